# SPDX-License-Identifier: Apache-2.0
"""What is known of a host. Every part that may be hidden from the reader can be an Unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..gpu.access import Access
from ..gpu.driver_facts import Driver
from ..gpu.topology import Topology
from ..system.dpkg import Packages
from ..system.host import Unread
from ..system.systemd import Unit

DEFAULT_SHM_BYTES = 64 * 1024 * 1024
"""Docker's own default of /dev/shm, for a container that states none."""
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)


@dataclass(frozen=True)
class HeldLock:
    """A lock of apt or dpkg that a process holds."""

    path: str
    pid: int
    command: str


@dataclass(frozen=True)
class System:
    name: str
    """As /etc/os-release has it for people."""
    distribution: str
    """ID and VERSION_ID, such as debian-13 and ubuntu-24.04."""
    packages: Packages | Unread
    half_installed: tuple[str, ...]
    dpkg_interrupted: bool | Unread
    locks: tuple[HeldLock, ...] | Unread
    synchronized: bool | Unread
    files_limit: int | Unread | None
    """Open files of a process in a container, by docker.service; None is no limit."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver answers for."""

    uuid: str
    name: str
    bus: str
    persistent: bool | None = None


@dataclass(frozen=True)
class Holder:
    """A process on a GPU."""

    uuid: str
    pid: int
    who: str
    ours: bool


@dataclass(frozen=True)
class Gpus:
    on_bus: Mapping[str, str]
    """PCI addresses of NVIDIA's GPUs, to the kernel driver that has them; empty for none."""
    answering: tuple[Gpu, ...]
    problem: str
    """What nvidia-smi said beside or instead of them; empty where all is well."""
    expected: Mapping[str, str]
    """UUIDs that somebody counts on, to who that is."""
    needed: int
    """How many GPUs the profile takes; 0 where nobody said."""
    holders: tuple[Holder, ...] | Unread


@dataclass(frozen=True)
class Specification:
    """A CDI specification of NVIDIA's GPUs."""

    path: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Runtime:
    docker_version: str
    docker: Unit | Unread
    config: Mapping[str, Any] | Unread
    """daemon.json; empty without one."""
    config_error: str
    """Why daemon.json is no configuration; empty where it is one."""
    refresh: Unit | Unread
    """nvidia-cdi-refresh.path."""
    specifications: tuple[Specification, ...] | Unread
    access: tuple[Access, ...] | Unread
    """What the running containers that have GPUs may use of them."""


@dataclass(frozen=True)
class Image:
    """The engines' image, as the role that made it recorded it."""

    name: str
    cuda: str
    """Version of the CUDA that it is made with; empty where it does not say."""
    driver_branch: str
    """Oldest branch of the driver that this CUDA works with; empty where that is not known."""


@dataclass(frozen=True)
class Space:
    """A file system, by what lies on it."""

    what: str
    path: str
    free_bytes: int
    free_inodes: int | None


@dataclass(frozen=True)
class Engine:
    """An engine that has files on the host."""

    name: str
    unit: Unit
    port: int
    listeners: tuple[str, ...]
    gpus: tuple[str, ...]
    shm_bytes: int | None
    """None: the container has the host's."""
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Serving:
    engines: tuple[Engine, ...] | Unread
    errors: tuple[str, ...]
    """Engines whose files cannot be used, each with the reason."""
    target: Unit | Unread
    unfinished_switch: str
    """What is known of a switch that was killed; empty where there is none."""
    switching: bool = False
    """Whether a switch runs now."""


@dataclass(frozen=True)
class Facts:
    as_root: bool
    system: System
    driver: Driver
    gpus: Gpus
    runtime: Runtime
    image: Image | Unread | None
    """None: no image is recorded."""
    topology: Topology
    spaces: tuple[Space | Unread, ...]
    serving: Serving
