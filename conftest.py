# SPDX-License-Identifier: Apache-2.0
"""For tests/ and molecule/ alike: which cases `make test` leaves to `make test-all`."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without VLLM_EDGE_THOROUGH the cases that say nothing new are left out; pytest's summary counts them."""
    if os.environ.get("VLLM_EDGE_THOROUGH"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
