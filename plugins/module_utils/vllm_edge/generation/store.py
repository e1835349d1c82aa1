# SPDX-License-Identifier: Apache-2.0
"""Storage of generations on the host: complete, numbered directories with what one activation of a profile needs.

A directory `generations/<number>/` appears by one rename and is never edited. The live files (engines, units, target)
are copies of one generation's files. Which generation the host is committed to is recorded in active-profile.json only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..engine import policy
from ..engine.config import (
    CONFIG_FILE,
    CONTAINER_FILE,
    CREATE_FILE,
    Engine,
    EngineConfigError,
    add_labels,
    parse_engine,
    read_container,
)
from ..engine.reasons import list_lines
from ..names import ENGINE_NAME, TARGET, unit_name
from ..paths import HostPaths
from ..system.files import make_directories, name_errors, sync, write_durably
from .build import OF_NO_ENGINE, EngineFiles, InstalledHash, Rendered, join_lines
from .committed import committed
from .model import (
    CHAT_FILE,
    DIRECTORY_MODE,
    FORMAT,
    STORED_MODE,
    Committed,
    Generation,
    GenerationError,
    Limits,
)


def load_committed(paths: HostPaths) -> Generation | None:
    """Read and check the committed generation; None if nothing was committed yet. Raises GenerationError."""
    now = committed(paths)
    return load(paths, now.generation) if now else None


def numbers(paths: HostPaths) -> list[int]:
    """Return the numbers of the generations with a directory, intact or not, sorted. Raises GenerationError."""
    try:
        names = [entry.name for entry in (paths.state / "generations").iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GenerationError(f"{paths.state / 'generations'} cannot be read: {error}") from error
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name))


def load(paths: HostPaths, number: int) -> Generation:
    """Read a generation and check all its files against the digest. Raises GenerationError."""
    directory = paths.generation_dir(number)
    if number not in numbers(paths):
        there = ", ".join(map(str, numbers(paths))) or "none"
        raise GenerationError(f"there is no generation {number} on this host ({directory}); there are: {there}")
    return load_directory(directory, number)


def load_directory(directory: Path, number: int) -> Generation:
    """Read and check a generation in any directory, such as one not in its place yet. Raises GenerationError."""
    cause: Exception
    try:
        return _load(directory, number)
    except FileNotFoundError as error:
        why, cause = f"{error.filename} is missing", error
    except (EngineConfigError, OSError, UnicodeDecodeError) as error:
        why, cause = str(error), error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"key {error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        why, cause = f"{directory / 'generation.json'}: {what}", error
    raise GenerationError(
        f"generation {number} is damaged: {why}. Where it is what the inventory says, site.yml writes it again; "
        "engines that run do not need it."
    ) from cause


def _load(directory: Path, number: int) -> Generation:
    data = json.loads((directory / "generation.json").read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise ValueError(f"format is {data['format']!r}, this program reads {FORMAT}")
    if data["generation"] != number:
        raise ValueError(f"generation is {data['generation']!r}, its directory says {number}")
    engines: dict[str, Engine] = {}
    files: dict[str, EngineFiles] = {}
    for name, row in data["engines"].items():
        if not ENGINE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no engine name")
        place = directory / "engines" / name
        text = (place / CONFIG_FILE).read_text(encoding="utf-8")
        config = parse_engine(text, str(place / CONFIG_FILE))
        if (config.engine, config.input_hash, config.generation) != (name, row["input_hash"], row["generation"]):
            raise ValueError(f"engine {name} is not the one that its {CONFIG_FILE} describes")
        chat = place / CHAT_FILE
        engines[name] = Engine(config, read_container(place))
        files[name] = EngineFiles(
            container=engines[name].container,
            unit=(directory / "units" / config.unit).read_text(encoding="utf-8"),
            config={key: value for key, value in json.loads(text).items() if key not in OF_NO_ENGINE},
            chat_template=chat.read_text(encoding="utf-8") if chat.exists() else None,
            input_hash=config.input_hash,
            content_hash=row.get("content_hash", ""),
        )
    known = {item.name for item in fields(Limits)}
    settings = {key: data[key] for key in ("profile", "budgets_mib", "foreign")} | {
        "limits": Limits(**{key: value for key, value in data["limits"].items() if key in known}),
        "quality": data.get("quality"),
        "purpose": data.get("purpose", "serving"),
        "early": data.get("early", True),
    }
    target = (directory / "units" / TARGET).read_text(encoding="utf-8")
    rendered = Rendered(engines=files, target=target, **settings)
    if rendered.digest != data["digest"]:
        raise ValueError(f"a file of {directory} was changed: their digest is not the recorded {data['digest'][:12]}")
    written = {"digest": rendered.digest, "created_at": data["created_at"], "directory": directory}
    return Generation(number=number, engines=engines, **written, **settings)


def read_installed_hashes(paths: HostPaths) -> Mapping[str, InstalledHash]:
    """Return what is recorded of the hashes of the committed generation's engines, by engine.

    A part that cannot be read is left out: without it an engine is compared by its input hash alone.
    """
    try:
        now = committed(paths)
        directory = paths.generation_dir(now.generation if now else 0)
        rows = json.loads((directory / "generation.json").read_text(encoding="utf-8"))["engines"]
        found = {
            str(name): (row["input_hash"], row.get("content_hash", row["input_hash"])) for name, row in rows.items()
        }
    except (GenerationError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    units = {name: directory / "units" / unit_name(name) for name in found}
    texts = {name: unit.read_text(encoding="utf-8", errors="replace") for name, unit in units.items() if unit.is_file()}
    return {name: InstalledHash(*hashes, texts.get(name, "")) for name, hashes in found.items()}


def choose_number(digest: str, paths: HostPaths) -> int:
    """Return the number for a generation with this digest.

    It is the committed number if that generation is the same, else the number of another stored generation that is the
    same, else a new one. Raises GenerationError.
    """
    now = committed(paths)
    if now is not None and now.digest == digest:
        return now.generation
    there = numbers(paths)
    for number in reversed(there):
        if (now is None or number != now.generation) and _read_recorded_digest(paths, number) == digest:
            return number
    return max([*there, now.generation if now else 0, 0]) + 1


def _read_recorded_digest(paths: HostPaths, number: int) -> str | None:
    try:
        data = json.loads((paths.generation_dir(number) / "generation.json").read_text(encoding="utf-8"))
        return str(data["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _mark_engines(rendered: Rendered, number: int, now: Committed | None) -> dict[str, dict[str, Any]]:
    """Return `Generation.marks` of a generation with this number; `now` is the committed one.

    An engine that is in the committed generation unchanged keeps the generation number in its container's label.
    """
    former = now.engines if now else {}
    marks: dict[str, dict[str, Any]] = {}
    for name, input_hash in rendered.hashes.items():
        known = former.get(name)
        mine = known.generation if known and known.input_hash == input_hash else number
        marks[name] = {"input_hash": input_hash, "generation": mine}
    return marks


def documents(rendered: Rendered, number: int, now: Committed | None, created_at: str) -> dict[str, str]:
    """Return the files of a generation, by path in its directory; `now` is the committed one."""
    files = {f"units/{TARGET}": rendered.target}
    rows: dict[str, dict[str, Any]] = {}
    for name, mark in _mark_engines(rendered, number, now).items():
        engine = rendered.engines[name]
        rows[name] = {**mark, **({"content_hash": engine.content_hash} if engine.content_hash else {})}
        config = {**engine.config, **mark}
        files[f"engines/{name}/{CONFIG_FILE}"] = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        container = {"arguments": list(engine.container)}
        files[f"engines/{name}/{CONTAINER_FILE}"] = json.dumps(container, indent=2, ensure_ascii=False) + "\n"
        files[f"engines/{name}/{CREATE_FILE}"] = join_lines(
            list_lines(add_labels(engine.container, **mark), config.get("plan"))
        )
        files[f"units/{engine.config['unit']}"] = engine.unit
        if engine.chat_template is not None:
            files[f"engines/{name}/{CHAT_FILE}"] = engine.chat_template
    described = {
        "format": FORMAT,
        "generation": number,
        "digest": rendered.digest,
        "created_at": created_at,
        "engines": rows,
        **rendered.settings,
    }
    files["generation.json"] = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    return files


def write_directory(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of a generation below an existing directory and flush them to disk. Raises GenerationError."""
    try:
        for name, text in files.items():
            write_durably(directory / name, text, STORED_MODE)
        for place in [directory, *(entry for entry in directory.rglob("*") if entry.is_dir())]:
            place.chmod(DIRECTORY_MODE)
            sync(place)
    except OSError as error:
        raise GenerationError(f"generation could not be written below {directory}: {error}") from error


def is_written(rendered: Rendered, number: int, now: Committed | None, paths: HostPaths) -> str | None:
    """Return what is wrong with the directory of a generation, or None if it is intact and as rendered."""
    if not paths.generation_dir(number).exists():
        return "it is not there"
    try:
        there = load(paths, number)
    except GenerationError as error:
        return str(error)
    if there.digest != rendered.digest:
        return f"it is another one: its digest is {there.digest[:12]}, rendered is {rendered.digest[:12]}"
    return None if there.marks == _mark_engines(rendered, number, now) else "its engines carry numbers of another time"


def put(staged: Path, number: int, paths: HostPaths) -> None:
    """Move a directory that `stage` made to the place of a generation, by one rename.

    A damaged generation in that place is set aside first and removed afterwards. Raises GenerationError.
    """
    place = paths.generation_dir(number)
    aside = place.with_name(f".former-{number}-{os.getpid()}")
    try:
        with name_errors(place):
            if place.exists():
                os.rename(place, aside)
            os.rename(staged, place)
        sync(place.parent)
    except OSError as error:
        raise GenerationError(f"{place} could not be written: {error}") from error
    shutil.rmtree(aside, ignore_errors=True)


def stage(paths: HostPaths) -> Path:
    """Create a directory beside the generations, for `write_directory` and `put`. Raises GenerationError.

    Directories that interrupted runs left are removed.
    """
    root = paths.state / "generations"
    try:
        make_directories(root, DIRECTORY_MODE)
        for entry in root.glob(".new-*"):
            shutil.rmtree(entry, ignore_errors=True)
        with name_errors(root):
            return Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    except OSError as error:
        raise GenerationError(f"{root} cannot be written: {error}") from error


def prune(paths: HostPaths, keep: int, verified: Sequence[int]) -> list[int]:
    """Remove all but `keep` generations, those that were never verified first; return them. Raises GenerationError.

    `verified` is in the order of the last commits, of which the last two stay, as does the committed generation and
    what was before it. The newest stays as well: no number is given twice. With the removed ones go the files of
    `engine.policy`, and the states of engines, that only they named.
    """
    now = committed(paths)
    there = numbers(paths)
    stay = {*verified[-2:], *there[-1:], *((now.generation, now.previous_generation) if now else ())}
    last = {number: place for place, number in enumerate(verified, start=1)}
    worth = sorted(there, key=lambda number: (last.get(number, 0), number))
    old = [number for number in worth[: max(0, len(there) - keep)] if number not in stay]
    for number in old:
        try:
            shutil.rmtree(paths.generation_dir(number))
        except OSError as error:
            raise GenerationError(f"{paths.generation_dir(number)} could not be removed: {error}") from error
    try:
        policy.prune(paths)
        named = {path.name for path in (paths.state / "generations").glob("*/engines/*")}
        for path in paths.engine_state("*").parent.glob("*.json"):
            if path.name.partition(".")[0] not in named:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise GenerationError(f"{error.filename} could not be removed: {error}") from error
    return old
