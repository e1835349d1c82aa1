# SPDX-License-Identifier: Apache-2.0
"""Programs that the doctor runs end within their limit, whatever they do."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from ansible.module_utils.vllm_edge.system import host, systemd
from ansible.module_utils.vllm_edge.system.systemd import Ran, SystemdError, run_command


def test_a_program_is_run_in_english() -> None:
    script = "import os, sys; print(os.environ['LC_ALL']); print('why ', file=sys.stderr); sys.exit(3)"
    assert host.run_in_english([sys.executable, "-c", script], 30) == Ran(3, "C\n", "why")


def test_nobody_waits_for_a_program_that_hangs() -> None:
    with pytest.raises(SystemdError, match=r"did not end within 0\.2 s"):
        host.run_in_english(["sleep", "60"], 0.2)


def test_output_that_is_no_utf_8_and_escapes_are_no_traceback() -> None:
    script = r"import os; os.write(1, b'\xff'); os.write(2, b'\x1b[2Jx'); raise SystemExit(1)"
    assert run_command([sys.executable, "-c", script], 30) == Ran(1, "\ufffd", "\\u001b[2Jx")


@pytest.mark.slow
def test_a_process_that_cannot_be_killed_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi on a lost GPU, which the kernel does not let die; or one whose control group is frozen."""
    scores: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: scores.append(process.pid))
    monkeypatch.setattr(systemd, "KILLED_S", 0.1)
    began = time.monotonic()
    with pytest.raises(SystemdError, match=r"its process \d+ cannot be killed"):
        host.run_in_english(["sleep", "5"], 0.2)
    assert time.monotonic() - began < 4
    with open(f"/proc/{scores[0]}/oom_score_adj", encoding="ascii") as file:
        assert file.read().strip() == "1000"
