# SPDX-License-Identifier: Apache-2.0
"""What the simulated vendors offer. The second of each is there so that pinning and holding have something to do."""

from __future__ import annotations

DRIVER_VERSION = "580.173.02"
DRIVER_VERSIONS = (DRIVER_VERSION, "580.178.04", "590.48.01")
DRIVER_BRANCHES = ("580", "590")
CUDA_VERSIONS = {"580": 13000, "590": 13010}
"""CUDA's version as the driver reports it: 1000 * major + 10 * minor."""

UBUNTU_VERSIONS = (DRIVER_VERSION, "615.71.09")
"""The server branches that Ubuntu 24.04's archive has at its release, each in one release."""
UBUNTU_UPDATE = "580.178.04"
"""What noble-updates has later, with modules for its newer kernel alone."""

TOOLKIT_VERSION = "1.18.2"
TOOLKIT_VERSIONS = (TOOLKIT_VERSION, "1.19.0", "1.20.0")
