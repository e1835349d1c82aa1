# SPDX-License-Identifier: Apache-2.0
"""Sentences of a switch, on standard output and in its journal."""

from __future__ import annotations

import contextlib
import sys

from ..generation.model import Generation
from .model import Journal


def say(text: str) -> None:
    """A line of progress; a reader that is gone must not end a switch."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def to_sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def name_generation(generation: Generation | None) -> str:
    return "nothing" if generation is None else f"generation {generation.number} ({generation.profile})"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_route(journal: Journal) -> str:
    """`Switching from generation 3 (nvfp4-tp2) to generation 4 (bf16-tp4)`."""
    to = f"generation {journal.generation}" + (f" ({journal.profile})" if journal.profile else "")
    if journal.from_generation is None:
        return f"The first switch of this host, to {to},"
    if journal.from_generation == journal.generation:
        return f"Repairing {to}"
    return f"Switching from generation {journal.from_generation} ({journal.from_profile}) to {to}"
