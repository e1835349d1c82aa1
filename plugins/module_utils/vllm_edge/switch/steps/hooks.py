# SPDX-License-Identifier: Apache-2.0
"""Hooks of a switch: executables of the operator, for example one that tells a gateway which profile serves.

They are in /etc/vllm-edge/hooks/<hook>.d, run one after the other in the order of their names, and each has a time
limit. They run as root, so a hook, and every directory above it, must belong to root and be writable by nobody else; a
switch is refused otherwise. A hook that fails in `before_drain` ends the switch, or `vllm-edge stop`, before anything
stops. In `after_commit` it is a warning, because the new generation serves already.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from ...generation.model import Generation
from ...redaction import find_secrets, redact
from ..model import Done, PhaseFailed
from ..render import to_sentence
from ..view import HostView

Hook = Literal["before_drain", "after_commit"]
HOOKS: tuple[Hook, ...] = get_args(Hook)

OUTPUT_SHOWN = 2000
OUTPUT_KEPT_BYTES = 1_048_576
"""What a hook has printed is cut to its end when there is more; it is in memory."""
POLL_S = 0.2
TERM_S = 2.0
OOM_SCORE = Path("/proc/self/oom_score_adj")
WRITABLE = stat.S_IWGRP | stat.S_IWOTH
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
"""Environment of a hook, besides PLACES and where the switch goes."""
PLACES = frozenset({"VLLM_EDGE_ETC", "VLLM_EDGE_STATE", "VLLM_EDGE_UNITS"})
"""Variables of this program that a hook gets, so that a `vllm-edge` in it looks at the same host."""


class HookFailed(Exception):
    """A hook failed. The text says which one, how it ended and what it printed."""


def find_unsafe(directory: Path) -> list[str]:
    """Return one sentence, with a remedy, for each hook or directory above it that others than root could change.

    A directory with the sticky bit, such as /tmp, may be above them: there, nobody can rename what is root's.
    """
    entries, _ = list_hooks(directory)
    if not entries:
        return []
    real = directory.resolve()
    above = {place for place in real.parents if place.stat().st_mode & stat.S_ISVTX}
    places = [place for place in (*reversed(real.parents), real) if place not in above]
    return [text for place in (*places, *entries) if (text := _explain_unsafe(place))]


def _explain_unsafe(path: Path) -> str:
    """Return why root may not run this hook, or what is in this directory; empty if it may."""
    found = path.lstat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        why, remedy = "is a link", f"'cp --remove-destination \"$(readlink -f {path})\" {path}' makes it a file"
    elif found.st_uid not in (0, os.geteuid()):
        why, remedy = f"belongs to uid {found.st_uid}", f"'chown root: {path}'"
    elif found.st_mode & WRITABLE:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        why, remedy = f"has mode {mode}, so that others may write it", f"'chmod go-w {path}'"
    else:
        return ""
    return f"Hooks run as root, and {path} {why}: look at what it holds, then {remedy}."


def list_hooks(directory: Path) -> tuple[list[Path], list[str]]:
    """List the hooks of a directory by name, and warnings for files that cannot be run. Copies that editors leave are
    skipped."""
    try:
        entries = sorted(directory.iterdir())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{directory} cannot be read: {error}; no hook was run."]
    files = [entry for entry in entries if not entry.name.startswith(".") and entry.name[-1] != "~" and entry.is_file()]
    hooks = [entry for entry in files if os.access(entry, os.X_OK)]
    others = [entry for entry in files if entry not in hooks]
    return hooks, [f"{entry} is not executable and was not run: 'chmod +x {entry}', or remove it." for entry in others]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a hook with all its children, which are in its process group."""
    for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def _read_output(descriptor: int) -> str:
    """Return the end of what a hook printed, as a sentence."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    raw = os.pread(descriptor, OUTPUT_SHOWN, max(0, size - OUTPUT_SHOWN))
    text = raw.decode("utf-8", "replace").strip()
    text = redact(text, find_secrets([text]))
    return f"It printed: {'...' if size > OUTPUT_SHOWN else ''}{to_sentence(text)}" if text else "It printed nothing."


def _wait(process: subprocess.Popen[bytes], output: int, until: float) -> int:
    """Return the exit status of a hook, and cut what it prints meanwhile. Raises TimeoutExpired at `until`."""
    while True:
        try:
            return process.wait(max(0.0, min(POLL_S, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until:
                raise
        size = os.fstat(output).st_size
        if size > OUTPUT_KEPT_BYTES:
            end = os.pread(output, OUTPUT_SHOWN, size - OUTPUT_SHOWN)
            os.ftruncate(output, 0)
            os.write(output, end)


def run_one(path: Path, environment: Mapping[str, str], timeout_s: float) -> float:
    """Run one hook and return the seconds that it took. Raises HookFailed."""
    began = time.monotonic()
    # A file in memory and not a pipe: a child that stays in the background must not be waited for, and no disk is
    # needed.
    output = os.memfd_create(path.name)
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    # The kernel's out-of-memory killer spares the unit of the switch; a hook would inherit that.
    spared = int(OOM_SCORE.read_text(encoding="ascii")) < 0
    as_others = ["choom", "--adjust", "0", "--"] if spared else []
    try:
        try:
            process = subprocess.Popen(
                [*as_others, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise HookFailed(
                f"{path} cannot be run: {error}. A script begins with a line such as '#!/bin/sh'."
            ) from error
        try:
            status = _wait(process, output, began + timeout_s)
        except subprocess.TimeoutExpired:
            _end_group(process)
            raise HookFailed(
                f"{path} did not end within {timeout_s:g} s and was ended, with its children. {_read_output(output)} "
                "A larger vllm_engine_hook_timeout_s gives it more time."
            ) from None
        except BaseException:
            _end_group(process)
            raise
        if status != 0:
            how = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
            raise HookFailed(f"{path} {how}. {_read_output(output)}")
        return time.monotonic() - began
    finally:
        os.close(output)


def run_hooks(host: HostView, hook: Hook, wanted: Generation, former: Generation | None) -> Done:
    """Run all hooks of one hook point; the generations are for their environment variables.

    Raises PhaseFailed if a hook of `before_drain` fails. In `after_commit` that is a warning in the result.
    """
    directory = host.paths.hook_dir(hook)
    unsafe = find_unsafe(directory)
    if unsafe and hook == "before_drain":
        raise PhaseFailed(f"{' '.join(unsafe)} No engine was stopped.")
    found, warnings = ([], [f"No hook {hook} was run. {' '.join(unsafe)}"]) if unsafe else list_hooks(directory)
    places = {name: value for name, value in os.environ.items() if name in PLACES}
    environment = {
        **ENVIRONMENT,
        **places,
        "VLLM_EDGE_HOOK": hook,
        "VLLM_EDGE_GENERATION": str(wanted.number),
        "VLLM_EDGE_PROFILE": wanted.profile,
        # Empty if there was none.
        "VLLM_EDGE_FROM_GENERATION": str(former.number) if former else "",
        "VLLM_EDGE_FROM_PROFILE": former.profile if former else "",
    }
    said = []
    for path in found:
        try:
            seconds = run_one(path, environment, wanted.limits.hook_timeout_s)
        except HookFailed as failure:
            text = f"Hook {hook} failed: {failure}"
            if hook == "before_drain":
                raise PhaseFailed(
                    f"{text} No engine was stopped. Correct or remove {path}, then begin again."
                ) from failure
            warnings.append(text)
        else:
            said.append(f"{path.name} ({seconds:.1f} s)")
    return Done(f"hooks run: {', '.join(said)}" if said else f"no hook in {directory}", warnings=tuple(warnings))
