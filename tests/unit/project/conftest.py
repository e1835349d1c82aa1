# SPDX-License-Identifier: Apache-2.0
"""For tests that run playbooks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def run_playbook() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_playbook(*arguments, cwd=..., VARIABLE=...): what ansible-playbook did, with VARIABLE in its environment."""

    def run(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ansible-playbook", *arguments],
            cwd=cwd,
            env=os.environ | {"ANSIBLE_NOCOLOR": "1"} | environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
