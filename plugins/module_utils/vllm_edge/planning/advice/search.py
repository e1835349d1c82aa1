# SPDX-License-Identifier: Apache-2.0
"""Search for the profiles that are feasible on a host with a set of models, and their ranking.

A profile is one main engine, which has the largest model and may have replicas, and beside it at most one engine of
each smaller model on the GPUs that stay free. Engines share no GPU, so the result for an engine depends only on its own
GPUs: each is planned once for each kind of GPU, in however many profiles it is. Tokens per second are the planner's
estimates.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...inventory.replicas import add_defaults
from ...text import describe_invalid_choice, nearest, shown
from .. import planner
from ..contract import EnginePlan, Gpu, Model, Verdict
from ..decode import TOGETHER_CONTEXT_TOKENS, TOGETHER_REQUESTS, estimate_together
from ..fixes import CONTEXT_STEP_TOKENS, TENSOR_PARALLEL_SIZES, Search
from ..memory.kv_cache import count_requests
from ..memory.weights import per_rank
from .choice import build_arguments, describe_choice, match_observed
from .model import (
    MAX_NUM_SEQS,
    MIN_CONTEXT_TOKENS,
    Advice,
    AdviceError,
    By,
    Engine,
    Fit,
    Host,
    NothingFits,
    Profile,
    Rejection,
    Shape,
    Wish,
)

KV_CACHE_DTYPES = ("auto", "fp8", "bfloat16")
"""As they are written in the inventory. Of those that are the same for a checkpoint, the first is used."""
ROLES_OF_MAIN = 2
"""This many roles stay with the main engine if there are others beside it."""
WITHOUT_KV = (Verdict.UNSUPPORTED_ENGINE, Verdict.UNSUPPORTED_SHAPE, Verdict.NOT_FREE, Verdict.OOM_WEIGHTS)
"""Verdicts that another dtype of the KV cache does not change."""
SHOWN_LOST = 3
"""This many of the next choices of engines are shown with the reason why they lost."""
BITS_OF_TENSORS = {"U8": 2, "F4": 1, "I32": 8, "I64": 16}
"""How many 4-bit weights one element of a packed tensor holds, by the tensor's dtype."""


def wish(known_models: Iterable[str], roles: Sequence[str], given: Mapping[str, Any]) -> Wish:
    """Check the variables advise_*. Raises AdviceError if a value is wrong.

    Without max_num_seqs it is MAX_NUM_SEQS, and for the ranking by the speed of several requests also their number.

    Args:
        known_models: keys of vllm_models.
        roles: the roles that min_tok_s may name, and from which these requests come.
        given: options of the module serving_advise; numbers may be text, because `-e` delivers text.
    """
    by, main, max_num_seqs = given.get("by") or By.TOK_S, given.get("main"), given.get("max_num_seqs")
    models, min_context = given.get("only"), given.get("min_context", MIN_CONTEXT_TOKENS)
    known = sorted(known_models)
    if by not in tuple(By):
        raise AdviceError(f"advise_by: {describe_invalid_choice(by, [choice.value for choice in By])}")
    chosen = _parse_number(
        "advise_choose", given.get("choose", 1), 1, "the rank of a profile in the table, 1 is the best"
    )
    tokens = _parse_number(
        "advise_min_context", min_context, CONTEXT_STEP_TOKENS, f"tokens, such as {MIN_CONTEXT_TOKENS} or 32768"
    )
    names = [models] if isinstance(models, str) else list(models or ())
    for name in names:
        if name not in known:
            raise AdviceError(f"advise_models: {shown(name)} is not a key of vllm_models; {nearest(str(name), known)}")
    if main not in (None, "") and main not in (names or known):
        where = "none of advise_models" if main in known else "not a key of vllm_models"
        raise AdviceError(f"advise_main: {shown(main)} is {where}; {nearest(str(main), names or known)}")
    sequences = [] if max_num_seqs in (None, "") else max_num_seqs
    sequences = sequences if isinstance(sequences, list) else str(sequences).split(",")
    counts = [_parse_number("advise_max_num_seqs", text, 1, "a number of requests, such as 16") for text in sequences]
    if not counts:
        counts = [MAX_NUM_SEQS, *([TOGETHER_REQUESTS * len(roles)] if by == By.TOGETHER and len(roles) > 1 else [])]
    return Wish(
        By(by),
        chosen,
        tokens,
        tuple(dict.fromkeys(names)),
        main or None,
        _parse_min_tok_s(given.get("min_tok_s"), roles),
        tuple(dict.fromkeys(counts)),
    )


def advise(asked: Wish, host: Host, unreadable: Mapping[str, str] | None = None) -> Advice:
    """Return all feasible profiles of the host, ranked, and the chosen one. Raises as planner.plan does, and
    AdviceError if no profile is feasible, the chosen rank does not exist, or the GPU's bandwidth is needed and unknown.

    Args:
        unreadable: why models cannot be planned.
    """
    models = {name: model for name, model in host.models.items() if not asked.models or name in asked.models}
    fits, refused = _find_fits(asked, host, models)
    if asked.min_tok_s and fits and all(fit.plan.decode_tok_s is None for fit in fits):
        raise describe_unknown_bandwidth("advise_min_tok_s:", "leave it out", host)
    refused += _list_too_slow(asked, fits)
    mains, profiles = _find_profiles(asked, host, models, fits)
    refused += _list_left_out(asked, host, mains, profiles, fits)
    rejections = [*(Rejection(name, "unknown", (), why) for name, why in (unreadable or {}).items()), *refused]
    if not profiles:
        raise NothingFits(_describe_failure(asked, host, rejections))
    if asked.by in (By.TOK_S, By.TOGETHER) and all(profile.main.fit.plan.decode_tok_s is None for profile in profiles):
        raise describe_unknown_bandwidth(f"advise_by: {asked.by.value!r}", "write 'context' or 'free_gpus'", host)
    profiles.sort(key=lambda profile: tuple(value(profile) for value, _ in ORDERS[asked.by]))
    if asked.choose > len(profiles):
        raise AdviceError(
            f"advise_choose: {asked.choose}, but {len(profiles)} profiles are feasible; write 1 to {len(profiles)}."
        )
    chosen = describe_choice(asked, host, profiles[asked.choose - 1])
    lost = tuple(_explain_lost(asked, profiles))
    return Advice(asked, host, mains, tuple(profiles), tuple(rejections), chosen, lost)


def parameters(model: Model) -> int:
    """Return the number of parameters of a checkpoint, whatever its precision, without a head that is not tied, because
    not every checkpoint has one. Scales of quantized weights count too, which is some per cent."""
    packed = model.quantization.weight_bits == 4
    return sum(
        math.prod(component.tensor.shape)
        * component.tensor.total
        * (BITS_OF_TENSORS.get(component.tensor.dtype, 1) if packed else 1)
        for component in model.components
        if not component.tensor.name.endswith("lm_head.weight")
    )


def group_kinds(models: Mapping[str, Model]) -> list[tuple[str, ...]]:
    """Group models that differ only in precision, the largest first."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, model in models.items():
        heads = (model.query_heads, model.experts, model.vocabulary)
        found.setdefault((model.family, model.hidden_size, len(model.layers), *heads), []).append(name)
    return sorted(
        (tuple(names) for names in found.values()), key=lambda names: -max(parameters(models[name]) for name in names)
    )


def shapes(gpus: int) -> list[Shape]:
    """Return the ways to distribute an engine over at most this many GPUs, fewer GPUs first."""
    found = [
        Shape(size, stages)
        for size in TENSOR_PARALLEL_SIZES
        for stages in range(1, gpus // size + 1)
        if size * stages <= gpus
    ]
    return sorted(found, key=lambda shape: (shape.gpus, -shape.pipeline_parallel_size))


def _find_fits(asked: Wish, host: Host, models: Mapping[str, Model]) -> tuple[list[Fit], list[Rejection]]:
    """Return every engine that starts with the least context, and why others do not."""
    found: list[Fit] = []
    rejections: list[Rejection] = []
    refused: dict[tuple[str, str], list[Fit]] = {}
    for name, model in models.items():
        if model.max_position_embeddings < asked.min_context_tokens:
            said = f"Its own maximum is {model.max_position_embeddings:,} tokens."
            rejections.append(Rejection(name, f"advise_min_context {asked.min_context_tokens:,}", (), said))
            continue
        for gpu, count in Counter(host.gpus).items():
            for shape, sequences in itertools.product(shapes(count), asked.max_num_seqs):
                for fit in plan_fits(name, gpu, shape, sequences, asked, host):
                    if fit.plan.verdict is Verdict.FITS:
                        found.append(fit)
                    else:
                        refused.setdefault((name, fit.plan.verdict.value), []).append(fit)
    for (name, verdict), cases in refused.items():
        last = cases[-1]
        stated = build_arguments(
            name, last.shape, last.kv_cache_dtype, asked.min_context_tokens, last.max_num_seqs, host
        )
        fix = _plan_engine(add_defaults(stated, host.inventory), last.gpu, last.shape, host, Search.SAME_GPUS).fix
        said = f"{last.plan.reason}{f' It fits with {fix}.' if fix else ''}"
        rejections.append(Rejection(name, verdict, tuple(dict.fromkeys(fit.spread for fit in cases)), said))
    return found, rejections


def _plan_engine(engine: Mapping[str, Any], gpu: Gpu, shape: Shape, host: Host, search: Search) -> EnginePlan:
    return planner.plan(
        "",
        [{"name": "engine", **engine, "gpus": list(range(shape.gpus))}],
        host.models,
        [gpu] * shape.gpus,
        host.vllm_version,
        observations={"engine": match_observed(engine, host)[1]},
        margin_mib=host.margin_mib,
        tolerance_mib=host.tolerance_mib,
        search=search,
    ).engines[0]


def plan_fits(name: str, gpu: Gpu, shape: Shape, max_num_seqs: int, asked: Wish, host: Host) -> Iterator[Fit]:
    """Yield the engine with each dtype of the KV cache that makes a difference."""
    seen: set[str] = set()
    for dtype in KV_CACHE_DTYPES:
        stated = build_arguments(name, shape, dtype, asked.min_context_tokens, max_num_seqs, host)
        engine = add_defaults(stated, host.inventory)
        given = (host.models[name], planner.arguments_of(engine), [gpu], host.vllm_version)
        model, arguments, resolved = planner.resolve(*given)
        if resolved in seen:
            continue
        seen.add(resolved)
        observed_as = match_observed(engine, host)[0]
        plan = _plan_engine(engine, gpu, shape, host, Search.NOWHERE)
        about = (model, arguments, host.vllm_version)
        at_once = functools.cache(functools.partial(count_requests, *about, plan.kv_blocks))
        own = resolved in (model.dtype, model.quantization.kv_cache_dtype)
        most = min(max_num_seqs, plan.kv_cache_tokens // TOGETHER_CONTEXT_TOKENS)
        speed = (model, arguments, per_rank(*about), gpu.bandwidth_bytes_per_s, resolved, most, TOGETHER_CONTEXT_TOKENS)
        together = functools.partial(estimate_together, *speed)
        yield Fit(name, gpu, shape, dtype, plan, own, at_once, max_num_seqs, together, observed_as)
        if plan.verdict in WITHOUT_KV:
            return


def _find_profiles(
    asked: Wish, host: Host, models: Mapping[str, Model], fits: Sequence[Fit]
) -> tuple[tuple[str, ...], list[Profile]]:
    kinds = group_kinds(models)
    for position, kind in enumerate(kinds):
        mains = tuple(name for name in kind if asked.main in (None, name))
        if profiles := list(_build_profiles(asked, host, mains, kinds[position + 1 :], fits)):
            return mains, profiles
    return (), []


def _build_profiles(
    asked: Wish, host: Host, mains: Sequence[str], smaller: Sequence[Sequence[str]], fits: Sequence[Fit]
) -> Iterator[Profile]:
    """Yield every main engine, with every number of replicas, and every choice of engines beside it."""
    beside = [_select_best_sides(kind, fits) for kind in smaller]
    for main, replicas in (
        (fit, number)
        for fit in fits
        if fit.model in mains
        for number in range(1, Counter(host.gpus)[fit.gpu] // fit.shape.gpus + 1)
    ):
        left = Counter(host.gpus)
        left[main.gpu] -= main.shape.gpus * replicas
        for sides in _choose_sides(beside, left, len(host.roles) - ROLES_OF_MAIN):
            stay = host.roles[:ROLES_OF_MAIN] if sides else host.roles
            others = tuple(
                Engine(side, _list_contexts(side, len(roles), asked.min_context_tokens)[0], roles)
                for side, roles in zip(sides, _distribute_roles(host.roles[ROLES_OF_MAIN:], len(sides)), strict=True)
            )
            free = left.total() - sum(side.shape.gpus for side in sides)
            if not all(_is_fast_enough(asked, engine.fit, engine.roles) for engine in others):
                continue
            if _is_fast_enough(asked, main, stay):
                for tokens in _list_contexts(main, math.ceil(len(stay) / replicas), asked.min_context_tokens):
                    yield Profile((Engine(main, tokens, tuple(stay), replicas), *others), free)


def _select_best_sides(kind: Sequence[str], fits: Sequence[Fit]) -> list[Fit]:
    """Return the engines of one kind of model that are worth having beside the main one.

    For each checkpoint that is the one on the fewest GPUs, and those on more GPUs that are faster. The KV cache is the
    checkpoint's own if that fits.
    """
    fastest: dict[tuple[str, Gpu], Fit] = {}
    best = []
    mine = (fit for fit in fits if fit.model in kind)
    for fit in sorted(mine, key=lambda fit: (fit.shape.gpus, -fit.tok_s, -fit.max_num_seqs)):
        known = fastest.get((fit.model, fit.gpu))
        if known is None or fit.tok_s > known.tok_s:
            fastest[fit.model, fit.gpu] = fit
            best.append(fit)
    return best


def _choose_sides(kinds: Sequence[Sequence[Fit]], left: Mapping[Gpu, int], most: int) -> Iterator[tuple[Fit, ...]]:
    """Yield choices of at most `most` engines, at most one of each kind, that fit on the GPUs that are left."""
    yield ()
    if most < 1:
        return
    for position, kind in enumerate(kinds):
        for fit in kind:
            if fit.shape.gpus <= left[fit.gpu]:
                rest = {**left, fit.gpu: left[fit.gpu] - fit.shape.gpus}
                for others in _choose_sides(kinds[position + 1 :], rest, most - 1):
                    yield (fit, *others)


def _distribute_roles(roles: Sequence[str], engines: int) -> list[tuple[str, ...]]:
    # One each, and the rest to the last.
    return [(roles[number],) if number < engines - 1 else tuple(roles[number:]) for number in range(engines)]


def _list_contexts(fit: Fit, requests: int, least: int) -> tuple[int, ...]:
    """Return the context lengths that are worth offering.

    For each number of requests up to `requests` it is the longest power of two of which that many fit at once, most
    requests first; then the longest length that fits at all. A shorter one gains nothing.
    """
    longest = max(fit.plan.max_context // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, least)
    ladder = [least, *(2**power for power in range(longest.bit_length()) if least < 2**power <= longest)]
    found = []
    for number in range(requests, 0, -1):
        short_enough = sum(fit.at_once(tokens) >= number for tokens in ladder)
        found.append(ladder[max(short_enough - 1, 0)])
    return tuple(dict.fromkeys((*found, longest)))


def _is_fast_enough(asked: Wish, fit: Fit, roles: Sequence[str]) -> bool:
    # The middle of the estimate: of a mixture of experts, its lowest value is half of that.
    return all(fit.tok_s >= asked.min_tok_s.get(role, 0.0) for role in roles)


def _list_too_slow(asked: Wish, fits: Sequence[Fit]) -> list[Rejection]:
    """Return for each model why none of its engines is fast enough for any role, although it fits."""
    least = min(asked.min_tok_s.values(), default=0.0)
    found = []
    for name in dict.fromkeys(fit.model for fit in fits):
        mine = [fit for fit in fits if fit.model == name]
        fastest = max(mine, key=lambda fit: fit.tok_s)
        if fastest.tok_s < least:
            said = f"Its fastest engine, {fastest.spread}, is estimated to give {fastest.tok_s:.1f} tok/s."
            shapes = tuple(dict.fromkeys(fit.spread for fit in mine))
            found.append(Rejection(name, f"advise_min_tok_s {least:g}", shapes, said))
    return found


def _list_left_out(
    asked: Wish, host: Host, mains: Sequence[str], profiles: Sequence[Profile], fits: Sequence[Fit]
) -> Iterator[Rejection]:
    """Yield for each model that fits and is in no profile why it is not."""
    used = {engine.fit.model for profile in profiles for engine in profile.engines}
    for name in dict.fromkeys(fit.model for fit in fits if profiles and fit.model not in used):
        why = f"It is smaller than {', '.join(mains)}, and no GPUs are left beside them on which it is fast enough."
        if asked.main:
            why = f"The main engine was to have {asked.main}, and this is not a smaller model that fits beside it."
        elif len(host.roles) <= ROLES_OF_MAIN:
            why = f"It is smaller than {', '.join(mains)}, and an engine beside the main one needs a third role."
        yield Rejection(name, "left out", (), why)


def _explain_lost(asked: Wish, profiles: Sequence[Profile]) -> Iterator[tuple[int, str, str]]:
    """Yield the next choices of engines after the chosen profile, each with the first criterion that it lost by."""
    winner = profiles[asked.choose - 1]
    seen = {winner.choice}
    for rank, profile in enumerate(profiles[asked.choose :], asked.choose + 1):
        if profile.choice in seen:
            continue
        seen.add(profile.choice)
        says = next(says for value, says in ORDERS[asked.by] if value(profile) != value(winner))
        yield rank, profile.label, f"{says(profile)}, the chosen one {says(winner)}"
        if len(seen) > SHOWN_LOST:
            return


Criterion = tuple[Callable[[Profile], Any], Callable[[Profile], str]]
"""The sort key of a profile, and what is said of it if that decides."""


def _say_kv_cache(profile: Profile) -> str:
    dtype = profile.main.fit.plan.kv_cache_dtype
    return f"KV cache in {dtype}{'' if profile.main.fit.calibrated else ', which is not the type of the checkpoint'}"


def _say_together(engine: Engine) -> str:
    speed, asked = engine.together, TOGETHER_REQUESTS * len(engine.roles)
    return (
        f"{speed.mid:.1f} tok/s together ({speed.requests} of {asked} requests at once)" if speed else "no known speed"
    )


BY_SPEED: Sequence[Criterion] = (
    (lambda profile: -profile.main.fit.tok_s, lambda profile: f"{profile.main.fit.tok_s:.1f} tok/s"),
    (lambda profile: not profile.main.fit.calibrated, _say_kv_cache),
    (lambda profile: profile.main.waiting, lambda profile: f"{profile.main.waiting} roles that may wait"),
    (lambda profile: -profile.main.max_model_len, lambda profile: f"{profile.main.max_model_len:,} tokens"),
    (lambda profile: -profile.main.fit.max_num_seqs, lambda profile: f"max_num_seqs {profile.main.fit.max_num_seqs}"),
    (lambda profile: -len(profile.others), lambda profile: f"{len(profile.others)} engines beside the main one"),
    (
        lambda profile: -sum(fit.tok_s for fit in profile.others),
        lambda profile: f"{sum(fit.tok_s for fit in profile.others):.1f} tok/s beside the main one",
    ),
    (lambda profile: -profile.free_gpus, lambda profile: f"{profile.free_gpus} free GPUs"),
    (lambda profile: -profile.main.at_once, lambda profile: f"{profile.main.at_once:.1f} requests at once"),
    (lambda profile: profile.label, lambda profile: f"the name {profile.label}"),
)
"""The ranking by tokens per second; later criteria break ties. A replica counts as an engine beside the main one."""
_TOGETHER: Criterion = (
    lambda profile: -(profile.main.together.mid if profile.main.together else 0),
    lambda profile: _say_together(profile.main),
)
ORDERS: Mapping[By, Sequence[Criterion]] = {
    By.TOK_S: BY_SPEED,
    By.CONTEXT: (BY_SPEED[3], *BY_SPEED),
    By.FREE_GPUS: (BY_SPEED[7], *BY_SPEED),
    By.TOGETHER: (BY_SPEED[1], _TOGETHER, *BY_SPEED),
}


def describe_unknown_bandwidth(asked: str, instead: str, host: Host) -> AdviceError:
    """Return the error for what was asked and needs a speed."""
    name = "" if all(gpu.name for gpu in host.gpus) else "set gpu_name to the name that nvidia-smi prints, or "
    return AdviceError(
        f"{asked} needs the bandwidth of the GPU, which is not known of {host.describe_gpus()}; {instead}, or "
        f"{name}give the memory bandwidth of its data sheet in GB/s (gpu_bandwidth_gb_s, --gpu-bandwidth)."
    )


def _describe_failure(asked: Wish, host: Host, rejections: Sequence[Rejection]) -> str:
    only = f"advise_main: no engine of {asked.main}" if asked.main else "advise_models: no engine of any of the models"
    why = [str(reason) for reason in rejections if asked.main in (None, reason.model)]
    if asked.min_tok_s:
        wanted = ", ".join(f"{role} {least:g}" for role, least in asked.min_tok_s.items())
        only = f"advise_min_tok_s ({wanted}): no profile is fast enough for these roles. {only}"
    tried = f"advise_min_context is {asked.min_context_tokens:,} tokens: a smaller one, or another model, may do."
    return f"{only} fits on {host.describe_gpus()} with vLLM {host.vllm_version}. {' '.join(why)} {tried}"


def _parse_number(variable: str, value: Any, least: int, what: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"\d+", text) or int(text) < least:
        raise AdviceError(f"{variable}: {shown(value)} is not {what}; write a whole number from {least} on.")
    return int(text)


def _parse_min_tok_s(value: Any, roles: Sequence[str]) -> dict[str, float]:
    if value in (None, "", {}):
        return {}
    given = value if isinstance(value, Mapping) else dict.fromkeys(roles, value)
    for role, least in given.items():
        where = f"advise_min_tok_s.{role}" if isinstance(value, Mapping) else "advise_min_tok_s"
        if role not in roles:
            raise AdviceError(f"{shown(where)} is no role of serving_roles; {nearest(str(role), sorted(roles))}")
        if isinstance(least, bool) or not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", str(least)):
            raise AdviceError(f"{where}: {shown(least)} is no number of tokens per second, such as 30 or 12.5.")
    return {str(role): float(least) for role, least in given.items()}
