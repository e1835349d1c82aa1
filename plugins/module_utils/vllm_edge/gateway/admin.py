# SPDX-License-Identifier: Apache-2.0
"""HAProxy's admin socket: replaces maps at run time, and takes servers away and brings them back."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..text import shown
from .names import find_link, name_server

ANSWER_BYTES = 32 * 1024 * 1024
TIMEOUT_S = 5.0
CHUNK_BYTES = 8_000
"""Bytes of entries in one command: HAProxy refuses a command that does not fit into its buffer, 16 KiB by default."""
MAINTENANCE = 0x01
"""SRV_ADMF_FMAINT of HAProxy's srv_admin_state: an operator, or we, took the server away."""


class GatewayDown(Exception):
    """Nothing answers on the admin socket. That is no failure: the gateway reads the files when it starts."""


class GatewayRefused(Exception):
    """HAProxy did not do what it was told. The text has its answer."""


class AdminSocket:
    """The admin socket at a path. Every command is a connection of its own and takes TIMEOUT_S at most."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def ask(self, command: str) -> str:
        """Send a command and return the answer without surrounding lines. Raises GatewayDown."""
        deadline = time.monotonic() + self._timeout_s
        answer = bytearray()
        try:
            # The gateway's user may write the directory: pin what is there, and never follow a link of it.
            place = os.open(self._path, os.O_PATH | os.O_NOFOLLOW)
            try:
                if not stat.S_ISSOCK(os.fstat(place).st_mode):
                    raise OSError("it is no socket")
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(self._timeout_s)
                    connection.connect(f"/proc/self/fd/{place}")
                    connection.sendall(f"{command}\n".encode())
                    while part := connection.recv(65_536):
                        answer += part
                        left = deadline - time.monotonic()
                        if left <= 0 or len(answer) > ANSWER_BYTES:
                            raise OSError("the answer does not end")
                        connection.settimeout(left)
            finally:
                os.close(place)
        except OSError as error:
            raise GatewayDown(f"{self._path}: {error.strerror or error or 'no answer'}.") from error
        return answer.decode("utf-8", "replace").strip("\n")

    def _order(self, command: str, expected: str = "") -> re.Match[str]:
        """Send a command. Raises GatewayRefused unless the answer matches the pattern `expected`."""
        answer = self.ask(command)
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
        """Replace all entries of a map at once. Raises GatewayDown, GatewayRefused."""
        version = self._order(f"prepare map {path}", r"New version created: (\d+)")[1]
        for chunk in split_entries(entries):
            self._order(f"add map @{version} {path} <<\n{chunk}")
        self._order(f"commit map @{version} {path}")

    def set_entry(self, path: Path, key: str, value: str) -> None:
        """Change one entry; key and value have no blanks. Raises GatewayDown, GatewayRefused."""
        self._order(f"set map {path} {key} {value}")

    def read_servers(self) -> dict[str, bool]:
        """Return whether each server that a link leads to is away, by `name_link`. Raises GatewayDown."""
        rows = [line.split() for line in self.ask("show servers state").splitlines()]
        return {
            link: bool(int(row[6]) & MAINTENANCE)
            for row in rows
            if len(row) > 6 and row[6].isdigit() and (link := find_link(row[1], row[3])) is not None
        }

    def set_away(self, link: str, away: bool) -> None:
        """Take the server of a link away, or bring it back. Raises GatewayDown, GatewayRefused."""
        self._order(f"set server {name_server(link)} state {'maint' if away else 'ready'}")


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
