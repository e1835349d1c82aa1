# SPDX-License-Identifier: Apache-2.0
"""Which hosts the first role of the host stage refuses, before any role has changed one."""

from __future__ import annotations

from typing import Any

from role_cases import Case, Role, platform


def facts(name: str, version: str, family: str, minor: int, service_mgr: str = "systemd") -> dict[str, Any]:
    """What Ansible gathers of a host with Python 3.<minor>."""
    python = {"version": {"major": 3, "minor": minor, "micro": 2}}
    return platform(name, version) | {"os_family": family, "python": python, "service_mgr": service_mgr}


STATES = [
    Case("Debian 12", "validate", facts=facts("Debian", "12.11", "Debian", 11)),
    Case(
        "host of the RHEL family",
        "validate",
        ("localhost runs Rocky 10.0 with Python 3.12 under systemd. vllm-edge needs Debian 12", "nothing was changed."),
        facts=facts("Rocky", "10.0", "RedHat", 12),
    ),
    Case(
        "Python that is too old",
        "validate",
        ("localhost runs Ubuntu 22.04 with Python 3.10 under systemd.",),
        facts=facts("Ubuntu", "22.04", "Debian", 10),
    ),
    Case(
        "host without systemd",
        "validate",
        ("localhost runs Debian 13.1 with Python 3.13 under sysvinit.",),
        facts=facts("Debian", "13.1", "Debian", 13, "sysvinit"),
    ),
]
CASES = Role("vllm_edge_host", "host_state", {}, facts("Ubuntu", "24.04", "Debian", 12), {}, STATES)


test_case = CASES.make_test()
