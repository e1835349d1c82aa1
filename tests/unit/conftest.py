# SPDX-License-Identifier: Apache-2.0
"""For unit tests: modules run through the real AnsibleModule, simulated GPUs under the real nvidia-ml-py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils import _internal
from ansible.module_utils.common import warnings as module_warnings
from ansible.module_utils.testing import patch_module_args
from ansible.module_utils.vllm_edge.paths import HostPaths
from fake_host import SmallDisk

from lab.nvidia import testing

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


def load_module(name: str, kind: str = "modules") -> ModuleType:
    """A module of plugins/modules, imported from its file under the name that it has on a host.

    Its relative imports lead to `ansible.module_utils`, as they do there.
    """
    path = ROOT / "plugins" / kind / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"ansible.{kind}.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="load_module")
def load_module_fixture() -> Callable[[str], ModuleType]:
    return load_module


@pytest.fixture(scope="session")
def filters() -> dict[str, Callable[..., Any]]:
    """The filters of plugins/filter by name."""
    files = (ROOT / "plugins" / "filter").glob("*.py")
    return {
        key: value for file in files for key, value in load_module(file.stem, "filter").FilterModule().filters().items()
    }


@pytest.fixture
def umask() -> int:
    """That of modules; a test replaces it by a parameter of this name."""
    return 0o022


@pytest.fixture
def run_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, umask: int
) -> Callable[..., Result]:
    """run_module(name, args, check=False, replace={}) -> what the module printed, with its exit status as `rc`.

    `warnings` is a list of texts, empty when there were none.

    `replace` sets names of the module (its `time`, for one) for this run.
    """

    def run(
        name: str, args: Mapping[str, Any], *, check: bool = False, replace: Mapping[str, Any] | None = None
    ) -> Result:
        module = load_module(name)
        for key, value in (replace or {}).items():
            setattr(module, key, value)
        capsys.readouterr()
        module_warnings._global_warnings.clear()  # of this process, hence of the run before
        # A test that imported a plugin of the controller makes the warnings of later modules go to its display.
        monkeypatch.setattr(_internal, "is_controller", False)
        # What a module does to this process would reach the tests after it.
        former = os.umask(umask)
        try:
            with patch_module_args({**args, "_ansible_check_mode": check}), pytest.raises(SystemExit) as ended:
                module.main()
        finally:
            left = os.umask(former)
        assert left == umask, "a module changed the umask and did not set it back"
        result: Result = json.loads(capsys.readouterr().out)
        result["rc"] = int(ended.value.code or 0)
        result["warnings"] = [warning["event"]["msg"] for warning in result.get("warnings", [])]
        return result

    return run


@pytest.fixture
def on_the_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a file and its name were synced since the test began, so that a power cut leaves it as it is."""
    synced: set[int] = set()
    fsync = os.fsync

    def keep(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", keep)
    return lambda path: {path.stat().st_ino, path.parent.stat().st_ino} <= synced


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated libnvidia-ml.so.1, compiled once and loaded into this process: one process can have only one."""
    library = testing.build_library(tmp_path_factory.mktemp("nvml"))
    testing.preload(library)
    return library


@pytest.fixture
def gpus(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> testing.LabRoot:
    """Four simulated GPUs and a loaded driver, for this test alone."""
    root = testing.create_root(tmp_path / "gpus")
    monkeypatch.setenv("LAB_GPU_ROOT", str(root.path))
    return root


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield SmallDisk(disk)
    subprocess.run(["umount", str(disk)], timeout=20, check=True)
