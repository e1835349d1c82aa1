# SPDX-License-Identifier: Apache-2.0
"""What each engine passes before clients reach it: first requests, canary, and the VRAM of its GPUs.

Every engine has a thread of its own for that, and waits for no other one. The thread of the switch looks at them: it
alone tells the gateway and ends the switch, so that nothing of a way forward goes on beside the way back.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ...generation.model import Generation
from ...system.threads import Worker, call_in_parallel
from ..model import Done, Phase, PhaseFailed
from ..render import complain, explain_unexpected

WAIT_S = 0.1
LEAVE_S = 3.0
"""How long the way back waits for requests that the way forward has sent."""
Step = Callable[[str], Done]
"""What an engine passes in one phase. Raises PhaseFailed."""


@dataclass
class Arrival:
    """How far one engine is. `ended` has the steps that ended, and how."""

    engine: str
    steps: dict[Phase, Step]
    ended: dict[Phase, Done | PhaseFailed] = field(default_factory=dict)
    worker: Worker = field(init=False)
    told: bool = False
    left: threading.Event = field(default_factory=threading.Event)
    """Set where no further step shall begin."""

    @property
    def passed(self) -> bool:
        return all(isinstance(self.ended.get(phase), Done) for phase in self.steps)

    def is_past(self, phase: Phase) -> bool:
        return phase not in self.steps or phase in self.ended or not self.worker.is_alive()


class Arrivals:
    """The engines of a generation that a switch brings up. With `patient` (a way back) one that fails ends nothing."""

    def __init__(self, wanted: Generation, *, patient: bool = False, tell: Callable[[str], None] | None = None) -> None:
        """`tell` lets clients reach an engine that has passed everything; None if they come back together."""
        self._order = [*wanted.engines]
        self._patient = patient
        self._tell = tell
        self._found: dict[str, Arrival] = {}

    @property
    def returns(self) -> bool:
        return self._tell is not None

    def begin(self, engines: Iterable[str], steps: dict[Phase, Step]) -> None:
        """Let engines that serve begin with their steps; one that has begun goes on."""
        for name in engines:
            if name not in self._found:
                arrival = self._found[name] = Arrival(name, steps)
                arrival.worker = Worker(self._pass, arrival)

    def forget_all_but(self, engines: Collection[str]) -> None:
        """Forget how far engines were that serve no longer: one that systemd starts again has to begin anew."""
        for name in self._found.keys() - {*engines}:
            self._found.pop(name).left.set()

    def leave(self) -> None:
        """Begin no further step, and wait a little for those that run."""
        for arrival in self._found.values():
            arrival.left.set()
        for arrival in self._found.values():
            arrival.worker.join(LEAVE_S / len(self._found))

    def _pass(self, arrival: Arrival) -> None:
        """Take the first step of an engine, which allocates its memory, then the others side by side."""
        first, *others = arrival.steps
        for phases in ([first], others):
            call_in_parallel(functools.partial(self._take, arrival), phases)
            failed = any(isinstance(ended, PhaseFailed) for ended in arrival.ended.values())
            if arrival.left.is_set() or (failed and not self._patient):
                return

    def _take(self, arrival: Arrival, phase: Phase) -> None:
        try:
            arrival.ended[phase] = arrival.steps[phase](arrival.engine)
        except PhaseFailed as failure:
            arrival.ended[phase] = failure
        except Exception as error:
            complain(traceback.format_exc())
            text = f"{explain_unexpected(f'Phase {phase} of {arrival.engine}', error)}."
            arrival.ended[phase] = PhaseFailed(text, engines=[arrival.engine])

    def list_past(self, phase: Phase) -> list[str]:
        """Return the engines that have passed a phase."""
        return [name for name, arrival in self._found.items() if isinstance(arrival.ended.get(phase), Done)]

    def look(self) -> None:
        """Let clients reach the engines that have passed everything. Raises PhaseFailed: one failed, unless patient.

        Memory of a single engine is left to the measurement of all GPUs: it only keeps clients away until then.
        """
        arrivals = list(self._found.values())
        for phase in (Phase.WARM_UP, Phase.CANARY):
            if not self._patient:
                self._raise([arrival.ended[phase] for arrival in arrivals if phase in arrival.ended], phase)
        for arrival in arrivals:
            if self._tell is not None and arrival.passed and not arrival.told and Phase.MEASURE in arrival.steps:
                arrival.told = True
                self._tell(arrival.engine)

    def wait(self, phase: Phase) -> list[Done]:
        """Wait until every engine that has begun is past a phase; return its results in the order of the generation.

        Raises PhaseFailed: what failed in it; unless patient, the first failure of any phase, at once.
        """
        while waited_for := [arrival for arrival in self._found.values() if not arrival.is_past(phase)]:
            self.look()
            waited_for[0].worker.join(WAIT_S)
        self.look()
        arrivals = [self._found[name] for name in self._order if name in self._found]
        ended = [arrival.ended[phase] for arrival in arrivals if phase in arrival.ended]
        self._raise(ended, phase)
        return [one for one in ended if isinstance(one, Done)]

    def _raise(self, ended: Sequence[Done | PhaseFailed], phase: Phase) -> None:
        """Raise one PhaseFailed for all that failed in a phase, with the rows of all that ended; if one has failed."""
        failed = [one for one in ended if isinstance(one, PhaseFailed)]
        if failed:
            rows = [row for one in ended for row in one.data.get("canary", ())]
            raise PhaseFailed(
                " ".join(one.text for one in failed),
                engines=[engine for one in failed for engine in one.engines],
                data={"canary": rows} if rows else {},
                phase=phase,
            )
