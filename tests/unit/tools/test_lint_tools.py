# SPDX-License-Identifier: Apache-2.0
"""The checks of `make lint` that are scripts of ours find what they are for, in any file of a repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQ" * 2
CLOUD_KEY = "AKIA" + "IOSFODNN7QWERTYU"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "tools").mkdir()
    for name in ("secrets", "shell_scripts", "hub_token.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    return tmp_path


FILES = {
    "group_vars/all.yml": 'password: "Tr0ub4dor-and-3"\n',
    "docs/a page.md": f"Give it `{HUB_TOKEN}`.\n",
    "tests/test_x.py": f'password = "Tr0ub4dor-and-3"\ntoken = "{HUB_TOKEN}"\n',
    "molecule/x.yml": f"key: {CLOUD_KEY}\n",
    "fine.yml": f'password: "Tr0ub4dor-and-3" # pragma: allowlist secret\ncommit: {"0123456789" * 4}\n',
    "docs/reference/x.txt": f"token {HUB_TOKEN}\n",
    ".gitignore": "/ignored\n",
    "ignored": f"token {HUB_TOKEN}\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_secrets_are_found(repository: Path) -> None:
    write(repository, FILES)
    (repository / "link").symlink_to("/etc/passwd")
    done = subprocess.run([repository / "tools/secrets"], capture_output=True, text=True, check=False)
    found = ["docs/a page.md:1", "group_vars/all.yml:1", "molecule/x.yml:1", "tests/test_x.py:2"]
    assert sorted(set(re.findall(r"Location:\s+(.+)", done.stdout))) == found and done.returncode == 1


def test_shell_scripts_are_found_by_their_first_line(repository: Path) -> None:
    bad = "#!{}\nrm -rf $1\n"
    shells = {"a b": bad.format("/bin/sh"), "postinst": bad.format("/usr/bin/env bash")}
    write(repository, {**shells, "x.py": "#!/usr/bin/python3\n", "y.md": bad.format("x")})
    done = subprocess.run([repository / "tools/shell_scripts"], capture_output=True, text=True, check=False)
    assert set(re.findall(r"In (.+) line 2:", done.stdout)) == {"a b", "postinst"}
    assert done.returncode != 0
