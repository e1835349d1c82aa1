# SPDX-License-Identifier: Apache-2.0
"""Ranking of the checkpoints that the project knows, by what they would be used for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import render
from ..checkpoint import families, model_facts
from ..contract import Model, Verdict
from ..decode import TOGETHER_REQUESTS
from ..fixes import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES
from ..parsers import find_parsers
from . import search
from .model import MIN_CONTEXT_TOKENS, AdviceError, By, Fit, Host, NothingFits, Shape, Wish

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
        """What it is ranked by: its parameters, halved for each year between its release and that of the newest."""
        return search.parameters(self.model) / 2 ** (max(RELEASED) - self.year)


@dataclass(frozen=True)
class Row:
    known: Known
    fit: Fit

    @property
    def context(self) -> int:
        """The longest that fits."""
        return self.fit.plan.max_model_len

    @property
    def parsers(self) -> tuple[str, str]:
        return find_parsers(self.known.model.architecture, self.fit.model)

    @property
    def together_tok_s(self) -> float:
        speed = self.fit.together(TOGETHER_REQUESTS)
        return speed.mid if speed else self.fit.tok_s

    def at_once(self, tokens: int) -> int:
        return min(int(self.fit.at_once(tokens)), self.fit.max_num_seqs)


ORDERS: Mapping[By, Callable[[Row], float]] = {
    By.TOK_S: lambda row: -row.fit.tok_s,
    By.CONTEXT: lambda row: -row.context,
    By.FREE_GPUS: lambda row: row.fit.shape.gpus,
    By.TOGETHER: lambda row: -row.together_tok_s,
}


@dataclass(frozen=True)
class Table:
    """The best checkpoint of each model that serves for a use, best first."""

    use: str
    tokens: int
    """The least context."""
    rows: Sequence[Row]


@dataclass(frozen=True)
class Ranking:
    host: Host
    by: By | None
    """What decides in place of size."""
    min_tok_s: float
    tables: Sequence[Table]
    left_out: Mapping[str, tuple[str, str]]
    """By repository a kind of reason, and the reason."""


def load() -> dict[str, Known]:
    """Return the checkpoints of RELEASED by repository."""
    return {
        repo: Known(families.interpret(facts), year, word != repo)
        for year, words in RELEASED.items()
        for word in words.split()
        if (facts := model_facts.published(repo := word.rstrip("*")))
    }


def rank(asked: Wish, host: Host, by: By | None) -> Ranking:
    """Rank the checkpoints that fit and are fast enough.

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
    known = load()
    host = replace(host, models={repo: one.model for repo, one in known.items()})
    rows: dict[str, list[Row]] = {}
    left_out: dict[str, tuple[str, str]] = {}
    for repo, one in known.items():
        fits = list(_plan_layouts(repo, host, asked))
        fitting = [Row(one, fit) for fit in fits if fit.plan.verdict is Verdict.FITS]
        rows[repo] = [row for row in fitting if row.fit.tok_s >= least]
        if not fitting:
            left_out[repo] = "not fitting", fits[-1].plan.reason
        elif not rows[repo]:
            left_out[repo] = "slower", f"{max(row.fit.tok_s for row in fitting):.1f} tok/s"
    tables = []
    for use, tokens in USES.items():
        tokens = max(tokens, asked.min_context_tokens)
        best = []
        for names in search.group_kinds(host.models):
            able = [row for repo in names for row in rows[repo] if row.context >= tokens]
            able = [row for row in able if use != TOOLS or row.parsers[0]]
            order = ORDERS[by or By.TOK_S] if speed_known else ORDERS[By.CONTEXT]
            best += sorted(able, key=lambda row: (order(row), row.fit.shape.gpus))[:1]
        best.sort(key=lambda row: (ORDERS[by](row) if by else 0, -row.known.size))
        tables.append(Table(use, tokens, best))
    if not any(table.rows for table in tables):
        raise NothingFits(
            f"None of the {len(known)} known checkpoints fits on {host.describe_gpus()} with vLLM {host.vllm_version}, "
            f"{asked.min_context_tokens:,} tokens of context and {least:g} tok/s "
            f"({_count_left_out(left_out)}). A smaller --min-context or --min-tok-s may do."
        )
    return Ranking(host, by, least, tables, left_out)


def _plan_layouts(repo: str, host: Host, asked: Wish) -> Iterator[Fit]:
    """Yield the checkpoint over each number of GPUs, with the KV cache that it states and the longest context."""
    for size in TENSOR_PARALLEL_SIZES:
        for sequences in asked.max_num_seqs if size <= len(host.gpus) else ():
            about = (repo, host.gpus[0], Shape(size), sequences)
            found = next(search.plan_fits(*about, asked, host))
            longest = found.plan.max_context // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
            # What encoders take may grow with the context, so that it is planned again.
            for tokens in (longest, *sorted(USES.values(), reverse=True)):
                if found.plan.verdict is Verdict.FITS and asked.min_context_tokens < tokens <= longest:
                    longer = next(search.plan_fits(*about, replace(asked, min_context_tokens=tokens), host))
                    if longer.plan.verdict is Verdict.FITS:
                        found = longer
                        break
            yield found


def _count_left_out(left_out: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in Counter(kind for kind, _ in left_out.values()).items())


def build_command(row: Row, gpus: Sequence[str]) -> str:
    """Return the line of `vllm-edge plan` for a row; `gpus` are the options that name the GPUs and the release."""
    size, sequences = str(row.fit.shape.tensor_parallel_size), str(row.fit.max_num_seqs)
    engine = ("--tensor-parallel-size", size, "--max-model-len", str(row.context), "--max-num-seqs", sequences)
    return shlex.join(["vllm-edge", "plan", "--model", row.fit.model, *gpus, *engine, "--output", "vllm"])


def document(ranking: Ranking, gpus: Sequence[str]) -> dict[str, Any]:
    return {
        "gpus": ranking.host.describe_gpus(),
        "vllm_version": ranking.host.vllm_version,
        "by": ranking.by.value if ranking.by else "size",
        "min_tok_s": ranking.min_tok_s,
        "uses": {
            table.use: {
                "min_context": table.tokens,
                "checkpoints": [
                    {
                        "model": row.fit.model,
                        "confirmed": row.known.confirmed,
                        "released": row.known.year,
                        "parameters": search.parameters(row.known.model),
                        "tensor_parallel_size": row.fit.shape.tensor_parallel_size,
                        "tok_s_estimate": row.fit.plan.decode_tok_s and asdict(row.fit.plan.decode_tok_s),
                        "context": row.context,
                        "at_once": row.at_once(table.tokens),
                        "tool_call_parser": row.parsers[0],
                        "reasoning_parser": row.parsers[1],
                        "next": build_command(row, gpus),
                    }
                    for row in table.rows
                ],
            }
            for table in ranking.tables
        },
        "left_out": {repo: f"{kind}: {reason}" for repo, (kind, reason) in ranking.left_out.items()},
    }


NOTES = (
    "Ranked by {by}. Of checkpoints that differ only in precision there is {best}. tok/s: one request at short "
    "context, an estimate. At once: requests of the context in the title. Confirmed: a public log or a measurement "
    "agrees with the plan of this checkpoint, not with the estimated speed. No answer was compared: only an evaluation "
    "with your own questions shows which one is best."
)
SIZE = f"the number of parameters, halved for each year that the model is older than {max(RELEASED)}"


def lines(ranking: Ranking, gpus: Sequence[str], choose: int) -> list[str]:
    """Return the tables as text, and the next command for the chosen rank of each. Raises AdviceError if none has it.

    Args:
        gpus: as in `build_command`.
    """
    longest = max(len(table.rows) for table in ranking.tables)
    if choose > longest:
        raise AdviceError(f"--choose: {choose}, but the longest table has {longest} rows; write 1 to {longest}.")
    host, fast = ranking.host, f" with {ranking.min_tok_s:g} tok/s or more" if ranking.min_tok_s else ""
    said = [
        *render.describe_release(host.vllm_version),
        *render.wrap(
            f"{host.describe_gpus()}, vLLM {host.vllm_version}: {len(host.models) - len(ranking.left_out)} of "
            f"{len(host.models)} known checkpoints fit{fast} ({_count_left_out(ranking.left_out) or 'all'})."
        ),
    ]
    for table in ranking.tables:
        title = f"{table.use}: {table.tokens:,} tokens or more"
        said += ["", _format("", title, "GPUs", "tok/s", "context", "at once", "confirmed")]
        said += [
            _format(
                f"{'>' if number == choose else ''}{number}",
                row.fit.model,
                str(row.fit.shape.gpus),
                f"{row.fit.tok_s:.1f}" if row.fit.tok_s else "?",
                f"{row.context:,}",
                str(row.at_once(table.tokens)),
                "yes" if row.known.confirmed else "no",
            )
            for number, row in enumerate(table.rows, 1)
            if number <= ROWS or number == choose
        ]
        if not table.rows:
            said.append(_format("", "none"))
        elif len(table.rows) > ROWS:
            said.append(_format("", f"and {len(table.rows) - ROWS} more (--format json)"))
    best = "the first of that" if ranking.by else "the fastest" if host.gpus[0].bandwidth_bytes_per_s else "one of them"
    by = ranking.by.value if ranking.by else SIZE
    said += ["", *render.wrap(NOTES.format(by=by, best=best)), "", "next:"]
    commands: dict[str, list[str]] = {}
    for table in ranking.tables:
        for row in table.rows[choose - 1 : choose]:
            commands.setdefault(build_command(row, gpus), []).append(table.use)
    return said + [f"{', '.join(uses)}: {line}" for line, uses in commands.items()]


def _format(*cells: str) -> str:
    widths = (4, 47, 4, 6, 9, 7, 9)
    parts = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
    parts[1] = cells[1].ljust(widths[1])
    return "  ".join(parts).rstrip()
