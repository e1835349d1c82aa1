# SPDX-License-Identifier: Apache-2.0
"""Generations for tests: engines as Ansible renders them, and hosts on which they are stored, committed and live."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.vllm_edge.generation import build, committed, live, model, store
from ansible.module_utils.vllm_edge.generation.build import EngineFiles, Rendered
from ansible.module_utils.vllm_edge.generation.model import Choice, Origin
from ansible.module_utils.vllm_edge.paths import HostPaths
from engine_files import CAGE

UUIDS = [f"GPU-f52a6b98-d1e7-5b3c-a05f-38c2d471000{slot}" for slot in range(4)]
MANIFEST = "m1"


def engine(name: str = "e2b", port: int = 8070, chat: str | None = None, note: str = "", **config: Any) -> EngineFiles:
    """Files of an engine; `note` is one more argument of vLLM, and so makes another input hash."""
    container = [f"--name=vllm-{name}", f"--label=vllm-edge.engine={name}", *CAGE, "vllm-edge/vllm:1"]
    container += [f"/models/{name}", "--served-model-name", name, *([note] if note else [])]
    unit = f"# Managed by Ansible, {model.MARK}\n[Service]\nExecStart=/usr/local/bin/vllm-edge run-engine {name}\n"
    written: dict[str, Any] = {
        "engine": name,
        "unit": f"vllm-{name}.service",
        "container": f"vllm-{name}",
        "url": f"http://127.0.0.1:{port}",
        "served_names": [name],
        "model": name,
        "repo": f"google/{name}",
        "revision": "main",
        "precision": "bf16",
        "tensor_parallel_size": 1,
        "gpus": UUIDS[:1],
        "port": port,
        "image": "vllm-edge/vllm:1",
        "image_id": "sha256:11",
        "vram_budget_mib": 20900,
        "stop_timeout_s": 30,
        "stall_timeout_s": 300,
        "health_timeout_s": 5,
        **config,
    }
    return EngineFiles(container, unit, written, chat, build.input_hash(container, unit, written, chat, MANIFEST))


def rendered(*engines: EngineFiles, profile: str = "p", **more: Any) -> Rendered:
    by_name = {str(item.config["engine"]): item for item in engines}
    wants = " ".join(f"vllm-{name}.service" for name in by_name)
    budgets = dict.fromkeys(UUIDS, 0)
    for item in engines:
        budgets |= dict.fromkeys(item.config["gpus"], item.config["vram_budget_mib"])
    return Rendered(profile, by_name, f"[Unit]\nWants={wants}\n", **{"budgets_mib": budgets, **more})


def put(paths: HostPaths, value: Rendered) -> int:
    """Store a generation as the module does."""
    number = store.choose_number(value.digest, paths)
    now = committed.committed(paths)
    staged = store.stage(paths)
    store.write_directory(staged, store.documents(value, number, now, "2026-11-21T16:40:00Z"))
    store.put(staged, number, paths)
    return number


def activate(
    paths: HostPaths, value: Rendered, origin: Origin = "inventory", chosen_at: str = "2026-11-21T16:41:00Z"
) -> int:
    """Store, install and commit a generation, as a switch would have left it."""
    number = put(paths, value)
    generation = store.load(paths, number)
    live.install(generation, paths, generation.engines, target=True)
    committed.commit(generation, paths, Choice(origin, value.profile), chosen_at)
    return number
