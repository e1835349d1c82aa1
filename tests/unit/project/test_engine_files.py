# SPDX-License-Identifier: Apache-2.0
"""What the role vllm_engine passes to the module serving_switch, and the units that it renders, by Ansible itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation.build import Rendered
from ansible.module_utils.vllm_edge.generation.build import rendered as render
from ansible.module_utils.vllm_edge.paths import HostPaths
from helpers import ROOT, run_playbook, start_warm_python

pytestmark = pytest.mark.slow

ENGINES: list[dict[str, Any]] = [
    {"name": name, "model": "m", "gpus": gpus, "tensor_parallel_size": len(gpus), "served_names": ["one"], **more}
    for name, gpus, more in (
        ("two", [0, 1], {}),
        ("keyed", [2], {"secret_env": {"STORE_PASSWORD": "store"}, "chat_template": ""}),
        ("one", [2], {"chat_template": "own.jinja", "gpu_memory_utilization": 0.85}),
    )
]
UUIDS = [f"GPU-f52a6b98-d1e7-5b3c-a05f-38c2d471000{slot}" for slot in range(3)]
MODEL = {"path": "/data/m", "manifest_sha256": "0", "precision": "bf16", "record": "/r", "repo": "o/n"}
MODEL |= {"revision": "main"}
BUS = {"environment": {"NCCL_P2P_DISABLE": "1"}, "arguments": ["--disable-custom-all-reduce"], "reasons": ["the IOMMU"]}
CASES: dict[str, dict[str, Any]] = {
    "bus": {"bus": BUS},
    "allowed": {"vllm_engine_peer_to_peer": "allowed", "vllm_engine_has_shutdown_timeout": False},
    "forbidden": {"vllm_engine_peer_to_peer": "forbidden", "vllm_engine_chat_template": "all.jinja"},
    # As operators give numbers with -e.
    "texts": {"vllm_engine_pids_limit": "77", "vllm_engine_stop_timeout_s": "40", "vllm_engine_memory": "96g"},
    "link": {"vllm_engine_models": {"m": "{{ vllm_engine_models_given | combine(model_weights_result.m) }}"}},
}
ROLE = [str(ROOT / "roles/vllm_engine" / part) for part in ("defaults/main.yml", "vars/main.yml")]
MARKED = "marked-secret-value"
GIVEN = {
    "vllm_engine_engines": ENGINES,
    "vllm_engine_models": {"m": MODEL},
    "vllm_engine_models_given": MODEL,
    "vllm_engine_gpu_uuids": UUIDS,
    "vllm_engine_image": "image",
    "vllm_engine_image_id": f"sha256:{'0a' * 32}",
    "vllm_engine_budgets": dict.fromkeys(UUIDS, 1),
    "vllm_engine_profile": "p",
    "vllm_engine_secrets": {"store": MARKED},
    "ansible_python_interpreter": start_warm_python(),
}


def run(place: Path, given: dict[str, Any], tasks: list[dict[str, Any]], *words: str, **environment: str) -> str:
    """Run tasks with the role's variables, and with these, which a task's own come before; all that it printed."""
    (place / "given.json").write_text(json.dumps(given))
    head = {"hosts": "localhost", "gather_facts": False, "connection": "local"}
    play = {**head, "vars_files": [*ROLE, str(place / "given.json")], "tasks": tasks}
    (place / "play.json").write_text(json.dumps([play]))
    done = run_playbook("-i", "localhost,", str(place / "play.json"), *words, **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rendered]:
    """The generation of each case, from what the role passes to the module, all by one play."""
    root = tmp_path_factory.mktemp("cases")
    for name in ("own", "all"):
        (root / f"{name}.jinja").write_text(f"{name}\n")
    (root / "templates").symlink_to(ROOT / "roles/vllm_engine/templates")
    # The weights are behind a link, as the role model_weights has recorded.
    record = {"path": "/mnt/nvme-1/m", "revision": "main", "manifest_sha256": "0", "bytes": 1, "files": {}}
    (root / "m.json").write_text(json.dumps(record))
    weights = {"model_weights_root": "/data", "model_weights_models": [{"name": "m", "dir": "m", "repo": "o/n"}]}
    recorded = {"ansible.builtin.include_tasks": str(ROOT / "roles/model_weights/tasks/recorded.yml")}
    tasks: list[dict[str, Any]] = [{**recorded, "vars": {**weights, "model_weights_state_directory": str(root)}}]
    for name, case in CASES.items():
        bus = case.get("bus")
        looks = {"ansible.builtin.include_tasks": str(ROOT / "roles/vllm_engine/tasks/topology.yml"), "vars": case}
        tasks.append({"ansible.builtin.set_fact": {"__vllm_engine_bus": bus}} if bus else looks)
        content = {"content": "{{ __vllm_engine_switch | to_json }}", "dest": f"{root}/{name}.json", "mode": "0600"}
        tasks.append({"ansible.builtin.copy": content, "vars": case})
    run(root, {**GIVEN, "vllm_engine_chat_templates_directory": str(root)}, tasks)
    passed = {name: (root / f"{name}.json").read_text() for name in CASES}
    assert MARKED not in "".join(passed.values()), "secrets go another way"
    return {name: render(json.loads(text), HostPaths()) for name, text in passed.items()}


NOTE = "# Its GPUs are kept from reading each other's memory: "


def test_what_the_bus_wants_reaches_engines_over_several_gpus(cases: dict[str, Rendered]) -> None:
    for case, reason in (("bus", "the IOMMU"), ("forbidden", "vllm_engine_peer_to_peer says so"), ("allowed", "")):
        two, one = (cases[case].engines[name] for name in ("two", "one"))
        assert ("--env=NCCL_P2P_DISABLE=1" in two.container) is bool(reason), case
        assert ("--disable-custom-all-reduce" in two.container) is bool(reason), case
        assert (f"{NOTE}{reason}." in two.unit) is bool(reason), case
        assert NOTE not in one.unit and not [word for word in one.container if "P2P" in word or "reduce" in word], case


def test_a_chat_template_is_the_engines_own_or_that_of_all_or_none(cases: dict[str, Rendered]) -> None:
    found = {name: [item.chat_template for item in case.engines.values()] for name, case in cases.items()}
    assert found["forbidden"] == ["all\n", None, "own\n"] and found["bus"] == [None, None, "own\n"]
    own, none = cases["bus"].engines["one"].container, cases["bus"].engines["keyed"].container
    assert "--chat-template=/chat-template.jinja" in own and not [word for word in none if "chat-template" in word]


def test_settings_reach_the_container_as_numbers(cases: dict[str, Rendered]) -> None:
    texts, allowed = cases["texts"].engines["one"], cases["allowed"].engines["one"]
    assert {"--pids-limit=77", "--memory=96g", "--memory-swap=96g"} <= {*texts.container}
    assert (texts.config["stop_timeout_s"], texts.config["shutdown_timeout_s"]) == (40, 30)
    assert "--shutdown-timeout=30" in texts.container and allowed.config["shutdown_timeout_s"] is None
    assert not [word for word in allowed.container if "--shutdown" in word]
    assert "--gpu-memory-utilization=0.85" in allowed.container
    keyed = cases["texts"].engines["keyed"].container
    assert "--env-file=/etc/vllm-edge/secrets/keyed.env" in keyed


def test_an_engine_starts_after_the_mounts_of_its_disks_whether_they_succeed_or_not(cases: dict[str, Rendered]) -> None:
    for case, disk in (("bus", ""), ("link", r" mnt.mount mnt-nvme\x2d1.mount mnt-nvme\x2d1-m.mount")):
        unit = cases[case].engines["one"].unit
        head = unit[unit.index("[Unit]") : unit.index("[Service]")].splitlines()
        mounts = f"data.mount data-m.mount{disk} data-vllm.mount data-vllm-cache.mount"
        assert f"After={mounts}" in head and f"Wants={mounts}" in head
        assert not [line for line in head if line.startswith(("Requires", "BindsTo"))], "one failed mount is the end"
        assert (
            "ReadWritePaths=/var/lib/vllm-edge -/run/vllm-edge -/data/vllm/cache/one\n" in unit
            and "RestrictAddressFamilies=AF_UNIX" in unit
        )


ODD = ["a\n--rm", "50%n${X}", "x --rm", "a\r--x", "a\0b", "a\u2028b", "a\x1b[2K", "a\"b'c", "a\\", ""]
WORDS = ("program", "state_directory", "cache_directory")
NUMBERS = ("start_timeout_s", "watchdog_s", "stop_timeout_s")


def test_no_value_becomes_another_line_of_a_unit_or_is_expanded(tmp_path: Path) -> None:
    """Each variable with each odd value: refused with a sentence, or written literally into its own line."""
    base = {"__vllm_engine_item": ENGINES[-1]}
    odd_cases: list[tuple[str, str, dict[str, Any]]] = [("nothing", "", base)]
    for odd in ODD:
        for key, value in (("name", odd), ("served_names", [odd])):
            engine = {**ENGINES[-1], key: value}
            odd_cases.append((key, odd, {"__vllm_engine_item": engine, "vllm_engine_engines": [engine]}))
        # What is refused as no word or no number needs no more cases.
        keys = WORDS + (NUMBERS if odd in ODD[:3] else ())
        odd_cases += [(key, odd, {**base, f"vllm_engine_{key}": odd}) for key in keys]
    files = ["vllm-engine.service", "vllm-edge-recover.service", "vllm-edge.target"]
    (tmp_path / "templates").symlink_to(ROOT / "roles/vllm_engine/templates")
    (tmp_path / "cases.json").write_text(json.dumps([variables for _, _, variables in odd_cases]))
    read = f"(lookup('ansible.builtin.file', '{tmp_path}/cases.json') | from_json)[item.0 | int]"
    made = f"{{{{ lookup('ansible.builtin.template', item.1 ~ '.j2', template_vars={read}) }}}}"
    loop = f"{{{{ range({len(odd_cases)}) | product({files}) }}}}"
    write = {"content": "{{ all.results | to_json }}", "dest": f"{tmp_path}/made.json", "mode": "0600"}
    block = [{"ansible.builtin.set_fact": {"made": made}, "loop": loop, "register": "all"}]
    tasks = [{"block": block, "rescue": [{"ansible.builtin.copy": write}]}]
    run(tmp_path, GIVEN, tasks)
    results = json.loads((tmp_path / "made.json").read_text())
    sound = [result["ansible_facts"]["made"] for result in results[: len(files)]]
    refused = 0
    for number, (name, odd, _) in enumerate(odd_cases):
        for file, result, text in zip(files, results[number * len(files) :], sound, strict=False):
            where = (name, odd, file)
            if result.get("failed"):
                refused += 1
                assert "systemd splits" in result["msg"], (where, result["msg"])
                continue
            lines = result["ansible_facts"]["made"]
            assert len(lines.split("\n")) == len(text.split("\n")), (where, lines)
            assert "$" not in lines and "%" not in lines.replace("%%", ""), (where, lines)
    assert refused > 4 * (len(ODD) - 1)


def test_a_run_with_everything_shown_shows_no_secret(tmp_path: Path) -> None:
    """The module as the role calls it, with --diff and -vvv."""
    secrets = "{{ vllm_engine_engines | edge.vllm_edge.resolve_secrets(vllm_engine_secrets) }}"
    module = {"secrets": secrets, "configuration_directory": str(tmp_path / "etc")}
    tasks = [
        {"name": "Bring the secrets", "edge.vllm_edge.engine_secrets": module, "register": "found"},
        {"ansible.builtin.debug": {"var": "found"}},
    ]
    (tmp_path / "secret").write_text(MARKED)
    given = {"vllm_engine_secrets": {"store": f"{{{{ lookup('ansible.builtin.file', '{tmp_path}/secret') }}}}"}}
    printed = run(tmp_path, GIVEN | given, tasks, "--diff", "-vvv", ANSIBLE_DISPLAY_OK_HOSTS="true")
    assert "secrets/keyed.env" in printed and "marked" not in printed, printed
    assert (tmp_path / "etc/secrets/keyed.env.other").read_text() == f"STORE_PASSWORD={MARKED}\n"
