# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: how --speculative-config is read, what a drafter takes, and what the plan cannot say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kv_models
import published
import pytest
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.inventory.engine_arguments import parse_arguments
from ansible.module_utils.vllm_edge.planning import planner, speculation
from ansible.module_utils.vllm_edge.planning.checkpoint import families, headers, model_facts, recording
from ansible.module_utils.vllm_edge.planning.contract import Arguments, EnginePlan, Gpu, Model, Speculation, Verdict
from ansible.module_utils.vllm_edge.planning.memory import kv_cache, overhead, weights
from checkpoints import DEFAULT, GIB, MIB, engine

H200 = Gpu("NVIDIA H200", round(139.8 * GIB))
V3 = families.interpret(published.facts("deepseek-ai/DeepSeek-V3"))
SMALL = published.qwen3((28, 1024, 3072, 16, 8, 151936, 40960), True)


def interpret(repo: str, made: dict[str, Any]) -> Model:
    return families.interpret(model_facts.build_facts(repo, "", made, published.headers(made)))


QWEN, SMALL_QWEN = interpret("Qwen/Qwen3-32B", published.QWEN3_32B), interpret("Qwen/Qwen3-0.6B", SMALL)
MODELS: dict[str, Model] = {
    **{"v3": V3, "qwen": QWEN, "Qwen/Qwen3-0.6B": SMALL_QWEN, "eagle3": published.eagle3("eagle3")},
    "shared": published.eagle3("eagle3 of speculators"),
    "short": interpret("short", {**SMALL, "max_position_embeddings": 4096}),
    "other words": interpret("other words", {**SMALL, "vocab_size": 151000}),
    "text": replace(published.first_layers("Qwen/Qwen3.5-4B"), architecture="Qwen3_5ForCausalLM", multimodal=False),
    "NVFP4": published.first_layers("Qwen3.5-4B, modelopt"),
    "gpt-oss": families.interpret(published.facts("openai/gpt-oss-20b", 4)),
}


def plan(name: str, config: Any, size: int = 2, version: str = DEFAULT, **more: Any) -> EnginePlan:
    words = ["--speculative-config", config if isinstance(config, str) else json.dumps(config)] if config else []
    wanted = {"max_model_len": 16384, "gpu_memory_utilization": 0.9, "max_num_seqs": 64, **more, "extra_args": words}
    ranks = size * more.get("pipeline_parallel_size", 1)
    return planner.plan("p", [engine(name, size, **wanted)], MODELS, [H200] * ranks, version).engines[0]


@pytest.mark.parametrize(
    ("words", "method", "tokens", "draft", "uncounted"),
    [
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'], "mtp", 2, "", ""),
        (['-sc={"method": "glm4_moe_mtp", "num-speculative-tokens": 1}'], "mtp", 1, "", ""),
        (["--spec-method", "mtp", "--spec-tokens=3", "-sc.draft_sample_method=greedy"], "mtp", 3, "", ""),
        (["-sc.model=a/b_eagle3", "-sc.num_speculative_tokens=3"], "eagle3", 3, "a/b_eagle3", ""),
        (["-sc.model=a/EAGLE-b", "--spec-tokens", "3"], "eagle", 3, "a/EAGLE-b", ""),
        (["--spec-model", "a/b", "--spec-tokens", "5"], "draft_model", 5, "a/b", ""),
        (['-sc={"model": "[ngram]", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'], "ngram", 4, "", ""),
        (['-sc={"method": "suffix"}'], "suffix", 24, "", ""),
        (['-sc={"method": "medusa", "model": "a/b", "num_speculative_tokens": 4}'], "medusa", 0, "a/b", "the method"),
        (['-sc={"method": "mtp"}'], "mtp", 0, "", "num_speculative_tokens"),
        (["--spec-tokens=2"], "draft_model", 0, "", "without a model"),
        (['-sc={"method": "mtp", "num_speculative_tokens": 0}'], "mtp", 0, "", "num_speculative_tokens"),
        (["-sc.method=mtp", "-sc.draft_sample_method=probabilistic"], "mtp", 0, "", "'draft_sample_method' in it"),
        (["-sc={}x"], "", 0, "", "no JSON object"),
        (["-sc.model=a/b", "-sc.quantization=fp8", "--spec-tokens=4"], "draft_model", 0, "a/b", "'quantization' in it"),
    ],
)
def test_reading(words: list[str], method: str, tokens: int, draft: str, uncounted: str) -> None:
    found = speculation.read(parse_arguments(words)[0])
    assert found and (found.method, found.tokens, found.draft) == (method, tokens, draft)
    assert uncounted in found.uncounted and bool(uncounted) == bool(found.uncounted)
    assert speculation.read(parse_arguments(["--speculative-config", "null", "--max-num-seqs=4"])[0]) is None


@pytest.mark.parametrize(("size", "version"), [(1, "0.19.0"), (2, "0.28.0"), (4, DEFAULT)])
def test_a_drafters_layers_are_layers_like_the_others(size: int, version: str) -> None:
    """As the judge of the KV cache has them: one list of layers, also beside sliding attention."""
    sliding = [kv_models.sliding(i, 8, 64, 128) if i % 2 else kv_models.full(i, 8, 64) for i in range(24)]
    for layers in ([kv_models.full(index, 8, 128) for index in range(8)], sliding):
        extra = [kv_models.full(len(layers), 8, 80 if layers is not sliding else 64)]
        whole, arguments = kv_models.model([*layers, *extra]), Arguments(tensor_parallel_size=size, max_model_len=9000)
        drafting = replace(kv_models.model(layers), drafter=kv_models.model([replace(extra[0], index=0)]))
        assert kv_cache.capacity(drafting, arguments, 5 * GIB, version) == kv_cache.capacity(
            whole, arguments, 5 * GIB, version
        )
        bare = kv_cache.capacity(kv_models.model(layers), arguments, 5 * GIB, version)
        assert bare.max_concurrency > kv_cache.capacity(whole, arguments, 5 * GIB, version).max_concurrency


def test_multi_token_prediction_takes_the_last_layer_of_the_checkpoint() -> None:
    """Beside its 61 layers V3 has 11.6 GiB for it, without the table of embeddings and the head that it shares."""
    bare, found = plan("v3", None, 8), plan("v3", {"method": "deepseek_mtp", "num_speculative_tokens": 1}, 8)
    assert (bare.verdict, found.verdict) == (Verdict.FITS, Verdict.FITS)
    assert [group.layers for group in found.kv_groups] == [62] and [group.layers for group in bare.kv_groups] == [61]
    one = weights.per_rank(families.interpret_drafting(V3), Arguments(tensor_parallel_size=8), DEFAULT)[0].bytes
    assert found.gpus[0].weights_bytes == bare.gpus[0].weights_bytes + one
    assert one == pytest.approx(1.55 * GIB, rel=0.01)
    # A plan whose bytes are just those of the engine without drafts would not hold one with them.
    room = (bare.gpus[0].weights_bytes + bare.gpus[0].context_bytes + one // 2) / H200.cuda_total_bytes
    tight = [Gpu("NVIDIA H200", round(H200.cuda_total_bytes * room))] * 8
    wanted = engine("v3", 8, max_num_seqs=4, enforce_eager=True, extra_args=["-sc.method=mtp", "--spec-tokens=1"])
    assert planner.plan("p", [wanted], MODELS, tight, DEFAULT).verdict is Verdict.OOM_WEIGHTS


def test_a_draft_model_keeps_its_own_table_and_shares_equal_rope_caches() -> None:
    bare, found = plan("qwen", None), plan("qwen", {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5})
    arguments = Arguments(tensor_parallel_size=2)
    alone = weights.per_rank(SMALL_QWEN, arguments, DEFAULT)[0]
    more = found.gpus[0].weights_bytes - bare.gpus[0].weights_bytes
    assert more == alone.bytes - alone.by_kind["rope_caches"] and "embeddings" in alone.by_kind
    assert [group.layers for group in found.kv_groups] == [64 + 28]


def test_eagle3_may_share_its_table_of_embeddings() -> None:
    """Whether its values are those of the model, only vLLM can tell when it loads them."""
    own, shared = (
        plan("qwen", {"method": "eagle3", "model": name, "num_speculative_tokens": 3}) for name in ("eagle3", "shared")
    )
    table = 151936 * 5120 * 2 // 2 // MIB
    assert own.uncertainty_mib[0] - shared.uncertainty_mib[0] == pytest.approx(table, abs=1)
    assert (own.gpus[0].weights_bytes - shared.gpus[0].weights_bytes) / MIB == pytest.approx(table, rel=0.1)


@pytest.mark.parametrize("version", ["0.19.0", DEFAULT])
@pytest.mark.parametrize("config", [{"method": "ngram", "num_speculative_tokens": 4}, {"method": "suffix"}])
def test_drafts_without_a_model_take_no_weights(config: dict[str, Any], version: str) -> None:
    bare, found = plan("qwen", None, version=version), plan("qwen", config, version=version)
    assert found.verdict is Verdict.FITS and found.gpus[0].weights_bytes == bare.gpus[0].weights_bytes
    assert [group.layers for group in found.kv_groups] == [64]
    # What verifies drafts takes memory, whether in the profile or when the second model runner warms up.
    assert found.gpus[0].overhead_bytes > bare.gpus[0].overhead_bytes


def test_the_advice_has_the_interval_of_the_speed() -> None:
    """Between no draft accepted, which is slower than without drafts, and all of them."""
    found = plan("qwen", {"model": "eagle3", "num_speculative_tokens": 3}, version="0.19.0")
    (said,) = (line for line in found.advice if "1 to 4 tokens in a step" in line)
    low, high = (int(word) for word in said.split("here ")[1].split(" tok/s")[0].split(" to "))
    assert found.decode_tok_s and low < found.decode_tok_s.low < found.decode_tok_s.high < high
    assert high < 4 * found.decode_tok_s.high
    assert found.decode_tok_s == plan("qwen", None, version="0.19.0").decode_tok_s
    # The first model runner profiles one draft of each of the 64 sequences; the second verifies all when it starts.
    more = 16 * 2 * 64 * 151936 // MIB + 1
    assert any(f"need up to {more:,} MiB more" in line for line in found.advice)
    later = plan("qwen", {"model": "eagle3", "num_speculative_tokens": 3}, version="0.33.0")
    assert not any("profile verifies" in line for line in later.advice)


@pytest.mark.parametrize(
    ("name", "config", "more", "reason"),
    [
        ("qwen", {"method": "mtp", "num_speculative_tokens": 1}, {}, "has no layers for multi-token prediction"),
        ("text", {"method": "mtp", "num_speculative_tokens": 1}, {"version": "0.27.0"}, "vLLM 0.27 does not know"),
        ("NVFP4", {"method": "mtp", "num_speculative_tokens": 1}, {"version": "0.19.0"}, "vLLM 0.19 does not load"),
        ("qwen", {"model": "a/b", "num_speculative_tokens": 1}, {}, "the draft 'a/b' without facts"),
        ("qwen", {"model": "short", "num_speculative_tokens": 1}, {}, "a draft for 4,096 tokens beside max_model_len"),
        ("qwen", {"model": "other words", "num_speculative_tokens": 1}, {}, "vocab_size 151000"),
        ("qwen", {"model": "eagle3", "num_speculative_tokens": 1}, {"pipeline_parallel_size": 2}, "in a pipeline"),
        ("v3", {"model": "eagle3", "num_speculative_tokens": 1}, {}, "beside latent attention"),
        ("gpt-oss", {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 1}, {}, "beside sliding attention"),
        ("qwen", {"method": "eagle3", "model": "short", "num_speculative_tokens": 1}, {}, "a Qwen3ForCausalLM"),
        (
            *("qwen", {"model": "eagle3", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1}, {}),
            "draft_tensor_parallel_size 1 beside tensor_parallel_size 2",
        ),
    ],
)
def test_what_has_no_rule_is_named(name: str, config: dict[str, Any], more: dict[str, Any], reason: str) -> None:
    """The rest of the plan is that of the engine without drafts."""
    found = plan(name, config, **more) if name != "v3" else plan(name, config, 8)
    assert found.verdict is Verdict.CANNOT_SAY and reason in found.reason, found.reason
    bare = plan(name, None, **more) if name != "v3" else plan(name, None, 8)
    assert found.kv_cache_tokens == bare.kv_cache_tokens and "Without it it would fit" in found.reason
    assert found.fix.startswith("extra_args without ")


def test_a_speculator_in_another_form_is_the_same() -> None:
    """speculators nests the configuration of the layer, and records keep what is read of it."""
    facts = published.eagle3("eagle3 of speculators").facts
    again = model_facts.parse_record("a/b", json.loads(json.dumps(recording.record(facts, "a test"))), "a test")
    assert families.interpret(again).components == published.eagle3("eagle3 of speculators").components
    for name, verdict in (("shared", Verdict.CANNOT_SAY), ("eagle3", Verdict.UNSUPPORTED_ENGINE)):
        alone = plan(name, None)
        assert alone.verdict is verdict and "drafts tokens for another model" in alone.reason
    with pytest.raises(headers.FactsError, match="has no layers for multi-token prediction"):
        families.interpret_drafting(QWEN)


def test_what_verification_takes() -> None:
    """In the first model runner as in the profile; in the second for as many sequences as a batch holds."""
    logit = QWEN.vocabulary
    first = overhead.sampler_with_drafts(QWEN, 3, 64, 2048, second=False, in_parts=False)
    assert (first.low, first.value, first.high) == tuple(64 * logit * each for each in (22, 26, 30))
    few, all_ = (overhead.sampler_with_drafts(QWEN, 3, 512, 40, second=True, in_parts=each) for each in (True, False))
    assert few.value == 40 * logit * 14, "the sampler of 40 sequences needs more than 8 with four logits each"
    many, parts = (overhead.sampler_with_drafts(QWEN, 3, 512, 9999, second=True, in_parts=x) for x in (False, True))
    assert many.value == 512 * 4 * logit * 6 and parts.value == 512 * 4 * logit * 2 + GIB and few == all_


def test_sizes_of_graphs_hold_whole_requests() -> None:
    assert overhead.list_captured_sizes(2, 8192, 4) == [4, 8, 16]
    model = kv_models.model([kv_models.full(index, 8, 128) for index in range(8)])
    plain, drafted = Arguments(), Arguments(speculation=Speculation("ngram", 3))
    one, four = (overhead.graphs(model, each, 4, 2048, all_seen=True).value for each in (plain, drafted))
    assert four > one


def test_the_command_reads_the_draft_like_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, drafter in (("qwen", QWEN), ("draft", MODELS["eagle3"]), ("broken", None)):
        found = recording.record(drafter.facts, "a test") if drafter else {}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    serve = ["vllm", "serve", f"{tmp_path}/qwen.json", "--max-model-len", "16384", "--max-num-seqs", "64"]
    command = ["plan", "--gpu", "H200", "--details", "--", *serve, "--spec-tokens", "3", "--speculative-config.model"]
    assert cli.main([*command, f"{tmp_path}/draft.json", "--speculative-config.method=eagle3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 to 4 tokens in a step" in said and "tok/s is without drafts; --details" in said
    assert cli.main([*command[:4], *serve, '-sc={"method": "suffix"}']) == 0
    assert "ends at its start without arctic-inference" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*command, f"{tmp_path}/broken.json"]) == 2
    told = capsys.readouterr()
    assert "broken.json is no record of a checkpoint" in told.err and "without facts" in " ".join(told.out.split())
