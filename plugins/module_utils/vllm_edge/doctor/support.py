# SPDX-License-Identifier: Apache-2.0
"""The support report: evidence about a host in one archive, without secrets.

Secrets are removed in two passes. The first collects everything that looks like a secret (an API key on a command line,
a file whose name says so). The second removes what the patterns match from every text, and the collected values
wherever else they appear.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..gpu.driver import GENERATED, STATIC
from ..names import unit_name
from ..text import printable
from .evidence import read_evidence, run
from .reading import Reader
from .render import render

GONE = "REDACTED"
JOURNAL_LINES = 300
LONGEST_FILE = 262_144
SHORTEST_SECRET = 6
RECORDS = ("*.json", "engines/*.json")
"""Files of the state directory: the active profile, the image, the slots, observations, a switch, states of engines."""
UNITS = (
    "vllm-edge.target",
    "vllm-edge-switch.service",
    "vllm-edge-recover.service",
    "docker.service",
    "nvidia-persistenced.service",
    "nvidia-cdi-refresh.path",
    "nvidia-cdi-refresh.service",
)

# A name of a secret. max_tokens and the tokenizer are none.
_NAME = r"(?:api[-_]?key|(?:\b|[-_.])key(?![a-z])|token(?!s|i[sz])|secret|passw|passphrase|credential)"
_FILE = re.compile(rf"{_NAME}|\.pem$|\.htpasswd", re.IGNORECASE)
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}\]\"']+)"
PATTERNS: tuple[re.Pattern[str], ...] = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<secret>(?:[^-]|-(?!----))*)-----END"),
    # https://user:password@host, and a token alone before the @. # pragma: allowlist secret
    re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://(?P<secret>[^\s/@\"']+)@", re.IGNORECASE),
    re.compile(r"\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9._~+/=-]{6,})", re.IGNORECASE),
    # One argument per line, as in docker-create: the values are on lines of their own.
    re.compile(
        rf"^--[\w-]{{0,50}}{_NAME}[\w-]{{0,50}}\n(?P<secret>(?!-).+(?:\n(?!-).+)*)", re.IGNORECASE | re.MULTILINE
    ),
    # On one line, with all values of an option that takes several.
    re.compile(
        rf"(?<!-)--[\w-]{{0,50}}{_NAME}[\w-]{{0,50}}[ \t]+(?P<secret>(?!-)\S+(?:[ \t]+(?!-)\S+)*)", re.IGNORECASE
    ),
    # NAME=value, name: value and "name": "value".
    re.compile(
        rf"{_NAME}[\w.-]{{0,50}}[\"']?[ \t]{{0,50}}[=:][ \t]{{0,50}}(?P<secret>{_VALUE})", re.IGNORECASE | re.MULTILINE
    ),
    # The form of known tokens, wherever they appear.
    re.compile(r"\b(?P<secret>hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|glpat-[\w-]{12,})"),
)


def find_secrets(texts: Iterable[str]) -> set[str]:
    """Return the values that a pattern matches.

    Short values and plain numbers are left out, because removing them everywhere would destroy evidence.
    """
    found: set[str] = set()
    for text in texts:
        for pattern in PATTERNS:
            for match in pattern.finditer(text):
                for word in match["secret"].split():
                    value = word.strip("\"',;")
                    # user:password of an address: the password alone may appear elsewhere.
                    found |= {part for part in (value, value.rpartition(":")[2]) if _is_secret(part)}
    return found


def _is_secret(value: str) -> bool:
    return len(value) >= SHORTEST_SECRET and not re.fullmatch(r"[\d.]+|true|false|null|none|REDACTED", value, re.I)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace in a text what a pattern matches, and the given values."""

    def without(match: re.Match[str]) -> str:
        start, end = match.span("secret")
        secret = match["secret"]
        kept = f"{secret[0]}{GONE}{secret[-1]}" if secret[:1] in ("'", '"') and secret[:1] == secret[-1:] else GONE
        return match.string[match.start() : start] + kept + match.string[end : match.end()]

    for pattern in PATTERNS:
        text = pattern.sub(without, text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, GONE)
    return text


def _collect_files(reader: Reader) -> tuple[dict[str, str], set[str]]:
    """Return the configuration files by name in the archive, and the secrets of files that are left out."""
    found: dict[str, str] = {}
    secrets: set[str] = set()
    single = ("etc/os-release", "etc/docker/daemon.json")
    places = [reader.at(path) for path in single]
    for directory in (reader.paths.etc, reader.at(STATIC), reader.at(GENERATED)):
        places += sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    state = reader.paths.state
    places += sorted(path for pattern in RECORDS for path in state.glob(pattern) if path.is_file())
    for path in places:
        name = f"files{path}"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}\n"
            continue
        if _FILE.search(path.name):
            secrets |= {word for word in re.split(r"[\s=:\"']+", text) if _is_secret(word)}
            found[name] = "left out: by its name it holds a secret\n"
        elif len(text) > LONGEST_FILE:
            found[name] = f"left out: {len(text)} characters\n"
        else:
            found[name] = text
    return found, secrets


def collect(reader: Reader, document: Mapping[str, Any]) -> dict[str, str]:
    """Return every text of the report, redacted, by name in the archive.

    Args:
        document: what `examine` returned.
    """
    texts, secrets = _collect_files(reader)
    engines = (
        sorted(path.name for path in (reader.paths.etc / "engines").glob("*")) if reader.paths.etc.is_dir() else []
    )
    units = [*(unit_name(engine) for engine in engines), *UNITS]
    texts |= read_evidence(reader, engines, units)
    texts["units.txt"] = run(reader, "systemctl", "--no-pager", "--full", "--lines=0", "status", *units)
    for unit in units:
        command = ("journalctl", "--no-pager", "--output=short-iso", f"--lines={JOURNAL_LINES}", f"--unit={unit}")
        texts[f"journal/{unit}.log"] = run(reader, *command)
    texts["doctor.json"] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    texts["doctor.txt"] = "\n".join(render(document)) + "\n"
    secrets |= find_secrets(texts.values())
    return {redact(name, secrets): printable(redact(text, secrets)) for name, text in sorted(texts.items())}


def write_report(path: Path, reader: Reader, document: Mapping[str, Any]) -> None:
    """Write the report as tar.gz that only its owner may read, because the logs of engines may contain data of users.

    Raises:
        OSError: if it cannot be written.
    """
    texts = collect(reader, document)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode()
            member = tarfile.TarInfo(f"vllm-edge-support/{name.lstrip('/')}")
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
