# SPDX-License-Identifier: Apache-2.0
"""The facts about a host that others judge. A part that this user may not be able to read can be an Unread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..answers.canary_command import Result
from ..gateway.certificate import Certificate
from ..gateway.peers import Seen
from ..gpu.access import Access
from ..gpu.budget import Foreign
from ..gpu.topology import Topology
from ..names import ENGINE_USER
from ..system.host import Unread
from ..system.space import Space
from ..system.systemd import Unit
from .dpkg import Packages
from .driver import Driver

DATA = "/data/vllm"
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
    path: str
    pid: int
    command: str


@dataclass(frozen=True)
class System:
    name: str
    """PRETTY_NAME of /etc/os-release."""
    distribution: str
    """ID and VERSION_ID of /etc/os-release, such as debian-13 or ubuntu-24.04."""
    packages: Packages | Unread
    half_installed: tuple[str, ...]
    dpkg_interrupted: bool | Unread
    locks: tuple[HeldLock, ...] | Unread
    synchronized: bool | Unread
    accounts: tuple[str, ...] = ()
    """People of /etc/passwd: users above 1000 with a shell. A directory service may know more."""


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    bus: str
    persistent: bool | None = None


@dataclass(frozen=True)
class Gpus:
    on_bus: Mapping[str, str]
    """Kernel driver by PCI address of NVIDIA's GPUs; empty if no driver has the device."""
    answering: tuple[Gpu, ...]
    problem: str
    """What nvidia-smi printed beside or instead of the GPUs; empty if all is well."""
    expected: Mapping[str, str] | Unread
    """UUIDs that something relies on, and what that is."""
    needed: int
    """How many GPUs the profile needs; 0 if nobody said."""
    others: tuple[str, ...] | Unread
    """Processes on the GPUs that are not of engines, described."""
    nodes: Mapping[str, int] | Unread = field(default_factory=dict)
    """Mode of each device node of the driver, by path."""


@dataclass(frozen=True)
class Runtime:
    docker_version: str
    docker: Unit | Unread
    config: Mapping[str, Any] | Unread
    """The content of daemon.json; empty if there is no such file."""
    config_error: str
    """Why daemon.json is not valid; empty if it is."""
    flags: Mapping[str, Any]
    """Settings on the command line of the dockerd that runs, under their names in daemon.json."""
    in_swarm: bool | Unread
    refresh: Unit | Unread
    """The unit nvidia-cdi-refresh.path."""
    creates_nodes: bool
    """Whether nvidia-cdi-refresh.service creates the device nodes of CUDA."""
    runc_version: str
    specifications: Mapping[str, Sequence[str]] | Unread
    """The devices of each CDI specification of NVIDIA's GPUs, by path."""
    without_uvm: tuple[str, ...]
    """Those of the specifications that do not list the device node of CUDA."""
    access: Access | Unread
    """Which of their GPUs the running containers may use."""
    leftovers: tuple[str, ...] | Unread
    """Names of containers that a killed benchmark or reference answer has left."""


@dataclass(frozen=True)
class Image:
    name: str
    cuda: str
    """Version of the CUDA in the image; empty if the record does not say."""
    driver_branch: str
    """The oldest driver branch that works with this CUDA; empty if it is not known."""


@dataclass(frozen=True)
class Engine:
    name: str
    unit: Unit
    silent: str | Unread
    """Why it does not answer on its socket; empty if it does."""
    gpus: tuple[str, ...]
    shm_bytes: int
    replaced: tuple[str, ...] | Unread = ()
    """Libraries of the distribution that its supervisor has loaded and that were replaced or removed since."""
    accept_risk: tuple[str, ...] = ()
    """Options and environment variables that undo a limit of the engine and that the inventory accepts."""
    cache: tuple[str, ...] | Unread = ()
    """What is wrong with its compile cache: one was set aside, or is too large."""


@dataclass(frozen=True)
class Serving:
    engines: tuple[Engine, ...] | Unread
    errors: tuple[str, ...]
    """Engines whose files cannot be used, each with the reason."""
    target: Unit | Unread
    unfinished_switch: str
    """What is known of a switch that was killed; empty if there is none."""
    switching: bool = False
    unrecorded: str | Unread = ""
    """Why the committed generation is not known; empty if it is."""
    over_budget: str = ""
    """What the last switch that committed said, if that was over its budget."""
    socket_directories: tuple[str, ...] | Unread = ()
    """What is wrong with the directories of the engines' sockets."""
    open_to_others: tuple[str, ...] = ()
    """Sentences on secrets and hooks that others than root could read or change."""


@dataclass(frozen=True)
class Metrics:
    units: tuple[Unit, ...]
    fault: str
    """Why the facts are not new, or the socket is not as it should be; empty if all is well."""


@dataclass(frozen=True)
class Gateway:
    unit: Unit | Unread
    answers: bool
    differences: tuple[str, ...]
    """Maps, links and servers that are not as they should be."""
    problems: tuple[str, ...]
    """What could not be compared, each with a remedy."""
    without_backend: tuple[str, ...]
    """Served names that the configuration does not know."""
    too_few_servers: tuple[str, ...]
    """Served names with more engines than the configuration has servers for; also those that it does not know."""
    port_users: tuple[str, ...]
    """Who listens on port 1 of loopback, which has to refuse the requests that wait."""
    with_tls: bool
    certificate: Certificate | Unread | None
    """None if there is no file."""
    metrics: Metrics | Unread | None = None
    """None if no metrics are served."""


@dataclass(frozen=True)
class Fleet:
    said: Mapping[str, Any]
    """What this host answers to `GET /fleet`, but for the time."""
    certificate: Certificate | Unread | None
    """The one with which it is known to the others; None if there is no file."""
    peers: tuple[Seen, ...] | Unread
    unserved: tuple[str, ...] | Unread
    """Served names that no host of the fleet serves."""


@dataclass(frozen=True)
class Expectation:
    """What the inventory expects of the host. All but the first three are for `doctor --deep`."""

    uuids: Sequence[str] = ()
    gpus: int = 0
    """How many GPUs the profile needs."""
    data: str = DATA
    """Directory of weights and caches."""
    profile: str | None = None
    weights: Sequence[Mapping[str, Any]] = ()
    """`name`, `repo` and `revision` (`main` if absent) of each model; none means those of the engines on the host."""
    group: str = ENGINE_USER
    files: Sequence[Mapping[str, str]] | None = None
    """`path` of each file that the inventory renders, and `how` it differs; None if they were not compared."""
    foreign: Foreign = "warn"
    """Whether processes on the GPUs that are not ours are a problem."""


@dataclass(frozen=True)
class Weights:
    """The weights of one model, all files hashed. Nothing was hashed if the record is not as expected."""

    model: str
    files: int = 0
    size_bytes: int = 0
    revision: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deep:
    expected: Expectation
    status: Mapping[str, Any]
    """The document of `collect`, not judged yet."""
    images: tuple[str, ...]
    """What is wrong with the images of the engines."""
    weights: tuple[Weights, ...]
    canary: Mapping[str, Sequence[Result]]
    """Results of each engine that runs."""
    moved: str = ""
    """That engines stopped or started meanwhile, in words after `because`; empty if they did not."""


@dataclass(frozen=True)
class Facts:
    as_root: bool
    system: System
    driver: Driver
    gpus: Gpus
    runtime: Runtime
    image: Image | Unread | None
    """None if no image is recorded."""
    topology: Topology
    spaces: Mapping[str, Sequence[Space] | Unread]
    """File systems that are written to, by the step."""
    serving: Serving
    gateway: Gateway | Unread | None = None
    """None if the host has no gateway."""
    fleet: Fleet | None = None
    """None if the host is in none, or this cannot be read."""
    deep: Deep | None = None
