# SPDX-License-Identifier: Apache-2.0
"""The progress of a long command, and the output of its container."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system import space
from ansible.module_utils.vllm_edge.system.docker import Container, DockerAway, LogRecord
from ansible.module_utils.vllm_edge.system.long_run import CommandRefused, LongRun
from ansible.module_utils.vllm_edge.trials import sidecar


def test_threads_may_tell_their_progress_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quality suite asks each engine in a thread of its own."""
    run = LongRun(tmp_path, "quality")
    with run.alone():
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run.say, [f"case {number}" for number in range(40)]))
        assert run.follow() == 0
    assert capsys.readouterr().out.startswith("case ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.asked", "quality.lock"]


def test_without_room_for_its_records_it_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LongRun(tmp_path, "bench", places={"state": tmp_path / "state", "run": tmp_path})
    with run.alone():
        pass
    monkeypatch.setitem(space.STEPS, "run", space.Step({"state": 10**12}, ""))
    with pytest.raises(CommandRefused, match=f"does not run: .*{tmp_path}/state.* MiB free"), run.alone():
        pytest.fail("it began")


class BreakingDocker:
    """A container of two lines, whose log breaks off after the first so many times."""

    def __init__(self, breaks: int) -> None:
        self.breaks, self.removed = breaks, False

    def listed(self) -> list[object]:
        return []

    def create(self, arguments: list[str]) -> str:
        return "c"

    def start(self, container: str) -> None:
        pass

    def remove(self, container: str) -> None:
        self.removed = True

    def logs(self, container: str, *, after: str | None, follow: bool, tail: int | None) -> Iterator[LogRecord]:
        if after is None:
            yield LogRecord("1", "one")
        if self.breaks:
            self.breaks -= 1
            raise DockerAway("connection reset")
        yield LogRecord("2", "two")

    def find(self, container: str) -> Container:
        return Container("c", "c", "exited", exit_code=0)


def test_output_of_a_container_is_read_on_after_a_break_and_its_loss_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "POLL_S", 0.01)
    paths = HostPaths(run=tmp_path / "run", state=tmp_path / "state")
    made = sidecar.Sidecar("test", "image", os.getuid(), "")

    def run(docker: BreakingDocker, on_line: Callable[[str], None]) -> sidecar.Ended:
        return sidecar.run_sidecar(made, docker, paths, timeout_s=9, on_line=on_line)  # type: ignore[arg-type]

    lines: list[str] = []
    assert run(BreakingDocker(3), lines.append).lines == ("one", "two") and lines == ["one", "two"]

    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    for docker, on_line, said in ((BreakingDocker(0), full, "No space"), (BreakingDocker(999), lines.append, "reset")):
        with pytest.raises(sidecar.SidecarError, match=f"lost.*{said}"):
            run(docker, on_line)
        assert docker.removed
