# SPDX-License-Identifier: Apache-2.0
"""Secrets of engines on a host: in one file of root, never in a generation, a difference or a record."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import load_config
from ansible.module_utils.vllm_edge.generation import live, secrets, store
from ansible.module_utils.vllm_edge.generation.model import FileChange, GenerationError
from ansible.module_utils.vllm_edge.paths import HostPaths
from generations import activate, engine, put, rendered

FIRST, SECOND = "marked-secret-one", "marked-secret-two"
Run = Callable[..., dict[str, Any]]


def arrange(paths: HostPaths, value: str, run_module: Run) -> Any:
    """A generation whose engine has a secret, which is staged as the role does it."""
    given = {"secrets": {"e2b": {"STORE": value}}, "configuration_directory": str(paths.etc)}
    result = run_module("engine_secrets", given)
    assert result["rc"] == 0, result
    return rendered(engine(secrets_hash=result["hashes"]["e2b"]))


def read(paths: HostPaths) -> str:
    return paths.secret_file("e2b").read_text()


def test_a_switch_installs_the_new_secret_and_its_rollback_the_former_one(paths: HostPaths, run_module: Run) -> None:
    one = store.load(paths, activate(paths, arrange(paths, FIRST, run_module)))
    assert read(paths) == f"STORE={FIRST}\n"
    two = store.load(paths, put(paths, arrange(paths, SECOND, run_module)))
    assert two.hashes != one.hashes, "a new secret restarts the engine"
    assert read(paths) == f"STORE={FIRST}\n", "the running engine may restart before the switch"
    live.install(two, paths, ["e2b"], target=False)
    assert read(paths) == f"STORE={SECOND}\n"
    live.install(one, paths, ["e2b"], target=False)
    assert read(paths) == f"STORE={FIRST}\n"
    secrets.prune(paths)
    assert sorted(path.name for path in paths.secrets.iterdir()) == ["e2b.env", "hash.key"]
    shutil.rmtree(paths.state / "generations")
    secrets.prune(paths)
    assert [path.name for path in paths.secrets.iterdir()] == ["hash.key"], "no generation names the file"


def test_a_later_switch_back_does_not_bring_a_rotated_secret_back(paths: HostPaths, run_module: Run) -> None:
    one = store.load(paths, activate(paths, arrange(paths, FIRST, run_module)))
    store.load(paths, activate(paths, arrange(paths, SECOND, run_module)))
    secrets.prune(paths)
    live.install(one, paths, ["e2b"], target=False)
    assert read(paths) == f"STORE={SECOND}\n"
    assert live.live_changes(one, paths, ["e2b"], target=False) == []
    assert sorted(path.name for path in paths.secrets.iterdir()) == ["e2b.env", "hash.key"]


def test_a_second_run_changes_nothing_and_check_mode_writes_nothing(paths: HostPaths, run_module: Run) -> None:
    given = {"secrets": {"e2b": {"STORE": FIRST}}, "configuration_directory": str(paths.etc)}
    assert run_module("engine_secrets", given, check=True)["changed"] and not paths.etc.exists()
    activate(paths, arrange(paths, FIRST, run_module))
    before = {path: (path.stat().st_ino, path.read_text()) for path in paths.secrets.iterdir()}
    result = run_module("engine_secrets", given)
    assert not result["changed"] and result["hashes"]["e2b"] == load_config("e2b", paths).secrets_hash
    given["secrets"] = {"e2b": {"STORE": SECOND}}
    foreseen = run_module("engine_secrets", given, check=True)
    assert foreseen["changed"] and foreseen["hashes"] != result["hashes"]
    assert {path: (path.stat().st_ino, path.read_text()) for path in paths.secrets.iterdir()} == before
    assert str(paths.secret_file("e2b")) in json.dumps(foreseen["diff"])


def test_nothing_but_the_files_of_root_has_the_secret(paths: HostPaths, run_module: Run) -> None:
    one = store.load(paths, activate(paths, arrange(paths, FIRST, run_module)))
    two = store.load(paths, put(paths, arrange(paths, SECOND, run_module)))
    changes = live.live_changes(two, paths)
    told = json.dumps(live.build_file_rows(two, paths, changes, None)) + repr(changes) + repr((one, two))
    assert f'"{paths.secret_file("e2b")}"' in told
    for path in [*paths.etc.rglob("*"), *paths.state.rglob("*"), *paths.units.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path == paths.secrets or paths.secrets in path.parents:
            assert mode == (0o700 if path.is_dir() else 0o600), path
        elif path.is_file():
            told += path.read_text()
            open_to_all = path.parent in (paths.units, paths.state) or path == paths.engine_dir("e2b") / "engine.json"
            assert mode == (0o644 if open_to_all else 0o640), path
    assert "marked" not in told and FIRST in read(paths)


def test_a_weak_secret_cannot_be_guessed_from_its_hash(tmp_path: Path, run_module: Run) -> None:
    found = set()
    for host in ("a", "b"):
        paths = HostPaths(tmp_path / host, tmp_path / host, tmp_path / host)
        found.add(arrange(paths, "password", run_module).engines["e2b"].config["secrets_hash"])
    assert len(found) == 2, "without a key of the host, the same secret has the same hash everywhere"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("one\ntwo\nthree", "line break"),
        ("carriage\rreturn", "line break or control"),
        ("nul-nul\0nul", "holds a NUL"),
        ("next\x85line....", "no line of a file"),
        ("surrogate\ud800", "no line of a file"),
        ("", "has 0 characters"),
        ("short", "has 5 characters"),
        ("x" * 20_000, "has 20000 characters"),
        (None, "has no value"),
        (True, "is no text"),
        (1234567890, "is no text"),
        (["marked-secret"], "is no text"),
    ],
)
def test_a_value_that_no_file_can_hold_is_refused_without_being_shown(paths: HostPaths, value: Any, why: str) -> None:
    with pytest.raises(GenerationError, match=why) as refused:
        secrets.prepare({"e2b": {"STORE": value}}, paths, write=True)
    assert "STORE" in str(refused.value) and not paths.etc.exists()
    assert not isinstance(value, str) or not value or value not in str(refused.value)


def test_a_link_in_place_of_a_secret_is_neither_read_nor_written(paths: HostPaths, run_module: Run) -> None:
    victim = paths.etc.parent / "victim"
    victim.write_text("precious")
    paths.secrets.mkdir(parents=True)
    paths.secret_file("e2b").symlink_to(victim)
    with pytest.raises(GenerationError, match=r"e2b\.env cannot be read"):
        secrets.prepare({"e2b": {"STORE": FIRST}}, paths, write=True)
    assert victim.read_text() == "precious"


def test_an_open_file_is_closed_again_and_a_missing_one_is_found(paths: HostPaths, run_module: Run) -> None:
    generation = store.load(paths, activate(paths, arrange(paths, FIRST, run_module)))
    for wrong in (0o644, 0o640, 0o666):
        paths.secret_file("e2b").chmod(wrong)
        (change,) = live.live_changes(generation, paths)
        assert change.attributes == f"mode {wrong:04o}, wanted 0600"
        live.install(generation, paths, ["e2b"], target=False)
        assert paths.secret_file("e2b").stat().st_mode & 0o777 == 0o600
        assert live.live_changes(generation, paths) == []
    assert secrets.find_missing(generation, ["e2b"], paths) == []
    paths.secret_file("e2b").unlink()
    assert secrets.find_missing(generation, ["e2b"], paths) == ["e2b"]


def test_a_difference_shows_no_secret_of_an_argument(paths: HostPaths) -> None:
    lines = "--env=VLLM_API_KEY={}\n--env=PROXY=http://u:{}@proxy\n--shm-size=4g\nimage\n"
    row = live.difference(FileChange("/x", lines.format(FIRST, SECOND), lines.format(SECOND, SECOND)))
    assert "marked" not in json.dumps(row) and "--shm-size=4g" in row["before"]
    assert row["before"] != row["after"], "that something differs is still said"
