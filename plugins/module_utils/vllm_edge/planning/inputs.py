# SPDX-License-Identifier: Apache-2.0
"""Conversion of inventory variables into the types of the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..gpu import models
from . import planner
from .checkpoint import families, model_facts
from .checkpoint.headers import FactsError
from .checkpoint.inferred import is_approximate
from .contract import Facts, Gpu, Model
from .separate_process import read_in_subprocess

UNKNOWN_RESERVE = 1 - 22563 / 23034
"""The fraction of a GPU that the driver keeps on an L4, used for GPUs whose CUDA total was never read."""

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
    name: str, model: Mapping[str, Any], weights_root: Path, facts: str, records: Mapping[str, Any] | None = None
) -> Facts:
    """Return the facts of the checkpoint of an entry of vllm_models.

    Files below weights_root are preferred, unless `facts` of the entry, or the argument if it has none, is `recorded`.
    Raises FactsError if the files are damaged, or there are none and nothing is recorded.

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
    recorded = model_facts.recorded(repo, records)
    if recorded is None:
        raise FactsError(
            f"vllm_models.{name}: {directory} does not exist here, and nothing is recorded of {repo or 'it'}. Record "
            f"its facts once, from its files or from a hub: ansible-playbook playbooks/record_facts.yml"
        )
    return recorded


def read_model(name: str, options: Mapping[str, Any], warn: Callable[[str], None]) -> Model:
    """Interpret the checkpoint of a key of vllm_models. Raises as `facts_of` and `families.interpret` do.

    Args:
        options: those of SPEC.
        warn: called with a sentence if the checkpoint brings code of its own.
    """
    root = Path(options["weights_root"])
    facts = facts_of(name, options["models"][name], root, options["facts"], options["recorded"])
    model = families.interpret(facts)
    if warning := families.warn_of_code(facts):
        warn(warning)
    return model


def build_gpu(slot: int, given: Mapping[str, Any], warn: Callable[[str], None]) -> Gpu:
    """Return a GPU with CUDA's total. Raises ValueError if neither cuda_total_bytes nor nvml_total_mib is given.

    Args:
        warn: called with a sentence if the total has to be estimated.
    """
    written = given.get("name") or ""
    name = models.find_by_short_name(written) or written
    total, nvml = given.get("cuda_total_bytes"), given.get("nvml_total_mib")
    if total is None:
        if nvml is None:
            raise ValueError(f"gpus[{slot}]: neither cuda_total_bytes nor nvml_total_mib is given; write one of them.")
        found = models.by_total(nvml)
        reserved = given.get("nvml_reserved_mib")
        kept = nvml * UNKNOWN_RESERVE if reserved is None else reserved
        total = found[1] if found else int(nvml - kept) * 2**20
        name = name or (found[0] if found else "")
        if found is None and reserved is None:
            warn(
                f"gpus[{slot}]: what CUDA can use of {nvml} MiB is not known for this GPU; the plan assumes "
                f"{total // 2**20} MiB, as if the driver reserved as much as on an L4."
            )
    return Gpu(name, total, given.get("free_bytes"))
