# SPDX-License-Identifier: Apache-2.0
"""The Docker Engine of the machine that runs the lab: find it, start it where nothing else would, talk to it."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from lab.shell import as_root, cache_directory, output, run

# Everything of the lab carries this label, so that it can be found again and removed.
LABEL = "vllm-edge-lab"
ENGINE_PID_FILE = Path("/var/run/docker.pid")
SYSTEMD = Path("/run/systemd/system")
"""There where systemd is PID 1."""
CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def docker_command() -> list[str]:
    """`docker`, or `sudo docker` where the user may not open the Engine's socket."""
    docker = shutil.which("docker")
    if docker is None:
        raise SystemExit("lab: there is no docker command; `make bootstrap` installs it")
    probe = subprocess.run([docker, "version"], capture_output=True, text=True, check=False)
    if probe.returncode != 0 and "permission denied" in probe.stderr.lower():
        return [*as_root(), docker]
    return [docker]


def docker(*arguments: str | Path, check: bool = True, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    return run([*docker_command(), *arguments], check=check, quiet=quiet)


def docker_output(*arguments: str | Path) -> str:
    return output([*docker_command(), *arguments])


def answers() -> bool:
    return docker("info", check=False).returncode == 0


def is_dockerd(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and b"dockerd" in command.read_bytes()


def pid_file() -> Path:
    return cache_directory() / "dockerd.pid"


def ensure_engine(timeout_s: int = 60) -> None:
    """Start the Docker Engine unless one answers: by systemd where that is PID 1, else by hand."""
    if answers():
        return
    if SYSTEMD.is_dir():
        print("    starting docker.service")
        run([*as_root(), "systemctl", "start", "docker.service"])
    else:
        dockerd = shutil.which("dockerd") or "/usr/sbin/dockerd"
        log = cache_directory() / "dockerd.log"
        print(f"    systemd is not PID 1 here: starting {dockerd} by hand, log in {log}")
        # One that was killed leaves its pid file, and another process may have that pid by now.
        if ENGINE_PID_FILE.exists() and not is_dockerd(int(ENGINE_PID_FILE.read_text())):
            run([*as_root(), "rm", "--force", ENGINE_PID_FILE])
        with log.open("ab") as sink:
            process = subprocess.Popen([*as_root(), dockerd], stdout=sink, stderr=sink, start_new_session=True)
        pid_file().write_text(f"{process.pid}\n")
    docker_command.cache_clear()
    deadline = time.monotonic() + timeout_s
    while not answers():
        if time.monotonic() > deadline:
            raise SystemExit(f"lab: the Docker Engine does not answer after {timeout_s} s; see its log")
        time.sleep(0.5)


def stop_engine_started_by_lab() -> None:
    """Stop the Engine that `ensure_engine` started by hand; one that was already there is left alone."""
    if not pid_file().exists():
        return
    pid = int(pid_file().read_text())
    if is_dockerd(pid):
        if os.geteuid() == 0:
            os.kill(pid, signal.SIGTERM)
        else:
            run([*as_root(), "kill", str(pid)])
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.1)
    pid_file().unlink()


def image_exists(name: str) -> bool:
    return docker("image", "inspect", name, check=False).returncode == 0


def cgroup_arguments() -> list[str]:
    """How a systemd container gets its cgroups.

    Where the machine runs cgroup v2 alone the container has a private cgroup namespace and never sees the tree of
    the machine. With cgroup v1 Docker inside the container needs the machine's tree, writable.
    """
    if (CGROUP / "cgroup.controllers").exists():
        return ["--cgroupns=private"]
    return ["--cgroupns=host", f"--volume={CGROUP}:{CGROUP}:rw"]


def can_raise_limits() -> bool:
    """Whether CAP_SYS_RESOURCE may be given to a container (some sandboxes lack it)."""
    bounding = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd"))
    return bool(int(bounding.split()[1], 16) & (1 << 24))
