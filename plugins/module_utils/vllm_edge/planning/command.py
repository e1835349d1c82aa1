# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-edge plan`, `advise` and `facts`: the planner on any machine, without Ansible or a host."""

from __future__ import annotations

import functools
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..gpu import models as gpu_models
from ..text import WIDTH, shown
from ..weights.access import read_token_file
from ..weights.record import WeightsError
from . import feasibility, inputs, output, planner, render, serve_options
from .advice import known, search
from .advice import model as advice_model
from .advice import render as advice_render
from .checkpoint import families, hub, model_facts, recording
from .checkpoint.headers import GGUF, INDEX, MAX_HEADER_BYTES, FactsError, describe_gguf, read_json
from .contract import EnginePlan, Facts, Fix, Gpu, Model, Plan, UnknownArchitecture, Verdict
from .fixes import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES, Search
from .memory.vllm_versions import describe_fallback
from .separate_process import read_in_subprocess

FITS, DOES_NOT_FIT, CANNOT_SAY = 0, 1, 2
"""Exit status of `plan` and `advise`."""
FEW_GPUS = 4
"""Up to so many are named as what an unknown one may be."""
Layouts = dict[str, tuple[Plan, Mapping[str, Any], Fix | None]]
_KEYS = "|".join([*serve_options.KEYS, "(?:tensor|pipeline)_parallel_size"])
_SPELLINGS: Sequence[tuple[str, str]] = (
    (r"(?:[.,]|, or)?\s+[Ss]tart\s+it\s+without\s+a\s+plan\s+\(-e\s+plan_override=true\)", ""),
    (r",?\s+or\s+add\s+the\s+architecture\s+\(CONTRIBUTING.md,\s+Add\s+a\s+model\)", ""),
    (r"[;:,]?\s+(?:measure\s+(?:it|the\s+engine)\s+with\s+)?playbooks/calibrate.yml(?:\s+measures\s+them)?", ""),
    (r"playbooks/record_facts.yml\s+or\s+", ""),
    (r"set\s+gpu_name\s+to\s+the\s+name\s+that\s+nvidia-smi\s+prints,\s+or\s+", ""),
    (r"(?:,\s+)?\bgpu_(?:bandwidth_gb_s|memory_mib|compute_capability)\b(?:,\s+)?", ""),
    (r"clear\s+the\s+variable", "leave it out"),
    (r"clear\s+(?=model_weights)", "leave out "),
    (r"model_weights_token\s+and\s+model_weights_token_file", "--token-file"),
    (r"model_weights_(token_file|endpoint)", r"--\1"),
    (r"\s+on\s+the\s+controller\b", ""),
    (r"\s+\(plan_margin_mib\)", ""),
    (r"raise\s+plan_margin_mib\s+or\s+", ""),
    (r"plan_margin_mib(?:\s+\d+)?", f"{planner.MARGIN_MIB} MiB"),
    (r"memory_threshold_percent\s+(\d+)", r"\1 %"),
    (r"\s*-e\s+format=json", " --format json"),
    (r"not\s+a\s+key\s+of\s+vllm_models", "no model that is given"),
    (r"\badvise_models", "--model"),
    (r"\badvise_(\w+)", r"--\1"),
    (r",\s+gpus:\s+\[[^]]*\]", ""),
    (r"[Ss]et\s+extra_env:\s+\{(\w+):\s+(\w+)\}", r"Write \1=\2 before vllm serve"),
    (r"([Ss])et\s+(extra_(?:args|env)\s+without|vllm_image_base\s+with)", r"\2"),
    (r"\bextra_(?:args|env)\s+without\b", "Leave out"),
    (r"\bextra_(?:args|env):\s+\[([^]]*)\]", r"\1"),
    (r"\bvllm_image_base\s+with\b", "Take"),
    (rf"(?<![\w\"'.])(?P<key>{_KEYS}):\s+(?!\d+\s%)", r"--\g<key> "),
)
"""What the sentences of the planner say in variables and plays of Ansible, and how this command says it."""


def run(name: str, options: Namespace) -> int:
    """Run the command `plan`, `advise` or `facts`, and return its exit status."""
    try:
        return {"plan": _plan, "advise": _advise, "facts": _print_facts}[name](options)
    except advice_model.NothingFits as error:
        print(spell(str(error)), file=sys.stderr)
        return DOES_NOT_FIT
    except (ValueError, WeightsError) as error:
        # All errors of the planner are a ValueError whose message has the problem and its remedy.
        print(spell(str(error)), file=sys.stderr)
        return CANNOT_SAY


def spell(text: str) -> str:
    """Return a text of the planner with this command's and vLLM's options in place of variables of Ansible."""
    for pattern, words in _SPELLINGS:
        text = re.sub(pattern, words, text)
    return re.sub(r"--[a-z]+(?:_[a-z]+)+", lambda option: option[0].replace("_", "-"), text)


def _print_lines(lines: Sequence[str]) -> None:
    """Print wrapped lines in this command's words, wrapped again where those are longer; a command line stays whole."""
    for line in spell("\n".join(lines)).split("\n"):
        fits = len(line) <= WIDTH or re.search("vllm serve |vllm-edge plan --", line)
        print(line if fits else "\n".join(render.wrap(line, re.match(" *", line)[0])))  # type: ignore[index]


def _warn(sentence: str) -> None:
    print(f"note: {spell(sentence)}", file=sys.stderr)


def load_facts(source: str, options: Namespace, shipped: Callable[[str], Facts | None] = model_facts.recorded) -> Facts:
    """Return the facts of a checkpoint from a directory, a file, what the project ships or a hub.

    Raises FactsError if nothing is there, or it is damaged, and WeightsError if the token's file cannot be used.
    """
    path = Path(source).expanduser()
    if GGUF.search(source):
        raise FactsError(describe_gguf(source))
    if path.exists():
        return _load_path(path)
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise FactsError(
            f"--model: {shown(source)} is neither a path that exists nor a repository; write owner/name, such as "
            f"google/gemma-4-31B-it, or a directory with config.json and {INDEX}."
        )
    found = shipped(source)
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
    return inputs.interpret(load_facts(source, options, model_facts.published), _warn)


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


def plan_layouts(
    model: Model,
    gpus: Sequence[Gpu],
    asked: serve_options.Asked,
    release: str,
    drafts: Mapping[str, Model] | None = None,
    margin_mib: int = planner.MARGIN_MIB,
) -> Layouts:
    """Plan a model as one engine over 1, 2, 4, ... GPUs, or over as many as are asked for, by the name of the layout;
    if no context is asked for, each with the longest that fits, as with vLLM's `max_model_len: auto`. Returns each
    plan with the engine, and with the cheapest change that gives all of the model's context."""
    shapes = [
        shape
        for size in (TENSOR_PARALLEL_SIZES if asked.size is None else [asked.size])
        if (shape := advice_model.Shape(size, asked.stages)).gpus * asked.replicas <= len(gpus)
    ]
    plans: Layouts = {}
    make = functools.partial(planner.plan, margin_mib=margin_mib)
    for shape in shapes:
        engine: dict[str, Any] = {
            "name": str(shape),
            "model": "model",
            **asked.engine,
            "tensor_parallel_size": shape.tensor_parallel_size,
            **({"pipeline_parallel_size": asked.stages} if asked.stages > 1 else {}),
            "gpus": list(range(shape.gpus)),
            **({"max_model_len": model.max_position_embeddings} if asked.longest else {}),
        }
        about = (engine["name"], [engine], {**(drafts or {}), "model": model}, gpus, release)
        plan = make(*about, search=Search.NOWHERE)
        longest = plan.engines[0].max_context // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
        too_long = plan.verdict in (Verdict.KV_BELOW_MAX_MODEL_LEN, Verdict.CANNOT_SAY) or (
            model.generic and plan.verdict is not Verdict.FITS
        )
        # What encoders of an unknown architecture take grows with the context, so that none may be left.
        most = engine.get("max_model_len", 0)
        halves = (most >> half for half in range(1, 6 if model.generic and model.multimodal else 1))
        for shorter in (longest, *halves) if asked.longest and too_long else ():
            if plan.verdict is not Verdict.FITS and 0 < shorter < engine["max_model_len"]:
                engine["max_model_len"] = shorter
                plan = make(*about, search=Search.NOWHERE)
        if plan.verdict is not Verdict.FITS:
            if asked.longest and plan.verdict is not Verdict.CANNOT_SAY:
                # No context fits, so what would help is looked for with the one that `advise` asks for.
                engine["max_model_len"] = min(model.max_position_embeddings, advice_model.MIN_CONTEXT_TOKENS)
            # More GPUs are the next line of the table.
            plan = make(*about, search=Search.EVERYWHERE if shape == shapes[-1] else Search.SAME_GPUS)
        whole = None
        if plan.verdict is Verdict.FITS and engine.get("max_model_len", most) < most:
            longer = make(about[0], [{**engine, "max_model_len": most}], *about[2:], search=Search.SAME_GPUS)
            whole = next((fix for fix in longer.engines[0].fixes if fix.max_model_len == most), None)
        explained = replace(plan.engines[0], reasons={**plan.engines[0].reasons, **asked.reasons})
        plans[engine["name"]] = replace(plan, engines=(explained,)), engine, whole
    if not plans:
        replicas = f", times --data-parallel-size {asked.replicas}," if asked.replicas > 1 else ""
        raise ValueError(
            f"--tensor-parallel-size: {advice_model.Shape(asked.size or 1, asked.stages)}{replicas} needs more GPUs "
            f"than --count {len(gpus)}; write --count {asked.gpus}."
        )
    return plans


def _plan(options: Namespace) -> int:
    asked = serve_options.read(options.rest, options.vllm)
    if not options.model and not asked.model:
        raise ValueError("--model: no model is named; write owner/name, or a whole line of vllm serve.")
    if options.model and asked.model:
        raise ValueError(f"--model: {shown(options.model)} and {shown(asked.model)} are two models; name one.")
    options.revision = options.revision or asked.revision
    options.count = options.count or (asked.gpus if asked.whole else 1)
    model, gpus = load_model(options.model or asked.model, options), find_gpus(options)
    speculation, drafts = asked.speculation, {}
    if speculation and speculation.draft not in ("", model.facts.repo) and not speculation.uncounted:
        try:
            drafts[speculation.draft] = load_model(speculation.draft, Namespace(**vars(options) | {"revision": ""}))
        except (FactsError, UnknownArchitecture) as error:
            _warn(str(error))
    # For an inventory the plan leaves room for what the host may measure, as serving_complete does.
    spare = planner.TOLERANCE_MIB if options.output == "inventory" else 0
    layouts = plan_layouts(model, gpus, asked, options.vllm, drafts, planner.MARGIN_MIB + spare)
    plans = {name: plan for name, (plan, _, _) in layouts.items()}
    where = [word for name, values in asked.server.items() for word in (name, *values)]
    serve = {
        name: render.build_serve_command(
            model.facts.repo, {**engine, "extra_args": [*engine["extra_args"], *where]}, plan.engines[0]
        )
        for name, (plan, engine, _) in layouts.items()
        if plan.verdict is Verdict.FITS
    }
    verdicts = {plan.verdict for plan in plans.values()}
    status = FITS if Verdict.FITS in verdicts else CANNOT_SAY if Verdict.CANNOT_SAY in verdicts else DOES_NOT_FIT
    if options.output:
        return _write_output(layouts, model, gpus[0].name, asked, options, status)
    if options.format == "json":
        documents = {name: render.document(plan) | {"serve": serve.get(name)} for name, plan in plans.items()}
        about = {"model": model.facts.repo, "vllm_version": options.vllm, "replicas": asked.replicas}
        _print_json({**about, "plans": documents}, options)
        return status
    host = advice_model.Host({}, gpus, options.vllm, ())
    lines = render.describe_release(options.vllm)
    lines += render.wrap(
        f"{model.facts.repo} on {host.describe_gpus()}, vLLM {options.vllm}; facts {model.facts.source}"
    )
    why = {
        name: [said.split(": ", 1)[1] for said in render.refusals(plan, render.spell_options)]
        for name, plan in plans.items()
    }
    for name, (_, _, fix) in layouts.items():
        if fix:
            costs = f"{render.spell_options(fix)} ({render.describe_costs(fix)})"
            why[name].append(f"{fix.max_model_len:,} tokens of context fit with {costs}.")
    longest = " The context is the longest that fits." if asked.longest else ""
    alike = asked.replicas > 1 and not model.experts
    undrafted = " tok/s is without drafts; --details has what they may change." if speculation else ""
    replicas = f" Each of {asked.replicas} replicas has this plan, on GPUs of its own." if alike else ""
    lines += ["", *render.overview(plans, why, render.NOTE + longest + replicas + undrafted)]
    # A line that is copied is not wrapped.
    lines += ["", *(f"{name}: {line}" for name, line in serve.items())] if serve else []
    if options.details:
        for plan in plans.values():
            lines += ["", "-" * 100, "", *render.lines(plan, render.spell_options)]
        lines += ["", *render.legend()]
    else:
        lines.append("--details has the memory of each GPU and advice.")
    _print_lines(lines)
    return status


def _write_output(
    layouts: Layouts, model: Model, gpu: str, asked: serve_options.Asked, options: Namespace, status: int
) -> int:
    """Print the best layout that fits as options.output has it; otherwise nothing but the refusals, as errors."""
    if options.format == "json" or options.details:
        raise ValueError(f"--output {options.output} takes neither --format json nor --details; leave them out.")
    fitting = list_fitting(layouts)
    if not fitting:
        said = [line for plan, _, _ in layouts.values() for line in render.refusals(plan, render.spell_options)]
        print(spell("\n".join(said)), file=sys.stderr)
        return status
    rate = rate_smallest(model) if options.output == "inventory" else _rate
    planned, engine = max(fitting, key=lambda found: rate(*found))
    advice = [spell(sentence) for sentence in planned.advice]
    print(output.write(options.output, output.Chosen(model, asked, options, gpu, engine, planned, advice)))
    return FITS


def list_fitting(layouts: Layouts) -> list[tuple[EnginePlan, Mapping[str, Any]]]:
    return [(plan.engines[0], engine) for plan, engine, _ in layouts.values() if plan.verdict is Verdict.FITS]


def _rate(planned: EnginePlan, engine: Mapping[str, Any]) -> tuple[float, ...]:
    """Return what the best layout has most of, in the order of importance."""
    return planned.max_model_len, planned.decode_tok_s.mid if planned.decode_tok_s else 0, -len(engine["gpus"])


def rate_smallest(model: Model) -> Callable[[EnginePlan, Mapping[str, Any]], tuple[float, ...]]:
    """Return the same for an engine of which an inventory says nothing: the fewest GPUs with which
    MIN_CONTEXT_TOKENS fit, or the longest context if they never do."""
    enough = min(model.max_position_embeddings, advice_model.MIN_CONTEXT_TOKENS)
    return lambda planned, engine: (min(planned.max_model_len, enough), -len(engine["gpus"]))


def _print_json(document: dict[str, Any], options: Namespace) -> None:
    said = {"warning": spell(describe_fallback(options.vllm))}
    print(json.dumps({**document, **said}, indent=2))


def _rank_known(options: Namespace) -> int:
    """Answer `advise` without models."""
    if options.role or options.main:
        raise ValueError("--role and --main are for profiles of models, and no model is given; name some with --model.")
    asked = search.wish((), ["main"], vars(options))
    host = advice_model.Host({}, find_gpus(options), options.vllm, ())
    keys = ("gpu", "count", "gpu_memory_mib", "compute_capability", "gpu_bandwidth", "vllm")
    given = {f"--{key.replace('_', '-')}": str(value) for key in keys if (value := getattr(options, key))}
    gpus = [word for option in given.items() for word in option]
    found = known.rank(asked, host, asked.by if options.by else None, gpus)
    if options.format == "json":
        _print_json(found, options)
    else:
        _print_lines(known.lines(found, asked.choose))
    return FITS


def _advise(options: Namespace) -> int:
    models: dict[str, Model] = {}
    unreadable: dict[str, str] = {}
    options.count = options.count or 1
    if not options.model:
        return _rank_known(options)
    for source in options.model:
        try:
            model = load_model(source, options)
        except (ValueError, WeightsError) as error:
            unreadable[source] = str(error)
            continue
        name = model.facts.repo.lower()
        short = name.rsplit("/", 1)[-1]
        models[name.replace("/", "-") if short in models else short] = model
    if not models:
        raise ValueError(" ".join(unreadable.values()))
    roles = options.role or ["main"]
    asked = search.wish(models, roles, vars(options))
    host = advice_model.Host(models, find_gpus(options), options.vllm, roles)
    found = search.advise(asked, host, unreadable)
    if options.format == "json":
        _print_json(advice_render.document(found), options)
    else:
        _print_lines(advice_render.lines(found, advice_render.list_serve_lines(found)))
    return FITS


def _print_facts(options: Namespace) -> int:
    facts = load_facts(options.model, options)
    if options.repo:
        facts = replace(facts, repo=options.repo)
    families.interpret(facts)
    print(json.dumps(recording.record(facts, recording.describe_origin(facts)), indent=2))
    return 0
