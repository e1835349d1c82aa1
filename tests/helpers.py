# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders use: runs of ansible-playbook and their hosts, files of the repository, scripts."""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_playbook(
    *words: str | Path, cwd: Path = ROOT, check: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook with the project's configuration; nobody is asked, and nothing is coloured."""
    known = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PIPELINING": "1"}
    known["ANSIBLE_CALLBACK_PLUGINS"] = str(ROOT / "tests" / "callbacks")
    return subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), *words],
        cwd=cwd,
        env=os.environ | known | environment,
        check=check,
        capture_output=True,
        text=True,
        timeout=600,
    )


def write_program(path: Path, script: str) -> None:
    """A shell script in place of a program of the host."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def replace_modules(directory: Path, **modules: str) -> str:
    """A path of collections, below the directory, in which these modules of the project have another text."""
    plugins = directory / "ansible_collections/edge/vllm_edge/plugins"
    shutil.copytree(ROOT / "plugins/modules", plugins / "modules")
    for name, text in modules.items():
        (plugins / f"modules/{name}.py").write_text(text)
    for name in ("action", "doc_fragments", "filter", "module_utils"):
        (plugins / name).symlink_to(ROOT / "plugins" / name)
    return f"{directory}:{ROOT / 'collections'}"


def make_host(directory: Path, **programs: str) -> dict[str, Any]:
    """Variables of a host that is this machine, with programs of its own that no other host of the run has."""
    place = directory / "bin"
    place.mkdir(parents=True)
    # Modules run by this interpreter, and look for programs where it does.
    python = f'#!/bin/sh\nPATH={place}:$PATH exec {start_warm_python()} "$@"\n'
    for name, text in {**programs, "python3": python}.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    return {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": str(place / "python3"),
        "ansible_module_compression": "ZIP_STORED",
    }


def find_failures(done: subprocess.CompletedProcess[str], joined: bool = True) -> dict[str, str]:
    """Why tasks failed, by the name of the host: all words in one line, or as they were printed."""
    found: dict[str, str] = {}
    for host, text in re.findall(r"(?ms)^(?:fatal|failed): \[([^] ]+)[^]]*\].*?=>(.*?)(?=^\S|\Z)", done.stdout):
        found[host] = found.get(host, "") + text
    return {host: " ".join(text.split()) if joined else text for host, text in found.items()}


def list_files(*patterns: str) -> list[Path]:
    """Files and links of the repository, those not yet committed included."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


def get_words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())


@functools.cache
def start_warm_python() -> str:
    """The path of an interpreter for Ansible's modules that has started already; it ends with this process."""
    directory = Path(tempfile.mkdtemp(prefix="warm-python-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    words = [sys.executable, ROOT / "tests/warm_python.py", directory / "clients"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=directory)
    atexit.register(server.communicate)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    return str(directory / "python")


def load_file(path: Path, name: str = "") -> ModuleType:
    """A Python file as a module, whatever its name ends in, and under no name of a package that others import."""
    loader = importlib.machinery.SourceFileLoader(name or f"file_{path.stem.replace('-', '_')}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module
