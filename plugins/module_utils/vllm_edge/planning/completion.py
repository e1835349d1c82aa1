# SPDX-License-Identifier: Apache-2.0
"""What the plan adds to an engine whose inventory names little more than its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..inventory.replicas import count_replicas
from .command import list_fitting, plan_layouts, rate_smallest
from .contract import Gpu, Model
from .parsers import find_parsers
from .serve_options import Asked


def complete(
    engine: Mapping[str, Any], model: Model, gpus: Sequence[Gpu], release: str, margins_mib: Sequence[int]
) -> dict[str, Any]:
    """Return what an engine does not state: the least tensor parallelism with which MIN_CONTEXT_TOKENS fit, or the
    longest context if they never do; the longest context that fits, the first slots, and the parsers of the model.

    Where nothing fits it is the engine over most GPUs, of which the plan says why. Raises ValueError if the GPUs are
    too few for the sizes that it states.

    Args:
        engine: as in serving_engines, with the defaults of its model.
        gpus: those of the host.
        margins_mib: what has to stay free on each GPU; the next one if nothing fits.
    """
    replicas, stages = count_replicas(engine), engine.get("pipeline_parallel_size", 1)
    slots = engine.get("gpus")
    size = engine.get("tensor_parallel_size", len(slots) // (replicas * stages) if slots else None)
    arguments = {key: value for key, value in engine.items() if key not in ("name", "model", "gpus", "replicas")}
    asked = Asked("", "", arguments, False, "max_model_len" not in engine, size, stages, replicas, None)
    for margin_mib in margins_mib:
        layouts = plan_layouts(model, gpus, asked, release, margin_mib=margin_mib)
        if fitting := list_fitting(layouts):
            break
    _, largest, _ = [*layouts.values()][-1]
    rate = rate_smallest(model)
    chosen = max(fitting, key=lambda found: rate(*found))[1] if fitting else largest
    added = {
        "tensor_parallel_size": chosen["tensor_parallel_size"],
        "gpus": list(range(len(chosen["gpus"]) * replicas)),
        **({"max_model_len": chosen["max_model_len"]} if asked.longest else {}),
        **find_parsers(model.architecture, model.facts.repo),
    }
    return {key: value for key, value in added.items() if key not in engine}


def describe(name: str, added: Mapping[str, Any]) -> str:
    """Return what was added to an engine as one sentence."""
    planned = ", ".join(f"{key} {value}" for key, value in added.items() if not key.endswith("_parser"))
    parsers = ", ".join(f"{key} {value}" for key, value in added.items() if key.endswith("_parser"))
    return f"{name}: {planned}: the plan's{f'; {parsers}: of the family of its model' if parsers else ''}."
