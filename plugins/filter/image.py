# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: which transformers a vLLM image needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..module_utils.vllm_edge.inventory import image_compat


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


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"resolve_transformers": resolve_transformers}
