# SPDX-License-Identifier: Apache-2.0
"""Causes from vLLM's and Docker's own texts. The lines are what the programs print, not what we would like.

logs.txt of tests/fixtures/explain has real logs, shortened. Before each there is a line with its cause, whether another
attempt can heal it, and its source (an issue of GitHub); lines `# name: value` may follow, such as what the explanation
takes from it (`says`). Lines are as they were printed; names of people are masked. Other files are logs of healthy
engines, with such lines, one of which is the source, and an empty line before them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine import diagnosis
from ansible.module_utils.vllm_edge.engine.diagnosis import Death, explain, find_last_exception, match_lines
from ansible.module_utils.vllm_edge.engine.signatures import SIGNATURES, START_WARNINGS, Explanation

HEALTHY = "healthy"
SOURCES = ("https://github.com/", "written by hand after ", "the lab's engine")


@dataclass(frozen=True)
class Log:
    name: str
    facts: dict[str, str]
    lines: list[str]

    @property
    def cause(self) -> str:
        return self.facts["cause"]

    @property
    def death(self) -> Death:
        if self.facts.get("said by") == "Docker":
            return Death(docker_message="\n".join(self.lines))
        return Death(lines=self.lines, exit_code=1)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "explain"


def read_head(lines: list[str]) -> dict[str, str]:
    return dict(line.removeprefix("# ").split(": ", 1) for line in lines)


def read(path: Path) -> Log:
    head, _, log = path.read_text().partition("\n\n")
    return Log(path.stem, read_head(head.splitlines()), log.splitlines())


def read_logs() -> Iterator[Log]:
    for text in re.split(r"^(?=# [\w-]+ (?:heals|final|-) )", (FIXTURES / "logs.txt").read_text(), flags=re.MULTILINE)[
        1:
    ]:
        head, *lines = text.splitlines()
        _, cause, heals, source = head.split(" ", 3)
        more = [line for line in lines if re.match(r"# [\w ]+: ", line)]
        place = (
            "https://github.com/" if re.match(r"\S+/\S+/(?:issues|pull|discussions)/\d+$|\S+/\S+/blob/", source) else ""
        )
        facts = {"source": place + source, "cause": cause, "heals": heals} | read_head(more)
        yield Log(f"{cause}-{re.sub(r'.*/', '', source)}", facts, [line for line in lines if line not in more])


LOGS = [*read_logs(), *map(read, sorted(FIXTURES.glob("healthy-*.log")))]
FAILED = [log for log in LOGS if log.cause != HEALTHY]
WELL = [log for log in LOGS if log.cause == HEALTHY]
LINE = {
    signature.cause: line
    for signature in SIGNATURES
    for log in FAILED
    for line in log.lines
    if log.cause == signature.cause and re.search(signature.pattern, line)
}
"""A line of a log for each cause."""
SUMMARY = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


def assert_told(why: Explanation, *words: str) -> None:
    """The explanation has these words, and nothing is missing in its sentences."""
    sentence = why.sentence()
    assert [text for text in words if text not in sentence] == [], sentence
    assert "{" not in sentence.replace('{"features": {"cdi": true}}', "")
    assert not re.search(r"  |\(\)|^VLLM|\b([a-z]+) \1\b", sentence), sentence


def test_texts_name_only_groups_of_their_pattern() -> None:
    for signature in SIGNATURES:
        named = {name for _, name, _, _ in string.Formatter().parse(signature.reason + signature.remedy) if name}
        assert named <= set(re.compile(signature.pattern).groupindex), signature.cause


def test_the_cause_wins_over_its_consequences() -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory."
    found = match_lines([LINE["oom_weights"], memory, LINE["kv_below_max_model_len"], SUMMARY])
    assert found is not None and found.cause == "kv_below_max_model_len"


OUTSIDE: list[tuple[Death, str, str]] = [
    (Death(oom_killed=True, exit_code=137, lines=[LINE["kv_below_max_model_len"]]), "oom_killed", "journalctl -k"),
    (Death(oom_killed=True, exit_code=1), "oom_killed", "journalctl -k"),
    (Death(removed=True), "removed", "docker rm"),
    (Death(exit_code=137), "sigkill", "status 137 (SIGKILL)"),
    (Death(exit_code=0, outside_signal="SIGTERM"), "stopped_outside", "systemctl stop"),
    (Death(exit_code=143, outside_signal="SIGTERM"), "stopped_outside", "systemctl stop"),
    (Death(exit_code=137, outside_signal="SIGKILL"), "stopped_outside", "SIGKILL"),
    # vLLM that is told to stop while it loads may end as if it had failed.
    (Death(exit_code=1, outside_signal="SIGTERM"), "unknown", "status 1"),
    (Death(docker_away=True), "docker_stopped", "live-restore"),
    (Death(docker_away=True, live_restore=False, exit_code=143), "docker_stopped", "took the engine's container"),
    (Death(docker_away=True, live_restore=True), "died_while_docker_away", "while the Docker Engine was away"),
]
"""What somebody did to an engine, from which it is started again whatever its log says."""
FACTS = [
    *OUTSIDE,
    (Death(exit_code=135), "shm_too_small", "SIGBUS"),
    (Death(exit_code=0), "ended_by_itself", "status 0"),
    (Death(docker_away=True, live_restore=False, lines=[LINE["not_free"]]), "docker_stopped", "took the engine's"),
    # Docker that leaves containers alone ends none: the log knows why.
    (Death(docker_away=True, live_restore=True, lines=[LINE["not_free"]]), "not_free", "GiB free"),
    (Death(docker_message="docker start: something new"), "docker_refused", "something new"),
    (Death(exit_code=3, lines=["ValueError: strange"]), "unknown", "status 3: ValueError: strange"),
    (Death(), "unknown", "container ended"),
]


@pytest.mark.parametrize(("death", "cause", "told"), FACTS, ids=[f"{c[1]}-{n}" for n, c in enumerate(FACTS)])
def test_causes_from_facts(death: Death, cause: str, told: str) -> None:
    why = explain(death)
    assert why.cause == cause
    assert told in why.sentence()


@pytest.mark.parametrize(("serving", "cause"), [(True, "engine_died_serving"), (False, "engine_died")])
def test_the_engine_process_died(serving: bool, cause: str) -> None:
    lines = [
        "(EngineCore pid=77) ERROR 11-21 03:00:00 [core.py:1512] EngineCore encountered a fatal error.",
        "(EngineCore pid=77) ERROR 11-21 03:00:00 [core.py:1512] ZeroDivisionError: division by zero",
        "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace",
    ]
    why = explain(Death(lines=lines, exit_code=1, was_serving=serving))
    assert why.cause == cause
    assert "ZeroDivisionError: division by zero" in why.reason


def test_who_was_ended_from_outside_is_started_again_whatever_the_log_says() -> None:
    assert explain(Death(lines=[LINE["no_kv"]], exit_code=1)).heals is False
    assert [death for death, _, _ in OUTSIDE if not explain(replace(death, lines=[LINE["no_kv"]])).heals] == []


def test_an_engine_that_has_served_or_got_past_a_cause_is_started_again() -> None:
    onward = "(EngineCore pid=40) INFO 11-22 12:00:20 [gpu_model_runner.py:2000] Starting to load model /models/x..."
    why = explain(Death(lines=[LINE["no_kv"], onward], exit_code=1))
    assert (why.cause, why.heals) == ("no_kv", True)
    why = explain(Death(lines=[LINE["no_kv"], onward, LINE["not_free"]], exit_code=1))
    assert why.cause == "not_free"
    why = explain(Death(lines=[onward, LINE["no_kv"]], exit_code=1))
    assert (why.cause, why.heals) == ("no_kv", False)
    why = explain(Death(lines=[LINE["compiler_missing"]], exit_code=1, was_serving=True))
    assert (why.cause, why.heals) == ("compiler_missing", True)


BROKEN_JSON = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_what_clients_and_local_directories_make_it_say_is_no_cause() -> None:
    why = explain(Death(lines=[f"ERROR {BROKEN_JSON}"], exit_code=139, was_serving=True))
    assert (why.cause, why.heals) == ("unknown", True)
    prompt = "INFO 11-22 12:00:20 [logger.py:39] Received request chatcmpl-1: prompt: 'CUDA out of memory, why?'"
    assert match_lines([prompt], was_serving=True) is None
    said = (
        "Error retrieving safetensors: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/x'. "
        "Use `repo_type` argument if needed."
    )
    lines = [
        f"(APIServer pid=1) ERROR 11-22 12:00:01 [repo_utils.py:47] {said}, retrying 1 of 2",
        f"(APIServer pid=1) ERROR 11-22 12:00:03 [repo_utils.py:45] {said}",
    ]
    assert match_lines(lines) is None
    assert explain(Death(lines=lines, exit_code=1)).heals is True


def test_the_last_exception_is_neither_the_summary_nor_a_warning() -> None:
    assert find_last_exception(["KeyError: 'a'", "  File x", SUMMARY]) == ("KeyError: 'a'", "")
    assert find_last_exception(["INFO nothing"]) is None
    warning = (
        "(APIServer pid=1) WARNING 11-21 03:36:35 [system_utils.py:255] Found ulimit of 20000 and failed. This can "
        "cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n"
    )
    assert match_lines([warning]) is None
    assert find_last_exception([warning]) is None
    assert find_last_exception([warning, "    raise ValueError", "AssertionError", SUMMARY]) == ("AssertionError", "")


healthy = pytest.mark.parametrize("log", WELL, ids=lambda log: log.name)


def test_logs_say_where_they_come_from() -> None:
    for log in LOGS:
        assert log.facts["source"].startswith(SOURCES) and log.lines, log.name
        assert set(log.facts) <= {"source", "version", "cause", "heals", "said by", "says", "note"}, log.name


def test_every_signature_has_a_log() -> None:
    """Otherwise add a real log of it."""
    known = {(log.cause, line) for log in FAILED for line in log.lines}
    for signature in SIGNATURES:
        assert any(cause == signature.cause and re.search(signature.pattern, line) for cause, line in known), signature


@pytest.mark.parametrize("log", FAILED, ids=lambda log: log.name)
def test_a_failure_is_told_as_its_cause(log: Log) -> None:
    why = explain(log.death)
    assert (why.cause, "heals" if why.heals else "final") == (log.cause, log.facts["heals"])
    assert_told(why, log.facts.get("says", ""))
    # A start goes before it, with all that vLLM says then.
    after = replace(log.death, lines=[*(line for well in WELL for line in well.lines), *log.death.lines])
    assert explain(after) == why


@healthy
def test_no_signature_matches_a_healthy_log(log: Log) -> None:
    assert [line for line in log.lines if match_lines([line]) or match_lines([line], was_serving=True)] == []
    assert match_lines(log.lines) is None


# From vllm-project/vllm#30957, #13119, #49141 and #17768; the others as 0.32.0 prints them.
STARTS = """
(ModelOpt fp8): Detected ModelOpt fp8 checkpoint (quant_algo=FP8_PB_WO). Please note that the format is experimental
in its unoptimized AWQ: Layer 'model.mlp' is not supported by AWQMarlin. Falling back to unoptimized AWQ kernels.
in its Moe WNA16: Layer 'layers.7.mlp.experts' is not supported by GPTQMoeMarlin. Falling back to Moe WNA16 kernels.
its MoE kernel: Using default MoE config. Performance might be sub-optimal! Config file not found at /x/E=128,N=8192
Block FP8 kernel for: Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file not
compute in FP8: Your GPU does not have native support for FP8 computation but FP8 quantization is being used.
pads weights: Marlin requires thread-tile padding for the MoE intermediate size of some layers in this model.
(more than two PCIe: Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.
vLLM takes 1.0: Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that k/v_scale
"""


def test_what_a_healthy_start_warns_of() -> None:
    causes = set()
    for words, line in (row.split(": ", 1) for row in STARTS.strip().splitlines()):
        warning = diagnosis.find_start_warning(f"(EngineCore pid=21) WARNING 11-22 19:37:10 [a.py:1] {line}")
        assert warning, line
        assert_told(warning, words)
        causes.add(warning.cause)
    assert causes == {row.cause for row in START_WARNINGS}
    found = {
        (log.name, told.cause) for log in WELL for line in log.lines if (told := diagnosis.find_start_warning(line))
    }
    marlin = {(f"healthy-{name}", "weight_only") for name in ("43507", "gpt-oss-120b-marlin")}
    assert found == {*marlin, ("healthy-two-gpus-without-p2p", "peer_to_peer")}


@healthy
def test_a_healthy_engine_that_ends_is_started_again(log: Log) -> None:
    for death, cause, _ in [*OUTSIDE, (Death(exit_code=1), "unknown", "")]:
        why = explain(replace(death, lines=log.lines))
        assert (why.cause, why.heals) == (cause, True), death
