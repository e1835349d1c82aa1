# SPDX-License-Identifier: Apache-2.0
"""Comparison of an engine's answers with those of plain transformers, token by token: data and pure functions.

Tokens before the first difference have the same history on both sides, so the log probabilities at the first
difference can be compared. What comes after it cannot: each side continues its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..answers.checks import ROUNDING_NATS, measure_spread
from ..options import option
from ..system.records import RecordError, read_record
from ..text import shown

Finding = Literal["equal", "template", "quantization", "engine", "tie", "unknown"]
Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


@dataclass(frozen=True)
class Options:
    engine: str = option("", "engine to compare", "NAME")
    model: str = option("", "model of the reference (default: the engine's own)", "NAME|DIR")
    prompts: str = option("", "JSON list of {case, messages} (default: two short prompts)", "FILE")
    chat_template: str = option("", "chat template of the reference (default: the engine's)", "FILE")
    tokens: int = option(64, "most tokens of an answer", "N")
    timeout: float = option(600.0, "most time for a prompt", "SECONDS")
    device: str = option("auto", "auto: GPUs without an engine, else the CPU", choices=("auto", "cpu", "gpu"))
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """What one side made of a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """For each generated token, the log probabilities of the likeliest tokens by id."""
    finish: str
    """`stop`, `length`, or `time` if the time limit of the prompt ended it."""


@dataclass(frozen=True)
class Compared:
    case: str
    prompt_equal: bool
    first_difference: int | None
    """Number of the first token of the answer that differs, from 0; None if none differs or none was compared."""
    agreed: int
    compared: int
    """Number of tokens that were compared, with the one that differs."""
    finding: Finding
    text: str


@dataclass(frozen=True)
class ScriptAnswers:
    """Content of answers.json, which reference_script.py writes."""

    device: str
    dtype: str
    torch: str
    transformers: str
    load_seconds: float
    answers: tuple[Mapping[str, Any], ...]


def parse_script_answers(data: Any) -> tuple[ScriptAnswers, dict[str, Answer]]:
    """Return what the script wrote, and its answers by case. Raises ValueError."""
    document = read_record(ScriptAnswers, data)
    try:
        return document, {
            str(item["case"]): Answer(
                tuple(map(int, item["prompt_ids"])),
                tuple(map(int, item["token_ids"])),
                tuple({int(token): float(value) for token, value in top.items()} for top in item["logprobs"]),
                str(item["finish"]),
            )
            for item in document.answers
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"answers.json has another form ({type(error).__name__}: {error})") from error


def find_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _compare_prompts(case: str, reference: Answer, engine: Answer, decode: Decode) -> Compared | None:
    """Return the finding `template` if the rendered prompts differ, else None."""
    at = find_difference(reference.prompt_ids, engine.prompt_ids)
    if at is None:
        return None
    ours, theirs = (
        shown(decode(side.prompt_ids[at:])) if side.prompt_ids[at:] else "its end" for side in (engine, reference)
    )
    text = (
        f"Prompt {case}: the chat template differs: the engine renders {len(engine.prompt_ids)} tokens and "
        f"transformers {len(reference.prompt_ids)}; from token {at + 1} on the engine has {ours} and transformers has "
        f"{theirs}."
    )
    return Compared(case, False, None, 0, 0, "template", text)


def _describe_rating(name: str, side: Answer, at: int, tokens: Sequence[int], decode: Decode) -> str:
    top = side.logprobs[at] if at < len(side.logprobs) else {}
    rated = (
        f"{shown(decode([token]))} {format(top[token], '.2f') if token in top else 'not among its likeliest'}"
        for token in tokens
    )
    return f"{name} rates {' and '.join(rated)}"


def compare(case: str, reference: Answer, engine: Answer, *, quantized: str, decode: Decode) -> Compared:
    """Compare both answers to one prompt, up to the first difference.

    A difference between tokens that both sides rate within ROUNDING_NATS of each other is rounding.

    Args:
        quantized: what is quantized in the engine and not in the reference, in words; empty if nothing is
        decode: the engine's tokenizer
    """
    if different := _compare_prompts(case, reference, engine, decode):
        return different
    at = find_difference(reference.token_ids, engine.token_ids)
    late = reference.finish == "time"
    if at is None or (late and at == len(reference.token_ids)):
        agreed = len(reference.token_ids)
        short = f" that transformers computed within the time limit of a prompt, where {len(engine.token_ids)} were due"
        finding: Finding = "equal" if agreed else "unknown"
        text = f"Prompt {case}: all {agreed} tokens{short if late else ''} are equal."
        if not agreed:
            text = f"Prompt {case}: transformers computed no token within the time limit, so nothing was compared."
        return Compared(case, True, None, agreed, agreed, finding, text)
    pair = [side.token_ids[at] for side in (engine, reference) if at < len(side.token_ids)]
    where = f"Prompt {case}: {at} tokens are equal, then "
    if len(pair) < 2:
        shorter = "the engine" if at >= len(engine.token_ids) else "transformers"
        what = f"{shorter} ends its answer and the other goes on with {shown(decode(pair))}"
    else:
        what = f"the engine has {shown(decode(pair[:1]))} and transformers has {shown(decode(pair[1:]))}"
    ratings = ", ".join(
        _describe_rating(name, side, at, pair, decode)
        for name, side in (("the engine", engine), ("transformers", reference))
        if at < len(side.logprobs)
    )
    gaps = [measure_spread(side.logprobs, at, pair) for side in (engine, reference)]
    if len(pair) == 2 and all(gap is not None and gap <= ROUNDING_NATS for gap in gaps):
        finding, why = "tie", "which rounding explains; what follows was not compared"
    elif quantized:
        finding, why = "quantization", f"which rounding does not explain: the engine has {quantized}"
    else:
        finding = "engine"
        why = "which rounding does not explain: with the same weights and the same prompt, the engine differs"
    text = f"{where}{what} as token {at + 1}; {ratings} (log probabilities), {why}."
    return Compared(case, True, at, at, at + 1, finding, text)


def choose_status(compared: Sequence[Compared]) -> int:
    """Return the exit status: 1 if a prompt has a finding, 2 if nothing can be said of one, else 0."""
    findings = {item.finding for item in compared}
    if findings & {"template", "quantization", "engine"}:
        return 1
    return 2 if "unknown" in findings or not findings else 0


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory on this host."""

    name: str
    path: str
    weights_mib: int
    config: Mapping[str, Any]
    quantization: str
    """Method of `quantization_config`, or that of hf_quant_config.json; empty if it is not quantized."""


def describe_quantized(same_checkpoint: bool, precision: str, kv_cache_dtype: str) -> str:
    """Return what is quantized in an engine and not in its reference, in words; a reference with other weights than
    the engine's has unquantized ones."""
    parts = [] if same_checkpoint else [f"weights in {precision} where the reference is not quantized"]
    if kv_cache_dtype not in ("", "auto", "bfloat16", "float16"):
        parts.append(f"a KV cache in {kv_cache_dtype}")
    return " and ".join(parts)


SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys that a quantized checkpoint has in common with its base."""


def read_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config", config)
    return {key: inner.get(key) for key in SHAPE}


def find_quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> str:
    """Return the method by which a checkpoint is quantized; empty if it is not."""
    declared = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if declared:
        return " ".join(str(declared[key]) for key in ("quant_method", "quant_algo") if declared.get(key)) or "unknown"
    algorithm = (modelopt or {}).get("quantization", {}).get("quant_algo")
    return f"modelopt {algorithm}" if algorithm else ""


def find_refusal(reference: Checkpoint, engine: Checkpoint, known: Sequence[Checkpoint]) -> str | None:
    """Return why a checkpoint cannot be the reference of an engine, and what to take instead; None if it can."""
    ours, theirs = read_shape(engine.config), read_shape(reference.config)
    others = [
        f"{item.name} ({item.weights_mib:,} MiB)"
        for item in known
        if not item.quantization and read_shape(item.config) == ours and item.path != reference.path
    ]
    instead = (
        f"Unquantized models of the same base on this host: {', '.join(others)}."
        if others
        else "No unquantized model of the same base is on this host; add it to a profile and run "
        "`ansible-playbook playbooks/weights.yml -e serving_profile=<profile>`."
    )
    if reference.quantization:
        no_loader = "transformers has no loader for checkpoints of NVIDIA's ModelOpt"
        other = "a reference needs unquantized weights, since each loader of quantized ones has kernels of its own"
        why = no_loader if reference.quantization.startswith("modelopt") else other
        return f"{reference.name} at {reference.path} is quantized ({reference.quantization}): {why}. {instead}"
    if different := [
        f"{key} is {theirs[key]} where the engine's is {ours[key]}" for key in SHAPE if theirs[key] != ours[key]
    ]:
        differs = "; ".join(different)
        return f"{reference.name} is no model of the same base as the engine's {engine.name}: {differs}. {instead}"
    return None


@dataclass(frozen=True)
class Place:
    device: Literal["cpu", "gpu", "either"]
    """`either`: on the GPUs, or on the CPU if PyTorch of the image has no CUDA."""
    gpus: tuple[str, ...]
    memory_mib: int
    """Limit of the container's host memory."""


BESIDES_MIB = 4096
"""Host memory besides the weights: PyTorch and transformers take about 1 GiB, KV cache and intermediate results of one
prompt less than 1 GiB, and loading needs room for one file's tensors; our choice."""
GPU_BESIDES_MIB = 2048
"""GPU memory besides the weights, on each GPU: CUDA context, KV cache and logits of one prompt; our choice."""


def choose_place(wanted: str, weights_mib: int, ram_mib: int, gpus: Mapping[str, int]) -> Place | str:
    """Return where the reference is computed, or a sentence why it cannot be.

    Args:
        wanted: `auto`, `cpu` or `gpu`
        ram_mib: host memory that is available
        gpus: MiB that are free on each GPU without an engine, by UUID
    """
    needs_mib = weights_mib + BESIDES_MIB
    usable = {uuid: mib - GPU_BESIDES_MIB for uuid, mib in gpus.items() if mib > GPU_BESIDES_MIB}
    chosen: list[str] = []
    left_mib = weights_mib
    for uuid in sorted(usable, key=lambda uuid: -usable[uuid]):
        if left_mib > 0:
            chosen.append(uuid)
            left_mib -= usable[uuid]
    fits_ram = ram_mib >= needs_mib
    if wanted != "cpu" and chosen and left_mib <= 0:
        either = fits_ram and wanted == "auto"
        return Place("either" if either else "gpu", tuple(chosen), needs_mib if either else BESIDES_MIB * 2)
    if wanted != "gpu" and fits_ram:
        return Place("cpu", (), needs_mib)
    parts = [
        f"the CPU needs {needs_mib:,} MiB of host memory ({weights_mib:,} MiB of weights and {BESIDES_MIB:,} MiB "
        f"besides), and {ram_mib:,} MiB are available",
        f"GPUs without an engine: {len(gpus)}, with {sum(usable.values()):,} MiB for weights"
        if gpus
        else "every GPU has an engine",
    ]
    shown = {"cpu": parts[:1], "gpu": parts[1:]}.get(wanted, parts)
    return f"There is too little memory for the reference of {weights_mib:,} MiB: {'; '.join(shown)}."
