# SPDX-License-Identifier: Apache-2.0
"""Conversion of inventory variables into the types of the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..gpu import models
from ..text import shown
from . import feasibility, planner
from .checkpoint import families, model_facts
from .checkpoint.headers import FactsError
from .checkpoint.inferred import is_approximate
from .contract import Facts, Gpu, Model
from .separate_process import read_in_subprocess

SPEC: dict[str, Any] = {
    "models": {"type": "dict", "required": True},
    "gpus": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "name": {"type": "str"},
            "cuda_total_bytes": {"type": "int"},
            "nvml_total_mib": {"type": "int"},
            "nvml_reserved_mib": {"type": "int"},
            "compute_capability": {"type": "str"},
            "bandwidth_gb_s": {"type": "float"},
            "free_bytes": {"type": "int"},
        },
    },
    "vllm_version": {"type": "str", "required": True},
    "weights_root": {"type": "path", "default": "/data/vllm/weights"},
    "facts": {"type": "str", "choices": ["files", "recorded"], "default": "files"},
    "recorded": {"type": "dict", "default": {}},
    "observations": {"type": "dict", "default": {}},
    "margin_mib": {"type": "int", "default": planner.MARGIN_MIB},
    "tolerance_mib": {"type": "int", "default": planner.TOLERANCE_MIB},
}
"""Options that the modules of the planner share; the documentation fragment `planning` describes them."""


def facts_of(
    model: Mapping[str, Any], weights_root: Path, facts: str, records: Mapping[str, Any] | None = None
) -> Facts | None:
    """Return the facts of the checkpoint of an entry of vllm_models; None if there are neither files nor a record.

    Files below weights_root are preferred, unless `facts` of the entry, or the argument if it has none, is `recorded`.
    Raises FactsError if the files are damaged.

    Args:
        records: plan_recorded_facts, the inventory's own records by repository.
    """
    repo = str(model.get("repo", ""))
    directory = weights_root / str(model.get("dir", ""))
    if model.get("facts", facts) == "files" and model.get("dir") and (directory / "config.json").is_file():
        revision = str(model.get("revision") or "")
        found = read_in_subprocess(str(directory), lambda: model_facts.read(directory, repo, revision))
        if not is_approximate(found.source):
            return found
        return model_facts.recorded(repo, records) or found
    return model_facts.recorded(repo, records)


def read_model(
    name: str,
    options: Mapping[str, Any],
    warn: Callable[[str], None],
    fetch: Callable[[Mapping[str, Any]], Facts | None] = lambda model: None,
) -> Model:
    """Interpret the checkpoint of a key of vllm_models. Raises as `facts_of` and `families.interpret` do.

    Args:
        options: those of SPEC.
        warn: called with a sentence if the checkpoint brings code of its own.
        fetch: called with the entry where there are neither files nor a record.
    """
    root, model = Path(options["weights_root"]), options["models"][name]
    facts = facts_of(model, root, options["facts"], options["recorded"]) or fetch(model)
    if facts is None:
        repo, directory = model.get("repo"), root / str(model.get("dir", ""))
        raise FactsError(
            f"vllm_models.{name}: {directory} does not exist here, and nothing is recorded of {repo or 'it'}. Record "
            f"its facts once, from its files or from a hub: ansible-playbook playbooks/record_facts.yml"
        )
    return interpret(facts, warn)


def interpret(facts: Facts, warn: Callable[[str], None]) -> Model:
    if warning := families.warn_of_code(facts):
        warn(warning)
    return families.interpret(facts)


def build_gpu(where: str, given: Mapping[str, Any], warn: Callable[[str], None]) -> Gpu:
    """Return a GPU with CUDA's total.

    Raises ValueError if its memory is neither given nor known by its name, its compute capability cannot be read, or
    another maker than NVIDIA made it.

    Args:
        where: what is given, such as `gpus[0]`, for messages.
        warn: called with a sentence about each thing that has to be estimated or is left open.
    """
    written = given.get("name") or ""
    name = models.find_by_short_name(written) or written
    if name not in models.GPU_MODELS and models.OTHER_MAKERS.search(written):
        raise ValueError(
            f"{where}: {shown(written)} is no GPU of NVIDIA; vllm-edge installs and serves on NVIDIA's GPUs only, and "
            f"its plans are for them: those of another maker take other kernels and other memory."
        )
    nvml, reserved = given.get("nvml_total_mib"), given.get("nvml_reserved_mib")
    if not name and nvml == models.L4_TOTAL_MIB:
        name = models.L4
    model = models.GPU_MODELS.get(name)
    stated, bandwidth = given.get("compute_capability"), given.get("bandwidth_gb_s")
    capability = None if stated in (None, "") else models.parse_capability(stated)
    total = given.get("cuda_total_bytes")
    if total is None:
        total = int(_find_cuda_mib(where, name, nvml, reserved, warn) * 2**20)
    if model and capability and capability != model.compute_capability:
        known = ".".join(map(str, model.compute_capability))
        warn(f"{where}: the plan takes the compute capability {stated}; {name} is known for {known}.")
    gpu = Gpu(name, total, given.get("free_bytes"), capability, bandwidth * 1e9 if bandwidth else None)
    if gpu.compute_capability is None:
        warn(
            f"{where}: the compute capability of {name or 'this GPU'} is not known, so the plan cannot say whether it "
            f"runs what not every GPU does: an FP8 KV cache, MXFP4, FP8 of ModelOpt. Write what `nvidia-smi "
            f"--query-gpu=compute_cap --format=csv` prints (--compute-capability, gpu_compute_capability)."
        )
    elif gpu.compute_capability < feasibility.LEAST_CAPABILITY:
        warn(
            f"{where}: vLLM's images with CUDA 13 have no kernels for the compute capability {stated}, but from 7.5 on."
        )
    if model and not model.totals_mib:
        warn(
            f"{where}: {name} shares its memory with the processor: the plan takes all that CUDA offers, of which the "
            f"operating system and other programs have a part; gpu_memory_utilization leaves it to them."
        )
    return gpu


def _find_cuda_mib(where: str, name: str, nvml: int | None, reserved: int | None, warn: Callable[[str], None]) -> float:
    """Return the MiB that CUDA offers of a GPU: what was read on such a card, or less if NVML reserves more; if nobody
    has read it, what NVML does not reserve, or an estimate."""
    model = models.GPU_MODELS.get(name)
    sizes = " or ".join(map(str, model.totals_mib)) if model else ""
    if nvml is None:
        if model is None:
            raise ValueError(
                f"{where}: neither cuda_total_bytes nor nvml_total_mib is given, and {shown(name)} is no GPU that the "
                f"planner knows; write one of them."
            )
        if len(model.totals_mib) > 1:
            raise ValueError(
                f"{where}: {name} has {sizes} MiB; write which, as nvidia-smi prints it (--gpu-memory-mib, "
                f"gpu_memory_mib)."
            )
        nvml = (*model.totals_mib, round(model.cuda_mib or 0))[0]
    elif model and model.totals_mib and not any(abs(total - nvml) <= total * 0.07 for total in model.totals_mib):
        warn(f"{where}: the plan takes the memory that is given, {nvml} MiB; {name} is known with {sizes} MiB.")
    offered = [float(nvml - reserved)] if reserved is not None else []
    if model and model.cuda_mib:
        offered.append(model.compute_cuda_mib(nvml))
    if offered:
        return min(offered)
    # No card of the table of which it was read keeps more for its driver.
    reserve = (models.L4_TOTAL_MIB - models.L4_CUDA_MIB) * max(1, nvml / models.L4_TOTAL_MIB)
    total = int(nvml - reserve)
    warn(
        f"{where}: what CUDA can use of {nvml} MiB is not known for {name or 'this GPU'}; the plan assumes {total} "
        f"MiB, as if the driver reserved as much as on an L4, or more of a larger memory."
    )
    return total
