# SPDX-License-Identifier: Apache-2.0
"""Names that Ansible, systemd, Docker and this program share: units, labels, users."""

from __future__ import annotations

import re

ENGINE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
LABEL_ENGINE = "vllm-edge.engine"
LABEL_GENERATION = "vllm-edge.generation"
LABEL_INPUT_HASH = "vllm-edge.input-hash"


TARGET = "vllm-edge.target"
SWITCH_UNIT = "vllm-edge-switch.service"


def unit_name(engine: str) -> str:
    return f"vllm-{engine}.service"


ENGINE_USER = "vllm-edge"
