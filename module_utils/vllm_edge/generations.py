# SPDX-License-Identifier: Apache-2.0
"""Generations: what one activation of a profile needs on the host, kept complete and numbered, beside the live files.

A directory `generations/<number>/` appears by one rename and is never edited. The live files (engines, units, target)
are copies of one generation's; which one the host is committed to is in active-profile.json, and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .durable import fresh_name, sync, write_durably
from .engine_config import (
    ENGINE_NAME,
    LABEL_ENGINE,
    LABEL_GENERATION,
    LABEL_INPUT_HASH,
    Engine,
    EngineConfigError,
    check_together,
    engine_problems,
    parse_docker_create,
    parse_engine,
)
from .host_paths import HostPaths
from .moves import SeenEngine
from .switching import TARGET, FileChange, Generation, Limits

FORMAT = 1
MODE = 0o644
DIRECTORY_MODE = 0o755
CONFIG_FILE = "engine.json"
CREATE_FILE = "docker-create"
CHAT_FILE = "chat-template.jinja"
ENGINE_FILES = (CONFIG_FILE, CREATE_FILE, CHAT_FILE)
OF_NO_ENGINE = ("input_hash", "generation")
"""Keys of engine.json that follow from the rest and from the generation's number."""
REACH_THE_SUPERVISOR = ("image_id", "stop_timeout_s", "stall_timeout_s", "health_timeout_s", "shutdown_timeout_s")
"""Keys of engine.json whose change is a restart. The others stand in the line of `docker create`, or change nothing."""
MARK = "role vllm_engine of vllm-edge"

Foreign = Literal["ignore", "warn", "fail"]
Origin = Literal["inventory", "-e", "host"]
ORIGINS: tuple[Origin, ...] = ("inventory", "-e", "host")


class GenerationError(Exception):
    """A generation cannot be read or written; the text says which, why, and what would do."""


# -- what was rendered, as a value


def bare(docker_create: str) -> str:
    """The line of `docker create` without the two labels that follow from the rest of it."""
    ours = (f"--label={LABEL_GENERATION}=", f"--label={LABEL_INPUT_HASH}=")
    return "".join(line for line in docker_create.splitlines(keepends=True) if not line.startswith(ours))


def labelled(docker_create: str, generation: int, input_hash: str) -> str:
    """The line of `docker create` with both labels, after the engine's own."""
    lines = docker_create.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines, 1) if line.startswith(f"--label={LABEL_ENGINE}=")]
    if len(places) != 1:
        raise GenerationError(
            f"the line of docker create has {len(places)} arguments --label={LABEL_ENGINE}=..., exactly one is expected"
        )
    labels = [f"--label={LABEL_GENERATION}={generation}\n", f"--label={LABEL_INPUT_HASH}={input_hash}\n"]
    return "".join([*lines[: places[0]], *labels, *lines[places[0] :]])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def input_hash(
    docker_create: str, unit: str, config: Mapping[str, Any], chat_template: str | None, manifest_sha256: str
) -> str:
    """Over everything that reaches the container or its supervisor: where it changes the engine restarts, else not."""
    reaches = {key: config.get(key) for key in REACH_THE_SUPERVISOR}
    return _hash([bare(docker_create), unit, reaches, chat_template, manifest_sha256])


@dataclass(frozen=True)
class EngineFiles:
    """What is rendered for one engine, whatever the number of its generation will be."""

    docker_create: str
    """Without the labels of generation and input hash."""
    unit: str
    config: Mapping[str, Any]
    """engine.json without `input_hash` and `generation`."""
    chat_template: str | None
    input_hash: str


@dataclass(frozen=True)
class Rendered:
    """A generation that has no number yet."""

    profile: str
    engines: Mapping[str, EngineFiles]
    target: str
    budgets_mib: Mapping[str, int]
    foreign: Foreign = "warn"
    limits: Limits = field(default_factory=Limits)

    @property
    def digest(self) -> str:
        return _hash(
            {
                "profile": self.profile,
                "engines": {name: asdict(engine) for name, engine in self.engines.items()},
                "target": self.target,
                "budgets_mib": dict(self.budgets_mib),
                "foreign": self.foreign,
                "limits": asdict(self.limits),
            }
        )

    @property
    def hashes(self) -> dict[str, str]:
        return {name: engine.input_hash for name, engine in self.engines.items()}


def rendered(options: Mapping[str, Any]) -> Rendered:
    """Out of the options of the module `serving_switch`; everything that is wrong is said at once."""
    engines: dict[str, EngineFiles] = {}
    problems: list[str] = []
    for row in options["engines"]:
        name = str(row["name"])
        config = {key: value for key, value in row["config"].items() if key not in OF_NO_ENGINE}
        create, unit, chat = bare(row["docker_create"]), row["unit"], row["chat_template"]
        hashed = input_hash(create, unit, config, chat, row["manifest_sha256"])
        found = engine_problems({**config, "input_hash": hashed, "generation": 1})
        expected = {"engine": name, "unit": f"vllm-{name}.service"}
        found += [
            f"{key} is {config.get(key)!r}, {want!r} is expected"
            for key, want in expected.items()
            if config.get(key) != want
        ]
        if name in engines:
            found.append("it is there twice")
        try:
            parse_docker_create(labelled(create, 1, hashed), CREATE_FILE)
        except (EngineConfigError, GenerationError) as error:
            found.append(str(error))
        problems += [f"engine {name}: {text}" for text in found]
        engines[name] = EngineFiles(create, unit, config, chat, hashed)
    budgets = {}
    for uuid, mib in options["budgets_mib"].items():
        if not str(mib).isdigit():
            problems.append(f"budgets_mib of {uuid} is {mib!r}: MiB, a whole number from 0")
        else:
            budgets[str(uuid)] = int(mib)
    known = {item.name: item for item in fields(Limits)}
    limits: dict[str, Any] = {}
    for key, value in options["limits"].items():
        whole = key == "keep_generations"
        try:
            limits[key] = int(value) if whole else float(value)
        except (ValueError, TypeError):
            problems.append(f"limits: {key} is {value!r}, a number is expected")
        if key not in known:
            problems.append(f"limits: {key} is none of {', '.join(known)}")
    if problems:
        raise GenerationError(f"What was rendered cannot be used: {'; '.join(problems)}.")
    return Rendered(options["profile"], engines, options["target"], budgets, options["foreign"], Limits(**limits))


# -- the committed generation


@dataclass(frozen=True)
class CommittedEngine:
    """One engine of the committed generation."""

    input_hash: str
    generation: int
    """The number in its label: of the generation in which this input hash came."""


@dataclass(frozen=True)
class Committed:
    """active-profile.json."""

    profile: str
    generation: int
    digest: str
    engines: Mapping[str, CommittedEngine]
    origin: Origin = "inventory"
    """Who chose the profile."""
    inventory_profile: str | None = None
    """What the inventory said when it was chosen; None where nobody asked it."""
    chosen_at: str = ""
    previous_generation: int | None = None

    @property
    def hashes(self) -> dict[str, str]:
        return {name: engine.input_hash for name, engine in self.engines.items()}


def parse_committed(text: str, source: str) -> Committed:
    """A file of the older form, without digest and origin, reads as digest `` and origin `inventory`."""
    try:
        data = json.loads(text)
        engines = {
            str(name): CommittedEngine(str(row["input_hash"]), int(row["generation"]))
            for name, row in data["engines"].items()
        }
        previous, inventory = data.get("previous_generation"), data.get("inventory_profile")
        origin = data.get("origin", "inventory")
        if origin not in ORIGINS:
            raise ValueError(f"origin is {origin!r}, one of {', '.join(ORIGINS)} is expected")
        return Committed(
            profile=str(data["profile"]),
            generation=int(data["generation"]),
            digest=str(data.get("digest", "")),
            engines=engines,
            origin=origin,
            inventory_profile=None if inventory is None else str(inventory),
            chosen_at=str(data.get("chosen_at", "")),
            previous_generation=None if previous is None else int(previous),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise GenerationError(
            f"{source} does not say which generation is committed: {why}. Engines that run were not touched. "
            f"`vllm-edge history` knows which one it was; with the file moved away, site.yml chooses anew."
        ) from error


def committed(paths: HostPaths) -> Committed | None:
    """What the host is committed to; None where nothing has been committed yet."""
    path = paths.active_profile
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"{path} cannot be read: {error}") from error
    return parse_committed(text, str(path))


def load_committed(paths: HostPaths) -> Generation | None:
    """The generation that the host is committed to, read and checked; None where nothing has been committed yet."""
    now = committed(paths)
    return load(paths, now.generation) if now else None


def commit(
    generation: Generation, paths: HostPaths, *, origin: str, inventory_profile: str | None, chosen_at: str
) -> None:
    """Makes it the committed generation, by one rename. The one before stays known as the previous."""
    before = _committed_before(paths)
    if before is None or before.generation == generation.number:
        previous = before.previous_generation if before else None
    else:
        previous = before.generation
    value = {
        "profile": generation.profile,
        "generation": generation.number,
        "digest": generation.digest,
        "engines": {
            name: {"input_hash": engine.config.input_hash, "generation": engine.config.generation}
            for name, engine in generation.engines.items()
        },
        "origin": origin,
        "inventory_profile": inventory_profile,
        "chosen_at": chosen_at,
        "previous_generation": previous,
    }
    _write(paths.active_profile, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _committed_before(paths: HostPaths) -> Committed | None:
    """A damaged record has no previous generation; it must not stand in the way of a good one."""
    try:
        return committed(paths)
    except GenerationError:
        return None


# -- reading


def numbers(paths: HostPaths) -> list[int]:
    """Generations that have a directory, whether it is sound or not."""
    try:
        names = [entry.name for entry in (paths.state / "generations").iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GenerationError(f"{paths.state / 'generations'} cannot be read: {error}") from error
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name))


def load(paths: HostPaths, number: int) -> Generation:
    """One generation, every file of it checked against its digest."""
    directory = paths.generation_dir(number)
    if not directory.is_dir():
        there = ", ".join(map(str, numbers(paths))) or "none"
        raise GenerationError(f"there is no generation {number} on this host ({directory}); there are: {there}")
    return load_directory(directory, number)


def load_directory(directory: Path, number: int) -> Generation:
    """The same of a directory anywhere."""
    try:
        return _load(directory, number)
    except EngineConfigError as error:
        raise _damaged(number, str(error)) from error
    except FileNotFoundError as error:
        raise _damaged(number, f"{error.filename} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(number, str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"key {error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise _damaged(number, f"{directory / 'generation.json'}: {why}") from error


def _damaged(number: int, why: str) -> GenerationError:
    return GenerationError(
        f"generation {number} is damaged: {why}. Where it is what the inventory says, site.yml writes it again; "
        "engines that run do not need it."
    )


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
        line = (place / CREATE_FILE).read_text(encoding="utf-8")
        create = parse_docker_create(line, str(place / CREATE_FILE))
        check_together(config, create, str(place / CREATE_FILE))
        if (config.engine, config.input_hash, config.generation) != (name, row["input_hash"], row["generation"]):
            raise ValueError(f"engine {name} is not the one that its {CONFIG_FILE} describes")
        if config.unit != f"vllm-{name}.service":
            raise ValueError(f"unit of engine {name} is {config.unit!r}, vllm-{name}.service is expected")
        chat = place / CHAT_FILE
        engines[name] = Engine(config, create)
        files[name] = EngineFiles(
            docker_create=bare(line),
            unit=(directory / "units" / config.unit).read_text(encoding="utf-8"),
            config={key: value for key, value in json.loads(text).items() if key not in OF_NO_ENGINE},
            chat_template=chat.read_text(encoding="utf-8") if chat.exists() else None,
            input_hash=config.input_hash,
        )
    known = {item.name for item in fields(Limits)}
    rendered = Rendered(
        profile=data["profile"],
        engines=files,
        target=(directory / "units" / TARGET).read_text(encoding="utf-8"),
        budgets_mib=data["budgets_mib"],
        foreign=data["foreign"],
        limits=Limits(**{key: value for key, value in data["limits"].items() if key in known}),
    )
    if rendered.digest != data["digest"]:
        raise ValueError(f"a file of {directory} was changed: their digest is not the recorded {data['digest'][:12]}")
    return Generation(
        number=number,
        profile=rendered.profile,
        digest=rendered.digest,
        created_at=data["created_at"],
        directory=directory,
        engines=engines,
        budgets_mib=rendered.budgets_mib,
        foreign=rendered.foreign,
        limits=rendered.limits,
    )


# -- writing a generation


def number_for(digest: str, paths: HostPaths) -> int:
    """The committed number where that is the same generation, else one that lies there already, else a new one."""
    now = committed(paths)
    if now is not None and now.digest == digest:
        return now.generation
    there = numbers(paths)
    for number in reversed(there):
        if (now is None or number != now.generation) and _recorded_digest(paths, number) == digest:
            return number
    return max([*there, now.generation if now else 0, 0]) + 1


def _recorded_digest(paths: HostPaths, number: int) -> str | None:
    try:
        data = json.loads((paths.generation_dir(number) / "generation.json").read_text(encoding="utf-8"))
        return str(data["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def documents(rendered: Rendered, number: int, now: Committed | None, created_at: str) -> dict[str, str]:
    """The files of a generation by their path in its directory.

    An engine that is in the committed generation as it is keeps the number that its container carries.
    """
    files = {f"units/{TARGET}": rendered.target}
    marks: dict[str, dict[str, object]] = {}
    for name, engine in rendered.engines.items():
        known = now.engines.get(name) if now else None
        mine = known.generation if known and known.input_hash == engine.input_hash else number
        marks[name] = {"input_hash": engine.input_hash, "generation": mine}
        config = {**engine.config, **marks[name]}
        files[f"engines/{name}/{CONFIG_FILE}"] = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        files[f"engines/{name}/{CREATE_FILE}"] = labelled(engine.docker_create, mine, engine.input_hash)
        files[f"units/{engine.config['unit']}"] = engine.unit
        if engine.chat_template is not None:
            files[f"engines/{name}/{CHAT_FILE}"] = engine.chat_template
    described = {
        "format": FORMAT,
        "generation": number,
        "profile": rendered.profile,
        "digest": rendered.digest,
        "created_at": created_at,
        "engines": marks,
        "budgets_mib": dict(rendered.budgets_mib),
        "foreign": rendered.foreign,
        "limits": asdict(rendered.limits),
    }
    files["generation.json"] = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    return files


def write_directory(directory: Path, files: Mapping[str, str]) -> None:
    """Files of a generation below a directory that is there, all of them on disk when this returns."""
    try:
        for name, text in files.items():
            place = directory / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            place.chmod(MODE)
            sync(place)
        for place in [directory, *(entry for entry in directory.rglob("*") if entry.is_dir())]:
            place.chmod(DIRECTORY_MODE)
            sync(place)
    except OSError as error:
        raise GenerationError(f"generation could not be written below {directory}: {error}") from error


def is_written(rendered: Rendered, number: int, now: Committed | None, paths: HostPaths) -> str | None:
    """None where the directory is there, sound, and says just this; else what is wrong with it, in words."""
    if not paths.generation_dir(number).exists():
        return "it is not there"
    try:
        there = load(paths, number)
    except GenerationError as error:
        return str(error)
    if there.digest != rendered.digest:
        return f"it is another one: its digest is {there.digest[:12]}, rendered is {rendered.digest[:12]}"
    wanted = json.loads(documents(rendered, number, now, "")["generation.json"])["engines"]
    marks = {
        name: {"input_hash": engine.config.input_hash, "generation": engine.config.generation}
        for name, engine in there.engines.items()
    }
    return None if marks == wanted else "its engines carry numbers of another time"


def put(staged: Path, number: int, paths: HostPaths) -> None:
    """A directory that was written beside it becomes the generation, by one rename; a damaged one goes after that."""
    place = paths.generation_dir(number)
    aside = place.with_name(f".former-{number}-{os.getpid()}")
    try:
        if place.exists():
            os.rename(place, aside)
        os.rename(staged, place)
        sync(place.parent)
    except OSError as error:
        raise GenerationError(f"{place} could not be written: {error}") from error
    shutil.rmtree(aside, ignore_errors=True)


def stage(paths: HostPaths) -> Path:
    """A directory beside the generations, for `write_directory` and `put`. What a dead run left there is removed."""
    root = paths.state / "generations"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for entry in root.glob(".new-*"):
            shutil.rmtree(entry, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    except OSError as error:
        raise GenerationError(f"{root} cannot be written: {error}") from error


def prune(paths: HostPaths, keep: int) -> list[int]:
    """Removes all but the newest `keep`; never the committed one nor the one before it."""
    now = committed(paths)
    stay = {now.generation, now.previous_generation} if now else set()
    there = numbers(paths)
    old = [number for number in there[: max(0, len(there) - keep)] if number not in stay]
    for number in old:
        try:
            shutil.rmtree(paths.generation_dir(number))
        except OSError as error:
            raise GenerationError(f"{paths.generation_dir(number)} could not be removed: {error}") from error
    return old


# -- the live files


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
            _write(Path(change.path), change.after)
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


# -- what differs, as Ansible shows it


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


# -- files


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
        sync(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise GenerationError(f"{path} could not be removed: {error}") from error
    return True


def _write(path: Path, text: str) -> None:
    try:
        write_durably(path, text, MODE)
    except OSError as error:
        raise GenerationError(f"{path} could not be written: {error}") from error
