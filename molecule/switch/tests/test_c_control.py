# SPDX-License-Identifier: Apache-2.0
"""What cuts a switch off: Ansible, its own program, the whole host. One of the two generations serves afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import (
    CONTAINER,
    LAB,
    LOADED_S,
    ROOT,
    Bystanders,
    Edge,
    Pair,
    default,
)

# ---- the switch program -----------------------------------------------------------------------------------------


def test_program_killed(edge: Edge, pair: Pair) -> None:
    """kill -9 in the drain; the unit's own recovery ends what it began. Every phase is in tests/unit/switch."""
    edge.hold("before_drain")
    container = default.life(edge, CONTAINER)
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, "drain", kill=True)
    edge.calm()
    done = begun.end()
    journal = edge.ended(begun.before)
    assert done.journal == journal, "who follows hears how it ended"
    assert "did not end: its program was killed, or the host went down, in phase drain" in journal["message"]
    assert journal["result"] == "rolled_back", journal["message"]
    edge.serves(pair.here)
    assert default.life(edge, CONTAINER) == container, "nothing had been stopped"


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
        pytest.param("clean_up", False, id="committed-orderly", marks=pytest.mark.thorough),
    ],
)
def test_reboot(edge: Edge, bystanders: Bystanders, pair: Pair, phase: str, hard: bool) -> None:
    if phase == "clean_up":
        edge.hold("after_commit")
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, phase)
    if phase == "healthy":
        # Docker itself may lose a port when power goes while it starts a container.
        edge.wait("the new container to run", lambda: default.life(edge, CONTAINER) is not None, 60)
    reboot(edge, hard=hard)
    begun.process.kill()
    begun.process.communicate(timeout=30)
    bystanders.again()
    edge.calm()
    wanted = pair.there if phase == "clean_up" else pair.here
    edge.wait("the engines after the boot", lambda: edge.status()["problems"] == [], LOADED_S + 60, every=1)
    # /dev is new, and the worker's CUDA has found the nodes that nobody but the refresh of the specification makes.
    assert "path: /dev/nvidia-uvm\n" in edge.run("cat", "/var/run/cdi/nvidia.yaml")
    journal = edge.last()
    assert journal is not None and journal["id"] != begun.before
    assert journal["result"] == ("committed" if phase == "clean_up" else "rolled_back"), json.dumps(journal, indent=1)
    assert f"in phase {phase}" in journal["message"] or "At boot" in journal["message"], journal["message"]
    edge.serves(wanted)
