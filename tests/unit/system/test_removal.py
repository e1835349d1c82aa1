# SPDX-License-Identifier: Apache-2.0
"""Removing: what is ours goes, what somebody else put beside it stays and is listed, a wrong path removes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import removal
from ansible.module_utils.vllm_edge.system.removal import Removal, RemovalError, check_path, remove

NOT_OURS = "vllm-edge did not create it"


def plant(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def all_paths(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path / "ours", "engines/e2b/engine.json", "venv/lib/x/y.py", "venv/notes.txt", "keys.json")


def remove_ours(root: Path, **options: Any) -> Removal:
    """Remove the directory venv, and two files with the directories around them."""
    names = ("engines/e2b/engine.json", "venv", "keys.json")
    return remove([f"{root}/{name}" for name in names], [str(root)], **options)


def test_everything_of_ours_goes_with_its_directories(root: Path) -> None:
    result = remove_ours(root)
    assert not root.exists() and root.parent.exists()
    removed = ["engines/e2b/engine.json", "venv/", "keys.json", "engines/e2b/", "engines/", ""]
    assert result == Removal([f"{root}/{name}" for name in removed], {})
    assert remove_ours(root) == Removal(), "nothing there is nothing to do"


def test_check_mode_says_the_same_and_touches_nothing(root: Path) -> None:
    plant(root, "notes.txt", "engines/e2b/mine")
    before = all_paths(root)
    foreseen = remove_ours(root, apply=False)
    assert all_paths(root) == before
    assert remove_ours(root) == foreseen
    assert remove_ours(root).removed == [], "a second run has nothing to do"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("notes.txt", "notes.txt"),
        ("engines/e2b/notes.txt", "engines/e2b/notes.txt"),
        ("engines/e2b/deeper/engine.json", "engines/e2b/deeper"),
        ("venv2/x", "venv2"),
    ],
)
def test_a_file_of_somebody_else_stays_and_is_listed(root: Path, name: str, left: str) -> None:
    plant(root, name)
    assert remove_ours(root).left == {f"{root}/{left}": NOT_OURS}
    assert [path for path in all_paths(root) if Path(path).is_file()] == [f"{root}/{name}"]


def test_no_link_is_followed(root: Path, tmp_path: Path) -> None:
    theirs = plant(tmp_path / "theirs", "engine.json", "precious")
    (root / "keys.json").unlink()
    for name in ("keys.json", "venv/out", "engines/linked"):
        (root / name).symlink_to(theirs)
    result = remove_ours(root)
    assert all_paths(theirs) == [f"{theirs}/engine.json", f"{theirs}/precious"]
    assert result.left == {f"{root}/engines/linked": NOT_OURS}, "a link that is not ours stays itself, too"
    assert f"{root}/keys.json" in result.removed
    assert not (root / "keys.json").is_symlink() and not (root / "venv").exists()


def test_names_are_no_patterns(tmp_path: Path) -> None:
    root = plant(tmp_path / "model", "a*.json", "ab.json", "sub/[x].txt", "sub/x.txt")
    result = remove([f"{root}/a*.json", f"{root}/sub/[x].txt"], [str(root)])
    assert sorted(result.left) == [f"{root}/ab.json", f"{root}/sub/x.txt"]
    assert all_paths(root) == [f"{root}/ab.json", f"{root}/sub", f"{root}/sub/x.txt"]


@pytest.mark.parametrize("place", ["venv", "venv/lib"])
def test_a_mounted_file_system_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    real = os.lstat

    def lstat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = real(path, *args, **kwargs)
        if str(path).startswith(f"{root}/{place}"):
            values = list(found)
            values[2] += 1
            return os.stat_result(values)
        return found

    monkeypatch.setattr(removal.os, "lstat", lstat)
    result = remove_ours(root)
    assert result.left == {f"{root}/venv": f"a file system is mounted at {root}/{place}"}
    assert (root / "venv/lib/x/y.py").exists() and not (root / "keys.json").exists()


def test_what_an_emptied_directory_may_be(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(root)
    plant(root, "theirs/mine").joinpath("theirs/mine").unlink()
    assert remove_ours(root).left == {f"{root}/theirs": NOT_OURS}, "an empty directory of somebody"
    (root / "theirs").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(removal.os.path, "ismount", lambda path: path == root)
        assert remove_ours(root).left == {str(root): "a file system is mounted there; it is empty now"}
    plant(root, "keys.json")
    link = tmp_path / "link"
    assert remove_ours(link).left == {str(link): f"it is a link to {root}, which is empty now"}
    assert link.is_symlink() and root.is_dir() and all_paths(root) == []


def test_what_is_kept_or_foreseen_by_an_earlier_step_is_not_listed_as_foreign(root: Path) -> None:
    plant(root, "theirs-no-more/x")
    result = remove_ours(root, gone=[f"{root}/theirs-no-more/"], apply=False)
    assert result.left == {} and result.removed[-1] == f"{root}/"
    assert remove_ours(root, gone=[f"{root}/theirs-no-more/", f"{root}/venv/"], apply=False).removed == [
        path for path in result.removed if path != f"{root}/venv/"
    ]
    assert f"{root}/" not in remove_ours(root, gone=[f"{root}/"], apply=False).removed
    assert remove_ours(root, keep=[f"{root}/theirs-no-more"]).left == {}
    assert all_paths(root) == [f"{root}/theirs-no-more", f"{root}/theirs-no-more/x"]


@pytest.mark.parametrize(
    "path", ["", "/", "relative", "/etc", "/opt/", "/usr/local/bin", "/var/lib", "/opt/x/../..", "/data/../etc"]
)
@pytest.mark.parametrize("option", ["paths", "directories"])
def test_a_path_that_cannot_have_been_meant(root: Path, path: str, option: str) -> None:
    options = {"paths": [f"{root}/venv"], "directories": [str(root)]}
    with pytest.raises(RemovalError, match="nothing was removed"):
        remove(**options | {option: [*options[option], path]})
    (root / "link").symlink_to("/etc")
    with pytest.raises(RemovalError, match="/etc, a directory of the system"):
        check_path(f"{root}/link")
    assert (root / "venv/notes.txt").exists()


def test_a_record_that_leads_elsewhere(tmp_path: Path) -> None:
    """Links are resolved before; a link in the parent, which an operator made, counts as part of it."""
    weights = plant(tmp_path / "weights", "e2b/model.safetensors")
    elsewhere = plant(tmp_path / "disk", "e4b/model.safetensors", "other/model.safetensors")
    (weights / "e4b").symlink_to(elsewhere / "e4b")

    def remove_weights(directory: Path) -> Removal:
        return remove([f"{directory}/model.safetensors"], [str(directory)], inside=str(weights))

    for refused in (elsewhere / "other", weights, tmp_path):
        with pytest.raises(RemovalError, match="is not inside"):
            remove_weights(refused)
    assert remove_weights(weights / "e2b").removed
    assert remove_weights(elsewhere / "e4b").removed
    assert (elsewhere / "other/model.safetensors").exists()
