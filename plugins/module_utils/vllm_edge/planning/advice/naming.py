# SPDX-License-Identifier: Apache-2.0
"""Names, ports and slots for the engines of the chosen profile."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import planner
from ..contract import Gpu
from ..feasibility import FEW_ENOUGH_REQUESTS
from .arguments import build_arguments, match_observed
from .model import Chosen, Engine, Host, Profile, Wish

PORTS = range(8050, 8150, 10)


def describe_choice(asked: Wish, host: Host, profile: Profile, kinds: Sequence[Sequence[str]]) -> Chosen:
    """Return the chosen profile as it is written into group_vars, planned on the whole host.

    Args:
        kinds: models that differ only in precision, as `search` groups them.
    """
    written: dict[str, dict[str, Any]] = {}
    observations: dict[str, Any] = {}
    ports: list[int] = []
    for engine, slots in zip(profile.engines, _assign_slots(profile, host.gpus), strict=True):
        fit = engine.fit
        arguments = build_arguments(fit.model, fit.shape, fit.kv_cache_dtype, engine.max_model_len)
        kind = next(kind for kind in kinds if fit.model in kind)
        ports.append(_choose_port(kind, host, ports))
        place = {"gpus": list(slots), "port": ports[-1], "served_names": list(engine.roles)}
        first = ("model", "tensor_parallel_size", "pipeline_parallel_size")
        described = {
            **{key: arguments.pop(key) for key in first if key in arguments},
            **place,
            **arguments,
            **_copy_dialect(fit.model, host),
        }
        name = _name_engine(engine, described, host)
        written[name] = described
        if fit.observed_as:
            observations[name] = match_observed(described, host)[1]
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
    name = _name_profile(profile, list(written), host)
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
        advice[written_name] = tuple([*planned.advice, *list_own_advice(engine, written_name, host)])
    return Chosen(asked.choose, name, written, profiles, dataclasses.replace(plan, profile=name), advice)


def _assign_slots(profile: Profile, gpus: Sequence[Gpu]) -> list[tuple[int, ...]]:
    """Return the slots of each engine: the lowest free ones of its kind of GPU."""
    left = {gpu: [slot for slot, other in enumerate(gpus) if other == gpu] for gpu in dict.fromkeys(gpus)}
    taken = []
    for engine in profile.engines:
        slots, count = left[engine.fit.gpu], engine.fit.shape.gpus
        taken.append(tuple(slots[:count]))
        left[engine.fit.gpu] = slots[count:]
    return taken


def _choose_port(kind: Sequence[str], host: Host, taken: Sequence[int]) -> int:
    """Return the port that the inventory uses for models of this kind, otherwise the next free one."""
    known = [engine.get("port") for engine in host.engines.values() if engine.get("model") in kind]
    return next(port for port in (*known, *PORTS) if isinstance(port, int) and port not in taken)


def _copy_dialect(model: str, host: Host) -> dict[str, Any]:
    """Return how clients talk to the model: as the inventory's engine with it, otherwise with one of its family."""
    names = [name for name, other in host.models.items() if other.family == host.models[model].family]
    for name in (model, *names):
        for engine in host.engines.values():
            if engine.get("model") == name:
                return {key: engine[key] for key in DIALECT if key in engine}
    return {}


DIALECT = ("chat_template", "tool_call_parser", "reasoning_parser")


def _name_engine(engine: Engine, described: Mapping[str, Any], host: Host) -> str:
    """Return a descriptive name that is free, or that of an equal engine of the inventory."""
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

    return _find_free_name((base, longer), mine)


def _name_profile(profile: Profile, engines: list[str], host: Host) -> str:
    base = "-".join([engines[0], *(side.fit.model for side in profile.sides)])
    return _find_free_name(
        (base,), lambda name: name not in host.profiles or host.profiles[name].get("engines") == engines
    )


def _find_free_name(names: Sequence[str], free: Callable[[str], bool]) -> str:
    """Return the first free name, otherwise the last one with a number."""
    numbered = (f"{names[-1]}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(names, numbered) if free(name))


def list_own_advice(engine: Engine, name: str, host: Host) -> Iterator[str]:
    """Yield advice that follows from the choice and that the planner cannot know.

    Args:
        name: the engine's name in the profile, or empty in the table of profiles.
    """
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
    if not _copy_dialect(fit.model, host).get("tool_call_parser"):
        yield (
            f"no engine of serving_engines has a model of family {host.models[fit.model].family}, so tool_call_parser "
            f"and reasoning_parser are yours to add"
        )
    if fit.observed_as and fit.observed_as != name:
        yield f"planned with what plan_observations has of {fit.observed_as}; write the same for {name}"


def describe_gpus(host: Host) -> str:
    """Return for example `4 x NVIDIA L4`."""
    kinds = Counter((gpu.name or f"GPU of {gpu.cuda_total_bytes // 2**20:,} MiB") for gpu in host.gpus)
    return " and ".join(f"{count} x {name}" for name, count in kinds.items())
