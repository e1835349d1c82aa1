# SPDX-License-Identifier: Apache-2.0
"""The transaction on a full disk, under signals, beside a second switch, at a shutdown; its recovery, and what clients
of the gateway see until then."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.gateway.view import build_view
from ansible.module_utils.vllm_edge.generation import committed, live, store
from ansible.module_utils.vllm_edge.generation.model import Committed, GenerationError
from ansible.module_utils.vllm_edge.names import TARGET
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import journal as journal_module
from ansible.module_utils.vllm_edge.switch.history import read_switch_progress
from ansible.module_utils.vllm_edge.switch.journal import history, read_journal
from ansible.module_utils.vllm_edge.switch.model import (
    BACK_PHASES,
    HARMLESS,
    ONWARD,
    PHASES,
    Exit,
    Phase,
    Result,
)
from ansible.module_utils.vllm_edge.system.systemd import Systemd
from fake_host import Clock, FakeSystemctl
from fake_machine import FakeMachine
from switch_host import SwitchHost

ROLLS_BACK = [phase for phase in PHASES[: PHASES.index(Phase.COMMIT) + 1] if phase not in HARMLESS]
ACTIONS = [phase for phase in Phase if phase is not Phase.COMMIT]
"""The machine's actions; the commit is none of the machine's."""


GONE = dict.fromkeys(["architect", "sentry", "worker"], "away")
"""The names of what stops."""
BACK = dict.fromkeys(GONE, "provisional")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def see(bench: SwitchHost) -> tuple[str | None, dict[str, str]]:
    """What clients of the gateway see: the profile that serves, and the names that are not simply up."""
    view = build_view("edge", store.load_committed(bench.paths), read_switch_progress(bench.paths), lambda engine: None)
    return view.profile, {role.name: role.state for role in view.roles if role.state != "up"}


def at_write(monkeypatch: pytest.MonkeyPatch, act: Callable[[dict[str, Any]], None]) -> None:
    """Call `act` with the journal before each time that it is written."""
    write = journal_module.write_durably

    def act_and_write(path: Path, text: str, mode: int) -> None:
        act(json.loads(text))
        write(path, text, mode)

    monkeypatch.setattr(journal_module, "write_durably", act_and_write)


def fill_disk(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """From the journal write of this phase on the disk is full."""
    full: list[bool] = []

    def refuse(journal: dict[str, Any]) -> None:
        if (journal["phase"], journal["direction"]) == (phase, "forward"):
            full.append(True)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at_write(monkeypatch, refuse)


def end_at_boot(bench: SwitchHost) -> None:
    """The host has gone down and comes back without faults."""
    bench.machine.change(going_down=False)
    bench.calm()
    assert bench.recover() == Exit.OK
    assert bench.unlike(bench.old) == []


@pytest.mark.parametrize("phase", PHASES)
def test_no_phase_acts_unjournalled(bench: SwitchHost, capsys: pytest.CaptureFixture[str], phase: Phase) -> None:
    with bench.monkeypatch.context() as patch:
        fill_disk(patch, phase)
        status = bench.switch()
    said = capsys.readouterr()
    assert "No space left on device" in said.err, "the journal cannot say it"
    serving = bench.new if phase in ONWARD else bench.old
    assert serving is not None and bench.unlike(serving) == []
    if phase in HARMLESS:
        assert status == Exit.REFUSED
    elif phase in ONWARD:
        assert status == Exit.OK, "after the commit there is only onward"
    else:
        assert status == Exit.ROLLED_BACK
        assert "going back, canary: begins" in said.out, "verified, though without a journal"
    if phase is not Phase.COMMIT and phase not in ONWARD:
        assert f"{phase}@2" not in bench.log
    # The journal on the disk did not see the end: recovery looks, and finds nothing wrong.
    before = bench.pids(*serving.engines)
    assert bench.recover() == Exit.OK
    assert bench.journal.result is not Result.FAILED
    assert bench.unlike(serving) == []
    assert bench.pids(*serving.engines) == before


def test_without_room_for_the_ballast_nothing_begins(bench: SwitchHost) -> None:
    bench.monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert " is full" in bench.ends(Result.REFUSED).message and bench.log == []


@pytest.mark.parametrize("phase", ACTIONS)
def test_a_second_switch_is_told_of_it(bench: SwitchHost, capsys: pytest.CaptureFixture[str], phase: Phase) -> None:
    seen: list[tuple[int, str]] = []

    def second() -> None:
        log = bench.log
        status = bench.switch(1, origin="host", by="bob")
        seen.append((status, capsys.readouterr().err))
        assert bench.log == log, "it did nothing"
        assert (bench.recover(), capsys.readouterr().err) == (Exit.BUSY, "")

    bench.at(phase, second)
    bench.ends(Result.COMMITTED)
    ((status, said),) = seen
    assert status == Exit.BUSY and f"asked by site.yml by alice, phase {phase}" in said


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_goes_back(bench: SwitchHost, phase: Phase) -> None:
    bench.at(phase, terminate)
    if phase is Phase.COMMIT or phase in ONWARD:
        bench.ends(Result.COMMITTED)  # too late to go back: it goes on to its end
        return
    journal = bench.ends(Result.REFUSED if phase in HARMLESS else Result.ROLLED_BACK)
    assert "SIGTERM asked the switch to end" in journal.message
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are given back"


def test_a_library_that_catches_every_error_does_not_catch_the_signal(bench: SwitchHost) -> None:
    caught: list[Exception] = []

    def ask() -> None:
        try:
            terminate()
        except Exception as error:
            caught.append(error)

    bench.at("canary", ask)
    assert "SIGTERM asked the switch to end" in bench.ends(Result.ROLLED_BACK).message
    assert caught == []


def test_sigterm_between_phases_is_obeyed_before_the_commit(bench: SwitchHost) -> None:
    at_write(bench.monkeypatch, lambda journal: terminate() if journal["phase"] == Phase.COMMIT else None)
    assert "in phase commit" in bench.ends(Result.ROLLED_BACK).message


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_the_way_back_ignores_sigterm(bench: SwitchHost, phase: Phase, capsys: pytest.CaptureFixture[str]) -> None:
    bench.at("healthy", terminate)
    bench.at(phase, terminate, bench.old)
    bench.ends(Result.ROLLED_BACK)
    assert "goes back already" in capsys.readouterr().err


@pytest.mark.parametrize("phase", [phase for phase in ROLLS_BACK if phase is not Phase.COMMIT])
@pytest.mark.parametrize("how", ["signal", "engines end first"])
def test_a_host_that_goes_down_leaves_it_to_the_boot(bench: SwitchHost, phase: Phase, how: str) -> None:
    bench.at(phase, lambda: bench.machine.change(going_down=True))
    if how == "signal":
        bench.at(phase, terminate)
    bench.fail(phase, "engines end, the host goes down")
    assert bench.switch() == Exit.FAILED
    journal = read_journal(bench.paths)
    assert journal is not None and journal.result is None and journal.phase is phase
    assert not any(record.direction == "back" for record in journal.phases)
    log = bench.log
    assert bench.recover() == Exit.OK, "ExecStopPost at a shutdown"
    assert bench.log == log, "touches nothing"
    end_at_boot(bench)


@pytest.mark.parametrize("phase", BACK_PHASES)
def test_a_host_that_goes_down_on_the_way_back_leaves_it_to_the_boot(bench: SwitchHost, phase: Phase) -> None:
    bench.fail("canary", "wrong answer")
    bench.at(phase, lambda: bench.machine.change(going_down=True), bench.old)
    bench.at(phase, terminate, bench.old)
    assert bench.switch() == Exit.FAILED
    journal = read_journal(bench.paths)
    assert journal is not None and journal.result is None and journal.direction == "back"
    end_at_boot(bench)


def test_nothing_to_recover(bench: SwitchHost, systemctl: FakeSystemctl, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.recover() == Exit.OK
    assert "there was no switch" in capsys.readouterr().out
    assert bench.recover(boot=True) == Exit.OK
    assert systemctl.calls == [] and bench.log == [] and bench.unlike(bench.old) == []
    bench.switch()
    for path in bench.paths.history.iterdir():
        path.unlink()
    assert bench.recover() == Exit.OK
    assert history(bench.paths) == [read_journal(bench.paths)]


def recover_verified(bench: SwitchHost, result: Result) -> None:
    """Recover: one of the two generations serves in full, and was asked and measured after everything that started."""
    assert bench.recover() == Exit.OK
    assert read_switch_progress(bench.paths) is None
    assert bench.journal.result is result and len(history(bench.paths)) == 1
    serving = bench.new if result is Result.COMMITTED else bench.old
    assert serving is not None and bench.unlike(serving) == []
    if result is not Result.REFUSED:
        last = {entry: place for place, entry in enumerate(bench.log)}
        started = last[f"start@{serving.number}"]
        assert all(last[f"{action}@{serving.number}"] > started for action in ("canary", "measure"))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_switch(bench: SwitchHost, phase: Phase, moment: str) -> None:
    bench.kill(phase, moment=moment)
    progress = read_switch_progress(bench.paths)
    assert progress is not None and progress.phase == phase
    if phase in ONWARD or (phase is Phase.COMMIT and moment == "after"):
        assert see(bench) == ("w4a16-tp2", {})
        recover_verified(bench, Result.COMMITTED)
    elif phase in HARMLESS:
        assert see(bench) == ("nvfp4-tp2", {})
        recover_verified(bench, Result.REFUSED)
        assert not any(entry.startswith("stop") for entry in bench.log)
    else:
        returned = PHASES.index(phase) + (moment == "after") > PHASES.index(Phase.HEALTHY)
        assert see(bench) == ("nvfp4-tp2", BACK if returned else GONE)
        recover_verified(bench, Result.ROLLED_BACK)
        assert ("Clients could already reach 31b-w4a16 (from" in bench.journal.message) is returned
        assert f"drain@1{' 31b-w4a16 e2b' if returned else ''}" in bench.log, "only these had clients"


def test_a_signal_waits_until_journal_and_gateway_agree_on_an_engine(bench: SwitchHost) -> None:
    at_write(bench.monkeypatch, lambda journal: terminate() if len(journal["provisional"]) == 1 else None)
    journal = bench.ends(Result.ROLLED_BACK)
    assert "return 31b-w4a16@2" in bench.log and "SIGTERM asked" in journal.message
    assert [*journal.provisional] == ["31b-w4a16"]


@pytest.mark.parametrize("towards", ["forward", "back"])
def test_an_engine_that_cannot_be_journalled_returns_by_itself_only_on_the_way_back(
    bench: SwitchHost, towards: str
) -> None:
    def refuse(journal: dict[str, Any]) -> None:
        told = journal["provisional" if towards == "forward" else "restored"]
        if told and (journal["phase"], journal["direction"]) == ("healthy", towards):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at_write(bench.monkeypatch, refuse)
    if towards == "back":
        bench.fail("measure", "over budget")
    bench.ends(Result.COMMITTED if towards == "forward" else Result.ROLLED_BACK)
    assert any(entry.startswith("return") and entry.endswith("@1") for entry in bench.log) is (towards == "back")
    assert any(entry.startswith("return") and entry.endswith("@2") for entry in bench.log) is (towards == "back")


def test_a_way_back_without_the_record_of_what_is_committed_waits_for_its_engines(bench: SwitchHost) -> None:
    bench.fail("measure", "over budget")
    with bench.monkeypatch.context() as patch:
        read = committed.committed

        def damaged(paths: HostPaths) -> Committed | None:
            if "free@1" in bench.log:
                raise GenerationError("damaged")
            return read(paths)

        patch.setattr(committed, "committed", damaged)
        bench.switch()
    assert "healthy@1" in bench.log and "Engines come back together: damaged" in bench.journal.warnings


@pytest.mark.parametrize("boot", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_switch_that_is_killed_between_two_engines(
    bench: SwitchHost, systemctl: FakeSystemctl, moment: str, boot: bool
) -> None:
    """The journal has the engine before clients reach it."""
    bench.kill("return_early", moment=moment)
    assert see(bench) == ("nvfp4-tp2", {**BACK, "sentry": "away"})
    if boot:
        assert bench.recover(boot=True) == Exit.OK and see(bench) == ("nvfp4-tp2", {})
        assert bench.machine.load()["away"] == []
        assert "could already reach 31b-w4a16 (from" in bench.journal.message
    else:
        recover_verified(bench, Result.ROLLED_BACK)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", BACK_PHASES)
@pytest.mark.parametrize("recovery", [False, True], ids=["going back", "in the recovery"])
def test_a_killed_way_back(bench: SwitchHost, phase: Phase, moment: str, recovery: bool) -> None:
    if recovery:
        bench.kill("healthy")
    else:
        bench.fail("measure", "over budget")
    bench.kill(phase, bench.old, moment=moment, recovery=recovery)
    returned = BACK_PHASES.index(phase) + (moment == "after") > BACK_PHASES.index(Phase.HEALTHY)
    assert see(bench) == ("nvfp4-tp2", {} if returned else GONE)
    recover_verified(bench, Result.ROLLED_BACK)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", [Phase.INSTALL, Phase.START, Phase.HEALTHY])
def test_a_killed_first_switch(first: SwitchHost, phase: Phase, moment: str) -> None:
    first.kill(phase, moment=moment)
    assert first.recover() == Exit.OK
    assert first.journal.result is Result.ROLLED_BACK and first.unlike(None) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"id": "x"}', "\x00\x00"])
def test_a_damaged_journal_is_recovered_from_and_kept(stopped: SwitchHost, damage: str) -> None:
    stopped.stop("31b-nvfp4")
    stopped.paths.switch_journal.write_text(damage)
    assert read_switch_progress(stopped.paths) is None and see(stopped) == ("nvfp4-tp2", {}), "it takes nobody away"
    assert stopped.recover() == Exit.OK
    assert stopped.unlike(stopped.old) == []
    journal = stopped.journal
    assert journal.result is Result.ROLLED_BACK and "is kept as" in journal.warnings[0]
    (kept,) = [path for path in stopped.paths.history.iterdir() if "damaged" in path.name]
    assert kept.read_text() == damage


def test_a_switch_first_goes_back_where_one_did_not_end(bench: SwitchHost, capsys: pytest.CaptureFixture[str]) -> None:
    bench.kill("healthy")
    bench.ends(Result.COMMITTED, by="bob")
    assert sorted(str(journal.result) for journal in history(bench.paths)) == ["committed", "rolled_back"]
    assert "going back first" in capsys.readouterr().out


@pytest.mark.parametrize("reboot", [False, True])
def test_a_recovery_counts_on_where_the_journal_was(bench: SwitchHost, reboot: bool) -> None:
    bench.kill("healthy")
    if reboot:
        bench.machine.change(now=3.0, boot_id="boot-2")
    else:
        bench.machine.change(now=bench.machine.clock() + 50)
    assert bench.recover() == Exit.OK
    assert bench.unlike(bench.old) == []
    journal = bench.journal
    assert all((record.seconds or 0) >= 0 for record in journal.phases)
    starts = [record.began_s for record in journal.phases]
    assert starts == sorted(starts)
    if reboot:
        return
    assert journal.seconds is not None and journal.seconds > 50
    healthy = next(record for record in journal.phases if record.phase is Phase.HEALTHY)
    assert (healthy.outcome, healthy.detail) == ("failed", "the program that ran the switch was ended here")
    first_back = next(record for record in journal.phases if record.direction == "back")
    gap = journal.downtime["architect"].gaps[0]
    assert gap.from_s == pytest.approx(first_back.began_s, abs=2), "in the switch's own time"


@pytest.mark.parametrize("away", [20, 10_000])
def test_a_recovery_waits_for_docker(bench: SwitchHost, away: int) -> None:
    bench.kill("healthy")
    bench.machine.change(docker_away=away)
    assert bench.recover() == Exit.OK
    assert bench.unlike(bench.old) == []


def test_a_recovery_that_fails_says_what_runs(bench: SwitchHost) -> None:
    bench.kill("healthy")
    bench.machine.change(quirks={"31b-nvfp4": "crashes while loading"})
    assert bench.recover() == Exit.FAILED
    journal = bench.journal
    assert journal.result is Result.FAILED and "31b-nvfp4 failed, e4b active, e2b active" in journal.message


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch) -> FakeSystemctl:
    """What a boot is asked for."""
    fake = FakeSystemctl(Clock())
    monkeypatch.setattr(FakeMachine, "systemd", Systemd(fake), raising=False)
    return fake


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in HARMLESS and phase is not Phase.COMMIT])
def test_at_boot_files_and_target_are_only_put_back(bench: SwitchHost, systemctl: FakeSystemctl, phase: Phase) -> None:
    bench.kill(phase)
    log = bench.log
    bench.machine.change(boot_id="boot-2", now=5.0, docker_away=10_000)
    assert bench.recover(boot=True) == Exit.OK
    committed_now = phase in ONWARD
    serving = bench.new if committed_now else bench.old
    assert serving is not None
    assert bench.log == [*log, f"back@{serving.number}"], "no engine, no container and no GPU is asked"
    assert bench.machine.load()["away"] == [] and live.live_changes(serving, bench.paths) == []
    assert bench.journal.result is (Result.COMMITTED if committed_now else Result.ROLLED_BACK)
    assert "not verified" in bench.journal.message
    gone = {"31b-w4a16"} if phase.value in ("start", "healthy", "warm_up", "canary", "measure") else set()
    gone |= {"31b-nvfp4"} if committed_now else set()
    assert systemctl.calls == [
        *(["stop", f"vllm-{name}.service"] for name in sorted(gone)),
        ["daemon-reload"],
        ["enable", TARGET],
        ["start", "--no-block", TARGET],  # the target waits for this unit: to wait for it would never end
    ]


def test_at_boot_a_damaged_generation_is_said(bench: SwitchHost, systemctl: FakeSystemctl) -> None:
    bench.kill("healthy")
    (bench.paths.generation_dir(1) / "generation.json").unlink()
    assert bench.recover(boot=True) == Exit.FAILED
    assert "generation 1 is damaged" in bench.journal.message.lower()


@pytest.mark.parametrize("boot", [False, True])
def test_a_recovery_without_the_record_stops_no_engine(bench: SwitchHost, systemctl: FakeSystemctl, boot: bool) -> None:
    """It is no first switch, whose engines are stopped: these may be committed, and serve."""
    bench.kill(Phase.CLEAN_UP)
    bench.paths.active_profile.unlink()
    log = bench.log
    assert bench.recover(boot=boot) == Exit.FAILED
    assert bench.log == log and systemctl.calls == []
    assert "active-profile.json, which named generation 1 when" in bench.journal.message


def test_a_first_switch_that_was_killed_leaves_nothing_at_boot(first: SwitchHost, systemctl: FakeSystemctl) -> None:
    first.kill("healthy")
    assert first.recover(boot=True) == Exit.OK
    assert first.journal.result is Result.ROLLED_BACK
