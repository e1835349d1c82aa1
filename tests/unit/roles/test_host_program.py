# SPDX-License-Identifier: Apache-2.0
"""The role's own tasks install the program below a directory of this machine; pip and the packages are stand-ins."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.releases import Releases

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("docker", "huggingface_hub", "pynvml")
PIP = f"""
import os, pathlib, sys, zipfile
if os.path.exists(os.environ["CASE"] + "/pip-fails"):
    sys.exit("ERROR: no matching distribution")
packages = pathlib.Path(__file__).parents[1]
for name in {PACKAGES!r}:
    (packages / f"{{name}}.py").write_text("")
zipfile.ZipFile(sys.argv[-1].partition("file://")[2].partition("#")[0]).extractall(packages)
"""
PYTHON = f"""#!/bin/sh
# As Debian's python3, of which only `-m venv` is asked; the environment's pip needs no index.
{sys.executable} -m venv --without-pip "$3" && cp -r "$CASE/packages/pip" "$(echo "$3"/lib/python3*/site-packages)/"
"""
APT_GET = """#!/bin/sh
echo "0 upgraded, 0 newly installed, 0 to remove and 0 not upgraded."
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to root")


@dataclass
class Played:
    rc: int
    changed: list[str]
    text: str


class Host:
    """A directory in place of `/opt/vllm-edge`, and a copy of what the role is made of, so that it can change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix = root / "opt"
        self.command = root / "bin/vllm-edge"
        self.source = root / "project/plugins/module_utils/vllm_edge"
        for tree in ("plugins/module_utils", "roles/vllm_edge_host"):
            shutil.copytree(ROOT / tree, root / "project" / tree, ignore=shutil.ignore_patterns("__pycache__", "*.whl"))
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, root / "project")
        for name in ("bin", "cache", "opt", "packages/pip", "path", "state", "wheels"):
            (root / name).mkdir(parents=True)
        (root / "wheels/none.whl").touch()
        (root / "packages/pip/__init__.py").touch()
        (root / "packages/pip/__main__.py").write_text(PIP)
        for name, script in (("python3", PYTHON), ("apt-get", APT_GET)):
            (root / "path" / name).write_text(script)
            (root / "path" / name).chmod(0o755)
        include = {"name": "vllm_edge_host", "tasks_from": "program", "rolespec_validate": False}
        steps = [{"ansible.builtin.setup": {"gather_subset": ["!all", "!min", "python"]}}]
        tasks = [*steps, {"ansible.builtin.include_role": include}]
        (root / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))

    def play(self, *options: str) -> Played:
        given = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "vllm_edge_host_prefix": str(self.prefix),
            "vllm_edge_host_state_directory": str(self.root / "state"),
            "vllm_edge_host_wheels_cache": str(self.root / "cache/wheels"),
            "vllm_edge_host_wheels_directory": str(self.root / "wheels"),
            "__vllm_edge_host_on_path": str(self.command),
        }
        done = subprocess.run(
            ["ansible-playbook", "-i", "host,", "-e", json.dumps(given), str(self.root / "play.yml"), *options],
            env=os.environ
            | {
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_ROLES_PATH": str(self.root / "project/roles"),
                "ANSIBLE_MODULE_UTILS": str(self.root / "project/plugins/module_utils"),
                "ANSIBLE_NOCOLOR": "1",
                "CASE": str(self.root),
                "PATH": f"{self.root / 'path'}:{os.environ['PATH']}",
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        tasks = re.split(r"^TASK \[", done.stdout, flags=re.MULTILINE)[1:]
        changed = [task[: task.index("]")].partition(" : ")[2] for task in tasks if "\nchanged: " in task]
        return Played(done.returncode, changed, done.stdout + done.stderr)

    @property
    def current(self) -> Path:
        return (self.prefix / "current").resolve(strict=True)

    def ask(self, option: str = "--help") -> str:
        """What the program says, started as systemd starts it."""
        return subprocess.run([self.command, option], env={}, check=True, capture_output=True, text=True).stdout

    def former_release(self) -> Path:
        """A release from before the program came as a wheel. Its command prints a line and waits."""
        release = self.prefix / "releases/former"
        shutil.copytree(self.source, release / "lib/vllm_edge")
        (release / "bin").mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", release / "venv"], check=True)
        launcher = release / "bin/vllm-edge"
        launcher.write_text(
            f"#!{release}/venv/bin/python -I\nimport time\nprint('runs', flush=True)\ntime.sleep(600)\n"
        )
        launcher.chmod(0o755)
        releases = Releases(self.prefix)
        releases.finish(release)
        releases.make_current(release)
        self.command.symlink_to(self.prefix / "current/bin/vllm-edge")
        return release

    def former_layout(self) -> None:
        """The program as it was installed when there were no releases."""
        shutil.copytree(self.source, self.prefix / "lib/vllm_edge")
        (self.prefix / "bin").mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.prefix / "venv"], check=True)
        launcher = self.prefix / "bin/vllm-edge"
        launcher.write_text(
            f"#!{self.prefix}/venv/bin/python -I\nimport sys\nsys.path.insert(0, '{self.prefix}/lib')\n"
            "from vllm_edge.cli import main\nsys.exit(main())\n"
        )
        launcher.chmod(0o755)
        (self.prefix / "requirements.txt").touch()
        self.command.symlink_to(launcher)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_bare_host(host: Host) -> None:
    foreseen = host.play("--check", "--diff")
    assert foreseen.rc == 0, foreseen.text[-4000:]
    assert foreseen.changed == [
        "Report the installation that check mode cannot simulate",
        "Make the release current",
        "Link the command into the path",
    ]
    assert list(host.prefix.iterdir()) == [] and not host.command.is_symlink()

    played = host.play()
    assert played.rc == 0, played.text[-4000:]
    assert {"Make the release current", "Link the command into the path"} <= {*played.changed}
    assert "run-engine" in host.ask()
    assert host.current.parent == host.prefix / "releases"
    again = host.play("--check", "--diff")
    assert (again.rc, again.changed) == (0, []), again.text[-4000:]

    version = host.ask("--version")
    (host.source / "version.py").write_text((host.source / "version.py").read_text() + "# A change.\n")
    upgraded = host.play()
    assert "Make the release current" in upgraded.changed and host.ask("--version") != version, upgraded.text[-4000:]
    assert len(list((host.prefix / "releases").iterdir())) == 2, "the release before it stays"


def test_a_release_of_the_former_layout_is_kept_and_what_runs_from_it_runs_on(host: Host) -> None:
    """A release with lib/ and a command that puts it on the path of modules, as version 0464f07 installed it."""
    former = host.former_release()
    supervisor = subprocess.Popen([host.prefix / "current/bin/vllm-edge"], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "runs\n"
    try:
        played = host.play()
        assert played.rc == 0, played.text[-4000:]
        assert supervisor.poll() is None and former.exists()
        assert host.current != former and host.ask("--version").startswith("vllm-edge ")
    finally:
        supervisor.kill()
        supervisor.wait()
    again = host.play("--check", "--diff")
    assert (again.rc, again.changed) == (0, []), again.text[-4000:]


def test_an_error_names_the_command_that_installs_setuptools(host: Host) -> None:
    (host.root / "old").mkdir()
    (host.root / "old/setuptools.py").write_text("__version__ = '66.1.1'\n")
    done = subprocess.run(
        [sys.executable, ROOT / "roles/vllm_edge_host/files/build_wheel.py", host.root / "project", host.root],
        env={**os.environ, "PYTHONPATH": str(host.root / "old")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "66.1.1" in done.stderr and f"{sys.executable} -m pip install 'setuptools>=77'" in done.stderr


def test_a_run_that_is_cut_off_leaves_the_program_that_was_there_and_the_next_one_ends_it(host: Host) -> None:
    """From the layout of a host that had no releases, where the program lay in one place."""
    host.former_layout()
    there = sorted(host.prefix.iterdir())
    foreseen = host.play("--check", "--diff")
    assert foreseen.rc == 0, foreseen.text[-4000:]
    assert foreseen.changed == [
        "Report the installation that check mode cannot simulate",
        "Make the release current",
        "Link the command into the path",
        "Remove releases that are no longer used",
    ]
    assert f"-{host.prefix}/venv/" in foreseen.text
    assert sorted(host.prefix.iterdir()) == there and "run-engine" in host.ask()

    (host.root / "pip-fails").touch()
    failed = host.play()
    assert failed.rc != 0 and "no matching distribution" in failed.text
    (half,) = (host.prefix / "releases").iterdir()
    assert (half / "venv/bin/python").exists(), "it was cut off between environment and packages"
    assert not (host.prefix / "current").exists() and "run-engine" in host.ask()

    (host.root / "pip-fails").unlink()
    played = host.play()
    assert played.rc == 0, played.text[-4000:]
    assert host.current == half and "run-engine" in host.ask()
    assert sorted(path.name for path in host.prefix.iterdir()) == ["current", "releases"]
