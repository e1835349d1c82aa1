# SPDX-License-Identifier: Apache-2.0
"""The status of a host: what systemd, Docker, NVML and the project's files say, what is wrong, and tables of it."""
