# SPDX-License-Identifier: Apache-2.0
"""Keeps those lines out of the log that speak of the tiny model or of the CPU where the real one's were printed."""

from __future__ import annotations

import logging

# Beginnings of messages (before formatting), each of them replaced by the worker or the plugin, or true of a CPU only.
TINY = (
    "Explicitly set (",
    "Auto set (",
    "%s is not found in LD_PRELOAD",
    "Triton is not installed",
    "VLLM_CPU_KVCACHE_SPACE",
)


class DropTinyLines(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(TINY)


def drop_lines_of_the_tiny_model() -> None:
    """On the handlers: a filter on a logger would not see what its children log."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(existing, DropTinyLines) for existing in handler.filters):
            handler.addFilter(DropTinyLines())
