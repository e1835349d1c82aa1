# SPDX-License-Identifier: Apache-2.0
"""A release: the package and the collection are built, installed and run without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import __version__
from ansible.module_utils.vllm_edge.version import describe_version, hash_sources
from helpers import ROOT, list_files

BUILDER = ROOT / "roles/vllm_edge_host/files/build_wheel.py"
WHEEL = f"vllm_edge-{__version__}-py3-none-any.whl"
ADDRESS = "https://github.com/owner/vllm-edge"


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
    for name in ("pyproject.toml", "LICENSE", "PYPI.md"):
        shutil.copy(project / name, tree)
    wheels, before = tmp_path / "wheels", sorted(tree.rglob("*"))
    first = build_wheel(tree, wheels)
    assert (first["sources"], first["version"], sorted(tree.rglob("*"))) == (hash_sources(), __version__, before)
    os.utime(tree / "plugins/module_utils/vllm_edge/cli.py")
    again = build_wheel(tree, tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="1")
    assert Path(first["path"]).read_bytes() == Path(again["path"]).read_bytes()
    # Without the packages that it depends on, which `--version` and `--help` do not need.
    shutil.unpack_archive(first["path"], tmp_path / "installed", "zip")
    bare, path = [sys.executable, "-S", "-m", "vllm_edge.cli"], str(tmp_path / "installed")
    assert run(*bare, "--version", cwd=tmp_path, PYTHONPATH=path).strip() == describe_version()
    assert "run-engine" in run(*bare, "--help", cwd=tmp_path, PYTHONPATH=path)
    (wheels / "vllm_edge-0.0.9-py3-none-any.whl").touch()
    Path(again["path"]).write_bytes(b"")
    assert build_wheel(tree, tmp_path / "again") == again
    made = Path(first["path"]).stat()
    assert build_wheel(tree, wheels) == first and Path(first["path"]).stat().st_mtime_ns == made.st_mtime_ns
    (tree / "PYPI.md").write_text("Another page\n")
    assert build_wheel(tree, wheels)["sha256"] != first["sha256"]
    (tree / "plugins/module_utils/vllm_edge/planning/checkpoint/recorded.json").write_text("{}\n")
    second = build_wheel(tree, wheels)
    assert second["sources"] != first["sources"] and second["sha256"] != first["sha256"]
    assert [path.name for path in wheels.iterdir()] == [Path(second["path"]).name]


# ---- release ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told", "notes"),
    [
        (["v9.9.9", ADDRESS], f"the tag is v9.9.9, and the version is {__version__}: tag v{__version__}", ""),
        ([f"v{__version__}", ADDRESS], f"CHANGELOG.md has no section [{__version__}]", ""),
        ([f"v{__version__}"], "ADDRESS is missing", ""),
        # Of a changelog whose newest section has got its name already; there is nothing to build here.
        ([], "build_wheel.py", "More."),
    ],
)
def test_a_tag_that_the_files_do_not_agree_with_is_refused(
    words: list[str], told: str, notes: str, tmp_path: Path
) -> None:
    for name in ("tools/release", "galaxy.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## [9.0.0]\n\nMore.\n\n## [0.0.9]\n\nLess.\n")
    place = tmp_path / "dist"
    with pytest.raises(AssertionError, match=re.escape(told)):
        run(tmp_path / "tools/release", place, *words)
    assert [path.read_text().strip() for path in place.glob("*")] == ([notes] if notes else [])


@pytest.fixture(scope="module")
def release(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release, built as .github/workflows/release.yml does for a tag."""
    changelog, place = project / "CHANGELOG.md", tmp_path_factory.mktemp("release") / "dist"
    changelog.write_text(changelog.read_text().replace("[Unreleased]", f"[{__version__}] - 2026-12-01"))
    run(project / "tools/release", place, f"v{__version__}", ADDRESS)
    return place


@pytest.mark.slow
def test_a_release_is_what_its_sums_and_its_changelog_say(release: Path, tmp_path: Path) -> None:
    """And its wheel is the one that pip builds of its sources, which are a checkout's."""
    sums = run("sha256sum", "--check", "SHA256SUMS", cwd=release).splitlines()
    sources = f"vllm_edge-{__version__}.tar.gz"
    files = {sources, WHEEL, f"edge-vllm_edge-{__version__}.tar.gz"}
    assert {line.removesuffix(": OK") for line in sums} == files == {path.name for path in release.glob("*vllm*")}
    notes = (release / "notes.md").read_text()
    assert "### Added" in notes and "## [" not in notes
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "-w", tmp_path, release / sources)
    assert (tmp_path / WHEEL).read_bytes() == (release / WHEEL).read_bytes()
    with zipfile.ZipFile(release / WHEEL) as wheel:
        metadata = wheel.read(f"vllm_edge-{__version__}.dist-info/METADATA").decode()
    assert f"Project-URL: Repository, {ADDRESS}\n" in metadata and ".invalid" not in metadata
    assert metadata.endswith("\n\n" + (ROOT / "PYPI.md").read_text())


@pytest.mark.slow
def test_the_package_plans_as_its_page_says(release: Path, tmp_path: Path) -> None:
    """Installed from its file into an empty environment, with what it depends on from the configured index."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty")
    run(sys.executable, "-m", "pip", "--python", tmp_path / "empty/bin/python", "install", "--quiet", release / WHEEL)
    page = textwrap.dedent((ROOT / "PYPI.md").read_text().partition("\n`vllm-edge` says")[0])
    command, _, shown = page.removeprefix("$ ").partition("\n")
    program, *words = command.split()
    assert run(tmp_path / "empty/bin" / program, *words, cwd=tmp_path) == shown


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_galaxy_imports_the_collection_without_errors(release: Path, whole: bool, tmp_path: Path) -> None:
    """With ansible-lint and ansible-doc in `make test-all` only: `make lint` and test_reference.py run them over the
    same files. What sanity tests ignore has its reason in the file."""
    (archive,) = release.glob("edge-*")
    settings = {f"GALAXY_IMPORTER_RUN_ANSIBLE_{part}": str(whole) for part in ("LINT", "DOC")} | {"HOME": str(tmp_path)}
    said = run(sys.executable, "-m", "galaxy_importer.main", archive, cwd=tmp_path, **settings)
    ignored = re.compile(r"WARNING: (tests/sanity/ignore-\S+ sanity\[cannot-ignore\]: |Ignore files skip ansible-test)")
    found = [line for line in said.splitlines() if line.startswith(("ERROR", "WARNING")) and not ignored.match(line)]
    assert found == [] and "Importer processing completed successfully" in said
    assert ("ansible-lint run complete" in said) == whole
    (ignores,) = ROOT.glob("tests/sanity/ignore-*.txt")
    assert [line for line in ignores.read_text().splitlines() if not line.partition(" # ")[2]] == []


# ---- collection -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collections(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the collection, installed from its file without a network."""
    place = tmp_path_factory.mktemp("collection")
    (archive,) = release.glob("edge-*")
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
def test_the_collection_carries_the_wheel_of_the_package(collections: Path, release: Path) -> None:
    """It is used as it is: nothing is written into the collection."""
    files = installed(collections) / "roles/vllm_edge_host/files"
    before = (files / WHEEL).stat().st_mtime_ns
    assert (files / WHEEL).read_bytes() == (release / WHEEL).read_bytes()
    assert build_wheel(installed(collections), files)["sources"] == hash_sources()
    assert (files / WHEEL).stat().st_mtime_ns == before


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
    assert re.findall(r"play #\d+ \(gpu_hosts\): (.*?)\t", stages)[-3:] == [
        "Serve metrics of the host",
        "Print the report",
        "Fail where the engines were not switched",
    ]
