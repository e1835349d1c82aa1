# SPDX-License-Identifier: Apache-2.0
"""The supervisor while the Docker Engine goes away and comes back, or refuses; and with a driver that mismatches."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine import compile_cache, container, launch, watchers
from ansible.module_utils.vllm_edge.engine.config import load_engine
from ansible.module_utils.vllm_edge.engine.journal import Journal, Reporter
from ansible.module_utils.vllm_edge.engine.loads import read_loads
from ansible.module_utils.vllm_edge.engine.sd_notify import Notifier
from ansible.module_utils.vllm_edge.engine.supervisor import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, Supervisor
from ansible.module_utils.vllm_edge.engine.usage import Usage
from ansible.module_utils.vllm_edge.gpu.driver import DriverVersions, find_missing_access
from ansible.module_utils.vllm_edge.switch.journal import take_lock
from ansible.module_utils.vllm_edge.system.docker import DockerAway, DockerRefused, DockerUnit
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.systemd import Ran, Systemd
from engine_files import CONFIG, CREATE, written
from fake_docker import FakeDocker

pytestmark = pytest.mark.slow

LABELS = {"vllm-edge.engine": "e2b", "vllm-edge.generation": "1", "vllm-edge.input-hash": "ab12"}


class Case:
    """A supervisor in a thread, its Docker, its engine's answers and what systemd was told."""

    def __init__(
        self,
        root: Path,
        docker: FakeDocker,
        *,
        patience_s: float = 60,
        unit: DockerUnit | None = None,
        healthy: bool = False,
        driver: DriverVersions | None = None,
        create: list[str] = CREATE,
        **changes: Any,
    ) -> None:
        config = {**CONFIG, "stop_timeout_s": 2, "stall_timeout_s": 20, **changes}
        self.root = root
        self.ordered: list[str] = []
        self.paths = replace(written(root, config=config, create=create), run=root / "run")
        self.docker = docker
        self.healthy = threading.Event()
        if healthy:
            self.healthy.set()
        self.unit = unit
        self.code: int | None = None
        self.told: list[str] = []
        self.output = io.StringIO()
        address = str(root / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(0.1)
        self.supervisor = Supervisor(
            load_engine("e2b", self.paths),
            self.paths,
            docker,
            Notifier(address),
            Journal(self.output, prefixed=True),
            watchdog_s=0.6,
            docker_wait_s=patience_s,
            unit=lambda: self.unit,
            health=self.health,
            driver=lambda: driver or DriverVersions(),
            gpus=lambda devices: find_missing_access(devices, root),
            systemd=Systemd(self.order),
        )
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def health(self, url: str, timeout_s: float) -> Answer:
        return Answer(200) if self.healthy.is_set() else Answer(None, error="connection refused")

    def order(self, command: Sequence[str], timeout_s: float) -> Ran:
        self.ordered.append(" ".join(command))
        return Ran(0)

    def run(self) -> None:
        self.code = self.supervisor.run()

    def listen(self) -> None:
        while True:
            try:
                self.told.append(self.socket.recv(65536).decode())
            except TimeoutError:
                continue
            except OSError:
                return

    def start(self) -> Case:
        self.thread.start()
        return self

    def until(self, what: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"{self.told}\n{self.output.getvalue()}"
            time.sleep(0.01)

    def until_told(self, words: str, seconds: float = 60) -> None:
        """systemd has been told this."""
        self.until(lambda: any(words in text for text in self.told), seconds)

    def until_logged(self, words: str) -> None:
        self.until(lambda: words in self.output.getvalue())

    def until_ready(self) -> Case:
        self.healthy.set()
        self.until_told("READY=1")
        return self

    def stop(self) -> None:
        self.supervisor.events.receive(signal.SIGTERM)

    def ends(self, seconds: float = 40) -> int | None:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), self.output.getvalue()
        return self.code

    def fails_with(self, cause: str, status: int = EXIT_FAILED) -> dict[str, Any]:
        """It ends with that status; the failure that it recorded, which has that cause."""
        assert self.ends() == status
        failure: dict[str, Any] = self.state()["last_failure"]
        assert failure["cause"] == cause
        return failure

    def lose_docker(self) -> None:
        """Docker goes away, and the supervisor has noticed it."""
        self.docker.away.set()
        self.until(lambda: self.supervisor.control.away.is_set())

    def fed(self) -> int:
        return sum("WATCHDOG=1" in text for text in self.told)

    def state(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.paths.engine_state("e2b").read_text())
        return data


@pytest.fixture
def docker() -> Iterator[FakeDocker]:
    made = FakeDocker()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "REFUSED_S", 0.6)
    monkeypatch.setattr(launch, "RETRY_FIRST_S", 0.2)
    monkeypatch.setattr(launch, "GPU_POLL_S", 0.1)


@pytest.fixture
def begin(tmp_path: Path, docker: FakeDocker) -> Iterator[Callable[..., Case]]:
    cases: list[Case] = []

    def make(**changes: Any) -> Case:
        case = Case(tmp_path / f"case{len(cases)}", docker, **changes)
        cases.append(case)
        return case

    (tmp_path / "case0").mkdir()
    yield make
    for case in cases:
        case.stop()
        if case.thread.ident is not None:
            case.thread.join(5)
        case.socket.close()


Begin = Callable[..., Case]


DAMAGED = (
    "(EngineCore pid=7) torch._dynamo.exc.BackendCompilerFailed: backend='<VllmBackend object>' raised:",
    "(EngineCore pid=7) UnpicklingError: pickle data was truncated",
)


def fail_with_cache(begin: Begin, docker: FakeDocker, root: Path, *names: str) -> tuple[Case, Path, Path]:
    """An engine whose cache has these files has failed once; the case, its cache, and where that is set aside."""
    cache = root / "cache/e2b/0a0a"
    cache.mkdir(parents=True)
    for name in names:
        (cache / name).write_text("cut off")
    mount = f"--mount=type=bind,source={cache},target=/cache"
    case = begin(create=[*CREATE[:2], mount, *CREATE[2:]]).start()
    case.until(lambda: docker.calls.count("follow") == 1)
    for line in DAMAGED:
        docker.log(line)
    docker.kill_container(signal.SIGUSR1)  # SIGHUP is ignored under nohup
    return case, cache, cache.with_name("0a0a.set-aside")


def test_a_compile_cache_that_breaks_a_start_is_set_aside(begin: Begin, docker: FakeDocker, tmp_path: Path) -> None:
    case, cache, aside = fail_with_cache(begin, docker, tmp_path, "graph")
    case.until(lambda: docker.calls.count("start") == 2)
    assert (aside / "graph").read_text() == "cut off" and list(cache.iterdir()) == []
    assert (cache.stat().st_mode & 0o777, cache.stat().st_uid) == (0o750, 8050 if os.geteuid() == 0 else os.geteuid())
    failure = case.state()["last_failure"]
    assert failure["cause"] == "cache_damaged" and f"set aside as {aside}" in failure["remedy"]
    assert f"set aside as {aside}" in case.output.getvalue()
    case.until_ready().until(lambda: not aside.exists())
    case.stop()
    assert case.ends() == EXIT_OK


def test_a_second_failure_is_not_blamed_on_the_cache(begin: Begin, docker: FakeDocker, tmp_path: Path) -> None:
    case, cache, aside = fail_with_cache(begin, docker, tmp_path, "graph")
    case.until(lambda: docker.calls.count("follow") == 2)
    (cache / "new").touch()
    docker.kill_container(signal.SIGUSR1)
    assert "the compile cache was new" in case.fails_with("compile_failed", EXIT_CONFIG)["reason"]
    assert aside.exists() and (cache / "new").exists() and docker.calls.count("create") == 2


def test_a_cache_that_is_too_large_is_emptied(begin: Begin, docker: FakeDocker, tmp_path: Path) -> None:
    """Links lead nowhere, and a tree that is nested too deeply for Python counts as well."""
    cache, outside = tmp_path / "cache/e2b/0a0a", tmp_path / "outside"
    nest = "/".join(["d" * 250] * 8)
    deep = f"for i in 1 2 3; do mkdir -p {nest}; cd -P {nest}; done; truncate -s {compile_cache.MOST_GIB}G graph"
    subprocess.run(["sh", "-c", f"mkdir -p {cache}; cd {cache}; {deep}"], check=True)
    outside.write_text("of the host")
    (cache / "link").symlink_to(outside)
    case = begin(create=[*CREATE[:2], f"--mount=type=bind,source={cache},target=/cache", *CREATE[2:]]).start()
    case.until_ready().until(lambda: not compile_cache.find_aside(cache).exists())
    assert list(cache.iterdir()) == [] and outside.exists()
    assert f"the compile cache {cache} has more than 20 GiB and is emptied" in case.output.getvalue()
    case.stop()
    assert case.ends() == EXIT_OK


@pytest.mark.parametrize("limit", ["MOST_GIB", "MOST_FILES"])
def test_what_a_cache_has_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    (tmp_path / "graph").write_text("compiled")
    assert compile_cache.find_excess(tmp_path) == ""
    monkeypatch.setattr(compile_cache, limit, 0)
    assert compile_cache.find_excess(tmp_path).startswith("more than 0 ")
    with pytest.raises(OSError, match="cannot be determined"):
        compile_cache.find_excess(tmp_path / "missing")


def test_an_empty_cache_is_not_blamed(begin: Begin, docker: FakeDocker, tmp_path: Path) -> None:
    case, _, aside = fail_with_cache(begin, docker, tmp_path)
    case.fails_with("compile_failed", EXIT_CONFIG)
    assert not aside.exists() and docker.calls.count("create") == 1


def test_setting_aside_follows_no_link_and_is_completed_if_it_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to("elsewhere")
    with pytest.raises(OSError, match="is a link"):
        compile_cache.set_aside(link, os.geteuid())
    (tmp_path / "0a.set-aside").mkdir()
    assert compile_cache.prepare(tmp_path / "0a", os.geteuid()) is False and (tmp_path / "0a").is_dir()


def leave_corpse(docker: FakeDocker, **changes: Any) -> None:
    """The container of an engine that ended while nobody watched."""
    docker.kill_container(9)
    found = docker.find("vllm-e2b")
    assert found is not None
    docker.container = replace(found, finished_at="2026-11-21T03:00:09.5Z", **changes)


@pytest.mark.parametrize(
    ("refusal", "cause", "tries"),
    [
        ("no space left on device", "docker_out_of_space", 1),
        ("what nobody has seen", "docker_refused", 2),
        ("", "", 1),
    ],
    ids=["full disk", "unknown", "one error of the API"],
)
def test_in_a_switch_a_refusal_ends_it(begin: Begin, docker: FakeDocker, refusal: str, cause: str, tries: int) -> None:
    docker.refuse_start = refusal
    case = begin(patience_s=900)
    with take_lock(case.paths):
        if cause:
            case.start().fails_with(cause)
            assert case.state()["phase"] == "failed" and docker.calls.count("start") == tries
        else:
            docker.refuse("start", 1)
            case.start().until_ready()
            assert docker.calls.count("create") == 2


def test_a_load_is_recorded_with_its_phases(begin: Begin, docker: FakeDocker) -> None:
    case = begin(plan={"gpus": [], "load_s": {"low": 40, "mid": 100, "high": 5000}}).start()
    case.until_told("EXTEND_TIMEOUT_USEC=5000000000")
    docker.log("INFO Starting to load model /models/e2b...")
    docker.log("WARNING Using default MoE config. Performance might be sub-optimal! Config file not found")
    docker.log("INFO [default_loader.py:507] Loading weights took 24.10 seconds")
    case.until(lambda: case.state()["phase"] == "loading-weights")
    assert case.state()["load_phases"] == {} and not case.paths.engine_loads("e2b").exists()
    case.until_ready()
    state, (load,) = case.state(), read_loads(case.paths.engine_loads("e2b"))
    assert state["load_phases"].keys() == {"starting-container", "loading-weights"}
    assert sum(state["load_phases"].values()) == pytest.approx(state["load_seconds"], abs=0.2)
    assert (load.seconds, load.phases) == (state["load_seconds"], state["load_phases"])
    assert len(state["start_warnings"]) == 1
    assert (load.input_hash, load.times) == ("ab12", {"weights_s": 24.1})


def test_a_load_that_fails_is_not_recorded(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start()
    case.until(lambda: docker.process is not None and any("starting container, 0 s" in text for text in case.told))
    docker.kill_container(9)
    assert case.ends() == EXIT_FAILED
    assert not case.paths.engine_loads("e2b").exists() and case.state()["load_phases"] == {}


def test_live_restore_the_engine_is_never_bounced(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start()
    docker.log("line 1")
    case.until_ready()
    pid = docker.container.pid if docker.container else 0
    docker.away.set()
    case.until_told("the Docker Engine is away")
    docker.log("line 2, written while Docker was away")
    before = case.fed()
    time.sleep(1.0)
    assert case.fed() >= before + 2, "a living engine was called dead because Docker was away"
    docker.away.clear()
    case.until_logged("the Docker Engine is back")
    docker.log("line 3")
    case.until_logged("line 3")
    text = case.output.getvalue()
    assert [text.count(f"line {n}") for n in (1, 2, 3)] == [1, 1, 1], "lines were lost or printed twice"
    assert case.thread.is_alive()
    assert docker.container is not None and docker.container.pid == pid
    assert docker.calls.count("start") == 1
    case.until(lambda: case.told[-1] != "" and case.state()["phase"] == "serving")
    case.stop()
    assert case.ends() == EXIT_OK
    assert docker.container is None


@pytest.mark.parametrize("back", [False, True], ids=["stays away", "back at once"])
def test_without_live_restore_the_death_is_dockers(begin: Begin, docker: FakeDocker, back: bool) -> None:
    docker.live = False
    case = begin(patience_s=900).start().until_ready()
    case.lose_docker()
    docker.kill_container(15)
    if back:
        docker.away.clear()
    assert "live-restore" in case.fails_with("docker_stopped")["remedy"]


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        (DockerUnit(False, "1"), "docker_stopped"),
        (DockerUnit(True, "2"), "docker_stopped"),
        (DockerUnit(True, "1"), "stopped_outside"),
    ],
    ids=["ending", "another", "a person at the same"],
)
def test_docker_that_answers_until_it_ends(begin: Begin, docker: FakeDocker, now: DockerUnit, cause: str) -> None:
    """Newer Docker stops its containers before it closes its socket, and sends them the signal a person would send."""
    docker.live = cause == "stopped_outside"
    docker.outside = "SIGTERM"
    case = begin(unit=DockerUnit(True, "1")).start().until_ready()
    case.unit = now
    docker.kill_container(15)
    case.fails_with(cause)


def test_while_its_service_is_stopped_docker_is_left_alone(begin: Begin, docker: FakeDocker) -> None:
    case = begin(unit=DockerUnit(True, "1")).start().until_ready()
    case.unit = DockerUnit(False, "1")
    case.lose_docker()
    time.sleep(0.3)
    asked = len(docker.calls)
    time.sleep(1.5)
    assert len(docker.calls) == asked, f"the socket was touched: {docker.calls[asked:]}"
    docker.away.clear()
    case.unit = DockerUnit(True, "2")
    case.until_logged("the Docker Engine is back")


def test_an_engine_that_dies_while_docker_is_away(begin: Begin, docker: FakeDocker) -> None:
    case = begin(patience_s=900).start().until_ready()
    case.lose_docker()
    time.sleep(0.3)
    docker.kill_container(9)
    case.fails_with("died_while_docker_away")


def test_stop_while_docker_is_away_ends_the_process(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start().until_ready()
    case.lose_docker()
    case.stop()
    assert docker.process is not None
    assert docker.process.wait(5) == -signal.SIGTERM, "the engine outlived its unit"
    assert case.ends() == EXIT_OK
    assert "next start removes" in case.output.getvalue()


def test_the_start_waits_for_docker_and_not_for_ever(begin: Begin, docker: FakeDocker) -> None:
    docker.away.set()
    begin(patience_s=3).start().fails_with("docker_away")
    docker.away.set()
    case = begin().start()
    case.until_told("STATUS=waiting for the Docker Engine")
    assert any("EXTEND_TIMEOUT_USEC=" in text for text in case.told)
    docker.away.clear()
    case.until_ready()


def test_a_stopped_docker_service_is_not_woken_through_its_socket(begin: Begin, docker: FakeDocker) -> None:
    case = begin(unit=DockerUnit(False, "")).start()
    case.until_told("docker.service is not running")
    time.sleep(0.2)
    assert docker.calls == []
    case.unit = DockerUnit(True, "1")
    case.until_ready()


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [("unresolvable CDI devices nvidia.com/gpu=GPU-1", "cdi_unresolvable"), ("nobody has seen this", "docker_refused")],
)
def test_a_refused_start_leaves_no_container(begin: Begin, docker: FakeDocker, refusal: str, cause: str) -> None:
    docker.refuse_start = f"CDI device injection failed: {refusal}" if "CDI" in refusal else refusal
    assert refusal.split()[-1] in begin(patience_s=3).start().fails_with(cause)["reason"]
    assert docker.container is None


def test_a_removal_in_progress_is_waited_for(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container({**LABELS, "vllm-edge.input-hash": "old"})
    docker.refuse_remove = 3
    case = begin().start().until_ready()
    assert docker.calls.count("remove") == 4
    assert docker.calls.index("create") > docker.calls.index("remove")
    assert "made from other inputs" in case.output.getvalue()


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How many cores the container uses; None where its control group cannot be read."""
    used: list[float | None] = [0.0]

    def read(_container_id: str) -> Usage | None:
        return None if used[0] is None else Usage(0, 0, used[0] * time.monotonic())

    for module in (launch, watchers):
        monkeypatch.setattr(module, "read_usage", read)
    return used


@pytest.mark.parametrize(
    ("used", "told"),
    [(1.0, "its log is silent, and it computes"), (0.0, "neither reads nor computes"), (None, "it does what cannot")],
    ids=["works", "idle", "unseen"],
)
def test_a_silent_load_is_kept_by_the_next_supervisor(
    begin: Begin,
    docker: FakeDocker,
    monkeypatch: pytest.MonkeyPatch,
    cores: list[float | None],
    used: float | None,
    told: str,
) -> None:
    """Its supervisor was killed, and the last line is older than the stall limit."""
    monkeypatch.setattr(launch, "WORK_S", 1.5)
    cores[0] = used
    left = docker.run_container(LABELS)
    docker.container = replace(left, started_at="2020-01-01T00:00:00.000000000Z")
    case = begin().start()
    case.until(lambda: "create" in docker.calls or "attaching" in case.output.getvalue())
    assert ("create" not in docker.calls) is (used != 0.0)
    assert told in case.output.getvalue()


def test_a_container_that_died_unwatched_is_explained(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.log("ValueError: No available memory for the cache blocks. Try increasing")
    leave_corpse(docker, exit_code=1)
    case = begin().start().until_ready()
    failure = case.state()["last_failure"]
    assert failure["cause"] == "no_kv" and failure["time"] == "2026-11-21T03:00:09Z"
    assert "ended without a supervisor" in case.output.getvalue()


def test_the_next_supervisor_counts_on(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    leave_corpse(docker, exit_code=1)
    case = begin(progress_timeout_s=0.5)
    place = case.paths.engine_state("e2b")
    place.parent.mkdir(parents=True)
    # As an older program wrote it, and with what only a newer one knows.
    place.write_text(
        '{"engine": "e2b", "phase": "serving", "since": "", "starts": 4, "failures": {"hung": 2}, "new": 1}'
    )
    case.supervisor.reporter = Reporter(
        case.supervisor.config, case.paths, case.supervisor.notifier, case.supervisor.journal
    )
    case.supervisor.ask = lambda *_, **__: Answer(200, b"vllm:num_requests_running 1\nvllm:generation_tokens_total 7\n")
    case.start().until_ready().until(lambda: case.state()["standstills"] == 1)
    assert case.state()["starts"] == 5 and case.state()["failures"]["hung"] == 2
    assert sum(case.state()["failures"].values()) == 3


def test_last_lines_that_come_late_explain_the_end(begin: Begin, docker: FakeDocker) -> None:
    """As from Docker on a busy host: without them an engine that can never fit would be started again and again."""
    docker.log_late_s, docker.command = 2, ("sh", "-c", "sleep 1; exit 1")
    docker.log("ValueError: No available memory for the cache blocks. Try increasing")
    begin().start().fails_with("no_kv", EXIT_CONFIG)


def test_a_foreign_container_ends_it_for_good(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container({})
    case = begin().start()
    assert case.ends() == EXIT_CONFIG
    assert not {"stop", "remove", "create"} & set(docker.calls)
    assert any(line.startswith("<3>") for line in case.output.getvalue().splitlines())


def test_a_state_directory_that_cannot_be_written_stops_no_engine(begin: Begin, docker: FakeDocker) -> None:
    case = begin()
    case.paths.state.write_text("a file where a directory should be")
    case.start().until_ready()
    case.until_logged("the load cannot be recorded: ")
    assert case.output.getvalue().count("the engine runs on without it") == 1


ALWAYS = 10_000


@pytest.mark.parametrize("call", ["find", "wait"])
def test_an_error_of_dockers_api_is_no_death(begin: Begin, docker: FakeDocker, call: str) -> None:
    case = begin().start().until_ready()
    docker.refuse(call, 2)
    docker.cut()
    case.until(lambda: not docker.fails[call] and "the Docker Engine is back" in case.output.getvalue())
    assert case.code is None, case.state()["last_failure"]
    docker.kill_container(9)
    case.fails_with("sigkill")


@pytest.mark.parametrize("times", [3, ALWAYS], ids=["a moment", "for good"])
def test_an_error_of_dockers_api_does_not_mean_it_was_removed(begin: Begin, docker: FakeDocker, times: int) -> None:
    case = begin().start().until_ready()
    docker.refuse("find", times)
    docker.kill_container(9)
    case.fails_with("sigkill" if times < ALWAYS else "unknown")


def test_the_log_is_followed_on_after_an_error_of_dockers_api(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start()
    docker.log("line 1")
    case.until_logged("line 1")
    docker.refuse("follow", 1)
    docker.cut()
    docker.log("line 2")
    case.until_logged("line 2")
    assert [case.output.getvalue().count(text) for text in ("line 1", "can be read again")] == [1, 1]


def test_a_log_that_cannot_be_read_is_no_silence(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse("follow", ALWAYS)
    docker.refuse("logs", ALWAYS)
    case = begin(stall_timeout_s=5).start()
    case.until_told("its log cannot be read")
    time.sleep(6)
    assert case.code is None, case.state()["last_failure"]
    case.until_ready()


@pytest.mark.parametrize(
    ("call", "good"), [("info", 0), ("find", 0), ("find", 2), ("find", 3), ("stop", 0), ("remove", 0)]
)
def test_an_error_of_dockers_api_does_not_end_a_start(begin: Begin, docker: FakeDocker, call: str, good: int) -> None:
    docker.run_container({**LABELS, "vllm-edge.input-hash": "old"})
    docker.fails[call] = [*[None] * good, DockerRefused("500 Server Error: context deadline exceeded")]
    case = begin().start().until_ready()
    assert case.state()["last_failure"] is None
    assert docker.calls.count("start") == 1
    assert not docker.fails[call]


def test_no_engine_is_left_unwatched_where_docker_does_not_stop_it(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse("stop", ALWAYS)
    case = begin(stall_timeout_s=1).start()
    case.fails_with("stalled")
    assert docker.process is not None and docker.process.poll() is not None


def test_a_stop_before_the_launch_takes_along_what_docker_does_not_stop(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.refuse("find", 1)
    docker.refuse("stop", 1)
    case = begin()
    case.supervisor.events.signal = signal.SIGTERM
    case.start()
    assert case.ends() == EXIT_OK
    assert docker.container is None, "an engine of a stopped unit was left running"


REFUSED = DockerRefused("logs: 500 Server Error")


@pytest.mark.parametrize(
    "errors",
    [[], [REFUSED] * ALWAYS, [None, *[DockerAway("connection reset by peer")] * 20], [None, *[REFUSED] * 20]],
    ids=["none", "never a log", "away after one answer", "refused after one answer"],
)
def test_an_engine_that_serves_is_kept(begin: Begin, docker: FakeDocker, errors: list[Exception | None]) -> None:
    """Its log cannot be read, there is no CDI specification, and the driver was upgraded underneath it."""
    pid = docker.run_container(LABELS).pid
    docker.fails["logs"] = errors.copy()
    case = begin(healthy=True, create=WITH_GPU, driver=REBOOT).start().until_ready()
    assert docker.container is not None and docker.container.pid == pid
    assert "create" not in docker.calls and case.thread.is_alive()


FULL = "no space left on device"
UNMOUNTED = 'invalid mount config for type "bind": bind source path does not exist: /data/vllm/weights/e2b'


@pytest.mark.parametrize(
    ("refusal", "words", "cause"),
    [
        (FULL, "Docker's disk is full", "docker_out_of_space"),
        (UNMOUNTED, "directory /data/vllm/weights/e2b, which the engine mounts, does not exist", "mount_missing"),
    ],
    ids=["full disk", "mounted late"],
)
def test_after_what_heals_it_tries_again(
    begin: Begin, docker: FakeDocker, refusal: str, words: str, cause: str
) -> None:
    docker.refuse_start = refusal
    case = begin().start()
    case.until(lambda: docker.calls.count("start") > 2)
    told = [text for text in case.told if "Trying again in" in text]
    assert all(words in text and "EXTEND_TIMEOUT_USEC=" in text for text in told) and told
    assert case.state()["last_failure"]["cause"] == cause
    docker.refuse_start = ""
    case.until_ready()


def test_the_wait_to_heal_is_seen_and_obeys(begin: Begin, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RETRY_FIRST_S", 300)
    docker.refuse_start = FULL
    case = begin(patience_s=900).start()
    case.until_told("Trying again in")
    case.until(lambda: case.state()["phase"] == "waiting-to-try-again")
    case.stop()
    assert case.ends() == EXIT_OK


def test_waits_grow_up_to_five_minutes(begin: Begin, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RETRY_FIRST_S", 5)
    docker.refuse_start = FULL
    case, waited, now = begin(patience_s=900), [0.0], [0.0]

    def pause(seconds: float, why: str) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(case.supervisor, "_wait_to_retry", pause)
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    assert case.supervisor.run() == EXIT_FAILED
    assert waited == [0, 5, 10, 20, 40, 80, 160, 300, 285], "systemd's five starts in half an hour are never used up"


UUID = CONFIG["gpus"][0]
WITH_GPU = [*CREATE[:2], f"--device=nvidia.com/gpu={UUID}", *CREATE[2:]]
UVM_LINE = "  - path: /dev/nvidia-uvm\n"
SPECIFICATION = f"""---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
{UVM_LINE}devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: {UUID}
"""


def give_gpus(root: Path, text: str = SPECIFICATION, nodes: Sequence[str] = ("nvidiactl", "nvidia-uvm")) -> None:
    for directory in ("var/run/cdi", "dev"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "var/run/cdi/nvidia.yaml").write_text(text)
    for name in nodes:
        (root / "dev" / name).touch()


LATE: list[tuple[str, Callable[[Path], None]]] = [
    ("there is no CDI specification", lambda root: None),
    (f"does not define {UUID}", lambda root: give_gpus(root, SPECIFICATION.replace(UUID, "GPU-other"))),
    ("nvidia.yaml does not list /dev/nvidia-uvm", lambda root: give_gpus(root, SPECIFICATION.replace(UVM_LINE, ""))),
    ("/dev/nvidia-uvm of /var/run/cdi/nvidia.yaml does not exist", lambda root: give_gpus(root, nodes=["nvidiactl"])),
]


def test_what_keeps_a_container_from_its_gpus(tmp_path: Path) -> None:
    for number, (told, state) in enumerate(LATE):
        state(tmp_path / str(number))
        assert told in (find_missing_access([UUID], tmp_path / str(number)) or "")


def test_the_start_waits_for_the_gpus(begin: Begin, docker: FakeDocker) -> None:
    case = begin(create=WITH_GPU, patience_s=900).start()
    case.until(lambda: any("STATUS=waiting for the GPUs" in text for text in case.told), 10)
    assert "create" not in docker.calls, "a container without CUDA was started"
    case.until(lambda: case.state()["phase"] == "waiting-for-gpus")
    assert case.state()["last_failure"] is None
    assert case.ordered == ["systemctl start --no-block -- nvidia-cdi-refresh.service"], "it is not asked too often"
    give_gpus(case.root)
    case.until_ready()


def test_a_late_module_uses_up_no_start(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    case, now = begin(create=WITH_GPU, patience_s=900), [0.0]

    def pause(seconds: float) -> None:
        case.supervisor.events.check_stop()
        now[0] += launch.GPU_POLL_S
        if now[0] >= 40:
            give_gpus(case.root)

    monkeypatch.setattr(launch, "GPU_POLL_S", 3.0)
    monkeypatch.setattr(case.supervisor.events, "pause", pause)
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    case.start().until_ready()
    assert case.ordered == ["systemctl start --no-block -- nvidia-cdi-refresh.service"] * 2


@pytest.mark.parametrize("patience_s", [0.5, 900], ids=["without a switch", "in a switch"])
def test_the_wait_for_the_gpus_has_an_end(begin: Begin, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    monkeypatch.setattr(launch, "GPU_WAIT_IN_SWITCH_S", 0.3)
    case = begin(create=WITH_GPU, patience_s=patience_s)
    with take_lock(case.paths) if patience_s == 900 else contextlib.nullcontext():
        failure = case.start().fails_with("gpus_not_ready")
    assert "no CDI specification" in failure["reason"] and "create-device-nodes" in failure["remedy"]


LIBRARY = {"libnvidia-ml.so.1": "580.173.02"}
REBOOT = DriverVersions("570.211.01", LIBRARY)
STALE = DriverVersions("580.173.02", LIBRARY, {"/var/run/cdi/nvidia.yaml": ("570.211.01",)})


@pytest.mark.parametrize(
    ("found", "status", "reason", "remedy"),
    [
        (REBOOT, EXIT_CONFIG, "the loaded NVIDIA kernel module is 570.211.01", "Reboot the host"),
        # The specification is made anew without anybody's doing: systemd tries again.
        (STALE, EXIT_FAILED, "/var/run/cdi/nvidia.yaml mounts 570.211.01", "nvidia-cdi-refresh.service"),
    ],
    ids=["reboot pending", "specification stale"],
)
def test_no_container_is_started(
    begin: Begin, docker: FakeDocker, found: DriverVersions, status: int, reason: str, remedy: str
) -> None:
    case = begin(driver=found, patience_s=3).start()
    failure = case.fails_with("driver_mismatch", status)
    assert "create" not in docker.calls
    assert reason in failure["reason"] and remedy in failure["remedy"]
    assert reason in case.output.getvalue().replace("The loaded", "the loaded")


def test_container_of_another_image_is_refused(begin: Begin, docker: FakeDocker) -> None:
    docker.tags = {"vllm-edge/vllm:1": "sha256:22"}
    failure = begin(image_id="sha256:11", healthy=True).start().fails_with("image_other", EXIT_CONFIG)
    assert "from the image sha256:22, and the engine's is sha256:11 (vllm-edge/vllm:1)" in failure["reason"]
    assert docker.container is None and "start" not in docker.calls


def test_the_socket_of_an_engine_is_opened_when_it_appears(
    begin: Begin, docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is there before the container is; one that a former container left is not used."""
    place = tmp_path / "case0" / "run" / "engines" / "e2b" / "api.sock"
    (place.parent / "left").mkdir(parents=True)
    mount = f"--mount=type=bind,source={place.parent},target=/run/api"
    uid = 8050 if os.geteuid() == 0 else os.geteuid()
    case = begin(url=f"unix:{place}", create=[mount, *(line.replace("8050", str(uid)) for line in CREATE)])
    seen: list[tuple[list[Path], int]] = []
    create = docker.create

    def look(arguments: Sequence[str]) -> str:
        seen.append((list(place.parent.iterdir()), place.parent.stat().st_uid))
        return create(arguments)

    monkeypatch.setattr(docker, "create", look)
    case.start()
    case.until(lambda: "start" in docker.calls)
    assert seen == [([], uid)]
    os.mknod(place, 0o140755)
    case.until(lambda: place.stat().st_mode == 0o140666)
    case.until(lambda: place.parent.stat().st_uid == os.geteuid())
    case.healthy.set()
    case.until_ready()


def test_a_directory_that_cannot_be_made_is_tried_again(begin: Begin) -> None:
    case = begin(
        url="unix:/proc/none/engines/e2b/api.sock",
        create=["--mount=type=bind,source=/proc/none/engines/e2b,target=/run/api", *CREATE],
        patience_s=0.5,
    )
    case.paths = case.supervisor.paths = replace(case.paths, run=Path("/proc/none"))
    failure = case.start().fails_with("socket_directory")
    assert "/proc/none/engines/e2b" in failure["reason"] and "systemd-tmpfiles --create" in failure["remedy"]
