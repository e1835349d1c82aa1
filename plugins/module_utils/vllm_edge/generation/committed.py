# SPDX-License-Identifier: Apache-2.0
"""The committed generation: reading and writing active-profile.json."""

from __future__ import annotations

import json

from ..paths import HostPaths
from ..system.records import read_record
from .live import write_file
from .model import Choice, Committed, Generation, GenerationError


def committed(paths: HostPaths) -> Committed | None:
    """Return what the host is committed to; None if nothing was committed yet. Raises GenerationError."""
    path = paths.active_profile
    try:
        return read_record(Committed, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GenerationError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise GenerationError(
            f"{path} does not say which generation is committed: {error}. Engines that run were not touched. "
            f"`vllm-edge history` shows which one it was. If you move it away, site.yml commits what the inventory "
            "names."
        ) from error


def commit(
    generation: Generation, paths: HostPaths, choice: Choice, chosen_at: str, *, over_budget: bool = False
) -> None:
    """Make a generation the committed one, by one rename; the former one is recorded as the previous generation.

    Committing the committed generation again keeps the recorded previous one. `chosen_at` is the time of the choice;
    `over_budget` says that its engines use more than their budgets. Raises GenerationError: the record cannot be
    written, or the generation is a calibration.
    """
    if generation.purpose == "calibration":
        raise GenerationError(f"generation {generation.number} is a calibration, which is measured and not committed")
    try:
        before = committed(paths)
    except GenerationError:
        before = None  # a damaged record must not prevent a commit
    if before is None or before.generation == generation.number:
        previous = before.previous_generation if before else None
    else:
        previous = before.generation
    known: tuple[int | None, ...] = before.verified if before else ()
    if before and not known:
        known = (before.previous_generation, None if before.over_budget else before.generation)
    former = [number for number in known if number is not None and number != generation.number]
    value = {
        "profile": generation.profile,
        "generation": generation.number,
        "digest": generation.digest,
        "engines": generation.marks,
        "origin": choice.origin,
        "inventory_profile": choice.inventory_profile,
        "chosen_at": chosen_at,
        "previous_generation": previous,
        "over_budget": over_budget,
        "verified": [number for number in former if paths.generation_dir(number).is_dir()]
        + ([] if over_budget else [generation.number]),
    }
    write_file(paths.active_profile, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
