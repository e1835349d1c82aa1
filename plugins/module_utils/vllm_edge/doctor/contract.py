# SPDX-License-Identifier: Apache-2.0
"""What a check says: its stable name, a state, the evidence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

State = Literal["ok", "warn", "fail", "unknown"]
STATES: tuple[State, ...] = ("ok", "warn", "fail", "unknown")
GROUPS = ("system", "driver", "gpus", "runtime", "topology", "storage", "serving")

from ..system.host import Unread

T = TypeVar("T")


class NotKnown(Exception):
    """A check cannot judge; the text says why."""


def known(value: T | Unread) -> T:
    """The value; NotKnown where it could not be read."""
    if isinstance(value, Unread):
        raise NotKnown(value.why)
    return value


@dataclass(frozen=True)
class Verdict:
    """What one check found. A remedy beside `ok` is advice."""

    state: State
    evidence: str
    remedy: str = ""


def good(evidence: str, advice: str = "") -> Verdict:
    return Verdict("ok", evidence, advice)


def warn(evidence: str, remedy: str) -> Verdict:
    return Verdict("warn", evidence, remedy)


def fail(evidence: str, remedy: str) -> Verdict:
    return Verdict("fail", evidence, remedy)


@dataclass(frozen=True)
class Finding:
    """A verdict under the name of its check."""

    check: str
    state: State
    evidence: str
    remedy: str = ""

    @property
    def group(self) -> str:
        return self.check.split(".", 1)[0]

    def as_dict(self) -> dict[str, str]:
        return {
            "check": self.check,
            "group": self.group,
            "state": self.state,
            "evidence": self.evidence,
            "remedy": self.remedy,
        }


def exit_status(findings: Iterable[Finding]) -> int:
    """0 nothing is wrong, 1 warnings, 2 failures. What could not be read is no fault of the host."""
    states = {finding.state for finding in findings}
    return 2 if "fail" in states else 1 if "warn" in states else 0
