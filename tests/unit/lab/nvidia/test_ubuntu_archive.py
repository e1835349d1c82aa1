# SPDX-License-Identifier: Apache-2.0
"""The part of Ubuntu's archive that has drivers: its layout, the real names, modules that tell their signer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lab.nvidia.ubuntu import KERNEL, NEWER_KERNEL, SIGNER, SUITE, UPDATES

pytestmark = pytest.mark.slow


def packages(archive: Path, component: str, suite: str = SUITE) -> dict[str, dict[str, str]]:
    text = (archive / "dists" / suite / component / "binary-amd64/Packages").read_text()
    entries = [dict(re.findall(r"^(\S+): (.*)$", block, re.MULTILINE)) for block in text.strip().split("\n\n")]
    return {entry["Package"]: entry for entry in entries}


@pytest.fixture
def archive(repositories: Path) -> Path:
    return repositories / "ubuntu"


@pytest.mark.parametrize(("branch", "version"), [("580", "580.173.02"), ("615", "615.71.09")])
def test_names_and_versions_of_the_server_drivers(archive: Path, branch: str, version: str) -> None:
    found = packages(archive, "restricted")
    prebuilt = f"linux-modules-nvidia-{branch}-server-open"
    assert f"{prebuilt}-{KERNEL}" in found[f"{prebuilt}-generic"]["Depends"]
    for name in (f"nvidia-headless-no-dkms-{branch}-server-open", f"nvidia-utils-{branch}-server"):
        assert found[name]["Version"].startswith(f"{version}-0ubuntu")
    # Of two branches one can be installed.
    assert found[f"nvidia-utils-{branch}-server"]["Conflicts"] == "nvidia-utils"


@pytest.mark.parametrize(
    ("suite", "kernel", "version"), [(SUITE, KERNEL, "580.173.02"), (UPDATES, NEWER_KERNEL, "580.178.04")]
)
def test_modules_of_a_kernel_need_one_release(archive: Path, suite: str, kernel: str, version: str) -> None:
    found = packages(archive, "restricted", suite)
    common = "nvidia-kernel-common-580-server"
    for name in (kernel, "generic"):
        needed = found[f"linux-modules-nvidia-580-server-open-{name}"]["Depends"]
        assert f"{common} (<= {version}-1), {common} (>= {version})" in needed
    assert f"{common}-{version}" in found["nvidia-utils-580-server"]["Depends"]
    assert f"{common}-{version}" in found[common]["Provides"]


def test_modinfo_reads_the_signer(archive: Path, tmp_path: Path) -> None:
    entry = packages(archive, "restricted")[f"linux-modules-nvidia-580-server-open-{KERNEL}"]
    subprocess.run(["dpkg-deb", "-x", archive / entry["Filename"], tmp_path], check=True)
    module = tmp_path / f"lib/modules/{KERNEL}/kernel/nvidia-580srv-open/nvidia.ko"

    def told(field: str) -> str:
        return subprocess.run(
            ["/sbin/modinfo", "-F", field, module], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert (told("signer"), told("version")) == (SIGNER, "580.173.02")
