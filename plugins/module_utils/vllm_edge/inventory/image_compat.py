# SPDX-License-Identifier: Apache-2.0
"""Resolution of the transformers release for a vLLM release: an operator's requirement and the compatibility matrix.

A requirement such as ``transformers>=4.58`` says nothing about the vLLM that will use it. The matrix says, for each
vLLM release, what its metadata accepts and which combinations are known to break nevertheless. The result is one
constraint for pip, or an error that names the row that contradicts the requirement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

Row = Mapping[str, Any]
"""A row of a table, with the keys that the argument specs of the role vllm_image describe."""
Edge = tuple[Version, bool]
"""A place between versions: just before a version (False) or just after it (True)."""
START: Edge = (Version("0.dev0"), False)
END: Edge = (Version("9999!0"), False)
MATRIX = "vllm_compatibility_matrix"


class CompatError(Exception):
    """The requirement cannot be met, or the data of the matrix is wrong. The text is for the operator."""


@dataclass(frozen=True)
class Resolution:
    constraint: str
    """For pip."""
    needs_layer: bool
    """Whether the base image does not meet it."""
    explanation: str


@dataclass(frozen=True)
class Range:
    """The versions between two edges without some excluded ones: specifiers in a form that can be intersected."""

    lower: Edge = START
    upper: Edge = END
    excluded: tuple[str, ...] = ()

    def is_empty(self) -> bool:
        if self.lower[0] != self.upper[0] or self.lower >= self.upper:
            return self.lower >= self.upper
        excluded = SpecifierSet(",".join(f"!={item}" for item in self.excluded))
        return not excluded.contains(self.lower[0], prereleases=True)

    def text(self) -> str:
        if self.lower[0] == self.upper[0]:
            return f"=={self.lower[0]}"
        lower = [f"{'>' if self.lower[1] else '>='}{self.lower[0]}"] if self.lower != START else []
        upper = [f"{'<=' if self.upper[1] else '<'}{self.upper[0]}"] if self.upper != END else []
        return ",".join([*lower, *(f"!={item}" for item in self.excluded), *upper])


def _parse_equal(text: str) -> Range:
    """Return the range of one version, or of all versions with a prefix such as ``5.3.*``."""
    version = Version(text.removesuffix(".*"))
    if not text.endswith(".*"):
        return Range((version, False), (version, True))
    *stem, last = version.release
    return Range((version, False), (Version(".".join(map(str, (*stem, last + 1)))), False))


def _parse_specifier(specifier: Specifier) -> Range:
    operator, text = specifier.operator, specifier.version
    if operator == "===":
        raise CompatError(f"'==={text}' compares text, not versions. Write '=={text}'.")
    if operator == "!=":
        return Range(excluded=(text,))
    equal = _parse_equal(text)
    if operator == "~=":
        stem = ".".join(map(str, Version(text).release[:-1]))
        return Range(equal.lower, _parse_equal(f"{stem}.*").upper)
    lower = {">": equal.upper, ">=": equal.lower, "==": equal.lower}.get(operator, START)
    return Range(lower, {"<": equal.lower, "<=": equal.upper, "==": equal.upper}.get(operator, END))


def intersect(first: Range, second: Range) -> Range | None:
    """Return the versions that are in both ranges, or None if there are none."""
    # Of two spellings of one version, such as 5.5 and 5.5.0, the lower end takes the second and the upper end
    # the first: the text of the constraint is an input of the image, which must not be built again.
    lower, upper = max(second.lower, first.lower), min(first.upper, second.upper)
    excluded = {item: _parse_equal(item) for item in first.excluded + second.excluded}
    # An excluded prefix at the lower end moves it: >=5.3,!=5.3.* becomes >=5.4.
    for span in sorted((span for item, span in excluded.items() if item.endswith(".*")), key=lambda span: span.lower):
        if span.lower <= lower < span.upper:
            lower = span.upper
    joined = Range(lower, upper, tuple(excluded))
    if joined.is_empty():
        return None
    inside = (item for item, span in excluded.items() if max(span.lower, lower) < min(span.upper, upper))
    return replace(joined, excluded=tuple(inside))


def parse_range(text: str, what: str) -> Range:
    """Parse specifiers such as ``>=5.5.3,!=5.6.0,<6``.

    `what` is what the text is, for the message. Raises CompatError: it cannot be read, or contradicts itself.
    """
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise CompatError(f"{what} {text!r} is not a set of version specifiers such as '>=5.5.3,<6'.") from error
    result: Range | None = Range()
    for specifier in sorted(specifiers, key=str):
        result = intersect(result, _parse_specifier(specifier)) if result else None
    if result is None:
        raise CompatError(f"{what} {text!r} contradicts itself: no version can satisfy all of it.")
    return result


def _subtract(span: Range | None, bad: Row) -> Range | None:
    """Return a range without versions that are known to break, or None if nothing is left.

    If two pieces are left, the upper one is returned, because it has the repair.
    """
    broken = parse_range(bad["transformers"], "A known-bad range")
    if span is None or intersect(span, broken) is None:
        return span
    if broken.lower[0] == broken.upper[0]:
        return intersect(span, Range(excluded=(str(broken.lower[0]),)))
    return intersect(span, Range(lower=broken.upper)) or intersect(span, Range(upper=broken.lower))


def parse_requirement(text: str) -> Range:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise CompatError(
            f"The requirement {text!r} cannot be read. Write it as pip does: 'transformers>=5.5'."
        ) from error
    if requirement.name.lower() != "transformers":
        raise CompatError(f"The requirement {text!r} names {requirement.name}, and the matrix knows transformers only.")
    if requirement.url or requirement.marker or requirement.extras:
        raise CompatError(f"The requirement {text!r} may name versions only, no address, marker or extra.")
    return parse_range(str(requirement.specifier), "The requirement")


def _parse_version(version: str, what: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion as error:
        raise CompatError(f"{what} {version!r} is not a version as PEP 440 writes one.") from error


def find_rows(vllm: str, matrix: Sequence[Row]) -> list[Row]:
    """Return every row that covers a vLLM release. Raises CompatError: none does, or a range cannot be read."""
    release = _parse_version(vllm, "The base image's vLLM")
    for number, row in enumerate(matrix, start=1):
        for key in ("vllm", "transformers"):
            parse_range(row[key], f"Row {number} of {MATRIX}: {key}")
    found = [row for row in matrix if SpecifierSet(row["vllm"]).contains(release, prereleases=True)]
    # A row without specifiers only adds combinations that are known to break; alone it does not say what fits.
    if not any(row["transformers"] for row in found):
        known = "; ".join(row["vllm"] for row in matrix if row["transformers"])
        raise CompatError(
            f"vLLM {vllm} is in no row of {MATRIX} (known: {known}), so nothing says which transformers it takes. "
            "Use a base image with a release that is known, or add a row from the requirements in its wheel's metadata."
        )
    return found


def _find_gap(span: Range, gaps: Sequence[Row]) -> Row | None:
    return next((gap for gap in gaps if Version(gap["last"]) < span.lower[0] < Version(gap["next"])), None)


def _intersect_rows(rows: Sequence[Row], release: str, takes: str, needs: Sequence[Row]) -> Range:
    span: Range | None = Range()
    for row in rows:
        span = intersect(span, parse_range(row["transformers"], "The row")) if span else None
    if span is None:
        raise CompatError(f"The rows of {MATRIX} for vLLM {release} contradict each other: {takes}.")
    for need in needs:
        joined = intersect(span, parse_range(need["transformers"], "A need of the image"))
        if joined is None:
            raise CompatError(
                f"vLLM {release} cannot be used here: {takes}, and {need['reason']} needs transformers "
                f"{need['transformers']}. Use a base image with a vLLM release whose row allows it."
            )
        span = joined
    return span


def _describe_impossible(joined: Range | None, span: Range, needs: Sequence[Row], gap: Row | None) -> str:
    because = "".join(f"; {need['reason']} needs {need['transformers']}" for need in needs)
    why = ""
    if joined and gap:
        both = f" What both would allow, {joined.text()}, lies between {gap['last']} and {gap['next']}"
        why = f"{both}, where no release is."
    return (
        f"{because}.{why} Write a requirement within transformers{span.text() or ' (any release)'}, or use a base "
        "image with a vLLM release whose row allows what is asked for."
    )


def _leave_out_broken(joined: Range, span: Range, rows: Sequence[Row], what: str) -> Range:
    """Return a range without what is known to break. Raises CompatError if nothing is left."""
    broken = [(row, bad) for row in rows for bad in row.get("known_bad") or []]
    for row, bad in broken:
        left = _subtract(joined, bad)
        if left is None:
            rest: Range | None = span
            for _row, other in broken:
                rest = _subtract(rest, other)
            within = rest.text() if rest else "nothing that is known to work"
            raise CompatError(
                f"{what} is known to be broken: {bad['reason']} (transformers {bad['transformers']} with vLLM "
                f"{row['vllm']}; {bad.get('reference') or row['reference']}). To repair it, "
                f"{bad.get('remedy') or f'require transformers within {within}'}."
            )
        joined = left
    return joined


def _explain(requirement: str, release: str, constraint: str, gaps: Sequence[Row]) -> str:
    wanted = parse_requirement(requirement)
    if gap := _find_gap(wanted, gaps):
        names_none = f"{requirement} names no release ({gap['last']} -> {gap['next']})"
        return f"{names_none}; with vLLM {release} it becomes {constraint}"
    if wanted.text() == constraint:
        return f"{requirement} stays as it is with vLLM {release}"
    return f"with vLLM {release}, {requirement} becomes {constraint or 'any release'}"


def resolve(
    requirement: str,
    vllm: str,
    installed: str | None,
    matrix: Sequence[Row],
    needs: Sequence[Row] = (),
    gaps: Sequence[Row] = (),
) -> Resolution:
    """Combine requirement, matrix and needs into one constraint, and compare it with the base image.

    `vllm` and `installed` are the releases of vLLM and transformers in the base image, the tables those of the role's
    variables. Raises CompatError: the combination is impossible or known to break.
    """
    wanted = parse_requirement(requirement)
    rows = find_rows(vllm, matrix)
    release = Version(vllm).public
    takes = "; ".join(
        f"vLLM {row['vllm']} takes transformers {row['transformers']} ({row['reference']})"
        for row in rows
        if row["transformers"]
    )
    span = _intersect_rows(rows, release, takes, needs)
    joined = intersect(span, wanted)
    gap = _find_gap(joined, gaps) if joined else None
    if joined is None or (gap and joined.upper <= (Version(gap["next"]), False)):
        impossible = _describe_impossible(joined, span, needs, gap)
        raise CompatError(f"{requirement} is impossible with vLLM {release}: {takes}{impossible}")
    constraint = _leave_out_broken(joined, span, rows, f"{requirement} with vLLM {release}").text()

    layer = f"the base image has {installed or 'none'}, so a layer is needed"
    meets = bool(installed) and SpecifierSet(constraint).contains(
        _parse_version(installed or "", "The base image's transformers"), prereleases=True
    )
    if meets:
        layer = f"the base image's {installed} already meets it, so there is no layer"
    explanation = f"{_explain(requirement, release, constraint, gaps)}; {layer}"
    return Resolution(f"transformers{constraint}", not meets, explanation)
