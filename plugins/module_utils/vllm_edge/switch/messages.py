# SPDX-License-Identifier: Apache-2.0
"""Functions that print the progress of a switch and build its sentences."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from ..generation.model import Generation
from .model import Journal


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line of progress. Errors are ignored: a closed pipe must not end a switch."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def complain(text: str) -> None:
    say(text, sys.stderr)


def to_sentence(text: str) -> str:
    """Strip the text and end it with a full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def name_generation(generation: Generation | None) -> str:
    return "nothing" if generation is None else f"generation {generation.number} ({generation.profile})"


def describe_over_budget(generation: Generation, journal: Journal, words: str) -> str:
    """Return that a generation `is` (or `is still`) over its budget, and the paragraph of each GPU."""
    return f"{capitalize(name_generation(generation))} {words} over its budget. {' '.join(journal.over_budget)}"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_route(journal: Journal) -> str:
    """Return the subject of a switch's message: `Switching from generation 3 (nvfp4-tp2) to generation 4
    (bf16-tp4)`."""
    to = f"generation {journal.generation}" + (f" ({journal.profile})" if journal.profile else "")
    if journal.from_generation is None:
        return f"The first switch of this host, to {to},"
    if journal.from_generation == journal.generation:
        return f"Repairing {to}"
    return f"Switching from generation {journal.from_generation} ({journal.from_profile}) to {to}"
