# SPDX-License-Identifier: Apache-2.0
"""Where the host keeps what: one place, so that tests (and a curious operator) can point the program elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ETC = "/etc/vllm-edge"
STATE = "/var/lib/vllm-edge"
UNITS = "/etc/systemd/system"


@dataclass(frozen=True)
class HostPaths:
    """The trees the program reads and writes."""

    etc: Path = Path(ETC)
    state: Path = Path(STATE)
    units: Path = Path(UNITS)

    def engine_dir(self, engine: str) -> Path:
        return self.etc / "engines" / engine

    def engine_state(self, engine: str) -> Path:
        return self.state / "engines" / f"{engine}.json"

    def engine_canary(self, engine: str) -> Path:
        """Which run of the engine's container has passed the canary."""
        return self.state / "engines" / f"{engine}.canary.json"

    def unit_file(self, unit: str) -> Path:
        return self.units / unit

    def hook_dir(self, hook: str) -> Path:
        """Executables that a switch runs at its hook points, `before_drain` and `after_commit`."""
        return self.etc / "hooks" / f"{hook}.d"

    def generation_dir(self, number: int) -> Path:
        return self.state / "generations" / str(number)

    @property
    def active_profile(self) -> Path:
        """The committed generation: the one rename that commits a switch is onto this file."""
        return self.state / "active-profile.json"

    @property
    def switch_journal(self) -> Path:
        return self.state / "switch.json"

    @property
    def switch_lock(self) -> Path:
        return self.state / "switch.lock"

    @property
    def history(self) -> Path:
        return self.state / "history"


def host_paths(
    etc: str | None = None,
    state: str | None = None,
    environ: Mapping[str, str] | None = None,
    units: str | None = None,
) -> HostPaths:
    """The option wins over the environment, the environment over the default."""
    env = os.environ if environ is None else environ
    return HostPaths(
        etc=Path(etc or env.get("VLLM_EDGE_ETC") or ETC),
        state=Path(state or env.get("VLLM_EDGE_STATE") or STATE),
        units=Path(units or env.get("VLLM_EDGE_UNITS") or UNITS),
    )
