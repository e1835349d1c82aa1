# SPDX-License-Identifier: Apache-2.0
"""The collection and the wheel of the host's program: built, installed and run without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import __version__
from ansible.module_utils.vllm_edge.version import describe_version, hash_sources
from helpers import ROOT, list_files
from packaging.requirements import Requirement

BUILDER = ROOT / "roles/vllm_edge_host/files/build_wheel.py"


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What a command prints on its standard output; the test fails where the command does."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        command, cwd=cwd, env=settings | environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def build_wheel(project: Path, directory: Path, **environment: str) -> dict[str, Any]:
    """Without site-packages: the Python of Ansible may have neither pip nor setuptools."""
    directory.mkdir(exist_ok=True)
    built: dict[str, Any] = json.loads(run(sys.executable, "-S", BUILDER, project, directory, **environment))
    return built


def read_wheel(wheel: Path) -> tuple[set[str], list[tuple[str, str]], str]:
    """Names of the files, the metadata and the commands; a requirement has its parts in one order."""
    with zipfile.ZipFile(wheel) as content:
        info = {Path(name).name: name for name in content.namelist() if ".dist-info/" in name}
        metadata = message_from_bytes(content.read(info["METADATA"]))
        del metadata["Dynamic"]
        found = [(key, str(Requirement(value)) if key == "Requires-Dist" else value) for key, value in metadata.items()]
        names = {*content.namelist()} - {info.get("top_level.txt", "")}
        return names, sorted(found), content.read(info["entry_points.txt"]).decode()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows or would add, as a clone has them."""
    target = tmp_path_factory.mktemp("clone")
    for path in list_files():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
    return target


# ---- wheel ------------------------------------------------------------------------------------------------------


def test_versions_and_dependencies_agree() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    required = yaml.safe_load((ROOT / "requirements.yml").read_text())["collections"]
    assert galaxy["version"] == __version__
    assert galaxy["dependencies"] == {entry["name"]: entry["version"] for entry in required}


@pytest.mark.slow
def test_a_wheel_is_built_again_only_when_its_sources_changed(project: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(project / "plugins", tmp_path / "tree/plugins").parent
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(project / name, tree)
    wheels, before = tmp_path / "wheels", sorted(tree.rglob("*"))
    first = build_wheel(tree, wheels)
    assert (first["sources"], first["version"], sorted(tree.rglob("*"))) == (hash_sources(), __version__, before)
    os.utime(tree / "plugins/module_utils/vllm_edge/cli.py")
    again = build_wheel(tree, tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="1")
    assert Path(first["path"]).read_bytes() == Path(again["path"]).read_bytes()
    # As setuptools builds it, with which `pipx install .` does.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", tmp_path / "setuptools", shutil.copytree(tree, tmp_path / "copy"))
    assert read_wheel(Path(first["path"])) == read_wheel(next((tmp_path / "setuptools").iterdir()))
    # Without the packages that it depends on, which `--version` and `--help` do not need.
    shutil.unpack_archive(first["path"], tmp_path / "installed", "zip")
    bare, path = [sys.executable, "-S", "-m", "vllm_edge.cli"], str(tmp_path / "installed")
    assert run(*bare, "--version", cwd=tmp_path, PYTHONPATH=path).strip() == describe_version()
    assert "run-engine" in run(*bare, "--help", cwd=tmp_path, PYTHONPATH=path)
    (wheels / "vllm_edge-0.0.9-py3-none-any.whl").touch()
    made = Path(first["path"]).stat()
    assert build_wheel(tree, wheels) == first and Path(first["path"]).stat().st_mtime_ns == made.st_mtime_ns
    (tree / "plugins/module_utils/vllm_edge/planning/checkpoint/recorded.json").write_text("{}\n")
    second = build_wheel(tree, wheels)
    assert second["sources"] != first["sources"] and second["sha256"] != first["sha256"]
    assert [path.name for path in wheels.iterdir()] == [Path(second["path"]).name]


# ---- collection -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collections(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the collection, built as `make collection` builds it, and installed without a network."""
    place = tmp_path_factory.mktemp("collection")
    build_wheel(project, project / "roles/vllm_edge_host/files")
    run("ansible-galaxy", "collection", "build", "--output-path", place, cwd=project)
    (archive,) = place.glob("edge-vllm_edge-*.tar.gz")
    install = ["ansible-galaxy", "collection", "install", "--offline", "--no-deps", "-p", place / "installed", archive]
    # Away from ansible.cfg of the checkout, by which the collection is there already.
    run(*install, cwd=place)
    return place / "installed"


def installed(collections: Path) -> Path:
    return collections / "ansible_collections/edge/vllm_edge"


@pytest.mark.slow
def test_the_collection_holds_what_an_operator_needs_and_nothing_else(collections: Path) -> None:
    names = {path.name for path in installed(collections).iterdir()}
    pages = {path.name for path in ROOT.glob("*.md")}
    assert names == pages | {
        *("FILES.json", "LICENSE", "LICENSES", "MANIFEST.json", "docs", "group_vars", "inventories", "meta"),
        *("playbooks", "plugins", "pyproject.toml", "requirements.yml", "roles", "tests"),
    }
    assert {path.name for path in installed(collections).glob("tests/*")} <= {"sanity"}
    assert [path.name for path in installed(collections).glob("inventories/*")] == ["xr7620"]


@pytest.mark.slow
def test_the_collection_carries_its_wheel(collections: Path) -> None:
    """It is used as it is: nothing is written into the collection."""
    files = installed(collections) / "roles/vllm_edge_host/files"
    (made,) = files.glob("*.whl")
    before = made.stat().st_mtime_ns
    carried = build_wheel(installed(collections), files)
    assert carried["sources"] == hash_sources() and made.stat().st_mtime_ns == before


@pytest.mark.slow
def test_playbooks_run_by_their_full_names(collections: Path, tmp_path: Path) -> None:
    """With variables, tasks and modules of the collection, which import the package from there.

    The inventory is a copy, because reports are beside it, and an update removes what is in the collection.
    """
    inventory = shutil.copytree(installed(collections) / "inventories/xr7620", tmp_path / "site") / "hosts.yml"
    playbooks = ["edge.vllm_edge.validate", "edge.vllm_edge.plan"]
    options = ["-e", "serving_profile=e2b-only", "-e", "plan_profile=e2b-only"]
    path = {"ANSIBLE_COLLECTIONS_PATH": str(collections)}
    shown = run("ansible-playbook", "-i", inventory, *playbooks, *options, cwd=tmp_path, **path)
    assert "profile e2b-only, vLLM 0.32.0: fits" in shown
    command = ["ansible-playbook", "--list-tasks", "-i", "xr7620,", "edge.vllm_edge.site"]
    stages = run(*command, cwd=tmp_path, **path)
    assert re.findall(r"play #\d+ \(gpu_hosts\): (.*?)\t", stages)[-2:] == ["Install the gateway", "Print the report"]
