# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugin: the variables of an air gap's medium."""

from __future__ import annotations

DOCUMENTATION = """
name: air_gap
short_description: the variables of an air gap's medium
extends_documentation_fragment: edge.vllm_edge.filters
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
MAX_BYTES = 16 * 1024**2


class _MediumError(ValueError):
    pass


def read_medium(file: str, sha256: str, host: str, url: str, models: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file air-gap.yml of a medium sets, as data: nothing in it is evaluated.

    Args:
        file: the file on the controller; the wheels are beside it
        sha256: its hash, which operators carried by another way and which covers all files of the medium
        host: the medium's directory on the host
        url: address of that directory for apt; empty for the directory itself
        models: the inventory's models

    Returns:
        `mistake`, and if that is empty also `variables` of the roles, `revisions` (the commits of the models),
        `directory` (the medium on the controller) and `sums_sha256` (the hash of SHA256SUMS).
    """
    path = Path(file).expanduser().absolute()
    try:
        if not re.fullmatch(r"/[A-Za-z0-9._+~@/-]*", host):
            raise _MediumError(f"air_gap_host_directory is {host!r}: set an absolute path of plain characters.")
        if url and not re.match(r"(file|https?)://", url):
            raise _MediumError(f"air_gap_url is {url!r}: set an address that begins with file:, http: or https:.")
        document = _read_document(path, str(sha256).strip())
        host = host.rstrip("/")
        variables = _resolve(document["variables"], path.parent, host, (url or f"file://{host}").rstrip("/"))
        revisions = _list_revisions(document["variables"].get("models", {}), models)
    except _MediumError as error:
        return {"mistake": str(error)}
    return {
        **{"mistake": "", "variables": variables, "revisions": revisions},
        **{"directory": str(path.parent), "sums_sha256": document["sums_sha256"]},
    }


def _read_document(path: Path, expected: str) -> dict[str, Any]:
    if not re.fullmatch("[0-9a-f]{64}", expected):
        raise _MediumError(
            f"air_gap_sha256 is {expected!r}: set it to the 64 digits that playbooks/stage.yml printed, carried by "
            f"another way than the medium (-e air_gap={path} -e air_gap_sha256=...)."
        )
    if not path.is_file():
        raise _MediumError(
            f"air_gap is {path}, which is no file of the controller: copy the medium there, or set air_gap."
        )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise _MediumError(f"air_gap is {path}, which cannot be read: {error.strerror}.") from error
    if (found := hashlib.sha256(data).hexdigest()) != expected:
        raise _MediumError(
            f"{path} has the SHA-256 {found}, and air_gap_sha256 is {expected}: the file was changed since it was "
            f"staged, or the hash belongs to another medium. Nothing of it was used. Compare both with what "
            f"playbooks/stage.yml printed, and copy the medium again."
        )
    try:
        document = json.loads(re.sub(rb"\A(?:#[^\n]*\n)+", b"", data))
        form = document["air_gap_format"]
    except (ValueError, TypeError, LookupError):
        form = None
    if form != FORMAT:
        raise _MediumError(
            f"{path} has the format {form}, and this release reads {FORMAT}: stage again with this release."
        )
    return dict(document)


def _resolve(staged: Mapping[str, Any], controller: Path, host: str, url: str) -> dict[str, Any]:
    """Return the staged variables with paths and addresses as controller, host and apt see them."""
    found: dict[str, Any] = {"vllm_image_base_digest": "", "vllm_image_base_archive_on_host": True}
    for name, value in staged.items():
        if name == "vllm_edge_host_distribution_repositories":
            found[name] = [{"url": f"{url}/{entry.pop('path')}", **entry} for entry in map(dict, value)]
        elif name.endswith(("_repository_url", "_key_url")):
            found[name] = f"{url}/{value}"
        elif name == "vllm_image_base_archive":
            found[name] = f"{host}/{value}"
        elif name.endswith("_wheels_directory"):
            found[name] = str(controller / value)
        elif name != "models":
            found[name] = value
    found |= {name.replace("_url", "_file"): "" for name in found if name.endswith("_key_url")}
    if "vllm_image_wheels_directory" in found:
        found["vllm_image_pip_source"] = "directory"
    if "models" in staged:
        found["model_weights_source_directory"] = f"{host}/weights"
    return found


def _list_revisions(staged: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, str]:
    """Return the commits that the medium has of the inventory's models."""
    found = {}
    for name, model in staged.items():
        if name not in models or models[name].get("repo") != model["repo"]:
            continue
        pinned = str(models[name]["revision"])
        if re.fullmatch("[0-9a-f]{40}", pinned) and pinned != model["revision"]:
            raise _MediumError(
                f"vllm_models.{name}.revision pins {pinned}, and the medium has the commit {model['revision']}: stage "
                f"again with this inventory, or pin the staged commit."
            )
        found[name] = str(model["revision"])
    return found


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"read_medium": read_medium}
