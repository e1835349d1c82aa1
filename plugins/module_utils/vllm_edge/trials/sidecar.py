# SPDX-License-Identifier: Apache-2.0
"""A container that runs beside an engine for a while: from the engine's image and in the engines' cage.

It generates load for the benchmark and computes reference answers. It has no network and no capabilities, sees the
weights and sockets that it is given read-only, and the kernel ends it before any engine if memory is short. Two
directories are made for it: /job has its program and files, in memory; what it writes to /job/out is read as data of
somebody else. However the run ends, container and directories are removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..names import ENGINE_USER, LABEL_SIDECAR
from ..paths import HostPaths
from ..system.docker import ContainerGone, DockerAway, DockerEngine, DockerRefused
from ..system.files import make_directories, name_errors, read_foreign
from ..system.long_run import CommandRefused
from ..system.threads import Worker

MEMORY_MIB = 8192
"""vLLM with PyTorch imported takes about 2 GiB, each process of it; our choice."""
OUTPUT_BYTES = 64 * 2**20
"""Bytes of one file in /job/out, and number of files that are read."""
OUTPUT_FILES = 100
KEPT_LINES = 200
POLL_S = 0.5
FOLLOW_TRIES = 60
"""Times that the log is asked for, so that Docker may be away for half a minute."""


class SidecarError(CommandRefused):
    """The container could not run or was ended. The text is a sentence that says why."""


@dataclass(frozen=True)
class Sidecar:
    purpose: str
    """`bench` or `reference`: there is one container of a purpose at a time, vllm-edge-<purpose>."""
    image: str
    """Id of the engine's image."""
    uid: int
    """User id and group id of the engines."""
    program: str
    """Text of a Python program, which runs as `python3 /job/program.py` with the packages of the image."""
    weights: Path | None = None
    """Directory of a checkpoint, read-only at /models/<its name>."""
    sockets: Mapping[str, Path] = field(default_factory=dict)
    """Directories that hold a socket, read-only at /run/<name>; one can connect all the same."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs, given by CDI."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files below /job that only the engines' user may read. Keys belong here: everybody who may use Docker
    sees the environment and the arguments of a container."""
    memory_mib: int = MEMORY_MIB

    @property
    def name(self) -> str:
        return f"vllm-edge-{self.purpose}"


@dataclass(frozen=True)
class Ended:
    status: int
    lines: tuple[str, ...]
    """The last KEPT_LINES lines of its output."""
    output: Mapping[str, bytes]
    """Files that it wrote to /job/out, by name."""


def build_create_arguments(sidecar: Sidecar, job: Path, out: Path) -> list[str]:
    """Return the arguments of `docker create`; `job` and `out` are the directories for /job and /job/out."""
    mounts = [f"type=bind,source={job},target=/job,readonly", f"type=bind,source={out},target=/job/out"]
    if sidecar.weights is not None:
        mounts.append(f"type=bind,source={sidecar.weights},target=/models/{sidecar.weights.name},readonly")
    mounts += [f"type=bind,source={path},target=/run/{name},readonly" for name, path in sidecar.sockets.items()]
    environment = {
        **{
            "HOME": "/tmp",
            "USER": ENGINE_USER,
            "LOGNAME": ENGINE_USER,
            "XDG_CACHE_HOME": "/tmp/.cache",
            "VLLM_CACHE_ROOT": "/tmp/vllm",
            "HF_HUB_OFFLINE": "1",
        },
        **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"},
        **{"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **sidecar.environment},
    }
    return [
        f"--name={sidecar.name}",
        f"--label={LABEL_SIDECAR}={sidecar.purpose}",
        f"--user={sidecar.uid}:{sidecar.uid}",
        *("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--userns=host"),
        *(f"--device=nvidia.com/gpu={uuid}" for uuid in sidecar.gpus),
        *(f"--memory={sidecar.memory_mib}m", f"--memory-swap={sidecar.memory_mib}m", "--oom-score-adj=1000"),
        *("--pids-limit=2048", "--shm-size=1g", "--tmpfs=/tmp:exec,mode=1777,size=4g"),
        *(f"--ulimit=fsize={OUTPUT_BYTES}", "--ulimit=core=0:0"),
        *(f"--mount={mount}" for mount in mounts),
        *(f"--env={name}={value}" for name, value in environment.items()),
        *("--log-driver=json-file", "--log-opt=max-size=16m", "--entrypoint=python3", "--workdir=/tmp"),
        sidecar.image,
        "/job/program.py",
    ]


@contextlib.contextmanager
def _make_directories(sidecar: Sidecar, paths: HostPaths) -> Iterator[tuple[Path, Path]]:
    """Make the directories of /job, in /run, and of /job/out, on a disk; remove them afterwards."""
    job, out = (root / "companions" / sidecar.purpose for root in (paths.run, paths.state))
    root = os.geteuid() == 0
    for path in (job, out):
        shutil.rmtree(path, ignore_errors=True)
    try:
        for path in (job, out):
            make_directories(path.parent)
            path.parent.chmod(0o700)
            path.mkdir(mode=0o700)
        (job / "out").mkdir()
        for name, content in {"program.py": sidecar.program.encode(), **sidecar.files}.items():
            with name_errors(job / name):
                handle = os.open(job / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
        if root:
            for path in (job, *job.iterdir(), out):
                os.chown(path, sidecar.uid, sidecar.uid)
        yield job, out
    finally:
        for path in (job, out):
            shutil.rmtree(path, ignore_errors=True)


def _read_output(out: Path) -> dict[str, bytes]:
    """Read the files of /job/out; what is no file, or too large, is left out."""
    found: dict[str, bytes] = {}
    for path in sorted(out.iterdir())[:OUTPUT_FILES]:
        with contextlib.suppress(OSError):
            found[path.name] = read_foreign(path, OUTPUT_BYTES)
    return found


def remove_sidecars(docker: DockerEngine, purpose: str) -> list[str]:
    """Remove containers of a purpose that a killed run has left, and return their names.

    Raises DockerAway, DockerRefused: Docker does not answer, or refuses.
    """
    left = [one for one in docker.listed() if one.labels.get(LABEL_SIDECAR) == purpose]
    for container in left:
        with contextlib.suppress(ContainerGone):
            docker.remove(container.id)
    return [container.name for container in left]


def run_sidecar(
    sidecar: Sidecar,
    docker: DockerEngine,
    paths: HostPaths,
    *,
    timeout_s: float,
    on_line: Callable[[str], None] = lambda line: None,
    find_trouble: Callable[[], str] = lambda: "",
) -> Ended:
    """Run the container until its program ends, and return how it ended.

    Args:
        timeout_s: seconds after which it is ended
        on_line: called with each line of the program's output, in a thread
        find_trouble: returns why it has to be ended; empty if it may go on

    Raises:
        SidecarError: it could not run, or was ended
        KeyboardInterrupt: Ctrl-C, or another signal inside `interruptible`
    """
    lines: list[str] = []

    def follow(container: str) -> None:
        """Read the log to its end; where Docker breaks it off, go on after the last time stamp."""
        last: str | None = None
        for attempt in range(FOLLOW_TRIES):
            try:
                for record in docker.logs(container, after=last, follow=True, tail=None):
                    last = record.at
                    lines.append(record.line)
                    del lines[:-KEPT_LINES]
                    on_line(record.line)
                return
            except DockerAway:
                if attempt == FOLLOW_TRIES - 1:
                    raise
                time.sleep(POLL_S)

    try:
        remove_sidecars(docker, sidecar.purpose)
        with _make_directories(sidecar, paths) as (job, out):
            container = docker.create(build_create_arguments(sidecar, job, out))
            try:
                docker.start(container)
                reader = Worker(follow, container)

                def find_any_trouble() -> str:
                    return find_trouble() or (f"its output was lost ({reader.problem})" if reader.problem else "")

                status = _wait(sidecar, docker, container, timeout_s, find_any_trouble)
                reader.join(timeout=10)
                if why := find_any_trouble() or ("its output did not end" if reader.is_alive() else ""):
                    raise SidecarError(f"Container {sidecar.name} ran to its end, but {why}.")
                return Ended(status, tuple(lines), _read_output(out))
            finally:
                with contextlib.suppress(ContainerGone):
                    docker.remove(container)
    except (DockerAway, DockerRefused) as error:
        raise SidecarError(f"Container {sidecar.name} could not run: {error}.") from error
    except OSError as error:
        raise SidecarError(f"The files of container {sidecar.name} cannot be written: {error}.") from error


def _wait(
    sidecar: Sidecar, docker: DockerEngine, container: str, timeout_s: float, find_trouble: Callable[[], str]
) -> int:
    """Wait for the program's end and return its exit status. Raises SidecarError, DockerAway, DockerRefused."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = docker.find(container)
        if found is None:
            why = find_trouble() or "somebody removed it"
            raise SidecarError(f"Container {sidecar.name} was ended: {why}.")
        if found.exit_code is not None:
            if found.oom_killed:
                raise SidecarError(
                    f"The kernel ended container {sidecar.name}: it needed more than its {sidecar.memory_mib} MiB "
                    "of memory, or the host had no more."
                )
            return found.exit_code
        if time.monotonic() >= deadline:
            raise SidecarError(f"Container {sidecar.name} was ended: it did not finish within {timeout_s:.0f} s.")
        if trouble := find_trouble():
            raise SidecarError(f"Container {sidecar.name} was ended: {trouble}.")
        time.sleep(POLL_S)
