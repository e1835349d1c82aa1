# SPDX-License-Identifier: Apache-2.0
"""`make test`: every part of the tests in lanes, with minutes and CPU seconds of each, and those of all containers.

A lane that is free takes the next part. Two lanes have the hosts whose engines often wait for each other or for a
deadline. A third one has what needs no host with engines; linters and unit tests compute with what the others leave.
A part that takes longer than its limit is ended, with everything that it started, so that the others go on. Each part's
output is printed when it ends; the last lines say how long each took, which failed or hung, and what was left out for
want of time.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "test"
LIMIT_S = 75 * 60
"""`make test` begins nothing later and ends what still runs, so that it has ended itself, and cleaned up, after 80
minutes: CI ends a run after 90, and nobody would see how it was going."""
TERM_S = 30
"""Seconds that a part has to end after SIGTERM."""
CLEAN_S = 180
"""Seconds for the removal of what a part left that was ended."""
THOROUGH = 4
"""`make test-all` gives each part so many times as long, and has no limit for all of them."""
LANES = ("engines", "engines", "beside")
MAKE = ["make", "--no-print-directory"]
BESIDE = ["nice", "-n", "10", *MAKE]
FAILURES = re.compile(r"^(FAILED|ERROR) |^fatal: |^make.*Error|CRITICAL")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FRAME = re.compile(r"^ *│ ", re.MULTILINE)
"""What Molecule writes before each line of another program."""


@dataclass(frozen=True)
class Part:
    """One part of the tests."""

    name: str
    command: Sequence[str]
    limit_s: float
    """Seconds after which it hangs: about twice what it takes on two slow processors, beside the others."""
    lane: str = "engines"
    scenario: str = ""
    """Molecule's, whose hosts are removed if the part is ended."""
    thorough: bool = False
    """Left to `make test-all`."""


PARTS = (
    # The longest first, so that the lanes end together. The first makes the lab's images, for which the others wait.
    Part(
        "molecule",
        ["bash", "-c", "python -m lab images && make --no-print-directory molecule"],
        70 * 60,
        scenario="default",
    ),
    Part("switch", [*MAKE, "switch"], 55 * 60, scenario="switch"),
    Part("airgap", [*MAKE, "airgap"], 40 * 60, scenario="airgap"),
    Part("fleet", [*MAKE, "fleet"], 40 * 60, scenario="fleet", thorough=True),
    Part("box", [*MAKE, "box"], 30 * 60, scenario="box", thorough=True),
    Part("lint", [*BESIDE, "lint"], 30 * 60, lane="beside"),
    Part("platforms", [*MAKE, "platforms"], 60 * 60, lane="beside", scenario="platforms"),
    Part("integration", [*MAKE, "integration"], 30 * 60, lane="beside"),
    # The last: on two processors it takes what the others leave, and both of them once they have ended.
    Part("unit", [*BESIDE, "unit"], 55 * 60, lane="beside"),
)


def container_seconds(root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU seconds that the containers of this machine have used, those among them that are gone.

    Their control groups are in `docker` or, where systemd makes them, in `system.slice`, which counts services, too.
    """
    spent = 0.0
    for group in ("docker", "system.slice"):
        for file, second in ((root / group / "cpu.stat", 1e6), (root / "cpuacct" / group / "cpuacct.usage", 1e9)):
            if file.exists() and (found := re.search(r"\d+", file.read_text())):
                spent += int(found[0]) / second
    return spent


# ---- lanes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a part ended."""

    part: Part
    status: int
    seconds: float
    cpu_seconds: float
    """Of its own processes."""
    cut: str = ""
    """That it was ended, and why; empty if it ended by itself."""


def signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of a group; returns whether there are any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def end_group(group: int) -> None:
    """End all processes of a group, those by force that are there TERM_S seconds later."""
    signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    while signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    signal_group(group, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], limit_s: float) -> tuple[resource.struct_rusage, bool]:
    """Wait for the leader of a process group, whose group is ended after so many seconds.

    Returns:
        what it used of the machine, and whether it was ended
    """
    ended, late = threading.Event(), threading.Event()

    def watch() -> None:
        if not ended.wait(limit_s):
            late.set()
            end_group(process.pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    return used, late.is_set()


@dataclass
class Run:
    """The parts of one run, those that ended and those that were not begun."""

    left: list[Part]
    logs: Path = LOGS
    limit_s: float = LIMIT_S
    times: float = 1
    """How many times its limit each part may take."""
    began: float = field(default_factory=time.monotonic)
    spent_before: float = field(default_factory=container_seconds)
    ended: list[Ended] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)
    """Process groups of the parts that run."""
    stopped: int = 0
    """The signal that ended the run."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, lane: str) -> None:
        """Run the parts of a lane one after the other, as long as there are any, and time; a lane for engines that has
        none left helps the other one."""
        while True:
            with self.lock:
                own = (part for part in self.left if part.lane == lane)
                part = next(own, next(iter(self.left), None) if lane == "engines" else None)
                if part is None or time.monotonic() - self.began > self.limit_s:
                    return
                self.left.remove(part)
                print(f"==> {part.name} begins after {(time.monotonic() - self.began) / 60:.1f} minutes", flush=True)
            ended = self.run(part)
            with self.lock:
                self.ended.append(ended)
                print((self.logs / f"{part.name}.log").read_text(errors="replace"), end="")
                print(f"<== {row(ended)}", flush=True)

    def run(self, part: Part) -> Ended:
        began = time.monotonic()
        limit_s = part.limit_s * self.times
        cut = f"HUNG: ended after its limit of {limit_s / 60:.0f} minutes"
        if (left_s := self.began + self.limit_s - began) < limit_s:
            limit_s, cut = left_s, f"ENDED, because {self.limit_s / 60:.0f} minutes had passed for all parts"
        with (self.logs / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
            self.groups.add(process.pid)
            if self.stopped:  # since it was begun
                signal_group(process.pid, self.stopped)
            used, late = wait_for(process, limit_s)
            self.groups.discard(process.pid)
            if late and part.scenario:
                words = ["molecule", "destroy", "--scenario-name", part.scenario]
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, timeout=CLEAN_S, check=False)
        cpu = used.ru_utime + used.ru_stime
        return Ended(part, process.returncode, time.monotonic() - began, cpu, cut if late else "")

    def all(self) -> int:
        """Run every part; returns the exit status of the whole."""
        lanes = [threading.Thread(target=self.take, args=(lane,)) for lane in LANES]
        try:
            for lane in lanes:
                lane.start()
            # Not by join(): Python regards a thread whose join() was interrupted as ended.
            while any(lane.is_alive() for lane in lanes):
                time.sleep(0.1)
        except KeyboardInterrupt as asked:
            # The parts are in groups of their own, which the terminal does not reach.
            self.left.clear()
            self.stopped = asked.args[0] if asked.args else signal.SIGINT
            for group in list(self.groups):
                signal_group(group, self.stopped)
            raise
        print("\n".join(["==> how each part ended", *self.summary()]), flush=True)
        return 1 if self.left or any(ended.status or ended.cut for ended in self.ended) else 0

    def summary(self) -> list[str]:
        """A line for each part, and under a failed one what pytest, Ansible and make say of the failure."""
        lines = []
        for ended in self.ended:
            lines.append(row(ended))
            if ended.status or ended.cut:
                log = (self.logs / f"{ended.part.name}.log").read_text(errors="replace")
                text = FRAME.sub("", COLOURS.sub("", log))
                lines += [f"    {line[:300]}" for line in text.splitlines() if FAILURES.search(line)]
        if self.left:
            names = ", ".join(part.name for part in self.left)
            lines.append(f"LEFT OUT, because {self.limit_s / 60:.0f} minutes had passed: {names}")
        return [*lines, f"{'containers':<26} {container_seconds() - self.spent_before:6.0f} CPU seconds"]


def row(ended: Ended) -> str:
    verdict = ended.cut or ("passed" if ended.status == 0 else f"FAILED, exit status {ended.status}")
    return f"{ended.part.name:<12} {ended.seconds / 60:5.1f} minutes {ended.cpu_seconds:6.0f} CPU seconds  {verdict}"


def interrupt(number: int, frame: FrameType | None) -> None:
    """Do for other signals what Python does for Ctrl-C."""
    raise KeyboardInterrupt(number)


def main() -> int:
    """Make room for the logs, and run everything."""
    sys.path.insert(0, str(ROOT))
    LOGS.mkdir(parents=True, exist_ok=True)
    for log in LOGS.glob("*.log"):
        log.unlink()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, interrupt)
    thorough = bool(os.environ.get("VLLM_EDGE_THOROUGH"))
    limit_s, times = (math.inf, THOROUGH) if thorough else (LIMIT_S, 1)
    parts = [part for part in PARTS if thorough or not part.thorough]
    return Run(parts, LOGS, limit_s, times).all()


if __name__ == "__main__":
    sys.exit(main())
