# SPDX-License-Identifier: Apache-2.0
"""One process of test_switch_killed.py: a real switch or recovery on the fake host, which kills itself on the way.

`python switch_driver.py <root> switch|recover <arguments as JSON>`; the keys: `number` (of the generation to switch
to), `fault` (a phase that fails on the way forward) and `kill`: `[phase, generation it is towards, moment]`. The moment
`before` is after the phase was written to the journal, before it acts; `after` is right after it acted, before the
journal is written again.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
sys.path.insert(0, str(ROOT / "tests"))

from ansible.module_utils.vllm_edge.generation import committed as generation_committed
from ansible.module_utils.vllm_edge.generation.model import Choice, Generation
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import run
from ansible.module_utils.vllm_edge.switch.model import PhaseFailed
from fake_world import FakeWorld


def main(root: Path, what: str, asked: dict[str, Any]) -> int:
    paths = HostPaths(etc=root / "etc", state=root / "state", units=root / "units")
    world = FakeWorld(paths, root / "host.json")

    def reach(moment: str, name: str, towards: int | None) -> None:
        if [name, towards, moment] == asked.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (moment, name, towards) == ("before", asked.get("fault"), asked.get("number")):
            raise PhaseFailed("the fault of this test")

    commit = generation_committed.commit

    def committed(generation: Generation, *arguments: Any, **named: Any) -> None:
        commit(generation, *arguments, **named)
        reach("after", "commit", generation.number)

    generation_committed.commit = committed
    world.before, world.after = functools.partial(reach, "before"), functools.partial(reach, "after")
    run._open_world = lambda paths: world  # type: ignore[assignment]
    if what == "recover":
        return run.run_recover(paths, boot=False)
    return run.run_switch(paths, asked["number"], Choice("-e", "nvfp4-tp2", "test_switch_killed"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
