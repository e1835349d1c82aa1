# SPDX-License-Identifier: Apache-2.0
"""Hooks of a switch: executables of the operator, for example one that tells a gateway which profile serves.

They are in /etc/vllm-edge/hooks/<hook>.d, run one after the other in the order of their names, and each has a time
limit. A hook that fails in `before_drain` ends the switch, or `vllm-edge stop`, before anything stops. In
`after_commit` it is a warning, because the new generation serves already.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..generation.model import Generation
from ..paths import HostPaths
from .model import Done, PhaseFailed

Hook = Literal["before_drain", "after_commit"]

OUTPUT_SHOWN = 2000
TERM_S = 2.0


class HookFailed(Exception):
    """A hook failed. The text says which one, how it ended and what it printed."""


def variables(hook: Hook, wanted: Generation, former: Generation | None) -> dict[str, str]:
    """Return the environment variables of a hook. Those of the former generation are empty if there was none."""
    return {
        "VLLM_EDGE_HOOK": hook,
        "VLLM_EDGE_GENERATION": str(wanted.number),
        "VLLM_EDGE_PROFILE": wanted.profile,
        "VLLM_EDGE_FROM_GENERATION": "" if former is None else str(former.number),
        "VLLM_EDGE_FROM_PROFILE": "" if former is None else former.profile,
    }


def executables(directory: Path) -> tuple[list[Path], list[str]]:
    """List the hooks of a directory by name, and warnings for files that cannot be run. Copies that editors leave are
    skipped."""
    try:
        entries = sorted(directory.iterdir())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{directory} cannot be read: {error}; no hook was run."]
    hooks, warnings = [], []
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith("~") or not entry.is_file():
            continue
        if os.access(entry, os.X_OK):
            hooks.append(entry)
        else:
            warnings.append(f"{entry} is not executable and was not run: 'chmod +x {entry}', or remove it.")
    return hooks, warnings


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
    if not text:
        return "It printed nothing."
    end = "" if text.endswith((".", "!", "?")) else "."
    return f"It printed: {'...' if size > OUTPUT_SHOWN else ''}{text}{end}"


def _read_own_oom_score_adj() -> int:
    """Return the value of this process, from -1000 to 1000: proc_pid_oom_score_adj(5)."""
    return int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))


def run_one(path: Path, environment: Mapping[str, str], timeout_s: float) -> float:
    """Run one hook and return the seconds that it took.

    Raises:
        HookFailed: if it cannot be run, does not end within `timeout_s`, or ends with an error.
    """
    began = time.monotonic()
    # A file in memory and not a pipe: a child that stays in the background must not be waited for, and no disk is
    # needed.
    output = os.memfd_create(path.name)
    # The kernel's out-of-memory killer spares the unit of the switch; a hook would inherit that.
    as_others = ["choom", "--adjust", "0", "--"] if _read_own_oom_score_adj() < 0 else []
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
            status = process.wait(timeout_s)
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


def run_hooks(hook: Hook, wanted: Generation, former: Generation | None, paths: HostPaths) -> Done:
    """Run all hooks of one hook point; the generations are for their environment variables.

    Raises PhaseFailed if a hook of `before_drain` fails. In `after_commit` that is a warning in the result.
    """
    directory = paths.hook_dir(hook)
    found, warnings = executables(directory)
    environment = {**os.environ, **variables(hook, wanted, former)}
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
