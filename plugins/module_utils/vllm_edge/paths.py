# SPDX-License-Identifier: Apache-2.0
"""Paths of the files and directories that the program reads and writes on the host.

They are kept in one place so that tests and options can point the program at other directories.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ETC = "/etc/vllm-edge"
STATE = "/var/lib/vllm-edge"
UNITS = "/etc/systemd/system"
RUN = "/run/vllm-edge"
GATEWAY_RUN = "/run/vllm-edge-gateway"
EXPORTER_RUN = "/run/vllm-edge-exporter"


@dataclass(frozen=True)
class HostPaths:
    """The directory trees of the program, and the files in them."""

    etc: Path = Path(ETC)
    state: Path = Path(STATE)
    units: Path = Path(UNITS)
    run: Path = Path(RUN)
    """Sockets of the engines, and the links of the gateway to them; the host forgets it at a reboot."""
    gateway_run: Path = Path(GATEWAY_RUN)
    """Sockets of the gateway itself."""
    exporter_run: Path = Path(EXPORTER_RUN)
    """What the exporter of metrics reads, and its socket."""

    def engine_dir(self, engine: str) -> Path:
        """Return the directory of the engine's live files (`engine.json`, `docker-create`, ...)."""
        return self.etc / "engines" / engine

    def engine_state(self, engine: str) -> Path:
        return self.state / "engines" / f"{engine}.json"

    def engine_loads(self, engine: str) -> Path:
        return self.state / "engines" / f"{engine}.loads.json"

    @property
    def read_rates(self) -> Path:
        """The read rates of the disks that hold weights, as they were measured on this host."""
        return self.state / "read-rates.json"

    def engine_canary(self, engine: str) -> Path:
        """Return the file that records which run of the engine's container has passed the canary."""
        return self.state / "engines" / f"{engine}.canary.json"

    def engine_socket(self, engine: str) -> Path:
        """Return the socket on which the engine serves. Its directory is made anew for each container."""
        return self.run / "engines" / engine / "api.sock"

    @property
    def facts(self) -> Path:
        """What `run-facts` has read of the host, from which `run-exporter` makes metrics."""
        return self.exporter_run / "facts.json"

    @property
    def metrics_record(self) -> Path:
        """What only `run-facts` counts, across restarts: Xids and switches."""
        return self.state / "metrics.json"

    @property
    def gateway(self) -> Path:
        return self.etc / "gateway"

    @property
    def gateway_lock(self) -> Path:
        """The lock of whoever changes the gateway's files, where the sandboxed units of the gateway may make it."""
        return self.run / "gateway.lock"

    @property
    def temporary_clients(self) -> Path:
        """Clients of the gateway that a running program made for itself, in the form of `clients.json`."""
        return self.run / "clients.json"

    @property
    def policies(self) -> Path:
        """The directory with the versions of the file by which engines judge requests (engine/policy.py)."""
        return self.etc / "policy"

    @property
    def secrets(self) -> Path:
        """The directory of the engines' secrets; only root may open it."""
        return self.etc / "secrets"

    def secret_file(self, engine: str) -> Path:
        """Return the file of the engine's secrets, which `docker create --env-file` reads."""
        return self.secrets / f"{engine}.env"

    def unit_file(self, unit: str) -> Path:
        return self.units / unit

    def hook_dir(self, hook: str) -> Path:
        """Return the directory of the executables that a switch runs at a hook (`before_drain` or `after_commit`)."""
        return self.etc / "hooks" / f"{hook}.d"

    def generation_dir(self, number: int) -> Path:
        return self.state / "generations" / str(number)

    @property
    def active_profile(self) -> Path:
        """The record of the committed generation. A switch commits by renaming a new version onto this file."""
        return self.state / "active-profile.json"

    @property
    def switch_journal(self) -> Path:
        return self.state / "switch.json"

    @property
    def switch_lock(self) -> Path:
        return self.state / "switch.lock"

    @property
    def bench(self) -> Path:
        return self.state / "bench"

    @property
    def quality(self) -> Path:
        return self.state / "quality"

    @property
    def history(self) -> Path:
        return self.state / "history"


def host_paths(etc: str | None = None, state: str | None = None) -> HostPaths:
    """Return the paths to use: an argument overrides the environment variable, which overrides the default."""
    return HostPaths(
        etc=Path(etc or os.environ.get("VLLM_EDGE_ETC") or ETC),
        state=Path(state or os.environ.get("VLLM_EDGE_STATE") or STATE),
        units=Path(os.environ.get("VLLM_EDGE_UNITS") or UNITS),
        run=Path(os.environ.get("VLLM_EDGE_RUN") or RUN),
        gateway_run=Path(os.environ.get("VLLM_EDGE_GATEWAY_RUN") or GATEWAY_RUN),
        exporter_run=Path(os.environ.get("VLLM_EDGE_EXPORTER_RUN") or EXPORTER_RUN),
    )


def find_interpreter(python: str) -> str:
    """Return the path of an interpreter below the link `current` by its release, as the link may change meanwhile."""
    path = Path(python)
    return str(path.parent.resolve() / path.name)
