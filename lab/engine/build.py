#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the lab's stand-in for the image `vllm/vllm-openai`.

The image holds vLLM's real CPU build under the entry point and layout of the official image; the only simulated part
is the package `vllm_edge_lab`, which gives it GPUs whose memory can run out. It is made without a registry and without
BuildKit: Debian by mmdebstrap, wheels downloaded here (this machine's pip configuration knows the index, the proxy and
the CA bundle; a container would not) and bind-mounted into the one container whose result is committed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
# Run as a script: the lab's package is two directories up.
sys.path.insert(0, str(HERE.parents[1]))

from lab.docker import LABEL, docker, docker_output, image_exists
from lab.nvidia import compiler
from lab.shell import as_root, cache_directory

REQUIREMENTS = HERE / "requirements.txt"
SUITE = "bookworm"
PYTHON = "3.11"
DEBIAN_PACKAGES = ("python3", "python3-dev", "libnuma1", "util-linux", "g++", "ca-certificates")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
REPOSITORY = HERE.parent.parent
VERSION = "0.32.0"
"""Of the CPU build. Another release, for which there is a `requirements-<release>.txt`, is laid over it."""
COMPAT_VERSION = "580.95.05"
"""Of the forward-compatibility library in CUDA 13.0's base image: no newer branch than the lab's driver, so that the
toolkit leaves it alone as on a real host."""
# Newest first, so that pip prefers the newest build; 2.36 is the glibc of Debian 12.
GLIBC_NEWEST = 36
LEGACY_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")


@dataclass(frozen=True)
class Pin:
    """One line of requirements.txt: an exact version and the only file that may stand for it."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})$")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirements(text: str) -> list[Pin]:
    pins = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = PIN.match(line)
        if match is None:
            raise ValueError(
                f"{REQUIREMENTS.name}:{number}: {line!r} is not NAME==VERSION --hash=sha256:HEX. "
                "Every wheel of the image is pinned by its hash; run build.py --lock after changing a version."
            )
        pins.append(Pin(**match.groupdict()))
    return pins


def wheel_key(filename: str) -> tuple[str, str]:
    """Distribution and version as a wheel's file name spells them."""
    name, version = filename.split("-")[:2]
    return canonical(name), version


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def find_wheels(pins: Iterable[Pin], folder: Path) -> tuple[dict[str, Path], list[Pin]]:
    """The wheels already in the cache whose hash is the pinned one, and the pins still to be downloaded."""
    present = {wheel_key(path.name): path for path in folder.glob("*.whl")}
    found: dict[str, Path] = {}
    missing: list[Pin] = []
    for pin in pins:
        path = present.get((canonical(pin.name), pin.version))
        if path is not None and sha256_of(path) == pin.sha256:
            found[pin.name] = path
        else:
            missing.append(pin)
    return found, missing


def platform_flags() -> list[str]:
    names = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_NEWEST, 4, -1)] + list(LEGACY_PLATFORMS)
    return [flag for name in names for flag in ("--platform", name)]


def pip_download(pins: Sequence[Pin], folder: Path, extra: Sequence[str]) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as handle:
        handle.write("\n".join(pin.requirement for pin in pins) + "\n")
        handle.flush()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--dest", str(folder), "--python-version", PYTHON, "--implementation", "cp"]
        command += ["--abi", "cp311", "--abi", "abi3", "--abi", "none", *platform_flags(), *extra, "-r", handle.name]
        return subprocess.run(command, check=False).returncode == 0


def torch_cpu_index() -> str:
    """Address of PyTorch's index of CPU builds, as the project's file of vendor addresses has it."""
    versions = yaml.safe_load((REPOSITORY / "group_vars" / "all" / "versions.yml").read_text())
    return str(versions["pytorch_cpu_index_url"])


def fetch_wheels(pins: Sequence[Pin], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    found, missing = find_wheels(pins, folder)
    torch = [pin for pin in missing if pin.name == "torch"]
    others = [pin for pin in missing if pin.name != "torch"]
    if missing:
        say(f"downloading {len(missing)} of {len(pins)} wheels into {folder}")
    if others and not pip_download(others, folder, []):
        raise SystemExit("pip could not download the wheels; check this machine's pip configuration: pip config list")
    # torch's CPU build is not on PyPI. Where pip is configured to find it elsewhere, PyTorch's own index is not asked.
    index = torch_cpu_index()
    if torch and not (pip_download(torch, folder, []) or pip_download(torch, folder, ["--extra-index-url", index])):
        raise SystemExit(f"torch=={torch[0].version} is neither on the configured index nor on {index}")
    found, missing = find_wheels(pins, folder)
    if missing:
        names = ", ".join(f"{pin.name}=={pin.version}" for pin in missing)
        raise SystemExit(f"after the download these are still missing or differ from their hash: {names}")
    return sorted(found.values())


def lock(folder: Path) -> None:
    """Rewrite requirements.txt with the versions it names and the hashes of the wheels in the cache."""
    present = {wheel_key(path.name): path for path in folder.glob("*.whl")}
    lines = []
    for line in REQUIREMENTS.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            lines.append(line)
            continue
        name, _, rest = line.partition("==")
        version = rest.split()[0]
        path = present.get((canonical(name), version))
        if path is None:
            raise SystemExit(f"no wheel of {name}=={version} in {folder}: pip download it there first")
        lines.append(Pin(name, version, sha256_of(path)).requirement)
    REQUIREMENTS.write_text("\n".join(lines) + "\n")


def runtime_image(mirror: str) -> str:
    """The image with the wheels and without the lab's package, by what goes into it."""
    digest = hashlib.sha256("\n".join((mirror, *DEBIAN_PACKAGES)).encode())
    for name in ("install.sh", "rename_distribution.py", "requirements.txt"):
        digest.update(f"{name}\n".encode() + (HERE / name).read_bytes())
    return f"{LABEL}/engine-runtime:{digest.hexdigest()[:12]}"


def committed(base: str, step: Sequence[str], mounts: Sequence[str], changes: Sequence[str], tag: str) -> None:
    """Run one step of install.sh in a container without network and name the result."""
    name = f"vllm-edge-lab-engine-{step[0]}-{os.getpid()}"
    command = ["--entrypoint", "/bin/sh", base, "/lab-engine/install.sh", *step]
    try:
        docker("run", "--name", name, "--user", "0", "--network", "none", *mounts, *command)
        docker("commit", *(part for change in changes for part in ("--change", change)), name, tag)
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def root_filesystem(cache: Path, mirror: str) -> Path:
    key = hashlib.sha256(repr((SUITE, mirror, DEBIAN_PACKAGES)).encode()).hexdigest()[:12]
    target = cache / "rootfs" / f"engine-{SUITE}-{key}.tar"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which("mmdebstrap") is None:
        raise SystemExit("mmdebstrap is not installed: apt-get install mmdebstrap debian-archive-keyring")
    say(f"making Debian {SUITE} from {mirror or 'its own mirror'}")
    partial = target.with_suffix(".partial.tar")
    command = [*as_root(), "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")]
    command += ["--aptopt=Acquire::Languages none", SUITE, str(partial)]
    # The key is named, because a machine that is not Debian does not trust it by itself.
    if mirror:
        command += [f"deb [signed-by={KEYRING}] {mirror} {suite} main" for suite in (SUITE, f"{SUITE}-updates")]
    subprocess.run(command, check=True)
    partial.rename(target)
    return target


def image_changes(release: str) -> list[str]:
    environment = {
        "LANG": "C.UTF-8",
        "VLLM_TARGET_DEVICE": "cpu",
        # Neither inductor for the model nor a warm-up that compiles it; see vllm_edge_lab/worker.py and command.py.
        "VLLM_CPU_CI_ENV": "1",
        # Ranks and engines share whatever cores there are; bound to cores, four ranks refuse to start on two.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Being set, whatever to, keeps every rank on the one memory node there is; 1 would demand binding.
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
        "OMP_NUM_THREADS": "1",
        # As the real image says which CUDA it is made with; nothing here is.
        "CUDA_VERSION": "13.0.2",
    }
    labels = {
        "org.opencontainers.image.title": "vllm-openai (lab)",
        "org.opencontainers.image.version": release,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.description": "vLLM's CPU build laid out as vllm/vllm-openai, over simulated GPUs",
        "org.opencontainers.image.source": "https://github.com/vllm-project/vllm",
        "org.opencontainers.image.base.name": f"debian:{SUITE}",
    }
    changes = [f"ENV {name}={value}" for name, value in environment.items()]
    changes += [f'LABEL {name}="{value}"' for name, value in labels.items()]
    return [*changes, "WORKDIR /vllm-workspace", 'ENTRYPOINT ["vllm","serve"]', "CMD []"]


def build(tag: str, cache: Path, mirror: str, release: str = VERSION) -> None:
    started = time.monotonic()
    wheels = cache / "wheels" / "engine"
    source = ["--volume", f"{HERE}:/lab-engine:ro"]
    runtime = runtime_image(mirror)
    if not image_exists(runtime):
        with ThreadPoolExecutor() as pool:
            waited = pool.submit(root_filesystem, cache, mirror)
            fetch_wheels(parse_requirements(REQUIREMENTS.read_text()), wheels)
            rootfs = waited.result()
        say("installing the wheels into the image")
        base = f"{runtime.partition(':')[0]}:debian"
        docker("import", "--change", f"LABEL {LABEL}=image", rootfs, base)
        committed(base, ("runtime",), ["--volume", f"{wheels}:/wheels:ro", *source], [], runtime)
    if release != VERSION:
        fetch_wheels(parse_requirements((HERE / f"requirements-{release}.txt").read_text()), wheels)
        say(f"laying vLLM {release} over it")
        base, runtime = runtime, f"{runtime}-{release}"
        committed(base, ("other", release), ["--volume", f"{wheels}:/wheels:ro", *source], [], runtime)
    with tempfile.TemporaryDirectory() as compat:
        compiler.cuda_library(Path(compat, f"libcuda.so.{COMPAT_VERSION}"), COMPAT_VERSION, compat=True)
        committed(runtime, ("lab",), [*source, "--volume", f"{compat}:/compat:ro"], image_changes(release), tag)
    size = int(docker_output("image", "inspect", "--format", "{{.Size}}", tag))
    say(f"{tag}: {size / 2**20:.0f} MiB in {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    print(f"[engine image] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the lab's vllm/vllm-openai image.")
    parser.add_argument("--tag", default=f"{LABEL}/vllm-openai:v{VERSION}", help="name of the image")
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="directory for wheels and root files")
    parser.add_argument("--mirror", default="", help="Debian mirror (default: mmdebstrap's own)")
    parser.add_argument("--release", default=VERSION, help="release of vLLM")
    parser.add_argument("--lock", action="store_true", help="rewrite requirements.txt from the cached wheels and stop")
    arguments = parser.parse_args()
    if arguments.lock:
        lock(arguments.cache / "wheels" / "engine")
        return
    build(arguments.tag, arguments.cache, arguments.mirror, arguments.release)


if __name__ == "__main__":
    main()
