# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of the program vllm-edge with pip, unless a wheel of the same sources is there already.

Usage: build_wheel.py PROJECT DIRECTORY

PROJECT is a checkout or an installed collection, DIRECTORY is where the wheel lies. The same sources and the same
setuptools always give the same bytes. Nothing is downloaded. Prints path, version, SHA-256, hash of the sources and
time of the newest commit as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "plugins/module_utils/vllm_edge"
EPOCH = "315532800"
"""1980-01-01, the earliest time that a zip file can hold."""
PIP = (
    *(sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "wheel", "--quiet", "--no-index"),
    *("--no-deps", "--no-build-isolation", "--check-build-dependencies", "--wheel-dir"),
)


def build(project: Path, wheel: Path) -> None:
    """Build the wheel and put it in its place by one rename; wheels of other versions beside it are removed."""
    fresh = wheel.with_name(f".{wheel.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, since setuptools writes into the tree. Modes do not depend on the umask.
        tree = Path(scratch, "tree")
        shutil.copytree(project / PACKAGE, tree / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(project / name, tree / name)
        for path in tree.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        done = subprocess.run(
            [*PIP, scratch, tree], env=environment, umask=0o022, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(
                f"pip cannot build the wheel of vllm-edge: {done.stderr.strip()[-4000:]}\nIf setuptools is missing or "
                f"too old, install it on the controller: {sys.executable} -m pip install 'setuptools>=77'"
            )
        shutil.copyfile(Path(scratch, wheel.name), fresh)
    fresh.chmod(0o644)
    os.replace(fresh, wheel)
    for other in wheel.parent.glob("vllm_edge-*.whl"):
        if other != wheel:
            other.unlink()


def find_commit_time(project: Path) -> int:
    """Return when the program was last changed by a commit, in seconds since the epoch; 0 without a git checkout."""
    command = ["git", "-C", str(project), "log", "-1", "--format=%ct", "--", PACKAGE, "roles/vllm_edge_host"]
    try:
        return int(subprocess.run(command, check=False, capture_output=True, text=True).stdout or 0)
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Build the wheel where it is absent or made of other sources, and print what is there."""
    project, directory = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str((project / PACKAGE).parent))
    version = importlib.import_module("vllm_edge.version")

    def hash_wheel() -> str:
        with zipfile.ZipFile(wheel) as content:
            names = [name for name in content.namelist() if name.startswith("vllm_edge/")]
            return str(version.hash_files({name.partition("/")[2]: content.read(name) for name in names}))

    wheel = directory / f"vllm_edge-{version.__version__}-py3-none-any.whl"
    sources = version.hash_sources()
    if not wheel.exists() or hash_wheel() != sources:
        try:
            build(project, wheel)
        except OSError as error:
            sys.exit(f"The wheel of vllm-edge cannot be built: {error}")
    if hash_wheel() != sources:
        sys.exit(f"{wheel} lacks files of {project / PACKAGE}: pyproject.toml does not name them all as package data.")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = {"path": str(wheel), "version": version.__version__, "sha256": sha256, "sources": sources}
    print(json.dumps({**found, "committed_s": find_commit_time(project)}))


if __name__ == "__main__":
    main()
