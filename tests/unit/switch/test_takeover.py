# SPDX-License-Identifier: Apache-2.0
"""A host that an earlier commit installed: this program reads what is recorded there, and takes the engines off the
network with the first switch.

tests/fixtures/installed_by_0464f07.json was recorded on the simulated host after `make lab` of that commit: the
files, what `docker inspect` said of the containers, and what `systemctl show` said of the units.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import load_engine
from ansible.module_utils.vllm_edge.generation import committed, live, store
from ansible.module_utils.vllm_edge.generation.render import OF_NO_ENGINE, bare
from ansible.module_utils.vllm_edge.gpu.slots import load
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.status.collect import collect
from ansible.module_utils.vllm_edge.switch.moves import decide_moves
from ansible.module_utils.vllm_edge.switch.preflight import check_release
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
    return collect(installed, docker, lambda names: (units, None), lambda *_: ([], None))  # type: ignore[arg-type]


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


def test_a_supervisor_of_this_release_starts_an_engine_of_the_recorded_generation(installed: HostPaths) -> None:
    """Between the installation of the program and the first switch an engine may crash, or the host boot."""
    read = load_engine("e2b", installed)
    assert read.create.publishes and (read.config.url, read.config.socket) == ("http://127.0.0.1:8070", None)


@pytest.mark.parametrize("rendered_now", [True, False], ids=["sockets", "ports"])
def test_an_update_stops_the_engines_that_publish_ports_and_renders_none(
    installed: HostPaths,
    status: dict[str, Any],
    run_module: Callable[..., dict[str, Any]],
    tmp_path: Path,
    rendered_now: bool,
) -> None:
    program = tmp_path / "vllm-edge"
    (tmp_path / "status.json").write_text(json.dumps(status))
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/status.json\n")
    program.chmod(0o755)
    directory = installed.generation_dir(1)
    recorded = json.loads((directory / "generation.json").read_text())
    engines = []
    for name in ENGINES:
        config = json.loads((directory / "engines" / name / "engine.json").read_text())
        create = bare((directory / "engines" / name / "docker-create").read_text())
        weights = parse_record((installed.state / "weights" / f"{config['model']}.json").read_text())
        if rendered_now:
            place = f"/run/vllm-edge/engines/{name}"
            config["url"] = f"unix:{place}/api.sock"
            mount = f"--mount=type=bind,source={place},target=/run/api"
            create = re.sub(r"--network=\S+\n--publish=\S+", f"--network=none\n{mount}", create)
        engines.append(
            {
                "name": name,
                "config": {key: value for key, value in config.items() if key not in OF_NO_ENGINE},
                "docker_create": create,
                "unit": (directory / "units" / config["unit"]).read_text(),
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
    if not rendered_now:
        assert result["rc"] != 0 and "the gateway answers on its port" in result["msg"], result
        return
    assert (result["rc"], result["changed"]) == (0, True), result
    moves = result["moves"]
    assert sorted(moves["stop"]) == sorted(moves["start"]) == sorted(ENGINES) and moves["keep"] == []
    hashes = {name: row["input_hash"] for name, row in recorded["engines"].items()}
    assert not {row["input_hash"] for row in result["engines"].values()} & set(hashes.values())


def test_a_failed_update_goes_back_to_the_published_ports_and_a_later_switch_does_not(installed: HostPaths) -> None:
    """The way back loads the recorded generation as it is; only as the aim of a switch it is refused."""
    former = store.load(installed, 1)
    assert all(engine.create.publishes for engine in former.engines.values())
    (said,) = check_release(former)
    assert "Generation 1 is of an earlier release" in said and "-e serving_profile=nvfp4-tp2" in said
