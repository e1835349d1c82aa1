# SPDX-License-Identifier: Apache-2.0
"""CDI specifications of NVIDIA's GPUs: which devices they define, and for which driver they were made."""

from __future__ import annotations

import glob
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
