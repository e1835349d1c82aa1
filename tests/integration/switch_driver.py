# SPDX-License-Identifier: Apache-2.0
"""One process of test_switch_killed.py: a real switch or recovery on the fake host, which kills itself on the way.

`python switch_driver.py <root> switch|recover <arguments as JSON>`; the keys: `number` (of the generation to switch
to), `fault` (a phase that fails on the way forward) and `kill`: `[phase, generation it is towards, moment]`. The moment
`journalled` is right after the phase was written to the journal, before it acts; `acted` is right after it acted,
before the journal is written again. The product has no hook for that: journal, world and commit are wrapped here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
sys.path.insert(0, str(ROOT / "tests"))

from ansible.module_utils.vllm_edge.generation import committed as generation_committed
from ansible.module_utils.vllm_edge.generation.model import Choice
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import run
from ansible.module_utils.vllm_edge.switch import run as switch_run
from ansible.module_utils.vllm_edge.switch.journal import JournalFile
from ansible.module_utils.vllm_edge.switch.model import Phase, PhaseFailed
from fake_world import FakeWorld


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # never reached: the signal is not handled


def main(root: Path, what: str, asked: dict[str, Any]) -> int:
    paths = HostPaths(etc=root / "etc", state=root / "state", units=root / "units")
    world = FakeWorld(paths, root / "host.json")
    phase, number, moment = asked.get("kill") or (None, None, None)
    fault = asked.get("fault")

    enter = JournalFile.enter

    def entered(self: JournalFile, now: Phase, *arguments: Any) -> None:
        enter(self, now, *arguments)
        if (now.value, moment) == (phase, "journalled") and world.towards == number:
            die()

    def before(name: str, towards: int | None) -> None:
        if name == fault and towards == asked.get("number"):
            raise PhaseFailed("the fault of this test")

    def after(name: str, towards: int | None) -> None:
        # A hook is part of a phase: after_commit is the last thing that CLEAN_UP does.
        done = {"hook after_commit": "clean_up"}.get(name, name)
        last = name != "clean_up" or what == "recover" or towards != asked.get("number")
        if (done, towards, moment) == (phase, number, "acted") and last:
            die()

    commit = generation_committed.commit

    def committed(*arguments: Any, **named: Any) -> None:
        commit(*arguments, **named)
        if (phase, moment) == ("commit", "acted"):
            die()

    JournalFile.enter = entered  # type: ignore[method-assign]
    generation_committed.commit = committed
    world.before, world.after = before, after
    switch_run._open_world = lambda paths: world  # type: ignore[assignment]
    if what == "recover":
        return run.run_recover(paths, boot=False)
    return switch_run.run_switch(paths, asked["number"], Choice("-e", "nvfp4-tp2", "test_switch_killed"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
