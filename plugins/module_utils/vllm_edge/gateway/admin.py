# SPDX-License-Identifier: Apache-2.0
"""HAProxy's command line: replaces maps at run time, takes servers away, brings them back, and says what it reaches.

Everything goes through the socket of the master. A reload leaves the former worker with its connections, and with maps
of its own, until these have ended; only the master reaches it then.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..system.sockets import pin
from ..system.systemd import Systemd, SystemdError
from ..text import shown
from .names import find_link, name_server

ANSWER_BYTES = 32 * 1024 * 1024
TIMEOUT_S = 5.0
RELOAD_S = 2.0
"""Seconds for which a master may refuse connections while it reads its configuration and maps."""
CHUNK_BYTES = 8_000
"""Bytes of entries in one command: HAProxy refuses a command that does not fit into its buffer, 16 KiB by default."""
MAINTENANCE = 0x01
"""SRV_ADMF_FMAINT of HAProxy's srv_admin_state: an operator, or we, took the server away."""
STOPPED = 0
"""SRV_ST_STOPPED of HAProxy's srv_op_state: the health check reaches nobody."""


class GatewayDown(Exception):
    """Nothing answers on the socket. Whether that is a failure, systemd's state of the unit says."""


class GatewayRefused(Exception):
    """HAProxy did not do what it was told. The text has its answer."""


class Server(NamedTuple):
    away: bool
    """Whether it was taken away."""
    up: bool
    """Whether HAProxy reaches the engine, which it does not ask while the server is away."""


class Check(NamedTuple):
    up: bool
    result: str
    """Of the last check, as HAProxy's `check_status` has it, such as `L4TOUT`."""


@dataclass(frozen=True)
class Worker:
    """A worker of HAProxy, reached by the socket of its master. Each command takes TIMEOUT_S at most."""

    path: Path
    pid: int

    def ask(self, command: str) -> str:
        """Send a command and return the answer without surrounding lines. Raises GatewayDown."""
        answer = ask_master(self.path, f"@!{self.pid} {command}")
        if answer.startswith("Can't find the target PID"):
            raise GatewayDown(f"The worker {self.pid} has ended.")
        return answer

    def _order(self, command: str, expected: str = "") -> re.Match[str]:
        """Send a command. Raises GatewayRefused unless the answer matches the pattern `expected`."""
        answer = self.ask(command)
        if expected and not answer:
            raise GatewayDown(f"The worker {self.pid} ended in the middle of a command.")
        found = re.fullmatch(expected, answer)
        if found is None:
            raise GatewayRefused(f"HAProxy answers {shown(answer)} to {shown(command.splitlines()[0])}.")
        return found

    def read_map(self, path: Path) -> dict[str, str] | None:
        """Return the entries of a map that HAProxy uses; None if it uses no such map. Raises GatewayDown."""
        answer = self.ask(f"show map {path}")
        if answer.startswith("Unknown map identifier"):
            return None
        lines = (line.split(" ", 2) for line in answer.splitlines() if line.startswith("0x"))
        return {words[1]: words[2] if len(words) > 2 else "" for words in lines if len(words) > 1}

    def replace_map(self, path: Path, entries: Mapping[str, str]) -> None:
        version = self._order(f"prepare map {path}", r"New version created: (\d+)")[1]
        for chunk in split_entries(entries):
            self._order(f"add map @{version} {path} <<\n{chunk}")
        self._order(f"commit map @{version} {path}")

    def set_entry(self, path: Path, key: str, value: str) -> None:
        """Change one entry; key and value have no blanks. Raises GatewayDown, GatewayRefused."""
        self._order(f"set map {path} {key} {value}")

    def read_servers(self) -> dict[str, Server]:
        """Return the state of each server that a link leads to, by `name_link`. Raises GatewayDown."""
        rows = [line.split() for line in self.ask("show servers state").splitlines()]
        return {
            link: Server(bool(int(row[6]) & MAINTENANCE), int(row[5]) != STOPPED)
            for row in rows
            if len(row) > 6 and row[5].isdigit() and row[6].isdigit() and (link := find_link(row[1], row[3]))
        }

    def read_checks(self, prefix: str) -> dict[tuple[str, str], Check]:
        """Return the last check of each server, by backend and server, of the backends whose names begin with `prefix`.

        Raises GatewayDown.
        """
        rows = csv.DictReader(self.ask("show stat -1 4 -1").removeprefix("# ").splitlines())
        return {
            (row["pxname"], row["svname"]): Check(row["status"].startswith("UP"), row["check_status"].lstrip("* "))
            for row in rows
            if row["pxname"].startswith(prefix) and None not in row.values()
        }

    def set_away(self, link: str, away: bool) -> None:
        self._order(f"set server {name_server(link)} state {'maint' if away else 'ready'}")


@dataclass(frozen=True)
class HAProxy:
    """The gateway's HAProxy: its unit, and the socket of its master."""

    unit: str
    path: Path
    systemd: Systemd = field(default_factory=Systemd)

    def list_workers(self) -> list[Worker]:
        """Return the worker that takes connections, and those that reloads have left with theirs. Raises GatewayDown.

        While a reload replaces the master nobody listens, so the worker that has read the files comes first afterwards.
        """
        deadline = time.monotonic() + RELOAD_S
        while True:
            try:
                text = ask_master(self.path, "show proc")
                break
            except GatewayDown as error:
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)
        rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
        workers = [Worker(self.path, int(row[0])) for row in rows if row[1:2] not in ([], ["master"])]
        if not workers:
            raise GatewayDown(f"{self.path}: no worker is there.")
        return workers

    def is_stopped(self) -> bool:
        """Return whether systemd says that it does not run, or will read its files at the start that is under way.

        Raises GatewayDown: systemd does not say.
        """
        try:
            return self.systemd.show([self.unit])[self.unit].active_state not in ("active", "reloading")
        except SystemdError as error:
            raise GatewayDown(f"{self.path} does not answer, and {error}.") from error

    def reload(self) -> bool:
        """Put a new worker in front; return False where a reload is under way, whose own end may be what calls this.

        Raises SystemdError.
        """
        if self.systemd.show([self.unit])[self.unit].active_state != "active":
            return False
        self.systemd.reload(self.unit)
        return True


def end_worker(pid: int) -> bool:
    """End a worker that a reload has left, with its connections; return whether that was allowed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def ask_master(path: Path, command: str) -> str:
    """Send a command to the socket of a master and return the answer, within TIMEOUT_S. Raises GatewayDown."""
    deadline = time.monotonic() + TIMEOUT_S
    answer = bytearray()
    try:
        with pin(path) as place, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(place)
            connection.sendall(f"{command}\n".encode())
            connection.shutdown(socket.SHUT_WR)  # the master hangs up after the last command
            while part := connection.recv(65_536):
                answer += part
                left = deadline - time.monotonic()
                if left <= 0 or len(answer) > ANSWER_BYTES:
                    raise OSError("the answer does not end")
                connection.settimeout(left)
    except OSError as error:
        raise GatewayDown(f"{path}: {error.strerror or error or 'no answer'}.") from error
    return answer.decode("utf-8", "replace").strip("\n")


def split_entries(entries: Mapping[str, str], most: int = CHUNK_BYTES) -> Iterator[str]:
    """Yield the entries as lines, in parts of at most `most` bytes; a longer entry is a part of its own."""
    part = ""
    for key, value in sorted(entries.items()):
        line = f"{key} {value}\n"
        if part and len(part.encode()) + len(line.encode()) > most:
            yield part
            part = ""
        part += line
    if part:
        yield part
