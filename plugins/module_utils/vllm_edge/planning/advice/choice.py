# SPDX-License-Identifier: Apache-2.0
"""Engines in the form of serving_engines, for the search and for the chosen profile, and observations that apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...inventory.replicas import add_defaults, list_replicas
from .. import planner
from ..contract import Gpu
from ..memory import overhead
from .model import PROFILE_NAME, Chosen, Fit, Host, Profile, Shape, Wish

FIRST_PORT, PORT_STEP = 8050, 10
SAME_WEIGHTS = ("model", "tensor_parallel_size", "pipeline_parallel_size")
SAME_BATCH = ("max_num_seqs", "max_num_batched_tokens")
DIALECT = ("chat_template", "tool_call_parser", "reasoning_parser")
"""What clients notice of an engine and does not follow from its checkpoint."""


def build_arguments(
    model: str, shape: Shape, kv_cache_dtype: str, max_model_len: int, max_num_seqs: int, host: Host
) -> dict[str, Any]:
    """Return an engine as in serving_engines, without what depends on the host's GPUs. A kv_cache_dtype `auto` is left
    out unless the model's engines have another default."""
    unsaid = kv_cache_dtype == "auto" and "kv_cache_dtype" not in add_defaults({"model": model}, host.inventory)
    stages = {"pipeline_parallel_size": shape.pipeline_parallel_size} if shape.pipeline_parallel_size > 1 else {}
    return {
        "model": model,
        "tensor_parallel_size": shape.tensor_parallel_size,
        **stages,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        **({} if unsaid else {"kv_cache_dtype": kv_cache_dtype}),
    }


def match_observed(engine: Mapping[str, Any], host: Host) -> tuple[str, dict[str, int]]:
    """Return the name of an engine of the inventory that is like this one, and its observations that apply; an empty
    name and none if there is none. Raises ObservationError if an observation cannot be used.

    Weights and the CUDA context are the same if model and parallelism are; activations and graphs only if the batch is
    the same too.
    """
    for name, known in host.engines.items():
        figures = overhead.observed(host.observations, name)
        if not figures or any(known.get(key, 1) != engine.get(key, 1) for key in SAME_WEIGHTS):
            continue
        if any(known.get(key) != engine.get(key) for key in SAME_BATCH) or known.get("enforce_eager"):
            figures = {key: value for key, value in figures.items() if key in ("weights_bytes", "context_bytes")}
        if figures:
            return name, figures
    return "", {}


def describe_choice(asked: Wish, host: Host, profile: Profile) -> Chosen:
    """Return the chosen profile as it is written into group_vars, planned on the whole host.

    Its engines are named after their models, of which each has one engine. Chat template and parsers that the model
    has no defaults for are those of the inventory's first engine with a model of the same family.
    """
    engines: dict[str, dict[str, Any]] = {}
    replicas: dict[str, dict[str, dict[str, Any]]] = {}
    observations: dict[str, Any] = {}
    slots = assign_slots(profile, host.gpus)
    for number, engine in enumerate(profile.engines):
        fit, name = engine.fit, f"{PROFILE_NAME}-{engine.fit.model}"
        engines[name] = {
            **build_arguments(fit.model, fit.shape, fit.kv_cache_dtype, engine.max_model_len, fit.max_num_seqs, host),
            **({"replicas": engine.replicas} if engine.replicas > 1 else {}),
            "gpus": list(slots[number]),
            **({} if engine.replicas > 1 else {"port": FIRST_PORT + number * PORT_STEP}),
            "served_names": list(engine.roles),
            **_copy_dialect(fit.model, host),
        }
        whole = add_defaults(engines[name], host.inventory)
        replicas[name] = list_replicas(name, whole)
        observations |= dict.fromkeys(replicas[name], match_observed(whole, host)[1])
    plan = planner.plan(
        PROFILE_NAME,
        [{"name": one, **engine} for parts in replicas.values() for one, engine in parts.items()],
        host.models,
        host.gpus,
        host.vllm_version,
        observations=observations,
        margin_mib=host.margin_mib,
        tolerance_mib=host.tolerance_mib,
    )
    described = {
        "engines": list(engines),
        "when": f"Advised by {asked.by.value}, number {asked.choose}, {profile.label}.",
        "source": f"predicted by playbooks/advise.yml for vLLM {host.vllm_version}, not yet run on GPUs",
    }
    planned = {one.engine: one for one in plan.engines}
    advice = {
        name: (*planned[next(iter(replicas[name]))].advice, *list_own_advice(engine.fit))
        for name, engine in zip(engines, profile.engines, strict=True)
    }
    return Chosen(engines, {PROFILE_NAME: described}, plan, advice)


def assign_slots(profile: Profile, gpus: Sequence[Gpu]) -> list[tuple[int, ...]]:
    """Return the slots of each engine: the lowest free ones of its kind of GPU."""
    left = {gpu: [slot for slot, other in enumerate(gpus) if other == gpu] for gpu in gpus}
    taken = []
    for engine in profile.engines:
        slots, count = left[engine.fit.gpu], engine.gpus
        taken.append(tuple(slots[:count]))
        left[engine.fit.gpu] = slots[count:]
    return taken


def _copy_dialect(model: str, host: Host) -> dict[str, Any]:
    family = host.models[model].family
    known = [engine for engine in host.engines.values() if engine.get("model") in host.models]
    alike = (engine for engine in known if host.models[engine["model"]].family == family)
    inherited = add_defaults({"model": model}, host.inventory)
    return {key: value for key, value in next(alike, {}).items() if key in DIALECT and key not in inherited}


def list_own_advice(fit: Fit) -> Iterator[str]:
    """Yield advice that follows from the choice and that the planner cannot know."""
    if not fit.calibrated and fit.plan.kv_cache_dtype.startswith("fp8"):
        yield (
            "the checkpoint has no scales for an FP8 KV cache, and vLLM takes 1.0 (model_executor/layers/quantization/"
            "kv_cache.py): compare answers before you rely on it"
        )
    if fit.observed_as:
        yield f"planned with plan_observations.{fit.observed_as}; repeat them under the name of the new engine"
