# SPDX-License-Identifier: Apache-2.0
"""What validation says: each wrong input is one sentence with variable, value, why, and what would do."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import engine_arguments, vllm_arguments
from ansible.module_utils.vllm_edge.inventory.profiles import Inventory, compute_vram_floor, contradictions, warnings
from ansible.module_utils.vllm_edge.inventory.variables import Project, load

ROOT = Path(__file__).resolve().parents[3]
ABSENT = object()
UUIDS = [f"GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d000{number}" for number in range(4)]

SOUND: dict[str, Any] = {
    "profile": "pair",
    "profiles": {"pair": {"engines": ["large", "small"], "when": "Always.", "source": "predicted"}},
    "engines": {
        "large": {
            "model": "big",
            "tensor_parallel_size": 2,
            "gpus": [0, 1],
            "port": 8050,
            "served_names": ["architect"],
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": "fp8",
            "tool_call_parser": "gemma4",
            "vram_budget_mib": 22200,
        },
        "small": {
            "model": "tiny",
            "tensor_parallel_size": 1,
            "gpus": [2],
            "port": 8060,
            "served_names": ["sentry"],
            "vram_budget_mib": 20900,
            "extra_args": ["--language-model-only", "--limit-mm-per-prompt={'image': 0}".replace("'", '"')],
        },
    },
    "models": {
        "big": {
            "repo": "google/gemma-4-31B-it",
            "revision": "main",
            "precision": "bf16",
            "dir": "big",
            "facts": "files",
        },
        "tiny": {"repo": "google/gemma-4-E2B-it", "revision": "main", "precision": "bf16", "dir": "tiny"},
    },
    "roles": ["architect", "sentry"],
    "gpu_count": 4,
    "gpu_memory_mib": 23034,
    "gpu_uuids": None,
    "image": "docker.io/vllm/vllm-openai:v0.32.0",
    "settings": {
        "allow_reboot": False,
        "allow_docker_restart": "yes",
        "verify_weights": "size",
        "vram_foreign": "warn",
    },
    "given": {"model_weights_token": False, "model_weights_token_file": True, "vllm_image_base_archive": False},
    "chat_templates": frozenset({"gemma4.jinja"}),
    "names": ["serving_profile", "allow_reboot", "vllm_engine_shm_size", "somebody_elses_variable", "ansible_user"],
}
VARIABLES = {"profile": "serving_profile", "profiles": "serving_profiles", "engines": "serving_engines"} | {
    "models": "vllm_models",
    "roles": "serving_roles",
    "image": "vllm_image_base",
    "chat_template": "vllm_engine_chat_template",
    "settings.": "",
}
"""What an operator calls the keys of SOUND."""

Case = tuple[str, dict[str, Any], list[list[str]]]
"""Class of mistake, what is changed of SOUND (dotted), and words of each sentence that is expected."""


def read_cases() -> Iterator[Case]:
    for mistake, items in yaml.safe_load((ROOT / "tests/fixtures/mistakes.yml").read_text()).items():
        for written, *words in items:
            changes: dict[str, Any] = {}
            sentences = words if isinstance(words[0], list) else [words]
            for path, value in written.items():
                if path.startswith("small."):
                    sentences[0].insert(0, f"serving_engines.{path}")
                    path = f"engines.{path}"
                changes[path] = ABSENT if value == "<absent>" else value
            yield mistake, changes, sentences


def add(kind: str, name: str, like: str) -> dict[str, Any]:
    """SOUND's engines or profiles with one more, whose name may have a dot or a slash."""
    return {kind: SOUND[kind] | {name: SOUND[kind][like]}}


CASES: list[Case] = [
    *read_cases(),
    (
        "GPU slot not there",
        {"gpu_uuids": UUIDS[:2], "gpu_count": None},
        [["serving_engines.small.gpus: slot 2 is not there, gpu_uuids has 2", "0 to 1"]],
    ),
    ("GPU slot not there", {"gpu_uuids": UUIDS[:3]}, [["gpu_count: 4 contradicts gpu_uuids, which has 3"]]),
    ("GPU UUIDs", {"gpu_uuids": ["GPU-0", *UUIDS[1:]]}, [["gpu_uuids[0]: 'GPU-0'", "nvidia-smi -L"]]),
    ("GPU UUIDs", {"gpu_uuids": [*UUIDS[:3], UUIDS[0].upper()]}, [["2 times", "another card"]]),
    ("GPU UUIDs", {"gpu_uuids": UUIDS[0]}, [["gpu_uuids", "is not a list"]]),
    ("path traversal", add("engines", "../x", "small"), [["serving_engines: '../x' cannot be the name of an engine"]]),
    ("path traversal", add("profiles", "a/b", "pair"), [["serving_profiles: 'a/b'"]]),
    ("reserved name", add("engines", "edge-switch", "small"), [["'edge-switch' would be the unit vllm-edge-switch"]]),
    ("reserved name", add("engines", "edge", "small"), [["would be the unit vllm-edge,"]]),
]


@pytest.fixture(scope="session")
def project() -> Project:
    """The project's own roles and variables."""
    return load([str(ROOT / "roles")], str(ROOT / "playbooks"), str(ROOT / "group_vars" / "all"))


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """SOUND with what is under dotted paths replaced or removed."""
    variables = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = variables
        for key in parents:
            place = place[key]
        if value is ABSENT:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return variables


def inventory(variables: dict[str, Any]) -> Inventory:
    return Inventory(**{**variables, "names": frozenset(variables["names"])})


def described(changes: dict[str, Any]) -> str:
    """The change as an operator would have written it."""
    lines = []
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if head in ("settings", "given"):
            lines += [f"{name}: {repr(item) if head == 'settings' else '...'}" for name, item in value.items()]
        elif head == "names":
            lines += [f"{name}: ..." for name in value]
        elif isinstance(value, dict) and head in ("engines", "profiles") and not rest:
            lines.append(f"{VARIABLES[head]}.{list(value)[-1]}: ...")
        else:
            name = ".".join(filter(None, [VARIABLES.get(head, head), rest]))
            lines.append(f"{name}: {'(absent)' if value is ABSENT else 'null' if value is None else repr(value)}")
    return ", ".join(lines)


def test_sound_variables_are_accepted(project: Project) -> None:
    assert contradictions(inventory(SOUND), project) == []
    assert warnings(inventory(SOUND), project) == []


@pytest.mark.parametrize(
    ("mistake", "changes", "expected"), CASES, ids=[f"{case[0]}: {described(case[1])[:60]}" for case in CASES]
)
def test_mistake_is_one_sentence(
    project: Project,
    mistake: str,
    changes: dict[str, Any],
    expected: list[list[str]],
    record_property: Any,
) -> None:
    found = contradictions(inventory(changed(changes)), project)
    record_property("what validation says", [mistake, described(changes), *found])
    assert len(found) == len(expected), found
    for words in expected:
        assert any(all(word in sentence for word in words) for sentence in found), (words, found)


def test_every_class_has_two_inputs() -> None:
    classes = [case[0] for case in CASES]
    assert {mistake for mistake in classes if classes.count(mistake) < 2} <= {"arguments that clash", "several at once"}


JUNK: list[Any] = [
    None,
    True,
    3,
    -1,
    2.5,
    1e400,
    "",
    "x y",
    "a\nb",
    "\0",
    "--",
    [],
    [None],
    [[]],
    {},
    {"a": None},
    {"": {}},
]


def paths(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place of nested mappings."""
    for key, item in value.items():
        yield (*prefix, key)
        if isinstance(item, dict):
            yield from paths(item, (*prefix, key))


# What the playbook makes, and no operator writes.
MADE = {("names",), ("chat_templates",), ("settings",), *(path for path in paths(SOUND) if path[0] == "given")}


@pytest.mark.parametrize("path", [path for path in paths(SOUND) if path not in MADE], ids=".".join)
def test_no_value_of_any_type_is_a_traceback(project: Project, path: tuple[str, ...]) -> None:
    for junk in JUNK:
        variables = copy.deepcopy(SOUND)
        place = variables
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        for sentence in contradictions(inventory(variables), project) + warnings(inventory(variables), project):
            assert sentence.isprintable(), repr(sentence)
            assert sentence[-1] in ".?", sentence
            assert ": " in sentence, sentence


def test_engine_keys_accept_junk(project: Project) -> None:
    for key in project.engine_keys:
        for junk in JUNK:
            contradictions(inventory(changed({f"engines.small.{key}": junk})), project)


WRONG: dict[str, Any] = {"int": 2.5, "float": "much", "bool": "yes", "list": 3, "dict": "x", "str": ["x"]}


def test_a_wrong_type_is_told_of_every_key(project: Project) -> None:
    for key, option in project.engine_keys.items():
        found = contradictions(inventory(changed({f"engines.small.{key}": WRONG[option.get("type", "str")]})), project)
        assert found[0].startswith(f"serving_engines.small.{key}: "), (key, found)
    for key in project.model_keys:
        found = contradictions(inventory(changed({f"models.tiny.{key}": ["x"]})), project)
        assert found[0].startswith(f"vllm_models.tiny.{key}: "), (key, found)


def test_no_secret_is_printed(project: Project) -> None:
    variables = changed({"engines.small.extra_args": ["--api-key", "hunter2", "--hf-token=hunter2 x"]})
    variables["engines"]["small"]["extra_env"] = {"HF_TOKEN": "hunter2\n", "MY_PASSWORD": ["hunter2"]}
    found = contradictions(inventory(variables), project)
    assert len(found) == 4
    assert not [sentence for sentence in found if "hunter2" in sentence]


# ---- other releases of vLLM ------------------------------------------------------------------------------------------


def test_another_release_of_vllm_makes_its_arguments_a_warning(project: Project) -> None:
    variables = changed({"image": "registry.example:5000/vllm/vllm-openai:v0.33.0"})
    variables["engines"]["small"]["extra_args"] = ["--new-in-0-33=1", "--port=1"]
    variables["engines"]["small"]["tool_call_parser"] = "gemma5"
    assert ["--port" in sentence for sentence in contradictions(inventory(variables), project)] == [True]
    told = warnings(inventory(variables), project)
    assert len(told) == 2
    for words, sentence in zip(("knows no 'gemma5'", "knows no '--new-in-0-33'"), told, strict=True):
        assert words in sentence
        assert "v0.33.0" in sentence


def test_another_release_has_a_default_of_its_own(project: Project) -> None:
    variables = changed({"engines.small.vram_budget_mib": 20500})
    assert "20757" in contradictions(inventory(variables), project)[0]
    assert contradictions(inventory({**variables, "image": "vllm/vllm-openai:v0.19.0"}), project) == []


@pytest.mark.parametrize("image", ["vllm/vllm-openai:v0.32.0-x86_64", "registry.lab:5000/vllm:0.32.0"])
def test_release_is_read_from_the_tag(project: Project, image: str) -> None:
    variables = changed({"image": image, "engines.small.extra_args": ["--nonsense"]})
    assert len(contradictions(inventory(variables), project)) == 1


def test_recorded_arguments_are_those_of_the_default_release() -> None:
    image = yaml.safe_load((ROOT / "group_vars/all/versions.yml").read_text())["vllm_image_base"]
    assert image.endswith(f":v{vllm_arguments.VERSION}"), "record them anew: the command is in vllm_arguments.py"


def test_what_is_said_of_options_is_true_of_the_recorded_release() -> None:
    names = {spelled for option in vllm_arguments.OPTIONS for spelled in (option.name, *option.aliases)}
    assert set(engine_arguments.OURS) <= names
    assert set(engine_arguments.KEY_OF_OPTION) <= names
    assert not set(engine_arguments.FORMER) & names
    assert {"--enable-log-requests", "--structured-outputs-config", "--runner", "--reasoning-parser"} <= names


@pytest.mark.parametrize(
    ("items", "values"),
    [
        (["--seed", "-1", "--async-scheduling"], [("-1",), ()]),
        (["--middleware=a", "--middleware=b"], [("a",), ("b",)]),
        (["--allowed-media-domains", "a", "b", "--seed=1"], [("a", "b"), ("1",)]),
        (["--hf-overrides.a.b", "1", "--hf_overrides.c=2"], [("1",), ("2",)]),
        (["-O3", "-sc={}"], [("3",), ("{}",)]),
    ],
)
def test_extra_args_are_read_as_vllm_does(project: Project, items: list[str], values: list[tuple[str, ...]]) -> None:
    found, stray = engine_arguments.arguments(items)
    assert [argument.values for argument in found] == values
    assert all(argument.option for argument in found)
    assert stray == []
    assert contradictions(inventory(changed({"engines.small.extra_args": items})), project) == []


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4", "w4a16"])
def test_precisions_of_published_checkpoints_are_accepted(project: Project, precision: str) -> None:
    assert contradictions(inventory(changed({"models.big.precision": precision})), project) == []


# ---- the project's own data -------------------------------------------------------------------------------------


def own(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "group_vars" / "all" / f"{name}.yml").read_text()))


@pytest.mark.parametrize("profile", own("profiles")["serving_profiles"])
def test_own_profiles_are_accepted(project: Project, profile: str) -> None:
    data = own("profiles") | own("engines") | own("models") | own("versions")
    mine = dataclasses.replace(
        inventory(SOUND),
        profile=profile,
        profiles=data["serving_profiles"],
        engines=data["serving_engines"],
        models=data["vllm_models"],
        roles=data["serving_roles"],
        image=data["vllm_image_base"],
        names=frozenset(data),
    )
    assert contradictions(mine, project) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("inventories/*/group_vars/*/*.yml")), ids=lambda path: path.parts[-4])
def test_own_inventories_hold_no_unknown_variable(project: Project, path: Path) -> None:
    names = list(yaml.safe_load(path.read_text()))
    assert contradictions(inventory(changed({"names": names})), project) == []


def test_results_of_plays_are_known(project: Project) -> None:
    assert {"gpu_slots_result", "vllm_image_result", "nvidia_driver_result", "model_weights_result"} <= project.results


@pytest.mark.parametrize(
    ("engine", "memory", "mib"),
    [
        ({"gpu_memory_utilization": 0.9}, 23034, 20306),
        ({"gpu_memory_utilization": 0.92}, 23034, 20757),
        ({}, 23034, 20757),
        ({"gpu_memory_utilization": 0.9}, 40960, None),
        ({"kv_cache_memory_bytes": 1048577}, 40960, 2),
    ],
)
def test_floor_of_a_budget(engine: dict[str, Any], memory: int, mib: int | None) -> None:
    floor = compute_vram_floor(engine, memory, 0.92)
    assert (floor.mib if floor else None) == mib
