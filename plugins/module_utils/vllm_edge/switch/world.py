# SPDX-License-Identifier: Apache-2.0
"""The host as the transaction needs it: systemd, Docker, NVML and the HTTP servers of the engines.

This module knows what each phase does and in which order. How each step works is in the modules beside it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..engine.config import EngineConfig, EngineConfigError, load_config
from ..engine.startup import Phase as EnginePhase
from ..engine.state import Failure
from ..gateway import sync as gateway
from ..gateway.clients import GatewayBusy, GatewayError
from ..gateway.sync import view_host
from ..gateway.view import Course, View
from ..generation import live
from ..generation.model import Generation, GenerationError, Limits, SeenEngine
from ..names import TARGET, unit_name
from ..planning import drift
from ..system.docker import (
    DockerAway,
    DockerRefused,
)
from ..system.systemd import SystemdError, Unit
from .model import Done, Moves, Phase, PhaseFailed, decide_moves
from .steps import cleanup, gpu_memory, hooks, loading, page_cache, preflight, requests
from .steps.downtime import RoleWatch
from .view import HostView, several

STOP_MARGIN_S = 60.0
"""Seconds beyond TimeoutStopSec: systemd kills the unit then, and the supervisor may need time to remove its
container."""
STOP_AT_MOST_S = 900.0
REMOVE_S = 60.0


@dataclass
class HostWorld(HostView):
    """The host that this program runs on.

        Transaction calls             the work is in
            moves                         _seen (what runs), then moves.decide_moves
            preflight, prepare            preflight.check_*, page_cache
            hook, watch                   hooks, downtime.RoleWatch
            drain, warm_up, canary        requests
            away, back, publish           gateway, course
            free, measure                 gpu_memory
            install                       generation.live
            healthy, clean_up             loading, cleanup
            stop, start, what_runs        this class, through `systemd` and `docker`

    Every phase returns a Done or raises PhaseFailed, and should raise nothing else. Every action is idempotent, because
    a recovery repeats it without knowing how far the killed switch came. The object keeps one piece of state: between
    `start` and `healthy` it remembers the failures that were known before (`_failures`).
    """

    _failures: dict[str, Failure | None] = field(default_factory=dict)
    """The last failure of each engine, as its supervisor recorded it before `start`."""

    def _seen(self, wanted: Collection[str]) -> tuple[list[SeenEngine], dict[str, Unit]]:
        """Return every engine that this host shows, with the state of its unit and container, and the units."""
        containers = [container for container in self.list_containers() if container.engine]
        names = self.find_engine_units() | set(live.list_live_engines(self.paths))
        names |= {container.engine for container in containers if container.engine}
        units = self.show_units([unit_name(name) for name in names | set(wanted)] + [TARGET])
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
        """Compare what runs, the live files and the target with a generation, and return what has to change."""
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
        units = self.show_units(names)
        patience = min(
            STOP_AT_MOST_S, max(unit.stop_timeout_s or STOP_AT_MOST_S for unit in units.values()) + STOP_MARGIN_S
        )
        said = None
        loaded = [name for name in names if units[name].loaded]
        if loaded:
            with self._ending_idle(moves.stop):
                said = self.systemd.stop(loaded, patience)
        outlived = self._remove_containers(moves.stop)
        left = [f"{name} is {unit.active_state}" for name, unit in self.show_units(names).items() if not unit.down]
        if left:
            raise PhaseFailed(
                f"{several(left)} {self.clock() - began:.0f} s after it was ordered to stop"
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
            left = [container for container in self.list_containers() if container.engine in engines]
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

    def install(self, wanted: Generation, moves: Moves) -> Done:
        """Write the files and units of `start`, `keep` and `wait` that differ, and run daemon-reload if a file was
        written or systemd does not know a unit. The target is not written."""
        engines = [*moves.start, *moves.keep, *moves.wait]
        try:
            written = live.install(wanted, self.paths, engines, target=False)
        except GenerationError as error:
            raise PhaseFailed(f"Files of generation {wanted.number} could not be installed: {error}.") from error
        units = self.show_units([unit_name(engine) for engine in engines])
        if written or any(unit.need_daemon_reload or not unit.loaded for unit in units.values()):
            self._order(self.systemd.daemon_reload, "The new units could not be read")
        return Done(f"{len(written)} files written" if written else "every file is as it should be")

    def _order(self, order: Callable[[], None], what: str) -> None:
        """Give systemd an order; raise PhaseFailed with `what` at its beginning if that fails."""
        try:
            order()
        except SystemdError as error:
            raise PhaseFailed(
                f"{what}: {error}. 'systemctl status' and 'journalctl -b -p warning' show more."
            ) from error

    def start(self, moves: Moves) -> Done:
        """Remember the last failures, reset the failed state of the units, and start them without waiting."""
        if not moves.start:
            return Done("no engine has to start")
        names = [unit_name(engine) for engine in moves.start]
        for engine in moves.start:
            self._failures[engine] = self.read_last_failure(engine)
        # Earlier failures must not count against the limit of starts, nor be taken for a failure of this start.
        self._order(lambda: self.systemd.reset_failed(names), "Former failures could not be forgotten")
        self._order(lambda: self.systemd.start(names), f"{several(moves.start)} could not be started")
        return Done(f"{several(moves.start)} were ordered to start")

    def healthy(self, wanted: Generation, moves: Moves, *, all_of_them: bool) -> Done:
        """Wait until all engines of `start` and `wait` are active.

        Fails at the first engine that ends, with its explanation. With `all_of_them` (a rollback) it waits for every
        engine and then fails with those that do not serve.
        """
        return loading.wait_until_healthy(self, wanted, moves, self._failures, all_of_them=all_of_them)

    def warm_up(self, wanted: Generation, moves: Moves) -> Done:
        configs = [wanted.engines[name].config for name in (*moves.start, *moves.wait)]
        return requests.warm_up(self, configs, wanted.limits)

    def canary(self, wanted: Generation) -> Done:
        return requests.run_canary(self, wanted)

    def ask_suite(self, wanted: Generation, moves: Moves) -> Done:
        return requests.ask_suite(self, wanted, moves.start)

    def measure(self, wanted: Generation, *, accept: bool = False) -> Done:
        """Compare the VRAM of every GPU with its budget and the plan: rows are `data["gpus"]` and `data["drift"]`.

        `accept` is as in `gpu_memory.measure`.
        """
        measured = gpu_memory.measure(self, wanted, accept=accept)
        return self._against_the_plan(wanted, measured)

    def _against_the_plan(self, wanted: Generation, measured: Done) -> Done:
        """Compare the measurement with the plan: a deviation is a warning, or a failure if the operator asked for
        that."""
        configs = [engine.config for engine in wanted.engines.values()]
        states = {config.engine: self.read_state(config.engine) for config in configs}
        rows = drift.compare(configs, states, measured.data["gpus"])
        said = drift.sentences(rows)
        data = {**measured.data, "drift": rows}
        on_drift = drift.wanted(configs)
        if said and on_drift == "fail":
            raise PhaseFailed(" ".join(said), data=data)
        return replace(measured, data=data, warnings=(*measured.warnings, *(() if on_drift == "ignore" else said)))

    def away(self, wanted: Generation, serving: Generation | None, moves: Moves) -> Done:
        """Let requests wait for the names of `serving` whose engines do not stay, or go to an engine that stands in.

        `wanted` is the generation whose engines will serve them.
        """
        if serving is None:
            return Done("nothing is known to serve")
        course = Course(Phase.AWAY, moves.keep, wanted)
        return self._show_clients(lambda: view_host(self.paths, serving, course))

    def back(self, generation: Generation) -> Done:
        return self._show_clients(lambda: view_host(self.paths, generation, Course(Phase.BACK)))

    def publish(self, phase: Phase | None) -> None:
        """Show clients of the gateway the phase of the switch. Raises GatewayError, OSError."""
        gateway.publish_phase(self.paths, phase)

    def _show_clients(self, look: Callable[[], View]) -> Done:
        try:
            report = gateway.apply(self.paths, look)
        except GatewayBusy as error:
            # Links and health checks tell the gateway what serves, so a switch need not wait for it.
            return Done(
                "the gateway was not told",
                warnings=(f"{error} Clients may get wrong answers until 'vllm-edge gateway sync' was run.",),
            )
        except GatewayError as error:
            raise PhaseFailed(str(error)) from error
        if not report.installed:
            return Done("this host has no gateway")
        told = f"requests for {several(report.away)} wait" if report.away else "every served name is reached"
        runs = report.answers or report.warnings  # one that does not answer is a warning
        return Done(f"{told}{'' if runs else '; the gateway does not run'}", warnings=report.warnings)

    def drain(self, moves: Moves, limits: Limits) -> Done:
        """Wait until the engines in `moves.stop` have no request, or `limits.drain_timeout_s` has passed."""
        return requests.drain(self, self._configs(moves.stop), limits)

    def free(self, wanted: Generation, moves: Moves) -> Done:
        """Wait until no process of ours uses the GPUs of `moves.start`, except engines that stay.

        After `wanted.limits.free_timeout_s` the processes that still do are named, and those of ours are killed.
        """
        needed = {
            uuid: wanted.budgets_mib.get(uuid, 0) for name in moves.start for uuid in wanted.engines[name].config.gpus
        }
        if not needed:
            return Done("no engine has to start")
        kept = {unit_name(name) for name in (*moves.keep, *moves.wait)}
        return gpu_memory.Release(self, needed, kept).run(wanted.limits.free_timeout_s)

    def clean_up(self, wanted: Generation, former: Generation | None) -> Done:
        return cleanup.clean_up(self, wanted)

    def what_runs(self, wanted: Generation) -> str:
        """Return one sentence, for the message of a failure: each engine, the names that it serves, and whether it
        does."""
        names = sorted(set(wanted.engines) | self.find_engine_units() | set(live.list_live_engines(self.paths)))
        units = self.show_units([unit_name(name) for name in names])
        try:
            hashes = {one.engine: one.input_hash for one in self.list_containers(0) if one.engine and one.running}
        except PhaseFailed:
            hashes = {}  # without Docker, nothing is said about which generation an engine belongs to
        sentences = []
        for name in names:
            unit, engine = units[unit_name(name)], wanted.engines.get(name)
            if engine is not None and hashes.get(name, wanted.hashes[name]) == wanted.hashes[name]:
                who = f"{name} ({several(engine.config.served_names)})"
            elif engine is None and unit.down:
                continue
            else:
                who = f"{name} (of another generation)"
            sentences.append(f"{who} {self._describe_service(name, unit)}")
        return several(sentences) or "no engine runs"

    def _describe_service(self, engine: str, unit: Unit) -> str:
        if unit.active_state != "active":
            return f"does not serve ({unit.active_state}, {unit.sub_state})"
        state = self.read_state(engine)
        return "is active and does not answer" if state and state.phase == EnginePhase.UNHEALTHY else "serves"

    def preflight(self, wanted: Generation, moves: Moves) -> Done:
        return preflight.check_host(self, wanted, moves)

    def prepare(self, wanted: Generation, moves: Moves) -> Done:
        configs = [wanted.engines[name].config for name in moves.start]
        return page_cache.prepare(configs, clock=self.clock, rates=self.paths.read_rates)

    def hook(self, name: hooks.Hook, wanted: Generation, former: Generation | None) -> Done:
        return hooks.run_hooks(name, wanted, former, self.paths)

    def watch(self, wanted: Generation, former: Generation | None) -> RoleWatch:
        """Start to ask for every served name, as a client would.

        The gaps it finds and the phases passed to `end` are in the time of `monotonic`; the transaction converts them
        to seconds since the switch began.
        """
        probe = f"unix:{self.paths.gateway_run / 'probe.sock'}" if gateway.is_installed(self.paths) else None
        return RoleWatch(wanted, former, clock=self.clock, ask=self.ask, gateway=probe)
