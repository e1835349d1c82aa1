# SPDX-License-Identifier: Apache-2.0
"""Which profiles are feasible on a host with a set of models, ranked, and one of them as group_vars.

A profile is one main engine, which has the largest model, and beside it up to one engine of each smaller model on the
GPUs that stay free. Engines share no GPU, so what comes of one depends on its own GPUs alone: each is planned once for
each kind of GPU, however many profiles it is in. Tokens per second are the planner's estimates.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..wording import nearest, not_among, shown
from . import overhead, planner, render
from .contract import EnginePlan, Gpu, Model, Plan, Verdict
from .feasibility import FEW_ENOUGH_REQUESTS, context_advice
from .kv_cache import groups as kv_groups
from .kv_cache import resolved_dtype
from .planner import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES
from .vllm_versions import batches_in_flight, max_num_batched_tokens

WIDTH = render.WIDTH
MIN_CONTEXT_TOKENS = 8192
MAX_NUM_SEQS = 16
"""Of every engine that is advised: four for each of the usual roles. Each one more costs memory whether it is used or
not, for the sampler and for CUDA graphs."""
KV_CACHE_DTYPES = ("auto", "fp8", "bfloat16")
"""As they are written down; of those that come to the same for a checkpoint the first is taken."""
PORTS = range(8050, 8150, 10)
ROLES_OF_MAIN = 2
"""So many roles stay with the main engine where others are beside it."""
ROWS = 20
"""Of the table. The document has all profiles."""
WITHOUT_KV = (Verdict.UNSUPPORTED_ENGINE, Verdict.UNSUPPORTED_SHAPE, Verdict.NOT_FREE, Verdict.OOM_WEIGHTS)
"""Verdicts that another dtype of the KV cache does not change."""
BITS_OF_TENSORS = {"U8": 2, "F4": 1, "I32": 8, "I64": 16}
"""Weights of 4 bits that one element of a packed tensor holds, by the tensor's dtype."""


class AdviceError(ValueError):
    """Nothing can be advised as it is asked for. The message names variable, value, why, and what would work."""


class By(StrEnum):
    """What the profiles are ranked by."""

    TOK_S = "tok_s"
    CONTEXT = "context"
    FREE_GPUS = "free_gpus"


@dataclass(frozen=True)
class Wish:
    """What an operator asks for, checked."""

    by: By = By.TOK_S
    choose: int = 1
    min_context_tokens: int = MIN_CONTEXT_TOKENS
    models: tuple[str, ...] = ()
    """Empty: all of them."""
    main: str | None = None


@dataclass(frozen=True)
class Host:
    """What there is to choose from."""

    models: Mapping[str, Model]
    gpus: Sequence[Gpu]
    vllm_version: str
    roles: Sequence[str]
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """serving_engines: names that are taken, ports, parsers."""
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """serving_profiles: names that are taken."""
    observations: Mapping[str, Any] = field(default_factory=dict)
    margin_mib: int = planner.MARGIN_MIB
    tolerance_mib: int = planner.TOLERANCE_MIB


@dataclass(frozen=True)
class Shape:
    """How an engine is spread over its GPUs."""

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
    """A model over some GPUs of one kind with one dtype of the KV cache, planned with the least context asked for."""

    model: str
    gpu: Gpu
    shape: Shape
    kv_cache_dtype: str
    plan: EnginePlan
    calibrated: bool
    """The KV cache is the model's own dtype, or one for which the checkpoint has scales."""
    blocks_of_request: Callable[[int], int]
    """Blocks of the KV cache that a request of so many tokens takes."""
    observed_as: str = ""
    """The engine whose observations are in the plan."""

    @property
    def tok_s(self) -> float:
        """The estimate, as exact as it is shown: what is closer together than that is equal."""
        return round(self.plan.decode_tok_s.mid, 1) if self.plan.decode_tok_s else 0.0

    @property
    def label(self) -> str:
        return f"{self.model} {self.spread}" if self.spread != "tp1" else self.model

    @property
    def spread(self) -> str:
        return f"{self.shape}{'' if self.kv_cache_dtype == 'auto' else f' kv={self.kv_cache_dtype}'}"

    def at_once(self, tokens: int) -> float:
        """Requests of so many tokens that the KV cache holds at once."""
        return self.plan.kv_blocks / self.blocks_of_request(tokens)


@dataclass(frozen=True)
class Engine:
    """A fit with its context and the roles that it serves."""

    fit: Fit
    max_model_len: int
    roles: tuple[str, ...]

    @property
    def at_once(self) -> float:
        return self.fit.at_once(self.max_model_len)

    @property
    def waiting(self) -> int:
        """Roles whose request waits when each of them sends one of full length at the same time."""
        return max(len(self.roles) - int(self.at_once), 0)


@dataclass(frozen=True)
class Profile:
    """Engines that fit beside each other, the main one first."""

    engines: tuple[Engine, ...]
    free_gpus: int

    @property
    def main(self) -> Engine:
        return self.engines[0]

    @property
    def sides(self) -> tuple[Engine, ...]:
        return self.engines[1:]

    @property
    def gpus(self) -> int:
        return sum(engine.fit.shape.gpus for engine in self.engines)

    @property
    def label(self) -> str:
        """Without the context, so profiles that differ by it alone have the same."""
        return " + ".join(engine.fit.label for engine in self.engines)

    @property
    def kind(self) -> tuple[tuple[str, Shape], ...]:
        """What it is whatever its KV cache."""
        return tuple((engine.fit.model, engine.fit.shape) for engine in self.engines)


@dataclass(frozen=True)
class Rejection:
    """Why some shapes of a model are in no profile."""

    model: str
    verdict: str
    shapes: tuple[str, ...]
    reason: str
    """Of the last of the shapes, which is the nearest to what would fit."""

    def __str__(self) -> str:
        over = f" as {', '.join(self.shapes)}" if self.shapes else ""
        return f"{self.model}{over}: {self.verdict}. {self.reason}"


@dataclass(frozen=True)
class Chosen:
    """One profile, as it is written into group_vars."""

    rank: int
    name: str
    serving_engines: Mapping[str, Mapping[str, Any]]
    serving_profiles: Mapping[str, Mapping[str, Any]]
    plan: Plan
    advice: Mapping[str, tuple[str, ...]]
    """By engine: what is right and could be better, or is advised against."""


@dataclass(frozen=True)
class Advice:
    wish: Wish
    host: Host
    mains: tuple[str, ...]
    """Models that the main engine may have."""
    profiles: tuple[Profile, ...]
    """The best first."""
    rejections: tuple[Rejection, ...]
    chosen: Chosen


def wish(
    known_models: Iterable[str],
    *,
    by: Any = By.TOK_S,
    choose: Any = 1,
    min_context: Any = MIN_CONTEXT_TOKENS,
    models: Any = (),
    main: Any = None,
) -> Wish:
    """The variables advise_*, checked. Numbers may be text, as `-e` delivers them. Raises AdviceError."""
    known = sorted(known_models)
    if by not in tuple(By):
        raise AdviceError(f"advise_by: {not_among(by, [choice.value for choice in By])}")
    chosen = _number("advise_choose", choose, 1, "the rank of a profile in the table, 1 is the best")
    tokens = _number(
        "advise_min_context", min_context, CONTEXT_STEP_TOKENS, f"tokens, such as {MIN_CONTEXT_TOKENS} or 32768"
    )
    names = [models] if isinstance(models, str) else list(models or ())
    for name in names:
        if name not in known:
            raise AdviceError(f"advise_models: {shown(name)} is not a key of vllm_models; {nearest(str(name), known)}")
    if main not in (None, "") and main not in (names or known):
        where = "none of advise_models" if main in known else "not a key of vllm_models"
        raise AdviceError(f"advise_main: {shown(main)} is {where}; {nearest(str(main), names or known)}")
    return Wish(By(by), chosen, tokens, tuple(dict.fromkeys(names)), main or None)


def advise(asked: Wish, host: Host, unreadable: Mapping[str, str] | None = None) -> Advice:
    """All feasible profiles of the host, ranked, and the chosen one.

    `unreadable` are models of which nothing is known, each with why. Raises AdviceError where no profile is feasible,
    the chosen one is not there, or what it is ranked by is not known of the GPU; else as planner.plan.
    """
    models = {name: model for name, model in host.models.items() if not asked.models or name in asked.models}
    rejections = [
        Rejection(name, "unknown", (), why)
        for name, why in (unreadable or {}).items()
        if not asked.models or name in asked.models
    ]
    fits, refused = _fits(asked, host, models)
    rejections += refused
    profiles: list[Profile] = []
    mains: tuple[str, ...] = ()
    kinds = _kinds(models)
    for position, kind in enumerate(kinds):
        mains = tuple(name for name in kind if asked.main in (None, name))
        profiles = list(_profiles(asked, host, mains, kinds[position + 1 :], fits)) if mains else []
        if profiles:
            break
    if not profiles:
        raise AdviceError(_nothing(asked, host, rejections))
    if asked.by is By.TOK_S and all(profile.main.fit.plan.decode_tok_s is None for profile in profiles):
        raise AdviceError(
            f"advise_by: 'tok_s' needs the bandwidth of the GPU, which is not known of "
            f"{host.gpus[0].name or f'one with {host.gpus[0].cuda_total_bytes // 2**20:,} MiB'}; write 'context' or "
            f"'free_gpus', or add the GPU to module_utils/vllm_edge/planning/gpu_models.py."
        )
    profiles.sort(key=ORDERS[asked.by])
    if asked.choose > len(profiles):
        raise AdviceError(
            f"advise_choose: {asked.choose}, but {len(profiles)} profiles are feasible; write 1 to {len(profiles)}."
        )
    chosen = _chosen(asked, host, profiles[asked.choose - 1], kinds)
    return Advice(asked, host, mains, tuple(profiles), tuple(rejections), chosen)


# ---- engines -----------------------------------------------------------------------------------------------------


def parameters(model: Model) -> int:
    """Parameters of a checkpoint, whatever its precision, but for a head that is not tied: not every one has it.

    Scales of quantized weights count too, some per cent.
    """
    packed = model.quantization.weight_bits == 4
    return sum(
        _elements(component.tensor.shape)
        * component.tensor.count
        * len(component.tensor.layers or (0,))
        * (BITS_OF_TENSORS.get(component.tensor.dtype, 1) if packed else 1)
        for component in model.components
        if not component.tensor.name.endswith("lm_head.weight")
    )


def _elements(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _kinds(models: Mapping[str, Model]) -> list[tuple[str, ...]]:
    """Models by what they are, whatever their precision; the largest first."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, model in models.items():
        heads = (model.query_heads, model.experts, model.vocabulary)
        found.setdefault((model.family, model.hidden_size, len(model.layers), *heads), []).append(name)
    return sorted(
        (tuple(names) for names in found.values()), key=lambda names: -max(parameters(models[name]) for name in names)
    )


def shapes(gpus: int) -> list[Shape]:
    """Ways to spread an engine over at most so many GPUs, fewer GPUs first."""
    found = [
        Shape(size, stages)
        for size in TENSOR_PARALLEL_SIZES
        for stages in range(1, gpus // size + 1)
        if size * stages <= gpus
    ]
    return sorted(found, key=lambda shape: (shape.gpus, -shape.pipeline_parallel_size))


def _fits(asked: Wish, host: Host, models: Mapping[str, Model]) -> tuple[list[Fit], list[Rejection]]:
    """Every engine that starts with the least context, and why others do not."""
    found: list[Fit] = []
    refused: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, model in models.items():
        if model.max_position_embeddings < asked.min_context_tokens:
            said = f"Its own maximum is {model.max_position_embeddings:,} tokens."
            refused[name, f"advise_min_context {asked.min_context_tokens:,}"] = [("", said)]
            continue
        for gpu, count in Counter(host.gpus).items():
            for shape in shapes(count):
                for fit in _over(name, gpu, shape, asked, host):
                    if fit.plan.verdict is Verdict.FITS:
                        found.append(fit)
                    else:
                        said = f"{fit.plan.reason}{f' It fits with {fit.plan.fix}.' if fit.plan.fix else ''}"
                        refused.setdefault((name, fit.plan.verdict.value), []).append((fit.spread, said))
    rejections = [
        Rejection(name, verdict, tuple(dict.fromkeys(spread for spread, _ in cases if spread)), cases[-1][1])
        for (name, verdict), cases in refused.items()
    ]
    return found, rejections


def _over(name: str, gpu: Gpu, shape: Shape, asked: Wish, host: Host) -> Iterator[Fit]:
    """The engine with each dtype of the KV cache that makes a difference."""
    model = host.models[name]
    seen: set[str] = set()
    for dtype in KV_CACHE_DTYPES:
        engine = _arguments(name, shape, dtype, asked.min_context_tokens)
        arguments = planner.arguments_of(engine)
        resolved = resolved_dtype(model, arguments, host.vllm_version)
        if resolved in seen:
            continue
        seen.add(resolved)
        observed_as, observed = _observed(engine, host)
        plan = planner.plan(
            "",
            [{"name": "engine", **engine, "gpus": list(range(shape.gpus))}],
            host.models,
            [gpu] * shape.gpus,
            host.vllm_version,
            observations={"engine": observed},
            margin_mib=host.margin_mib,
            tolerance_mib=host.tolerance_mib,
        ).engines[0]
        in_flight = batches_in_flight(model, arguments, host.vllm_version) * max_num_batched_tokens(
            model, arguments, host.vllm_version
        )
        found = kv_groups(model, arguments, host.vllm_version) if plan.verdict is Verdict.FITS else ()

        def blocks(tokens: int, found: Any = found, in_flight: int = in_flight) -> int:
            return sum(group.blocks(tokens, in_flight) for group in found)

        own = resolved == model.dtype or resolved == model.quantization.kv_cache_dtype
        yield Fit(name, gpu, shape, dtype, plan, own, blocks, observed_as)
        if plan.verdict in WITHOUT_KV:
            return


def _arguments(model: str, shape: Shape, kv_cache_dtype: str, max_model_len: int) -> dict[str, Any]:
    """An engine as in serving_engines, without what depends on the host."""
    stages = {"pipeline_parallel_size": shape.pipeline_parallel_size} if shape.pipeline_parallel_size > 1 else {}
    return {
        "model": model,
        "tensor_parallel_size": shape.tensor_parallel_size,
        **stages,
        "max_model_len": max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        **({} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}),
    }


def _observed(engine: Mapping[str, Any], host: Host) -> tuple[str, dict[str, int]]:
    """What was observed of an engine of the inventory that is like this one: its name, and the figures that hold.

    Weights and CUDA's context are the same where model and parallelism are; activations and graphs only where the
    batch is, too. Raises ObservationError.
    """
    for name, known in host.engines.items():
        figures = overhead.observed(host.observations, name)
        if not figures or any(known.get(key, 1) != engine.get(key, 1) for key in SAME_WEIGHTS):
            continue
        if any(known.get(key) != engine.get(key) for key in SAME_BATCH) or known.get("enforce_eager"):
            figures = {key: value for key, value in figures.items() if key in ("weights_bytes", "context_bytes")}
        if figures:
            return name, figures
    return "", {}


SAME_WEIGHTS = ("model", "tensor_parallel_size", "pipeline_parallel_size")
SAME_BATCH = ("max_num_seqs", "max_num_batched_tokens")


# ---- profiles ----------------------------------------------------------------------------------------------------


def _profiles(
    asked: Wish, host: Host, mains: Sequence[str], smaller: Sequence[Sequence[str]], fits: Sequence[Fit]
) -> Iterator[Profile]:
    """Every main engine with every choice of engines beside it."""
    beside = [_best_sides(kind, fits) for kind in smaller]
    for main in fits:
        if main.model not in mains:
            continue
        left = Counter(host.gpus)
        left[main.gpu] -= main.shape.gpus
        for sides in _beside(beside, left, len(host.roles) - ROLES_OF_MAIN):
            stay = host.roles[:ROLES_OF_MAIN] if sides else host.roles
            others = tuple(
                Engine(side, _contexts(side, len(roles), asked.min_context_tokens)[0], roles)
                for side, roles in zip(sides, _dealt(host.roles[ROLES_OF_MAIN:], len(sides)), strict=True)
            )
            free = left.total() - sum(side.shape.gpus for side in sides)
            for tokens in _contexts(main, len(stay), asked.min_context_tokens):
                yield Profile((Engine(main, tokens, tuple(stay)), *others), free)


def _best_sides(kind: Sequence[str], fits: Sequence[Fit]) -> list[Fit]:
    """Engines of one kind of model that may be beside another: of each checkpoint the one on the fewest GPUs, and those
    that are faster on more; with the KV cache as the checkpoint has it where that fits."""
    fastest: dict[tuple[str, Gpu], Fit] = {}
    best = []
    for fit in sorted((fit for fit in fits if fit.model in kind), key=lambda fit: (fit.shape.gpus, -fit.tok_s)):
        known = fastest.get((fit.model, fit.gpu))
        if known is None or fit.tok_s > known.tok_s:
            fastest[fit.model, fit.gpu] = fit
            best.append(fit)
    return best


def _beside(kinds: Sequence[Sequence[Fit]], left: Mapping[Gpu, int], most: int) -> Iterator[tuple[Fit, ...]]:
    """Choices of at most so many engines, one of each kind at most, that fit on the GPUs that are left."""
    yield ()
    if most < 1:
        return
    for position, kind in enumerate(kinds):
        for fit in kind:
            if fit.shape.gpus <= left[fit.gpu]:
                rest = {**left, fit.gpu: left[fit.gpu] - fit.shape.gpus}
                for others in _beside(kinds[position + 1 :], rest, most - 1):
                    yield (fit, *others)


def _dealt(roles: Sequence[str], engines: int) -> list[tuple[str, ...]]:
    """Roles of the engines beside the main one: one each, the last has the rest."""
    return [(roles[number],) if number < engines - 1 else tuple(roles[number:]) for number in range(engines)]


def _contexts(fit: Fit, requests: int, least: int) -> tuple[int, ...]:
    """The lengths that are worth offering: for each number of requests up to so many the longest power of two of which
    that many fit at once, most requests first, and the longest that fits at all. A shorter one gains nothing."""
    longest = max(fit.plan.max_context // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, least)
    ladder = [least, *(2**power for power in range(longest.bit_length()) if least < 2**power <= longest)]
    found = []
    for number in range(requests, 0, -1):
        short_enough = sum(fit.at_once(tokens) >= number for tokens in ladder)
        found.append(ladder[max(short_enough - 1, 0)])
    return tuple(dict.fromkeys((*found, longest)))


def _by_speed(profile: Profile) -> tuple[Any, ...]:
    main = profile.main
    return (
        -main.fit.tok_s,
        not main.fit.calibrated,
        main.waiting,
        -main.max_model_len,
        -len(profile.sides),
        -sum(side.fit.tok_s for side in profile.sides),
        -profile.free_gpus,
        -main.at_once,
        profile.label,
    )


def _by_context(profile: Profile) -> tuple[Any, ...]:
    return (-profile.main.max_model_len, *_by_speed(profile))


def _by_free_gpus(profile: Profile) -> tuple[Any, ...]:
    return (-profile.free_gpus, *_by_speed(profile))


ORDERS: Mapping[By, Callable[[Profile], tuple[Any, ...]]] = {
    By.TOK_S: _by_speed,
    By.CONTEXT: _by_context,
    By.FREE_GPUS: _by_free_gpus,
}


def _nothing(asked: Wish, host: Host, rejections: Sequence[Rejection]) -> str:
    """Why no profile is feasible, and what would work."""
    only = f"advise_main: no engine of {asked.main}" if asked.main else "advise_models: no engine of any of the models"
    why = [str(reason) for reason in rejections if asked.main in (None, reason.model)]
    tried = f"advise_min_context is {asked.min_context_tokens:,} tokens: a smaller one, or another model, may do."
    return f"{only} fits on {_gpus(host)} with vLLM {host.vllm_version}. {' '.join(why)} {tried}"


# ---- the chosen one ----------------------------------------------------------------------------------------------


def _chosen(asked: Wish, host: Host, profile: Profile, kinds: Sequence[Sequence[str]]) -> Chosen:
    written: dict[str, dict[str, Any]] = {}
    observations: dict[str, Any] = {}
    ports: list[int] = []
    for engine, slots in zip(profile.engines, _slots(profile, host.gpus), strict=True):
        fit = engine.fit
        arguments = _arguments(fit.model, fit.shape, fit.kv_cache_dtype, engine.max_model_len)
        kind = next(kind for kind in kinds if fit.model in kind)
        ports.append(_port(kind, host, ports))
        place = {"gpus": list(slots), "port": ports[-1], "served_names": list(engine.roles)}
        first = ("model", "tensor_parallel_size", "pipeline_parallel_size")
        described = {
            **{key: arguments.pop(key) for key in first if key in arguments},
            **place,
            **arguments,
            **_dialect(fit.model, host),
        }
        name = _engine_name(engine, described, host)
        written[name] = described
        if fit.observed_as:
            observations[name] = _observed(described, host)[1]
    plan = planner.plan(
        "advised",
        [{"name": name, **engine} for name, engine in written.items()],
        host.models,
        host.gpus,
        host.vllm_version,
        observations=observations,
        margin_mib=host.margin_mib,
        tolerance_mib=host.tolerance_mib,
    )
    name = _profile_name(profile, list(written), host)
    main = profile.main
    profiles = {
        name: {
            "engines": list(written),
            "when": f"Advised by {asked.by.value}, number {asked.choose}, {main.fit.model} with {main.max_model_len:,} "
            f"tokens on {profile.gpus} GPU{'s' if profile.gpus > 1 else ''}.",
            "source": f"predicted by playbooks/advise.yml for vLLM {host.vllm_version}, not yet run on GPUs",
        }
    }
    advice = {}
    for engine, (written_name, _), planned in zip(profile.engines, written.items(), plan.engines, strict=True):
        advice[written_name] = tuple([*planned.advice, *_own_advice(engine, written_name, host)])
    return Chosen(asked.choose, name, written, profiles, dataclasses.replace(plan, profile=name), advice)


def _slots(profile: Profile, gpus: Sequence[Gpu]) -> list[tuple[int, ...]]:
    """Slots of each engine, the lowest of their kind that are left."""
    left = {gpu: [slot for slot, other in enumerate(gpus) if other == gpu] for gpu in dict.fromkeys(gpus)}
    taken = []
    for engine in profile.engines:
        slots, count = left[engine.fit.gpu], engine.fit.shape.gpus
        taken.append(tuple(slots[:count]))
        left[engine.fit.gpu] = slots[count:]
    return taken


def _port(kind: Sequence[str], host: Host, taken: Sequence[int]) -> int:
    """The port at which the inventory has models of the kind, else the next one."""
    known = [engine.get("port") for engine in host.engines.values() if engine.get("model") in kind]
    return next(port for port in (*known, *PORTS) if isinstance(port, int) and port not in taken)


def _dialect(model: str, host: Host) -> dict[str, Any]:
    """How clients speak to the model: as to an engine of the inventory with it, else with one of its family."""
    names = [name for name, other in host.models.items() if other.family == host.models[model].family]
    for name in (model, *names):
        for engine in host.engines.values():
            if engine.get("model") == name:
                return {key: engine[key] for key in DIALECT if key in engine}
    return {}


DIALECT = ("chat_template", "tool_call_parser", "reasoning_parser")


def _engine_name(engine: Engine, described: Mapping[str, Any], host: Host) -> str:
    """A name that says what it is and is free, or is that of the very same engine of the inventory."""
    fit, shape = engine.fit, engine.fit.shape
    spread = [f"tp{shape.tensor_parallel_size}"] if shape.gpus > 1 else []
    spread += [f"pp{shape.pipeline_parallel_size}"] if shape.pipeline_parallel_size > 1 else []
    base = "-".join([fit.model, *spread])
    tokens = engine.max_model_len
    length = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    longer = f"{base}-{length}{'' if fit.kv_cache_dtype == 'auto' else f'-{fit.kv_cache_dtype}'}"

    def mine(name: str) -> bool:
        known = host.engines.get(name)
        return known is None or {key: known[key] for key in known if key != "vram_budget_mib"} == described

    return _free_name((base, longer), mine)


def _profile_name(profile: Profile, engines: list[str], host: Host) -> str:
    base = "-".join([engines[0], *(side.fit.model for side in profile.sides)])
    return _free_name((base,), lambda name: name not in host.profiles or host.profiles[name].get("engines") == engines)


def _free_name(names: Sequence[str], free: Callable[[str], bool]) -> str:
    numbered = (f"{names[-1]}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(names, numbered) if free(name))


def _own_advice(engine: Engine, name: str, host: Host) -> Iterator[str]:
    """What the planner cannot say, because it follows from the choice."""
    fit = engine.fit
    if not fit.calibrated and fit.plan.kv_cache_dtype.startswith("fp8"):
        yield (
            "the checkpoint has no scales for an FP8 KV cache, and vLLM takes 1.0 (model_executor/layers/quantization/"
            "kv_cache.py): compare answers before you rely on it"
        )
    if engine.waiting and engine.at_once >= FEW_ENOUGH_REQUESTS:
        yield (
            f"the KV cache holds {engine.at_once:.1f} requests of full length: of its {len(engine.roles)} roles "
            f"{engine.waiting} would wait if all sent such requests at once"
        )
    if not _dialect(fit.model, host).get("tool_call_parser"):
        yield (
            f"no engine of serving_engines has a model of family {host.models[fit.model].family}, so tool_call_parser "
            f"and reasoning_parser are yours to add"
        )
    if fit.observed_as and fit.observed_as != name:
        yield f"planned with what plan_observations has of {fit.observed_as}; write the same for {name}"


# ---- the answer --------------------------------------------------------------------------------------------------


def document(advice: Advice) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "by": advice.wish.by.value,
        "min_context": advice.wish.min_context_tokens,
        "main_models": list(advice.mains),
        "profiles": [_row(rank, profile, advice) for rank, profile in enumerate(advice.profiles, 1)],
        "rejected": [
            {
                "model": rejection.model,
                "verdict": rejection.verdict,
                "shapes": list(rejection.shapes),
                "reason": rejection.reason,
            }
            for rejection in advice.rejections
        ],
        "chosen": {
            "rank": advice.chosen.rank,
            "profile": advice.chosen.name,
            "serving_engines": advice.chosen.serving_engines,
            "serving_profiles": advice.chosen.serving_profiles,
            "advice": {name: list(said) for name, said in advice.chosen.advice.items()},
            "plan": render.document(advice.chosen.plan),
        },
    }


def lines(advice: Advice) -> list[str]:
    """The answer for people, at most WIDTH columns."""
    count, host, chosen = len(advice.profiles), advice.host, advice.chosen
    return [
        *_wrapped(
            f"{_gpus(host)}, vLLM {host.vllm_version}: {count} feasible profiles of "
            f"{advice.wish.min_context_tokens:,} tokens or more, ranked by {advice.wish.by.value}. The main engine has "
            f"one of {', '.join(advice.mains)}."
        ),
        "",
        *_table(advice),
        "",
        *_wrapped(NOTES),
        "",
        "rejected:",
        *(line for rejection in advice.rejections for line in _wrapped(f"  {rejection}", "    ")),
        *_wrapped(f"  {NOT_CONSIDERED}", "    "),
        "",
        f"chosen: {chosen.rank} of {count} (advise_choose), {chosen.name}",
        *(
            line
            for planned in chosen.plan.engines
            for line in (
                *_wrapped(f"  {planned.engine}  {planned.verdict.value}: {_figures(planned)}", "    "),
                *(said for text in chosen.advice[planned.engine] for said in _wrapped(f"    advice: {text}", " " * 12)),
            )
        ),
        "",
        *pasted(chosen),
    ]


def pasted(chosen: Chosen) -> list[str]:
    """YAML for group_vars, which is also a file of its own for `-e @FILE`."""
    return [
        "# For group_vars/all/engines.yml. The KV cache gets what is left of each GPU but plan_margin_mib.",
        "serving_engines:",
        *(line for name, engine in chosen.serving_engines.items() for line in _entry(name, engine)),
        "# For group_vars/all/profiles.yml.",
        "serving_profiles:",
        *(line for name, profile in chosen.serving_profiles.items() for line in _entry(name, profile)),
    ]


NOTES = (
    "Every tok/s is an estimate, of one sequence of the main engine at short context: low, mid, high. At once: "
    "requests of full context that its KV cache holds. (n): pieces of advice, shown of the chosen one. kv=: not what "
    "the checkpoint says of its KV cache. Precision is not weighed: what fewer bits cost in answers, only an "
    "evaluation says. The table has the best of each choice of engines; other contexts and KV caches have the ranks "
    "between, and -e format=json has all."
)
NOT_CONSIDERED = (
    "not considered: two engines on one GPU, two engines of one model, an engine over GPUs that are not alike, "
    f"tensor_parallel_size other than {', '.join(map(str, TENSOR_PARALLEL_SIZES))}, max_num_seqs other than "
    f"{MAX_NUM_SEQS}, a smaller model as main engine (advise_main)."
)
COLUMNS = (4, 31, 9, 17, 8, 7)
"""Widths of rank, engines, GPUs, tok/s, context and at once; what is left is the verdict's."""


def _table(advice: Advice) -> Iterator[str]:
    yield _columns("rank", "engines, the main one first", "GPUs", "tok/s, estimate", "context", "at once", "verdict")
    yield _columns("", "", "used/free", "low-  mid- high", "tokens", "", "(advice)")
    seen: set[Any] = set()
    for rank, profile in enumerate(advice.profiles, 1):
        if rank != advice.chosen.rank and (profile.kind in seen or len(seen) >= ROWS):
            continue
        seen.add(profile.kind)
        row = _row(rank, profile, advice)
        speed = row["tok_s_estimate"]
        label, *more = textwrap.wrap(profile.label, COLUMNS[1], subsequent_indent="  ", break_on_hyphens=False)
        yield _columns(
            f"{'>' if rank == advice.chosen.rank else ''}{rank}",
            label,
            f"{row['gpus_used']}/{row['gpus_free']}",
            f"{speed['low']:.1f}-{speed['mid']:5.1f}-{speed['high']:5.1f}" if speed else "not known",
            f"{row['context']:,}",
            f"{row['max_concurrency']:.1f}",
            f"{row['verdict']} ({len(row['advice'])})",
        )
        for line in more:
            yield _columns("", line).rstrip()
    kinds = {profile.kind for profile in advice.profiles}
    if len(kinds) > len(seen):
        yield f"      ... and {len(kinds) - len(seen)} more choices of engines (-e format=json)"


def _columns(*cells: str) -> str:
    left = (1,)
    parts = [
        cell.ljust(width) if number in left else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, COLUMNS, strict=False))
    ]
    return "  ".join([*parts, *cells[len(COLUMNS) :]])


def _row(rank: int, profile: Profile, advice: Advice) -> dict[str, Any]:
    main = profile.main
    speed = main.fit.plan.decode_tok_s
    return {
        "rank": rank,
        "engines": [
            {
                "model": engine.fit.model,
                "tensor_parallel_size": engine.fit.shape.tensor_parallel_size,
                "pipeline_parallel_size": engine.fit.shape.pipeline_parallel_size,
                "kv_cache_dtype": engine.fit.plan.kv_cache_dtype,
                "max_model_len": engine.max_model_len,
                "max_concurrency": round(engine.at_once, 2),
                "served_names": list(engine.roles),
                "tok_s_estimate": dataclasses.asdict(engine.fit.plan.decode_tok_s)
                if engine.fit.plan.decode_tok_s
                else None,
            }
            for engine in profile.engines
        ],
        "gpus_used": profile.gpus,
        "gpus_free": profile.free_gpus,
        "tok_s_estimate": dataclasses.asdict(speed) if speed else None,
        "context": main.max_model_len,
        "max_concurrency": round(main.at_once, 2),
        "verdict": main.fit.plan.verdict.value,
        "advice": [text for engine in profile.engines for text in _advice_of(engine, advice)],
    }


def _advice_of(engine: Engine, advice: Advice) -> list[str]:
    """The planner's, with the context that the engine has in place of the one that it was planned with, and ours."""
    plan = engine.fit.plan
    planned = context_advice(advice.wish.min_context_tokens, plan.max_concurrency)
    kept = [text for text in plan.advice if text not in planned]
    return [*kept, *context_advice(engine.max_model_len, engine.at_once), *_own_advice(engine, "", advice.host)]


def _figures(planned: EnginePlan) -> str:
    speed = planned.decode_tok_s
    fast = f"{speed.mid:.1f} tok/s (estimate: {speed.low:.1f} to {speed.high:.1f}), " if speed else ""
    return (
        f"{fast}{planned.max_concurrency:.1f} requests of full context at once, KV cache {planned.kv_cache_dtype}. "
        f"{planned.reason}"
    )


def _entry(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {_yaml(name)}:"
    for key, value in values.items():
        yield f"    {key}: {_yaml(value)}"


PLAIN = re.compile(r"[A-Za-z0-9](?:[\w .,()/-]*[\w.)])?")
NOT_TEXT = re.compile(r"[\d_.+-]+(?:e[-+]?\d+)?|0[xob].*|y|n|yes|no|on|off|true|false|null|\d{4}-\d.*", re.IGNORECASE)


def _yaml(value: Any) -> str:
    """A value on one line. Texts are quoted where YAML would take them for something else."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and not NOT_TEXT.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _gpus(host: Host) -> str:
    kinds = Counter((gpu.name or f"GPU of {gpu.cuda_total_bytes // 2**20:,} MiB") for gpu in host.gpus)
    return " and ".join(f"{count} x {name}" for name, count in kinds.items())


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _number(variable: str, value: Any, least: int, what: str) -> int:
    """A whole number, which may have come as text."""
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"\d+", text) or int(text) < least:
        raise AdviceError(f"{variable}: {shown(value)} is not {what}; write a whole number from {least} on.")
    return int(text)
