# SPDX-License-Identifier: Apache-2.0
"""The vendors' repositories: signed, complete, and built only when something changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.nvidia import build
from lab.nvidia.build import CUDA_LATER, inputs_digest

NVIDIA = Path(build.__file__).parent

CUDA = "cuda/repos/debian13/x86_64"
TOOLKIT = "libnvidia-container/stable/deb/amd64"


def stanzas(repository: Path) -> list[dict[str, str]]:
    text = (repository / "Packages").read_text()
    return [dict(re.findall(r"^(\S+): (.*)$", block, re.MULTILINE)) for block in text.strip().split("\n\n")]


def unpack(repository: Path, package: str, target: Path) -> Path:
    subprocess.run(["dpkg-deb", "-x", repository / package, target], check=True)
    return target


@pytest.mark.slow
def test_each_vendor_has_a_key_of_its_own(repositories: Path) -> None:
    fingerprints = json.loads((repositories / "fingerprints.json").read_text())
    cuda, toolkit = fingerprints["cuda"], fingerprints["libnvidia-container"]
    assert cuda["fingerprint"] != toolkit["fingerprint"]
    assert cuda["key"] == f"{CUDA}/{cuda['fingerprint'][-8:].lower()}.pub"
    assert toolkit["key"] == "libnvidia-container/gpgkey"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "packages", "expected"),
    [
        (
            CUDA,
            "nvidia-driver-cuda libnvidia-ml1 libcuda1 nvidia-smi nvidia-persistenced nvidia-kernel-open-dkms "
            "nvidia-kernel-support nvidia-modprobe",
            {"580.173.02-1", "580.178.04-1", "590.48.01-1"},
        ),
        (
            TOOLKIT,
            "nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1",
            {"1.18.2-1", "1.19.0-1", "1.20.0-1", "1.20.0+8269969f-1"},
        ),
    ],
)
def test_packages_and_their_releases(repositories: Path, path: str, packages: str, expected: set[str]) -> None:
    entries = stanzas(repositories / path)
    for name in packages.split():
        assert {entry["Version"] for entry in entries if entry["Package"] == name} == expected, name
    for entry in entries:
        for version in re.findall(r"\(= ([^)]+)\)", entry.get("Depends", "")):
            assert version == entry["Version"], "packages ask for each other's version"


@pytest.mark.slow
def test_a_repository_that_begins_at_590_and_drivers_that_need_contrib(repositories: Path) -> None:
    names = {entry["Package"]: entry["Version"] for entry in stanzas(repositories / CUDA_LATER)}
    pinning = [name.removeprefix("nvidia-driver-pinning-") for name in names if "pinning" in name]
    assert pinning == ["590.48.01", "590"] and names["nvidia-driver-cuda"] == "590.48.01-1"
    entries = stanzas(repositories / CUDA)
    assert {entry["Depends"] for entry in entries if entry["Package"] == "libcuda1"} == {"nvidia-support"}
    assert "nvidia-support" not in {entry["Package"] for entry in entries}


@pytest.mark.slow
@pytest.mark.parametrize(("pinned", "pattern"), [("580", "580.*"), ("590", "590.*"), ("580.173.02", "580.173.02-*")])
def test_pinning_is_a_preferences_file_that_apt_reads(
    repositories: Path, tmp_path: Path, pinned: str, pattern: str
) -> None:
    (package,) = (repositories / CUDA).glob(f"nvidia-driver-pinning-{pinned}_*.deb")
    (path,) = (unpack(repositories / CUDA, package.name, tmp_path) / "etc/apt/preferences.d").iterdir()
    # apt overlooks names with any other ending than .pref, and takes what follows a dot for one.
    assert "." not in path.name
    assert f"Pin: version {pattern}\nPin-Priority: 1000\n" in path.read_text()


@pytest.mark.slow
def test_the_module_says_what_modinfo_reads(repositories: Path, tmp_path: Path) -> None:
    unpack(repositories / CUDA, "nvidia-kernel-open-dkms_580.173.02-1_amd64.deb", tmp_path)
    module = tmp_path / "usr/src/nvidia-580.173.02/nvidia.ko"
    header = subprocess.run(["readelf", "-h", module], capture_output=True, text=True, check=True).stdout
    assert "REL (Relocatable file)" in header
    info = subprocess.run(["readelf", "-p", ".modinfo", module], capture_output=True, text=True, check=True).stdout
    assert {"version=580.173.02", "license=Dual MIT/GPL", "name=nvidia"} <= set(re.findall(r"\]\s+(\S.*)", info))
    assert "signer" not in info


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "units", "has", "has_not"),
    [
        ("1.18.2", "etc", ["Restart=on-failure", "StartLimitBurst=5"], ["nvidia-smi -L", "create-device-nodes"]),
        ("1.19.0", "etc", ["After=multi-user.target"], ["Restart=", "create-device-nodes"]),
        ("1.20.0", "lib", ["nvidia-smi -L", "Restart=on-failure"], ["After=", "create-device-nodes"]),
        ("1.20.0+8269969f", "lib", ["create-device-nodes --control-devices --load-kernel-modules"], ["After="]),
    ],
)
def test_each_toolkit_has_its_own_units(
    repositories: Path, tmp_path: Path, release: str, units: str, has: list[str], has_not: list[str]
) -> None:
    unpack(repositories / TOOLKIT, f"nvidia-container-toolkit-base_{release}-1_amd64.deb", tmp_path)
    service = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.service").read_text()
    path = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.path").read_text()
    assert "Copyright (c) 2025, NVIDIA CORPORATION" in service and "Licensed under the Apache License" in service
    for text in ("Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml", *has):
        assert text in service
    assert not [text for text in has_not if text in service]
    assert "PathChanged=/lib/modules/%v/modules.dep" in path
    rule = tmp_path / "lib/udev/rules.d/99-nvidia-cdi-refresh.rules"
    assert rule.exists() is ("+" in release)
    version = subprocess.run(
        [sys.executable, tmp_path / "usr/bin/nvidia-ctk", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout == f"NVIDIA Container Toolkit CLI version {release}\n"


@pytest.mark.slow
def test_a_second_run_does_nothing_unless_the_first_was_cut_short(repositories: Path) -> None:
    def run() -> dict[Path, int]:
        subprocess.run([sys.executable, NVIDIA / "build.py", "--out", repositories], check=True)
        return {path: path.stat().st_mtime_ns for path in repositories.rglob("*")}

    before = {path: path.stat().st_mtime_ns for path in repositories.rglob("*")}
    assert run() == before
    (repositories / ".inputs").unlink()
    (repositories / TOOLKIT / "stray.deb").touch()
    after, release = run(), repositories / TOOLKIT / "Release"
    assert after[release] > before[release] and after.keys() == before.keys()
    assert (repositories / ".inputs").read_text()


def test_the_stamp_covers_sources_and_keys(tmp_path: Path) -> None:
    from lab.nvidia.repository import Key

    key = Key(tmp_path / "a.asc", "a")
    key.secret.write_text("one")
    first = inputs_digest(key)
    key.secret.write_text("two")
    assert inputs_digest(key) != first
