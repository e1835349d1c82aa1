# SPDX-License-Identifier: Apache-2.0
"""What somebody broke by hand: check mode names it, the next run of the stage repairs exactly it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import CONTAINER, ENGINE, ENGINES, ROLES, UNIT, Controller, Machine, Play, life

UNIT_FILE = f"/etc/systemd/system/{UNIT}"
DOCKER_CREATE = f"/etc/vllm-edge/engines/{ENGINE}/docker-create"
HEALED = ["vllm_engine : Switch to the rendered generation"]
DAMAGE = {UNIT_FILE: "content", DOCKER_CREATE: "0777 -> 0640"}


def differing(play: Play) -> dict[str, str]:
    """Files that the play's diffs show, and whether content or mode differs."""
    found = {path: "content" for path in re.findall(r"^\+\+\+ after: (.*)$", play.output, re.MULTILINE)}
    modes = re.findall(r"^-\s+mode: '(\d+)'\n\+\s+mode: '(\d+)'\n\s+path: (.*)$", play.output, re.MULTILINE)
    return found | {path: f"{before} -> {after}" for before, after, path in modes}


def last_switch(machine: Machine) -> dict[str, Any]:
    journal: dict[str, Any] = json.loads(machine.host.file("/var/lib/vllm-edge/switch.json").content_string)
    return journal


@pytest.fixture(scope="module")
def damaged(machine: Machine) -> None:
    """A unit deleted, a file opened to everybody. The engine runs on: neither reaches its container."""
    machine.run("rm", UNIT_FILE)
    machine.run("chmod", "0777", DOCKER_CREATE)


def test_check_mode_names_the_damage_and_leaves_it(
    machine: Machine, controller: Controller, damaged: None, undisturbed: None
) -> None:
    before = life(machine)
    play = controller.play("playbooks/engines.yml", "--check")
    assert play.rc == 0, play.output[-6000:]
    assert (play.changed, differing(play)) == (HEALED, DAMAGE)
    assert f"+Description=vLLM engine {ENGINE}" in play.output, "the diff shows the missing unit"
    assert re.search(r"^-\s+mode: '0777'$", play.output, re.MULTILINE), "and the mode"
    assert not machine.host.file(UNIT_FILE).exists
    assert machine.host.file(DOCKER_CREATE).mode == 0o777
    assert life(machine) == before is not None


def test_one_run_repairs_exactly_the_damage(
    machine: Machine, controller: Controller, damaged: None, undisturbed: None
) -> None:
    """The engine is removed, too, and the unit stopped before systemd starts it again: only a run brings it back."""
    before, cursor = life(machine), machine.cursor()
    assert before is not None
    machine.run("docker", "rm", "--force", CONTAINER)
    machine.wait("the unit's end", lambda: machine.unit_ended_at(cursor), 10)
    machine.run("systemctl", "stop", UNIT)
    assert life(machine) is None
    play = controller.play("playbooks/engines.yml")
    assert play.rc == 0, play.output[-6000:]
    assert (play.changed, differing(play)) == (HEALED, DAMAGE)
    journal = last_switch(machine)
    assert (journal["result"], journal["generation"], journal["from_generation"]) == ("committed", 1, 1)
    assert (journal["start"], journal["stop"]) == ([ENGINE], [])
    assert sorted(journal["keep"]) == sorted(engine.name for engine in ENGINES if engine.name != ENGINE)
    # Removal by force is a kill first; on a busy machine the supervisor tells of that before the removal is there.
    assert re.search(r"Somebody (removed|stopped) the engine's container with Docker", machine.journal(cursor))
    unit = machine.host.file(UNIT_FILE)
    assert (unit.user, unit.group, unit.mode) == ("root", "root", 0o644)
    assert machine.host.file(DOCKER_CREATE).mode == 0o640
    assert machine.unit("NeedDaemonReload", "ActiveState") == {"NeedDaemonReload": "no", "ActiveState": "active"}
    after = life(machine)
    assert after is not None and after.id != before.id
    assert [machine.complete(name)[0] for name in ROLES] == [200] * 4
