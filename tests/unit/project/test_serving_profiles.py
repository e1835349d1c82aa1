# SPDX-License-Identifier: Apache-2.0
"""The project's own profiles: complete, said where they come from, budgets that follow from the facts."""

from __future__ import annotations

import ast
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import vllm_arguments
from ansible.module_utils.vllm_edge.serving import CUDA_TOTAL_MIB
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
DATA: dict[str, Any] = {
    name: value
    for file in ("profiles", "engines", "models", "versions")
    for name, value in yaml.safe_load((ROOT / "group_vars" / "all" / f"{file}.yml").read_text()).items()
}
PROFILES: dict[str, Any] = DATA["serving_profiles"]
ENGINES: dict[str, Any] = DATA["serving_engines"]
MODELS: dict[str, Any] = DATA["vllm_models"]

CUDA_MIB = CUDA_TOTAL_MIB[23034]
# What lies outside the fraction of the 31B, measured on the reference host: context and NCCL by tensor_parallel_size,
# CUDA graphs (over two GPUs with 256 sequences, the most there can be).
CONTEXT_MIB = {2: 105, 4: 391}
GRAPHS_MIB = 1505
MARGIN_MIB = 300
OF_31B = [name for name in ENGINES if name.startswith("31b-")]


def predicted_mib(engine: dict[str, Any]) -> int:
    inside = math.ceil(engine["gpu_memory_utilization"] * CUDA_MIB)
    graphs = 0 if engine.get("enforce_eager") else GRAPHS_MIB
    return int(inside + graphs + CONTEXT_MIB[engine["tensor_parallel_size"]])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_says_when_to_choose_it_and_where_its_figures_come_from(profile: str) -> None:
    when, source = PROFILES[profile]["when"], PROFILES[profile]["source"]
    assert re.fullmatch(r"[A-Z][^.]*\.", when), when
    assert source.startswith(("measured on ", "predicted from ")), source
    if source.startswith("predicted"):
        assert "not yet run on GPUs" in source


@pytest.mark.parametrize("engine", OF_31B)
def test_budgets_of_the_31b_are_what_is_known_plus_300_mib(engine: str) -> None:
    budget = ENGINES[engine]["vram_budget_mib"]
    # Rounded to 50 MiB.
    assert abs(predicted_mib(ENGINES[engine]) + MARGIN_MIB - budget) <= 25


@pytest.mark.parametrize("engine", ENGINES)
def test_a_budget_can_be_exceeded(engine: str) -> None:
    assert ENGINES[engine]["vram_budget_mib"] < CUDA_MIB


@pytest.mark.parametrize("engine", OF_31B)
def test_the_samplers_warm_up_has_room(engine: str) -> None:
    # 262,144 logits in float32 for each sequence and the sampler's copies, 0.875 GiB for 256.
    warm_up_mib = 896 * ENGINES[engine].get("max_num_seqs", 256) / 256
    if "max_num_seqs" in ENGINES[engine]:
        assert predicted_mib(ENGINES[engine]) + warm_up_mib + MARGIN_MIB <= CUDA_MIB
    else:
        assert engine == "31b-nvfp4-tp2", "only this one was seen to start with the default of 256 sequences"


def test_the_reference_profile_over_four_gpus_has_the_arguments_it_was_measured_with() -> None:
    engine = ENGINES["31b-bf16-tp4"]
    measured = {
        "tensor_parallel_size": 4,
        "gpus": [0, 1, 2, 3],
        "port": 8050,
        "max_model_len": 16384,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.92,
        "enforce_eager": True,
        "vram_budget_mib": 21450,
    }
    assert {key: engine[key] for key in measured} == measured
    assert "kv_cache_dtype" not in engine


def test_small_models_stay_where_only_the_31b_changes() -> None:
    assert PROFILES["w4a16-tp2"]["engines"][1:] == PROFILES["nvfp4-tp2"]["engines"][1:] == ["e4b", "e2b"]
    assert ENGINES["31b-w4a16-tp2"]["gpus"] == ENGINES["31b-nvfp4-tp2"]["gpus"]


def test_an_engines_name_says_its_model_and_its_width() -> None:
    for name in OF_31B:
        assert name == f"{ENGINES[name]['model']}-tp{ENGINES[name]['tensor_parallel_size']}"
        assert ENGINES[name]["model"] == f"31b-{MODELS[ENGINES[name]['model']]['precision']}"


def test_the_lab_has_a_checkpoint_for_every_model() -> None:
    made = ast.parse((ROOT / "lab" / "models" / "make.py").read_text())
    repositories = next(
        ast.literal_eval(node.value)
        for node in made.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REPOSITORIES"
    )
    for model in MODELS.values():
        assert model["repo"] in repositories
    for engine in ENGINES.values():
        assert engine["max_model_len"] <= repositories[MODELS[engine["model"]]["repo"]]


def test_the_recorded_release_knows_the_argument_that_lets_requests_finish() -> None:
    since = DATA["vllm_shutdown_timeout_since"]
    assert isinstance(since, str)
    assert [int(part) for part in since.split(".")] <= [int(part) for part in vllm_arguments.VERSION.split(".")]
    assert any(option.name == "--shutdown-timeout" for option in vllm_arguments.OPTIONS)


def rows(page: Path, first: str) -> list[dict[str, str]]:
    """Rows of the table whose first column has this title."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    cells = [
        (token.type, following.content)
        for token, following in itertools.pairwise(tokens)
        if token.type in {"table_open", "tr_open", "th_open", "td_open"}
    ]
    titles: list[str] = []
    found: list[dict[str, str]] = []
    for kind, content in cells:
        if kind == "table_open":
            titles = []
        elif kind == "tr_open":
            found.append({})
        elif kind == "th_open":
            titles.append(content)
        else:
            found[-1][titles[len(found[-1])]] = content
    return [row for row in found if row and next(iter(row)) == first]


def test_the_page_says_what_the_data_say() -> None:
    page = ROOT / "docs" / "profiles.md"
    said: dict[str, list[list[str]]] = {}
    profile = ""
    for row in rows(page, "profile"):
        profile = row["profile"].strip("`") or profile
        said.setdefault(profile, []).append([row[key].replace("`", "") for key in list(row)[1:]])
    known = {}
    for name, item in PROFILES.items():
        known[name] = [
            [
                engine,
                ", ".join(map(str, ENGINES[engine]["gpus"])),
                str(ENGINES[engine]["tensor_parallel_size"]),
                MODELS[ENGINES[engine]["model"]]["precision"],
                f"{ENGINES[engine]['max_model_len']:,}",
                ", ".join(ENGINES[engine]["served_names"])
                if ENGINES[engine]["served_names"] != DATA["serving_roles"]
                else "all",
                f"{ENGINES[engine]['vram_budget_mib']:,}",
            ]
            for engine in item["engines"]
        ]
    assert said == known


def test_the_page_says_when_to_choose_each_profile() -> None:
    said = {row["choose"].strip("`"): row["when"].replace("`", "") for row in rows(ROOT / "docs/profiles.md", "choose")}
    assert said == {name: item["when"] for name, item in PROFILES.items()}
