# SPDX-License-Identifier: Apache-2.0
"""A generation as a value: engines, limits, the files of it that differ on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..engine.config import Engine


@dataclass(frozen=True)
class SeenEngine:
    """An engine of ours as systemd and Docker show it."""

    name: str
    active_state: str
    """systemd's ActiveState: `active`, `activating`, `deactivating`, `failed`, `inactive`, ..."""
    sub_state: str
    """systemd's SubState: `running`, `start`, `auto-restart`, ..."""
    running_input_hash: str | None
    """Label of the container that runs; None without one."""


@dataclass(frozen=True)
class Limits:
    """Patience of each phase, in seconds, as the generation states it (role vllm_engine)."""

    drain_timeout_s: float = 30.0
    free_timeout_s: float = 60.0
    healthy_timeout_s: float = 1800.0
    canary_timeout_s: float = 120.0
    hook_timeout_s: float = 30.0
    keep_generations: int = 5


@dataclass(frozen=True)
class Generation:
    """`generations/<number>/` as a value; `generations.load` reads and checks it."""

    number: int
    profile: str
    digest: str
    """SHA-256 of what it says but for its number: two generations with one digest are the same."""
    created_at: str
    directory: Path
    engines: Mapping[str, Engine]
    budgets_mib: Mapping[str, int]
    """By GPU UUID, every GPU of the host; 0 where no engine may be."""
    foreign: Literal["ignore", "warn", "fail"] = "warn"
    limits: Limits = field(default_factory=Limits)

    @property
    def hashes(self) -> dict[str, str]:
        """Input hash by engine."""
        return {name: engine.config.input_hash for name, engine in self.engines.items()}

    @property
    def roles(self) -> dict[str, str]:
        """Engine by served name."""
        return {served: name for name, engine in self.engines.items() for served in engine.config.served_names}


@dataclass(frozen=True)
class FileChange:
    """A live file that is not what the generation says. `before` or `after` None: absent."""

    path: str
    before: str | None
    after: str | None
    attributes: str = ""
    """Mode or owner where only they differ: `mode 0777, wanted 0644`."""


FORMAT = 1


Foreign = Literal["ignore", "warn", "fail"]
Origin = Literal["inventory", "-e", "host"]
ORIGINS: tuple[Origin, ...] = ("inventory", "-e", "host")


class GenerationError(Exception):
    """A generation cannot be read or written; the text says which, why, and what would do."""


@dataclass(frozen=True)
class CommittedEngine:
    """One engine of the committed generation."""

    input_hash: str
    generation: int
    """The number in its label: of the generation in which this input hash came."""


@dataclass(frozen=True)
class Committed:
    """active-profile.json."""

    profile: str
    generation: int
    digest: str
    engines: Mapping[str, CommittedEngine]
    origin: Origin = "inventory"
    """Who chose the profile."""
    inventory_profile: str | None = None
    """What the inventory said when it was chosen; None where nobody asked it."""
    chosen_at: str = ""
    previous_generation: int | None = None

    @property
    def hashes(self) -> dict[str, str]:
        return {name: engine.input_hash for name, engine in self.engines.items()}


MODE = 0o644
DIRECTORY_MODE = 0o755
CONFIG_FILE = "engine.json"
CREATE_FILE = "docker-create"
CHAT_FILE = "chat-template.jinja"
ENGINE_FILES = (CONFIG_FILE, CREATE_FILE, CHAT_FILE)
MARK = "role vllm_engine of vllm-edge"
