# SPDX-License-Identifier: Apache-2.0
"""The list of deliberate faults, and the program that tries them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, load_file, write_program

faults = load_file(ROOT / "tests/tools/deliberate_faults.py")


def test_each_fault_of_the_list_still_applies() -> None:
    every = faults.read_faults()
    assert len({fault.name for fault in every}) == len(every)
    mistakes = {fault.name: mistake for fault in every if (mistake := fault.find_mistake(ROOT))}
    assert not mistakes
    on_a_host = sum(bool(fault.scenario) for fault in every)
    in_the_package = sum(not fault.scenario and fault.file.startswith("plugins/") for fault in every)
    assert (in_the_package, len(every) - in_the_package - on_a_host, on_a_host) == (47, 10, 5)


FAULT = faults.Fault("a", "counting.py", "1 + 1", "1 - 1", "It counts wrong.", "test_of_it.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "counting.py").write_text("def two():\n    return 1 + 1\n\n\ndef three():\n    return 1 + 2\n")
    (tmp_path / "test_of_it.py").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    docker\npythonpath = .\n")
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"old": "1 * 1"}, "'1 * 1' is found 0 times in counting.py"),
        ({"old": "return 1"}, "'return 1' is found 2 times in counting.py"),
        ({"old": "return 1", "after": "def three"}, ""),
        ({"old": "return 1", "after": "def "}, "'def ' is found 2 times in counting.py"),
        ({"new": "1 1"}, "it is an error of syntax"),
        ({"new": "1\n1"}, "it does not change one line"),
        ({"noticed_by": "test_gone.py"}, "test_gone.py is not there"),
    ],
)
def test_what_does_not_apply_is_said(tree: Path, fault: dict[str, str], expected: str) -> None:
    said = faults.Fault(**{**vars(FAULT), **fault}).find_mistake(tree)
    assert said.startswith(expected) and bool(said) == bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "limit_s", "verdict"),
    [
        ("assert two() == 2", 60, "noticed"),
        ("assert two() in (0, 2)", 60, "NOT NOTICED"),
        ("assert two() == 7", 60, "fails without the fault, too"),
        ("pass", 0.01, "took longer than 0.01 s"),
    ],
)
def test_a_fault_counts_as_noticed_only_if_it_makes_a_test_fail(
    tree: Path, test: str, limit_s: float, verdict: str
) -> None:
    (tree / "test_of_it.py").write_text(f"from counting import two\n\n\ndef test_two():\n    {test}\n")
    before = (tree / "counting.py").read_text()
    assert faults.try_fault(FAULT, tree, limit_s).verdict == verdict
    assert (tree / "counting.py").read_text() == before


MOLECULE = """
echo "$1 $VLLM_EDGE_LAB_NAME" >>log
test "$1" != converge || { ! grep -q "1 / 1" counting.py && cp counting.py on_the_host.py; }
"""


@pytest.mark.thorough
def test_faults_of_a_host_are_tried_on_one_host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The playbook of the stand-in fails at one of them."""
    write_program(tree / "bin/molecule", MOLECULE)
    monkeypatch.setenv("PATH", f"{tree / 'bin'}:{os.environ['PATH']}")
    (tree / "molecule/s").mkdir(parents=True)
    environment = {"VLLM_EDGE_LAB_NAME": "vllm-edge-s", "VLLM_EDGE_LAB_SSH_PORT": "22025"}
    described = {"ansible": {"env": environment, "playbooks": {"create": "create.yml"}}}
    (tree / "molecule/s/molecule.yml").write_text(yaml.safe_dump(described))
    (tree / "test_of_it.py").write_text("from on_the_host import two\n\n\ndef test_two():\n    assert two() == 2\n")
    write_program(tree / "bin/ssh", 'echo "$4" >>damage')
    given = {**vars(FAULT), "scenario": "s", "damage": "rm x"}
    every = [faults.Fault(**{**given, "new": new}) for new in ("1 - 1", "2 * 1", "1 / 1")]
    outcomes = list(faults.try_host_faults("s", every, tree))
    assert [(outcome.verdict, outcome.detail) for outcome in outcomes] == [
        ("noticed", "test_of_it.py::test_two"),
        ("NOT NOTICED", ""),
        ("noticed", "the playbook fails: see its output"),
    ]
    assert (tree / "damage").read_text().splitlines() == ["sudo rm x"] * 3
    steps = ["destroy", "create", "converge", *["converge"] * 6, "destroy"]
    assert (tree / "log").read_text().splitlines() == [f"{step} vllm-edge-faults" for step in steps]
