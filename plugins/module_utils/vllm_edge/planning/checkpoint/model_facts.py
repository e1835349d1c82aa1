# SPDX-License-Identifier: Apache-2.0
"""Reader of a checkpoint: config.json and the headers of its safetensors files, never the weights."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...text import printable, shown
from ..contract import Facts, Tensor
from . import inferred
from .headers import (
    DTYPE_BITS,
    INDEX,
    LARGEST,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    MODULES,
    SINGLE,
    FactsError,
    Header,
    compute_bytes,
    describe_gguf,
    open_regular,
    parse_header,
    read_json,
)

_DECODER_LAYER = re.compile(r"(?:(?:model|language_model|backbone)\.)*layers\.(\d{1,9})\.")
"""A tensor whose name begins like this belongs to a decoder layer; the names of layers of towers begin with the tower's
name."""
PUBLISHED = Path(__file__).parent / "published_facts.json"


def parameters(facts: Facts) -> int:
    """Return the number of elements of all tensors. For packed weights that is the number of packed words."""
    return sum(math.prod(tensor.shape) * tensor.total for tensor in facts.tensors)


def checkpoint_bytes(facts: Facts) -> int:
    return sum(compute_bytes(tensor) * tensor.total for tensor in facts.tensors)


def read(directory: Path, repo: str = "", revision: str = "") -> Facts:
    """Read the facts of a model directory in Hugging Face's layout. Raises FactsError if a file is missing or damaged.

    If the index is there and none of the files that it names, the tensors are inferred, and the source says so. Without
    `repo` the directory's name is used.
    """
    config = read_json(
        directory / "config.json",
        _find_gguf(directory) or "It is no model directory in Hugging Face's layout, or incomplete.",
    )
    quantization = None
    path = directory / "hf_quant_config.json"
    if not find_quantization(config) and path.exists():
        quantization = read_json(path, "Fetch it again.")
    repo, pooling = repo or directory.name, (directory / MODULES).exists()
    shards = _list_shards(directory)
    if not any(shard.exists() for shard in shards):
        index = read_json(directory / INDEX, "Fetch it again.", MAX_HEADER_BYTES)
        metadata = index.get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        size = size if type(size) is int and 0 < size < 2**62 else None
        scheme = find_quantization(config) or quantization or {}
        found, exactness = inferred.infer_headers(repo, config, scheme, sorted(index["weight_map"]), size)
        return build_facts(repo, revision, config, found, quantization, f"{inferred.APPROXIMATE}{exactness}", pooling)
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise FactsError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names. Fetch the rest of it.")
    headers = (header for shard in shards for header in _read_headers(shard))
    return build_facts(repo, revision, config, headers, quantization, pooling=pooling)


def find_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says about quantization, or an empty mapping.

    vLLM looks in the same places (`ModelConfig._parse_quant_hf_config`, vllm/config/model.py of 0.33).
    """
    for at, place in (("", config), ("text_config.", config.get("text_config") or {})):
        if not isinstance(place, Mapping):
            raise FactsError(f"config.json: text_config is {shown(place)}, an object is expected. Fetch it again.")
        for key in ("quantization_config", "compression_config"):
            if place.get(key):
                if not isinstance(place[key], Mapping):
                    raise FactsError(f"config.json: {at}{key} is {shown(place[key])}, an object is expected.")
                return dict(place[key])
    return {}


def build_facts(
    repo: str,
    revision: str,
    config: Mapping[str, Any],
    headers: Iterable[Header],
    quantization: Mapping[str, Any] | None = None,
    source: str = "files",
    pooling: bool = False,
) -> Facts:
    """Build facts from headers; tensors with alike names become one pattern.

    Args:
        quantization: used only if config.json says nothing.

    Raises:
        FactsError: if a dtype is unknown, a tensor appears twice, or there is none.
    """
    seen: set[str] = set()
    patterns: dict[tuple[str, str, tuple[int, ...]], dict[int | None, int]] = {}
    for name, dtype, shape in headers:
        if len(seen) == MAX_TENSORS:
            raise FactsError(f"{repo} has more than {MAX_TENSORS:,} tensors, which no model has. Fetch it again.")
        if len(name) > MAX_NAME:
            raise FactsError(f"{repo}: the name of tensor {shown(name)} has more than {MAX_NAME} characters.")
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise FactsError(
                f"{repo}: tensor {name} has dtype {str(dtype)[:60]}, which is none of {', '.join(DTYPE_BITS)}."
            )
        if name in seen:
            raise FactsError(f"{repo}: tensor {name} appears twice; remove the files that do not belong to it.")
        seen.add(name)
        match = _DECODER_LAYER.match(name)
        layer = int(match[1]) if match else None
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        counts = patterns.setdefault((pattern, dtype, tuple(shape)), {})
        counts[layer] = counts.get(layer, 0) + 1
    if not seen:
        raise FactsError(f"{repo}: its safetensors files hold no tensors.")
    tensors = [
        Tensor(pattern, dtype, shape, layers, count)
        for (pattern, dtype, shape), counts in patterns.items()
        for layers, count in _group_layers(counts)
    ]
    tensors.sort(key=lambda tensor: (tensor.name, tensor.layers or (), tensor.dtype, tensor.shape))
    scheme = find_quantization(config) or dict(quantization or {})
    return Facts(repo, revision, config, tuple(tensors), scheme, source, pooling)


def recorded(repo: str, own: Mapping[str, Any] | None = None) -> Facts | None:
    """Return the recorded facts of a repository, or None if it is not recorded. Raises as `parse_record` does.

    Args:
        own: records of the inventory (plan_recorded_facts), which come before those that the project ships.
    """
    # Imported here because the data is large, and reading files does not need it.
    from . import recorded_facts

    record = (own or {}).get(repo) or recorded_facts.RECORDS.get(repo)
    return None if record is None else parse_record(repo, record, f"plan_recorded_facts.{repo}")


def published(repo: str) -> Facts | None:
    """Return the facts of a recorded checkpoint, or of one whose plan the project's tests compare with vLLM; None if it
    is neither. The file is not sent to hosts."""
    found = recorded(repo)
    if found is None and (record := _read_published().get(repo)):
        source = "published sizes; the released config.json was not read"
        found = parse_record(repo, {**record, "revision": "", "source": source}, str(PUBLISHED))
    return found


@functools.cache
def _read_published() -> dict[str, Any]:
    return read_json(PUBLISHED, "Install the package again.")


def parse_record(repo: str, record: Any, where: str) -> Facts:
    """Return the facts of a record as `recording.record` returns it. Raises FactsError if it has another form."""
    try:
        tensors = load_tensors(record["tensors"])
        for tensor in tensors:
            whole = (*tensor.shape, *(tensor.layers or ()), tensor.count)
            if tensor.dtype not in DTYPE_BITS or not all(type(size) is int and 0 <= size <= LARGEST for size in whole):
                raise ValueError(f"{shown(tensor.name)} is {shown(tensor.dtype)} {shown(list(tensor.shape))}")
        config, quantization = dict(record["config"]), dict(record["quantization"])
        source = f"recorded: {printable(record['source'], '')}"
        pooling = record.get("pooling") is True
        return Facts(repo, str(record["revision"]), config, tensors, quantization, source, pooling)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FactsError(
            f"{where} is no record of a checkpoint ({str(error)[:MAX_NAME]}). Write it with playbooks/record_facts.yml "
            "or vllm-edge facts."
        ) from error


def _group_layers(counts: Mapping[int | None, int]) -> Iterator[tuple[tuple[int, ...] | None, int]]:
    if None in counts:
        yield None, counts[None]
    for count in sorted({counts[layer] for layer in counts if layer is not None}):
        yield tuple(sorted(layer for layer, has in counts.items() if layer is not None and has == count)), count


def dump_tensors(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [
        (
            tensor.name,
            tensor.dtype,
            tensor.shape,
            None if tensor.layers is None else ranges(tensor.layers),
            tensor.count,
        )
        for tensor in tensors
    ]


def load_tensors(rows: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return what `dump_tensors` returned, also after JSON."""
    return tuple(
        Tensor(name, dtype, tuple(shape), None if layers is None else tuple(_expand_ranges(layers)), count)
        for name, dtype, shape, layers, count in rows
    )


def _expand_ranges(ranges: str) -> Iterator[int]:
    """Yield 0, 1, 2, 3, 4, 6 for `0-4,6`."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if int(last or first) > MAX_TENSORS:
            raise ValueError(f"layers {shown(part)} are more than any model has")
        yield from range(int(first), int(last or first) + 1)


def ranges(layers: Sequence[int]) -> str:
    """Return `0-4,6` for 0, 1, 2, 3, 4, 6, as recorded facts spell layers."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _list_shards(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, which may be missing. Raises FactsError if nothing names them."""
    index = directory / INDEX
    if index.exists():
        weight_map = read_json(index, "Fetch it again.", MAX_HEADER_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FactsError(f"{index} has no weight_map. Fetch it again.")
        for name in weight_map.values():
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
                raise FactsError(
                    f"{index} names {shown(name)}, which is no safetensors file beside it. Fetch it again."
                )
        return [directory / name for name in sorted(set(weight_map.values()))]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    remedy = (
        f"Fetch its weights in safetensors format, or {INDEX} alone if the model has it: it is small, and an "
        "approximate plan needs no more."
    )
    raise FactsError(f"{directory} has neither {SINGLE} nor {INDEX}. {_find_gguf(directory) or remedy}")


def _find_gguf(directory: Path) -> str:
    """Return a sentence about the GGUF file of a directory; empty if it has none."""
    with contextlib.suppress(OSError):
        return "".join(describe_gguf(path.name) for path in sorted(directory.glob("*.gguf"))[:1])
    return ""


def _read_headers(path: Path) -> Iterator[Header]:
    """Yield the tensors of one safetensors file. Raises FactsError if its size and header do not match."""
    remedy = "It is damaged or not yet complete; fetch it again."
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise FactsError(f"{path} does not begin with the length of a safetensors header. {remedy}")
        raw = file.read(length)
    headers, end = parse_header(raw, str(path))
    if size != 8 + length + end:
        raise FactsError(f"{path} has {size:,} bytes, and its header says {8 + length + end:,}. {remedy}")
    yield from headers
