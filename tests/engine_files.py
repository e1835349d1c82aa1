# SPDX-License-Identifier: Apache-2.0
"""Files of one engine in /etc/vllm-edge, as the role writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.vllm_edge.paths import HostPaths

CONFIG: dict[str, Any] = {
    "engine": "e2b",
    "unit": "vllm-e2b.service",
    "container": "vllm-e2b",
    "url": "http://127.0.0.1:8070",
    "served_names": ["sentry"],
    "model": "e2b",
    "repo": "google/gemma-4-E2B-it",
    "revision": "main",
    "precision": "bf16",
    "tensor_parallel_size": 1,
    "gpus": ["GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003"],
    "port": 8070,
    "input_hash": "ab12",
    "generation": 1,
    "image": "vllm-edge/vllm:1",
    "vram_budget_mib": 20900,
    "stop_timeout_s": 30,
    "stall_timeout_s": 300,
    "health_timeout_s": 5,
}
CAGE = ["--user=8050:8050", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
"""Options of `docker create` that every engine has."""
CREATE = [
    "--name=vllm-e2b",
    "--label=vllm-edge.engine=e2b",
    *CAGE,
    "vllm-edge/vllm:1",
    "/models/e2b",
    "--served-model-name",
    "sentry",
]


def written(
    root: Path, config: dict[str, Any] = CONFIG, create: list[str] = CREATE, directory: str = "e2b"
) -> HostPaths:
    target = root / "engines" / directory
    target.mkdir(parents=True)
    (target / "engine.json").write_text(json.dumps(config))
    (target / "container.json").write_text(json.dumps({"arguments": create}))
    return HostPaths(etc=root, state=root / "state")
