# SPDX-License-Identifier: Apache-2.0
"""What a container's processes use, on made-up trees of /proc and cgroups, and on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.usage import Usage, read_usage
from fake_host import write

STAT = "{pid} (VLLM::Worker (TP0)) S {parent} 1 1 0 -1 4194560 900 800 {faults} 5 {ticks} 7 11 13 20 0 4 0\n"
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("cgroup", "path", "text"),
    [
        ("0::/docker/c0\n", "docker/c0/io.stat", "259:0 rbytes=4096 wbytes=9\n8:0 rbytes=1000 wbytes=0 rios=3\n"),
        (
            "9:cpu,cpuacct:/docker/c0\n5:blkio:/docker/c0\n",
            "blkio/docker/c0/blkio.throttle.io_service_bytes_recursive",
            "8:0 Read 5096\n8:0 Write 9\nTotal 5105\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_all_processes_of_the_container_count(tmp_path: Path, cgroup: str, path: str, text: str) -> None:
    for pid, parent in ((10, 1), (20, 10), (30, 20), (40, 1)):
        write(tmp_path / f"proc/{pid}/stat", STAT.format(pid=pid, parent=parent, faults=pid, ticks=pid * TICKS))
    write(tmp_path / "proc/self/stat", "not a process")
    write(tmp_path / "proc/10/cgroup", cgroup)
    write(tmp_path / "sys/fs/cgroup" / path, text)
    found = read_usage(10, tmp_path)
    assert found == Usage(5096, 60 + 15, 60 + 93 / TICKS)
    assert read_usage(11, tmp_path) is None


def test_on_this_machine() -> None:
    first = read_usage(os.getpid())
    sum(range(5_000_000))
    second = read_usage(os.getpid())
    assert first is not None and second is not None and second.cpu_s > first.cpu_s
