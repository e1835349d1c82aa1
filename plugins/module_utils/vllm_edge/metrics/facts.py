# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge run-facts`: writes facts.json every ten seconds and when a switch has ended; and `vllm-edge metrics`."""

from __future__ import annotations

import grp
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

from ..doctor.contract import STATES
from ..engine.sd_notify import Notifier
from ..names import EXPORTER_USER
from ..paths import HostPaths, find_interpreter
from ..system.files import is_locked, make_fresh_name, name_errors, write_fresh
from .gpus import GpuReader
from .reader import HostFacts, Series

FAST_S = 10.0
SLOW_S = 600.0
"""The doctor and the status need more than a second of a core each time."""
LOOK_S = 1.0
"""Seconds between two looks at whether a switch has ended, or a child."""
CHILD_S = 120.0
"""Seconds after which a child is killed: the doctor asks programs that may hang."""
COMMANDS = ("doctor", "status")


def list_figures(name: str, output: IO[bytes]) -> list[Series]:
    """Return what is taken of the JSON that a command has printed."""
    output.seek(0)
    found = json.load(output)
    if name == "status":
        return [("status_problems", len(found["problems"]), {})]
    states = {str(row["check"]): str(row["state"]) for row in found["checks"]}
    series: list[Series] = [("doctor_timestamp_seconds", time.time(), {})]
    series += [("doctor_checks", list(states.values()).count(state), {"state": state}) for state in STATES]
    return series + [("doctor_check", 1, {"check": check, "state": state}) for check, state in states.items()]


class Service:
    def __init__(self, paths: HostPaths, facts: HostFacts, program: Sequence[str]) -> None:
        self.paths, self.facts, self.program = paths, facts, program
        self.asked: Iterator[bool] = iter(())
        """What is left of `ask_commands`."""
        self._idle = True
        self._switch: int | None = None
        self._fast_at = self._slow_at = float("-inf")

    def step(self) -> None:
        """Do what is due. Nothing raises."""
        now, attempt = time.monotonic(), self.facts.attempt
        if attempt("the switch", self._has_switch_ended):
            self._fast_at = self._slow_at = now
        if self._idle and now >= self._slow_at:
            self._slow_at = now + SLOW_S
            attempt("what changes seldom", self.facts.read_seldom)
            self.asked = self.ask_commands()
        if now >= self._fast_at:
            self._fast_at = now + FAST_S
            attempt(f"what goes into {self.paths.facts}", self._write)
        # After the file, whose age the doctor judges: else it would first find that the service which asks it is down.
        came = attempt("doctor and status", next, self.asked, None)
        self._idle = came is None
        if came:
            self._fast_at = now

    def ask_commands(self) -> Iterator[bool]:
        """Run one after the other, each a process with which its memory goes.

        Nobody waits for them: yields again and again, and True where one has ended.
        """
        for name in COMMANDS:
            with os.fdopen(os.memfd_create(name), "rb") as output:
                command = [*self.program, name, "--format", "json"]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)
                deadline = time.monotonic() + CHILD_S
                while process.poll() is None:
                    if time.monotonic() > deadline:
                        process.kill()
                    yield False
                if figures := self.facts.attempt(name, list_figures, name, output):
                    self.facts.slow[name] = figures
            yield True

    def _has_switch_ended(self) -> bool:
        try:
            changed = self.paths.switch_journal.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if changed == self._switch or is_locked(self.paths.switch_lock):
            return False
        self._switch = changed
        return True

    def _write(self) -> None:
        place, text = self.paths.facts, json.dumps(self.facts.read()) + "\n"
        with name_errors(place):
            write_fresh(place, text, 0o640, grp.getgrnam(EXPORTER_USER).gr_gid)
            os.rename(make_fresh_name(place), place)


def list_program(paths: HostPaths) -> list[str]:
    program = [find_interpreter(sys.executable), "-m", f"{__package__.rpartition('.')[0]}.cli"]
    return [*program, "--etc", str(paths.etc), "--state", str(paths.state)]


def run_facts(paths: HostPaths) -> int:
    service = Service(paths, HostFacts(paths, GpuReader().read_gpus), list_program(paths))
    service.step()
    # Whoever starts the unit finds facts: site.yml prints right after it what `status` says.
    Notifier(os.environ.get("NOTIFY_SOCKET")).send(ready=True)
    while True:
        time.sleep(LOOK_S)
        service.step()


def run_metrics(paths: HostPaths) -> int:
    """Print once what the exporter serves, read now."""
    from prometheus_client import generate_latest

    from ..switch.command import refuse_without_write_access
    from .exporter import HostCollector

    if refused := refuse_without_write_access(paths, "metrics"):
        return refused
    facts = HostFacts(paths, GpuReader().read_gpus, say=lambda text: print(text, file=sys.stderr), keep=False)
    facts.read_seldom()
    for _ in Service(paths, facts, list_program(paths)).ask_commands():
        time.sleep(0.1)
    print(generate_latest(HostCollector(facts.read)).decode(), end="")
    return 0
