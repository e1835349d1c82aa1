# SPDX-License-Identifier: Apache-2.0
"""Adapters, one for each foreign thing: Docker, systemd, NVML, CDI, dpkg, apt, HTTP and the file system."""
