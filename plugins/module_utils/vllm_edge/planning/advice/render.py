# SPDX-License-Identifier: Apache-2.0
"""The advice as a document for programs and as text for a terminal."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ...inventory.replicas import list_replicas
from ...text import WIDTH
from .. import render
from ..contract import Decode, DecodeTogether, EnginePlan
from ..feasibility import advise_on_context
from ..fixes import TENSOR_PARALLEL_SIZES
from .choice import FIRST_PORT, list_own_advice
from .model import PROFILE_NAME, Advice, By, Chosen, Engine, Profile

ROWS = 20
"""Rows of the table. The document has all profiles."""


def document(advice: Advice) -> dict[str, Any]:
    return {
        "by": advice.wish.by.value,
        "min_context": advice.wish.min_context_tokens,
        "min_tok_s": dict(advice.wish.min_tok_s),
        "max_num_seqs": list(advice.wish.max_num_seqs),
        "main_models": list(advice.mains),
        "profiles": [_build_row(rank, profile, advice) for rank, profile in enumerate(advice.profiles, 1)],
        "rejected": [dataclasses.asdict(rejection) for rejection in advice.rejections],
        "chosen": {
            "rank": advice.wish.choose,
            "profile": PROFILE_NAME,
            "serving_engines": advice.chosen.serving_engines,
            "serving_profiles": advice.chosen.serving_profiles,
            "advice": {name: list(said) for name, said in advice.chosen.advice.items()},
            "plan": render.document(advice.chosen.plan),
        },
        "lost": [{"rank": rank, "label": label, "reason": why} for rank, label, why in advice.lost],
    }


def lines(advice: Advice, how: Sequence[str] = ()) -> list[str]:
    """Return the advice as text of at most WIDTH columns.

    Args:
        how: lines that start the chosen profile, in place of its YAML.
    """
    count, host, chosen = len(advice.profiles), advice.host, advice.chosen
    sequences = ", ".join(map(str, advice.wish.max_num_seqs))
    wanted = "".join(f", {least:g} tok/s or more for {role}" for role, least in advice.wish.min_tok_s.items())
    unknown = [rejection.model for rejection in advice.rejections if rejection.verdict == "unknown"]
    left_out = f" Left out, because it cannot be planned (see below): {', '.join(unknown)}." if unknown else ""
    return [
        *render.describe_release(host.vllm_version),
        *render.wrap(
            f"{host.describe_gpus()}, vLLM {host.vllm_version}: {count} feasible profiles of "
            f"{advice.wish.min_context_tokens:,} tokens or more{wanted}, ranked by {advice.wish.by.value}. The main "
            f"engine has one of {', '.join(advice.mains)}.{left_out}"
        ),
        "",
        *render.wrap(
            f"chosen: {advice.wish.choose} of {count} (advise_choose), {advice.profiles[advice.wish.choose - 1].label}",
            "    ",
        ),
        *(
            line
            for name, engine, planned in _list_chosen(advice)
            for line in (
                *render.wrap(
                    f"  {name}{_describe_replicas(engine)}  {planned.verdict.value}: {_describe_figures(planned)}",
                    "    ",
                ),
                *(said for text in chosen.advice[name] for said in render.wrap(f"    advice: {text}", " " * 12)),
            )
        ),
        *(["why the next ones lost:"] if advice.lost else []),
        *(line for rank, label, why in advice.lost for line in render.wrap(f"  {rank}, {label}: {why}", "    ")),
        "",
        *(how or pasted(chosen)),
        "",
        *_render_table(advice),
        "",
        *render.wrap(NOTES),
        "",
        "rejected:",
        *(line for rejection in advice.rejections for line in render.wrap(f"  {rejection}", "    ")),
        *render.wrap(f"  {NOT_CONSIDERED}, max_num_seqs other than {sequences} (advise_max_num_seqs).", "    "),
    ]


def _list_chosen(advice: Advice) -> Iterator[tuple[str, Engine, EnginePlan]]:
    """Yield the chosen engines by name, each with the plan of its first replica: those of the others are equal."""
    planned = iter(advice.chosen.plan.engines)
    profile = advice.profiles[advice.wish.choose - 1]
    for name, engine in zip(advice.chosen.serving_engines, profile.engines, strict=True):
        (first, *_) = itertools.islice(planned, engine.replicas)
        yield name, engine, first


def _describe_replicas(engine: Engine) -> str:
    if engine.replicas == 1:
        return ""
    speed = engine.together
    said = f" ({speed.requests} requests at once: {speed.mid:.0f} tok/s together)" if speed else ""
    return f", {engine.replicas} replicas{said}, each"


def list_serve_lines(advice: Advice) -> list[str]:
    """Return a line of `vllm serve` for each engine of the chosen profile, not wrapped, so that it can be copied."""
    planned = iter(advice.chosen.plan.engines)
    found: list[str] = []
    for engine in advice.chosen.serving_engines.values():
        for each in list_replicas("engine", engine).values():
            serve = render.build_serve_command(advice.host.models[engine["model"]].facts.repo, each, next(planned))
            devices = ",".join(map(str, each["gpus"]))
            port = each.get("port", FIRST_PORT + len(found))
            names = shlex.join(["--served-model-name", *each["served_names"], "--port", str(port)])
            found.append(f"CUDA_VISIBLE_DEVICES={devices} {serve} {names}")
    return found


def pasted(chosen: Chosen) -> list[str]:
    """Return the chosen profile as YAML for group_vars; it is also a valid file for `-e @FILE`."""
    import yaml

    entries = {"serving_engines": chosen.serving_engines, "serving_profiles": chosen.serving_profiles}
    return [
        "# For group_vars/all/engines.yml and profiles.yml. The KV cache gets all but plan_margin_mib.",
        *yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, width=WIDTH).splitlines(),
    ]


NOTES = (
    "All speeds are estimates for one sequence of the main engine at short context, or together for eight requests of "
    "each of its roles: low, mid, high. x2: replicas. At once: requests of full context that the KV cache holds. (n): "
    "number of recommendations, printed for the chosen profile. kv=: not the type that the checkpoint states for its "
    "KV cache. Precision does not count: only an evaluation shows how bits that are saved change the answers. The "
    "table has the best of each choice of engines; other contexts and KV caches have the ranks between, and -e "
    "format=json has all."
)
NOT_CONSIDERED = (
    "not considered: two engines on one GPU, two engines of one model that differ, replicas of another engine than the "
    "main one, an engine over GPUs that are not alike, "
    f"tensor_parallel_size other than {', '.join(map(str, TENSOR_PARALLEL_SIZES))}, a smaller model as main "
    f"engine (advise_main), speculative decoding (`vllm-edge plan` counts it with --speculative-config)"
)
COLUMNS = (4, 31, 9, 17, 8, 7)
"""Widths of rank, engines, GPUs, tok/s, context and at once; the verdict gets the rest."""


def _render_table(advice: Advice) -> Iterator[str]:
    together = advice.wish.by is By.TOGETHER
    unit, digits = ("tok/s, together", 0) if together else ("tok/s, estimate", 1)
    yield _format_columns("rank", "engines, the main one first", "GPUs", unit, "context", "at once", "verdict")
    yield _format_columns("", "", "used/free", "low-  mid- high", "tokens", "", "(advice)")
    seen: set[Any] = set()
    for rank, profile in enumerate(advice.profiles, 1):
        if rank != advice.wish.choose and (profile.choice in seen or len(seen) >= ROWS):
            continue
        seen.add(profile.choice)
        row = _build_row(rank, profile, advice)
        speed = row["tok_s_together_estimate" if together else "tok_s_estimate"]
        label, *more = textwrap.wrap(profile.label, COLUMNS[1], subsequent_indent="  ", break_on_hyphens=False)
        yield _format_columns(
            f"{'>' if rank == advice.wish.choose else ''}{rank}",
            label,
            f"{row['gpus_used']}/{row['gpus_free']}",
            f"{speed['low']:.{digits}f}-{speed['mid']:5.{digits}f}-{speed['high']:5.{digits}f}"
            if speed
            else "not known",
            f"{row['context']:,}",
            f"{row['max_concurrency']:.1f}",
            f"{row['verdict']} ({len(row['advice'])})",
        )
        for line in more:
            yield _format_columns("", line).rstrip()
    kinds = {profile.choice for profile in advice.profiles}
    if len(kinds) > len(seen):
        yield f"      ... and {len(kinds) - len(seen)} more choices of engines (-e format=json)"


def _format_columns(*cells: str) -> str:
    parts = [cell.rjust(width) for cell, width in zip(cells, COLUMNS, strict=False)]
    parts[1] = cells[1].ljust(COLUMNS[1])
    return "  ".join([*parts, *cells[len(COLUMNS) :]])


def _build_row(rank: int, profile: Profile, advice: Advice) -> dict[str, Any]:
    main = profile.main
    return {
        "rank": rank,
        "engines": [
            {
                "model": engine.fit.model,
                "tensor_parallel_size": engine.fit.shape.tensor_parallel_size,
                "pipeline_parallel_size": engine.fit.shape.pipeline_parallel_size,
                "replicas": engine.replicas,
                "kv_cache_dtype": engine.fit.plan.kv_cache_dtype,
                "max_model_len": engine.max_model_len,
                "max_num_seqs": engine.fit.max_num_seqs,
                "max_concurrency": round(engine.at_once, 2),
                "served_names": list(engine.roles),
                "tok_s_estimate": _describe_speed(engine.fit.plan.decode_tok_s),
                "tok_s_together_estimate": _describe_speed(engine.fit.plan.decode_together_tok_s),
            }
            for engine in profile.engines
        ],
        "gpus_used": profile.gpus,
        "gpus_free": profile.free_gpus,
        "tok_s_estimate": _describe_speed(main.fit.plan.decode_tok_s),
        "tok_s_together_estimate": _describe_speed(main.together),
        "context": main.max_model_len,
        "max_concurrency": round(main.at_once, 2),
        "verdict": main.fit.plan.verdict.value,
        "advice": [text for engine in profile.engines for text in _collect_advice(engine, advice)],
    }


def _describe_speed(speed: Decode | DecodeTogether | None) -> dict[str, float] | None:
    return dataclasses.asdict(speed) if speed else None


def _collect_advice(engine: Engine, advice: Advice) -> list[str]:
    """Return the advice for an engine: the planner's, recomputed for its real context, and that of the choice."""
    plan = engine.fit.plan
    planned = advise_on_context(advice.wish.min_context_tokens, plan.max_concurrency)
    kept = [text for text in plan.advice if text not in planned]
    return [
        *kept,
        *advise_on_context(engine.max_model_len, engine.fit.at_once(engine.max_model_len)),
        *list_own_advice(engine.fit),
    ]


def _describe_figures(planned: EnginePlan) -> str:
    fast = ""
    if speed := planned.decode_tok_s:
        together = render.describe_together(planned)
        fast = f"{speed.mid:.1f} tok/s (estimate: {speed.low:.1f} to {speed.high:.1f}){together}, "
    return (
        f"{fast}{planned.max_concurrency:.1f} requests of full context at once, KV cache {planned.kv_cache_dtype}. "
        f"{planned.reason}"
    )
