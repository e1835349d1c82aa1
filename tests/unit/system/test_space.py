# SPDX-License-Identifier: Apache-2.0
"""What each step writes to is measured, a file system that is full is named by its mount point, and nothing is left."""

import ast
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.releases import Releases
from ansible.module_utils.vllm_edge.system import space
from ansible.module_utils.vllm_edge.system.files import name_errors, write_durably
from ansible.module_utils.vllm_edge.weights.directory import DirectorySource
from ansible.module_utils.vllm_edge.weights.record import RemoteFile
from helpers import ROOT


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB and 200 inodes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=200", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, what: str = "bytes") -> Path:
    """Use up the bytes or inodes of the disk; return the directory to remove for room."""
    ballast = disk / "ballast"
    ballast.mkdir()
    with pytest.raises(OSError, match="No space left"):
        for number in range(1000):
            (ballast / str(number)).write_bytes(b"x" * (2**20 if what == "bytes" else 0))
    return ballast


def free(ballast: Path) -> None:
    for path in ballast.iterdir():
        path.unlink()
    ballast.rmdir()


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
    assert str(tmp_path / ".record.json.new") in told and words in told and told.count("the file system ") == 1
    assert f"file system {space.find_mount(tmp_path)} " in told and "/data/weights" not in told


def test_an_error_of_a_copy_is_of_what_it_writes(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "full", "/source/file", None, str(tmp_path / "copy"))
    assert space.explain_unwritable(error, tmp_path).startswith(f"{tmp_path / 'copy'} could not be written")


@pytest.mark.parametrize(("what", "left"), [("bytes", "0 MiB and"), ("inodes", "and 0 inodes free")])
def test_a_full_disk_is_named_and_the_next_write_leaves_nothing_of_the_failed_one(
    disk: Path, tmp_path: Path, what: str, left: str
) -> None:
    (tmp_path / "link").symlink_to(disk)
    record = tmp_path / "link/state/record.json"
    write_durably(record, "old")
    ballast = fill(disk, what)
    with pytest.raises(OSError) as caught:
        write_durably(record, "new" * 10_000)
    assert f"the file system {disk} is full" in str(caught.value) and left in str(caught.value)
    assert str(record.with_name(".record.json.new")) in str(caught.value)
    assert (record.read_text(), [path.name for path in record.parent.iterdir()]) == ("old", ["record.json"])
    (found,) = (one for one in space.measure_step("switch", {"state": record.parent}) if one.mount == str(disk))
    assert ("inodes free" if what == "inodes" else "has 0 MiB free") in space.find_shortage(found)
    free(ballast)
    write_durably(record, "new")
    assert record.read_text() == "new"


def test_weights_that_did_not_fit_leave_the_room_of_their_part(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 2**19)
    item = RemoteFile("model.safetensors", 2**19)
    (disk / "other").write_bytes(b"x" * 600_000)
    with pytest.raises(OSError, match=f"the file system {disk} is full") as caught:
        DirectorySource(tmp_path).fetch("owner/name", "0" * 40, item, disk / "staging", lambda _: None)
    assert caught.value.filename == str(disk / "staging/model.safetensors")
    assert list((disk / "staging").iterdir()) == []
    (disk / "other").unlink()
    fetched = DirectorySource(tmp_path).fetch("owner/name", "0" * 40, item, disk / "staging", lambda _: None)
    assert fetched.stat().st_size == 2**19


def test_a_release_that_did_not_fit_is_built_again_in_its_place(disk: Path) -> None:
    releases, source = Releases(disk), {"version": "1", "committed_s": 0}
    (disk / "releases/a").mkdir(parents=True)
    ballast = fill(disk)
    with pytest.raises(OSError, match=f"the file system {disk} is full"):
        releases.finish(disk / "releases/a", source)
    wanted = releases.wanted("a")
    assert (wanted.path, wanted.whole) == (disk / "releases/a", False)
    free(ballast)
    releases.finish(wanted.path, source)
    releases.make_current(wanted.path)
    assert releases.wanted("a").whole and releases.wanted("a").current


def test_directories_of_one_file_system_share_its_room(disk: Path, tmp_path: Path) -> None:
    at = {"images": disk / "containerd", "docker": disk / "docker", "state": tmp_path}
    found, state = space.measure_step("image", at, {"images": 7, str(disk / "more"): 9}, {"images": 5, "docker": 6})
    assert (found.mount, found.needed_bytes, found.kept_bytes) == (str(disk), 16, 6)
    assert found.paths == tuple(str(disk / name) for name in ("containerd", "docker", "more"))
    assert state.paths == (str(tmp_path),) and state.mount != str(disk)


@pytest.mark.parametrize(("on_host", "read_only"), [(0, False), (os.ST_RDONLY, True), (None, True)])
def test_what_only_the_sandbox_of_a_service_closes_is_not_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_host: int | None, read_only: bool
) -> None:
    def statvfs(place: Path | str) -> Mock:
        if (flags := on_host if str(place).startswith("/proc/1/root/") else os.ST_RDONLY) is None:
            raise PermissionError
        return Mock(f_files=0, f_bavail=1, f_frsize=1, f_flag=flags)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert [found.read_only for found in space.measure_step("run", {"state": tmp_path, "run": tmp_path})] == [read_only]


@pytest.mark.parametrize(
    ("free_bytes", "inodes", "read_only", "words"),
    [
        (9, 999, True, "mounted read-only"),
        (9, 99, False, "/x, the file system of /x/y, has 99 inodes free, and 100 are needed"),
        (4, 999, False, "has 0 MiB free, and 0 MiB have to be"),
        (9, None, False, ""),
    ],
)
def test_shortage(free_bytes: int, inodes: int | None, read_only: bool, words: str) -> None:
    told = space.find_shortage(space.Space("switch", "/x", ("/x/y",), free_bytes, inodes, read_only, kept_bytes=5))
    assert words in told and bool(told) == bool(words)


def test_the_path_of_a_relative_name_is_that_of_its_directory(disk: Path) -> None:
    with pytest.raises(OSError, match=f"the file system {disk} is full"), name_errors(disk / "link"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "target", None, ".link.new")


OF_OTHERS = {"separate_process.py", "container_probe.py", "reference_script.py", "program.py", "systemd.py"}
"""They write to pipes, to /proc, or in a container."""
WRITES = re.compile(r"\bos\.(fsync|posix_fallocate)\(|\.write_(text|bytes)\(|open\((?!\w*open).*['\"][wax]b?['\"]")


def test_whatever_writes_names_the_file_system_that_is_full() -> None:
    """The kernel's error of write(2), fsync(2) and posix_fallocate(3) has no path."""
    wrong = []
    for path in (ROOT / "plugins/module_utils").rglob("*.py"):
        text = path.read_text()
        lines = [number for number, line in enumerate(text.splitlines(), 1) if WRITES.search(line)]
        for node in ast.walk(ast.parse(text)) if lines else ():
            if isinstance(node, ast.With) and re.search("name_errors|suppress", ast.unparse(node.items[0])):
                lines = [line for line in lines if not node.lineno <= line <= (node.end_lineno or 0)]
        wrong += [f"{path.name}:{line}" for line in lines if path.name not in OF_OTHERS]
    assert wrong == []
