# SPDX-License-Identifier: Apache-2.0
"""An error in a thread reaches whoever waits for what the thread does."""

from __future__ import annotations

import io
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ansible.module_utils.vllm_edge.engine import watchers
from ansible.module_utils.vllm_edge.engine.journal import Journal
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.switch.model import Moves
from ansible.module_utils.vllm_edge.switch.steps.downtime import RoleWatch
from ansible.module_utils.vllm_edge.system.threads import call_in_parallel
from ansible.module_utils.vllm_edge.trials.bench.sampling import Sampler
from fake_host import Bench, until
from generations import engine

ROOT = Path(__file__).parents[3]


def fail(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("lost")


def sample(bench: Bench, wanted: Generation) -> str:
    sampler = Sampler(fail, every_s=0.01)
    with sampler:
        until(lambda: bool(sampler.find_problem()))
    return sampler.find_problem()


def watch_roles(bench: Bench, wanted: Generation) -> str:
    watch = RoleWatch(wanted, wanted, clock=time.monotonic, ask=fail)
    with pytest.raises(RuntimeError) as failed:
        watch.end(())
    return str(failed.value)


def stop_engines(bench: Bench, wanted: Generation) -> str:
    bench.machine.ask = fail
    bench.systemctl.unit("vllm-e2b.service", ActiveState="inactive")
    bench.systemctl.on["stop"] = lambda names: until(lambda: not any(map(is_watch, threading.enumerate())))
    return bench.machine.stop(Moves(stop=("e2b",))).warnings[0]


def is_watch(thread: threading.Thread) -> bool:
    return thread.name == "watch"


def call(bench: Bench, wanted: Generation) -> str:
    with pytest.raises(RuntimeError) as failed:
        call_in_parallel(fail, [1, 2])
    return str(failed.value)


@pytest.mark.parametrize("act", [sample, watch_roles, stop_engines, call])
def test_an_error_in_a_thread_reaches_its_caller(tmp_path: Path, act: Callable[[Bench, Generation], str]) -> None:
    bench = Bench(tmp_path)
    wanted = bench.live(engine("e2b", shutdown_timeout_s=60))
    assert "lost" in act(bench, wanted)


def test_a_watcher_of_an_engine_says_so_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "ASK_AGAIN_S", 0.01)
    said, errors = io.StringIO(), [RuntimeError("lost")]
    given: Any = (None, None, Journal(said, prefixed=False), None, None, fail, fail)
    made = watchers.Watchers(*given)

    def watch() -> None:
        if errors:
            raise errors.pop()

    made._thread(watch).join(9)
    assert said.getvalue() == "watch met an unexpected error and begins again: RuntimeError: lost\n" and not errors


def test_threads_are_made_in_one_place() -> None:
    """The benchmark's program runs alone in a container. A pool whose results are read raises what it meets."""
    command = ["git", "grep", "-lE", r"\bThread\(|\.submit\(|Timer\(", "--", "plugins"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    package = "plugins/module_utils/vllm_edge"
    assert found == [f"{package}/trials/bench/program.py"]
