# SPDX-License-Identifier: Apache-2.0
"""The journal of a switch: what it says survives, also a full disk and a half-written file; the lock has one holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import journal as journal_module
from ansible.module_utils.vllm_edge.switch.journal import (
    BALLAST_BYTES,
    DAMAGED,
    Busy,
    JournalFile,
    JournalLost,
    history,
    holder,
    make_id,
    read_journal,
    set_aside_damaged,
    take_lock,
    to_json,
)
from ansible.module_utils.vllm_edge.switch.model import Downtime, Gap, Journal, Phase, Result
from ansible.module_utils.vllm_edge.system.records import read_record
from fake_host import SmallDisk
from journals import RUNNING, ended

ROOT = Path(__file__).resolve().parents[3]
BEGUN = replace(RUNNING, phase=None, keep=(), stop=(), start=(), phases=())
ENDED = ended(
    canary=({"served_name": "architect", "passed": True},),
    gpus=({"index": 0, "used_mib": 21000},),
    warnings=("hook 10-notify said no",),
    downtime={"architect": Downtime(91.5, (Gap(2.0, 93.5), Gap(99.0, None)), {"stop": 3.0, "back:healthy": 1.0}, 240)},
)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "plugins" / "module_utils"), "PYTHONDONTWRITEBYTECODE": "1"}


def read(paths: HostPaths) -> Journal:
    journal = read_journal(paths)
    assert journal is not None
    return journal


@pytest.fixture
def file(paths: HostPaths) -> JournalFile:
    """The journal of a switch that has begun, with its ballast."""
    file = JournalFile(paths, BEGUN)
    file.take_ballast()
    return file


def test_what_is_written_is_read_back_and_keys_of_a_newer_program_are_no_damage(paths: HostPaths) -> None:
    for journal in (BEGUN, ENDED):
        JournalFile(paths, journal).write()
        assert read_journal(paths) == journal
    data = json.loads(paths.switch_journal.read_text())
    assert (data["phase"], data["result"], data["phases"][0]["phase"]) == ("clean_up", "committed", "preflight")
    data["new"] = 1
    data["phases"][0]["new"] = 1
    data["downtime"]["architect"]["new"] = 1
    assert read_record(Journal, data) == ENDED


def test_no_journal_is_none_and_to_ask_leaves_nothing_behind(paths: HostPaths) -> None:
    assert (read_journal(paths), history(paths), holder(paths)) == (None, [], None)
    assert not paths.state.exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_half_written_journal_counts_as_unfinished_and_is_kept(paths: HostPaths, share: float) -> None:
    text = json.dumps(to_json(ENDED))
    half = text[: int(len(text) * share)]
    paths.state.mkdir(parents=True)
    paths.switch_journal.write_text(half)
    assert (read(paths).id, read(paths).result) == (DAMAGED, None)
    assert str(paths.switch_journal) in read(paths).message
    kept = set_aside_damaged(paths, "2026-11-21T16:50:00Z")
    assert kept is not None and kept.parent == paths.history and kept.read_text() == half
    assert read_journal(paths) is None
    paths.switch_journal.write_bytes(b"\xff\x00")
    assert read(paths).id == DAMAGED
    (paths.history / "20261121T164000Z-3.json").mkdir()
    assert history(paths) == []
    again = set_aside_damaged(paths, "2026-11-21T16:50:00Z")
    assert again is not None and again != kept and kept.read_text() == half


def test_a_phase_is_on_disk_before_it_acts_and_its_end_with_the_next(paths: HostPaths) -> None:
    file = JournalFile(paths, BEGUN)
    file.enter(Phase.DRAIN, "forward", "2026-11-21T16:40:01Z", 1.0)
    assert read(paths).phase is Phase.DRAIN and read(paths).phases[-1].outcome is None
    file.leave("done", 0.5, "nothing ran")
    file.enter(Phase.STOP, "forward", "2026-11-21T16:40:02Z", 1.5)
    assert [record.outcome for record in read(paths).phases] == ["done", None]
    assert read(paths).phases[0].seconds == 0.5 and read(paths).phases[0].detail == "nothing ran"


def test_the_ballast_is_taken_over_and_given_back_at_the_end(paths: HostPaths, file: JournalFile) -> None:
    assert file.ballast.stat().st_blocks * 512 >= BALLAST_BYTES, "a hole holds no room"
    JournalFile(paths, BEGUN).take_ballast()
    assert file.ballast.stat().st_size == BALLAST_BYTES
    file.finish(result=Result.COMMITTED, ended_at="2026-11-21T16:41:00Z", seconds=60.0, message="done")
    assert read_journal(paths) == file.journal
    assert history(paths) == [file.journal]
    assert not file.ballast.exists()


def test_every_write_is_synced_before_and_after_the_rename(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        steps.append("fsync " + ("directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"))
        real_fsync(handle)

    def rename(source: Path, target: Path) -> None:
        steps.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    JournalFile(paths, BEGUN).write()
    assert steps == ["fsync file", "rename", "fsync directory"]


def fail_to_write(monkeypatch: pytest.MonkeyPatch, file: JournalFile, error: int) -> None:
    """Nothing can be written as long as the ballast lies there."""
    real = journal_module.write_durably

    def write(path: Path, text: str, mode: int) -> None:
        if file.ballast.exists():
            raise OSError(error, os.strerror(error))
        real(path, text, mode)

    monkeypatch.setattr(journal_module, "write_durably", write)


def test_only_a_full_disk_takes_ballast(file: JournalFile, monkeypatch: pytest.MonkeyPatch, paths: HostPaths) -> None:
    fail_to_write(monkeypatch, file, errno.EIO)
    with pytest.raises(JournalLost, match="Input/output error"):
        file.write()
    assert file.ballast.exists()
    fail_to_write(monkeypatch, file, errno.ENOSPC)
    file.enter(Phase.STOP, "forward", "2026-11-21T16:40:02Z", 1.5)
    assert not file.ballast.exists()
    assert read(paths).phase is Phase.STOP


@pytest.mark.slow
def test_a_disk_that_is_really_full_takes_the_ballast_and_then_fails(small_disk: SmallDisk) -> None:
    paths = HostPaths(state=small_disk.path / "state")
    file = JournalFile(paths, BEGUN)
    file.take_ballast()
    file.write()
    small_disk.fill()
    file.enter(Phase.STOP, "forward", "2026-11-21T16:40:02Z", 1.5)
    assert not file.ballast.exists()
    former = read(paths)
    assert former.phase is Phase.STOP
    small_disk.fill()
    with pytest.raises(JournalLost, match="No space left on device"):
        file.enter(Phase.FREE, "forward", "2026-11-21T16:40:03Z", 2.5)
    assert read(paths) == former, "the former journal is whole"
    assert sorted(entry.name for entry in paths.state.iterdir()) == ["switch.json"], "no half of a file stays behind"
    with pytest.raises(JournalLost, match="1024 KiB for the journal"):
        file.take_ballast()
    assert not file.ballast.exists()


def test_the_history_is_newest_first_and_has_an_end(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "HISTORY_KEPT", 3)
    for number in range(5):
        JournalFile(paths, replace(ENDED, id=f"2026112{number}T000000Z-4")).finish()
    assert [item.id[7] for item in history(paths)] == ["4", "3", "2"]
    assert [item.id[7] for item in history(paths, 1)] == ["4"]
    # A clock that went back does not prune the newest.
    JournalFile(paths, replace(ENDED, id="19700101T000000Z-5")).finish()
    assert [item.id[:8] for item in history(paths)] == ["20261124", "20261123", "19700101"]


def test_an_id_is_never_given_twice(paths: HostPaths) -> None:
    stamp = "2026-11-21T16:40:00Z"
    assert make_id(paths, stamp, 4) == "20261121T164000Z-4"
    JournalFile(paths, replace(ENDED, id="20261121T164000Z-4")).finish()
    assert make_id(paths, stamp, 4) == "20261121T164000Z-4-2"
    JournalFile(paths, replace(ENDED, id="20261121T164000Z-4-2")).write()
    assert make_id(paths, stamp, 4) == "20261121T164000Z-4-3"
    JournalFile(paths, replace(ENDED, id="20261121T164000Z-4-2")).archive()
    assert [item.id[-4:] for item in history(paths)] == ["-4-2", "0Z-4"], "newest first"


HOLD = """
import sys, time
from pathlib import Path
from vllm_edge.paths import HostPaths
from vllm_edge.switch.journal import take_lock
with take_lock(HostPaths(state=Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(paths: HostPaths) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(paths.state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_who_holds_the_lock_is_named_and_frees_it_when_killed(paths: HostPaths, other: subprocess.Popen[str]) -> None:
    JournalFile(paths, ENDED).write()
    running = holder(paths)
    assert running is not None and running.asked_by == "another vllm-edge" and running.phase is None
    with pytest.raises(Busy, match="has not written its journal yet"), take_lock(paths):
        pass
    file = JournalFile(paths, BEGUN)
    file.enter(Phase.HEALTHY, "back", "2026-11-21T16:40:01Z", 1.0)
    with pytest.raises(Busy) as caught, take_lock(paths):
        pass
    assert "generation 4 (bf16-tp4), asked by site.yml by alice, phase healthy, going back, process 4711" in str(
        caught.value
    )
    assert holder(paths) == caught.value.journal == file.journal
    JournalFile(paths, BEGUN).write()
    other.kill()
    other.wait(10)
    assert holder(paths) is None
    with take_lock(paths):
        assert holder(paths) == BEGUN
    assert holder(paths) is None


def test_neither_a_child_nor_who_asks_looks_like_a_switch(paths: HostPaths) -> None:
    with take_lock(paths):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with take_lock(paths):
            pass
        assert holder(paths) is None
    finally:
        child.kill()
        child.wait(10)
    # `holder` has the lock for a moment, shared: a switch that begins just then waits for it.
    with take_lock(paths):
        pass
    asking = os.open(paths.switch_lock, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    assert holder(paths) is None
    threading.Timer(0.1, os.close, [asking]).start()
    with take_lock(paths):
        pass


def test_only_the_function_whose_locks_are_for_root_locks_a_file() -> None:
    found = {path.name for path in (ROOT / "plugins").rglob("*.py") if "fcntl.flock(" in path.read_text()}
    assert found == {"files.py"}


# What another user sees and can do: `who` is its number, and the lock is opened as flock(1) would.
AS_ANOTHER = """
import fcntl, os, sys
from pathlib import Path
from vllm_edge.paths import HostPaths
from vllm_edge.switch.journal import holder
os.setgroups([]); os.setgid(65534); os.setuid(65534)
paths = HostPaths(state=Path(sys.argv[1]))
running = holder(paths)
print(running.asked_by if running else "nobody")
try:
    fcntl.flock(os.open(paths.switch_lock, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("took the lock")
except PermissionError:
    print("may not")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_hold_the_lock_nor_read_the_journal() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own directories are for nobody else
        Path(place).chmod(0o755)
        paths = HostPaths(state=Path(place) / "state")
        paths.state.mkdir()
        paths.switch_lock.touch(0o644)  # as a former release made it

        def another() -> list[str]:
            words = [sys.executable, "-c", AS_ANOTHER, str(paths.state)]
            return subprocess.run(words, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout.split("\n")

        with take_lock(paths):
            assert another()[:2] == ["nobody", "may not"]
            JournalFile(paths, replace(BEGUN, pid=os.getpid())).write()
            assert another()[:2] == ["nobody", "may not"], "the journal is for root, and a status says so"
        JournalFile(paths, replace(ENDED, pid=os.getpid())).write()
        assert another()[:2] == ["nobody", "may not"]
