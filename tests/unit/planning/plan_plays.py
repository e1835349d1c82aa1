# SPDX-License-Identifier: Apache-2.0
"""Playbooks of the plan, as an operator runs them: hosts that are the cases, no GPU, no weights on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import run_playbook

HOST = {
    "serving_profile": "nvfp4-tp2",
    "gpu_count": 4,
    "gpu_memory_mib": 23034,
    "model_weights_root": "/nowhere",
    # No variable of the connection is needed, nor read.
    "ansible_port": "{{ lookup('ansible.builtin.file', '/nonexistent/port') }}",
    "ansible_host": "{{ lookup('ansible.builtin.file', '/nonexistent/address') }}",
    "ansible_user": "{{ not_set }}",
    "ansible_ssh_private_key_file": "{{ not_set }}",
}
"""The reference host's GPUs."""


def play(place: Path, playbook: str, hosts: Mapping[str, Mapping[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Run a playbook for hosts with these variables; the place is a directory for its inventory."""
    listed = {name: HOST | dict(variables) for name, variables in hosts.items()}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": listed}}))
    return run_playbook("-i", place / "hosts.yml", f"playbooks/{playbook}.yml")


def read_document(output: str) -> Any:
    """The JSON that one of the hosts prints."""
    return json.loads(output[output.index("\n{\n") : output.index("\n}\n") + 3])
