# SPDX-License-Identifier: Apache-2.0
"""What engine and GPUs do while requests run: samples once a second, and what they say about a stretch of time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ...engine.config import EngineConfig
from ...engine.metrics import Totals, read_totals
from ...system.http import request
from ...system.nvml import NvmlFailure, NvmlSession, StateReading, open_nvml
from ...system.threads import Worker
from .model import GpuFigures

EVERY_S = 0.5
METRICS_S = 3.0


@dataclass(frozen=True)
class Sample:
    at: float
    """Monotonic seconds."""
    totals: Totals | None
    """None if an engine did not answer."""
    vram_mib: Mapping[str, int] = field(default_factory=dict)
    """Memory in use by UUID, of all processes."""
    states: Mapping[str, StateReading] = field(default_factory=dict)


@dataclass
class Sampler:
    """Takes samples in a thread, and summarizes those since the last `begin`."""

    take: Callable[[], Sample]
    every_s: float = EVERY_S
    samples: list[Sample] = field(default_factory=list)
    _moved_at: float = field(default_factory=time.monotonic)
    _totals: Totals | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: Worker | None = None

    def __enter__(self) -> Sampler:
        self._thread = Worker(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=METRICS_S + self.every_s)

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            self._look()

    def _look(self) -> None:
        # One at a time: the thread and whoever begins or ends a stretch share one session of NVML.
        with self._lock:
            self.samples.append(self.take())
            totals = self.samples[-1].totals
            # The supervisor asks an idle engine for a token from time to time, which is no progress of the stretch.
            if totals is not None and totals.in_work and totals != self._totals:
                self._moved_at, self._totals = time.monotonic(), totals

    def begin(self) -> None:
        with self._lock:
            self.samples = [self.take()]
            self._moved_at = time.monotonic()

    def end(self) -> list[Sample]:
        self._look()
        with self._lock:
            self._moved_at = time.monotonic()
            return list(self.samples)

    def find_problem(self) -> str:
        """Return why there are no more samples; empty if there are."""
        problem = self._thread.problem if self._thread is not None else None
        return f"its figures are no longer sampled ({type(problem).__name__}: {problem})" if problem else ""

    def get_still_s(self) -> float:
        return time.monotonic() - self._moved_at


@contextlib.contextmanager
def open_sampler(configs: Sequence[EngineConfig]) -> Iterator[Sampler]:
    """Sample engines and their GPUs. Without NVML the figures of the GPUs are missing."""
    with contextlib.ExitStack() as stack:
        session: NvmlSession | None = None
        with contextlib.suppress(NvmlFailure, ImportError):
            session = stack.enter_context(open_nvml())
        yield stack.enter_context(Sampler(lambda: take_sample(configs, session)))


def add_totals(parts: Sequence[Totals]) -> Totals:
    """Return the sums over engines, and of `kv_use` the mean; a figure that one of them does not report is None."""
    sums: dict[str, float | None] = {}
    for name in (one.name for one in fields(Totals)):
        values = [getattr(part, name) for part in parts]
        sums[name] = None if None in values else sum(values) / (len(values) if name == "kv_use" else 1)
    return Totals(**sums)


def take_sample(configs: Sequence[EngineConfig], session: NvmlSession | None) -> Sample:
    """Look at engines and their GPUs once; what does not answer is left out."""
    answers = [request(config.url, "/metrics", METRICS_S) for config in configs]
    known = [read_totals(answer.body.decode("utf-8", "replace")) for answer in answers if answer.ok]
    totals = add_totals(known) if len(known) == len(configs) else None
    uuids = {uuid for config in configs for uuid in config.gpus}
    vram: dict[str, int] = {}
    states: dict[str, StateReading] = {}
    for gpu in session.identities if session else ():
        if gpu.uuid in uuids and session is not None:
            with contextlib.suppress(NvmlFailure):
                vram[gpu.uuid] = session.read_gpu(gpu).used_mib
                states[gpu.uuid] = session.read_state(gpu)
    return Sample(time.monotonic(), totals, vram, states)


def summarize_gpu(uuid: str, slot: int | None, samples: Sequence[Sample], busy: tuple[float, float]) -> GpuFigures:
    """Return the figures of one GPU over a stretch of time.

    Energy is the difference of the GPU's own counter; where it has none, power times time.

    Args:
        busy: monotonic seconds between which requests ran; power and energy are those of this time
    """
    vram = [sample.vram_mib[uuid] for sample in samples if uuid in sample.vram_mib]
    states = [(sample.at, sample.states[uuid]) for sample in samples if uuid in sample.states]
    while_busy = [state for at, state in states if busy[0] <= at <= busy[1]] or [state for _, state in states]
    power = [state.power_w for state in while_busy if state.power_w is not None]
    energy = [(at, state.energy_j) for at, state in states if state.energy_j is not None]
    clocks = [state.sm_clock_mhz for state in while_busy if state.sm_clock_mhz is not None]
    heat = [state.temperature_c for _, state in states if state.temperature_c is not None]
    mean = sum(power) / len(power) if power else None
    joules = None if mean is None else mean * (busy[1] - busy[0])
    if len(energy) > 1:
        joules = _interpolate(energy, busy[1]) - _interpolate(energy, busy[0])
    return GpuFigures(
        slot,
        uuid,
        vram_before_mib=vram[0] if vram else None,
        vram_peak_mib=max(vram, default=None),
        vram_after_mib=vram[-1] if vram else None,
        power_w_mean=None if mean is None else round(mean, 1),
        power_w_max=max(power, default=None),
        joules=None if joules is None else round(joules, 1),
        sm_clock_mhz_min=min(clocks, default=None),
        sm_clock_mhz_max=max(clocks, default=None),
        temperature_c_max=max(heat, default=None),
        throttle=tuple(dict.fromkeys(name for state in while_busy for name in state.throttle or ())),
    )


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a time between points of seconds and values; at the ends, that of the end."""
    for (before, low), (after, high) in itertools.pairwise(points):
        if at <= after:
            share = (at - before) / (after - before) if after > before else 1.0
            return low + (high - low) * max(0.0, share)
    return points[-1][1]


def subtract(samples: Sequence[Sample], name: str) -> int | None:
    """Return by how much a total of the engine grew over the samples; None if it is not known at both ends."""
    if len(samples) < 2:
        return None
    before, after = (getattr(one.totals, name, None) for one in (samples[0], samples[-1]))
    return None if before is None or after is None else int(after - before)


def find_kv_peak(samples: Sequence[Sample]) -> float | None:
    return max((one.totals.kv_use for one in samples if one.totals and one.totals.kv_use is not None), default=None)
