# SPDX-License-Identifier: Apache-2.0
"""Reading a host without changing it: files below a root directory, and what programs print.

Needs Python alone, so that it works on a host that has no driver and nothing of vllm-edge yet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .systemd import Ran, Run, Systemd, SystemdError, Unit, run_command

ASK_S = 30.0
MEMINFO = Path("/proc/meminfo")
SOCKET = "unix:///var/run/docker.sock"
"""Docker's, where the engines run."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Unread:
    """Stands for a fact that could not be read, and says why. It is neither good nor bad."""

    why: str


def run_in_english(command: Sequence[str], timeout_s: float) -> Ran:
    """Run a program with English output, also from the sbin directories. Raises SystemdError.

    `docker` asks the daemon that `DockerEngine` asks, whatever context the user has chosen.
    """
    environment = {
        **{"DOCKER_HOST": SOCKET, **os.environ},
        **{"LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{PATH}"},
    }
    return run_command(command, timeout_s, environment)


@dataclass(frozen=True)
class HostReader:
    """A host below a directory. Tests give another directory, and programs of their own."""

    root: Path = Path("/")
    run: Run = run_in_english

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | Unread:
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return Unread(f"/{path.lstrip('/')}: {error.strerror or error}")

    def plain(self, path: str) -> str:
        """Return the text of a file without surrounding white space; empty if it cannot be read."""
        text = self.text(path)
        return "" if isinstance(text, Unread) else text.strip()

    def demand(self, *command: str) -> Ran:
        """Run a command for at most ASK_S seconds. Raises SystemdError."""
        return self.run(command, ASK_S)

    def ask(self, *command: str) -> Ran | Unread:
        try:
            return self.demand(*command)
        except SystemdError as error:
            return Unread(str(error))

    def units(self, *names: str) -> dict[str, Unit] | Unread:
        try:
            return Systemd(self.run).show(names)
        except SystemdError as error:
            return Unread(str(error))

    def unit(self, name: str) -> Unit | Unread:
        found = self.units(name)
        return found if isinstance(found, Unread) else found[name]


def available_bytes(path: Path = MEMINFO) -> int:
    """Return the memory that the kernel could provide without swapping (MemAvailable); 0 if it does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
