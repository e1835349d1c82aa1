# SPDX-License-Identifier: Apache-2.0
"""The deep checks name every problem with a remedy, each once, and nothing else."""

from __future__ import annotations

import grp
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.answers.canary_command import Result
from ansible.module_utils.vllm_edge.doctor import command
from ansible.module_utils.vllm_edge.doctor.contract import NotKnown
from ansible.module_utils.vllm_edge.doctor.registry import DEEP
from ansible.module_utils.vllm_edge.facts import serving
from ansible.module_utils.vllm_edge.facts.model import Deep, Expectation, Weights
from ansible.module_utils.vllm_edge.weights.record import Record
from ansible.module_utils.vllm_edge.weights.verification import hash_file, observe
from doctor_host import FakeHost

COMMIT = "0" * 40
ENGINE: dict[str, Any] = {
    **{"engine": "e2b", "unit": "vllm-e2b.service", "active_state": "active", "sub_state": "running"},
    **{"load_state": "loaded", "phase": "serving", "wanted_by_target": True, "need_daemon_reload": False},
    **{"container": "vllm-e2b", "container_state": "running", "container_ours": True, "port": 8070},
    **{"container_image_id": "sha256:aa", "image": "vllm-edge/x:1", "image_id": "sha256:aa"},
    **{"input_hash": "ab12", "running_input_hash": "ab12"},
}
SWITCH: dict[str, Any] = {
    **{"generation": 5, "profile": "bf16-tp4", "phase": "healthy", "asked_by": "site.yml by alice"},
    "started_at": "2026-11-21T16:40:00Z",
}
STATUS: dict[str, Any] = {
    "active_profile": {"profile": "e2b-only", "generation": 4, "origin": "inventory", "chosen_at": "t"},
    "expected_profile": "e2b-only",
    "target": {"unit": "vllm-edge.target", "active_state": "active", "enabled": True},
    "switch": None,
    "unfinished_switch": None,
    "live_files": [],
    "engines": [ENGINE],
    "gpus": [{"problem": None}],
    "problems": [],
}
RESULTS = [Result("e2b", name, True, 0.1, "a", 1, None, ()) for name in ("auditor", "sentry")]
FINE = [{"path": "/etc/x", "how": ""}]
GOOD = Deep(
    expected=Expectation(profile="e2b-only", files=FINE),
    status=STATUS,
    images=(),
    weights=(Weights("e2b", 3, 5 * 1024**2, COMMIT),),
    canary={"e2b": RESULTS},
)


def host(facts: Deep = GOOD, **changed: Any) -> Deep:
    return replace(facts, status=STATUS | changed)


def engine(**changed: Any) -> Deep:
    return host(engines=[ENGINE | changed])


def rendered(how: str) -> Deep:
    return replace(GOOD, expected=replace(GOOD.expected, files=[{"path": "/etc/x", "how": how}]))


def find(facts: Deep) -> dict[str, tuple[str, str]]:
    """State and evidence by check."""
    found = {}
    for name, check in DEEP.items():
        try:
            verdict = check(facts)
            found[name] = (str(verdict.state), verdict.evidence)
        except NotKnown as error:
            found[name] = ("unknown", str(error))
    return found


def test_a_host_that_is_as_it_should_be() -> None:
    assert find(GOOD) == {
        "deep.status": (
            "ok",
            "profile e2b-only, generation 4, chosen by the inventory on t; 1 engines and 1 GPUs are as they should be",
        ),
        "deep.images": ("ok", "vllm-edge/x:1 (aa)"),
        "deep.weights": ("ok", "e2b: 3 files, 5 MiB, sha256 as recorded at 000000000000"),
        "deep.files": ("ok", "1 files are as the inventory renders them"),
        "deep.canary": ("ok", "all answer: auditor (e2b) in 0.10 s, sentry (e2b) in 0.10 s"),
    }


UNANSWERED = {"e2b": [RESULTS[0], replace(RESULTS[1], ok=False, error="HTTP 500.")]}
SENTRY = "Served name sentry does not answer as it should: HTTP 500. '"
CASES: list[tuple[str, Deep, str, str]] = [
    ("weights", replace(GOOD, weights=(Weights("e2b", problems=("The weights are gone.",)),)), "are gone", ""),
    ("images", engine(container_image_id="sha256:bb"), "runs the image sha256:bb, recorded is sha256:aa", "site.yml"),
    ("images", engine(container_state="absent"), "is active and has no container", "systemctl restart"),
    ("images", replace(GOOD, images=("somebody moved the tag",)), "somebody moved the tag", ""),
    ("status", host(gpus=[{"problem": "GPU 3 is over budget"}]), "GPU 3 is over budget", ""),
    ("status", host(unfinished_switch=SWITCH), "was ended in phase healthy and left unfinished", "vllm-edge recover"),
    ("status", host(switch=SWITCH), "A switch to generation 5 (bf16-tp4) runs, asked by site.yml by alice", "progress"),
    ("status", host(live_files=[{"path": "/etc/x", "how": "it is missing"}]), "is not what generation 4", "site.yml"),
    ("files", rendered("it is missing"), "/etc/x is not what the inventory renders: it is missing", "site.yml"),
    ("canary", replace(GOOD, canary=UNANSWERED), SENTRY, "vllm-edge canary e2b"),
]


@pytest.mark.parametrize(("check", "facts", "told", "remedy"), CASES, ids=[told for *_, told, _ in CASES])
def test_each_problem_is_named_alone(check: str, facts: Deep, told: str, remedy: str) -> None:
    ((name, (state, evidence)),) = [item for item in find(facts).items() if item[1][0] != "ok"]
    assert (name, state) == (f"deep.{check}", "fail")
    assert told in evidence and remedy in evidence


def test_the_units_of_a_switch_that_runs_are_its_own_affair() -> None:
    loading = ENGINE | {"active_state": "activating", "sub_state": "start"}
    target = STATUS["target"] | {"active_state": "inactive"}
    facts = host(switch=SWITCH, engines=[loading], target=target, expected_profile="bf16-tp4")
    assert find(facts)["deep.status"][1].startswith("A switch to generation 5")


def test_a_file_that_is_not_as_rendered_is_named_once() -> None:
    files = [{"path": "/etc/x", "how": "it is missing"}, {"path": "/etc/y", "how": "it is missing"}]
    found = find(host(rendered("it is missing"), live_files=files))
    assert "/etc/y is not what generation 4 says" in found["deep.status"][1]
    assert "/etc/x" not in found["deep.status"][1] and "/etc/x" in found["deep.files"][1]


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (None, "'ansible-playbook playbooks/verify.yml' does that"),
        ("e2b-only", "a switch runs, or image, weights or GPUs are not known"),
        ("nvfp4-tp2", "'-e serving_profile=e2b-only' verifies what runs"),
    ],
)
def test_files_that_could_not_be_compared(expected: str | None, told: str) -> None:
    facts = host(replace(GOOD, expected=Expectation(profile=expected)), expected_profile=expected)
    found = find(facts)
    assert found["deep.files"][0] == "unknown" and told in found["deep.files"][1]
    assert (found["deep.status"][0] == "fail") is (expected == "nvfp4-tp2")


def test_an_empty_host() -> None:
    empty = STATUS | {"active_profile": None, "engines": [], "gpus": [], "expected_profile": None}
    found = find(Deep(Expectation(), empty, (), (), {}))
    assert [name for name, (state, _) in found.items() if state == "ok"] == ["deep.status"], "the rest had no evidence"
    assert {state for state, _ in found.values()} == {"ok", "unknown"}


# ---- reading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    """A model of two files with a record, and what `hash_weights` is asked about it."""
    root = tmp_path / "weights"
    root.mkdir(mode=0o750)
    files = {}
    for name in ("config.json", "model.safetensors"):
        (root / name).write_text(name)
        (root / name).chmod(0o640)
        files[name] = observe(root / name, hash_file(root / name)[0])
    record = Record("e2b", "google/x", "main", COMMIT, str(root), "hub", files)
    (tmp_path / "e2b.json").write_text(record.to_json())
    group = grp.getgrgid(os.getegid()).gr_name
    return {"model": "e2b", "repo": "google/x", "revision": "main", "group": group, "state": tmp_path}


def problems(given: Mapping[str, Any], **changed: Any) -> str:
    # Tests may run as a user who is not root, and then owns the files.
    return " ".join(
        text for text in serving.hash_weights(**{**given, **changed}).problems if "owner and mode" not in text
    )


def test_weights_as_recorded(model: dict[str, Any]) -> None:
    found = serving.hash_weights(**model)
    assert (found.files, found.size_bytes, found.revision, problems(model)) == (2, 28, COMMIT, "")
    assert problems(model, revision=COMMIT) == ""
    (model["state"] / "weights/config.json").chmod(0o666)
    told = " ".join(serving.hash_weights(**model).problems)
    assert f"{model['state']}/weights/config.json of model e2b has owner and mode {os.geteuid()}:" in told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": "e4b"}, "The weights of e4b (google/x) are not recorded: run site.yml."),
        ({"repo": "google/y"}, f"are google/x at {COMMIT}, wanted are google/y at main: run site.yml"),
        ({"revision": "v2"}, "wanted are google/x at v2"),
        ({"group": "no-such-group"}, "could not be verified"),
    ],
)
def test_weights_that_are_not_the_expected_ones(model: dict[str, Any], changed: dict[str, Any], told: str) -> None:
    assert told in problems(model, **changed)


def test_weights_that_are_damaged(model: dict[str, Any]) -> None:
    root = model["state"] / "weights"
    (root / "config.json").unlink()
    seen = (root / "model.safetensors").stat()
    (root / "model.safetensors").write_text("model.Safetensors")
    os.utime(root / "model.safetensors", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    (root / "model.safetensors").chmod(0o666)
    told = problems(model)
    assert f"{root}/config.json of model e2b is missing. 'ansible-playbook playbooks/weights.yml" in told
    assert f"{root}/model.safetensors of model e2b is damaged: its sha256 is" in told and "verify_weights=full" in told


@pytest.fixture
def stubbed(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The healthy host of the doctor's tests, with stand-ins for Docker, the canary and the status."""

    def collect(*_: Any, expected_profile: str | None, **__: Any) -> dict[str, Any]:
        return STATUS | {"expected_profile": expected_profile}

    monkeypatch.setattr(serving, "collect", collect)
    monkeypatch.setattr(serving, "full_canary", lambda *_: RESULTS)
    monkeypatch.setattr(serving, "check_images", lambda configs, docker: [])
    return host


def test_the_command_runs_them_after_the_others(stubbed: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.dumps({"profile": "e2b-only", "files": FINE})
    reader = stubbed.reader
    assert command.run_doctor(reader.paths, output="json", deep=True, expected=expected, reader=reader) == 2
    printed = json.loads(capsys.readouterr().out)
    states = {check["check"]: check["state"] for check in printed["checks"]}
    assert list(states)[-5:] == list(DEEP) and next(iter(states)) == "system.distribution"
    wrong = [check for check in printed["checks"] if check["state"] != "ok"]
    assert [check["check"] for check in wrong] == ["deep.weights"]
    assert "The weights of e2b (google/gemma-4-E2B-it) are not recorded" in wrong[0]["evidence"]


def test_models_are_hashed_and_stopped_engines_not_asked(stubbed: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        serving, "collect", lambda *_, **__: STATUS | {"engines": [ENGINE | {"active_state": "failed"}]}
    )
    models = [{"name": "e4b", "repo": "google/y", "dir": "y"}]
    facts = serving.read_deep(stubbed.reader.paths, Expectation(weights=models))
    (found,) = facts.weights
    assert found.problems == ("The weights of e4b (google/y) are not recorded: run site.yml.",)
    assert facts.canary == {}


def test_the_module_asks_the_hosts_program(run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vllm-edge"
    document = {"host": "h", "as_root": True, "exit_status": 2, "summary": {"fail": 1}}
    check = {"check": "deep.files", "group": "deep", "state": "fail", "evidence": "x differs", "remedy": ""}
    answer = json.dumps(document | {"checks": [check]})
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/args\necho '{answer}'\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = {"host": "xr7620", "gpus": 2, "deep": {"profile": "e2b-only", "files": None}}
    found = run_module("host_doctor", asked, check=True)
    assert (found["rc"], found["changed"], found["doctor"]["host"]) == (0, False, "xr7620")
    assert found["problems"] == ["deep.files: x differs."]
    *arguments, value = (tmp_path / "args").read_text().splitlines()
    assert arguments == ["doctor", "--deep", "--format=json", "--expect"]
    expected = Expectation(**json.loads(value))
    assert (expected.gpus, expected.profile, expected.files) == (2, "e2b-only", None)
    program.write_text("#!/bin/sh\necho 'unrecognized arguments: --deep' >&2\nexit 2\n")
    failed = run_module("host_doctor", asked)
    assert failed["rc"] != 0 and "unrecognized arguments: --deep. playbooks/host.yml installs" in failed["msg"]
