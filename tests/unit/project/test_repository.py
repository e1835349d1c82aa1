# SPDX-License-Identifier: Apache-2.0
"""Rules of the repository that no linter knows. A case looks at all files and lists the offenders."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, list_files

LINES = {
    "plugins": 51_850,
    "roles": 9_120,
    "playbooks": 2_500,
    "group_vars": 735,
    "meta": 530,
    "lab": 8_380,
    "tools": 1_890,
    "tests": 46_100,
    "molecule": 5_560,
    "docs": 3_340,
}
"""The most lines of each folder, a little above what is there. It is a reminder to take away what a change replaces; a
commit that raises a number says why."""
NOT_COUNTED = re.compile(
    "requirements|(recorded|published)_facts|fixtures/explain/|docs/(reference|evidence|measured)|serving_metrics/files/"
)
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
LOWEST = {"names", "paths", "text", "version", "system", "gpu", "weights"}
OF_A_BARE_HOST = {"facts.dpkg", "facts.driver", "facts.driver_state", "facts.docker_daemon", "facts.runtime"}
"""Files of `facts` that modules take to a bare host, hence import the lowest layers only."""
ABOVE = {
    "host_doctor": "it runs on a bare host with every check of the doctor",
    "program_release": "it takes the lock of the switch and names the switch that has it",
    "model_facts": "it interprets checkpoints as the planner does",
    "engine_secrets": "the program is installed",
    **{f"serving_{name}": "the program is installed" for name in ("advise", "observations", "plan", "switch")},
    "serving_complete": "it runs on the controller",
}
"""Modules that import more than the lowest layers of the package, and why they may."""
WRITERS = ("ansible.builtin.copy", "ansible.builtin.file", "ansible.builtin.template")
PRIVATE = ("0600", "0700", "u+rwx", "u=rwX,go=")
OF_THE_REPOSITORY = {f"{task} facts" for task in ("Create the directory of the inventory's", "Write the", "Keep the")}
"""Files of the project itself or of an inventory, as git keeps them: shapes of published checkpoints."""


def load(path: Path) -> Any:
    """A YAML file; an empty one is an empty mapping."""
    return yaml.load(path.read_text(), yaml.CSafeLoader) or {}


def test_no_folder_outgrows_its_limit() -> None:
    """Locked packages, recorded data, the generated reference, rules, dashboard and evidence do not count."""
    found = dict.fromkeys(LINES, 0)
    for path in list_files(*LINES):
        name = str(path.relative_to(ROOT))
        if path.is_file() and not path.is_symlink() and not NOT_COUNTED.search(name):
            found[name.partition("/")[0]] += path.read_bytes().count(b"\n")
    assert {folder: lines for folder, lines in found.items() if lines > LINES[folder]} == {}


def test_plays_run_on_gpu_hosts_after_a_check_that_there_are_some() -> None:
    plays = [(path, play) for path in PLAYBOOKS if path.name != "controller.yml" for play in load(path)]
    assert [path.name for path in PLAYBOOKS if path.name != "controller.yml" and "hosts" in load(path)[0]] == []
    elsewhere = [(path, play) for path, play in plays if play.get("hosts") != "gpu_hosts"]
    imported = [path.parent / play.get("ansible.builtin.import_playbook", "") for path, play in elsewhere]
    assert set(imported) <= set(PLAYBOOKS), imported


def list_tasks(tasks: Any, environment: Any) -> Iterator[tuple[Mapping[str, Any], Any]]:
    for task in tasks if isinstance(tasks, list) else []:
        applied = task.get("environment", environment)
        yield task, applied
        for key in ("block", "rescue", "always", "tasks", "pre_tasks"):
            yield from list_tasks(task.get(key), applied)


def test_modules_are_called_by_their_full_names() -> None:
    """A checkout finds a module by its short name, too, and a collection does not."""
    names = {path.stem for folder in ("modules", "action") for path in ROOT.glob(f"plugins/{folder}/*.py")}
    paths = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("roles/*/handlers/*.yml"), *ROOT.glob("playbooks/**/*.yml")]
    assert [
        (path.name, found) for path in paths for task, _ in list_tasks(load(path), None) if (found := names & {*task})
    ] == []


def test_docker_commands_ask_the_daemon_of_the_engines() -> None:
    """`docker context use` of root leads them elsewhere, while the supervisors go on with the socket.

    What roles/vllm_image does after its main.yml has its environment; staging takes the Docker of its user.
    """
    paths = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/**/*.yml")]
    inner = {path for path in ROOT.glob("roles/vllm_image/tasks/*.yml") if path.stem not in ("main", "uninstall")}
    tasks = [(path.name, *found) for path in {*paths} - inner for found in list_tasks(load(path), None)]
    wrong = [
        (name, task["name"])
        for name, task, environment in tasks
        for what in (task.get("ansible.builtin.command"), task.get("ansible.builtin.shell"))
        if re.search("'docker'|vllm_image_docker", str(what)) and not (environment or {}).get("DOCKER_HOST")
    ]
    assert wrong == []
    (provide,) = (task for task in load(ROOT / "roles/vllm_image/tasks/main.yml") if "provide.yml" in str(task))
    assert provide["ansible.builtin.include_tasks"]["apply"]["environment"]["DOCKER_HOST"]


def test_every_option_of_a_role_is_required_or_has_a_default() -> None:
    """Ansible applies no default of an argument spec, so that they are in defaults/main.yml alone."""
    for role in sorted((ROOT / "roles").iterdir()):
        entry_points = load(role / "meta" / "argument_specs.yml")["argument_specs"].values()
        options = {name: option for each in entry_points for name, option in each.get("options", {}).items()}
        optional = {name for name, option in options.items() if not option.get("required")}
        assert optional == load(role / "defaults" / "main.yml").keys(), role.name
        assert [name for name, option in options.items() if "default" in option] == []


def test_nothing_outside_the_lab_knows_the_lab() -> None:
    files = list_files("roles", "playbooks", "plugins", "group_vars", "site.yml")
    words = re.compile(r"lab-gpu|vendors\.lab|hub\.lab|registry\.lab|vllm-edge-lab|LAB_GPU")
    found = {str(path): words.findall(path.read_text(errors="replace")) for path in files if path.is_file()}
    assert {path: names for path, names in found.items() if names} == {}


def test_sources_carry_a_licence() -> None:
    wrong = []
    for path in list_files("*.py", "*.sh", "*.c", "*.h", "Makefile", "tools/*", ".ci/run"):
        text = path.read_text()
        of_ansible = re.search(r"^from ansible\.(plugins|errors|utils)", text, re.MULTILINE)
        if "SPDX-License-Identifier: " + "GPL-3.0-or-later" * bool(of_ansible) not in text[:400]:
            wrong.append(str(path))
    assert wrong == []


@pytest.mark.slow
def test_operators_switches_are_normalised() -> None:
    """Text as -e gives it, and a truth value as an inventory does."""
    command = ["ansible", "all", "-i", "sentinel,", "--playbook-dir", str(ROOT / "playbooks"), "-c", "local"]
    command += ["-e", json.dumps({"allow_reboot": "yes", "allow_docker_restart": True})]
    wanted = ["nvidia_driver_allow_reboot is true", "container_runtime_allow_restart is true"]
    command += ["-m", "ansible.builtin.assert", "-a", json.dumps({"that": wanted})]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_for_a_bare_host_import_the_lowest_layers_only() -> None:
    """All that a module imports travels to the host with it. `make lint` keeps these layers from importing others."""

    def list_parts(path: Path) -> set[str]:
        text = path.read_text().replace("facts import ", "facts.").replace("from . import ", "from .")
        text = re.sub(r"^from \.(?=\w)", "from ..facts.", text, flags=re.MULTILINE)
        return set(re.findall(r"^from \.\.(?:module_utils\.vllm_edge\.)?((?:facts\.)?\w+)", text, re.MULTILINE))

    modules = (ROOT / "plugins" / "modules").glob("*.py")
    assert {path.stem for path in modules if list_parts(path) - LOWEST - OF_A_BARE_HOST} == ABOVE.keys()
    package = ROOT / "plugins/module_utils/vllm_edge"
    for name in OF_A_BARE_HOST:
        assert list_parts(package / f"{name.replace('.', '/')}.py") <= LOWEST | OF_A_BARE_HOST, name


def test_teardown_knows_every_record_of_the_program() -> None:
    """A file or directory of the state tree that no role removes is left behind as if it were somebody's."""
    source = (ROOT / "plugins/module_utils/vllm_edge/paths.py").read_text()
    names = {*re.findall(r'self\.state / "([^"]+)"', source)}
    assert len(names) > 8
    removed = "".join(path.read_text() for path in ROOT.glob("roles/*/tasks/uninstall.yml"))
    assert [name for name in sorted(names) if f"'{name}'" not in removed] == []


def find_local_tasks(tasks: Any, local: bool = False) -> Iterator[dict[str, Any]]:
    """The tasks that run on the controller, also those in blocks."""
    for task in tasks if isinstance(tasks, list) else []:
        here = local or task.get("delegate_to") == "localhost"
        for part in ("block", "rescue", "always", "tasks"):
            yield from find_local_tasks(task.get(part) or [], here)
        if here and any(name in task for name in WRITERS):
            yield task


def test_files_on_the_controller_are_their_owners_alone() -> None:
    """They hold answers, addresses or gated weights."""
    found = {}
    for file in (*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").glob("*/tasks/*.yml")):
        for task in find_local_tasks(load(file)):
            (options,) = (task[name] for name in WRITERS if name in task)
            if options.get("state") != "absent":
                found[task["name"]] = options
    assert len(found) >= 10, found
    to_others = {name: options.get("owner") for name, options in found.items() if options.get("mode") not in PRIVATE}
    assert to_others == dict.fromkeys(OF_THE_REPOSITORY, "{{ controller_user | default(omit, true) }}")


def test_directories_above_others_are_made_with_a_mode_of_their_own() -> None:
    """By make_directories: mkdir makes the missing ones above as the umask is, which may keep everybody out."""
    files = [path for path in list_files("plugins/module_utils", "plugins/modules") if path.suffix == ".py"]
    assert [str(path) for path in files if re.search(r"parents=True|makedirs\(", path.read_text())] == []


def test_no_play_keeps_facts_or_believes_those_of_another_run() -> None:
    """A cache of facts outlives a run: a medium for another distribution, or a host that was installed again."""
    files = (*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").glob("*/tasks/*.yml"))
    kept = r"cacheable:|when:.*ansible_facts\S* is (not )?defined"
    assert [str(file) for file in files if re.search(kept, file.read_text())] == []
