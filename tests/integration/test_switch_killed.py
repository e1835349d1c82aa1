# SPDX-License-Identifier: Apache-2.0
"""The switch program killed by SIGKILL: a new process ends with one of the two generations serving completely.

Every phase, with an exception in place of the signal, is in tests/unit/switch/test_switch_interrupted.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation import committed as generation_committed
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.switch.journal import history, holder, read_journal
from ansible.module_utils.vllm_edge.switch.model import Result
from fake_world import FakeWorld, host, unlike

DRIVER = Path(__file__).with_name("switch_driver.py")


def drive(world: FakeWorld, what: str, **asked: Any) -> int:
    """A process of its own; its exit status, negative where a signal ended it."""
    words = [sys.executable, str(DRIVER), str(world.file.parent), what, json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def kill(world: FakeWorld, what: str, **asked: Any) -> None:
    assert drive(world, what, **asked) == -signal.SIGKILL
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is None, "it was killed too late"
    assert holder(world.paths) is None, "the kernel frees the lock"


@pytest.mark.parametrize(
    ("first", "then", "result"),
    [
        ({"kill": ["prepare", 2, "before"]}, {}, Result.REFUSED),
        ({"kill": ["stop", 2, "after"]}, {}, Result.ROLLED_BACK),
        ({"kill": ["commit", 2, "after"]}, {}, Result.COMMITTED),
        ({"kill": ["healthy", 1, "before"], "fault": "measure"}, {}, Result.ROLLED_BACK),
        ({"kill": ["healthy", 2, "before"]}, {"kill": ["free", 1, "after"]}, Result.ROLLED_BACK),
    ],
    ids=["before anything", "forward", "after the commit", "on the way back", "and in the recovery"],
)
def test_killed(tmp_path: Path, first: dict[str, Any], then: dict[str, Any], result: Result) -> None:
    world, old, new = host(tmp_path / "host")
    kill(world, "switch", number=new.number, **first)
    if then:
        kill(world, "recover", **then)
    if result is not Result.REFUSED:
        assert unlike(world, old) != [], "else the recovery would show nothing"
    assert drive(world, "recover") == 0
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is result, journal
    assert [item.id for item in history(world.paths)] == [journal.id]
    assert holder(world.paths) is None
    assert not (world.paths.state / ".switch.ballast").exists()
    now = generation_committed.committed(world.paths)
    assert now is not None and unlike(world, store.load(world.paths, now.generation)) == []
