# SPDX-License-Identifier: Apache-2.0
"""What the lab asks of the machine that runs it, and what Docker is told on machines that are not at hand."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import lab.docker
import lab.machine
import lab.server
from lab.machine import CACHE_GIB, DOCKER_GIB, GIB, MEMORY_GIB, missing_of_cpu, missing_of_docker, missing_of_memory
from lab.server import Server

ROOT = Path(__file__).resolve().parents[3]
FLAGS = "processor\t: 0\nflags\t\t: fpu sse2 avx {0} aes\n"
Usage = namedtuple("Usage", "total used free")


def test_what_the_cpu_and_docker_lack() -> None:
    assert missing_of_cpu("x86_64", FLAGS.format("avx2 avx512f amx_tile")) == []
    assert missing_of_cpu("aarch64", "Features\t: fp asimd\n")[0].startswith("an x86-64 CPU (this one is aarch64")
    too_old = [version for version in ("20.10.24+dfsg1", "29.0.1", "20.5", "") if missing_of_docker(version)]
    assert too_old == ["20.5"]


def test_places_on_one_disk_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.machine.shutil, "disk_usage", lambda path: Usage(0, 0, 8 * GIB))
    wanted = {tmp_path / "not" / "there": DOCKER_GIB, tmp_path: CACHE_GIB}
    (lacking,) = lab.machine.missing_of_disk(wanted)
    assert (
        f"{DOCKER_GIB + CACHE_GIB} GiB are wanted in {tmp_path}/not/there and {tmp_path}, 8.0 GiB are free" in lacking
    )
    assert lab.machine.missing_of_disk({tmp_path: CACHE_GIB}) == []


def lacking_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, running: str) -> None:
    """A small machine, with or without a lab that runs."""
    for name, text in (("CPUINFO", FLAGS.format("sse4_2")), ("MEMINFO", "MemAvailable: 1048576 kB\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(lab.machine, name, tmp_path / name)
    monkeypatch.setattr(lab.machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(lab.machine.shutil, "disk_usage", lambda path: Usage(0, 0, GIB))
    answers = {"version": "19.03.15", "inspect": running, "info": str(tmp_path)}
    monkeypatch.setattr(lab.machine, "said_by", lambda program, verb, *rest: answers[verb])


def test_everything_that_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking_everything(monkeypatch, tmp_path, "")
    with pytest.raises(SystemExit) as ended:
        lab.machine.main()
    text = str(ended.value)
    assert text.startswith("lab: this machine lacks AVX2 (") and "\n" not in text
    assert all(word in text for word in ("a newer Docker Engine", "memory (", "room on the disk ("))
    assert f"memory ({MEMORY_GIB} GiB are wanted, 1.0 GiB are available)" in text
    assert text.endswith("Nothing was downloaded or started.")
    assert missing_of_memory(f"MemTotal: 9 kB\nMemAvailable:   {MEMORY_GIB * GIB // 1024} kB\n") == []
    lacking_everything(monkeypatch, tmp_path, "true")
    what = [text.split(" (")[0] for text in lab.machine.missing()]
    assert what == ["AVX2", "a newer Docker Engine"], "a lab that runs has its memory and its room"


@pytest.mark.slow
def test_it_runs_before_anything_is_installed() -> None:
    """With nothing but Python, and at once; what this machine itself lacks is its own matter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    isolated = [sys.executable, "-S", "-c", "import lab.machine; print(lab.machine.missing())"]
    done = subprocess.run(isolated, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert computed < 2, "a second on a machine that does nothing else"
    text = (ROOT / "tools" / "bootstrap").read_text()
    assert text.index("-m lab.machine") < text.index("apt-get update")


# ---- what Docker is told ----------------------------------------------------------------------------------------


@pytest.fixture
def created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of `docker create` of a host."""
    arguments: list[str] = []
    monkeypatch.setattr(lab.server, "docker", lambda *words, **_: arguments.extend(map(str, words)))
    for name in ("keys", "copy_in"):
        monkeypatch.setattr(lab.server, name, lambda *_: None)
    return arguments


@pytest.mark.parametrize(
    ("controllers", "expected"),
    [
        # Version 2: a tree of its own, which lab-init makes writable; never the machine's.
        (True, ["--cgroupns=private"]),
        # Version 1: Docker inside needs the machine's tree.
        (False, ["--cgroupns=host", "--volume={0}:{0}:rw"]),
    ],
)
def test_control_groups_of_the_host(
    created: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: bool, expected: list[str]
) -> None:
    if controllers:
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    monkeypatch.setattr(lab.docker, "CGROUP", tmp_path)
    lab.server.create_host(Server("x", 22999), "image")
    told = [word for word in created if word.startswith("--cgroupns") or ":rw" in word or "/sys/fs/cgroup" in word]
    assert told == [word.format(tmp_path) for word in expected]
