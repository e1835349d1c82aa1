# SPDX-License-Identifier: Apache-2.0
"""What a host has measured of its engines: derived from vLLM's log and NVML, kept in observations.json, used by plans.

An observation is valid for one image, one model of GPU and the arguments that affect memory, whatever the engine's
name. The two arguments that only divide the memory, and thus size the KV cache, are not among them: a calibration
starts an engine with a share of the GPU, and the plan pins its KV cache afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..system.records import read_record
from .contract import Arguments
from .memory.overhead import GIB, MIB, ObservationError

AFFECTING = frozenset(
    {field.name for field in fields(Arguments)} - {"gpu_memory_utilization", "kv_cache_memory_bytes"}
) | {"dtype", "extra_args", "extra_env", "limit_mm_per_prompt"}
"""Keys of an engine on which an observation depends; the model's repository is added to them."""
NEEDED: Mapping[str, str] = {
    "model_gib": "Model loading took",
    "kv_cache_gib": "Available KV cache memory",
    "consumed_gib": "Actual usage is",
    "activation_gib": "peak activation",
}
"""Figures of the log (engine/startup.py) without which nothing can be derived, and the words of their lines."""


@dataclass(frozen=True)
class Observation:
    """What was measured of one engine. The figures are those of its fullest rank."""

    engine: str
    image_id: str
    gpu: str
    """Model of its GPUs, as NVML names it."""
    arguments: Mapping[str, Any]
    """See AFFECTING."""
    components: Mapping[str, int]
    """Bytes by component, as in plan_observations."""
    kv_cache_bytes: int
    """What was left for the KV cache of the share that the engine had."""
    nvml_mib: Mapping[str, int]
    """What NVML showed of the engines on each of its GPUs, by UUID."""
    log: Mapping[str, Any]
    """The figures of vLLM's log from which the components were derived."""


@dataclass(frozen=True)
class Host:
    """What an observation has to match besides the arguments."""

    image_id: str
    models: Mapping[str, Mapping[str, Any]]
    gpus: Sequence[str]
    """The names of the GPUs, by slot."""

    def describe_arguments(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: engine[key] for key in sorted(AFFECTING & engine.keys()) if engine[key] is not None}
        return {"model": str(self.models.get(str(engine.get("model")), {}).get("repo", "")), **given}

    def describe_gpus(self, engine: Mapping[str, Any]) -> str:
        return " + ".join(sorted({self.gpus[slot] for slot in engine.get("gpus") or () if slot < len(self.gpus)}))

    def find(self, engine: Mapping[str, Any], known: Iterable[Observation]) -> Observation | None:
        wanted = (self.image_id, self.describe_gpus(engine), self.describe_arguments(engine))
        return next((item for item in known if (item.image_id, item.gpu, item.arguments) == wanted), None)

    def explain_mismatch(self, engine: Mapping[str, Any], item: Observation) -> str:
        """Return in which respect an observation is not one of this engine: the first that differs."""
        if item.image_id != self.image_id:
            return f"it is of image {item.image_id}, and the engine runs {self.image_id}"
        if item.gpu != (gpu := self.describe_gpus(engine)):
            return f"it was made on {item.gpu}, and the engine has {gpu}"
        now = self.describe_arguments(engine)
        changed = [
            f"{key} was {item.arguments.get(key)!r} and is {now.get(key)!r}"
            for key in sorted(item.arguments.keys() | now.keys())
            if item.arguments.get(key) != now.get(key)
        ]
        return ", ".join(changed)


def read(path: Path) -> list[Observation]:
    """Return the observations of a host; none if nothing was observed yet. Raises ObservationError."""
    try:
        return [read_record(Observation, item) for item in json.loads(path.read_text(encoding="utf-8"))["observations"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ObservationError(
            f"{path} cannot be used: {error}. Remove it; playbooks/calibrate.yml measures the engines again."
        ) from error


def render(observations: Iterable[Observation]) -> str:
    return json.dumps({"observations": [asdict(item) for item in observations]}, indent=2, ensure_ascii=False) + "\n"


def replace_matching(known: Iterable[Observation], new: Sequence[Observation]) -> list[Observation]:
    keys = [(item.image_id, item.gpu, item.arguments) for item in new]
    return [item for item in known if (item.image_id, item.gpu, item.arguments) not in keys] + list(new)


def merge(
    given: Mapping[str, Any], known: Sequence[Observation], engines: Iterable[Mapping[str, Any]], host: Host
) -> tuple[dict[str, Any], list[str]]:
    """Return the observations that a plan uses, and one sentence for each engine of which only invalid ones are there.

    Args:
        given: plan_observations, which takes precedence component by component over what the host has measured.
    """
    merged, ignored = dict(given), []
    for engine in engines:
        name = str(engine.get("name"))
        found = host.find(engine, known)
        stated = given.get(name, {})
        if found is not None and isinstance(stated, Mapping):
            merged[name] = {**found.components, **stated}
        elif found is None and (former := [item for item in known if item.engine == name]):
            ignored.append(
                f"The observation of engine {name} is ignored: {host.explain_mismatch(engine, former[-1])}. The plan "
                "predicts its memory until playbooks/calibrate.yml has measured it."
            )
    return merged, ignored


def derive(
    engine: str, log: Mapping[str, Any], nvml: Sequence[Mapping[str, Any]], *, alone: bool
) -> tuple[dict[str, int], int]:
    """Return the components of an engine that ran with a share of the GPU, in bytes, and its KV cache.

    What vLLM's profile finds is all memory since its first snapshot, weights included, and the transient peak of the
    activations; the latter has the estimate for CUDA graphs in it, unless that is switched off (0.32.0
    v1/worker/gpu_worker.py:734-744). The CUDA context is what was taken at the first snapshot, or what NVML shows
    beyond everything else if that is more: libraries also allocate after profiling.

    Args:
        log: the figures of its log, as engine/startup.py reads them.
        nvml: the rows of the VRAM evaluation for its GPUs.
        alone: whether it shares its GPUs with no other engine; otherwise no context_bytes can be derived.

    Raises:
        ObservationError: if a figure is missing from the log.
    """
    if missing := [words for figure, words in NEEDED.items() if figure not in log]:
        raise ObservationError(
            f"The log of engine {engine} has no line with {' and none with '.join(map(repr, missing))}, so nothing "
            f"can be derived from it. Such lines are printed at a start with gpu_memory_utilization and read by this "
            f"release: `systemctl restart vllm-{engine}.service`, and calibrate again."
        )
    kept = 0.0 if log.get("graphs_outside") else log.get("graphs_estimate_gib", 0.0)
    found = {
        "weights_bytes": log["model_gib"],
        "overhead_bytes": log["consumed_gib"] - log["model_gib"] + log["activation_gib"] - kept,
        "graphs_bytes": log.get("graphs_gib", 0.0),
    }
    components = {name: max(round(value * GIB), 0) for name, value in found.items()}
    kv_cache = max(round(log["kv_cache_gib"] * GIB), 0)
    if alone and nvml and all(row["foreign_mib"] == 0 for row in nvml):
        beyond = max(row["engine_mib"] for row in nvml) * MIB - sum(components.values()) - kv_cache
        components["context_bytes"] = max(round(log.get("outside_gib", 0.0) * GIB), beyond, 0)
    return components, kv_cache


def observe(
    engine: Mapping[str, Any], status: Mapping[str, Any], boards: Iterable[Mapping[str, Any]], host: Host
) -> Observation:
    """Return the observation of an engine that serves. Raises ObservationError if it runs another image, or its log
    lacks a figure.

    Args:
        engine: the engine in the inventory.
        status: the engine in `vllm-edge status --format json`.
        boards: `gpus` there.
    """
    name = str(engine["name"])
    if status["container_image_id"] != host.image_id:
        raise ObservationError(
            f"Engine {name} runs image {status['container_image_id']}, which is not {host.image_id}: it was not "
            "started by this calibration. Run it again."
        )
    nvml = [row for row in boards if row["uuid"] in status["gpus"]]
    alone = all(row["container"] in (None, status["container"]) for board in nvml for row in board["processes"])
    components, kv_cache = derive(name, status["log_facts"], nvml, alone=alone)
    return Observation(
        name,
        host.image_id,
        host.describe_gpus(engine),
        host.describe_arguments(engine),
        components,
        kv_cache,
        {row["uuid"]: row["engine_mib"] for row in nvml},
        status["log_facts"],
    )
