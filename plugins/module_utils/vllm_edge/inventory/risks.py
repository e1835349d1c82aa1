# SPDX-License-Identifier: Apache-2.0
"""What an engine may be given only if its key `accept_risk` names it: options and environment variables that run code,
open files, addresses or routes of the server, or write what clients send into the journal.

Every recorded option of vLLM is in one table: SAFE, UNSAFE, `engine_arguments.OURS`, or a key of the engine. A test
fails for a new release with an option that is in none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..names import VARIABLE_NAME
from ..text import nearest, shown
from .engine_arguments import Argument, parse_arguments, quote, read_spellings
from .engine_inputs import NO_SECRET, OUR_ENVIRONMENT, SECRET, select_texts
from .vllm_arguments import VERSION

_CODE = "it imports Python code by name"
_HOSTS = "it makes the engine talk to other hosts, over ports that take pickled objects from anybody"
_OUTSIDE = "it hands data of the engine to an address, or takes them from there"
_JOURNAL = "it writes what clients send, and what they get, into the journal"
_LOADS = "it makes the engine load files that nobody has verified"
UNSAFE: dict[str, str] = {
    "--trust-remote-code": "it runs Python code that lies beside the weights",
    "--allowed-local-media-path": "clients read files of the container by file:// addresses, the weights included",
    "--enable-prompt-embeds": "it unpickles tensors that clients send",
    "--enable-mm-embeds": "it loads tensors that clients send, unchecked, which can end the engine",
    "--trust-request-chat-template": "clients send templates that the server runs",
    "--trust-request-mm-kwargs": "clients choose the arguments of the processor, such as the size of its buffers",
    "--enable-tokenizer-info-endpoint": "it shows the chat template and the tokenizer's settings to every client",
    "--allow-credentials": "web pages of other sites use the engine with a visitor's credentials",
    "--enable-elastic-ep": "clients change the number of ranks by /scale_elastic_ep",
    "--tool-server": "the model runs tools, such as a Python interpreter or a browser",
    "--watchdog-config": "it writes a file at a place of its own",
    "--additional-config": "it hands settings to plugins that nobody has judged",
    "--mm-encoder-fp8-scale-save-path": "it writes a file at a place of its own",
    **dict.fromkeys(("--enable-log-requests", "--enable-log-outputs", "--enable-log-deltas"), _JOURNAL),
    **dict.fromkeys(
        (
            *("--middleware", "--tool-parser-plugin", "--reasoning-parser-plugin", "--io-processor-plugin"),
            *("--worker-cls", "--worker-extension-cls", "--scheduler-cls", "--logits-processors"),
            *("--model-class-overrides", "--distributed-executor-backend", "--logging-config", "--log-config-file"),
        ),
        _CODE,
    ),
    **dict.fromkeys(("--load-format", "--tokenizer", "--hf-config-path"), _LOADS),
    **dict.fromkeys(
        (
            *("--otlp-traces-endpoint", "--weight-transfer-config", "--profiler-config", "--kv-transfer-config"),
            *("--kv-events-config", "--ec-transfer-config", "--ec-manager-config"),
        ),
        _OUTSIDE,
    ),
    **dict.fromkeys(
        (
            *("--master-addr", "--master-port", "--nnodes", "--node-rank", "--data-parallel-rank"),
            *("--data-parallel-start-rank", "--data-parallel-size-local", "--data-parallel-address"),
            *("--data-parallel-rpc-port", "--data-parallel-backend", "--data-parallel-multi-port-external-lb"),
            *("--data-parallel-supervisor-port", "--data-parallel-hybrid-lb", "--data-parallel-external-lb"),
            *("--enable-fault-tolerance", "--fault-tolerance-config", "--enable-scale-out", "--tokens-only"),
            "--enable-trace-replay",
        ),
        _HOSTS,
    ),
}
"""Option of vLLM to what it opens. The negated form of a switch opens nothing."""
HARMLESS_VALUES: dict[str, frozenset[str]] = {
    "--distributed-executor-backend": frozenset({"mp", "uni"}),
    "--load-format": frozenset({"auto", "safetensors", "fastsafetensors", "sharded_state", "bitsandbytes", "dummy"}),
}
"""Values with which an option of UNSAFE opens nothing."""
UNSAFE_KEYS: dict[str, str] = {
    "--compilation-config": "backend inductor_passes inductor_compile_config debug_dump_path cache_dir",
    "--speculative-config": "custom_class",
}
"""Keys of a JSON value that import code or write files, by option; `auto_map` and the names of UNSAFE in any."""

# By what they do in vLLM 0.32 and 0.33. --allowed-media-domains replaces the role's default, which allows none.
_SAFE = """
aggregate-engine-logging all2all-backend allow-deprecated-quantization allowed-headers allowed-media-domains
allowed-methods allowed-origins anthropic-disabled-thinking-effort api-server-count async-scheduling attention-backend
attention-config aux-output-config block-size chat-template-content-format code-revision cohere-format
cohere-is-reasoning-model collect-detailed-traces compilation-config config-format convert cp-kv-cache-interleave-size
cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params cudagraph-capture-sizes cudagraph-metrics
custom-histogram-buckets dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size default-chat-template-kwargs
default-mm-loras diffusion-config disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-stats
disable-nccl-for-dp-synchronization disable-sliding-window disable-uvicorn-access-log distributed-timeout-seconds
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval
elastic-ep-max-dp-size enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
enable-ep-weight-filter enable-eplb enable-expert-parallel enable-flash-late-interaction enable-flashinfer-autotune
enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-logging-iteration-details enable-lora
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
enable-per-request-metrics enable-prefix-caching enable-prompt-tokens-details enable-request-id-headers
enable-return-routed-experts enable-server-load-tracking enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh
enable-tower-connector-lora engram-config eplb-config exclude-tools-when-tool-choice-none expert-placement-strategy
fail-on-environ-validation fingerprint-mode fingerprint-value fully-sharded-loras gdn-prefill-backend
generation-config h11-max-header-count h11-max-incomplete-event-size hf-overrides ignore-patterns
interleave-mm-strings ir-op-priority jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend
kernel-config kv-cache-dtype-skip-layers kv-cache-metrics kv-cache-metrics-sample kv-offloading-backend
kv-offloading-size kv-sharing-fast-prefill language-model-only linear-backend log-error-stack log-level logprobs-mode
long-prefill-token-threshold long-prefill-token-threshold-adaptive lora-dtype lora-modules lora-target-modules
mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype
mamba-ssu-algorithm max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels
max-lora-rank max-loras max-num-active-seqs max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens
max-parallel-loading-workers media-io-kwargs mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm
mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
mm-shm-cache-max-object-size-mb mm-tensor-ipc model-impl model-loader-extra-config moe-backend monokernel
num-gpu-blocks-override numa-bind numa-bind-cpus numa-bind-nodes offload-backend offload-group-size
offload-num-in-group offload-params offload-prefetch-step optimization-level override-generation-config
per-request-spec-decode-metrics performance-mode pooler-config prefill-context-parallel-size prefill-schedule-interval
prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit pt-load-map-location quantization
quantization-config ray-workers-use-nsight reasoning-config reasoning-effort-map renderer-num-workers
replayssm-buffer-len response-role return-sampling-mask return-tokens-as-token-ids runner safetensors-load-strategy
safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-reserve-full-isl scheduling-policy seed
show-hidden-metrics-for-version skip-mm-profiling skip-tokenizer-init sleep-mode-backend sleep-mode-offload-cudagraph
sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method spec-model spec-tokens specialize-active-lora
speculative-config sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-ciphers stream-interval
structured-outputs-config swa-bounded-replay tokenizer-mode tokenizer-revision tool-strict-level ubatch-size
use-fp64-gumbel use-replayssm use-tqdm-on-load uvicorn-log-level video-pruning-method video-pruning-rate watermark
watermark-config
"""
SAFE = frozenset(f"--{name}" for name in _SAFE.split())

# Environment variables that an operator may set; any other name is a risk, and so is one of the two tables below.
ENVIRONMENT = re.compile(
    r"(VLLM|NCCL|TORCH|PYTORCH|TORCHINDUCTOR|CUDA|CUBLAS|CUDNN|OMP|MKL|OPENBLAS|TRITON|FLASHINFER|GLOO|TOKENIZERS"
    r"|SAFETENSORS|LC|TZ|LANG)(_[A-Z0-9_]+)?"
)
UNSAFE_ENVIRONMENT: dict[str, str] = {
    "VLLM_SERVER_DEV_MODE": "clients may pause the engine, replace its weights and run its methods, without a key",
    "VLLM_USE_RUST_FRONTEND": "that API server runs no middleware, so nothing judges what clients ask",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "it unpickles what comes over the engine's sockets",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "clients load adapters from any path of the container",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "an allowed site of media sends the engine on to any address",
    "VLLM_MEDIA_CONNECTOR": _CODE,
    "VLLM_ENABLE_RESPONSES_API_STORE": "it keeps what clients send and get, without a limit",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _JOURNAL,
    "VLLM_USE_MODELSCOPE": _OUTSIDE,
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "it unpickles whatever is in a file of weights",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": _CODE,
    "TRITON_CACHE_MANAGER": _CODE,
}
_REACHES_OUT = re.compile(
    r"_(PLUGINS?|PATHS?|DIRS?|FOLDER|FILE(NAME)?|LIBRAR(Y|IES)|ROOT|HOME|URL|URI|ENDPOINT|SERVER|IP|ADDR(ESS)?|HOST|PORT"
    r"|COMM_ID|MODULE|COMMAND)(?=_|$)"
)
# Names of this kind that are no path or address.
_HARMLESS_ENVIRONMENT = re.compile(r"NCCL_(IB_ADDR_(FAMILY|RANGE)|IB_HCA|NET_SHARED_\w+)")


def find_risks(engine: Mapping[str, Any], version: str = VERSION) -> dict[str, str]:
    """Return what an engine has that its key `accept_risk` must name, and what each opens.

    The keys of the engine may be of any type. `version` is a key of vllm_arguments.RELEASES; another release may read
    an alias or an abbreviation otherwise.
    """
    found: dict[str, str] = {}
    for argument in parse_arguments(select_texts(engine.get("extra_args")), version)[0]:
        found |= _find_argument_risks(argument, version)
    for key in ("extra_env", "secret_env"):
        environment = engine.get(key)
        for name in environment if isinstance(environment, dict) else ():
            # What is no name of a variable is refused by engine_inputs.
            named = isinstance(name, str) and re.fullmatch(VARIABLE_NAME, name) is not None
            if not named or name in OUR_ENVIRONMENT:
                continue
            # In extra_env such a name is refused in any case; a secret of a store may have any name of this kind.
            is_secret = SECRET.search(NO_SECRET.sub("", name)) and name not in UNSAFE_ENVIRONMENT
            if not is_secret and (why := _find_environment_risk(name)):
                found[name] = why
    return found


def find_risk_errors(where: str, engine: Mapping[str, Any], version: str = VERSION) -> Iterator[str]:
    """Yield risks that an engine does not accept, and those that it accepts for nothing.

    Each sentence begins with `where`, the variable; the rest is as in `find_risks`.
    """
    accepted = select_texts(engine.get("accept_risk"))
    risks = find_risks(engine, version)
    for name, opens in risks.items():
        hidden = engine.get("secret_env")
        secret = isinstance(hidden, dict) and name in hidden
        key = "extra_args" if name.startswith("-") else "secret_env" if secret else "extra_env"
        if name not in accepted:
            yield (
                f"{where}.{key}: {shown(name)} is a risk: {opens}; remove it, or name it where you accept that: "
                f"accept_risk: [{quote(name)}]."
            )
    for name in dict.fromkeys(accepted):
        if name not in risks:
            yield (
                f"{where}.accept_risk: {shown(name)} accepts a risk that the engine does not have; remove it"
                f"{', or write one that it has: ' + nearest(name, risks) if risks else '.'}"
            )


def _find_argument_risks(argument: Argument, version: str) -> Iterator[tuple[str, str]]:
    name = argument.option.name if argument.option else ""
    names = [name] if name else [begun for begun in UNSAFE if _may_mean(argument.name, begun, version)]
    for option in names:
        harmless = HARMLESS_VALUES.get(option, frozenset())
        negated = argument.name != option and argument.name.startswith(("--no-", "--disable-"))
        if option in UNSAFE and not negated and not (argument.values and harmless.issuperset(argument.values)):
            yield option, UNSAFE[option]
    base = name or argument.name
    reads = {"auto_map", *(option[2:].replace("-", "_") for option in UNSAFE), *UNSAFE_KEYS.get(base, "").split()}
    for key in _find_keys(argument):
        if key.replace("-", "_") in reads:
            yield f"{base}.{key}", UNSAFE.get("--" + key.replace("_", "-"), "it runs code, or writes files")


def _may_mean(written: str, option: str, version: str) -> bool:
    """Return whether vLLM may take an option that is not recorded, or abbreviated, for an unsafe one."""
    known = read_spellings(version).get(option)
    spelled = (known.name, *known.aliases) if known else (option,)
    return len(written.strip("-")) > 0 and any(item.startswith(written) for item in spelled)


def _find_keys(argument: Argument) -> Iterator[str]:
    """Yield the keys of the JSON in an option's values, and those that follow the option after dots."""
    yield from (part.rstrip("+") for part in argument.dotted.split(".") if part)
    for value in argument.values:
        if value[:1] in ("{", "["):
            try:
                yield from _walk(json.loads(value))
            except (ValueError, RecursionError):
                continue  # refused by engine_arguments


def _walk(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _walk(item)
    if isinstance(value, dict):
        for key in value:
            yield from key.split(".")


def _find_environment_risk(name: str) -> str:
    """Return what an environment variable opens, or an empty string."""
    if name in UNSAFE_ENVIRONMENT:
        return UNSAFE_ENVIRONMENT[name]
    if not ENVIRONMENT.fullmatch(name):
        return "it is no variable of vLLM, PyTorch, NCCL or CUDA, and others make Python or the loader run code"
    if _REACHES_OUT.search(name) and not _HARMLESS_ENVIRONMENT.fullmatch(name):
        return "it names a file, a directory or an address that the engine loads, writes or talks to"
    return ""
