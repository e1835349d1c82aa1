# SPDX-License-Identifier: Apache-2.0
"""One reading of every GPU within a deadline, whatever hangs.

No NVML call can be interrupted, and one that hangs in the kernel cannot even be killed. A process that keeps NVML open
stands in the way of `nvidia-smi --gpu-reset` and of unloading the module, and keeps the library of the driver that was
there when it began. So each round has a child of its own, which opens NVML, reads each GPU in a thread of its own, and
writes a line for each as it comes. The parent has no thread, never calls NVML, and waits no longer than the deadline.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..system.nvml import MIB, NvmlFailure, NvmlSession, ProcessReading, open_nvml
from ..system.process import engine_uid, is_hidden, uid_of
from ..system.threads import Worker

Row = dict[str, Any]
"""One GPU. Always: index (NVML's), uuid ("" if it was never told), up, why (NVML's error code, if it is not up or a
figure failed). As far as NVML reports them: name, bus, total_bytes, used_bytes, foreign_bytes, and the fields of
StateReading and HealthReading."""
KILLED_S = 0.1
"""Seconds that the kernel gets to end a child that is late; the round ends without it after them."""
FORGOTTEN_S = 30
"""Seconds after which a child ends itself, should its parent be gone."""


class GpuReader:
    def __init__(self) -> None:
        self._known: dict[str, Row] = {}
        """uuid, index, name and bus of every GPU that has answered, by UUID."""
        self._hanging: dict[int, set[int]] = {}
        """The GPUs that a child was reading, by its pid; none if opening or closing NVML is what hangs."""
        with contextlib.suppress(ImportError):  # each child says so
            importlib.import_module("pynvml")  # once, and not in each child

    def read_gpus(self, deadline_s: float = 2.0) -> tuple[list[Row], str]:
        """Return a row for each GPU, by index, and the error code of NVML as a whole, "" if it answers.

        GPUs that a former round's child still hangs on are not asked, and not up.
        """
        self._hanging = {pid: gpus for pid, gpus in self._hanging.items() if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if not all(self._hanging.values()):
            return self._complete([], "TIMEOUT"), "TIMEOUT"
        skipped = {index for indices in self._hanging.values() for index in indices}
        child, source = _start_child(skipped)
        lines: list[dict[str, Any]] = []
        late, count = True, None
        try:
            lines, late = _read_lines(source, time.monotonic() + deadline_s)
        finally:
            os.close(source)
            count = next((line["count"] for line in lines if "count" in line), None)
            rows = [line for line in lines if "index" in line]
            silent = set(range(count or 0)) - {row["index"] for row in rows}
            if not _kill(child):
                self._hanging[child] = silent - skipped
        why = "TIMEOUT" if late else "UNKNOWN"  # one that ended before it said all has crashed
        error: str = next((line["error"] for line in lines if "error" in line), "" if count is not None else why)
        unread = {index: "TIMEOUT" if index in skipped else why for index in silent}
        rows += [{"index": index, "uuid": "", "up": False, "why": said} for index, said in unread.items()]
        return self._complete(rows, error or "NOT_FOUND"), error

    def _complete(self, rows: list[Row], why: str) -> list[Row]:
        """Name the GPUs that do not tell who they are, and add those that are known and not there, for `why`."""
        told = {row["uuid"]: {key: row[key] for key in ("index", "uuid", "name", "bus")} for row in rows if row["uuid"]}
        self._known |= told
        absent = {known["index"]: known for uuid, known in self._known.items() if uuid not in told}
        rows = [row if row["uuid"] else row | absent.pop(row["index"], {}) for row in rows]
        rows += [{**known, "up": False, "why": why} for known in absent.values()]
        return sorted(rows, key=lambda row: (row["index"], row["uuid"]))


def _start_child(skipped: Collection[int]) -> tuple[int, int]:
    """Return the pid of a child that reads GPUs, and a descriptor with its lines."""
    source, sink = os.pipe()
    try:
        if (child := os.fork()) == 0:
            try:
                _detach(sink)
                _write_gpus(sink, skipped)
            finally:
                os._exit(0)
    except OSError:
        os.close(source)
        raise
    finally:
        os.close(sink)
    return child, source


def _detach(sink: int) -> None:
    """Keep nothing of the parent's: who hangs would hold its locks and its output."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(FORGOTTEN_S)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, sink)
    os.closerange(sink + 1, os.sysconf("SC_OPEN_MAX"))


def _write_gpus(sink: int, skipped: Collection[int]) -> None:
    def write(line: Mapping[str, Any]) -> None:
        """Write in one piece, as the kernel does up to PIPE_BUF bytes, so that threads need no lock."""
        os.write(sink, json.dumps(line).encode() + b"\n")

    try:
        with open_nvml(identify=False) as session:
            write({"count": session.count})
            wanted = set(range(session.count)) - set(skipped)
            for worker in [Worker(lambda index: write(_read_gpu(session, index)), index) for index in wanted]:
                worker.join()
    except NvmlFailure as failure:
        write({"error": failure.code})
    except ImportError:
        write({"error": "LIBRARY_NOT_FOUND"})


def _read_gpu(session: NvmlSession, index: int) -> Row:
    row: Row = {"index": index, "uuid": "", "up": False, "why": ""}
    try:
        gpu = session.identify(index)
        row |= {"uuid": gpu.uuid, "name": gpu.name, "bus": gpu.pci_bus_id}
        memory = session.read_gpu(gpu)
        row |= {"total_bytes": memory.total_mib * MIB, "used_bytes": memory.used_mib * MIB}
        row["foreign_bytes"] = _sum_foreign(memory.processes)
    except NvmlFailure as failure:
        row["why"] = failure.code
    # A card answers if it tells its memory; one that shares the host's says that it has none of its own.
    row["up"] = row["why"] in ("", "NOT_SUPPORTED")
    for read in (session.read_state, session.read_health) if row["up"] else ():
        try:
            row |= vars(read(gpu))
        except NvmlFailure as failure:
            row["why"] = failure.code
    return {name: value for name, value in row.items() if value is not None}


def _sum_foreign(processes: Iterable[ProcessReading] | None) -> int | None:
    """Return the bytes of processes that do not run as the engines' user; None if a part of them is not known."""
    sizes: list[int | None] = [None] if processes is None else []
    ours = engine_uid()
    for process in processes or ():
        user = uid_of(process.pid)
        if user is None and is_hidden(process.pid):
            return None
        if user not in (None, ours):
            sizes.append(process.used_mib)
    known = [size for size in sizes if size is not None]
    return sum(known) * MIB if len(known) == len(sizes) else None


def _read_lines(source: int, until: float) -> tuple[list[dict[str, Any]], bool]:
    """Return what a child wrote, and whether it did not end in time."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    text, late = b"", True
    while late and poll.poll(max(0.0, until - time.monotonic()) * 1000):
        chunk = os.read(source, 65_536)
        text, late = text + chunk, bool(chunk)
    return [json.loads(line) for line in text.splitlines()], late


def _kill(child: int) -> bool:
    """Kill and reap a child. Returns False if it does not end."""
    os.kill(child, signal.SIGKILL)
    until = time.monotonic() + KILLED_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
