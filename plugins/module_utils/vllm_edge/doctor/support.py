# SPDX-License-Identifier: Apache-2.0
"""The support report: evidence about a host in one archive, without secrets.

Secrets are removed in two passes. The first collects everything that looks like a secret (an API key on a command line,
a file whose name says so). The second removes what the patterns match from every text, and the collected values
wherever else they appear.

What only a host with real GPUs can show is in it, too: docs/install.md says what each text settles. Every program has
a time limit (`system.host.ASK_S`), and a part that cannot be had is a sentence with the reason. No memory is allocated
on a GPU that an engine or another process may use.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..facts import dpkg
from ..facts.reader import Reader
from ..gpu import container_probe
from ..gpu.driver import GENERATED, STATIC
from ..names import unit_name
from ..redaction import NAME, find_secrets, is_secret, redact
from ..system.files import name_errors
from ..system.host import Unread
from ..system.systemd import Ran
from ..text import printable
from .render import render

LONGEST = 262_144
"""Most characters of a file or output. Of an output the beginning is kept, where a log has the start of the engine."""
PROBE_CONTAINER = "vllm-edge-support-probe"
BOOT = ("journalctl", "--boot", "--no-pager", "--output=short-monotonic")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "kernel": ("uname", "-a"),
    "kernel-command-line": ("cat", "/proc/cmdline"),
    "kernel-modules": ("cat", "/proc/modules"),
    "packages": ("dpkg-query", "-W", "-f", dpkg.FORMAT, *dpkg.PATTERNS, "docker*", "containerd*"),
    "package-sources": ("apt-cache", "policy"),
    "driver-branches": ("apt-cache", "search", "--names-only", "^nvidia-driver-pinning-"),
    "docker": ("docker", "version"),
    "docker-disk": ("docker", "system", "df"),
    "runc": ("runc", "--version"),
    "nvidia-smi": ("nvidia-smi",),
    "nvidia-smi-memory": ("nvidia-smi", "-q", "-d", "MEMORY,ECC,PERFORMANCE"),
    "nvidia-smi-processes": ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv"),
    "nvidia-smi-topology": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-peers": ("nvidia-smi", "topo", "-p2p", "r"),
    # With the time at which each was created: an ls would need a shell for the pattern.
    "gpu-device-nodes": ("find", "/dev", "-maxdepth", "2", "-path", "/dev/nvidia*", "-ls"),
    "cdi-devices": ("nvidia-ctk", "cdi", "list"),
    "block-devices": ("df", "-h"),
    "boot-duration": ("systemd-analyze", "--no-pager", "critical-chain", "vllm-edge.target"),
    "boot-kernel": (*BOOT, "--dmesg", "--grep=nvidia|NVRM|nouveau|IOMMU|DMAR|AMD-Vi"),
}
UNIT_TIMES = (
    "Id,LoadState,ActiveState,SubState,Result,NRestarts,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic"
)
JOURNAL_LINES = 300
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


def show(command: Sequence[str], ran: Ran | Unread) -> str:
    """Return a command with its output and exit status, or why it has none; programs in arguments are left out."""
    if isinstance(ran, Unread):
        text = f"{ran.why}\n"
    else:
        out = f"{ran.out}{ran.err}"
        if len(out) > LONGEST:
            out = f"{out[:LONGEST]}\n[left out: {len(out) - LONGEST} more characters]"
        text = f"$ {' '.join(command)}\n{out}\n" + (f"exit status {ran.status}\n" if ran.status else "")
    for program in (word for word in command if "\n" in word):
        text = text.replace(program, "...")
    return text


def run(reader: Reader, *command: str) -> str:
    return show(command, reader.ask(*command))


def read_evidence(reader: Reader, engines: Sequence[str], units: Sequence[str]) -> dict[str, str]:
    """Return the texts by name in the archive."""
    texts = {name: run(reader, *command) for name, command in COMMANDS.items()}
    release = re.escape(reader.plain("proc/sys/kernel/osrelease"))
    prebuilt = ("apt-cache", "search", "--full", "--names-only", f"^linux-modules-nvidia-.*-{release}$")
    texts["driver-modules"] = run(reader, *prebuilt)
    texts["boot-times"] = run(reader, "systemctl", "show", f"--property={UNIT_TIMES}", "--", *units)
    texts["unit-files"] = run(reader, "systemctl", "--no-pager", "cat", *units)
    texts["boot-units"] = run(reader, *BOOT, "--identifier=systemd", *(f"--unit={unit}" for unit in units))
    nvidia = [f"--unit={unit}" for unit in units if unit.startswith("nvidia-")]
    texts["boot-nvidia"] = run(reader, *BOOT, *nvidia)
    texts["iommu-groups"] = describe_iommu(reader)
    image = reader.image()
    name = image.name if image and not isinstance(image, Unread) else ""
    texts["image"] = run(reader, "docker", "image", "inspect", name) if name else "no image is recorded\n"
    texts["cuda-new-container"] = probe_idle_gpus(reader, name)
    for engine in engines:
        container = unit_name(engine).removesuffix(".service")
        texts[f"cuda-{engine}"] = run(reader, "docker", "exec", container, *probe())
        log = ("docker", "logs", "--timestamps", container)
        ran = reader.ask(*log)
        if not isinstance(ran, Unread):
            # vLLM writes to both streams; the times bring them together again.
            ran = Ran(ran.status, "\n".join(sorted(f"{ran.out}\n{ran.err}".splitlines())), "")
        texts[f"start-of-{engine}"] = show(log, ran)
    return {f"commands/{name}.txt": text for name, text in texts.items()}


def describe_iommu(reader: Reader) -> str:
    groups = reader.at("sys/kernel/iommu_groups")
    try:
        found = sorted(groups.iterdir(), key=lambda group: (len(group.name), group.name))
        lines = [
            f"{group.name}: {(group / 'type').read_text(encoding='ascii').strip()}: "
            + " ".join(sorted(os.listdir(group / "devices")))
            for group in found
        ]
    except OSError as error:
        return f"{error.filename}: {error.strerror}\n"
    return "\n".join(lines or ["no groups: the IOMMU is off"]) + "\n"


def probe(*arguments: str) -> tuple[str, ...]:
    return ("python3", "-c", inspect.getsource(container_probe), *arguments)


def find_idle_gpus(reader: Reader) -> list[str] | Unread:
    """Return the UUIDs of the GPUs that no engine and no process uses; Unread if that is not certain."""
    serving = reader.serving()
    if isinstance(serving.engines, Unread):
        return serving.engines
    if serving.errors or serving.switching or serving.unfinished_switch:
        return Unread("a switch runs or was killed, or the files of an engine cannot be read")
    ran = reader.ask("nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader")
    rows, problem = reader.smi(("uuid",))
    if isinstance(ran, Unread) or ran.status or problem:
        return Unread(f"nvidia-smi: {problem or (ran.why if isinstance(ran, Unread) else ran.out + ran.err)}")
    used = {*ran.out.split(), *(uuid for engine in serving.engines if not engine.unit.down for uuid in engine.gpus)}
    return [row[0] for row in rows if row[0] not in used]


def probe_idle_gpus(reader: Reader, image: str) -> str:
    """Ask CUDA in a new container, locked up as those of the engines are, on the GPUs that nobody uses."""
    gpus = find_idle_gpus(reader)
    if isinstance(gpus, Unread):
        return f"not asked: {gpus.why}\n"
    if not image or not gpus:
        return f"not asked: {'every GPU that answers is in use' if image else 'no image is recorded'}\n"
    user = reader.engine_uid() or 65_534
    answer = run(
        reader,
        *("docker", "run", "--rm", "--pull=never", f"--name={PROBE_CONTAINER}", f"--user={user}:{user}"),
        *("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--userns=host"),
        *(f"--device=nvidia.com/gpu={gpu}" for gpu in gpus),
        *("--entrypoint=python3", image, *probe(*gpus)[1:]),
    )
    # A docker run that was ended because of its time limit leaves the container behind.
    reader.ask("docker", "rm", "--force", PROBE_CONTAINER)
    return answer


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
        elif len(text) > LONGEST:
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
    with name_errors(path), os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        os.fchmod(descriptor, 0o600)  # also of a file that was there
        for name, text in texts.items():
            data = text.encode()
            member = tarfile.TarInfo(f"vllm-edge-support/{name.lstrip('/')}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
