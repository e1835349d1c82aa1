# SPDX-License-Identifier: Apache-2.0
"""Taking it all away again, while other people's things live on beside it. The last file: it leaves no engine."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from conftest import INVENTORY_HOST, Machine, Play
from neighbours import Watched, watched

__all__ = ["watched"]  # a fixture

TEARDOWN = "playbooks/teardown.yml"
NAMED = ["-e", f"teardown={INVENTORY_HOST}"]
NOTES = "/etc/vllm-edge/notes-of-an-operator.txt"
HOOK = "/etc/vllm-edge/hooks/after_commit.d/50-notify"
"""An operator's."""


def told(play: Play) -> dict[str, list[str]]:
    """The last lines of the play: what went, what was kept, what is not ours."""
    lines = play.output.splitlines()
    begin = next(
        at for at, line in enumerate(lines) if re.match(rf"{INVENTORY_HOST}: (would remove|removed|nothing)", line)
    )
    found: dict[str, list[str]] = {}
    heading = ""
    for line in [re.sub(r"^\S+: ", "", lines[begin]), *lines[begin + 1 : lines.index("", begin)]]:
        if line.startswith("    "):
            found[heading][-1] += " " + line.strip()
        elif line.startswith("  "):
            found[heading].append(line.strip())
        else:
            heading = line
            found[heading] = []
    return found


def containers(machine: Machine) -> str:
    return machine.shell("docker ps --all --format '{{.ID}} {{.Names}} {{.State}}' --filter label=vllm-edge.engine")


def weights(machine: Machine) -> str:
    """Every file of ours there, so that a download, or a second hashing into a record, could be seen."""
    return machine.shell(
        "find /data/vllm/weights /var/lib/vllm-edge/weights -type f "
        "-not -path '*/neighbours-model/*' -not -name '*.lock' -printf '%p %s %i %T@ %u:%g\\n' | sort"
    )


@pytest.fixture(scope="module")
def before(machine: Machine) -> dict[str, Any]:
    """The host as it serves at first."""
    status: dict[str, Any] = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    assert status["engines"], "these tests begin on a host with engines"
    machine.shell(f"printf '#!/bin/sh\\n' > {HOOK}; chmod 0755 {HOOK}")
    base = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    return status | {"base": base, "weights": weights(machine)}


def test_refuses_a_host_that_was_not_named(machine: Machine, watched: Watched, before: dict[str, Any]) -> None:
    running = containers(machine)
    play = watched.play(TEARDOWN, "-e", "teardown=another-host")
    assert play.rc != 0 and play.recap["changed"] == 0
    words = " ".join(play.output.split())
    assert "Nothing was removed, as teardown is 'another-host' and does not name this host" in words
    assert f"`-e teardown={INVENTORY_HOST}` removes it" in words
    assert containers(machine) == running


def test_refuses_while_a_switch_runs(machine: Machine, watched: Watched, before: dict[str, Any]) -> None:
    """It holds its lock for its whole life."""
    running, holder = containers(machine), "switch-of-somebody.service"
    lock = "/var/lib/vllm-edge/switch.lock"
    machine.run("systemd-run", f"--unit={holder}", "flock", lock, "sleep", "300")
    try:
        machine.wait("the lock", lambda: machine.host.run(f"flock --nonblock {lock} true").rc != 0, 10)
        play = watched.play(TEARDOWN, *NAMED)
    finally:
        machine.run("systemctl", "stop", holder)
    assert play.rc != 0 and play.recap["changed"] == 0
    assert f"A switch runs on {INVENTORY_HOST}. Nothing was removed." in " ".join(play.output.split())
    assert containers(machine) == running


@pytest.fixture(scope="module")
def foreseen(watched: Watched, machine: Machine, before: dict[str, Any]) -> list[str]:
    """What `--check` says would go; it touches nothing."""
    running, kept = containers(machine), weights(machine)
    play = watched.play(TEARDOWN, "--check")
    assert play.rc == 0, play.output[-5000:]
    assert (containers(machine), weights(machine)) == (running, kept)
    assert all(machine.host.file(path).exists for path in ("/opt/vllm-edge", "/etc/vllm-edge/engines"))
    return told(play)["would remove"]


def test_check_mode_lists_what_would_go(foreseen: list[str], before: dict[str, Any]) -> None:
    for engine in before["engines"]:
        assert f"container {engine['container']}" in foreseen
        assert f"/etc/systemd/system/{engine['unit']}" in foreseen
    assert {
        "/etc/tmpfiles.d/vllm-edge.conf",
        "/run/vllm-edge/",
        "user vllm-edge-gateway",
        "/opt/vllm-edge/",
        "/usr/local/bin/vllm-edge",
        "/data/vllm/cache/",
    } <= {*foreseen}
    assert f"image {before['engines'][0]['image']}" in foreseen
    assert not any(path.startswith("/data/vllm/weights") for path in foreseen)
    assert not any(before["base"] in line for line in foreseen)


def test_interrupted_and_finished_by_the_next_run(
    machine: Machine, watched: Watched, before: dict[str, Any], foreseen: list[str]
) -> None:
    process = watched.controller.start_play(TEARDOWN, *NAMED)
    assert process.stdout is not None
    seen, begin = "", time.monotonic()
    for line in process.stdout:
        seen += line
        assert time.monotonic() - begin < 120, seen[-3000:]
        if "TASK [vllm_engine : Remove the units]" in line:
            break
    process.terminate()
    process.wait(30)
    watched.unharmed()
    assert containers(machine) == "" and machine.host.file("/opt/vllm-edge").exists, "it was ended in the middle"

    play = watched.play(TEARDOWN, *NAMED)
    assert play.rc == 0, play.output[-5000:]
    found = told(play)
    assert {*found["removed"]} <= {*foreseen}, "nothing goes that check mode did not name"
    assert [path for path in foreseen if path.startswith("/") and machine.host.file(path).exists] == []
    assert (
        machine.shell("systemctl list-units --all --plain --no-legend 'vllm-*'").split()[0]
        == "vllm-of-somebody.service"
    )
    images = machine.run("docker", "images", "--format={{.Repository}}:{{.Tag}}").split()
    assert before["base"] in images and not any(image.startswith("vllm-edge/") for image in images)
    assert machine.shell("docker network ls --quiet --filter label=vllm-edge.network") == ""
    assert weights(machine) == before["weights"], "weights and their records stay"
    assert machine.host.user("vllm-edge").exists
    assert any("weights in /data/vllm/weights/" in line and "remove_weights=true" in line for line in found["kept"])
    assert any("NVIDIA driver, Docker" in line for line in found["kept"])
    assert found["not ours, left alone"] == [
        f"{HOOK}: vllm-edge did not create it",
        f"{NOTES}: vllm-edge did not create it",
    ]


def test_the_rest_of_the_host_still_works(machine: Machine) -> None:
    assert len(machine.gpu_memory()) == 4 and set(machine.gpu_memory().values()) == {0}
    assert json.loads(machine.run("docker", "info", "--format={{json .LiveRestoreEnabled}}")) is True


def test_nothing_is_left_and_a_second_run_changes_nothing(machine: Machine, watched: Watched) -> None:
    """Once other people's files are gone, so are directories, user and group."""
    watched.neighbours.stop()
    machine.run("rm", HOOK)
    first = watched.controller.play(TEARDOWN, *NAMED, "-e", "remove_weights=true")
    assert first.rc == 0, first.output[-5000:]
    assert {"user vllm-edge", "group vllm-edge", "/etc/vllm-edge/", "/data/vllm/"} <= {*told(first)["removed"]}
    second = watched.controller.play(TEARDOWN, *NAMED, "-e", "remove_weights=true")
    assert (second.rc, second.recap["changed"]) == (0, 0), second.output[-5000:]
    assert f"{INVENTORY_HOST}: nothing of vllm-edge is left to remove" in second.output.splitlines()
    assert not machine.host.user("vllm-edge").exists and not machine.host.group("vllm-edge").exists
    traces = machine.shell(
        "find /etc /opt /usr/local /var/lib /data -name '*vllm*' -not -path '/var/lib/docker/*' | sort"
    ).split()
    apt = [path for path in traces if path.startswith(("/etc/apt/", "/var/lib/apt/"))]
    kept = {*apt, "/etc/modules-load.d/vllm-edge-nvidia.conf"}
    assert {*traces} == kept, "apt repositories and the driver stay"
    assert not machine.host.file("/etc/systemd/system/haproxy.service").exists, "it was masked"
