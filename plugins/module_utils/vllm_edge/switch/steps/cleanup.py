# SPDX-License-Identifier: Apache-2.0
"""Phase `clean_up`: the target of the committed generation, and removal of what only other generations had."""

from __future__ import annotations

from collections.abc import Callable

from ...generation import live, secrets, store
from ...generation.model import Generation, GenerationError
from ...names import TARGET, unit_name
from ...system.systemd import SystemdError
from ..history import list_verified
from ..model import Done, PhaseFailed
from ..view import HostView

POLL_S = 0.5
TARGET_S = 10.0


def clean_up(host: HostView, wanted: Generation) -> Done:
    """Do as much of the clean-up as possible, and report everything that failed together.

    No engine of `wanted` is stopped: its target is written and started, never restarted, because the engines would be
    restarted with it.
    """
    problems: list[str] = []
    warnings: list[str] = []
    done: list[str] = []

    def attempt(act: Callable[[], str | None], what: str, failures: list[str]) -> None:
        try:
            detail = act()
        except (GenerationError, SystemdError) as error:
            failures.append(f"{what}: {error}.")
        else:
            done.extend([detail] if detail else [])

    def write_target() -> str | None:
        return "target written" if live.install(wanted, host.paths, (), target=True) else None

    def prune() -> str | None:
        pruned = store.prune(host.paths, wanted.limits.keep_generations, list_verified(host.paths))
        secrets.prune(host.paths)
        return f"generations {', '.join(map(str, pruned))} removed" if pruned else None

    attempt(write_target, "The target could not be written", problems)
    removed = _remove_engines(host, wanted, problems)
    if removed:
        done.append(f"files of {', '.join(removed)} removed")
    attempt(host.systemd.daemon_reload, "systemd could not read the units again", problems)
    attempt(lambda: host.systemd.enable(TARGET), f"{TARGET} could not be enabled", problems)
    attempt(lambda: host.systemd.start([TARGET]), f"{TARGET} could not be started", problems)
    problems += _find_target_problems(host)
    attempt(prune, "Old generations were not removed", warnings)
    units = [unit_name(name) for name in removed]
    attempt(lambda: host.systemd.reset_failed(units), "systemd still lists removed engines", warnings)
    if problems:
        raise PhaseFailed(" ".join(problems))
    return Done("; ".join(done) or "nothing was left to do", warnings=tuple(warnings))


def _remove_engines(host: HostView, wanted: Generation, problems: list[str]) -> list[str]:
    """Remove the live files of engines that `wanted` does not have, unless they run; return their names."""
    gone = sorted((host.find_engine_units() | set(live.list_live_engines(host.paths))) - wanted.engines.keys())
    units = host.show_units([unit_name(name) for name in gone])
    removed = []
    for name in gone:
        unit = units[unit_name(name)]
        if not unit.down:
            problems.append(
                f"{unit.id} is {unit.active_state} and no engine of generation {wanted.number}: 'systemctl stop "
                f"{unit.id}', then run site.yml."
            )
            continue
        try:
            removed += [name] if live.remove_engine(name, host.paths) else []
        except GenerationError as error:
            problems.append(f"Files of the former engine {name} could not be removed: {error}.")
    return removed


def _find_target_problems(host: HostView) -> list[str]:
    """Return why the target is not active and enabled, after waiting TARGET_S for it.

    The wait is not left to systemctl, which would also wait for an engine that systemd restarts again and again.
    """
    deadline = host.clock() + TARGET_S
    while True:
        target = host.show_units([TARGET])[TARGET]
        if target.active_state == "active" and target.file_state == "enabled":
            return []
        if host.clock() >= deadline:
            state = f"{target.active_state} and {target.file_state or 'not installed'}"
            return [f"{TARGET} is {state}: its engines do not all start at boot. 'systemctl status {TARGET}'."]
        host.sleep(POLL_S)
