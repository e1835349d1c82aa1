# SPDX-License-Identifier: Apache-2.0
"""Reads weights into the page cache while the former engines serve, so that new engines load from memory.

This is an optimisation: weights that do not fit into free memory, or take too long to read, are left to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...engine.config import EngineConfig
from ...engine.state import stamp
from ...generation.model import Generation
from ...system.host import available_bytes
from ...weights.read_rate import ensure_measured
from ...weights.record import load_record
from ..model import Done, Moves
from ..view import HostView

RESERVE_BYTES = 8 * 1024**3
"""Left for the engines that run, which need host memory too, and for everything else."""
CHUNK_BYTES = 8 * 1024**2
LIMIT_S = 180.0
"""For all models together. An old disk reads 30 GB in this time; the switch waits no longer for an optimisation."""


def list_weight_files(config: EngineConfig) -> list[tuple[Path, int]]:
    record = load_record(Path(config.weights_record)) if config.weights_record else None
    if record is None:
        return []
    return [(Path(record.path) / name, item.size_bytes) for name, item in sorted(record.files.items())]


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 1024**3:.1f} GiB" if size_bytes >= 1024**3 / 10 else f"{size_bytes / 1024**2:.1f} MiB"


def read_through(path: Path, deadline: float, clock: Callable[[], float]) -> tuple[int, bool]:
    """Read a file from its beginning until `deadline`; return how many bytes were read, and whether that was all of
    it."""
    buffer = bytearray(CHUNK_BYTES)
    done = 0
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while clock() < deadline:
            read = stream.readinto(buffer)
            if not read:
                return done, True
            done += read
    return done, False


def _measure_disk(rates: Path, config: EngineConfig, files: Sequence[tuple[Path, int]]) -> list[str]:
    """Measure the disk of a model unless that was done before; return what is new as text."""
    try:
        found = ensure_measured(rates, Path(config.weights_path), files, stamp())
    except OSError as error:
        return [f"the read rate of the disk of {config.model} was not recorded: {error}"]
    if found is None:
        return []
    told = f"reads {_gib(found.bytes_per_s)}/s" if found.bytes_per_s else f"is of unknown rate: {found.reason}"
    return [f"the disk of {found.directory} {told}"]


def read_ahead(host: HostView, wanted: Generation, moves: Moves) -> Done:
    """Read the weights of the engines that start. This never fails: the result says what was not read and why.

    The disk of a model without a recorded read rate is measured before it is read.
    """
    configs = [wanted.engines[name].config for name in moves.start]
    models = {config.weights_path or config.model: config for config in configs}
    began = host.clock()
    room = available_bytes() - RESERVE_BYTES
    said: list[str] = []
    warnings: list[str] = []
    for config in models.values():
        files = list_weight_files(config)
        size_bytes = sum(size for _, size in files)
        said += _measure_disk(host.paths.read_rates, config, files)
        if not files:
            said.append(f"{config.model} has no record of its weights and was not read")
        elif size_bytes > room:
            said.append(
                f"{config.model} ({_gib(size_bytes)}) does not fit into the {_gib(max(0, room))} of memory that are "
                f"free beside a reserve of {_gib(RESERVE_BYTES)} and was not read"
            )
        else:
            room -= size_bytes
            since = host.clock()
            done, whole = 0, True
            try:
                for path, _ in files:
                    size, whole = read_through(path, began + LIMIT_S, host.clock)
                    done += size
                    if not whole:
                        break
            except OSError as error:
                warnings.append(f"Weights of {config.model} could not be read ahead: {error}.")
                continue
            text = f"{config.model} {_gib(done)} read in {host.clock() - since:.1f} s"
            said.append(text if whole else f"{text}, of {_gib(size_bytes)}: the limit of {LIMIT_S:.0f} s was reached")
    return Done("; ".join(said) or "no engine has to start", warnings=tuple(warnings))
