# SPDX-License-Identifier: Apache-2.0
"""The module serving_plan and its playbook, as an operator runs them: no host, no GPU, no network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, find_failures
from plan_plays import play, read_document
from test_model_facts import hub, write  # noqa: F401 (the fixture)

from lab.hub.server import Hub

L4 = {"name": "NVIDIA L4", "cuda_total_bytes": 23_659_151_360}
MODELS = {
    "31b-nvfp4": {"repo": "nvidia/Gemma-4-31B-IT-NVFP4", "dir": "Gemma-4-31B-IT-NVFP4", "facts": "recorded"},
    "e2b": {"repo": "google/gemma-4-E2B-it", "dir": "gemma-4-E2B-it", "facts": "files"},
}
E2B = {"name": "e2b", "model": "e2b", "tensor_parallel_size": 1, "gpus": [0], "max_model_len": 4096}
NVFP4_TP1 = {"name": "31b", "model": "31b-nvfp4", "tensor_parallel_size": 1, "gpus": [1], "max_model_len": 4096}

Run = Callable[..., dict[str, Any]]


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "profiles": {"p": {"engines": [E2B, NVFP4_TP1]}},
        "models": MODELS,
        "gpus": [L4, L4, L4],
        "vllm_version": "0.19.0",
        "weights_root": "/nowhere",
    } | more


def plan(run_module: Run, **more: Any) -> dict[str, Any]:
    """The result, with that of the only profile."""
    found = run_module("serving_plan", arguments(**more), check=True)
    return found | found.get("plans", {}).get("p", {})


def test_keys_of_the_contract(run_module: Run) -> None:
    found = plan(run_module)
    assert (found["rc"], found["changed"], found["verdict"]) == (0, False, "oom_weights")
    assert [engine["engine"] for engine in found["engines"]] == ["e2b", "31b"]
    for engine in found["engines"]:
        assert engine.keys() >= {"kv_blocks", "kv_cache_tokens", "max_concurrency", "max_context", "verdict", "reason"}
        assert engine["decode_tok_s"].keys() == {"low", "mid", "high", "ceiling"}
        for gpu in engine["gpus"]:
            assert gpu.keys() >= {"weights_bytes", "overhead_bytes", "kv_cache_bytes"}
    assert found["engines"][1]["fix"] == "tensor_parallel_size: 2, gpus: [1, 2]"
    (fix,) = found["engines"][1]["fixes"]
    assert (fix["change"], fix["costs"]) == (found["engines"][1]["fix"], ["2 GPUs instead of 1"])
    said = f"31b: oom_weights. {found['engines'][1]['reason']} Set {fix['change']} (2 GPUs instead of 1)."
    assert found["refusals"] == [said]
    assert any("WWW" in line for line in found["lines"]) and found["legend"]


def test_several_profiles_at_once_of_which_one_cannot_be_planned(run_module: Run) -> None:
    own = {"engines": [E2B | {"model": "own"}]}
    profiles = {"own": own, "small": {"engines": [E2B]}, "large": {"engines": [NVFP4_TP1]}}
    wrong = {"auto": {"max_model_len": "auto"}, "slot": {"gpus": 2}, "share": {"gpu_memory_utilization": 95}}
    profiles |= {name: {"engines": [E2B | values]} for name, values in wrong.items()}
    models = MODELS | {"own": {"repo": "somebody/else", "dir": "else"}}
    found = plan(run_module, profiles=profiles, models=models)
    verdicts = {name: plan["verdict"] for name, plan in found["plans"].items()}
    assert verdicts == {"own": None, "small": "fits", "large": "oom_weights"} | dict.fromkeys(wrong)
    assert "max_model_len: 'auto' is for vLLM to resolve" in found["plans"]["auto"]["refusals"][0]
    assert "another form: TypeError" in found["plans"]["slot"]["refusals"][0]
    assert found["plans"]["small"]["profile"] == "small"
    assert found["plans"]["own"].keys() == found["plans"]["small"].keys()
    assert "nothing is recorded of somebody/else" in found["plans"]["own"]["refusals"][0]
    overview = "\n".join(found["overview"])
    assert re.search(r"^small +fits +\d+\.\d +4,096 +\d+\.\d +- +- +1\d,\d{3}$", overview, re.MULTILINE), overview
    assert re.search(r"^large +oom_weights( +-){6}$", overview, re.MULTILINE), overview
    assert "large: 31b: oom_weights." in overview


def test_files_come_before_what_is_recorded(run_module: Run, tmp_path: Path) -> None:
    directory = tmp_path / MODELS["e2b"]["dir"]
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    found = plan(run_module, weights_root=str(tmp_path))
    assert found["verdict"] is None and str(directory) in found["refusals"][0]
    shutil.rmtree(directory)
    assert plan(run_module, weights_root=str(tmp_path))["verdict"] == "oom_weights"


def test_gpus_by_what_nvidia_smi_prints(run_module: Run) -> None:
    by_total = plan(run_module, gpus=[{"nvml_total_mib": 23034}] * 3)
    assert by_total["engines"] == plan(run_module)["engines"]
    unknown = plan(run_module, gpus=[{"nvml_total_mib": 49140}] * 2)
    assert len(unknown["warnings"]) == 4 and "48135 MiB" in unknown["warnings"][0]
    assert "compute capability of this GPU is not known" in unknown["warnings"][1]
    assert unknown["engines"][0]["decode_tok_s"] is None
    stated = {"nvml_total_mib": 49140, "nvml_reserved_mib": 600, "compute_capability": "8.9", "bandwidth_gb_s": 864}
    told = plan(run_module, gpus=[stated] * 2)
    assert told["warnings"] == [] and told["engines"][0]["decode_tok_s"]["mid"] > 100


def test_a_release_that_nobody_examined_is_planned_with_a_warning(run_module: Run) -> None:
    found = plan(run_module, vllm_version="0.40.0")
    assert found["overview"][0].startswith(found["lines"][0][:60]) and "0.40.0" in found["lines"][0]
    assert len(found["warnings"]) == 1 and "vLLM 0.40.0 uses memory: this is a plan for 0.33" in found["warnings"][0]


def test_what_the_plan_adds_to_an_engine(run_module: Run) -> None:
    alone = {"p": {"engines": [E2B]}}
    (engine,) = plan(run_module, profiles=alone, drift_tolerances={"weights_mib": 7}, on_drift="fail")["engines"]
    assert engine["inherited"] == {}
    settings = engine["settings"]
    assert settings.keys() == {"kv_cache_memory_bytes", "gpu_memory_utilization", "vram_budget_mib", "plan"}
    assert settings["kv_cache_memory_bytes"] == engine["gpus"][0]["kv_cache_bytes"]
    assert settings["plan"]["gpus"][0]["total_mib"] + 300 == pytest.approx(settings["vram_budget_mib"], abs=1)
    assert (settings["plan"]["on_drift"], settings["plan"]["tolerances"]["weights_mib"]) == ("fail", 7)
    for more, said in (
        ({"drift_tolerances": {"weight": 7}}, "plan_drift_tolerances: 'weight' is none of"),
        ({"gpus": [{}, L4]}, "gpus[0]: neither cuda_total_bytes nor nvml_total_mib is given"),
    ):
        wrong = plan(run_module, **more)
        assert wrong["rc"] == 1 and said in wrong["msg"]


def test_the_plan_says_which_arguments_an_engine_has_from_its_model(run_module: Run) -> None:
    """The engine comes with them; what it states otherwise is its own."""
    models = {
        "e2b": MODELS["e2b"] | {"engine_defaults": {"dtype": "half", "kv_cache_dtype": "auto", "max_model_len": 1}}
    }
    engine = E2B | {"kv_cache_dtype": "auto", "dtype": "bfloat16"}
    completed = {"e2b": {"tensor_parallel_size": 1, "tool_call_parser": "gemma4"}}
    found = plan(run_module, profiles={"p": {"engines": [engine]}}, models=models, completed=completed)
    assert found["engines"][0]["inherited"] == {"vllm_models.e2b.engine_defaults": {"kv_cache_dtype": "auto"}}
    assert "  arguments: kv_cache_dtype: auto, from vllm_models.e2b.engine_defaults" in found["lines"]
    reasons = found["engines"][0]["settings"]["plan"]["reasons"]
    assert (reasons["dtype"], reasons["kv_cache_dtype"]) == ("your word", "your word: vllm_models.e2b.engine_defaults")
    assert {reasons[key][:8] for key in ("kv_cache_memory_bytes", *completed["e2b"])} == {"it fits:", "vLLM's d"}


# -- the playbook


REFUSED = yaml.safe_load((ROOT / "tests/by_hand/refused_profiles.yml").read_text())
PLANNED = {
    "bf16-tp2": "oom_weights",
    "bf16-pp2": "oom_weights",
    "nvfp4-tp1": "oom_weights",
    "nvfp4-tp2": "fits",
    "nvfp4-pp2": "unsupported_engine",
    "bf16-tp4": "fits",
    "bf16-tp4-graphs": "oom_warmup",
}
"""As it was measured on the reference host."""
UNMODELED = {
    "serving_engines": {"e2b": {**E2B, "served_names": ["a"], "extra_args": ["--enable-dbo"]}},
    "serving_profiles": {"e2b-only": {"engines": ["e2b"]}},
    "serving_roles": ["a"],
    **dict.fromkeys(("serving_profile", "plan_profile"), "e2b-only"),
}
del UNMODELED["serving_engines"]["e2b"]["name"]
MISSPELT = {"model": "e2b", "gpus": [3], "served_names": ["architect"], "tool_call_parsr": "gemma4"}
NVFP4 = REFUSED | dict.fromkeys(("serving_profile", "plan_profile"), "nvfp4-tp1")
OVERRIDE = {"plan_override": "true"}
UNKNOWN_CARD = {"gpu_name": "New card", "gpu_memory_mib": 30000}
PLANS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "measured": (REFUSED | {"vllm_version": "0.19.0", "plan_details": "true"}, []),
    "json": ({"plan_profile": "e2b-only", "serving_profile": "e2b-only", "format": "json"}, []),
    "chosen": (NVFP4, ["nvfp4-tp1 will not start with vLLM 0.32.0", "Weights need 31.03 GiB"]),
    "misspelt": (
        {"serving_engines": {"e2b-all": MISSPELT}, "plan_profile": "e2b-only"},
        ["serving_engines.e2b-all.tool_call_parsr"],
    ),
    "unmodeled": (
        UNMODELED,
        [
            "The plan cannot say whether e2b-only starts with vLLM 0.32.0. e2b: cannot_say.",
            "does not count '--enable-dbo', which needs more memory",
        ],
    ),
    "uncounted_anyway": (UNMODELED | OVERRIDE, []),
    "card": (UNKNOWN_CARD, ["cannot_say. An FP8 KV cache needs compute capability 8.9, and that of New card is not"]),
    "stated_card": (UNKNOWN_CARD | {"gpu_compute_capability": 12.0, "gpu_bandwidth_gb_s": 1792}, []),
    "wrong_card": (
        UNKNOWN_CARD | {"gpu_bandwidth_gb_s": 1.8},
        ["gpu_bandwidth_gb_s: 1.8 is too small, the least is 100"],
    ),
    "format": ({"format": "yaml"}, ["format is 'yaml'; a plan is written as"]),
    "profile": ({"plan_profile": "e2b-olny"}, ["plan_profile 'e2b-olny' is not a key of serving_profiles"]),
    "release": ({"gpu_count": 2, "vllm_image_base": "registry/vllm:latest"}, ["names no release of vLLM"]),
}
"""Hosts by what the plan says in its refusal; nothing where it refuses nothing."""


@pytest.mark.slow
def test_what_the_playbook_plans_and_refuses(
    tmp_path: Path,
    hub: Hub,  # noqa: F811
) -> None:
    """It validates first, and contacts no host. What no engine names is completed, of a hub if nobody recorded it."""
    write(tmp_path / "hub" / "example" / "tiny")
    of_hub = {
        "vllm_models_extra": {"chat": {"repo": "example/tiny"}},
        "serving_profile": "chat",
        "plan_details": "true",
    }
    of_hub |= {"model_weights_endpoint": f"http://127.0.0.1:{hub.server_address[1]}"}
    done = play(tmp_path, "plan", {"of_hub": of_hub} | {name: variables for name, (variables, _) in PLANS.items()})
    record = json.loads((tmp_path / "model_facts" / "example--tiny.json").read_text())
    assert record["source"].startswith(of_hub["model_weights_endpoint"])
    assert "profile chat, vLLM 0.32.0: fits\n" in done.stdout
    failures = {host: text.replace("''", "'") for host, text in find_failures(done).items()}
    for host, (_, words) in PLANS.items():
        assert (host in failures) == bool(words), done.stdout + done.stderr
        assert [each for each in words if each not in failures[host]] == [], failures[host]
    for profile, verdict in PLANNED.items():
        assert f"profile {profile}, vLLM 0.19.0: {verdict}\n" in done.stdout
        assert re.search(rf"^{profile} +{verdict} ", done.stdout, re.MULTILINE), done.stdout
    for engine in ("e4b", "e2b"):
        assert f"\n{engine}  fits: " in done.stdout
    for profile in ("bf16-tp2", "nvfp4-tp2"):
        assert f"profile {profile}, vLLM 0.32.0" not in done.stdout, "one was asked for, and others are shown"
    said = "plan_override: e2b-only would be started although the plan says that it will not start."
    assert done.stdout.count(said) == 1
    found = read_document(done.stdout)
    assert found["host"] == "json" and found["plans"]["e2b-only"]["engines"][0]["verdict"] == "fits"


@pytest.mark.slow
def test_hosts_with_the_same_variables_are_planned_once(tmp_path: Path) -> None:
    wrong = {"plan_profile": "e2b-only", "plan_drift_tolerances": {"x": 1}}
    hosts = {"one": wrong, "two": wrong, "other": wrong | {"gpu_memory_mib": 24564}}
    failures = find_failures(play(tmp_path, "plan", hosts))
    assert failures.keys() == hosts.keys()
    assert all("is none of weights_mib" in text for text in failures.values()), failures
    assert [host for host, text in failures.items() if "(as of one)" in text] == ["two"]


@pytest.mark.slow
def test_site_refuses_a_profile_that_does_not_fit_before_a_host_is_asked(tmp_path: Path) -> None:
    """In its first stage. No host exists, and nobody notices."""
    nobody = {"ansible_host": "192.0.2.1", "ansible_port": 22, "ansible_user": "a", "ansible_ssh_private_key_file": "a"}
    chosen = {**nobody, "serving_profile": "w4a16-tp2", "plan_margin_mib": 10900}
    bare = chosen | {"gpu_count": "{{ not_set }}"}  # planned when its driver answers
    done = play(tmp_path, "validate", {"bare": bare, "refused": chosen, "anyway": chosen | OVERRIDE})
    failures = find_failures(done)
    assert done.returncode == 2 and failures.keys() == {"refused"}, done.stdout + done.stderr
    for words in (
        "w4a16-tp2 will not start with vLLM 0.32.0. 31b-w4a16-tp2: no_kv. Weights take 10.76 GiB",
        "plan_margin_mib 10900 is kept free, which leaves no KV cache",
        "No host was touched.",
        "-e plan_override=true",
    ):
        assert words in failures["refused"]
