# SPDX-License-Identifier: Apache-2.0
"""Makes maps, links and the running gateway fit what clients should see.

Files come first: a gateway that is down reads them when it starts. All new content is written under temporary names
before the first rename, so a full file system changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.state import read_state, stamp
from ..generation.model import Generation
from ..paths import HostPaths
from ..planning.load_on_host import expect_load
from ..system.files import make_fresh_name, sync
from .admin import AdminSocket, GatewayDown, GatewayRefused
from .clients import GatewayError, read_clients, read_temporary
from .names import backend_name
from .view import (
    MODELS,
    STATE,
    Course,
    Maps,
    View,
    build_view,
    keep_seconds,
    parse_text,
    render_clients,
    render_models,
    to_text,
)

CONFIGURATION = "haproxy.cfg"
FILE_MODE, DIRECTORY_MODE = 0o640, 0o710
LOCK_S = 30.0
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


def open_admin(paths: HostPaths) -> AdminSocket:
    return AdminSocket(paths.gateway_run / "admin.sock")


def view_host(paths: HostPaths, live: Generation | None, course: Course | None) -> View:
    def load_seconds(engine: str) -> float | None:
        state = read_state(paths.engine_state(engine))
        if state is not None and state.load_seconds is not None:
            return state.load_seconds
        coming = course.wanted if course is not None and course.keep is not None else None
        found = next((each.engines[engine] for each in (coming, live) if each and engine in each.engines), None)
        expected = expect_load(paths, found.config) if found is not None else None
        return expected.mid if expected is not None else None

    return build_view(socket.gethostname(), live, course, load_seconds)


@contextlib.contextmanager
def lock(paths: HostPaths, patience_s: float = LOCK_S) -> Iterator[None]:
    """Let nobody else change the gateway's files meanwhile. Raises GatewayError after `patience_s`."""
    try:
        handle = os.open(paths.gateway, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise GatewayError(f"{paths.gateway} cannot be opened: {error}") from error
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise GatewayError(f"another program has held {paths.gateway} for {patience_s:g} s") from error
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> str | None:
    """Return the text of a regular file of the map's size; None for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        if os.geteuid() != 0 and isinstance(error, PermissionError):
            raise
        return None


def _stage(path: Path, text: str, group: int) -> None:
    fresh = make_fresh_name(path)
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if os.geteuid() == 0:
            os.fchown(handle, 0, group)
        os.fchmod(handle, FILE_MODE)
        os.fsync(handle)


def _list_links(roles: Path) -> dict[str, str]:
    """Return the links in the directory of roles, by name; files of others are left out. Raises OSError."""
    try:
        found = [entry for entry in os.scandir(roles) if entry.is_symlink()]
    except FileNotFoundError:
        return {}
    return {entry.name: os.readlink(entry.path) for entry in found}


@dataclass(frozen=True)
class _Difference:
    """What has to change in the files: content of maps, and targets of links (None removes one)."""

    files: Mapping[Path, str]
    links: Mapping[str, str | None]


def _compare(paths: HostPaths, maps: Maps, view: View) -> _Difference:
    texts = {paths.gateway / name: to_text(entries) for name, entries in maps.items()}
    there = _list_links(paths.run / "roles")
    wanted: dict[str, str | None] = {**dict.fromkeys(there), **view.links}
    return _Difference(
        {path: text for path, text in texts.items() if _read(path) != text},
        {name: target for name, target in wanted.items() if there.get(name) != target},
    )


def _write(paths: HostPaths, difference: _Difference) -> None:
    """Write maps and links: stage everything, rename, and remove at last. Raises OSError; then nothing is lost."""
    group = os.stat(paths.gateway).st_gid
    roles = paths.run / "roles"
    if difference.links and not roles.is_dir():
        roles.mkdir(DIRECTORY_MODE, parents=True)
        if os.geteuid() == 0:
            os.chown(roles, 0, group)
    staged: list[Path] = []
    directory = os.open(roles, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) if difference.links else -1
    try:
        for path, text in difference.files.items():
            staged.append(make_fresh_name(path))
            _stage(path, text, group)
        for name, target in difference.links.items():
            if target is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f".{name}.new", dir_fd=directory)
                staged.append(roles / f".{name}.new")
                os.symlink(target, f".{name}.new", dir_fd=directory)
        for path in difference.files:
            os.rename(make_fresh_name(path), path)
        for name, target in difference.links.items():
            if target is not None:
                os.rename(f".{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory)
        for name, target in difference.links.items():
            if target is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
        if difference.files:
            sync(paths.gateway)
    except BaseException:
        for path in staged:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    finally:
        if directory != -1:
            os.close(directory)


def _tell(
    paths: HostPaths, admin: AdminSocket, maps: Maps, view: View, servers: Mapping[str, bool], check: bool
) -> list[str]:
    """Make the running gateway fit, and return what differed. Raises GatewayDown, GatewayRefused."""
    changes = []
    for name, entries in maps.items():
        there = admin.read_map(paths.gateway / name)
        if there is None or there == entries:
            continue
        changes.append(f"{name} in the running gateway")
        if not check:
            admin.replace_map(paths.gateway / name, entries)
    names = {backend_name(role.name): role for role in view.roles}
    for link, was_away in servers.items():  # one that is missing the doctor names; the play of the gateway brings it
        backend, _, place = link.partition("+")
        if backend not in names:
            continue
        away = link not in names[backend].links
        if was_away == away:
            continue
        changes.append(f"server {f'{place} ' if place else ''}of {names[backend].name} {'away' if away else 'back'}")
        if not check:
            admin.set_away(link, away)
    return changes


def apply(
    paths: HostPaths, look: Callable[[], View], *, check: bool = False, admin: AdminSocket | None = None
) -> Report:
    """Make maps, links and the running gateway fit a view; with `check` only say what would change.

    Where the clients cannot be read, their maps stay as they are, which is a warning. A gateway that does not run is
    neither a failure nor a warning.

    Args:
        look: returns the view, called while nobody else changes the files
        check: change nothing, and take no lock
        admin: the gateway's admin socket; a stand-in for tests

    Raises:
        GatewayError: maps or links cannot be written, or read; none was changed then
    """
    if not is_installed(paths):
        return Report(False)
    warnings: list[str] = []
    with contextlib.nullcontext() if check else lock(paths):
        view = look()
        maps = render_models(view)
        try:
            now = stamp()
            clients = read_temporary(paths.temporary_clients, now) | read_clients(paths.gateway / "clients.json")
            maps |= render_clients(view, clients, now)
        except GatewayError as error:
            warnings.append(str(error))
        try:
            maps = keep_seconds(maps, _read(paths.gateway / MODELS) or "")
            difference = _compare(paths, maps, view)
            if not check:
                _write(paths, difference)
        except OSError as error:
            raise GatewayError(
                f"The gateway's maps and links cannot be {'read' if check else 'written'}: {error}. When the cause is "
                "gone, 'vllm-edge gateway sync' writes them."
            ) from error
        changes = [path.name for path in difference.files] + [f"link {name}" for name in difference.links]
        admin = admin or open_admin(paths)
        answers = True
        try:
            servers = admin.read_servers()
        except GatewayDown:
            answers = False
        else:
            try:
                changes += _tell(paths, admin, maps, view, servers, check)
            except (GatewayDown, GatewayRefused) as refused:
                warnings.append(f"{refused} 'systemctl reload vllm-edge-gateway.service' makes it read the files.")
    away = tuple(role.name for role in view.roles if role.state == "away")
    served = {role.name: len(role.engines) for role in view.roles}
    return Report(True, tuple(changes), tuple(warnings), answers, away, served)


def publish_phase(paths: HostPaths, phase: str | None) -> None:
    """Write the phase of a switch, or that none runs, where `GET /status` shows it. Raises GatewayError, OSError."""
    if not is_installed(paths):
        return
    path, value = paths.gateway / STATE, "null" if phase is None else f'"{phase}"'
    # A phase is over soon, and its switch does not wait for others; that none runs has to be right.
    with lock(paths, 1.0 if phase else LOCK_S):
        entries = parse_text(_read(path) or "")
        if entries.get("switch") in (None, value):
            return
        _write(paths, _Difference({path: to_text({**entries, "switch": value})}, {}))
        with contextlib.suppress(GatewayDown, GatewayRefused):
            open_admin(paths).set_entry(path, "switch", value)
