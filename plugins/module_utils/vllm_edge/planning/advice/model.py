# SPDX-License-Identifier: Apache-2.0
"""The types of the advice: what was asked, the host, shapes, fits and profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .. import planner
from ..contract import DecodeTogether, EnginePlan, Gpu, Model, Plan
from ..decode import TOGETHER_CONTEXT_TOKENS, TOGETHER_REQUESTS

MIN_CONTEXT_TOKENS = 8192
MAX_NUM_SEQS = 16
"""Of every engine that is advised unless advise_max_num_seqs says otherwise: four for each of the usual roles. Each
further sequence costs memory for the sampler and for CUDA graphs, whether it is used or not."""
PROFILE_NAME = "advised"
"""Name of the chosen profile, and the beginning of the names of its engines."""


class AdviceError(ValueError):
    """No advice is possible as asked. The message names the variable, the value, why, and what would work."""


class NothingFits(AdviceError):
    """No profile is feasible."""


class By(StrEnum):
    TOK_S = "tok_s"
    CONTEXT = "context"
    FREE_GPUS = "free_gpus"
    TOGETHER = "together"


@dataclass(frozen=True)
class Wish:
    """What an operator asks for, already checked."""

    by: By = By.TOK_S
    choose: int = 1
    min_context_tokens: int = MIN_CONTEXT_TOKENS
    models: tuple[str, ...] = ()
    """Empty means all models."""
    main: str | None = None
    min_tok_s: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second that a request to a role must be estimated to get alone, by role; a role may be absent."""
    max_num_seqs: tuple[int, ...] = (MAX_NUM_SEQS,)
    """The values that engines are planned with."""


@dataclass(frozen=True)
class Host:
    models: Mapping[str, Model]
    gpus: Sequence[Gpu]
    vllm_version: str
    roles: Sequence[str]
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """serving_engines, for their parsers and for observations, with the defaults of their models."""
    observations: Mapping[str, Any] = field(default_factory=dict)
    margin_mib: int = planner.MARGIN_MIB
    tolerance_mib: int = planner.TOLERANCE_MIB
    inventory: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """vllm_models, for their engine_defaults."""

    def describe_gpus(self) -> str:
        kinds = Counter((gpu.name or f"GPU of {gpu.cuda_total_bytes // 2**20:,} MiB") for gpu in self.gpus)
        return " and ".join(f"{count} x {name}" for name, count in kinds.items())


@dataclass(frozen=True)
class Shape:
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        stages = f" pp{self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        return f"tp{self.tensor_parallel_size}{stages}"


@dataclass(frozen=True)
class Fit:
    """A model on some GPUs of one kind with one dtype of the KV cache, planned with the least context asked for."""

    model: str
    gpu: Gpu
    shape: Shape
    kv_cache_dtype: str
    plan: EnginePlan
    calibrated: bool
    """The KV cache has the model's own dtype, or one for which the checkpoint has scales."""
    at_once: Callable[[int], float]
    """Returns how many requests of so many tokens the KV cache holds, if the engine fits."""
    max_num_seqs: int
    together: Callable[[int], DecodeTogether | None]
    """Estimates the speed of so many requests together, or of as many of them as run at once; None for one request, or
    if the bandwidth is not known."""
    observed_as: str
    """The engine whose observations are in the plan; empty if there is none."""

    @property
    def tok_s(self) -> float:
        # Rounded as it is shown: what is closer together than that counts as equal.
        return round(self.plan.decode_tok_s.mid, 1) if self.plan.decode_tok_s else 0.0

    @property
    def label(self) -> str:
        return f"{self.model} {self.spread}" if self.spread != "tp1" else self.model

    @property
    def spread(self) -> str:
        sequences = "" if self.max_num_seqs == MAX_NUM_SEQS else f" seqs={self.max_num_seqs}"
        return f"{self.shape}{'' if self.kv_cache_dtype == 'auto' else f' kv={self.kv_cache_dtype}'}{sequences}"


@dataclass(frozen=True)
class Engine:
    """A fit with its context, the roles that it serves, and how many times it is there."""

    fit: Fit
    max_model_len: int
    roles: tuple[str, ...]
    replicas: int = 1

    @property
    def label(self) -> str:
        return f"{self.fit.label} x{self.replicas}" if self.replicas > 1 else self.fit.label

    @property
    def gpus(self) -> int:
        return self.fit.shape.gpus * self.replicas

    @property
    def at_once(self) -> float:
        return self.fit.at_once(self.max_model_len) * self.replicas

    @property
    def waiting(self) -> int:
        return max(len(self.roles) - int(self.fit.at_once(self.max_model_len)) * self.replicas, 0)

    @property
    def together(self) -> DecodeTogether | None:
        """The estimate for TOGETHER_REQUESTS requests of each role at the same time, shared out to the replicas.

        Each of them runs at most max_num_seqs at once. None if the bandwidth is not known.
        """
        each, more = divmod(TOGETHER_REQUESTS * len(self.roles), self.replicas)
        parts = [self._estimate(each + (number < more)) for number in range(self.replicas)]
        found = [part for part in parts if part]
        if not found:
            return None
        speeds = (round(sum(getattr(part, name) for part in found), 1) for name in ("low", "mid", "high"))
        return DecodeTogether(sum(part.requests for part in found), TOGETHER_CONTEXT_TOKENS, *speeds)

    def _estimate(self, requests: int) -> DecodeTogether | None:
        """Return the speed of a replica with so many requests; that of one request is the usual estimate."""
        one = self.fit.plan.decode_tok_s
        if one is None or not requests:
            return None
        alone = DecodeTogether(1, TOGETHER_CONTEXT_TOKENS, one.low, one.mid, one.high)
        return self.fit.together(requests) or alone


@dataclass(frozen=True)
class Profile:
    """Engines that fit together on the host, the main engine first."""

    engines: tuple[Engine, ...]
    free_gpus: int

    @property
    def main(self) -> Engine:
        return self.engines[0]

    @property
    def gpus(self) -> int:
        return sum(engine.gpus for engine in self.engines)

    @property
    def label(self) -> str:
        return " + ".join(engine.label for engine in self.engines)

    @property
    def others(self) -> tuple[Fit, ...]:
        """What runs beside the first replica of the main engine: its other replicas, and the other engines."""
        return (*[self.main.fit] * (self.main.replicas - 1), *(side.fit for side in self.engines[1:]))

    @property
    def choice(self) -> tuple[tuple[str, Shape, int, int], ...]:
        """Models, shapes, max_num_seqs and replicas: profiles in which they are the same share a row of the table."""
        return tuple(
            (engine.fit.model, engine.fit.shape, engine.fit.max_num_seqs, engine.replicas) for engine in self.engines
        )


@dataclass(frozen=True)
class Rejection:
    model: str
    verdict: str
    shapes: tuple[str, ...]
    reason: str
    """That of the last of the shapes, which is the nearest to fitting."""

    def __str__(self) -> str:
        over = f" as {', '.join(self.shapes)}" if self.shapes else ""
        return f"{self.model}{over}: {self.verdict}. {self.reason}"


@dataclass(frozen=True)
class Chosen:
    serving_engines: Mapping[str, Mapping[str, Any]]
    serving_profiles: Mapping[str, Mapping[str, Any]]
    plan: Plan
    advice: Mapping[str, tuple[str, ...]]
    """By engine of serving_engines: what works and could be better, and what is advised against."""


@dataclass(frozen=True)
class Advice:
    """The answer: what was asked, all feasible profiles, the rejected shapes, and the chosen profile."""

    wish: Wish
    host: Host
    mains: tuple[str, ...]
    """Models that the main engine may have."""
    profiles: tuple[Profile, ...]
    """Best first."""
    rejections: tuple[Rejection, ...]
    chosen: Chosen
    lost: tuple[tuple[int, str, str], ...] = ()
    """The best of the next choices of engines: rank, label, and why it is behind the chosen profile."""
