# SPDX-License-Identifier: Apache-2.0
"""The units of each toolkit, nvidia-ctk's specification, and the hooks on a container's root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import load_file

from lab.nvidia import testing
from lab.nvidia.packages import toolkit
from lab.nvidia.versions import DRIVER_VERSION as VERSION

NVIDIA = Path(testing.__file__).parent


def load_program(name: str) -> ModuleType:
    """A program of the toolkit as a module, with the version that its package gives it."""
    module = load_file(NVIDIA / "toolkit" / name)
    module.VERSION = "1.18.2"  # type: ignore[attr-defined]
    return module


@pytest.fixture
def ctk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_program("nvidia-ctk")
    libraries = tmp_path / "lib"
    libraries.mkdir()
    for name in ("libcuda", "libnvidia-ml"):
        (libraries / f"{name}.so.{VERSION}").touch()
    monkeypatch.setattr(module, "LIBRARIES", libraries)
    return module


GPUS = [(uuid, minor) for minor, uuid in enumerate(testing.UUIDS)]


def test_a_device_for_each_index_uuid_and_all_brings_its_node_and_its_memory(ctk: ModuleType) -> None:
    spec = ctk.specification(VERSION, GPUS)
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "nvidia.com/gpu")
    devices = {device["name"]: device["containerEdits"] for device in spec["devices"]}
    assert list(devices) == ["0", "1", "2", "3", *testing.UUIDS, "all"]
    assert devices["2"] == devices[testing.UUIDS[2]]
    assert devices["2"]["deviceNodes"] == [{"path": "/dev/nvidia2"}]
    (mount,) = devices["2"]["mounts"]
    assert mount["hostPath"] == mount["containerPath"] == f"/var/lib/lab-gpu/gpus/{testing.UUIDS[2]}"
    # Docker adds "ro" where it is missing, the runtime obeys the last of both.
    assert mount["options"].index("ro") < mount["options"].index("rw")
    assert [node["path"] for node in devices["all"]["deviceNodes"]] == [f"/dev/nvidia{minor}" for minor in range(4)]
    # What every container gets.
    edits, hook = spec["containerEdits"], load_program("nvidia-cdi-hook")
    for entry in edits["hooks"]:
        assert hook.parser().parse_args(entry["args"][1:]).command == entry["args"][1]
    assert "NVIDIA_VISIBLE_DEVICES=void" in edits["env"]
    assert [hook["args"][1] for hook in edits["hooks"]] == [
        "create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification",
    ]  # fmt: skip
    assert {hook["hookName"] for hook in edits["hooks"]} == {"createContainer"}
    assert f"libnvidia-ml.so.{VERSION}::{ctk.LIBRARIES}/libnvidia-ml.so.1" in edits["hooks"][0]["args"]
    mounted = [mount["hostPath"] for mount in edits["mounts"]]
    assert f"{ctk.LIBRARIES}/libnvidia-ml.so.{VERSION}" in mounted
    assert all("ro" in mount["options"] and "rw" not in mount["options"] for mount in edits["mounts"])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """An OCI bundle whose root has what a container image has."""
    root = tmp_path / "bundle" / "rootfs"
    for directory in ("etc", "usr/lib"):
        (root / directory).mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root.parent / "config.json").write_text('{"root": {"path": "rootfs"}}')
    return root.parent


def run_hook(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    state = json.dumps({"ociVersion": "1.2.0", "id": "x", "status": "creating", "pid": 1, "bundle": str(bundle)})
    program = [sys.executable, str(NVIDIA / "toolkit" / "nvidia-cdi-hook"), *arguments]
    return subprocess.run(program, input=state, capture_output=True, text=True)


@pytest.mark.slow
def test_a_link_never_leaves_the_container(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (bundle / "rootfs/escape").symlink_to(f"../../../{outside}")
    assert run_hook(bundle, "create-symlinks", "--link", "t::/escape/../../x").returncode == 0
    for target in ("another", "t"):
        assert run_hook(bundle, "create-symlinks", "--link", f"{target}::/escape/y").returncode == 0
    found = [os.readlink(path) for path in (bundle / "rootfs").rglob("*") if path.name == "y"]
    assert found == ["t"], "a link that is there is made anew"
    assert list(outside.iterdir()) == []
    assert {path.name for path in (bundle / "rootfs").rglob("*") if path.is_symlink()} == {"lib", "escape", "x", "y"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "units", "has", "has_not"),
    [
        ("1.18.2", "etc", ["Restart=on-failure", "StartLimitBurst=5"], ["nvidia-smi -L", "create-device-nodes"]),
        ("1.19.0", "etc", ["After=multi-user.target"], ["Restart=", "create-device-nodes"]),
        ("1.20.0", "lib", ["nvidia-smi -L", "Restart=on-failure"], ["After=", "create-device-nodes"]),
    ],
)
def test_units_of_each_toolkit(tmp_path: Path, release: str, units: str, has: list[str], has_not: list[str]) -> None:
    (package,) = [one for one in toolkit(release) if one.name == "nvidia-container-toolkit-base"]
    subprocess.run(["dpkg-deb", "-x", package.build(tmp_path), tmp_path], check=True)
    service = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.service").read_text()
    path = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.path").read_text()
    assert "Copyright (c) 2025, NVIDIA CORPORATION" in service and "Licensed under the Apache License" in service
    for text in ("Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml", *has):
        assert text in service
    assert not [text for text in has_not if text in service]
    assert "PathChanged=/lib/modules/%v/modules.dep" in path
