# SPDX-License-Identifier: Apache-2.0
"""What the looks at driver and container runtime make of the programs' answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.facts import dpkg as packaging
from ansible.module_utils.vllm_edge.system.cdi import lists_uvm

Load = Callable[[str, str], ModuleType]
Run = Callable[..., dict[str, Any]]
GPUS = ["GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000", "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001"]
REPOSITORY = "http://vendor.example/cuda/"


@pytest.fixture
def driver(load_module: Load) -> ModuleType:
    return load_module("nvidia_driver_state")


@pytest.fixture
def runtime(load_module: Load) -> ModuleType:
    return load_module("container_runtime_state")


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


def test_packages_installed_held_and_half_installed() -> None:
    packages, half = packaging.parse_packages(PACKAGES)
    held = {name: package["held"] for name, package in packages.items()}
    of_others = dict.fromkeys(("libnvidia-ml1", "nvidia-driver-pinning-580", "linux-image-amd64"), False)
    assert held == {"nvidia-driver-cuda": True, "nvidia-container-toolkit": True, **of_others}
    assert half == ["nvidia-kernel-open-dkms"]


def test_a_driver_is_the_packages_of_its_version() -> None:
    packages, _ = packaging.parse_packages(PACKAGES + "nvidia-settings\tii \t550.163.01-2\n")
    assert packaging.driver_packages(packages, "580.173.02") == ["libnvidia-ml1", "nvidia-driver-cuda"]
    assert packaging.is_driver("nvidia-cuda-mps") and not packaging.is_driver("nvidia-cuda-toolkit")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("580.173.02-1", "580.173.02"), ("1:580.173.02-0ubuntu0.24.04.1", "580.173.02"), ("580", "580")],
)
def test_upstream_versions(version: str, expected: str) -> None:
    assert packaging.parse_upstream_version(version) == expected


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
MIRROR = "http://mirror.example.org/debian"
SOURCES = f"""Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 {MIRROR} trixie/non-free amd64 Packages
     release v=13.1,o=Debian,a=stable,n=trixie,l=Debian,c=non-free,b=amd64
     origin mirror.example.org
 500 http://vendor.example/cuda  Packages
     release v=1.0,o=NVIDIA,a=,n=,l=NVIDIA CUDA,c=,b=amd64
     origin vendor.example
"""


def test_local_mirrors_count_as_the_repository(driver: ModuleType) -> None:
    assert driver.homes("nvidia", ["file:/srv/cuda"], "file:///srv/cuda/", "", {}) == {"file:/srv/cuda": True}


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


UNIT = "Id=nvidia-persistenced.service\nLoadState=loaded\nUnitFileState=enabled\nActiveState={}\n"


@pytest.fixture
def look(run_module: Run, program: Callable[[str, str], None], tmp_path: Path) -> Run:
    """What the module says of a bare host, to which a test adds."""
    program("dpkg-query", 'cat "$STATE/packages"; exit 1')
    program(
        "apt-cache",
        'case $1$2 in madison*) cat "$STATE/madison";; policy) cat "$STATE/sources";; show*) cat "$STATE/show";; '
        '*) cat "$STATE/policy";; esac',
    )
    # A version only where the kernel of a file is asked for.
    program("modinfo", 'case $1 in -k) cat "$STATE/on-disk-$2";; *) cat "$STATE/signer";; esac')
    program("systemctl", 'cat "$STATE/unit"')
    program("nvidia-smi", f'printf "{GPUS[0]}, Enabled\\n{GPUS[1]}, Disabled\\n"')
    root = tmp_path / "root"
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    for name, text in {
        "madison": "linux-headers-amd64 | 6.12.48-1 | http://x\n",
        "sources": SOURCES,
        "unit": UNIT.format("inactive"),
        "packages": "linux-image-amd64\tii \t6.12.48-1\n",
        "root/proc/sys/kernel/osrelease": "6.12.48+deb13-amd64\n",
        "root/proc/sys/kernel/random/boot_id": "boot\n",
    }.items():
        (tmp_path / name).write_text(text)
    given = {
        "lead_package": "nvidia-driver-cuda",
        "source": "nvidia",
        "archive": "Debian",
        "branch": "580",
        "repository": REPOSITORY,
        "mark": "/etc/apt/apt.conf.d/52vllm-edge-nvidia-driver",
        "metapackages": METAPACKAGES,
        "root": str(root),
    }
    return lambda **more: run_module("nvidia_driver_state", given | more, check=True)


def test_look_at_a_bare_host_and_at_a_driver(look: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    bare = look()
    assert (bare["version"], bare["module_version"], bare["headers"], bare["nouveau"]) == ("", "", False, False)
    # Of the two that are wanted apt knows one.
    assert (bare["headers_to_install"], bare["persistence"]) == (["linux-headers-amd64"], False)

    (tmp_path / "packages").write_text(PACKAGES)
    (tmp_path / "policy").write_text(POLICY)
    (tmp_path / "unit").write_text(UNIT.format("active"))
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
    assert found["foreign"] == {"libnvidia-ml1": [MIRROR]} and found["recorded"] == ""
    assert found["unknown"] == ["nvidia-persistenced"]
    assert (found["gpus"], found["volatile_gpus"], found["nvml_error"]) == (GPUS, [GPUS[1]], "")

    # With our mark the driver is ours, wherever its version may be offered today.
    mark = root / "etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"
    mark.parent.mkdir(parents=True)
    mark.touch()
    ours = look()
    assert (ours["foreign"], ours["unknown"], ours["recorded"]) == ({}, [], "nvidia")
    mark.write_text("// Managed by Ansible\n// Source: distribution\n")
    assert look()["recorded"] == "distribution"


def test_a_driver_that_is_wholly_of_the_other_source_can_be_kept(look: Run, tmp_path: Path) -> None:
    (tmp_path / "packages").write_text("libnvidia-ml1\tii \t550.163.01-2\n")
    (tmp_path / "policy").write_text(POLICY.partition("nvidia-driver-cuda:")[0])
    found = look()
    assert (list(found["foreign"]), found["fitting"]) == (["libnvidia-ml1"], "distribution")
    wanted = look(source="distribution")
    assert (wanted["foreign"], wanted["fitting"]) == ({}, "")


UBUNTU = "6.8.0-79-generic"
PREBUILT = "linux-modules-nvidia-580-server-open-"
UBUNTU_PACKAGES = (
    "nvidia-headless-no-dkms-580-server-open\tii \t580.173.02-0ubuntu0.24.04.1\n"
    "nvidia-utils-580-server\thi \t580.173.02-0ubuntu0.24.04.1\n"
    f"{PREBUILT}generic\tii \t6.8.0-79.79\n"
    f"{PREBUILT}{UBUNTU}\thi \t6.8.0-79.79\n"
    f"linux-image-generic\tii \t6.8.0-79.79\nlinux-image-{UBUNTU}\tii \t6.8.0-79.79\n"
)


@pytest.fixture
def ubuntu(look: Run, tmp_path: Path) -> Run:
    """Prebuilt modules: the running kernel and a newer one, for which there is none yet, and an older one."""
    root = tmp_path / "root"
    (tmp_path / "packages").write_text(UBUNTU_PACKAGES)
    (tmp_path / "signer").write_text("Canonical Ltd. Kernel Module Signing\n")
    (root / "proc/sys/kernel/osrelease").write_text(f"{UBUNTU}\n")
    (root / "boot").mkdir()
    for release, module in (("6.8.0-31-generic", False), (UBUNTU, True), ("6.8.0-100-generic", False)):
        (root / "lib/modules" / release).mkdir(parents=True)
        text = "kernel/nvidia-580srv-open/nvidia.ko.zst: kernel/x.ko\n" if module else ""
        (root / "lib/modules" / release / "modules.dep").write_text(text)
        (root / "boot" / f"vmlinuz-{release}").touch()
    mark = root / "etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"
    mark.parent.mkdir(parents=True)
    mark.write_text("// Source: distribution\n")
    names = ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"]
    given = {"lead_package": names[0], "packages": names, "source": "distribution", "archive": "Ubuntu"}
    return lambda **more: look(**{**given, "prebuilt": PREBUILT, **more})


def test_look_at_prebuilt_modules(ubuntu: Run, tmp_path: Path) -> None:
    (tmp_path / "madison").write_text(f"{PREBUILT}6.8.0-100-generic | 6.8.0-100.100 | http://x\n")
    found = ubuntu()
    assert (found["version"], found["signer"]) == ("580.173.02", "Canonical Ltd. Kernel Module Signing")
    # An older kernel is nobody's next boot; of a newer one the module is wanted where apt knows it.
    assert found["bare_kernels"] == ["6.8.0-100-generic"]
    assert found["modules_to_install"] == [f"{PREBUILT}6.8.0-100-generic"]
    assert found["headers_to_install"] == []
    # The modules and the kernel's metapackage are held with the driver: a newer kernel would start without a module.
    assert found["unheld"] == ["linux-image-generic", f"{PREBUILT}generic", "nvidia-headless-no-dkms-580-server-open"]
    assert found["other_branch"] == []

    names = ["nvidia-headless-no-dkms-615-server-open", "nvidia-utils-615-server"]
    prebuilt = PREBUILT.replace("580", "615")
    (tmp_path / "madison").write_text(f"{prebuilt}generic | 1 | http://x\n{prebuilt}{UBUNTU} | 1 | http://x\n")
    found = ubuntu(lead_package=names[0], packages=names, branch="615", prebuilt=prebuilt)
    assert (found["version"], found["installed"], len(found["other_branch"])) == ("", "580.173.02", 4)
    assert found["modules_to_install"] == [f"{prebuilt}generic", f"{prebuilt}{UBUNTU}"]


def show(name: str, version: str, depends: str) -> str:
    return f"Package: {name}\nVersion: {version}\nDepends: {depends}\nDescription: x\n y\n\n"


def need(release: str) -> str:
    common = "nvidia-kernel-common-580-server"
    return f"{common} (<= {release}-1), {common} (>= {release})"


def test_what_the_archive_offers(ubuntu: Run, tmp_path: Path) -> None:
    """A newer kernel, and a driver release with modules for that kernel alone. apt knows the old module no more."""
    (tmp_path / f"on-disk-{UBUNTU}").write_text("580.173.02\n")
    newer = "6.8.0-111-generic"
    offers = {
        "nvidia-headless-no-dkms-580-server-open": ("580.178.04-0ubuntu0.24.04.1", need("580.178.04")),
        "linux-image-generic": ("6.8.0-111.111", f"linux-image-{newer}"),
        f"{PREBUILT}generic": ("6.8.0-111.111", f"{PREBUILT}{newer} (= 6.8.0-111.111), {need('580.178.04')}"),
        f"{PREBUILT}{UBUNTU}": ("6.8.0-79.79", f"linux-image-{UBUNTU}, {need('580.173.02')}"),
    }
    (tmp_path / "show").write_text("".join(show(name, *offer) for name, offer in offers.items()))
    found = ubuntu()
    assert (found["candidate"], found["offered_kernel"]) == ("580.178.04", newer)
    assert found["module_releases"] == {f"{PREBUILT}generic": "580.178.04", f"{PREBUILT}{UBUNTU}": "580.173.02"}
    assert (found["next_kernel"], found["next_modules"]) == ("6.8.0-100-generic", [f"{PREBUILT}generic"])
    assert found["modules_on_disk"] == {UBUNTU: "580.173.02"}
    assert (found["kernel_updates"], found["module_updates"]) == (["linux-image-generic"], [f"{PREBUILT}generic"])
    assert found["outdated_modules"] == [f"{PREBUILT}{UBUNTU}"]

    # Modules of the same kernel, built anew for the new release, with objects that are held like them.
    (tmp_path / "packages").write_text(
        f"{UBUNTU_PACKAGES}linux-objects-nvidia-580-server-open-{UBUNTU}\thi \t6.8.0-79.79\n"
    )
    offers[f"linux-objects-nvidia-580-server-open-{UBUNTU}"] = ("6.8.0-79.79+1", "libc6")
    offers[f"{PREBUILT}{UBUNTU}"] = ("6.8.0-79.79+1", f"linux-image-{UBUNTU}, {need('580.178.04')}")
    (tmp_path / "show").write_text("".join(show(name, *offer) for name, offer in offers.items()))
    found = ubuntu()
    objects = f"linux-objects-nvidia-580-server-open-{UBUNTU}"
    assert sorted(found["module_updates"]) == [f"{PREBUILT}{UBUNTU}", f"{PREBUILT}generic", objects]
    assert found["outdated_modules"] == []


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("SecureBoot", b"\x06\0\0\0\x01", True), ("SecureBoot", b"\x06\0\0\0\0", False), ("Boot0000", b"\1\1", False)],
)
def test_secure_boot(look: Run, tmp_path: Path, variable: str, value: bytes, expected: bool) -> None:
    variables = tmp_path / "root/sys/firmware/efi/efivars"
    variables.mkdir(parents=True)
    (variables / f"{variable}-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(value)
    found = look()
    assert (found["secure_boot"], found["key_enrolled"]) == (expected, False)


def test_key_of_dkms_that_the_firmware_trusts(driver: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "var/lib/dkms").mkdir(parents=True)
    (tmp_path / "sys/firmware/efi/mok-variables").mkdir(parents=True)
    assert not driver.key_enrolled(tmp_path)
    (tmp_path / "var/lib/dkms/mok.pub").write_bytes(b"0\x82certificate")
    trusted = tmp_path / "sys/firmware/efi/mok-variables/MokListRT"
    trusted.write_bytes(b"head another certificate tail")
    assert not driver.key_enrolled(tmp_path)
    trusted.write_bytes(b"head 0\x82certificate tail")
    assert driver.key_enrolled(tmp_path)


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
    deviceNodes:
        - path: /dev/nvidia-uvm
          gid: 44
        - path: /dev/nvidia-uvm-tools
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


def test_devices_and_gpus(runtime: ModuleType) -> None:
    devices = runtime.parse_devices(CDI_LIST)
    assert devices == ["nvidia.com/gpu=0", f"nvidia.com/gpu={GPUS[0]}", "nvidia.com/gpu=all"]
    assert runtime.compare(devices, [GPUS[1]]) == ([GPUS[1]], [GPUS[0]])


@pytest.mark.parametrize(
    ("devices_missing_gone_versions", "said"),
    [
        ((["d"], [], [], ["580.1"]), ""),
        ((["d"], [], [], []), ""),
        (([], [], [], []), "no CDI specification"),
        ((["d"], ["GPU-a"], [], ["580.1"]), "does not name GPU-a"),
        ((["d"], [], ["GPU-b"], ["580.1"]), "names GPU-b"),
        ((["d"], [], [], ["570.1"]), "made for driver 570.1, the host has 580.1"),
    ],
)
def test_when_a_specification_is_stale(runtime: ModuleType, devices_missing_gone_versions: Any, said: str) -> None:
    found = runtime.explain(*devices_missing_gone_versions, "580.1")
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
def test_specifications_of_nvidias_gpus(runtime: Any, tmp_path: Path, name: str, text: str, counts: bool) -> None:
    (tmp_path / name).write_text(text)
    assert bool(runtime.gpu_specs(str(tmp_path))) is counts


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (SPEC, True),
        (SPEC.replace("/dev/nvidia-uvm\n", '"/dev/nvidia-uvm"\n'), True),
        ('{"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia-uvm"}, {"path": "/dev/nvidiactl"}]}}', True),
        (SPEC.replace("path: /dev/nvidia-uvm\n", "path: /dev/nvidiactl\n"), False),
        ('{"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia-uvm-tools"}]}}', False),
    ],
)
def test_node_of_cuda_in_a_specification(text: str, listed: bool) -> None:
    assert lists_uvm(text) is listed


def test_look_at_a_container_runtime(run_module: Run, program: Callable[[str, str], None], tmp_path: Path) -> None:
    program("dockerd", 'echo "Docker version 26.1.5+dfsg1, build a72d7cd"')
    program("dpkg-query", 'printf "nvidia-container-toolkit\\thi \\t1.18.2-1\\n"; exit 1')
    program("nvidia-ctk", f"printf '{CDI_LIST}'")
    program("nvidia-smi", f'printf "{GPUS[0]}, 580.173.02\\n{GPUS[1]}, 580.173.02\\n"')
    program("systemctl", f"printf '{UNITS}'")
    for directory in ("var/run/cdi", "etc/cdi"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "var/run/cdi/nvidia.yaml").write_text(SPEC)
    args = {
        "packages": ["nvidia-container-toolkit"],
        "units": ["nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service", "missing.service"],
        "root": str(tmp_path),
    }
    found = run_module("container_runtime_state", args, check=True)
    assert (found["docker_version"], found["docker_major"]) == ("26.1.5", 26)
    assert found["packages"] == {"nvidia-container-toolkit": {"version": "1.18.2-1", "held": True}}
    assert (found["driver"], found["cdi_driver"], found["cdi_missing"]) == ("580.173.02", ["580.173.02"], [GPUS[1]])
    assert found["units"] == {
        "nvidia-cdi-refresh.path": {"enabled": True, "active": True},
        "nvidia-cdi-refresh.service": {"enabled": False, "active": False},
    }
    assert GPUS[1] in found["cdi_stale"] and found["cdi_static"] == []
    program("nvidia-smi", f'printf "{GPUS[0]}, 580.173.02\\n"')
    said = run_module("container_runtime_state", args)["cdi_stale"]
    assert said == "there is no /dev/nvidia-uvm, so that NVML works in containers and CUDA fails with error 999"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-uvm").touch()
    assert run_module("container_runtime_state", args)["cdi_stale"] == ""
    (tmp_path / "var/run/cdi/nvidia.yaml").write_text(SPEC.replace("path: /dev/nvidia-uvm\n", "path: /dev/nvidiactl\n"))
    assert "nvidia.yaml does not list /dev/nvidia-uvm" in run_module("container_runtime_state", args)["cdi_stale"]
    (tmp_path / "etc/cdi/nvidia.yaml").write_text(SPEC)
    found = run_module("container_runtime_state", args)
    assert found["cdi_static"] == [str(tmp_path / "etc/cdi/nvidia.yaml")]
