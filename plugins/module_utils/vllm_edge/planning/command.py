# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-edge plan`, `advise` and `facts`: the planner on any machine, without Ansible or a host."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..gpu import models as gpu_models
from ..text import shown
from ..weights.access import read_token_file
from ..weights.record import WeightsError
from . import feasibility, inputs, planner, render
from .advice import model as advice_model
from .advice import render as advice_render
from .advice import search
from .checkpoint import families, hub, model_facts, recording
from .checkpoint.headers import INDEX, MAX_HEADER_BYTES, FactsError, read_json
from .contract import Facts, Gpu, Model, Plan, Verdict
from .fixes import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES, TEXT_ONLY, Search
from .separate_process import read_in_subprocess

FITS, DOES_NOT_FIT, CANNOT_SAY = 0, 1, 2
"""Exit status of `plan` and `advise`."""
FEW_GPUS = 4
"""Up to so many are named as what an unknown one may be."""


def run(name: str, options: Namespace) -> int:
    """Run the command `plan`, `advise` or `facts`, and return its exit status."""
    try:
        return {"plan": _plan, "advise": _advise, "facts": _print_facts}[name](options)
    except advice_model.NothingFits as error:
        print(error, file=sys.stderr)
        return DOES_NOT_FIT
    except (ValueError, WeightsError) as error:
        # All errors of the planner are a ValueError whose message has the problem and its remedy.
        print(error, file=sys.stderr)
        return CANNOT_SAY


def _warn(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


def load_facts(source: str, options: Namespace) -> Facts:
    """Return the facts of a checkpoint from a directory, a file, the project's records or a hub.

    Raises FactsError if nothing is there, or it is damaged, and WeightsError if the token's file cannot be used.
    """
    path = Path(source).expanduser()
    if path.exists():
        return _load_path(path)
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise FactsError(
            f"--model: {shown(source)} is neither a path that exists nor a repository; write owner/name, such as "
            "google/gemma-4-31B-it, or a directory with config.json."
        )
    found = model_facts.recorded(source)
    if found is not None and not options.revision:
        return found
    token = read_token_file(Path(options.token_file).expanduser()) if options.token_file else None
    return read_in_subprocess(
        source, lambda: hub.read(source, options.revision, options.endpoint, token), drop_root=False
    )


def _load_path(path: Path) -> Facts:
    """Read a directory, a file in one, or a record that `vllm-edge facts` wrote."""
    if path.is_file() and path.name not in ("config.json", INDEX) and path.suffix == ".json":
        document = read_json(path, "", MAX_HEADER_BYTES)
        return model_facts.parse_record(path.stem.replace("--", "/"), document, str(path))
    directory = path if path.is_dir() else path.parent
    return read_in_subprocess(str(directory), lambda: model_facts.read(directory), drop_root=False)


def load_model(source: str, options: Namespace) -> Model:
    facts = load_facts(source, options)
    if warning := families.warn_of_code(facts):
        _warn(warning)
    return families.interpret(facts)


def find_gpus(options: Namespace) -> list[Gpu]:
    """Return the GPUs of the command line. Raises ValueError if one is not known and its memory is not given."""
    known = gpu_models.find_by_short_name(options.gpu) or gpu_models.OTHER_MAKERS.search(options.gpu)
    if not known and options.gpu_memory_mib is None:
        alike = gpu_models.list_by_words(options.gpu)
        hint = f"Write one of {', '.join(alike)}. " if alike else ""
        raise ValueError(
            f"--gpu: {shown(options.gpu)} is not a GPU that the planner knows. {hint}For another one give "
            f"--gpu-memory-mib as nvidia-smi prints it, --compute-capability as `nvidia-smi --query-gpu=compute_cap` "
            f"does, and for its speed --gpu-bandwidth in GB/s, of its data sheet."
        )
    if not known and 0 < len(alike := gpu_models.list_by_memory(options.gpu_memory_mib)) <= FEW_GPUS:
        _warn(f"--gpu: {shown(options.gpu)} is not known; known GPUs with about this memory: {', '.join(alike)}.")
    if not 1 <= options.count <= 64:
        raise ValueError(f"--count: {options.count} is not a number of GPUs from 1 to 64.")
    given: dict[str, Any] = {
        "name": options.gpu,
        "nvml_total_mib": options.gpu_memory_mib,
        "compute_capability": options.compute_capability,
        "bandwidth_gb_s": options.gpu_bandwidth,
    }
    gpu = inputs.build_gpu("--gpu", given, _warn)
    if said := feasibility.describe_unconfirmed(gpu):
        _warn(said)
    return [gpu] * options.count


def plan_layouts(model: Model, gpus: Sequence[Gpu], options: Namespace) -> dict[str, tuple[Plan, Mapping[str, Any]]]:
    """Plan a model as one engine over 1, 2, 4, ... GPUs, by the name of the layout; without --context each with the
    longest context that fits, as with vLLM's `max_model_len: auto`. Returns each plan with the engine."""
    given = options.tensor_parallel_size
    sizes = [size for size in ([given] if given is not None else TENSOR_PARALLEL_SIZES) if size <= len(gpus)]
    plans: dict[str, tuple[Plan, Mapping[str, Any]]] = {}
    for size in sizes:
        engine: dict[str, Any] = {
            "name": f"tp{size}",
            "model": "model",
            "tensor_parallel_size": size,
            "gpus": list(range(size)),
            "max_model_len": model.max_position_embeddings if options.context is None else options.context,
            **({"limit_mm_per_prompt": TEXT_ONLY} if options.text_only else {}),
        }
        for key in ("max_num_seqs", "kv_cache_dtype", "gpu_memory_utilization", "enforce_eager"):
            if getattr(options, key) is not None:
                engine[key] = getattr(options, key)
        about = (engine["name"], [engine], {"model": model}, gpus, options.vllm)
        plan = planner.plan(*about, search=Search.NOWHERE)
        longest = plan.engines[0].max_context // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
        too_long = plan.verdict is Verdict.KV_BELOW_MAX_MODEL_LEN or (
            model.generic and plan.verdict is not Verdict.FITS
        )
        # What encoders of an unknown architecture take grows with the context, so that none may be left.
        halves = (engine["max_model_len"] >> half for half in range(1, 6 if model.generic and model.multimodal else 1))
        for shorter in (longest, *halves) if options.context is None and too_long else ():
            if plan.verdict is not Verdict.FITS and 0 < shorter < engine["max_model_len"]:
                engine["max_model_len"] = shorter
                plan = planner.plan(*about, search=Search.NOWHERE)
        if plan.verdict is not Verdict.FITS:
            if options.context is None and plan.verdict is not Verdict.CANNOT_SAY:
                # No context fits, so what would help is looked for with the one that `advise` asks for.
                engine["max_model_len"] = min(model.max_position_embeddings, advice_model.MIN_CONTEXT_TOKENS)
            # More GPUs are the next line of the table.
            plan = planner.plan(*about, search=Search.SAME_GPUS if size < sizes[-1] else Search.EVERYWHERE)
        plans[engine["name"]] = plan, engine
    if not plans:
        raise ValueError(f"--tensor-parallel-size: {given} needs more GPUs than --count {len(gpus)}.")
    return plans


def _plan(options: Namespace) -> int:
    model, gpus = load_model(options.model, options), find_gpus(options)
    layouts = plan_layouts(model, gpus, options)
    plans = {name: plan for name, (plan, _) in layouts.items()}
    serve = {
        name: render.build_serve_command(model.facts.repo, engine, plan.engines[0])
        for name, (plan, engine) in layouts.items()
        if plan.verdict is Verdict.FITS
    }
    verdicts = {plan.verdict for plan in plans.values()}
    status = FITS if Verdict.FITS in verdicts else CANNOT_SAY if Verdict.CANNOT_SAY in verdicts else DOES_NOT_FIT
    if options.format == "json":
        documents = {name: render.document(plan) | {"serve": serve.get(name)} for name, plan in plans.items()}
        print(json.dumps({"model": model.facts.repo, "vllm_version": options.vllm, "plans": documents}, indent=2))
        return status
    host = advice_model.Host({}, gpus, options.vllm, ())
    lines = render.wrap(
        f"{model.facts.repo} on {host.describe_gpus()}, vLLM {options.vllm}; facts {model.facts.source}"
    )
    why = {
        name: [said.split(": ", 1)[1] for said in render.refusals(plan, render.spell_options)]
        for name, plan in plans.items()
    }
    longest = " The context is the longest that fits." if options.context is None else ""
    lines += ["", *render.overview(plans, why, render.NOTE + longest)]
    # A line that is copied is not wrapped.
    lines += ["", *(f"{name}: {line}" for name, line in serve.items())] if serve else []
    if options.details:
        for plan in plans.values():
            lines += ["", "-" * 100, "", *render.lines(plan)]
        lines += ["", *render.legend()]
    else:
        lines.append("--details has the memory of each GPU and advice.")
    print("\n".join(lines))
    return status


def _advise(options: Namespace) -> int:
    models = {}
    for source in options.model:
        model = load_model(source, options)
        models[model.facts.repo.rsplit("/", 1)[-1].lower()] = model
    roles = options.role or ["main"]
    asked = search.wish(models, roles, vars(options))
    found = search.advise(asked, advice_model.Host(models, find_gpus(options), options.vllm, roles))
    if options.format == "json":
        print(json.dumps(advice_render.document(found), indent=2))
    else:
        print("\n".join(advice_render.lines(found)))
    return FITS


def _print_facts(options: Namespace) -> int:
    facts = load_facts(options.model, options)
    if options.repo:
        facts = replace(facts, repo=options.repo)
    families.interpret(facts)
    print(json.dumps(recording.record(facts, recording.describe_origin(facts)), indent=2))
    return 0
