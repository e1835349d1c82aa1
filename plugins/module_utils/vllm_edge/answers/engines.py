# SPDX-License-Identifier: Apache-2.0
"""The engines that serve: which of them are measured or asked, and what a record says of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.config import Engine
from ..generation.model import Generation, GenerationError
from ..generation.store import load_committed
from ..paths import HostPaths
from ..redaction import redact
from ..system.long_run import CommandRefused


def choose_engines(paths: HostPaths, names: Sequence[str]) -> tuple[Generation, dict[str, Engine]]:
    """Return the committed generation, and its engines with these names, or all. Raises CommandRefused."""
    try:
        generation = load_committed(paths)
    except GenerationError as error:
        raise CommandRefused(f"The committed generation cannot be read: {error}") from error
    if generation is None:
        raise CommandRefused("No profile is active on this host, so there is no engine to ask. Run site.yml.")
    if unknown := sorted(set(names) - set(generation.engines)):
        raise CommandRefused(
            f"{', '.join(unknown)} is no engine of profile {generation.profile}, which serves now; it has "
            f"{', '.join(generation.engines)}."
        )
    return generation, {name: generation.engines[name] for name in names or generation.engines}


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return what a record keeps of an engine, without its secrets."""
    keys = ("model", "repo", "revision", "precision", "tensor_parallel_size", "input_hash")
    return {
        **{key: getattr(engine.config, key) for key in keys},
        "served_names": list(engine.config.served_names),
        "arguments": redact("\n".join(engine.arguments)).splitlines(),
    }
