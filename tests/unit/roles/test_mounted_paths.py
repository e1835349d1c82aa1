# SPDX-License-Identifier: Apache-2.0
"""Directories below a mount point that is not mounted: the module, and each role before it creates anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from role_cases import Cases, Run, Steps

RunModule = Callable[..., dict[str, Any]]


def make_root(tmp_path: Path) -> Path:
    """A host with /etc/fstab and an enabled mount unit; of its disks only / and "/mnt/my disk" are mounted."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        f"22 1 0:5 / / rw - ext4 /dev/sda1 rw\n30 22 0:9 / {tmp_path}/mnt/my\\040disk rw - ext4 /dev/sdb1 rw\n"
        f"31 30 0:10 / {tmp_path}/mnt/my\\040disk/closed rw,nosuid,noexec - ext4 /dev/sdc1 rw\n"
    )
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True)
    (wanted / "iscsi.mount").write_text(f"[Mount]\nWhat=/dev/disk/by-label/iscsi\nWhere={tmp_path}/mnt/iscsi\n")
    (tmp_path / "etc/fstab").write_text(
        "# <file system> <mount point>\n"
        "/dev/sda1 / ext4 defaults 0 1\n"
        "/dev/sda2 none swap sw 0 0\n"
        f"LABEL=disk {tmp_path}/mnt/my\\040disk ext4 defaults\n"
        f"UUID=0b1c {tmp_path}/data/vllm ext4 defaults,nofail 0 2\n"
        f"/dev/sdz1 {tmp_path}/mnt/stick ext4 user,noauto\n"
    )
    (tmp_path / "data/vllm").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data/vllm")
    return tmp_path


def refuse(root: Path, role: str, tasks: str, variable: str, place: str, told: str) -> Steps:
    # What comes before the check may read this machine, which need not be one that the role supports.
    facts = {"os_family": "Debian", "service_mgr": "systemd", "distribution": "Debian", "distribution_version": "13"}
    facts |= {"python": {"version": {"major": 3, "minor": 13}}}
    given = {variable: f"{root}/{place}", "vllm_engine_engines": [], "ansible_facts": facts}
    played = yield Run([tasks], False, {"role_of_case": role, "root_of_case": str(root), **given})
    assert played.failed and played.changed == []
    assert f"{variable} is {root}/{place}" in played.text and told in played.text
    main = (ROOT / "roles" / role / "tasks/main.yml").read_text()
    assert f"import_tasks: {tasks}.yml" in main.partition("directories")[0]


CASES = Cases("{{ role_of_case }}", make=make_root, validated=False)
CASES.defaults = {"edge.vllm_edge.mounted_paths": {"root": "{{ root_of_case }}"}}
for role, tasks, variable in (
    ("vllm_edge_host", "validate", "vllm_edge_host_data_directory"),
    ("model_weights", "preflight", "model_weights_root"),
    ("vllm_engine", "validate", "vllm_engine_cache_directory"),
):
    unmounted = {"place": "data/vllm/new", "told": "UUID=0b1c"}
    CASES.add(refuse, role, role=role, tasks=tasks, variable=variable, **unmounted)
for role, variable in (("vllm_edge_host", "vllm_edge_host_prefix"), ("vllm_engine", "vllm_engine_cache_directory")):
    noexec = {"place": "mnt/my disk/closed/new", "told": "closed is mounted with noexec"}
    CASES.add(refuse, f"{role}-noexec", role=role, tasks="validate", variable=variable, **noexec)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("data/vllm", ("/etc/fstab mounts UUID=0b1c at {root}/data/vllm", "'mount {root}/data/vllm'", "its line")),
        ("data/vllm/weights/new", ("UUID=0b1c",)),
        ("link/weights", ("model_weights_root is {root}/link/weights", "UUID=0b1c")),
        ("mnt/iscsi/weights", ("iscsi.mount mounts /dev/disk/by-label/iscsi", "'systemctl disable iscsi.mount'")),
        ("data", ()),
        ("data/vllm2", ()),
        ("mnt/my disk/weights", ()),
        ("mnt/stick/weights", ()),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_a_directory_below_a_mount_point(
    tmp_path: Path, run_module: RunModule, path: str, told: tuple[str, ...], check: bool
) -> None:
    root = make_root(tmp_path)
    given = {"paths": {"model_weights_root": f"{root}/{path}"}, "root": str(root)}
    result = run_module("mounted_paths", given, check=check)
    assert bool(result.get("failed")) is bool(told), result
    assert [words for words in told if words.format(root=root) not in result["msg"]] == []


def test_a_mount_where_nothing_is_executed(tmp_path: Path, run_module: RunModule) -> None:
    root = make_root(tmp_path)
    disk = f"{root}/mnt/my disk"
    given = {"paths": {"a": f"{disk}/closed/cache"}, "root": str(root)}
    assert not run_module("mounted_paths", given).get("failed")
    refused = run_module("mounted_paths", {**given, "executed": {"a": "libraries"}})
    assert f"a is {disk}/closed/cache, and {disk}/closed is mounted with noexec" in refused["msg"]
    assert not run_module("mounted_paths", {**given, "paths": {"a": disk}, "executed": {"a": "it"}}).get("failed")


def test_what_the_kernel_says_where_nothing_is_executed(tmp_path: Path, run_module: RunModule) -> None:
    """Linux 6.18 says it of a real mount, which only the script sees; the message quotes it."""
    disk, info = tmp_path / "disk", tmp_path / "proc/self/mountinfo"
    for directory in (disk, info.parent):
        directory.mkdir(parents=True)
    script = f"""
        mount -t tmpfs -o noexec,size=16m none {disk} || exit 77
        cat /proc/self/mountinfo >{info}
        cp /bin/true "$(ldd /bin/true | grep -o '/[^ ]*libc[^ ]*')" {disk}
        {disk}/true; {sys.executable} -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" {disk}/libc*"""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    if not info.exists():
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    given = {"paths": {"a": f"{disk}/new"}, "executed": {"a": "it"}, "root": str(tmp_path)}
    told = run_module("mounted_paths", given)["msg"]
    for words in ("Permission denied", "failed to map segment from shared object"):
        assert words in done.stderr and words in told


def test_the_disk_of_the_caches_is_checked_before_the_host_is_prepared() -> None:
    before = (ROOT / "playbooks/host.yml").read_text().partition("\n  roles:")[0]
    assert "name: vllm_engine\n        tasks_from: validate\n" in before


def test_a_host_without_fstab(tmp_path: Path, run_module: RunModule) -> None:
    assert not run_module("mounted_paths", {"paths": {"x": "/data"}, "root": str(tmp_path)}).get("failed")


@pytest.mark.parametrize("check", [False, True])
def test_a_file_system_without_room(tmp_path: Path, run_module: RunModule, check: bool) -> None:
    given = {"places": {"prefix": "/new/prefix"}, "purpose": "It was not installed", "root": str(tmp_path)}
    refused = run_module("mounted_paths", {**given, "room": {"program": {"prefix": 10**9, "/var": 1}}}, check=check)
    for words in ("It was not installed: /", "/new/prefix and /tmp and /var", "1000000001 MiB are to be written"):
        assert words in refused["msg"], refused["msg"]
    assert "vllm_edge_host_prefix names another place" in refused["msg"]
    assert not run_module("mounted_paths", {**given, "room": {"program": {"prefix": 1}}}, check=check).get("failed")


test_a_role_refuses_it_before_its_other_tasks = CASES.make_test()
