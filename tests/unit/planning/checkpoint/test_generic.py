# SPDX-License-Identifier: Apache-2.0
"""The generic plan of an unknown architecture: published checkpoints under another architecture's name are compared
with the exact plan of their own, which vLLM's model classes confirmed (test_published.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import checkpoints
import kv_models
import published
import pytest
from ansible.module_utils.vllm_edge.planning import command, planner, serve_options
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts, recording
from ansible.module_utils.vllm_edge.planning.checkpoint.generic import (
    LEAST_OF_WEIGHTS,
    MOST_OF_WEIGHTS,
    bound_encoder,
)
from ansible.module_utils.vllm_edge.planning.contract import (
    Arguments,
    EnginePlan,
    Facts,
    Gpu,
    Model,
    Tensor,
    UnknownArchitecture,
    Verdict,
)
from ansible.module_utils.vllm_edge.planning.memory import overhead, weights

RELEASE, GIB = "0.32.0", 2**30
QWEN = "Qwen/Qwen2.5-7B-Instruct"
REPOS = (
    "google/gemma-2-9b-it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "microsoft/Phi-4-mini-instruct",
    "LGAI-EXAONE/EXAONE-4.0-32B",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "Qwen2.5-7B-Instruct, FP8 by channel",
    "google/gemma-3-27b-it",
    "google/gemma-4-31B-it",
    "nvidia/Gemma-4-31B-IT-NVFP4",
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
)


def facts_of(repo: str) -> Facts:
    return published.facts(repo) if repo in published.CONFIGS else checkpoints.recorded(repo)


def rename(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, config={"model_type": "new", **facts.config, "architectures": ["NewForCausalLM"], **changes})


def generic(repo: str, **changes: Any) -> Model:
    return families.interpret(rename(facts_of(repo), **changes))


def plan(model: Model, gpu_gib: float, size: int = 1, **more: Any) -> EnginePlan:
    gpus = [Gpu("NVIDIA L4", int(gpu_gib * GIB))] * (size * more.get("pipeline_parallel_size", 1))
    engine = checkpoints.engine("m", size, max_num_seqs=16, **more)
    return planner.plan("p", [engine], {"m": model}, gpus, RELEASE).engines[0]


@pytest.mark.parametrize("repo", REPOS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_planned_is_an_upper_bound(repo: str, size: int) -> None:
    known, found = families.interpret(facts_of(repo)), generic(repo)
    most, least = (
        overhead.activations(each, Arguments(tensor_parallel_size=size), 65536).value for each in (found, known)
    )
    assert most >= least
    arguments = Arguments(tensor_parallel_size=size)
    exact, bound = (weights.per_rank(each, arguments, RELEASE)[0].bytes for each in (known, found))
    assert 1.01 < bound * MOST_OF_WEIGHTS / exact < 1.11
    whole = weights.per_rank(found, Arguments(), RELEASE)[0].bytes
    assert exact * size / whole > 0.97 > LEAST_OF_WEIGHTS
    for tokens in (100, 2000, 32768):
        asked = replace(arguments, max_model_len=tokens)
        assert kv_models.needed(found, asked, RELEASE) >= kv_models.needed(known, asked, RELEASE)


def test_a_weight_that_no_rule_knows_is_on_every_gpu() -> None:
    facts = rename(facts_of(QWEN))
    strange = Tensor("model.layers.*.mlp.second.weight", "BF16", (64, 64), (0, 1))
    found = families.interpret(replace(facts, tensors=(*facts.tensors, strange)))
    before, after = (
        weights.per_rank(each, Arguments(tensor_parallel_size=4), RELEASE)[0].bytes for each in (generic(QWEN), found)
    )
    assert after - before == 2 * 64 * 64 * 2


def test_keys_that_are_the_values_too_are_in_memory_twice() -> None:
    facts = facts_of(QWEN)
    keys = tuple(tensor for tensor in facts.tensors if ".v_proj." not in tensor.name)
    found = families.interpret(rename(replace(facts, tensors=keys), attention_k_eq_v=True))
    assert (
        weights.per_rank(found, Arguments(), RELEASE)[0].bytes
        == weights.per_rank(generic(QWEN), Arguments(), RELEASE)[0].bytes
    )


def test_layers_beyond_those_of_config_json_count() -> None:
    """Layers for speculative decoding."""
    facts = facts_of(QWEN)
    more = tuple(replace(tensor, layers=(*tensor.layers, 28)) if tensor.layers else tensor for tensor in facts.tensors)
    assert len(families.interpret(rename(replace(facts, tensors=more))).layers) == 29


@pytest.mark.parametrize("name", [name.removesuffix("ForCausalLM") for name in families._PLAN_NEEDS])
def test_what_a_plan_would_need_is_said_of_families_that_are_asked_for(name: str) -> None:
    facts = rename(facts_of(QWEN), architectures=[f"{name}ForCausalLM"], hc_mult=4)
    with pytest.raises(UnknownArchitecture, match=rf"is a {name}ForCausalLM, .*\. A plan of it needs .* (cache|state)"):
        families.interpret(facts)
    asked = "GlmMoeDsa DeepseekV4 KimiLinear GraniteMoeHybrid FalconH1 Bamba Jamba Plamo2 Zamba2 NemotronHPuzzle"
    assert {f"{each}ForCausalLM" for each in asked.split()} == families._PLAN_NEEDS.keys()


@pytest.mark.parametrize(
    ("name", "shape", "changes", "why"),
    [
        ("model.layers.*.x.A_log", (64,), {}, "A_log belongs to state-space or linear attention"),
        ("model.layers.*.linear_attn.in_proj.weight", (64, 64), {}, "belongs to state-space or linear attention"),
        ("model.layers.*.encoder_attn.k_proj.weight", (64, 64), {}, "belongs to an encoder"),
        ("model.layers.*.self_attn.kv_b_proj.weight", (4096, 512), {}, r"belongs to latent attention \(MLA\)"),
        ("model.layers.*.self_attn.*.o_proj.weight", (64, 64), {}, "belongs to several attentions"),
        ("model.layers.*.attn.k_proj.weight", (4096, 3584), {}, r"k_proj\.weight has 4096 outputs, and .* says 512"),
        ("model.layers.*.attn.v_proj.scales", (28, 4096), {}, r"v_proj\.scales has 4096 outputs, and .* says 512"),
        ("model.layers.*.attn.k_proj.weight", (512, 3584), {}, "the tensors are of 29 attentions for 28 layers"),
        ("draft.layers.*.self_attn.k_proj.weight", (512, 3584), {}, "the tensors are of 29 attentions for 28 layers"),
        # DeepSeek V4, by vLLM 0.32.0 (models/deepseek_v4/compressor.py, models/deepseek_v4/amd/model.py).
        ("layers.*.attn.indexer.compressor.wkv.weight", (256, 4096), {}, "an indexer or a compressor"),
        ("layers.*.attn.compressor.ape", (4, 1024), {}, "an indexer or a compressor"),
        ("layers.*.hc_attn_fn", (24, 16384), {}, r"what layers\.\*\.hc_attn_fn is for, the planner does not know"),
        ("layers.*.attn.wo_a.weight", (64, 64), {}, r"what layers\.\*\.attn\.wo_a\.weight is for"),
        ("model.layers.*.conv.conv.weight", (64, 1, 3), {}, "is for, the planner does not know"),
        ("model.layers.*.norm.weight", (64,), {"hc_mult": 4}, "hc_mult in config.json may change the memory"),
        ("model.layers.*.norm.weight", (64,), {"index_topk": 512}, "index_topk in config.json may change"),
        ("model.layers.*.norm.weight", (64,), {"text_config": {"linear_num_key_heads": 16}}, "linear_num_key_heads in"),
        (
            "model.layers.*.norm.weight",
            (64,),
            {"layer_types": ["compressed_sparse_attention"] * 28},
            "layer_types in config.json has compressed_sparse_attention",
        ),
        ("model.layers.*.norm.weight", (64,), {"vocab_size": None}, "config.json lacks vocab_size"),
        ("model.layers.*.mlp.experts.w1.weight", (64, 64), {}, "config.json lacks num_experts or num_local_experts or"),
        (
            "model.layers.*.mlp.experts.w1.weight",
            (64, 64),
            {"num_experts": 8},
            "config.json lacks num_experts_per_tok or top_k_experts",
        ),
        ("model.layers.*.norm.weight", (64,), {"model_type": None}, "config.json lacks model_type"),
    ],
)
def test_what_has_no_upper_bound_is_refused(
    name: str, shape: tuple[int, ...], changes: Mapping[str, Any], why: str
) -> None:
    facts = rename(facts_of(QWEN), **changes)
    with pytest.raises(UnknownArchitecture, match=f"^{QWEN} is a NewForCausalLM, which .* is not possible: .*{why}"):
        families.interpret(replace(facts, tensors=(*facts.tensors, Tensor(name, "BF16", shape, (0,)))))


ENCODERS = ("BertModel", "XLMRobertaModel", "ModernBertForSequenceClassification", "Qwen3ForSequenceClassification")


@pytest.mark.parametrize("architecture", [*ENCODERS, "Qwen3Model", "DiffusionGemmaForBlockDiffusion"])
def test_what_generates_no_text_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(UnknownArchitecture, match=f"^{QWEN} is a {architecture}, which .* no tokens per second"):
        generic(QWEN, architectures=[architecture])


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "NewForCausalLM"])
def test_attention_in_both_directions_has_no_kv_cache(architecture: str) -> None:
    for key, value in {"is_causal": False, "use_bidirectional_attention": True}.items():
        with pytest.raises(
            UnknownArchitecture, match=f"says {key} {str(value).lower()} in config.* mostly no KV cache"
        ):
            generic(QWEN, architectures=[architecture], **{key: value})
        assert generic(QWEN, architectures=[architecture], **{key: None}).layers


def test_a_record_has_all_keys_of_an_unknown_architecture() -> None:
    """So that its plan is refused for the same keys as that of the files."""
    facts = rename(facts_of(QWEN), hc_mult=4)
    again = model_facts.parse_record(QWEN, recording.record(facts, "here"), "")
    with pytest.raises(UnknownArchitecture, match="hc_mult in config"):
        families.interpret(again)


WITHOUT = {
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "intermediate_size_mlp in config.json",
    "openai/gpt-oss-20b": "mxfp4",
    "google/gemma-4-E4B-it": "hidden_size_per_layer_input in",
}


@pytest.mark.parametrize("repo", WITHOUT)
def test_sizes_that_config_json_does_not_have_are_refused(repo: str) -> None:
    with pytest.raises(UnknownArchitecture, match=WITHOUT[repo]):
        generic(repo)


@pytest.mark.parametrize(
    ("gpu_gib", "size", "more", "verdict", "said"),
    [
        (22.0, 1, {}, Verdict.FITS, "MiB stay free"),
        (14.7, 1, {}, Verdict.CANNOT_SAY, "NewForCausalLM, and weights and KV .* it would be oom_weights"),
        (11.0, 1, {}, Verdict.OOM_WEIGHTS, "Weights need"),
        (15.4, 1, {}, Verdict.CANNOT_SAY, "With them it would be no_kv: "),
        (15.8, 1, {}, Verdict.CANNOT_SAY, "it would be kv_below_max_model_len: "),
        (22.0, 1, {"pipeline_parallel_size": 2}, Verdict.CANNOT_SAY, "each stage of its pipeline has is not known"),
        (22.0, 3, {}, Verdict.UNSUPPORTED_SHAPE, "is not divisible by tensor_parallel_size 3"),
        (22.0, 1, {"extra_args": ["--enable-lora"]}, Verdict.CANNOT_SAY, "The plan does not count .*enable-lora"),
    ],
)
def test_verdicts(gpu_gib: float, size: int, more: Mapping[str, Any], verdict: Verdict, said: str) -> None:
    found = plan(generic(QWEN), gpu_gib, size, **more)
    assert found.verdict is verdict
    assert re.search(said, found.reason)
    assert found.advice[0].startswith("this plan is approximate: generic, because the planner does not know NewForC")
    changes = [fix.change for fix in found.fixes]
    assert "kv_below" not in found.reason or (changes[0], changes[-1]) == ("max_num_seqs: 8", "max_model_len: 3072")


TEXT_ONLY = {"limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0)}


@pytest.mark.parametrize(
    ("gpu_gib", "more", "verdict", "said"),
    [
        (139.8, {"max_model_len": 262144}, Verdict.FITS, "stay free"),
        (139.8, {"max_model_len": 262144, "gpu_memory_utilization": 0.9}, Verdict.FITS, "stay free"),
        (66.0, {}, Verdict.FITS, "stay free"),
        (61.0, {}, Verdict.CANNOT_SAY, "encoders take up to 2,560 MiB for images, .* With them it would be no_kv: "),
        (61.0, {"gpu_memory_utilization": 0.99}, Verdict.CANNOT_SAY, "up to 2,560 MiB .* would be no_kv: "),
        (61.0, TEXT_ONLY, Verdict.FITS, "stay free"),
        (50.0, {}, Verdict.OOM_WEIGHTS, "Weights need"),
    ],
)
def test_an_encoder_decides_only_where_it_may(
    gpu_gib: float, more: Mapping[str, Any], verdict: Verdict, said: str
) -> None:
    found = plan(generic("Qwen/Qwen3-VL-30B-A3B-Instruct"), gpu_gib, **more)
    assert found.verdict is verdict, found.reason
    assert re.search(said, found.reason), found.reason
    text_only = [fix.settings for fix in found.fixes if fix.settings == TEXT_ONLY]
    assert bool(text_only) is (verdict is Verdict.CANNOT_SAY), found.fixes
    if verdict is Verdict.FITS and more is not TEXT_ONLY:
        assert any("what its encoders need" in advice for advice in found.advice)


def test_the_longest_context_leaves_room_for_an_encoder() -> None:
    asked = serve_options.read(["-tp", "1"], RELEASE)
    gpus = [Gpu("NVIDIA H100 80GB HBM3", 79 * GIB)]
    ((planned, _, _),) = command.plan_layouts(generic("Qwen/Qwen3-VL-30B-A3B-Instruct"), gpus, asked, RELEASE).values()
    assert (planned.verdict, planned.engines[0].max_model_len) == (Verdict.FITS, 32768)


def test_the_bound_of_an_encoder_is_above_what_a_layer_of_it_holds() -> None:
    """Qwen3-VL (0.32.0 qwen3_vl.py, qwen2_5_vl.py): residual, norm, and the inputs of the MLP before and after its
    activation, for each of four patches; the output and three of deepstack, for each token."""
    model = generic("Qwen/Qwen3-VL-30B-A3B-Instruct")
    layer = 2 * (4 * (2 * 1152 + 2 * 4304) + 4 * 2048)
    for batch, length in ((2048, 4096), (65536, 4096), (2048, 262144)):
        assert bound_encoder(model, batch, length) > layer * max(batch, length, 16384)


def test_what_does_not_depend_on_what_is_unknown_is_refused() -> None:
    model = generic(QWEN)
    asked = plan(model, 22.0, gpu_memory_utilization=0.999)
    assert (asked.verdict, asked.fix) == (Verdict.NOT_FREE, "gpu_memory_utilization: 0.99")
    # All layers have full attention of the sizes in config.json, or some may have a window.
    for windows, verdict in ((False, Verdict.KV_BELOW_MAX_MODEL_LEN), (True, Verdict.CANNOT_SAY)):
        found = plan(generic(QWEN, use_sliding_window=windows), 15.2, gpu_memory_utilization=0.97, max_model_len=32768)
        assert found.verdict is verdict, found.reason


def test_inferred_facts_are_named_in_the_source() -> None:
    facts = replace(rename(facts_of(QWEN)), source="recorded: approximate: 15.2 GB by config.json")
    source = families.interpret(facts).facts.source
    assert source.startswith("approximate: generic, because the planner does not know NewForCausalLM")
    assert "(15.2 GB by config.json)" in source
