# SPDX-License-Identifier: Apache-2.0
"""The read rate of a disk: measured on a real file, or unknown with the reason; once for each directory and device."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.weights import read_rate
from ansible.module_utils.vllm_edge.weights.read_rate import ensure_measured, find_file_system, find_rate, measure

AT = "2026-11-25T02:00:00Z"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory with a file of 4 MiB, which is enough here."""
    monkeypatch.setattr(read_rate, "LEAST_BYTES", 2 * 1024**2)
    monkeypatch.setattr(read_rate, "CHUNK_BYTES", 1024**2)
    directory = tmp_path / "weights" / "e2b"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(os.urandom(4 * 1024**2 + 100))
    return directory


def clock(step_s: float) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def test_a_real_file(weights: Path) -> None:
    rate, reason, done = measure(weights / "model.safetensors")
    if rate is None:
        assert "read past the page cache" in reason or "in memory" in reason
    else:
        assert rate > 0 and reason == "" and done == 4 * 1024**2 + 100


def test_reading_ends_after_a_limit(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(read_rate, "IN_MEMORY", frozenset())
    rate, _, done = measure(weights / "model.safetensors", clock(0.9))
    assert done == 2 * 1024**2 and rate == pytest.approx(done / 3.6)
    monkeypatch.setattr(read_rate, "MOST_BYTES", 3 * 1024**2)
    assert measure(weights / "model.safetensors")[2] == 3 * 1024**2
    assert "only 1 MiB of" in measure(weights / "model.safetensors", clock(1.9))[1]


def test_what_cannot_be_measured_is_unknown_with_the_reason(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = weights / "model.safetensors"
    (weights / "small").write_bytes(b"x")
    assert measure(weights / "small")[:2] == (None, f"{weights / 'small'} has less than 2 MiB")
    assert measure(weights / "absent")[1].endswith("cannot be read past the page cache: No such file or directory")
    monkeypatch.setattr(read_rate, "find_file_system", lambda device: "tmpfs")
    assert measure(file) == (None, f"{file} is on tmpfs, which is in memory", 0)
    monkeypatch.setattr(read_rate, "find_file_system", lambda device: "ext4")

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    assert measure(file) == (None, f"{file} cannot be read past the page cache: Invalid argument", 0)


def test_a_disk_is_measured_once(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "read-rates.json"
    files = [(weights / "config.json", 10), (weights / "model.safetensors", 100)]
    answers = iter([(None, "why", 0), (None, "why", 0), (2e9, "", 7)])
    asked: list[str] = []

    def answer(path: Path) -> tuple[float | None, str, int]:
        asked.append(path.name)
        return next(answers)

    monkeypatch.setattr(read_rate, "measure", answer)
    assert find_rate(record, weights) is None and ensure_measured(record, weights, [], AT) is None
    first = ensure_measured(record, weights, files, AT)
    assert first is not None and first.directory == str(weights.parent)
    assert (first.bytes_per_s, first.reason) == (None, "why")
    assert ensure_measured(record, weights, files, "later") is None, "the same reason is nothing new"
    assert find_rate(record, weights) == first
    known = ensure_measured(record, weights, files, AT)
    assert known is not None and known.bytes_per_s == 2e9 and find_rate(record, weights) == known
    (weights.parent / "e4b").mkdir()
    assert ensure_measured(record, weights.parent / "e4b", files, AT) is None, "another model on the same disk"
    assert asked == ["model.safetensors"] * 3
    assert find_rate(record, tmp_path / "absent") is None
    (tmp_path / "elsewhere").mkdir()
    assert find_rate(record, tmp_path / "elsewhere") is None


@pytest.mark.parametrize("text", ["", "{}", '{"rates": [1]}', '{"rates": [{"directory": "/"}]}'])
def test_a_damaged_record_is_replaced(weights: Path, tmp_path: Path, text: str) -> None:
    record = tmp_path / "read-rates.json"
    record.write_text(text)
    assert find_rate(record, weights) is None
    assert ensure_measured(record, weights, [(weights / "model.safetensors", 100)], AT) is not None
    assert find_rate(record, weights) is not None


def test_the_type_of_a_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw\n25 22 0:23 / /dev/shm rw shared:4 - tmpfs tmpfs rw\n"
    )
    assert [find_file_system(device, mounts) for device in ("8:2", "0:23", "8:3")] == ["ext4", "tmpfs", ""]
    assert find_file_system("8:2", tmp_path / "absent") == ""
