# SPDX-License-Identifier: Apache-2.0
"""What the role container_runtime makes of each state of a host: its tasks, over states that its look would give."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.vllm_edge.facts.runtime import RuntimeState
from helpers import ROOT, write_program
from role_cases import Case, Role, Run, Steps, platform

BARE = {"packages": {}, "gpus": [], "nvml_error": "", **asdict(RuntimeState())}
REPOSITORY = "container_runtime_docker_repository_url"
SERVING = BARE | {"docker_version": "28.5.1"}


STATES = [
    Case("Docker absent: nothing is refused", "assert", state=BARE, given={REPOSITORY: "https://docker.example"}),
    Case("Docker's own repository has no address", "assert", ("Debian-12 is too old for CDI. Set", REPOSITORY), BARE),
    Case("Docker with CDI there: nothing is refused", "assert"),
    Case(
        "Docker too old",
        "assert",
        (
            "This host has Docker 20.10.24, which does not support CDI; release 25 and later do.",
            "install a newer Docker, or remove this",
        ),
        SERVING | {"docker_version": "20.10.24"},
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
            "container_runtime_toolkit_version is 1.20.0-1: its hook update-application-profile stops a container",
            "Nothing was changed: take another release",
        ),
        given={"container_runtime_toolkit_version": "1.20.0-1"},
    ),
    Case(
        "toolkit whose unit waits for the whole boot",
        "assert",
        ("1.19.0-1: its nvidia-cdi-refresh.service is ordered after multi-user.target",),
        given={"container_runtime_toolkit_version": "1.19.0-1"},
    ),
    *(
        Case(f"toolkit after the correction: {version}", "assert", given={"container_runtime_toolkit_version": version})
        for version in ("1.20.1-1", "1.20.0+8269969f-1")
    ),
    Case("Debian 12: its repository is known", "validate"),
]
VARIABLES = {"container_runtime_toolkit_version": "1.18.2-1", "container_runtime_docker_packages": [], REPOSITORY: ""}


CASES = Role("container_runtime", "__container_runtime_state", SERVING, platform("Debian", "12.11"), VARIABLES, STATES)


@CASES.add
def drop_in_comes_once_and_goes_with_teardown(place: Path) -> Steps:
    write_program(place / "bin/systemctl", 'echo "$@" >> "$STATE/asked"')
    main = (ROOT / "roles/container_runtime/tasks/main.yml").read_text()
    assert main.index("device_nodes.yml") < main.index("install.yml"), "the toolkit makes the first specification"
    drop_in = place / "nvidia-cdi-refresh.service.d/vllm-edge.conf"
    points = ["device_nodes", "device_nodes", "uninstall", "uninstall"]
    given = {"__container_runtime_drop_in": str(drop_in)}
    foreseen = yield Run(points, True, given)
    create = "ExecStartPre=-/usr/bin/nvidia-ctk system create-device-nodes --control-devices --load-kernel-modules"
    assert not foreseen.failed and create in foreseen.text
    assert not drop_in.parent.exists() and not (place / "asked").exists()
    played = yield Run(points, False, given)
    assert not played.failed and len(played.changed) == 2, played.changed
    assert (place / "asked").read_text().splitlines().count("daemon-reload") == 2
    assert not drop_in.parent.exists()


test_case = CASES.make_test()
