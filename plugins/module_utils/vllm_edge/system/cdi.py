# SPDX-License-Identifier: Apache-2.0
"""CDI specifications for NVIDIA GPUs: their devices and nodes, and the driver version that they were made for."""

from __future__ import annotations

import json
import re
from pathlib import Path

GPU_KIND = re.compile(
    r"""^[ \t]*"?kind"?\s{0,9}:\s{0,9}["']?nvidia\.com/gpu["']?[ \t]{0,9},?[ \t\r]{0,9}$""", re.MULTILINE
)
UVM = "/dev/nvidia-uvm"
"""The device node that every CUDA program opens, and NVML does not. nvidia-ctk lists it only if it exists."""
UVM_NODE = re.compile(rf"""\bpath"?\s*:\s*["']?{UVM}(?![\w-])""")
DRIVER_LIBRARY = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)")


def gpu_specs(directory: str) -> dict[str, str]:
    """Return the CDI specifications for NVIDIA GPUs in a directory: their text by path. Raises OSError."""
    paths = [path for path in sorted(Path(directory).glob("[!.]*")) if path.suffix in (".yaml", ".json")]
    texts = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in paths}
    return {path: text for path, text in texts.items() if GPU_KIND.search(text)}


def lists_uvm(text: str) -> bool:
    return bool(UVM_NODE.search(text))


def driver_versions(text: str) -> list[str]:
    """Return the versions of the driver libraries that a specification mounts into containers."""
    return sorted(set(DRIVER_LIBRARY.findall(text)))


def compare(devices: list[str], gpus: list[str]) -> tuple[list[str], list[str]]:
    """Return the UUIDs of GPUs without a device `nvidia.com/gpu=<UUID>`, and of devices without a GPU."""
    named = {device.split("=", 1)[1] for device in devices}
    uuids = {name for name in named if name.startswith("GPU-")}
    return sorted(set(gpus) - uuids), sorted(uuids - set(gpus))


def parse_device_names(text: str) -> list[str]:
    """Return the names of the devices that a specification defines.

    Not every host has a YAML library, so the YAML that nvidia-ctk writes is matched by patterns: the items of the list
    under `devices`, at any indentation, and the key `name` at any position in an item.
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
