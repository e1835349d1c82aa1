# SPDX-License-Identifier: Apache-2.0
"""nvidia-ctk's specification and Docker entry, and the hooks on a container's root."""

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
