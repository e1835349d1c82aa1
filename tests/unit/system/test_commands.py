# SPDX-License-Identifier: Apache-2.0
"""Programs that the doctor runs end within their limit, whatever they do."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from ansible.module_utils.vllm_edge.system import host
from ansible.module_utils.vllm_edge.system.systemd import Ran, SystemdError


def test_a_program_is_run_in_english() -> None:
    script = "import os, sys; print(os.environ['LC_ALL']); print('why ', file=sys.stderr); sys.exit(3)"
    assert host.run_in_english([sys.executable, "-c", script], 30) == Ran(3, "C\n", "why")


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(SystemdError, match=r"did not end within 0\.2 s"):
        host.run_in_english(["sleep", "60"], 0.2)


def test_nobody_waits_for_a_program_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi on a lost GPU, which the kernel does not let die."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    monkeypatch.setattr(host, "DYING_S", 0.1, raising=False)
    began = time.monotonic()
    with pytest.raises(SystemdError, match="did not end"):
        host.run_in_english(["sleep", "5"], 0.2)
    assert time.monotonic() - began < 4
