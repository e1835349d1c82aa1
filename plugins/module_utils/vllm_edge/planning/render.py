# SPDX-License-Identifier: Apache-2.0
"""A plan as text of at most 100 columns without colour, and as data for programs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..engine.config import list_passed
from ..text import WIDTH, table
from .checkpoint.inferred import is_approximate
from .checkpoint.model_facts import ranges
from .contract import EnginePlan, Fix, GpuPlan, Plan, Verdict
from .memory.overhead import FREE_UNCERTAINTIES, MIB
from .memory.vllm_versions import describe_fallback
from .planner import AT_ONCE_TOKENS, takes_text_only

BAR_WIDTH = 34

HEADINGS = ("weights", "activ.", "warm-up", "context", "graphs", "KV", "free")


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return found | {"verdict": plan.verdict.value}


NOTE = (
    "All but KV MiB is of the first engine: tok/s is an estimate for one sequence at short context; at once are "
    "requests of the full context, of 8,192 and of 32,768 tokens. KV MiB is the smallest KV cache on a GPU."
)
SHOWN_COSTS, SUGGESTED = 3, 3 * WIDTH - 40
"""Beside a refusal: so many changes with their costs, and as many as these characters hold, which are three lines."""


def overview(plans: Mapping[str, Plan | None], why: Mapping[str, Sequence[str]], note: str = NOTE) -> list[str]:
    """Return a table with one line for each profile, why some do not start, and warnings; None is one that cannot be
    planned."""
    rows = [[name, *(_summarize(plan) if plan else ("cannot be planned", *["-"] * 6))] for name, plan in plans.items()]
    heads = ["profile", "verdict", "tok/s", "context", "at once", "of 8k", "of 32k", "KV MiB"]
    lines = [*table(heads, rows, frozenset(range(2, 8))), ""]
    lines += [line for name, said in why.items() for text in said for line in wrap(f"{name}: {text}", "  ")]
    for name, plan in plans.items():
        lines += [line for text in (plan.memory_warnings if plan else ()) for line in wrap(f"{name}: {text}", "  ")]
    return [*lines, *wrap(note)]


def _summarize(plan: Plan) -> tuple[str, ...]:
    """Return verdict, tok/s, context, requests at once and KV cache in MiB; only what fits has more than a verdict."""
    if plan.verdict is not Verdict.FITS or not plan.engines:
        return plan.verdict.value, *["-"] * 6
    first = plan.engines[0]
    speed = f"{first.decode_tok_s.mid:.1f}" if first.decode_tok_s else "not known"
    about = ", approximate" if any(is_approximate(engine.facts_source) for engine in plan.engines) else ""
    at_once = (f"{first.at_once[tokens]:.1f}" if tokens in first.at_once else "-" for tokens in AT_ONCE_TOKENS)
    least = min(gpu.kv_cache_bytes // MIB for engine in plan.engines for gpu in engine.gpus)
    figures = (f"{first.max_model_len:,}", f"{first.max_concurrency:.1f}", *at_once, f"{least:,}")
    return f"{plan.verdict.value}{about}", speed, *figures


def spell_keys(fix: Fix) -> str:
    """Return a change as keys of serving_engines."""
    return fix.change


Spell = Callable[[Fix], str]


def lines(plan: Plan, spell: Spell = spell_keys) -> list[str]:
    result = describe_release(plan.vllm_version)
    result += [f"profile {plan.profile}, vLLM {plan.vllm_version}: {plan.verdict.value}"]
    for engine in plan.engines:
        result += ["", *_engine(engine, spell)]
    budgets = ", ".join(f"GPU {slot} {mib:,}" for slot, mib in sorted(plan.budgets_mib.items()))
    warnings = [line for sentence in plan.memory_warnings for line in _wrapped("warning: ", sentence)]
    return [*result, "", *_wrapped("budgets, MiB: ", budgets), *warnings]


def describe_release(version: str) -> list[str]:
    """Return the first lines of every output about a release of vLLM that was not examined."""
    return wrap(describe_fallback(version))


def legend() -> list[str]:
    return _wrapped(
        "",
        "W weights, A activations, S sampler's warm-up, C CUDA context, G CUDA graphs, K KV cache, . free, | end of "
        "GPU; figures are MiB per GPU; tok/s are estimates, for one sequence at short context unless they say "
        "otherwise.",
    )


def refusals(plan: Plan, spell: Spell = spell_keys) -> list[str]:
    """Return for each engine that does not start why, and changes with which it would, as `spell` writes them."""
    return [
        f"{engine.engine}: {engine.verdict.value}. {engine.reason}{_suggest(engine.fixes, spell)}"
        for engine in plan.engines
        if engine.verdict is not Verdict.FITS
    ]


def _suggest(fixes: Sequence[Fix], spell: Spell) -> str:
    said = ""
    for number, fix in enumerate(fixes):
        costs = f" ({describe_costs(fix)})" if fix.settings and number < SHOWN_COSTS else ""
        if said and len(said) + len(spell(fix) + costs) > SUGGESTED:
            return f"{said}; {len(fixes) - number} more with details."
        said += f"{'; or' if said else ' Set'} {spell(fix)}{costs}"
    return f"{said}." if said else ""


def describe_costs(fix: Fix) -> str:
    return ", ".join(fix.costs) or "nothing is lost"


def spell_options(fix: Fix) -> str:
    """Return a change as options of `vllm serve`."""
    return " ".join(_list_options(fix.settings)) or fix.change


def build_serve_command(repo: str, engine: Mapping[str, Any], plan: EnginePlan) -> str:
    """Return the `vllm serve` line of an engine that was planned, with what the plan adds to it."""
    variables = [f"{name}={shlex.quote(str(value))} " for name, value in (engine.get("extra_env") or {}).items()]
    return "".join(variables) + shlex.join(["vllm", "serve", repo, *_list_options({**engine, **plan.settings})])


def _list_options(settings: Mapping[str, Any]) -> list[str]:
    text_only = takes_text_only(settings.get("limit_mm_per_prompt"))
    passed = {key: value for key, value in settings.items() if not text_only or key != "limit_mm_per_prompt"}
    given = [str(word) for word in settings.get("extra_args") or ()]
    return [*(word for _, word in list_passed(passed)), *(["--language-model-only"] if text_only else []), *given]


def bar(parts: Mapping[str, int], capacity_bytes: int, width: int = BAR_WIDTH) -> str:
    """Return a bar of letters to scale, from bytes by letter.

    Each part is as long as its share of the GPU, or of all that is needed if that is more. A part that is not 0 has at
    least one cell. If the bar is too full, `|` marks the end of the GPU.
    """
    needed = sum(parts.values())
    whole = max(capacity_bytes, needed)
    sizes = {letter: size for letter, size in {**parts, ".": whole - needed}.items() if size > 0}
    cells = {letter: max(1, size * width // whole) for letter, size in sizes.items()}
    # Cells that are left by rounding go to the parts that lost most; if there are too many, the longest parts lose
    # some.
    by_loss = sorted(sizes, key=lambda letter: -(sizes[letter] * width % whole))
    for letter in by_loss[: max(width - sum(cells.values()), 0)]:
        cells[letter] += 1
    while sum(cells.values()) > width:
        cells[max(cells, key=lambda letter: cells[letter])] -= 1
    text = "".join(letter * count for letter, count in cells.items())
    if needed > capacity_bytes:
        end = capacity_bytes * width // whole
        text = text[:end] + "|" + text[end + 1 :]
    return text


def _engine(engine: EnginePlan, spell: Spell) -> Iterator[str]:
    for head, text in _describe(engine, spell):
        yield from _wrapped(head, text)
    if engine.gpus:
        yield "  GPU " + " " * (BAR_WIDTH + 3) + "".join(f"{heading:>8}" for heading in HEADINGS)
        alike: dict[str, list[int]] = {}
        for gpu in engine.gpus:
            alike.setdefault(_render_gpu(gpu), []).append(gpu.slot)
        for line, slots in alike.items():
            yield f"  {ranges(slots):>3} {line}"


def _describe(engine: EnginePlan, spell: Spell) -> Iterator[tuple[str, str]]:
    """Yield the head and the text of each paragraph about an engine."""
    yield f"{engine.engine}  {engine.verdict.value}: ", engine.reason
    for fix in engine.fixes:
        speed = f", {fix.decode_tok_s:.1f} tok/s" if fix.decode_tok_s else ""
        then = f"{fix.max_concurrency:.1f} requests of {fix.max_model_len:,} tokens at once{speed}"
        yield "  fix: ", f"set {spell(fix)}{f'; cost: {describe_costs(fix)}; {then}' if fix.settings else ''}"
    for origin, arguments in engine.inherited.items():
        said = [f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items()]
        yield "  arguments: ", f"{', '.join(said)}, from {origin}"
    if engine.kv_blocks:
        shorter = "".join(f", {count:.1f} of {tokens:,}" for tokens, count in engine.at_once.items())
        alone = f"; max_model_len could be up to {engine.max_context:,}, for one request at once"
        yield (
            "  context: ",
            f"max_model_len {engine.max_model_len:,} tokens, {engine.max_concurrency:.2f} requests of that length at "
            f"once{shorter}{alone if engine.max_context > engine.max_model_len else ''}",
        )
        yield (
            "  KV cache: ",
            f"{engine.kv_cache_dtype}, {engine.kv_blocks:,} blocks; vLLM's log counts them as "
            f"{engine.kv_cache_tokens:,} tokens",
        )
    for name, size in engine.free_uncertainty_mib.items():
        of = "what is free" if engine.pinned else "the KV cache"
        yield "  uncertain: ", f"up to {size:,} MiB less of {of} per GPU {FREE_UNCERTAINTIES[name][1]}"
    if engine.verdict is Verdict.FITS:
        yield from _describe_speed(engine)
    if pinned := engine.derived_kv_cache_memory_bytes:
        leaves = "leaves" if "kv_cache_memory_bytes" in engine.settings else "would leave"
        yield "  pinned: ", f"kv_cache_memory_bytes: {pinned} ({pinned // MIB:,} MiB) {leaves} plan_margin_mib free"
    if engine.observed:
        yield "  observed: ", f"{', '.join(engine.observed)} (plan_observations)"
    for sentence in engine.advice:
        yield "  advice: ", sentence


def _describe_speed(engine: EnginePlan) -> Iterator[tuple[str, str]]:
    if speed := engine.decode_tok_s:
        yield (
            "  speed: ",
            f"{speed.mid:.1f} tok/s (estimate: {speed.low:.1f} to {speed.high:.1f}, ceiling {speed.ceiling:.1f})"
            f"{describe_together(engine)}",
        )
    if load := engine.load_s:
        yield (
            "  load: ",
            f"{load.low:.0f} to {load.high:.0f} s, probably {load.mid:.0f}, to read {load.read_bytes / 1e9:.1f} GB and "
            f"start (estimate; the disk's read rate is not known)",
        )


def describe_together(engine: EnginePlan) -> str:
    several = engine.decode_together_tok_s
    if several is None:
        return ""
    return (
        f"; {several.requests} requests at once: {several.mid:.0f} tok/s together, "
        f"{several.mid / several.requests:.1f} each (estimate: {several.low:.0f} to {several.high:.0f} together)"
    )


def _render_gpu(gpu: GpuPlan) -> str:
    parts = {
        "W": gpu.weights_bytes,
        "A": gpu.overhead_bytes - gpu.warm_up_bytes,  # the warm-up is part of the activations' peak
        "S": gpu.warm_up_bytes,
        "C": gpu.context_bytes,
        "G": gpu.graphs_bytes,
        "K": gpu.kv_cache_bytes,
    }
    cells = bar(parts, gpu.total_bytes + gpu.free_bytes)
    figures = [*(round(size / MIB) for size in parts.values()), gpu.free_bytes // MIB]
    return f"[{cells}] " + "".join(f"{figure:>8,}" for figure in figures)


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * (len(head) if len(head) < 20 else 4)
    return wrap(head + text, indent)


def wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
