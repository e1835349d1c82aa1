# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: what --speculative-config asks for, and the drafter that the engine then loads.

A method that is not in METHODS, and an option that changes memory in another way, is not counted: the plan says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..inventory.engine_arguments import Argument
from ..text import shown
from .checkpoint.families import interpret_drafting
from .checkpoint.headers import FactsError
from .contract import Arguments, Model, RankWeights, Speculation
from .decode import estimate_speculative
from .memory.vllm_versions import derive_limit

METHODS = frozenset({"mtp", "eagle", "eagle3", "draft_model", "ngram", "suffix"})
SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
"""Options since 0.22, and the keys that they set (engine/arg_utils.py, create_speculative_config)."""
NVFP4_MTP_SINCE = (0, 20)
"""0.19.0 takes mtp.fc for NVFP4 too, which ModelOpt leaves in BF16 (model_executor/models/qwen3_5_mtp.py,
vllm-project/vllm#38650)."""
TEXT_MTP_SINCE = (0, 28)
"""0.27 has the text model of Qwen3.5 alone, and MTP only of the whole one (config/speculative.py:516)."""
VERIFIED_BYTES_PER_LOGIT = 16
"""For each draft in the first model runner: logits and their selection (2 B each), the latter in fp32 twice, and
probabilities (4 B; 0.19.0 v1/sample/rejection_sampler.py:115-150)."""
_KEYS = frozenset(
    {
        *("method", "model", "revision", "code_revision", "num_speculative_tokens", "draft_tensor_parallel_size"),
        *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob"),
        *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "use_local_argmax_reduction"),
        "moe_backend",
    }
)
"""Keys that the plan counts, or that change no memory of a GPU; the suffix trees are in the host's memory, and
moe_backend is --moe-backend for the drafter's experts (0.19.0 v1/spec_decode/eagle.py:1220)."""


def read(arguments: Sequence[Argument]) -> Speculation | None:
    """Return what the options of an engine say of speculative decoding; None if they say nothing."""
    said: dict[str, Any] = {}
    for argument in arguments:
        name = argument.option.name if argument.option else argument.name
        value = argument.values[0] if argument.values else ""
        if name in SHORT or (name == "--speculative-config" and argument.dotted):
            said[SHORT.get(name) or argument.dotted[1:]] = value
        elif name == "--speculative-config" and value.strip().lower() not in ("", "none", "null"):
            try:
                said |= json.loads(value)
            except (ValueError, TypeError):
                return Speculation("", 0, uncounted="a text that is no JSON object")
    said = {key.replace("-", "_"): value for key, value in said.items() if value is not None}
    if said.get("draft_sample_method") == "greedy":  # the default (0.21.0 to 0.33.0 config/speculative.py)
        del said["draft_sample_method"]
    return _resolve(said) if said else None


def _resolve(said: Mapping[str, Any]) -> Speculation:
    draft = str(said.get("model", ""))
    method = _resolve_method(str(said.get("method", "")), draft.lower())
    tokens = str(said.get("num_speculative_tokens", 24 if method == "suffix" else ""))
    ranks = str(said.get("draft_tensor_parallel_size", "0"))
    uncounted = ""
    if method not in METHODS:
        uncounted = f"the method {shown(method)}; it counts {', '.join(sorted(METHODS))}"
    elif not draft and method in ("draft_model", "eagle", "eagle3"):
        # 0.19.0 config/speculative.py:397, 0.33.0 :1294
        uncounted = "drafts without a model and a method that needs none, such as mtp or ngram, which vLLM refuses"
    elif other := sorted(said.keys() - _KEYS):
        uncounted = f"{shown(other[0])} in it"
    elif not (tokens.isdecimal() and ranks.isdecimal() and int(tokens) and len(tokens + ranks) < 9):
        uncounted = f"num_speculative_tokens {shown(tokens)}, which should be a whole number, such as 2"
    if uncounted:
        return Speculation(method, 0, draft, uncounted=uncounted)
    return Speculation(method, int(tokens), "" if method in ("ngram", "suffix") else draft, int(ranks))


def _resolve_method(method: str, draft: str) -> str:
    """Return the method that vLLM takes (0.33.0 config/speculative.py:1220-1445; up to 0.21 the names of MTP have the
    family before them)."""
    if method == "mtp" or method.endswith("_mtp"):
        return "mtp"
    if "ngram" in (method.strip("[]"), draft.strip("[]")):
        return "ngram"
    named = next((kind for part, kind in (("eagle-", "eagle"), ("eagle3", "eagle3")) if part in draft), "draft_model")
    return method or named


def add_drafter(
    model: Model, arguments: Arguments, models: Mapping[str, Model], release: tuple[int, int]
) -> tuple[Model, Arguments]:
    """Return the model with what drafts tokens for it, and the arguments with why the plan does not count that.

    Args:
        models: of which a draft with a checkpoint of its own is one, by its repository or directory.
    """
    asked = arguments.speculation
    if asked is None or asked.uncounted:
        return model, arguments
    own = asked.draft in ("", model.facts.repo)
    draft = model if own else models.get(asked.draft)
    drafter, uncounted = None, ""
    if model.generic or not model.gated:
        uncounted = "a model that is planned by bounds" if model.generic else f"a {model.architecture}"
    elif asked.method in ("ngram", "suffix"):
        pass  # these draft without a model
    elif draft is None:
        records = "playbooks/record_facts.yml or vllm-edge facts records"
        uncounted = f"the draft {shown(asked.draft)} without facts, which {records}"
    elif asked.method == "mtp" or draft.drafting:
        asked = replace(asked, method="mtp")
        try:
            drafter = interpret_drafting(draft)
        except FactsError as error:
            uncounted = f"multi-token prediction here: {error}"
    elif own or draft.generic or (draft.family == "eagle3") is not asked.method.startswith("eagle"):
        uncounted = f"{asked.method} with the draft {shown(asked.draft)}, a {draft.architecture}"
    else:
        drafter = draft
    if drafter and not (uncounted := _find_obstacle(model, drafter, arguments, asked, release)):
        rope = drafter.rope_caches
        if _describe_rope(drafter) == _describe_rope(model):
            rope = ()
        elif asked.method.startswith("eagle"):
            # Since 0.27 as long as the engine's context (config/speculative.py,
            # _maybe_override_draft_max_position_embeddings).
            rope = tuple((size, max(rows, arguments.max_model_len or derive_limit(model))) for size, rows in rope)
        model = replace(model, drafter=replace(drafter, dtype=model.dtype, rope_caches=rope))
    asked = replace(asked, tokens=0, uncounted=uncounted) if uncounted else asked
    return model, replace(arguments, speculation=asked)


def _find_obstacle(
    model: Model, drafter: Model, arguments: Arguments, asked: Speculation, release: tuple[int, int]
) -> str:
    """Return why a drafter cannot be counted; empty if it can."""
    size, length = arguments.tensor_parallel_size, arguments.max_model_len or derive_limit(model)
    if arguments.pipeline_parallel_size > 1:
        return "a drafter in a pipeline"
    if release < NVFP4_MTP_SINCE and drafter.quantization.method == "modelopt_fp4":
        return f"layers for multi-token prediction in NVFP4, which vLLM {release[0]}.{release[1]} does not load"
    if release < TEXT_MTP_SINCE and asked.method == "mtp" and model.family[:7] == "qwen3_5" and not model.multimodal:
        return f"multi-token prediction of {model.architecture}, which vLLM {release[0]}.{release[1]} does not know"
    if asked.ranks not in (0, size):
        return f"draft_tensor_parallel_size {asked.ranks} beside tensor_parallel_size {size}"
    if drafter.query_heads % size:
        return f"a drafter of {drafter.query_heads} query heads over {size} GPUs"
    windowed = any(layer.window_tokens for layer in (*model.layers, *drafter.layers))
    if len(drafter.layers) > 1 and windowed:
        # "All drafting layers should belong to the same kv cache group" (0.19.0 v1/spec_decode/eagle.py).
        return "a drafter of several layers beside sliding attention"
    if (model.latent is None) is not (drafter.latent is None):
        return f"a {drafter.architecture} beside latent attention"
    if asked.method == "draft_model" and drafter.vocabulary != model.vocabulary:
        return f"a draft with vocab_size {drafter.vocabulary}, which vLLM refuses beside {model.vocabulary}"
    if asked.method == "draft_model" and derive_limit(drafter) < length:
        return f"a draft for {derive_limit(drafter):,} tokens beside max_model_len {length:,}"
    return ""


def _describe_rope(model: Model) -> tuple[Any, ...]:
    """Return what vLLM's RoPE caches depend on: models with the same share them (get_rope, _ROPE_DICT of
    model_executor/layers/rotary_embedding/__init__.py)."""
    config = model.facts.config
    for key in ("text_config", "transformer_layer_config"):
        config = {**config, **(config.get(key) or {})}
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return (*(config.get(key) for key in keys), model.rope_caches)


def advise(
    model: Model, arguments: Arguments, ranks: Sequence[RankWeights], bandwidth: float | None, unprofiled: int
) -> Iterator[str]:
    """Yield what drafts do to the speed of one sequence, and to memory after the start, if the plan counts them.

    Args:
        unprofiled: sequences whose drafts vLLM verifies at once without having made room for them.
    """
    asked, speed = arguments.speculation, ""
    if asked is None or asked.uncounted:
        return
    if bandwidth and ranks:
        low, high = estimate_speculative(model, arguments, ranks, bandwidth, asked.tokens)
        speed = f", here {low:.0f} to {high:.0f} tok/s"
    yield (
        f"speculative decoding ({asked.method}) yields 1 to {asked.tokens + 1} tokens in a step, depending on how many "
        f"drafts are accepted (vLLM v1/sample/rejection_sampler.py){speed}; the speed in this plan is without it: "
        f"measure yours"
    )
    if asked.method == "suffix":
        yield (
            "vLLM ends at its start without arctic-inference 0.1.1, which it does not bring (config/speculative.py, "
            "_validate_suffix_decoding): install that package"
        )
    if unprofiled and asked.tokens > 1:
        more = VERIFIED_BYTES_PER_LOGIT * (asked.tokens - 1) * unprofiled * model.vocabulary
        yield (
            f"vLLM's profile verifies one draft of each sequence, and max_num_seqs {unprofiled} with {asked.tokens} "
            f"each need up to {math.ceil(more / 2**20):,} MiB more at work: leave them free, or lower max_num_seqs"
        )
