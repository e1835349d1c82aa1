# SPDX-License-Identifier: Apache-2.0
"""The planner's entry point: whether the engines of a profile will start on their GPUs, and what each takes there."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..engine.reasons import explain_plan
from ..inventory.engine_arguments import derive_key, find_option, parse_arguments
from ..text import shown
from . import decode, feasibility
from .checkpoint.inferred import is_approximate
from .contract import Arguments, EnginePlan, Fix, Gpu, KvCapacity, Model, Plan, Verdict
from .feasibility import THRESHOLD_PERCENT, Engine, check_threshold, find_weakest, warn_of_plan
from .fixes import Search, find_fixes
from .load_time import plan_load
from .memory import overhead
from .memory.kv_cache import choose_block_size, count_requests, keeps_ds_mla, resolve_dtype
from .memory.overhead import MIB
from .memory.vllm_versions import (
    LARGE_GPU_GIB,
    SWITCHES,
    Behaviour,
    behaviour,
    list_first_runner_options,
    resolve_model_dtype,
    set_gpu_defaults,
    uses_second_runner,
)
from .memory.weights import bound_expert_padding
from .outcome import (
    Outcome,
    compute_encoder_bytes,
    compute_outcome,
    compute_requested_bytes,
    derive_kv_cache_bytes,
    mib,
    to_sentence,
)
from .speculation import add_drafter, advise
from .speculation import read as read_speculation
from .unmodeled_arguments import (
    TASK,
    find_unmodeled,
    judge,
    judge_generic,
    read_graph_options,
    read_processor_options,
)

MARGIN_MIB = 512
AT_ONCE_TOKENS = (8192, 32768)
"""Lengths of requests of which a plan says how many fit at once."""
TOLERANCE_MIB = 300


class PlanError(ValueError):
    """A profile that cannot be planned at all. The message names the engine, the variable and what would be right."""


def plan(
    profile_name: str,
    engines: Sequence[Mapping[str, Any]],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    vllm_version: str,
    *,
    observations: Mapping[str, Any] | None = None,
    margin_mib: int = MARGIN_MIB,
    tolerance_mib: int = TOLERANCE_MIB,
    memory_threshold_percent: int = THRESHOLD_PERCENT,
    search: Search = Search.EVERYWHERE,
) -> Plan:
    """Plan a profile: what will happen when its engines start on these GPUs.

    Engines start in their order, so each finds the memory taken that those before it on the same GPU took. An engine
    that has neither gpu_memory_utilization nor kv_cache_memory_bytes is given the KV cache that leaves margin_mib free.

    Args:
        engines: as in serving_engines, each with its `name`.
        models: interpreted checkpoints, by key of vllm_models.
        gpus: the n-th is slot n.
        observations: plan_observations, which replace predictions.
        tolerance_mib: plan_tolerance_mib, which is added to each budget.
        search: where changes are looked for with which an engine that does not fit would.

    Raises PlanError, vllm_versions.UnknownVersion and overhead.ObservationError.
    """
    free = [gpu.cuda_total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in gpus]
    budgets = dict.fromkeys(range(len(gpus)), 0)
    about: dict[str, Any] = {"models": models, "observations": observations or {}, "release": behaviour(vllm_version)}
    about["margin_bytes"] = margin_mib * MIB
    plans = []
    for described in engines:
        others = (slot for other in engines if other is not described for slot in other.get("gpus") or ())
        parse: Callable[..., Engine] = functools.partial(
            _parse_engine, others=frozenset(others), gpus=gpus, free=free, **about
        )
        engine = parse(described)
        outcome = compute_outcome(engine)
        most = compute_outcome(engine, "most") if engine.model.generic else outcome
        # What would settle a compute capability that is not known is to state it.
        if most.verdict not in (Verdict.FITS, Verdict.CANNOT_SAY):
            fixes = find_fixes(described, engine, most, parse, search)
            outcome = replace(outcome, fix=fixes[0].change if fixes else outcome.fix, fixes=fixes)
        unmodeled = [*find_unmodeled(engine.model, engine.arguments, engine.extra_args, engine.environment)]
        outcome = judge_generic(judge(outcome, unmodeled, engine), engine)
        found = _describe_engine(engine, outcome)
        if any(item.what == TASK.what for item in unmodeled):
            found = replace(found, decode_tok_s=None, decode_together_tok_s=None)
        budget = described.get("vram_budget_mib") or _compute_budget_mib(outcome, gpus, tolerance_mib)
        settings = {**found.settings, **({} if described.get("vram_budget_mib") else {"vram_budget_mib": budget})}
        defaults = _list_defaults(engine, models[str(described["model"])].dtype)
        reasons = explain_plan(described, settings, defaults, found.observed, f"{margin_mib} MiB")
        plans.append(replace(found, settings=settings, reasons=reasons))
        for slot in engine.slots:
            budgets[slot] += budget
        for taken in outcome.gpus:
            free[taken.slot] -= taken.total_bytes
    experts = [str(engine.get("name", "")) for engine in engines if models[str(engine["model"])].experts]
    warnings = warn_of_plan(plans, gpus, experts, check_threshold(memory_threshold_percent))
    return Plan(profile_name, vllm_version, tuple(plans), budgets, tuple(warnings))


def arguments_of(engine: Mapping[str, Any]) -> Arguments:
    """Return the keys and extra_args of an engine that affect memory, the latter as vLLM's own parser reads them.

    Raises PlanError if one has another value than vLLM takes, or one that only vLLM can resolve.
    """
    kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(Arguments) if _is_option(field.name)}
    where = f"serving_engines.{engine['name']}." if engine.get("name") else ""
    chosen: dict[str, Any] = {
        name: _read_value(f"{where}{name}: {shown(value)}", name, kinds[name], value)
        for name, value in engine.items()
        if name in kinds and value is not None
    }
    stated = engine.get("limit_mm_per_prompt")
    limits = dict(stated) if isinstance(stated, Mapping) else {}
    keep = set()
    said = parse_arguments([str(word) for word in engine.get("extra_args") or ()])[0]
    for argument in said:
        place = f"{where}extra_args: {shown(argument.text)}" if where else shown(argument.text)
        value = argument.values[0] if argument.values else ""
        if argument.option and argument.option.name == "--limit-mm-per-prompt":
            limits |= _read_limits(place, argument.dotted, value)
        if argument.option and argument.option.name == "--mm-processor-kwargs":
            pixels = read_processor_options(argument).get("max_pixels")
            chosen["max_pixels"] = pixels if type(pixels) is int and pixels > 0 else None
        if (graphs := read_graph_options(argument)) is not None:
            chosen |= graphs
        key = derive_key(argument.option) if argument.option and not argument.dotted else ""
        if key in kinds:
            is_switch = kinds[key] == "bool"
            chosen[key] = (
                not argument.name.startswith("--no-") if is_switch else _read_value(place, key, kinds[key], value)
            )
        if argument.name == "--disable-prefix-caching":  # since 0.33.0
            chosen["enable_prefix_caching"] = False
        if key in list_first_runner_options() and not argument.name.startswith("--no-"):
            keep.add(key)
    for key, variable in SWITCHES.items():
        if (switch := str((engine.get("extra_env") or {}).get(variable, "")).strip()) in ("0", "1"):
            chosen[key] = switch == "1"
    chosen["without"] = _list_without(limits)
    chosen["sizes_items"] = any(isinstance(limit, Mapping) and limit.keys() - {"count"} for limit in limits.values())
    if takes_text_only(limits):
        chosen["language_model_only"] = True
    chosen["speculation"] = read_speculation(said)
    return Arguments(**chosen, first_runner_options=frozenset(keep))


WITHOUT_VIDEO = frozenset({"gemma3", "llama4", "llava_next", "mistral3"})
"""Families of images only (get_supported_mm_limits of their classes, the same from 0.19.0 to 0.33.0)."""
_SUFFIXES = {
    suffix: base**power
    for base, suffixes in ((1000, "kmgt"), (1024, "KMGT"))
    for power, suffix in enumerate(suffixes, 1)
}
_SCALED = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
"""What vLLM's parser multiplies a number by, and where (0.32.0 utils/argparse_utils.py:29, engine/arg_utils.py:391)."""


@functools.cache
def _is_option(name: str) -> bool:
    """Return whether a field of Arguments is an option of vLLM that may stand in an engine, with one value."""
    return name != "cudagraph_capture_sizes" and find_option("--" + name.replace("_", "-")) is not None


def _read_value(place: str, key: str, kind: str, value: Any) -> bool | int | float | str:
    """Return the value of one argument. Raises PlanError.

    Args:
        place: where it stands, and what it is.
        kind: the name of its type.
    """
    text = str(value).strip()
    if kind == "bool":
        return text.lower() in ("true", "yes", "1")
    if kind == "str":
        return text
    if kind == "float":
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if 0 < share <= 1:
            return share
        right = share / 100 if 2 < share <= 100 else 0.92
        raise PlanError(f"{place} is no share of the GPU's memory, which is above 0 and at most 1; write {right:g}.")
    number = re.fullmatch(
        r"(\d{1,15})(\.\d{1,9}(?=[kmgt]))?([kmgtKMGT]?)" if key in _SCALED else r"(\d{1,15})()()", text
    )
    size = int(float(number[1] + (number[2] or "")) * _SUFFIXES.get(number[3], 1)) if number else 0
    if size > 0:
        return size
    if key == "max_model_len" and text.lower() in ("auto", "-1"):
        raise PlanError(
            f"{place} is for vLLM to resolve when it starts; write the tokens, or leave it out: the plan then takes "
            f"the model's own maximum, and says how much of it fits."
        )
    example = "32768, 32k (32,000) or 32K (32,768)" if key in _SCALED else "16"
    raise PlanError(f"{place} is not a whole number above 0; write one, such as {example}.")


def _read_limits(place: str, dotted: str, value: str) -> dict[str, Any]:
    """Return what an argument says of limit_mm_per_prompt, as JSON or for one modality. Raises PlanError."""
    try:
        found = {dotted.lstrip("."): int(value)} if dotted else json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PlanError(f'{place} is no JSON object of numbers; write \'{{"image": 0, "video": 0, "audio": 0}}\'.')
    return found


def takes_text_only(limits: Any) -> bool:
    """Return whether limit_mm_per_prompt allows no image, no video and no audio, which is the same as
    language_model_only (0.32.0 config/multimodal.py:304). vLLM allows 999 of a modality that is not named.
    """
    return {"image", "video", "audio"} <= _list_without(limits)


def _list_without(limits: Any) -> frozenset[str]:
    """Return the modalities of which limit_mm_per_prompt allows none."""
    given = limits.items() if isinstance(limits, Mapping) else ()
    counts = {name: count.get("count", 999) if isinstance(count, Mapping) else count for name, count in given}
    return frozenset(str(name) for name, count in counts.items() if not count)


def _parse_engine(
    engine: Mapping[str, Any],
    others: frozenset[int],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    free: Sequence[int],
    observations: Mapping[str, Any],
    release: Behaviour,
    margin_bytes: int,
) -> Engine:
    name = str(engine.get("name", ""))
    where = f"serving_engines.{name}"
    if engine.get("model") not in models:
        raise PlanError(f"{where}.model: {engine.get('model')!r} is not a known model ({', '.join(sorted(models))}).")
    arguments = arguments_of(engine)
    slots = tuple(engine.get("gpus") or ())
    if beyond := [slot for slot in slots if slot not in range(len(gpus))]:
        raise PlanError(f"{where}.gpus: slot {shown(beyond[0])} does not exist; slots are 0 to {len(gpus) - 1}.")
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if len(slots) != ranks:
        raise PlanError(
            f"{where}.gpus: {len(slots)} GPUs for tensor_parallel_size x pipeline_parallel_size = {ranks}; "
            f"give one for each."
        )
    model = models[str(engine["model"])]
    model, arguments, kv_cache_dtype = resolve(model, arguments, [gpus[slot] for slot in slots], release.version)
    model, arguments = add_drafter(model, arguments, models, release.number)
    return Engine(
        name,
        arguments,
        slots,
        model,
        tuple(str(word) for word in engine.get("extra_args") or ()),
        str(engine.get("tool_call_parser") or ""),
        dict(engine.get("extra_env") or {}),
        overhead.observed(observations, name),
        kv_cache_dtype,
        margin_bytes,
        others,
        gpus,
        tuple(free),
        release,
    )


def resolve(model: Model, arguments: Arguments, gpus: Sequence[Gpu], version: str) -> tuple[Model, Arguments, str]:
    """Return model and arguments with what vLLM chooses by the GPUs of an engine, and the dtype of its KV cache."""
    arguments = set_gpu_defaults(arguments, gpus[0], version)
    if model.multimodal and _list_modalities(model) <= arguments.without:
        arguments = replace(arguments, language_model_only=True)
    capability = find_weakest(gpus).compute_capability
    model = replace(model, dtype=resolve_model_dtype(model, arguments.dtype, capability))
    dtype = resolve_dtype(model, arguments, version)
    # 0.33.0 model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:148, with the CUDA 13 of vLLM's images.
    flashinfer = capability is None or capability[0] in (9, 10, 12)
    block_size, ds_mla = choose_block_size(model, dtype, capability), keeps_ds_mla(model, dtype, capability)
    arguments = replace(arguments, default_block_size=block_size, ds_mla=ds_mla, flashinfer_states=flashinfer)
    arguments = replace(arguments, fp4_units=capability is None or capability >= feasibility.FP4_UNITS_SINCE)
    return model, arguments, resolve_dtype(model, arguments, version)


def _list_modalities(model: Model) -> set[str]:
    """Return what a checkpoint takes besides text: if limit_mm_per_prompt allows nothing of it, vLLM runs it for text
    only (0.19.0 multimodal/registry.py:116) and without its towers (model_executor/models/interfaces.py,
    _mark_tower_model)."""
    audio = model.generic or any("audio" in part.tensor.name for part in model.components)
    return {"image", *(["audio"] if audio else []), *(["video"] if model.family not in WITHOUT_VIDEO else [])}


def _derive_settings(engine: Engine, outcome: Outcome) -> dict[str, float | int]:
    """Return what the plan adds to the engine's own arguments.

    vLLM checks that gpu_memory_utilization of the GPU is free even if the size of the KV cache is given
    (vllm/v1/worker/utils.py, request_memory). The share that the engine needs, in thousandths, makes it check just
    that. An engine of which the plan cannot say what it takes is left to vLLM, which measures it itself.
    """
    pinned = outcome.kv_cache_memory_bytes
    if not pinned or engine.arguments.gpu_memory_utilization is not None or outcome.verdict is Verdict.CANNOT_SAY:
        return {}
    share = max(
        compute_requested_bytes(None, outcome.ranks[number], engine.gpus[slot], pinned)
        / engine.gpus[slot].cuda_total_bytes
        for slot, number in engine.places
    )
    given = {} if engine.arguments.kv_cache_memory_bytes is not None else {"kv_cache_memory_bytes": pinned}
    return {**given, "gpu_memory_utilization": math.floor(share * 1000) / 1000}


def _compute_budget_mib(outcome: Outcome, gpus: Sequence[Gpu], tolerance_mib: int) -> int:
    """Return the MiB that NVML may show of the engine on each GPU: at most what there is, 0 if nothing is known, and
    the whole GPU if the plan cannot say."""
    if outcome.verdict is Verdict.CANNOT_SAY and outcome.gpus:
        return max(gpus[gpu.slot].cuda_total_bytes for gpu in outcome.gpus) // MIB
    most = max((min(gpu.total_bytes, gpus[gpu.slot].cuda_total_bytes) for gpu in outcome.gpus), default=0)
    return math.ceil(most / MIB) + tolerance_mib if most else 0


def _describe_engine(engine: Engine, outcome: Outcome) -> EnginePlan:
    kv, fits = outcome.kv, outcome.verdict is Verdict.FITS
    advice = [to_sentence(finding.reason)[:-1] for finding in outcome.later] + [*feasibility.list_advice(engine)]
    if is_approximate(engine.model.facts.source):
        advice.insert(0, f"this plan is {engine.model.facts.source.removeprefix('recorded: ')}")
    unknown = _list_free_uncertainties(engine, outcome)
    if fits and kv is not None:
        advice += _check_free_uncertainties(outcome, kv, unknown)
        advice += feasibility.advise_on_context(engine.max_model_len, kv.max_concurrency)
        advice += _check_highest(engine, outcome)
    weights = tuple(rank.loaded for rank in outcome.ranks)
    reads = engine.model, engine.arguments, weights, engine.bandwidth_bytes_per_s
    second = uses_second_runner(engine.model, engine.arguments, engine.release.version)
    advice += advise(*reads, 0 if second else engine.max_num_seqs)
    most = min(kv.tokens // decode.TOGETHER_CONTEXT_TOKENS, engine.max_num_seqs) if kv else 0
    if fits and (encoder := compute_encoder_bytes(engine)):
        advice.append(
            f"what its encoders need for images, videos or audio is not known: at most {mib(encoder)} by assumption, "
            f"with which it fits too"
        )
    # What judged the outcome after the search may have named another fix.
    fixes = outcome.fixes if [fix.change for fix in outcome.fixes[:1]] == [outcome.fix] else (Fix(outcome.fix),)
    uncertainty = _compute_uncertainty(outcome)
    advice += _describe_extrapolation(engine, uncertainty)
    return EnginePlan(
        engine=engine.name,
        verdict=outcome.verdict,
        reason=outcome.reason,
        fix=outcome.fix,
        kv_cache_dtype=engine.kv_cache_dtype,
        kv_blocks=kv.blocks if kv else 0,
        kv_cache_tokens=kv.tokens if kv else 0,
        max_concurrency=kv.max_concurrency if kv else 0.0,
        max_context=kv.max_context_tokens if kv else 0,
        decode_tok_s=decode.estimate(*reads),
        decode_together_tok_s=decode.estimate_together(*reads, engine.kv_cache_dtype, most),
        gpus=outcome.gpus,
        kv_groups=kv.groups if kv else (),
        advice=tuple(advice),
        facts_source=engine.model.facts.source,
        derived_kv_cache_memory_bytes=derive_kv_cache_bytes(engine, outcome.ranks),
        settings=_derive_settings(engine, outcome),
        pinned=outcome.kv_cache_memory_bytes is not None,
        uncertainty_mib=uncertainty,
        free_uncertainty_mib=unknown,
        observed=tuple(sorted(engine.observed)),
        max_model_len=engine.max_model_len,
        at_once={
            tokens: min(
                count_requests(engine.model, engine.arguments, engine.release.version, kv.blocks, tokens),
                engine.max_num_seqs,
            )
            for tokens in AT_ONCE_TOKENS
            if kv and fits and tokens <= engine.max_model_len
        },
        fixes=fixes if outcome.fix else (),
        load_s=plan_load(engine.model, engine.arguments),
    )


def _compute_uncertainty(outcome: Outcome) -> tuple[int, int]:
    """Return by how many MiB what is beside the KV cache may be less, and more, on the rank on which that is most."""
    less = max((sum(part.value - part.low for part in rank.parts) for rank in outcome.ranks), default=0.0)
    more = max((sum(part.high - part.value for part in rank.parts) for rank in outcome.ranks), default=0.0)
    return round(less / MIB), round(more / MIB)


def _list_defaults(engine: Engine, checkpoint_dtype: str) -> dict[str, str]:
    """Return the reasons of what the plan counts with where the engine states nothing, by key."""
    arguments, dtype = engine.arguments, engine.model.dtype
    by_card = {"max_num_seqs": arguments.default_max_num_seqs is not None}
    by_card |= {"dtype": dtype != checkpoint_dtype, "max_num_batched_tokens": by_card["max_num_seqs"]}
    taken = {"dtype": dtype, "kv_cache_dtype": engine.kv_cache_dtype, "max_model_len": f"{engine.max_model_len:,}"}
    taken |= {key: f"{getattr(engine, key):,}" for key in ("max_num_seqs", "max_num_batched_tokens")}
    return {
        key: f"rule of the card: {value} on this GPU" if by_card.get(key) else f"vLLM's default: {value}"
        for key, value in taken.items()
    }


def _list_free_uncertainties(engine: Engine, outcome: Outcome) -> dict[str, int]:
    names = []
    if outcome.kv_cache_memory_bytes is None and not engine.arguments.enforce_eager:
        names.append("compile_cache")
    measured = engine.gpu.name == overhead.FITTED_GPU or {"overhead_bytes", "context_bytes"} <= engine.observed.keys()
    if engine.arguments.tensor_parallel_size > 1 and not engine.has_nvlink and not measured:
        names.append("pcie")
    if engine.gpu.compute_capability in overhead.INTEGRATED and not measured:
        names.append("shared_memory")
    found = {name: math.ceil(overhead.FREE_UNCERTAINTIES[name][0].high / MIB) for name in names if outcome.gpus}
    reads, capability = (engine.model, engine.arguments, engine.release.number), engine.gpu.compute_capability
    padding = max((bound_expert_padding(*reads, rank.loaded, capability) for rank in outcome.ranks), default=0)
    return found | ({"experts": math.ceil(padding / MIB)} if padding else {})


def _check_free_uncertainties(outcome: Outcome, kv: KvCapacity, unknown: Mapping[str, int]) -> list[str]:
    """Return a warning if an engine that fits would not do so with all that may be missing."""
    room, what = kv.available_bytes - kv.needed_bytes, "the KV cache has beside one request of max_model_len"
    change = "take a smaller max_model_len or max_num_seqs"
    if outcome.kv_cache_memory_bytes is not None:
        room, what = min(gpu.free_bytes for gpu in outcome.gpus), "is free"
        change = "raise plan_margin_mib or lower kv_cache_memory_bytes"
    short = sum(unknown.values()) * MIB - room
    if not unknown or short <= 0:
        return []
    reasons = " and ".join(f"{size:,} MiB {overhead.FREE_UNCERTAINTIES[name][1]}" for name, size in unknown.items())
    return [f"vLLM may take up to {reasons}, which is {mib(short)} more than {what}: measure it, or {change}"]


def _describe_extrapolation(engine: Engine, uncertainty_mib: tuple[int, int]) -> list[str]:
    """Return advice with the uncertainty in MiB if the engine lies outside of what the figures were fitted on."""
    if not any(uncertainty_mib):
        return []
    gpu, hidden_size = engine.gpu, engine.model.hidden_size
    sequences, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    outside = [
        gpu.name or "a GPU whose name is not known" if gpu.name != overhead.FITTED_GPU else "",
        "NVLink" if engine.has_nvlink else "",
        f"max_num_seqs {sequences:,}" if sequences > overhead.FITTED_SEQUENCES else "",
        f"max_num_batched_tokens {tokens:,}" if tokens > overhead.FITTED_TOKENS else "",
        f"hidden size {hidden_size:,}" if hidden_size > overhead.FITTED_HIDDEN_SIZE else "",
    ]
    if not any(outside):
        return []
    found = [
        f"what is beside the KV cache is uncertain by {uncertainty_mib[0]:,} MiB less to {uncertainty_mib[1]:,} MiB "
        f"more per GPU: its figures were fitted on an L4 with smaller batches, and this engine has "
        f"{', '.join(filter(None, outside))}; measure it with playbooks/calibrate.yml"
    ]
    unstated = engine.arguments.max_num_seqs is None or engine.arguments.max_num_batched_tokens is None
    if not gpu.name and gpu.cuda_total_bytes >= LARGE_GPU_GIB * 2**30 and unstated:
        found.append(
            "vLLM's defaults of max_num_seqs and max_num_batched_tokens are planned as on an H100; on an A100 they are "
            "256 and 2,048, which needs less"
        )
    return found


def _check_highest(engine: Engine, outcome: Outcome) -> list[str]:
    pinned = outcome.kv_cache_memory_bytes is not None
    short = 0
    for placed, (_, number) in zip(outcome.gpus, engine.places, strict=True):
        rank = outcome.ranks[number]
        # vLLM takes what it counts itself out of its share, which only makes the KV cache smaller.
        beyond = (
            rank.parts if pinned else (rank.context, rank.warm_up, *(() if rank.graphs_kept.value else (rank.graphs,)))
        )
        more = sum(part.high - part.value for part in beyond)
        short = max(short, math.ceil(more) - placed.free_bytes)
    if short <= 0:
        return []
    return [
        f"with the highest of the uncertain figures it would be {mib(short)} too much: measure the engine with "
        f"playbooks/calibrate.yml"
    ]
