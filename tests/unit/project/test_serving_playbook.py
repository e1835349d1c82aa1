# SPDX-License-Identifier: Apache-2.0
"""Validation as an operator runs it: against hosts that cannot be reached, and that nobody tries to reach.

One run looks at several hosts, each of which has mistakes of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, find_failures, replace_modules, run_playbook, write_program

pytestmark = pytest.mark.slow

NOBODY = "192.0.2.1"
"""Of the addresses that RFC 5737 keeps for documentation: no host has it."""
GOOD = {"serving_profile": "nvfp4-tp2", "gpu_count": 4, "gpu_memory_mib": 23034}
STAGES = ("host", "image", "weights", "engines", "gateway", "clients")
Hosts = Mapping[str, Mapping[str, Any]]


def play(place: Path, hosts: Hosts, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run playbooks for hosts with these variables; ssh only writes down that it was called."""
    listed = {name: {"ansible_host": NOBODY, **variables} for name, variables in hosts.items()}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": listed}}))
    called = place / "called"
    write_program(place / "bin/ssh", f'echo "$@" >>{called}\nexit 255')
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    done = run_playbook("-i", place / "hosts.yml", *words, PATH=path, **environment)
    assert not called.exists(), f"ssh was called: {called.read_text()}"
    assert "UNREACHABLE" not in done.stdout
    return done


def read_example(name: str) -> dict[str, Any]:
    """Variables of the only example in the pages of docs/ that has this name."""
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    blocks = [part.split("```")[0] for page in pages for part in page.split("```yaml\n")[1:]]
    (example,) = (yaml.safe_load(block) for block in blocks if name in block)
    return dict(example)


FIFTH_ROLE = read_example("with-reflector:")
REPLICAS = read_example("e4b-four-times:")
SHORT = yaml.safe_load((ROOT / "README.md").read_text().split("hosts.yml\n")[1].split("```")[0])
SHORT = {**SHORT["gpu_hosts"]["hosts"]["gpu1"], "ansible_host": NOBODY}
HUB = {
    "model_weights_endpoint": "http://mirror.example",
    "model_weights_environment": {"HTTPS_PROXY": "http://user:pla/nted@proxy"},
}
ODD = {
    "serving_engines": {
        "x": {
            **{"model": "e2b", "tensor_parallel_size": 1, "gpus": [0], "port": 8050, "served_names": ["architect"]},
            **{"extra_env": {"VLLM_NOTE": "one\n--pid=host"}, "extra_args": ["--middlew=a"]},
        }
    },
    "serving_profiles": {"p": {"engines": ["x"]}},
    "serving_profile": "p",
    "serving_roles": ["architect"],
    "vllm_engine_ulimits": ["nofile=1\n--rm", "rtprio=99"],
    "vllm_engine_shm_size": "4 GiB",
    "vllm_engine_request_limits": {"VLLM_MAX_N_SEQUENCES": "-1"},
    "vllm_engine_cache_directory": "/data/../etc",
}
PINNED = {
    **GOOD,
    **{"serving_profile": "e2b-only", "container_runtime_repository_key_fingerprint": "", "require_pins": "true"},
    **{"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
    "ansible_facts": {"distribution": "Debian", "distribution_version": "13.1", "distribution_major_version": "13"},
}
WRONG: dict[str, dict[str, Any]] = {
    "misspelt": {
        **{"serving_profile": "e2b-olny", "gpu_count": "four", "vllm_engine_watchdog": 30, "vllm_image_keep": "many"},
        "vllm_engine_shutdown_timeout_s": 20,
        **{"verify_weights": "ful", "alow_docker_restart": "true"},
    },
    "unpinned": PINNED,
    "hub": GOOD | HUB,
    "odd": ODD,
}


def test_good_variables_and_the_examples_of_the_page_pass_without_a_connection(tmp_path: Path) -> None:
    later = {"vllm_image_keep": "{{ ansible_facts['nobody_knows_yet'] }}"}
    # With a medium the hub is not asked.
    medium = {**HUB, "model_weights_token": "t", "model_weights_source_directory": "/media/vllm-edge/weights"}
    hosts = {
        "good": GOOD | later | medium | {"plan_profile": "e2b-only"},
        "fifth": GOOD | FIFTH_ROLE | {"plan_profile": "with-reflector"},
        "replicas": GOOD | REPLICAS | {"plan_profile": "e4b-four-times"},
        "short": SHORT,
        "beside": SHORT | {"serving_profile": "e2b-only", "gpu_count": 4},
    }
    options = ("-e", "plan_facts=recorded", "-e", "allow_reboot=true", "-e", "vllm_engine_watchdog_s=60")
    done = play(tmp_path, hosts, "playbooks/validate.yml", "playbooks/plan.yml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FIFTH_ROLE["serving_roles"][4:] == ["reflector"] and "e4b-reflector  fits" in done.stdout
    assert "chat: tensor_parallel_size 1, gpus [0], max_model_len 131072: the plan's;" in done.stdout
    tables = re.findall(r"^profile .*\n-.*\n((?:\S.*\n)+)", done.stdout, re.MULTILINE)
    shown = [[line.split()[:2] for line in table.splitlines()] for table in tables]
    assert [["chat", "fits"]] in shown and [["e2b-only", "fits"], ["chat", "fits"]] in shown, done.stdout
    assert [f"e4b-each-{k}  fits: 512 MiB stay free on GPU {k}." in done.stdout for k in range(4)] == [True] * 4


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What site.yml says of all WRONG hosts, and the file of the hub's token, which others may read."""
    place = tmp_path_factory.mktemp("refused")
    token = place / "token"
    token.write_text("hf_planted")
    token.chmod(0o644)
    hosts = WRONG | {"hub": WRONG["hub"] | {"model_weights_token_file": str(token)}, "right": GOOD}
    return play(place, hosts, "site.yml", "-vvv"), token


def test_a_mistake_of_one_host_stops_all_before_any_is_touched(refused: Any) -> None:
    done, token = refused
    assert done.returncode == 2 and find_failures(done).keys() == WRONG.keys(), done.stdout + done.stderr
    assert done.stdout.count("PLAY [") == 2
    assert "hf_planted" not in done.stdout + done.stderr and "nted@proxy" not in done.stdout + done.stderr
    said = find_failures(done)
    for host, words in {
        "unpinned": (
            "vllm_image_base_digest: ",
            "vllm_models.e2b.revision: ",
            "container_runtime_repository_key_fingerprint: ",
        ),
        "hub": (
            "3 mistakes in the variables",
            "model_weights_environment: 'HTTPS_PROXY' is no address of a proxy",
            f"`chmod 0600 {token}`",
            "model_weights_endpoint: 'http://mirror.example' is not encrypted, and a token is given",
        ),
        "odd": ("7 mistakes in the variables", "is a risk: it imports Python code by name"),
    }.items():
        assert [each for each in words if each not in said[host]] == [], said[host]
    assert "31b-bf16" not in said["unpinned"], "models of other profiles are not used"


@pytest.mark.parametrize(
    ("group", "options", "told"),
    [
        ("gpus", [], "No host is in the group gpu_hosts of the inventory"),
        ("gpu_hosts", ["--limit", "other"], "--limit other leaves no host of the group gpu_hosts. Its hosts are one."),
        ("gpu_hosts", [], "and vllm-edge needs 99.1.0 or newer."),
    ],
)
def test_a_run_that_would_do_nothing_or_has_an_old_ansible_fails(
    tmp_path: Path, group: str, options: list[str], told: str
) -> None:
    """With a copy of the project's first play that says it needs a future release where nothing else is wrong."""
    place = tmp_path / "playbooks" if not options and group == "gpu_hosts" else ROOT / "playbooks"
    (tmp_path / "playbooks").mkdir()
    shutil.copy(ROOT / "playbooks/controller.yml", tmp_path / "playbooks/verify.yml")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/runtime.yml").write_text('requires_ansible: ">=99.1.0"\n')
    inventory = {"all": {"hosts": {"other": {}}, "children": {group: {"hosts": {"one": {}}}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = run_playbook("-i", tmp_path / "hosts.yml", place / "verify.yml", *options)
    assert done.returncode != 0 and told in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_every_mistake_is_said_on_a_line_of_its_own(refused: Any) -> None:
    said = find_failures(refused[0], joined=False)["misspelt"]
    assert "7 mistakes in the variables, see 'mistakes'; no host was touched." in " ".join(said.split())
    listed = [line.strip() for line in said.splitlines() if line.strip()[:1].isdigit()]
    for number, words in enumerate(
        [
            "serving_profile: 'e2b-olny' is not a key of serving_profiles; did you mean e2b-only?",
            "gpu_count: 'four' is text, not a number; write a whole number of GPUs, such as 4.",
            "verify_weights: 'ful' is not one of size, full; did you mean full?",
            "vllm_image_keep: 'many' is text, not a number; write a whole number of images, such as 3.",
            "alow_docker_restart: nothing reads a variable of this name",
            "vllm_engine_shutdown_timeout_s: there is no such variable any more; set vllm_engine_drain_timeout_s",
            "vllm_engine_watchdog: nothing reads a variable of this name",
        ]
    ):
        assert listed[number].startswith(f"{number + 1}. {words}"), said


def test_each_stage_validates_first_and_once(tmp_path: Path) -> None:
    """In site.yml the result of the first play keeps the stages from repeating it; a stage by itself validates too."""
    for stage in STAGES:
        (first, *_) = yaml.safe_load((ROOT / "playbooks" / f"{stage}.yml").read_text())[1]["pre_tasks"]
        assert first["ansible.builtin.import_tasks"].removeprefix("tasks/") == "validated.yml"
    end, once = yaml.safe_load((ROOT / "playbooks/tasks/validated.yml").read_text())
    assert end["ansible.builtin.meta"] == "end_host"
    assert once["ansible.builtin.include_tasks"]["file"] == "validate_inventory.yml"
    assert once["when"] == "serving_validated is not defined"
    (*_, last) = yaml.safe_load((ROOT / "playbooks/tasks/validate_inventory.yml").read_text())
    assert last["register"] == "serving_validated"
    done = play(tmp_path, {"nobody": ODD}, "playbooks/host.yml", "--diff", "--check")
    assert done.returncode == 2 and "7 mistakes in the variables" in find_failures(done)["nobody"], done.stdout


MEASURED = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"budgets": {"type": "dict"}, "gpu_slots": {"type": "list"}, "foreign": {}})
module.exit_json(gpus=[], **module.params["budgets"])
"""
AT_RISK = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
AnsibleModule({"containers": {}}).exit_json(at_risk=["x"], warning="x may lose its GPUs")
"""
NVML = {"failed": True, "msg": "VRAM cannot be measured"}
OVER = {"failed": True, "msg": "500 MiB too many", "failures": ["500 MiB too many"]}
WITHIN = {"msg": "within", "failures": []}
BUDGETS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "by_the_switch": ("over_budget", NVML, "500 MiB too many by the switch", True),
    "over": ("unchanged", OVER, "500 MiB too many", True),
    "unknown": ("unchanged", NVML, "VRAM cannot be measured", False),
    "within": ("unchanged", WITHIN, "", False),
    "committed": ("committed", NVML, "", False),
}
"""Result of the switch, what is measured, what the failure says, and whether the report comes before it."""


def test_a_gpu_over_its_budget_fails_the_play_after_its_report_and_containers_at_risk_are_named(tmp_path: Path) -> None:
    """Parts of playbooks/engines.yml with the wiring, where modules answer what this test says."""
    (_, whole) = yaml.safe_load((ROOT / "playbooks" / "engines.yml").read_text())
    first = next(at for at, task in enumerate(whole["tasks"]) if "edge.vllm_edge.vram_budget" in task)
    wiring = yaml.safe_load((ROOT / "group_vars" / "all" / "wiring.yml").read_text())
    names = ("serving_over_budget", "serving_unmoved", "vram_foreign", "serving_switch_error", "serving_report_follows")
    variables = {name: wiring[name] for name in names}
    variables |= {"gpu_slots_result": {"uuids": []}}
    switched = {"msg": "500 MiB too many by the switch", "journal": {"gpus": []}}
    hosts = {
        name: {"serving_budgets": measured, "vllm_engine_result": {**switched, "result": result}}
        for name, (result, measured, _, _) in BUDGETS.items()
    }
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
    end = {"hosts": "all", "gather_facts": False, "connection": "local", "vars": variables}
    warn = {"ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/gpu_access.yml")}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{**end, "tasks": [warn, *whole["tasks"][first:]]}]))
    (tmp_path / "tasks").mkdir()
    for name in ("report.yml", "page.yml"):
        (tmp_path / "tasks" / name).write_text("- debug: {msg: hidden}\n")
    collections = replace_modules(tmp_path / "collections", vram_budget=MEASURED, host_facts=AT_RISK)
    done = run_playbook("-i", "hosts.yml", "play.yml", cwd=tmp_path, ANSIBLE_COLLECTIONS_PATH=collections)
    failures = find_failures(done)
    assert done.stdout.count(": WARNING: x may lose its GPUs") == len(BUDGETS), done.stdout
    for name, (_, _, words, report) in BUDGETS.items():
        assert (name in failures) == bool(words) and words in failures.get(name, ""), done.stdout
        said = done.stdout.partition(f"fatal: [{name}]")[0]
        included = [line for line in said.splitlines() if line.startswith("included: ") and "report.yml" in line]
        assert any(name in line for line in included) == report, done.stdout


def test_a_directory_for_support_reports_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = {
        "empty": ("", "support is '', which is no absolute path"),
        "switch": ("true", "support is 'true', which is no absolute path"),
        "relative": ("reports/today", "-e support=/srv/here/reports"),
        "unwritable": ("/proc/reports", "this machine cannot write /proc/reports/unwritable.tar.gz"),
        "in_a_file": (f"{tmp_path}/file/reports", "Name a directory that you may write to, for example -e support="),
    }
    hosts = {name: GOOD | {"support": support} for name, (support, _) in wanted.items()}
    failures = find_failures(done := play(tmp_path, hosts, "playbooks/doctor.yml", PWD="/srv/here"))
    for name, (_, words) in wanted.items():
        assert words in failures[name].replace("''", "'"), done.stdout
