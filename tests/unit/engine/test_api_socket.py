# SPDX-License-Identifier: Apache-2.0
"""The directory of an engine's socket: made anew, opened when the socket is there, and nothing in it is trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.api_socket import make_directory, open_to_gateway

ROOT = os.geteuid() == 0
UID = 8050 if ROOT else os.geteuid()


def describe(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return stat.S_IMODE(found.st_mode), found.st_uid


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run" / "engines" / "e2b" / "api.sock"


def test_the_directory_is_the_engines_until_the_socket_is_there(place: Path) -> None:
    make_directory(place, UID)
    assert describe(place.parent) == (0o755, UID)
    assert describe(place.parent.parent) == (0o710, os.geteuid())
    with pytest.raises(FileNotFoundError):
        open_to_gateway(place)
    assert describe(place.parent) == (0o755, UID), "taken from the engine before it made its socket"
    os.mknod(place, stat.S_IFSOCK | 0o755)
    os.chown(place, UID, -1)
    place.parent.chmod(0o777)
    open_to_gateway(place)
    assert describe(place) == (0o666, UID)
    assert describe(place.parent) == (0o755, os.geteuid())


@pytest.mark.parametrize("left", ["files", "a link"])
def test_what_a_former_container_left_is_gone(place: Path, tmp_path: Path, left: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    make_directory(place, UID)
    if left == "a link":
        place.parent.rmdir()
        place.parent.symlink_to(precious, target_is_directory=True)
    else:
        os.mknod(place, stat.S_IFSOCK | 0o666)
        (place.parent / "link").symlink_to(precious, target_is_directory=True)
        here = os.open(place.parent, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=here)
            here, former = os.open("d", os.O_RDONLY, dir_fd=here), here
            os.close(former)
        os.close(here)
    make_directory(place, UID)
    assert list(place.parent.iterdir()) == [] and not place.parent.is_symlink()
    assert (precious / "file").exists()


@pytest.mark.parametrize("kind", ["link", "directory", "file"])
def test_something_else_in_place_of_the_socket_is_left_as_it_is(place: Path, tmp_path: Path, kind: str) -> None:
    make_directory(place, UID)
    shadow = tmp_path / "shadow"
    shadow.touch(mode=0o600)
    if kind == "link":
        place.symlink_to(shadow)
    elif kind == "directory":
        place.mkdir(mode=0o700)
    else:
        place.touch(mode=0o600)
    before = describe(place), describe(shadow)
    with pytest.raises(OSError, match=f"it is a {kind} and no socket"):
        open_to_gateway(place)
    assert (describe(place), describe(shadow)) == before
    assert describe(place.parent) == (0o755, UID)
