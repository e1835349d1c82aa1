# SPDX-License-Identifier: Apache-2.0
"""Caches of engines: the role vllm_engine removes those of images that no kept generation uses, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import ROOT, run_playbook

OLD, KEPT, LIVE = "0" * 12, "1" * 12, "2" * 12


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """One engine over three images, one engine of a former profile, and what others have put there."""
    for cache in (f"e2b/{OLD}", f"e2b/{KEPT}", f"e2b/{LIVE}", f"former/{OLD}", "e2b/notes-of-me", f"e2b/{OLD}-mine"):
        (tmp_path / "cache" / cache / "vllm").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").rename(tmp_path / "disk" / "cache")
    (tmp_path / "cache").symlink_to("disk/cache")
    for place, image in (("state/generations/4", KEPT), ("state/generations/5", LIVE), ("etc", LIVE)):
        file = tmp_path / place / "engines" / "e2b" / "engine.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"engine": "e2b", "image_id": f"sha256:{image}{'0' * 52}"}, indent=2))
    return tmp_path


def play(host: Path, *arguments: str) -> str:
    variables = {
        "vllm_engine_cache_directory": f"{host}/cache",
        "vllm_engine_state_directory": f"{host}/state",
        "vllm_engine_configuration_directory": f"{host}/etc",
        "vllm_engine_uid": os.getuid(),
    }
    include = {"name": "vllm_engine", "tasks_from": "prune", "rolespec_validate": False}
    tasks = [{"ansible.builtin.include_role": include}]
    content = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": variables, "tasks": tasks}]
    (host / "play.yml").write_text(json.dumps(content))
    roles = str(ROOT / "roles")
    done = run_playbook("--inventory=localhost,", *arguments, "play.yml", cwd=host, ANSIBLE_ROLES_PATH=roles)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout


def caches(host: Path) -> list[str]:
    return sorted(str(path.relative_to(host / "cache")) for path in (host / "cache").glob("*/*"))


def test_caches_that_no_generation_names_are_removed(host: Path) -> None:
    before = caches(host)
    foreseen = play(host, "--check", "--diff")
    assert "changed=1" in foreseen and f"{host}/cache/former/{OLD}" in foreseen and caches(host) == before
    assert "changed=1" in play(host)
    assert caches(host) == sorted([f"e2b/{KEPT}", f"e2b/{LIVE}", "e2b/notes-of-me", f"e2b/{OLD}-mine"])
    assert "changed=0" in play(host), "a second run changes nothing"


def test_nothing_is_removed_where_no_generation_can_be_read(host: Path) -> None:
    before = caches(host)
    for file in host.rglob("engine.json"):
        file.unlink()
    assert "changed=0" in play(host) and caches(host) == before
