# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: what an image says of itself, and which transformers it needs."""

from __future__ import annotations

DOCUMENTATION = """
name: image
short_description: what an image says of itself, and which transformers it needs
extends_documentation_fragment: edge.vllm_edge.filters
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..module_utils.vllm_edge import text
from ..module_utils.vllm_edge.inventory import image_answer, image_compat


def resolve_transformers(
    requirement: str,
    packages: Mapping[str, str],
    matrix: Sequence[image_compat.Row],
    needs: Sequence[image_compat.Row] = (),
    gaps: Sequence[image_compat.Row] = (),
) -> dict[str, Any]:
    """Return the fields of a Resolution for an image with these packages, and `error`: empty, or why it is refused."""
    try:
        found = image_compat.resolve(requirement, packages["vllm"], packages.get("transformers"), matrix, needs, gaps)
    except image_compat.CompatError as error:
        return {"error": str(error)}
    return {"error": "", **asdict(found)}


READERS: dict[str, Callable[[Any], Any]] = {
    "image": image_answer.read_image,
    "pip report": image_answer.read_pip_report,
    "record": image_answer.read_record,
}


def read_image_answer(answer: str, kind: str, origin: str) -> dict[str, Any]:
    """Return the `value` of JSON of some kind, and `error`: empty, or a sentence that begins with `origin`."""
    try:
        return {"value": READERS[kind](image_answer.parse_json(answer)), "error": ""}
    except image_answer.ImageAnswerError as error:
        return {"value": {}, "error": f"{origin} cannot be used: {error}."}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "list_requirements": image_answer.list_requirements,
            "read_image_answer": read_image_answer,
            "resolve_transformers": resolve_transformers,
            "shorten": text.shorten,
        }
