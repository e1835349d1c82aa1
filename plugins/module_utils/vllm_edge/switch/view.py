# SPDX-License-Identifier: Apache-2.0
"""What the phases of a switch see of the host: its clock, units, containers and the states of its engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ..answers.checks import Ask
from ..engine.config import EngineConfig, EngineConfigError, load_config
from ..engine.state import EngineState, Failure, read_state, stamp
from ..generation.live import is_engine_unit
from ..gpu.owners import Owner, find_owners
from ..names import engine_name
from ..paths import HostPaths
from ..system.docker import (
    Container,
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    docker_unit,
    explain_unreachable_docker,
)
from ..system.http import request
from ..system.nvml import NvmlSession, open_nvml
from ..system.systemd import Systemd, SystemdError, Unit
from .model import PhaseFailed

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DOCKER_PATIENCE_S = 60.0
SYSTEMD_PATIENCE_S = 30.0
"""systemd does not answer for a while during a daemon-reload or while it re-executes itself."""
PING_S = 3.0
POLL_S = 0.5
OpenNvml = Callable[[], AbstractContextManager[NvmlSession]]
Owners = Callable[[Iterable[int]], Mapping[int, Owner]]


@dataclass
class HostView:
    """The host that this program runs on. What lies outside of the program is a field, so that tests can replace it."""

    paths: HostPaths
    systemd: Systemd = field(default_factory=Systemd)
    docker: DockerEngine = field(default_factory=DockerEngine)
    docker_unit: Callable[[], DockerUnit | None] = docker_unit
    nvml: OpenNvml = open_nvml
    owners: Owners = find_owners
    ask: Ask = request
    clock: Callable[[], float] = time.monotonic
    """Seconds that never jump; all durations and deadlines use it."""
    sleep: Callable[[float], None] = time.sleep
    known_failures: dict[str, Failure | None] = field(default_factory=dict)
    """The last failure of each engine, as its supervisor recorded it before `start`, for `healthy`."""

    def stamp(self) -> str:
        """Return the wall clock, for people only."""
        return stamp()

    def boot_id(self) -> str:
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError as error:
            raise PhaseFailed(f"{BOOT_ID} cannot be read: {error}. Is /proc mounted?") from error

    def going_down(self) -> bool:
        try:
            return self.systemd.going_down()
        except SystemdError:
            return False

    def show_units(self, names: Iterable[str]) -> dict[str, Unit]:
        """Show units, retrying for SYSTEMD_PATIENCE_S while systemd reloads."""
        wanted = list(names)
        deadline = self.clock() + SYSTEMD_PATIENCE_S
        while True:
            try:
                return self.systemd.show(wanted)
            except SystemdError as error:
                if self.clock() >= deadline:
                    raise PhaseFailed(
                        f"{error}. Nothing can be started or stopped without it: look at 'systemctl status'."
                    ) from error
            self.sleep(POLL_S)

    def list_containers(self, patience_s: float = DOCKER_PATIENCE_S) -> list[Container]:
        """List all containers, waiting for a Docker Engine that is being restarted."""
        deadline = self.clock() + patience_s
        while True:
            problem = explain_unreachable_docker(self.docker.ping, self.docker_unit(), PING_S)
            if problem is None:
                try:
                    return self.docker.listed()
                except (DockerAway, DockerRefused) as error:
                    problem = str(error)
            if self.clock() >= deadline:
                raise PhaseFailed(
                    f"The Docker Engine did not answer for {patience_s:.0f} s ({problem}): it is not known "
                    "which engines run, and none can start. 'systemctl status docker.service docker.socket' shows why; "
                    "'systemctl start docker.service' starts it, then switch again."
                )
            self.sleep(POLL_S)

    def find_engine_units(self) -> set[str]:
        """Return the engines whose unit is loaded and whose unit file says that this project wrote it."""
        try:
            loaded = self.systemd.loaded("vllm-*.service")
        except SystemdError as error:
            raise PhaseFailed(f"{error}. Nothing can be started or stopped without it.") from error
        found: set[str] = set()
        for name, unit in self.show_units(loaded).items():
            engine = engine_name(name)
            # Without a unit file, only a container or a directory of ours can still name the engine.
            with contextlib.suppress(OSError):
                text = Path(unit.fragment).read_text(encoding="utf-8", errors="replace") if unit.fragment else ""
                found |= {engine} if is_engine_unit(text, engine) else set()
        return found

    def load_configs(self, engines: Iterable[str]) -> list[EngineConfig]:
        """Load the configurations of live engines, leaving out those that cannot be read."""
        configs = []
        for name in engines:
            with contextlib.suppress(EngineConfigError):
                configs.append(load_config(name, self.paths))
        return configs

    def read_state(self, engine: str) -> EngineState | None:
        return read_state(self.paths.engine_state(engine))

    def read_last_failure(self, engine: str) -> Failure | None:
        state = self.read_state(engine)
        return state.last_failure if state else None
