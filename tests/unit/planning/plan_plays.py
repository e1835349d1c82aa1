# SPDX-License-Identifier: Apache-2.0
"""Playbooks of the plan, as an operator runs them: no host, no GPU, no weights on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def play(playbook: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run playbooks/PLAYBOOK.yml for the reference inventory."""
    command = ["ansible-playbook", "-i", "inventories/xr7620", f"playbooks/{playbook}.yml"]
    return subprocess.run(
        [*command, "-e", "model_weights_root=/nowhere", *options],
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
