# SPDX-License-Identifier: Apache-2.0
"""Releases of the program: what is current is whole, and nothing is removed under what runs from it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.paths import find_interpreter
from ansible.module_utils.vllm_edge.releases import Releases
from ansible.module_utils.vllm_edge.switch import journal

Run = Callable[..., dict[str, Any]]
SOURCE = {"version": "0.1.0", "committed_s": 1_764_201_600}


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    (tmp_path / "proc").mkdir()
    (tmp_path / "opt").mkdir()
    return Releases(tmp_path / "opt", proc=tmp_path / "proc")


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def build(releases: Releases, name: str) -> Path:
    """What a run writes before it says that the release is whole."""
    release = releases.wanted(name).path
    write(release / "lib/vllm_edge/cli.py", name)
    write(release / "bin/vllm-edge").chmod(0o755)
    write(release / "venv/bin/python3")
    (release / "venv/bin/python").symlink_to("python3")
    return release


def install(releases: Releases, name: str) -> Path:
    release = build(releases, name)
    releases.finish(release, SOURCE)
    releases.make_current(release)
    return release


def runs(releases: Releases, program: Path | str) -> None:
    """A process as the kernel shows it that was started as a script of a release."""
    command = f"{program}\0-I\0/usr/local/bin/vllm-edge\0run-engine\0e2b\0".encode()
    place = releases.proc / str(100 + len(list(releases.proc.iterdir())))
    place.mkdir()
    (place / "cmdline").write_bytes(command)


def names(releases: Releases) -> list[str]:
    return sorted(path.name for path in (releases.prefix / "releases").iterdir())


def test_what_is_installed_is_current_and_whole(releases: Releases) -> None:
    release = install(releases, "a")
    assert os.readlink(releases.link) == "releases/a"
    wanted = releases.wanted("a")
    assert (wanted.path, wanted.whole, wanted.current, wanted.why) == (release, True, True, "")
    write(release / "lib/vllm_edge/__pycache__/cli.cpython-311.pyc")
    assert releases.wanted("a").whole, "what Python compiles is no damage"


def test_what_was_cut_off_is_not_whole_and_is_built_in_its_place(releases: Releases) -> None:
    before = install(releases, "a")
    half = build(releases, "b")
    wanted = releases.wanted("b")
    assert (wanted.path, wanted.whole, wanted.why) == (half, False, f"{half} was not built to its end")
    assert releases.current == before and releases.wanted("a").whole
    runs(releases, half / "venv/bin/python")
    assert releases.wanted("b").path.name == "b-2", "something runs from it"


@pytest.mark.parametrize("cut", ["symlink_to", "rename"])
def test_a_cut_within_the_swap_leaves_a_link_that_leads_to_a_whole_release(
    releases: Releases, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    before = install(releases, "a")
    release = build(releases, "b")
    releases.finish(release, SOURCE)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path if cut == "symlink_to" else os, cut, killed)
        releases.make_current(release)
    assert releases.current == before
    assert releases.wanted("b").whole and not releases.wanted("b").current
    releases.make_current(release)
    assert releases.current == release


def test_what_a_umask_keeps_for_root_is_built_again(releases: Releases) -> None:
    release = build(releases, "a")
    (release / "lib/vllm_edge/cli.py").chmod(0o640)
    releases.finish(release, SOURCE)
    wanted = releases.wanted("a")
    assert not wanted.whole and "cli.py was built with a umask that lets only root read it" in wanted.why


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("python4")


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("lib/vllm_edge/cli.py", lambda path: path.write_text(""), "is not as it was built"),
        ("bin/vllm-edge", lambda path: path.chmod(0o600), "is not as it was built"),
        ("bin/vllm-edge", Path.unlink, "is not as it was built"),
        ("venv/bin/python", relink, "is not as it was built"),
        ("release.json", lambda path: path.write_text(""), "is damaged"),
    ],
)
def test_a_damaged_release_is_built_anew_beside_it(
    releases: Releases, file: str, damage: Callable[[Path], object], why: str
) -> None:
    damaged = install(releases, "a")
    damage(damaged / file)
    wanted = releases.wanted("a")
    assert (wanted.path.name, wanted.whole) == ("a-2", False)
    assert wanted.why == f"{damaged / file} {why}"
    assert install(releases, "a").name == "a-2"
    assert releases.wanted("a").path == releases.current == wanted.path


def test_the_release_before_stays_and_older_ones_go(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        install(releases, name)
    assert releases.remove_others(releases.wanted("c").path, apply=False) == [f"{releases.prefix}/releases/a/"]
    assert names(releases) == ["a", "b", "c"]
    assert releases.remove_others(releases.wanted("c").path) == [f"{releases.prefix}/releases/a/"]
    assert names(releases) == ["b", "c"]
    assert releases.remove_others(releases.wanted("c").path) == [], "a second run changes nothing"
    releases.make_current(releases.wanted("b").path)
    install(releases, "d")
    releases.remove_others(releases.wanted("d").path)
    assert names(releases) == ["b", "d"], "the one before was current last"


def test_what_a_supervisor_runs_from_stays_until_it_ends(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        install(releases, name)
    runs(releases, releases.prefix / "releases/a/venv/bin/python")
    assert releases.remove_others(releases.wanted("c").path) == []
    (releases.proc / "100/cmdline").write_bytes(b"")
    runs(releases, releases.prefix / "releases/ab/venv/bin/python")
    assert releases.remove_others(releases.wanted("c").path) == [f"{releases.prefix}/releases/a/"]


# ---- interpreters -----------------------------------------------------------------------------------------------


def test_a_module_goes_on_under_the_release_that_is_current_as_it_begins(releases: Releases) -> None:
    """Its packages are of one release, whatever becomes current meanwhile, and the release counts as used."""
    release = install(releases, "a")
    python = find_interpreter(str(releases.link / "venv/bin/python"))
    assert python == str(release / "venv/bin/python")
    assert find_interpreter(str(release / "venv/bin/python")) == python
    nowhere = str(releases.prefix / "absent/venv/bin/python")
    assert find_interpreter(nowhere) == nowhere, "on a bare host"


# ---- the module -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(releases: Releases, tmp_path: Path, run_module: Run) -> Run:
    def go(state: str, name: str = "a", *, check: bool = False, **more: Any) -> dict[str, Any]:
        place = {"source": SOURCE, **more, "prefix": str(releases.prefix), "state_directory": str(tmp_path / "state")}
        return run_module("program_release", {**place, "name": name, "state": state}, check=check)

    return go


def test_what_was_built_becomes_current_once(releases: Releases, run: Run) -> None:
    release = build(releases, "a")
    known = run("known")
    assert (known["path"], known["whole"], known["current"], known["changed"]) == (str(release), False, False, False)
    foreseen = run("current", check=True)
    assert foreseen["changed"] and releases.current is None
    made = run("current")
    assert made["diff"] == foreseen["diff"] and made["diff"]["after"]["src"] == "releases/a"
    assert releases.current == release and releases.wanted("a").whole
    assert [run("current")["changed"], run("alone")["changed"]] == [False, False]


@pytest.mark.parametrize(
    ("changes", "older"),
    [
        ({"committed_s": SOURCE["committed_s"] - 60}, "0.1.0, committed 2025-11-26 23:59 UTC"),
        ({"version": "0.0.9", "committed_s": SOURCE["committed_s"] + 60}, "0.0.9, committed 2025-11-27 00:01 UTC"),
        ({"version": "0.0.9", "committed_s": 0}, "0.0.9"),
        ({"committed_s": SOURCE["committed_s"] + 60}, ""),
        ({"version": "0.10.0", "committed_s": 0}, ""),
        ({"committed_s": 0}, "is not known"),
    ],
)
def test_a_controller_with_an_older_program_does_not_replace_a_newer_one(
    releases: Releases, run: Run, changes: dict[str, Any], older: str
) -> None:
    install(releases, "a")
    known = run("known", "b", source={**SOURCE, **changes}, check=True)
    if older == "is not known":
        assert known["rc"] == 0 and older in known["warnings"][0]
    else:
        assert known["rc"] == bool(older)
        assert f"than that of this controller (version {older})" in known.get("msg", "") or not older
        assert not known.get("warnings")
    assert run("known", "b", source={**SOURCE, **changes}, allow_older=True)["rc"] == 0
    assert run("known", source={**SOURCE, **changes})["rc"] == 0, "what is current replaces nothing"


def test_no_release_becomes_current_under_a_switch(
    releases: Releases, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LOCK_PATIENCE_S", 0.1)
    before = install(releases, "a")
    build(releases, "b")
    (tmp_path / "state").mkdir()
    with (tmp_path / "state/switch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run("current", "b")
    assert refused["rc"] == 1 and releases.current == before
    assert "was not replaced by its new release, which is built. Another switch runs" in refused["msg"]
    assert run("known", "b")["whole"], "the next run has only to make it current"
    assert run("current", "b")["changed"] and releases.wanted("b").current


def test_a_disk_that_refuses_makes_nothing_current(
    releases: Releases, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sync` tells of errors that nobody who wrote was told of."""
    build(releases, "a")
    sync = write(tmp_path / "bin/sync", "#!/bin/sh\necho 'sync: error syncing: Input/output error' >&2\nexit 1\n")
    sync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sync.parent}:{os.environ['PATH']}")
    refused = run("current")
    assert refused["rc"] == 1 and "Input/output error" in refused["msg"]
    assert releases.current is None and not releases.wanted("a").whole
