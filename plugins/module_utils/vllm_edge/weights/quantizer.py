# SPDX-License-Identifier: Apache-2.0
"""The program that quantized a checkpoint, as the checkpoint's own files tell it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ..system.files import read_foreign
from ..system.records import parse_json

MOST_BYTES = 16 * 2**20
_NAME, _VERSION = re.compile(r"[A-Za-z][\w.+-]{0,39}"), re.compile(r"\d[\w.+-]{0,39}")


def read_quantizer(directory: Path) -> str:
    """Return name and version, such as `modelopt 0.37.0`; empty if the files in the directory do not tell both."""
    for file in ("config.json", "hf_quant_config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            document = parse_json(read_foreign(directory / file, MOST_BYTES))
            config = document.get("quantization_config", document)
            # compressed-tensors writes its version beside quant_method; AWQ's `version` is a layout, such as gemm.
            version = config.get("version") or config.get("autoround_version")
            producer = config.get("producer") or {"name": config.get("quant_method"), "version": version}
            name, version = str(producer.get("name")), str(producer.get("version"))
            if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
                return f"{name} {version}"
    return ""
