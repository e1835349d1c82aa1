# SPDX-License-Identifier: Apache-2.0
"""Playbooks of the plan, as an operator runs them: no host, no GPU, no weights on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def run(playbook: str, *options: str, inventory: str = "inventories/xr7620") -> subprocess.CompletedProcess[str]:
    """Run playbooks/PLAYBOOK.yml, for the reference inventory unless told; each option follows a `-e`."""
    command = ["ansible-playbook", "-i", inventory, f"playbooks/{playbook}.yml"]
    variables = [word for option in ("model_weights_root=/nowhere", *options) for word in ("-e", option)]
    return subprocess.run(
        [*command, *variables],
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def play(playbook: str, *options: str) -> str:
    """The output of a playbook that succeeds."""
    done = run(playbook, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(playbook: str, *options: str) -> str:
    """The output of a playbook that fails, on one line."""
    done = run(playbook, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).replace("''", "'").split())


def document(playbook: str, *options: str) -> Any:
    """The JSON that a playbook prints."""
    output = play(playbook, "format=json", *options)
    return json.loads(output[output.index("\n{\n") : output.index("\n}\n") + 3])
