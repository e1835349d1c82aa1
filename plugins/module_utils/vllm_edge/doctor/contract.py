# SPDX-License-Identifier: Apache-2.0
"""The result types of checks: a state, the evidence, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from ..system.host import Unread

State = Literal["ok", "warn", "fail", "unknown"]
STATES: tuple[State, ...] = ("ok", "warn", "fail", "unknown")

T = TypeVar("T")


class NotKnown(Exception):
    """Raised by a check that cannot judge. The text says why, and the finding has the state `unknown`."""


def known(value: T | Unread) -> T:
    """Return the value. Raises NotKnown if it could not be read."""
    if isinstance(value, Unread):
        raise NotKnown(value.why)
    return value


@dataclass(frozen=True)
class Verdict:
    """The result of one check. If the state is `ok`, the remedy is advice."""

    state: State
    evidence: str
    remedy: str = ""


# Called with the evidence and the remedy, which may be empty for `good` and where the evidence names it.
good = partial(Verdict, "ok")
warn = partial(Verdict, "warn")
fail = partial(Verdict, "fail")
