# SPDX-License-Identifier: Apache-2.0
"""What the planner makes of a checkpoint: layers, quantization, and what becomes of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning.checkpoint import families
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ansible.module_utils.vllm_edge.planning.contract import (
    Attention,
    Component,
    Model,
    Quantization,
    Sharding,
    Tensor,
    UnknownArchitecture,
)
from checkpoints import model, recorded

FULL, SLIDING = Attention.FULL, Attention.SLIDING


QWEN, MISTRAL, LLAMA = "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"
GEMMA, GEMMA3 = "google/gemma-4-31B-it", "google/gemma-3-27b-it"


def changed(repo: str, **changes: Any) -> Model:
    """The model with another config.json; None takes a key away."""
    facts = recorded(repo)
    text = "text_config" in facts.config
    merged = {**(facts.config["text_config"] if text else facts.config), **changes}
    config = {key: value for key, value in merged.items() if value is not None or key not in changes}
    return families.interpret(replace(facts, config={**facts.config, "text_config": config} if text else config))


def with_quantization(repo: str, quantization: Mapping[str, Any]) -> Quantization:
    return families.interpret(replace(recorded(repo), quantization=quantization)).quantization


def components(found: Model, name: str) -> list[Component]:
    return [component for component in found.components if name in component.tensor.name]


# -- architectures


def with_tensor(repo: str, *tensor: Any, **config: Any) -> Model:
    """The model with another tensor, and changed keys of its config.json."""
    facts = recorded(repo)
    return families.interpret(
        replace(facts, config={**facts.config, **config}, tensors=(*facts.tensors, Tensor(*tensor)))
    )


@pytest.mark.parametrize("architectures", [["FalconMambaForCausalLM"], [], None])
def test_an_architecture_without_bounds_is_refused_by_name(architectures: list[str] | None) -> None:
    with pytest.raises(UnknownArchitecture) as refused:
        with_tensor(QWEN, "model.layers.*.mixer.A_log", "BF16", (8192, 16), (0, 1), architectures=architectures)
    assert str(refused.value).startswith(f"Qwen/Qwen3-8B is a {(architectures or ['(none)'])[0]}, which")
    assert all(family.name in str(refused.value) for family in families.FAMILIES.values())
    assert "-e plan_override=true" in str(refused.value)


def test_a_weight_that_is_not_known_is_refused() -> None:
    with pytest.raises(FactsError, match=r"compressor\.weight \[64, 64\] is not a weight that the planner knows"):
        with_tensor(QWEN, "model.layers.*.self_attn.compressor.weight", "BF16", (64, 64), (0, 1))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("self_attn.kv_a_proj_with_mqa", r"latent attention \(MLA\)"),  # Mistral Small 4, which says it is Small 3
        ("self_attn.indexer.wk", "an indexer"),
        ("linear_attn.out_proj", "linear attention"),
    ],
)
def test_attention_of_another_family_is_refused(part: str, what: str) -> None:
    with pytest.raises(UnknownArchitecture, match=rf"MistralForCausalLM with {what}: model\.layers\.\*\.{part}"):
        with_tensor(MISTRAL, f"model.layers.*.{part}.weight", "BF16", (320, 4096), range(32))


# -- layers


@pytest.mark.parametrize(
    ("repo", "shape", "sliding", "full"),
    [
        (GEMMA, (60, 50, 10, 262144), (16, 256, 1024), (4, 512, None)),
        ("google/gemma-4-E4B-it", (42, 35, 7, 131072), (2, 256, 512), (2, 512, None)),
        ("google/gemma-4-E2B-it", (35, 28, 7, 131072), (1, 256, 512), (1, 512, None)),
        (GEMMA3, (62, 52, 10, 131072), (16, 128, 1024), (16, 128, None)),
    ],
)
def test_layers_are_those_of_the_published_sizes(
    repo: str, shape: tuple[int, ...], sliding: tuple[int, ...] | None, full: tuple[int, ...]
) -> None:
    found = model(repo)
    number = sum(layer.attention is SLIDING for layer in found.layers)
    assert (len(found.layers), number, len(found.layers) - number, found.max_position_embeddings) == shape
    seen = {(x.attention, (x.kv_heads, x.head_size, x.window_tokens)) for x in found.layers}
    assert seen == {(kind, sizes) for kind, sizes in ((SLIDING, sliding), (FULL, full)) if sizes}
    # Some layers share with the last of their type before them.
    own = {"google/gemma-4-E4B-it": 24, "google/gemma-4-E2B-it": 15}.get(repo, len(found.layers))
    shared = [(layer.attention, layer.shares_with) for layer in found.layers]
    assert {target for _, target in shared[:own]} == {None}
    assert set(shared[own:]) == ({(SLIDING, own - 2), (FULL, own - 1)} if own < len(found.layers) else set())


NEWER: dict[str, Any] = dict.fromkeys(("global_head_dim", "num_global_key_value_heads"))
NEWER["per_layer_config"] = {f"{n:02d}": {"head_dim": 512, "num_key_value_heads": 4} for n in range(5, 60, 6)}


@pytest.mark.parametrize(
    ("repo", "changes"),
    [
        pytest.param(GEMMA, {"layer_types": None}, id="layer types of Gemma 4 are derived"),
        pytest.param(GEMMA3, {"layer_types": None}, id="those of Gemma 3 too"),
        pytest.param(GEMMA, {"layer_types": [*[*[SLIDING] * 5, FULL] * 9, *[SLIDING] * 6]}, id="the last one is full"),
        pytest.param(GEMMA, NEWER, id="per_layer_config instead of older keys"),
    ],
)
def test_gemmas_config_in_other_words(repo: str, changes: dict[str, Any]) -> None:
    assert changed(repo, **changes).layers == model(repo).layers


QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 0, "layer_types": None}


@pytest.mark.parametrize(
    ("repo", "changes", "window"),
    [
        pytest.param(MISTRAL, {"sliding_window": 4096}, 4096, id="of every layer"),
        pytest.param(MISTRAL, {"sliding_window": 0}, None, id="0 is none"),
        pytest.param(MISTRAL, {}, None, id="null is none"),
        pytest.param(MISTRAL, {"sliding_window": None}, 4096, id="default of Mistral"),
        pytest.param(QWEN, QWEN_WINDOW, None, id="not switched on"),
        pytest.param(QWEN, {**QWEN_WINDOW, "use_sliding_window": True}, 4096, id="switched on"),
    ],
)
def test_window_of_the_whole_model(repo: str, changes: dict[str, Any], window: int | None) -> None:
    found = {(layer.attention, layer.window_tokens) for layer in changed(repo, **changes).layers}
    assert found == {(SLIDING if window else FULL, window)}


def test_a_window_for_some_layers() -> None:
    types = [SLIDING if index % 4 else FULL for index in range(32)]
    layers = changed(MISTRAL, sliding_window=512, layer_types=types).layers
    assert [layer.attention for layer in layers] == types
    assert {layer.window_tokens for layer in layers if layer.attention is FULL} == {None}
    with pytest.raises(FactsError, match=r"layer_types .* has 1 entries \['linear_attention'\] for 60 layers"):
        changed(GEMMA, layer_types=["linear_attention"])
    with pytest.raises(FactsError, match="sliding_window 512, and only full_attention in layer_types"):
        changed(MISTRAL, sliding_window=512, layer_types=[FULL] * 32)
    with pytest.raises(FactsError, match="a sliding window for only some layers"):
        changed(QWEN, **QWEN_WINDOW | {"use_sliding_window": True, "max_window_layers": 20})


# -- config.json against the tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 35}, "config.json says 35 layers, the tensors are of 36"),
        ({"num_key_value_heads": 4}, r"config.json says 4 KV heads of 128 for layer 0, .*k_proj\.weight has 1024 rows"),
        ({"vocab_size": 7}, r"config.json says vocab_size 7 and hidden_size 4096, .* is \[151936, 4096\]"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"dtype": None}, "config.json lacks dtype"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, r"config\.json scales RoPE without factor"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FactsError, match=rf"^Qwen/Qwen3-8B: {message}"):
        changed(QWEN, **changes)


def test_a_head_that_is_not_tied_must_be_there() -> None:
    facts = recorded(QWEN)
    headless = replace(facts, tensors=tuple(tensor for tensor in facts.tensors if tensor.name != "lm_head.weight"))
    with pytest.raises(FactsError, match=r"tie_word_embeddings is false, and there is no lm_head\.weight"):
        families.interpret(headless)


# -- RoPE


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("repo", "changes", "caches"),
    [
        (GEMMA, {}, ((256, 262144), (512, 262144))),
        # Its full layers scale by 8, linearly: eight times the rows.
        (GEMMA3, {}, ((128, 131072), (128, 1048576))),
        (LLAMA, {}, ((128, 131072),)),
        (QWEN, {"rope_parameters": YARN, "rope_scaling": None}, ((128, 131072),)),
        (QWEN, {"rope_parameters": None, "rope_scaling": YARN}, ((128, 131072),)),
    ],
)
def test_rope_caches(repo: str, changes: dict[str, Any], caches: tuple[tuple[int, int], ...]) -> None:
    assert changed(repo, **changes).rope_caches == caches


def test_float32_is_computed_in_bfloat16() -> None:
    dtypes = [changed(QWEN, dtype=None, torch_dtype=said).dtype for said in ("float32", "float16")]
    assert dtypes == ["bfloat16", "float16"]


# -- quantization


WEIGHTS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True}
CT, FP8 = "compressed-tensors", frozenset({"FP8"})
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}


def _mix(*algorithms: str) -> dict[str, Any]:
    layers = {f"layer{index}": {"quant_algo": name} for index, name in enumerate(algorithms)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


PRODUCED, NVFP4 = {"producer": {"name": "modelopt"}}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (recorded(GEMMA).quantization, Quantization("none", 16)),
        (recorded("nvidia/Gemma-4-31B-IT-NVFP4").quantization, Quantization("modelopt_fp4", 4, 16, "fp8")),
        (
            recorded("google/gemma-4-31B-it-qat-w4a16-ct").quantization,
            Quantization(CT, 4, 32, None, frozenset({"W4A16"})),
        ),
        (recorded("RedHatAI/gemma-4-31B-it-FP8-dynamic").quantization, Quantization(CT, 8, schemes=FP8)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Quantization("modelopt", 8)),
        (
            {**PRODUCED, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            Quantization("modelopt", 8, None, "fp8"),
        ),
        ({**PRODUCED, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, Quantization("modelopt_fp4", 4, 16)),
        ({**NVFP4, "kv_cache_scheme": DYNAMIC}, Quantization("modelopt_fp4", 4, 16)),
        ({**NVFP4, "quant_algo": "W4A16_NVFP4"}, Quantization("modelopt_fp4", 4, 16)),
        (_mix("FP8", "NVFP4"), Quantization("modelopt_mixed", 4, 16)),
        (_mix("FP8"), Quantization("modelopt_mixed", 8)),
        (
            {"quant_method": "compressed-tensors", **WEIGHTS, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            Quantization(CT, 8, None, "fp8", FP8),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8", 8, 128)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Quantization("fp8", 8)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Quantization("awq", 4, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4, 64)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Quantization("gptq", 8)),
        ({"quant_method": "awq_marlin", "bits": 4, "group_size": 64}, Quantization("awq", 4, 64)),
        ({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}, Quantization("modelopt_mxfp8", 8, 32)),
        ({**AUTO_ROUND, "sym": True, "extra_config": {"lm_head": {"bits": 16}}}, Quantization("gptq", 4, 128)),
        ({**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, Quantization("awq", 4, 128)),
    ],
    ids=str,
)
def test_quantization_as_it_is_written(config: Mapping[str, Any], expected: Quantization) -> None:
    assert with_quantization(QWEN, config) == expected


def _groups(weights: str, inputs: str = "", form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """compressed-tensors; `weights` are bits, type and strategy, and `inputs` bits and type."""
    given = zip(("num_bits", "type", "strategy", "group_size"), weights.split(), strict=False)
    group: dict[str, Any] = {"weights": {key: int(value) if value.isdecimal() else value for key, value in given}}
    if inputs:
        group["input_activations"] = {"num_bits": int(inputs.split()[0]), "type": inputs.split()[1]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (_groups("4 int group 128"), "W4A16"),
        (_groups("8 int channel"), "W8A16"),
        (_groups("8 int channel", "8 int", "int-quantized"), "W8A8 INT8"),
        (_groups("8 float block", "8 float", "float-quantized"), "FP8"),
        (_groups("8 float tensor", "", "naive-quantized"), "FP8"),
        (_groups("4 float tensor_group 16", "4 float", "nvfp4-pack-quantized"), "NVFP4"),
        (_groups("4 float tensor_group 16", "", "nvfp4-pack-quantized"), "NVFP4"),
        (_groups("4 float group 32", "", "mxfp4-pack-quantized"), "MXFP4"),
        (_groups("8 float group 32", "8 float", "mxfp8-quantized"), "MXFP8"),
        (_groups("4 int group 128", "8 float"), "W4A8 FP8"),
    ],
    ids=str,
)
def test_schemes_of_compressed_tensors(config: Mapping[str, Any], scheme: str) -> None:
    assert with_quantization(QWEN, config).schemes == {scheme}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *(({"quant_method": name}, name) for name in ("bitsandbytes", "quark", "torchao", "fbgemm_fp8", "fp_quant")),
        ({"load_in_4bit": True}, "without quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ"),
        (_mix("NVFP4", "W4A8_AWQ"), "modelopt MIXED_PRECISION of NVFP4, W4A8_AWQ"),
        (_mix(), "modelopt MIXED_PRECISION of MIXED_PRECISION"),
        ({"quant_method": "awq"}, "awq of None bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "sym": False}, "gptq of 4 bits, asymmetric"),
        ({**AUTO_ROUND, "bits": 2}, "auto-round of 2 bits"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "auto-round of 4 bits, mx_fp"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, "auto-round of 4 bits, int, auto_round:llm"),
        ({**AUTO_ROUND, "extra_config": {".*mlp.*": {"bits": 2}}}, "auto-round of 4 bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without weights"),
        (_groups("3 int group 128"), "compressed-tensors W3A16 of int by group in pack-quantized"),
        (_groups("4 int group 128", "8 int"), "compressed-tensors W4A8 of int by group in pack-quantized"),
        (_groups("4 float group 32", "8 float", "mxfp4-pack-quantized"), "compressed-tensors W4A8 of float"),
        (_groups("8 int channel", sparsity_config={"targets": ["Linear"]}), "compressed-tensors with sparsity_config"),
        (_groups("8 int channel", transform_config={"config_groups": {}}), "compressed-tensors with transform_config"),
        (_groups("8 int channel", kv_cache_scheme={"num_bits": 8, "type": "int"}), "with kv_cache_scheme int8"),
    ],
    ids=str,
)
def test_another_quantization_is_refused(config: Mapping[str, Any], said: str) -> None:
    with pytest.raises(FactsError, match=f"does not know the quantization '.*{said}.*; it knows"):
        with_quantization(QWEN, config)


# -- tensors


def sharding(found: Model, name: str) -> set[tuple[str, Sharding, int | None]]:
    return {(part.kind, part.sharding, part.kv_heads) for part in components(found, name)}


def test_a_tied_head_is_read_and_not_loaded_again() -> None:
    found = with_tensor(GEMMA, "lm_head.weight", "BF16", (262144, 5376))
    assert sharding(found, "lm_head") == {("embeddings", Sharding.NOT_LOADED, None)}
    (table,) = components(found, "embed_tokens.weight")
    assert table.read_per_token == 1.0


def test_kv_heads_are_told_apart_where_shapes_are_not() -> None:
    # 16 heads of 256 and 8 of 512 are both 4096 rows.
    facts = recorded(GEMMA)
    config = {**facts.config, "text_config": {**facts.config["text_config"], "num_global_key_value_heads": 8}}
    same = tuple(
        replace(tensor, shape=(4096, 5376)) if "k_proj" in tensor.name and tensor.shape[0] == 2048 else tensor
        for tensor in facts.tensors
    )
    k = Tensor("model.language_model.layers.*.self_attn.k_proj.weight", "BF16", (4096, 5376), tuple(range(60)))
    tensors = (*(tensor for tensor in same if tensor.name != k.name), k)
    found = families.interpret(replace(facts, config=config, tensors=tensors))
    heads = {part.kv_heads: len(part.tensor.layers or ()) for part in components(found, "k_proj.weight")}
    assert heads == {16: 50, 8: 10}


def test_layers_that_share_a_cache_have_twice_the_mlp() -> None:
    """Of E2B, and not of E4B."""
    assert model("google/gemma-4-E2B-it").intermediate_sizes == (6144, 12288)
    assert model("google/gemma-4-E4B-it").intermediate_sizes == (10240,)


def test_towers() -> None:
    whole = model(GEMMA)
    assert whole.multimodal
    assert sharding(whole, "vision_tower") == {("towers", Sharding.REPLICATED, None)}
    facts = recorded(GEMMA)
    text = families.interpret(replace(facts, config={**facts.config, "architectures": ["Gemma4ForCausalLM"]}))
    assert not text.multimodal
    assert sharding(text, "vision_tower") == {("towers", Sharding.NOT_LOADED, None)}
    siglip = model(GEMMA3)
    assert sharding(siglip, "fc1") == {("towers", Sharding.SHARDED, None)}
    assert sharding(siglip, "fc2.bias") == sharding(siglip, "multi_modal") == {("towers", Sharding.REPLICATED, None)}


@pytest.mark.parametrize(
    ("leaf", "dtype", "shape", "of", "expected"),
    [
        ("g_idx", "I32", (12288,), "down", Sharding.SHARDED),
        ("g_idx", "I32", (4096,), "gate", Sharding.REPLICATED),
        ("bias", "BF16", (4096,), "down", Sharding.REPLICATED),
    ],
)
def test_tensors_of_other_quantizers(leaf: str, dtype: str, shape: Any, of: str, expected: Sharding) -> None:
    extra = (f"model.layers.*.mlp.{of}_proj.{leaf}", dtype, shape, tuple(range(36)))
    (part,) = [part for part in with_tensor(QWEN, *extra).components if part.tensor == Tensor(*extra)]
    assert (part.kind, part.sharding) == ("mlp", expected)


NANO = published.facts(published.NEMOTRON, 8)


def test_layers_of_nemotron_have_two_forms_in_config_json_and_its_tensors_two_prefixes() -> None:
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    types = [names[letter] for letter in NANO.config["hybrid_override_pattern"]]
    config = {**NANO.config, "layers_block_type": types, "hybrid_override_pattern": None}
    tensors = tuple(replace(tensor, name=tensor.name.replace("backbone.", "model.", 1)) for tensor in NANO.tensors)
    first, other = families.interpret(NANO), families.interpret(replace(NANO, config=config, tensors=tensors))
    assert first.layers == other.layers and first.components == other.components
    assert [layer.attention.value[0] for layer in first.layers] == list("lnlnlfnlnl")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hybrid_override_pattern": "MEMEM*EX"}, r"has layers \['\*', 'E', 'M', 'X'\]; the planner knows M, mamba"),
        ({"hybrid_override_pattern": "MEMEMMEM"}, "models with both Mamba and attention"),
        ({"mamba_ssm_cache_dtype": None}, "lacks mamba_ssm_cache_dtype"),
    ],
)
def test_a_nemotron_of_another_kind_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FactsError, match=said):
        families.interpret(replace(NANO, config={**NANO.config, **changes}))
