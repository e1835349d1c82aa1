# SPDX-License-Identifier: Apache-2.0
"""Removing: what is ours goes, everything else stays and is named, and a wrong path removes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import removal
from ansible.module_utils.vllm_edge.system.removal import Owned, Removal, RemovalError, check_directory, remove

OURS = Owned(files=("engines/*/engine.json", "link"), trees=("venv",))


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
    return plant(tmp_path / "ours", "engines/e2b/engine.json", "venv/lib/x/y.py", "venv/pyvenv.cfg")


def test_everything_of_ours_goes_with_its_directory(root: Path) -> None:
    result = remove(str(root), OURS)
    assert not root.exists() and root.parent.exists()
    assert result.left == {}
    assert result.removed == [
        f"{root}/{name}" for name in ("engines/e2b/engine.json", "engines/e2b/", "engines/", "venv/")
    ] + [f"{root}/"]


def test_check_mode_says_the_same_and_touches_nothing(root: Path) -> None:
    plant(root, "notes.txt", "engines/e2b/mine")
    before = all_paths(root)
    foreseen = remove(str(root), OURS, apply=False)
    assert all_paths(root) == before
    assert remove(str(root), OURS) == foreseen
    assert remove(str(root), OURS).removed == [], "a second run has nothing to do"


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "engines/e2b/notes.txt",
        "engines/engine.json",
        "engines/e2b/deeper/engine.json",
        "venv2/x",
        "engines/e2b/engine.json.orig",
    ],
)
def test_a_file_that_nobody_of_us_made_stays_and_is_named(root: Path, name: str) -> None:
    plant(root, name)
    result = remove(str(root), OURS)
    assert (root / name).read_text() == name
    (left,) = result.left
    assert (root / name).is_relative_to(left)
    assert [path for path in all_paths(root) if Path(path).is_file()] == [str(root / name)]


def test_an_empty_directory_of_somebody_stays(root: Path) -> None:
    (root / "theirs").mkdir()
    assert list(remove(str(root), OURS).left) == [f"{root}/theirs"]
    assert (root / "theirs").is_dir()


def test_no_link_is_followed(root: Path, tmp_path: Path) -> None:
    theirs = plant(tmp_path / "theirs", "engine.json", "precious")
    (root / "link").symlink_to(theirs)
    (root / "venv" / "out").symlink_to(theirs)
    (root / "engines" / "linked").symlink_to(theirs)
    result = remove(str(root), OURS)
    assert all_paths(theirs) == [f"{theirs}/engine.json", f"{theirs}/precious"]
    assert list(result.left) == [f"{root}/engines/linked"], "a link that is not ours stays itself, too"
    assert not (root / "link").is_symlink() and not (root / "venv").exists()


def test_a_link_in_place_of_a_tree_is_not_the_tree(tmp_path: Path) -> None:
    theirs = plant(tmp_path / "theirs", "precious")
    root = plant(tmp_path / "ours", "engines/e2b/engine.json")
    (root / "venv").symlink_to(theirs)
    assert list(remove(str(root), OURS).left) == [f"{root}/venv"]
    assert (theirs / "precious").exists()


def test_names_are_no_patterns(tmp_path: Path) -> None:
    root = plant(tmp_path / "model", "a*.json", "ab.json", "sub/[x].txt", "sub/x.txt")
    result = remove(str(root), Owned(names=("a*.json", "sub/[x].txt")))
    assert sorted(result.left) == [f"{root}/ab.json", f"{root}/sub/x.txt"]
    assert all_paths(root) == [f"{root}/ab.json", f"{root}/sub", f"{root}/sub/x.txt"]


def test_what_is_kept_is_not_called_foreign(root: Path) -> None:
    plant(root, "weights/e2b.json")
    result = remove(str(root), Owned(OURS.files, (), OURS.trees, None, ("weights",)))
    assert (result.kept, result.left) == ([f"{root}/weights"], {})
    assert all_paths(root) == [f"{root}/weights", f"{root}/weights/e2b.json"]


def test_in_a_tree_only_what_belongs_to_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file here belongs to whoever runs the test; the walk is told of another owner for one of them."""
    root = plant(tmp_path / "cache", "e2b/graph", "e2b/theirs", "e4b/graph")
    real = removal._Walk.owns

    def owns(self: Any, path: str, found: os.stat_result) -> bool:
        if path.endswith("theirs"):
            found = os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])
        return real(self, path, found)

    monkeypatch.setattr(removal._Walk, "owns", owns)
    result = remove(str(root), Owned(trees=("*",), uid=os.getuid()))
    assert result.left == {f"{root}/e2b/theirs": f"it belongs to user {os.getuid() + 1}, and ours is {os.getuid()}"}
    assert result.removed == [f"{root}/e2b/ in part", f"{root}/e4b/"]
    assert all_paths(root) == [f"{root}/e2b", f"{root}/e2b/theirs"]
    assert remove(str(root), Owned(trees=("*",), uid=os.getuid())).removed == []


def test_a_tree_of_another_user_stays_whole(tmp_path: Path) -> None:
    root = plant(tmp_path / "cache", "e2b/graph")
    result = remove(str(root), Owned(trees=("*",), uid=os.getuid() + 1))
    assert list(result.left) == [f"{root}/e2b"] and (root / "e2b" / "graph").exists()


def test_another_file_system_is_not_entered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = real(path, *args, **kwargs)
        if path == root:
            values = list(found)
            values[2] += 1
            return os.stat_result(values)
        return found

    monkeypatch.setattr(removal.os, "stat", stat)
    result = remove(str(root), OURS)
    assert set(result.left.values()) == {"another file system is mounted there"}
    assert (root / "venv/lib/x/y.py").exists()


def test_a_directory_that_is_a_link_keeps_the_link_and_what_it_leads_to(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    result = remove(str(link), OURS)
    assert result.left == {str(link): f"it is a link to {root}, which is empty now"}
    assert link.is_symlink() and all_paths(root) == []


def test_what_an_earlier_step_foresees_is_not_called_foreign(root: Path) -> None:
    plant(root, "theirs-no-more/x")
    result = remove(str(root), OURS, gone=[f"{root}/theirs-no-more/"], apply=False)
    assert result.left == {} and result.removed[-1] == f"{root}/"
    assert remove(str(root), OURS, gone=[f"{root}/"], apply=False) == Removal()


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert remove(str(tmp_path / "gone"), OURS) == Removal()


@pytest.mark.parametrize(
    "path", ["", "/", "relative", "/etc", "/opt/", "/usr/local/bin", "/var/lib", "/opt/x/../..", "/data/../etc"]
)
def test_a_path_that_cannot_have_been_meant(path: str) -> None:
    with pytest.raises(RemovalError, match="nothing was removed"):
        remove(path, Owned(trees=("*",)), apply=False)


def test_a_link_to_a_directory_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(RemovalError, match="/etc, a directory of the system"):
        check_directory(str(tmp_path / "link"))


@pytest.mark.parametrize("pattern", ["/etc", "../x", "a/../../b", "", "."])
def test_a_pattern_that_leaves_the_directory(root: Path, pattern: str) -> None:
    with pytest.raises(RemovalError, match="does not name something below"):
        remove(str(root), Owned(names=(pattern,)))
    assert (root / "venv/pyvenv.cfg").exists()


def test_a_record_that_leads_elsewhere(tmp_path: Path) -> None:
    """Inside is inside after links are resolved; a link in the parent, which an operator made, counts as it."""
    weights = plant(tmp_path / "weights", "e2b/model.safetensors")
    elsewhere = plant(tmp_path / "disk", "e4b/model.safetensors", "other/model.safetensors")
    (weights / "e4b").symlink_to(elsewhere / "e4b")
    names = Owned(names=("model.safetensors",))
    for refused in (elsewhere / "other", weights, tmp_path):
        with pytest.raises(RemovalError, match="is not inside"):
            remove(str(refused), names, inside=str(weights))
    assert remove(str(weights / "e2b"), names, inside=str(weights)).removed
    assert remove(str(elsewhere / "e4b"), names, inside=str(weights)).removed
    assert (elsewhere / "other/model.safetensors").exists()
