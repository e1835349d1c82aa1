# SPDX-License-Identifier: Apache-2.0
"""Adapters, one for each foreign system: Docker, systemd, NVML, CDI, dpkg, apt, HTTP, sockets, processes and files."""
