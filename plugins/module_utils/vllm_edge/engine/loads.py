# SPDX-License-Identifier: Apache-2.0
"""The last loads of an engine on this host, in /var/lib/vllm-edge/engines/<engine>.loads.json.

The supervisor writes them: a load that ended with an answer of /health is an entry, one that failed is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..system.files import read_foreign, write_durably
from ..system.records import RecordError, parse_json, read_record
from ..weights.record import load_record
from .config import EngineConfig
from .startup import TIMES, Phase

KEPT = 20
"""Loads that are kept of an engine, the newest."""
MOST_BYTES = 1024 * 1024
FROM_CACHE, FROM_DISK = 0.1, 0.9
"""Up to this share of the weights read from disks they were in the page cache, and from that share on they were not."""


@dataclass(frozen=True)
class Load:
    """One load of an engine that ended with an answer of /health."""

    at: str
    """When it ended."""
    input_hash: str
    image: str
    """Id of the image, or its name if no id is known."""
    model: str
    revision: str
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by value of `Phase`; they add up to `seconds`."""
    times: Mapping[str, float] = field(default_factory=dict)
    """vLLM's own times in seconds, those of startup.TIMES that it logged."""
    weights_path: str = ""
    weights_bytes: int | None = None
    """Size of the checkpoint; None if there is no record of it."""
    read_bytes: int | None = None
    """Bytes that the container read from disks while it loaded weights; None if they were not counted. A network file
    system counts as 0."""

    @property
    def cached(self) -> bool | None:
        """Whether the weights came from the page cache; None if only a part did, or nobody counted."""
        if not self.weights_bytes or self.read_bytes is None:
            return None
        share = self.read_bytes / self.weights_bytes
        return True if share <= FROM_CACHE else False if share >= FROM_DISK else None

    @property
    def disk_bytes_per_s(self) -> float | None:
        """The rate at which the weights came from the disk; None unless they did."""
        seconds = self.times.get("weights_s") or self.phases.get(Phase.LOADING)
        return self.weights_bytes / seconds if self.cached is False and self.weights_bytes and seconds else None


def describe_load(
    config: EngineConfig,
    at: str,
    seconds: float,
    phases: Mapping[str, float],
    facts: Mapping[str, float | int],
    read_bytes: int | None = None,
) -> Load:
    """Return the entry of a load that has just ended."""
    record = load_record(Path(config.weights_record)) if config.weights_record else None
    times = {key: float(facts[key]) for key in TIMES if key in facts}
    return Load(
        at,
        config.input_hash,
        config.image_id or config.image,
        config.model,
        config.revision,
        seconds,
        dict(phases),
        times,
        config.weights_path,
        record.total_bytes if record else None,
        read_bytes,
    )


def read_loads(path: Path) -> list[Load]:
    """Return the loads in a file, the newest last; none if there is none, and without entries that are damaged.

    Raises PermissionError: there may be loads, and this user may not read them.
    """
    try:
        rows = parse_json(read_foreign(path, MOST_BYTES))["loads"]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = []
    for row in rows if isinstance(rows, list) else []:
        try:
            found.append(read_record(Load, row))
        except RecordError:
            continue
    return [load for load in found if load.seconds > 0]


def remember_load(path: Path, load: Load) -> None:
    rows = [asdict(each) for each in [*read_loads(path), load][-KEPT:]]
    write_durably(path, json.dumps({"loads": rows}, indent=1) + "\n", 0o640)


def find_longest(path: Path, config: EngineConfig) -> float:
    """Return the seconds that a start of the engine may need: the highest of its plan or, if it was longer, the longest
    of its loads with these inputs. 0 if neither is known."""
    planned = (config.plan or {}).get("load_s") or {}
    loads = [load.seconds for load in read_loads(path) if load.input_hash == config.input_hash]
    return max([float(planned.get("high") or 0.0), *loads])
