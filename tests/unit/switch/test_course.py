# SPDX-License-Identifier: Apache-2.0
"""What clients of the gateway see while a switch runs, after it was killed, and after it ended."""

from __future__ import annotations

import pytest
from ansible.module_utils.vllm_edge.gateway.view import build_view
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.switch.course import read_course
from ansible.module_utils.vllm_edge.switch.model import BACK_PHASES, HARMLESS, ONWARD, PHASES, Phase, Result
from switch_host import Killed, SwitchHost


def see(bench: SwitchHost) -> tuple[str | None, set[str]]:
    """The generation and the names that are away."""
    view = build_view("edge", store.load_committed(bench.paths), read_course(bench.paths), lambda engine: None)
    return view.profile, {role.name for role in view.roles if role.state == "away"}


GONE = {"architect", "worker", "sentry"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_switch_that_was_killed(bench: SwitchHost, phase: Phase) -> None:
    bench.kill(phase)
    course = read_course(bench.paths)
    assert course is not None and course.phase == phase
    if phase in ONWARD:
        assert see(bench) == ("w4a16-tp2", set())
    else:
        assert see(bench) == ("nvfp4-tp2", set() if phase in HARMLESS else GONE)
    bench.recover()
    assert read_course(bench.paths) is None


def test_after_the_commit_the_new_engines_serve(bench: SwitchHost) -> None:
    bench.fail("commit", Killed(), once=True, moment="after")
    with pytest.raises(Killed):
        bench.switch()
    assert see(bench) == ("w4a16-tp2", set())


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_on_the_way_back(bench: SwitchHost, phase: Phase) -> None:
    seen = []
    bench.fail("measure", "too much")
    bench.at(phase, lambda: seen.append(see(bench)), bench.old)
    bench.ends(Result.ROLLED_BACK)
    assert seen == [("nvfp4-tp2", set() if phase in ONWARD else GONE)]


def test_a_damaged_journal_takes_nobody_away(bench: SwitchHost) -> None:
    bench.paths.switch_journal.write_text("{")
    assert read_course(bench.paths) is None and see(bench) == ("nvfp4-tp2", set())
