# SPDX-License-Identifier: Apache-2.0
"""systemd as a switch needs it: what units do, and the few orders that it gives. Through `systemctl`, which every
host has and an operator can repeat by hand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "NeedDaemonReload",
    "FragmentPath",
    "StatusText",
    "Result",
    "NRestarts",
    "InvocationID",
    "Job",
    "TimeoutStopUSec",
)
ASK_S = 20.0
ORDER_S = 60.0

_SPAN = re.compile(r"(\d+)(y|month|w|d|h|min|s|ms|us)")
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
    """systemd cannot be asked, or refuses an order; the text has its own words."""


@dataclass(frozen=True)
class Ran:
    """What a command said."""

    status: int
    out: str = ""
    err: str = ""


Run = Callable[[Sequence[str], float], Ran]


def run_command(command: Sequence[str], timeout_s: float) -> Ran:
    """Runs a program to its end; SystemdError where it cannot be run or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise SystemdError(f"'{' '.join(command)}' did not end within {timeout_s:g} s") from error
    except OSError as error:
        raise SystemdError(f"'{' '.join(command)}' cannot be run: {error}") from error
    return Ran(done.returncode, done.stdout, done.stderr.strip())


@dataclass(frozen=True)
class Unit:
    """One unit. `inactive` and `not-found` is what systemd says of a unit that it does not know."""

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
    job: bool = False
    """Whether a job waits or runs: a unit that is about to start is `inactive` until then."""
    stop_timeout_s: float | None = 90.0
    """None: systemd waits for ever."""

    @property
    def loaded(self) -> bool:
        return self.load_state != "not-found"

    @property
    def auto_restart(self) -> bool:
        """Its process ended, and systemd waits before it starts it again."""
        return self.active_state == "activating" and self.sub_state.startswith("auto-restart")

    @property
    def down(self) -> bool:
        """Nothing of it runs, and nothing is about to."""
        return self.active_state in ("inactive", "failed") and not self.job


def timespan(text: str) -> float | None:
    """`1min 30s` in seconds; None for `infinity`."""
    if text == "infinity":
        return None
    return sum(int(number) * _SECONDS[unit] for number, unit in _SPAN.findall(text))


def unit_of(shown: Mapping[str, str]) -> Unit:
    """A unit out of what `systemctl show` prints of it."""
    restarts = shown.get("NRestarts", "")
    return Unit(
        id=shown["Id"],
        load_state=shown.get("LoadState", "not-found"),
        active_state=shown.get("ActiveState", "inactive"),
        sub_state=shown.get("SubState", "dead"),
        file_state=shown.get("UnitFileState", ""),
        need_daemon_reload=shown.get("NeedDaemonReload") == "yes",
        fragment=shown.get("FragmentPath", ""),
        status_text=shown.get("StatusText", ""),
        result=shown.get("Result", "success"),
        restarts=int(restarts) if restarts.isdigit() else 0,
        invocation=shown.get("InvocationID", ""),
        job=shown.get("Job", "0") not in ("", "0"),
        stop_timeout_s=timespan(shown.get("TimeoutStopUSec", "1min 30s")),
    )


class Systemd:
    """`systemctl`, asked and ordered. Orders are judged by what the units do afterwards, not by exit statuses alone:
    to stop what is not loaded is an error to systemctl, and no error to us."""

    def __init__(self, run: Run = run_command) -> None:
        self._run = run

    def _systemctl(self, *arguments: str, timeout_s: float) -> Ran:
        return self._run(["systemctl", *arguments], timeout_s)

    def _order(self, *arguments: str, timeout_s: float = ORDER_S) -> None:
        ran = self._systemctl(*arguments, timeout_s=timeout_s)
        if ran.status != 0:
            raise SystemdError(f"'systemctl {' '.join(arguments)}': {ran.err or f'exit status {ran.status}'}")

    def show(self, units: Iterable[str]) -> dict[str, Unit]:
        """Every unit that was asked for, by name; those that systemd does not know are `not-found`."""
        names = sorted(set(units))
        if not names:
            return {}
        ran = self._systemctl("show", f"--property={','.join(PROPERTIES)}", "--", *names, timeout_s=ASK_S)
        if ran.status != 0:
            raise SystemdError(f"systemd cannot be asked: {ran.err or f'exit status {ran.status}'}")
        shown = parse_units(ran.out)
        return {name: unit_of(shown[name]) if name in shown else Unit(name) for name in names}

    def loaded(self, pattern: str) -> list[str]:
        """Units that systemd has in memory, whether their files are still there or not."""
        ran = self._systemctl("list-units", "--all", "--plain", "--no-legend", "--full", "--", pattern, timeout_s=ASK_S)
        if ran.status != 0:
            raise SystemdError(f"systemd cannot be asked: {ran.err or f'exit status {ran.status}'}")
        # A mark stands before a unit that failed or is not found, even with --plain in some releases.
        words = [line.replace("●", " ").replace("*", " ").split() for line in ran.out.splitlines()]
        return sorted({line[0] for line in words if line})

    def going_down(self) -> bool:
        """Whether the host is being stopped."""
        return self._systemctl("is-system-running", timeout_s=ASK_S).out.strip() == "stopping"

    def daemon_reload(self) -> None:
        self._order("daemon-reload")

    def reset_failed(self, units: Sequence[str]) -> None:
        """Forgets failures and the count of starts. A unit that systemd does not know has neither."""
        if units:
            self._systemctl("reset-failed", "--", *units, timeout_s=ASK_S)

    def start(self, units: Sequence[str]) -> None:
        """Without waiting for them."""
        if units:
            self._order("start", "--no-block", "--", *units)

    def stop(self, units: Sequence[str], timeout_s: float) -> str | None:
        """All of them side by side; None when they ended in time, else what systemctl said."""
        try:
            ran = self._systemctl("stop", "--", *units, timeout_s=timeout_s)
        except SystemdError as error:
            return str(error)
        return None if ran.status == 0 else ran.err or f"exit status {ran.status}"

    def enable(self, unit: str) -> None:
        self._order("enable", "--", unit)


UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "WantedBy",
    "NeedDaemonReload",
    "StatusText",
    "Result",
    "NRestarts",
    "InactiveExitTimestamp",
    "ActiveEnterTimestamp",
    "StateChangeTimestamp",
)


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """`systemctl show` of several units: blocks of Key=value, divided by blank lines."""
    blocks = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def ask_units(units: Sequence[str]) -> tuple[dict[str, dict[str, str]], str | None]:
    command = ["systemctl", "show", "--timestamp=unix", f"--property={','.join(UNIT_PROPERTIES)}", "--", *units]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"systemd cannot be asked: {error}"
    if done.returncode != 0:
        return {}, f"systemd cannot be asked: {done.stderr.strip() or f'exit status {done.returncode}'}"
    return parse_units(done.stdout), None
