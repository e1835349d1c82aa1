# SPDX-License-Identifier: Apache-2.0
"""CDI specifications of NVIDIA's GPUs: which devices they define, and for which driver they were made."""

from __future__ import annotations

import glob
import json
import os
import re

GPU_KIND = re.compile(r"""^\s*"?kind"?\s*:\s*["']?nvidia\.com/gpu["']?\s*,?\s*$""", re.MULTILINE)
DRIVER_LIBRARY = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)")


def gpu_specs(directory: str) -> dict[str, str]:
    """The specifications of NVIDIA's GPUs in a directory; path to text."""
    found = {}
    for path in sorted(glob.glob(os.path.join(directory, "*"))):
        if path.endswith((".yaml", ".json")):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            if GPU_KIND.search(text):
                found[path] = text
    return found


def driver_versions(text: str) -> list[str]:
    """Versions of the driver whose libraries a specification mounts."""
    return sorted(set(DRIVER_LIBRARY.findall(text)))


def compare(devices: list[str], gpus: list[str]) -> tuple[list[str], list[str]]:
    """GPUs that no device names by UUID, and UUIDs of devices that no GPU has."""
    named = {device.split("=", 1)[1] for device in devices}
    uuids = {name for name in named if name.startswith("GPU-")}
    return sorted(set(gpus) - uuids), sorted(uuids - set(gpus))


def device_names(text: str) -> list[str]:
    """Names of the devices that a specification defines.

    The YAML that nvidia-ctk writes is read without a YAML library, which not every host has: the items of the list
    under `devices`, whatever its indent, and the key `name` of each, wherever in the item it stands.
    """
    try:
        return [str(device["name"]) for device in json.loads(text)["devices"]]
    except (ValueError, KeyError, TypeError):
        pass
    block = re.search(r"^devices:[ \t]*\n((?:[ \t-].*\n?|\n)*)", text, re.MULTILINE)
    first = re.search(r"^( *)-( +)", block[1], re.MULTILINE) if block else None
    if block is None or first is None:
        return []
    indent = len(first[1])
    key = indent + 1 + len(first[2])
    item = rf"^(?: {{{indent}}}-{first[2]}| {{{key}}})name: *[\"']?([^\"'\n]+?)[\"']? *$"
    return re.findall(item, block[1], re.MULTILINE)
