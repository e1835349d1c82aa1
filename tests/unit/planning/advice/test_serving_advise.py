# SPDX-License-Identifier: Apache-2.0
"""The module serving_advise and its playbook, as an operator runs them: no host, no GPU, no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory.merging import merge
from ansible.module_utils.vllm_edge.inventory.profiles import Inventory, find_mistakes
from ansible.module_utils.vllm_edge.inventory.replicas import expand
from ansible.module_utils.vllm_edge.inventory.variables import load
from helpers import ROOT, find_failures
from plan_plays import play, read_document

MODELS = {
    "31b-w4a16": {"repo": "google/gemma-4-31B-it-qat-w4a16-ct", "dir": "w4a16", "facts": "recorded"},
    "e2b": {"repo": "google/gemma-4-E2B-it", "dir": "gemma-4-E2B-it", "facts": "files"},
}
OPTIONS = {
    "models": MODELS,
    "gpus": [{"nvml_total_mib": 23034}] * 2,
    "vllm_version": "0.32.0",
    "roles": ["architect", "worker", "auditor", "sentry"],
    "weights_root": "/nowhere",
}

Run = Callable[..., dict[str, Any]]


def test_neither_a_model_of_which_nothing_is_known_nor_a_release_that_nobody_examined_keeps_others(
    run_module: Run,
) -> None:
    more = {"models": MODELS | {"own": {"repo": "somebody/else", "dir": "else"}}, "vllm_version": "0.40.0"}
    found = run_module("serving_advise", OPTIONS | more | {"gpus": [{"nvml_total_mib": 23034}]})
    assert any("vLLM 0.40.0 uses memory: this is a plan for 0.33" in warning for warning in found["warnings"])
    assert found["advice"]["main_models"] == ["e2b"]
    (own,) = [rejection for rejection in found["advice"]["rejected"] if rejection["model"] == "own"]
    assert "nothing is recorded of somebody/else" in own["reason"]


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "H100"])
def test_a_gpu_that_is_named_has_its_speed(run_module: Run, name: str) -> None:
    """Its memory does not say which one it is: another H100 with the same has half the bandwidth."""
    found = run_module("serving_advise", OPTIONS | {"gpus": [{"nvml_total_mib": 81559, "name": name}]})
    (engine,) = found["advice"]["profiles"][0]["engines"]
    assert engine["tok_s_estimate"]["mid"] > 100
    assert "1 x NVIDIA H100 80GB HBM3" in found["lines"][0]


def test_what_is_advised_is_valid_and_fits(run_module: Run) -> None:
    """What is pasted, with replicas; the way of docs/install.md for another box does the same by playbooks."""
    models = yaml.safe_load((ROOT / "group_vars" / "all" / "models.yml").read_text())["vllm_models"]
    asked = OPTIONS | {"models": models, "only": "26b-nvfp4,e4b", "by": "together"}
    ranked = run_module("serving_advise", asked)["advice"]["profiles"]
    choose = next(row["rank"] for row in ranked if row["engines"][0].get("replicas", 1) > 1)
    advised = run_module("serving_advise", asked | {"choose": choose}, check=True)
    assert (advised["rc"], advised["changed"]) == (0, False)
    assert "\n".join(advised["pasted"]) in "\n".join(advised["lines"])
    pasted = yaml.safe_load("\n".join(advised["pasted"]))
    assert pasted["serving_engines"] == advised["advice"]["chosen"]["serving_engines"]
    engines, profiles = pasted["serving_engines"], pasted["serving_profiles"]
    (profile,) = profiles
    settings = {"gpu_count": 2, "gpu_memory_mib": 23034}
    given = {"profiles": profiles, "engines": engines, "models": models, "roles": OPTIONS["roles"]}
    inventory = Inventory(profile, merge(given, {}, lambda: given, [profile]), settings=settings)
    assert find_mistakes(inventory, load(ROOT)) == []
    engines, profiles = expand(engines, profiles, models)
    planned = {"engines": [{"name": name, **engine} for name, engine in engines.items()]}
    given = {key: asked[key] for key in ("models", "gpus", "vllm_version", "weights_root")}
    found = run_module("serving_plan", given | {"profiles": {"p": planned}})["plans"]["p"]
    assert found["verdict"] == "fits" and len(found["engines"]) == 2


# -- the playbook


@pytest.mark.slow
def test_what_the_playbook_prints_and_refuses(tmp_path: Path) -> None:
    wrong = {
        "format": ("yaml", "format is 'yaml'; advice is written as"),
        "advise_model": ("e2b", "No play reads advise_model, so setting it would have no effect. Use one of advise_by"),
        "gpu_count": (0, "Set gpu_count, and gpu_name or gpu_memory_mib"),
        "advise_by": ("speed", "advise_by: 'speed' is not one of tok_s, context, free_gpus, together"),
    }
    hosts: dict[str, dict[str, Any]] = {name: {name: value} for name, (value, _) in wrong.items()}
    hosts |= {"json": {"format": "json", "advise_models": "e2b", "gpu_count": 1}, "text": {"advise_models": "e2b"}}
    done = play(tmp_path, "advise", hosts)
    failures = {host: text.replace("''", "'") for host, text in find_failures(done).items()}
    assert failures.keys() == wrong.keys(), done.stdout + done.stderr
    assert [words for name, (_, words) in wrong.items() if words not in failures[name]] == []
    assert "4 x NVIDIA L4" in done.stdout
    found = read_document(done.stdout)
    assert found["host"] == "json" and found["advice"]["profiles"][0]["rank"] == 1
