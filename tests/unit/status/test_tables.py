# SPDX-License-Identifier: Apache-2.0
"""The report fits a terminal and says what was measured."""

from __future__ import annotations

from typing import Any

import page_example
import pytest
from ansible.module_utils.vllm_edge.status.tables import render, render_gpu_table, render_role_table, verdict
from ansible.module_utils.vllm_edge.switch.journal import to_json
from journals import ended

LONG = "a\nb" + "c" * 200
ASKED: list[dict[str, Any]] = [
    {"check": "completion", "outcome": "passed", "seconds": 0.1, "detail": ""},
    {"check": "tool_call", "outcome": "passed", "seconds": 0.2, "detail": ""},
]
GPU = page_example.REPORT["gpus"][0] | {"used_mib": 20600, "budget_mib": 20900, "within_budget": True}
REPORT: dict[str, Any] = {
    "host": "xr7620",
    "profile": "nvfp4-tp2",
    "generation": 3,
    "engines": page_example.REPORT["engines"],
    "completions": [
        row | {"seconds": 0.12, "completion": LONG, "checks": ASKED} for row in page_example.REPORT["completions"]
    ],
    "gpus": [GPU | {"index": index, "used_mib": 20600 + index} for index in range(4)],
    "versions": {"vLLM": "0.32.0"},
    "problems": [],
    "pins": ["revision: abc"],
}


def tell(**more: Any) -> str:
    """The report with more in it, on one line. It fits a terminal."""
    lines = render(REPORT | more)
    assert max(map(len, lines)) <= 100
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"peer_to_peer_off": ["the IOMMU translates x"]}, "off: the IOMMU translates x; iommu=pt and a reboot "),
        ({"peer_to_peer_off": ["vllm_engine_peer_to_peer says so"]}, "off: vllm_engine_peer_to_peer says so. 3"),
        ({"start_warnings": ["The GPU does not compute in FP4."]}, "31b-nvfp4-tp2: The GPU does not compute in FP4."),
        (
            {"accept_risk": ["--trust-remote-code", "VLLM_SERVER_DEV_MODE"]},
            "31b-nvfp4-tp2: accepted risks: --trust-remote-code, VLLM_SERVER_DEV_MODE.",
        ),
    ],
)
def test_the_report_says_what_an_engine_has_and_others_have_not(engine: dict[str, Any], words: str) -> None:
    large, *others = REPORT["engines"]
    assert words in tell(engines=[large | engine, *others])


def test_report_says_all_of_it_and_keeps_a_completion_on_one_line() -> None:
    lines = render(REPORT | {"completed": ["e2b: gpus [3]: the plan's."]})
    text = "\n".join(lines)
    for words in (
        "profile nvfp4-tp2, generation 3",
        "vllm-31b-nvfp4-tp2  31b-nvfp4 nvfp4   2  0,1   8050  active  132 s  2026-11-21T13:20:01Z",
        "architect    31b-nvfp4-tp2  8050  2 of 2  0.12 s  a b",
        "sentry       e2b            8070  2 of 2  0.12 s  a b",
        "3  NVIDIA L4  20,603  20,900        0     23,034  within   [##################| ]",
        "4 GPUs     82,406  83,600        0     92,136",
        "vLLM: 0.32.0",
        "e2b: gpus [3]: the plan's.",
        "revision: abc",
    ):
        assert words in text
    (line,) = [line for line in lines if line.startswith("sentry")]
    assert line.endswith("...") and len(line) == 100


SWITCH: dict[str, Any] = to_json(ended()) | {
    "phases": [
        {"phase": "canary", "direction": "forward", "seconds": 0.2, "outcome": "failed", "detail": "worker " * 40},
        {"phase": "healthy", "direction": "back", "seconds": 60.4, "outcome": "done", "detail": ""},
        {"phase": "clean_up", "direction": "back", "seconds": None, "outcome": None, "detail": ""},
    ],
    "downtime": {
        "sentry": {"seconds": 0.0, "gaps": [], "phases": {}},
        "worker": {"seconds": 9.0, "gaps": [{"from_s": 1.0, "to_s": 2.0}, {"from_s": 60, "to_s": None}], "phases": {}},
    },
}


def test_the_switch_that_this_run_made_went_back() -> None:
    """What a switch says that went well is in tests/unit/switch/test_command.py."""
    lines = render(REPORT | {"switch": SWITCH, "last_switch": SWITCH})
    for told in ("back: healthy   60.4 s", "back: clean_up       -", "sentry  0.0 s  0            -"):
        assert told in lines
    assert "worker  9.0 s  2, not back  -" in lines
    (failed,) = [line for line in lines if line.startswith("canary ")]
    assert "0.2 s  FAILED: worker worker" in failed and failed.endswith("...")
    assert max(map(len, lines)) <= 100
    assert not any("last switch" in line for line in lines)


def test_a_plain_run_has_the_last_switch_in_a_line() -> None:
    last = SWITCH | {"downtime": {"architect": 64.5, "sentry": 0.0}, "result": "rolled_back"}
    assert (
        "last switch 2026-11-21T16:40:00Z: from generation 3 (nvfp4-tp2) to generation 4 (bf16-tp4), rolled back after "
        "70 s, architect not served for 64 s"
    ) in tell(switch=None, last_switch=last)
    assert "last switch" not in tell(), "a host that has made none"


def test_a_switch_to_what_is_committed_and_the_first_of_a_host() -> None:
    again = SWITCH | {"from_generation": 4, "from_profile": "bf16-tp4"}
    assert "switch to generation 4 (bf16-tp4), which is committed, asked by site.yml by alice" in tell(switch=again)
    first = SWITCH | {"from_generation": None, "from_profile": None, "downtime": {}, "keep": [], "stop": []}
    text = tell(switch=first)
    assert "switch to generation 4 (bf16-tp4) from nothing, asked by site.yml by alice" in text
    assert "; started" not in text and " started 31b-bf16-tp4 " in text and "role down gaps" not in text


def asked(served_name: str, outcomes: dict[str, str], **more: Any) -> dict[str, Any]:
    """What the canary says of one served name; `more` replaces parts of it."""
    checks = [
        {"check": check, "outcome": outcome, "seconds": 0.1, "detail": f"why {outcome}" if outcome != "passed" else ""}
        for check, outcome in outcomes.items()
    ]
    row = {"served_name": served_name, "engine": "e4b", "port": 8060, "seconds": 1, "ok": True, "checks": checks}
    return row | more


def test_what_was_not_shown_is_not_called_passed() -> None:
    outcomes = {"completion": "passed", "json_schema": "skipped", "tool_call": "not_shown"}
    lines = render_role_table([asked("auditor", outcomes), asked("sentry", outcomes)])
    assert "auditor      e4b     8060  1 of 3" in lines[2]
    assert "auditor, sentry: json_schema skipped: why skipped" in lines
    assert "auditor, sentry: tool_call not shown: why not_shown" in lines
    replicas = render_role_table([asked("auditor", outcomes), asked("auditor", outcomes, engine="e4b-1")])
    assert "auditor (e4b), auditor (e4b-1): json_schema skipped: why skipped" in replicas


def test_a_check_that_failed() -> None:
    failing = asked("auditor", {"completion": "passed", "json_schema": "failed"}, ok=False, error="no JSON came back")
    lines = render_role_table([failing, asked("sentry", {"completion": "passed", "json_schema": "passed"})])
    assert "FAILED 1 of 2" in lines[2] and "  2 of 2" in lines[3]
    assert "auditor: json_schema failed: why failed" in lines
    assert "auditor: FAILED: no JSON came back" in lines
    # A canary without single checks.
    for ok, words in ((True, "ok"), (False, "FAILED")):
        assert f"8060  {words}" in render_role_table([asked("auditor", {}, ok=ok)])[2]


def test_when_the_full_canary_last_passed() -> None:
    before = {"passed_at": "2026-11-22T10:00:00Z", "token_s": 0.04}
    lines = render_role_table(
        [
            asked("architect", {}, engine="31b", passed_at="2026-11-22T11:00:00Z", token_s=None),
            asked("auditor", {}, **before),
            asked("sentry", {}, engine="e2b", **before | {"token_s": 1.5}),
            asked("scribe", {}, engine="new"),
        ]
    )
    text = " ".join(" ".join(lines).split())
    assert (
        "The full canary was passed by 31b at 2026-11-22T11:00:00Z, e4b at 2026-11-22T10:00:00Z, "
        "e2b at 2026-11-22T10:00:00Z. Where that container runs since (e4b, e2b) this run asked for one token, which "
        "took up to 1.50 s; playbooks/verify.yml asks all."
    ) in text
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("gpu", "word"),
    [
        ({"within_budget": True, "budget_mib": 20900}, "within"),
        ({"within_budget": False, "budget_mib": 20900}, "OVER"),
        ({"within_budget": True, "budget_mib": 0}, "free"),
        ({"within_budget": None, "budget_mib": None}, "unknown"),
    ],
)
def test_verdict(gpu: dict[str, Any], word: str) -> None:
    assert verdict(gpu) == word
    assert word in render_gpu_table([GPU | gpu])[2]


def test_unknown_memory_is_not_zero() -> None:
    lines = render_gpu_table([*REPORT["gpus"][:3], REPORT["gpus"][3] | {"foreign_mib": None}])
    assert "20,900        ?" in lines[5]
    assert "83,600        ?" in lines[6], "nor is its sum"


def test_a_long_name_leaves_the_bar_whole() -> None:
    long = GPU | {"name": "NVIDIA RTX 6000 Ada Generation Laptop GPU"}
    assert max(map(len, render_gpu_table([long]))) <= 100
    assert render_gpu_table([long])[2].endswith("]")


def test_problems_and_what_was_started_against_the_plan_stand_in_the_report() -> None:
    said = "31b-nvfp4-tp2: no_kv. Weights take 16.27 GiB of the 22.03 GiB of GPU 0, " + "and so on, " * 12
    assert "plan_override: 31b-nvfp4-tp2: no_kv. Weights" in tell(overrides=[said])
    assert "Problems: Something is wrong." in tell(problems=["Something is wrong. " * 20])
    for absent in ("plan_override", "Problems:", "accepted risks"):
        assert absent not in tell()
