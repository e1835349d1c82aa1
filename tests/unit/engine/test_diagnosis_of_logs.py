# SPDX-License-Identifier: Apache-2.0
"""Real logs of vLLM, and real words of Docker, against the signatures: each is told as its cause, healthy ones as none.

A file of tests/fixtures/explain is one log: lines `# name: value` (where it comes from, which cause it has, whether
another attempt can heal it), an empty line, the log. Lines are as they were printed; names of people are masked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.diagnosis import Death, explain, match_lines
from ansible.module_utils.vllm_edge.engine.signatures import SIGNATURES, Signature

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


def read(path: Path) -> Log:
    head, _, log = path.read_text().partition("\n\n")
    facts = dict(line.removeprefix("# ").split(": ", 1) for line in head.splitlines())
    return Log(path.stem, facts, log.splitlines())


LOGS = [read(path) for path in sorted((Path(__file__).parents[2] / "fixtures" / "explain").glob("*.log"))]
FAILED = [log for log in LOGS if log.cause != HEALTHY]
WELL = [log for log in LOGS if log.cause == HEALTHY]

every = pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
failed = pytest.mark.parametrize("log", FAILED, ids=lambda log: log.name)
healthy = pytest.mark.parametrize("log", WELL, ids=lambda log: log.name)


@every
def test_a_log_says_where_it_comes_from(log: Log) -> None:
    assert log.facts["source"].startswith(SOURCES)
    assert set(log.facts) <= {"source", "version", "cause", "heals", "said by", "note"}
    assert log.lines


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: f"{signature.cause}-{signature.pattern:.20}")
def test_every_signature_has_a_log(signature: Signature) -> None:
    assert any(
        log.cause == signature.cause and any(re.search(signature.pattern, line) for line in log.lines) for log in FAILED
    ), "add a real log of it to tests/fixtures/explain"


@failed
def test_a_failure_is_told_as_its_cause(log: Log) -> None:
    why = explain(log.death)
    assert (why.cause, "yes" if why.heals else "no") == (log.cause, log.facts["heals"])
    # A start goes before it, with all that vLLM says then.
    after = replace(log.death, lines=[*(line for well in WELL for line in well.lines), *log.death.lines])
    assert explain(after) == why


@healthy
def test_no_signature_matches_a_healthy_log(log: Log) -> None:
    assert [line for line in log.lines if match_lines([line]) or match_lines([line], was_serving=True)] == []
    assert match_lines(log.lines) is None


@healthy
@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (Death(docker_away=True, live_restore=False), "docker_stopped"),
        (Death(docker_away=True, live_restore=True), "died_while_docker_away"),
        (Death(exit_code=137), "sigkill"),
        (Death(exit_code=143, outside_signal="SIGTERM"), "stopped_outside"),
        (Death(exit_code=1), "unknown"),
    ],
    ids=["docker_restarted", "docker_away", "killed", "stopped", "by_itself"],
)
def test_a_healthy_engine_that_ends_is_started_again(log: Log, death: Death, cause: str) -> None:
    why = explain(replace(death, lines=log.lines))
    assert (why.cause, why.heals) == (cause, True)
