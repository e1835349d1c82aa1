# SPDX-License-Identifier: Apache-2.0
"""The host of a switch: what moves, what is stopped and started, how long is waited, and what is said when it fails."""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.engine.loads import Load, remember_load
from ansible.module_utils.vllm_edge.engine.state import EngineState, write_state
from ansible.module_utils.vllm_edge.gateway import sync
from ansible.module_utils.vllm_edge.gateway.admin import HAProxy
from ansible.module_utils.vllm_edge.generation import model, store
from ansible.module_utils.vllm_edge.generation.model import Limits, SeenEngine
from ansible.module_utils.vllm_edge.names import LABEL_SIDECAR, TARGET
from ansible.module_utils.vllm_edge.switch import view
from ansible.module_utils.vllm_edge.switch.model import Done, Moves, Phase, PhaseFailed, decide_moves
from ansible.module_utils.vllm_edge.switch.steps import requests
from ansible.module_utils.vllm_edge.switch.stop import stop_engines
from ansible.module_utils.vllm_edge.system.docker import Container
from ansible.module_utils.vllm_edge.system.files import LockHeld
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.long_run import LongRun
from fake_host import OOM, ServingHost, failure, ok, until, write
from generations import engine


def test_what_moves_from_one_generation_to_another(host: ServingHost) -> None:
    moves = host.machine.moves(host.generation_with("e4b"))
    assert (moves.stop, moves.start, moves.keep) == (("e2b",), ("e4b",), ())
    changed = {Path(change.path).name: change.after is None for change in moves.files}
    assert changed["vllm-e2b.service"] and not changed["vllm-e4b.service"] and not changed[TARGET]
    moves = host.machine.moves(host.generation)
    assert not moves and moves.keep == ("e2b",)
    host.systemctl.unit(TARGET, ActiveState="inactive", UnitFileState="disabled", NeedDaemonReload="yes")
    host.systemctl.unit("vllm-e2b.service", NeedDaemonReload="yes")
    moves = host.machine.moves(host.generation)
    assert moves.target == ("not enabled", "not active", f"needs daemon-reload (vllm-e2b.service, {TARGET})")
    assert moves.keep == ("e2b",)
    # An ended container has no hash.
    host.docker.containers = [replace(host.docker.containers[0], status="exited")]
    assert host.machine.moves(host.generation).start == ("e2b",)


def test_engines_are_known_by_their_files_their_units_and_their_containers(host: ServingHost, tmp_path: Path) -> None:
    # A container without a unit, a unit that was linked from elsewhere, files without a unit; and what is not ours.
    host.docker.engine("orphan", "h")
    marked = f"# {model.MARK}\n[Service]\nExecStart=/opt/vllm-edge run-engine linked\n"
    host.systemctl.unit(
        "vllm-linked.service", ActiveState="active", SubState="running", FragmentPath=write(tmp_path / "l", marked)
    )
    foreign = write(tmp_path / "f", "[Service]\nExecStart=/usr/bin/vllm serve\n")
    host.systemctl.unit("vllm-foreign.service", ActiveState="active", FragmentPath=foreign)
    switch = write(tmp_path / "s", f"# {model.MARK}\n[Service]\nExecStart=/opt/vllm-edge recover --boot\n")
    host.systemctl.unit("vllm-edge-recover.service", ActiveState="active", FragmentPath=switch)
    host.systemctl.unit("vllm-lost.service", ActiveState="active", FragmentPath=tmp_path / "nothing")
    assert host.machine.moves(host.generation).stop == ("linked", "orphan")


@pytest.mark.parametrize("why", ["docker.service is not running", "connection refused"])
def test_docker_is_waited_for_and_then_named(host: ServingHost, why: str) -> None:
    def docker(away: bool) -> None:
        host.docker_runs = not away or why == "connection refused"
        host.docker.away = why if away and host.docker_runs else ""

    docker(away=True)
    host.clock.at(10, lambda: docker(away=False))
    assert host.machine.moves(host.generation).keep == ("e2b",)
    assert host.clock.now >= 1010
    docker(away=True)
    text = failure(lambda: host.machine.moves(host.generation)).text
    assert f"The Docker Engine did not answer for 60 s ({why})" in text and "'systemctl start docker.service'" in text


def test_what_cannot_be_asked_or_read_is_named(host: ServingHost) -> None:
    host.systemctl.busy = 4
    assert host.machine.moves(host.generation).keep == ("e2b",)
    host.systemctl.busy = 1000
    text = failure(lambda: host.machine.moves(host.generation)).text
    assert text.startswith("systemd cannot be asked: Failed to get properties")
    host.systemctl.busy = 0
    place = host.paths.engine_dir("e2b") / "engine.json"
    place.unlink()
    place.mkdir()
    assert "engine.json cannot be read" in failure(lambda: host.machine.moves(host.generation)).text


def test_units_are_stopped_side_by_side_with_a_deadline_above_systemds(host: ServingHost) -> None:
    host.serve("e4b")
    host.on_stop(containers=[])
    done = host.stop("e2b", "e4b")
    assert host.systemctl.orders("stop") == [["vllm-e2b.service", "vllm-e4b.service"]]
    assert done.detail == "e2b, e4b stopped in 0.0 s"
    assert done.warnings == () and host.docker.removed == []
    assert host.machine.stop(Moves()).detail == "no engine has to stop"
    host.systemctl.unit("vllm-e2b.service", TimeoutStopUSec="3min")
    host.stop()
    assert host.systemctl.patience_s == 240.0
    host.systemctl.unit("vllm-e2b.service", TimeoutStopUSec="infinity")
    host.stop()
    assert host.systemctl.patience_s == 900.0


def test_what_does_not_stop_is_named(host: ServingHost) -> None:
    host.systemctl.refuse["stop"] = "Job for vllm-e2b.service canceled."
    host.docker.containers = []
    failed = failure(lambda: host.stop())
    assert failed.text.startswith(
        "vllm-e2b.service is active 0 s after it was ordered to stop (Job for vllm-e2b.service canceled.)"
    )
    assert "state D" in failed.text and failed.engines == ("e2b",)


def test_a_container_that_cannot_be_removed_is_named(host: ServingHost) -> None:
    host.on_stop()
    host.docker.refuse_remove = "could not kill: tried to kill container, but did not receive an exit event"
    failed = failure(lambda: host.stop())
    assert "Container vllm-e2b could not be removed within 60 s (could not kill" in failed.text
    assert "a reboot ends it" in failed.text


def test_a_container_that_outlives_its_unit_or_has_none_is_removed_and_no_other(host: ServingHost) -> None:
    host.docker.engine("gone")
    done = host.stop("gone")
    assert host.systemctl.orders("stop") == [] and host.docker.removed == ["id-gone"]
    assert "vllm-gone outlived its unit" in done.detail
    host.on_stop("failed")
    own, kept = host.docker.containers[0], host.docker.engine("e4b")
    done = host.stop()
    assert host.docker.removed == ["id-gone", "id-e2b"] and host.docker.containers == [kept]
    assert done.warnings == ("Container vllm-e2b outlived its unit and was removed.",)
    # One that has ended goes without a word.
    host.docker.containers = [replace(own, status="exited")]
    assert host.stop().warnings == ()
    assert host.docker.removed == ["id-gone", "id-e2b", "id-e2b"]


@pytest.fixture
def finishing(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> ServingHost:
    """e2b finishes its requests when it is stopped, and has none; e4b is its neighbour."""
    monkeypatch.setattr(requests, "IDLE_POLL_S", 0.01)
    host.live(engine("e2b", shutdown_timeout_s=20), engine("e4b", port=8060))
    host.http.answers["http://127.0.0.1:8070/metrics"] = ok("vllm:num_requests_running 0")
    return host


@pytest.mark.parametrize(("running", "killed"), [([2, 1, 0, 0, 0], True), ([2, 0, 0, 1, 0, 0, 3], False)])
def test_an_idle_engine_need_not_take_its_time(finishing: ServingHost, running: list[int], killed: bool) -> None:
    """vLLM with --shutdown-timeout spends all of it after SIGTERM, whether requests run or not."""
    neighbour = finishing.docker.engine("e4b")
    counts = iter(running)
    finishing.http.answers["http://127.0.0.1:8070/metrics"] = lambda _: ok(
        f"vllm:num_requests_running {next(counts, running[-1])}"
    )
    finishing.on_stop(containers=[neighbour], during=lambda: finishing.wait_for_kill(60 if killed else 0.3))
    finishing.stop()
    assert finishing.docker.killed == (["id-e2b"] if killed else [])
    asked = len(finishing.http.asked)
    time.sleep(0.1)
    assert len(finishing.http.asked) <= asked + 1


def test_an_idle_engine_that_was_not_told_to_stop_yet_takes_requests(finishing: ServingHost) -> None:
    """systemd may take seconds to deliver SIGTERM, and until then the engine is nobody's to kill."""
    finishing.http.answers["/tokenize"] = ok({"tokens": [1]})
    early: list[list[str]] = []

    def during() -> None:
        time.sleep(0.2)
        early.append(list(finishing.docker.killed))
        finishing.http.answers["/tokenize"] = Answer(503)
        finishing.wait_for_kill()

    finishing.on_stop(containers=[], during=during)
    finishing.stop()
    assert (early, finishing.docker.killed) == ([[]], ["id-e2b"])


def test_without_docker_an_engine_takes_its_time(finishing: ServingHost) -> None:
    def during() -> None:
        finishing.docker.away = "connection refused"
        time.sleep(0.2)
        finishing.docker.away = ""

    finishing.on_stop(containers=[], during=during)
    assert finishing.stop().detail.startswith("e2b stopped in")
    assert finishing.docker.killed == []


def test_what_measures_engines_ends_with_a_word_before_they_stop(host: ServingHost) -> None:
    suite = LongRun(host.paths.run, "quality")
    ours = {name: Container(name, f"vllm-edge-{name}", "running", {LABEL_SIDECAR: name}) for name in ("bench", "probe")}
    theirs = Container("b" * 64, "web", "running", {})
    host.docker.containers += [theirs, *ours.values()]
    host.on_stop(containers=[theirs])
    with suite.alone():
        warnings = stop_engines(host.machine).warnings
        assert "a switch began, or a stop" in suite.find_trouble()
    why = "was ended, because engines stop and start."
    assert warnings == tuple(
        f"{what} {why}" for what in ("`vllm-edge quality`", "Container vllm-edge-bench", "Container vllm-edge-probe")
    )
    assert host.docker.removed == list(ours)
    host.docker.away = "connection refused"
    assert host.machine.away(host.generation, None, Moves(stop=("e2b",))).warnings == (), "a way back does so again"


def test_what_measures_engines_goes_on_where_none_moves(host: ServingHost) -> None:
    suite = LongRun(host.paths.run, "quality")
    with suite.alone():
        assert host.machine.away(host.generation, host.generation, Moves(keep=("e2b",))).warnings == ()
        assert not suite.find_trouble()


def test_names_go_away_and_come_back(host: ServingHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HAProxy, "is_stopped", lambda self: True)
    assert host.machine.away(host.generation, host.generation, Moves()).detail == "this host has no gateway"
    host.machine.publish(Phase.DRAIN)
    assert not host.paths.gateway.exists()
    host.machine.paths = paths = replace(host.paths, run=tmp_path / "run", gateway_run=tmp_path / "gateway")
    write(paths.gateway / "haproxy.cfg", "")
    link = paths.run / "roles" / "e2b.sock"
    assert host.machine.back(host.generation).detail == "every served name is reached; the gateway does not run"
    with monkeypatch.context() as patch:
        patch.setattr(sync, "hold_lock", Mock(side_effect=LockHeld))
        assert "gateway.lock" in host.machine.away(host.generation, host.generation, Moves()).warnings[0]
    assert os.readlink(link) == "../engines/e2b/api.sock"
    assert host.machine.away(host.generation, None, Moves()).detail == "nothing is known to serve"
    assert host.machine.away(host.generation, host.generation, Moves(stop=("e2b",))).detail.startswith(
        "requests for e2b wait"
    )
    assert not link.is_symlink()
    host.machine.return_early(host.generation, host.generation, Moves(), ["e2b"], Phase.HEALTHY)
    assert link.is_symlink()
    host.machine.away(host.generation, host.generation, Moves(stop=("e2b",)))
    write(paths.gateway / "clients.json", "[]")
    assert "clients.json" in host.machine.back(host.generation).warnings[0] and link.is_symlink()
    (paths.gateway / "models.map").unlink()
    (paths.gateway / "models.map").mkdir()
    assert "vllm-edge gateway sync" in failure(lambda: host.machine.back(host.generation)).text


def test_files_of_engines_are_installed_and_the_target_is_not(host: ServingHost) -> None:
    wanted = host.generation_with("e4b")
    host.systemctl.unit("vllm-e4b.service", ActiveState="inactive", NeedDaemonReload="no")
    before = host.paths.unit_file(TARGET).read_text()
    done = host.machine.install(wanted, Moves(start=("e4b",), stop=("e2b",)))
    assert done.detail == "4 files written"
    assert host.paths.unit_file("vllm-e4b.service").exists() and host.paths.unit_file("vllm-e2b.service").exists()
    assert host.paths.unit_file(TARGET).read_text() == before
    assert len(host.systemctl.orders("daemon-reload")) == 1
    assert host.machine.install(wanted, Moves(start=("e4b",))).detail == "every file is as it should be"
    assert len(host.systemctl.orders("daemon-reload")) == 1
    host.systemctl.unit("vllm-e4b.service", NeedDaemonReload="yes")
    host.machine.install(wanted, Moves(keep=("e4b",)))
    assert len(host.systemctl.orders("daemon-reload")) == 2


def test_a_file_that_cannot_be_written_fails_the_phase(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = host.generation_with("e4b")
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "rename", Mock(side_effect=OSError(28, "No space left on device")))
        text = failure(lambda: host.machine.install(wanted, Moves(start=("e4b",)))).text
    assert text.startswith("Files of generation 2 could not be installed: ") and "No space left on device" in text
    host.systemctl.refuse["daemon-reload"] = "Refusing to reload, not enough space available on /run/systemd."
    text = failure(lambda: host.machine.install(wanted, Moves(start=("e4b",)))).text
    assert "The new units could not be read: " in text and "not enough space available" in text


def test_engines_start_side_by_side_and_their_failures_are_forgotten_first(host: ServingHost) -> None:
    done = host.machine.start(Moves(start=("a", "b")))
    assert host.systemctl.calls == [
        ["reset-failed", "vllm-a.service", "vllm-b.service"],
        ["start", "--no-block", "vllm-a.service", "vllm-b.service"],
    ]
    assert done.detail == "a, b were ordered to start"
    assert host.machine.start(Moves()).detail == "no engine has to start"
    host.systemctl.refuse["start"] = "Unit vllm-a.service is masked."
    text = failure(lambda: host.machine.start(Moves(start=("a",)))).text
    assert text.startswith("a could not be started: ") and "Unit vllm-a.service is masked" in text


def test_clean_up_writes_the_target_and_removes_what_is_no_more(host: ServingHost) -> None:
    wanted = host.generation_with("e4b")
    host.systemctl.unit("vllm-e2b.service", ActiveState="inactive", SubState="dead")
    host.docker.containers = []
    done = host.machine.clean_up(wanted)
    assert done.detail == "target written; files of e2b removed"
    assert "vllm-e4b.service" in host.paths.unit_file(TARGET).read_text()
    assert not host.paths.unit_file("vllm-e2b.service").exists()
    verbs = [call[0] for call in host.systemctl.calls]
    assert verbs == ["daemon-reload", "enable", "start", "reset-failed"]
    # Never restarted: its engines are PartOf it.
    assert host.systemctl.orders("start") == [["--no-block", TARGET]]


def test_clean_up_again_removes_only_former_generations(host: ServingHost) -> None:
    before = {place: place.stat().st_mtime_ns for place in host.paths.units.iterdir()}
    assert host.machine.clean_up(host.generation).detail == "nothing was left to do"
    assert {place: place.stat().st_mtime_ns for place in host.paths.units.iterdir()} == before
    assert not host.systemctl.orders("stop") and not host.systemctl.orders("restart")
    for name in ("x", "y", "z"):
        host.generation_with(name)
    wanted = replace(host.generation, limits=Limits(keep_generations=2))
    assert host.machine.clean_up(wanted).detail == "generations 2, 3 removed"
    assert store.numbers(host.paths) == [1, 4]


def test_clean_up_does_all_it_can_and_then_says_what_it_could_not(host: ServingHost) -> None:
    wanted = host.generation_with("e4b")
    host.systemctl.refuse["enable"] = "Failed to enable unit: Read-only file system"
    host.systemctl.refuse["start"] = "Job for vllm-edge.target failed."
    failed = failure(lambda: host.machine.clean_up(wanted))
    assert "vllm-e2b.service is active and no engine of generation 2: 'systemctl stop" in failed.text
    assert "could not be enabled: " in failed.text and "Read-only file system" in failed.text
    assert "vllm-edge.target could not be started" in failed.text
    assert "vllm-edge.target is" not in failed.text
    # An engine that runs keeps its files.
    assert host.paths.unit_file("vllm-e2b.service").exists()
    assert "vllm-e4b.service" in host.paths.unit_file(TARGET).read_text()


def test_a_target_that_does_not_come_up_is_told(host: ServingHost) -> None:
    host.systemctl.unit(TARGET, ActiveState="inactive", UnitFileState="disabled")
    host.clock.at(4, lambda: host.systemctl.unit(TARGET, ActiveState="active", UnitFileState="enabled") and None)
    host.machine.clean_up(host.generation)
    assert host.clock.now == 1004
    host.systemctl.unit(TARGET, ActiveState="inactive", UnitFileState="disabled")
    text = failure(lambda: host.machine.clean_up(host.generation)).text
    assert "vllm-edge.target is inactive and disabled: its engines do not all start" in text


def test_what_runs_is_said_of_every_engine_and_of_which_generation_it_is(host: ServingHost) -> None:
    host.docker.containers = []
    host.docker.engine("e2b", "of another one")
    assert host.machine.what_runs(host.generation) == "e2b (of another generation) serves"
    host.docker.away = "connection refused"
    assert host.machine.what_runs(host.generation) == "e2b (e2b) serves"
    host.docker.away = ""
    host.docker.containers = []
    host.failed("e2b", phase="not-answering")
    assert host.machine.what_runs(host.generation) == "e2b (e2b) is active and does not answer"
    host.serve("e2b")
    host.failed("e2b", phase="serving")
    host.serve("old", ActiveState="deactivating", SubState="stop-sigterm")
    write(host.paths.unit_file("vllm-old.service"), f"# {model.MARK}\nExecStart=/opt/vllm-edge run-engine old\n")
    wanted = host.generation_with("e2b", "e4b")
    assert host.machine.what_runs(wanted) == (
        "e2b (e2b) serves, e4b (e4b) does not serve (inactive, dead), "
        "old (of another generation) does not serve (deactivating, stop-sigterm)"
    )


def test_the_hosts_life(host: ServingHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.machine.going_down() is False
    host.systemctl.state = "stopping"
    assert host.machine.going_down() is True
    assert len(host.machine.boot_id()) == 36
    monkeypatch.setattr(view, "BOOT_ID", tmp_path / "absent")
    text = failure(host.machine.boot_id).text
    assert "absent cannot be read: " in text and "Is /proc mounted" in text


Shown = dict[str, object]


def wait_healthy(
    host: ServingHost, *names: str, all_of_them: bool = False, limit_s: float = 60, wait: bool = False
) -> Done:
    wanted = replace(host.generation, limits=Limits(healthy_timeout_s=limit_s))
    moves = Moves(wait=names) if wait else Moves(start=names)
    if not wait:
        host.machine.start(moves)
    host.let_pass("warm_up_engine", "check_engine")
    return host.machine.healthy(wanted, moves, all_of_them=all_of_them)


UP: Shown = {"ActiveState": "active", "SubState": "running"}
ENDED: Shown = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}
WAITS: Shown = {"SubState": "auto-restart"}


def test_a_load_that_is_planned_to_be_longer_raises_the_default_limit(host: ServingHost) -> None:
    host.generation = host.stored(engine("e2b", plan={"gpus": [], "load_s": {"low": 1, "mid": 5, "high": 2000}}))
    default_s = Limits().healthy_timeout_s
    host.loads("e2b", (1900, UP))
    assert "e2b serves after 1900.0 s" in wait_healthy(host, "e2b", limit_s=default_s).detail
    host.loads("e2b")
    assert "does not serve after 2000 s" in failure(lambda: wait_healthy(host, "e2b", limit_s=default_s)).text
    for limit_s in (60, 2400):
        failed = failure(lambda limit_s=limit_s: wait_healthy(host, "e2b", limit_s=limit_s))
        assert f"does not serve after {limit_s} s" in failed.text, "an operator's limit stays"


def test_a_slow_load_is_a_warning(host: ServingHost) -> None:
    host.generation = host.stored(engine("e2b", plan={"gpus": [], "load_s": {"low": 1, "mid": 5, "high": 100}}))
    config = host.generation.engines["e2b"].config
    state = EngineState("e2b", "serving", "", input_hash=config.input_hash, load_seconds=150.0)
    write_state(host.paths.engine_state("e2b"), state)
    phases = {"loading-weights": 140.0, "compiling": 10.0}
    load = Load("2026-11-25T02:00:00Z", config.input_hash, config.image_id, "e2b", "main", 150.0, phases)
    remember_load(host.paths.engine_loads("e2b"), load)
    host.loads("e2b", (20, UP))
    (warning,) = wait_healthy(host, "e2b").warnings
    assert warning.startswith("Engine e2b took 150 s to load, and 1 to 100 s were expected")


def test_engines_are_waited_for_from_where_they_are_until_all_serve(host: ServingHost) -> None:
    host.loads("a", (1, {}), (9, UP), ActiveState="inactive", SubState="dead", InvocationID="a-1", Job=17)
    host.loads("b", (4, UP))
    done = wait_healthy(host, "a", "b")
    assert done.detail == "a, b serve after 9.0 s, a last"
    assert host.machine.healthy(host.generation, Moves(), all_of_them=False).detail == "no engine has to load"
    host.loads("a", (2, {**UP, "NRestarts": 3}), NRestarts=3)
    assert wait_healthy(host, "a", wait=True).detail == "a serves after 2.0 s"


@pytest.mark.parametrize(
    "end",
    [
        ENDED,
        {**WAITS, "Result": "exit-code"},
        {"NRestarts": 1, "InvocationID": "a-3"},
        {"InvocationID": "a-3"},
        {**UP, "InvocationID": "a-3", "NRestarts": 1},
        {"ActiveState": "inactive", "SubState": "dead"},
    ],
)
def test_the_first_engine_that_ends_fails_the_phase_with_its_explanation(host: ServingHost, end: Shown) -> None:
    host.loads("a", (5, end))
    host.loads("b")
    host.clock.at(5, lambda: host.failed("a"))
    failed = failure(lambda: wait_healthy(host, "a", "b"))
    assert failed.text == "Engine a ended while it was loading. The GPU has too little memory. Lower max_num_seqs."
    assert failed.engines == ("a",) and host.clock.now == 1005


def test_an_engine_that_ended_before_the_first_look_or_after_it_had_served(host: ServingHost) -> None:
    host.loads("a", (1, UP), (3, {**ENDED, "Result": "watchdog"}))
    host.loads("b")
    failed = failure(lambda: wait_healthy(host, "a", "b"))
    assert "Engine a ended again after it had loaded. systemd says failed, watchdog" in failed.text
    host.loads("a", **ENDED)
    host.failed("a")
    assert "The GPU has too little memory" in failure(lambda: wait_healthy(host, "a")).text


def test_an_old_failure_is_not_taken_for_this_one_whatever_the_clock_says(host: ServingHost) -> None:
    host.failed("a", phase="stopped")
    host.loads("a", (2, {**ENDED, "Result": "timeout", "StatusText": "loading weights"}))
    failed = failure(lambda: wait_healthy(host, "a"))
    assert "too little memory" not in failed.text
    assert "Engine a ended while it was loading. loading weights. 'vllm-edge explain a'." in failed.text
    # Of an earlier time than the one known before, and new all the same: the clock went back.
    host.loads("a", (2, WAITS))
    host.failed("a", phase="loading")
    new = replace(OOM, time="2026-11-20T00:00:00Z", reason="no KV cache")
    host.clock.at(2, lambda: host.failed("a", new, phase="loading"))
    assert "No KV cache. Lower max_num_seqs" in failure(lambda: wait_healthy(host, "a")).text


def test_an_engine_that_never_serves(host: ServingHost) -> None:
    host.loads("a", StatusText="capturing graphs, 58 s")
    host.loads("b", **UP)
    failed = failure(lambda: wait_healthy(host, "a", "b", limit_s=60))
    assert "Engine a does not serve after 60 s (capturing graphs, 58 s)" in failed.text
    assert "healthy_timeout_s is 60" in failed.text and failed.engines == ("a",)


def test_the_way_back_waits_for_all_and_gives_each_some_more_tries(host: ServingHost) -> None:
    again = {"NRestarts": 1, "InvocationID": "a-3"}
    host.loads("a", (2, WAITS), (7, again), (20, {**again, **UP}))
    host.loads("b", (3, ENDED))
    host.clock.at(3, lambda: host.failed("b"))
    failed = failure(lambda: wait_healthy(host, "a", "b", all_of_them=True))
    assert failed.engines == ("b",) and host.clock.now == 1020


def test_an_engine_that_ends_after_it_has_served_is_asked_anew_on_the_way_back(host: ServingHost) -> None:
    """What it had passed, or failed because it ended, says nothing of its next run."""
    asked: list[float] = []
    ended = threading.Event()

    def warm_up(*_: object) -> Done:
        asked.append(host.clock.now)
        if len(asked) == 1:
            assert ended.wait(60)
            raise PhaseFailed("connection refused")
        return Done()

    again = {"NRestarts": 1, "InvocationID": "e2b-3"}

    def sleep(seconds: float) -> None:
        if host.clock.now > 1002.5:
            until(lambda: bool(asked))
        host.clock.sleep(seconds)

    host.machine.sleep = sleep
    host.loads("e2b", (2, UP), (5, WAITS), (9, {**again, **UP}))
    host.loads("b", (20, UP))
    host.clock.at(5, ended.set)
    wanted = host.generation_with("e2b", "b")
    moves = Moves(start=("e2b", "b"))
    host.machine.start(moves)
    host.let_pass("check_engine")
    host.machine.warm_up_engine = warm_up
    host.machine.healthy(wanted, moves, all_of_them=True)
    assert host.machine.warm_up(wanted, moves).detail == "; " and asked[0] < 1005 < asked[1]


def test_an_engine_that_came_back_long_ago_has_to_be_alive_before_the_commit(host: ServingHost) -> None:
    """It hangs, or has ended, after it was verified; an engine that stays is asked as well, and not told of."""
    host.let_pass("warm_up_engine", "check_engine", "measure_engine")
    wanted, moves, told = host.generation_with("a", "b"), Moves(keep=("e2b",), start=("a", "b")), list[str]()
    host.loads("a", (1, UP))
    host.loads("b", (20, UP))
    host.machine.healthy(wanted, moves, all_of_them=False, tell=told.append)
    host.machine.warm_up(wanted, moves)
    until(lambda: (host.machine.canary(wanted), len(told) == 2)[1])
    assert sorted(told) == ["a", "b"]
    host.machine.check_engine = Mock(side_effect=PhaseFailed("a does not answer"))  # type: ignore[method-assign]
    assert failure(lambda: host.machine.canary(wanted)).text == "a does not answer"


def test_the_way_back_does_not_try_for_ever(host: ServingHost) -> None:
    host.loads("a")
    for tries in range(4):
        host.clock.at(5 + 10 * tries, functools.partial(host.loads, "a", **WAITS, NRestarts=tries))
        again = {"NRestarts": tries + 1, "InvocationID": f"a-{tries + 3}"}
        host.clock.at(10 + 10 * tries, functools.partial(host.loads, "a", **again))
    host.failed("a")
    failed = failure(lambda: wait_healthy(host, "a", all_of_them=True))
    assert "Engine a ended while it was loading" in failed.text and host.clock.now == 1025


RIGHT, WRONG = "sha-right", "sha-wrong"


def moves_of(active: str, sub: str, running: str | None, wanted: bool = True) -> Moves:
    return decide_moves({"e": RIGHT} if wanted else {}, [SeenEngine("e", active, sub, running)], (), ())


KEPT, AWAITED = Moves(keep=("e",)), Moves(wait=("e",))
RESTARTED, STARTED = Moves(stop=("e",), start=("e",)), Moves(start=("e",))


@pytest.mark.parametrize(
    ("active", "sub", "running", "expected"),
    [
        ("active", "running", RIGHT, KEPT),
        ("reloading", "reload", RIGHT, KEPT),
        ("active", "running", WRONG, RESTARTED),
        ("active", "running", None, RESTARTED),
        ("activating", "start", RIGHT, AWAITED),
        ("activating", "start-post", RIGHT, AWAITED),
        ("activating", "start", WRONG, RESTARTED),
        ("activating", "auto-restart", None, RESTARTED),
        ("activating", "auto-restart-queued", RIGHT, RESTARTED),
        ("deactivating", "stop-sigterm", RIGHT, RESTARTED),
        ("deactivating", "stop-sigterm", None, RESTARTED),
        ("failed", "failed", None, STARTED),
        ("failed", "failed", RIGHT, RESTARTED),
        ("inactive", "dead", None, STARTED),
        ("inactive", "dead", WRONG, RESTARTED),
    ],
)
def test_what_becomes_of_an_engine(active: str, sub: str, running: str | None, expected: Moves) -> None:
    assert moves_of(active, sub, running) == expected
    stopped = () if expected is STARTED else ("e",)
    assert moves_of(active, sub, running, wanted=False) == Moves(stop=stopped), "where it is not wanted"


@pytest.mark.parametrize("state", ["maintenance", "new-in-258"])
def test_every_wanted_engine_has_one_place_in_states_that_nobody_foresaw(state: str) -> None:
    for running in (RIGHT, WRONG, None):
        moves = moves_of(state, "dead", running)
        assert len(moves.keep) + len(moves.start) + len(moves.wait) == 1
        assert not set(moves.stop) & {*moves.keep, *moves.wait}
