# SPDX-License-Identifier: Apache-2.0
"""Data types for generations: a generation, the committed one, its limits, and differences on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..engine.config import CONFIG_FILE, CONTAINER_FILE, CREATE_FILE, Engine
from ..gpu.budget import Foreign


@dataclass(frozen=True)
class SeenEngine:
    """State of one engine according to systemd and Docker."""

    name: str
    active_state: str
    """systemd's ActiveState: `active`, `activating`, `deactivating`, `failed`, `inactive`, ..."""
    sub_state: str
    """systemd's SubState: `running`, `start`, `auto-restart`, ..."""
    running_input_hash: str | None
    """Label of the running container; None if none is running."""


@dataclass(frozen=True)
class Limits:
    """Timeouts of the phases of a switch in seconds, and the number of generations to keep (role vllm_engine)."""

    drain_timeout_s: float = 30.0
    free_timeout_s: float = 60.0
    healthy_timeout_s: float = 1800.0
    canary_timeout_s: float = 120.0
    hook_timeout_s: float = 30.0
    keep_generations: int = 5


Purpose = Literal["serving", "calibration"]
"""What a generation is for. A calibration is started, measured and left again; it is never committed."""


@dataclass(frozen=True)
class Generation:
    """One generation, `generations/<number>/` on the host; `store.load` reads and checks it."""

    number: int
    profile: str
    digest: str
    """SHA-256 of everything in it except its number and creation time: two generations with the same digest are the
    same.
    """
    created_at: str
    directory: Path
    engines: Mapping[str, Engine]
    budgets_mib: Mapping[str, int]
    """By GPU UUID, for every GPU of the host; 0 if no engine may use it."""
    foreign: Foreign = "warn"
    """What happens if processes that are not ours use a GPU: nothing, a warning or a failure."""
    limits: Limits = field(default_factory=Limits)
    quality: Mapping[str, Any] | None = None
    """The quality gate of a switch: `gate` (`warn` or `fail`), `cases` as the inventory has them, `repeats` and
    `timeout_s`. None if a switch asks no questions."""
    purpose: Purpose = "serving"
    early: bool = True
    """Whether, in a switch to it, clients reach each engine as soon as that is verified (`serving_switch_early`)."""

    @property
    def returns_early(self) -> bool:
        """Not where the engines are only measured, or are asked a suite at the end, which needs them for itself."""
        return self.early and self.purpose == "serving" and not self.quality

    @property
    def hashes(self) -> dict[str, str]:
        return {name: engine.config.input_hash for name, engine in self.engines.items()}

    @property
    def marks(self) -> dict[str, dict[str, object]]:
        """By engine the labels of its container: `input_hash`, and the `generation` in which that first appeared."""
        return {
            name: {"input_hash": engine.config.input_hash, "generation": engine.config.generation}
            for name, engine in self.engines.items()
        }

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Engines by served name, several where it has replicas, in the order of their names."""
        found: dict[str, tuple[str, ...]] = {}
        for name, engine in sorted(self.engines.items()):
            for served in engine.config.served_names:
                found[served] = (*found.get(served, ()), name)
        return found


@dataclass(frozen=True)
class FileChange:
    path: str
    before: str | None
    """Content on the host; None if the file does not exist."""
    after: str | None
    """Content in the generation; None if the file must not exist."""
    attributes: str = ""
    """Mode or owner if they differ, such as `mode 0777, wanted 0644`."""


FORMAT = 1
"""Version of the format of generation.json."""


Origin = Literal["inventory", "-e", "host"]
"""Who can have chosen a profile: the inventory, `-e` on the command line of Ansible, or an operator on the host."""


class GenerationError(Exception):
    """A generation cannot be read or written; the text says which, why, and what to do."""


@dataclass(frozen=True)
class CommittedEngine:
    input_hash: str
    generation: int
    """Number in the container's label: the generation in which this input hash first appeared."""


@dataclass(frozen=True)
class Choice:
    origin: Origin = "host"
    inventory_profile: str | None = None
    """Profile of the inventory at that time; None if the inventory was not involved."""
    asked_by: str | None = None
    """Who asked, for example `site.yml by alice`; only the journal of the switch keeps it."""
    gap: bool = False
    """Whether this host may leave its names although no other host of the fleet serves them."""


@dataclass(frozen=True)
class Committed:
    """Content of active-profile.json: which generation the host is committed to."""

    profile: str
    generation: int
    digest: str
    engines: Mapping[str, CommittedEngine]
    origin: Origin = "inventory"
    """Who chose the profile."""
    inventory_profile: str | None = None
    """Profile of the inventory at that time; None if the inventory was not involved."""
    chosen_at: str = ""
    previous_generation: int | None = None
    over_budget: bool = False
    """Whether it was committed although its engines use more than their budgets."""
    verified: tuple[int, ...] = ()
    """Generations that a switch verified and committed within their budgets, by the time of their last commit. Empty
    in records of before; `switch.history.list_verified` knows more."""


MODE = 0o644
STORED_MODE = 0o640
"""Mode of files that may hold what only root should read: those of a generation, container.json and docker-create."""
DIRECTORY_MODE = 0o750
"""Mode of the directories of a generation."""
CHAT_FILE = "chat-template.jinja"
ENGINE_FILES = (CONFIG_FILE, CONTAINER_FILE, CREATE_FILE, CHAT_FILE)
MARK = "role vllm_engine of vllm-edge"
"""Text in the header of every unit file that vllm-edge renders."""
