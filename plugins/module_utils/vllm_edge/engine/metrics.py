# SPDX-License-Identifier: Apache-2.0
"""What vLLM's /metrics tell of an engine (0.19 to 0.33). Pure; None where they do not tell."""

from __future__ import annotations

import re

_IN_WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_KV_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d+)"', re.MULTILINE)


def requests_in_work(metrics: str) -> int | None:
    """Running and waiting requests over all label sets."""
    found = _IN_WORK.findall(metrics)
    try:
        return int(sum(float(value) for value in found)) if found else None
    except ValueError:
        return None


def kv_blocks(metrics: str) -> int | None:
    """Blocks of the KV cache."""
    found = _KV_BLOCKS.search(metrics)
    return int(found[1]) if found else None
