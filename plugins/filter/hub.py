# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: the token for a hub, and whether it may be sent there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.vllm_edge.weights import access
from ..module_utils.vllm_edge.weights.record import SHA256, WeightsError

PLAIN = "[A-Za-z0-9][A-Za-z0-9._-]"


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


def find_weights_mistakes(
    models: Sequence[Mapping[str, Any]], manifests: Mapping[str, str], token: str, token_file: str
) -> list[str]:
    """Return why models cannot be installed as model_weights_models and the variables beside it say."""
    found = []
    for model in models:
        pin = model.get("manifest_sha256") or manifests.get(model["name"]) or ""
        plain = all(re.fullmatch(f"{PLAIN}*", str(model[key])) for key in ("name", "dir"))
        if (
            plain
            and re.fullmatch(rf"{PLAIN}*/[\w.-]+", str(model["repo"]), re.ASCII)
            and SHA256.fullmatch(pin or "0" * 64)
        ):
            continue
        found.append(
            f"Model '{model['name']}' (repo '{model['repo']}', dir '{model['dir']}'): name and dir may have letters, "
            "digits, '.', '_' and '-', since they become file names; repo is written as owner/name, and "
            "manifest_sha256 as 64 hexadecimal digits."
        )
    for key, remedy in (
        ("name", "Each name is one record on the host; remove the second entry."),
        (
            "dir",
            "The files of one model would replace those of the other; engines that share weights name the same model.",
        ),
    ):
        names = [str(model[key]) for model in models]
        if len(set(names)) < len(names):
            found.append(f"model_weights_models has a {key} twice: {', '.join(names)}. {remedy}")
    if token and token_file:
        found.append(
            "Both model_weights_token and model_weights_token_file are set, so it is not clear which token to use. "
            "Keep one of them."
        )
    return found


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "read_hub_token": read_hub_token,
            "find_access_mistakes": access.find_access_mistakes,
            "find_weights_mistakes": find_weights_mistakes,
        }
