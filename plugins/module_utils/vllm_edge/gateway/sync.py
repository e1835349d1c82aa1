# SPDX-License-Identifier: Apache-2.0
"""Makes maps, links and the running gateway fit what clients should see.

Files come first: a gateway that is down reads them when it starts. All new content is written under temporary names
before the first rename, so a full file system changes nothing.

The keys of the clients come before everything else and need `clients.json` alone, so that nothing keeps a revoked key
valid. Where the names that are served cannot be read, they stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import __version__
from ..engine.state import read_state, stamp
from ..generation.model import CHAT_FILE, Generation
from ..names import GATEWAY_UNIT
from ..paths import HostPaths
from ..planning.load_time import expect_load
from ..system.files import (
    LockHeld,
    hold_lock,
    make_directories,
    make_fresh_name,
    name_errors,
    read_foreign,
    sync,
    write_fresh,
)
from ..system.systemd import SystemdError
from .admin import GatewayDown, GatewayRefused, HAProxy, Worker, end_worker
from .clients import Client, GatewayBusy, GatewayError, read_clients, read_temporary
from .fleet import read_fleet
from .names import backend_name
from .view import (
    CLIENTS,
    LEAVING,
    MODELS,
    RIGHTS,
    STATE,
    Maps,
    SwitchProgress,
    View,
    build_view,
    drop_ended,
    keep_seconds,
    narrow_rights,
    parse_text,
    render_keys,
    render_models,
    render_rights,
    to_text,
)

CONFIGURATION = "haproxy.cfg"
FILE_MODE, DIRECTORY_MODE = 0o640, 0o710
LOCK_S = 30.0
PATIENCE_S = 10.0
"""Seconds for which a worker that does not answer is asked again."""
MOST_BYTES = 16 * 1024 * 1024
"""Bytes of a map that are read for comparison."""


@dataclass(frozen=True)
class Report:
    """What differed and, unless it was a check, does so no longer; and what could not be done."""

    installed: bool
    """Whether the host has a gateway. If not, nothing was done."""
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    answers: bool = False
    """Whether the gateway runs and was compared."""
    away: tuple[str, ...] = ()
    """Served names that no engine answers for."""
    served: Mapping[str, int] = field(default_factory=dict)
    """By served name of the live generation the number of its engines."""


def is_installed(paths: HostPaths) -> bool:
    return os.path.lexists(paths.gateway / CONFIGURATION)


def open_proxy(paths: HostPaths) -> HAProxy:
    return HAProxy(GATEWAY_UNIT, paths.gateway_run / "master.sock")


OF_THE_HOST = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--disable-custom-all-reduce", "--uds"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens"),
)
"""Arguments of vLLM that decide how an engine fits its GPUs, and not what it answers."""


def hash_service(generation: Generation) -> str:
    """Return 12 hex digits over what a generation means for clients: the same on hosts that serve one profile alike.

    Left out is what two such hosts may differ in: GPUs, their buses and what was planned or measured for them, ports,
    paths, timeouts, budgets, environment, numbers of generations; and the id of the image, which is made on each host
    while its name has the hash of all that it is made of.
    """
    engines = {}
    for name, engine in generation.engines.items():
        config, chat = engine.config, generation.directory / "engines" / name / CHAT_FILE
        engines[name] = [
            *(config.model, config.repo, config.revision, config.precision, config.max_model_len, config.image),
            *(config.served_names, config.stands_in_for, _read(chat)),
            [word for word in engine.vllm_arguments if word.partition("=")[0] not in OF_THE_HOST],
        ]
    return hashlib.sha256(json.dumps(engines, sort_keys=True).encode()).hexdigest()[:12]


def view_host(paths: HostPaths, live: Generation | None, progress: SwitchProgress | None) -> View:
    def load_seconds(engine: str) -> float | None:
        state = read_state(paths.engine_state(engine))
        if state is not None and state.load_seconds is not None:
            return state.load_seconds
        coming = progress.wanted if progress is not None and progress.keep is not None else None
        found = next((each.engines[engine] for each in (coming, live) if each and engine in each.engines), None)
        expected = expect_load(paths, found.config) if found is not None else None
        return expected.mid if expected is not None else None

    try:
        fleet = read_fleet(paths)
    except GatewayError:
        fleet = None  # the doctor says it; what is served does not depend on it
    view = build_view(fleet.host if fleet else socket.gethostname(), live, progress, load_seconds)
    if fleet is None:
        return view
    return replace(view, fleet=fleet.fleet, digest=hash_service(live) if live else None, release=__version__)


@contextlib.contextmanager
def lock(paths: HostPaths, patience_s: float = LOCK_S) -> Iterator[None]:
    """Let nobody else change the gateway's files meanwhile. Raises GatewayError, after `patience_s` GatewayBusy."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(paths.gateway_lock, patience_s))
        except LockHeld as error:
            raise GatewayBusy(f"Another program has held {paths.gateway_lock} for {patience_s:g} s.") from error
        except OSError as error:
            raise GatewayError(f"The lock {paths.gateway_lock} cannot be taken: {error}.") from error
        yield


def _read(path: Path) -> str | None:
    """Return the text of a regular file of the map's size; None for anything else."""
    try:
        return read_foreign(path, MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        if os.geteuid() != 0 and isinstance(error, PermissionError):
            raise
        return None


def read_map(paths: HostPaths, name: str) -> dict[str, str]:
    return parse_text(_read(paths.gateway / name) or "")


def _list_links(roles: Path) -> dict[str, str]:
    try:
        found = [entry for entry in os.scandir(roles) if entry.is_symlink()]
    except FileNotFoundError:
        return {}
    return {entry.name: os.readlink(entry.path) for entry in found}


def _compare(
    paths: HostPaths, maps: Maps, links: Mapping[str, str] | None = None
) -> tuple[dict[Path, str], dict[str, str | None]]:
    """Return the maps that have other content, and the links with another target (None removes one). Raises OSError."""
    texts = {paths.gateway / name: to_text(entries) for name, entries in maps.items()}
    there = _list_links(paths.run / "roles") if links is not None else {}
    wanted: dict[str, str | None] = {**dict.fromkeys(there), **(links or {})}
    return (
        {path: text for path, text in texts.items() if _read(path) != text},
        {name: target for name, target in wanted.items() if there.get(name) != target},
    )


def _write(paths: HostPaths, files: Mapping[Path, str], links: Mapping[str, str | None]) -> None:
    """Write maps and links: stage everything, rename, and remove at last. Raises OSError; then nothing is lost."""
    group = os.stat(paths.gateway).st_gid
    placed = {name: target for name, target in links.items() if target is not None}
    directory = -1

    def remove(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    with contextlib.ExitStack() as end:  # removes what is staged and was not renamed
        if links:
            roles = paths.run / "roles"
            if not roles.is_dir():
                make_directories(roles, DIRECTORY_MODE)
                if os.geteuid() == 0:
                    os.chown(roles, 0, group)
            directory = os.open(roles, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            end.callback(os.close, directory)
        for path, text in files.items():
            end.callback(make_fresh_name(path).unlink, missing_ok=True)
            write_fresh(path, text, FILE_MODE, group)
        for name, target in placed.items():
            remove(f".{name}.new")
            end.callback(remove, f".{name}.new")
            with name_errors(paths.run / "roles" / name):
                os.symlink(target, f".{name}.new", dir_fd=directory)
        for path in files:
            os.rename(make_fresh_name(path), path)
        for name in placed:
            os.rename(f".{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory)
        for name in links.keys() - placed.keys():
            remove(name)
        if files:
            sync(paths.gateway)


@dataclass(frozen=True)
class _Told:
    answers: bool = True
    """Whether the process runs."""
    changes: tuple[str, ...] = ()
    problem: str = ""
    silent: bool = False
    """Whether the worker that takes connections does not answer."""


def _tell(proxy: HAProxy, change: Callable[[Worker], Iterable[str]], check: bool) -> _Told:
    """Make every worker of a process fit by `change`, which returns what differed; with `check` each is asked once.

    A reload meanwhile has a worker that is changed, too. A worker that a former reload has left, and that does not
    answer, is ended with its connections: it would go on with former keys and rights until these have ended.
    """
    done: set[int] = set()
    changes: dict[str, None] = {}
    deadline = time.monotonic() + (0.0 if check else PATIENCE_S)
    while True:
        left = workers = list[Worker]()
        try:
            while True:
                workers = proxy.list_workers()
                left = [worker for worker in workers if worker.pid not in done]
                if not left:
                    return _Told(True, tuple(changes))
                for changed in change(left[0]):
                    changes[changed] = None
                done.add(left[0].pid)
        except GatewayRefused as error:
            text = f"{error} 'systemctl reload {proxy.unit}' makes it read the files."
            return _Told(True, tuple(changes), text)
        except GatewayDown as error:
            reason = str(error)
        if not done:
            try:
                if proxy.is_stopped():
                    return _Told(False)
            except GatewayDown as error:
                reason = str(error)
        if time.monotonic() < deadline:
            time.sleep(0.5)
        elif not left or left[0] is workers[0]:
            text = (
                f"{proxy.unit} runs and does not answer ({reason.rstrip('.')}), so it may still use former keys and "
                f"names. 'systemctl restart {proxy.unit}' makes it read the files, and ends the streams that run."
            )
            return _Told(True, tuple(changes), text, silent=True)
        elif not check and end_worker(left[0].pid):
            done.add(left[0].pid)
            changes[f"former worker {left[0].pid} of {proxy.unit} ended with its streams"] = None
        else:
            text = (
                f"A former worker of {proxy.unit} does not answer ({reason.rstrip('.')}), so it may still use former "
                f"keys and names: 'kill -KILL {left[0].pid}' ends it, and the streams that it still has."
            )
            return _Told(True, tuple(changes), text)


def _change_maps(paths: HostPaths, worker: Worker, maps: Maps, check: bool) -> Iterator[str]:
    """Make the maps of a worker fit, and yield what differed. Raises GatewayDown, GatewayRefused."""
    for name, entries in maps.items():
        there = worker.read_map(paths.gateway / name)
        if there is None or there == entries:
            continue
        yield f"{name} in the running gateway"
        if not check:
            worker.replace_map(paths.gateway / name, entries)


def _change_servers(worker: Worker, view: View, check: bool) -> Iterator[str]:
    """Make the servers of a worker fit, and yield what differed. Raises GatewayDown, GatewayRefused."""
    names = {backend_name(role.name): role for role in view.roles}
    for link, server in worker.read_servers().items():  # one that is missing the doctor names; the play brings it
        backend, _, place = link.partition("+")
        if backend not in names:
            continue
        away = link not in names[backend].links
        if server.away == away:
            continue
        yield f"server {f'{place} ' if place else ''}of {names[backend].name} {'away' if away else 'back'}"
        if not check:
            worker.set_away(link, away)


def read_keys(
    paths: HostPaths, now: str, ask: Callable[[], Mapping[str, str]] = dict
) -> tuple[Mapping[str, Client] | None, dict[str, str], list[str]]:
    """Return the clients, the keys that count, and what could not be read.

    The clients are None if their file is damaged, or is missing although the gateway has keys: those of its map count
    then, or what `ask` returns where that is missing, too. Raises OSError: this user may not read the former keys.
    """
    place = paths.gateway / "clients.json"

    def recall() -> dict[str, str]:
        text = _read(paths.gateway / CLIENTS)
        return drop_ended(ask() if text is None else parse_text(text), now)

    temporary: Mapping[str, Client] = {}
    problems = []
    try:
        temporary = read_temporary(paths.temporary_clients, now)
    except GatewayError as error:
        problems.append(str(error))
    try:
        clients = {**temporary, **(read_clients(place) if os.path.lexists(place) or recall() else {})}
    except GatewayError as error:
        return None, recall() | render_keys(temporary, now), [*problems, str(error)]
    return clients, render_keys(clients, now), problems


def _ask_for_keys(paths: HostPaths, proxy: HAProxy) -> Mapping[str, str]:
    """Return the clients.map of the running gateway; nothing if it does not run or answer."""
    with contextlib.suppress(GatewayDown):
        return proxy.list_workers()[0].read_map(paths.gateway / CLIENTS) or {}
    return {}


def apply(
    paths: HostPaths, look: Callable[[], View | None], *, check: bool = False, proxy: HAProxy | None = None
) -> Report:
    """Make maps, links and the running gateway fit the clients and a view; with `check` only say what would change.

    The keys come first. What cannot be read or told is a warning: where the clients cannot be read, those that are
    known stay, but not longer than their keys count; where the view cannot be read, names and links stay, and rights
    only become fewer. A gateway that does not run is neither a failure nor a warning; one that runs and does not answer
    is reloaded, and asked again. `look` returns the view, or None if names and links shall stay as they are; it is
    called while nobody else changes the files, and may raise GatewayError. A check takes no lock; `proxy` is a stand-in
    for tests. Raises GatewayError: maps or links cannot be written, or read; running processes know the keys all the
    same.
    """
    if not is_installed(paths):
        return Report(False)
    proxy = proxy or open_proxy(paths)
    report, silent = _apply(paths, look, check, proxy)
    if check or not silent:
        return report
    # Without the lock: the reload of the unit synchronizes, too.
    try:
        reloaded = proxy.reload()
    except SystemdError as error:
        return replace(report, warnings=(*report.warnings, f"{error}."))
    return _apply(paths, look, check, proxy)[0] if reloaded else report


def _apply(paths: HostPaths, look: Callable[[], View | None], check: bool, proxy: HAProxy) -> tuple[Report, bool]:
    """Return what `apply` does without a reload, and whether one may help."""
    view: View | None = None
    changes: list[str] = []

    def write(maps: Maps, links: Mapping[str, str] | None = None) -> None:
        try:
            files, moved = _compare(paths, maps, links)
            if not check:
                _write(paths, files, moved)
        except OSError as error:
            raise GatewayError(
                f"The gateway's maps and links cannot be {'read' if check else 'written'}: {error}. When the cause is "
                "gone, 'vllm-edge gateway sync' writes them."
            ) from error
        changes.extend([*(path.name for path in files), *(f"link {name}" for name in moved)])

    with contextlib.nullcontext() if check else lock(paths):
        try:
            clients, keys, warnings = read_keys(paths, stamp(), lambda: _ask_for_keys(paths, proxy))
        except OSError as error:
            raise GatewayError(f"The gateway's maps cannot be read: {error}.") from error
        try:
            write({CLIENTS: keys})
        finally:  # also on a full disk a running process refuses a revoked key
            first = _tell(proxy, lambda one: _change_maps(paths, one, {CLIENTS: keys}, check), check)
        maps: Maps = {}
        try:
            view = look()
        except GatewayError as error:
            warnings.append(str(error))
        if view is not None:
            maps = keep_seconds(render_models(view), _read(paths.gateway / MODELS) or "")
            maps |= render_rights(view, clients) if clients is not None else {}
        elif clients is not None:
            maps = {RIGHTS: narrow_rights(read_map(paths, RIGHTS), clients)}
        write(maps, view.links if view is not None else None)

        def change(worker: Worker) -> Iterator[str]:
            yield from _change_maps(paths, worker, maps, check)
            if view is not None:
                yield from _change_servers(worker, view, check)

        second = first if first.silent else _tell(proxy, change, check)  # a silent one was asked long enough
    roles = view.roles if view is not None else ()
    report = Report(
        True,
        tuple(dict.fromkeys((*changes, *first.changes, *second.changes))),
        tuple(dict.fromkeys(filter(None, (*warnings, first.problem, second.problem)))),
        answers=first.answers and second.answers and not (first.silent or second.silent),
        away=tuple(role.name for role in roles if role.state == "away"),
        served={role.name: len(role.engines) for role in roles},
    )
    return report, first.silent or second.silent


def publish_leaving(paths: HostPaths, names: Iterable[str]) -> tuple[str, ...]:
    """Tell the other hosts of the fleet that these served names leave, while everything here goes on.

    Returns what the running gateway could not be told. Raises GatewayError: the map cannot be written.
    """
    path = paths.gateway / MODELS
    with lock(paths):
        entries = read_map(paths, MODELS)
        rows = {name: entries[name].split(" ") for name in names if name in entries}
        entries |= {name: " ".join((*row[:2], LEAVING, *row[3:])) for name, row in rows.items()}
        try:
            _write(paths, {path: to_text(entries)}, {})
        except OSError as error:
            raise GatewayError(f"{path} cannot be written: {error}.") from error
        told = _tell(open_proxy(paths), lambda worker: _change_maps(paths, worker, {MODELS: entries}, False), False)
    return (told.problem,) if told.problem else ()


def list_leaving(paths: HostPaths) -> list[str]:
    """Return the served names that `publish_leaving` was told of, until the gateway shows others."""
    return [name for name, line in read_map(paths, MODELS).items() if line.split(" ")[2:3] == [LEAVING]]


def publish_phase(paths: HostPaths, phase: str | None) -> None:
    """Write the phase of a switch, or that none runs, where `GET /status` shows it. Raises GatewayError, OSError."""
    if not is_installed(paths):
        return
    path, value = paths.gateway / STATE, "null" if phase is None else f'"{phase}"'
    # A phase is over soon, and its switch does not wait for others; that none runs has to be right.
    with lock(paths, 1.0 if phase else LOCK_S):
        entries = read_map(paths, STATE)
        if entries.get("switch") in (None, value):
            return
        _write(paths, {path: to_text({**entries, "switch": value})}, {})
        with contextlib.suppress(GatewayDown, GatewayRefused):
            for worker in open_proxy(paths).list_workers():
                worker.set_entry(path, "switch", value)
