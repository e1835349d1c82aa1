# SPDX-License-Identifier: Apache-2.0
"""systemd for a switch: the state of units, and the few commands that it gives.

Everything goes through `systemctl`, which every host has and whose commands an operator can repeat by hand.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..text import printable

TEXTS = {
    "LoadState": "load_state",
    "ActiveState": "active_state",
    "SubState": "sub_state",
    "UnitFileState": "file_state",
    "FragmentPath": "fragment",
    "StatusText": "status_text",
    "Result": "result",
    "InvocationID": "invocation",
}
"""Properties whose text is a field of Unit, and its name."""
PROPERTIES = ("Id", *TEXTS, "NeedDaemonReload", "NRestarts", "MainPID", "Job", "TimeoutStopUSec", "LimitNOFILE")
"""Properties of a unit that `Systemd.show` reads."""
SHOWN = (
    *("Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "WantedBy", "NeedDaemonReload", "StatusText"),
    *("Result", "NRestarts", "InactiveExitTimestamp", "ActiveEnterTimestamp", "StateChangeTimestamp"),
)
"""Properties of a unit that people are shown."""
ASK_S = 20.0
"""Seconds that a query may take."""
KILLED_S = 2.0
"""Seconds that a process may take to end after SIGKILL."""
ORDER_S = 60.0
"""Seconds that a command which changes something may take."""

_SPAN = re.compile(r"(\d{1,20})(y|month|w|d|h|min|s|ms|us)")
_SECONDS = {
    "y": 31_557_600.0,
    "month": 2_629_800.0,
    "w": 604_800.0,
    "d": 86_400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
}


class SystemdError(Exception):
    """systemd could not be queried or refused a command; the text includes systemd's message."""


@dataclass(frozen=True)
class Ran:
    status: int
    out: str = ""
    err: str = ""


class Run(Protocol):
    """Runs a command with a timeout in seconds; raises SystemdError."""

    def __call__(self, command: Sequence[str], timeout_s: float, /) -> Ran: ...


def run_command(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Ran:
    """Run a program and wait until it ends.

    `environment` is None for that of this process. Raises SystemdError: it could not be run or did not end in time.
    """
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
    except (OSError, ValueError) as error:
        raise SystemdError(f"'{command[0]}' cannot be run: {getattr(error, 'strerror', '') or error}") from error
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        # A process in a frozen control group, or in a call of a driver that hangs, survives SIGKILL: never wait for it
        # without a limit, as subprocess.run does.
        _let_be_killed_first(process.pid)
        process.kill()
        try:
            process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            raise SystemdError(
                f"'{' '.join(command)}' did not end within {timeout_s:g} s, and its process {process.pid} cannot be "
                "killed: it is frozen, or hangs in a driver"
            ) from error
        raise SystemdError(f"'{' '.join(command)}' did not end within {timeout_s:g} s") from error
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    return Ran(process.returncode, out, printable(err.strip()))


def _let_be_killed_first(pid: int) -> None:
    """Make the kernel choose a process that cannot be killed now before all others if the memory runs out."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


@dataclass(frozen=True)
class Unit:
    """State of one unit. The defaults are what systemd reports of a unit that it does not know."""

    id: str
    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    file_state: str = ""
    need_daemon_reload: bool = False
    fragment: str = ""
    status_text: str = ""
    result: str = "success"
    restarts: int = 0
    invocation: str = ""
    main_pid: int = 0
    """Process id of its main process; 0 if none runs."""
    job: bool = False
    """Whether a job for the unit is queued or running. A unit about to start is `inactive` until its job runs."""
    stop_timeout_s: float | None = 90.0
    """TimeoutStopSec; None if systemd waits without a limit."""
    files_limit: int | None = None
    """How many files a process of a service may open (LimitNOFILE); None if there is no limit."""

    @property
    def loaded(self) -> bool:
        return self.load_state != "not-found"

    @property
    def starts_at_boot(self) -> bool:
        return self.file_state in ("enabled", "enabled-runtime", "static", "alias", "generated")

    @property
    def auto_restart(self) -> bool:
        return self.active_state == "activating" and self.sub_state.startswith("auto-restart")

    @property
    def down(self) -> bool:
        return self.active_state in ("inactive", "failed") and not self.job


def parse_timespan(text: str) -> float | None:
    """Convert systemd's notation (`1min 30s`) to seconds; None for `infinity`."""
    if text == "infinity":
        return None
    return sum(int(number) * _SECONDS[unit] for number, unit in _SPAN.findall(text))


def build_unit(shown: Mapping[str, str]) -> Unit:
    texts: dict[str, Any] = {name: shown[key] for key, name in TEXTS.items() if key in shown}
    return Unit(
        id=shown["Id"],
        need_daemon_reload=shown.get("NeedDaemonReload") == "yes",
        restarts=int(restarts) if (restarts := shown.get("NRestarts", "")).isdigit() else 0,
        main_pid=int(shown.get("MainPID") or 0),
        job=shown.get("Job", "0") not in ("", "0"),
        stop_timeout_s=parse_timespan(shown.get("TimeoutStopUSec", "1min 30s")),
        files_limit=int(files) if (files := shown.get("LimitNOFILE", "")).isdigit() else None,
        **texts,
    )


class Systemd:
    """Queries and commands to systemd.

    Callers check afterwards what the units do and do not rely on exit statuses alone: systemctl reports an error for
    stopping a unit that is not loaded, which is no error to a switch.
    """

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def _systemctl(self, *arguments: str, timeout_s: float) -> Ran:
        return self._run(["systemctl", *arguments], timeout_s)

    def _order(self, *arguments: str, timeout_s: float = ORDER_S) -> None:
        ran = self._systemctl(*arguments, timeout_s=timeout_s)
        if ran.status != 0:
            raise SystemdError(f"'systemctl {' '.join(arguments)}': {ran.err or f'exit status {ran.status}'}")

    def _ask(self, *arguments: str) -> str:
        ran = self._systemctl(*arguments, timeout_s=ASK_S)
        if ran.status != 0:
            raise SystemdError(f"systemd cannot be asked: {ran.err or f'exit status {ran.status}'}")
        return ran.out

    def show(self, units: Iterable[str]) -> dict[str, Unit]:
        """Return the state of every named unit; one that systemd does not know is `not-found`. Raises SystemdError."""
        names = sorted(set(units))
        shown = self.show_properties(names, PROPERTIES) if names else {}
        return {name: build_unit(shown[name]) if name in shown else Unit(name) for name in names}

    def show_properties(
        self, units: Sequence[str], properties: Sequence[str], *options: str
    ) -> dict[str, dict[str, str]]:
        """Return properties, with `Id` among them, of units by the unit's Id. Raises SystemdError."""
        return parse_units(self._ask("show", f"--property={','.join(properties)}", *options, "--", *units))

    def loaded(self, pattern: str) -> list[str]:
        """Return the units in systemd's memory that match the pattern, with or without a file. Raises SystemdError."""
        out = self._ask("list-units", "--all", "--plain", "--no-legend", "--full", "--", pattern)
        # In some releases a mark precedes a unit that failed or was not found, even with --plain.
        words = [line.replace("●", " ").replace("*", " ").split() for line in out.splitlines()]
        return sorted({line[0] for line in words if line})

    def going_down(self) -> bool:
        return self._systemctl("is-system-running", timeout_s=ASK_S).out.strip() == "stopping"

    def daemon_reload(self) -> None:
        self._order("daemon-reload")

    def reset_failed(self, units: Sequence[str]) -> None:
        """Clear the failed state and start counter of the units. Errors are ignored: an unknown unit has neither."""
        if units:
            self._systemctl("reset-failed", "--", *units, timeout_s=ASK_S)

    def start(self, units: Sequence[str]) -> None:
        if units:
            self._order("start", "--no-block", "--", *units)

    def stop(self, units: Sequence[str], timeout_s: float) -> str | None:
        """Stop all units at once and wait for their end. Return None, or systemctl's message if it takes longer."""
        try:
            ran = self._systemctl("stop", "--", *units, timeout_s=timeout_s)
        except SystemdError as error:
            return str(error)
        return None if ran.status == 0 else ran.err or f"exit status {ran.status}"

    def reload(self, unit: str) -> None:
        """Reload the service and wait until it has done so. Raises SystemdError."""
        self._order("reload", "--", unit)

    def enable(self, unit: str) -> None:
        self._order("enable", "--", unit)


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Return the properties by the unit's Id from the output of `systemctl show` for several units."""
    blocks = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def ask_units(units: Sequence[str]) -> tuple[dict[str, dict[str, str]], str | None]:
    """Return SHOWN by the unit's Id, times since the epoch in seconds; and None, or why it is silent."""
    try:
        return Systemd().show_properties(units, SHOWN, "--timestamp=unix"), None
    except SystemdError as error:
        return {}, str(error)
