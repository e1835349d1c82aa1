# SPDX-License-Identifier: Apache-2.0
"""The real host behind the protocol `World`: systemd, Docker, NVML and the HTTP servers of the engines.

This module knows what each phase does and in which order. How each step works is in the modules beside it: preflight,
page_cache, hooks, requests, gpu_memory and downtime.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..canary.checks import Ask
from ..engine.config import EngineConfig, EngineConfigError, load_config
from ..engine.startup import Phase as EnginePhase
from ..engine.state import EngineState, Failure, read_state, stamp
from ..generation import live, model, store
from ..generation.model import Generation, GenerationError, Limits, SeenEngine
from ..gpu.owners import find_owners
from ..names import TARGET, EngineIdentity, unit_name
from ..paths import HostPaths
from ..planning import drift
from ..system.docker import (
    Container,
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    docker_unit,
    explain_unreachable_docker,
)
from ..system.http import request
from ..system.nvml import NvmlFailure, open_nvml
from ..system.systemd import Systemd, SystemdError, Unit
from . import gpu_memory, hooks, page_cache, preflight, requests
from .downtime import RoleWatch
from .model import Done, Moves, PhaseFailed, Watch, World
from .moves import decide_moves
from .preflight import Found

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DOCKER_PATIENCE_S = 60.0
SYSTEMD_PATIENCE_S = 30.0
"""systemd does not answer for a while during a daemon-reload or while it re-executes itself."""
PING_S = 3.0
POLL_S = 0.5
STOP_MARGIN_S = 60.0
"""Seconds beyond TimeoutStopSec: systemd kills the unit then, and the supervisor may need time to remove its
container."""
STOP_AT_MOST_S = 900.0
REMOVE_S = 60.0
TARGET_S = 10.0
RESTARTS_ON_THE_WAY_BACK = 2
"""A rollback has no other generation to fall back to, so an engine that failed and may recover gets this many more
tries."""


def several(names: Iterable[str]) -> str:
    """Join names with commas."""
    return ", ".join(names)


@dataclass
class _Loading:
    """An engine that the phase `healthy` waits for, and what systemd has shown of it so far."""

    name: str
    last_failure: Failure | None
    """The failure that was recorded before the start: any other one is new. Records are compared as a whole, because
    wall clocks may jump."""
    invocation: str = ""
    restarts: int = 0
    seen: bool = False
    serves: bool = False
    problem: str = ""
    final: bool = False
    """True if systemd does not restart the unit any more."""
    seconds: float = 0.0


@dataclass
class HostWorld:
    """The host that this program runs on; the contract of each method is in `World`.

        Transaction calls             the work is in
            moves                         _seen (what runs), then moves.decide_moves
            preflight, prepare            preflight.check_*, page_cache
            hook, watch                   hooks, downtime.RoleWatch
            drain, warm_up, canary        requests
            free, measure                 gpu_memory
            install                       generation.live
            stop, start, healthy,         this class, through `systemd` and `docker`
            clean_up, what_runs

    Every phase returns a Done or raises PhaseFailed. The object keeps one piece of state: between `start` and `healthy`
    it remembers the failures that were known before (`_failures`). Everything outside of this program is a field, so
    that tests can replace it.
    """

    paths: HostPaths
    systemd: Systemd = field(default_factory=Systemd)
    docker: DockerEngine = field(default_factory=DockerEngine)
    docker_unit: Callable[[], DockerUnit | None] = docker_unit
    nvml: gpu_memory.OpenNvml = open_nvml
    owners: gpu_memory.Owners = find_owners
    ask: Ask = request
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _failures: dict[str, Failure | None] = field(default_factory=dict)
    """The last failure of each engine, as its supervisor recorded it before `start`."""

    # -- time and the host's life

    def monotonic(self) -> float:
        return self.clock()

    def stamp(self) -> str:
        return stamp()

    def boot_id(self) -> str:
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError as error:
            raise PhaseFailed(f"{BOOT_ID} cannot be read: {error}. Is /proc mounted?") from error

    def going_down(self) -> bool:
        try:
            return self.systemd.going_down()
        except SystemdError:
            return False

    # -- asking

    def _units(self, names: Iterable[str]) -> dict[str, Unit]:
        """Show units, retrying for SYSTEMD_PATIENCE_S while systemd reloads."""
        wanted = list(names)
        deadline = self.clock() + SYSTEMD_PATIENCE_S
        while True:
            try:
                return self.systemd.show(wanted)
            except SystemdError as error:
                if self.clock() >= deadline:
                    raise PhaseFailed(
                        f"{error}. Nothing can be started or stopped without it: look at 'systemctl status'."
                    ) from error
            self.sleep(POLL_S)

    def _docker_problem(self) -> str | None:
        """Return why the Docker Engine cannot be asked, or None."""
        return explain_unreachable_docker(self.docker.ping, self.docker_unit(), PING_S)

    def _containers(self, patience_s: float = DOCKER_PATIENCE_S) -> list[Container]:
        """List all containers, waiting for a Docker Engine that is being restarted."""
        deadline = self.clock() + patience_s
        while True:
            problem = self._docker_problem()
            if problem is None:
                try:
                    return self.docker.listed()
                except (DockerAway, DockerRefused) as error:
                    problem = str(error)
            if self.clock() >= deadline:
                raise PhaseFailed(
                    f"The Docker Engine did not answer for {patience_s:.0f} s ({problem}): which engines run cannot be "
                    "told, and none can start. 'systemctl status docker.service docker.socket' tells why; "
                    "'systemctl start docker.service' starts it, then switch again."
                )
            self.sleep(POLL_S)

    # -- what is there

    def _our_units(self) -> set[str]:
        """Return the engines whose unit is loaded and whose unit file says that this project wrote it."""
        found: set[str] = set()
        try:
            loaded = self.systemd.loaded("vllm-*.service")
        except SystemdError as error:
            raise PhaseFailed(f"{error}. Nothing can be started or stopped without it.") from error
        units = self._units(loaded)
        for name, unit in units.items():
            engine = EngineIdentity.from_unit(name).engine
            try:
                text = Path(unit.fragment).read_text(encoding="utf-8", errors="replace") if unit.fragment else ""
            except OSError:
                continue  # without a unit file, only a container or a directory of ours can still name the engine
            # Check the command as well: the units of the switch and of the recovery are ours, but they are no engines.
            if model.MARK in text and f"run-engine {engine}\n" in text:
                found.add(engine)
        return found

    def _seen(self, wanted: Collection[str]) -> tuple[list[SeenEngine], dict[str, Unit]]:
        """Return every engine that this host shows, with the state of its unit and container, and the units."""
        containers = [container for container in self._containers() if container.engine]
        names = self._our_units() | set(live.list_live_engines(self.paths))
        names |= {container.engine for container in containers if container.engine}
        units = self._units([unit_name(name) for name in names | set(wanted)] + [TARGET])
        running = {container.engine: container.input_hash or "" for container in containers if container.running}
        seen = [
            SeenEngine(
                name,
                units[unit_name(name)].active_state,
                units[unit_name(name)].sub_state,
                running.get(name),
            )
            for name in sorted(names)
        ]
        return seen, units

    def moves(self, wanted: Generation) -> Moves:
        """Read what runs, the live files and the target, and let `decide_moves` decide."""
        seen, units = self._seen(wanted.engines)
        try:
            files = live.live_changes(wanted, self.paths)
        except GenerationError as error:
            raise PhaseFailed(str(error)) from error
        target = []
        if units[TARGET].file_state != "enabled":
            target.append("not enabled")
        if units[TARGET].active_state != "active":
            target.append("not active")
        stale = [name for name, unit in units.items() if unit.need_daemon_reload]
        if stale:
            target.append(f"needs daemon-reload ({several(sorted(stale))})")
        return decide_moves(wanted.hashes, seen, files, target)

    # -- stop

    def _configs(self, names: Iterable[str]) -> list[EngineConfig]:
        """Load the configurations of live engines, leaving out those that cannot be read."""
        configs = []
        for name in names:
            try:
                configs.append(load_config(name, self.paths))
            except EngineConfigError:
                continue
        return configs

    def stop(self, moves: Moves) -> Done:
        """Stop the units, waiting for TimeoutStopSec plus STOP_MARGIN_S, and remove containers that outlived them."""
        if not moves.stop:
            return Done("no engine has to stop")
        began = self.clock()
        names = [unit_name(engine) for engine in moves.stop]
        units = self._units(names)
        patience = min(
            STOP_AT_MOST_S, max(unit.stop_timeout_s or STOP_AT_MOST_S for unit in units.values()) + STOP_MARGIN_S
        )
        said = None
        loaded = [name for name in names if units[name].loaded]
        if loaded:
            with self._ending_idle(moves.stop):
                said = self.systemd.stop(loaded, patience)
        outlived = self._remove_containers(moves.stop)
        left = [f"{name} is {unit.active_state}" for name, unit in self._units(names).items() if not unit.down]
        if left:
            raise PhaseFailed(
                f"{several(left)} {self.clock() - began:.0f} s after it was told to stop"
                + (f" ({said})" if said else "")
                + f". 'systemctl status {' '.join(names)}' shows what it waits for; a process in state D of "
                "'ps -eo pid,stat,wchan,cmd' hangs in the driver, and only a reboot ends it.",
                engines=moves.stop,
            )
        engines = f"{several(moves.stop)} stopped in {self.clock() - began:.1f} s"
        if not outlived:
            return Done(engines)
        text = f"{several(outlived)} outlived its unit and was removed"
        return Done(f"{engines}; {text}", warnings=(f"Container {text}.",))

    @contextlib.contextmanager
    def _ending_idle(self, engines: Collection[str]) -> Iterator[None]:
        """End containers that have finished their requests while their units stop.

        Such a container only waits for its shutdown timeout. If this fails, the stop takes longer and nothing else
        happens.
        """
        over = threading.Event()

        def watch(config: EngineConfig) -> None:
            if requests.wait_until_idle(config, over.wait, ask=self.ask):
                with contextlib.suppress(DockerAway, DockerRefused):
                    for container in self.docker.listed():
                        if container.engine == config.engine and container.running and not over.is_set():
                            self.docker.kill(container.id)

        for config in self._configs(engines):
            if config.shutdown_timeout_s is not None:
                threading.Thread(target=watch, args=(config,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _remove_containers(self, engines: Collection[str]) -> list[str]:
        """Remove containers of these engines that outlived their unit; return the names of those that were running."""
        deadline = self.clock() + REMOVE_S
        outlived: list[str] = []
        problem = ""
        while True:
            left = [container for container in self._containers() if container.engine in engines]
            if not left:
                return outlived
            if self.clock() >= deadline:
                raise PhaseFailed(
                    f"Container {several(container.name for container in left)} could not be removed within "
                    f"{REMOVE_S:.0f} s ({problem or 'still there'}). A process that cannot be killed holds it, often "
                    "inside the driver: look for state D in 'ps -eo pid,stat,wchan,cmd' and at 'journalctl -k'; a "
                    "reboot ends it.",
                    engines=[container.engine for container in left if container.engine],
                )
            for container in left:
                if container.running and container.name not in outlived:
                    outlived.append(container.name)
                try:
                    self.docker.remove(container.id)
                except (DockerAway, DockerRefused) as error:
                    problem = str(error)
            self.sleep(0.2)

    # -- files

    def install(self, wanted: Generation, moves: Moves) -> Done:
        """Write the files and units, and run daemon-reload if a file was written or systemd does not know a unit."""
        engines = [*moves.start, *moves.keep, *moves.wait]
        try:
            written = live.install(wanted, self.paths, engines, target=False)
        except GenerationError as error:
            raise PhaseFailed(f"Files of generation {wanted.number} could not be installed: {error}.") from error
        units = self._units([unit_name(engine) for engine in engines])
        if written or any(unit.need_daemon_reload or not unit.loaded for unit in units.values()):
            self._order(self.systemd.daemon_reload, "The new units could not be read")
        return Done(f"{len(written)} files written" if written else "every file is as it should be")

    def _order(self, order: Callable[[], None], what: str) -> None:
        """Give systemd an order; raise PhaseFailed with `what` at its beginning if that fails."""
        try:
            order()
        except SystemdError as error:
            raise PhaseFailed(
                f"{what}: {error}. 'systemctl status' and 'journalctl -b -p warning' tell more."
            ) from error

    # -- start and healthy

    def _state(self, engine: str) -> EngineState | None:
        return read_state(self.paths.engine_state(engine))

    def _last_failure(self, engine: str) -> Failure | None:
        state = self._state(engine)
        return state.last_failure if state else None

    def start(self, moves: Moves) -> Done:
        """Remember the last failures, reset the failed state, and start the units."""
        if not moves.start:
            return Done("no engine has to start")
        names = [unit_name(engine) for engine in moves.start]
        for engine in moves.start:
            self._failures[engine] = self._last_failure(engine)
        # Earlier failures must not count against the limit of starts, nor be taken for a failure of this start.
        self._order(lambda: self.systemd.reset_failed(names), "Former failures could not be forgotten")
        self._order(lambda: self.systemd.start(names), f"{several(moves.start)} could not be started")
        return Done(f"{several(moves.start)} told to start")

    def healthy(self, wanted: Generation, moves: Moves, *, all_of_them: bool) -> Done:
        """Poll the units until all serve, the first one fails, or `limits.healthy_timeout_s` has passed."""
        names = [*moves.start, *moves.wait]
        if not names:
            return Done("no engine has to load")
        engines = {name: _Loading(name, self._failures.get(name, self._last_failure(name))) for name in names}
        limit = wanted.limits.healthy_timeout_s
        began = self.clock()
        while True:
            units = self._units([unit_name(name) for name in names])
            now = self.clock() - began
            for engine in engines.values():
                self._judge(engine, units[unit_name(engine.name)], now, all_of_them)
            failed = [engine for engine in engines.values() if engine.problem]
            loading = [engine for engine in engines.values() if not engine.serves and not engine.problem]
            over = now >= limit
            if failed and not all_of_them:
                raise self._unhealthy(failed, units, now, wanted)
            if over or not loading:
                break
            self.sleep(POLL_S)
        if failed or loading:
            raise self._unhealthy([*failed, *loading], units, now, wanted)
        slowest = max(engines.values(), key=lambda engine: engine.seconds)
        return Done(
            f"{several(names)} {'serve' if len(names) > 1 else 'serves'} after {now:.1f} s"
            + (f", {slowest.name} last" if len(names) > 1 else ""),
            data={"load_seconds": {engine.name: round(engine.seconds, 1) for engine in engines.values()}},
        )

    def _judge(self, engine: _Loading, unit: Unit, now: float, patient: bool) -> None:
        """Update one engine from what systemd shows of its unit.

        `now` is seconds since `healthy` began. With `patient` (a rollback) an engine that ended may be restarted by
        systemd.
        """
        engine.problem = ""
        if unit.job and unit.active_state in ("inactive", "failed", "deactivating"):
            engine.serves = False
            return  # the start job waits for another unit
        if not engine.seen and not unit.down and not unit.auto_restart:
            engine.seen, engine.invocation, engine.restarts = True, unit.invocation, unit.restarts
        again = engine.seen and (unit.invocation != engine.invocation or unit.restarts != engine.restarts)
        ended = unit.down or unit.auto_restart
        tries = unit.restarts - engine.restarts + (1 if unit.auto_restart else 0)
        may_heal = patient and not unit.down and tries <= RESTARTS_ON_THE_WAY_BACK
        was_up = engine.serves
        engine.serves = unit.active_state == "active" and (patient or not again)
        if engine.serves and not was_up:
            engine.seconds = now
        if (ended or again) and not engine.serves and not may_heal:
            engine.problem = f"{unit.active_state}, {unit.result}"

    def _unhealthy(
        self, engines: Sequence[_Loading], units: Mapping[str, Unit], now: float, wanted: Generation
    ) -> PhaseFailed:
        """Return the failure that explains why each of these engines does not serve."""
        texts = []
        limit = wanted.limits.healthy_timeout_s
        for engine in engines:
            unit = units[unit_name(engine.name)]
            state = self._state(engine.name)
            if not engine.problem:
                doing = unit.status_text or unit.sub_state
                texts.append(
                    f"Engine {engine.name} does not serve after {now:.0f} s ({doing}). 'journalctl -u "
                    f"vllm-{engine.name}' shows how far it came; vllm_engine_healthy_timeout_s is {limit:g}."
                )
                continue
            failure = state.last_failure if state else None
            # The phase is `failed` only for the run that ended last. Otherwise a failure is new if it differs from the
            # one known before the start, whatever the clock says.
            fresh = state is not None and (state.phase == EnginePhase.FAILED or failure != engine.last_failure)
            if failure is not None and fresh:
                why = f"{failure.reason[:1].upper()}{failure.reason[1:]}. {failure.remedy}"
            else:
                why = f"{unit.status_text or f'systemd says {engine.problem}'}. 'vllm-edge explain {engine.name}'"
            when = "ended again after it had loaded" if engine.seconds else "ended while it was loading"
            texts.append(f"Engine {engine.name} {when}. {why.rstrip('.')}.")
        return PhaseFailed(" ".join(texts), engines=[engine.name for engine in engines])

    # -- what the new engines do

    def warm_up(self, wanted: Generation, moves: Moves) -> Done:
        configs = [wanted.engines[name].config for name in (*moves.start, *moves.wait)]
        return requests.warm_up(configs, wanted.limits, ask=self.ask, clock=self.clock)

    def canary(self, wanted: Generation) -> Done:
        return requests.run_canary(wanted, self.paths, self.docker, ask=self.ask, clock=self.clock)

    def measure(self, wanted: Generation) -> Done:
        """Measure the GPUs and compare them with the budgets and the plan."""
        measured = gpu_memory.measure(
            wanted,
            gpu_memory.load_slots(self.paths),
            open_nvml=self.nvml,
            owners=self.owners,
            clock=self.clock,
            sleep=self.sleep,
        )
        return self._against_the_plan(wanted, measured)

    def _against_the_plan(self, wanted: Generation, measured: Done) -> Done:
        """Compare the measurement with the plan: a deviation is a warning, or a failure if the operator asked for
        that."""
        configs = [engine.config for engine in wanted.engines.values()]
        states = {config.engine: self._state(config.engine) for config in configs}
        rows = [row.as_dict() for row in drift.compare_engines(configs, states, measured.data["gpus"])]
        said = drift.sentences(rows)
        data = {**measured.data, "drift": rows}
        on_drift = drift.wanted(configs)
        if said and on_drift == "fail":
            raise PhaseFailed(" ".join(said), data=data)
        return replace(measured, data=data, warnings=(*measured.warnings, *(() if on_drift == "ignore" else said)))

    # -- drain and free

    def drain(self, moves: Moves, limits: Limits) -> Done:
        return requests.drain(self._configs(moves.stop), limits, ask=self.ask, clock=self.clock, sleep=self.sleep)

    def free(self, wanted: Generation, moves: Moves) -> Done:
        """Wait until the GPUs of the engines that start are free; engines that stay keep their memory."""
        needed = {
            uuid: wanted.budgets_mib.get(uuid, 0) for name in moves.start for uuid in wanted.engines[name].config.gpus
        }
        if not needed:
            return Done("no engine has to start")
        return gpu_memory.Release(
            needed,
            {unit_name(name) for name in (*moves.keep, *moves.wait)},
            gpu_memory.load_slots(self.paths),
            open_nvml=self.nvml,
            owners=self.owners,
            clock=self.clock,
            sleep=self.sleep,
        ).run(wanted.limits.free_timeout_s)

    # -- the end

    def clean_up(self, wanted: Generation, former: Generation | None) -> Done:
        """Do as much of the clean-up as possible, and report everything that failed together.

        No engine of `wanted` is stopped: its target is written and started, never restarted, because the engines would
        be restarted with it.
        """
        problems: list[str] = []
        warnings: list[str] = []
        done: list[str] = []
        try:
            if live.install(wanted, self.paths, (), target=True):
                done.append("target written")
        except GenerationError as error:
            problems.append(f"The target could not be written: {error}.")
        gone = [
            name
            for name in sorted(self._our_units() | set(live.list_live_engines(self.paths)))
            if name not in wanted.engines
        ]
        units = self._units([unit_name(name) for name in gone])
        removed = []
        for name in gone:
            if not units[unit_name(name)].down:
                problems.append(
                    f"{unit_name(name)} is {units[unit_name(name)].active_state} and no engine of generation "
                    f"{wanted.number}: 'systemctl stop {unit_name(name)}', then run site.yml."
                )
                continue
            try:
                removed += [name] if live.remove_engine(name, self.paths) else []
            except GenerationError as error:
                problems.append(f"Files of engine {name}, which is no more, stay: {error}.")
        if removed:
            done.append(f"files of {several(removed)} removed")
        for order, what in (
            (self.systemd.daemon_reload, "systemd could not read the units again"),
            (lambda: self.systemd.enable(TARGET), f"{TARGET} could not be enabled"),
            (lambda: self.systemd.start([TARGET]), f"{TARGET} could not be started"),
        ):
            try:
                order()
            except SystemdError as error:
                problems.append(f"{what}: {error}.")
        problems += self._target_problems()
        try:
            pruned = store.prune(self.paths, wanted.limits.keep_generations)
            if pruned:
                done.append(f"generations {several(map(str, pruned))} removed")
        except GenerationError as error:
            warnings.append(f"Old generations were not removed: {error}.")
        try:
            self.systemd.reset_failed([unit_name(name) for name in removed])
        except SystemdError as error:
            warnings.append(f"systemd still lists engines that are no more: {error}.")
        if problems:
            raise PhaseFailed(" ".join(problems))
        return Done("; ".join(done) or "nothing was left to do", warnings=tuple(warnings))

    def _target_problems(self) -> list[str]:
        """Return why the target is not active and enabled, after waiting TARGET_S for it.

        The wait is not left to systemctl, which would also wait for an engine that systemd restarts again and again.
        """
        deadline = self.clock() + TARGET_S
        while True:
            target = self._units([TARGET])[TARGET]
            if target.active_state == "active" and target.file_state == "enabled":
                return []
            if self.clock() >= deadline:
                state = f"{target.active_state} and {target.file_state or 'not installed'}"
                return [f"{TARGET} is {state}: its engines do not all start at boot. 'systemctl status {TARGET}'."]
            self.sleep(POLL_S)

    def what_runs(self, wanted: Generation) -> str:
        """Return each engine, the names that it serves, and whether it serves, as one sentence."""
        names = sorted(set(wanted.engines) | self._our_units() | set(live.list_live_engines(self.paths)))
        units = self._units([unit_name(name) for name in names])
        roles = {name: several(engine.config.served_names) for name, engine in wanted.engines.items()}
        try:
            hashes = {one.engine: one.input_hash for one in self._containers(0) if one.engine and one.running}
        except PhaseFailed:
            hashes = {}  # without Docker, nothing is said about which generation an engine belongs to
        words = []
        for name in names:
            unit = units[unit_name(name)]
            if name not in wanted.engines and unit.down:
                continue
            other = name not in roles or hashes.get(name, wanted.hashes[name]) != wanted.hashes[name]
            who = f"{name} ({'of another generation' if other else roles[name]})"
            state = self._state(name)
            if unit.active_state != "active":
                words.append(f"{who} does not serve ({unit.active_state}, {unit.sub_state})")
            elif state is not None and state.phase == EnginePhase.UNHEALTHY:
                words.append(f"{who} is active and does not answer")
            else:
                words.append(f"{who} serves")
        return several(words) or "no engine runs"

    # -- before anything is touched, hooks, and the client's view

    def preflight(self, wanted: Generation, moves: Moves) -> Done:
        """Run all checks and report every problem at once, so that an operator can repair them together."""
        began = self.clock()
        start = [wanted.engines[name].config for name in moves.start]
        problems: list[str] = []
        warnings: list[str] = []
        try:
            containers = self._containers()
        except PhaseFailed as failed:
            problems.append(failed.text)
        else:
            problems += preflight.check_images(start, self.docker)
            ports = preflight.check_ports(start, moves.stop, containers)
            if ports:
                # While systemd restarts a container, Docker may listen on its port before the container is listed.
                self.sleep(POLL_S)
                ports = preflight.check_ports(start, moves.stop, self._containers())
            problems += ports
        weights = preflight.check_weights(start)
        problems += weights.problems
        warnings += weights.warnings
        problems += preflight.check_disk(self.paths.state)
        try:
            found = self._check_gpus(wanted, moves)
            problems += found.problems
            warnings += found.warnings
        except NvmlFailure as failure:
            problems.append(f"The GPUs cannot be read: {failure}")
        if problems:
            raise PhaseFailed(" ".join(problems), engines=moves.start)
        return Done(
            f"image, weights, ports, GPUs and disk as they should be; {self.clock() - began:.1f} s",
            warnings=tuple(warnings),
        )

    def _check_gpus(self, wanted: Generation, moves: Moves) -> Found:
        """Read the GPUs and compare them with what the generation needs."""
        with self.nvml() as session:
            boards = gpu_memory.read_boards(session, gpu_memory.load_slots(self.paths))
        owners = self.owners({process.pid for gpu in boards.gpus for process in gpu.processes or ()})
        ours = gpu_memory.engine_uid()
        looks = {gpu.uuid: gpu_memory.look(gpu, owners, (), ours=ours) for gpu in boards.gpus}
        return preflight.check_gpus(wanted, moves.start, boards, looks)

    def prepare(self, wanted: Generation, moves: Moves) -> Done:
        return page_cache.prepare([wanted.engines[name].config for name in moves.start], clock=self.clock)

    def hook(
        self, name: Literal["before_drain", "after_commit"], wanted: Generation, former: Generation | None
    ) -> Done:
        return hooks.run_hooks(name, wanted, former, self.paths)

    def watch(self, wanted: Generation, former: Generation | None) -> Watch:
        return RoleWatch(wanted, former, clock=self.clock, ask=self.ask)


def open_world(paths: HostPaths) -> World:
    """Return the host that this program runs on."""
    return HostWorld(paths)
