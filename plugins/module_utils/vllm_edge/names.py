# SPDX-License-Identifier: Apache-2.0
"""Names that Ansible, systemd, Docker and this program have to agree on: units, container labels, the engines' user."""

from __future__ import annotations

import re

ENGINE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Names of engines, clients and cases: lower-case letters, digits and "-", at most 63 characters."""
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
"""Names of environment variables."""
ENGINE_USER = "vllm-edge"
GATEWAY_USER = "vllm-edge-gateway"
"""User and group of the gateway, the only ones beside root who may open the sockets of engines."""
LABEL_ENGINE = "vllm-edge.engine"
"""Container label: name of the engine. A container that carries it was created by vllm-edge."""
LABEL_GENERATION = "vllm-edge.generation"
"""Container label: number of the generation in which this configuration of the engine first appeared."""
LABEL_INPUT_HASH = "vllm-edge.input-hash"
"""Container label: hash over everything that makes up the container (`generation.build.input_hash`)."""
LABEL_SIDECAR = "vllm-edge.companion"
"""Container label: purpose of a container that runs beside an engine for a while (`trials.sidecar`)."""
TEMPORARY_CLIENT = "bench"
"""Client of the gateway that exists while the benchmark runs; operators give no client this name."""
EXPORTER_USER = "vllm-edge-exporter"
"""User and group of the exporter of metrics, which reads nothing but what `run-facts` wrote for it."""
TARGET = "vllm-edge.target"
SWITCH_UNIT = "vllm-edge-switch.service"
GATEWAY_UNIT = "vllm-edge-gateway.service"
FACTS_UNIT = "vllm-edge-facts.service"
EXPORTER_UNIT = "vllm-edge-exporter.service"
EXPORTER_SOCKET = "vllm-edge-exporter.socket"


def unit_name(engine: str) -> str:
    return f"vllm-{engine}.service"


def engine_name(unit: str) -> str:
    """Return the engine that a unit named as `unit` belongs to; an engine of that name need not exist."""
    return unit.removeprefix("vllm-").removesuffix(".service")
