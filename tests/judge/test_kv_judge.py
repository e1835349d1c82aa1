# SPDX-License-Identifier: Apache-2.0
"""Our arithmetic of the KV cache against vLLM's own code, block for block, in the image that the lab runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import kv_cache, vllm_versions
from ansible.module_utils.vllm_edge.planning.vllm_versions import TokenRule
from kv_configurations import Configuration, configurations, differences, table

from lab import images

pytestmark = pytest.mark.docker

HERE = Path(__file__).parent
FLOAT_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
# quantization_config of a checkpoint, and what `kv_cache_dtype: auto` becomes with it; `auto` is the model's own dtype.
CHECKPOINTS = (
    ({"quant_method": "modelopt", "kv_cache_scheme": FLOAT_SCHEME}, "fp8"),
    ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_SCHEME, "num_bits": 4}}, "nvfp4"),
    ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_SCHEME, "dynamic": True}}, "auto"),
    ({"quant_method": "modelopt"}, "auto"),
)


@pytest.fixture(scope="module")
def asked() -> tuple[Configuration, ...]:
    return configurations()


@pytest.fixture(scope="module")
def judged(asked: tuple[Configuration, ...]) -> dict[str, Any]:
    """vLLM's answers to all questions, from one container."""
    questions = [each.as_json() for each in asked] + [{"quantization_config": found} for found, _ in CHECKPOINTS]
    command = ["docker", "run", "--rm", "--interactive", "--network", "none", f"--volume={HERE}:/judge:ro"]
    command += ["--entrypoint", "python3", images.engine_image(), "/judge/vllm_kv.py"]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def compared(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> Iterator[tuple[Configuration, list[str]]]:
    for each, told in zip(asked, judged["answers"][: len(asked)], strict=True):
        yield each, differences(each, told, judged["version"])


def test_every_configuration_is_as_vllm_computes_it(
    asked: tuple[Configuration, ...], judged: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = list(compared(asked, judged))
    with capsys.disabled():
        print(f"\nKV cache against vLLM {judged['version']}\n{table(found)}")
    wrong = [(each.family, each.arguments, each.available_bytes, what) for each, what in found if what]
    assert not wrong, wrong[:3]


def test_the_configurations_reach_every_verdict(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> None:
    answers = judged["answers"][: len(asked)]
    refusals = [check["refusal"] for told in answers for check in told.get("checks", ())]
    assert len(asked) >= 500 and len({each.family for each in asked}) == 7
    assert sum("No available memory" in refusal for refusal in refusals) > 10
    assert sum("estimated maximum model length" in refusal for refusal in refusals) > 50
    assert sum(not refusal for refusal in refusals) > 100
    assert any("error" in told for told in answers)
    assert any(len(told.get("groups", ())) == 2 for told in answers)


def test_auto_is_resolved_as_vllm_does(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> None:
    told = [answer["kv_cache_dtype"].removesuffix("_e4m3") for answer in judged["answers"][len(asked) :]]
    assert told == [expected for _, expected in CHECKPOINTS]


def one_block_more(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kv_cache.Spec.blocks
    monkeypatch.setattr(
        kv_cache.Spec, "blocks", lambda spec, *tokens: right(spec, *tokens) + (spec.window_tokens is not None)
    )


def one_batch_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "count_batches_in_flight", lambda *_: 1)


def groups_as_large_as_the_largest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "FEW_MORE_LAYERS", 100)


def groups_as_large_as_the_rarest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "FEW_MORE_LAYERS", 1)


def no_null_block(monkeypatch: pytest.MonkeyPatch) -> None:
    behave_as(monkeypatch, null_block_reserved=False)


def tokens_by_the_old_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    behave_as(monkeypatch, token_rule=TokenRule.BLOCKS_PER_GROUP)


def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    behave_as(monkeypatch, pads_pages=False)


def elements_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kv_cache.ELEMENT_BYTES, "fp8", 2)


def remaining_layers_to_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(model: Any, arguments: Any, rank: int) -> range:
        size, count = len(model.layers) // arguments.pipeline_parallel_size, len(model.layers)
        return range(rank * size, count if rank == arguments.pipeline_parallel_size - 1 else (rank + 1) * size)

    monkeypatch.setattr(kv_cache, "select_layers", halves)


def behave_as(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    right = vllm_versions.behaviour
    monkeypatch.setattr(kv_cache, "behaviour", lambda version: replace(right(version), **changes))


@pytest.mark.parametrize(
    "mistake",
    [
        one_block_more,
        one_batch_in_flight,
        groups_as_large_as_the_largest_kind,
        groups_as_large_as_the_rarest_kind,
        no_null_block,
        tokens_by_the_old_rule,
        no_padding,
        elements_of_one_size,
        remaining_layers_to_the_last_rank,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_wrong_rule_is_found(
    asked: tuple[Configuration, ...], judged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    mistake(monkeypatch)
    assert any(what for _, what in compared(asked, judged))
