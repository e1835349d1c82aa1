# SPDX-License-Identifier: Apache-2.0
"""What a requirement on transformers becomes with the project's own matrix, and what is refused."""

from __future__ import annotations

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import image_compat
from helpers import ROOT
from packaging.specifiers import SpecifierSet

ROWS = yaml.safe_load((ROOT / "group_vars/all/versions.yml").read_text())["vllm_compatibility_matrix"]
NEEDS = [{"transformers": ">=5.5.0", "reason": "the gemma4 architecture"}]
GAPS = [{"last": "4.57.6", "next": "5.0.0"}]


def resolve(requirement: str, vllm: str, installed: str | None = None) -> image_compat.Resolution:
    return image_compat.resolve(requirement, vllm, installed, ROWS, NEEDS, GAPS)


@pytest.mark.parametrize(
    ("requirement", "vllm", "constraint"),
    [
        ("transformers>=4.58", "0.32.0", "transformers>=5.16.1,<5.20.0"),
        ("transformers", "0.33.0", "transformers>=5.16.1,<5.21.0"),
        ("transformers~=5.17.2", "0.32.0", "transformers>=5.17.2,<5.18"),
        ("transformers==5.18.*,!=5.18.1", "0.32.0", "transformers>=5.18,!=5.18.1,<5.19"),
        ("transformers==5.19.0", "0.32.0", "transformers==5.19.0"),
        ("transformers>5.17.0,<=5.19.0", "0.32.0", "transformers>5.17.0,<=5.19.0"),
        ("transformers>=5.17,!=4.50.*,!=6.0.0", "0.32.0", "transformers>=5.17,<5.20.0"),
        ("transformers>=4.58", "0.28.0", "transformers>=5.5.3"),
        ("transformers>=4.58", "0.27.1", "transformers>=5.5.3,<5.15.0"),
        # Excluded prefixes at the lower end are no releases to start from.
        ("transformers>=4.58", "0.19.1", "transformers>=5.5.0,!=5.5.0,<5.15.0"),
    ],
)
def test_requirement_becomes_a_constraint_with_a_ceiling(requirement: str, vllm: str, constraint: str) -> None:
    assert resolve(requirement, vllm).constraint == constraint


@pytest.mark.parametrize(
    ("requirement", "vllm", "texts"),
    [
        (
            "transformers<5",
            "0.32.0",
            ["impossible with vLLM 0.32.0", "wheel", "requirement within transformers>=5.16.1"],
        ),
        ("transformers>=4.58", "0.19.0", ["the gemma4 architecture needs transformers >=5.5.0"]),
        ("transformers==5.15.0", "0.27.1", ["known to be broken", "AmbiguousGlobalPerLayerAttributeError", "5.14.1"]),
        ("transformers>=4.58", "0.40.0", ["in no row", "0.33", "add a row"]),
        ("torch>=2", "0.32.0", ["names torch"]),
        ("transformers @ https://x/y.whl", "0.32.0", ["no address"]),
        ("transformers>=5,<5", "0.32.0", ["contradicts itself"]),
        ("transformers===5.17", "0.32.0", ["Write '==5.17'"]),
        ("transformers>=five", "0.32.0", ["cannot be read"]),
        ("transformers>=5", "nightly", ["not a version"]),
    ],
)
def test_refusals_say_what_stands_against_it(requirement: str, vllm: str, texts: list[str]) -> None:
    with pytest.raises(image_compat.CompatError) as refused:
        resolve(requirement, vllm)
    for text in texts:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("installed", "needs_layer"),
    [(None, True), ("5.16.0", True), ("5.16.1", False), ("5.19.3", False), ("5.20.0", True), ("5.17.0.dev0", False)],
)
def test_layer_only_where_the_base_does_not_meet_the_constraint(installed: str | None, needs_layer: bool) -> None:
    assert resolve("transformers>=4.58", "0.32.0", installed).needs_layer is needs_layer


@pytest.mark.parametrize(
    ("requirement", "installed", "first", "last"),
    [
        (
            *(
                ">=4.58",
                "5.16.0",
                ">=4.58 names no release (4.57.6 -> 5.0.0); with vLLM 0.32.0 it becomes >=5.16.1,<5.20.0",
            ),
            "the base image has 5.16.0, so a layer is needed",
        ),
        ("==5.17.0", "5.17.0", "==5.17.0 stays as it is", "so there is no layer"),
        (">=5.17", None, "with vLLM 0.32.0, transformers>=5.17 becomes >=5.17,<5.20.0", "has none"),
    ],
)
def test_explanation(requirement: str, installed: str | None, first: str, last: str) -> None:
    said = resolve(f"transformers{requirement}", "0.32.0", installed).explanation
    assert said.removeprefix("transformers").startswith(first) and last in said


def test_requirement_that_lies_in_the_gap_is_impossible() -> None:
    with pytest.raises(image_compat.CompatError, match=r"lies between 4\.57\.6 and 5\.0\.0, where no release is"):
        image_compat.resolve("transformers>=4.58", "0.19.0", None, ROWS, (), GAPS)
    # Without the gap being known, the range looks as good as any.
    assert image_compat.resolve("transformers>=4.58", "0.19.0", None, ROWS).constraint == "transformers>=4.58,<5"


@pytest.mark.parametrize(
    ("span", "bad", "left"),
    [
        (">=5,<6", ">=5.15", ">=5,<5.15"),
        (">=5,<6", "==5.15.0", ">=5,!=5.15.0,<6"),
        (">=5,<6", "<=5.4", ">5.4,<6"),
        (">=5,<6", ">=5.2,<5.4", ">=5.4,<6"),
        (">=5,<6", ">=7", ">=5,<6"),
        (">=5,<6", ">=4,<7", None),
        ("==5.15.0", "==5.15.0", None),
    ],
)
def test_known_bad_releases_are_left_out(span: str, bad: str, left: str | None) -> None:
    known_bad = [{"transformers": bad, "reason": "it breaks"}]
    rows = [{"vllm": "==1.0.*", "transformers": span, "reference": "r", "known_bad": known_bad}]
    if left is None:
        with pytest.raises(image_compat.CompatError, match="it breaks"):
            image_compat.resolve("transformers", "1.0.0", None, rows)
    else:
        assert image_compat.resolve("transformers", "1.0.0", None, rows).constraint == f"transformers{left}"


VERSIONS = [f"{major}.{minor}.{patch}" for major in (4, 5, 6) for minor in (0, 4, 5, 15, 16, 17, 20) for patch in "01"]
SPECIFIERS = [">=5.5.1", ">5.16.0", "<=5.17.1", "<5.16.1", "!=5.16.*", "!=5.16.0", "==5.*", "~=5.16.0", "==5.16.1"]


@pytest.mark.parametrize("first", SPECIFIERS)
@pytest.mark.parametrize("second", SPECIFIERS)
def test_intersection_is_that_of_packaging(first: str, second: str) -> None:
    """Every release is in the intersection exactly where packaging has it in both."""
    joined = image_compat.intersect(image_compat.parse_range(first, "1"), image_compat.parse_range(second, "2"))
    expected = [item for item in VERSIONS if item in SpecifierSet(f"{first},{second}")]
    found = [] if joined is None else [item for item in VERSIONS if item in SpecifierSet(joined.text())]
    assert found == expected


def test_every_row_of_the_matrix_has_its_reference() -> None:
    for row in ROWS:
        assert row["reference"], row
        assert all(bad["reason"] and bad["reference"] for bad in row["known_bad"]), row


@pytest.mark.parametrize("row", [{"vllm": "one", "transformers": ""}, {"vllm": "==1", "transformers": "five"}])
def test_mistakes_in_the_matrix_name_the_row(row: dict[str, str]) -> None:
    with pytest.raises(image_compat.CompatError, match="Row 1"):
        image_compat.resolve("transformers", "1", None, [row | {"reference": "r"}])
