# SPDX-License-Identifier: Apache-2.0
"""The live files on the host, which are copies of a generation's: /etc/vllm-edge/engines and the systemd units."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..engine.config import CONTAINER_FILE, CREATE_FILE
from ..names import ENGINE_NAME, TARGET, engine_name, unit_name
from ..paths import HostPaths
from ..redaction import find_secrets, redact
from ..system.files import find_wrong_attributes, make_fresh_name, sync, write_durably
from . import secrets
from .model import (
    ENGINE_FILES,
    MARK,
    MODE,
    STORED_MODE,
    Committed,
    FileChange,
    Generation,
    GenerationError,
    SeenEngine,
)


def _map_engine_files(name: str, paths: HostPaths) -> dict[str, Path]:
    unit = unit_name(name)
    return {
        **{f"engines/{name}/{file}": paths.engine_dir(name) / file for file in ENGINE_FILES},
        f"units/{unit}": paths.unit_file(unit),
    }


def list_live_engines(paths: HostPaths) -> list[str]:
    """Return the engines that have live files, complete or not, sorted."""
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
            name = engine_name(unit.name)
            if ENGINE_NAME.fullmatch(name) and is_engine_unit(_text(unit) or "", name):
                found.add(name)
    return sorted(found)


def is_engine_unit(text: str, engine: str) -> bool:
    # By header and command: an operator may have own units with such names, and ours of the switch are no engines.
    return MARK in text and f"run-engine {engine}\n" in text


def _text(path: Path) -> str | None:
    """Return the content of a file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise GenerationError(f"{path} cannot be read: {error}. Nothing was changed; move it away.") from error


def _choose_mode(path: Path) -> int:
    return STORED_MODE if path.name in (CONTAINER_FILE, CREATE_FILE) else MODE


def _compare_file(place: Path, wanted: str | None) -> FileChange | None:
    there = _text(place)
    if there is None and not os.path.lexists(place):
        return None if wanted is None else FileChange(str(place), None, wanted)
    attributes = find_wrong_attributes(place, _choose_mode(place)) if wanted is not None else ""
    if there == wanted and wanted is not None and not attributes:
        return None
    return FileChange(str(place), there if there is not None else "", wanted, attributes)


def live_places(
    generation: Generation, paths: HostPaths, engines: Iterable[str] | None = None, target: bool = True
) -> dict[Path, str | None]:
    """Return the relevant live files with their wanted content; None means that the file must not exist.

    `engines` are those to consider; None means all of the generation and all with live files.
    """
    names = sorted(generation.engines.keys() | set(list_live_engines(paths))) if engines is None else list(engines)
    wanted: dict[Path, str | None] = {}
    for name in names:
        for inside, place in _map_engine_files(name, paths).items():
            wanted[place] = _text(generation.directory / inside) if name in generation.engines else None
    if target:
        wanted[paths.unit_file(TARGET)] = _text(generation.directory / "units" / TARGET)
    return wanted


def live_changes(
    generation: Generation, paths: HostPaths, engines: Iterable[str] | None = None, target: bool = True
) -> list[FileChange]:
    """Return the live files that differ from the generation in content, mode or (if this runs as root) owner.

    The arguments are those of `live_places`. Raises GenerationError. Files of secrets have no content here.
    """
    named = None if engines is None else list(engines)
    places = live_places(generation, paths, named, target)
    changes = [change for place, text in places.items() if (change := _compare_file(place, text)) is not None]
    return changes + secrets.find_changes(generation, paths, named)


def seen(status: Mapping[str, Any]) -> tuple[list[SeenEngine], list[str]]:
    """Return the engines in `vllm-edge status --format json`, and what is wrong with the target in systemd."""
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
    """Write the live files of these engines, with `target` also the target, where they differ, each by one rename.

    Returns the changed paths. Raises GenerationError.
    """
    changes = live_changes(generation, paths, engines, target)
    for change in changes:
        place = Path(change.path)
        if place.parent == paths.secrets:
            secrets.install(generation, place.stem, paths)
        elif change.after is None:
            _unlink(place)
        else:
            write_file(place, change.after, _choose_mode(place))
    return [change.path for change in changes]


def remove_engine(name: str, paths: HostPaths) -> list[str]:
    """Remove the live files of an engine, not what lies beside them; return their paths. Raises GenerationError."""
    places = list(_map_engine_files(name, paths).values())
    for place in places:
        _unlink(make_fresh_name(place))
    gone = [str(place) for place in places if _unlink(place)]
    directory = paths.engine_dir(name)
    try:
        directory.rmdir()
        gone.append(str(directory))
    except OSError:
        pass  # it does not exist or contains files of others
    return gone


def describe_file_change(change: FileChange) -> str:
    if change.after is None:
        return "it is of an engine that is not in it"
    if change.before is None:
        return "it is missing"
    return change.attributes if change.attributes and change.before == change.after else "its content differs"


def difference(change: FileChange) -> dict[str, Any]:
    """Return one file for Ansible's `--diff`: its content without secrets, or mode and owner if only they differ."""
    if change.before == change.after and change.attributes:
        wrong = [re.fullmatch(r"(\w+) (.*), wanted (.*)", part) for part in change.attributes.split("; ")]
        pairs = [(found[1], found[2], found[3]) for found in wrong if found]
        return {
            "before": {"path": change.path, **{key: before for key, before, _ in pairs}},
            "after": {"path": change.path, **{key: after for key, _, after in pairs}},
        }
    texts = {"before": change.before or "", "after": change.after or ""}
    found = find_secrets(texts.values())
    row: dict[str, Any] = {key: redact(text, found) for key, text in texts.items()}
    if row["before"] == row["after"] and texts["before"] != texts["after"]:
        row["after"] += "# Only values that are not shown differ.\n"
    if change.before is not None:
        row["before_header"] = change.path
    row["after_header"] = change.path if change.after is not None else "/dev/null"
    return row


def build_file_rows(
    generation: Generation, paths: HostPaths, changes: Iterable[FileChange], record: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return all relevant live files and, unless None, the `record` of what is committed, with their differences.

    Each row has `path`, `diff` and, in words, `how` (both empty if the file does not differ); rows are sorted by path.
    """
    places = live_places(generation, paths).items()
    rows = {str(place): {"diff": {}, "how": ""} for place, text in places if text is not None}
    rows |= {change.path: {"diff": difference(change), "how": describe_file_change(change)} for change in changes}
    if record is not None:
        rows[str(paths.active_profile)] = {"diff": dict(record), "how": "it names another generation"}
    return [{"path": path, **row} for path, row in sorted(rows.items())]


def record_difference(
    now: Committed | None, generation: Generation, origin: str, paths: HostPaths, defect: str | None
) -> dict[str, Any] | None:
    """Return how a run changes the record of the committed generation, for `--diff`; None if it does not.

    `defect` is what is wrong with the stored committed generation, if anything.
    """

    def lines(number: int, profile: str, digest: str, chosen: str, state: str) -> str:
        return f"generation: {number}{state}\nprofile: {profile}\ndigest: {digest}\norigin: {chosen}\n"

    state = f" ({defect})" if defect else ""
    before = lines(now.generation, now.profile, now.digest, now.origin, state) if now else ""
    same = now is not None and now.digest == generation.digest
    # The recorded origin stays, unless the inventory has come to choose the same.
    chosen = now.origin if now is not None and same and origin != "inventory" else origin
    after = lines(generation.number, generation.profile, generation.digest, chosen, "")
    header = {"before_header": str(paths.active_profile)} if now else {}
    row = {"before": before, "after": after, **header, "after_header": str(paths.active_profile)}
    return None if before == after else row


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
        sync(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise GenerationError(f"{path} could not be removed: {error}") from error
    return True


def write_file(path: Path, text: str, mode: int = MODE) -> None:
    try:
        write_durably(path, text, mode)
    except OSError as error:
        raise GenerationError(f"{path} could not be written: {error}") from error
