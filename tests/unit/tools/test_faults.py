# SPDX-License-Identifier: Apache-2.0
"""The list of deliberate faults, and the program that tries them."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
from helpers import ROOT


def test_each_fault_of_the_list_still_applies() -> None:
    every = faults.read_faults()
    assert len({fault.name for fault in every}) == len(every)
    mistakes = {fault.name: mistake for fault in every if (mistake := fault.find_mistake(ROOT))}
    assert not mistakes
    on_a_host = [fault for fault in every if fault.scenario]
    in_the_package = [fault for fault in every if not fault.scenario and fault.file.startswith("plugins/")]
    elsewhere = [fault for fault in every if fault not in on_a_host and fault not in in_the_package]
    assert (len(in_the_package), len(elsewhere), len(on_a_host)) == (45, 10, 5)


FAULT = faults.Fault("a", "counting.py", "1 + 1", "1 - 1", "It counts wrong.", "test_of_it.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "counting.py").write_text("def two():\n    return 1 + 1\n\n\ndef three():\n    return 1 + 2\n")
    (tmp_path / "test_of_it.py").touch()
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
    (tree / "pytest.ini").write_text("[pytest]\nmarkers =\n    docker\npythonpath = .\n")
    before = (tree / "counting.py").read_text()
    assert faults.try_fault(FAULT, tree, limit_s).verdict == verdict
    assert (tree / "counting.py").read_text() == before
