# SPDX-License-Identifier: Apache-2.0
"""Startup progress of an engine, from the lines that vLLM prints (versions 0.19 to 0.33)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Phases of an engine's life in order. The values are stored in state files and printed by `vllm-edge status`."""

    WAITING_FOR_DOCKER = "waiting-for-docker"
    WAITING_FOR_GPUS = "waiting-for-gpus"
    RETRYING = "waiting-to-try-again"
    CLEARING = "clearing"
    STARTING = "starting-container"
    INITIALIZING = "initializing"
    LOADING = "loading-weights"
    COMPILING = "compiling"
    KV_CACHE = "kv-cache"
    CAPTURING = "capturing-graphs"
    HEALTH = "waiting-for-health"
    SERVING = "serving"
    UNHEALTHY = "not-answering"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


WORDS = {phase: phase.replace("-", " ") for phase in Phase} | {
    Phase.WAITING_FOR_DOCKER: "waiting for the Docker Engine",
    Phase.WAITING_FOR_GPUS: "waiting for the GPUs",
    Phase.CLEARING: "removing the previous container",
    Phase.INITIALIZING: "starting vLLM",
    Phase.KV_CACHE: "KV cache",
    Phase.HEALTH: "waiting for /health",
    Phase.UNHEALTHY: "not answering /health",
}
"""Phases as text for people."""

ORDER = list(Phase)

STARTING_PHASES = frozenset(ORDER[ORDER.index(Phase.STARTING) : ORDER.index(Phase.SERVING)])
"""Phases in which a container runs that has not answered /health yet."""

BUSY_PHASES = frozenset({Phase.LOADING, Phase.COMPILING, Phase.KV_CACHE, Phase.CAPTURING})
"""Phases that may be long without a line in the log: a shard of weights may have 50 GB, and a cold compiler is slow."""

_PHASE_LINES: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (re.compile(r"Capturing CUDA graphs?\b[^:]*(?:\([^)]*\))?:?\s*(?P<percent>\d+)%"), Phase.CAPTURING),
    (re.compile(r"Capturing (?:\w{1,30} ){0,6}(?:CUDA|cuda) ?graphs?"), Phase.CAPTURING),
    (re.compile(r"Loading \w+ checkpoint shards:\s*(?P<percent>\d+)%"), Phase.LOADING),
    (re.compile(r"Starting to load model |Loading weights took|Model loading took"), Phase.LOADING),
    # Not every line with "torch.compile": "Enforce eager set, disabling torch.compile" comes before all others.
    (
        re.compile(
            r"(?:Starting|vLLM.s) torch\.compile|torch\.compile (?:takes|took|and initial)|Dynamo bytecode|"
            r"Compiling a graph for"
        ),
        Phase.COMPILING,
    ),
    (re.compile(r"Available KV cache memory:|KV cache size:|Maximum concurrency for"), Phase.KV_CACHE),
    (
        re.compile(
            r"Graph capturing finished|init engine \(|Starting vLLM (?:API )?server|"
            r"Waiting for application startup|Application startup complete"
        ),
        Phase.HEALTH,
    ),
)

# Lines that an engine repeats while it hangs, so they are no sign of progress.
_NO_PROGRESS = re.compile(r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)")

_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("model_gib", re.compile(r"Model loading took (?P<value>[\d.]+) GiB")),
    # What is left of its share of the GPU, or the amount set by kv_cache_memory_bytes.
    (
        "kv_cache_gib",
        re.compile(
            r"(?:Available KV cache memory:|free memory [\d.]+ GiB, reserved) (?P<value>-?[\d.]+) GiB", re.IGNORECASE
        ),
    ),
    ("graphs_gib", re.compile(r"Graph capturing finished in .{0,50} secs, took (?P<value>[\d.]+) GiB")),
    ("kv_cache_tokens", re.compile(r"KV cache size: (?P<value>[\d,]+) tokens")),
    ("max_concurrency", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: (?P<value>[\d.]+)x")),
    # The lines of the profile, which vLLM prints only at a start with gpu_memory_utilization (v1/worker/gpu_worker.py).
    ("graphs_estimate_gib", re.compile(r"CUDA graph pool memory: [\d.]+ GiB \(actual\), (?P<value>[\d.]+) GiB")),
    ("consumed_gib", re.compile(r"Actual usage is (?P<value>[\d.]+) GiB for consumed memory")),
    ("activation_gib", re.compile(r"(?<![\d.])(?P<value>[\d.]{1,20}) GiB for peak activation")),
    # vLLM's own times (the same texts in 0.19.0, 0.26.0 and 0.33.0): model_executor/model_loader/default_loader.py, and
    # sharded_state_loader.py; v1/worker/gpu_model_runner.py; compilation/monitor.py, with compilation/decorators.py for
    # a compiled model that was found in the cache; v1/engine/core.py.
    ("weights_s", re.compile(r"Loading weights took (?P<value>[\d.]+) seconds")),
    ("model_s", re.compile(r"Model loading took [\d.]+ GiB(?: memory)? and (?P<value>[\d.]+) seconds")),
    (
        "compile_s",
        re.compile(r"torch\.compile (?:and initial profiling/warmup run together )?took (?P<value>[\d.]+) s in total"),
    ),
    ("profile_s", re.compile(r"Initial profiling/warmup run took (?P<value>[\d.]+) s\b")),
    ("graphs_s", re.compile(r"Graph capturing finished in (?P<value>[\d.]+) secs")),
    ("init_s", re.compile(r"init engine \([^)]{0,80}\) took (?P<value>[\d.]+) s")),
)
# Until 0.26 the line gave the memory outside of torch by itself, which later releases measure with the weights.
_CONSUMED = re.compile(r"Actual usage is ([\d.]+) GiB for weight, .{0,300} (-?[\d.]+) GiB for non-torch memory")
_AT_FIRST = re.compile(r"Free memory on device \(([\d.]+)/([\d.]+) GiB\) on startup")
_GRAPHS_OUTSIDE = "CUDA graph memory profiling is disabled"
TIMES = ("weights_s", "model_s", "compile_s", "profile_s", "graphs_s", "init_s")
"""Of the figures those that are vLLM's own times in seconds. `init_s` contains the three before it."""
WORST = frozenset({"graphs_estimate_gib", "consumed_gib", "activation_gib", "outside_gib", *TIMES})
"""Figures that every rank of an engine logs, of which the largest counts."""


def is_progress(line: str) -> bool:
    return line.strip() != "" and not _NO_PROGRESS.search(line)


def parse_phase(line: str) -> tuple[Phase, int | None] | None:
    """Return the phase that a log line announces and its percentage, if it has one; None for other lines."""
    for pattern, phase in _PHASE_LINES:
        match = pattern.search(line)
        if match:
            percent = match.groupdict().get("percent")
            return phase, (int(percent) if percent is not None else None)
    return None


def facts_of(line: str) -> dict[str, float | int]:
    """Return the figures in a log line: vLLM's own measurements of its memory and its times.

    Returns:
        `model_gib`, `kv_cache_gib`, `graphs_gib` (GiB), `kv_cache_tokens` and `max_concurrency`, as far as the line has
        them. Of a start with gpu_memory_utilization also, in GiB: `consumed_gib` (weights, and memory outside of
        torch), `activation_gib` (transient peak of the activations, with the estimate for graphs if that counts),
        `graphs_estimate_gib`, and `outside_gib` (what was taken before vLLM began to count); and `graphs_outside`, 1
        if the estimate does not count. In seconds: those of TIMES.
    """
    found: dict[str, float | int] = {}
    for key, pattern in _FACTS:
        match = pattern.search(line)
        if match:
            text = match["value"].replace(",", "")
            found[key] = int(text) if key == "kv_cache_tokens" else float(text)
    if match := _CONSUMED.search(line):
        found["consumed_gib"] = round(float(match[1]) + float(match[2]), 2)
    if match := _AT_FIRST.search(line):
        found["outside_gib"] = round(float(match[2]) - float(match[1]), 2)
    if _GRAPHS_OUTSIDE in line:
        found["graphs_outside"] = 1
    return found


@dataclass
class Progress:
    """The furthest phase seen so far. It never goes back, because an engine's workers log in any order."""

    phase: Phase = Phase.STARTING
    percent: int | None = None
    facts: dict[str, float | int] = field(default_factory=dict)

    def feed(self, line: str) -> None:
        for key, value in facts_of(line).items():
            self.facts[key] = max(value, self.facts.get(key, value)) if key in WORST else value
        told = parse_phase(line)
        if told is None and (self.phase is not Phase.STARTING or line.strip() == ""):
            return
        # Any first line shows that the container is alive; vLLM imports for a while before it prints more.
        phase, percent = told or (Phase.INITIALIZING, None)
        if phase is self.phase:
            self.percent = self.percent if percent is None else percent
        elif ORDER.index(phase) > ORDER.index(self.phase):
            self.phase, self.percent = phase, percent

    def words(self) -> str:
        text = WORDS[self.phase]
        return text if self.percent is None else f"{text}, {self.percent} %"
