# SPDX-License-Identifier: Apache-2.0
"""The transaction: whatever fails, in whatever phase, who serves afterwards, with which result and exit status."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation import committed, live, model, store
from ansible.module_utils.vllm_edge.generation.model import Choice, Generation, Origin
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import journal as journal_module
from ansible.module_utils.vllm_edge.switch import run as switch_run
from ansible.module_utils.vllm_edge.switch import transaction
from ansible.module_utils.vllm_edge.switch.journal import Lock, history, holder, read_journal
from ansible.module_utils.vllm_edge.switch.model import (
    BACK_PHASES,
    EXITS,
    HARMLESS,
    PHASES,
    Exit,
    Interrupted,
    Journal,
    Moves,
    Phase,
    PhaseFailed,
    Result,
)
from fake_world import E2B, KEPT, NEW, OLD, SMALL, FakeWorld, host, new_host, pid, put, rendered, serve, unlike

BEFORE_COMMIT = PHASES[: PHASES.index(Phase.COMMIT) + 1]
ROLLS_BACK = [phase for phase in BEFORE_COMMIT if phase not in HARMLESS]
ACTIONS = {phase: phase.value for phase in Phase if phase is not Phase.COMMIT}
"""Names of the world's actions by phase; the commit is none of the world's."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "DECIDE_POLL_S", 0.0)
    monkeypatch.setattr(journal_module, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # durability is shown in test_journal.py


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run(world, number) through the entry of `vllm-edge run-switch`."""

    def go(world: FakeWorld, number: int, origin: Origin = "-e", asked_by: str = "site.yml by alice") -> int:
        monkeypatch.setattr(switch_run, "_open_world", lambda paths: world)
        return switch_run.run_switch(world.paths, number, Choice(origin, "nvfp4-tp2", asked_by))

    return go


@pytest.fixture
def recover(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def go(world: FakeWorld, *, boot: bool = False) -> int:
        monkeypatch.setattr(switch_run, "_open_world", lambda paths: world)
        return switch_run.run_recover(world.paths, boot=boot)

    return go


def journal_of(world: FakeWorld) -> Journal:
    """The final journal, which has to be whole, in the history too, and with its lock free."""
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is not None
    assert journal.ended_at and journal.seconds is not None and journal.seconds >= 0
    assert journal.message and "\n" not in journal.message
    assert all(record.outcome is not None and record.seconds is not None for record in journal.phases)
    assert journal in history(world.paths)
    assert holder(world.paths) is None
    assert not (world.paths.state / ".switch.ballast").exists()
    return journal


def journal_for(world: FakeWorld, status: int, result: Result) -> Journal:
    journal = journal_of(world)
    assert (status, journal.result) == (EXITS[result], result), journal.message
    return journal


def ended(world: FakeWorld, status: int, result: Result, serving: Generation | None) -> Journal:
    journal = journal_for(world, status, result)
    assert unlike(world, serving) == []
    return journal


def failing(phase: str, number: int, error: Callable[[], BaseException], times: int = 99) -> Callable[..., None]:
    left = [times]

    def before(name: str, towards: int | None) -> None:
        if name == phase and towards == number and left[0] > 0:
            left[0] -= 1
            raise error()

    return before


# ---- it goes well -----------------------------------------------------------------------------------------------


def test_a_switch_commits_and_touches_only_what_differs(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world, old, new = host(tmp_path)
    kept, changed = pid(world, "e4b"), pid(world, "e2b")
    journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    assert pid(world, "e4b") == kept and pid(world, "e2b") != changed
    assert [record.phase for record in journal.phases] == list(PHASES)
    assert {record.direction for record in journal.phases} == {"forward"}
    assert (journal.keep, set(journal.stop), set(journal.start)) == (
        ("e4b",),
        {"31b-nvfp4", "e2b"},
        {"31b-w4a16", "e2b"},
    )
    assert (journal.from_generation, journal.from_profile) == (old.number, "nvfp4-tp2")
    assert (journal.generation, journal.profile, journal.origin) == (new.number, "w4a16-tp2", "-e")
    assert len(journal.canary) == 4 and len(journal.gpus) == 4
    assert set(journal.downtime) == {"architect", "worker", "auditor", "sentry"}
    drain = next(record for record in journal.phases if record.phase is Phase.DRAIN)
    assert journal.downtime["architect"].gaps[0].from_s == pytest.approx(drain.began_s, abs=1.1)
    said = capsys.readouterr().out
    assert "healthy: done in" in said and "committed: Generation 2 (w4a16-tp2) serves and is verified" in said
    now = committed.committed(world.paths)
    assert now is not None and (now.origin, now.previous_generation) == ("-e", old.number)


def test_what_is_active_already_is_not_touched(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, _ = host(tmp_path)
    journal = ended(world, run(world, old.number, "inventory"), Result.UNCHANGED, old)
    assert world.load()["log"] == ["moves@1"]
    assert journal.phases == ()
    now = committed.committed(world.paths)
    assert now is not None and (now.origin, now.chosen_at) == ("inventory", "2026-11-20T00:00:00Z")


def test_the_same_profile_chosen_by_somebody_else_is_remembered(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, _ = host(tmp_path)
    ended(world, run(world, old.number, "-e"), Result.UNCHANGED, old)
    assert world.load()["log"] == ["moves@1"]
    now = committed.committed(world.paths)
    assert now is not None and now.origin == "-e" and now.previous_generation is None


def test_a_hand_on_what_is_active_chooses_nothing(tmp_path: Path, run: Callable[..., int]) -> None:
    """Else a later edit of the inventory would be refused, because of somebody who only looked."""
    world, old, _ = host(tmp_path)
    ended(world, run(world, old.number, "host"), Result.UNCHANGED, old)
    now = committed.committed(world.paths)
    assert now is not None and now.origin == "inventory"


def test_a_gap_is_told_in_the_time_of_the_switch(tmp_path: Path, run: Callable[..., int]) -> None:
    """Beside the phases it can only be read if both count from the same moment."""
    world, _, new = host(tmp_path)
    journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    began = {record.phase: record.began_s for record in journal.phases}
    for downtime in journal.downtime.values():
        (gap,) = downtime.gaps
        assert gap.to_s is not None
        assert began[Phase.PREPARE] <= gap.from_s <= began[Phase.DRAIN] and gap.to_s >= began[Phase.CLEAN_UP]


def test_there_and_back(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    ended(world, run(world, new.number), Result.COMMITTED, new)
    ended(world, run(world, old.number), Result.COMMITTED, old)
    assert {journal.generation for journal in history(world.paths)} == {old.number, new.number}


def test_a_change_that_no_engine_notices_is_committed(tmp_path: Path, run: Callable[..., int]) -> None:
    world, _old, _ = host(tmp_path)
    before = {name: pid(world, name) for name in ("31b-nvfp4", "e4b", "e2b")}
    other = rendered("nvfp4-tp2-renamed", *OLD.engines.values())
    number = put(world.paths, other)
    generation = store.load(world.paths, number)
    journal = ended(world, run(world, number), Result.COMMITTED, generation)
    assert {name: pid(world, name) for name in before} == before
    assert "hook before_drain" not in " ".join(world.load()["log"]), "nothing is drained where nothing stops"
    assert journal.start == ()


# ---- every phase fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_phase_that_fails(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, phase: Phase, when: str
) -> None:
    """`before` it did anything, and `after` it did everything."""
    world, old, new = host(tmp_path)
    kept = pid(world, "e4b")
    if phase is Phase.COMMIT:
        real = committed.commit

        def commit(*arguments: Any, **named: Any) -> None:
            if when == "after":
                real(*arguments, **named)
            raise model.GenerationError("the disk said no")

        monkeypatch.setattr(committed, "commit", commit)
    else:
        setattr(world, when, failing(ACTIONS[phase], new.number, lambda: PhaseFailed("the fault\nof this test")))
    status = run(world, new.number)
    if phase in HARMLESS:
        journal = ended(world, status, Result.REFUSED, old)
        assert "Nothing was touched" in journal.message and journal.downtime == {}
        assert not any(entry.startswith(("stop", "start", "install")) for entry in world.load()["log"])
    elif phase is Phase.COMMIT and when == "after":
        # The rename has happened: onward.
        journal = ended(world, status, Result.COMMITTED, new)
        assert "the disk said no" in journal.warnings[0]
    else:
        journal = ended(world, status, Result.ROLLED_BACK, old)
        assert "serves again and is verified" in journal.message
        back = [record.phase for record in journal.phases if record.direction == "back"]
        assert back == list(BACK_PHASES)
        assert journal.direction == "back"
    if journal.result is not Result.COMMITTED:
        assert f"in phase {phase}" in journal.message
        assert "the fault of this test" in journal.message or "the disk said no" in journal.message
    assert pid(world, "e4b") == kept


@pytest.mark.parametrize("phase", ROLLS_BACK)
def test_what_nobody_expected_is_a_failed_phase_with_a_traceback(
    tmp_path: Path,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
) -> None:
    world, old, new = host(tmp_path)

    def bug(*arguments: Any, **named: Any) -> None:
        raise KeyError("unheard of")

    if phase is Phase.COMMIT:
        monkeypatch.setattr(committed, "commit", bug)
    else:
        world.before = failing(ACTIONS[phase], new.number, lambda: KeyError("unheard of"))
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert "KeyError: 'unheard of'" in journal.message
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_clean_up_leaves_the_new_generation_serving_and_says_what_is_left(
    tmp_path: Path, run: Callable[..., int]
) -> None:
    world, _old, new = host(tmp_path)
    world.before = failing("clean_up", new.number, lambda: PhaseFailed("systemd did not answer."))
    journal = journal_for(world, run(world, new.number), Result.FAILED)
    assert "is committed and serves" in journal.message and "vllm-edge switch 2" in journal.message
    world.before = lambda name, number: None
    started = {name: pid(world, name) for name in new.engines}
    ended(world, run(world, new.number), Result.COMMITTED, new)
    assert {name: pid(world, name) for name in new.engines} == started


def test_a_failing_hook_before_drain_goes_back_and_one_after_commit_is_a_warning(
    tmp_path: Path, run: Callable[..., int]
) -> None:
    world, old, new = host(tmp_path)
    world.change(failing_hooks=["before_drain"])
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert "10-gateway" in journal.message and not any("hook after" in entry for entry in world.load()["log"])
    world.change(failing_hooks=["after_commit"])
    journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    assert "10-gateway" in journal.warnings[0]


# ---- faults of engines and hosts --------------------------------------------------------------------------------

NEW_ENGINE = f"31b-w4a16@{SMALL.input_hash}"
OLD_ENGINE = "31b-nvfp4"


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"quirks": {NEW_ENGINE: "does not fit"}}, Phase.HEALTHY),
        ({"quirks": {NEW_ENGINE: "crashes while loading"}}, Phase.HEALTHY),
        ({"quirks": {NEW_ENGINE: "never healthy"}}, Phase.HEALTHY),
        ({"quirks": {NEW_ENGINE: "canary wrong"}}, Phase.CANARY),
        ({"quirks": {NEW_ENGINE: "hangs"}}, Phase.CANARY),
        ({"quirks": {NEW_ENGINE: "grows"}}, Phase.MEASURE),
    ],
    ids=lambda value: next(iter(value["quirks"].values())) if isinstance(value, dict) else str(value),
)
def test_a_faulty_new_engine_is_replaced_by_the_old_one(
    tmp_path: Path, run: Callable[..., int], change: dict[str, Any], phase: Phase
) -> None:
    world, old, new = host(tmp_path)
    world.change(**change)
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert f"in phase {phase}" in journal.message


@pytest.mark.parametrize("quirk", ["ignores SIGTERM", "leaves an orphan", "releases slowly"])
def test_an_old_engine_that_resists_is_overcome(tmp_path: Path, run: Callable[..., int], quirk: str) -> None:
    world, _old, new = host(tmp_path)
    world.change(quirks={OLD_ENGINE: quirk})
    journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    assert bool(journal.warnings) == (quirk == "leaves an orphan")


def test_an_old_engine_that_cannot_be_stopped_goes_on_serving(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    before = pid(world, OLD_ENGINE)
    world.change(quirks={OLD_ENGINE: "cannot be stopped"})
    ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert pid(world, OLD_ENGINE) == before


@pytest.mark.parametrize(
    "change",
    [
        {"ports": {"8070": "nginx (pid 12)"}},
        {"missing_images": ["vllm-edge/vllm:1"]},
        {"damaged_weights": ["31b-w4a16"]},
        {"memory": {"GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710000": {"foreign python3 (pid 99)": 4000}}},
    ],
    ids=["port taken", "image missing", "damaged weights", "foreign process on the GPU"],
)
def test_what_can_be_known_before_is_refused(tmp_path: Path, run: Callable[..., int], change: dict[str, Any]) -> None:
    world, old, new = host(tmp_path)
    state = world.load()
    for key, value in change.items():
        state[key] = {**state[key], **value} if isinstance(value, dict) else value
    world.save(state)
    status = run(world, new.number)
    assert (status, journal_of(world).result) == (Exit.REFUSED, Result.REFUSED)
    assert [entry for entry in world.load()["log"] if entry.startswith(("stop", "start"))] == []
    assert committed.committed(world.paths).generation == old.number  # type: ignore[union-attr]


def test_a_foreign_process_that_comes_in_the_middle_is_named_and_the_rest_comes_back(
    tmp_path: Path, run: Callable[..., int]
) -> None:
    world, _old, new = host(tmp_path)

    def arrives(name: str, number: int | None) -> None:
        if name == "free" and number == new.number:
            state = world.load()
            state["memory"][new.engines["31b-w4a16"].config.gpus[0]]["foreign python3 (pid 99)"] = 9000
            world.save(state)

    world.before = arrives
    journal = journal_for(world, run(world, new.number), Result.FAILED)
    assert "foreign python3 (pid 99) holds 9000 MiB of GPU 0" in journal.message
    assert "31b-nvfp4 does not fit on GPU 0" in journal.message
    assert "What runs now: 31b-nvfp4 failed, e4b active, e2b active." in journal.message
    assert "vllm-edge switch 1" in journal.message
    units = world.load()["units"]
    assert units["e2b"]["hash"] == E2B.input_hash and units["e4b"]["hash"] == KEPT.input_hash


def test_a_gpu_that_is_lost_in_the_middle_leaves_the_others_serving(tmp_path: Path, run: Callable[..., int]) -> None:
    world, _old, new = host(tmp_path)

    def lost(name: str, number: int | None) -> None:
        if name == "start" and number == new.number:
            world.change(lost_gpus=[new.engines["31b-w4a16"].config.gpus[1]])

    world.before = lost
    journal = journal_for(world, run(world, new.number), Result.FAILED)
    assert "GPU 1 is lost" in journal.message and "e4b active, e2b active" in journal.message
    canary = [row["served_name"] for row in journal.canary]
    assert sorted(canary) == ["auditor", "sentry"], "what serves is asked all the same"


@pytest.mark.parametrize("phase", ["free", "start", "healthy", "canary"])
def test_docker_restarted_in_the_middle_is_waited_for_on_the_way_back(
    tmp_path: Path, run: Callable[..., int], phase: str
) -> None:
    world, old, new = host(tmp_path)

    def restarted(name: str, number: int | None) -> None:
        if name == phase and number == new.number:
            world.change(docker_away=20)
            raise PhaseFailed("The Docker Engine did not answer.")

    world.before = restarted
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert journal.warnings == (), "it was waited for, and seen"


def test_a_docker_that_does_not_come_back_is_gone_back_without(tmp_path: Path, run: Callable[..., int]) -> None:
    """What runs cannot be seen: the journal says what was moved, and its reverse is done."""
    world, old, new = host(tmp_path)

    def gone(name: str, number: int | None) -> None:
        if name == "warm_up" and number == new.number:
            world.change(docker_away=10_000)
            raise PhaseFailed("The Docker Engine did not answer.")

    world.before = gone
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert any("going by the journal" in text for text in journal.warnings)


def test_a_docker_that_is_away_from_the_beginning_refuses(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    world.change(docker_away=1)
    journal = ended(world, run(world, new.number), Result.REFUSED, old)
    assert "did not answer" in journal.message


@pytest.mark.parametrize("fault", [False, True])
def test_a_clock_that_jumps_changes_no_duration_and_no_decision(
    tmp_path: Path, run: Callable[..., int], fault: bool
) -> None:
    stamps = [f"20{60 - year:02}-01-01T00:00:00Z" for year in range(60)]

    def once(root: Path, jumps: bool) -> Journal:
        world, old, new = host(root)
        if jumps:
            world.change(stamps=stamps)
        if fault:
            world.change(quirks={NEW_ENGINE: "crashes while loading"})
        return ended(
            world,
            run(world, new.number),
            Result.ROLLED_BACK if fault else Result.COMMITTED,
            old if fault else new,
        )

    steady, jumping = once(tmp_path / "steady", False), once(tmp_path / "jumping", True)
    assert jumping.started_at > (jumping.ended_at or ""), "the clock went back all the time"
    assert (jumping.seconds, jumping.result, jumping.downtime) == (steady.seconds, steady.result, steady.downtime)
    assert [(record.phase, record.began_s, record.seconds) for record in jumping.phases] == [
        (record.phase, record.began_s, record.seconds) for record in steady.phases
    ]


# ---- the way back fails, too ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_a_way_back_that_fails_brings_back_what_it_can(tmp_path: Path, run: Callable[..., int], phase: Phase) -> None:
    world, old, new = host(tmp_path)
    forward = failing("canary", new.number, lambda: PhaseFailed("wrong answer"))
    back = failing(ACTIONS[phase], old.number, lambda: PhaseFailed("this, too"))
    world.before = lambda name, number: (forward(name, number), back(name, number))[0]
    status = run(world, new.number)
    journal = journal_of(world)
    assert "wrong answer" in journal.message
    back_phases = [record.phase for record in journal.phases if record.direction == "back"]
    assert list(dict.fromkeys(back_phases)) == list(BACK_PHASES), "nothing is left out"
    if phase in (Phase.FREE, Phase.WARM_UP):
        assert unlike(world, old) == []
        assert (status, journal.result) == (Exit.ROLLED_BACK, Result.ROLLED_BACK)
        assert any("this, too" in text for text in journal.warnings)
        return
    assert (status, journal.result) == (Exit.FAILED, Result.FAILED)
    assert f"In phase {phase}: this, too." in journal.message and "What runs now:" in journal.message
    assert "vllm-edge switch 1" in journal.message
    units = world.load()["units"]
    assert (units["e4b"]["active"], units["e4b"]["hash"]) == ("active", KEPT.input_hash)
    if phase in (Phase.CANARY, Phase.MEASURE):
        assert unlike(world, old) == []
    # When the cause is gone, what the message says brings the rest.
    world.before = lambda name, number: None
    expected = Result.COMMITTED if unlike(world, old) else Result.UNCHANGED
    ended(world, run(world, old.number), expected, old)


def test_an_engine_that_answers_and_is_of_the_other_generation_is_no_rollback(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canary asks a served name, and cannot know whose it is."""
    world, _old, new = host(tmp_path)
    world.change(quirks={f"e2b@{new.hashes['e2b']}": "cannot be stopped"})
    world.before = failing("measure", new.number, lambda: PhaseFailed("over budget"))
    monkeypatch.setattr(world, "silent", lambda state, wanted, name: False)
    journal = journal_for(world, run(world, new.number), Result.FAILED)
    assert "engines that run and should not, or otherwise: e2b" in journal.message


def test_an_engine_without_its_files_is_not_started_as_something_else(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    forward = failing("canary", new.number, lambda: PhaseFailed("wrong answer"))
    back = failing("install", old.number, lambda: PhaseFailed("the disk is full"))
    world.before = lambda name, number: (forward(name, number), back(name, number))[0]
    assert run(world, new.number) == Exit.FAILED
    units = world.load()["units"]
    assert units["e2b"]["active"] == "inactive", "its live files are those of the other generation"
    assert (units["31b-nvfp4"]["active"], units["e4b"]["active"]) == ("active", "active")


def test_the_ballast_makes_room_for_files_on_the_way_back(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    ballast = world.paths.state / ".switch.ballast"

    def full(name: str, number: int | None) -> None:
        if name == "canary" and number == new.number:
            raise PhaseFailed("wrong answer")
        if name == "install" and number == old.number and ballast.exists():
            raise PhaseFailed("No space left on device")

    world.before = full
    ended(world, run(world, new.number), Result.ROLLED_BACK, old)


def test_an_old_engine_that_does_not_come_back_leaves_the_others(tmp_path: Path, run: Callable[..., int]) -> None:
    world, _old, new = host(tmp_path)

    def breaks(name: str, number: int | None) -> None:
        if name == "canary" and number == new.number:
            world.change(quirks={OLD_ENGINE: "crashes while loading"})
            raise PhaseFailed("wrong answer")

    world.before = breaks
    journal = journal_for(world, run(world, new.number), Result.FAILED)
    assert "In phase healthy: 31b-nvfp4 ended while it was loading." in journal.message
    assert "31b-nvfp4 failed, e4b active, e2b active" in journal.message
    assert {row["served_name"] for row in journal.canary} == {"auditor", "sentry"}


# ---- the disk ---------------------------------------------------------------------------------------------------


def full_disk(
    monkeypatch: pytest.MonkeyPatch, world: FakeWorld, phase: Phase, direction: str, *, ballast_helps: bool
) -> None:
    """From the journal write of this phase on the disk is full."""
    real = journal_module.write_durably
    state = {"full": False}

    def write(path: Path, text: str) -> None:
        data = json.loads(text)
        if data["phase"] == phase and data["direction"] == direction:
            state["full"] = True
        if state["full"] and (not ballast_helps or (world.paths.state / ".switch.ballast").exists()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, text)

    monkeypatch.setattr(journal_module, "write_durably", write)


@pytest.mark.parametrize("phase", PHASES)
def test_a_full_disk_takes_the_ballast_and_the_switch_goes_on(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    world, _old, new = host(tmp_path)
    full_disk(monkeypatch, world, phase, "forward", ballast_helps=True)
    ended(world, run(world, new.number), Result.COMMITTED, new)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_cannot_be_journalled_does_not_act(
    tmp_path: Path,
    run: Callable[..., int],
    recover: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: Phase,
) -> None:
    world, old, new = host(tmp_path)
    with monkeypatch.context() as patch:
        full_disk(patch, world, phase, "forward", ballast_helps=False)
        status = run(world, new.number)
    said = capsys.readouterr()
    assert "No space left on device" in said.err, "the journal cannot say it"
    serving = new if phase is Phase.CLEAN_UP else old
    assert unlike(world, serving) == []
    log = world.load()["log"]
    if phase in HARMLESS:
        assert status == Exit.REFUSED
    elif phase is Phase.CLEAN_UP:
        assert status == Exit.OK, "after the commit there is only onward"
    else:
        assert status == Exit.ROLLED_BACK
        assert "going back, canary: begins" in said.out, "verified, though without a journal"
    if phase not in (Phase.COMMIT, Phase.CLEAN_UP):
        assert f"{ACTIONS[phase]}@{new.number}" not in log
    # The journal on the disk did not see the end: recovery looks, and finds nothing wrong.
    before = {name: pid(world, name) for name in serving.engines}
    assert recover(world) == Exit.OK
    assert journal_of(world).result is not Result.FAILED
    assert unlike(world, serving) == []
    assert {name: pid(world, name) for name in serving.engines} == before


def test_without_room_for_the_ballast_nothing_begins(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, old, new = host(tmp_path)

    def allocate(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    journal = ended(world, run(world, new.number), Result.REFUSED, old)
    assert "df -h" in journal.message and world.load()["log"] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], timeout=20, check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("phase", ACTIONS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
def test_a_disk_that_really_fills_up(
    tmp_path: Path,
    small_disk: Path,
    run: Callable[..., int],
    recover: Callable[..., int],
    phase: Phase,
    again: bool,
) -> None:
    """Journal, generations and live files on one disk. Filled once, before this phase acts, the ballast is enough for
    all that has to be written. Filled before every action from then on, the ballast is eaten, too."""
    world, old, new = host(small_disk / "host")
    elsewhere = tmp_path / "host.json"  # units and containers are not on that disk
    elsewhere.write_bytes(world.file.read_bytes())
    world.file = elsewhere
    actions: list[str] = []

    def before(name: str, number: int | None) -> None:
        if actions or name == ACTIONS[phase]:
            if again or not actions:
                fill(small_disk)
            actions.append(name)

    world.before = before
    status = run(world, new.number)
    now = committed.committed(world.paths)
    assert now is not None
    serving = {generation.number: generation for generation in (old, new)}[now.generation]
    missing = unlike(world, serving)
    if not again:
        assert missing == []
        assert status == (Exit.OK if serving is new else Exit.ROLLED_BACK)
    elif status in (Exit.OK, Exit.ROLLED_BACK, Exit.REFUSED):
        assert missing == []
    else:
        # Where live files were overwritten already the old ones cannot come back on a full disk: e2b's alone.
        units = world.load()["units"]
        others = [name for name in serving.engines if name != "e2b"]
        assert [name for name in others if units[name]["active"] != "active"] == []
    (small_disk / "filler").unlink()
    world.before = lambda name, number: None
    assert recover(world) == Exit.OK
    if unlike(world, serving):
        assert run(world, serving.number) == Exit.OK
    assert unlike(world, serving) == []


# ---- two at once, and who is asked to end -----------------------------------------------------------------------


@pytest.mark.parametrize("phase", ACTIONS)
def test_a_second_switch_is_refused_with_the_first_ones_name_and_phase(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str], phase: Phase
) -> None:
    world, _old, new = host(tmp_path)
    seen: list[tuple[int, str]] = []

    def second(name: str, number: int | None) -> None:
        if name == ACTIONS[phase] and not seen:
            log = world.load()["log"]
            status = switch_run.run_switch(world.paths, 1, Choice(asked_by="bob"))
            seen.append((status, capsys.readouterr().err))
            assert world.load()["log"] == log, "it did nothing"
            assert switch_run.run_recover(world.paths, boot=False) == Exit.BUSY

    world.before = second
    ended(world, run(world, new.number), Result.COMMITTED, new)
    assert seen[0][0] == Exit.BUSY
    assert f"asked by site.yml by alice, phase {phase}" in seen[0][1]


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_goes_back(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    world, old, new = host(tmp_path)
    sent: list[str] = []

    def send(name: str, number: int | None) -> None:
        if name == ACTIONS.get(phase) and number == new.number and not sent:
            sent.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

    world.before = send
    if phase is Phase.COMMIT:
        real = committed.commit

        def commit(*arguments: Any, **named: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            real(*arguments, **named)

        monkeypatch.setattr(committed, "commit", commit)
    status = run(world, new.number)
    if phase in HARMLESS:
        journal = ended(world, status, Result.REFUSED, old)
    elif phase in (Phase.COMMIT, Phase.CLEAN_UP):
        ended(world, status, Result.COMMITTED, new)  # too late to go back: it goes on to its end
        return
    else:
        journal = ended(world, status, Result.ROLLED_BACK, old)
    assert "SIGTERM asked the switch to end" in journal.message
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are given back"


def test_sigterm_between_two_phases_is_obeyed_before_the_commit(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, old, new = host(tmp_path)
    real = journal_module.write_durably

    def write(path: Path, text: str) -> None:
        if json.loads(text)["phase"] == Phase.COMMIT:
            os.kill(os.getpid(), signal.SIGTERM)
        real(path, text)

    monkeypatch.setattr(journal_module, "write_durably", write)
    journal = ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert "in phase commit" in journal.message


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_a_second_sigterm_is_ignored_on_the_way_back(
    tmp_path: Path, run: Callable[..., int], phase: Phase, capsys: pytest.CaptureFixture[str]
) -> None:
    world, old, new = host(tmp_path)

    def send(name: str, number: int | None) -> None:
        if (name, number) in (("healthy", new.number), (ACTIONS[phase], old.number)):
            os.kill(os.getpid(), signal.SIGTERM)

    world.before = send
    ended(world, run(world, new.number), Result.ROLLED_BACK, old)
    assert "goes back already" in capsys.readouterr().err


@pytest.mark.parametrize("phase", [phase for phase in ROLLS_BACK if phase is not Phase.COMMIT])
@pytest.mark.parametrize("how", ["signal", "engines end first"])
def test_a_host_that_goes_down_leaves_it_to_the_boot(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], phase: Phase, how: str
) -> None:
    world, old, new = host(tmp_path)

    def down(name: str, number: int | None) -> None:
        if name == ACTIONS[phase] and number == new.number:
            world.change(going_down=True)
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            raise PhaseFailed("engines end, the host goes down")

    world.before = down
    assert run(world, new.number) == Exit.FAILED
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is None and journal.phase is phase
    assert not any(record.direction == "back" for record in journal.phases)
    log = world.load()["log"]
    assert recover(world) == Exit.OK, "ExecStopPost at a shutdown"
    assert world.load()["log"] == log, "touches nothing"
    world.change(going_down=False)
    world.before = lambda name, number: None
    assert recover(world) == Exit.OK
    assert unlike(world, old) == []


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_a_host_that_goes_down_on_the_way_back_leaves_it_to_the_boot(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], phase: Phase
) -> None:
    world, old, new = host(tmp_path)

    def down(name: str, number: int | None) -> None:
        if (name, number) == ("canary", new.number):
            raise PhaseFailed("wrong answer")
        if (name, number) == (ACTIONS[phase], old.number):
            world.change(going_down=True)
            os.kill(os.getpid(), signal.SIGTERM)

    world.before = down
    assert run(world, new.number) == Exit.FAILED
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is None and journal.direction == "back"
    world.change(going_down=False)
    world.before = lambda name, number: None
    assert recover(world) == Exit.OK
    assert unlike(world, old) == []


def test_interrupted_raised_by_the_world_itself_goes_back(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    world.before = failing("healthy", new.number, lambda: Interrupted("SIGTERM"), times=1)
    ended(world, run(world, new.number), Result.ROLLED_BACK, old)


# ---- first run --------------------------------------------------------------------------------------------------


def first(tmp_path: Path) -> tuple[FakeWorld, Generation]:
    world = new_host(tmp_path)
    return world, store.load(world.paths, put(world.paths, OLD))


def test_the_first_switch_of_a_host(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old = first(tmp_path)
    journal = ended(world, run(world, old.number, "inventory"), Result.COMMITTED, old)
    assert journal.from_generation is None and journal.stop == ()


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_a_first_switch_that_fails_stops_what_it_started(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    world, old = first(tmp_path)
    if phase is Phase.COMMIT:

        def commit(*arguments: Any, **named: Any) -> None:
            raise model.GenerationError("the disk said no")

        monkeypatch.setattr(committed, "commit", commit)
    else:
        world.before = failing(ACTIONS[phase], old.number, lambda: PhaseFailed("the fault of this test"), times=1)
        if phase is Phase.DRAIN:
            world.before = failing("stop", old.number, lambda: PhaseFailed("the fault of this test"), times=1)
    status = run(world, old.number, "inventory")
    journal = ended(world, status, Result.REFUSED if phase in HARMLESS else Result.ROLLED_BACK, None)
    assert committed.committed(world.paths) is None
    if phase not in HARMLESS:
        assert "Nothing served before, and nothing serves now" in journal.message


def test_a_first_switch_whose_engines_cannot_be_stopped_again_says_so(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old = first(tmp_path)
    world.change(quirks={"e4b": "cannot be stopped", "e2b": "canary wrong"})
    journal = journal_for(world, run(world, old.number), Result.FAILED)
    assert "e4b did not stop" in journal.message and "Nothing is committed" in journal.message


# ---- repair -----------------------------------------------------------------------------------------------------


def test_a_repair_brings_back_what_is_missing_and_touches_nothing_that_serves(
    tmp_path: Path, run: Callable[..., int]
) -> None:
    world, old, _ = host(tmp_path)
    world.towards = old.number
    world.stop(Moves(stop=("e2b",)))
    (world.paths.unit_file("vllm-e2b.service")).unlink()
    kept = {name: pid(world, name) for name in ("31b-nvfp4", "e4b")}
    journal = ended(world, run(world, old.number), Result.COMMITTED, old)
    assert {name: pid(world, name) for name in kept} == kept
    assert journal.start == ("e2b",) and journal.from_generation == journal.generation
    now = committed.committed(world.paths)
    assert now is not None and now.previous_generation is None


def test_a_repair_that_fails_rolls_nothing_back(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, _ = host(tmp_path)
    world.towards = old.number
    world.stop(Moves(stop=("e2b",)))
    world.change(quirks={"e2b": "crashes while loading"})
    kept = {name: pid(world, name) for name in ("31b-nvfp4", "e4b")}
    journal = journal_for(world, run(world, old.number), Result.FAILED)
    assert "Repairing generation 1 (nvfp4-tp2) failed in phase healthy" in journal.message
    assert "31b-nvfp4 active, e4b active, e2b failed" in journal.message
    assert {name: pid(world, name) for name in kept} == kept
    assert not any(record.direction == "back" for record in journal.phases)


# ---- what cannot be read ----------------------------------------------------------------------------------------


def test_a_generation_that_is_not_there_is_refused_in_the_journal(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, _ = host(tmp_path)
    journal = ended(world, run(world, 77), Result.REFUSED, old)
    assert "there are: 1, 2" in journal.message and journal.generation == 77


def test_a_damaged_generation_is_refused(tmp_path: Path, run: Callable[..., int]) -> None:
    world, old, new = host(tmp_path)
    (new.directory / "engines" / "e2b" / "docker-create").write_text("--name=vllm-e2b\nx\n")
    journal = ended(world, run(world, new.number), Result.REFUSED, old)
    assert "generation 2 is damaged" in journal.message.lower()


def test_no_switch_without_a_way_back_where_the_committed_generation_is_damaged(
    tmp_path: Path, run: Callable[..., int]
) -> None:
    world, old, new = host(tmp_path)
    (old.directory / "generation.json").write_text("{}")
    status = run(world, new.number)
    journal = journal_of(world)
    assert (status, journal.result) == (Exit.REFUSED, Result.REFUSED)
    assert "nothing to go back to" in journal.message and str(old.directory) in journal.message


@pytest.mark.parametrize("fails", ["", "before the stop", "after it"])
def test_a_committed_generation_without_a_directory_is_left_with_a_warning(
    tmp_path: Path, run: Callable[..., int], fails: str
) -> None:
    """As an older release has set the host up."""
    world, old, new = host(tmp_path)
    old.directory.rename(tmp_path / "elsewhere")
    if fails == "before the stop":
        world.change(failing_hooks=["before_drain"])
        before = world.load()["units"]
        journal = journal_for(world, run(world, new.number), Result.ROLLED_BACK)
        assert world.load()["units"] == before and "were not touched" in journal.message
    elif fails:
        world.change(quirks={NEW_ENGINE: "crashes while loading"})
        status = run(world, new.number)
        journal = journal_for(world, status, Result.FAILED)
        assert "cannot be brought back" in journal.message
        assert world.load()["units"]["e4b"]["active"] == "active", "what was kept is not touched"
    else:
        journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    assert "There is nothing to go back to" in journal.warnings[0]


def test_a_damaged_record_of_what_is_committed_is_refused(tmp_path: Path, run: Callable[..., int]) -> None:
    world, _old, new = host(tmp_path)
    world.paths.active_profile.write_text("{")
    status = run(world, new.number)
    assert (status, journal_of(world).result) == (Exit.REFUSED, Result.REFUSED)
    assert world.load()["log"] == []


def test_a_watch_that_breaks_costs_its_numbers_only(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _old, new = host(tmp_path)

    def watch(wanted: Generation, former: Generation | None) -> None:
        raise OSError("no sockets left")

    monkeypatch.setattr(world, "watch", watch)
    journal = ended(world, run(world, new.number), Result.COMMITTED, new)
    assert journal.downtime == {} and "no sockets left" in journal.warnings[0]


def test_a_world_that_cannot_be_opened_is_no_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception that nobody catches would end Python with status 1, which says `rolled back`."""

    def broken(paths: HostPaths) -> None:
        raise ImportError("no docker")

    monkeypatch.setattr(switch_run, "_open_world", broken)
    world, _, _ = host(tmp_path)
    assert switch_run.run_switch(world.paths, 2, Choice("-e", asked_by="x")) == Exit.FAILED
    assert "no docker" in capsys.readouterr().err


def test_a_reader_that_is_gone_does_not_end_the_switch(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _old, new = host(tmp_path)

    def gone(*arguments: Any, **named: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    status = run(world, new.number)
    monkeypatch.undo()
    assert status == Exit.OK and unlike(world, new) == []


# ---- recovery ---------------------------------------------------------------------------------------------------


def test_nothing_to_recover(tmp_path: Path, recover: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    world, old, _ = host(tmp_path)
    assert recover(world) == Exit.OK
    assert "there was no switch" in capsys.readouterr().out
    assert world.load()["log"] == [] and unlike(world, old) == []


def test_a_copy_that_is_missing_in_the_history_is_made(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int]
) -> None:
    world, _old, new = host(tmp_path)
    run(world, new.number)
    for path in world.paths.history.iterdir():
        path.unlink()
    assert recover(world) == Exit.OK
    assert history(world.paths) == [read_journal(world.paths)]


def test_a_busy_lock_keeps_recovery_away(
    tmp_path: Path, recover: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, _ = host(tmp_path)
    with Lock(world.paths):
        assert recover(world) == Exit.BUSY
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"id": "x"}', "\x00\x00"])
def test_a_damaged_journal_is_recovered_from_and_kept(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], damage: str
) -> None:
    world, old, _ = host(tmp_path)
    world.towards = old.number
    world.stop(Moves(stop=("e2b", "31b-nvfp4")))
    world.paths.switch_journal.write_text(damage)
    assert recover(world) == Exit.OK
    assert unlike(world, old) == []
    journal = journal_of(world)
    assert journal.result is Result.ROLLED_BACK and "is kept as" in journal.warnings[0]
    kept = [path for path in world.paths.history.iterdir() if "damaged" in path.name]
    assert len(kept) == 1 and kept[0].read_text() == damage


def test_a_switch_goes_back_first_where_the_former_one_did_not_end(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world, _old, new = host(tmp_path)
    killed(world, run, "healthy", new.number)
    ended(world, run(world, new.number, asked_by="bob"), Result.COMMITTED, new)
    assert sorted(str(journal.result) for journal in history(world.paths)) == ["committed", "rolled_back"]
    assert "going back first" in capsys.readouterr().out


class Killed(BaseException):
    """Stands for SIGKILL where the state of the process does not matter; the real one is in tests/integration."""


def killed(world: FakeWorld, run: Callable[..., int], name: str, number: int) -> None:
    world.before = failing(name, number, Killed, times=1)
    with pytest.raises(Killed):
        run(world, number)
    world.before = lambda name, number: None
    journal = read_journal(world.paths)
    assert journal is not None and journal.result is None


def test_a_recovery_of_the_same_boot_counts_on(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int]
) -> None:
    world, old, new = host(tmp_path)
    killed(world, run, "healthy", new.number)
    begun = world.monotonic()
    world.change(now=begun + 50)
    assert recover(world) == Exit.OK
    journal = journal_of(world)
    assert unlike(world, old) == []
    assert journal.seconds is not None and journal.seconds > 50
    starts = [record.began_s for record in journal.phases]
    assert starts == sorted(starts)
    healthy = [record for record in journal.phases if record.phase is Phase.HEALTHY]
    assert (healthy[0].outcome, healthy[0].detail) == ("failed", "the program that ran the switch was ended here")
    first_back = next(record for record in journal.phases if record.direction == "back")
    gap = journal.downtime["architect"].gaps[0]
    assert gap.from_s == pytest.approx(first_back.began_s, abs=2), "in the switch's own time"


def test_a_recovery_after_a_reboot_goes_on_where_the_journal_was(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int]
) -> None:
    world, old, new = host(tmp_path)
    killed(world, run, "canary", new.number)
    world.change(now=3.0, boot_id="boot-2")
    assert recover(world) == Exit.OK
    journal = journal_of(world)
    assert unlike(world, old) == []
    assert all((record.seconds or 0) >= 0 for record in journal.phases)
    starts = [record.began_s for record in journal.phases]
    assert starts == sorted(starts)


@pytest.mark.parametrize("away", [20, 10_000])
def test_a_recovery_waits_for_docker(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], away: int
) -> None:
    world, old, new = host(tmp_path)
    killed(world, run, "healthy", new.number)
    world.change(docker_away=away)
    assert recover(world) == Exit.OK
    assert unlike(world, old) == []


def test_a_recovery_that_fails_says_what_runs(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int]
) -> None:
    world, _old, new = host(tmp_path)
    killed(world, run, "healthy", new.number)
    world.change(quirks={OLD_ENGINE: "crashes while loading"})
    assert recover(world) == Exit.FAILED
    journal = journal_of(world)
    assert journal.result is Result.FAILED and "31b-nvfp4 failed, e4b active, e2b active" in journal.message


# ---- recovery at boot -------------------------------------------------------------------------------------------


class FakeSystemd:
    """The orders that a boot gives."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def stop(self, units: list[str], timeout_s: float) -> str | None:
        self.orders.append(f"stop {' '.join(units)}")
        return None

    def daemon_reload(self) -> None:
        self.orders.append("daemon-reload")

    def enable(self, unit: str) -> None:
        self.orders.append(f"enable {unit}")

    def start(self, units: list[str], *, wait: bool = False) -> None:
        assert not wait, "the target waits for this unit: that would never end"
        self.orders.append(f"start {' '.join(units)}")


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in HARMLESS and phase is not Phase.COMMIT])
def test_at_boot_files_and_target_are_put_back_and_nothing_is_waited_for(
    tmp_path: Path,
    run: Callable[..., int],
    recover: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
) -> None:
    world, old, new = host(tmp_path)
    killed(world, run, ACTIONS[phase], new.number)
    systemd = FakeSystemd()
    monkeypatch.setattr(switch_run, "Systemd", lambda: systemd)
    log = world.load()["log"]
    world.change(boot_id="boot-2", now=5.0, docker_away=10_000)
    assert recover(world, boot=True) == Exit.OK
    assert world.load()["log"] == log, "no engine, no container and no GPU is asked"
    serving = new if phase is Phase.CLEAN_UP else old
    assert live.live_changes(serving, world.paths) == []
    journal = journal_of(world)
    assert journal.result is (Result.COMMITTED if phase is Phase.CLEAN_UP else Result.ROLLED_BACK)
    assert "not verified" in journal.message
    gone = {"31b-w4a16"} if phase.value in ("start", "healthy", "warm_up", "canary", "measure") else set()
    gone |= {"31b-nvfp4"} if phase is Phase.CLEAN_UP else set()
    stops = [f"stop vllm-{name}.service" for name in sorted(gone)]
    assert systemd.orders == [*stops, "daemon-reload", "enable vllm-edge.target", "start vllm-edge.target"]


def test_at_boot_without_an_unfinished_switch_nothing_is_done(
    tmp_path: Path, recover: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _, _ = host(tmp_path)
    monkeypatch.setattr(switch_run, "Systemd", lambda: pytest.fail("systemd was asked"))
    assert recover(world, boot=True) == Exit.OK


def test_at_boot_a_damaged_generation_is_said(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, old, new = host(tmp_path)
    killed(world, run, "healthy", new.number)
    (old.directory / "generation.json").unlink()
    monkeypatch.setattr(switch_run, "Systemd", FakeSystemd)
    assert recover(world, boot=True) == Exit.FAILED
    assert "generation 1 is damaged" in journal_of(world).message.lower()


def test_a_first_switch_that_was_killed_leaves_nothing_at_boot(
    tmp_path: Path, run: Callable[..., int], recover: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, old = first(tmp_path)
    killed(world, run, "healthy", old.number)
    monkeypatch.setattr(switch_run, "Systemd", FakeSystemd)
    assert recover(world, boot=True) == Exit.OK
    assert journal_of(world).result is Result.ROLLED_BACK


def test_threads_of_a_watch_do_not_take_the_signal(tmp_path: Path, run: Callable[..., int]) -> None:
    """Python hands signals to the main thread, also where another one runs."""
    world, old, new = host(tmp_path)
    done = threading.Event()
    threads: list[threading.Thread] = []

    def send(name: str, number: int | None) -> None:
        if (name, number) == ("healthy", new.number):
            thread = threading.Thread(target=lambda: (os.kill(os.getpid(), signal.SIGTERM), done.set()))
            threads.append(thread)
            thread.start()
            done.wait(5)
            thread.join()

    world.before = send
    ended(world, run(world, new.number), Result.ROLLED_BACK, old)


def test_serving_generations_are_what_the_helper_says(tmp_path: Path) -> None:
    """The judge of these tests can say no."""
    world, old, new = host(tmp_path)
    assert unlike(world, old) == []
    assert unlike(world, new) != []
    world.change(foreign={**world.load()["foreign"], "started_at": "now"})
    assert unlike(world, old) == ["somebody else's container was touched"]
    other = new_host(tmp_path / "other")
    serve(other, NEW)
    assert unlike(other, None) != []
