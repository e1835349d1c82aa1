# SPDX-License-Identifier: Apache-2.0
"""The transaction: whatever fails, in whatever phase, who serves afterwards, with which result and exit status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.generation import committed, store
from ansible.module_utils.vllm_edge.generation.model import Committed, GenerationError
from ansible.module_utils.vllm_edge.switch import run as switch_run
from ansible.module_utils.vllm_edge.switch.history import list_verified
from ansible.module_utils.vllm_edge.switch.model import (
    BACK_PHASES,
    HARMLESS,
    PHASES,
    Exit,
    Phase,
    PhaseFailed,
    Result,
)
from fake_machine import BIG, E2B, E2B_CHANGED, GPUS, KEPT, NEW, OLD, SMALL, host, new_host, serve, unlike
from generations import engine, put, rendered
from switch_host import SwitchHost

BEFORE_COMMIT = PHASES[: PHASES.index(Phase.COMMIT) + 1]
ROLLS_BACK = [phase for phase in BEFORE_COMMIT if phase not in HARMLESS]


def recorded(bench: SwitchHost) -> Committed:
    """The record of what is committed."""
    now = committed.committed(bench.paths)
    assert now is not None
    return now


def test_a_switch_commits_and_touches_only_what_differs(bench: SwitchHost, capsys: pytest.CaptureFixture[str]) -> None:
    kept, changed = bench.pids("e4b", "e2b")
    journal = bench.ends(Result.COMMITTED)
    assert bench.pids("e4b") == [kept] and bench.pids("e2b") != [changed]
    assert [record.phase for record in journal.phases] == list(PHASES)
    assert {record.direction for record in journal.phases} == {"forward"}
    assert (journal.keep, {*journal.stop}) == (("e4b",), {"31b-nvfp4", "e2b"})
    assert {*journal.start} == {"31b-w4a16", "e2b"}
    assert journal.restarts == ("e2b: restart because of --max-model-len",)
    assert (journal.from_generation, journal.from_profile) == (1, "nvfp4-tp2")
    assert (journal.generation, journal.profile, journal.origin) == (2, "w4a16-tp2", "-e")
    assert len(journal.canary) == 4 and len(journal.gpus) == 4
    assert set(journal.downtime) == {"architect", "worker", "auditor", "sentry"}
    # Beside the phases a gap can only be read if both count from the same moment.
    began = {record.phase: record.began_s for record in journal.phases}
    for downtime in journal.downtime.values():
        (gap,) = downtime.gaps
        assert gap.to_s is not None and gap.to_s >= began[Phase.CLEAN_UP]
        assert gap.from_s == pytest.approx(began[Phase.DRAIN], abs=1.1) and gap.from_s >= began[Phase.PREPARE]
    said = capsys.readouterr().out
    assert "healthy: done in" in said and "committed: Generation 2 (w4a16-tp2) serves and is verified" in said
    assert (recorded(bench).origin, recorded(bench).previous_generation) == ("-e", 1)


@pytest.mark.parametrize(
    ("origin", "kept", "chosen_at"),
    [
        ("inventory", "inventory", "2026-11-20T00:00:00Z"),
        ("-e", "-e", "2026-11-21T16:40:00Z"),
        # Otherwise a later edit of the inventory would be refused, because of somebody who only looked.
        ("host", "inventory", "2026-11-20T00:00:00Z"),
    ],
)
def test_what_is_active_is_kept_and_its_origin(bench: SwitchHost, origin: str, kept: str, chosen_at: str) -> None:
    journal = bench.ends(Result.UNCHANGED, bench.old, origin=origin)
    assert bench.log == ["moves@1", "back@1"] and journal.phases == ()
    now = recorded(bench)
    assert (now.origin, now.chosen_at, now.previous_generation) == (kept, chosen_at, None)


def test_a_change_that_no_engine_notices_is_committed(bench: SwitchHost) -> None:
    before = bench.pids(*OLD.engines)
    number = put(bench.paths, rendered(*OLD.engines.values(), profile="nvfp4-tp2-renamed"))
    journal = bench.ends(Result.COMMITTED, store.load(bench.paths, number))
    assert bench.pids(*OLD.engines) == before
    assert "hook before_drain" not in " ".join(bench.log), "nothing is drained where nothing stops"
    assert journal.start == ()


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_phase_that_fails(bench: SwitchHost, phase: Phase, when: str) -> None:
    """`before` it did anything, and `after` it did everything."""
    kept = bench.pids("e4b")
    fault = "the fault\nof this test"
    bench.fail(phase, GenerationError(fault) if phase is Phase.COMMIT else fault, moment=when)
    if phase is Phase.COMMIT and when == "after":
        # The rename has happened: onward.
        assert fault in bench.ends(Result.COMMITTED).warnings[0]
    elif phase in HARMLESS:
        journal = bench.ends(Result.REFUSED)
        assert "Nothing was touched" in journal.message and journal.downtime == {}
        assert not any(entry.startswith(("away", "stop", "start", "install")) for entry in bench.log)
    else:
        journal = bench.ends(Result.ROLLED_BACK)
        assert "serves again and is verified" in journal.message
        assert [record.phase for record in journal.phases if record.direction == "back"] == list(BACK_PHASES)
        assert journal.direction == "back"
    if bench.journal.result is not Result.COMMITTED:
        assert f"in phase {phase}" in journal.message and "the fault of this test" in journal.message
    assert bench.pids("e4b") == kept


@pytest.mark.parametrize("phase", ROLLS_BACK)
def test_an_exception_is_a_failed_phase(bench: SwitchHost, capsys: pytest.CaptureFixture[str], phase: Phase) -> None:
    bench.fail(phase, KeyError("unheard of"))
    assert "KeyError: 'unheard of'" in bench.ends(Result.ROLLED_BACK).message
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phase", "words", "then"),
    [("clean_up", "vllm-edge switch 2", Result.COMMITTED), ("back", "Phase back failed", Result.UNCHANGED)],
)
def test_a_failure_after_the_commit_says_what_is_left(bench: SwitchHost, phase: str, words: str, then: Result) -> None:
    bench.fail(phase, "systemd did not answer.")
    journal = bench.ends(Result.FAILED)
    assert "is committed and serves" in journal.message and words in journal.message
    assert journal.phases[-1].phase is Phase.CLEAN_UP, "nothing is left out"
    bench.calm()
    started = bench.pids(*NEW.engines)
    bench.ends(then)
    assert bench.pids(*NEW.engines) == started


def test_a_failing_hook_before_drain_goes_back_and_one_after_commit_is_a_warning(bench: SwitchHost) -> None:
    bench.machine.change(failing_hooks=["before_drain"])
    journal = bench.ends(Result.ROLLED_BACK)
    assert "10-gateway" in journal.message and not any("hook after" in entry for entry in bench.log)
    bench.machine.change(failing_hooks=["after_commit"])
    assert "10-gateway" in bench.ends(Result.COMMITTED).warnings[0]


NEW_ENGINE = f"31b-w4a16@{SMALL.input_hash}"
OLD_ENGINE = "31b-nvfp4"


def test_a_new_engine_that_does_not_pass_the_quality_suite_is_replaced_by_the_old_one(bench: SwitchHost) -> None:
    bench.machine.change(quirks={NEW_ENGINE: "answers badly"})
    assert "in phase canary" in bench.ends(Result.ROLLED_BACK).message


def test_an_old_engine_that_cannot_be_stopped_goes_on_serving_and_one_leaving_memory_warns(bench: SwitchHost) -> None:
    before = bench.pids(OLD_ENGINE)
    bench.machine.change(quirks={OLD_ENGINE: "cannot be stopped"})
    bench.ends(Result.ROLLED_BACK)
    assert bench.pids(OLD_ENGINE) == before
    bench.machine.change(quirks={OLD_ENGINE: "leaves an orphan"})
    assert "was killed" in bench.ends(Result.COMMITTED).warnings[0]


def test_a_foreign_process_that_comes_in_the_middle_is_named_and_the_rest_comes_back(bench: SwitchHost) -> None:
    def arrives() -> None:
        state = bench.machine.load()
        state["memory"][bench.new.engines["31b-w4a16"].config.gpus[0]]["foreign python3 (pid 99)"] = 9000
        bench.machine.save(state)

    bench.at("free", arrives)
    journal = bench.ends(Result.FAILED)
    assert "foreign python3 (pid 99) holds 9000 MiB of GPU 0" in journal.message
    assert "31b-nvfp4 does not fit on GPU 0" in journal.message
    assert "What runs now: 31b-nvfp4 failed, e4b active, e2b active." in journal.message
    assert "vllm-edge switch 1" in journal.message
    assert (bench.units["e2b"]["hash"], bench.units["e4b"]["hash"]) == (E2B.input_hash, KEPT.input_hash)


def test_a_gpu_that_is_lost_in_the_middle_leaves_the_others_serving(bench: SwitchHost) -> None:
    bench.at("start", lambda: bench.machine.change(lost_gpus=[bench.new.engines["31b-w4a16"].config.gpus[1]]))
    journal = bench.ends(Result.FAILED)
    assert "GPU 1 is lost" in journal.message and "e4b active, e2b active" in journal.message
    canary = [row["served_name"] for row in journal.canary]
    assert sorted(canary) == ["auditor", "sentry"], "what serves is asked all the same"


@pytest.mark.parametrize("phase", ["free", "start", "healthy", "canary"])
def test_docker_restarted_in_the_middle_is_waited_for_on_the_way_back(bench: SwitchHost, phase: str) -> None:
    bench.at(phase, lambda: bench.machine.change(docker_away=20))
    bench.fail(phase, "The Docker Engine did not answer.")
    assert bench.ends(Result.ROLLED_BACK).warnings == (), "it was waited for, and seen"


def test_a_docker_that_is_away_at_first_refuses_and_one_that_stays_away_is_gone_back_without(bench: SwitchHost) -> None:
    bench.machine.change(docker_away=1)
    assert "did not answer" in bench.ends(Result.REFUSED).message
    # What runs cannot be seen: the journal says what was moved, and its reverse is done.
    bench.at("warm_up", lambda: bench.machine.change(docker_away=10_000))
    bench.fail("warm_up", "The Docker Engine did not answer.")
    assert any("going by the journal" in text for text in bench.ends(Result.ROLLED_BACK).warnings)


@pytest.mark.parametrize("fault", ["", "crashes while loading"])
def test_a_clock_that_jumps_changes_nothing_else(bench: SwitchHost, fault: str) -> None:
    stamps = [f"20{60 - year:02}-01-01T00:00:00Z" for year in range(60)]
    bench.machine.change(stamps=stamps, quirks={NEW_ENGINE: fault})
    journal = bench.ends(Result.ROLLED_BACK if fault else Result.COMMITTED)
    assert journal.started_at > (journal.ended_at or ""), "the clock went back all the time"
    ends = [record.began_s + (record.seconds or -1) for record in journal.phases]
    assert all(end <= later.began_s for end, later in zip(ends, journal.phases[1:], strict=False))
    assert 0 < ends[-1] <= (journal.seconds or 0) < 200, "seconds of the host's steady clock"


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_a_way_back_that_fails_brings_back_what_it_can(bench: SwitchHost, phase: Phase) -> None:
    old = bench.old
    bench.fail("canary", "wrong answer")
    bench.fail(phase, "this, too", old)
    partly = phase in (Phase.AWAY, Phase.DRAIN, Phase.FREE, Phase.WARM_UP)
    journal = bench.ends(Result.ROLLED_BACK if partly else Result.FAILED)
    assert "wrong answer" in journal.message
    back_phases = [record.phase for record in journal.phases if record.direction == "back"]
    assert list(dict.fromkeys(back_phases)) == list(BACK_PHASES), "nothing is left out"
    if partly:
        assert any("this, too" in text for text in journal.warnings)
        return
    assert f"In phase {phase}: this, too." in journal.message and "What runs now:" in journal.message
    assert "vllm-edge switch 1" in journal.message
    assert (bench.units["e4b"]["active"], bench.units["e4b"]["hash"]) == ("active", KEPT.input_hash)
    if phase in (Phase.CANARY, Phase.MEASURE):
        assert bench.unlike(old) == []
    # When the cause is gone, what the message says brings the rest.
    bench.calm()
    bench.ends(Result.COMMITTED if bench.unlike(old) and phase is not Phase.BACK else Result.UNCHANGED, old)


def test_an_answer_of_the_other_generation_is_no_rollback(bench: SwitchHost) -> None:
    """A canary asks a served name, and cannot know whose it is."""
    bench.machine.change(quirks={f"e2b@{bench.new.hashes['e2b']}": "cannot be stopped"})
    bench.fail("measure", "over budget")
    bench.monkeypatch.setattr(bench.machine, "silent", lambda state, wanted, name: False)
    assert "engines that run and should not, or otherwise: e2b" in bench.ends(Result.FAILED).message


def test_the_ballast_makes_room_for_the_way_back_and_no_engine_starts_without_its_files(bench: SwitchHost) -> None:
    def full() -> None:
        if bench.ballast.exists():
            raise PhaseFailed("No space left on device")

    bench.fail("canary", "wrong answer")
    bench.at("install", full, bench.old)
    bench.ends(Result.ROLLED_BACK)
    bench.calm()
    bench.fail("canary", "wrong answer")
    bench.fail("install", "the disk is full", bench.old)
    assert bench.switch() == Exit.FAILED
    assert bench.units["e2b"]["active"] == "inactive", "its live files are those of the other generation"
    assert (bench.units["31b-nvfp4"]["active"], bench.units["e4b"]["active"]) == ("active", "active")


def test_the_first_switch_of_a_host(first: SwitchHost) -> None:
    journal = first.ends(Result.COMMITTED, origin="inventory")
    assert journal.from_generation is None and journal.stop == ()


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_a_first_switch_that_fails_stops_what_it_started(first: SwitchHost, phase: Phase) -> None:
    # There is nothing to drain; the stop of the way back is towards the same generation.
    action = Phase.STOP if phase is Phase.DRAIN else phase
    first.fail(action, GenerationError("no") if phase is Phase.COMMIT else "the fault of this test", once=True)
    journal = first.ends(Result.REFUSED if phase in HARMLESS else Result.ROLLED_BACK, origin="inventory")
    assert committed.committed(first.paths) is None
    assert phase in HARMLESS or "Nothing served before, and nothing serves now" in journal.message


def test_a_first_switch_whose_engines_cannot_be_stopped_again_says_so(first: SwitchHost) -> None:
    first.machine.change(quirks={"e4b": "cannot be stopped", "e2b": "canary wrong"})
    journal = first.ends(Result.FAILED)
    assert "e4b did not stop" in journal.message and "Nothing is committed" in journal.message


@pytest.fixture
def over(first: SwitchHost) -> SwitchHost:
    """A host whose first generation serves and uses 500 MiB more than the budget of e2b."""
    first.machine.change(quirks={"e2b": "grows"})
    first.ends(Result.OVER_BUDGET, origin="inventory")
    return first


def test_a_first_switch_over_its_budget_serves_and_a_raised_one_ends_that_without_a_restart(over: SwitchHost) -> None:
    journal = over.journal
    assert [record.phase for record in journal.phases] == list(PHASES)
    assert journal.over_budget == ("GPU 3: 21400 MiB, budget 20900 MiB.",)
    assert journal.over_budget[0] in journal.message and "keep serving" in journal.message
    assert recorded(over).over_budget
    before = over.pids(*OLD.engines)
    config = {"served_names": ["sentry"], "gpus": GPUS[3:], "vram_budget_mib": 21_700}
    raised = engine("e2b", note="--max-model-len=8192\n", **config)
    number = put(over.paths, rendered(BIG, KEPT, raised, profile=OLD.profile))
    over.ends(Result.COMMITTED, store.load(over.paths, number), origin="inventory")
    assert over.pids(*OLD.engines) == before and not recorded(over).over_budget


def test_a_lost_gpu_is_no_overrun_of_a_first_switch(first: SwitchHost) -> None:
    first.machine.change(quirks={"e2b": "grows"})
    first.at("measure", lambda: first.machine.change(lost_gpus=[first.new.engines["e4b"].config.gpus[0]]))
    assert "GPU 2 is lost" in first.ends(Result.ROLLED_BACK).message
    assert committed.committed(first.paths) is None


@pytest.mark.parametrize("fault", ["", "canary"])
def test_a_later_switch_goes_back_to_the_generation_over_its_budget(over: SwitchHost, fault: str) -> None:
    """It is the one that was committed: that it still exceeds its budget is said and is no failure of the way back."""
    new = store.load(over.paths, put(over.paths, NEW))
    over.machine.change(quirks={"e2b": "grows", "31b-w4a16": fault and "canary wrong"})
    assert over.switch(new) == Exit.ROLLED_BACK
    journal = over.journal
    assert f"in phase {fault or 'measure'}" in journal.message and journal.over_budget
    assert any("still over its budget" in text for text in journal.warnings)
    assert over.unlike(over.new) == []


def test_a_recovered_first_switch_over_its_budget_says_so(first: SwitchHost) -> None:
    first.machine.change(quirks={"e2b": "grows"})
    first.kill("clean_up")
    assert first.recover() == Exit.OK
    assert (first.journal.result, len(first.journal.over_budget)) == (Result.OVER_BUDGET, 1)


@pytest.fixture
def calibration(bench: SwitchHost) -> SwitchHost:
    """A host whose new generation is a calibration."""
    value = replace(NEW, purpose="calibration")
    bench.new = store.load(bench.paths, put(bench.paths, value))
    return bench


def test_a_calibration_is_measured_and_goes_back_by_itself(calibration: SwitchHost) -> None:
    journal = calibration.ends(Result.MEASURED, whole=False)
    assert calibration.unlike(calibration.old) == []
    assert [row["engine"] for row in journal.measured["engines"]] == [*NEW.engines]
    assert Phase.COMMIT not in [record.phase for record in journal.phases]
    assert "is a calibration and was measured. Generation 1 (nvfp4-tp2) serves again" in journal.message
    assert recorded(calibration).generation == 1 and list_verified(calibration.paths) == [1]


@pytest.mark.parametrize("phase", ["healthy", "measure"])
def test_a_calibration_that_is_cut_off_leaves_the_committed_generation(calibration: SwitchHost, phase: str) -> None:
    calibration.kill(phase)
    assert calibration.recover() == Exit.OK and calibration.journal.result is Result.ROLLED_BACK
    assert recorded(calibration).generation == 1 and calibration.unlike(calibration.old) == []


def test_a_calibration_of_a_bare_host_stops_what_it_started(first: SwitchHost) -> None:
    value = replace(OLD, purpose="calibration")
    first.new = store.load(first.paths, put(first.paths, value))
    journal = first.ends(Result.MEASURED, whole=False)
    assert committed.committed(first.paths) is None and first.unlike(None) == []
    assert journal.measured and "site.yml starts the engines as planned" in journal.message


def test_a_calibration_without_a_way_back_is_refused(calibration: SwitchHost) -> None:
    calibration.paths.active_profile.unlink()
    journal = calibration.ends(Result.REFUSED, whole=False)
    assert "which this host does not have" in journal.message and "Nothing was touched" in journal.message


def test_a_repair_of_a_generation_over_its_budget_measures_it_again(over: SwitchHost) -> None:
    for quirk, result in (("grows", Result.OVER_BUDGET), ("", Result.COMMITTED)):
        over.machine.change(quirks={"e2b": quirk})
        over.stop("e2b")
        over.ends(result)
        assert recorded(over).over_budget is (quirk == "grows")


def test_a_repair_touches_nothing_that_serves_and_rolls_nothing_back_where_it_fails(stopped: SwitchHost) -> None:
    stopped.machine.change(quirks={"e2b": "crashes while loading"})
    kept = stopped.pids("31b-nvfp4", "e4b")
    journal = stopped.ends(Result.FAILED, stopped.old)
    assert "Repairing generation 1 (nvfp4-tp2) failed in phase healthy" in journal.message
    assert "31b-nvfp4 active, e4b active, e2b failed" in journal.message
    assert stopped.pids("31b-nvfp4", "e4b") == kept
    assert [record.phase for record in journal.phases if record.direction == "back"] == [Phase.BACK]
    assert stopped.machine.load()["away"] == [], "an engine that is started by hand must be reached"
    stopped.machine.change(quirks={})
    stopped.paths.unit_file("vllm-e2b.service").unlink()
    kept = stopped.pids("31b-nvfp4", "e4b")
    journal = stopped.ends(Result.COMMITTED, stopped.old)
    assert stopped.pids("31b-nvfp4", "e4b") == kept
    assert journal.start == ("e2b",) and journal.from_generation == journal.generation
    assert recorded(stopped).previous_generation is None


def test_a_generation_that_is_not_there_or_damaged_is_refused(bench: SwitchHost) -> None:
    journal = bench.ends(Result.REFUSED, 77)
    assert "there are: 1, 2" in journal.message and journal.generation == 77
    (bench.new.directory / "engines" / "e2b" / "container.json").write_text("{}")
    assert "generation 2 is damaged" in bench.ends(Result.REFUSED).message.lower()


def test_no_switch_without_a_way_back_where_the_committed_generation_is_damaged(bench: SwitchHost) -> None:
    directory = bench.paths.generation_dir(1)
    (directory / "generation.json").write_text("{}")
    journal = bench.ends(Result.REFUSED)
    assert "nothing to go back to" in journal.message and str(directory) in journal.message


@pytest.mark.parametrize("fails", ["", "before the stop", "after it"])
def test_leaving_a_committed_generation_without_files_warns(tmp_path: Path, bench: SwitchHost, fails: str) -> None:
    """As an older release has set the host up."""
    bench.paths.generation_dir(1).rename(tmp_path / "elsewhere")
    if fails == "before the stop":
        bench.machine.change(failing_hooks=["before_drain"])
        before = bench.units
        journal = bench.ends(Result.ROLLED_BACK, whole=False)
        assert bench.units == before and "were not touched" in journal.message
    elif fails:
        bench.machine.change(quirks={NEW_ENGINE: "crashes while loading"})
        journal = bench.ends(Result.FAILED)
        assert "cannot be brought back" in journal.message
        assert bench.units["e4b"]["active"] == "active", "what was kept is not touched"
    else:
        journal = bench.ends(Result.COMMITTED)
    assert "There is nothing to go back to" in journal.warnings[0]


def test_a_damaged_record_of_what_is_committed_is_refused(bench: SwitchHost) -> None:
    bench.paths.active_profile.write_text("{")
    bench.ends(Result.REFUSED, whole=False)
    assert bench.log == []


def test_a_watch_that_breaks_costs_its_numbers_only(bench: SwitchHost) -> None:
    bench.monkeypatch.setattr(bench.machine, "watch", Mock(side_effect=OSError("no sockets left")))
    journal = bench.ends(Result.COMMITTED)
    assert journal.downtime == {} and "no sockets left" in journal.warnings[0]


def test_a_host_that_cannot_be_opened_is_no_rollback(bench: SwitchHost, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception that nobody catches would end Python with status 1, which says `rolled back`."""
    bench.monkeypatch.setattr(switch_run, "SwitchedHost", Mock(side_effect=ImportError("no docker")))
    assert bench.switch() == Exit.FAILED
    assert "no docker" in capsys.readouterr().err


def test_a_reader_that_is_gone_does_not_end_the_switch(bench: SwitchHost) -> None:
    with bench.monkeypatch.context() as patch:
        patch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
        status = bench.switch()
    assert status == Exit.OK and bench.unlike(bench.new) == []


def test_serving_generations_are_what_the_helper_says(tmp_path: Path) -> None:
    """The judge of these tests can say no."""
    machine, old, new = host(tmp_path)
    assert unlike(machine, old) == []
    assert unlike(machine, new) != []
    machine.change(foreign={**machine.load()["foreign"], "started_at": "now"})
    assert unlike(machine, old) == ["somebody else's container was touched"]
    other = new_host(tmp_path / "other")
    serve(other, NEW)
    assert unlike(other, None) != []


LATE = {
    "serving_switch_early": {"early": False},
    "a suite": {"quality": {"gate": "warn", "cases": [], "repeats": 1, "timeout_s": 1}},
}


@pytest.mark.parametrize("why", [None, *LATE])
def test_names_are_away_from_the_drain_until_their_engine_is_verified_or_all_are(
    bench: SwitchHost, why: str | None
) -> None:
    if why:
        bench.new = store.load(bench.paths, put(bench.paths, replace(NEW, **LATE[why])))
    away: dict[str, list[str]] = {}
    for action in ("away", "drain", "return_early", "commit", "back", "clean_up"):
        bench.at(action, lambda action=action: away.update({action: bench.machine.load()["away"]}))  # type: ignore[misc]
    journal = bench.ends(Result.COMMITTED)
    gone = ["architect", "worker", "sentry"]
    late = {"commit": gone, "back": gone} if why else {"return_early": ["sentry"], "commit": [], "back": []}
    assert away == {"away": [], "drain": gone, "clean_up": []} | late, "auditor's engine stays"
    assert [*journal.provisional] == ([] if why else ["31b-w4a16", "e2b"]) and journal.restored == {}
    assert [*bench.machine.published] == [*(phase for phase in PHASES), None]


def test_a_role_that_came_back_goes_away_again_with_a_later_engine_that_fails(bench: SwitchHost) -> None:
    away: list[list[str]] = []
    bench.machine.change(quirks={f"e2b@{E2B_CHANGED.input_hash}": "crashes while loading"})
    for moment, action, towards in (("after", "return_early", bench.new), ("after", "away", bench.old)):
        bench.at(action, lambda: away.append(bench.machine.load()["away"]), towards, moment=moment)
    journal = bench.ends(Result.ROLLED_BACK)
    assert away == [["sentry"], ["architect", "worker", "sentry"]]
    assert "drain@1 31b-w4a16" in bench.log, "its requests are waited for, as those of any engine that goes"
    assert [*journal.provisional] == ["31b-w4a16"] and {*journal.restored} == {"31b-nvfp4", "e2b"}
    assert "Clients could already reach 31b-w4a16 (from " in journal.message
    assert bench.log.index("return 31b-nvfp4@1") < bench.log.index("canary@1"), "on the way back each returns by itself"


def test_an_engine_of_which_the_gateway_cannot_be_told_comes_back_with_the_others(bench: SwitchHost) -> None:
    bench.fail("return_early", "/run is full.")
    journal = bench.ends(Result.COMMITTED)
    assert "31b-w4a16 comes back with the others: /run is full." in journal.warnings and journal.provisional == {}


def test_nothing_returns_early_of_a_first_switch(first: SwitchHost) -> None:
    assert first.ends(Result.COMMITTED).provisional == {} and not any(entry.startswith("return") for entry in first.log)
