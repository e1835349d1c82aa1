# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of the program vllm-edge, unless a wheel of the same sources is there already.

Usage: build_wheel.py PROJECT DIRECTORY

PROJECT is a checkout or an installed collection, DIRECTORY is where the wheel lies. The same sources and the same
setuptools always give the same bytes. Nothing is downloaded. Prints path, version, SHA-256 and hash of the sources as
JSON.
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
SETUPTOOLS = 77
"""The first release that reads a licence as pyproject.toml writes it."""
EPOCH = "315532800"
"""1980-01-01, the earliest time that a zip file can hold."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def check_setuptools() -> None:
    """Exit with the command to run where this interpreter has no setuptools, or one that is too old."""
    try:
        import setuptools

        found = setuptools.__version__
    except ImportError:
        found = "0"
    if int(found.split(".")[0]) < SETUPTOOLS:
        sys.exit(
            f"The wheel of vllm-edge is built with setuptools {SETUPTOOLS} or newer, and {sys.executable} has "
            f"{'none' if found == '0' else found}. Install it on the controller: "
            f"{sys.executable} -m pip install 'setuptools>={SETUPTOOLS}'"
        )


def copy_tree(project: Path, target: Path) -> None:
    """Copy what the wheel is made of, since setuptools writes into the tree. Modes do not depend on the umask."""
    shutil.copytree(project / PACKAGE, target / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(project / name, target / name)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def build(project: Path, wheel: Path) -> None:
    """Build the wheel and put it in its place by one rename; wheels of other versions beside it are removed."""
    check_setuptools()
    fresh = wheel.with_name(f".{wheel.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as scratch:
        tree, built = Path(scratch, "tree"), Path(scratch, "built")
        copy_tree(project, tree)
        built.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(built)],
            cwd=tree,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
            umask=0o022,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"setuptools cannot build the wheel of vllm-edge:\n{done.stderr[-4000:]}")
        shutil.copyfile(built / wheel.name, fresh)
    fresh.chmod(0o644)
    os.replace(fresh, wheel)
    for other in wheel.parent.glob("vllm_edge-*.whl"):
        if other != wheel:
            other.unlink()


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
    print(json.dumps({"path": str(wheel), "version": version.__version__, "sha256": sha256, "sources": sources}))


if __name__ == "__main__":
    main()
