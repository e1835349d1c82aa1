# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: the token for a hub, and whether it may be sent there."""

from __future__ import annotations

DOCUMENTATION = """
name: hub
short_description: the token for a hub, and whether it may be sent there
extends_documentation_fragment: edge.vllm_edge.filters
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.vllm_edge.weights import access
from ..module_utils.vllm_edge.weights.record import WeightsError


def read_hub_token(token_file: str, token: str = "") -> str:
    """Return the token in a file of the controller, or `token` if there is no file; empty if neither is given.

    Raises AnsibleFilterError: others may read the file, or what it has is no token.
    """
    try:
        if token_file:
            return access.read_token_file(Path(token_file).expanduser())
        return access.parse_token(token, "model_weights_token")
    except WeightsError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "read_hub_token": read_hub_token,
            "find_access_mistakes": access.find_access_mistakes,
        }
