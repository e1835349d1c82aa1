# SPDX-License-Identifier: Apache-2.0
"""The Docker Engine as the supervisor needs it: a small interface, and the real one behind it.

`docker create` goes through the command line client, so that the argument file an operator reads is exactly what
ran; everything else goes through the API. Two failures matter and have types of their own: the Engine is away
(wait, it comes back) and the Engine refuses (say so, and end).
"""

from __future__ import annotations

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
from typing import Any, Protocol

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ?(.*)", re.DOTALL)
_AWAY_TEXT = re.compile(r"Cannot connect to the Docker daemon|connection refused|error during connect", re.IGNORECASE)


class DockerAway(Exception):
    """The Docker Engine does not answer."""


class DockerRefused(Exception):
    """The Docker Engine answered with an error."""


class ContainerGone(DockerRefused):
    """No such container."""


@dataclass(frozen=True)
class Container:
    """What the supervisor wants to know of one container."""

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
    # Addresses on the container's own networks, `host:port`, reachable from this host without Docker's proxy.
    direct: tuple[str, ...] = ()
    # Addresses of this host that its ports are published on, `host:port`; without a host it is every address.
    published: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        return self.status == "running"


@dataclass(frozen=True)
class LogRecord:
    """One line of a container's log; `at` is Docker's own time stamp, which sorts as text."""

    at: str
    line: str


class Docker(Protocol):
    """What the supervisor asks of Docker. Every call raises DockerAway or DockerRefused."""

    def ping(self, timeout_s: float) -> None: ...

    def live_restore(self) -> bool | None: ...

    def find(self, name: str) -> Container | None: ...

    def create(self, arguments: Sequence[str]) -> str: ...

    def start(self, container_id: str) -> None: ...

    def wait(self, container_id: str) -> int: ...

    def logs(self, container_id: str, *, after: str | None, follow: bool, tail: int | None) -> Iterator[LogRecord]: ...

    def stop(self, container_id: str, timeout_s: float) -> None: ...

    def remove(self, container_id: str) -> None: ...

    def killed_from_outside(self, container_id: str, since_s: float) -> str | None: ...


def container_from_inspect(info: Mapping[str, Any]) -> Container:
    """Docker's answer to `inspect`, reduced."""
    state = info.get("State") or {}
    config = info.get("Config") or {}
    networks = (info.get("NetworkSettings") or {}).get("Networks") or {}
    ports = (info.get("HostConfig") or {}).get("PortBindings") or {}
    addresses = [net["IPAddress"] for net in networks.values() if net and net.get("IPAddress")]
    inner = [port.split("/")[0] for port in ports if port.endswith("/tcp")]
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
        direct=tuple(f"{address}:{port}" for address in addresses for port in inner),
        published=tuple(
            f"{binding.get('HostIp', '')}:{binding.get('HostPort', '')}"
            for bindings in ports.values()
            for binding in bindings or ()
        ),
    )


def split_records(chunk: str, previous: str = "") -> list[LogRecord]:
    """Time-stamped log text as records. A progress bar redraws its line (carriage returns): its last state counts."""
    records: list[LogRecord] = []
    for raw in chunk.split("\n"):
        if raw == "":
            continue
        stamped = _TIMESTAMP.match(raw)
        at, line = (stamped.group(1), stamped.group(2)) if stamped else (previous, raw)
        previous = at
        drawn = [part for part in line.split("\r") if part.strip()]
        records.append(LogRecord(at, drawn[-1].rstrip() if drawn else ""))
    return records


def stamp_seconds(stamp: str) -> float | None:
    """Docker's RFC 3339 time stamp in seconds since the epoch; None for the zero time and for nonsense."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z", stamp)
    if not match or stamp.startswith("0001-"):
        return None
    whole = datetime.fromisoformat(match.group(1)).replace(tzinfo=UTC).timestamp()
    return whole + float(match.group(2) or 0)


def killed_by(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The signal of the first `kill` that a client of Docker sent, in words, or None."""
    for event in events:
        if event.get("Action") == "kill":
            signal = str(((event.get("Actor") or {}).get("Attributes") or {}).get("signal", "?"))
            return {"15": "SIGTERM", "9": "SIGKILL", "2": "SIGINT"}.get(signal, f"signal {signal}")
    return None


class DockerEngine:
    """The real thing. Threads share the object; each has a connection of its own."""

    def __init__(self, environ: Mapping[str, str] | None = None, request_timeout_s: float = 30) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._timeout = request_timeout_s
        self._local = threading.local()

    def _connect(self, timeout_s: float) -> Any:
        import docker  # type: ignore[import-untyped,unused-ignore]

        base_url = self._environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        # version="auto" asks the Engine for its version: a client that exists has been answered.
        return docker.APIClient(base_url=base_url, version="auto", timeout=timeout_s)

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._connect(self._timeout)
            self._local.client = client
        return client

    def _translate(self, what: str, function: Callable[[], Any]) -> Any:
        """Docker's and requests' many errors as our two."""
        import docker
        import requests
        import urllib3

        try:
            return function()
        except docker.errors.NotFound as error:
            raise ContainerGone(f"{what}: {error.explanation or error}") from error
        except docker.errors.APIError as error:
            raise DockerRefused(f"{what}: {error.explanation or error}") from error
        except (
            docker.errors.DockerException,
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            self._local.client = None
            raise DockerAway(str(error)) from error

    def _call(self, what: str, function: Callable[[Any], Any]) -> Any:
        return self._translate(what, lambda: function(self._client()))

    def _patient(self, what: str, timeout_s: float, function: Callable[[Any], Any]) -> None:
        """A call that may take longer than the others."""

        def ask(client: Any) -> None:
            client.timeout, before = timeout_s, client.timeout
            try:
                function(client)
            finally:
                client.timeout = before

        self._call(what, ask)

    def ping(self, timeout_s: float) -> None:
        # A connection of its own: an old one may be broken, and the short timeout must not stick to other calls.
        self._translate("ping", lambda: self._connect(timeout_s).close())

    def live_restore(self) -> bool | None:
        value = self._call("info", lambda c: c.info()).get("LiveRestoreEnabled")
        return value if isinstance(value, bool) else None

    def find(self, name: str) -> Container | None:
        try:
            info = self._call(f"inspect {name}", lambda c: c.inspect_container(name))
        except ContainerGone:
            return None
        found = container_from_inspect(info)
        # Docker also answers to the beginning of an id; only the name, or the whole id, is meant.
        return found if name in (found.name, found.id) else None

    def create(self, arguments: Sequence[str]) -> str:
        client = shutil.which("docker", path=self._environ.get("PATH"))
        if client is None:
            raise DockerRefused("docker create: the command `docker` is not on the PATH: install Docker's client")
        # An image is brought by the image stage; pulling while a unit starts would make booting depend on a registry.
        pull = [] if any(argument.startswith("--pull") for argument in arguments) else ["--pull=never"]
        # No client configuration of root's home: contexts and default headers of a person must not reach a service.
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
        self._patient("docker start", 120, lambda c: c.start(container_id))

    def wait(self, container_id: str) -> int:
        answer = self._call("docker wait", lambda c: c.wait(container_id))
        return int(answer["StatusCode"])

    def logs(self, container_id: str, *, after: str | None, follow: bool, tail: int | None) -> Iterator[LogRecord]:
        options: dict[str, Any] = {
            "stdout": True,
            "stderr": True,
            "timestamps": True,
            "stream": follow,
            "follow": follow,
        }
        seconds = stamp_seconds(after) if after else None
        if seconds is not None and seconds >= 1:
            # Whole seconds, then compared as text: a float cannot hold nanoseconds.
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
        seconds = max(0, round(timeout_s))
        # The request lasts as long as the container takes: the connection needs a longer patience than that.
        self._patient("docker stop", seconds + 30, lambda c: c.stop(container_id, timeout=seconds))

    def remove(self, container_id: str) -> None:
        self._call("docker rm", lambda c: c.remove_container(container_id, force=True, v=True))

    def killed_from_outside(self, container_id: str, since_s: float) -> str | None:
        now = time.time()
        filters = {"container": container_id, "type": "container", "event": ["kill"]}
        since, until = int(now - since_s), int(now) + 1
        answer = self._call("docker events", lambda c: list(c.events(since=since, until=until, filters=filters)))
        return killed_by([json.loads(line) for item in answer for line in item.decode().splitlines() if line.strip()])


@dataclass(frozen=True)
class DockerUnit:
    """docker.service as systemd sees it; `invocation` changes with every start."""

    active: bool
    invocation: str


def docker_unit(environ: Mapping[str, str] | None = None) -> DockerUnit | None:
    """What systemd says of docker.service; None where systemd or the unit is not known.

    Asked before the socket is touched: with socket activation a mere connection would start a Docker Engine that an
    operator (or a package upgrade) has just stopped.
    """
    env = os.environ if environ is None else environ
    if env.get("DOCKER_HOST", "unix:///var/run/docker.sock") not in (
        "unix:///var/run/docker.sock",
        "unix:///run/docker.sock",
    ):
        return None
    command = ["systemctl", "show", "docker.service", "--property=LoadState,ActiveState,InvocationID"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if done.returncode != 0 or shown.get("LoadState") != "loaded":
        return None
    active = shown.get("ActiveState") in ("active", "activating", "reloading")
    return DockerUnit(active, shown.get("InvocationID", ""))


def why_away(ping: Callable[[float], None], unit: DockerUnit | None, timeout_s: float) -> str | None:
    """None when the Docker Engine answers, else why not. Asked only where its unit runs: see `docker_unit`."""
    if unit is not None and not unit.active:
        return "docker.service is not running"
    try:
        ping(timeout_s)
    except (DockerAway, DockerRefused) as error:
        return str(error)
    return None
