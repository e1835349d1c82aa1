# SPDX-License-Identifier: Apache-2.0
"""Facts about releases of the NVIDIA Container Toolkit."""

from __future__ import annotations

from collections.abc import Mapping

REFRESH_SINCE = (1, 18)
"""First release with the systemd units that keep the CDI specification current (nvidia-cdi-refresh)."""
KNOWN_BAD: Mapping[str, str] = {
    "1.19.0": "its nvidia-cdi-refresh.service is ordered after multi-user.target, so engines start only when the boot "
    "is over, and a service that multi-user.target wants and that waits for an engine closes an ordering cycle",
    "1.19.1": "cuInit was reported to fail in containers that are started with --gpus "
    "(NVIDIA/nvidia-container-toolkit#1967); the cause is not known, and nobody has tried it with CDI",
    "1.20.0": "its hook update-application-profile stops a container that has a read-only /etc/nvidia "
    "(NVIDIA/nvidia-container-toolkit#2026)",
}
"""What is wrong with a release, by release. Later releases have the correction (#2028), and a
nvidia-cdi-refresh.service that creates the device nodes of CUDA by itself (#1979)."""
