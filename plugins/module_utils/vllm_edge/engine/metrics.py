# SPDX-License-Identifier: Apache-2.0
"""Figures from vLLM's /metrics (versions 0.19 to 0.33), by pure functions that return None if a figure is missing."""

from __future__ import annotations

import re

_IN_WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_KV_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d+)"', re.MULTILINE)


def requests_in_work(metrics: str) -> int | None:
    """Return the number of running and waiting requests, summed over all label sets."""
    found = _IN_WORK.findall(metrics)
    try:
        return int(sum(float(value) for value in found)) if found else None
    except ValueError:
        return None


def kv_blocks(metrics: str) -> int | None:
    """Return the number of blocks of the KV cache."""
    found = _KV_BLOCKS.search(metrics)
    return int(found[1]) if found else None
