# SPDX-License-Identifier: Apache-2.0
"""What the role container_runtime makes of each state of a host: its tasks, over states that its look would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ansible.module_utils.vllm_edge.gpu.toolkit import KNOWN_BAD
from role_cases import Case, Role, platform, read_empty_result

DEBIAN_12 = platform("Debian", "12.11")
ROCKY = platform("Rocky", "9.4")
BARE = read_empty_result("container_runtime_state") | {"toolkit_known_bad": dict(KNOWN_BAD)}
SERVING = BARE | {"docker_version": "28.5.1", "docker_major": 28}


CASES = [
    Case("Docker absent: nothing is refused", "assert", state=BARE),
    Case("Docker with CDI there: nothing is refused", "assert"),
    Case(
        "Docker too old",
        "assert",
        (
            "This host has Docker 20.10.24, which does not support CDI; release 25 and later do.",
            "install a newer Docker, or remove this",
        ),
        SERVING | {"docker_version": "20.10.24", "docker_major": 20},
    ),
    Case(
        "two CDI specifications in conflict",
        "assert",
        ("/etc/cdi/nvidia.yaml describes the GPUs by hand", "Remove it and run again."),
        SERVING | {"cdi_static": ["/etc/cdi/nvidia.yaml"]},
    ),
    Case(
        "toolkit that is known not to work",
        "assert",
        (
            "container_runtime_toolkit_version is 1.20.0-1: cuInit fails in containers",
            "Nothing was changed: take another release",
        ),
        given={"container_runtime_toolkit_version": "1.20.0-1"},
    ),
    Case("Debian 12: its repository is known", "validate"),
    Case(
        "distribution of the RHEL family",
        "validate",
        ("this host is Rocky-9", "Install one of these distributions, or install Docker 25 and the toolkit yourself"),
        facts=ROCKY,
    ),
]
VARIABLES = {"container_runtime_toolkit_version": "1.18.2-1", "container_runtime_docker_packages": []}


ROLE = Role("container_runtime", "__container_runtime_state", SERVING, DEBIAN_12, VARIABLES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(said: dict[str, str], case: Case, seen: Callable[[str, str], None]) -> None:
    case.check(said, seen)
