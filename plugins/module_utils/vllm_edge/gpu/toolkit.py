# SPDX-License-Identifier: Apache-2.0
"""Facts about releases of the NVIDIA Container Toolkit."""

from __future__ import annotations

from collections.abc import Mapping

REFRESH_SINCE = (1, 18)
"""First release with the systemd units that keep the CDI specification current (nvidia-cdi-refresh)."""
KNOWN_BAD: Mapping[str, str] = {
    "1.19.1": "cuInit fails in containers (NVIDIA/nvidia-container-toolkit#1967)",
    "1.20.0": "cuInit fails in containers (NVIDIA/nvidia-container-toolkit#1967)",
}
"""What is wrong with a release, by release."""
