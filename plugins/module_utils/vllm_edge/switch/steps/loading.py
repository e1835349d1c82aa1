# SPDX-License-Identifier: Apache-2.0
"""Phase `healthy`: waits until every engine that was started serves, or says why one does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...engine.startup import Phase as EnginePhase
from ...engine.state import Failure
from ...generation.model import Generation, Limits
from ...names import unit_name
from ...planning.load_time import longest_load_s, warn_of_load
from ...system.systemd import Unit
from ..model import Done, Moves, PhaseFailed
from ..render import capitalize
from ..view import HostView

POLL_S = 0.25
RESTARTS_ON_THE_WAY_BACK = 2
"""A rollback has no other generation to fall back to, so an engine that failed and may recover gets this many more
tries."""

QUEUED = ("inactive", "failed", "deactivating")
"""States of a unit whose start job waits for another unit."""


@dataclass
class Loading:
    """An engine that is waited for, and what systemd has shown of it so far."""

    name: str
    last_failure: Failure | None
    """The failure that was recorded before the start: any other one is new. Records are compared as a whole, because
    wall clocks may jump."""
    invocation: str = ""
    restarts: int = 0
    seen: bool = False
    serves: bool = False
    problem: str = ""
    seconds: float = 0.0
    """When it began to serve, since the wait began; 0 if it never did."""

    def update(self, unit: Unit, now: float, *, patient: bool) -> None:
        """Judge the engine by what systemd shows of its unit.

        `now` is seconds since the wait began. With `patient` (a rollback) an engine that ended may be restarted by
        systemd.
        """
        self.problem = ""
        if unit.job and unit.active_state in QUEUED:
            self.serves = False
            return
        ended = unit.down or unit.auto_restart
        if not self.seen and not ended:
            self.seen, self.invocation, self.restarts = True, unit.invocation, unit.restarts
        again = self.seen and (unit.invocation, unit.restarts) != (self.invocation, self.restarts)
        was_up, self.serves = self.serves, unit.active_state == "active" and (patient or not again)
        if self.serves and not was_up:
            self.seconds = now
        if (ended or again) and not self.serves and not self._may_recover(unit, patient):
            self.problem = f"{unit.active_state}, {unit.result}"

    def _may_recover(self, unit: Unit, patient: bool) -> bool:
        tries = unit.restarts - self.restarts + (1 if unit.auto_restart else 0)
        return patient and not unit.down and tries <= RESTARTS_ON_THE_WAY_BACK

    @property
    def waits(self) -> bool:
        return not self.serves and not self.problem


def wait_until_healthy(
    host: HostView,
    wanted: Generation,
    moves: Moves,
    *,
    all_of_them: bool,
    arrived: Callable[[Sequence[str]], None],
) -> Done:
    """Poll the units until all serve, the first one fails, or `limits.healthy_timeout_s` has passed.

    At each poll, `arrived` is called with the engines that serve; what it raises ends the wait.
    Where nobody has changed that limit, it is raised to what the load of one of the engines may take. With
    `all_of_them` (a rollback) this waits for every engine, and then fails with those that do not serve.
    """
    names = [*moves.start, *moves.wait]
    if not names:
        return Done("no engine has to load")
    engines = [Loading(name, host.known_failures.get(name, host.read_last_failure(name))) for name in names]
    configs = [engine.config for name, engine in wanted.engines.items() if name in names]
    limit_s = wanted.limits.healthy_timeout_s
    if limit_s == Limits.healthy_timeout_s:
        limit_s = max(limit_s, longest_load_s(host.paths, configs))
    began = host.clock()
    while True:
        units = host.show_units(map(unit_name, names))
        now = host.clock() - began
        for engine in engines:
            engine.update(units[unit_name(engine.name)], now, patient=all_of_them)
        failed = [engine for engine in engines if engine.problem]
        loading = [engine for engine in engines if engine.waits]
        if failed and not all_of_them:
            raise _build_failure(host, failed, units, now, wanted)
        arrived([engine.name for engine in engines if engine.serves])
        if now >= limit_s or not loading:
            break
        host.sleep(POLL_S)
    if failed or loading:
        raise _build_failure(host, [*failed, *loading], units, now, wanted)
    slow = [warn_of_load(host.paths, config, host.read_state(config.engine)) for config in configs]
    slowest = max(engines, key=lambda engine: engine.seconds).name
    serve = f"serve after {now:.1f} s, {slowest} last" if len(engines) > 1 else f"serves after {now:.1f} s"
    return Done(f"{', '.join(names)} {serve}", warnings=tuple(text for text in slow if text))


def _build_failure(
    host: HostView, engines: Sequence[Loading], units: Mapping[str, Unit], now: float, wanted: Generation
) -> PhaseFailed:
    texts = []
    for engine in engines:
        unit = units[unit_name(engine.name)]
        if engine.problem:
            when = "ended again after it had loaded" if engine.seconds else "ended while it was loading"
            texts.append(f"Engine {engine.name} {when}. {_explain_end(host, engine, unit).rstrip('.')}.")
        else:
            texts.append(
                f"Engine {engine.name} does not serve after {now:.0f} s ({unit.status_text or unit.sub_state}). "
                f"'journalctl -u vllm-{engine.name}' shows how far it came; vllm_engine_healthy_timeout_s is "
                f"{wanted.limits.healthy_timeout_s:g}."
            )
    return PhaseFailed(" ".join(texts), engines=[engine.name for engine in engines])


def _explain_end(host: HostView, engine: Loading, unit: Unit) -> str:
    state = host.read_state(engine.name)
    # The phase is `failed` only for the run that ended last. Otherwise a failure is new if it differs from the one
    # known before the start, whatever the clock says.
    if (
        state
        and state.last_failure
        and (state.phase == EnginePhase.FAILED or state.last_failure != engine.last_failure)
    ):
        return f"{capitalize(state.last_failure.reason)}. {state.last_failure.remedy}"
    return f"{unit.status_text or f'systemd says {engine.problem}'}. 'vllm-edge explain {engine.name}'"
