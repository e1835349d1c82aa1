# SPDX-License-Identifier: Apache-2.0
"""The filters of group_vars/all/wiring.yml: what a role gets of the results of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers import ROOT

ENGINES = {"a": {"model": "x", "gpus": [0, 1], "vram_budget_mib": 100}, "b": {"model": "x", "gpus": [1]}}
NAMED = [{"name": name, **engine} for name, engine in ENGINES.items()]
PROFILES = {"both": {"engines": ["a", "b"], "when": "Always."}, "one": {"engines": ["b"]}}
SLOTS = [{"name": "L4", "total_mib": 23, "reserved_mib": 0}, {"name": "", "total_mib": 24, "reserved_mib": None}]
CARDS = [{"total_mib": 23, "reserved_mib": 1}] * 2
SERVED = {"tensor_parallel_size": 1, "port": 8050, "served_names": ["r"]}
GATED = {"a": SERVED | {"max_model_len": 128}, "b": {"served_names": ["s"]}}
ENDPOINT = {"endpoint": "http://h:1/v1"}
GATED |= {"unused": {"port": 1, "served_names": ["t"]}}
STATUS = {"unit": "vllm-a.service", "load_seconds": 1.5, "active_since": "then", "active_state": "active"}
NOTES = {"peer_to_peer_off": ["why"], "accept_risk": ["--lax"], "start_warnings": ["FP4 is slow."]}
STATUS |= NOTES

PAIRS = {"gpus": [3, 1, 0, 2], "tensor_parallel_size": 2, "replicas": 2, "served_names": ["r"], "stands_in_for": ["s"]}
SINGLE = {"gpus": [4], "served_names": ["s"], "port": 1}
PLAIN = {key: value for key, value in PAIRS.items() if key != "replicas"}
EXPANDED: dict[str, Any] = {
    "engines": {"e-0": PLAIN | {"gpus": [3, 1]}, "e-1": PLAIN | {"gpus": [0, 2]}, "f": SINGLE},
    "profiles": {"p": {"engines": ["f", "e-0", "e-1"], "when": "w"}},
}
GIVEN: dict[str, Any] = {"e-1": {}, "f": 3, "g": {}}
OBSERVED: dict[str, Any] = {"e-0": {"x_bytes": 1}, **GIVEN}
PLACE = {"revision": "main", "dir": "y", "repo": "x/y"}
DEFAULTS = {
    "m": PLACE | {"engine_defaults": {"dtype": "auto", "limit_mm_per_prompt": {"image": 0}, "port": 1, "gpus": [9]}},
    "n": PLACE | {"engine_defaults": None},
}
OF_M = {"model": "m", "dtype": "half", "limit_mm_per_prompt": {"image": 0}}
JUNK: dict[str, Any] = {"engines": {"e": PLAIN}, "profiles": {"p": None, "q": {"engines": ["e", 1]}}}

IMAGE = {
    "vllm": "0.32.0",
    "transformers": "5.16.0",
    "requirement": ">=4",
    "constraint": ">=5",
    "name": "i:1",
    "id": "x",
}
OF_IMAGE = {"vLLM": "0.32.0", "transformers": "5.16.0 (>=4 became >=5)", "image": "i:1", "image id": "x"}
REMOVED = {"removed": ["/etc/x/", "/etc/x/file", "/etc/y"], "kept": ["user u"], "left": {"/etc/x/mine": "not ours"}}
LINES = ["h: removed", "  /etc/x/", "  /etc/y", "kept", "  user u"]
LINES += ["  NVIDIA driver, Docker, container toolkit, their apt repositories, daemon.json: others use them"]
LINES += ["not ours, left alone", "  /etc/x/mine: not ours"]


def expanded(engines: Any, profiles: Any, models: Any) -> tuple[Any, ...]:
    """Arguments of `expand_inventory` for an inventory that adds nothing."""
    given = {"engines": engines, "profiles": profiles, "models": models, "roles": ["r"]}
    return given, {}, "p", "", {"s": {"gpus": [8], "max_model_len": 9}}, {"m": "c" * 40}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("name_entries", (["b", "a"], ENGINES), NAMED[::-1]),
        ("plan_profiles", (PROFILES, ENGINES, ""), {"both": {"engines": NAMED}, "one": {"engines": NAMED[1:]}}),
        ("plan_profiles", (PROFILES, ENGINES, "one"), {"one": {"engines": NAMED[1:]}}),
        (
            *("list_containers", (NAMED, ["GPU-a", "GPU-b"])),
            [{"name": "vllm-a", "gpus": ["GPU-a", "GPU-b"]}, {"name": "vllm-b", "gpus": ["GPU-b"]}],
        ),
        ("list_ports", (PROFILES, GATED), [8050]),
        ("list_versions", ({}, {}, {}), {}),
        ("list_versions", ({"version": "580.1"}, {}, IMAGE), {"driver": "580.1", **OF_IMAGE}),
        ("list_removal", ([REMOVED, {"removed": [], "kept": [], "left": {}}], "h", False), LINES),
        ("list_removal", ([], "h", True), ["h: nothing of vllm-edge is left to remove", "kept", LINES[-3]]),
        (
            *(
                "list_prompts",
                ([{"name": "a", "prompt": "p", "system": "s"}, {"name": "b", "prompt": "p", "tools": []}],),
            ),
            [{"case": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]}],
        ),
        ("list_served_names", (PROFILES, GATED), ["r", "s"]),
        (
            *("expand_inventory", expanded({"e": PAIRS, "f": SINGLE}, {"p": {"engines": ["f", "e"], "when": "w"}}, {})),
            EXPANDED | {"models": {}, "roles": ["r"], "incomplete": {}, "needed": ["f", "e"]},
        ),
        (
            *("expand_inventory", expanded({"e": PAIRS | {"replicas": "2"}, "f": 3}, JUNK["profiles"], "x")),
            JUNK | {"models": {}, "roles": ["r"], "incomplete": {}, "needed": []},
        ),
        # Replicas have the defaults of their model. What they state themselves stands, and what belongs to one engine
        # is not taken from a model. What the plan adds gives way to what an engine states.
        (
            "expand_inventory",
            expanded({"e": PAIRS | {"model": "m", "dtype": "half"}, "s": SINGLE | {"model": "n"}}, {}, DEFAULTS),
            {
                "engines": {name: EXPANDED["engines"][name] | OF_M for name in ("e-0", "e-1")}
                | {"s": SINGLE | {"model": "n", "max_model_len": 9}},
                "profiles": {},
                "models": {"m": DEFAULTS["m"] | {"revision": "c" * 40}, "n": DEFAULTS["n"]},
                **{"roles": ["r"], "incomplete": {}, "needed": []},
            },
        ),
        ("expand_observations", ({"e": {"x_bytes": 1}, **GIVEN}, {"e": PAIRS, "f": SINGLE}), OBSERVED),
        ("expand_observations", ("x", {"e": PAIRS}), "x"),
        ("count_places", (EXPANDED["profiles"], EXPANDED["engines"]), {"r": 2, "s": 2}),
        ("count_places", (PROFILES, GATED), {}),
        (
            "client_models",
            (
                # a and its replica serve the same name, and are in the file once.
                [{"engine": one, "served_names": ["r"]} for one in ("a", "a-1")]
                + [{"engine": "x", "served_names": ["q/b"]}],
                {"a-1": GATED["a"], **GATED},
                "http://h:1",
                100,
            ),
            {
                "q/b": ENDPOINT | {"role_endpoint": "http://h:1/roles/q_b-caf259b6/v1", "model": "q/b"},
                "r": ENDPOINT
                | {"role_endpoint": "http://h:1/roles/r/v1"}
                | {"model": "r", "context": 128, "max_tokens": 100},
            },
        ),
        (
            "describe_gpus",
            ([SLOTS[0] | {"compute_capability": "8.9"}],),
            [{"nvml_total_mib": 23, "name": "L4", "nvml_reserved_mib": 0, "compute_capability": "8.9"}],
        ),
        ("describe_gpus", (SLOTS[1:],), [{"nvml_total_mib": 24}]),
        ("declare_gpus", (2, 23034, "", "8.9", 0.0), [{"nvml_total_mib": 23034, "compute_capability": "8.9"}] * 2),
        ("declare_gpus", (1, 0, "l4", "", 300.0), [{"name": "l4", "bandwidth_gb_s": 300.0}]),
        # There are cards of this name with 10 and with 12 GB.
        *(("declare_gpus", (count, 0, name, "", 0.0), []) for count, name in ((1, "RTX 3080"), (1, "L5"), (0, "L4"))),
        (
            "add_settings",
            (NAMED, [{"engine": "a", "settings": {"vram_budget_mib": 7, "kv_cache_memory_bytes": 5}}]),
            [{**NAMED[0], "vram_budget_mib": 7, "kv_cache_memory_bytes": 5}, NAMED[1]],
        ),
        (
            "calibrate",
            ([NAMED[0] | {"kv_cache_memory_bytes": 5}, NAMED[1] | {"name": "c"}], ["a", "c"], 0.9, CARDS),
            [
                NAMED[0] | {"gpu_memory_utilization": 0.9, "vram_budget_mib": 11},
                NAMED[1] | {"name": "c", "gpu_memory_utilization": 0.9, "vram_budget_mib": 11},
            ],
        ),
        (
            "calibrate",
            ([NAMED[1] | {"gpu_memory_utilization": 0.4, "extra_args": ["-x"]}, NAMED[0]], ["b"], 0.9, CARDS),
            [NAMED[1] | {"gpu_memory_utilization": 0.4, "extra_args": ["-x"], "vram_budget_mib": 11}, NAMED[0]],
        ),
        # As `systemd-escape --path --suffix=mount` writes them.
        ("list_mount_units", (["/.a/b-1/", "/.a"],), [r"\x2ea.mount", r"\x2ea-b\x2d1.mount"]),
        ("list_mount_units", (["/ü %/_:.", "/"],), [r"\xc3\xbc\x20\x25.mount", r"\xc3\xbc\x20\x25-_:..mount"]),
        ("find_release", ("registry:5000/vllm:v0.32.0-x86_64", "0.33.1"), "0.32.0"),
        ("find_release", ("registry:5000/vllm:0.32.0", "0.33.1"), "0.32.0"),
        ("find_release", ("vllm:nightly", "0.33.1+cpu"), "0.33.1"),
        ("find_release", ("vllm:nightly", ""), ""),
        ("sum_budgets", (NAMED, SLOTS), {"0": 100, "1": 124}),
        ("sum_budgets", (NAMED[:1], []), {"0": 100, "1": 100}),
        ("assign_budgets", ({"1": 5}, ["GPU-a", "GPU-b"]), {"GPU-a": 0, "GPU-b": 5}),
        (
            "describe_weights",
            (
                *({name: {"path": name} for name in "xyz"}, {"x": {"precision": "fp8"}, "y": {}, "z": {}}),
                *([{"model": name, "precision": "bf16"} for name in "xy"], "/state"),
            ),
            {
                name: {"path": name, "precision": precision, "record": f"/state/weights/{name}.json"}
                for name, precision in {"x": "fp8", "y": "bf16", "z": "unknown"}.items()
            },
        ),
        (
            "report_engines",
            ([NAMED[0] | SERVED], [{"engine": "b"}, {"engine": "a", "precision": "fp8"} | STATUS]),
            [
                {"engine": "a", "unit": "vllm-a.service", "model": "x", "precision": "fp8", "slots": [0, 1]}
                | {"state": "active", "load_seconds": 1.5, "since": "then"}
                | NOTES
                | SERVED
            ],
        ),
    ],
)
def test_result(filters: dict[str, Callable[..., Any]], name: str, arguments: tuple[Any, ...], result: Any) -> None:
    assert filters[name](*arguments) == result


def test_every_filter_is_used_by_its_full_name(filters: dict[str, Callable[..., Any]]) -> None:
    """Filters that import the package are found in the collection only."""
    files = [path for place in ("group_vars", "roles", "playbooks") for path in (ROOT / place).rglob("*.*")]
    text = "".join(path.read_text() for path in files if path.suffix in {".yml", ".j2"})
    assert [name for name in filters if not re.search(rf"(\| |map\(')edge\.vllm_edge\.{name}\b", text)] == []
    assert [name for name in filters if re.search(rf"\|\s*{name}\b", text)] == []
