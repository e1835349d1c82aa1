# SPDX-License-Identifier: Apache-2.0
"""What a host has of Docker and CDI, and what the role container_runtime decides by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..gpu.access import Access, CannotAsk, look
from ..gpu.driver import GENERATED, STATIC, find_missing_devices, read_specifications
from ..gpu.toolkit import KNOWN_BAD
from ..system import cdi
from ..system.host import Unread
from ..system.systemd import Unit
from .docker_daemon import plan_docker_daemon
from .driver import DriverReader


@dataclass(frozen=True)
class RuntimeState:
    """Docker, the container toolkit and CDI of a host, as the role decides by it. The defaults are a bare host."""

    docker_version: str = ""
    """Empty if there is no Docker Engine."""
    units: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Whether a unit is `enabled` and `active`, by its name; those that do not exist are left out."""
    cdi_devices: Sequence[str] = ()
    """CDI devices of NVIDIA's GPUs."""
    cdi_static: Sequence[str] = ()
    """CDI specifications of NVIDIA's GPUs that somebody made by hand."""
    cdi_stale: str = ""
    """Why the CDI specification has to be made again; empty if it fits the host."""
    docker_source: bool = False
    """Whether the source of Docker's own repository is there, which the role wrote."""
    daemon: Mapping[str, Any] = field(default_factory=dict)
    """What daemon.json becomes, as `plan_docker_daemon` returns it."""
    toolkit_known_bad: Mapping[str, str] = field(default_factory=lambda: dict(KNOWN_BAD))
    """Releases of the container toolkit that do not work, each with the reason."""


@dataclass(frozen=True)
class RuntimeReader(DriverReader):
    """Reads, beside the driver, programs of the container runtime, CDI specifications and the GPUs of containers."""

    def version(self, program: str) -> str:
        ran = self.ask(program, "--version")
        version = re.search(r"version (\d+(?:\.\d+)+)", "" if isinstance(ran, Unread) else ran.out)
        return version[1] if version else ""

    def access(self) -> Access | Unread:
        try:
            return look(self.run, self.root)
        except CannotAsk as error:
            return Unread(str(error))

    def specifications(self) -> dict[str, str] | Unread:
        """Return the text of each CDI specification of NVIDIA's GPUs, by path."""
        try:
            return read_specifications(self.root)
        except OSError as error:
            return Unread(f"{error.filename}: {error.strerror}")

    def read_runtime_state(
        self, units: Iterable[str], source: str, daemon_options: Mapping[str, Any], gpus: Sequence[str], driver: str
    ) -> RuntimeState:
        """Read what the role needs.

        Args:
            units: names of units to look for
            source: path of the source of Docker's own repository
            daemon_options: settings that daemon.json should have
            gpus: UUIDs of the GPUs that answer
            driver: version of the driver that they name; empty if none answers
        """
        texts, seen = self.specifications(), self.units(*units)
        texts = {} if isinstance(texts, Unread) else texts
        version, info = self.version("dockerd"), self.ask("docker", "info", "--format", "{{json .}}")
        text, said = self.text("etc/docker/daemon.json"), "" if isinstance(info, Unread) else info.out
        return RuntimeState(
            docker_version=version,
            units={} if isinstance(seen, Unread) else describe_units(seen),
            cdi_devices=list_devices(texts.values()),
            cdi_static=[path for path in texts if path.startswith(f"/{STATIC}/")],
            cdi_stale=explain_stale(texts, gpus, driver, self.root),
            docker_source=self.at(source).exists(),
            daemon=plan_docker_daemon(
                None if isinstance(text, Unread) else text, daemon_options, version, said, self.root
            ),
        )


def describe_units(units: Mapping[str, Unit]) -> dict[str, dict[str, bool]]:
    return {
        name: {"enabled": unit.starts_at_boot, "active": unit.active_state == "active"}
        for name, unit in units.items()
        if unit.load_state == "loaded"
    }


def list_devices(texts: Iterable[str]) -> list[str]:
    return sorted({f"nvidia.com/gpu={name}" for text in texts for name in cdi.parse_device_names(text)})


def explain_stale(texts: Mapping[str, str], gpus: Sequence[str], driver: str, root: Path) -> str:
    """Return why the CDI specification has to be made again; empty if it fits the host.

    Args:
        texts: the specifications by path
        gpus: UUIDs of the GPUs that answer
        driver: version of the driver; empty if it is not known
        root: of the host's file system
    """
    if missing := find_missing_devices(gpus, texts, root):
        return missing
    if gone := cdi.compare(list_devices(texts.values()), list(gpus))[1]:
        return f"it names {', '.join(gone)}, which the host does not have"
    generated = [text for path, text in texts.items() if path.startswith(f"/{GENERATED}/")]
    versions = sorted({version for text in generated for version in cdi.driver_versions(text)})
    if driver and versions and driver not in versions:
        return f"it was made for driver {', '.join(versions)}, the host has {driver}"
    return ""
