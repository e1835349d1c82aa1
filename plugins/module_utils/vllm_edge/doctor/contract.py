# SPDX-License-Identifier: Apache-2.0
"""What checks are written with: verdicts of a state, the evidence and what to do, and words that several share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn, TypeVar

from ..facts.dpkg import parse_upstream_version
from ..system.host import Unread

State = Literal["ok", "warn", "fail", "unknown"]
STATES: tuple[State, ...] = ("ok", "warn", "fail", "unknown")
HOST_STAGE = "'ansible-playbook playbooks/host.yml'"

T = TypeVar("T")


class NotKnown(Exception):
    """Raised by a check that cannot judge. The text says why, and the finding has the state `unknown`."""


def known(value: T | Unread) -> T:
    """Return the value. Raises NotKnown if it could not be read."""
    if isinstance(value, Unread):
        raise NotKnown(value.why)
    return value


def decline_to_judge(why: str) -> NoReturn:
    raise NotKnown(f"not judged: {why}")


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


def numbers(version: str) -> tuple[int, ...]:
    upstream = parse_upstream_version(version) if "-" in version else version
    return tuple(int(part) for part in re.findall(r"\d+", upstream))


def listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
