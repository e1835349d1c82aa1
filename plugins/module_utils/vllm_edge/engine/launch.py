# SPDX-License-Identifier: Apache-2.0
"""Start of an engine's container: wait for Docker, attach to a running container or create one, retry what may pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ..gpu.driver import DriverVersions, explain_mismatch, find_missing_access, read_versions
from ..paths import HostPaths
from ..system.docker import Container, DockerAway, DockerEngine, DockerRefused, DockerUnit, docker_unit, parse_stamp
from ..system.files import is_locked
from ..system.http import Answer, get_health
from ..system.systemd import Systemd, SystemdError
from ..system.threads import Worker
from . import compile_cache
from .api_socket import make_directory
from .config import Engine
from .container import ContainerControl, LaunchFailed
from .diagnosis import Death, explain
from .events import Events
from .journal import Journal, Reporter
from .lifecycle import (
    EXTEND_BY_S,
    UNSEEN,
    Decision,
    Existing,
    Found,
    decide_existing,
    describe_work,
    had_been_ready,
    is_other_image,
)
from .sd_notify import Notifier
from .signatures import Explanation
from .startup import Phase
from .state import TAIL_LINES, Failure, stamp
from .usage import read_usage

DOCKER_WAIT_S = 900.0
"""Seconds that a launch waits for Docker, and during which a failed launch is repeated."""
RETRY_FIRST_S = 5.0
"""Seconds before the second attempt after a failure that may pass, as systemd's RestartSec; then doubled each time."""
RETRY_MOST_S = 300.0
"""Longest time between two attempts, in seconds."""
CREATE_S = 240.0
"""Seconds that `docker create` and `docker start` may take together."""
GPU_POLL_S = 3.0
"""Seconds between two looks at what a container needs for its GPUs."""
GPU_WAIT_IN_SWITCH_S = 30.0
"""Seconds that a launch waits for the GPUs within a switch, which can roll back: enough for one new specification."""
CDI_REFRESH = "nvidia-cdi-refresh.service"
REFRESH_EVERY_S = 30.0
"""Seconds between two starts of CDI_REFRESH, whose release 1.18.2 allows 5 within 10 s."""
WORK_S = 5.0
"""Seconds in which a container whose log is silent has to read or compute to be kept."""
STATUS_S = 1.0
"""Seconds between two status texts during a wait."""

_ENDS = (Phase.FAILED, Phase.STOPPING, Phase.STOPPED)
"""Phases that a supervisor records when it has seen the container's end itself."""


@dataclass
class Launcher:
    """Brings an engine's container to run: `launch` returns it, or raises LaunchFailed or Stopped."""

    engine: Engine
    paths: HostPaths
    docker: DockerEngine
    notifier: Notifier
    journal: Journal
    docker_wait_s: float = DOCKER_WAIT_S
    unit: Callable[[], DockerUnit | None] = docker_unit
    health: Callable[[str, float], Answer] = get_health
    driver: Callable[[], DriverVersions] = read_versions
    gpus: Callable[[Sequence[str]], str | None] = find_missing_access
    """Returns what keeps CDI devices from being given to a container."""
    systemd: Systemd = field(default_factory=Systemd)

    def __post_init__(self) -> None:
        self.config = self.engine.config
        self.events = Events()
        self.cache_filled = True
        """Whether the container was made with a compile cache that an earlier start had filled, as far as known."""
        self.reporter = Reporter(self.config, self.paths, self.notifier, self.journal)
        self.control = ContainerControl(self.docker, self.unit, self.reporter, self.events)

    def launch(self) -> tuple[Container, Existing]:
        """Return the running container and how it came about: created, or attached to.

        Launches that failed for a reason that may pass are repeated: systemd would use up its starts in half a minute.
        Raises LaunchFailed: the engine cannot run now, or systemd should try again; Stopped: a signal to stop arrived.
        """
        deadline = time.monotonic() + self.docker_wait_s
        pause = RETRY_FIRST_S
        while True:
            try:
                return self._launch()
            except LaunchFailed as failure:
                left = deadline - time.monotonic()
                why = failure.explanation
                # An unknown failure may be a single error of Docker's API, which is no reason to roll back.
                first_unknown = why.cause == "docker_refused" and pause == RETRY_FIRST_S
                if not why.heals or left <= 0 or (self._is_switch_running() and not first_unknown):
                    raise
                self.reporter.note_failure(why)
            self._wait_to_retry(min(pause, left), why.sentence())
            pause = min(2 * pause, RETRY_MOST_S)

    def _wait_to_retry(self, seconds: float, why: str) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.reporter.enter(Phase.RETRYING, f"Trying again in {left:.0f} s. {why}")
            self.events.pause(min(STATUS_S, left))
        self.reporter.enter(Phase.WAITING_FOR_DOCKER)

    def _is_switch_running(self) -> bool:
        """Return whether a switch is in progress. It can roll back and needs to know of a failure at once."""
        try:
            return is_locked(self.paths.switch_lock)
        except OSError:
            return False

    def _launch(self) -> tuple[Container, Existing]:
        """Repeat the preparation if Docker goes away during it; every step can be repeated."""
        deadline = time.monotonic() + self.docker_wait_s
        while True:
            self._wait_for_docker()
            try:
                self.control.refresh_live_restore()
                return self._prepare()
            except DockerRefused as error:
                raise LaunchFailed(explain(Death(docker_message=str(error)))) from error
            except DockerAway as error:
                if time.monotonic() >= deadline:
                    raise LaunchFailed(explain(Death(docker_message=str(error)))) from error
                self.journal.write(f"the Docker Engine went away: {error}", 4)
                self.events.pause(1.0)

    def _wait_for_docker(self) -> None:
        """Wait until Docker answers. Raises LaunchFailed after `docker_wait_s` seconds, Stopped."""
        begin = time.monotonic()
        while True:
            self.events.check_stop()
            why = self.control.explain_unreachable()
            if why is None:
                return
            waited = time.monotonic() - begin
            if waited >= self.docker_wait_s:
                raise LaunchFailed(
                    Explanation(
                        "docker_away",
                        f"the Docker Engine did not answer for {waited:.0f} s ({why})",
                        "`systemctl status docker.service docker.socket` tells why; systemd tries again",
                    )
                )
            self.reporter.enter(Phase.WAITING_FOR_DOCKER, f"waiting for the Docker Engine, {waited:.0f} s: {why}")
            self.events.pause(1.0)

    def _wait_for_gpus(self) -> None:
        """Wait until a container can be given the engine's GPUs, and have the CDI specification made meanwhile.

        The wait is as long as that for Docker, and short within a switch. Raises LaunchFailed after it, Stopped.
        """
        begin, refreshed = time.monotonic(), float("-inf")
        while (missing := self.gpus(self.engine.devices)) is not None:
            now = time.monotonic()
            waited = now - begin
            limit = min(GPU_WAIT_IN_SWITCH_S, self.docker_wait_s) if self._is_switch_running() else self.docker_wait_s
            if waited >= limit:
                raise LaunchFailed(
                    Explanation(
                        "gpus_not_ready",
                        f"the GPUs could not be given to a container for {waited:.0f} s: {missing}",
                        f"`journalctl -b -u {CDI_REFRESH}` says why there is no complete specification, `ls -l "
                        "/dev/nvidia*` what the driver has made; `nvidia-ctk system create-device-nodes "
                        f"--control-devices --load-kernel-modules` and `systemctl restart {CDI_REFRESH}` make both",
                    )
                )
            if now - refreshed >= REFRESH_EVERY_S:
                refreshed = now
                self._refresh_specification(missing)
            self.reporter.enter(Phase.WAITING_FOR_GPUS, f"waiting for the GPUs, {waited:.0f} s: {missing}")
            self.events.pause(GPU_POLL_S)

    def _refresh_specification(self, why: str) -> None:
        self.journal.write(f"{why}: starting {CDI_REFRESH}", 5)
        try:
            self.systemd.start([CDI_REFRESH])
        except SystemdError as error:
            self.journal.write(str(error), 4)

    def _prepare(self) -> tuple[Container, Existing]:
        config = self.config
        present = self.control.find(config.container)
        decision = decide_existing(present, config, self._examine_container)
        if decision.what is Existing.REFUSE:
            raise LaunchFailed(Explanation("name_foreign", decision.why, "Nothing was changed", heals=False))
        if present is not None and decision.what in (Existing.ATTACH_SERVING, Existing.ATTACH_LOADING):
            self.journal.write(f"attaching to container {present.name} ({present.id[:12]}): {decision.why}")
            return present, decision.what
        if present is not None:
            if not present.running:
                self._report_corpse(present)
            self._clear(present, decision)
        self.events.check_stop()
        self._wait_for_gpus()
        self._refuse_mismatch()
        self.reporter.enter(Phase.STARTING)
        self.notifier.send(extend_s=CREATE_S + EXTEND_BY_S)
        self._make_socket_directory()
        self._prepare_cache()
        container_id = self.docker.create(self.engine.arguments)
        try:
            self._refuse_other_image(container_id)
            self.docker.start(container_id)
        except (DockerRefused, LaunchFailed):
            self.control.remove(container_id, stopping=True)
            raise
        started = self.control.find(container_id)
        if started is None:
            raise LaunchFailed(explain(Death(removed=True)))
        return started, Existing.CREATE

    def _make_socket_directory(self) -> None:
        """Make the directory for the engine's socket anew. Raises LaunchFailed."""
        if self.config.socket is None:
            return
        place = self.paths.engine_socket(self.config.engine)
        try:
            make_directory(place, self.engine.uid)
        except OSError as error:
            raise LaunchFailed(
                Explanation(
                    "socket_directory",
                    f"the directory {place.parent}, in which the engine makes its socket, could not be made: {error}",
                    "`systemd-tmpfiles --create /etc/tmpfiles.d/vllm-edge.conf` makes the directories around it, and "
                    "so does each boot",
                )
            ) from error

    def _prepare_cache(self) -> None:
        """Empty the compile cache if it is too large. The old one is removed while the engine loads."""
        cache = self.engine.cache
        if cache is None:
            return
        try:
            self.cache_filled = compile_cache.prepare(cache, self.engine.uid)
            if not self.cache_filled or not (excess := compile_cache.find_excess(cache)):
                return
            if not compile_cache.find_aside(cache).exists():
                compile_cache.set_aside(cache, self.engine.uid)
                self.cache_filled = False
                self.journal.write(f"the compile cache {cache} has {excess} and is emptied: vLLM compiles again", 4)
        except OSError as error:
            self.journal.write(f"the compile cache cannot be read or emptied: {error}", 4)
        else:
            Worker(self.discard_cache)

    def discard_cache(self) -> None:
        """Remove a compile cache that was set aside: the engine does not need it any more."""
        if self.engine.cache is not None:
            try:
                compile_cache.discard(self.engine.cache)
            except Exception as error:  # nobody waits for this thread
                self.journal.write(f"the compile cache that was set aside cannot be removed: {error}", 4)

    def _refuse_other_image(self, container_id: str) -> None:
        """Raise LaunchFailed if a new container was made from another image than the engine's."""
        config, created = self.config, self.control.find(container_id)
        if created is not None and is_other_image(created, config):
            raise LaunchFailed(
                Explanation(
                    "image_other",
                    f"Docker made the container from the image {created.image_id}, and the engine's is "
                    f"{config.image_id} ({config.image})",
                    "Run the image stage (`ansible-playbook site.yml`), which checks the image and writes its id",
                    heals=False,
                )
            )

    def _examine_container(self, container: Container) -> Found:
        """Determine the condition of a running container of ours, to decide whether it is kept."""
        records = self.control.read_log(container.id, 2000)
        answer = self.health(self.config.url, self.config.health_timeout_s)
        seconds = parse_stamp((records[-1].at if records else None) or container.started_at)
        age = None if seconds is None else max(0.0, time.time() - seconds)
        was_ready = had_been_ready(container, self.reporter.previous, [record.line for record in records])
        loads = not (answer.ok or was_ready or (age is not None and age < self.config.stall_timeout_s))
        return Found(answer, was_ready, age, self._watch_work(container.id) if loads else "")

    def _watch_work(self, container_id: str) -> str:
        """Return what a container's processes do within WORK_S seconds; empty if they do nothing."""
        begin, first = time.monotonic(), read_usage(container_id)
        doing = ""
        while not doing and (span := time.monotonic() - begin) < WORK_S:
            self.events.pause(min(1.0, WORK_S - span))
            usage = read_usage(container_id)
            if first is None or usage is None:
                return UNSEEN
            doing = describe_work(first, usage, time.monotonic() - begin)[0]
        return doing

    def _report_corpse(self, container: Container) -> None:
        """Record why a container ended while no supervisor was watching (supervisor killed, host crashed)."""
        finished = parse_stamp(container.finished_at)
        if finished is None or container.exit_code is None:
            return
        time_of_end = stamp(datetime.fromtimestamp(finished, UTC))
        last, previous = self.reporter.state.last_failure, self.reporter.previous
        recorded = last is not None and last.time >= time_of_end
        watched = previous is not None and previous.container_id == container.id and previous.phase in _ENDS
        if recorded or watched:
            return
        lines = [record.line for record in self.control.read_log(container.id, 400)]
        served = previous is not None and previous.container_id == container.id and previous.ready_at is not None
        why = explain(
            Death(lines=lines, exit_code=container.exit_code, oom_killed=container.oom_killed, was_serving=served)
        )
        self.journal.write(f"the previous container ended without a supervisor: {why.sentence()}", 4)
        phase = previous.phase if previous else ""
        told = (time_of_end, container.exit_code, why.cause, why.reason, why.remedy, phase, lines[-TAIL_LINES:])
        self.reporter.record(last_failure=Failure(*told))

    def _clear(self, container: Container, decision: Decision) -> None:
        self.reporter.enter(Phase.CLEARING, f"removing the previous container: {decision.why}")
        self.journal.write(f"removing container {container.name} ({container.id[:12]}): {decision.why}")
        if decision.what is Existing.STOP_AND_REMOVE:
            self.notifier.send(extend_s=self.config.stop_timeout_s + EXTEND_BY_S)
            self.control.end(container, self.config.stop_timeout_s)
        self.control.remove(container.id)

    def _refuse_mismatch(self) -> None:
        """Raise LaunchFailed if the NVIDIA kernel module does not match the libraries or the CDI specification.

        A new container would fail minutes later with "Failed to initialize NVML". A running container is not checked,
        because it has its libraries already.
        """
        found = explain_mismatch(self.driver())
        if found is not None:
            raise LaunchFailed(Explanation("driver_mismatch", found.reason, found.remedy, heals=found.heals))
