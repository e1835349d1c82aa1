#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Processor time of playbooks/plan.yml over that of the same command without its tasks, pair by pair.

    planning_time.py [--pairs 7] [--inventory inventories/xr7620]

`--tags nothing` leaves Ansible's start, the inventory and the variables, and runs no task; the difference is the plan
of every profile, with the tasks that check and print it. Each pair goes the other way round than the one before it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NOTHING = ("--tags", "nothing")


def cpu_seconds(command: Sequence[str]) -> float:
    """Processor time of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def line(name: str, seconds: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--inventory", default="inventories/xr7620")
    arguments = parser.parse_args()
    plan = ["ansible-playbook", "-i", arguments.inventory, "playbooks/plan.yml"]
    pairs = []
    for number in range(arguments.pairs):
        first, second = (plan, [*plan, *NOTHING]) if number % 2 else ([*plan, *NOTHING], plan)
        one, other = cpu_seconds(first), cpu_seconds(second)
        pairs.append((one, other) if number % 2 else (other, one))
    print(f"| {arguments.pairs} pairs | median, s of CPU | range |\n|---|---|---|")
    print(line("plan.yml", [whole for whole, _ in pairs]))
    print(line("the same without tasks", [start for _, start in pairs]))
    print(line("planning: the difference in each pair", [whole - start for whole, start in pairs]))


if __name__ == "__main__":
    main()
