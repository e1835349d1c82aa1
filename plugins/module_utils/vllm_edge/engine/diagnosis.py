# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of an engine's failure: its cause and remedy, from the container's last log lines and facts from Docker.

Facts from the kernel and Docker (killed, removed, stopped, Docker itself stopped) take precedence over log lines,
because a log that was cut off points at something else. Among log lines the most specific signature wins; errors that
vLLM logs and then recovers from are ignored. Only `explain` decides whether another attempt is worthwhile. Real logs of
both kinds are in tests/fixtures/explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .signatures import COMPILERS, ENGINE_SIGNATURES, SIGNATURES, START_WARNINGS, Explanation, Signature
from .startup import parse_phase


@dataclass(frozen=True)
class Death:
    """What is known about an end that nobody requested."""

    lines: Sequence[str] = ()
    exit_code: int | None = None
    oom_killed: bool = False
    docker_message: str = ""
    was_serving: bool = False
    """Whether the engine had answered /health before."""
    removed: bool = False
    docker_away: bool = False
    live_restore: bool | None = None
    """Whether Docker keeps containers running while it is stopped; None if unknown."""
    outside_signal: str | None = None
    """Signal that a client of Docker sent to the container, if any."""


ENGINE_DEAD = re.compile(
    r"EngineDeadError|EngineCore encountered (?:a fatal error|an issue)|Engine core process .*died unexpectedly|"
    r"Worker proc .*died unexpectedly|Process \S+ \(PID: \d+\) died with exit code"
)
"""vLLM's messages that its engine process or a worker has ended."""
_EXCEPTION = re.compile(r"(?<!raise )(?P<text>(?<![\w.])[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt)(?:: .+)?)$")
# Lines that are no cause: vLLM logs settings, prompts and possible failures ("This can cause fd limit errors like
# ..."), and logs an error when the hub rejects a local directory, after which it goes on.
_NO_CAUSE = re.compile(
    r"(?:DEBUG|INFO|WARNING)(?:\x1b\[[\d;]*m)* \d\d-\d\d \d\d:|Error retrieving |, retrying \d+ of \d+$"
)
# torch wraps what one of its compilers raised, and does not print the frames in it.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+|(?P<wrapped>torch\._(?:dynamo|inductor)\.exc\.)')
_READERS = re.compile(r"/(?:json|encodings)/|/(?:pickle|zipfile|gzip|codecs|copyreg)\.py$|^<frozen")
"""Files of Python's own library that read files for others."""
_CORE_FAILED = re.compile(r"(?:Engine core|WorkerProc) initialization failed|Worker failed with error")
_SIGNALS = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV", 143: "SIGTERM"}


def _fill_signature(signature: Signature, match: re.Match[str]) -> Explanation:
    groups = {key: (value or "").strip() for key, value in match.groupdict().items()}
    reason, remedy = (text.format(**groups) for text in (signature.reason, signature.remedy))
    # Older versions omit some of the numbers.
    for empty in (" ( GiB needed,  GiB left)", " (tried to allocate )", " ()", " (to  at most)"):
        reason, remedy = reason.replace(empty, ""), remedy.replace(empty, "")
    return Explanation(signature.cause, " ".join(reason.split()).rstrip(":"), remedy, signature.heals)


def _find_raising_file(lines: Sequence[str], number: int) -> str:
    """Return the source file whose code met the exception in a line.

    It is the last file in the same process's traceback above the line, except for those of Python's parsers.
    """
    name, mark, _ = lines[number].partition(") ")
    process = name + mark if name.startswith("(") else ""
    for line in reversed(lines[:number]):
        frame = _FRAME.search(line)
        if frame and line.startswith(process):
            if frame["wrapped"]:
                return "/torch/_dynamo/exc.py"
            if not _READERS.search(frame["file"]):
                return frame["file"]
    return ""


def _match(
    signatures: Iterable[Signature], lines: Sequence[str], numbers: Sequence[int], was_serving: bool = False
) -> Explanation | None:
    numbers = [number for number in numbers if not _NO_CAUSE.search(lines[number])]
    for signature in signatures:
        if was_serving and signature.only_while_starting:
            continue
        for number in reversed(numbers):
            match = re.search(signature.pattern, lines[number])
            if match and (
                signature.raised_in is None or re.search(signature.raised_in, _find_raising_file(lines, number))
            ):
                return _fill_signature(signature, match)
    return None


def find_start_warning(line: str) -> Explanation | None:
    """Return what a line of a start says that costs speed or precision, and is no failure."""
    matches = ((signature, re.search(signature.pattern, line)) for signature in START_WARNINGS)
    return next((_fill_signature(signature, match) for signature, match in matches if match), None)


def match_lines(lines: Sequence[str], was_serving: bool = False) -> Explanation | None:
    """Return the most specific known cause in the log; for one signature the last matching line counts.

    Errors before the last sign of progress were apparently survived. They count only if nothing later explains the end,
    and then another attempt may succeed. `was_serving` is whether the engine had answered /health, which excludes
    signatures for startup only.
    """
    onward = max((number for number, line in enumerate(lines) if parse_phase(line)), default=-1) + 1
    found = _match(ENGINE_SIGNATURES, lines, range(onward, len(lines)), was_serving)
    if found is not None:
        return found
    found = _match(ENGINE_SIGNATURES, lines, range(onward), was_serving)
    return replace(found, heals=True) if found is not None else None


def find_last_exception(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return the last exception that is no summary of vLLM's, and the file that raised it, empty if not known."""
    for number, line in reversed(list(enumerate(lines))):
        match = None if _NO_CAUSE.search(line) else _EXCEPTION.search(line.rstrip())
        if match and not _CORE_FAILED.search(line) and not ENGINE_DEAD.search(line):
            return match["text"].strip(), _find_raising_file(lines, number)
    return None


def _describe_end(death: Death) -> str:
    if death.exit_code is None:
        return "the engine's container ended"
    name = _SIGNALS.get(death.exit_code)
    return f"the engine's container ended with status {death.exit_code}" + (f" ({name})" if name else "")


def explain(death: Death) -> Explanation:
    """Return the explanation of an engine's end; an unknown cause is described by what is known."""
    fact = _explain_facts(death)
    if fact is not None:
        return fact
    known = match_lines(death.lines, death.was_serving)
    if known is None:
        return _explain_exit(death)
    # After an engine has served, or if somebody interfered with it, another attempt is always worthwhile.
    return replace(known, heals=known.heals or death.was_serving or death.outside_signal is not None)


def _explain_facts(death: Death) -> Explanation | None:
    """Return an explanation from facts of the kernel and of Docker. Only a refusal by Docker can be final."""
    if death.oom_killed:
        return Explanation(
            "oom_killed",
            "the kernel killed a process of the engine because the host's memory, or the container's limit, ran out",
            "Look with `journalctl -k | grep -i oom`; free host memory, or raise vllm_engine_memory",
        )
    if death.removed:
        return Explanation(
            "removed",
            "somebody removed the engine's container with Docker (docker rm)",
            "Use `systemctl stop` instead; systemd starts it again now",
        )
    if death.docker_away:
        return _explain_docker_away(death)
    if death.docker_message:
        refusal = _match(SIGNATURES, [death.docker_message], range(1))
        if refusal is not None:
            return replace(refusal, heals=refusal.heals or death.was_serving)
        if death.exit_code is None:
            return Explanation(
                "docker_refused", f"Docker refused: {death.docker_message}", "Look with `journalctl -u docker.service`"
            )
    if death.outside_signal is not None and death.exit_code in (0, 2, 130, 137, 143):
        return Explanation(
            "stopped_outside",
            f"somebody stopped the engine's container with Docker ({death.outside_signal}) instead of systemd",
            "Use `systemctl stop` instead; systemd starts it again now",
        )
    if death.exit_code == 137:
        return Explanation(
            "sigkill",
            f"{_describe_end(death)}: killed from outside, by `docker kill`, `docker rm -f` or the host's kernel",
            "Look with `journalctl -k | grep -i -e oom -e killed` and in the shell histories of the operators",
        )
    return None


def _explain_docker_away(death: Death) -> Explanation:
    if death.live_restore:
        # With live-restore Docker does not end containers, so the engine ended by itself, and only its log can explain
        # it.
        known = match_lines(death.lines, death.was_serving)
        if known is not None:
            return replace(known, heals=True)
        return Explanation(
            "died_while_docker_away",
            "the engine ended while the Docker Engine was away, so its exit status is not known",
            "It is started again as soon as Docker is back",
        )
    return Explanation(
        "docker_stopped",
        "the Docker Engine stopped and took the engine's container with it",
        "It is started again as soon as Docker is back; with live-restore in /etc/docker/daemon.json engines outlive "
        "a restart of Docker",
    )


def _explain_exit(death: Death) -> Explanation:
    dead = any(ENGINE_DEAD.search(line) for line in death.lines)
    error, file = find_last_exception(death.lines) or ("", "")
    said = f": {error}" if error else ""
    if not death.was_serving and re.search(COMPILERS, file):
        return Explanation(
            "compile_failed",
            f"vLLM failed while it compiled the model{said}",
            "The traceback in the journal names the place; enforce_eager of the engine does without a compiled model",
        )
    if dead and death.was_serving:
        return Explanation(
            "engine_died_serving",
            f"vLLM's engine process died while serving a request{said}",
            "The traceback above its end names the place; if the first completion after a start kills it, the image "
            "lacks something it compiles with (g++, Python's headers), or a kernel does not fit the GPU",
        )
    if dead:
        return Explanation(
            "engine_died",
            f"vLLM's engine process died while starting{said}",
            "The traceback in the journal names the place",
        )
    if death.exit_code == 135:
        return Explanation(
            "shm_too_small",
            f"{_describe_end(death)}: most often /dev/shm of the container is too small",
            "Raise vllm_engine_shm_size (2g for one GPU, 4g for four)",
        )
    if death.exit_code in (0, 143):
        return Explanation(
            "ended_by_itself",
            f"{_describe_end(death)}, although nobody stopped it",
            "Look at its last lines in the journal",
        )
    return Explanation("unknown", f"{_describe_end(death)}{said}", "Its last lines in the journal may tell more")
