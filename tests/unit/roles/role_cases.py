# SPDX-License-Identifier: Apache-2.0
"""A role's own tasks over states that its look at a host would give, and what an operator then reads."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
EMPTY: Mapping[str, Any] = {"str": "", "list": [], "dict": {}, "bool": False, "int": 0}


def read_empty_result(module: str) -> dict[str, Any]:
    """What a module returns on a host that has nothing, from the types in its documentation."""
    text = (ROOT / f"plugins/modules/{module}.py").read_text()
    returned = yaml.safe_load(text.partition('RETURN = r"""')[2].partition('"""')[0])
    return {name: EMPTY[value["type"]] for name, value in returned.items()}


def platform(distribution: str, version: str) -> dict[str, str]:
    """What Ansible gathers of a distribution."""
    major = version.partition(".")[0]
    return {
        "distribution": distribution,
        "distribution_version": version,
        "distribution_major_version": major,
    }


@dataclass(frozen=True)
class Case:
    """A state, the file of tasks that meets it, and what an operator reads; nothing where the role goes on."""

    name: str
    tasks: str
    said: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    """Empty: as the role's other cases."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same of the distribution."""
    given: Mapping[str, Any] = field(default_factory=dict)

    def check(self, said: Mapping[str, str], seen: Callable[[str, str], None]) -> None:
        """That the role said what it has to, in one paragraph, or nothing; a row of the table where it did."""
        told = said.get(self.name, "")
        assert bool(told) == bool(self.said), told
        assert [words for words in self.said if words not in told] == [], told
        assert "\n" not in told
        seen(self.name, told or "goes on")


@dataclass(frozen=True)
class Role:
    """A role, and what holds where a case says nothing else."""

    name: str
    state_variable: str
    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    variables: Mapping[str, Any]

    def said(self, directory: Path, cases: Sequence[Case]) -> dict[str, str]:
        """Why the role refused, by the name of the case.

        One ansible-playbook runs them all, on this machine, which they do not touch: they refuse or go on.
        """
        kept = {"content": "{{ cases_said | to_json }}", "dest": str(directory / "said.json")}
        play = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {"cases_said": {}},
            "tasks": [*map(self._block, cases), {"ansible.builtin.copy": kept}],
        }
        (directory / "play.yml").write_text(json.dumps([play]))
        done = subprocess.run(
            ["ansible-playbook", "--inventory=localhost,", str(directory / "play.yml")],
            cwd=directory,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(ROOT / "roles")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        found: dict[str, str] = json.loads((directory / "said.json").read_text())
        return found

    def _block(self, case: Case) -> dict[str, Any]:
        begin = {self.state_variable: dict(case.state or self.state), **self.variables, **case.given}
        include = {"name": self.name, "tasks_from": case.tasks, "rolespec_validate": False}
        keep = f"{{{{ cases_said | combine({{{case.name!r}: ansible_failed_result.msg}}) }}}}"
        return {
            "name": case.name,
            "block": [
                {"ansible.builtin.set_fact": {**(case.facts or self.facts), "cacheable": True}},
                {"ansible.builtin.set_fact": begin},
                {"ansible.builtin.include_role": include},
            ],
            "rescue": [{"ansible.builtin.set_fact": {"cases_said": keep}}],
        }
