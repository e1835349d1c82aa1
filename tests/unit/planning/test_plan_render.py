# SPDX-License-Identifier: Apache-2.0
"""A plan as people see it: to scale, within the width, nothing left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import render
from ansible.module_utils.vllm_edge.planning.contract import Decode, EnginePlan, Fix, GpuPlan, Plan, Verdict

MIB = 2**20


def gpu(slot: int = 0, free_mib: int = 500, **mib: int) -> GpuPlan:
    sizes = {"weights": 16000, "overhead": 1200, "context": 260, "graphs": 1500, "kv_cache": 2400, "warm_up": 900} | mib
    total = sum(size for name, size in sizes.items() if name != "warm_up")
    sizes |= {"total": total, "free": free_mib}
    return GpuPlan(slot, **{f"{name}_bytes": size * MIB for name, size in sizes.items()})


def engine(verdict: Verdict = Verdict.FITS, **more: Any) -> EnginePlan:
    given: dict[str, Any] = {
        **{"engine": "31b", "verdict": verdict, "reason": "500 MiB stay free on GPU 0.", "fix": ""},
        **{"kv_cache_dtype": "fp8", "kv_blocks": 3956, "kv_cache_tokens": 10544, "max_concurrency": 3.62},
        **{"max_context": 95712, "max_model_len": 8192, "decode_tok_s": Decode(12.2, 15.0, 16.6, 18.9)},
        "gpus": (gpu(0), gpu(1)),
    }
    return EnginePlan(**given | more)


def plan(*engines: EnginePlan) -> Plan:
    return Plan("nvfp4-tp2", "0.32.0", engines, {0: 21660, 1: 21660, 2: 0})


def test_what_an_operator_reads() -> None:
    text = "\n".join(render.lines(plan(engine(advice=("watch it",), observed=("graphs_bytes",)))))
    for words in (
        "profile nvfp4-tp2, vLLM 0.32.0: fits",
        "31b  fits: 500 MiB stay free on GPU 0.",
        "context: max_model_len 8,192 tokens, 3.62 requests of that length at once; max_model_len could be up to",
        "KV cache: fp8, 3,956 blocks; vLLM's log counts them as 10,544 tokens",
        "15.0 tok/s (estimate: 12.2 to 16.6, ceiling 18.9)",
        "observed: graphs_bytes (plan_observations)",
        "advice: watch it",
        "GPU 0 21,660, GPU 1 21,660, GPU 2 0",
    ):
        assert words in " ".join(text.split()) or words in text
    for figure in ("16,000", "300", "900", "260", "1,500", "2,400", "500"):
        assert re.search(rf" {figure}(\s|$)", text, re.MULTILINE), figure


def test_a_refusal_has_reason_and_fix() -> None:
    fewer = Fix("max_num_seqs: 8", {"max_num_seqs": 8}, ("fewer requests",), 4096, 2.04, 15.0)
    longer = Fix("x: " + "y" * 90, {"extra_args": ["--x"]})
    first, other = "Set max_num_seqs: 8 (fewer requests); or", Fix("dtype: auto", {"dtype": "auto"})
    for fixes, said in (
        ((Fix("extra_args without --x"),), "Set extra_args without --x."),
        ((fewer, other, other, other), f"{first} {'dtype: auto (nothing is lost); or ' * 2}dtype: auto."),
        ((fewer, *[longer] * 4), f"{first} {longer.change} (nothing is lost); 3 more with details."),
    ):
        refused = engine(Verdict.NO_KV, reason="It is 1 MiB too little.", fixes=fixes, kv_blocks=0)
        assert render.refusals(plan(refused, engine())) == [f"31b: no_kv. It is 1 MiB too little. {said}"]
        text = " ".join(" ".join(render.lines(plan(refused))).split())
        assert "no_kv" in text and all(f"fix: set {fix.change}" in text for fix in fixes)
    text = " ".join(" ".join(render.lines(plan(engine(Verdict.NO_KV, fixes=(fewer,), kv_blocks=0)))).split())
    assert "8; cost: fewer requests; 2.0 requests of 4,096 tokens at once, 15.0 tok/s" in text


def test_a_plan_as_options_of_vllm_serve() -> None:
    text_only = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
    fix = Fix("x", {"max_num_seqs": 8, "gpus": [0], "enforce_eager": True, **text_only})
    assert render.spell_options(fix) == "--max-num-seqs=8 --enforce-eager --language-model-only"
    assert render.spell_options(Fix("extra_args without --x")) == "extra_args without --x"
    wanted = {"name": "tp2", "model": "m", "tensor_parallel_size": 2, "extra_args": ["--seed", "1 2"], "gpus": [0, 1]}
    planned = engine(settings={"kv_cache_memory_bytes": 7, "gpu_memory_utilization": 0.5, "vram_budget_mib": 9})
    assert render.build_serve_command("owner/name", wanted, planned) == (
        "vllm serve owner/name --tensor-parallel-size=2 --gpu-memory-utilization=0.5 --kv-cache-memory-bytes=7 --seed "
        "'1 2'"
    )


def test_nothing_is_wider_than_100_columns() -> None:
    long = engine(
        engine="an-engine-with-a-name-as-long-as-names-can-be-0123456789",
        reason="words " * 60,
        fixes=(Fix("tensor_parallel_size: 4, pipeline_parallel_size: 1, gpus: [0, 1, 2, 3] " * 3, {"x": 1}),),
        advice=("advice " * 50, "vllm/" + "x" * 60),
        gpus=(gpu(0, free_mib=-999_999, weights=999_999),),
    )
    lines = render.lines(plan(long)) + render.legend()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("parts", "capacity", "cells"),
    [
        ({"W": 50, "K": 25}, 100, "WWWWWKKK.."),
        ({"W": 0, "K": 50}, 100, "KKKKK....."),
        ({"W": 98, "C": 1, "G": 1}, 100, "WWWWWWWWCG"),
        ({"W": 150, "K": 50}, 100, "WWWWW|WWKK"),
    ],
)
def test_bars_are_to_scale(parts: dict[str, int], capacity: int, cells: str) -> None:
    assert render.bar(parts, capacity, 10) == cells


def test_equal_gpus_are_one_line() -> None:
    text = "\n".join(render.lines(plan(engine(gpus=(gpu(0), gpu(1), gpu(2, free_mib=7), gpu(3))))))
    assert re.findall(r"^ +(\S+) \[W.* (\d+)$", text, re.MULTILINE) == [("0-1,3", "500"), ("2", "7")]


def test_the_overview_has_one_line_for_each_profile() -> None:
    refused = engine(Verdict.NO_KV, reason="It is 1 MiB too little.", kv_blocks=0, gpus=(gpu(0, free_mib=-9),))
    plans = {
        "a": replace(
            plan(
                engine(facts_source="recorded: approximate: x", at_once={8192: 3.0}), engine(gpus=(gpu(2, kv_cache=7),))
            ),
            memory_warnings=("GPU 2 is full.",),
        ),
        "b": plan(refused),
        "c": None,
        "d": plan(engine(decode_tok_s=None)),
    }
    lines = render.overview(plans, {"a": [], "b": ["31b: no_kv."], "c": ["nothing is recorded"], "d": []})
    assert [line.split() for line in lines[2:6]] == [
        ["a", "fits,", "approximate", "15.0", "8,192", "3.6", "3.0", "-", "7"],
        ["b", "no_kv", *"------"],
        ["c", "cannot", "be", "planned", *"------"],
        ["d", "fits", "not", "known", "8,192", "3.6", "-", "-", "2,400"],
    ]
    assert lines[7:10] == ["b: 31b: no_kv.", "c: nothing is recorded", "a: GPU 2 is full."]
