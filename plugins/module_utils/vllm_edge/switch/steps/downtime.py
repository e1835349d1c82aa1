# SPDX-License-Identifier: Apache-2.0
"""Measurement of the downtime that clients see during a switch.

Every role (served name) is asked for twice a second. A role is up if GET /v1/models lists its name at the address of
the former or of the wanted engine, and that engine still takes requests. A gap lasts from the last good answer before
it to the first good answer after it, both at the time they arrived. Nothing is interpolated: a gap is at least as long
as the time without service and at most about a second longer. A role that was never up since the watch began is down
from its beginning.

Where the host has a gateway, a role is up if the gateway says so, which is what clients meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from ...answers.canary_command import parse_models
from ...answers.checks import Ask
from ...generation.model import Generation
from ...system.http import takes_work
from ...system.threads import Worker
from ..model import Downtime, Gap, PhaseRecord

EVERY_S = 0.5
TIMEOUT_S = 5.0
"""A busy engine answers late and counts as up. A hanging engine is noticed after this time, and its gap begins at its
last good answer."""
JOIN_S = TIMEOUT_S + 1.0


@dataclass
class Role:
    good_s: float = 0.0
    """The time of the last good answer on the monotonic clock; at first the beginning of the watch."""
    asked: int = 0
    down: bool = False
    gaps: list[Gap] = field(default_factory=list)

    def answered(self, at_s: float, good: bool) -> None:
        """Record one answer that arrived at `at_s`."""
        self.asked += 1
        if not good:
            self.down = True
            return
        if self.down:
            self.gaps.append(Gap(round(self.good_s, 3), round(at_s, 3)))
            self.down = False
        self.good_s = at_s

    def result(self, end_s: float, phases: Sequence[PhaseRecord]) -> Downtime:
        """Return the downtime of the role. `phases` and `end_s` are in the time of the answers."""
        gaps = [*self.gaps, *([Gap(round(self.good_s, 3), None)] if self.down else [])]
        seconds = sum((end_s if gap.to_s is None else gap.to_s) - gap.from_s for gap in gaps)
        return Downtime(round(seconds, 3), tuple(gaps), split_by_phase(gaps, phases, end_s), self.asked)


def split_by_phase(gaps: Iterable[Gap], phases: Sequence[PhaseRecord], end_s: float) -> dict[str, float]:
    """Return the seconds of the gaps by phase; phases of a rollback are named `back:<phase>`."""
    found: dict[str, float] = {}
    for gap in gaps:
        until = end_s if gap.to_s is None else gap.to_s
        for phase in phases:
            ended = end_s if phase.seconds is None else phase.began_s + phase.seconds
            shared = min(until, ended) - max(gap.from_s, phase.began_s)
            if shared > 0:
                name = phase.phase.value if phase.direction == "forward" else f"back:{phase.phase.value}"
                found[name] = found.get(name, 0.0) + shared
    return {name: round(seconds, 3) for name, seconds in found.items()}


def addresses(wanted: Generation, former: Generation | None) -> dict[str, tuple[str, ...]]:
    """Return the URLs at which each role may be served, those of the former engines first."""
    found: dict[str, dict[str, None]] = {}
    for generation in (former, wanted):
        if generation is None:
            continue
        for role, engines in generation.roles.items():
            urls = (generation.engines[engine].config.url.rstrip("/") for engine in engines)
            found.setdefault(role, {}).update(dict.fromkeys(urls))
    return {role: tuple(urls) for role, urls in found.items()}


class RoleWatch:
    """Asks for all roles in threads, one for each set of addresses, so that a hanging engine delays no other role."""

    def __init__(
        self,
        wanted: Generation,
        former: Generation | None,
        *,
        clock: Callable[[], float],
        ask: Ask,
        gateway: str | None = None,
    ) -> None:
        """Begin to ask. `gateway` is the URL at which the gateway answers GET /ready/<role>, if there is one."""
        self._wanted = frozenset(wanted.roles)
        self._former = frozenset(former.roles) if former else self._wanted
        self._clock = clock
        self._ask = ask
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._gateway = gateway
        where = addresses(wanted, former)
        if gateway is not None:
            where = dict.fromkeys(where, (gateway,))
        self._roles = {role: Role(good_s=clock()) for role in where}
        groups: dict[tuple[str, ...], list[str]] = {}
        for role, urls in where.items():
            groups.setdefault(urls, []).append(role)
        self._threads = [Worker(self._watch, urls, roles) for urls, roles in groups.items()]

    def _find_up(self, url: str, roles: Sequence[str]) -> frozenset[str]:
        """Return the roles that are up at an address; `roles` are those that are looked for."""
        if self._gateway is not None:
            return frozenset(role for role in roles if self._ask(url, f"/ready/{quote(role, safe='/:')}", TIMEOUT_S).ok)
        answer = self._ask(url, "/v1/models", TIMEOUT_S)
        try:
            names = frozenset(parse_models(answer)) if answer.ok else frozenset()
        except ValueError:
            return frozenset()
        return names if names and takes_work(url, min(names), TIMEOUT_S, self._ask) else frozenset()

    def _watch(self, urls: Sequence[str], roles: Sequence[str]) -> None:
        """Ask the addresses of some roles until the watch ends; this is the body of a thread."""
        order = list(urls)
        while not self._stop.is_set():
            began = self._clock()
            up: set[str] = set()
            for url in list(order):
                listed = self._find_up(url, roles)
                up |= listed
                if up.issuperset(roles):
                    # Ask the address that answered first from now on, so that a hanging one costs no time.
                    order.sort(key=lambda other, first=url: other != first)  # type: ignore[misc]
                    break
            at_s = self._clock()
            if self._stop.is_set():
                return
            with self._lock:
                for role in roles:
                    self._roles[role].answered(at_s, role in up)
            self._stop.wait(max(0.0, EVERY_S - (self._clock() - began)))

    def end(self, phases: Iterable[PhaseRecord]) -> dict[str, Downtime]:
        """Stop the threads and return the downtime of the roles that are served now, after a rollback those of before.

        The times in `phases` and in the result are those of `clock`. Raises what has ended a thread early.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)
            thread.check()
        records = list(phases)
        end_s = self._clock()
        back = any(record.direction == "back" for record in records)
        with self._lock:
            return {
                role: self._roles[role].result(end_s, records)
                for role in sorted(self._former if back else self._wanted)
                if role in self._roles
            }
