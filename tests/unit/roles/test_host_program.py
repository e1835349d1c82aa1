# SPDX-License-Identifier: Apache-2.0
"""The role's own tasks install the program below a directory of this machine; pip and the packages are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.vllm_edge.releases import Releases
from helpers import ROOT, write_program
from role_cases import Cases, Run, Steps

PACKAGES = ("docker", "huggingface_hub", "prometheus_client", "pynvml")
PIP = f"""
import os, pathlib, sys, zipfile
if os.path.exists(os.environ["STATE"] + "/pip-fails"):
    sys.exit("ERROR: no matching distribution")
packages = pathlib.Path(__file__).parents[1]
for name in {PACKAGES!r}:
    (packages / f"{{name}}.py").write_text("")
zipfile.ZipFile(sys.argv[-1].partition("file://")[2].partition("#")[0]).extractall(packages)
"""
CONTROLLERS_PIP = """
import pathlib, re, sys, time
directory, python = (re.search(f"--{name}[= ]([^ ]+)", " ".join(sys.argv))[1] for name in ("dest", "python-version"))
with (pathlib.Path(__file__).parents[1] / "asked").open("a") as log:
    print(python, file=log)
time.sleep(1)
pathlib.Path(directory, "none.whl").touch()
"""
PYTHON = f"""# As Debian's python3, of which only `-m venv` is asked; the environment's pip needs no index.
{sys.executable} -m venv --without-pip "$3" && cp -r "$STATE/packages/pip" "$(echo "$3"/lib/python3*/site-packages)/"
"""

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to root"), pytest.mark.slow]


class Host:
    """A directory in place of `/opt/vllm-edge`, and a copy of what the role is made of, so that it can change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix = root / "opt"
        self.command = root / "path/vllm-edge"
        self.source = root / "project/plugins/module_utils/vllm_edge"
        for tree in ("plugins/module_utils", "roles/vllm_edge_host"):
            shutil.copytree(ROOT / tree, root / "project" / tree, ignore=shutil.ignore_patterns("__pycache__", "*.whl"))
        for name in ("pyproject.toml", "LICENSE", "PYPI.md"):
            shutil.copy(ROOT / name, root / "project")
        for name in ("bin", "cache", "opt", "packages/pip", "path", "state", "wheels"):
            (root / name).mkdir(parents=True)
        for line in (ROOT / "roles/vllm_edge_host/files/requirements.txt").read_text().splitlines():
            if "==" in line:
                (root / "wheels" / f"{line.partition('==')[0].replace('-', '_')}-1-py3-none-any.whl").touch()
        (root / "packages/pip/__init__.py").touch()
        (root / "packages/pip/__main__.py").write_text(PIP)
        write_program(root / "bin/hosts-python3", PYTHON)
        # Nobody else can read a test's directories.
        write_program(root / "bin/setpriv", 'while [ "$1" != env ]; do shift; done; exec "$@"')
        write_program(root / "bin/apt-get", 'echo "0 upgraded, 0 newly installed, 0 to remove and 0 not upgraded."')

    def run(self, check: bool = False) -> Run:
        given = {
            "role_of_case": str(self.root / "project/roles/vllm_edge_host"),
            "vllm_edge_host_prefix": str(self.prefix),
            "vllm_edge_host_state_directory": str(self.root / "state"),
            "vllm_edge_host_wheels_cache": str(self.root / "cache/wheels"),
            "vllm_edge_host_wheels_directory": str(self.root / "wheels"),
            "__vllm_edge_host_on_path": str(self.command),
            "__vllm_edge_host_interpreter": str(self.root / "bin/hosts-python3"),
            "__vllm_edge_host_python": f"{sys.version_info.major}.{sys.version_info.minor}",
        }
        return Run(["wheels", "program"], check, given)

    @property
    def current(self) -> Path:
        return (self.prefix / "current").resolve(strict=True)

    def ask(self, option: str = "--help") -> str:
        """What the program says, started as systemd starts it."""
        return subprocess.run([self.command, option], env={}, check=True, capture_output=True, text=True).stdout

    def former_release(self) -> Path:
        """A release whose command prints a line and waits."""
        release = self.prefix / "releases/former"
        (release / "bin").mkdir(parents=True)
        write_program(release / "bin/vllm-edge", "echo runs; while :; do sleep 1; done")
        releases = Releases(self.prefix)
        releases.finish(release, {"version": "0.1.0", "committed_s": 1})
        releases.make_current(release)
        self.command.symlink_to(self.prefix / "current/bin/vllm-edge")
        return release


CASES = Cases("{{ role_of_case }}", make=Host, validated=False)
FORESEEN = [
    "Report the installation that check mode cannot simulate",
    "Make the release current",
    "Link the command into the path",
]


@CASES.add
def a_bare_host(host: Host) -> Steps:
    foreseen = yield host.run(check=True)
    assert (foreseen.failed, foreseen.changed) == (False, FORESEEN), foreseen.text
    assert list(host.prefix.iterdir()) == [] and not host.command.is_symlink()
    (host.root / "wheels/hf_xet-1-py3-none-any.whl").rename(host.root / "wheel")
    refused = yield host.run()
    assert refused.failed and "/wheels (vllm_edge_host_wheels_directory) has no wheel of hf-xet on" in refused.text
    assert list(host.prefix.iterdir()) == []
    (host.root / "wheel").rename(host.root / "wheels/hf_xet-1-py3-none-any.whl")

    played = yield host.run()
    assert not played.failed, played.text
    assert {*FORESEEN[1:]} <= {*played.changed}
    assert "run-engine" in host.ask()
    assert host.current.parent == host.prefix / "releases"
    again = yield host.run(check=True)
    assert (again.failed, again.changed) == (False, []), again.text

    version = host.ask("--version")
    (host.source / "version.py").write_text((host.source / "version.py").read_text() + "# A change.\n")
    upgraded = yield host.run()
    assert FORESEEN[1] in upgraded.changed and host.ask("--version") != version, upgraded.text
    assert len(list((host.prefix / "releases").iterdir())) == 2, "the release before it stays"


@CASES.add
def a_run_that_is_cut_off_leaves_the_release_that_was_there_and_the_next_one_ends_it(host: Host) -> Steps:
    former = host.former_release()
    supervisor = subprocess.Popen([host.prefix / "current/bin/vllm-edge"], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "runs\n"
    try:
        (host.root / "pip-fails").touch()
        failed = yield host.run()
        assert failed.failed and "no matching distribution" in failed.text
        half = next(path for path in (host.prefix / "releases").iterdir() if path != former)
        assert (half / "venv/bin/python").exists(), "it was cut off between environment and packages"
        assert host.current == former

        (host.root / "pip-fails").unlink()
        played = yield host.run()
        assert not played.failed, played.text
        assert host.current == half and host.ask("--version").startswith("vllm-edge ")
        assert supervisor.poll() is None and former.exists()
    finally:
        supervisor.kill()
        supervisor.wait()
    again = yield host.run(check=True)
    assert (again.failed, again.changed) == (False, []), again.text


def download(host: Host, place: Path, pip: str | None, **variables: str) -> Run:
    """A host whose wheels are downloaded by a controller with this pip, which is below `place`, as is the cache."""
    (place / "pip").mkdir(parents=True, exist_ok=True)
    (place / "pip/__init__.py").touch()
    if pip is not None:
        (place / "pip/__main__.py").write_text(pip)
    given = {"vllm_edge_host_wheels_directory": "", "vllm_edge_host_wheels_cache": f"{place}/cache", **variables}
    asked = host.run()
    return replace(asked, variables={**asked.variables, **given}, environment={"PYTHONPATH": str(place)})


def hosts_download_once_for_each_python(host: Host, python: str) -> Steps:
    """They are at the task at the same time, on a controller whose pip takes a while."""
    shared = host.root.parent / "shared"
    asked = download(host, shared, CONTROLLERS_PIP, __vllm_edge_host_python=python)
    played = yield replace(asked, points=["download"])
    assert not played.failed, played.text
    assert sorted((shared / "asked").read_text().split()) == ["3.11", "3.12"]
    (found,) = (shared / "cache").glob(f"cp{python.replace('.', '')}-*/*.whl")
    assert found.name == "none.whl"


for name, python in {"one": "3.11", "two": "3.11", "three": "3.11", "other": "3.12"}.items():
    CASES.add(hosts_download_once_for_each_python, f"host_{name}_of_python_{python}", python=python)


@CASES.add
def a_controller_without_pip(host: Host) -> Steps:
    """It is told before the host is changed, also in check mode, and what is there needs no pip."""
    main = yaml.safe_load((ROOT / "roles/vllm_edge_host/tasks/main.yml").read_text())
    assert [task["ansible.builtin.import_tasks"] for task in main][:2] == ["validate.yml", "wheels.yml"]
    asked = replace(download(host, host.root, None), points=["wheels"])
    for check in (True, False):
        refused = yield replace(asked, check=check)
        assert refused.failed and f"{sys.executable}, which runs Ansible on the controller, has no pip" in refused.text
        assert "`apt install python3-pip`" in refused.text and "set vllm_edge_host_wheels_directory" in refused.text
    failing = download(host, host.root, "raise SystemExit('ERROR: no index answers')")
    refused = yield replace(failing, points=["wheels"])
    assert "on the controller: ERROR: no index answers. Correct the settings of pip" in refused.text
    (host.root / "pip/__main__.py").write_text(CONTROLLERS_PIP)
    downloaded = yield asked
    assert not downloaded.failed, "a failure leaves nothing behind that is taken for the wheels"
    (host.root / "pip/__main__.py").unlink()
    again = yield asked
    assert (again.failed, again.changed) == (False, []), again.text


test_case = CASES.make_test()
