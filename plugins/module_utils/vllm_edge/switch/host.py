# SPDX-License-Identifier: Apache-2.0
"""The host as the transaction needs it: systemd, Docker, NVML and the HTTP servers of the engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..engine.config import EngineConfig
from ..engine.startup import Phase as EnginePhase
from ..gateway import sync as gateway
from ..gateway.clients import GatewayBusy, GatewayError
from ..gateway.sync import view_host
from ..gateway.view import SwitchProgress, View
from ..generation import live
from ..generation.model import Generation, GenerationError, SeenEngine
from ..names import LABEL_SIDECAR, TARGET, unit_name
from ..system.docker import ContainerGone, DockerAway, DockerRefused
from ..system.files import LockHeld
from ..system.long_run import COMMANDS, begin_moving, list_running
from ..system.systemd import SystemdError, Unit
from ..system.threads import Worker, call_in_parallel
from .model import Done, Moves, Phase, PhaseFailed, decide_moves
from .render import capitalize
from .steps.arrivals import Arrivals, Step
from .steps.cleanup import clean_up
from .steps.downtime import RoleWatch
from .steps.gpu_memory import free, measure, measure_engine
from .steps.hooks import run_hooks
from .steps.leaving import check_peers, leave
from .steps.loading import wait_until_healthy
from .steps.page_cache import read_ahead
from .steps.preflight import check_host
from .steps.requests import ask_suite, drain, run_canary, wait_until_idle, warm_up
from .view import HostView

STOP_MARGIN_S = 60.0
"""Seconds beyond TimeoutStopSec: systemd kills the unit then, and the supervisor may need time to remove its
container."""
STOP_AT_MOST_S = 900.0
REMOVE_S = 60.0


@dataclass
class SwitchedHost(HostView):
    """The host that this program runs on, with what a switch does to it: the phases, `hook`, and what they look at.

    Every phase returns a Done or raises PhaseFailed, and should raise nothing else. Every action is idempotent, because
    a recovery repeats it without knowing how far the killed switch came.
    """

    preflight = check_host
    check_peers = check_peers
    prepare = read_ahead
    hook = run_hooks
    drain = drain
    free = free
    ask_suite = ask_suite
    clean_up = clean_up

    warm_up_engine = warm_up
    check_engine = run_canary
    measure_engine = measure_engine

    _moving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What `begin_moving` holds, until the switch or this process ends."""
    _arrivals: Arrivals | None = None
    """The engines that the phases from `healthy` to `measure` bring up."""

    def moves(self, wanted: Generation) -> Moves:
        """Compare what runs, the live files and the target with a generation, and return what has to change."""
        containers = [container for container in self.list_containers() if container.engine]
        names = self.find_engine_units() | set(live.list_live_engines(self.paths))
        names |= {container.engine for container in containers if container.engine}
        units = self.show_units([unit_name(name) for name in names | set(wanted.engines)] + [TARGET])
        running = {container.engine: container.input_hash or "" for container in containers if container.running}
        shown = {name: units[unit_name(name)] for name in sorted(names)}
        seen = [SeenEngine(name, one.active_state, one.sub_state, running.get(name)) for name, one in shown.items()]
        try:
            files = live.live_changes(wanted, self.paths)
        except GenerationError as error:
            raise PhaseFailed(str(error)) from error
        stale = sorted(name for name, unit in units.items() if unit.need_daemon_reload)
        wrong = {
            "not enabled": units[TARGET].file_state != "enabled",
            "not active": units[TARGET].active_state != "active",
            f"needs daemon-reload ({', '.join(stale)})": bool(stale),
        }
        return decide_moves(wanted.hashes, seen, files, [words for words, is_so in wrong.items() if is_so])

    def stop(self, moves: Moves) -> Done:
        """Stop the units, waiting for TimeoutStopSec plus STOP_MARGIN_S, and remove containers that outlived them."""
        if self._arrivals is not None:  # of the way forward
            self._arrivals.leave()
            self._arrivals = None
        if not moves.stop:
            return Done("no engine has to stop")
        began = self.clock()
        names = [unit_name(engine) for engine in moves.stop]
        units = self.show_units(names)
        patience = min(
            STOP_AT_MOST_S, max(unit.stop_timeout_s or STOP_AT_MOST_S for unit in units.values()) + STOP_MARGIN_S
        )
        said, problems = None, list[str]()
        loaded = [name for name in names if units[name].loaded]
        if loaded:
            with self._ending_idle(moves.stop) as watchers:
                said = self.systemd.stop(loaded, patience)
            problems = [str(one.problem) for one in watchers if one.problem is not None]
        outlived = self._remove_containers(moves.stop)
        left = [f"{name} is {unit.active_state}" for name, unit in self.show_units(names).items() if not unit.down]
        if left:
            raise PhaseFailed(
                f"{', '.join(left)} {self.clock() - began:.0f} s after it was ordered to stop"
                + (f" ({said})" if said else "")
                + f". 'systemctl status {' '.join(names)}' shows what it waits for; a process in state D of "
                "'ps -eo pid,stat,wchan,cmd' hangs in the driver, and only a reboot ends it.",
                engines=moves.stop,
            )
        engines = f"{', '.join(moves.stop)} stopped in {self.clock() - began:.1f} s"
        warnings = tuple(
            f"Engines without requests were not ended before their shutdown timeout: {one}." for one in problems
        )
        if not outlived:
            return Done(engines, warnings=warnings)
        text = f"{', '.join(outlived)} outlived its unit and was removed"
        return Done(f"{engines}; {text}", warnings=(*warnings, f"Container {text}."))

    @contextlib.contextmanager
    def _ending_idle(self, engines: Collection[str]) -> Iterator[list[Worker]]:
        """While units stop, end containers that have no requests and only wait for their shutdown timeout."""
        over = threading.Event()

        def watch(config: EngineConfig) -> None:
            if wait_until_idle(config, over.wait, self.ask):
                with contextlib.suppress(DockerAway, DockerRefused):
                    for container in self.docker.listed():
                        if container.engine == config.engine and container.running and not over.is_set():
                            self.docker.kill(container.id)

        configs = [config for config in self.load_configs(engines) if config.shutdown_timeout_s is not None]
        try:
            yield [Worker(watch, config) for config in configs]
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
                    f"Container {', '.join(container.name for container in left)} could not be removed within "
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
            self.known_failures[engine] = self.read_last_failure(engine)
        # Earlier failures must not count against the limit of starts, nor be taken for a failure of this start.
        self._order(lambda: self.systemd.reset_failed(names), "Former failures could not be forgotten")
        self._order(lambda: self.systemd.start(names), f"{', '.join(moves.start)} could not be started")
        return Done(f"{', '.join(moves.start)} were ordered to start")

    def healthy(
        self,
        wanted: Generation,
        moves: Moves,
        *,
        all_of_them: bool,
        tell: Callable[[str], None] | None = None,
    ) -> Done:
        """Wait until the engines serve; see `wait_until_healthy`. Each that does goes on to the next phases by itself.

        `tell` is called with an engine that has passed all of them; None if all come back together.
        """
        arrivals = self._arrivals = Arrivals(wanted, patient=all_of_them, tell=tell)

        def arrived(engines: Sequence[str]) -> None:
            arrivals.forget_all_but(engines)
            self._begin(arrivals, wanted, engines)
            arrivals.look()

        return wait_until_healthy(self, wanted, moves, all_of_them=all_of_them, arrived=arrived)

    def _begin(self, arrivals: Arrivals, wanted: Generation, engines: Iterable[str]) -> None:
        """Let new engines begin with what they pass before clients reach them."""
        steps: dict[Phase, Step] = {
            Phase.WARM_UP: lambda engine: self.warm_up_engine(wanted, engine),
            Phase.CANARY: lambda engine: self.check_engine(wanted, engine),
        }
        if arrivals.returns:
            steps[Phase.MEASURE] = lambda engine: self.measure_engine(wanted, engine)
        arrivals.begin(engines, steps)

    def warm_up(self, wanted: Generation, moves: Moves) -> Done:
        """Wait until new engines have answered their first requests."""
        arrivals = self._arrivals = self._arrivals or Arrivals(wanted)
        self._begin(arrivals, wanted, (*moves.start, *moves.wait))
        return Done("; ".join(done.detail for done in arrivals.wait(Phase.WARM_UP)) or "no engine is new")

    def canary(self, wanted: Generation) -> Done:
        """Wait until every engine has passed its canary, also those that stay; rows are `data["canary"]`."""
        arrivals = self._arrivals = self._arrivals or Arrivals(wanted)
        before = arrivals.list_past(Phase.CANARY)
        arrivals.begin(wanted.engines, {Phase.CANARY: lambda engine: self.check_engine(wanted, engine)})
        found = arrivals.wait(Phase.CANARY)
        # Engines that came back long before the last one have to be alive now.
        call_in_parallel(lambda engine: self.check_engine(wanted, engine), before)
        rows = [row for done in found for row in done.data["canary"]]
        return Done("; ".join(done.detail for done in found), data={"canary": rows})

    def measure(self, wanted: Generation, *, accept: bool = False) -> Done:
        """Compare the VRAM of every GPU; see `gpu_memory.measure`. It decides, whatever was measured of one engine."""
        if self._arrivals is not None:
            with contextlib.suppress(PhaseFailed):
                self._arrivals.wait(Phase.MEASURE)
        return measure(self, wanted, accept=accept)

    def away(self, wanted: Generation, serving: Generation | None, moves: Moves, *, gap: bool = False) -> Done:
        """Let requests wait for the names of `serving` whose engines do not stay, or go to an engine that stands in.

        In a fleet the other hosts are told before; if none of them serves these names, they stay, unless `gap` is set.
        If engines move, the commands that measure them end, and containers beside the engines are removed.
        """
        left = Done()
        if serving is not None:
            try:
                left = leave(self, wanted, serving, moves, gap=gap)
            except PhaseFailed:
                if gateway.list_leaving(self.paths):
                    self._show_clients(lambda: view_host(self.paths, serving, None))
                raise
        warnings = self._end_long_runs() if moves.stop or moves.start else ()
        if serving is None:
            return Done("nothing is known to serve", warnings=warnings)
        progress = SwitchProgress(Phase.AWAY, moves.keep, wanted)
        done = self._show_clients(lambda: view_host(self.paths, serving, progress))
        detail = "; ".join(filter(None, (left.detail, done.detail)))
        return replace(done, detail=detail, warnings=(*left.warnings, *warnings, *done.warnings))

    def _end_long_runs(self) -> tuple[str, ...]:
        """Tell the commands of `system.long_run`, and remove their containers; return a warning for each."""
        try:
            running = list_running(self.paths.run)
            self._moving.enter_context(begin_moving(self.paths.run))
        except LockHeld:
            running = []  # this process does already
        except OSError as error:
            return (f"Benchmarks and other commands that measure engines were not told to end: {error}.",)
        ended = [f"`{COMMANDS[name]}`" for name in running]
        # If Docker does not answer, or one stays, `free` waits for its memory and says what is in the way.
        with contextlib.suppress(PhaseFailed, DockerAway, DockerRefused):
            for container in self.list_containers(0):
                purpose = container.labels.get(LABEL_SIDECAR)
                if purpose is not None:
                    with contextlib.suppress(ContainerGone):
                        self.docker.remove(container.id)
                    ended += [] if purpose in running else [f"container {container.name}"]
        return tuple(f"{capitalize(one)} was ended, because engines stop and start." for one in ended)

    def has_gateway(self) -> bool:
        return gateway.is_installed(self.paths)

    def return_early(
        self, wanted: Generation, serving: Generation, moves: Moves, engines: Collection[str], phase: Phase | None
    ) -> Done:
        """Let requests for the names of `serving` go to these engines of `wanted`, beside those that stay."""
        progress = SwitchProgress(phase, moves.keep, wanted, engines)
        return self._show_clients(lambda: view_host(self.paths, serving, progress))

    def back(self, generation: Generation) -> Done:
        return self._show_clients(lambda: view_host(self.paths, generation, SwitchProgress(Phase.BACK)))

    def publish(self, phase: Phase | None) -> None:
        if phase is None:
            self._moving.close()
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
        told = f"requests for {', '.join(report.away)} wait" if report.away else "every served name is reached"
        runs = report.answers or report.warnings  # one that does not answer is a warning
        return Done(f"{told}{'' if runs else '; the gateway does not run'}", warnings=report.warnings)

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
                who = f"{name} ({', '.join(engine.config.served_names)})"
            elif engine is None and unit.down:
                continue
            else:
                who = f"{name} (of another generation)"
            sentences.append(f"{who} {self._describe_service(name, unit)}")
        return ", ".join(sentences) or "no engine runs"

    def _describe_service(self, engine: str, unit: Unit) -> str:
        if unit.active_state != "active":
            return f"does not serve ({unit.active_state}, {unit.sub_state})"
        state = self.read_state(engine)
        return "is active and does not answer" if state and state.phase == EnginePhase.UNHEALTHY else "serves"

    def watch(self, wanted: Generation, former: Generation | None, clock: Callable[[], float]) -> RoleWatch:
        """Start to ask for every served name, as a client would. The gaps it finds are in the time of `clock`."""
        probe = f"unix:{self.paths.gateway_run / 'probe.sock'}" if self.has_gateway() else None
        return RoleWatch(wanted, former, clock=clock, ask=self.ask, gateway=probe)
