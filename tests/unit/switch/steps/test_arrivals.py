# SPDX-License-Identifier: Apache-2.0
"""What engines pass before clients reach them: each by itself, and only the switch's own thread makes it known."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.switch.model import Done, Phase, PhaseFailed
from ansible.module_utils.vllm_edge.switch.steps.arrivals import Arrivals, Step
from fake_host import Bench, failure, until
from generations import engine

STEPS = (Phase.WARM_UP, Phase.CANARY, Phase.MEASURE)


class Line:
    """Two engines of a generation, `slow` and `quick`, whose steps a test holds up or lets fail."""

    def __init__(self, root: Path, wrong: Mapping[str, Exception] | None = None, *, patient: bool = False) -> None:
        self.back: list[str] = []
        self.begun: set[str] = set()
        self.held = {"slow warm_up": threading.Event()}
        self.wrong = wrong or {}
        wanted = Bench(root).live(engine("slow"), engine("quick", port=8060))
        self.arrivals = Arrivals(wanted, patient=patient, tell=self.back.append)
        self.arrivals.begin(["quick", "slow"], {phase: self.step(phase) for phase in STEPS})

    def step(self, phase: Phase) -> Step:
        def act(engine: str) -> Done:
            at = f"{engine} {phase}"
            self.begun.add(at)
            if at in self.held:
                assert self.held[at].wait(60)
            if at in self.wrong:
                raise self.wrong[at]
            return Done(at, {"canary": [engine]})

        return act

    def release(self) -> None:
        for event in self.held.values():
            event.set()


def test_an_engine_waits_for_no_other_one_and_is_made_known_once(tmp_path: Path) -> None:
    line = Line(tmp_path)
    until(lambda: "quick measure" in line.begun and "quick canary" in line.begun)

    def look() -> bool:
        line.arrivals.look()
        return bool(line.back)

    until(look)
    assert line.back == ["quick"] and line.begun.isdisjoint({"slow canary", "slow measure"})
    line.release()
    assert [done.detail for done in line.arrivals.wait(Phase.CANARY)] == ["slow canary", "quick canary"]
    line.arrivals.wait(Phase.MEASURE)
    line.arrivals.look()
    assert line.back == ["quick", "slow"]


def test_the_first_failure_of_any_step_ends_the_wait_for_an_earlier_one(tmp_path: Path) -> None:
    line = Line(tmp_path, {"quick canary": PhaseFailed("no answer", engines=["quick"])})
    failed = failure(lambda: line.arrivals.wait(Phase.WARM_UP))
    assert (failed.text, failed.phase, failed.engines, line.back) == ("no answer", Phase.CANARY, ("quick",), [])
    line.release()


def test_the_way_back_hears_all_failures_of_a_step_when_every_engine_is_past_it(tmp_path: Path) -> None:
    names = ("slow", "quick")
    wrong = {f"{name} warm_up": PhaseFailed(f"{name} is silent.", engines=[name]) for name in names}
    line = Line(tmp_path, wrong, patient=True)
    line.release()
    failed = failure(lambda: line.arrivals.wait(Phase.WARM_UP))
    assert failed.text == "slow is silent. quick is silent." and failed.engines == names
    assert len(line.arrivals.wait(Phase.CANARY)) == 2, "what else can be said of them"
    assert line.back == [], "it comes back with the others"


@pytest.mark.parametrize("patient", [False, True])
def test_an_error_that_nobody_expected_is_a_failure_of_its_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], patient: bool
) -> None:
    line = Line(tmp_path, {"quick canary": KeyError("unheard of")}, patient=patient)
    line.release()
    failed = failure(lambda: line.arrivals.wait(Phase.CANARY))
    assert failed.engines == ("quick",) and "KeyError: 'unheard of'" in failed.text
    assert "Traceback" in capsys.readouterr().err
    if patient:
        line.arrivals.look()
        until(lambda: (line.arrivals.look(), line.back == ["slow"])[1])


def test_memory_of_one_engine_over_its_budget_keeps_clients_away_and_decides_nothing(tmp_path: Path) -> None:
    line = Line(tmp_path, {"quick measure": PhaseFailed("over budget", engines=["quick"])})
    line.release()
    line.arrivals.wait(Phase.CANARY)
    assert failure(lambda: line.arrivals.wait(Phase.MEASURE)).text == "over budget"
    assert line.back == ["slow"]


def test_the_way_back_begins_no_further_step_of_the_way_forward(tmp_path: Path) -> None:
    line = Line(tmp_path)
    until(lambda: "quick measure" in line.begun)
    leaving = threading.Timer(0.2, line.release)
    leaving.start()
    line.arrivals.leave()
    leaving.join()
    assert line.begun.isdisjoint({"slow canary", "slow measure"})
