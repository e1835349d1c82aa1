# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders use: runs of ansible-playbook, and scripts of the project as modules."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def run_playbook(
    *words: str | Path, cwd: Path = ROOT, check: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook with the project's configuration; nobody is asked, and nothing is coloured."""
    known = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), *words],
        cwd=cwd,
        env=os.environ | known | environment,
        check=check,
        capture_output=True,
        text=True,
        timeout=600,
    )


def get_words(done: subprocess.CompletedProcess[str]) -> str:
    """Everything that a run printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())


def load_file(path: Path, name: str = "") -> ModuleType:
    """A Python file as a module, whatever its name ends in."""
    loader = importlib.machinery.SourceFileLoader(name or path.stem.replace("-", "_"), str(path))
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
