# SPDX-License-Identifier: Apache-2.0
"""Releases of the NVIDIA Container Toolkit, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping

REFRESH_SINCE = (1, 18)
"""The units that keep the CDI specification current came with it."""
KNOWN_BAD: Mapping[str, str] = {
    "1.19.1": "cuInit fails in containers (NVIDIA/nvidia-container-toolkit#1967)",
    "1.20.0": "cuInit fails in containers (NVIDIA/nvidia-container-toolkit#1967)",
}
"""Release to what is wrong with it."""
