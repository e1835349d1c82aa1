# SPDX-License-Identifier: Apache-2.0
"""The quality suite: mistakes in cases, answers that are right or wrong, the stand-in engine, comparison, the gate."""

from __future__ import annotations

import json
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.answers import model, suite
from ansible.module_utils.vllm_edge.answers import quality as run
from ansible.module_utils.vllm_edge.answers.checks import Reply
from ansible.module_utils.vllm_edge.answers.quality import Options, OutOfTime, Suite
from ansible.module_utils.vllm_edge.answers.suite import find_mistakes, judge, read_cases
from ansible.module_utils.vllm_edge.engine.config import EngineConfig, parse_engine
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.model import Moves, PhaseFailed
from ansible.module_utils.vllm_edge.switch.steps.requests import ask_suite
from ansible.module_utils.vllm_edge.switch.view import HostView
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.long_run import LongRun
from engine_files import CONFIG
from fake_engine import chat
from generations import activate, engine, put, rendered

ROOT = Path(__file__).resolve().parents[3]
PROJECT = yaml.safe_load((ROOT / "group_vars/all/quality.yml").read_text())["quality_suite"]
CASES = {case.name: case for case in read_cases(PROJECT)}
STIG = """Precondition: `fips-mode-setup --check` must say enabled. Backup sshd_config, apply the fix
KexAlgorithms ecdh-sha2-nistp256,ecdh-sha2-nistp384, run sshd -t, validate with `ssh -vv host`, else roll back."""
GOOD: Mapping[str, Any] = {
    "stig-v-257844": STIG,
    "tool-call": [("restart_service", '{"service": "nginx", "host": "web-2"}')],
    "json": '{"program": "sshd", "pid": 4711, "user": "root", "port": 50022}',
    "german": "Mittwoch",
    "english": "32",
    "long-context": "7319",
}


def answer_well(name: str, count: int) -> Any:
    return GOOD[name]


def reply(content: Any, finish: str = "stop") -> Reply:
    text, calls = ("", tuple(content)) if isinstance(content, list) else (content, ())
    return Reply(text, False, 3, 7, finish, calls, (), ())


# ---- cases ------------------------------------------------------------------------------------------------------


def test_the_suite_of_the_project_is_valid_and_says_where_its_cases_come_from() -> None:
    assert find_mistakes(PROJECT, "quality_suite") == []
    sources = {case["name"]: case["source"] for case in PROJECT}
    assert sources == dict.fromkeys(GOOD, "own") | {"stig-v-257844": "reference host"}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"prompt": "x", "exact": "y"}, "has no name"),
        ({"name": "A b", "prompt": "x", "exact": "y"}, "small letters, digits and '-'"),
        ({"name": "a", "prompt": " ", "exact": "y"}, "the prompt is empty"),
        ({"name": "a", "prompt": "x"}, "it expects nothing; write exactly one of exact, regex"),
        ({"name": "a", "prompt": "x", "exact": "y", "regex": "z"}, "it expects exact and regex"),
        ({"name": "a", "prompt": "x", "regex": "("}, "'(' is no regular expression"),
        ({"name": "a", "prompt": "x", "points": [{"point": "p", "patterns": ["["]}]}, "'[' is no regular expression"),
        ({"name": "a", "prompt": "x", "exact": "y", "max_tokens": 0}, "max_tokens is 0"),
        ({"name": "a", "promt": "x", "prompt": "x", "exact": "y"}, "'promt' is no key of a case; did you mean prompt"),
        ({"name": "a", "prompt": "x", "tool_call": {"name": "t", "arguments": {}}}, "tools is empty"),
        ({"name": "a", "prompt": "x", "exact": "y", "context": {"fact": "f", "share": 2.0}}, "context.share is 2.0"),
        ({"name": "a", "prompt": 7, "exact": "y"}, "prompt is 7, str is expected"),
    ],
)
def test_a_mistake_is_named_with_its_case(case: Mapping[str, Any], said: str) -> None:
    (sentence,) = find_mistakes([case], "quality_cases")
    assert sentence.startswith("quality_cases") and said in sentence
    twice = {"name": "a", "prompt": "x", "exact": "y"}
    assert "two cases have the name a" in find_mistakes([twice, twice], "quality_cases")[0]
    assert "is no list" in find_mistakes("a", "quality_cases")[0]


# ---- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_the_expected_answer_passes_and_another_does_not(name: str) -> None:
    assert judge(CASES[name], reply(GOOD[name])) == ""
    assert judge(CASES[name], reply("I do not know.")) != ""


def test_each_of_the_five_points_is_required() -> None:
    points = {text: text for text in ("fips-mode-setup --check", "sshd -t", "ssh -vv")}
    for without, point in (points | {"ecdh-sha2-nistp": "FIPS-validated", "roll back": "rollback"}).items():
        assert point in judge(CASES["stig-v-257844"], reply(STIG.replace(without, "")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("json", "```json\n{}\n```", "is not JSON"),
        (
            "json",
            '{"program": "sshd", "pid": "4711", "user": "root", "port": 1}',
            "is not of the schema: data.pid",
        ),
        ("tool-call", [("restart_service", '{"host": "web-1", "service": "nginx"}')], "web-2"),
        ("tool-call", [("restart_service", "{")], "expected is restart_service"),
        ("tool-call", "systemctl restart nginx", "no tool was called"),
        ("german", "Donnerstag", "matches"),
    ],
)
def test_a_wrong_answer_is_quoted(name: str, content: Any, said: str) -> None:
    assert said in judge(CASES[name], reply(content))


def test_an_answer_that_was_cut_off_says_so() -> None:
    assert "cut off at max_tokens" in judge(CASES["stig-v-257844"], reply("First,", finish="length"))


# ---- the stand-in engine ----------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[[Callable[[str, int], Any]], EngineConfig]]:
    """stand_in(answer) starts an engine on a Unix socket; `answer` gets a case, and how often it was asked by now."""
    made: list[socketserver.ThreadingUnixStreamServer] = []

    def start(answer: Callable[[str, int], Any]) -> EngineConfig:
        asked: Counter[str] = Counter()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = question["messages"][-1]["content"]
                assert question["temperature"] == 0 and question["seed"] == 0
                name = next(case["name"] for case in PROJECT if case["prompt"].strip() in text)
                asked[name] += 1
                content = answer(name, asked[name])
                calls = content if isinstance(content, list) else []
                status, data = chat(None if calls else content, calls=calls)
                body = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        path = tmp_path / f"api{len(made)}.sock"
        made.append(socketserver.ThreadingUnixStreamServer(str(path), Handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.02,), daemon=True).start()
        config = parse_engine(json.dumps({**CONFIG, "served_names": ["sentry", "auditor"]}), "engine.json")
        return replace(config, url=f"unix:{path}", max_model_len=4096)

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def results(config: EngineConfig, **options: Any) -> dict[str, model.CaseResult]:
    found = Suite(Options(read_cases(PROJECT), **options)).run([config])
    assert {one.served_name for one in found} == {"sentry"}, "the names of one engine share its model"
    return {one.case: one for one in found}


def test_a_wrong_and_an_unsteady_answer_are_told_apart(stand_in: Any) -> None:
    def answer(name: str, count: int) -> Any:
        if name == "english":
            return "33"
        return "Mittwoch" if name == "german" and count != 2 else "Freitag" if name == "german" else GOOD[name]

    found = results(stand_in(answer))
    assert [len(one.repeats) for one in found.values()] == [3] * 6
    verdicts = {name: one.verdict for name, one in found.items() if one.verdict != "passed"}
    assert verdicts == {"english": "failed", "german": "unsteady"}
    assert "2 of 3 answers are as expected, and they differ" in found["german"].describe()
    twice = results(
        stand_in(lambda name, count: f"Mittwoch{'.' * (count - 1)}" if name == "german" else GOOD[name]), repeats=2
    )
    assert twice["german"].verdict == "unsteady", "both are as expected, and nothing is random"
    assert "'33'" in found["english"].describe()


def test_the_fact_is_in_the_middle_of_a_context_of_the_engines_size(stand_in: Any) -> None:
    config = stand_in(answer_well)
    case = CASES["long-context"]
    lines = suite.build_prompt(case, config).splitlines()
    assert case.context is not None and abs(lines.index(case.context.fact) - len(lines) / 2) < 5
    assert 60 < len(lines) < 4096 * 0.5 / suite.FILLER_TOKENS + 3
    assert suite.build_prompt(case, config) == suite.build_prompt(case, config)


def test_an_engine_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    config = parse_engine(json.dumps({**CONFIG, "url": f"unix:{tmp_path}/nobody.sock"}), "engine.json")
    (found, *_) = Suite(Options(read_cases(PROJECT[-1:]), repeats=1)).run([config])
    assert found.verdict == "error" and "does not exist" in found.describe()


def test_the_suite_ends_when_its_time_is_over(stand_in: Any) -> None:
    with pytest.raises(OutOfTime, match="did not finish within 0 s"):
        results(stand_in(answer_well), limit_s=0.0)


# ---- records, comparison, the gate ------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units", tmp_path / "run")


def record(paths: HostPaths, profile: str, config: EngineConfig) -> model.Record:
    number = activate(paths, rendered(engine("e2b"), profile="p"))
    generation = replace(store.load(paths, number), profile=profile)
    options = Options(read_cases(PROJECT), repeats=1)
    made = run.build_record(generation, options, Suite(options).run([config]), f"2026-11-2{number}T00:00:00Z")
    run.write_record(made, paths)
    return made


def test_two_profiles_are_compared_side_by_side(
    paths: HostPaths, stand_in: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record(paths, "nvfp4-tp2", stand_in(answer_well))

    def other(name: str, count: int) -> Any:
        return {"english": "31", "german": "Mittwoch."}.get(name, GOOD[name])

    record(paths, "bf16-tp4", stand_in(other))
    assert run.run_compare(paths, ["nvfp4-tp2", "bf16-tp4"], output="text") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "english of sentry: passed with bf16" in said and "failed with bf16" in said and "'32' / '31'" in said
    assert "german of sentry: both passed, texts differ from character 8 on" in said
    assert "stig" not in said
    assert run.run_compare(paths, ["nvfp4-tp2", "w4a16"], output="text") == 2
    assert "No run of w4a16 is recorded" in capsys.readouterr().err


def test_what_only_one_of_two_runs_asked_is_one_sentence(paths: HostPaths, stand_in: Any) -> None:
    one = record(paths, "nvfp4-tp2", stand_in(answer_well))
    more = tuple(replace(result, served_name="auditor") for result in one.cases)
    other = replace(one, run="second", cases=one.cases[1:] + more)
    said = [f"{one.cases[0].case} of sentry: only in {one.run}.", "Only second asked auditor."]
    assert model.compare(one, other) == said


def ask(paths: HostPaths, long_run: LongRun | None = None) -> int:
    """The exit status of `vllm-edge quality` with the suite of the project."""
    options = Options(read_cases(PROJECT), repeats=1)
    return run.run_quality(paths, options, long_run or LongRun(paths.run, "quality"), output="json")


@pytest.fixture
def serve(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> Callable[[EngineConfig], None]:
    """Let the engine of the committed generation be a stand-in."""

    def commit(config: EngineConfig) -> None:
        generation = store.load(paths, activate(paths, rendered(engine("e2b"))))
        stands_in = replace(generation.engines["e2b"], config=config)
        committed = replace(generation, engines={"e2b": stands_in})
        monkeypatch.setattr("ansible.module_utils.vllm_edge.answers.engines.load_committed", lambda paths: committed)

    return commit


def test_the_command_tells_by_its_status_whether_all_passed(
    paths: HostPaths, stand_in: Any, serve: Callable[[EngineConfig], None], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: set[str] = set()
    serve(stand_in(lambda name, count: "33" if name in wrong else GOOD[name]))
    assert ask(paths) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["failed"], said["findings"]) == (6, 0, [])
    (path,) = model.list_files(paths)
    assert said["path"] == str(path)
    path.rename(path.with_stem("20260101T000000Z-p"))
    wrong.add("english")
    assert ask(paths) == 1
    assert "english of sentry" in " ".join(json.loads(capsys.readouterr().out)["findings"])


def test_the_command_runs_once_and_ends_when_nobody_follows_it(
    paths: HostPaths, stand_in: Any, serve: Callable[[EngineConfig], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(stand_in(answer_well))
    with LongRun(paths.run, "quality").alone():
        assert ask(paths) == 2
    assert "runs on this host already" in capsys.readouterr().err
    assert ask(paths, LongRun(paths.run, "quality", attended=True, _began=-100.0)) == 2
    assert "nobody follows it any more. Nothing was recorded" in capsys.readouterr().err
    assert model.list_files(paths) == []


def test_a_record_keeps_every_answer_and_is_not_for_everybody_and_the_newest_stay(
    paths: HostPaths, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "KEPT", 2)
    made = record(paths, "p", stand_in(answer_well))
    (path,) = model.list_files(paths)
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(model.read_suites(paths)) == [made]
    assert made.cases[0].repeats[0].text == STIG
    for name in ("20270101T000000Z-p", "20280101T000000Z-p"):
        run.write_record(replace(made, run=name), paths)
    assert [path.stem[:4] for path in model.list_files(paths)] == ["2027", "2028"]


def gated(paths: HostPaths, gate: str, config: EngineConfig) -> Generation:
    quality = None if gate == "none" else {"gate": gate, "cases": PROJECT, "repeats": 1, "timeout_s": 9}
    generation = store.load(paths, put(paths, rendered(engine("e2b"), profile="p", quality=quality)))
    made = generation.engines["e2b"]
    return replace(generation, engines={"e2b": replace(made, config=config)})


def test_the_gate_rolls_back_warns_or_asks_nothing(paths: HostPaths, stand_in: Any) -> None:
    bad = stand_in(lambda name, count: "33" if name == "english" else GOOD[name])
    host = HostView(paths, ask=run.request, clock=lambda: 0.0)
    assert ask_suite(host, gated(paths, "none", bad), Moves(start=("e2b",))).detail == ""
    warned = ask_suite(host, gated(paths, "warn", bad), Moves(start=("e2b",)))
    assert "5 of 6 quality cases passed" in warned.detail
    assert len(warned.warnings) == 1 and "english" in warned.warnings[0]
    assert {row["case"]: row["verdict"] for row in warned.data["quality"]}["english"] == "failed"
    with pytest.raises(PhaseFailed, match=r"quality_gate: fail.*english of sentry.*'33'.*All answers are in") as failed:
        ask_suite(host, gated(paths, "fail", bad), Moves(start=("e2b",)))
    assert list(failed.value.engines) == ["e2b"]
    good = stand_in(answer_well)
    assert ask_suite(host, gated(paths, "fail", good), Moves(start=("e2b",))).warnings == ()
    assert ask_suite(host, gated(paths, "fail", bad), Moves()).detail == "", "engines that run on are not asked"


@pytest.mark.parametrize(("thinks", "verdict"), [(300, "passed"), (9000, "not_shown")])
def test_a_model_that_always_thinks_is_judged_by_its_answer_or_not_at_all(
    paths: HostPaths, stand_in: Any, thinks: int, verdict: str
) -> None:
    def ask(*_: Any, payload: Any, **__: Any) -> Answer:
        most = payload["max_tokens"]
        cut = most <= thinks
        message = {"role": "assistant", "content": None if cut else "Berlin", "reasoning": "Let me think"}
        choice = {"message": message, "finish_reason": "length" if cut else "stop"}
        return Answer(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": most}}).encode())

    config = replace(stand_in(answer_well), reasoning_parser="openai_gptoss", max_model_len=131072)
    cases = read_cases([{"name": "capital", "prompt": "Capital of Germany?", "exact": "Berlin", "max_tokens": 64}])
    (result,) = Suite(Options(cases), ask=ask).run([config])
    assert result.verdict == verdict, result.describe()


def test_an_interrupted_suite_says_so(
    paths: HostPaths,
    stand_in: Any,
    serve: Callable[[EngineConfig], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    serve(stand_in(answer_well))
    switches = iter(["", "a switch began (alice)"])
    assert ask(paths, LongRun(paths.run, "quality", find_switch=lambda: next(switches))) == 2
    monkeypatch.setattr(Suite, "run", interrupt)
    assert ask(paths) == 2
    said = capsys.readouterr().err
    assert "a switch began (alice). Nothing was recorded" in said and "The suite was interrupted" in said
    assert model.list_files(paths) == []
