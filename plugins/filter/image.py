# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: what an image says of itself, and which transformers it needs."""

from __future__ import annotations

import re
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
    """Return what a requirement on transformers becomes with the vLLM of an image.

    Args:
        requirement: the operator's requirement, in the syntax of pip.
        packages: versions of the Python packages in the image, `vllm` and perhaps `transformers` among them.
        matrix, needs, gaps: the variables of the role vllm_image with these names.

    Returns:
        `constraint` for pip, `needs_layer`, `explanation` (one sentence), and `error`: empty, or why it is refused.
    """
    try:
        found = image_compat.resolve(requirement, packages["vllm"], packages.get("transformers"), matrix, needs, gaps)
    except image_compat.CompatError as error:
        return {"error": str(error)}
    return {"error": "", **asdict(found)}


READERS: dict[str, Callable[[object], Any]] = {
    "contents": image_answer.check_contents,
    "inventory": image_answer.check_inventory,
    "tests": image_answer.check_tests,
    "identity": image_answer.check_identity,
    "record": image_answer.check_record,
    "wheels": image_answer.check_wheels,
    "pip report": image_answer.read_pip_report,
}


def read_image_answer(answer: str, kind: str, origin: str) -> dict[str, Any]:
    """Return what an image, Docker about an image, or the record of an image says, once it is found harmless.

    Args:
        answer: JSON.
        kind: a key of READERS.
        origin: who says it, as the beginning of a sentence.

    Returns:
        `value`, and `error`: empty, or a sentence that names the origin and the reason.
    """
    try:
        return {"value": READERS[kind](image_answer.parse_json(answer)), "error": ""}
    except image_answer.ImageAnswerError as error:
        return {"value": {}, "error": f"{origin} cannot be used: {error}."}


def explain_wheels(found: Mapping[str, str], pinned: Mapping[str, str], recorded: Mapping[str, str]) -> str:
    """Return why the wheels of a layer are refused, as the end of a sentence; empty if they are accepted.

    Args:
        found: SHA-256 of each wheel by its file name.
        pinned: the variable vllm_image_wheel_hashes; empty where nothing is pinned.
        recorded: what an image of the same inputs was made of; empty where nothing is recorded.
    """
    try:
        image_answer.check_wheels(found)
        wanted = image_answer.check_wheels(pinned or recorded)
    except image_answer.ImageAnswerError as error:
        return str(error)
    return image_answer.explain_other_wheels(found, wanted) if wanted else ""


def compare_image_names(before: Sequence[str], after: Sequence[str], base: str) -> dict[str, dict[str, str]]:
    """Return the names of images, other than the base image's, that moved between two lists.

    Args:
        before, after: lines of `docker image ls --no-trunc`, each a name, a blank and an id.
        base: name of the base image.

    Returns:
        `moved`: the former id by name, and `added`: the id by name.
    """
    former, now = (dict(line.rsplit(" ", 1) for line in lines if "<none>" not in line) for lines in (before, after))
    names = [name for name in former.keys() | now.keys() if name != re.sub(HUB, "", base) and name != base]
    return {
        "moved": {name: former[name] for name in sorted(names) if name in former and now.get(name) != former[name]},
        "added": {name: now[name] for name in sorted(names) if name not in former},
    }


HUB = r"^docker\.io/(library/)?"
"""What Docker leaves out of a name when it prints it."""


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "compare_image_names": compare_image_names,
            "explain_wheels": explain_wheels,
            "list_requirements": image_answer.list_requirements,
            "read_image_answer": read_image_answer,
            "resolve_transformers": resolve_transformers,
            "shorten": text.shorten,
        }
