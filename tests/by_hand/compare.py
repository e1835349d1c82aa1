#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Downtime of a switch by vllm-edge held against that by a hand-written script, pair by pair, on the host itself.

    compare.py [--pairs 7] A B      numbers of two generations; takes some five loads of the engines per pair, as root

Each pair, on a host that is left serving: `vllm-edge switch` from one generation to the other; the same by switch.sh;
and by switch.sh back again, which tells how far the script is from itself. The next pair goes the other way. What is
measured is the time for which a client of one role had no answer (role_client.py). Engines' loads are taken from their
own logs: from the start of the container to "Application startup complete".
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import role_client

GENERATIONS = Path("/var/lib/vllm-edge/generations")
ACTIVE = Path("/var/lib/vllm-edge/active-profile.json")
SCRIPT = HERE / "switch.sh"
LOADED = "Application startup complete"
MOST_RATIO = 1.1
MOST_OVERHEAD_S = 10.0
BACK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Run:
    """One switch, whoever did it."""

    downtime_s: float
    load_s: float
    """Of the slowest new engine."""

    @property
    def overhead_s(self) -> float:
        return self.downtime_s - self.load_s


@dataclass(frozen=True)
class Pair:
    """The same switch by vllm-edge and by the script, and the script's way back."""

    ours: Run
    script: Run
    again: Run

    @property
    def ratio(self) -> float:
        return self.ours.downtime_s / self.script.downtime_s

    @property
    def script_to_itself(self) -> float:
        return self.again.downtime_s / self.script.downtime_s


# ---- what it comes to -------------------------------------------------------------------------------------------


def range_of_script(pairs: Sequence[Pair]) -> tuple[float, float]:
    """How far the script is from itself, in both directions: neither of its two runs is the measure of the other."""
    ratios = [ratio for pair in pairs for ratio in (pair.script_to_itself, 1 / pair.script_to_itself)]
    return min(ratios), max(ratios)


def verdict(pairs: Sequence[Pair]) -> tuple[bool, list[str]]:
    """Whether vllm-edge is as quick as the script, and adds no more than it may; the sentences that say so."""
    ratios = [pair.ratio for pair in pairs]
    median = statistics.median(ratios)
    low, high = range_of_script(pairs)
    quick = median <= max(MOST_RATIO, high)
    overheads = [pair.ours.overhead_s for pair in pairs]
    lean = max(overheads) <= MOST_OVERHEAD_S
    script = [pair.script.overhead_s for pair in pairs]
    return quick and lean, [
        f"downtime by vllm-edge / by the script: median {median:.2f}, range {min(ratios):.2f} to {max(ratios):.2f}; "
        f"the script against itself: {low:.2f} to {high:.2f}; "
        f"{'good' if quick else 'TOO SLOW'}: at most {MOST_RATIO} or within that range is wanted",
        f"downtime beyond the load of the slowest new engine: median {statistics.median(overheads):.1f} s, "
        f"range {min(overheads):.1f} to {max(overheads):.1f} s (script: median {statistics.median(script):.1f} s); "
        f"{'good' if lean else 'TOO MUCH'}: at most {MOST_OVERHEAD_S:.0f} s is wanted",
    ]


def row(number: int, pair: Pair) -> list[str]:
    cells = [f"{run.downtime_s:.1f} ({run.load_s:.1f})" for run in (pair.ours, pair.script, pair.again)]
    return [str(number), *cells, f"{pair.ratio:.2f}", f"{pair.script_to_itself:.2f}", f"{pair.ours.overhead_s:.1f} s"]


HEADING = (
    "pair",
    "vllm-edge (load)",
    "script (load)",
    "script again (load)",
    "ratio",
    "script/itself",
    "added to the load",
)


# ---- the host ---------------------------------------------------------------------------------------------------


def run(*words: str | Path, check: bool = True) -> str:
    done = subprocess.run([str(word) for word in words], check=False, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def engines(generation: int) -> list[str]:
    return sorted(path.name for path in (GENERATIONS / str(generation) / "engines").iterdir())


def ports(*generations: int) -> list[int]:
    """Of all engines of the generations."""
    files = [
        GENERATIONS / str(number) / "engines" / name / "docker-create"
        for number in generations
        for name in engines(number)
    ]
    published = [line for file in files for line in file.read_text().splitlines() if line.startswith("--publish=")]
    return sorted({int(line.split(":")[-2]) for line in published})


def committed() -> int:
    return int(json.loads(ACTIVE.read_text())["generation"])


def moment(text: str) -> float:
    """Docker's time stamps have nanoseconds."""
    return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00").timestamp()


def load_s(engine: str) -> float:
    """From the start of the container to the line by which vLLM says that it serves."""
    container = f"vllm-{engine}"
    started = moment(run("docker", "inspect", "--format", "{{.State.StartedAt}}", container).strip())
    done = subprocess.run(["docker", "logs", "--timestamps", container], check=True, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if LOADED in line]
    if not lines:
        raise SystemExit(f"the log of {container} has no line {LOADED!r}")
    return moment(min(line.split()[0] for line in lines)) - started


def measured(role: str, at: Sequence[int], new: int, act: Callable[[], object]) -> Run:
    """What a client of the role sees while `act` goes on."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        command = [
            sys.executable,
            role_client.__file__,
            "watch",
            "--log",
            str(log),
            "--roles",
            role,
            "--interval",
            "0.2",
        ]
        with subprocess.Popen([*command, "--ports", *map(str, at)]) as client:
            try:
                answered(log, 0.0)
                act()
                answered(log, time.monotonic())
            finally:
                client.send_signal(signal.SIGTERM)
                client.wait(30)
        found = role_client.gaps(role_client.read(log).asked)
    if not found:
        raise SystemExit(f"{role} was answered all the time: nothing was switched")
    downtime_s = sum(gap.seconds or 0.0 for gap in found)
    return Run(round(downtime_s, 2), round(max(load_s(engine) for engine in engines(new)), 2))


def answered(log: Path, since_s: float) -> None:
    """Wait for a good answer to a question that was asked since then."""
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < deadline:
        if (
            log.exists()
            and log.read_text()
            and any(one.ok and one.monotonic_s >= since_s for one in role_client.read(log).asked)
        ):
            return
        time.sleep(0.1)
    raise SystemExit(f"no answer for {BACK_TIMEOUT_S:.0f} s: see `vllm-edge status`")


def by_hand(new: int, old: int | None) -> None:
    run(SCRIPT, GENERATIONS / str(new), *([GENERATIONS / str(old)] if old is not None else []))


def take_from_systemd(generation: int) -> None:
    run("systemctl", "stop", "vllm-edge.target", *[f"vllm-{engine}.service" for engine in engines(generation)])
    remove(generation)


def give_to_systemd(generation: int) -> None:
    run("systemctl", "start", "vllm-edge.target", *[f"vllm-{engine}.service" for engine in engines(generation)])


def remove(*generations: int) -> None:
    for name in sorted({name for number in generations for name in engines(number)}):
        run("docker", "rm", "--force", f"vllm-{name}", check=False)


def one_pair(role: str, old: int, new: int) -> Pair:
    """Begins and ends with systemd's engines: of `old`, and of `new`."""
    at = ports(old, new)
    ours = measured(role, at, new, lambda: run("vllm-edge", "switch", str(new)))
    take_from_systemd(new)
    try:
        by_hand(old, None)
        script = measured(role, at, new, lambda: by_hand(new, old))
        again = measured(role, at, old, lambda: by_hand(old, new))
    finally:
        remove(old, new)
        give_to_systemd(new)
    return Pair(ours, script, again)


def main() -> int:
    parser = argparse.ArgumentParser(description="Downtime by vllm-edge against that by a hand-written script.")
    parser.add_argument("generations", nargs=2, type=int, metavar="GENERATION")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--role", default="architect")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    # Ended in the middle, it still gives the engines back to systemd.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    old, new = given.generations
    if committed() not in (old, new):
        raise SystemExit(f"generation {committed()} is committed, neither {old} nor {new}: switch to one of them first")
    if committed() == new:
        old, new = new, old
    pairs: list[Pair] = []
    for number in range(1, given.pairs + 1):
        pairs.append(one_pair(given.role, old, new))
        print(
            f"{old} -> {new}: "
            + ", ".join(f"{name} {cell}" for name, cell in zip(HEADING, row(number, pairs[-1]), strict=True))
        )
        sys.stdout.flush()
        old, new = new, old
    good, sentences = verdict(pairs)
    print(
        "\n".join(
            [
                "",
                *role_client.table([row(number, pair) for number, pair in enumerate(pairs, 1)], HEADING),
                "",
                *sentences,
            ]
        )
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
