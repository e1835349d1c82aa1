# SPDX-License-Identifier: Apache-2.0
"""Docker as a switch needs it, beside what one supervisor asks: all containers at once, and the id of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..names import LABEL_ENGINE, LABEL_INPUT_HASH
from .docker import Container, ContainerGone, DockerEngine


@dataclass(frozen=True)
class Listed:
    """One container, running or not, as a list of them shows it."""

    id: str
    name: str
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[tuple[str, int], ...] = ()
    """Published ports with the address of this host that they are on."""

    @property
    def engine(self) -> str | None:
        """The engine of ours that it is, or was."""
        return self.labels.get(LABEL_ENGINE)

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def input_hash(self) -> str | None:
        return self.labels.get(LABEL_INPUT_HASH)


class HostDocker(Protocol):
    """Every call raises DockerAway or DockerRefused."""

    def ping(self, timeout_s: float) -> None: ...

    def find(self, name: str) -> Container | None: ...

    def listed(self) -> list[Listed]: ...

    def image_id(self, name: str) -> str | None: ...

    def kill(self, container_id: str) -> None: ...

    def remove(self, container_id: str) -> None: ...


def listed_of(entry: Mapping[str, Any]) -> Listed:
    """One entry of Docker's answer."""
    names = entry.get("Names") or [entry["Id"][:12]]
    return Listed(
        id=entry["Id"],
        name=str(names[0]).lstrip("/"),
        state=str(entry.get("State", "")),
        labels=dict(entry.get("Labels") or {}),
        ports=tuple(
            sorted(
                {
                    (str(port.get("IP", "")), int(port["PublicPort"]))
                    for port in entry.get("Ports") or []
                    if port.get("PublicPort")
                }
            )
        ),
    )


class DockerHost(DockerEngine):
    """The real thing."""

    def listed(self) -> list[Listed]:
        return [listed_of(entry) for entry in self._call("docker ps", lambda c: c.containers(all=True))]

    def kill(self, container_id: str) -> None:
        self._call("docker kill", lambda c: c.kill(container_id))

    def image_id(self, name: str) -> str | None:
        """None where the image is not on this host."""
        try:
            return str(self._call(f"docker image inspect {name}", lambda c: c.inspect_image(name))["Id"])
        except ContainerGone:
            return None
