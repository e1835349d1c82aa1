# SPDX-License-Identifier: Apache-2.0
"""Marked secrets through a run with everything shown, a switch, a rollback: an unprivileged user finds none of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CONTAINER, ENGINE, Edge, default, play
from test_a_switch import SETTINGS, edited

pytestmark = pytest.mark.thorough

MARK = "marked7"
"""In every planted secret, and in nothing else."""
PATTERN = f"{MARK[:-1]}[{MARK[-1]}]"
"""Finds MARK, and is not found itself on the command line of a search."""
LOG = "/var/tmp/seen-by-nobody"
WATCH = f"""
import glob, os, time
seen = open("{LOG}", "a")
while True:
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            text = open(path, "rb").read()
        except OSError:
            continue
        if b"{MARK[:-1]}" + b"{MARK[-1]}" in text:
            seen.write(repr(text) + "\\n")
            seen.flush()
    time.sleep(0.02)
"""


def plant(directory: Path, turn: str, **engine: Any) -> list[str]:
    """The options of a run with secrets of each kind; those of another turn are rotated."""
    secrets = {
        "store": f"{MARK}-engine-{turn}",
        "other": f"{{{{ lookup('ansible.builtin.file', '{directory}/file') }}}}",
    }
    (directory / "file").write_text(f"{MARK}-file-{turn}")
    named = {"secret_env": {"STORE_PASSWORD": "store", "OTHER_KEY": "other"}}
    given = directory / "given.yml"
    # The weights are in place, so the hub is not asked; token and proxy are handed over all the same.
    download = {
        "model_weights_endpoint": "https://hub.lab:8443",
        "model_weights_token": f"{MARK}-token",
        "model_weights_environment": {"HTTPS_PROXY": f"http://user:{MARK}-proxy@proxy.lab:3128"},
    }
    given.write_text(yaml.safe_dump({"vllm_engine_secrets": secrets, **download}))
    return [SETTINGS, "-e", f"@{given}", edited(**{ENGINE: {**named, **engine}}), "--diff", "-vvv"]


@pytest.fixture(scope="module")
def watched(edge: Edge) -> Iterator[None]:
    """A user without rights samples every command line that it can read, all the time."""
    edge.put("/var/tmp/watch.py", WATCH)
    edge.shell(f"install --owner=nobody --mode=0600 /dev/null {LOG}")
    unit = ["--quiet", "--collect", "--unit=watch-secrets", "--uid=nobody"]
    edge.run("systemd-run", *unit, "python3", "/var/tmp/watch.py")
    yield
    edge.run("systemctl", "stop", "watch-secrets")
    edge.run("rm", "--force", LOG, "/var/tmp/watch.py")


def look(edge: Edge, outputs: list[str], torn_down: bool = False) -> None:
    """Search what user nobody can read, what was printed, the journal and the support report."""
    assert [line for text in outputs for line in text.splitlines() if MARK in line] == []
    assert edge.shell(f"cat {LOG}") == "", "a command line"
    places = "/etc /var /opt /usr/local /data /home /root /run /tmp /srv"
    search = f"grep --recursive --binary-files=text --files-with-matches --no-messages '{PATTERN}' {places}"
    found = edge.host.run(f"runuser -u nobody -- {search}").stdout.splitlines()
    assert [path for path in found if path not in (LOG, "/var/tmp/watch.py")] == []
    assert MARK not in edge.shell("journalctl --quiet --no-pager --boot")
    if not torn_down:
        edge.host.run("vllm-edge doctor --support-report /root/report.tar.gz")  # it ends with 1 where it warns
        unpack = "tar --extract --to-stdout --gzip --file=/root/report.tar.gz"
        assert edge.shell(f"{unpack} | grep --count '{PATTERN}' || true").strip() == "0"
        edge.run("rm", "/root/report.tar.gz")
    search = f"grep --recursive --files-with-matches --no-messages '{PATTERN}' /etc /var/lib/vllm-edge /root || true"
    whole = edge.shell(search)
    known = [] if torn_down else [f"/etc/vllm-edge/secrets/{ENGINE}.env"]
    assert whole.splitlines() == known, "root finds it in one place"


def read(edge: Edge) -> dict[str, str]:
    """The environment of the container."""
    container: Any = edge.container(CONTAINER)
    return dict(item.split("=", 1) for item in container["Config"]["Env"])


def test_no_secret_is_found_through_runs_switch_and_rollback(
    edge: Edge, controller: Any, watched: None, tmp_path: Path
) -> None:
    before = edge.number()
    first = play(controller, "site.yml", *plant(tmp_path, "one"))
    assert first.rc == 0, first.output[-4000:]
    assert read(edge)["STORE_PASSWORD"] == f"{MARK}-engine-one" and read(edge)["OTHER_KEY"] == f"{MARK}-file-one"
    look(edge, [first.output])

    life = default.life(edge, CONTAINER)
    again = play(controller, "site.yml", *plant(tmp_path, "one"))
    assert (again.rc, again.changed, default.life(edge, CONTAINER)) == (0, [], life), "nothing has changed"

    foreseen = play(controller, "site.yml", *plant(tmp_path, "two"), "--check")
    assert foreseen.rc == 0 and f"secrets/{ENGINE}.env" in foreseen.output
    assert default.life(edge, CONTAINER) == life
    rotated = play(controller, "site.yml", *plant(tmp_path, "two"))
    assert rotated.rc == 0 and default.life(edge, CONTAINER) != life, "a rotated secret restarts the engine"
    assert read(edge)["STORE_PASSWORD"] == f"{MARK}-engine-two"
    look(edge, [again.output, foreseen.output, rotated.output])

    back = edge.rollback()
    assert back.rc == 0, back.message
    assert read(edge)["STORE_PASSWORD"] == f"{MARK}-engine-two", "a rotated secret does not return"
    look(edge, [json.dumps(edge.history())])

    assert edge.switch(before).rc == 0
    assert f"--env-file=/etc/vllm-edge/secrets/{ENGINE}.env" not in edge.shell(
        f"cat /etc/vllm-edge/engines/{shlex.quote(ENGINE)}/docker-create"
    )


def test_teardown_leaves_no_secret(edge: Edge, controller: Any, watched: None, tmp_path: Path) -> None:
    named = ["-e", f"teardown={default.INVENTORY_HOST}"]
    gone = play(controller, "playbooks/teardown.yml", *named, *plant(tmp_path, "one"))
    assert gone.rc == 0, gone.output[-4000:]
    look(edge, [gone.output], torn_down=True)
