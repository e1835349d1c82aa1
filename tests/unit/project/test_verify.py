# SPDX-License-Identifier: Apache-2.0
"""Verify names every problem with a remedy, each once, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.doctor.verify import Collected, difference, render, verify
from ansible.module_utils.vllm_edge.status.problems import judge

COMMIT = "0" * 40
GPU = {
    "index": 3,
    "name": "NVIDIA L4",
    "used_mib": 20600,
    "budget_mib": 20900,
    "foreign_mib": 0,
    "total_mib": 23034,
    "within_budget": True,
}
ENGINE: dict[str, Any] = {
    "engine": "e2b",
    "unit": "vllm-e2b.service",
    "active_state": "active",
    "sub_state": "running",
    "load_state": "loaded",
    "phase": "serving",
    "wanted_by_target": True,
    "need_daemon_reload": False,
    "container": "vllm-e2b",
    "container_state": "running",
    "container_ours": True,
    "container_image_id": "sha256:aa",
    "input_hash": "ab12",
    "running_input_hash": "ab12",
    "listens_on": ["127.0.0.1"],
    "published": ["127.0.0.1:8070"],
    "port": 8070,
    "served_names": ["auditor", "sentry"],
}
SWITCH: dict[str, Any] = {
    "generation": 5,
    "profile": "bf16-tp4",
    "phase": "healthy",
    "direction": "forward",
    "seconds": 12.3,
    "asked_by": "site.yml by alice",
    "started_at": "2026-11-21T16:40:00Z",
}
STATUS: dict[str, Any] = {
    "active_profile": {
        "profile": "e2b-only",
        "generation": 4,
        "engines": {"e2b": {"input_hash": "ab12"}},
        "origin": "inventory",
        "chosen_at": "2026-11-20T10:00:00Z",
    },
    "expected_profile": "e2b-only",
    "target": {"unit": "vllm-edge.target", "active_state": "active", "enabled": True},
    "switch": None,
    "unfinished_switch": None,
    "history": [{"started_at": "2026-11-20T10:00:00Z", "result": "rolled_back"}],
    "live_files": [],
    "engines": [ENGINE],
    "gpus": [],
    "problems": [],
}
MODEL: dict[str, Any] = {
    "name": "e2b",
    "repo": "google/x",
    "revision": "main",
    "recorded": {"repo": "google/x", "revision": COMMIT},
    "fits": True,
    "result": {"path": "/w/x", "files": 3, "bytes": 5 * 1024**2, "revision": COMMIT, "damaged": {}, "downloaded": []},
}
RESULTS = [{"served_name": name, "engine": "e2b", "ok": True, "seconds": 0.1} for name in ("auditor", "sentry")]
GOOD = Collected(
    host="xr7620",
    status=STATUS,
    image={"name": "vllm-edge/x:1", "recorded_id": "sha256:aa", "present_id": "sha256:aa"},
    weights=[MODEL],
    canary=[{"engine": "e2b", "ok": True, "results": RESULTS}],
    files=[{"path": "/etc/x", "diff": {"before": {"path": "/etc/x"}, "after": {"path": "/etc/x"}}}],
    vram={"gpus": [GPU], "failures": [], "msg": "Every GPU is within its budget."},
)


def problems(collected: Collected) -> list[str]:
    return [problem for check in verify(collected) for problem in check.problems]


def test_a_host_that_is_as_it_should_be() -> None:
    checked = verify(GOOD)
    assert [(check.what, check.verdict) for check in checked] == [
        (what, "ok")
        for what in (
            "host",
            "profile",
            "switches",
            "generation",
            "units",
            "containers",
            "image",
            "weights e2b",
            "files",
            "served names",
            "GPUs",
        )
    ]
    lines = render(GOOD, checked)
    assert lines[0] == "xr7620: verified"
    assert "e2b-only, generation 4, chosen by the inventory on 2026-11-20T10:00:00Z" in "\n".join(lines)
    assert "1 known, the last rolled back at 2026-11-20T10:00:00Z, none unfinished" in "\n".join(lines)
    assert "live files as in generation 4" in "\n".join(lines)
    assert "3 files, 5 MiB, sha256 as recorded at 000000000000" in "\n".join(lines)
    assert max(map(len, lines)) <= 100


def test_a_switch_to_the_profile_of_the_inventory_is_the_only_problem_while_it_runs() -> None:
    switch = {"generation": 5, "profile": "w4a16-tp2", "asked_by": "site.yml", "phase": "healthy"}
    (told,) = problems(host(expected_profile="w4a16-tp2", switch=switch))
    assert told.startswith("A switch to generation 5 (w4a16-tp2) runs, asked by site.yml, phase healthy")


def weights(**result: Any) -> Collected:
    return replace(GOOD, weights=[MODEL | {"result": MODEL["result"] | result}])


def engine(**changed: Any) -> Collected:
    """As the host says it: what it judged itself stands under its problems, too."""
    status = STATUS | {"engines": [ENGINE | changed]}
    return replace(GOOD, status=status | {"problems": judge(status)})


def host(**changed: Any) -> Collected:
    """The same of the host as a whole."""
    status = STATUS | changed
    return replace(GOOD, status=status | {"problems": judge(status)})


CASES: list[tuple[Collected, str, str]] = [
    (
        weights(damaged={"m": "its sha256 is 1, 2 was recorded"}, downloaded=["m"]),
        "/w/x/m of model e2b",
        "verify_weights",
    ),
    (weights(downloaded=["m"]), "/w/x/m of model e2b is missing", "verify_weights"),
    (weights(healed={"/w/x/m": "0:0 0666"}), "/w/x/m of model e2b has owner and mode 0:0 0666", "verify_weights"),
    (
        replace(GOOD, weights=[MODEL | {"result": {"msg": "The disk is gone"}}]),
        "could not be verified: The disk is gone",
        "",
    ),
    (replace(GOOD, weights=[MODEL | {"recorded": {}}]), "are not recorded", "run site.yml"),
    (
        replace(GOOD, weights=[MODEL | {"fits": False, "repo": "google/y"}]),
        "the inventory says google/y at main",
        "site",
    ),
    (
        engine(active_state="inactive", container_image_id=None, running_input_hash=None),
        "is inactive",
        "systemctl start",
    ),
    (engine(container_image_id="sha256:bb"), "runs the image sha256:bb, recorded is sha256:aa", "site.yml"),
    (engine(container_state="absent", container_image_id=None), "is active and has no container", "systemctl restart"),
    (engine(listens_on=["0.0.0.0"]), "open beyond the loopback", "ss -ltnp"),
    (replace(GOOD, image=GOOD.image | {"present_id": ""}), "is not on this host", "site.yml"),
    (replace(GOOD, image=GOOD.image | {"present_id": "sha256:cc"}), "somebody moved the tag", "site.yml"),
    (replace(GOOD, image={}), "No image is recorded", "site.yml"),
    (replace(GOOD, vram={"gpus": [GPU], "failures": ["GPU 3 is over budget"], "msg": "?"}), "GPU 3 is over budget", ""),
    (replace(GOOD, vram={"gpus": [], "msg": "VRAM cannot be measured"}), "VRAM cannot be measured", ""),
    (
        replace(
            GOOD, canary=[{"engine": "e2b", "results": [RESULTS[0], RESULTS[1] | {"ok": False, "error": "HTTP 500"}]}]
        ),
        "Served name sentry does not answer as it should: HTTP 500",
        "vllm-edge canary e2b",
    ),
    (replace(GOOD, canary=[{"engine": "e2b", "error": "killed"}]), "could not be asked: killed", ""),
    (replace(GOOD, files=[{"path": "/etc/x", "diff": [{"before": "", "after": "y"}]}]), "it is missing", "site.yml"),
    (replace(GOOD, files=[{"path": "/etc/x", "diff": None, "msg": "broken"}]), "/etc/x could not be compared", ""),
    (replace(GOOD, status=STATUS | {"problems": ["Docker is away"]}), "Docker is away", ""),
    (host(unfinished_switch=SWITCH), "was ended in phase healthy and left unfinished", "vllm-edge recover"),
    (host(switch=SWITCH), "A switch to generation 5 (bf16-tp4) runs", "verify again"),
    (host(live_files=[{"path": "/etc/x", "how": "it is missing"}]), "/etc/x is not what generation 4 says", "site.yml"),
]


@pytest.mark.parametrize(("collected", "told", "remedy"), CASES, ids=[told for _, told, _ in CASES])
def test_each_problem_is_named_alone(collected: Collected, told: str, remedy: str) -> None:
    (problem,) = problems(collected)
    assert told in problem and remedy in problem
    lines = render(collected, verify(collected))
    assert lines[0] == "xr7620: NOT verified, 1 problem"
    assert sum("PROBLEM" in line for line in lines) == 1
    assert max(map(len, lines)) <= 100


def test_the_units_of_a_switch_that_runs_are_its_own_affair() -> None:
    loading = ENGINE | {"active_state": "activating", "sub_state": "start"}
    (problem,) = problems(
        host(switch=SWITCH, engines=[loading], target=STATUS["target"] | {"active_state": "inactive"})
    )
    assert "A switch to generation 5" in problem


def test_a_file_that_is_not_as_rendered_is_named_once() -> None:
    files = [{"path": "/etc/x", "diff": [{"before": "", "after": "y"}]}]
    changed = host(live_files=[{"path": "/etc/x", "how": "it is missing"}, {"path": "/etc/y", "how": "it is missing"}])
    first, second = problems(replace(changed, files=files))
    assert "/etc/y is not what generation 4 says" in first and "/etc/x is not what the inventory renders" in second


def test_without_a_generation_at_hand_its_files_are_not_compared() -> None:
    verdicts = {check.what: check.verdict for check in verify(host(live_files=None))}
    assert verdicts["generation"] == "not compared"


def test_all_problems_are_named_at_once() -> None:
    worst = replace(weights(downloaded=["m"]), vram={"gpus": [], "msg": "over"}, image={})
    assert len(problems(worst)) == 3
    assert render(worst, verify(worst))[0] == "xr7620: NOT verified, 3 problems"


def test_another_profile_is_one_problem_and_the_inventory_s_engines_are_not_held_against_the_host() -> None:
    other = replace(GOOD, status=STATUS | {"expected_profile": "nvfp4-tp2"}, weights=[], files=None, vram=None)
    (problem,) = problems(other)
    assert "The inventory says profile nvfp4-tp2, this host runs e2b-only" in problem
    assert "'-e serving_profile=e2b-only' verifies what runs" in problem
    verdicts = {check.what: check.verdict for check in verify(other)}
    assert (verdicts["files"], verdicts["GPUs"], verdicts["units"]) == ("not compared", "not compared", "ok")


def test_an_engine_that_does_not_run_is_not_said_to_be_silent_too() -> None:
    down = replace(engine(active_state="failed", container_image_id=None, running_input_hash=None), canary=[])
    (problem,) = problems(down)
    assert "vllm-e2b.service is failed" in problem


@pytest.mark.parametrize(
    ("diff", "told"),
    [
        ([], None),
        ({"before": {"path": "x"}, "after": {"path": "x"}}, None),
        ({"before": {"mode": "0777"}, "after": {"mode": "0644"}}, "mode is 0777 instead of 0644"),
        ([{"before": "", "after": "y"}], "it is missing"),
        ([{"before_header": "x", "before": "a", "after": "b"}], "its content differs"),
        ([{"before_header": "x", "before": "a", "after": "a"}], None),
    ],
)
def test_difference(diff: Any, told: str | None) -> None:
    assert difference(diff) == told
