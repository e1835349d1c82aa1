# SPDX-License-Identifier: Apache-2.0
"""What apt itself makes of the preferences: a vendor supplies its own packages, and never one of the distribution."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.vllm_edge.system.apt_sources import choose_preferences
from helpers import ROOT

pytestmark = [pytest.mark.skipif(not shutil.which("apt-cache"), reason="apt is not installed"), pytest.mark.slow]

DISTRIBUTION = ["sudo", "libc6", "docker.io", "dkms", "linux-image-amd64", "nvidia-support", "libgl1", "python3"]
"""Packages that a vendor must not replace; all but the one that it may, nvidia-support, whose name is the vendor's."""
DRIVER = [
    *("libcuda1", "libcudadebugger1", "libnvidia-ml1", "libnvidia-compute-580", "cuda-drivers-580"),
    *("nvidia-smi", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-kernel-support", "nvidia-modprobe"),
    *("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-driver-pinning-580", "nvidia-dkms-580-open"),
    *("nvidia-utils-580", "firmware-nvidia-gsp", "xserver-xorg-video-nvidia", "libnvcuvid1", "libnvoptix1"),
    *("libglx-nvidia0", "libegl-nvidia0", "libgles-nvidia2", "libxnvctrl0"),
]
TOOLKIT = [f"nvidia-container-toolkit{end}" for end in ("", "-base")]
TOOLKIT += [f"libnvidia-container{end}" for end in ("-tools", "1")]
DOCKER = [f"docker-{end}" for end in ("ce", "ce-cli", "ce-rootless-extras", "buildx-plugin", "compose-plugin")]
DOCKER += ["containerd.io"]


def read_patterns(role: str, variable: str) -> list[str]:
    """The packages that a role's repository supplies by default."""
    return list(yaml.safe_load((ROOT / f"roles/{role}/defaults/main.yml").read_text())[variable])


VENDORS = {
    "driver": (DRIVER, read_patterns("nvidia_driver", "nvidia_driver_repository_packages")),
    "toolkit": (TOOLKIT, read_patterns("container_runtime", "container_runtime_repository_packages")),
    "docker": (DOCKER, read_patterns("container_runtime", "container_runtime_docker_repository_packages")),
}


def write_repository(place: Path, origin: str, packages: dict[str, str]) -> None:
    """A flat repository of packages that nobody downloads."""
    place.mkdir()
    text = "".join(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: x\nFilename: ./{name}.deb\nSize: 1\n"
        f"SHA256: {'0' * 64}\nDescription: x\n\n"
        for name, version in packages.items()
    )
    (place / "Packages").write_text(text)
    (place / "Release").write_text(
        f"Origin: {origin}\nLabel: {origin} L\nDate: Mon, 23 Nov 2026 10:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(text.encode()).hexdigest()} {len(text)} Packages\n"
    )


class Apt:
    """apt of this machine with a configuration and a state of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()

    def run(self, *words: str) -> str:
        options = [f"Dir={self.root}", f"Dir::State::status={self.root}/status", "Dir::Etc::main=/dev/null"]
        options += ["APT::Architecture=amd64", "APT::Sandbox::User=", "Acquire::http::Proxy=false"]
        command = [words[0], *(part for option in options for part in ("-o", option)), *words[1:]]
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        return subprocess.run(
            command, env=environment | {"LC_ALL": "C"}, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def candidates(self, names: list[str]) -> dict[str, str]:
        return dict(
            re.findall(r"^(\S+):\n.*\n  Candidate: (.*)$", self.run("apt-cache", "policy", *names), re.MULTILINE)
        )


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("place", ["host of its own", "shared host", "directory"])
def test_vendor_supplies_its_packages_and_no_other(tmp_path: Path, address: str, place: str) -> None:
    apt = Apt(tmp_path / "root")
    own = DRIVER + TOOLKIT + DOCKER
    # The distribution has older packages of the same names too, as Debian's non-free has the driver's.
    write_repository(tmp_path / "debian", "Debian", dict.fromkeys(DISTRIBUTION + own, "1"))
    base = f"file://{tmp_path}" if place == "directory" else f"http://{address}"
    host = base.replace("127.0.0.1", "localhost") if place == "host of its own" else base
    lines = [f"deb [trusted=yes] {base}/debian/ ./"]
    for vendor, (packages, patterns) in VENDORS.items():
        offered = dict.fromkeys(DISTRIBUTION, "99") | dict.fromkeys(packages, "2") | {"new-dependency": "1"}
        write_repository(tmp_path / vendor, vendor.upper(), offered)
        lines.append(f"deb [trusted=yes] {host}/{vendor}/ ./")
        wanted = {"url": f"{host}/{vendor}/", "source": "/own", "preferences": "/p", "packages": patterns}
        indexes = [f"{wanted['url']}|{vendor.upper()}|{vendor.upper()} L"]
        chosen = choose_preferences(wanted, {"/s/debian.list": lines[0]}, indexes)
        (apt.root / f"etc/apt/preferences.d/{vendor}.pref").write_text(chosen["text"])
    # The role's own pin of versions comes before these.
    (apt.root / "etc/apt/preferences.d/toolkit").write_text(
        "Package: nvidia-container-toolkit\nPin: version 1\nPin-Priority: 1001\n"
    )
    (apt.root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
    apt.run("apt-get", "-qq", "update")
    found = apt.candidates(DISTRIBUTION + own + ["new-dependency"])
    replaced = [name for name in DISTRIBUTION if found.pop(name) != "1"]
    assert replaced == ["nvidia-support"]
    assert (found.pop("nvidia-container-toolkit"), found.pop("new-dependency")) == ("1", "1")
    assert found == dict.fromkeys((name for name in own if name != "nvidia-container-toolkit"), "2")
    for pref in (apt.root / "etc/apt/preferences.d").glob("*.pref"):
        pref.unlink()
    assert apt.candidates(["sudo"]) == {"sudo": "99"}, "without the preferences the vendor replaces it"
