# SPDX-License-Identifier: Apache-2.0
"""Why an engine died, and what to do: a table of known signatures over the container's last lines and Docker's facts.

Facts of the kernel and of Docker (killed, removed, stopped, Docker itself gone) stand above all lines, because a log
that was cut off tells of something else. Among the lines the most specific signature stands first and wins; what vLLM
logs and gets past is no cause. `explain` alone decides whether another attempt is worth it. Real logs of both kinds
are in tests/fixtures/explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .signatures import ENGINE_SIGNATURES, SIGNATURES, Explanation, Signature
from .startup import phase_of


@dataclass(frozen=True)
class Death:
    """What is known about an end that nobody asked for."""

    lines: Sequence[str] = ()
    exit_code: int | None = None
    oom_killed: bool = False
    docker_message: str = ""
    was_serving: bool = False
    removed: bool = False
    docker_away: bool = False
    live_restore: bool | None = None
    outside_signal: str | None = None


ENGINE_DEAD = re.compile(
    r"EngineDeadError|EngineCore encountered (?:a fatal error|an issue)|Engine core process .*died unexpectedly|"
    r"Worker proc .*died unexpectedly|Process \S+ \(PID: \d+\) died with exit code"
)
_EXCEPTION = re.compile(r"(?<!raise )(?P<text>\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .+)?)$")
# vLLM tells of settings, of prompts and of failures that may come ("This can cause fd limit errors like ..."), and
# calls the hub's refusal of a local directory an error before it goes on: such a line is no cause.
_NO_CAUSE = re.compile(
    r"(?:DEBUG|INFO|WARNING)(?:\x1b\[[\d;]*m)* \d\d-\d\d \d\d:|Error retrieving |, retrying \d+ of \d+$"
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+')
_CORE_FAILED = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
_SIGNALS = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV", 143: "SIGTERM"}


def _filled(signature: Signature, match: re.Match[str]) -> Explanation:
    groups = {key: (value or "").strip() for key, value in match.groupdict().items()}
    reason = signature.reason.format(**groups)
    # Older versions leave some of the numbers out of their sentence.
    reason = reason.replace(" ( GiB needed,  GiB there)", "").replace(" (tried to allocate )", "").replace(" ()", "")
    remedy = signature.remedy(groups) if callable(signature.remedy) else signature.remedy.format(**groups)
    return Explanation(signature.cause, " ".join(reason.split()).rstrip(":"), remedy, signature.heals)


def _raised_in(lines: Sequence[str], number: int) -> str:
    """Whose code met the exception of a line: the last file of the same process's traceback, but for the parser's."""
    name, mark, _ = lines[number].partition(") ")
    process = name + mark if name.startswith("(") else ""
    for line in reversed(lines[:number]):
        frame = _FRAME.search(line)
        if frame and "/json/" not in frame["file"] and line.startswith(process):
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
            match = signature.pattern.search(lines[number])
            if match and (signature.raised_in is None or signature.raised_in.search(_raised_in(lines, number))):
                return _filled(signature, match)
    return None


def match_lines(lines: Sequence[str], was_serving: bool = False) -> Explanation | None:
    """The most specific known cause among the lines; for one signature the last line that carries it.

    What stands before the last sign of progress was survived, as far as one can tell: it explains the end only where
    nothing later does, and then another attempt may succeed.
    """
    onward = max((number for number, line in enumerate(lines) if phase_of(line)), default=-1) + 1
    found = _match(ENGINE_SIGNATURES, lines, range(onward, len(lines)), was_serving)
    if found is not None:
        return found
    found = _match(ENGINE_SIGNATURES, lines, range(onward), was_serving)
    return replace(found, heals=True) if found is not None else None


def last_exception(lines: Sequence[str]) -> str | None:
    """The last exception a traceback ends with, but not vLLM's summary, which only points above itself."""
    for line in reversed(lines):
        match = None if _NO_CAUSE.search(line) else _EXCEPTION.search(line.rstrip())
        if match and not _CORE_FAILED.search(line) and not ENGINE_DEAD.search(line):
            return match["text"].strip()
    return None


def _ended(death: Death) -> str:
    if death.exit_code is None:
        return "the engine's container ended"
    name = _SIGNALS.get(death.exit_code)
    return f"the engine's container ended with status {death.exit_code}" + (f" ({name})" if name else "")


def explain(death: Death) -> Explanation:
    """One cause for one death. Total: an unknown one is told with what is known."""
    fact = _explain_facts(death)
    if fact is not None:
        return fact
    known = match_lines(death.lines, death.was_serving)
    if known is None:
        return _explain_exit(death)
    # An engine that has served, or that somebody interfered with, is always worth another attempt.
    return replace(known, heals=known.heals or death.was_serving or death.outside_signal is not None)


def _explain_facts(death: Death) -> Explanation | None:
    """What the kernel and Docker know. Only a refusal of Docker can be final."""
    if death.oom_killed:
        return Explanation(
            "oom_killed",
            "the kernel killed a process of the engine because the host's memory, or the container's limit, ran out",
            "Look with `journalctl -k | grep -i oom`; free host memory, or raise the container's --memory",
        )
    if death.removed:
        return Explanation(
            "removed",
            "somebody removed the engine's container with Docker (docker rm)",
            "Use `systemctl stop`, which knows the engine; systemd starts it again now",
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
            f"somebody stopped the engine's container with Docker ({death.outside_signal}), past systemd",
            "Use `systemctl stop`, which knows the engine; systemd starts it again now",
        )
    if death.exit_code == 137:
        return Explanation(
            "sigkill",
            f"{_ended(death)}: killed from outside, by `docker kill`, `docker rm -f` or the host's kernel",
            "Look with `journalctl -k | grep -i -e oom -e killed` and in the shell histories of the operators",
        )
    return None


def _explain_docker_away(death: Death) -> Explanation:
    if death.live_restore:
        # The engine ended by itself, since Docker takes none with it: the log is all that tells of it.
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
    error = last_exception(death.lines)
    said = f": {error}" if error else ""
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
            f"{_ended(death)}: most often /dev/shm of the container is too small",
            "Raise vllm_engine_shm_size (2g for one GPU, 4g for four)",
        )
    if death.exit_code in (0, 143):
        return Explanation(
            "ended_by_itself",
            f"{_ended(death)}, although nobody asked it to",
            "Look at its last lines in the journal",
        )
    return Explanation(
        "unknown", f"{_ended(death)}{said}", "Its last lines in the journal tell more than is known here"
    )


def explain_stall(seconds: float, phase_words: str) -> Explanation:
    """The engine runs, but its log stands still while it should load."""
    return Explanation(
        "stalled",
        f"the engine's log did not advance for {seconds:.0f} s ({phase_words}); it was ended",
        "Where a phase takes that long on this host, raise vllm_engine_stall_timeout_s; with several GPUs think of a "
        "hanging NCCL",
    )


def explain_hang(seconds: float, answer: str) -> Explanation:
    """The engine served, and does not answer any more."""
    return Explanation(
        "hung",
        f"the engine has not answered /health for {seconds:.0f} s ({answer}); systemd's watchdog ended it",
        "systemd starts it again; when it repeats, look at the last requests and at `journalctl -k` for Xid lines",
    )
