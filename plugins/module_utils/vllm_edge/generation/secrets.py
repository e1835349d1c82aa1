# SPDX-License-Identifier: Apache-2.0
"""The secrets of engines on the host: one file for `docker create --env-file` per engine, outside of the generations.

A generation holds a keyed hash of the secrets only, so that new secrets restart an engine by a normal switch. The next
secrets lie beside the file (`<engine>.env.other`) until the switch installs them; the former ones then lie there until
the switch ends, so that a rollback within it starts the engine as it ran. A later switch back to an older generation
uses the file as it is: a key that was rotated does not return.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets as random
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..engine.config import CONFIG_FILE
from ..inventory.engine_inputs import find_secret_fault
from ..paths import HostPaths
from ..system.files import find_wrong_attributes, make_directories, write_durably
from .model import FileChange, Generation, GenerationError

KEY_FILE = "hash.key"
"""Key of the hashes. Without it, a weak secret could be guessed from its hash, which everybody may read."""
SECRET_MODE = 0o600
DIRECTORY_MODE = 0o700
OTHER = "content of other secrets, wanted those of the generation"


def compute_hash(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def render(values: Mapping[str, object]) -> str:
    """Return the file of secrets for the values by environment variable. Raises GenerationError."""
    for name, value in values.items():
        if fault := find_secret_fault(value):
            raise GenerationError(f"The secret for the variable {name} {fault}.")
    return "".join(f"{name}={value}\n" for name, value in sorted(values.items()))


def _read(path: Path) -> str | None:
    """Return the content of a file; None if there is none. A link is not followed."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", newline="") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"{path} cannot be read: {error}. Nothing was changed; move it away.") from error


def _get_other(engine: str, paths: HostPaths) -> Path:
    return paths.secret_file(engine).with_name(f"{engine}.env.other")


def _write(path: Path, text: str) -> None:
    try:
        write_durably(path, text, SECRET_MODE)
    except OSError as error:
        raise GenerationError(f"{path} could not be written: {error}") from error


def prepare(
    wanted: Mapping[str, Mapping[str, object]], paths: HostPaths, *, write: bool
) -> tuple[dict[str, str], list[str]]:
    """Write the secrets of engines beside their files, where they differ, for the next switch to install.

    `wanted` are values by environment variable, by engine. Without `write` the hashes are only computed; without a key
    yet, they are of no use but to differ from all others. Returns the keyed hash of the secrets by engine, and the
    engines whose secrets differ from those on the host. Raises GenerationError.
    """
    texts = {engine: render(values) for engine, values in wanted.items() if values}
    place = paths.secrets / KEY_FILE
    key = _read(place) if texts else ""
    if not key:
        key = random.token_hex(32)
        if write and texts:
            try:
                make_directories(paths.secrets, DIRECTORY_MODE)
                paths.secrets.chmod(DIRECTORY_MODE)
            except OSError as error:
                raise GenerationError(f"{paths.secrets} could not be created: {error}") from error
            _write(place, key)
    differ = [engine for engine, text in texts.items() if _read(paths.secret_file(engine)) != text]
    for engine in differ if write else ():
        if _read(_get_other(engine, paths)) != texts[engine]:
            _write(_get_other(engine, paths), texts[engine])
    return {engine: compute_hash(key, text) for engine, text in texts.items()}, differ


def find_changes(generation: Generation, paths: HostPaths, engines: Iterable[str] | None = None) -> list[FileChange]:
    """Return the files of secrets that `install` would change, without their content. Raises GenerationError."""
    found = []
    for name in generation.engines if engines is None else engines:
        wanted = generation.engines[name].config.secrets_hash if name in generation.engines else ""
        if not wanted:
            continue
        place, key = paths.secret_file(name), _read(paths.secrets / KEY_FILE) or ""
        text, other = _read(place), _read(_get_other(name, paths))
        if text is not None and compute_hash(key, text) == wanted:
            wrong = find_wrong_attributes(place, SECRET_MODE)
        else:
            wrong = OTHER if other is not None and compute_hash(key, other) == wanted else ""
        found += [FileChange(str(place), "", "", wrong)] if wrong else []
    return found


def install(generation: Generation, engine: str, paths: HostPaths) -> None:
    """Exchange the engine's secrets with those beside them if these are the generation's. Raises GenerationError."""
    place, other = paths.secret_file(engine), _get_other(engine, paths)
    text, next_text = _read(place), _read(other)
    wanted, key = generation.engines[engine].config.secrets_hash, _read(paths.secrets / KEY_FILE) or ""
    if next_text is None or compute_hash(key, next_text) != wanted:
        next_text = text
    if next_text is not None:
        _write(place, next_text)
    if text is None and next_text is not None:
        other.unlink(missing_ok=True)
    elif text is not None and text != next_text:
        _write(other, text)


def find_missing(generation: Generation, engines: Iterable[str], paths: HostPaths) -> list[str]:
    """Return the engines of the generation that have secrets of which the host has no file."""
    return [
        name
        for name in engines
        if generation.engines[name].config.secrets_hash
        and not paths.secret_file(name).exists()
        and not find_changes(generation, paths, [name])
    ]


def prune(paths: HostPaths) -> None:
    """Remove what lies beside the secrets, and those of engines that no generation has. Raises GenerationError."""
    try:
        kept = {
            paths.secret_file(file.parent.name)
            for file in (paths.state / "generations").glob(f"*/engines/*/{CONFIG_FILE}")
            if '"secrets_hash"' in file.read_text(encoding="utf-8", errors="replace")
        }
        for path in [*paths.secrets.glob("*.env"), *paths.secrets.glob("*.env.other")]:
            if path not in kept:
                path.unlink()
    except OSError as error:
        raise GenerationError(f"{error.filename} could not be removed: {error}") from error
