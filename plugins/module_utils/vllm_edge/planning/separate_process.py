# SPDX-License-Identifier: Apache-2.0
"""Reading of a checkpoint in a process of its own, with limits and without root.

What a model repository contains is not trusted before it is served. A file that takes all memory or time, or that finds
a fault in a parser, then ends a process without rights instead of the module, which often runs as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import signal
from collections.abc import Callable
from typing import Any

from ..names import ENGINE_USER
from ..system.records import parse_json
from .checkpoint.headers import FactsError
from .checkpoint.model_facts import dump_tensors, load_tensors
from .contract import Facts

MEMORY_BYTES = 2 * 2**30
"""Address space of the process: Python and the hub's client need a part of it."""
CPU_S = 120
ANSWER_BYTES = 16 * 2**20


def read_in_subprocess(what: str, read: Callable[[], Facts], drop_root: bool = True) -> Facts:
    """Return what `read` returns in a child process. Raises FactsError if `read` did, or the child ran into a limit.

    Args:
        what: the directory or repository, for messages
        drop_root: whether the child becomes the engines' user, if this process is root and the host has that user
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _limit(drop_root)
            with os.fdopen(writer, "wb") as stream:
                stream.write(_answer(what, read))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        raw = stream.read(ANSWER_BYTES + 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if len(raw) > ANSWER_BYTES or (status == 0 and not raw):
        raise FactsError(f"{what} has more kinds of tensors than any model. Fetch it again.")
    if status != 0:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        raise FactsError(
            f"{what} cannot be read within {MEMORY_BYTES // 2**20:,} MiB of memory and {CPU_S} s of CPU time ({how}). "
            "It is damaged or hostile; fetch it again, or take another repository."
        )
    try:
        return _parse(parse_json(raw))
    except FactsError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise FactsError(f"{what} cannot be read: {error}. Fetch it again.") from error


def _limit(drop_root: bool) -> None:
    with contextlib.suppress(
        ValueError, OSError
    ):  # macOS refuses this limit, whatever its value; the others hold there
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if drop_root and os.geteuid() == 0:
        try:
            user = pwd.getpwnam(ENGINE_USER)
        except KeyError:
            return  # the user is created with the host's program; before that there are no weights
        os.setgroups([])
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def _answer(what: str, read: Callable[[], Facts]) -> bytes:
    try:
        facts = read()
        answer: dict[str, Any] = {**vars(facts), "tensors": dump_tensors(facts.tensors)}
    except FactsError as error:
        answer = {"error": str(error)}
    except Exception as error:  # whatever it is, it is about the checkpoint, and a sentence instead of a traceback
        answer = {"error": f"{what} has a form that was not expected ({type(error).__name__}: {str(error)[:200]})"}
    return json.dumps(answer).encode()


def _parse(answer: dict[str, Any]) -> Facts:
    if "error" in answer:
        raise FactsError(answer["error"])
    return Facts(tensors=load_tensors(answer.pop("tensors")), **answer)
