# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files and the JSON beside them: their form, and how large what they say may be.

A safetensors file begins with eight bytes: the length of a JSON header, little-endian. The header gives name, dtype,
shape and position of each tensor (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...system.records import parse_json
from ...text import printable, shown
from ..contract import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF = re.compile(r"(?:[-_.]gguf|(?<=[^/:])/[^/:]+:[\w-]+)$", re.IGNORECASE)
"""The end of what names a GGUF: a file, a repository, or a repository with its quantization (owner/name:Q4_K_M)."""
MODULES = "modules.json"
"""Of Sentence Transformers: the repository is an embedding model."""
MAX_HEADER_BYTES = 16 * 2**20
"""Bytes of a header. The safetensors library takes 100 MB (`MAX_HEADER_SIZE` in safetensors/src/tensor.rs); the headers
of published checkpoints have less than 2 MB."""
MAX_JSON_BYTES = 4 * 2**20
"""Bytes of config.json and hf_quant_config.json."""
MAX_TENSORS = 1_000_000
"""Tensors of a checkpoint."""
MAX_NAME = 300
"""Characters of a tensor's name."""
LARGEST = 2**40
"""The largest size in config.json, and of a dimension of a tensor."""

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Width in bits of each dtype of safetensors."""


class FactsError(ValueError):
    """Files are missing, damaged or contradict each other. The message names the file and the remedy."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, ""))


def describe_gguf(source: str) -> str:
    return (
        f"{source} is GGUF, which the planner does not read. Take the checkpoint in safetensors that it was made from "
        "(base_model on its page), or one of it in AWQ, GPTQ, W4A16 or FP8 with about as many bits."
    )


Header = tuple[str, str, Sequence[int]]
"""Name, dtype and shape of one tensor."""


def compute_bytes(tensor: Tensor) -> int:
    return (math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] + 7) // 8


def parse_header(raw: bytes, where: str) -> tuple[list[Header], int]:
    """Return the tensors of a safetensors file, and how many bytes of data must follow its header. Raises FactsError if
    the header is damaged."""
    remedy = "It is damaged; fetch it again."
    headers: list[Header] = []
    end = 0
    try:
        for name, entry in parse_json(raw).items():
            if name == "__metadata__":
                continue
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if len(shape) > 16 or not all(type(size) is int and 0 <= size <= LARGEST for size in shape):
                raise ValueError(f"{name[:MAX_NAME]} has shape {shown(entry['shape'])}")
            if not all(type(offset) is int and 0 <= offset <= 2**62 for offset in (first, last)):
                raise ValueError(f"{name[:MAX_NAME]} lies at {shown(entry['data_offsets'])}")
            if dtype in DTYPE_BITS and (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8 != last - first:
                raise FactsError(f"{where}: {name} is {dtype} {list(shape)}, but has {last - first} bytes. {remedy}")
            headers.append((name, dtype, shape))
            end = max(end, last)
    except FactsError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise FactsError(f"{where} has no valid safetensors header ({reason[:MAX_NAME]}). {remedy}") from error
    return headers, end


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint. Raises FactsError if it is no regular file or cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FactsError(f"{path} is no regular file. Remove it and fetch it again.")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FactsError(f"{path} cannot be read: {error.strerror}. Make it readable for your user.") from error


def read_json(path: Path, remedy: str, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. Raises FactsError if it is missing (then with the remedy), too large, no
    regular file, or no JSON object."""
    try:
        with open_regular(path) as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise FactsError(f"{path} has more than {most_bytes:,} bytes. It is not of a model; fetch it again.")
        document = parse_json(raw)
    except FileNotFoundError:
        raise FactsError(f"{path} is missing. {remedy}") from None
    except FactsError:
        raise
    except (ValueError, MemoryError) as error:
        raise FactsError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(document, dict):
        raise FactsError(f"{path} does not contain a JSON object. Fetch it again.")
    return document
