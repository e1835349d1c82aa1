# SPDX-License-Identifier: Apache-2.0
"""A file system that is full, over its quota, or read-only is named by its mount point."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.system import space
from ansible.module_utils.vllm_edge.system.files import write_durably


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "a quota holds"),
        (errno.EROFS, "is mounted read-only"),
    ],
)
def test_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError) as caught:
        write_durably(tmp_path / "record.json", "{}")
    told = space.explain_unwritable(caught.value, Path("/data/weights"))
    assert str(tmp_path / ".record.json.new") in told and words in told
    assert f"file system {space.find_mount(tmp_path)} " in told and "/data/weights" not in told


def test_an_error_of_a_copy_is_of_what_it_writes(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "full", "/source/file", None, str(tmp_path / "copy"))
    assert space.explain_unwritable(error, tmp_path).startswith(f"{tmp_path / 'copy'} could not be written")


@pytest.mark.parametrize(
    ("free", "inodes", "read_only", "words"),
    [
        (9, 9, True, "mounted read-only"),
        (9, 0, False, "no inode"),
        (1, 9, False, "0 MiB free"),
        (9, None, False, ""),
    ],
)
def test_shortage(free: int, inodes: int | None, read_only: bool, words: str) -> None:
    told = space.find_shortage(space.Space("", "/x", free, inodes, read_only), 5)
    assert words in told and bool(told) == bool(words)
