# SPDX-License-Identifier: Apache-2.0
"""What is advised: found by the planner's figures alone, ranked as asked, and ready to be pasted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.advice import choice, render, search
from ansible.module_utils.vllm_edge.planning.advice.model import Advice, AdviceError, By, Host, Profile, Shape, Wish
from ansible.module_utils.vllm_edge.planning.contract import Gpu, Verdict
from checkpoints import DEFAULT, L4, model

ROLES = ("architect", "worker", "auditor", "sentry")
MODELS = ("31b-bf16", "31b-w4a16", "31b-fp8", "31b-nvfp4", "e4b", "e2b")
SMALL = ("e4b", "e2b")
NVFP4_TP2 = {
    "model": "31b-nvfp4",
    "tensor_parallel_size": 2,
    "gpus": [0, 1],
    "port": 8050,
    "served_names": ["architect", "worker"],
    "max_model_len": 8192,
    "kv_cache_dtype": "fp8",
    "tool_call_parser": "gemma4",
    "reasoning_parser": "gemma4",
}


def host(names: Iterable[str] = MODELS, gpus: int = 4, **more: Any) -> Host:
    options = {"models": {name: model(name) for name in names}, "gpus": [L4] * gpus, "vllm_version": DEFAULT}
    return Host(**options | {"roles": ROLES} | more)


def advised(at: Host, **asked: Any) -> Advice:
    return search.advise(search.wish(at.models, at.roles, asked), at)


@functools.cache
def reference(by: str = "tok_s", choose: int = 1) -> Advice:
    """For the reference host, four NVIDIA L4."""
    return advised(host(engines={"31b-nvfp4-tp2": NVFP4_TP2}), by=by, choose=choose)


@functools.cache
def three_gpus(choose: int = 1) -> Advice:
    return advised(host(("31b-w4a16", "e2b"), 3), choose=choose)


# -- what is found


@pytest.mark.parametrize("by", list(By))
def test_ranked_as_asked(by: By) -> None:
    profiles = reference(by.value).profiles
    criterion = {
        By.TOK_S: lambda profile: profile.main.fit.tok_s,
        By.CONTEXT: lambda profile: profile.main.max_model_len,
        By.FREE_GPUS: lambda profile: profile.free_gpus,
        # A KV cache of another type than the checkpoint's comes last, however fast it is.
        By.TOGETHER: lambda profile: (profile.main.fit.calibrated, profile.main.together.mid),
    }[by]
    values = [criterion(profile) for profile in profiles]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]


def test_every_profile_is_one() -> None:
    profiles = reference().profiles
    assert len({(profile.label, profile.main.max_model_len) for profile in profiles}) == len(profiles)
    for profile in profiles:
        assert profile.gpus + profile.free_gpus == 4 and profile.free_gpus >= 0
        assert Counter(itertools.chain(*(engine.roles for engine in profile.engines))) == Counter(ROLES)
        assert all(engine.max_model_len >= 8192 and engine.at_once >= 1 for engine in profile.engines)
        sides = [engine.fit.model for engine in profile.engines[1:]]
        assert set(sides) <= set(SMALL) and len(sides) == len(set(sides))
    assert {len(profile.engines[1:]) for profile in profiles} == {0, 1, 2}
    # Of equal engines the KV cache as the checkpoint has it comes first, although FP8 would hold more.
    labels = [profile.label for profile in profiles]
    assert labels.index("31b-w4a16 tp4") < labels.index("31b-w4a16 tp4 kv=fp8")


def test_each_engine_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search depends on the engines that there are, and not on the profiles that they make."""
    calls: list[Any] = []
    plan = planner.plan

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return plan(*given, **more)

    monkeypatch.setattr(planner, "plan", counted)
    found = advised(host(("31b-w4a16", "e2b")))
    dtypes, shapes = 2, len(search.shapes(4))
    assert len(calls) <= 2 * shapes * dtypes + 1
    assert len(found.profiles) > len(calls) / 2


# -- what is asked of roles and batches


@functools.cache
def with_experts(**min_tok_s: float) -> Advice:
    return advised(host(("31b-w4a16", "26b-nvfp4", "e2b")), min_tok_s=min_tok_s or None)


def test_a_minimum_of_speed_makes_a_faster_model_the_main_engine() -> None:
    assert with_experts().mains == ("31b-w4a16",)
    found = with_experts(worker=50)
    assert found.mains == ("26b-nvfp4",)
    assert min(profile.main.fit.tok_s for profile in found.profiles) >= 50
    # An engine beside the main one serves the last two roles, for which nothing was asked.
    assert any(side.fit.tok_s < 60 for profile in found.profiles for side in profile.engines[1:])
    (slow,) = [rejection for rejection in found.rejections if rejection.verdict == "advise_min_tok_s 50"]
    assert slow.model == "31b-w4a16" and "estimated to give 42.4 tok/s" in slow.reason
    text = " ".join(" ".join(render.lines(found)).split())
    assert "50 tok/s or more for worker" in text
    # A minimum for all roles counts for every engine and replica.
    found = with_experts(**dict.fromkeys(ROLES, 50))
    assert found.profiles and all(engine.fit.tok_s >= 50 for profile in found.profiles for engine in profile.engines)
    labels = [profile.label for profile in found.profiles]
    assert "26b-nvfp4 tp2 x2" in labels and "26b-nvfp4 x4" not in labels


def test_other_numbers_of_sequences() -> None:
    found = advised(host(("31b-w4a16", "e2b")), max_num_seqs="8,64")
    assert {profile.main.fit.max_num_seqs for profile in found.profiles} == {8, 64}
    # Of equal speed and context more sequences are better; they leave less memory for the KV cache.
    assert found.profiles[0].main.fit.max_num_seqs == 64
    (engine,) = found.chosen.serving_engines.values()
    assert engine["max_num_seqs"] == 64
    _, label, why = found.lost[0]
    assert label.endswith("seqs=8") and why == "max_num_seqs 8, the chosen one max_num_seqs 64"
    other = next(p for p in found.profiles if p.main.fit.max_num_seqs == 8 and p.label[:13] == "31b-w4a16 tp4")
    assert other.main.at_once > found.profiles[0].main.at_once
    assert "max_num_seqs other than 8, 64" in " ".join(" ".join(render.lines(found)).split())


@pytest.mark.parametrize("by", list(By))
def test_the_text_and_the_document_begin_with_the_chosen_one_and_say_why_others_lost(by: By) -> None:
    found = reference(by.value)
    lines = render.lines(found)
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if "31b-" in line and "fits (" in line]
    assert len(rows) == render.ROWS and rows[0].lstrip().startswith(">1 ")
    unit = "tok/s, together" if by is By.TOGETHER else "tok/s, estimate"
    assert any(unit in line and "rank" in line for line in lines) and "All speeds are estimates" in "\n".join(lines)
    assert f"{len(found.profiles)} feasible profiles" in lines[0]
    document = render.document(found)
    assert [row["rank"] for row in document["profiles"]] == list(range(1, len(found.profiles) + 1))
    assert document["profiles"][0]["tok_s_estimate"].keys() == {"low", "mid", "high", "ceiling"}
    assert document["chosen"]["plan"]["verdict"] == "fits" and document["chosen"]["rank"] == 1
    places = [
        [line.startswith(text) for line in lines].index(True) for text in ("chosen: 1 of", "why the next", "rank ")
    ]
    assert places == sorted(places) and len(found.lost) == search.SHOWN_LOST
    winner = found.profiles[0]
    for rank, label, said in found.lost:
        loser = found.profiles[rank - 1]
        assert loser.label == label and loser.choice != winner.choice
        decides = next(says for value, says in search.ORDERS[by] if value(loser) != value(winner))
        assert said == f"{decides(loser)}, the chosen one {decides(winner)}"


# -- replicas


def find(found: Advice, label: str) -> Profile:
    return next(profile for profile in found.profiles if profile.label == label)


def find_rank(found: Advice, is_it: Callable[[Profile], object]) -> int:
    return next(rank for rank, profile in enumerate(found.profiles, 1) if is_it(profile))


@functools.cache
def with_replicas(by: str = "tok_s", choose: int = 1, max_num_seqs: str | None = None) -> Advice:
    at = host(("26b-nvfp4", "e4b"), engines={"other": {"model": "26b-nvfp4", "tool_call_parser": "gemma4"}})
    return advised(at, by=by, choose=choose, max_num_seqs=max_num_seqs)


def test_a_replica_counts_as_an_engine_beside_the_main_one() -> None:
    found = with_replicas()
    once, twice, four = (find(found, f"26b-nvfp4{times}") for times in ("", " x2", " x4"))
    assert [profile.free_gpus for profile in (once, twice, four)] == [3, 2, 0]
    assert once.main.fit.tok_s == four.main.fit.tok_s, "one request is answered no faster"
    assert four.main.at_once == pytest.approx(4 * four.main.fit.at_once(four.main.max_model_len))
    # Two engines hold the longest request of two roles each, one engine a shorter one of all four.
    assert (once.main.waiting, twice.main.waiting, four.main.waiting) == (0, 0, 0)
    assert once.main.max_model_len < twice.main.max_model_len < four.main.max_model_len
    # Of equal speed and context, what has more engines is first, and the small model beside counts as much.
    labels = [profile.label for profile in found.profiles]
    assert labels.index("26b-nvfp4 x4") < labels.index("26b-nvfp4 x2 + e4b") < labels.index("26b-nvfp4 x2")
    assert labels.index("26b-nvfp4 tp4") < labels.index("26b-nvfp4 tp2 x2") < labels.index("26b-nvfp4 tp2")
    assert all(profile.main.replicas == 1 for profile in advised(host(("e4b",), 1)).profiles)


def test_the_speed_of_many_requests_is_that_of_all_replicas() -> None:
    found = with_replicas("together", max_num_seqs="16")
    assert found.profiles[0].label == "26b-nvfp4 tp2 x2"
    for label, requests in (("tp4", 16), ("tp2 x2", 32), ("x4", 32), ("x3", 32)):
        speed = find(found, f"26b-nvfp4 {label}").main.together
        assert speed is not None and speed.requests == requests, "a replica runs 16 of 32 at once"
    # Each of four has eight requests, and is as fast as the planner says.
    four = find(found, "26b-nvfp4 x4").main
    alone = four.fit.plan.decode_together_tok_s
    assert alone is not None and four.together is not None and alone.requests == 8
    assert four.together.mid == pytest.approx(4 * alone.mid, abs=0.1)
    # One engine that may run them all is faster by estimate, so it is tried without being asked for.
    assert with_replicas("together").profiles[0].label == "26b-nvfp4 tp4 seqs=32"
    text = " ".join(" ".join(render.lines(found)).split())
    assert "advised-26b-nvfp4, 2 replicas (32 requests at once: 858 tok/s together), each fits: 56.5 tok/s" in text
    assert "26b-nvfp4 tp2 x2 4/0 598- 858- 995" in text


# -- the chosen one is what the planner says it is


@pytest.mark.parametrize("sides", [0, 1])
def test_the_chosen_one_fits_as_it_is_shown(sides: int) -> None:
    choose = find_rank(three_gpus(), lambda profile: len(profile.engines[1:]) == sides)
    found = three_gpus(choose)
    profile, chosen = found.profiles[choose - 1], found.chosen
    assert chosen.plan.verdict is Verdict.FITS
    for engine, planned in zip(profile.engines, chosen.plan.engines, strict=True):
        assert planned.max_concurrency == pytest.approx(engine.at_once)
        assert planned.decode_tok_s == engine.fit.plan.decode_tok_s
        assert planned.kv_cache_dtype == engine.fit.plan.kv_cache_dtype
    written = list(chosen.serving_engines.values())
    slots = [slot for engine in written for slot in engine["gpus"]]
    assert len(slots) == len(set(slots)) == profile.gpus
    assert len({engine["port"] for engine in written}) == len(written)
    assert not any("gpu_memory_utilization" in engine for engine in written)


def test_requests_at_once_are_those_of_the_plan() -> None:
    """vLLM's batches on a large GPU are larger."""
    found = advised(dataclasses.replace(host(["31b-w4a16"]), gpus=[Gpu("NVIDIA H100 80GB HBM3", 81079 * 2**20)]))
    assert found.profiles[0].main.at_once == pytest.approx(found.chosen.plan.engines[0].max_concurrency)


def test_names_and_parsers_of_the_chosen_one() -> None:
    at = host(("31b-nvfp4", "e4b"), 3, engines={"other": {"model": "away"}, "31b-nvfp4-tp2": NVFP4_TP2})
    rank = find_rank(advised(at), lambda profile: profile.label == "31b-nvfp4 tp2 + e4b")
    chosen = advised(at, choose=rank).chosen
    assert list(chosen.serving_engines) == ["advised-31b-nvfp4", "advised-e4b"]
    assert [engine["port"] for engine in chosen.serving_engines.values()] == [8050, 8060]
    # Gemma's parsers are those of the family; an inventory without an engine of it has none to copy.
    assert {engine["tool_call_parser"] for engine in chosen.serving_engines.values()} == {"gemma4"}
    alone = advised(dataclasses.replace(at, engines={}), choose=rank).chosen.serving_engines
    assert not any("tool_call_parser" in engine for engine in alone.values())


def test_engines_are_planned_with_the_defaults_of_their_model_which_are_not_printed() -> None:
    text_only = {"limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0), "tool_call_parser": "gemma4"}
    at = host(("e4b",), 1, engines={"other": {"model": "e4b", "chat_template": "a.jinja", **text_only}})
    inheriting = dataclasses.replace(at, inventory={"e4b": {"engine_defaults": text_only | {"kv_cache_dtype": "fp8"}}})
    (plain,), (whole,) = (advised(each).chosen.serving_engines.values() for each in (at, inheriting))
    assert (plain["tool_call_parser"], whole["chat_template"]) == ("gemma4", "a.jinja")
    assert not whole.keys() & text_only.keys()
    # With another default, what vLLM takes by itself has to be written.
    assert ("kv_cache_dtype" in plain, whole["kv_cache_dtype"]) == (False, "auto")
    (with_encoders,), (without,) = (advised(each).chosen.plan.engines for each in (at, inheriting))
    assert without.gpus[0].weights_bytes < with_encoders.gpus[0].weights_bytes


def test_observations_of_an_engine_that_is_like_it_count() -> None:
    more = {"engines": {"31b-nvfp4-tp2": NVFP4_TP2}, "observations": {"31b-nvfp4-tp2": {"weights_bytes": 10**10}}}
    at = host(("31b-nvfp4",), 2, **more)
    (name,) = advised(at).chosen.serving_engines
    found = advised(at)
    assert found.chosen.plan.engines[0].gpus[0].weights_bytes == 10**10
    assert any("planned with plan_observations.31b-nvfp4-tp2" in said for said in found.chosen.advice[name])
    # Its batch is another, so of activations nothing follows.
    other = advised(dataclasses.replace(at, observations={"31b-nvfp4-tp2": {"overhead_bytes": 10**9}}))
    over_two = [profile.main.fit for profile in other.profiles if profile.main.fit.shape == Shape(2)]
    assert over_two and all(fit.plan.gpus[0].overhead_bytes < 10**9 for fit in over_two)


def test_gpus_that_are_not_alike_are_not_mixed() -> None:
    large = Gpu("NVIDIA L40S", 47 * 2**30)
    at = host(("31b-fp8", "e2b"), gpus=1)
    found = advised(dataclasses.replace(at, gpus=[L4, large, L4]))
    assert {profile.main.fit.gpu for profile in found.profiles} == {L4, large}
    for rank, profile in enumerate(found.profiles, 1):
        for engine, slots in zip(profile.engines, choice.assign_slots(profile, [L4, large, L4]), strict=True):
            assert slots and set(slots) <= ({1} if engine.fit.gpu is large else {0, 2}), rank


# -- what is not advised


def test_rejections_are_grouped_and_say_why() -> None:
    found = reference()
    keys = [(rejection.model, rejection.verdict) for rejection in found.rejections]
    assert len(keys) == len(set(keys))
    bf16 = next(rejection for rejection in found.rejections if rejection.model == "31b-bf16")
    assert bf16.verdict == "oom_weights" and "Weights need" in bf16.reason
    # Another KV cache does not change that, so it is not tried.
    assert set(bf16.shapes) == {"tp1", "tp2", "tp1 pp2", "tp1 pp3"}
    text = "\n".join(render.lines(found))
    assert "two engines on one GPU" in text


def test_a_model_that_fits_and_is_in_no_profile_is_left_out_with_the_reason() -> None:
    models = ("31b-w4a16", "e4b")
    cases = (
        (host(models, roles=("one",)), {}, "smaller than 31b-w4a16, and an engine beside the main one needs a third"),
        (host(("31b-bf16", "e4b")), {}, "no GPUs are left beside them"),
        (host(("31b-w4a16", "31b-fp8")), {"main": "31b-fp8"}, "The main engine was to have 31b-fp8, and this is not"),
    )
    for at, wanted, why in cases:
        found = advised(at, **wanted)
        used = {engine.fit.model for profile in found.profiles for engine in profile.engines}
        assert {rejection.model for rejection in found.rejections} >= {*at.models} - used
        assert any(each.verdict == "left out" and why in each.reason for each in found.rejections), found.rejections


def test_what_is_larger_than_the_model_allows() -> None:
    found = advised(host(("31b-w4a16", "e2b")), min_context=200_000)
    assert {profile.label.count("+") for profile in found.profiles} == {0}
    assert any(rejection.model == "e2b" and "maximum is 131,072" in rejection.reason for rejection in found.rejections)


def test_the_largest_that_fits_is_the_main_engine() -> None:
    at = host(("31b-bf16", *SMALL), 1)
    found = search.advise(search.wish([*at.models, "own"], at.roles, {}), at, {"own": "nothing is recorded of it"})
    assert found.mains == ("e4b",) and {rejection.model for rejection in found.rejections} >= {"31b-bf16"}
    assert "own: unknown. nothing is recorded of it" in map(str, found.rejections)
    # Parameters do not depend on precision.
    of_31b = [search.parameters(model(f"31b-{precision}")) for precision in ("bf16", "w4a16", "fp8", "nvfp4")]
    assert of_31b == pytest.approx([31_273_088_876] * 4, rel=0.05)


# -- what is advised against is said


def test_advice_is_with_the_chosen_one() -> None:
    found = advised(host(("26b-nvfp4", "e2b"), 2))
    text = " ".join(" ".join(render.lines(found)).split())
    assert "all 128 experts are in memory" in text
    assert any("experts" in said for said in render.document(found)["profiles"][0]["advice"])
    with_fp8 = find_rank(three_gpus(), lambda profile: profile.main.fit.kv_cache_dtype == "fp8")
    (said, *_) = three_gpus(with_fp8).chosen.advice.values()
    assert any("no scales for an FP8 KV cache" in sentence for sentence in said)
    # NVIDIA's checkpoint has them, so its FP8 KV cache is no reason to prefer another.
    (said, *_) = found.chosen.advice.values()
    assert found.chosen.plan.engines[0].kv_cache_dtype == "fp8" and not any("scales" in sentence for sentence in said)


def test_advice_on_context_is_that_of_the_context_that_is_advised() -> None:
    found = advised(host(("31b-fp8",), 2))
    rows = render.document(found)["profiles"]
    assert {profile.main.max_model_len for profile in found.profiles} > {8192}
    for profile, row in zip(found.profiles, rows, strict=True):
        said = " ".join(row["advice"])
        assert "8,192: a second one" not in said or profile.main.max_model_len == 8192
        assert (f"requests of max_model_len {profile.main.max_model_len:,}" in said) == (profile.main.at_once < 2)


# -- what is wrong is said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"by": "toks"}, "advise_by: 'toks' is not one of tok_s, context, free_gpus, together; did you mean tok_s?"),
        ({"choose": 0}, "advise_choose: 0 is not the rank of a profile in the table"),
        ({"choose": "99999"}, "profiles are feasible; write 1 to "),
        ({"min_context": "8k"}, "advise_min_context: '8k' is not tokens"),
        ({"min_context": 512}, "write a whole number from 1024 on"),
        ({"only": ["e3b"]}, "advise_models: 'e3b' is not a key of vllm_models; did you mean e2b?"),
        ({"main": "31b"}, "advise_main: '31b' is not a key of vllm_models"),
        ({"main": "e2b", "only": ["31b-w4a16"]}, "advise_main: 'e2b' is none of advise_models"),
        ({"min_tok_s": "fast"}, "advise_min_tok_s: 'fast' is no number of tokens per second, such as 30"),
        ({"min_tok_s": {"worker": True}}, "advise_min_tok_s.worker: true is no number"),
        ({"min_tok_s": {"wroker": 3}}, "'advise_min_tok_s.wroker' is no role of serving_roles; did you mean worker?"),
        ({"min_tok_s": 99}, "advise_min_tok_s (architect 99, worker 99, auditor 99, sentry 99): no profile is fast"),
        ({"max_num_seqs": "16,x"}, "advise_max_num_seqs: 'x' is not a number of requests"),
        ({"main": "31b-bf16"}, "advise_main: no engine of 31b-bf16 fits on 1 x NVIDIA L4 with vLLM 0.32.0. 31b-bf16"),
    ],
)
def test_what_cannot_be_advised_on_is_said(asked: dict[str, Any], said: str) -> None:
    at = host(("31b-bf16", "31b-w4a16", "e2b"), 1)
    with pytest.raises(AdviceError, match=re.escape(said)):
        advised(at, **asked)
    numbers = search.wish(["e2b"], ROLES, {"choose": "2", "min_context": "4096"})
    assert numbers == Wish(choose=2, min_context_tokens=4096), "numbers may be text"


def test_a_gpu_whose_bandwidth_nobody_knows() -> None:
    at = dataclasses.replace(host(("e2b",)), gpus=[Gpu("", 23_659_151_360)])
    for by in ("tok_s", "together"):
        with pytest.raises(AdviceError, match=f"advise_by: '{by}' needs the bandwidth of the GPU.* set gpu_name to"):
            advised(at, by=by)
    assert "not known" in "\n".join(render.lines(advised(at, by="context")))
    with pytest.raises(AdviceError, match="advise_min_tok_s: needs the bandwidth of the GPU, which is not known"):
        advised(at, by="context", min_tok_s=5)
