# SPDX-License-Identifier: Apache-2.0
"""What the looks at driver and container runtime make of the programs' answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str, str], ModuleType]
Run = Callable[..., dict[str, Any]]
GPUS = ["GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000", "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001"]
REPOSITORY = "http://vendor.example/cuda/"


@pytest.fixture
def driver(load_role_module: Load) -> ModuleType:
    return load_role_module("nvidia_driver", "nvidia_driver_state")


@pytest.fixture
def runtime(load_role_module: Load) -> ModuleType:
    return load_role_module("container_runtime", "container_runtime_state")


PACKAGES = (
    "nvidia-driver-cuda\thi \t580.173.02-1\n"
    "libnvidia-ml1\tii \t580.173.02-1\n"
    "nvidia-container-toolkit\thi \t1.18.2-1\n"
    "nvidia-driver-pinning-580\tii \t580-1\n"
    "nvidia-smi\trc \t550.163.01-2\n"
    "nvidia-kernel-open-dkms\tiF \t580.173.02-1\n"
    "linux-image-amd64\tii \t6.12.48-1\n"
    "libcuda1\tun \t\n"
)


def test_packages_installed_held_and_half_installed(driver: ModuleType) -> None:
    packages, half = driver.parse_packages(PACKAGES)
    assert {name: package["held"] for name, package in packages.items()} == {
        "nvidia-driver-cuda": True,
        "libnvidia-ml1": False,
        "nvidia-container-toolkit": True,
        "nvidia-driver-pinning-580": False,
        "linux-image-amd64": False,
    }
    assert half == ["nvidia-kernel-open-dkms"]


def test_a_driver_is_the_packages_of_its_version(driver: ModuleType) -> None:
    packages, _ = driver.parse_packages(PACKAGES + "nvidia-settings\tii \t550.163.01-2\n")
    assert driver.driver_packages(packages, "580.173.02") == ["libnvidia-ml1", "nvidia-driver-cuda"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("580.173.02-1", "580.173.02"), ("1:580.173.02-0ubuntu0.24.04.1", "580.173.02"), ("580", "580")],
)
def test_upstream_versions(driver: ModuleType, version: str, expected: str) -> None:
    assert driver.upstream(version) == expected


POLICY = """libnvidia-ml1:
  Installed: 550.163.01-2
  Candidate: 580.173.02-1
  Version table:
     580.173.02-1 1000
        500 http://vendor.example/cuda  Packages
 *** 550.163.01-2 500
        500 http://mirror.example.org/debian trixie/non-free amd64 Packages
        100 /var/lib/dpkg/status
nvidia-driver-cuda:
  Installed: 580.173.02-1
  Candidate: 580.173.02-1
  Version table:
 *** 580.173.02-1 1000
        500 http://vendor.example/cuda  Packages
        100 /var/lib/dpkg/status
     550.163.01-2 500
        500 http://mirror.example.org/debian trixie/non-free amd64 Packages
nvidia-persistenced:
  Installed: 570.1-1
  Candidate: 570.1-1
  Version table:
 *** 570.1-1 100
        100 /var/lib/dpkg/status
"""


def test_origin_of_what_is_installed_not_of_what_could_be(driver: ModuleType) -> None:
    foreign, unknown = driver.from_elsewhere(driver.parse_policy(POLICY), REPOSITORY)
    assert foreign == {"libnvidia-ml1": ["http://mirror.example.org/debian"]}
    assert unknown == ["nvidia-persistenced"]


def test_local_mirrors_count_as_the_repository(driver: ModuleType) -> None:
    assert driver.from_elsewhere({"a": ["file:/srv/cuda"]}, "file:///srv/cuda/") == ({}, [])


@pytest.mark.parametrize(
    ("code", "out", "expected"),
    [
        (0, "GPU-a\nGPU-b\n", (["GPU-a", "GPU-b"], "")),
        (18, "Failed to initialize NVML: Driver/library version mismatch\n", ([], "Driver/library version mismatch")),
        (15, "GPU-a\nUnable to determine the device handle\n", (["GPU-a"], "Unable to determine")),
        (0, "No devices were found\n", ([], "No devices were found")),
        (124, "", ([], "ended with 124")),
    ],
)
def test_answers_of_nvidia_smi(driver: ModuleType, code: int, out: str, expected: tuple[list[str], str]) -> None:
    gpus, error = driver.parse_smi(code, out, "")
    assert gpus == expected[0]
    assert expected[1] in error and bool(expected[1]) == bool(error)


METAPACKAGES = {"linux-image-amd64": "linux-headers-amd64", "linux-image-generic": "linux-headers-generic"}


@pytest.mark.parametrize(
    ("given", "built", "packages", "expected"),
    [
        ([], False, [], ["linux-headers-6.12"]),
        ([], True, [], []),
        ([], True, ["linux-image-amd64"], ["linux-headers-amd64"]),
        ([], False, ["linux-image-generic"], ["linux-headers-6.12", "linux-headers-generic"]),
        (["mine"], False, ["linux-image-amd64"], ["mine"]),
    ],
)
def test_headers_that_dkms_needs(
    driver: ModuleType, given: list[str], built: bool, packages: list[str], expected: list[str]
) -> None:
    installed: dict[str, Any] = {name: {} for name in packages}
    assert driver.wanted_headers(given, built, "6.12", installed, METAPACKAGES) == expected


@pytest.fixture
def bare_host(program: Callable[[str, str], None], tmp_path: Path) -> dict[str, Any]:
    program("dpkg-query", 'cat "$STATE/packages"; exit 1')
    program(
        "apt-cache",
        'case $1 in madison) echo "linux-headers-amd64 | 6.12.48-1 | http://x";; *) cat "$STATE/policy";; esac',
    )
    program("systemctl", 'cat "$STATE/unit"')
    (tmp_path / "unit").write_text("UnitFileState=enabled\nActiveState=inactive\n")
    program("nvidia-smi", f'printf "{GPUS[0]}\\n"')
    (tmp_path / "packages").write_text("linux-image-amd64\tii \t6.12.48-1\n")
    root = tmp_path / "root"
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/osrelease").write_text("6.12.48+deb13-amd64\n")
    (root / "proc/sys/kernel/random/boot_id").write_text("boot\n")
    return {
        "lead_package": "nvidia-driver-cuda",
        "repository": REPOSITORY,
        "mark": "/etc/apt/apt.conf.d/52vllm-edge-nvidia-driver",
        "metapackages": METAPACKAGES,
        "root": str(root),
    }


def test_look_at_a_bare_host_and_at_a_driver(run_role_module: Run, bare_host: dict[str, Any], tmp_path: Path) -> None:
    def look() -> dict[str, Any]:
        return run_role_module("nvidia_driver", "nvidia_driver_state", bare_host, check=True)

    root = tmp_path / "root"
    bare = look()
    assert (bare["version"], bare["module_version"], bare["headers"], bare["nouveau"]) == ("", "", False, False)
    # Of the two that are wanted apt knows one.
    assert (bare["headers_to_install"], bare["persistence"]) == (["linux-headers-amd64"], False)

    (tmp_path / "packages").write_text(PACKAGES)
    (tmp_path / "policy").write_text(POLICY)
    (tmp_path / "unit").write_text("UnitFileState=enabled\nActiveState=active\n")
    (root / "sys/module/nvidia").mkdir(parents=True)
    (root / "sys/module/nvidia/version").write_text("580.100\n")
    (root / "sys/module/nouveau").mkdir()
    (root / "lib/modules/6.12.48+deb13-amd64/build").mkdir(parents=True)
    (root / "lib/modules/6.12.48+deb13-amd64/build/Makefile").touch()
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/nvidia-uninstall").touch()
    found = look()
    assert (found["version"], found["module_version"]) == ("580.173.02", "580.100")
    assert (found["headers"], found["nouveau"], found["boot_id"]) == (True, True, "boot")
    assert (found["unheld"], found["persistence"]) == (["libnvidia-ml1"], True)
    assert found["installer"] == "/usr/bin/nvidia-uninstall"
    assert list(found["foreign"]) == ["libnvidia-ml1"]

    # With our mark the driver is ours, wherever its version may be offered today.
    mark = root / "etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"
    mark.parent.mkdir(parents=True)
    mark.touch()
    ours = look()
    assert (ours["foreign"], ours["unknown"]) == ({}, [])


# -- container runtime

CDI_LIST = """INFO[0000] Found 3 CDI devices
nvidia.com/gpu=0
nvidia.com/gpu=GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000
nvidia.com/gpu=all
"""
SPEC = """---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
    mounts:
        - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.173.02
        - hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
"""
UNITS = """Id=nvidia-cdi-refresh.path
LoadState=loaded
UnitFileState=enabled
ActiveState=active

Id=nvidia-cdi-refresh.service
LoadState=loaded
UnitFileState=disabled
ActiveState=inactive

Id=missing.service
LoadState=not-found
UnitFileState=
ActiveState=inactive
"""


def test_devices_gpus_and_units(runtime: ModuleType) -> None:
    devices = runtime.parse_devices(CDI_LIST)
    assert devices == ["nvidia.com/gpu=0", f"nvidia.com/gpu={GPUS[0]}", "nvidia.com/gpu=all"]
    assert runtime.compare(devices, GPUS) == ([GPUS[1]], [])
    assert runtime.compare(devices, [GPUS[1]]) == ([GPUS[1]], [GPUS[0]])
    assert runtime.parse_units(UNITS) == {
        "nvidia-cdi-refresh.path": {"enabled": True, "active": True},
        "nvidia-cdi-refresh.service": {"enabled": False, "active": False},
    }


@pytest.mark.parametrize(
    ("devices", "missing", "gone", "versions", "driver", "said"),
    [
        (["d"], [], [], ["580.1"], "580.1", ""),
        (["d"], [], [], [], "580.1", ""),
        ([], [], [], [], "580.1", "no CDI specification"),
        (["d"], ["GPU-a"], [], ["580.1"], "580.1", "does not name GPU-a"),
        (["d"], [], ["GPU-b"], ["580.1"], "580.1", "names GPU-b"),
        (["d"], [], [], ["570.1"], "580.1", "made for driver 570.1, the host has 580.1"),
    ],
)
def test_when_a_specification_is_stale(
    runtime: ModuleType,
    devices: list[str],
    missing: list[str],
    gone: list[str],
    versions: list[str],
    driver: str,
    said: str,
) -> None:
    found = runtime.explain(devices, missing, gone, versions, driver)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("nvidia.yaml", SPEC, True),
        ("by-hand.json", '{"cdiVersion": "0.6.0",\n "kind": "nvidia.com/gpu",\n "devices": []}', True),
        ("intel.yaml", SPEC.replace("nvidia.com/gpu", "intel.com/gpu"), False),
        ("nvidia.yaml.bak", SPEC, False),
    ],
)
def test_specifications_of_nvidias_gpus(
    runtime: ModuleType, tmp_path: Path, name: str, text: str, counts: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert bool(runtime.gpu_specs(str(tmp_path))) is counts


def test_look_at_a_container_runtime(run_role_module: Run, program: Callable[[str, str], None], tmp_path: Path) -> None:
    program("dockerd", 'echo "Docker version 26.1.5+dfsg1, build a72d7cd"')
    program("dpkg-query", 'printf "nvidia-container-toolkit\\thi \\t1.18.2-1\\n"; exit 1')
    program("nvidia-ctk", f"printf '{CDI_LIST}'")
    program("nvidia-smi", f'printf "{GPUS[0]}, 580.173.02\\n{GPUS[1]}, 580.173.02\\n"')
    program("systemctl", f"printf '{UNITS}'")
    for directory in ("var/run/cdi", "etc/cdi"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "var/run/cdi/nvidia.yaml").write_text(SPEC)
    args = {"packages": ["nvidia-container-toolkit"], "units": ["x"], "root": str(tmp_path)}
    found = run_role_module("container_runtime", "container_runtime_state", args, check=True)
    assert (found["docker_version"], found["docker_major"]) == ("26.1.5", 26)
    assert found["packages"] == {"nvidia-container-toolkit": {"version": "1.18.2-1", "held": True}}
    assert (found["driver"], found["cdi_driver"], found["cdi_missing"]) == ("580.173.02", ["580.173.02"], [GPUS[1]])
    assert GPUS[1] in found["cdi_stale"] and found["cdi_static"] == []
    (tmp_path / "etc/cdi/nvidia.yaml").write_text(SPEC)
    found = run_role_module("container_runtime", "container_runtime_state", args)
    assert found["cdi_static"] == [str(tmp_path / "etc/cdi/nvidia.yaml")]
