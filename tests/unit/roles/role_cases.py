# SPDX-License-Identifier: Apache-2.0
"""Roles in directories of this machine, or over states that their look at a host would give: many cases in one play."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import run_playbook, start_warm_python

Values = Mapping[str, Any]


def platform(distribution: str, version: str) -> dict[str, str]:
    """What Ansible gathers of a distribution."""
    facts = {"distribution": distribution, "distribution_version": version}
    return facts | {"distribution_major_version": version.partition(".")[0]}


@dataclass(frozen=True)
class Run:
    """A run of entry points of a role that a case asks for. Programs in its directory `bin` come before the host's."""

    points: Sequence[str] = ("main",)
    check: bool = False
    variables: Values = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Played:
    """What a run came to."""

    failed: bool
    message: str
    """Why the last task failed."""
    changed: list[str]
    """Names of the tasks that changed something."""
    text: str
    """What the run printed, in one line, without the tasks that only looked and went well."""
    result: Any
    """The fact that the role hands on."""


Steps = Generator[Run, Played, Any]
"""A case: it asks for a run by `played = yield Run(...)`."""


class Cases:
    """Cases that run a role on this machine, each in a directory of its own.

    A case is a host of one ansible-playbook, which goes on where others fail. Those that ask for another run then run
    together again, until all are at their end; runs in check mode have a play of their own.
    """

    def __init__(self, role: str, result: str = "", make: Callable[[Path], Any] = Path, validated: bool = True) -> None:
        """Cases get what `make` makes of their directory. `result` is the fact that the role hands on."""
        self.role, self.result, self.make, self.validated = role, result, make, validated
        self.steps: dict[str, Callable[[Any], Steps]] = {}
        self.defaults: Values = {}
        """Defaults of modules."""

    def add(self, case: Callable[..., Steps], name: str = "", /, **given: Any) -> Callable[..., Steps]:
        self.steps[name or case.__name__] = functools.partial(case, **given)
        return case

    def play(self, directory: Path, names: Sequence[str]) -> dict[str, Any]:
        """Run these cases; return what each returned or raised."""
        ended: dict[str, Any] = {}
        running = {}
        asked: dict[str, Run] = {}

        def advance(name: str, played: Played | None) -> None:
            try:
                asked[name] = running[name].send(played)
            except StopIteration as end:
                ended[name] = end.value
            except Exception as error:
                ended[name] = error

        for name in names:
            place = directory / name_host(name)
            place.mkdir()
            running[name] = self.steps[name](self.make(place))
            advance(name, None)
        while asked:
            check = any(run.check for run in asked.values())
            now = {name: asked.pop(name) for name, run in list(asked.items()) if run.check is check}
            for name, played in self._run(directory, now, check).items():
                advance(name, played)
        return ended

    def _run(self, directory: Path, runs: Mapping[str, Run], check: bool) -> dict[str, Played]:
        hosts = {}
        for name, run in runs.items():
            place = directory / name_host(name)
            (place / "variables.json").write_text(json.dumps(dict(run.variables)))
            environment = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "STATE": str(place), **run.environment}
            hosts[place.name] = {"points": list(run.points), "environment_of_case": environment}
        here = {"ansible_connection": "local", "ansible_python_interpreter": start_warm_python()}
        here["ansible_module_compression"] = "ZIP_STORED"
        (directory / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": here}}))
        include = {"name": self.role, "tasks_from": "{{ point }}", "rolespec_validate": self.validated}
        result = f"{{{{ lookup('ansible.builtin.vars', '{self.result}', default={{}}) }}}}" if self.result else ""
        tasks = [
            # They come before the variables of a role, as those of the command line do.
            {"ansible.builtin.include_vars": {"file": f"{directory}/{{{{ inventory_hostname }}}}/variables.json"}},
            {"ansible.builtin.include_role": include, "loop": "{{ points }}", "loop_control": {"loop_var": "point"}},
            {"name": "Print the result", "ansible.builtin.debug": {"msg": result}},
        ]
        play = {"hosts": "all", "gather_facts": False, "environment": "{{ environment_of_case }}", "tasks": tasks}
        play["module_defaults"] = self.defaults
        (directory / "play.json").write_text(json.dumps([play]))
        results = directory / "results.json"
        results.unlink(missing_ok=True)
        done = run_playbook(
            *("--inventory=hosts.json", "play.json", "--diff", *(["--check"] if check else [])),
            cwd=directory,
            ANSIBLE_STDOUT_CALLBACK="cases",
            CASES=str(directory),
        )
        assert results.exists(), done.stdout[-4000:] + done.stderr
        found = json.loads(results.read_text())
        played = {}
        for name in runs:
            host = found[name_host(name)]
            # What `show` prints does not come to the callback.
            shown = [line for line in done.stdout.splitlines() if line.startswith(f"{name_host(name)}: ")]
            text = " ".join(" ".join([*shown, *host.pop("texts")]).split())
            played[name] = Played(**host, text=text)
        return played

    def make_test(self) -> Callable[..., None]:
        """The test of the file that has these CASES."""

        @pytest.mark.slow
        @pytest.mark.parametrize("case", self.steps)
        def test_case(run_case: Callable[[str], Any], case: str, seen: Callable[[str, Any], None]) -> None:
            seen(case, run_case(case))

        return test_case


def name_host(case: str) -> str:
    """The name of a case's host and directory."""
    return re.sub(r"\W+", "-", case)


@dataclass(frozen=True)
class Case:
    """A state, the file of tasks that meets it, and what an operator reads; nothing where the role goes on."""

    name: str
    tasks: str
    said: tuple[str, ...] = ()
    state: Values = field(default_factory=dict)
    """Empty: as the role's other cases."""
    facts: Values = field(default_factory=dict)
    """The same of the distribution."""
    given: Values = field(default_factory=dict)


class Role(Cases):
    """A role whose tasks meet states of a host. What it is given holds where a case says nothing else."""

    def __init__(
        self, name: str, state_variable: str, state: Values, facts: Values, given: Values, cases: Sequence[Case]
    ) -> None:
        super().__init__(name, validated=False)
        for case in cases:
            host = {state_variable: case.state or state, "ansible_facts": case.facts or facts}
            self.add(meet, case.name, case=case, variables={**host, **given, **case.given})


def meet(place: Path, case: Case, variables: Values) -> Steps:
    """The role says what it has to, in one paragraph, or goes on."""
    played = yield Run([case.tasks], False, variables)
    told = played.message.replace(place.name, "localhost")
    assert played.failed == bool(case.said), told
    assert [words for words in case.said if words not in told] == [], told
    assert "\n" not in told
    return told or "goes on"
