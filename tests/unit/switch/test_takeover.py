# SPDX-License-Identifier: Apache-2.0
"""A host that an earlier commit installed: this program reads what is recorded there and restarts no engine.

tests/fixtures/installed_by_0464f07.json was recorded on the simulated host after `make lab` of that commit: the
files, what `docker inspect` said of the containers, and what `systemctl show` said of the units.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation import committed, live, store
from ansible.module_utils.vllm_edge.generation.render import OF_NO_ENGINE, bare
from ansible.module_utils.vllm_edge.gpu.slots import load
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.status.collect import collect
from ansible.module_utils.vllm_edge.switch.moves import decide_moves
from ansible.module_utils.vllm_edge.system.docker import parse_container
from ansible.module_utils.vllm_edge.weights.record import parse_record

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "installed_by_0464f07.json").read_text())
PLACES = {"/etc/vllm-edge": "etc", "/var/lib/vllm-edge": "state", "/etc/systemd/system": "units"}
ENGINES = ["31b-nvfp4-tp2", "e4b", "e2b"]


@pytest.fixture
def installed(paths: HostPaths) -> HostPaths:
    """The recorded files, with the modes of the host."""
    for name, text in RECORDED["files"].items():
        root, place = next((root, place) for root, place in PLACES.items() if name.startswith(f"{root}/"))
        file = paths.state.parent / place / name.removeprefix(f"{root}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o644)
    return paths


@pytest.fixture
def status(installed: HostPaths, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `vllm-edge status` prints there."""
    monkeypatch.setattr("ansible.module_utils.vllm_edge.status.collect.docker_unit", lambda: None)
    containers = {found.name: found for found in map(parse_container, RECORDED["containers"])}
    docker = SimpleNamespace(ping=lambda timeout_s: None, find=containers.get)
    units = {unit["Id"]: unit for unit in RECORDED["units"]}
    ports = {8050: ["127.0.0.1"], 8060: ["127.0.0.1"], 8070: ["127.0.0.1"]}
    return collect(installed, docker, lambda names: (units, None), lambda *_: ([], None), lambda: ports)  # type: ignore[arg-type]


def test_the_recorded_state_is_read_and_only_modes_are_corrected(installed: HostPaths, status: dict[str, Any]) -> None:
    now = committed.committed(installed)
    assert now is not None and (now.profile, now.generation, now.origin) == ("nvfp4-tp2", 1, "inventory")
    generation = store.load(installed, 1)
    seen, target = live.seen(status)
    changes = live.live_changes(generation, installed)
    assert {change.attributes for change in changes} == {"mode 0644, wanted 0640"} and target == []
    assert {Path(change.path).name for change in changes} == {"docker-create"}
    moves = decide_moves(generation.hashes, seen, changes, target)
    assert not (moves.stop or moves.start) and sorted(moves.keep) == sorted(ENGINES)
    assert [engine["phase"] for engine in status["engines"]] == ["serving"] * 3
    assert {slot.uuid for slot in load(str(installed.state / "gpu-slots.json"))} == generation.budgets_mib.keys()


def test_units_of_this_commit_are_installed_without_a_restart(
    installed: HostPaths, status: dict[str, Any], run_module: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Their section [Unit] has one more line. The hash over the rest, weights included, is the recorded one."""
    program = tmp_path / "vllm-edge"
    (tmp_path / "status.json").write_text(json.dumps(status))
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/status.json\n")
    program.chmod(0o755)
    directory = installed.generation_dir(1)
    recorded = json.loads((directory / "generation.json").read_text())
    engines = []
    for name in ENGINES:
        config = json.loads((directory / "engines" / name / "engine.json").read_text())
        weights = parse_record((installed.state / "weights" / f"{config['model']}.json").read_text())
        unit = (directory / "units" / config["unit"]).read_text()
        engines.append(
            {
                "name": name,
                "config": {key: value for key, value in config.items() if key not in OF_NO_ENGINE},
                "docker_create": bare((directory / "engines" / name / "docker-create").read_text()),
                "unit": unit.replace("\nStartLimit", f"\nRequiresMountsFor={weights.path}\nStartLimit", 1),
                "chat_template": (directory / "engines" / name / "chat-template.jinja").read_text(),
                "manifest_sha256": weights.manifest_sha256,
            }
        )
    result = run_module(
        "serving_switch",
        {
            "profile": recorded["profile"],
            "engines": engines,
            "target": (directory / "units" / "vllm-edge.target").read_text(),
            "budgets_mib": recorded["budgets_mib"],
            "foreign": recorded["foreign"],
            "limits": recorded["limits"],
            "state_directory": str(installed.state),
            "configuration_directory": str(installed.etc),
            "units_directory": str(installed.units),
            "program": str(program),
        },
        check=True,
    )
    assert (result["rc"], result["changed"]) == (0, True), result
    moves = result["moves"]
    assert (sorted(moves["keep"]), moves["stop"], moves["start"]) == (sorted(ENGINES), [], [])
    shown = {Path(row.get("after_header") or row["after"]["path"]).suffix for row in result["diff"]}
    assert shown == {".service", ".json", ""}, "docker-create is closed to others"
    assert {name: row["input_hash"] for name, row in result["engines"].items()} == {
        name: row["input_hash"] for name, row in recorded["engines"].items()
    }
