# SPDX-License-Identifier: Apache-2.0
"""Access to the Docker Engine for a switch: the containers of the host, image ids, and killing a container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..names import LABEL_ENGINE, LABEL_INPUT_HASH
from .docker import Container, ContainerGone, DockerEngine


@dataclass(frozen=True)
class Listed:
    """One container, running or not, as `docker ps --all` lists it."""

    id: str
    name: str
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[tuple[str, int], ...] = ()
    """Published ports, as (address on this host, port)."""

    @property
    def engine(self) -> str | None:
        """Name of the engine that the container belongs to; None if vllm-edge did not create it."""
        return self.labels.get(LABEL_ENGINE)

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def input_hash(self) -> str | None:
        return self.labels.get(LABEL_INPUT_HASH)


class HostDocker(Protocol):
    """The calls that a switch makes. Every one may raise DockerAway or DockerRefused."""

    def ping(self, timeout_s: float) -> None:
        """Check that Docker answers within `timeout_s` seconds."""
        ...

    def find(self, name: str) -> Container | None:
        """Return the container with this name or full id; None if there is none."""
        ...

    def listed(self) -> list[Listed]:
        """Return all containers, running or not."""
        ...

    def image_id(self, name: str) -> str | None:
        """Return the id of an image; None if the host does not have it."""
        ...

    def kill(self, container_id: str) -> None:
        """Send SIGKILL to the container."""
        ...

    def remove(self, container_id: str) -> None:
        """Remove the container and its anonymous volumes, by force."""
        ...


def listed_of(entry: Mapping[str, Any]) -> Listed:
    """Convert one entry of Docker's list of containers."""
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
    """The implementation, through Docker's API. The methods are documented in `HostDocker`."""

    def listed(self) -> list[Listed]:
        return [listed_of(entry) for entry in self._call("docker ps", lambda c: c.containers(all=True))]

    def kill(self, container_id: str) -> None:
        self._call("docker kill", lambda c: c.kill(container_id))

    def image_id(self, name: str) -> str | None:
        try:
            return str(self._call(f"docker image inspect {name}", lambda c: c.inspect_image(name))["Id"])
        except ContainerGone:
            return None
