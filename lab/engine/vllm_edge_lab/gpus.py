# SPDX-License-Identifier: Apache-2.0
"""The simulated GPUs this process can see, and the book of who holds how much of their memory.

A claim is a file whose text is a number of MiB. It counts while some process holds a flock on it, so that it is gone
with the process, however that died. Whoever checks and claims holds a flock on the directory meanwhile: two engines
that start together cannot both take the last gibibyte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
DEFAULT_ROOT = Path("/var/lib/lab-gpu")
# Environment of every process of an engine: which engine it is, as JSON of `identity`.
IDENTITY = "VLLM_EDGE_LAB_ENGINE"


class OutOfMemory(Exception):
    """A claim that does not fit. The message is the one torch prints."""


def lab_root() -> Path:
    return Path(os.environ.get("LAB_GPU_ROOT", DEFAULT_ROOT))


def read_seed() -> str | None:
    """The seed of this host's overheads, see `physics`; None where the host was made without one."""
    file = lab_root() / "seed"
    return file.read_text().strip() if file.is_file() else None


@dataclass(frozen=True)
class Gpu:
    path: Path
    index: int
    uuid: str
    total_mib: int
    reserved_mib: int
    name: str = ""

    @property
    def cuda_total(self) -> int:
        """What CUDA calls total: the driver's reserve is not part of it."""
        return cuda_total_bytes(self.total_mib, self.reserved_mib)


def cuda_total_bytes(total_mib: int, reserved_mib: int) -> int:
    """An L4 shows CUDA 23,659,151,360 bytes of its 23,034 MiB, a bit less than the 22,564 MiB that NVML leaves over."""
    if (total_mib, reserved_mib) == (23034, 470):
        return 23_659_151_360
    return (total_mib - reserved_mib) * MIB


def read_board(path: Path) -> Gpu:
    lines = (line.partition("=") for line in (path / "board").read_text().splitlines() if "=" in line)
    board = {key.strip(): value.strip() for key, _, value in lines}
    memory = int(board["total_mib"]), int(board["reserved_mib"])
    return Gpu(path, int(board["index"]), board["uuid"], *memory, board.get("name", ""))


def visible_gpus(root: Path | None = None) -> list[Gpu]:
    """The GPUs in CUDA's order, here by index; inside a container only those given to it exist."""
    folder = (root or lab_root()) / "gpus"
    paths = [path for path in folder.iterdir() if (path / "board").is_file()] if folder.is_dir() else []
    gpus = [read_board(path) for path in paths if not (path / "faults" / "mig").exists()]
    return select_visible(sorted(gpus, key=lambda gpu: gpu.index), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: positions or UUIDs, and the first unknown one ends the list."""
    if wanted is None:
        return gpus
    chosen: list[Gpu] = []
    for name in wanted.split(","):
        name = name.strip()
        if name.isdecimal() and int(name) < len(gpus):
            chosen.append(gpus[int(name)])
        elif matches := [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]:
            chosen.append(matches[0])
        else:
            break
    return chosen


def fault(gpu: Gpu, name: str) -> str | None:
    """The value of a fault that is set on this GPU for this engine, None where it is not.

    `30,max_model_len=2048` is the value 30 for the engine that was started with `--max-model-len=2048`: an engine that
    takes its place on the same GPU does not meet the fault. Several conditions must all hold.
    """
    try:
        text = (gpu.path / "faults" / name).read_text().strip()
    except OSError:
        return None
    words = [word.strip() for word in text.split(",")]
    engine = json.loads(os.environ.get(IDENTITY, "{}"))
    for word in words:
        key, equals, wanted = word.partition("=")
        if equals and wanted not in engine.get(key, []):
            return None
    return "" if "=" in words[0] else words[0]


def fault_of(gpus: Iterable[Gpu], name: str) -> str | None:
    """The same on the first of several GPUs that has it: what one rank does wrong shows in all of them."""
    return next((value for gpu in gpus if (value := fault(gpu, name)) is not None), None)


def number(text: str | None) -> int:
    """A fault's or claim's number; an empty or half-written one counts as nothing."""
    try:
        return int((text or "").strip())
    except ValueError:
        return 0


def is_held(path: Path) -> bool:
    """Whether some process holds the claim. Asked by trying: a container's /proc/locks shows its own only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def still_releasing(path: Path, seconds: int) -> bool:
    """The fault slow-release: a claim that lost its process counts on for so long after somebody first saw it go."""
    mark = path.with_name(f".released-{path.name}")
    try:
        if not mark.exists() or mark.stat().st_mtime < path.stat().st_ctime:
            mark.touch(mode=0o666)
        return time.time() - mark.stat().st_mtime < seconds
    except OSError:
        return False


def used_mib(gpu: Gpu, own: Path | None = None) -> int:
    """MiB held on the GPU by all but the claim `own`."""
    total = number(fault(gpu, "orphan"))
    slow = fault(gpu, "slow-release")
    for path in (gpu.path / "claims").iterdir():
        if path == own or path.name.startswith("."):
            continue
        if is_held(path) or (slow is not None and still_releasing(path, number(slow))):
            try:
                total += number(path.read_text())
            except OSError:
                continue
    return total


def free_bytes(gpu: Gpu, own: Path | None = None) -> int:
    return gpu.cuda_total - used_mib(gpu, own) * MIB


@contextmanager
def locked(gpu: Gpu) -> Iterator[None]:
    descriptor = os.open(gpu.path / "claims", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / MIB:.2f} MiB"


class Claim:
    """This process's memory on one GPU: grows while the engine starts, ends with the process."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu = gpu
        self.held = 0
        self.path = gpu.path / "claims" / name
        with locked(gpu):
            self._remove_dead()
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # Waits at most for somebody's look at it (is_held): the name is ours alone.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._write(0)

    def _remove_dead(self) -> None:
        if fault(self.gpu, "slow-release") is not None:
            return
        for path in (self.gpu.path / "claims").iterdir():
            # Another user's stay: the directory is sticky, and who else claims there may not know of our lock.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_uid == os.geteuid() and not is_held(path):
                    path.unlink()

    def _write(self, held: int) -> None:
        # Fixed width in one write: no reader ever sees a part of a number.
        os.pwrite(self._descriptor, f"{-(-held // MIB):>10}\n".encode(), 0)
        self.held = held

    @property
    def free(self) -> int:
        return free_bytes(self.gpu, self.path) - self.held

    def grow(self, amount: int, device: int) -> None:
        """Take `amount` more bytes, or say what torch says when they are not there."""
        with locked(self.gpu):
            free = self.free
            if amount > free:
                raise OutOfMemory(
                    f"CUDA out of memory. Tried to allocate {gib(amount)}. GPU {device} has a total capacity of "
                    f"{gib(self.gpu.cuda_total)} of which {gib(max(free, 0))} is free. Including non-PyTorch memory, "
                    f"this process has {gib(self.held)} memory in use."
                )
            self._write(self.held + amount)
