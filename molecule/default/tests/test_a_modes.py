# SPDX-License-Identifier: Apache-2.0
"""Who may read and write what we leave on a host: all of it is walked, and what is open is in a stated list."""

from __future__ import annotations

import re

from conftest import Machine

OURS = "/etc/vllm-edge /var/lib/vllm-edge /opt/vllm-edge /usr/local/bin/vllm-edge /data/vllm/weights /data/vllm/cache"
PLACES = "/etc/systemd/system /etc/needrestart /etc/apt /etc/docker /etc/modprobe.d /etc/modules-load.d"
"""Directories of the system in which some files are ours."""

OPEN = {
    # What `vllm-edge status` of a normal user reads. It has no secret, only keyed hashes of them.
    r"/etc/vllm-edge(/engines(/[a-z0-9-]+(/engine\.json)?)?)?": "status",
    r"/var/lib/vllm-edge(/engines)?": "status; the states of engines themselves are closed",
    r"/var/lib/vllm-edge/(active-profile|gpu-slots|image|keys|observations)\.json": "status, plan and pins",
    r"/var/lib/vllm-edge/apt\.conf": "apt's own user",
    r"/var/lib/vllm-edge/(weights|sbom|log|progress)(/.*)?": "records, logs of pull and build, progress",
    # The engines' user reads it in the container.
    r"/etc/vllm-edge/engines/[a-z0-9-]+/chat-template\.jinja": "the engine",
    r"/etc/vllm-edge/policy(/[0-9a-f]{64}(/edge_policy\.py)?)?": "the engine",
    r"/etc/vllm-edge/hooks(/(before_drain|after_commit)\.d)?": "operators see where hooks go",
    r"/etc/systemd/system/.*": "systemctl cat",
    r"/(opt|usr/local/bin)/vllm-edge(/.*)?": "the program",
    r"/data/vllm/cache": "only the directory; those of the engines are closed",
    r"/etc/(needrestart|apt|docker|modprobe\.d|modules-load\.d)/.*": "configuration of the system",
}
"""What everybody may read: a pattern of the whole path, and why."""


def find(machine: Machine, permission: str) -> list[str]:
    """Paths of ours with this permission for others, that can be reached: what is below a closed directory cannot."""
    below = f"find {OURS} -xdev -type d ! -perm -001 ! -perm -004 -prune -o ! -type l -perm {permission} -print"
    named = f"find {PLACES} -xdev ! -type l -perm {permission} \\( -name '*vllm*' -o -name '*nvidia*' \\) -print"
    return sorted(set(machine.shell(f"{below}; {named}").splitlines()))


def test_nothing_of_ours_is_writable_for_others(machine: Machine) -> None:
    assert find(machine, "/022") == []


def test_only_caches_belong_to_engines(machine: Machine) -> None:
    """And their group reads the weights."""
    others = machine.shell(f"find {OURS} -xdev ! -user root").splitlines()
    assert [path for path in others if not path.startswith("/data/vllm/cache/")] == []
    shown = machine.run(
        "stat", "--format=%U:%G %a", "/data/vllm/weights", "/etc/vllm-edge/engines", "/etc/docker/daemon.json"
    )
    assert shown.splitlines() == ["root:vllm-edge 750", "root:root 755", "root:root 644"]


def test_only_what_is_listed_is_readable_for_others(machine: Machine) -> None:
    found = find(machine, "/004")
    assert "/var/lib/vllm-edge/active-profile.json" in found
    assert [path for path in found if not any(re.fullmatch(pattern, path) for pattern in OPEN)] == []


def test_a_normal_user_gets_a_status_and_sentences_about_what_is_closed(machine: Machine) -> None:
    status = machine.host.run("runuser -u ops -- vllm-edge status")
    for told in ("switch.json is not for this user: switches", "generations is not for this user: whether files"):
        assert told in status.stdout, status.stdout + status.stderr
    assert "Traceback" not in status.stdout + status.stderr and "left unfinished" not in status.stdout
    for command in ("history", "progress"):
        said = machine.host.run(f"runuser -u ops -- vllm-edge {command}")
        assert said.rc == 1 and f"shown to root: 'sudo vllm-edge {command}'" in said.stderr
