# SPDX-License-Identifier: Apache-2.0
"""The project's own profiles: complete, said where they come from, budgets that follow from the facts."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.gpu.models import L4_CUDA_MIB
from ansible.module_utils.vllm_edge.inventory import engine_arguments, vllm_arguments
from ansible.module_utils.vllm_edge.inventory.replicas import expand, list_replicas
from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.checkpoint.quantization import name_precision
from ansible.module_utils.vllm_edge.planning.contract import EnginePlan, Gpu, Verdict
from helpers import ROOT

DATA: dict[str, Any] = {
    name: value
    for file in ("profiles", "engines", "models", "versions")
    for name, value in yaml.safe_load((ROOT / "group_vars" / "all" / f"{file}.yml").read_text()).items()
}
PROFILES: dict[str, Any] = DATA["serving_profiles"]
ENGINES: dict[str, Any] = DATA["serving_engines"]
MODELS: dict[str, Any] = DATA["vllm_models"]
EXPANDED = dict(zip(("engines", "profiles"), expand(ENGINES, PROFILES, MODELS), strict=True))
"""With each replica as an engine of its own."""

L4 = Gpu("NVIDIA L4", int(L4_CUDA_MIB * 2**20))
CUDA_MIB = L4.cuda_total_bytes // 2**20


@functools.cache
def planned(profile: str) -> dict[str, EnginePlan]:
    """Of the release that the lab runs for real, on the reference host's GPUs."""
    engines = [{"name": name} | EXPANDED["engines"][name] for name in EXPANDED["profiles"][profile]["engines"]]
    facts = {engine["model"]: model_facts.recorded(MODELS[engine["model"]]["repo"]) for engine in engines}
    models = {name: families.interpret(found) for name, found in facts.items() if found is not None}
    plan = planner.plan(profile, engines, models, [L4] * 4, vllm_arguments.VERSION)
    return {engine.engine: engine for engine in plan.engines}


def test_the_precision_of_a_model_is_that_of_its_checkpoint() -> None:
    for name, model in MODELS.items():
        facts = model_facts.recorded(model["repo"])
        assert facts is not None
        found = families.interpret(facts)
        assert name_precision(found.dtype, found.quantization) == model["precision"], name


def budget_of(profile: str, engine: str) -> int:
    plans = [planned(profile)[name] for name in list_replicas(engine, ENGINES[engine])]
    (found,) = {ENGINES[engine].get("vram_budget_mib") or plan.settings["vram_budget_mib"] for plan in plans}
    assert isinstance(found, int)
    return found


def test_profiles_say_when_to_choose_them_and_where_their_figures_come_from() -> None:
    for name, item in PROFILES.items():
        assert re.fullmatch(r"[A-Z][^.]*\.", item["when"]), name
        assert item["source"].startswith(("measured on ", "predicted from ")), name
        assert item["source"].startswith("measured") or "not yet run on GPUs" in item["source"], name


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_fits_by_its_plan(profile: str) -> None:
    for name, engine in planned(profile).items():
        assert engine.verdict is Verdict.FITS, f"{name}: {engine.reason}"
        # What was measured is stated, with 300 MiB; what nobody has measured follows from the plan.
        stated = EXPANDED["engines"][name]
        assert ("vram_budget_mib" in stated) == ("gpu_memory_utilization" in stated)
        assert engine.pinned == ("vram_budget_mib" not in stated)
    # A budget that cannot be exceeded would prove nothing.
    assert all(budget_of(profile, name) < CUDA_MIB for name in PROFILES[profile]["engines"])


def test_four_requests_of_full_length_fit_at_once_where_all_roles_share_an_engine() -> None:
    for profile in (name for name, item in PROFILES.items() if len(item["engines"]) == 1):
        engines = list(planned(profile).values())
        assert not engines[0].pinned or sum(int(engine.max_concurrency) for engine in engines) >= 4, profile


def test_what_the_page_says_about_speed() -> None:
    said = {}
    for row in rows("engine"):
        for engine in row["engine"].replace("`", "").split(", ") if "one request, tok/s" in row else []:
            said[engine] = (*map(row.get, ("one request, tok/s", "lowest to highest")), list(row.values())[-1])
    known = {}
    for name, plan in ((name, plan) for profile in PROFILES for name, plan in planned(profile).items()):
        name = next(one for one in ENGINES if name in list_replicas(one, ENGINES[one]))
        alone, together = plan.decode_tok_s, plan.decode_together_tok_s
        assert alone and together and together.requests == 8
        known[name] = (f"{alone.mid:.0f}", f"{alone.low:.0f} to {alone.high:.0f}", f"{together.mid:.0f}")
    assert said == known


def test_the_lab_has_a_checkpoint_for_every_model() -> None:
    made = ast.parse((ROOT / "lab" / "models" / "make.py").read_text())
    named = {ast.unparse(node.targets[0]): node.value for node in made.body if isinstance(node, ast.Assign)}
    repositories = ast.literal_eval(named["REPOSITORIES"])
    for model in MODELS.values():
        assert model["repo"] in repositories
    for engine in ENGINES.values():
        assert engine["max_model_len"] <= repositories[MODELS[engine["model"]]["repo"]]


def test_the_recorded_release_knows_the_argument_that_lets_requests_finish() -> None:
    since = DATA["vllm_shutdown_timeout_since"]
    assert isinstance(since, str)
    assert [int(part) for part in since.split(".")] <= [int(part) for part in vllm_arguments.VERSION.split(".")]
    assert "--shutdown-timeout" in engine_arguments.read_spellings(engine_arguments.VERSION)


def rows(first: str) -> list[dict[str, str]]:
    """Rows of the page's table whose first column has this title."""
    found: list[dict[str, str]] = []
    titles: list[str] = []
    (page,) = (text for text in (path.read_text() for path in (ROOT / "docs").glob("*.md")) if "\n| choose |" in text)
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if titles and cells and set(line) - set("|-: "):
            found.append(dict(zip(titles, cells, strict=True)))
        titles = (titles or cells) if cells else []
    return [row for row in found if next(iter(row)) == first]


def test_the_page_says_what_the_data_say() -> None:
    said: dict[str, list[list[str]]] = {}
    profile = ""
    for row in rows("profile"):
        profile = row["profile"].strip("`") or profile
        said.setdefault(profile, []).append([row[key].replace("`", "") for key in list(row)[1:]])
    known: dict[str, list[list[str]]] = {}
    for profile, name in ((profile, name) for profile, item in PROFILES.items() for name in item["engines"]):
        engine = ENGINES[name]
        served = ", ".join(engine["served_names"]) if engine["served_names"] != DATA["serving_roles"] else "all"
        cells = [name, ", ".join(map(str, engine["gpus"])), str(engine["tensor_parallel_size"])]
        cells += [MODELS[engine["model"]]["precision"], f"{engine['max_model_len']:,}", served]
        known.setdefault(profile, []).append([*cells, f"{budget_of(profile, name):,}"])
    assert said == known


def test_the_page_says_when_to_choose_each_profile() -> None:
    said = {row["choose"].strip("`"): row["when"].replace("`", "") for row in rows("choose")}
    assert said == {name: item["when"] for name, item in PROFILES.items()}
