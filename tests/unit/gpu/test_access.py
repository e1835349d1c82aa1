# SPDX-License-Identifier: Apache-2.0
"""Which containers may lose their GPUs at a daemon-reload: the rule, what Docker does not say, and the module."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.facts.runtime import RuntimeReader
from ansible.module_utils.vllm_edge.gpu import access as gpu_access
from ansible.module_utils.vllm_edge.gpu.access import Access, CannotAsk
from ansible.module_utils.vllm_edge.system.systemd import Ran
from fake_host import never

GPU = [["gpu"]]
EVERY_GPU = ("NVIDIA_VISIBLE_DEVICES=all",)
HOOK = {"DeviceRequests": [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": GPU}]}
"""Of `docker run --gpus all`."""
CDI = {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1f3c0a51"], "Capabilities": None}]}
"""Of `docker run --device nvidia.com/gpu=GPU-1f3c0a51`."""


def inspected(name: str, host: dict[str, Any], env: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "Id": name * 8,
        "Name": f"/{name}",
        "State": {"Running": True, "Pid": 201},
        "Config": {"Env": [*env, "PATH=/usr/bin"]},
        "HostConfig": host,
    }


@pytest.mark.parametrize(
    ("host", "env", "method"),
    [
        ({}, (), ""),
        ({"DeviceRequests": None, "Devices": None, "Runtime": "runc"}, EVERY_GPU, ""),
        (HOOK, (), "hook"),
        (HOOK | {"Runtime": "nvidia"}, EVERY_GPU, "hook"),
        ({"DeviceRequests": [{"Driver": "nvidia", "Count": 1, "Capabilities": [["compute", "gpu"]]}]}, (), "hook"),
        ({"DeviceRequests": [{"Driver": "nvidia.runtime-hook", "Capabilities": GPU}]}, (), "hook"),
        ({"DeviceRequests": [{"Driver": "amd", "Capabilities": GPU}]}, (), ""),
        ({"DeviceRequests": [{"Driver": "", "Capabilities": [["tpu"]]}]}, (), ""),
        (CDI, (), "device"),
        ({"DeviceRequests": [{"Driver": "nvidia.cdi", "Capabilities": GPU}]}, (), "device"),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["vendor.example/net=0"]}]}, (), ""),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}, {"PathOnHost": "/dev/nvidiactl"}]}, (), "device"),
        ({"Devices": [{"PathOnHost": "/dev/fuse"}]}, (), ""),
        # NVIDIA names this as a remedy: runc is told of the nodes that the hook grants.
        (HOOK | {"Devices": [{"PathOnHost": "/dev/nvidia0"}, {"PathOnHost": "/dev/nvidiactl"}]}, (), "device"),
        (HOOK | {"Privileged": True}, (), ""),
        ({"Runtime": "nvidia"}, ("NVIDIA_VISIBLE_DEVICES=0,1",), "hook"),
        ({"Runtime": "nvidia"}, ("NVIDIA_VISIBLE_DEVICES=void",), ""),
        ({"Runtime": "nvidia"}, (), ""),
        ({"Runtime": "nvidia"}, ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=all",), "device"),
        ({"Runtime": "nvidia-cdi"}, EVERY_GPU, "device"),
        ({"Runtime": "nvidia", "Annotations": {"cdi.k8s.io/gpus": "nvidia.com/gpu=0"}}, EVERY_GPU, "device"),
    ],
)
def test_how_a_container_got_its_gpus(host: dict[str, Any], env: Sequence[str], method: str) -> None:
    assert gpu_access.find_method(inspected("x", host, env)) == method


class Host:
    """Answers of systemctl and docker on a host with four containers, and a directory that has its /dev."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.listed = [
            inspected("web", {}),
            inspected("trainer", HOOK),
            inspected("notebook", {"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=all"]),
            inspected("vllm-e2b", CDI),
        ]
        self.unit = "LoadState=loaded\nActiveState=active\n"
        self.answers: dict[str, Ran] = {"info": Ran(0, "systemd\n")}
        self.version = "Docker version 26.1.5+dfsg1, build a72d7cd\n"
        self.asked: list[str] = []

    def run(self, command: Sequence[str], timeout_s: float) -> Ran:
        assert timeout_s > 0
        what = "systemctl" if command[0] == "systemctl" else command[1]
        self.asked.append(what)
        listed = {
            "--version": self.version,
            "systemctl": f"Id=docker.service\n{self.unit}",
            "ps": "".join(f"{one['Id']}\n" for one in self.listed),
            "inspect": json.dumps(self.listed),
        }
        return self.answers.get(what) or Ran(0, listed[what])

    def look(self) -> Access:
        return gpu_access.look(self.run, self.root)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "dev/char").mkdir(parents=True)
    (tmp_path / "dev/char/1:3").symlink_to("../null")
    return Host(tmp_path)


def test_containers_of_the_hook_are_at_risk_and_those_of_cdi_are_not(host: Host) -> None:
    found = host.look()
    assert found == Access(by_device=("vllm-e2b",), by_hook=("notebook", "trainer"), reload_safe=False)
    assert found.at_risk == ("notebook", "trainer")
    assert "may take the GPUs from notebook, trainer, which" in found.risk
    host.root = host.root / "none"
    assert host.look() == found, "without a /dev/char"


def end_trainer(host: Host) -> None:
    host.listed[1]["State"]["Pid"] = 0
    host.answers["inspect"] = Ran(1, json.dumps(host.listed), "Error response from daemon: No such container: 4f6c")


@pytest.mark.parametrize(
    ("changes", "at_risk"),
    [
        (lambda host: (host.root / "dev/char/195:255").symlink_to("../nvidiactl"), ()),
        (lambda host: host.answers.update(info=Ran(0, "cgroupfs\n")), ()),
        (lambda host: (host.listed.clear(), host.answers.update(inspect=Ran(1))), ()),
        (end_trainer, ("notebook",)),
        # A Docker that systemd does not know.
        (lambda host: setattr(host, "unit", "LoadState=not-found\nActiveState=inactive\n"), ("notebook", "trainer")),
    ],
)
def test_what_a_host_keeps_over_a_reload(
    host: Host, changes: Callable[[Host], object], at_risk: tuple[str, ...]
) -> None:
    changes(host)
    found = host.look()
    assert (found.at_risk, bool(found.risk)) == (at_risk, bool(at_risk))
    assert found.by_hook == (at_risk or (("notebook", "trainer") if host.listed else ()))


@pytest.mark.parametrize("state", ["inactive", "failed", "deactivating"])
def test_a_docker_that_was_stopped_is_not_started_by_the_question(host: Host, state: str) -> None:
    host.unit = f"LoadState=loaded\nActiveState={state}\n"
    with pytest.raises(CannotAsk, match=f"docker.service is {state}"):
        host.look()
    assert host.asked == ["systemctl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda host: host.answers.update(systemctl=Ran(1, "", "no bus")), "systemd cannot be asked: no bus"),
        (lambda host: host.answers.update(ps=Ran(1, "", "permission denied")), "docker ps: permission denied"),
        (lambda host: host.answers.update(ps=Ran(124)), "docker ps: ended with 124"),
        (lambda host: host.answers.update(inspect=Ran(1, "[]", "Cannot connect\n")), "docker inspect: Cannot connect"),
        (lambda host: host.answers.update(info=Ran(1, "", "no")), "docker info: no"),
        (lambda host: host.answers.update(inspect=Ran(0, '{"message": 1}')), "something else than containers"),
        (lambda host: host.answers.update(inspect=Ran(0, '[{"Id": "x"}]')), "something else than containers"),
        (lambda host: setattr(host, "run", never), "did not end within"),
    ],
)
def test_where_nobody_can_be_asked(host: Host, changes: Callable[[Host], object], message: str) -> None:
    changes(host)
    with pytest.raises(CannotAsk, match=message):
        host.look()


# -- the module


Run = Callable[[], dict[str, Any]]


@pytest.fixture
def check(run_module: Callable[..., dict[str, Any]], host: Host) -> Run:
    """Runs the module in check mode."""

    def run() -> dict[str, Any]:
        replace = {"RuntimeReader": lambda root: RuntimeReader(host.root, host.run)}
        result = run_module("host_facts", {"containers": True}, check=True, replace=replace)
        assert (result["rc"], result["changed"]) == (0, False)
        return result

    return run


def test_the_module_names_the_containers_and_the_remedies(check: Run, host: Host) -> None:
    result = check()
    assert (result["at_risk"], result["problem"]) == (["notebook", "trainer"], "")
    for words in ("notebook, trainer", "daemon-reload", "--device nvidia.com/gpu=", "create-dev-char-symlinks"):
        assert words in result["warning"]
    assert "vllm-e2b" not in result["warning"]


def test_the_module_without_a_finding(check: Run, host: Host) -> None:
    host.listed = host.listed[-1:]  # of CDI
    result = check()
    assert (result["at_risk"], result["problem"], result["warning"]) == ([], "", "")
    host.answers["ps"] = Ran(1, "", "Cannot connect")
    result = check()
    assert (result["at_risk"], result["problem"], result["warning"]) == ([], "docker ps: Cannot connect", "")


def test_the_module_without_docker(check: Run, host: Host) -> None:
    host.version = ""
    result = check()
    assert (result["at_risk"], result["problem"], host.asked) == ([], "", ["--version"])
