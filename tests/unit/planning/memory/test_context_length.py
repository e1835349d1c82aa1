# SPDX-License-Identifier: Apache-2.0
"""max_model_len above what the model allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning.contract import Verdict
from ansible.module_utils.vllm_edge.planning.memory.vllm_versions import derive_default, derive_limit
from checkpoints import DEFAULT, engine, model, plan_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("name", "rope", "more", "limit", "default"),
    [
        ("31b-bf16", None, {}, 262_144, 262_144),
        ("Qwen/Qwen3-8B", {"rope_type": "linear", "factor": 2.0}, {}, 81_920, 81_920),
        ("Qwen/Qwen3-8B", {"type": "dynamic", "factor": 4.0}, {}, 163_840, 163_840),
        ("Qwen/Qwen3-8B", {"rope_type": "llama3", "factor": 8.0}, {}, 40_960, 40_960),
        ("Qwen/Qwen3-8B", {"rope_type": "linear", "factor": None}, {}, 40_960, 40_960),
        ("Qwen/Qwen3-8B", {"rope_type": "longrope"}, {"original_max_position_embeddings": 4096}, 40_960, 4096),
        ("Qwen/Qwen3-8B", YARN, {}, 40_960, 40_960),
        ("google/gemma-3-27b-it", {"rope_type": "linear", "factor": 8.0}, {}, 131_072, 131_072),
    ],
)
def test_what_vllm_derives(
    name: str, rope: dict[str, Any] | None, more: dict[str, Any], limit: int, default: int
) -> None:
    chosen = model(name)
    config = {**chosen.facts.config, **({"rope_scaling": rope, "rope_parameters": None} if rope else {}), **more}
    if rope and "text_config" in config:
        config["text_config"] = {**config["text_config"], "rope_parameters": rope}
    chosen = dataclasses.replace(chosen, facts=dataclasses.replace(chosen.facts, config=config))
    assert (derive_limit(chosen), derive_default(chosen)) == (limit, default)
    # Earlier releases scale by YaRN, too.
    assert derive_limit(chosen, (0, 19)) == (131_072 if rope is YARN else limit)


ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
REFUSED = (Verdict.UNSUPPORTED_ENGINE, "max_model_len: 131072")


@pytest.mark.parametrize(
    ("wanted", "verdict", "fix"),
    [
        (engine("e2b", max_model_len=131_072), Verdict.FITS, ""),
        (engine("e2b", max_model_len=131_073), *REFUSED),
        # The model allows more than the GPU holds.
        (engine("26b-nvfp4", max_model_len=300_000, max_num_seqs=2), Verdict.UNSUPPORTED_ENGINE, "max_model_len: "),
        (engine("e2b", max_model_len=200_000, extra_env={ALLOWED: "1"}), Verdict.FITS, ""),
        (engine("e2b", max_model_len=200_000, extra_env={ALLOWED: "0"}), *REFUSED),
    ],
)
def test_more_than_the_model_allows_is_refused(wanted: dict[str, Any], verdict: Verdict, fix: str) -> None:
    found = plan_of(wanted, DEFAULT)
    assert found.verdict is verdict, found.reason
    assert found.fix.startswith(fix) and bool(found.fix) == bool(fix)
    if verdict is Verdict.FITS:
        assert any(ALLOWED in sentence for sentence in found.advice) == ("extra_env" in wanted)
        return
    assert f"max_model_len {wanted['max_model_len']:,} is more than the " in found.reason
    assert plan_of(wanted | found.fixes[0].settings, DEFAULT).verdict is Verdict.FITS
