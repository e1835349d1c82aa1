# SPDX-License-Identifier: Apache-2.0
"""Images and artefacts of the lab: made from Debian's archive and PyPI alone, each once per content of its inputs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.docker import LABEL, docker, docker_output, image_exists
from lab.engine.build import VERSION, fetch_wheels, parse_requirements
from lab.shell import LAB, as_root, cache_directory, output, run, stage

HOST_PACKAGES = (
    "systemd,systemd-sysv,dbus,udev,kmod,python3,python3-apt,sudo,openssh-server,ca-certificates,iproute2,procps,less"
)
VENDORS_PACKAGES = ("docker-registry",)


def digest(*paths: Path, extra: str = "") -> str:
    """Twelve hex digits over the contents and names of files and directories."""
    total = hashlib.sha256(extra.encode())
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            # A page that is corrected is no reason to make an image anew.
            if "__pycache__" in file.parts or file.suffix == ".md":
                continue
            total.update(str(file.relative_to(LAB)).encode() + b"\0")
            total.update(file.read_bytes())
    return total.hexdigest()[:12]


def debian_mirror() -> str:
    """Debian's mirror as this machine uses it: the first `debian` URI of its apt sources; empty where it has none."""
    if forced := os.environ.get("VLLM_EDGE_LAB_MIRROR"):
        return forced
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file():
            continue
        for line in file.read_text(errors="replace").splitlines():
            found = re.match(r"\s*(?:URIs:|deb\s+(?:\[[^]]*\]\s*)?)\s*(https?://\S+/debian)/?(?:\s|$)", line)
            if found:
                return found.group(1)
    return ""


def apt_proxy() -> str:
    shown = output(["apt-config", "dump", "--format", "%v%n", "Acquire::http::Proxy"])
    return shown.splitlines()[0] if shown else ""


def debian_image(release: str, packages: str) -> str:
    """A Debian root file system of `release` as an image; returns its name."""
    mirror = debian_mirror()
    tag = f"{LABEL}/debian-{release}:{digest(extra=f'{release} {packages} {mirror}')}"
    if image_exists(tag):
        return tag
    with (
        stage(f"Debian {release} from {mirror or 'its own mirror'}"),
        tempfile.TemporaryDirectory(dir=cache_directory()) as scratch,
    ):
        archive = Path(scratch) / f"{release}.tar"
        command = [*as_root(), "mmdebstrap", "--variant=minbase", "--quiet", f"--include={packages}", release, archive]
        # The key is named, because a machine that is not Debian does not trust it by itself.
        if mirror:
            command.append(f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror} {release} main")
        run(command, quiet=True)
        docker("import", "--change", f"LABEL {LABEL}=image", archive, tag)
    return tag


def derived_image(tag: str, base: str, script: str, copies: dict[Path, str], changes: tuple[str, ...]) -> str:
    """Run `script` in a container of `base` after copying files into it, and commit it as `tag`.

    A run and a commit, where others would use a Dockerfile: it needs no builder, so it works with every Docker.
    """
    container = docker_output(
        "create", "--network=bridge", f"--label={LABEL}=build", "--entrypoint=", base, "sh", "-euc", script
    )
    try:
        for source, target in copies.items():
            docker("cp", source, f"{container}:{target}")
        docker("start", "--attach", container)
        arguments = [word for change in (*changes, f"LABEL {LABEL}=image") for word in ("--change", change)]
        docker("commit", *arguments, container, tag)
    finally:
        docker("rm", "--force", container, check=False)
    return tag


def host_image(release: str = "trixie") -> str:
    """Debian with systemd, ssh and the simulated hardware, and nothing of vllm-edge."""
    base = debian_image(release, HOST_PACKAGES)
    gpus = (LAB / "nvidia" / "hardware.sh", LAB / "nvidia" / "lab-gpu")
    inputs = digest(LAB / "host", *gpus, extra=base + apt_proxy())
    tag = f"{LABEL}/host:{inputs}"
    if image_exists(tag):
        return tag
    with stage(f"lab host image, Debian {release}"), tempfile.TemporaryDirectory() as scratch:
        proxy = Path(scratch) / "30proxy"
        proxy.write_text(f'Acquire::http::Proxy "{apt_proxy()}";\n' if apt_proxy() else "")
        derived_image(
            tag,
            base,
            "sh /root/provision.sh && rm /root/provision.sh",
            {
                LAB / "host" / "provision.sh": "/root/provision.sh",
                LAB / "host" / "lab-init": "/usr/local/sbin/lab-init",
                gpus[0]: "/usr/local/sbin/lab-hardware",
                gpus[1]: "/usr/local/sbin/lab-gpu",
                proxy: "/etc/apt/apt.conf.d/30proxy",
            },
            ('ENTRYPOINT ["/usr/local/sbin/lab-init"]', "CMD []"),
        )
    if release == "trixie":
        docker("tag", tag, f"{LABEL}/host:latest")
    return tag


def vendors_image() -> str:
    """What answers for the sites that cannot be reached: apt repositories, package index, model hub, registry."""
    base = debian_image("trixie", HOST_PACKAGES)
    tag = f"{LABEL}/vendors:{digest(LAB / 'vendors', LAB / 'hub', extra=base)}"
    if image_exists(tag):
        return tag
    with stage("vendors image"):
        install = (
            "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq; apt-get install -y -qq --no-install-recommends "
        )
        derived_image(
            tag,
            base,
            install + " ".join(VENDORS_PACKAGES) + "; rm -rf /var/lib/apt/lists/*; chmod 0755 /srv/*.py /srv/serve",
            {
                LAB / "vendors" / "serve": "/srv/serve",
                LAB / "vendors" / "index.py": "/srv/index.py",
                LAB / "vendors" / "registry.yml": "/srv/registry.yml",
                LAB / "hub" / "server.py": "/srv/hub.py",
            },
            ('ENTRYPOINT ["/srv/serve"]', "CMD []"),
        )
    return tag


def built_by(script: Path, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)


def apt_repositories() -> Path:
    """The vendors' signed apt repositories with the simulated driver and toolkit; returns their root directory."""
    target = cache_directory() / "apt"
    with stage("simulated driver and toolkit packages, signed repositories"):
        built_by(LAB / "nvidia" / "build.py", "--out", target)
    return target


def index_wheels() -> Path:
    """The wheels that the lab's package index has; returns their directory."""
    target = cache_directory() / "wheels" / f"index-{digest(LAB / 'vendors' / 'requirements.txt')}"
    fetch_wheels(parse_requirements((LAB / "vendors" / "requirements.txt").read_text()), target)
    return target


def engine_image(release: str = VERSION) -> str:
    """The simulated `vllm/vllm-openai` of a release: vLLM's CPU build behind a wrapper that keeps the physics."""
    library = [LAB / "nvidia" / "nvml" / name for name in ("boards.h", "cuda.c")]
    tag = f"{LABEL}/vllm-openai:{digest(LAB / 'engine', *library, extra=debian_mirror())}-{release}"
    if not image_exists(tag):
        with stage(f"engine base image with vLLM {release}"):
            options = ("--tag", tag, "--cache", cache_directory(), "--mirror", debian_mirror(), "--release", release)
            built_by(LAB / "engine" / "build.py", *options)
    return tag


def models(image: str) -> Path:
    """Tiny random checkpoints under the real repository names; returns the hub's root directory."""
    target = cache_directory() / f"hub-{digest(LAB / 'models')}"
    if not target.is_dir():
        with stage("tiny random models"):
            partial = target.with_suffix(".part")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            run = ["run", "--rm", "--network=none", f"--user={os.getuid()}:{os.getgid()}", "--env=HOME=/tmp"]
            run += [
                "--env=USER=lab",
                "--tmpfs=/tmp:exec,mode=1777",
                "--workdir=/tmp",
                f"--volume={LAB / 'models'}:/models:ro",
            ]
            run += [f"--volume={partial}:/out", "--entrypoint=python3", image]
            docker(*run, "/models/make.py", "/models/chat_template.jinja")
            partial.rename(target)
    return target


def remove_images() -> None:
    """Remove every image of the lab, the youngest first, because an image outlives those made of it."""
    found = docker_output("image", "ls", "--quiet", "--no-trunc", "--filter", f"label={LABEL}")
    for identity in dict.fromkeys(found.splitlines()):
        docker("image", "rm", "--force", identity, check=False)
