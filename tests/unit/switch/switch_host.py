# SPDX-License-Identifier: Apache-2.0
"""A host on which the program itself switches and recovers, with the faults that a test plans."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation import committed, store
from ansible.module_utils.vllm_edge.generation.model import Choice, Generation, Origin
from ansible.module_utils.vllm_edge.switch import journal as journal_module
from ansible.module_utils.vllm_edge.switch import rollback, run
from ansible.module_utils.vllm_edge.switch.journal import history, holder, read_journal
from ansible.module_utils.vllm_edge.switch.model import EXITS, Exit, Journal, Moves, PhaseFailed, Result
from fake_machine import OLD, host, new_host, unlike
from generations import put


class Killed(BaseException):
    """Stands for SIGKILL where the state of the process does not matter."""


class SwitchHost:
    """OLD serves as generation 1, NEW lies there as generation 2; the program switches, and faults come as planned.

    With `first` nothing was ever committed, and `new` is OLD as generation 1. An action is a phase, or `hook <name>`.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, first: bool = False) -> None:
        self.monkeypatch = monkeypatch
        self.old: Generation | None = None
        if first:
            self.machine = new_host(root)
            self.new = store.load(self.machine.paths, put(self.machine.paths, OLD))
        else:
            self.machine, self.old, self.new = host(root)
        self.paths = self.machine.paths
        self.ballast = self.paths.state / ".switch.ballast"
        self.machine.before = functools.partial(self._act, "before")
        self.machine.after = functools.partial(self._act, "after")
        commit = committed.commit

        def commit_with_faults(generation: Generation, *arguments: Any, **named: Any) -> None:
            self.machine.before("commit", generation.number)
            commit(generation, *arguments, **named)
            self.machine.after("commit", generation.number)

        monkeypatch.setattr(committed, "commit", commit_with_faults)
        monkeypatch.setattr(run, "SwitchedHost", lambda paths: self.machine)
        monkeypatch.setattr(rollback, "DECIDE_POLL_S", 0.0)
        monkeypatch.setattr(journal_module, "LOCK_PATIENCE_S", 0.05)
        monkeypatch.setattr(os, "fsync", lambda handle: None)  # durability is shown in test_journal.py
        self._events: list[tuple[str, str, int | None, Callable[[], object]]] = []

    # -- faults

    def _act(self, moment: str, action: str, number: int | None) -> None:
        for *when, act in list(self._events):
            if when == [moment, action, number]:
                act()

    def at(
        self, action: str, act: Callable[[], object], towards: Generation | None = None, *, moment: str = "before"
    ) -> None:
        """Do something each time before (or `after`) an action towards the new generation (or another one)."""
        self._events.append((moment, action, (towards or self.new).number, act))

    def fail(
        self,
        action: str,
        error: str | BaseException,
        towards: Generation | None = None,
        *,
        moment: str = "before",
        once: bool = False,
    ) -> None:
        """Let an action fail; a text is that of a failed phase. After a fault that comes `once` there are no others."""

        def act() -> None:
            if once:
                self.calm()
            raise PhaseFailed(error) if isinstance(error, str) else error

        self.at(action, act, towards, moment=moment)

    def calm(self) -> None:
        """No more faults."""
        self._events.clear()

    # -- the program

    def switch(self, to: Generation | int | None = None, origin: Origin = "-e", by: str = "site.yml by alice") -> int:
        """`vllm-edge run-switch`, to the new generation or another one; its exit status."""
        number = to if isinstance(to, int) else (to or self.new).number
        return run.run_switch(self.paths, number, Choice(origin, "nvfp4-tp2", by))

    def recover(self, *, boot: bool = False) -> int:
        return run.run_recover(self.paths, boot=boot)

    def stop(self, *engines: str) -> None:
        """By hand, without a switch."""
        self.machine.towards = 1
        self.machine.stop(Moves(stop=engines))

    def kill(
        self, action: str, towards: Generation | None = None, *, moment: str = "before", recovery: bool = False
    ) -> None:
        """A switch, or its recovery, whose program is killed before an action (or `after` it)."""
        self.fail(action, Killed(), towards, moment=moment, once=True)
        with pytest.raises(Killed):
            self.recover() if recovery else self.switch()
        journal = read_journal(self.paths)
        assert journal is not None and journal.result is None

    def ends(self, result: Result, to: Generation | int | None = None, *, whole: bool = True, **asked: str) -> Journal:
        """Switch; assert the result and, if it is `whole` and not `failed`, that a generation serves in full."""
        status = self.switch(to, **asked)
        journal = self.journal
        assert (status, journal.result) == (EXITS[result], result), journal.message
        there = to if isinstance(to, Generation) else self.new
        if whole and result is not Result.FAILED:
            assert unlike(self.machine, there if EXITS[result] in (Exit.OK, Exit.OVER_BUDGET) else self.old) == []
        return journal

    @property
    def journal(self) -> Journal:
        """The final journal, which has to be whole, in the history too, and with its lock free."""
        journal = read_journal(self.paths)
        assert journal is not None and journal.result is not None
        assert journal.ended_at and journal.seconds is not None and journal.seconds >= 0
        assert journal.message and "\n" not in journal.message
        assert all(record.outcome is not None and record.seconds is not None for record in journal.phases)
        assert journal in history(self.paths)
        assert holder(self.paths) is None
        assert not self.ballast.exists()
        return journal

    # -- what is there

    @property
    def log(self) -> list[str]:
        entries: list[str] = self.machine.load()["log"]
        return entries

    @property
    def units(self) -> dict[str, dict[str, Any]]:
        units: dict[str, dict[str, Any]] = self.machine.load()["units"]
        return units

    def pids(self, *names: str) -> list[int]:
        """Others after a restart."""
        return [self.units[name]["pid"] for name in names]

    def unlike(self, generation: Generation | None) -> list[str]:
        return unlike(self.machine, generation)
