# SPDX-License-Identifier: Apache-2.0
"""What vLLM printed at the start of engines elsewhere, as their logs in public repositories have it.

vLLM prints the memory that is left for the KV cache in GiB with two digits, and the tokens that it makes of it. A
plan is exact if some memory that is printed so gives that number of tokens. None of the logs was used to make a rule.
"""

from __future__ import annotations

import functools
from typing import Any

import checkpoints
import kv_models
import published
import pytest
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Model
from ansible.module_utils.vllm_edge.planning.memory import kv_cache, weights

GIB = 2**30
LOADED_WITHIN = 0.01
"""What vLLM logs is the peak of its allocator."""
QWEN3_30B = published.CONFIGS["Qwen/Qwen3-30B-A3B"]


def _qwen3(sizes: tuple[int, ...], tied: bool) -> dict[str, Any]:
    return published.config("Qwen3ForCausalLM", "qwen3", sizes, head_dim=128, tie_word_embeddings=tied)


def _qwen2(sizes: tuple[int, ...], tied: bool) -> dict[str, Any]:
    return published.config("Qwen2ForCausalLM", "qwen2", sizes, tie_word_embeddings=tied, use_sliding_window=False)


MODELS: dict[str, Any] = {
    **published.CONFIGS,
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2((28, 1536, 8960, 12, 2, 151936, 32768), True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2((36, 2048, 11008, 16, 2, 151936, 32768), True),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2((48, 5120, 13824, 40, 8, 152064, 32768), False),
    "Qwen/Qwen2.5-32B-Instruct": _qwen2((64, 5120, 27648, 40, 8, 152064, 32768), False),
    "Qwen/Qwen3-4B": _qwen3((36, 2560, 9728, 32, 8, 151936, 40960), True),
    "Qwen/Qwen3-32B": _qwen3((64, 5120, 25600, 64, 8, 151936, 40960), False),
    "Qwen/Qwen3-235B-A22B-FP8": {
        **QWEN3_30B,
        **{"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    },
    "openai/gpt-oss-120b": published.gpt_oss(36, 128),
    "meta-llama/Meta-Llama-3-8B-Instruct": published.config(
        "LlamaForCausalLM", "llama", (32, 4096, 14336, 32, 8, 128256, 8192), tie_word_embeddings=False
    ),
}


LOGS = """\
2215860382/VedioSifter:train_run Qwen/Qwen3-4B 0.12.0 1 40960 7.5552 39.28 285984 auto
DaisukeTakai/eval_dataset:vllm_judge.log Qwen/Qwen3-235B-A22B-FP8 0.10.0 8 32768 - 35.65 1590736 fp8
DaisukeTakai/eval_dataset:vllm_predict.log Qwen/Qwen3-32B 0.10.0 8 32768 7.6871 55.62 3644816 fp8
HienHoang3011/translate-pipeline:vllm_server.log google/gemma-4-E4B-it 0.19.2 1 16384 15.16 16.45 179632 auto
KevinHuang8/Augment_QA:vllm.log Qwen/Qwen2.5-3B-Instruct 0.17.0 1 4096 5.79 14.74 429328 auto
TW-10519/VLLM-ROUTER:logs/vllm.log openai/gpt-oss-20b 0.13.0 1 8192 13.7193 12.94 282624 auto
WaroonRagwongsiri/SuperAi-SS6:llm.log Qwen/Qwen3-8B 0.22.0 1 8192 15.27 37.81 275328 auto
Zzsf11/VideoCuttingAgent:Qwen3VL Qwen/Qwen3-VL-30B-A3B-Instruct 0.12.0 2 65536 29.3114 38.15 833344 auto
abinavChandar/demo_env_l4:vllm.log meta-llama/Llama-3.1-8B-Instruct 0.11.0 1 32000 14.9889 4.75 38944 auto
apollo-mg/Project-Apollo:vllm_results.log Qwen/Qwen2.5-14B-Instruct 0.14.0 1 1024 - 0.34 1856 auto
dennislee22/vLLM-benchmarking:120B-4gpu openai/gpt-oss-120b 0.10.1 4 16384 17.2217 45.32 2640144 auto
emocat17/GraphRAG:vllm.log meta-llama/Meta-Llama-3-8B-Instruct 0.13.0 4 8192 3.7418 62.52 2048704 auto
eole-nlp/eole:benchmarks/genai/results.md google/gemma-3-1b-it 0.13.0 1 2048 - 25.39 950864 auto
giyushino/ModelMerging:vllm_server.log Qwen/Qwen2.5-1.5B-Instruct 0.9.2 1 1536 2.8833 14.58 545856 auto
jyngjeon/multiagentsdebate:qwen25_2.log Qwen/Qwen2.5-14B-Instruct 0.9.2 4 16384 6.9461 12.79 279408 auto
leadawon/LAMBO:backend_server Qwen/Qwen2.5-32B-Instruct 0.18.1 4 32768 15.39 5.24 85760 auto
sostrowsk/dgx-spark-local-llm:gemma4-nvfp4.log google/gemma-4-26B-A4B-it 0.25.1 1 262144 - 84.68 3912140 auto
sridhar1804/local-ai:logs/vllm.log microsoft/Phi-3-mini-4k-instruct 0.19.1 1 4096 7.12 13.06 35648 auto
trietnguyeminh/Submission---EXACT--IJCNN:download.txt Qwen/Qwen3-8B 0.22.0 2 8192 7.71 3.92 57120 auto
"""
"""Repository on GitHub and what of its files, model, release, ranks, max_model_len, GiB that were loaded and that were
left on the GPU with the least, tokens, and dtype of the KV cache. Nothing is said of the load if the checkpoint is
another one with the same layers, or the GPU is one of AMD's."""


@functools.cache
def model(repo: str) -> Model:
    if repo == "google/gemma-3-1b-it":
        layers = [kv_models.full(i, 1, 256) if i % 6 == 5 else kv_models.sliding(i, 1, 256, 512) for i in range(26)]
        return kv_models.model(layers, family="gemma3", maximum=32768)
    if repo not in MODELS:
        return families.interpret(checkpoints.recorded(repo))
    made = MODELS[repo]
    return families.interpret(model_facts.build_facts(repo, "", made, published.headers(made)))


@pytest.mark.parametrize("log", LOGS.splitlines(), ids=lambda log: log.split()[0])
def test_tokens_and_weights_are_those_of_the_log(log: str) -> None:
    _, repo, release, ranks, length, loaded, left, tokens, dtype = log.split()
    release = max(release, "0.19.0", key=lambda text: [int(part) for part in text.split(".")])
    arguments = Arguments(tensor_parallel_size=int(ranks), max_model_len=int(length), kv_cache_dtype=dtype)
    least, most = (
        kv_cache.capacity(model(repo), arguments, round((float(left) + off) * GIB), release).tokens
        for off in (-0.005, 0.005)
    )
    assert least <= int(tokens) <= most, (least, tokens, most)
    if loaded != "-":
        found = weights.per_rank(model(repo), arguments, release)[0].bytes / GIB
        assert found == pytest.approx(float(loaded), rel=LOADED_WITHIN)
