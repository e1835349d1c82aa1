# SPDX-License-Identifier: Apache-2.0
"""How a refused value is shown and what is offered instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from typing import Any

LONGEST = 60
FEW = 12


def shown(value: Any) -> str:
    """A value on one line, as far as it helps to find it."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Sentence that offers the names most like `name`, or all of them where they are few."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5 if len(names) <= FEW else 0.7)
    if close:
        likeness = {other: difflib.SequenceMatcher(None, other, name).ratio() for other in close}
        return f"did you mean {' or '.join(other for other in close if likeness[other] > likeness[close[0]] - 0.1)}?"
    if not names:
        return "there is none."
    return (
        f"there are: {', '.join(names)}." if len(names) <= FEW else f"none of the {len(names)} known ones is like it."
    )


def not_among(value: Any, choices: Collection[str]) -> str:
    """What is wrong with a value that is none of a few."""
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    remedy = nearest(str(value), choices) if close else "write one of those."
    return f"{shown(value)} is not one of {', '.join(choices)}; {remedy}"
