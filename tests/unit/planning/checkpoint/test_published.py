# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints of every family against what vLLM's own model classes answered for them (judged.json).

`tests/judge/test_model_judge.py` asks vLLM again, in the image that the lab runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning.checkpoint import families, inferred, model_facts
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Facts, Model, Sharding
from ansible.module_utils.vllm_edge.planning.memory import weights

SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
MAVERICK = "meta-llama/Llama-4-Maverick-17B-128E-Instruct"
JUDGED: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "judged.json").read_text())
KEYS = published.KEYS
ANSWERS = {tuple(each.get(key) for key in KEYS): each for each in JUDGED["answers"]}


def test_every_published_checkpoint_was_judged() -> None:
    assert {repo for repo, *_ in ANSWERS} == {*published.CONFIGS, "Qwen/Qwen3-32B"}
    known = {found["architectures"][0] for found in (*published.CONFIGS.values(), *published.EAGLE3.values())}
    older = {f"Gemma{number}For{kind}" for number in (3, 4) for kind in ("ConditionalGeneration", "CausalLM")}
    older |= {"Gemma4UnifiedForConditionalGeneration"}
    # No checkpoint is published of the last; their text is that of the classes with an encoder. Eagle3LlamaForCausalLM
    # is the same class of vLLM as LlamaForCausalLMEagle3.
    text = {f"{name}ForCausalLM" for name in ("Llama4", "Qwen3_5", "Qwen3_5Moe")}
    assert set(families.FAMILIES) == known | older | text | {"Eagle3LlamaForCausalLM"}


@pytest.mark.parametrize("repo", published.PARAMETERS)
def test_parameters_are_the_hubs(repo: str) -> None:
    assert model_facts.parameters(published.facts(repo)) == published.PARAMETERS[repo]


@pytest.mark.parametrize("case", ANSWERS, ids=str)
def test_layers_and_bytes_are_vllms(case: tuple[Any, ...]) -> None:
    """On one rank of tensor parallelism, of the whole model or of one of two stages of a pipeline."""
    assert published.compare(dict(zip(KEYS, case, strict=True)), ANSWERS[case], JUDGED["version"]) == []


def test_what_other_releases_keep() -> None:
    """As the judge found with their sources: M-RoPE's rows up to 0.31, towers and their buffers on the second stage up
    to 0.32, adapters of a tied head up to 0.27."""
    qwen, llava = published.first_layers("Qwen/Qwen3-VL-30B-A3B-Instruct"), published.first_layers(published.LLAVA)
    ropes = [weights.per_rank(qwen, Arguments(), release)[0].by_kind["rope_caches"] for release in ("0.31.0", "0.32.0")]
    assert ropes == [4 * 262144 * 128 * 2 + 589824, 262144 * 128 * 2 + 589824]
    both = Arguments(pipeline_parallel_size=2)
    buffers = [rank.by_kind.get("buffers", 0) for rank in weights.per_rank(qwen, both, "0.33.0")]
    assert buffers == [2048 * 3 * 2048 * 2, 0]
    stages = weights.per_rank(llava, both, "0.33.0")
    assert stages[0].by_kind["towers"] > 2**26 and stages[1].by_kind["towers"] == 4096 * 2  # image_newline
    text = weights.per_rank(llava, Arguments(language_model_only=True), "0.33.0")[0]
    assert text.by_kind["towers"] == 4096 * 2
    small, lora = published.first_layers("Qwen/Qwen3-4B"), Arguments(enable_lora=True)
    held = [weights.per_rank(small, lora, release)[0].by_kind["adapters"] for release in ("0.27.0", "0.28.0")]
    assert held[0] - held[1] == 16 * (151936 + 2560) * 2


def take_text(repo: str, before: str, after: str) -> tuple[Model, Facts]:
    """The first layers of a checkpoint, and the facts of its text model alone, whose tensors have another prefix."""
    facts = published.facts(repo, 4)
    named = [each for each in facts.tensors if each.name.startswith((before, "lm_head", "mtp."))]
    tensors = tuple(replace(each, name=each.name.replace(before, after)) for each in named)
    return families.interpret(facts), replace(facts, config=facts.config["text_config"], tensors=tensors)


def test_llama4s_text_model_alone_is_the_same() -> None:
    """Architecture Llama4ForCausalLM, which has no encoder, and layers without RoPE as config.json lists them."""
    whole, facts = take_text(SCOUT, "language_model.", "")
    alone = families.interpret(replace(facts, config={**facts.config, "no_rope_layers": [1, 1, 1, 0]}))
    assert alone.layers == whole.layers and not alone.multimodal
    text_only = weights.per_rank(whole, Arguments(language_model_only=True), JUDGED["version"])[0]
    tower_rope = 176 * 577 * 2
    assert weights.per_rank(alone, Arguments(), JUDGED["version"])[0].bytes == text_only.bytes - tower_rope
    with pytest.raises(FactsError, match=r"no_rope_layers in config\.json has 3 entries for 4 layers"):
        families.interpret(replace(facts, config={**facts.config, "no_rope_layers": [1, 1, 0]}))


@pytest.mark.parametrize("repo", ["Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"])
def test_qwens_text_model_alone_has_positions_of_one_dimension(repo: str) -> None:
    """Qwen3_5ForCausalLM drops M-RoPE, whose cache had four times the rows up to 0.31."""
    whole, facts = take_text(repo, "model.language_model.", "model.")
    alone = families.interpret(facts)
    assert alone.layers == whole.layers
    for release, times in (("0.28.0", 3), ("0.33.0", 0)):
        both = (weights.per_rank(each, Arguments(language_model_only=True), release)[0] for each in (whole, alone))
        rope, tower = 64 * 262144 * 2, 36 * 8192 * 2
        assert next(both).bytes - next(both).bytes == times * rope + tower


def test_llavas_config_leaves_out_what_a_llama_has_by_default() -> None:
    """As the published config.json does."""
    facts = published.facts(published.LLAVA)
    left_out = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    text = {key: value for key, value in facts.config["text_config"].items() if key not in left_out}
    short = families.interpret(replace(facts, config={**facts.config, "text_config": text}))
    assert short.layers == families.interpret(facts).layers and len(short.layers) == 32


@pytest.mark.parametrize(("layer", "built"), [(-2, 23), (-1, 24), (3, 3), ([-10, 7], 15), (-30, 0), (None, 23)])
def test_llavas_encoder_ends_at_the_layer_whose_output_is_read(layer: int | list[int] | None, built: int) -> None:
    facts = published.facts(published.LLAVA)
    config = {key: value for key, value in facts.config.items() if key != "vision_feature_layer"}
    found = families.interpret(
        replace(facts, config=config if layer is None else {**config, "vision_feature_layer": layer})
    )
    parts = [part for part in found.components if part.kind == "towers"]
    assert {part.tensor.count for part in parts if ".encoder." in part.tensor.name} == {built}
    left_out = {part.tensor.name for part in parts if part.sharding is Sharding.NOT_LOADED}
    assert left_out == {f"vision_tower.vision_model.post_layernorm.{leaf}" for leaf in ("weight", "bias")}


INDEXED = [MAVERICK, "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V3"]
INDEXED += ["Qwen/Qwen3.6-27B-FP8", "Qwen/Qwen3.6-35B-A3B"]
INDEXED += [published.NEMOTRON, "Nemotron-3-Nano, latent experts"]


@pytest.mark.parametrize("repo", INDEXED)
def test_an_index_gives_the_same_shapes(repo: str) -> None:
    """Of the text model; encoders share what is left of the size, and fused experts may be transposed."""
    made = {**published.cut(published.CONFIGS[repo], 4), "num_nextn_predict_layers": 0}
    exact = list(published.headers(made))
    total = sum({"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype] * math.prod(shape) for _, dtype, shape in exact)
    how = made.get("quantization_config", {})
    found, _ = inferred.infer_headers(repo, made, how, [name for name, *_ in exact], total)
    told, wanted = (
        {(name, dtype, shape if len(shape) < 3 else math.prod(shape)) for name, dtype, shape in each}
        for each in (found, exact)
    )
    others = ("vision", "multi", "model.visual")
    left = {name for name, *_ in wanted - told if not name.startswith(others)}
    # What may be in float32.
    assert {name for name in left if not name.endswith(("A_log", "linear_attn.norm.weight"))} == set()


def test_fused_q_k_and_v_of_awq_are_divided_by_columns() -> None:
    facts = published.facts("microsoft/phi-4", 1)
    packed = [
        replace(tensor, name=tensor.name.replace("weight", "qweight"), dtype="I32", shape=(5120, 7680 // 8))
        for tensor in facts.tensors
        if "qkv_proj" in tensor.name
    ]
    found = families.interpret(replace(facts, tensors=(*facts.tensors, *packed)))
    shapes = {part.tensor.name[-14:-8]: part.tensor.shape for part in found.components if "qweight" in part.tensor.name}
    assert shapes == {"q_proj": (5120, 640), "k_proj": (5120, 160), "v_proj": (5120, 160)}


def test_experts_and_what_a_token_reads_of_them() -> None:
    """Number, number for each token, intermediate size, and sizes of dense MLPs."""
    for repo, sizes in {
        "openai/gpt-oss-20b": (32, 4, 2880, ()),
        "mistralai/Mixtral-8x7B-Instruct-v0.1": (8, 2, 14336, ()),
        "Qwen/Qwen2-57B-A14B-Instruct": (64, 8, 2560, (20480,)),
        SCOUT: (16, 1, 8192, (8192,)),
        MAVERICK: (128, 1, 8192, (8192, 16384)),
    }.items():
        model = published.first_layers(repo)
        found = (model.experts, model.experts_per_token, model.expert_intermediate_size, model.intermediate_sizes)
        assert found == sizes, repo
        parts = [part for part in model.components if part.kind == "experts"]
        assert {part.read_per_token for part in parts} == {model.experts_per_token / model.experts}


@pytest.mark.parametrize("repo", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"])
def test_qwens_encoder_is_the_same_from_the_index_and_from_records(repo: str) -> None:
    """The shapes of the tower do not follow from config.json, whose vision_config records do not have."""
    facts, made = published.facts(repo), published.CONFIGS[repo]
    names = sorted(name for name, *_ in published.headers(made))
    found, _ = inferred.infer_headers(repo, made, {}, names, model_facts.checkpoint_bytes(facts))
    index = model_facts.build_facts(repo, "", made, found, source=inferred.APPROXIMATE)
    record = replace(facts, config={key: value for key, value in made.items() if key != "vision_config"})
    assert families.interpret(index).encoder == families.interpret(record).encoder
    assert families.interpret(record).encoder == families.interpret(facts).encoder
