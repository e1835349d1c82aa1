# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` of releases of vLLM takes: data that tools/vllm_release.py writes, never edited by hand.

`options` has the names of the options without `--`, with their aliases, by what follows them: `none`, `one`, `many` or
`optional` values of the kind `text`, `int` or `float`. A `switch` takes no value and has a `--no-` form. `metrics` are
those that the project reads, without `vllm:` and the `_total` of counters. A release after the first has what it
changed (vllm_changes.py). VERSION is the release of vllm_image_base.
"""

from typing import Any

from .vllm_changes import apply_changes

VERSION = "0.32.0"
CHANGES: dict[str, dict[str, Any]] = {
    "0.32.0": {
        "gpu_memory_utilization": 0.92,
        "tool_call_parsers": """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling
internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5
minimax_m2 minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder
qwen3_json qwen3_xml seed_oss step3 step3p5 xlam
""",
        "reasoning_parsers": """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47 granite
granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv
minimax_m2 minimax_m2_append_think minimax_m3 mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1
qwen3 seed_oss step3 step3p5
""",
        "options": {
            "none text": """
headless grpc data-parallel-multi-port-external-lb|-dpm disable-log-stats aggregate-engine-logging
""",
            "one int": """
api-server-count|-asc sse-keep-alive-interval port data-parallel-supervisor-port dp-supervisor-probe-failure-threshold
ssl-cert-reqs h11-max-incomplete-event-size h11-max-header-count seed max-logprobs renderer-num-workers
safetensors-prefetch-num-threads mamba-cache-philox-rounds pipeline-parallel-size|-pp master-port nnodes|-n
node-rank|-r tensor-parallel-size|-tp decode-context-parallel-size|-dcp dcp-kv-cache-interleave-size
cp-kv-cache-interleave-size prefill-context-parallel-size|-pcp data-parallel-size|-dp data-parallel-rank|-dpn
data-parallel-start-rank|-dpr data-parallel-size-local|-dpl data-parallel-rpc-port|-dpp ubatch-size
elastic-ep-max-dp-size dbo-decode-token-threshold dp-sync-interval dbo-prefill-token-threshold block-size
replayssm-buffer-len offload-group-size offload-num-in-group offload-prefetch-step mm-shm-cache-max-object-size-mb
max-loras max-lora-rank max-num-seqs long-prefill-token-threshold prefill-schedule-interval stream-interval
max-cudagraph-capture-size spec-tokens shutdown-timeout
""",
            "one text": """
config chat-template chat-template-content-format default-chat-template-kwargs response-role tool-call-parser
tool-parser-plugin tool-strict-level tool-server max-log-len cohere-format anthropic-disabled-thinking-effort
fingerprint-mode fingerprint-value host grpc-port uds uvicorn-log-level disable-access-log-for-endpoints
allowed-origins allowed-methods allowed-headers ssl-keyfile ssl-certfile ssl-ca-certs ssl-ciphers root-path model
runner convert tokenizer tokenizer-mode dtype hf-config-path allowed-local-media-path revision code-revision
tokenizer-revision max-model-len quantization|-q quantization-config logprobs-mode config-format hf-overrides
model-class-overrides pooler-config generation-config override-generation-config model-impl io-processor-plugin
load-format download-dir safetensors-load-strategy safetensors-prefetch-block-size model-loader-extra-config
pt-load-map-location attention-backend mamba-backend mamba-ssu-algorithm reasoning-parser reasoning-parser-plugin
distributed-executor-backend master-addr distributed-timeout-seconds cpu-distributed-timeout-seconds device-ids
dcp-comm-backend data-parallel-address|-dpa data-parallel-backend|-dpb all2all-backend eplb-config
expert-placement-strategy max-parallel-loading-workers worker-cls worker-extension-cls fault-tolerance-config
kv-cache-memory-bytes kv-cache-dtype num-gpu-blocks-override prefix-caching-hash-algo prefix-cache-retention-interval
mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size prefix-match-unit mamba-cache-mode kv-offloading-size
kv-offloading-backend offload-backend limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-type
mm-hasher-algorithm mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
mm-encoder-fp8-scale-save-path video-pruning-rate video-pruning-method mm-tensor-ipc mm-processor-device lora-dtype
max-cpu-loras default-mm-loras max-lora-cls-labels logging-config log-level log-config-file
show-hidden-metrics-for-version otlp-traces-endpoint per-request-spec-decode-metrics custom-histogram-buckets
jit-monitor-mode max-num-batched-tokens max-num-scheduled-tokens max-num-active-seqs max-num-queued-reqs
max-num-queued-tokens scheduling-policy scheduler-cls ir-op-priority moe-backend linear-backend
sparse-indexer-topk-backend speculative-config|-sc spec-method spec-model watermark-config diffusion-config|-dc
kv-transfer-config kv-events-config ec-transfer-config ec-manager-config compilation-config|-cc attention-config|-ac
engram-config reasoning-config kernel-config additional-config structured-outputs-config aux-output-config
profiler-config optimization-level performance-mode weight-transfer-config gdn-prefill-backend kda-prefill-backend
kda-decode-backend
""",
            "many text": """
lora-modules api-key allowed-media-domains served-model-name sleep-preserve-parameter-names logits-processors
ignore-patterns numa-bind-nodes numa-bind-cpus kv-cache-dtype-skip-layers cpu-offload-params offload-params
lora-target-modules collect-detailed-traces
""",
            "switch": """
trust-request-chat-template trust-request-mm-kwargs return-tokens-as-token-ids enable-auto-tool-choice
exclude-tools-when-tool-choice-none enable-prompt-tokens-details enable-per-request-metrics
enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint enable-log-outputs
enable-log-deltas cohere-is-reasoning-model log-error-stack tokens-only enable-scale-out disable-uvicorn-access-log
allow-credentials enable-ssl-refresh enable-request-id-headers disable-fastapi-docs enable-offline-docs
enable-flash-late-interaction trust-remote-code allow-deprecated-quantization enforce-eager
enable-return-routed-experts return-sampling-mask use-fp64-gumbel enable-trace-replay disable-sliding-window
disable-cascade-attn skip-tokenizer-init enable-prompt-embeds enable-sleep-mode sleep-mode-offload-cudagraph
enable-cumem-allocator enable-nccl-comm-suspend use-tqdm-on-load enable-mamba-cache-stochastic-rounding numa-bind
dcp-q-replicate data-parallel-hybrid-lb|-dph data-parallel-external-lb|-dpe enable-hc-sp enable-expert-parallel|-ep
enable-batch-sharded-sampling enable-ep-weight-filter enable-dbo enable-shm-tensor-arena enable-elastic-ep
disable-nccl-for-dp-synchronization enable-eplb ray-workers-use-nsight disable-custom-all-reduce
enable-fault-tolerance enable-prefix-caching kv-sharing-fast-prefill swa-bounded-replay
enable-mamba-shared-prefix-checkpoint use-replayssm language-model-only enable-mm-embeds mm-encoder-only
interleave-mm-strings skip-mm-profiling mm-device-do-normalize enable-lora enable-tower-connector-lora
fully-sharded-loras specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras kv-cache-metrics
cudagraph-metrics enable-layerwise-nvtx-tracing enable-mfu-metrics enable-logging-iteration-details
jit-monitor-verbose long-prefill-token-threshold-adaptive enable-chunked-prefill disable-chunked-mm-input
scheduler-reserve-full-isl disable-hybrid-kv-cache-manager async-scheduling enable-flashinfer-autotune
fail-on-environ-validation enable-log-requests
""",
            "one float": """
dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s gpu-memory-utilization|--device-memory-utilization
cpu-offload-gb mm-processor-cache-gb mm-encoder-fp8-scale-save-margin mm-ipc-gpu-memory-gb kv-cache-metrics-sample
watermark
""",
            "repeatable one text": "middleware",
            "optional text": "hf-token",
            "many int": "cudagraph-capture-sizes",
        },
        "choices": {
            "chat-template-content-format": "auto openai string",
            "tool-strict-level": "auto function parameter",
            "anthropic-disabled-thinking-effort": "auto high low max medium none xhigh",
            "fingerprint-mode": "custom full hash none",
            "uvicorn-log-level": "critical debug error info trace warning",
            "runner": "auto draft generate pooling",
            "convert": "auto classify embed none",
            "dtype": "auto bfloat16 float float16 float32 half",
            "logprobs-mode": "processed_logits processed_logprobs raw_logits raw_logprobs",
            "all2all-backend": """
allgather_reducescatter deepep_high_throughput deepep_low_latency deepep_v2 flashinfer_all2allv
flashinfer_nvlink_one_sided flashinfer_nvlink_two_sided moonep mori_high_throughput mori_low_latency naive nixl_ep
pplx
""",
            "expert-placement-strategy": "linear round_robin",
            "kv-cache-dtype": """
auto bfloat16 float16 fp8 fp8_ds_mla fp8_e4m3 fp8_e5m2 fp8_inc fp8_per_token_head int4_per_token_head
int8_per_token_head nvfp4 nvfp4_4over6 nvfp4_ds_mla turboquant_3bit_nc turboquant_4bit_nc turboquant_k3v4_nc
turboquant_k8v4 ultraquant_4bit
""",
            "prefix-caching-hash-algo": "sha256 sha256_cbor xxhash xxhash_cbor",
            "mamba-cache-dtype": "auto bfloat16 float16 float32",
            "mamba-ssm-cache-dtype": "auto bfloat16 float16 float32",
            "mamba-cache-mode": "align none",
            "kv-offloading-backend": "lmcache native",
            "offload-backend": "auto prefetch uva",
            "mm-processor-cache-type": "lru shm",
            "mm-hasher-algorithm": "blake3 sha256 sha512",
            "mm-encoder-tp-mode": "data weights",
            "video-pruning-method": "evs vidcom2",
            "mm-tensor-ipc": "direct_rpc torch_shm",
            "max-lora-rank": "1 8 16 32 64 128 256 320 512",
            "lora-dtype": "auto bfloat16 float16",
            "per-request-spec-decode-metrics": "detailed none summary",
            "jit-monitor-mode": "error warn",
            "scheduling-policy": "fcfs priority",
            "performance-mode": "balanced interactivity throughput",
        },
        "metrics": """
cache_config_info e2e_request_latency_seconds generation_tokens inter_token_latency_seconds iteration_tokens_total
kv_cache_usage_perc num_preemptions num_requests_running num_requests_waiting prefix_cache_hits prefix_cache_queries
prompt_tokens request_queue_time_seconds request_success time_to_first_token_seconds
""",
    },
    "0.33.0": {
        "tool_call_parsers": "beam muse musespark1x step5",
        "reasoning_parsers": "beam muse musespark1x step5",
        "options": {
            "one text": "reasoning-effort-map sleep-mode-backend watchdog-config",
            "switch": """
enable-auto-tool-choice|--disable-auto-tool-choice enable-prompt-tokens-details|--disable-prompt-tokens-details
enable-per-request-metrics|--disable-per-request-metrics enable-server-load-tracking|--disable-server-load-tracking
enable-force-include-usage|--disable-force-include-usage
enable-tokenizer-info-endpoint|--disable-tokenizer-info-endpoint enable-log-outputs|--disable-log-outputs
enable-log-deltas|--disable-log-deltas enable-scale-out|--disable-scale-out
disable-uvicorn-access-log|--enable-uvicorn-access-log enable-ssl-refresh|--disable-ssl-refresh
enable-request-id-headers|--disable-request-id-headers disable-fastapi-docs|--enable-fastapi-docs
enable-offline-docs|--disable-offline-docs enable-flash-late-interaction|--disable-flash-late-interaction
enable-return-routed-experts|--disable-return-routed-experts enable-trace-replay|--disable-trace-replay
disable-sliding-window|--enable-sliding-window disable-cascade-attn|--enable-cascade-attn
enable-prompt-embeds|--disable-prompt-embeds enable-sleep-mode|--disable-sleep-mode
enable-cumem-allocator|--disable-cumem-allocator enable-nccl-comm-suspend|--disable-nccl-comm-suspend
enable-mamba-cache-stochastic-rounding|--disable-mamba-cache-stochastic-rounding enable-hc-sp|--disable-hc-sp
enable-expert-parallel|--disable-expert-parallel|-ep enable-batch-sharded-sampling|--disable-batch-sharded-sampling
enable-ep-weight-filter|--disable-ep-weight-filter enable-dbo|--disable-dbo
enable-shm-tensor-arena|--disable-shm-tensor-arena enable-elastic-ep|--disable-elastic-ep
disable-nccl-for-dp-synchronization|--enable-nccl-for-dp-synchronization enable-eplb|--disable-eplb
disable-custom-all-reduce|--enable-custom-all-reduce enable-fault-tolerance|--disable-fault-tolerance
enable-prefix-caching|--disable-prefix-caching
enable-mamba-shared-prefix-checkpoint|--disable-mamba-shared-prefix-checkpoint enable-mm-embeds|--disable-mm-embeds
enable-lora|--disable-lora enable-tower-connector-lora|--disable-tower-connector-lora
enable-mixed-moe-lora-format|--disable-mixed-moe-lora-format enable-moe-shared-loras|--disable-moe-shared-loras
enable-layerwise-nvtx-tracing|--disable-layerwise-nvtx-tracing enable-mfu-metrics|--disable-mfu-metrics
enable-logging-iteration-details|--disable-logging-iteration-details enable-chunked-prefill|--disable-chunked-prefill
disable-chunked-mm-input|--enable-chunked-mm-input disable-hybrid-kv-cache-manager|--enable-hybrid-kv-cache-manager
enable-flashinfer-autotune|--disable-flashinfer-autotune enable-log-requests|--disable-log-requests monokernel
""",
        },
        "choices": {
            "tool-strict-level": "-auto -function -parameter",
            "kv-cache-dtype": """
-auto -bfloat16 -float16 -fp8 -fp8_ds_mla -fp8_e4m3 -fp8_e5m2 -fp8_inc -fp8_per_token_head -int4_per_token_head
-int8_per_token_head -nvfp4 -nvfp4_4over6 -nvfp4_ds_mla -turboquant_3bit_nc -turboquant_4bit_nc -turboquant_k3v4_nc
-turboquant_k8v4 -ultraquant_4bit
""",
        },
    },
}
RELEASES = apply_changes(CHANGES)
