# SPDX-License-Identifier: Apache-2.0
"""The progress of a long command."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system.long_run import LongRun


def test_threads_may_tell_their_progress_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quality suite asks each engine in a thread of its own."""
    run = LongRun(tmp_path, "quality")
    with run.alone():
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run.say, [f"case {number}" for number in range(40)]))
        assert run.follow() == 0
    assert capsys.readouterr().out.startswith("case ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.asked", "quality.lock"]
