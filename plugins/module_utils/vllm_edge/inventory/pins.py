# SPDX-License-Identifier: Apache-2.0
"""What an inventory leaves to the first use: a host would accept and record it, which `require_pins` refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
KEYS = (
    ("nvidia_driver_repository", "NVIDIA's driver"),
    ("container_runtime_repository", "the container toolkit"),
    ("container_runtime_docker_repository", "Docker"),
)
NAMES = (
    "vllm_image_base",
    "vllm_image_base_digest",
    "vllm_image_base_id",
    "nvidia_driver_source",
    "container_runtime_docker_packages",
    *(f"{prefix}_{suffix}" for prefix, _ in KEYS for suffix in ("url", "key_fingerprint")),
)
"""The variables that `find_unpinned` reads, beside the models."""


def list_used_repositories(values: Mapping[str, Any], distribution: str) -> list[str]:
    """Return the prefixes of the variables of the vendors' repositories that a host of this distribution gets."""
    used = ["container_runtime_repository"]
    source = values.get("nvidia_driver_source") or ("distribution" if distribution == "Ubuntu-24.04" else "nvidia")
    if source == "nvidia":
        used.append("nvidia_driver_repository")
    # Debian 12 alone has a Docker that is too old.
    if distribution in ("", "Debian-12") and not values.get("container_runtime_docker_packages"):
        used.append("container_runtime_docker_repository")
    return used


def find_unpinned(values: Mapping[str, Any], models: Sequence[Mapping[str, Any]], distribution: str) -> list[str]:
    """Return a sentence about each thing that is not pinned, with the way to its value.

    `values` has variables by name, None or missing where one is not set; `models` are those of the chosen profile, each
    with `name`; `distribution` is name and release of the host's, empty if unknown.
    """
    found = []
    pins = [str(values.get(name) or "") for name in ("vllm_image_base_digest", "vllm_image_base_id")]
    if not any(DIGEST.fullmatch(pin) for pin in pins):
        found.append(
            f"vllm_image_base_digest: {values.get('vllm_image_base')!a} is a tag, which its owner can move. "
            f"'docker manifest inspect --verbose' of it on a machine that you trust prints its digest; a host that "
            f"has it says its id in /var/lib/vllm-edge/image.json (base_id, for vllm_image_base_id)."
        )
    for model in models:
        revision = str(model.get("revision") or "main")
        if not COMMIT.fullmatch(revision):
            found.append(
                f"vllm_models.{model.get('name')}.revision: {revision!a} is a branch or tag of {model.get('repo')!a}, "
                f"which its owner can move. Set the commit of 40 digits that the hub lists; a host that has the "
                f"weights says it in /var/lib/vllm-edge/weights/{model.get('name')}.json (revision)."
            )
    used = list_used_repositories(values, distribution)
    for prefix, owner in KEYS:
        if prefix in used and not values.get(f"{prefix}_key_fingerprint"):
            found.append(
                f"{prefix}_key_fingerprint: the signing key of {owner} is not pinned. Ask its owner for the "
                f"fingerprint; 'gpg --show-keys' prints that of a key file, and /var/lib/vllm-edge/keys.json has what "
                f"a host recorded."
            )
    return [f"{sentence} require_pins is true." for sentence in found]
