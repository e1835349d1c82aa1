# SPDX-License-Identifier: Apache-2.0
"""Ranking of the checkpoints that the project knows, by what they would be used for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import parsers, render
from ..checkpoint import families, model_facts
from ..contract import Model, Verdict
from ..fixes import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES
from . import search
from .model import MIN_CONTEXT_TOKENS, AdviceError, By, Engine, Fit, Host, NothingFits, Profile, Shape, Wish

RELEASED: Mapping[int, str] = {
    2023: "mistralai/Mixtral-8x7B-Instruct-v0.1",
    2024: """
Qwen/Qwen2-57B-A14B-Instruct Qwen/Qwen2.5-0.5B-Instruct* Qwen/Qwen2.5-1.5B-Instruct* Qwen/Qwen2.5-3B-Instruct*
Qwen/Qwen2.5-7B-Instruct* Qwen/Qwen2.5-7B-Instruct-AWQ* Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 Qwen/Qwen2.5-14B-Instruct*
Qwen/Qwen2.5-32B-Instruct* deepseek-ai/DeepSeek-V2-Lite-Chat deepseek-ai/DeepSeek-V3 google/gemma-2-9b-it
llava-hf/llava-v1.6-mistral-7b-hf meta-llama/Llama-3.1-8B-Instruct* meta-llama/Meta-Llama-3-8B-Instruct*
microsoft/Phi-3-mini-4k-instruct* microsoft/phi-4* mistralai/Mistral-7B-Instruct-v0.3
""",
    2025: """
LGAI-EXAONE/EXAONE-4.0-1.2B LGAI-EXAONE/EXAONE-4.0-32B MiniMaxAI/MiniMax-M2 Qwen/Qwen2.5-VL-3B-Instruct
Qwen/Qwen2.5-VL-7B-Instruct* Qwen/Qwen3-4B* Qwen/Qwen3-8B* Qwen/Qwen3-14B-AWQ* Qwen/Qwen3-30B-A3B* Qwen/Qwen3-32B*
Qwen/Qwen3-32B-AWQ* Qwen/Qwen3-235B-A22B-FP8* Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3-Next-80B-A3B-Instruct-FP8
Qwen/Qwen3-VL-2B-Instruct* Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-8B-Instruct* Qwen/Qwen3-VL-30B-A3B-Instruct*
baidu/ERNIE-4.5-0.3B-PT deepseek-ai/DeepSeek-V3.2 google/gemma-3-27b-it* ibm-granite/granite-3.3-8b-instruct
meta-llama/Llama-4-Maverick-17B-128E-Instruct meta-llama/Llama-4-Scout-17B-16E-Instruct microsoft/Phi-4-mini-instruct
mistralai/Ministral-3-14B-Instruct-2512-BF16* mistralai/Mistral-Small-24B-Instruct-2501
mistralai/Mistral-Small-3.1-24B-Instruct-2503 moonshotai/Kimi-K2-Instruct
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16* openai/gpt-oss-20b* openai/gpt-oss-120b* zai-org/GLM-4-9B-0414
zai-org/GLM-4-32B-0414 zai-org/GLM-4.5 zai-org/GLM-4.5-Air
""",
    2026: """
Qwen/Qwen3.5-0.8B Qwen/Qwen3.5-4B* Qwen/Qwen3.5-9B* Qwen/Qwen3.6-27B* Qwen/Qwen3.6-27B-FP8* Qwen/Qwen3.6-35B-A3B*
RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic RedHatAI/gemma-4-31B-it-FP8-dynamic google/gemma-4-26B-A4B-it*
google/gemma-4-31B-it* google/gemma-4-31B-it-qat-w4a16-ct google/gemma-4-E2B-it* google/gemma-4-E4B-it*
nvidia/Gemma-4-26B-A4B-NVFP4* nvidia/Gemma-4-31B-IT-NVFP4* zai-org/GLM-4.7-Flash
""",
}
"""Checkpoints by the year of their release. *: a public log, or the reference host, agrees with the plan."""
TOOLS = "tools"
USES: Mapping[str, int] = {"chat": MIN_CONTEXT_TOKENS, TOOLS: 32768, "long context": 131072}
"""The least context in tokens that a request needs."""
MIN_TOK_S = 15.0
"""Of one request, unless --min-tok-s says otherwise: about twice as fast as people read."""
ROWS = 5
"""Of each table. The document has all."""


@dataclass(frozen=True)
class Known:
    model: Model
    year: int
    confirmed: bool

    @property
    def size(self) -> float:
        return search.parameters(self.model) / 2.0 ** (max(RELEASED) - self.year)

    @property
    def parsers(self) -> dict[str, str]:
        return parsers.find_parsers(self.model.architecture, self.model.facts.repo)


def load() -> dict[str, Known]:
    """Return the checkpoints of RELEASED by repository."""
    return {
        repo: Known(families.interpret(facts), year, word != repo)
        for year, words in RELEASED.items()
        for word in words.split()
        if (facts := model_facts.published(repo := word.rstrip("*")))
    }


def rank(asked: Wish, host: Host, by: By | None, gpus: Sequence[str]) -> dict[str, Any]:
    """Return as a document what fits and is fast enough by use, the best first: one checkpoint of those that differ
    only in precision.

    Args:
        by: what decides in place of size.
        gpus: options of `vllm-edge plan` that name the GPUs and the release.

    Raises:
        AdviceError: if the speed of the GPUs is needed and not known.
        NothingFits: if no checkpoint fits and is fast enough.
    """
    speed_known = host.gpus[0].bandwidth_bytes_per_s is not None
    if not speed_known and asked.min_tok_s:
        raise search.describe_unknown_bandwidth("--min-tok-s:", "leave it out", host)
    if not speed_known and by in (By.TOK_S, By.TOGETHER):
        raise search.describe_unknown_bandwidth(f"--by: {by.value!r}", "write 'context' or 'free_gpus'", host)
    least = min(asked.min_tok_s.values(), default=MIN_TOK_S if speed_known else 0.0)
    criteria = search.ORDERS[by or (By.TOK_S if speed_known else By.CONTEXT)]
    known = load()
    host = replace(host, models={repo: one.model for repo, one in known.items()})
    serving: dict[str, list[Profile]] = {}
    left_out: dict[str, str] = {}
    for repo in known:
        fits = list(_plan_layouts(repo, host, asked))
        fitting = [fit for fit in fits if fit.plan.verdict is Verdict.FITS]
        serving[repo] = [
            Profile((Engine(fit, fit.plan.max_model_len, ("main",)),), len(host.gpus) - fit.shape.gpus)
            for fit in fitting
            if fit.tok_s >= least
        ]
        if not fitting:
            left_out[repo] = f"not fitting: {fits[-1].plan.reason}"
        elif not serving[repo]:
            left_out[repo] = f"slower: {max(fit.tok_s for fit in fitting):.1f} tok/s"
    counts = Counter(reason.partition(":")[0] for reason in left_out.values())
    fit = f"{len(known) - len(left_out)} of {len(known)} known checkpoints fit on {host.describe_gpus()} with vLLM "
    fit += f"{host.vllm_version}, {asked.min_context_tokens:,} tokens of context and {least:g} tok/s or more"
    fit += "".join(f"; {kind}: {count}" for kind, count in counts.items())
    if len(left_out) == len(known):
        raise NothingFits(f"{fit}. A smaller --min-context or --min-tok-s may do.")

    def order(profile: Profile) -> tuple[Any, ...]:
        return tuple(value(profile) for value, _ in criteria)

    uses = {}
    for use, tokens in USES.items():
        tokens, best = max(tokens, asked.min_context_tokens), []
        for names in search.group_kinds(host.models):
            able = [one for repo in names for one in serving[repo] if one.main.max_model_len >= tokens]
            able = [one for one in able if use != TOOLS or known[one.main.fit.model].parsers.get("tool_call_parser")]
            best += sorted(able, key=order)[:1]
        best.sort(key=order if by else lambda one: -known[one.main.fit.model].size)
        rows = [_describe(one.main, known[one.main.fit.model], tokens, gpus) for one in best]
        uses[use] = {"min_context": tokens, "checkpoints": rows}
    return {"summary": fit, "vllm_version": host.vllm_version, "by": by or "size", "uses": uses, "left_out": left_out}


def _describe(engine: Engine, known: Known, tokens: int, gpus: Sequence[str]) -> dict[str, Any]:
    fit, speed = engine.fit, engine.fit.plan.decode_tok_s
    size, most, context = fit.shape.tensor_parallel_size, fit.max_num_seqs, engine.max_model_len
    given = {"tensor-parallel-size": size, "max-model-len": context, "max-num-seqs": most, "output": "vllm"}
    options = (word for key, value in given.items() for word in (f"--{key}", str(value)))
    return {
        "model": fit.model,
        "confirmed": known.confirmed,
        "released": known.year,
        "parameters": search.parameters(known.model),
        "tensor_parallel_size": size,
        "tok_s_estimate": asdict(speed) if speed else None,
        "context": context,
        "at_once": min(int(fit.at_once(tokens)), most),
        **dict.fromkeys(parsers.KEYS, ""),
        **known.parsers,
        "next": shlex.join(["vllm-edge", "plan", "--model", fit.model, *gpus, *options]),
    }


def _plan_layouts(repo: str, host: Host, asked: Wish) -> Iterator[Fit]:
    """Yield the checkpoint over each number of GPUs, with the KV cache that it states and the longest context."""
    for size in TENSOR_PARALLEL_SIZES:
        for sequences in asked.max_num_seqs if size <= len(host.gpus) else ():
            about = (repo, host.gpus[0], Shape(size), sequences)
            found = next(search.plan_fits(*about, asked, host))
            # What encoders take may grow with the context, so that it is planned again.
            for half in range(4) if found.plan.verdict is Verdict.FITS else ():
                tokens = (found.plan.max_context >> half) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
                wish = replace(asked, min_context_tokens=max(tokens, asked.min_context_tokens))
                longer = next(search.plan_fits(*about, wish, host))
                if longer.plan.verdict is Verdict.FITS:
                    found = longer
                    break
            yield found


NOTES = (
    "Ranked by {by}. Of checkpoints that differ only in precision there is one, the fastest unless --by says "
    "otherwise. tok/s: one request at short context, an estimate. At once: requests of the context in the title. "
    "Confirmed: a public log or a measurement agrees with what is planned of the memory of this checkpoint. No answers "
    "were compared: only an evaluation with your own questions shows which is best."
)
SIZE = f"the number of parameters, halved for each year that the model is older than {max(RELEASED)}"


def lines(found: Mapping[str, Any], choose: int) -> list[str]:
    """Return the document of `rank` as text with the next command for the chosen rank of each use. Raises AdviceError
    if none has that rank."""
    longest = max(len(use["checkpoints"]) for use in found["uses"].values())
    if choose > longest:
        raise AdviceError(f"--choose: {choose}, but the longest table has {longest} rows; write 1 to {longest}.")
    said = [*render.describe_release(found["vllm_version"]), *render.wrap(f"{found['summary']}.")]
    commands: dict[str, list[str]] = {}
    for use, table in found["uses"].items():
        title, rows = f"{use}: {table['min_context']:,} tokens or more", table["checkpoints"]
        said += ["", _format("", title, "GPUs", "tok/s", "context", "at once", "confirmed")]
        for number, row in enumerate(rows, 1):
            speed = f"{row['tok_s_estimate']['mid']:.1f}" if row["tok_s_estimate"] else "?"
            cells = (row["model"], row["tensor_parallel_size"], speed, f"{row['context']:,}", row["at_once"])
            if number == choose:
                commands.setdefault(row["next"], []).append(use)
            if number <= ROWS or number == choose:
                rank = f"{'>' if number == choose else ''}{number}"
                said.append(_format(rank, *map(str, cells), "yes" if row["confirmed"] else "no"))
        if len(rows) > ROWS or not rows:
            said.append(_format("", f"and {len(rows) - ROWS} more (--format json)" if rows else "none"))
    by = SIZE if found["by"] == "size" else found["by"]
    said += ["", *render.wrap(NOTES.format(by=by)), "", "next:"]
    return said + [f"{', '.join(uses)}: {line}" for line, uses in commands.items()]


def _format(*cells: str) -> str:
    widths = (4, 47, 4, 6, 9, 7, 9)
    parts = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
    parts[1] = cells[1].ljust(widths[1])
    return "  ".join(parts).rstrip()
