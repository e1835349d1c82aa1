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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..facts.reader import Reader
from ..gpu.driver import GENERATED, STATIC
from ..names import unit_name
from ..redaction import NAME, find_secrets, is_secret, redact
from ..text import printable
from .evidence import read_evidence, run
from .render import render

JOURNAL_LINES = 300
LONGEST_FILE = 262_144
_FILE = re.compile(rf"{NAME}|\.pem$|\.htpasswd", re.IGNORECASE)
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


def _collect_files(reader: Reader) -> tuple[dict[str, str], set[str]]:
    """Return the configuration files by name in the archive, and the secrets of files that are left out."""
    found: dict[str, str] = {}
    secrets: set[str] = set()
    directories = [reader.paths.etc, reader.at(STATIC), reader.at(GENERATED)]
    places = [path for directory in directories for path in directory.rglob("*")]
    places += [path for pattern in RECORDS for path in reader.paths.state.glob(pattern)]
    files = [path for path in places if path.is_file()]
    for path in (reader.at("etc/os-release"), reader.at("etc/docker/daemon.json"), *files):
        name = f"files{path}"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}\n"
            continue
        ours = path.parent == reader.paths.secrets
        if ours or _FILE.search(path.name):
            words = [line.partition("=")[2] or line for line in text.splitlines()]
            secrets |= {word for word in (words if ours else re.split(r"[\s=:\"']+", text)) if is_secret(word)}
            found[name] = "left out: by its name it holds a secret\n"
        elif len(text) > LONGEST_FILE:
            found[name] = f"left out: {len(text)} characters\n"
        else:
            found[name] = text
    return found, secrets


def collect(reader: Reader, document: Mapping[str, Any]) -> dict[str, str]:
    """Return every text of the report, redacted, by name in the archive."""
    texts, secrets = _collect_files(reader)
    engines = sorted(path.name for path in (reader.paths.etc / "engines").glob("*"))
    units = [*map(unit_name, engines), *UNITS]
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

    Raises OSError if it cannot be written.
    """
    texts = collect(reader, document)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # also of a file that was there
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode()
            member = tarfile.TarInfo(f"vllm-edge-support/{name.lstrip('/')}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
