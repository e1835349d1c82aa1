# SPDX-License-Identifier: Apache-2.0
"""The arguments of a host's engine and of `vllm-edge plan --output` before the parser of `vllm serve`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.engine.config import PASSED
from ansible.module_utils.vllm_edge.engine.render import DEFAULTS, Settings, list_create_arguments
from ansible.module_utils.vllm_edge.paths import HostPaths
from asked import SOURCES, ask

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
PLANNED = ("google/gemma-4-E2B-it", "--gpu", "L4", "--count", "2", "--output", "compose")
IMAGE = "vllm-edge/vllm:1"
ENGINE: dict[str, Any] = {
    **{
        "name": "e",
        "model": "m",
        "gpus": [0],
        "served_names": ["main"],
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
    },
    **{"pipeline_parallel_size": 1, "max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 2048},
    **{"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 2**30, "kv_cache_dtype": "fp8", "enforce_eager": True},
    **{"limit_mm_per_prompt": {"image": 0}, "reasoning_parser": "gemma4", "tool_call_parser": "gemma4"},
}


@pytest.mark.parametrize("sources", SOURCES, ids=lambda path: path.rpartition("/")[2])
def test_vllm_takes_the_arguments_as_they_are_meant(capsys: pytest.CaptureFixture[str], sources: str) -> None:
    settings = Settings(**DEFAULTS, image=IMAGE, gpu_uuids=[f"GPU-{'0' * 36}"], shutdown_timeout_s=20)
    host = list_create_arguments(ENGINE, {"path": "/data/m/m"}, settings, HostPaths(), chat_template=False)
    asked = ["--max-num-seqs", "8", "--enable-expert-parallel"]
    assert cli.main(["plan", *PLANNED, *asked]) == 0
    written = yaml.safe_load(capsys.readouterr().out)["services"]["vllm"]["command"]
    by_host, by_plan = ask("vllm_arguments.py", [host[host.index(IMAGE) + 1 :], written], sources)["answers"]
    same = [key for key in PASSED if key != "limit_mm_per_prompt"]
    assert {key: by_host[key] for key in same} == {key: ENGINE[key] for key in same}
    assert (by_host["model_tag"], by_host["uds"], by_host["max_logprobs"]) == ("/models/m", "/run/api/api.sock", 20)
    said = dict(word.removeprefix("--").partition("=")[::2] for word in written if "=" in word)
    for option in ("max-model-len", "kv-cache-memory-bytes", "tensor-parallel-size", "port", "max-num-seqs"):
        assert by_plan[option.replace("-", "_")] == int(said[option])
    assert (by_plan["model_tag"], by_plan["enable_expert_parallel"]) == (PLANNED[0], True)
