# SPDX-License-Identifier: Apache-2.0
"""Live files of a generation on the host: /etc/vllm-edge/engines and the units."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..names import ENGINE_NAME, TARGET
from ..paths import HostPaths
from ..system.files import fresh_name, sync, write_durably
from .model import ENGINE_FILES, MARK, MODE, Committed, FileChange, Generation, GenerationError, SeenEngine


def _engine_places(name: str, paths: HostPaths) -> dict[str, Path]:
    """Live files of an engine by their path in a generation."""
    unit = f"vllm-{name}.service"
    return {
        **{f"engines/{name}/{file}": paths.engine_dir(name) / file for file in ENGINE_FILES},
        f"units/{unit}": paths.unit_file(unit),
    }


def live_engines(paths: HostPaths) -> list[str]:
    """Engines that have files of ours among the live ones, be they complete or not."""
    found: set[str] = set()
    root = paths.etc / "engines"
    if root.is_dir():
        found |= {
            entry.name
            for entry in root.iterdir()
            if ENGINE_NAME.fullmatch(entry.name) and any(os.path.lexists(entry / file) for file in ENGINE_FILES)
        }
    if paths.units.is_dir():
        for unit in paths.units.glob("vllm-*.service"):
            name = unit.name.removeprefix("vllm-").removesuffix(".service")
            # By mark and by what it runs: an operator may have units of his own that are called so.
            text = _text(unit) or ""
            if ENGINE_NAME.fullmatch(name) and MARK in text and f"run-engine {name}\n" in text:
                found.add(name)
    return sorted(found)


def _text(path: Path) -> str | None:
    """What is in a file; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise GenerationError(f"{path} cannot be read: {error}. Nothing was changed; move it away.") from error


def _attributes(path: Path) -> str:
    """What is wrong with a file but for its content."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link {os.readlink(path)}, wanted file"
    wrong = []
    mode = stat.S_IMODE(found.st_mode)
    if mode != MODE:
        wrong.append(f"mode {mode:04o}, wanted {MODE:04o}")
    if os.geteuid() == 0 and (found.st_uid, found.st_gid) != (0, 0):
        wrong.append(f"owner {found.st_uid}:{found.st_gid}, wanted 0:0")
    return "; ".join(wrong)


def _change(place: Path, wanted: str | None) -> FileChange | None:
    there = _text(place)
    if there is None and not os.path.lexists(place):
        return None if wanted is None else FileChange(str(place), None, wanted)
    attributes = _attributes(place) if wanted is not None else ""
    if there == wanted and wanted is not None and not attributes:
        return None
    return FileChange(str(place), there if there is not None else "", wanted, attributes)


def live_places(
    generation: Generation, paths: HostPaths, engines: Iterable[str] | None = None, target: bool = True
) -> dict[Path, str | None]:
    """Live files that are of concern, with what has to be in them; None where there must be none."""
    names = sorted(generation.engines.keys() | set(live_engines(paths))) if engines is None else list(engines)
    wanted: dict[Path, str | None] = {}
    for name in names:
        for inside, place in _engine_places(name, paths).items():
            wanted[place] = _text(generation.directory / inside) if name in generation.engines else None
    if target:
        wanted[paths.unit_file(TARGET)] = _text(generation.directory / "units" / TARGET)
    return wanted


def live_changes(
    generation: Generation, paths: HostPaths, engines: Iterable[str] | None = None, target: bool = True
) -> list[FileChange]:
    """Live files that are not what the generation says: content, mode, and owner where this runs as root.

    Of all engines, those included that are not in the generation; or of some.
    """
    places = live_places(generation, paths, engines, target)
    return [change for place, text in places.items() if (change := _change(place, text)) is not None]


def seen(status: Mapping[str, Any]) -> tuple[list[SeenEngine], list[str]]:
    """What `vllm-edge status --format json` says: the engines, and what is wrong with the target in systemd."""
    engines = [
        SeenEngine(
            str(row["engine"]),
            str(row.get("active_state") or "inactive"),
            str(row.get("sub_state") or "dead"),
            row.get("running_input_hash"),
        )
        for row in status.get("engines", [])
    ]
    target = status.get("target") or {}
    stale = [row for row in [target, *status.get("engines", [])] if row.get("need_daemon_reload")]
    wrong = {
        "not enabled": not target.get("enabled"),
        "not active": target.get("active_state") != "active",
        "needs daemon-reload": bool(stale),
    }
    return engines, [words for words, is_so in wrong.items() if is_so]


def install(generation: Generation, paths: HostPaths, engines: Iterable[str], *, target: bool) -> list[str]:
    """Writes live files of these engines where they differ, each by one rename; returns their paths."""
    changes = live_changes(generation, paths, engines, target)
    for change in changes:
        if change.after is None:
            _unlink(Path(change.path))
        else:
            write_file(Path(change.path), change.after)
    return [change.path for change in changes]


def remove_engine(name: str, paths: HostPaths) -> list[str]:
    """Removes the live files of an engine; what an operator put beside them stays. Returns what was removed."""
    places = list(_engine_places(name, paths).values())
    for place in places:
        _unlink(fresh_name(place))
    gone = [str(place) for place in places if _unlink(place)]
    directory = paths.engine_dir(name)
    try:
        directory.rmdir()
        gone.append(str(directory))
    except OSError:
        pass  # it is not there, or holds something that is not ours
    return gone


def difference(change: FileChange) -> dict[str, Any]:
    """One file for `--diff`: its content, or its mode and owner where only they differ."""
    if change.before == change.after and change.attributes:
        wrong = [re.fullmatch(r"(\w+) (.*), wanted (.*)", part) for part in change.attributes.split("; ")]
        pairs = [(found[1], found[2], found[3]) for found in wrong if found]
        return {
            "before": {"path": change.path, **{key: before for key, before, _ in pairs}},
            "after": {"path": change.path, **{key: after for key, _, after in pairs}},
        }
    row: dict[str, Any] = {"before": change.before or "", "after": change.after or ""}
    if change.before is not None:
        row["before_header"] = change.path
    row["after_header"] = change.path if change.after is not None else "/dev/null"
    return row


def file_rows(
    generation: Generation, paths: HostPaths, changes: Iterable[FileChange], record: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Every live file of concern with its difference, and the record of what is committed where that differs."""
    differing = {change.path: difference(change) for change in changes}
    wanted = [str(place) for place, text in live_places(generation, paths).items() if text is not None]
    rows = [{"path": path, "diff": differing.get(path, {})} for path in [*wanted, *(differing.keys() - set(wanted))]]
    if record is not None:
        rows.append({"path": str(paths.active_profile), "diff": dict(record)})
    return sorted(rows, key=lambda row: str(row["path"]))


def record_difference(
    now: Committed | None, generation: Generation, origin: str, paths: HostPaths, defect: str | None
) -> dict[str, Any] | None:
    """What a run changes of what the host remembers; None where it is the same."""

    def lines(number: int, profile: str, digest: str, chosen: str, state: str) -> str:
        return f"generation: {number}{state}\nprofile: {profile}\ndigest: {digest}\norigin: {chosen}\n"

    state = f" ({defect})" if defect else ""
    before = lines(now.generation, now.profile, now.digest, now.origin, state) if now else ""
    same = now is not None and now.digest == generation.digest
    # Who chose it stays what it was, but for the inventory that has come to say the same.
    chosen = now.origin if now is not None and same and origin != "inventory" else origin
    after = lines(generation.number, generation.profile, generation.digest, chosen, "")
    header = {"before_header": str(paths.active_profile)} if now else {}
    row = {"before": before, "after": after, **header, "after_header": str(paths.active_profile)}
    return None if before == after else row


def would(generation: Generation, moves: Mapping[str, Iterable[str]]) -> str:
    """What a switch would do, in a sentence."""
    words = {"stop": "stop", "start": "start", "wait": "wait for", "keep": "keep"}
    parts = [f"{verb} {', '.join(moves[key])}" for key, verb in words.items() if moves[key]]
    head = f"would go to generation {generation.number} ({generation.profile})"
    return f"{head}: {'; '.join(parts) or 'no engine moves'}"


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
        sync(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise GenerationError(f"{path} could not be removed: {error}") from error
    return True


def write_file(path: Path, text: str) -> None:
    try:
        write_durably(path, text, MODE)
    except OSError as error:
        raise GenerationError(f"{path} could not be written: {error}") from error
