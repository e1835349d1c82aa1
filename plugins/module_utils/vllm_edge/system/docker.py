# SPDX-License-Identifier: Apache-2.0
"""Access to the Docker Engine.

Containers are created with the `docker` command line client, so that the argument file that an operator can read is
exactly what ran. Everything else goes through Docker's API. Callers distinguish two failures: the Engine is away
(`DockerAway`: wait until it is back) and the Engine refuses the request (`DockerRefused`: report it and end).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..names import LABEL_ENGINE, LABEL_INPUT_HASH
from ..text import printable
from .host import SOCKET
from .systemd import Systemd, SystemdError, run_command

T = TypeVar("T")

UNIT_S = 5.0
"""Seconds that systemd may take to show docker.service."""

ANSWER_BYTES = 64 * 2**20
"""Bytes of one answer of Docker's API; the log of 2,000 lines has at most 32 MiB. Our choice."""
MOST_EVENTS = 1000
LINE_CHARS = 2000
"""Characters of a line of a container's log that are kept. Our choice; vLLM's own messages are shorter."""

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ?(.*)", re.DOTALL)
_AWAY_TEXT = re.compile(r"Cannot connect to the Docker daemon|connection refused|error during connect", re.IGNORECASE)


class DockerAway(Exception):
    """The Docker Engine does not answer."""


class DockerRefused(Exception):
    """The Docker Engine answered with an error."""


class ContainerGone(DockerRefused):
    """There is no such container."""


@dataclass(frozen=True)
class Container:
    """State of one container. A list of containers gives the first four fields only."""

    id: str
    name: str
    status: str
    labels: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    image_id: str = ""
    pid: int = 0
    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""
    started_at: str = ""
    finished_at: str = ""

    @property
    def engine(self) -> str | None:
        """Name of the engine that the container belongs to; None if vllm-edge did not create it."""
        return self.labels.get(LABEL_ENGINE)

    @property
    def input_hash(self) -> str | None:
        return self.labels.get(LABEL_INPUT_HASH)

    @property
    def running(self) -> bool:
        return self.status == "running"


@dataclass(frozen=True)
class LogRecord:
    at: str
    """Docker's time stamp (RFC 3339, nanoseconds, UTC). Time stamps can be compared as text."""
    line: str


def parse_container(info: Mapping[str, Any]) -> Container:
    """Convert one object of Docker's `inspect` answer."""
    state, config = info.get("State") or {}, info.get("Config") or {}
    running = state.get("Status") == "running"
    return Container(
        id=info["Id"],
        name=str(info.get("Name", "")).removeprefix("/"),
        status=state.get("Status", ""),
        labels=dict(config.get("Labels") or {}),
        image=config.get("Image", ""),
        image_id=info.get("Image", ""),
        pid=int(state.get("Pid") or 0) if running else 0,
        exit_code=None if running or state.get("Status") == "created" else state.get("ExitCode"),
        oom_killed=bool(state.get("OOMKilled")),
        error=state.get("Error") or "",
        started_at=state.get("StartedAt") or "",
        finished_at=state.get("FinishedAt") or "",
    )


def split_records(chunk: str, previous: str = "") -> list[LogRecord]:
    """Split a piece of log text that carries time stamps into records.

    A progress bar redraws its line with carriage returns; only its last state is kept. Lines are cut to LINE_CHARS: a
    client writes as much as it likes into vLLM's access log, and all later work on a line is to be bounded. `chunk` is
    text as Docker sends it with `timestamps=true`, `previous` a time stamp for a first line that has none (the
    continuation of a long line).
    """
    records: list[LogRecord] = []
    for line in filter(None, chunk.split("\n")):
        if stamped := _TIMESTAMP.match(line):
            previous, line = stamped.groups()
        drawn = [part for part in line.split("\r") if part.strip()]
        records.append(LogRecord(previous, drawn[-1][:LINE_CHARS].rstrip() if drawn else ""))
    return records


def _quote(text: object) -> str:
    """Return a message of Docker as it may be printed: it has texts of images and of other people's containers."""
    return printable(str(text)[:LINE_CHARS])


def parse_stamp(stamp: str) -> float | None:
    """Convert Docker's RFC 3339 time stamp to seconds since the epoch; None for the zero time and malformed text."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z", stamp)
    if not match or stamp.startswith("0001-"):
        return None
    whole = datetime.fromisoformat(match.group(1)).replace(tzinfo=UTC).timestamp()
    return whole + float(match.group(2) or 0)


def find_kill_signal(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the signal of the first `kill` event, which only a client of Docker causes, or None."""
    for event in events:
        if event.get("Action") == "kill":
            signal = str(((event.get("Actor") or {}).get("Attributes") or {}).get("signal", "?"))
            return {"15": "SIGTERM", "9": "SIGKILL", "2": "SIGINT"}.get(signal, f"signal {signal}")
    return None


def parse_listed(entry: Mapping[str, Any]) -> Container:
    names = entry.get("Names") or [entry["Id"][:12]]
    return Container(
        id=entry["Id"],
        name=str(names[0]).lstrip("/"),
        status=str(entry.get("State", "")),
        labels=dict(entry.get("Labels") or {}),
    )


def _send_bounded(send: Callable[..., Any], request: Any, **options: Any) -> Any:
    """Send as requests.Session.send does. Raises ValueError if an answer, not a stream, is longer than ANSWER_BYTES."""
    stream = options.pop("stream", False)
    response = send(request, stream=True, **options)
    if not stream:
        content = bytearray()
        for part in response.iter_content(65536):
            content += part
            if len(content) > ANSWER_BYTES:
                response.close()
                raise ValueError(f"it is longer than {ANSWER_BYTES // 2**20} MiB")
        response._content = bytes(content)
    return response


class DockerEngine:
    """The Docker Engine at DOCKER_HOST or at the local socket.

    Every public method may raise DockerAway or DockerRefused. Threads may share one object; each gets its own
    connection, which is made anew after a failure.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, request_timeout_s: float = 30) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._timeout = request_timeout_s
        self._local = threading.local()

    def _connect(self, timeout_s: float) -> Any:
        import docker  # type: ignore[import-untyped,unused-ignore]

        base_url = self._environ.get("DOCKER_HOST") or SOCKET
        # version="auto" asks the Engine for its version, so a client that could be made has reached the Engine.
        client = docker.APIClient(base_url=base_url, version="auto", timeout=timeout_s)
        client.send = functools.partial(_send_bounded, client.send)
        return client

    def _get_client(self) -> Any:
        if getattr(self._local, "client", None) is None:
            self._local.client = self._connect(self._timeout)
        return self._local.client

    def _translate(self, what: str, function: Callable[[], T]) -> T:
        """Call `function`; convert the exceptions of docker-py and requests to those of this file."""
        import docker
        import requests
        import urllib3

        try:
            return function()
        except docker.errors.NotFound as error:
            raise ContainerGone(f"{what}: {_quote(error.explanation or error)}") from error
        except docker.errors.APIError as error:
            raise DockerRefused(f"{what}: {_quote(error.explanation or error)}") from error
        except (
            docker.errors.DockerException,
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            self._local.client = None
            raise DockerAway(_quote(error)) from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DockerRefused(
                f"{what}: Docker's answer has a form that was not expected ({_quote(repr(error))})"
            ) from error

    def _call(self, what: str, function: Callable[[Any], T]) -> T:
        return self._translate(what, lambda: function(self._get_client()))

    def _call_patiently(self, what: str, timeout_s: float, function: Callable[[Any], Any]) -> None:
        """Make a call that may take up to `timeout_s` seconds, longer than the others."""

        def ask(client: Any) -> None:
            client.timeout, before = timeout_s, client.timeout
            try:
                function(client)
            finally:
                client.timeout = before

        self._call(what, ask)

    def ping(self, timeout_s: float) -> None:
        """Check that Docker answers within `timeout_s` seconds."""
        # A separate connection: an existing one may be broken, and the short timeout must not stay set for other calls.
        self._translate("ping", lambda: self._connect(timeout_s).close())

    def live_restore(self) -> bool | None:
        """Return whether containers keep running while Docker is stopped; None if Docker does not say."""
        value = self._call("info", lambda c: c.info().get("LiveRestoreEnabled"))
        return value if isinstance(value, bool) else None

    def find(self, name: str) -> Container | None:
        """Return the container with this name or full id; None if there is none."""
        try:
            found = self._call(f"inspect {name}", lambda c: parse_container(c.inspect_container(name)))
        except ContainerGone:
            return None
        # Docker also accepts the beginning of an id. Only the name or the whole id counts here.
        return found if name in (found.name, found.id) else None

    def create(self, arguments: Sequence[str]) -> str:
        """Create a container without starting it, by arguments of `docker create`, and return its id."""
        client = shutil.which("docker", path=self._environ.get("PATH"))
        if client is None:
            raise DockerRefused("docker create: the command `docker` is not on the PATH: install Docker's client")
        # The image stage loads images. Pulling while a unit starts would make booting depend on a registry.
        pull = [] if any(argument.startswith("--pull") for argument in arguments) else ["--pull=never"]
        # Do not read root's client configuration: a person's contexts and default headers must not affect a service.
        command = [client, "--config", "/nonexistent", "create", *pull, *arguments]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=120,
                env=self._environ,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DockerAway("docker create did not end within 120 s") from error
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[-1]
        text = done.stderr.strip() or f"exit status {done.returncode}"
        if _AWAY_TEXT.search(text):
            raise DockerAway(text)
        raise DockerRefused(f"docker create: {text}")

    def start(self, container_id: str) -> None:
        self._call_patiently("docker start", 120, lambda c: c.start(container_id))

    def wait(self, container_id: str) -> int:
        return self._call("docker wait", lambda c: int(c.wait(container_id)["StatusCode"]))

    def logs(self, container_id: str, *, after: str | None, follow: bool, tail: int | None) -> Iterator[LogRecord]:
        """Yield lines of the container's log with a later time stamp than `after`; of those there are the last `tail`.

        None means all. With `follow` further lines are waited for until the container ends.
        """
        options: dict[str, Any] = {"timestamps": True, "stream": follow, "follow": follow}
        seconds = parse_stamp(after) if after else None
        if seconds is not None and seconds >= 1:
            # Ask for whole seconds, then compare time stamps as text: a float cannot represent nanoseconds.
            options["since"] = int(seconds)
        if tail is not None:
            options["tail"] = tail
        stream = self._call("docker logs", lambda c: c.logs(container_id, **options))
        chunks: Iterator[bytes] = iter(stream if follow else [stream])
        last = ""
        while True:
            chunk = self._call("docker logs", lambda _: next(chunks, None))
            if chunk is None:
                return
            for record in split_records(chunk.decode("utf-8", "replace"), last):
                last = record.at
                if after is None or record.at > after:
                    yield record

    def stop(self, container_id: str, timeout_s: float) -> None:
        """Send SIGTERM to the container, and SIGKILL if it is still running after `timeout_s` seconds."""
        seconds = max(0, round(timeout_s))
        # The request lasts until the container has ended, so the connection needs a longer timeout than that.
        self._call_patiently("docker stop", seconds + 30, lambda c: c.stop(container_id, timeout=seconds))

    def remove(self, container_id: str) -> None:
        self._call("docker rm", lambda c: c.remove_container(container_id, force=True, v=True))

    def killed_from_outside(self, container_id: str, since_s: float) -> str | None:
        """Return the signal that a client of Docker sent to the container in the last `since_s` seconds, or None."""
        now = time.time()
        filters = {"container": container_id, "type": "container", "event": ["kill"]}
        since, until = int(now - since_s), int(now) + 1

        def ask(client: Any) -> str | None:
            answer = itertools.islice(client.events(since=since, until=until, filters=filters), MOST_EVENTS)
            lines = [line for item in answer for line in item.decode().splitlines() if line.strip()]
            return find_kill_signal([json.loads(line) for line in lines])

        return self._call("docker events", ask)

    def listed(self) -> list[Container]:
        return self._call("docker ps", lambda c: [parse_listed(entry) for entry in c.containers(all=True)])

    def kill(self, container_id: str) -> None:
        self._call("docker kill", lambda c: c.kill(container_id))

    def image_id(self, name: str) -> str | None:
        try:
            return self._call(f"docker image inspect {name}", lambda c: str(c.inspect_image(name)["Id"]))
        except ContainerGone:
            return None


@dataclass(frozen=True)
class DockerUnit:
    active: bool
    invocation: str
    """systemd's InvocationID, which changes with every start of the unit."""


def docker_unit() -> DockerUnit | None:
    """Return the state of docker.service; None if systemd or the unit is unknown, or DOCKER_HOST names another Docker.

    Callers check this before they touch the socket: with socket activation a mere connection would start a Docker
    Engine that an operator or a package upgrade has just stopped.
    """
    if os.environ.get("DOCKER_HOST", SOCKET) not in (SOCKET, "unix:///run/docker.sock"):
        return None
    try:
        unit = Systemd(lambda command, _: run_command(command, UNIT_S)).show(["docker.service"])["docker.service"]
    except SystemdError:
        return None
    if unit.load_state != "loaded":
        return None
    return DockerUnit(unit.active_state in ("active", "activating", "reloading"), unit.invocation)


def explain_unreachable_docker(ping: Callable[[float], None], unit: DockerUnit | None, timeout_s: float) -> str | None:
    """Return None if the Docker Engine answers, else the reason why not.

    `ping` is `DockerEngine.ping`, which is called only if the unit is active (see `docker_unit`); `unit` is None if its
    state is unknown.
    """
    if unit is not None and not unit.active:
        return "docker.service is not running"
    try:
        ping(timeout_s)
    except (DockerAway, DockerRefused) as error:
        return str(error)
    return None
