# SPDX-License-Identifier: Apache-2.0
"""Where the host keeps what: one place, so that tests (and a curious operator) can point the program elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ETC = "/etc/vllm-edge"
STATE = "/var/lib/vllm-edge"


@dataclass(frozen=True)
class HostPaths:
    """The two trees the program reads and writes."""

    etc: Path = Path(ETC)
    state: Path = Path(STATE)

    def engine_dir(self, engine: str) -> Path:
        return self.etc / "engines" / engine

    def engine_state(self, engine: str) -> Path:
        return self.state / "engines" / f"{engine}.json"

    @property
    def active_profile(self) -> Path:
        return self.state / "active-profile.json"


def host_paths(etc: str | None = None, state: str | None = None, environ: Mapping[str, str] | None = None) -> HostPaths:
    """The option wins over the environment, the environment over the default."""
    env = os.environ if environ is None else environ
    return HostPaths(
        etc=Path(etc or env.get("VLLM_EDGE_ETC") or ETC),
        state=Path(state or env.get("VLLM_EDGE_STATE") or STATE),
    )
