# SPDX-License-Identifier: Apache-2.0
"""The switch program killed by SIGKILL at every phase, before and after it acted, on the way forward, on the way back,
and in the recovery: a new process always ends with one of the two generations serving completely, verified."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation import committed as generation_committed
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.switch.journal import history, holder, read_journal
from ansible.module_utils.vllm_edge.switch.model import BACK_PHASES, HARMLESS, ONWARD, PHASES, Phase, Result

HERE = Path(__file__).resolve().parent

from fake_world import OLD, FakeWorld, host, new_host, put, unlike

MOMENTS = ("journalled", "acted")
TITLE = "The switch program killed by SIGKILL (phase, killed when, who served afterwards)"


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory where there is room for that: what is synced to a disk is shown in test_journal.py."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="vllm-edge-killed-", dir=memory if os.access(memory, os.W_OK) else None))
    yield place / "host"
    shutil.rmtree(place)


def drive(world: FakeWorld, what: str, **asked: Any) -> int:
    """A process of its own; its exit status, negative where a signal ended it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "switch_driver.py"), str(world.file.parent), what, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def kill(world: FakeWorld, what: str, **asked: Any) -> None:
    assert drive(world, what, **asked) == -signal.SIGKILL
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is None, "it was killed too late"
    assert holder(world.paths) is None, "the kernel frees the lock"


def recover(world: FakeWorld) -> float:
    """Seconds that a recovery took."""
    began = time.monotonic()
    assert drive(world, "recover") == 0
    return time.monotonic() - began


def judged(world: FakeWorld, expected: Result) -> None:
    """The journal is finished, in the history, once; the lock is free; what is committed serves, and nothing else."""
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is expected, journal
    assert [item.id for item in history(world.paths)] == [journal.id]
    assert holder(world.paths) is None
    assert not (world.paths.state / ".switch.ballast").exists()
    now = generation_committed.committed(world.paths)
    serving = store.load(world.paths, now.generation) if now else None
    assert unlike(world, serving) == []


def verified(world: FakeWorld, number: int) -> None:
    """Asked and measured by the recovery itself, after everything that it started."""
    last = {entry: place for place, entry in enumerate(world.load()["log"])}
    for action in ("canary", "measure"):
        assert last[f"{action}@{number}"] > last[f"start@{number}"]


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Callable[[FakeWorld, str, str, float], None]:
    """A line of the table at the end of the run."""

    def add(world: FakeWorld, where: str, when: str, seconds: float) -> None:
        now = generation_committed.committed(world.paths)
        who = f"generation {now.generation} ({now.profile}) in full" if now else "nobody, as before"
        record_property(TITLE, [where, when, f"{who}; recovery took {seconds:.1f} s"])

    return add


Row = Callable[[FakeWorld, str, str, float], None]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_killed_on_the_way_forward(root: Path, row: Row, phase: Phase, moment: str) -> None:
    world, old, new = host(root)
    kill(world, "switch", number=new.number, kill=[phase, new.number, moment])
    seconds = recover(world)
    committed = phase in ONWARD or (phase is Phase.COMMIT and moment == "acted")
    if phase in HARMLESS:
        judged(world, Result.REFUSED)
        assert not any(entry.startswith("stop") for entry in world.load()["log"])
    else:
        judged(world, Result.COMMITTED if committed else Result.ROLLED_BACK)
        verified(world, new.number if committed else old.number)
    now = generation_committed.committed(world.paths)
    assert now is not None and now.generation == (new.number if committed else old.number)
    row(world, phase, f"forward, {moment}", seconds)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", BACK_PHASES)
def test_killed_on_the_way_back(root: Path, row: Row, phase: Phase, moment: str) -> None:
    world, old, new = host(root)
    kill(world, "switch", number=new.number, fault="measure", kill=[phase, old.number, moment])
    seconds = recover(world)
    judged(world, Result.ROLLED_BACK)
    verified(world, old.number)
    row(world, phase, f"going back, {moment}", seconds)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", BACK_PHASES)
def test_killed_in_the_recovery(root: Path, row: Row, phase: Phase, moment: str) -> None:
    world, old, new = host(root)
    kill(world, "switch", number=new.number, kill=["healthy", new.number, "journalled"])
    kill(world, "recover", kill=[phase, old.number, moment])
    seconds = recover(world)
    judged(world, Result.ROLLED_BACK)
    verified(world, old.number)
    row(world, phase, f"in the recovery, {moment}", seconds)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", [Phase.INSTALL, Phase.HEALTHY])
def test_a_first_switch_killed(root: Path, row: Row, phase: Phase, moment: str) -> None:
    world = new_host(root)
    number = put(world.paths, OLD)
    kill(world, "switch", number=number, kill=[phase, number, moment])
    seconds = recover(world)
    judged(world, Result.ROLLED_BACK)
    row(world, phase, f"first switch, {moment}", seconds)


def test_the_next_switch_recovers_by_itself(root: Path) -> None:
    """Where nobody called the recovery."""
    world, _old, new = host(root)
    kill(world, "switch", number=new.number, kill=["free", new.number, "acted"])
    assert drive(world, "switch", number=new.number) == 0
    assert unlike(world, new) == []
    assert sorted(str(journal.result) for journal in history(world.paths)) == ["committed", "rolled_back"]


def test_a_kill_is_a_kill(root: Path) -> None:
    """Without the recovery nothing serves in full, else the tests above would show nothing."""
    world, old, new = host(root)
    kill(world, "switch", number=new.number, kill=["start", new.number, "journalled"])
    assert unlike(world, old) != [] and unlike(world, new) != []
