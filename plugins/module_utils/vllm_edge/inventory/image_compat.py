# SPDX-License-Identifier: Apache-2.0
"""Resolution of the transformers release for a vLLM release: an operator's requirement and the compatibility matrix.

A requirement such as ``transformers>=4.58`` says nothing about the vLLM that will use it. The matrix says, for each
vLLM release, what its metadata accepts and which combinations are known to break nevertheless. The result is one
constraint for pip, or an error that names the row that contradicts the requirement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version


class CompatError(Exception):
    """The requirement cannot be met, or the data of the matrix is wrong. The text is for the operator."""


@dataclass(frozen=True)
class KnownBad:
    """A range of transformers that the metadata of a vLLM release allows and that breaks it."""

    transformers: str
    reason: str
    remedy: str = ""
    reference: str = ""


@dataclass(frozen=True)
class Row:
    """One row of the matrix: a range of vLLM releases and the transformers that they take."""

    vllm: str
    transformers: str
    reference: str
    known_bad: tuple[KnownBad, ...] = ()

    def describe(self) -> str:
        """Return the row as one clause of a message."""
        accepted = self.transformers or "anything but what is known to break"
        return f"vLLM {self.vllm} takes transformers {accepted} ({self.reference})"


@dataclass(frozen=True)
class Need:
    """A requirement that does not come from vLLM, for example the first release that knows an architecture."""

    transformers: str
    reason: str


@dataclass(frozen=True)
class Resolution:
    """The constraint for pip, and whether the base image needs another layer to meet it."""

    constraint: str
    needs_layer: bool
    explanation: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bound:
    """One end of a range of versions."""

    version: Version
    inclusive: bool


@dataclass(frozen=True)
class Range:
    """A range of versions without some excluded ones: a set of specifiers in a form that can be intersected."""

    lower: Bound | None = None
    upper: Bound | None = None
    excluded: tuple[str, ...] = field(default=())

    def is_empty(self) -> bool:
        """Return whether no version can be in the range."""
        if self.lower is None or self.upper is None:
            return False
        if self.lower.version != self.upper.version:
            return self.lower.version > self.upper.version
        if not (self.lower.inclusive and self.upper.inclusive):
            return True
        return not SpecifierSet(",".join(f"!={item}" for item in self.excluded)).contains(
            self.lower.version, prereleases=True
        )

    def text(self) -> str:
        """Return the range as specifiers for pip."""
        if (
            self.lower is not None
            and self.upper is not None
            and self.lower.version == self.upper.version
            and self.lower.inclusive
            and self.upper.inclusive
        ):
            return f"=={self.lower.version}"
        parts = []
        if self.lower is not None:
            parts.append(f"{'>=' if self.lower.inclusive else '>'}{self.lower.version}")
        parts.extend(f"!={item}" for item in self.excluded)
        if self.upper is not None:
            parts.append(f"{'<=' if self.upper.inclusive else '<'}{self.upper.version}")
        return ",".join(parts)


def _release(version: str, what: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion as error:
        raise CompatError(f"{what} {version!r} is not a version as PEP 440 writes one.") from error


def _increment_prefix(prefix: str) -> Version:
    """Return the version after all those with a prefix: 5.3 becomes 5.4."""
    numbers = list(Version(prefix).release)
    numbers[-1] += 1
    return Version(".".join(str(number) for number in numbers))


def _parse_specifier(specifier: Specifier) -> Range:
    """Convert one specifier to a range."""
    operator, text = specifier.operator, specifier.version
    if operator == "===":
        raise CompatError(f"'==={text}' compares text, not versions. Write '=={text}'.")
    if operator == "!=":
        return Range(excluded=(text,))
    if operator == "==" and text.endswith(".*"):
        prefix = text[:-2]
        return Range(Bound(Version(prefix), True), Bound(_increment_prefix(prefix), False))
    if operator == "~=":
        stem = ".".join(str(number) for number in Version(text).release[:-1])
        return Range(Bound(Version(text), True), Bound(_increment_prefix(stem), False))
    bound = Bound(Version(text), operator in {"==", ">=", "<="})
    if operator == "==":
        return Range(bound, bound)
    return Range(lower=bound) if operator in {">=", ">"} else Range(upper=bound)


def _choose_tighter(first: Bound | None, second: Bound | None, *, lower: bool) -> Bound | None:
    """Return the bound that allows less."""
    if first is None or second is None:
        return first or second
    if first.version == second.version:
        return first if not first.inclusive else second
    return first if (first.version > second.version) is lower else second


def _is_outside(item: str, span: Range) -> bool:
    """Return whether an exclusion is redundant because it lies outside the ends of the range."""
    if not item.endswith(".*"):
        version = Version(item)
        return _join(Range(span.lower, span.upper), Range(Bound(version, True), Bound(version, True))).is_empty()
    first, after = Version(item[:-2]), _increment_prefix(item[:-2])
    return _join(Range(span.lower, span.upper), Range(Bound(first, True), Bound(after, False))).is_empty()


def _raise_lower_end(span: Range) -> Range:
    """Move the lower end out of excluded prefixes: >=5.3,!=5.3.* becomes >=5.4."""
    for item in sorted((item for item in span.excluded if item.endswith(".*")), key=lambda item: Version(item[:-2])):
        first, after = Version(item[:-2]), _increment_prefix(item[:-2])
        if span.lower is not None and first <= span.lower.version < after:
            span = replace(span, lower=Bound(after, True))
    return span


def _join(first: Range, second: Range) -> Range:
    """Return the range of what both allow; it may be empty."""
    return Range(
        _choose_tighter(first.lower, second.lower, lower=True),
        _choose_tighter(first.upper, second.upper, lower=False),
        tuple(dict.fromkeys(first.excluded + second.excluded)),
    )


def intersect(first: Range, second: Range) -> Range | None:
    """Return the versions that are in both ranges, or None if there are none."""
    joined = _raise_lower_end(_join(first, second))
    if joined.is_empty():
        return None
    return replace(joined, excluded=tuple(item for item in joined.excluded if not _is_outside(item, joined)))


def parse_range(text: str, what: str) -> Range:
    """Parse specifiers such as ``>=5.5.3,!=5.6.0,<6``.

    Args:
        what: what the text is, for the message.

    Raises:
        CompatError: if the text cannot be read or contradicts itself.
    """
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier as error:
        raise CompatError(f"{what} {text!r} is not a set of version specifiers such as '>=5.5.3,<6'.") from error
    result = Range()
    for specifier in sorted(specifiers, key=str):
        narrowed = intersect(result, _parse_specifier(specifier))
        if narrowed is None:
            raise CompatError(f"{what} {text!r} contradicts itself: no version can satisfy all of it.")
        result = narrowed
    return result


def parse_requirement(text: str) -> Range:
    """Parse the operator's requirement: the name transformers and optional specifiers.

    Raises:
        CompatError: if it cannot be read, names another package, or has more than versions.
    """
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


def parse_matrix(data: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Parse the variable ``vllm_compatibility_matrix``.

    Raises:
        CompatError: if a row lacks a key or a range cannot be read.
    """
    rows = []
    for number, item in enumerate(data, start=1):
        missing = [key for key in ("vllm", "transformers", "reference") if key not in item]
        if missing:
            raise CompatError(f"Row {number} of vllm_compatibility_matrix lacks {', '.join(missing)}.")
        row = Row(
            vllm=str(item["vllm"]),
            transformers=str(item["transformers"]),
            reference=str(item["reference"]),
            known_bad=tuple(
                KnownBad(
                    transformers=str(bad["transformers"]),
                    reason=str(bad["reason"]),
                    remedy=str(bad.get("remedy") or ""),
                    reference=str(bad.get("reference") or item["reference"]),
                )
                for bad in item.get("known_bad") or []
            ),
        )
        parse_range(row.vllm, f"Row {number} of vllm_compatibility_matrix: vllm")
        parse_range(row.transformers, f"Row {number} of vllm_compatibility_matrix: transformers")
        rows.append(row)
    return rows


def find_rows(vllm: str, rows: Sequence[Row]) -> list[Row]:
    """Return every row that covers a vLLM release.

    Args:
        vllm: the release, as PEP 440 writes it.
        rows: the matrix.

    Raises:
        CompatError: if no row with specifiers covers it, or it is no version.
    """
    release = _release(vllm, "The base image's vLLM")
    found = [row for row in rows if SpecifierSet(row.vllm).contains(release, prereleases=True)]
    # A row without specifiers only adds combinations that are known to break; alone it does not say what fits.
    if not any(row.transformers for row in found):
        known = "; ".join(row.vllm for row in rows if row.transformers)
        raise CompatError(
            f"vLLM {vllm} is in no row of vllm_compatibility_matrix (known: {known}), so nothing says which "
            "transformers it takes. Use a base image with a release that is known, or add a row from the "
            "requirements in its wheel's metadata."
        )
    return found


def _subtract(span: Range, bad: Range) -> Range | None:
    """Return a range without a part of it that is known to break, or None if nothing is left.

    If two pieces are left, the upper one is returned, because it has the repair.
    """
    if intersect(span, bad) is None:
        return span
    if bad.lower is not None and bad.lower == bad.upper:
        return intersect(span, Range(excluded=(str(bad.lower.version),)))
    if bad.upper is not None:
        above = intersect(span, Range(lower=Bound(bad.upper.version, not bad.upper.inclusive)))
        if above is not None:
            return above
    if bad.lower is not None:
        return intersect(span, Range(upper=Bound(bad.lower.version, not bad.lower.inclusive)))
    return None


def _find_gap(span: Range, gaps: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the gap between two releases in which the range begins, or None."""
    if span.lower is None:
        return None
    for last, first in gaps:
        if Version(last) < span.lower.version < Version(first):
            return last, first
    return None


def _find_enclosing_gap(span: Range, gaps: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the gap between two releases that the whole range lies in, or None."""
    gap = _find_gap(span, gaps)
    if gap is None or span.upper is None:
        return None
    first = Version(gap[1])
    reaches = span.upper.version > first or (span.upper.version == first and span.upper.inclusive)
    return None if reaches else gap


def resolve(
    requirement: str,
    vllm: str,
    installed: str | None,
    rows: Sequence[Row],
    needs: Sequence[Need] = (),
    gaps: Sequence[tuple[str, str]] = (),
) -> Resolution:
    """Combine requirement, matrix and needs into one constraint, and compare it with the base image.

    Args:
        requirement: for example ``transformers>=5.5``.
        vllm: the vLLM release of the base image.
        installed: its transformers release, or None.
        rows: the matrix.
        needs: further requirements.
        gaps: pairs of consecutive releases between which there is no other.

    Raises:
        CompatError: if the combination is impossible or known to break.
    """
    wanted = parse_requirement(requirement)
    found = find_rows(vllm, rows)
    release = Version(vllm).public
    said = "; ".join(row.describe() for row in found if row.transformers)

    span: Range | None = Range()
    for row in found:
        span = intersect(span, parse_range(row.transformers, "The row")) if span is not None else None
    if span is None:
        raise CompatError(f"The rows of vllm_compatibility_matrix for vLLM {release} contradict each other: {said}.")
    for need in needs:
        joined = intersect(span, parse_range(need.transformers, "A need of the image"))
        if joined is None:
            raise CompatError(
                f"vLLM {release} cannot be used here: {said}, and {need.reason} needs transformers "
                f"{need.transformers}. Use a base image with a vLLM release whose row allows it."
            )
        span = joined

    joined = intersect(span, wanted)
    if joined is None or (gap := _find_enclosing_gap(joined, gaps)) is not None:
        why = ""
        if joined is not None and gap is not None:
            why = f" What both would allow, {joined.text()}, lies between {gap[0]} and {gap[1]}, where no release is."
        because = "".join(f"; {need.reason} needs {need.transformers}" for need in needs)
        raise CompatError(
            f"{requirement} is impossible with vLLM {release}: {said}{because}.{why} What would do: a requirement "
            f"within transformers{span.text() or ' (any release)'}, or a base image with a vLLM release whose row "
            "allows what is asked for."
        )

    for row in found:
        for bad in row.known_bad:
            left = _subtract(joined, parse_range(bad.transformers, "A known-bad range"))
            if left is None:
                remedy = bad.remedy or f"require transformers within {_describe_rest(span, found)}"
                raise CompatError(
                    f"{requirement} with vLLM {release} is known to be broken: {bad.reason} (transformers "
                    f"{bad.transformers} with vLLM {row.vllm}; {bad.reference}). What would do: {remedy}."
                )
            joined = left

    constraint = joined.text()
    meets = installed is not None and SpecifierSet(constraint).contains(
        _release(installed, "The base image's transformers"), True
    )
    return Resolution(
        constraint=f"transformers{constraint}",
        needs_layer=not meets,
        explanation=_explain(requirement, wanted, constraint, release, installed, meets, gaps),
        references=tuple(
            dict.fromkeys([row.reference for row in found] + [bad.reference for row in found for bad in row.known_bad])
        ),
    )


def _describe_rest(span: Range, rows: Sequence[Row]) -> str:
    """Return the range without everything that is known to break, for a message."""
    left: Range | None = span
    for row in rows:
        for bad in row.known_bad:
            left = _subtract(left, parse_range(bad.transformers, "A known-bad range")) if left is not None else None
    return left.text() if left is not None else "nothing that is known to work"


def _explain(
    requirement: str,
    wanted: Range,
    constraint: str,
    release: str,
    installed: str | None,
    meets: bool,
    gaps: Sequence[tuple[str, str]],
) -> str:
    """Return one sentence: what became of the requirement, and whether the base image meets it."""
    gap = _find_gap(wanted, gaps)
    if gap is not None:
        first = f"{requirement} names no release ({gap[0]} -> {gap[1]}); with vLLM {release} it becomes {constraint}"
    elif wanted.text() == constraint:
        first = f"{requirement} stands as it is with vLLM {release}"
    else:
        first = f"with vLLM {release}, {requirement} becomes {constraint or 'any release'}"
    if meets:
        return f"{first}; the base image's {installed} already meets it, so there is no layer"
    have = f"the base image has {installed}" if installed else "the base image has none"
    return f"{first}; {have}, so a layer is needed"
