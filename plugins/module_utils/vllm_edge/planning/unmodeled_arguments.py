# SPDX-License-Identifier: Apache-2.0
"""Arguments of an engine that change its memory and that the plan does not count.

The plan never says `fits` about such an engine. It says `cannot_say`, with the argument, unless what the argument
changes was measured (plan_observations, playbooks/calibrate.yml). Names are those of vLLM 0.32.0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ..inventory.engine_arguments import Argument, parse_arguments
from ..text import printable, shown
from .checkpoint.headers import MODULES
from .contract import Arguments, Model, Verdict
from .feasibility import Engine
from .memory.kv_cache import supports_flashinfer
from .outcome import Outcome, compute_encoder_bytes, compute_outcome, mib, to_sentence
from .speculation import SHORT


class Effect(StrEnum):
    MORE = "needs more memory"
    OTHER = "needs more or less memory"
    MODEL = "makes another model of the checkpoint"


@dataclass(frozen=True)
class Unmodeled:
    effect: Effect
    what: str
    measured: frozenset[str] = frozenset()
    """The observations that contain it; empty if it changes the KV cache too."""
    key: str = "extra_args"
    text: str = ""
    """As the operator wrote it, shortened."""
    fix: str = ""
    """Empty if leaving it out is the fix."""
    loads: bool = False
    """Whether the weights may become less."""


_LOADED = frozenset({"weights_bytes", "overhead_bytes"})
_GRAPHS = frozenset({"graphs_bytes"})
_CONNECTOR = Unmodeled(Effect.MORE, "buffers of the connector, which may also lay out the KV cache in another way")
_CONFIG = Unmodeled(Effect.MODEL, "values of config.json", loads=True)
TASK = Unmodeled(Effect.MODEL, "the task, so that there may be no KV cache")

_ARGUMENTS: Mapping[str, Unmodeled] = {
    **dict.fromkeys(
        ("--enable-lora", "--enable-tower-connector-lora"),
        Unmodeled(Effect.MORE, "the adapters' weights, on every GPU", _LOADED | _GRAPHS),
    ),
    **dict.fromkeys(
        ("--lora-target-modules", "--enable-mixed-moe-lora-format", "--enable-moe-shared-loras"),
        Unmodeled(Effect.OTHER, "which layers have buffers for adapters", _LOADED, loads=True),
    ),
    **dict.fromkeys(
        ("--speculative-config", *SHORT),
        Unmodeled(Effect.MORE, "weights and KV cache of a drafter, and larger batches"),
    ),
    **dict.fromkeys(("--kv-transfer-config", "--ec-transfer-config", "--kv-offloading-size"), _CONNECTOR),
    "--enable-dbo": Unmodeled(Effect.MORE, "buffers of a second batch", _LOADED | _GRAPHS),
    "--enable-eplb": Unmodeled(Effect.MORE, "redundant experts and their buffers", _LOADED),
    "--enable-sleep-mode": Unmodeled(
        Effect.MORE, "the allocator that can free the weights", _LOADED | {"context_bytes"}
    ),
    "--enable-return-routed-experts": Unmodeled(Effect.MORE, "a buffer for the experts of each token", _LOADED),
    "--mm-ipc-gpu-memory-gb": Unmodeled(Effect.MORE, "a buffer for images and videos", _LOADED),
    **dict.fromkeys(
        ("--quantization", "--quantization-config"),
        Unmodeled(Effect.OTHER, "the weights that vLLM quantizes while it loads them", _LOADED, loads=True),
    ),
    **dict.fromkeys(
        ("--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size", "--offload-params"),
        Unmodeled(
            Effect.OTHER, "the weights that stay in the host's memory, and buffers for them", _LOADED, loads=True
        ),
    ),
    **dict.fromkeys(
        (
            *("--compilation-config", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
            "--optimization-level",
        ),
        Unmodeled(Effect.OTHER, "the CUDA graphs", _GRAPHS | _LOADED),
    ),
    "--performance-mode": Unmodeled(Effect.OTHER, "vLLM's defaults of max_num_seqs and max_num_batched_tokens"),
    "--mm-encoder-tp-mode": Unmodeled(Effect.OTHER, "the copies of the vision tower", _LOADED, loads=True),
    "--mm-processor-kwargs": Unmodeled(Effect.OTHER, "the size of the largest image or video", _LOADED),
    "--skip-mm-profiling": Unmodeled(
        Effect.OTHER, "the activations of the vision tower, which vLLM then leaves out", _LOADED
    ),
    **dict.fromkeys(
        (
            *("--decode-context-parallel-size", "--prefill-context-parallel-size", "--disable-hybrid-kv-cache-manager"),
            *("--kv-cache-dtype-skip-layers", "--kv-sharing-fast-prefill", "--num-gpu-blocks-override"),
            *("--attention-backend", "--enable-mamba-shared-prefix-checkpoint", "--gdn-prefill-backend"),
            *("--mamba-block-size", "--mamba-cache-mode", "--use-replayssm"),
        ),
        Unmodeled(Effect.OTHER, "the KV cache"),
    ),
    **dict.fromkeys(("--hf-overrides", "--hf-config-path", "--model-class-overrides", "--diffusion-config"), _CONFIG),
    **dict.fromkeys(("--runner", "--convert"), TASK),
    "--mm-encoder-only": replace(TASK, loads=True),
    "--data-parallel-size": Unmodeled(
        Effect.OTHER,
        "the experts, which vLLM shares out over the replicas",
        fix="tensor_parallel_size in place of --data-parallel-size",
        loads=True,
    ),
    "--model-impl": Unmodeled(Effect.MODEL, "the implementation of the model", loads=True),
    "--disable-sliding-window": Unmodeled(Effect.MODEL, "KV cache and longest request"),
}
_VARIABLES: Mapping[str, str] = {
    "VLLM_PP_LAYER_PARTITION": "the layers of each rank",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "whether layers with chunked attention keep only their chunk",
}
_NEUTRAL = frozenset({"0", "0.0", "null", "none", "auto", "", "{}"})
_DEFAULTS = {
    **dict.fromkeys(("--data-parallel-size", "--decode-context-parallel-size", "--prefill-context-parallel-size"), "1"),
    "--mm-encoder-tp-mode": "weights",
    "--optimization-level": "2 3",
    "--performance-mode": "balanced",
    "--runner": "generate",
}
"""What vLLM does without these arguments (0.32.0 config/multimodal.py:385, config/vllm.py:427 and :433); the planner
plans models that generate. Optimization level 3 is that of level 2, but for a tuning of kernels in 0.21.0 (config/
vllm.py, OPTIMIZATION_LEVEL_03, 0.19.0 to 0.33.0)."""
_GRAPH_MODES = frozenset({"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"})
_BLOCKS_OF_16 = frozenset({"triton_attn", "flashinfer", "flash_attn"})
"""Backends that take the block of 16 tokens with which the plan counts (get_supported_kernel_block_sizes,
v1/attention/backends, 0.19.0 to 0.33.0)."""


def find_unmodeled(
    model: Model, arguments: Arguments, extra_args: Sequence[str], environment: Mapping[str, Any]
) -> Iterator[Unmodeled]:
    """Yield what the plan does not count of an engine, in the order in which it is written."""
    pooling, speculation = model.facts.pooling, arguments.speculation
    for argument in parse_arguments(list(extra_args))[0]:
        name = argument.option.name if argument.option else argument.name
        value = argument.values[0].strip().lower() if argument.values else ""
        switched_off = argument.name.startswith("--no-")
        valueless = argument.option is not None and argument.option.takes == "none"
        changes_nothing = {*_DEFAULTS[name].split(), "auto"} if name in _DEFAULTS else _NEUTRAL
        neutral = not valueless and not argument.dotted and value in changes_nothing
        pooling = pooling and not (name == "--runner" and value == "generate")
        if switched_off or neutral or (name == "--quantization" and _is_own_quantization(model, value)):
            continue
        if name == "--mm-processor-kwargs" and _is_counted(model, argument):
            continue
        if read_graph_options(argument) is not None:
            continue
        if name == "--mm-encoder-tp-mode" and (model.encoder or arguments.tensor_parallel_size == 1):
            continue
        if name == "--attention-backend" and _keeps_blocks(model, value, arguments.kv_cache_dtype):
            continue
        if name == "--enable-lora" and model.gated and not model.generic:
            continue  # memory/weights.py counts it
        if name == "--data-parallel-size" and not model.experts:
            continue  # each replica is an engine of its own
        if name == "--mamba-cache-mode" and value == "align" and _has_linear_attention(model):
            continue  # prefix caching alone decides (0.19.0 model_executor/models/config.py:435, 0.33.0 :764)
        if name == "--performance-mode" and value == "throughput" and _states_batch(arguments):
            continue
        if name in ("--speculative-config", *SHORT) and speculation:
            if speculation.uncounted:
                what = f"{_ARGUMENTS[name].what} (the plan has no rule for {speculation.uncounted})"
                yield replace(_ARGUMENTS[name], text=shown(argument.text), what=what)
        elif name in _ARGUMENTS:
            yield replace(_ARGUMENTS[name], text=shown(argument.text))
    if pooling:
        yield replace(TASK, text=f"{MODULES} of the checkpoint", fix="extra_args: [--runner, generate]")
    if arguments.sizes_items and model.encoder and not arguments.language_model_only:
        size = "a size in limit_mm_per_prompt"  # 0.19.0 multimodal/processing/dummy_inputs.py:125
        yield replace(_ARGUMENTS["--mm-processor-kwargs"], text=size, fix="limit_mm_per_prompt with counts alone")
    for name in sorted(_VARIABLES.keys() & environment.keys()):
        yield Unmodeled(Effect.OTHER, _VARIABLES[name], key="extra_env", text=name, loads=True)


def read_processor_options(argument: Argument) -> dict[str, Any]:
    """Return what an argument says of mm_processor_kwargs; nothing if it is no JSON, which vLLM refuses."""
    with contextlib.suppress(ValueError):
        found = json.loads(argument.values[0] if argument.values else "")
        found = {argument.dotted.lstrip("."): found} if argument.dotted else found
        return dict(found) if isinstance(found, dict) else {}
    return {}


def read_graph_options(argument: Argument) -> dict[str, Any] | None:
    """Return what an argument says of the CUDA graphs, as fields of Arguments; None if that is not all that it says."""
    name = argument.option.name if argument.option else ""
    try:
        if name == "--cudagraph-capture-sizes":
            found: Any = {"cudagraph_capture_sizes": [int(value) for value in argument.values]}
        elif name == "--max-cudagraph-capture-size":
            found = {"max_cudagraph_capture_size": int(argument.values[0])}
        elif name == "--compilation-config" and argument.dotted:
            found = {argument.dotted[1:]: argument.values[0]}
        elif name == "--compilation-config":
            found = json.loads(argument.values[0])
        else:
            return None
        read: dict[str, Callable[[Any], Any]] = {
            "cudagraph_capture_sizes": tuple,
            "max_cudagraph_capture_size": int,
            "cudagraph_mode": str.upper,
        }
        found = {key: read[key](value) for key, value in found.items() if value is not None}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    sizes = (*found.get("cudagraph_capture_sizes", ()), found.get("max_cudagraph_capture_size", 1))
    whole = all(type(size) is int and size > 0 for size in sizes)
    return found if whole and found.get("cudagraph_mode", "FULL") in _GRAPH_MODES else None


def _keeps_blocks(model: Model, backend: str, kv_cache_dtype: str) -> bool:
    """Return whether an attention backend runs a model, with the KV cache that it has without the argument."""
    if backend == "triton_attn":
        return model.latent is None and not model.generic
    in_fp8 = model.quantization.kv_cache_dtype or kv_cache_dtype != "auto"
    return backend in _BLOCKS_OF_16 and supports_flashinfer(model) and (backend == "flashinfer" or not in_fp8)


def _has_linear_attention(model: Model) -> bool:
    """Return whether what a model keeps of a request are states of linear attention, not of Mamba2."""
    return model.hybrid and not any(layer.state and layer.state.chunk_tokens for layer in model.layers)


def _states_batch(arguments: Arguments) -> bool:
    """Return whether both numbers are given whose defaults `throughput` doubles (0.19.0 engine/arg_utils.py:2207)."""
    return None not in (arguments.max_num_seqs, arguments.max_num_batched_tokens)


def _is_counted(model: Model, argument: Argument) -> bool:
    """Return whether mm_processor_kwargs changes nothing, or only how large an image is for Qwen's encoder."""
    found = read_processor_options(argument)
    known = model.encoder is not None and found.keys() <= {"min_pixels", "max_pixels"}
    return not model.multimodal or (known and all(type(size) is int and size > 0 for size in found.values()))


def _is_own_quantization(model: Model, value: str) -> bool:
    """Return whether `--quantization` only names what the checkpoint is: `awq_marlin` is `awq` with another kernel."""
    own = model.quantization.method.replace("-", "_")
    said = value.replace("-", "_").removeprefix("auto_").removesuffix("_marlin")
    if model.facts.quantization.get("quant_method") == "auto-round":
        return said in ("round", "inc")
    return own != "none" and (said == own or (said == "modelopt" and own.startswith("modelopt_")))


def judge(outcome: Outcome, found: Iterable[Unmodeled], engine: Engine) -> Outcome:
    """Return the outcome of an engine with what is not counted: `cannot_say` wherever that could change the verdict."""
    # vLLM asks for its share of the GPU before anything else.
    if outcome.verdict is Verdict.NOT_FREE and engine.arguments.gpu_memory_utilization is not None:
        return outcome
    for item in found:
        if item.measured and item.measured <= engine.observed.keys():
            continue
        if outcome.verdict is Verdict.OOM_WEIGHTS and not item.loads:
            continue
        unsupported = outcome.verdict in (Verdict.UNSUPPORTED_ENGINE, Verdict.UNSUPPORTED_SHAPE)
        if outcome.verdict is not Verdict.FITS and (
            item.effect is Effect.MORE or (unsupported and item.effect is not Effect.MODEL)
        ):
            continue
        without = "it would fit" if outcome.verdict is Verdict.FITS else f"it would be {outcome.verdict.value}"
        return replace(
            outcome,
            verdict=Verdict.CANNOT_SAY,
            reason=to_sentence(
                f"the plan does not count {item.text}, which {item.effect.value}: {item.what}. Without it {without}: "
                f"{outcome.reason.removesuffix('.')}"
            ),
            fix=item.fix or f"{item.key} without {item.text}",
        )
    return outcome


def judge_generic(outcome: Outcome, engine: Engine) -> Outcome:
    """Return the outcome of an engine whose architecture the planner does not know: what fits with the most that it may
    take fits, and what does not fit with the least does not. Otherwise the plan cannot say."""
    model, arguments = engine.model, engine.arguments
    if not model.generic or outcome.verdict in (
        Verdict.CANNOT_SAY,
        Verdict.UNSUPPORTED_ENGINE,
        Verdict.UNSUPPORTED_SHAPE,
    ):
        return outcome
    fix = outcome.fix
    least = compute_outcome(engine, "least")
    certain = least.verdict is not Verdict.KV_BELOW_MAX_MODEL_LEN or model.kv_cache_exact
    if least.verdict is not Verdict.FITS and certain:
        return replace(outcome, verdict=least.verdict, reason=least.reason)
    most = compute_outcome(engine, "most") if outcome.verdict is Verdict.FITS else outcome
    if arguments.pipeline_parallel_size > 1:
        why, fix = "which tensors each stage of its pipeline has is not known", "pipeline_parallel_size: 1"
    elif most.verdict is Verdict.FITS:
        return outcome
    else:
        encoder = compute_encoder_bytes(engine)
        more = f", and its encoders take up to {mib(encoder)} for images, videos or audio" if encoder else ""
        why = (
            f"weights and KV cache are upper bounds{more}. With them it would be {most.verdict.value}: "
            f"{most.reason.removesuffix('.')}"
        )
    said = f"the planner does not know {printable(model.architecture[:100], '')}, and {why}"
    return replace(outcome, verdict=Verdict.CANNOT_SAY, reason=to_sentence(said), fix=fix)
