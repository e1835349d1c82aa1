# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge switch` and `vllm-edge rollback`: start the switch as a unit of systemd, and follow it.

The transaction runs in `vllm-edge-switch.service`, outside of this process. If the SSH session is cut, Ansible is
killed or the operator presses Ctrl-C, only the following ends; the switch continues.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

from ..generation.committed import committed
from ..generation.model import Choice, Generation, GenerationError
from ..generation.store import load, numbers
from ..names import SWITCH_UNIT
from ..paths import HostPaths
from ..system.process import get_user_name
from ..system.systemd import Run, Systemd, SystemdError, run_command
from ..text import print_result, wrapped
from .history import list_loading_engines, list_verified
from .journal import Busy, history, holder, read_journal, to_json
from .model import EXITS, Exit, Journal, Moves, PhaseFailed
from .render import (
    capitalize,
    complain,
    describe_result,
    render_head,
    render_phase,
    render_restarts,
    render_result,
    to_sentence,
)

PROGRAM = "/usr/local/bin/vllm-edge"
INTERRUPTED = 130
"""The exit status that shells use after Ctrl-C: this process was interrupted, the switch was not."""
POLL_S = 0.3
ASK_SYSTEMD_S = 1.0
START_S = 60.0
QUIET_S = 10.0
"""If no phase ends for this long, a line says what is going on."""

SANDBOX = (
    "NoNewPrivileges=yes",
    # NVML asks for CAP_SYS_ADMIN where it tells root which processes use a GPU. The others are of no use to a switch or
    # to a hook, whose own work needs files, users, networks and signals.
    "CapabilityBoundingSet=~CAP_AUDIT_CONTROL CAP_AUDIT_READ CAP_BLOCK_SUSPEND CAP_BPF CAP_CHECKPOINT_RESTORE "
    "CAP_IPC_LOCK CAP_IPC_OWNER CAP_LEASE CAP_LINUX_IMMUTABLE CAP_MAC_ADMIN CAP_MAC_OVERRIDE CAP_MKNOD CAP_PERFMON "
    "CAP_SYSLOG CAP_SYS_BOOT CAP_SYS_CHROOT CAP_SYS_MODULE CAP_SYS_PACCT CAP_SYS_RAWIO CAP_SYS_TIME "
    "CAP_SYS_TTY_CONFIG CAP_WAKE_ALARM",
    # /usr and /boot only: the switch and hooks write below /etc and /var.
    "ProtectSystem=yes",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    # No allow list, and no MemoryDenyWriteExecute: nobody knows the programs of hooks.
    "SystemCallFilter=~@clock @cpu-emulation @debug @module @mount @obsolete @raw-io @reboot @swap",
)
"""The sandbox of a switch and its hooks.

Not ProtectClock and PrivateDevices: both close the device nodes of the GPUs, which NVML opens.
"""


def build_start_command(paths: HostPaths, generation: Generation, choice: Choice, asked_by: str) -> list[str]:
    """Return the systemd-run command that starts the switch.

    The unit is never restarted: if the switch dies, ExecStopPost runs `vllm-edge recover` once. `choice` is passed to
    `run-switch`; `asked_by` says who asked, for the unit's description and the journal.
    """
    properties = [
        # However the switch ended, even by SIGKILL, the host returns to the committed generation before anybody else
        # may switch.
        f"ExecStopPost={PROGRAM} recover",
        # SIGTERM goes only to the program, which then rolls back: its children (hooks, docker) may finish.
        "KillMode=mixed",
        # A rollback loads engines and has its own limits. At a shutdown the program ends at once, and systemd's own
        # limit for the shutdown applies.
        "TimeoutStopSec=infinity",
        "Restart=no",
        "OOMScoreAdjust=-900",
        # A hook that takes too much memory does not end the switch; hooks.py makes the kernel kill the hook first.
        "OOMPolicy=continue",
        # Stop before Docker, and so at the beginning of a shutdown. Do not wait for the target: it is still starting
        # while the engines of a boot load, and a switch must not wait for what it replaces.
        "After=docker.service",
        "UMask=0022",
        *SANDBOX,
    ]
    # A hook sees them. It gets what docs/operate.md lists, and where a host is elsewhere.
    usual = vars(HostPaths())
    elsewhere = [f"--setenv=VLLM_EDGE_{key.upper()}={path}" for key, path in vars(paths).items() if path != usual[key]]
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
        *(["--gap"] if choice.gap else []),
    ]


class Unit:
    """The transient unit of a switch, through systemd-run and systemctl."""

    def __init__(self, run: Run = run_command) -> None:
        self._run = run
        self._systemd = Systemd(run)

    def start(self, command: Sequence[str]) -> str | None:
        """Start the unit. Returns None, or why it was not started."""
        self._forget()  # a unit that failed while nobody followed it
        try:
            ran = self._run(command, START_S)
        except SystemdError as error:
            return str(error)
        return None if ran.status == 0 else ran.err or f"exit status {ran.status}"

    def running(self) -> bool:
        """Return whether the unit or its ExecStopPost runs; it is asked again if systemd does not answer."""
        try:
            return self._systemd.show([SWITCH_UNIT])[SWITCH_UNIT].active_state not in ("inactive", "failed")
        except SystemdError:
            return True

    def collect(self) -> int | None:
        """Make systemd forget the unit that has ended; return its program's exit status, None if not known."""
        try:
            properties = ("Id", "ExecMainCode", "ExecMainStatus")
            shown = self._systemd.show_properties([SWITCH_UNIT], properties).get(SWITCH_UNIT, {})
        except SystemdError:
            return None
        finally:
            self._forget()
        exited = shown.get("ExecMainCode") == str(os.CLD_EXITED)
        return int(shown["ExecMainStatus"]) if exited else None

    def _forget(self) -> None:
        with contextlib.suppress(SystemdError):
            self._systemd.reset_failed([SWITCH_UNIT])


class Refused(Exception):
    """The command is refused and nothing was done. The text says why; `status` is the exit status."""

    def __init__(self, text: str, status: Exit = Exit.REFUSED) -> None:
        super().__init__(text)
        self.status = status


def explain_unverified(generation: Generation, paths: HostPaths) -> str:
    """Return why a generation that is not in `list_verified` is passed over."""
    if generation.purpose == "calibration":
        return "is a calibration, which is measured and left again"
    last = next((each for each in history(paths) if each.generation == generation.number), None)
    if last is None:
        return "was never switched to"
    return f"was never verified: the switch to it at {last.started_at} ended {describe_result(last.result)}"


def _pass_over(passed: Iterable[Generation], chosen: Generation, verified: Sequence[int], paths: HostPaths) -> None:
    """Say which generations were not chosen although they are newer, and why."""
    for one in passed:
        served = f"is newer and verified, but generation {chosen.number} served after it"
        why = served if one.number in verified else explain_unverified(one, paths)
        complain(
            f"Generation {one.number} ({one.profile}) is passed over, it {why}; 'vllm-edge switch {one.number}' goes "
            f"there. Chosen is generation {chosen.number} ({chosen.profile})."
        )


def find_generation(wanted: str, paths: HostPaths) -> Generation:
    """Find a generation by its number, or the one of a profile that was verified and served last.

    It says which newer ones of the profile it passes over. Raises Refused, GenerationError.
    """
    there: list[Generation] = []
    broken: list[str] = []
    for number in sorted(numbers(paths), reverse=True):
        try:
            generation = load(paths, number)
        except GenerationError as error:
            if wanted == str(number):
                raise
            broken.append(capitalize(to_sentence(str(error))))
            continue
        if wanted == str(number):
            return generation
        there.append(generation)
    verified = list_verified(paths)
    of_profile = [generation for generation in there if generation.profile == wanted]
    good = [generation for generation in of_profile if generation.number in verified]
    if good:
        chosen = max(good, key=lambda generation: verified.index(generation.number))
        _pass_over([one for one in of_profile if one.number > chosen.number], chosen, verified, paths)
        return chosen
    if of_profile:
        each = "; ".join(f"generation {one.number} {explain_unverified(one, paths)}" for one in of_profile)
        raise Refused(
            f"No generation of profile {wanted!r} on this host was verified: {each}. 'vllm-edge switch "
            f"{of_profile[0].number}' goes to that one all the same."
        )
    known = ", ".join(f"{generation.number} ({generation.profile})" for generation in there) or "none"
    what = f"generation {wanted}" if wanted.isdigit() else f"generation of a profile {wanted!r}"
    raise Refused(
        f"There is no {what} on this host. There are: {known}. {' '.join(broken)}".rstrip()
        + " Ansible brings another one: 'ansible-playbook site.yml -e serving_profile=<profile>'."
    )


def previous_generation(paths: HostPaths) -> Generation:
    """Return the generation that was committed before the present one, within its budgets.

    It says what it passes over. Raises Refused, GenerationError.
    """
    now = committed(paths)
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
    previous, verified = load(paths, now.previous_generation), list_verified(paths)
    if previous.number in verified:
        return previous
    others = [number for number in verified if number != now.generation and paths.generation_dir(number).is_dir()]
    if not others:
        raise Refused(
            f"There is nothing verified to roll back to: generation {previous.number} ({previous.profile}), which was "
            f"committed before, {explain_unverified(previous, paths)}. 'vllm-edge switch {previous.number}' tries it."
        )
    chosen = load(paths, others[-1])
    _pass_over([previous], chosen, verified, paths)
    return chosen


def busy(running: Journal | None) -> Refused:
    """Return the refusal because another switch runs. `running` is its journal, None if it has not written one yet."""
    text = str(Busy(running)) if running else f"{SWITCH_UNIT} runs already and has not begun yet. Nothing was done."
    return Refused(
        f"{text} 'vllm-edge progress' and 'journalctl -fu {SWITCH_UNIT}' show how far it is.",
        Exit.BUSY,
    )


def start(paths: HostPaths, unit: Unit, generation: Generation, choice: Choice, asked_by: str) -> Journal | None:
    """Start the unit of the switch, and return the journal that was there before, so that `follow` knows the new one.

    The parameters are those of `build_start_command`. Raises Refused.
    """
    running = holder(paths)
    if running is not None:
        raise busy(running)
    if unit.running():
        raise busy(None)
    before = read_journal(paths)
    failure = unit.start(build_start_command(paths, generation, choice, asked_by))
    if failure is not None:
        if unit.running():  # two commands at the same time: systemd allows only one unit of a name
            raise busy(holder(paths))
        raise Refused(f"systemd did not start {SWITCH_UNIT}, nothing was touched: {failure}")
    return before


def follow(paths: HostPaths, unit: Unit, before: Journal | None, tell: Callable[[Journal], None]) -> Journal | None:
    """Wait until systemd has ended the unit and its ExecStopPost, and call `tell` with each journal that was read.

    `before` is the journal that `start` returned. Returns the journal of the switch, or None if it wrote none.
    """

    def tell_news() -> Journal | None:
        journal = read_journal(paths)
        if journal is None or (before is not None and journal.id == before.id):
            return None
        tell(journal)
        return journal

    asked_at = time.monotonic()
    while True:
        journal = tell_news()
        if (journal is not None and journal.result is not None) or time.monotonic() - asked_at >= ASK_SYSTEMD_S:
            asked_at = time.monotonic()
            if not unit.running():
                return tell_news()  # it may have written once more between reading the journal and asking systemd
        time.sleep(POLL_S)


class Teller:
    """Prints what is new in a journal: its head, each phase that has ended, and a line while a phase takes long."""

    def __init__(self) -> None:
        self.told, self.told_of = 0, ""
        self.told_at = time.monotonic()

    def __call__(self, journal: Journal) -> None:
        if journal.id != self.told_of:  # a recovery of a damaged journal has one of its own
            self.told, self.told_of = 0, journal.id
        row = to_json(journal)
        ended = [record for record in row["phases"] if record["outcome"] is not None]
        # The reasons for restarts come after the head, and before the first phase.
        lines = [*render_head(row), *render_restarts(row), *map(render_phase, ended)]
        lasting = [record for record in row["phases"] if record["outcome"] is None]
        news = lines[self.told :]
        if not news and lasting and journal.result is None and time.monotonic() - self.told_at >= QUIET_S:
            news = [render_phase({**lasting[-1], "detail": "; ".join(list_loading_engines(journal))})]
        if news:
            print("\n".join(news), flush=True)
            self.told, self.told_at = len(lines), time.monotonic()


def _refuse_without_root(command: str) -> None:
    if os.geteuid() != 0:
        raise Refused(f"Only root may do that, as it starts and stops units of systemd: 'sudo vllm-edge {command}'.")


def refuse_without_write_access(paths: HostPaths, command: str) -> int:
    """Return 0, or print that the state directory is not writable for this user and return the exit status."""
    if paths.state.is_dir() and not os.access(paths.state, os.W_OK):
        print(f"{paths.state} is not writable for this user: 'sudo vllm-edge {command}'.", file=sys.stderr)
        return Exit.REFUSED
    return 0


def _start_and_follow(
    paths: HostPaths, unit: Unit, generation: Generation, choice: Choice, asked_by: str, output: str
) -> int:
    try:
        before = start(paths, unit, generation, choice, asked_by)
        journal = follow(paths, unit, before, Teller() if output == "text" else lambda journal: None)
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
    print_result(output, to_json(journal), render_result(to_json(journal)))
    return EXITS[journal.result]


def run_switch_to(
    wanted: str | None, paths: HostPaths, choice: Choice, *, output: str, unit: Unit | None = None
) -> int:
    """Run `vllm-edge switch <generation|profile>`, without `wanted` `vllm-edge rollback`, and return the exit status.

    `output` is `text` or `json`; `unit` is a stand-in for tests.
    """
    command = "rollback" if wanted is None else "switch"
    try:
        _refuse_without_root(f"{command} {wanted or ''}".strip())
        generation = previous_generation(paths) if wanted is None else find_generation(wanted, paths)
        if choice.inventory_profile is None and choice.origin == "host":
            # A switch by hand does not change what the inventory says: keep the record of it.
            now = committed(paths)
            choice = replace(choice, inventory_profile=now.inventory_profile if now else None)
        user = os.environ.get("SUDO_USER") or get_user_name(os.getuid())
        asked_by = choice.asked_by or f"vllm-edge {command} by {user}"
        return _start_and_follow(paths, unit or Unit(), generation, choice, asked_by, output)
    except Refused as error:
        print(error, file=sys.stderr)
        return error.status
    except GenerationError as error:
        print(capitalize(to_sentence(str(error))), file=sys.stderr)
        return Exit.REFUSED


def moves_lines(generation: Generation, moves: Moves) -> list[str]:
    """Return what a switch would do, one line for each kind of work."""
    head = f"generation {generation.number}, profile {generation.profile}"
    if generation.purpose == "calibration":
        head += ", a calibration: it is measured, and the host goes back to what is committed"
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
            lines += wrapped(f"{words} {', '.join(names)}", "  ")
    for change in moves.files:
        words = "removes" if change.after is None else "writes"
        lines.append(f"  {words} {change.path}{f' ({change.attributes})' if change.attributes else ''}")
    lines += [f"  vllm-edge.target: {words}" for words in moves.target]
    return lines


def run_check(wanted: str, paths: HostPaths, *, output: str) -> int:
    """Run `vllm-edge switch --check` and return the exit status. Nothing is changed."""
    from .host import SwitchedHost

    try:
        _refuse_without_root(f"switch {wanted} --check")
        generation = find_generation(wanted, paths)
        moves = SwitchedHost(paths).moves(generation)
    except (Refused, GenerationError, PhaseFailed) as error:
        print(capitalize(to_sentence(str(error))), file=sys.stderr)
        return Exit.REFUSED
    data = {"generation": generation.number, "profile": generation.profile, "moves": asdict(moves)}
    print_result(output, data, moves_lines(generation, moves))
    return Exit.OK
