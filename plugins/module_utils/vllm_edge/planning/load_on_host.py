# SPDX-License-Identifier: Apache-2.0
"""What a host knows of the load time of its engines: their earlier loads, and the read rate of their disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from ..engine.config import EngineConfig
from ..engine.loads import read_loads
from ..engine.state import EngineState
from ..paths import HostPaths
from ..weights.read_rate import find_rate
from .load_time import REACHED, Expected, expect, find_slow_load


def find_disk_rate(paths: HostPaths, config: EngineConfig, until: str = "9") -> float | None:
    """Return what the disk of an engine's weights delivers to a sequential reader, in bytes per second.

    Loads of any engine whose weights came from the same directory's disk tell most; otherwise what was measured counts.
    None if neither is known.

    Args:
        until: loads that ended then or later do not count
    """
    directory = Path(config.weights_path).parent
    rates = [
        rate
        for path in sorted((paths.state / "engines").glob("*.loads.json"))
        for load in read_loads(path)
        if Path(load.weights_path).parent == directory and load.at < until
        if (rate := load.disk_bytes_per_s) is not None
    ]
    if rates:
        return median(rates) / REACHED.value
    found = find_rate(paths.read_rates, Path(config.weights_path)) if config.weights_path else None
    return found.bytes_per_s if found else None


def expect_load(paths: HostPaths, config: EngineConfig) -> Expected | None:
    """Return how long the next load of an engine of this host will take; None if that cannot be said."""
    return expect(config, read_loads(paths.engine_loads(config.engine)), find_disk_rate(paths, config))


def warn_of_load(paths: HostPaths, config: EngineConfig, state: EngineState | None) -> str | None:
    """Return a sentence if the last load of an engine took longer than was expected before it; else None.

    It counts only if it is the load of the container that runs.
    """
    loads = read_loads(paths.engine_loads(config.engine))
    if state is None or state.load_seconds is None or state.input_hash != config.input_hash or not loads:
        return None
    last = loads[-1]
    if (last.input_hash, last.seconds) != (config.input_hash, state.load_seconds):
        return None
    return find_slow_load(config, last, loads[:-1], find_disk_rate(paths, config, last.at))


def longest_load_s(paths: HostPaths, configs: Iterable[EngineConfig]) -> float:
    """Return the highest seconds that a load of these engines is expected to take; 0 if nothing is known."""
    return max((found.high for config in configs if (found := expect_load(paths, config)) is not None), default=0.0)
