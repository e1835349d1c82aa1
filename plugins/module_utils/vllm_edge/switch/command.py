# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge switch` and `rollback`: start the switch as a unit of systemd, and follow it.

The transaction runs in `vllm-edge-switch.service`, outside of this process: an SSH session that is cut, Ansible that is
killed, a Ctrl-C end the following and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from ..generation.committed import committed
from ..generation.model import Committed, Generation, GenerationError
from ..generation.store import load, numbers
from ..names import SWITCH_UNIT
from ..paths import ETC, STATE, UNITS, HostPaths
from ..text import wrapped
from .history import describe_names, engines_that_load
from .journal import Busy, holder, read_journal, to_json
from .model import EXITS, Exit, Journal, Moves, PhaseFailed
from .render import phase_line, switch_head, switch_result

PROGRAM = "/usr/local/bin/vllm-edge"
INTERRUPTED = 130
"""Of a shell: this process was ended by Ctrl-C. The switch was not."""
POLL_S = 0.3
ASK_SYSTEMD_S = 1.0
QUIET_S = 10.0
"""After that long without a phase that ends, a line says what is going on."""


@dataclass(frozen=True)
class Choice:
    """Who chose the profile, and what the inventory says."""

    origin: str = "host"
    inventory_profile: str | None = None
    asked_by: str | None = None


class Unit(Protocol):
    """The transient unit, as far as following it needs."""

    def start(self, command: Sequence[str]) -> str | None:
        """None, or why it was not started."""
        ...

    def running(self) -> bool:
        """Whether the unit still runs, its ExecStopPost included."""
        ...

    def collect(self) -> int | None:
        """Lets systemd forget the unit that has ended. The exit status of its program, None where a signal ended it or
        systemd does not say."""
        ...


# ---- the unit ---------------------------------------------------------------------------------------------------


def start_command(paths: HostPaths, generation: Generation, choice: Choice, asked_by: str) -> list[str]:
    """The line of systemd-run. The unit is never restarted: a switch that died is ended by `recover`, once."""
    properties = [
        # Whatever ended it, killed included: the host goes back to what is committed, before anybody else may switch.
        f"ExecStopPost={PROGRAM} recover",
        # SIGTERM goes to the program alone, which then goes back: its children (hooks, docker) may finish.
        "KillMode=mixed",
        # Going back loads engines and has limits of its own. At a shutdown the program ends at once, and systemd's own
        # limit for the shutdown stands behind it.
        "TimeoutStopSec=infinity",
        "Restart=no",
        "OOMScoreAdjust=-900",
        # A hook that takes too much memory, which hooks.py lets the kernel end first, does not end the switch.
        "OOMPolicy=continue",
        # Stopped before Docker is, hence at the beginning of a shutdown. Not after the target: that is still starting
        # while the engines of a boot load, and a switch must not wait for what it is to replace.
        "After=docker.service",
        "UMask=0022",
    ]
    standard = {"VLLM_EDGE_ETC": (paths.etc, ETC), "VLLM_EDGE_STATE": (paths.state, STATE)}
    standard["VLLM_EDGE_UNITS"] = (paths.units, UNITS)
    elsewhere = [f"--setenv={name}={path}" for name, (path, usual) in standard.items() if str(path) != usual]
    inventory = [f"--inventory-profile={choice.inventory_profile}"] if choice.inventory_profile else []
    return [
        "systemd-run",
        f"--unit={SWITCH_UNIT}",
        f"--description=Switch to generation {generation.number}, profile {generation.profile}, asked by {asked_by}",
        "--quiet",
        "--service-type=exec",
        *[f"--property={item}" for item in properties],
        *elsewhere,
        "--",
        PROGRAM,
        "run-switch",
        str(generation.number),
        f"--origin={choice.origin}",
        *inventory,
        f"--asked-by={asked_by}",
    ]


class SystemdUnit:
    """The real one."""

    def start(self, command: Sequence[str]) -> str | None:
        self._forget()  # one that failed while nobody followed it
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"

    def running(self) -> bool:
        command = ["systemctl", "show", "--property=ActiveState", "--value", SWITCH_UNIT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return True  # systemd that does not answer says nothing about the unit: ask again
        return done.stdout.strip() not in ("inactive", "failed")

    def collect(self) -> int | None:
        wanted = ["ExecMainCode", "ExecMainStatus"]
        command = ["systemctl", "show", f"--property={','.join(wanted)}", SWITCH_UNIT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        finally:
            self._forget()
        shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        exited = shown.get("ExecMainCode") == str(os.CLD_EXITED)
        return int(shown["ExecMainStatus"]) if exited else None

    def _forget(self) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["systemctl", "reset-failed", SWITCH_UNIT], capture_output=True, timeout=30, check=False)


# ---- which generation -------------------------------------------------------------------------------------------


class Refused(Exception):
    """Nothing was done; the text says why."""

    def __init__(self, text: str, status: Exit = Exit.REFUSED) -> None:
        super().__init__(text)
        self.status = status


def find_generation(wanted: str, paths: HostPaths) -> Generation:
    """By its number, or the newest one of a profile."""
    there: list[Generation] = []
    broken: list[str] = []
    for number in sorted(numbers(paths), reverse=True):
        try:
            generation = load(paths, number)
        except GenerationError as error:
            if wanted == str(number):
                raise Refused(f"Generation {number} cannot be used: {error}") from error
            broken.append(f"generation {number} cannot be read: {error}")
            continue
        if wanted in (str(number), generation.profile):
            return generation
        there.append(generation)
    known = ", ".join(f"{generation.number} ({generation.profile})" for generation in there) or "none"
    what = f"generation {wanted}" if wanted.isdigit() else f"generation of a profile {wanted!r}"
    raise Refused(
        f"There is no {what} on this host. There are: {known}."
        + "".join(f" {text[0].upper()}{text[1:]}." for text in broken)
        + " Ansible brings another one: 'ansible-playbook site.yml -e serving_profile=<profile>'."
    )


def previous_generation(paths: HostPaths) -> Generation:
    """What was committed before."""
    now = _committed(paths)
    if now is None:
        raise Refused("There is nothing to roll back: no generation was ever committed on this host.")
    if now.previous_generation is None:
        raise Refused(
            f"There is nothing to roll back to: generation {now.generation} ({now.profile}) is the first that was "
            "committed on this host. 'vllm-edge switch <generation>' goes to any other that is there."
        )
    if not paths.generation_dir(now.previous_generation).is_dir():
        raise Refused(
            f"Generation {now.previous_generation}, which was committed before generation {now.generation} "
            f"({now.profile}), is gone: {paths.generation_dir(now.previous_generation)} does not exist. "
            "'ansible-playbook site.yml -e serving_profile=<profile>' renders and brings the one that you want."
        )
    try:
        return load(paths, now.previous_generation)
    except GenerationError as error:
        raise Refused(f"Generation {now.previous_generation} cannot be used: {error}") from error


def _committed(paths: HostPaths) -> Committed | None:
    try:
        return committed(paths)
    except GenerationError as error:
        raise Refused(f"What is committed cannot be read: {error}") from error


# ---- starting and following -------------------------------------------------------------------------------------


def busy(running: Journal | None) -> Refused:
    """Somebody else switches: who, whereto, how far."""
    text = str(Busy(running)) if running else f"{SWITCH_UNIT} runs already and has not begun yet. Nothing was done."
    return Refused(
        f"{text} 'vllm-edge progress' and 'journalctl -fu {SWITCH_UNIT}' show how far it is.",
        Exit.BUSY,
    )


def start(paths: HostPaths, unit: Unit, generation: Generation, choice: Choice, asked_by: str) -> Journal | None:
    """Start the unit; returns the journal that was there before, so that the new one is known by its difference."""
    running = holder(paths)
    if running is not None:
        raise busy(running)
    if unit.running():
        raise busy(None)
    before = read_journal(paths)
    failure = unit.start(start_command(paths, generation, choice, asked_by))
    if failure is not None:
        if unit.running():  # two at once: systemd knows one unit of a name
            raise busy(holder(paths))
        raise Refused(f"systemd did not start {SWITCH_UNIT}, nothing was touched: {failure}")
    return before


def follow(
    paths: HostPaths,
    unit: Unit,
    before: Journal | None,
    tell: Callable[[Journal], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Journal | None:
    """Until systemd has ended the unit and its ExecStopPost. The journal of the switch, None where it wrote none."""
    asked_at = clock()
    while True:
        journal = read_journal(paths)
        if journal is not None and before is not None and journal.id == before.id:
            journal = None
        if journal is not None:
            tell(journal)
        if (journal is not None and journal.result is not None) or clock() - asked_at >= ASK_SYSTEMD_S:
            asked_at = clock()
            if not unit.running():
                # It may have written once more between the two questions.
                last = read_journal(paths)
                ours = last is not None and (before is None or last.id != before.id)
                if last is not None and ours:
                    tell(last)
                return last if ours else None
        sleep(POLL_S)


class Teller:
    """Prints what is new in a journal: its head, each phase when it has ended, and a word while one lasts."""

    def __init__(self, paths: HostPaths, clock: Callable[[], float] = time.monotonic) -> None:
        self.paths, self.clock = paths, clock
        self.headed = False
        self.told = 0
        self.told_at = clock()

    def __call__(self, journal: Journal) -> None:
        if not self.headed:
            self.headed = True
            self._print(switch_head(to_json(journal)))
        ended = [record for record in journal.phases if record.outcome is not None]
        for record in ended[self.told :]:
            self._print([phase_line(asdict(record))])
        self.told = len(ended)
        lasting = [record for record in journal.phases if record.outcome is None]
        if lasting and journal.result is None and self.clock() - self.told_at >= QUIET_S:
            self._print([phase_line({**asdict(lasting[-1]), "detail": "; ".join(engines_that_load(journal))})])

    def _print(self, lines: Sequence[str]) -> None:
        print("\n".join(lines), flush=True)
        self.told_at = self.clock()


def _asked_by(choice: Choice, command: str) -> str:
    if choice.asked_by:
        return choice.asked_by
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
    return f"vllm-edge {command} by {user}"


def _refuse_without_root(command: str) -> None:
    if os.geteuid() != 0:
        raise Refused(f"Only root may do that, as it starts and stops units of systemd: 'sudo vllm-edge {command}'.")


def refuse_without_write_access(paths: HostPaths, command: str) -> int:
    """For what works on files, and on the state of a test, too: 0, or the exit status after a sentence."""
    if paths.state.is_dir() and not os.access(paths.state, os.W_OK):
        print(f"{paths.state} is not for this user: 'sudo vllm-edge {command}'.", file=sys.stderr)
        return Exit.REFUSED
    return 0


def _go(paths: HostPaths, unit: Unit, generation: Generation, choice: Choice, asked_by: str, output: str) -> int:
    try:
        before = start(paths, unit, generation, choice, asked_by)
        journal = follow(paths, unit, before, Teller(paths) if output == "text" else lambda journal: None)
    except (KeyboardInterrupt, BrokenPipeError):
        print(
            f"The switch goes on in {SWITCH_UNIT}; only the following has ended. 'vllm-edge progress' says how far it "
            f"is, 'journalctl -fu {SWITCH_UNIT}' follows it, 'vllm-edge history' has its end, and 'systemctl stop "
            f"{SWITCH_UNIT}' sends it back to the committed generation.",
            file=sys.stderr,
        )
        return INTERRUPTED
    status = unit.collect()
    if journal is None and status in (Exit.REFUSED, Exit.BUSY):
        print(
            f"{SWITCH_UNIT} refused to begin: nothing was touched. 'journalctl -u {SWITCH_UNIT}' has the reason.",
            file=sys.stderr,
        )
        return status
    if journal is None or journal.result is None:
        how_far = "before it had begun" if journal is None else f"in phase {journal.phase or 'none'}"
        print(
            f"{SWITCH_UNIT} ended {how_far}, and its journal has no result: 'journalctl -u {SWITCH_UNIT}' says why. "
            "'vllm-edge status' says what runs, and 'vllm-edge recover' goes back to the committed generation.",
            file=sys.stderr,
        )
        return Exit.FAILED
    if output == "json":
        print(json.dumps(to_json(journal), indent=2, ensure_ascii=False))
    else:
        print("\n".join(switch_result(to_json(journal))))
    return EXITS[journal.result]


def _refused(error: Refused) -> int:
    print(error, file=sys.stderr)
    return error.status


def run_switch_to(wanted: str, paths: HostPaths, choice: Choice, *, output: str, unit: Unit | None = None) -> int:
    """Entry of `vllm-edge switch`."""
    try:
        _refuse_without_root(f"switch {wanted}")
        generation = find_generation(wanted, paths)
        if choice.inventory_profile is None and choice.origin == "host":
            # The inventory still says what it said.
            now = _committed(paths)
            choice = Choice(choice.origin, now.inventory_profile if now else None, choice.asked_by)
        return _go(paths, unit or SystemdUnit(), generation, choice, _asked_by(choice, "switch"), output)
    except Refused as error:
        return _refused(error)


def run_rollback(paths: HostPaths, *, output: str, unit: Unit | None = None) -> int:
    """Entry of `vllm-edge rollback`."""
    try:
        _refuse_without_root("rollback")
        generation = previous_generation(paths)
        now = _committed(paths)
        choice = Choice("host", now.inventory_profile if now else None)
        return _go(paths, unit or SystemdUnit(), generation, choice, _asked_by(choice, "rollback"), output)
    except Refused as error:
        return _refused(error)


# ---- what would be done -----------------------------------------------------------------------------------------


def moves_lines(generation: Generation, moves: Moves) -> list[str]:
    """One line for each kind of work."""
    head = f"generation {generation.number}, profile {generation.profile}"
    if not moves:
        return [f"{head}: everything is so already, nothing would be touched"]
    lines = [head]
    for words, names in (
        ("keeps", moves.keep),
        ("stops", moves.stop),
        ("starts", moves.start),
        ("waits for", moves.wait),
    ):
        if names:
            lines += wrapped(f"{words} {describe_names(names)}", "  ")
    for change in moves.files:
        words = "removes" if change.after is None else "writes"
        lines.append(f"  {words} {change.path}{f' ({change.attributes})' if change.attributes else ''}")
    lines += [f"  vllm-edge.target: {words}" for words in moves.target]
    return lines


def run_check(wanted: str, paths: HostPaths, *, output: str) -> int:
    """Entry of `vllm-edge switch --check`."""
    from .host import open_world

    try:
        _refuse_without_root(f"switch {wanted} --check")
        generation = find_generation(wanted, paths)
        moves = open_world(paths).moves(generation)
    except Refused as error:
        return _refused(error)
    except PhaseFailed as failure:
        return _refused(Refused(failure.text))
    if output == "json":
        data = {"generation": generation.number, "profile": generation.profile, "moves": asdict(moves)}
        print(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        print("\n".join(moves_lines(generation, moves)))
    return Exit.OK
