# SPDX-License-Identifier: Apache-2.0
"""What cuts a switch off: Ansible, its own program, the whole host. One of the two generations serves afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import (
    CONTAINER,
    ENGINE,
    LAB,
    LOADED_S,
    ROOT,
    SETTINGS,
    Bystanders,
    Edge,
    Pair,
    default,
    kill_group,
    play,
    start_play,
)
from test_a_switch import edited

Seen = Callable[..., None]
THOROUGH = pytest.mark.thorough


def hold_in(edge: Edge, phase: str) -> None:
    """The phases that have a hook last as long as a test wants."""
    for name in {"drain": "before_drain", "clean_up": "after_commit"}.get(phase, "").split():
        edge.hold(name)


# ---- the switch program -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase",
    [
        "healthy",
        pytest.param("drain", marks=THOROUGH),
        pytest.param("stop", marks=THOROUGH),
        pytest.param("clean_up", marks=THOROUGH),
    ],
)
def test_program_killed(edge: Edge, pair: Pair, phase: str, seen: Seen) -> None:
    """kill -9; the unit's own recovery ends what it began."""
    hold_in(edge, phase)
    container = default.life(edge, CONTAINER)
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, phase, kill=True)
    edge.calm()
    done = begun.end()
    journal = edge.ended(begun.before)
    assert done.journal == journal, "who follows hears how it ended"
    assert f"did not end: its program was killed, or the host went down, in phase {phase}" in journal["message"]
    committed = phase == "clean_up"
    assert journal["result"] == ("committed" if committed else "rolled_back"), journal["message"]
    served = edge.serves(pair.there if committed else pair.here)
    if phase == "drain":
        assert default.life(edge, CONTAINER) == container, "nothing had been stopped"
    seen(f"switch program killed, in phase {phase}", journal["message"], served, journal["seconds"])


@THOROUGH
def test_program_told_to_stop(edge: Edge, pair: Pair, seen: Seen) -> None:
    """`systemctl stop`: it goes back by itself."""
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, "healthy")
    edge.run("systemctl", "stop", "--no-block", "vllm-edge-switch.service")
    done = begun.end()
    assert done.result == "rolled_back" and "SIGTERM asked the switch to end" in done.message, done.message
    seen("systemctl stop of the switch, in phase healthy", done.message, edge.serves(pair.here), done.seconds)


# ---- Ansible ----------------------------------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("phase", ["drain", "stop", "canary"])
def test_ansible_killed(edge: Edge, controller: Any, pair: Pair, phase: str, seen: Seen) -> None:
    """All of its processes at once. In phase healthy it is killed in test_a_switch.py."""
    hold_in(edge, phase)
    before = edge.last_id()
    length = pair.there_len - 1024
    edit = edited(**{ENGINE: {"max_model_len": length}})
    playing = start_play(controller, "playbooks/engines.yml", SETTINGS, edit)
    edge.until(before, phase)
    kill_group(playing)
    edge.let_go()
    journal = edge.ended(before)
    assert journal["result"] == "committed", journal["message"]
    served = edge.serves(journal["generation"])
    assert edge.engines(journal["generation"])[ENGINE]["max_model_len"] == length
    again = play(controller, "playbooks/engines.yml", SETTINGS, edit)
    assert (again.rc, again.recap["changed"]) == (0, 0), again.output[-6000:]
    seen(f"Ansible killed, in phase {phase}", journal["message"], served, journal["seconds"])
    assert edge.switch(pair.here).rc == 0


# ---- the host ---------------------------------------------------------------------------------------------------


def reboot(edge: Edge, *, hard: bool) -> None:
    """The lab's own command; its bystanders' process goes with the host, their container stays on its disk."""
    edge.forget_connection()
    words = [sys.executable, "-m", "lab", "reboot", *(["--hard"] if hard else [])]
    environment = os.environ | {"VLLM_EDGE_LAB_NAME": LAB}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("phase", "hard"),
    [
        pytest.param("healthy", True, id="healthy-power"),
        pytest.param("healthy", False, id="healthy-orderly", marks=THOROUGH),
        pytest.param("drain", False, id="drain-orderly", marks=THOROUGH),
        pytest.param("drain", True, id="drain-power", marks=THOROUGH),
        pytest.param("clean_up", True, id="committed-power", marks=THOROUGH),
        pytest.param("clean_up", False, id="committed-orderly", marks=THOROUGH),
    ],
)
def test_reboot(edge: Edge, bystanders: Bystanders, pair: Pair, phase: str, hard: bool, seen: Seen) -> None:
    hold_in(edge, phase)
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, phase)
    if phase == "healthy":
        # Docker itself may lose a port when power goes while it starts a container: docs/switching.md.
        edge.wait("the new container to run", lambda: default.life(edge, CONTAINER) is not None, 60)
    reboot(edge, hard=hard)
    begun.process.kill()
    begun.process.communicate(timeout=30)
    bystanders.again()
    edge.calm()
    booted = edge.now()
    wanted = pair.there if phase == "clean_up" else pair.here
    edge.wait("the engines after the boot", lambda: edge.status()["problems"] == [], LOADED_S + 60, every=1)
    serving = edge.now() - booted
    # /dev is new, and the worker's CUDA has found the nodes that nobody but the refresh of the specification makes.
    assert "path: /dev/nvidia-uvm\n" in edge.run("cat", "/var/run/cdi/nvidia.yaml")
    journal = edge.last()
    assert journal is not None and journal["id"] != begun.before
    assert journal["result"] == ("committed" if phase == "clean_up" else "rolled_back"), json.dumps(journal, indent=1)
    assert f"in phase {phase}" in journal["message"] or "At boot" in journal["message"], journal["message"]
    kind = "power cut" if hard else "reboot"
    seen(f"{kind}, in phase {phase}", journal["message"], edge.serves(wanted), serving)
