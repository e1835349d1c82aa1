# SPDX-License-Identifier: Apache-2.0
"""A healthy host, for tests to break."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, DRIVER, DROP_IN, GPUS, KERNEL, LOADED, FakeHost, card, specification


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """Two GPUs and one engine that serves; every check is ok."""
    found = FakeHost(tmp_path / "host")
    found.write("etc/os-release", 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\n')
    found.write("proc/sys/kernel/osrelease", f"{KERNEL}\n")
    found.write("proc/locks", "")
    found.write("proc/meminfo", "MemTotal:       131072000 kB\n")
    found.write("proc/mounts", "tmpfs /dev/shm tmpfs rw 0 0\n")
    found.write("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    for directory in ("dev/shm", "var/lib/dpkg/updates", "var/lib/vllm-edge", "etc/vllm-edge/engines"):
        (found.root / directory).mkdir(parents=True)
    for lock in ("var/lib/dpkg/lock-frontend", "var/lib/apt/lists/lock"):
        found.write(lock)
    found.kernel("6.2.1-amd64", module=False)
    found.kernel(KERNEL)
    found.module(DRIVER)
    for node in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        found.write(f"dev/{node}").chmod(0o660)
    found.write("sys/module/nvidia_uvm/refcnt", "0\n")
    found.library(DRIVER)
    for uuid, bus in zip(GPUS, BUSES, strict=True):
        found.bus(bus)
        found.gpus.append(card(uuid, bus))
    found.write("etc/docker/daemon.json", '{"features": {"cdi": true}}')
    found.write("var/run/cdi/nvidia.yaml", specification("0", "1", *GPUS, "all"))
    found.write("etc/systemd/system/nvidia-cdi-refresh.service", "ExecStart=/usr/bin/nvidia-ctk cdi generate\n")
    found.write(DROP_IN, "ExecStartPre=-/usr/bin/nvidia-ctk system create-device-nodes --control-devices\n")
    for unit in ("docker.service", "nvidia-persistenced.service", "nvidia-cdi-refresh.path", "vllm-edge.target"):
        found.unit(unit)
    found.answers = {
        "timedatectl": Ran(0, "yes\n"),
        "modinfo": Ran(0, "Example key\n"),
        "runc --version": Ran(0, "runc version 1.1.15+ds1\ncommit: 1.1.15+ds1-2\nspec: 1.2.0\ngo: go1.24.4\n"),
        "dockerd --version": Ran(0, "Docker version 28.1.1, build 01f442b\n"),
        "nvidia-smi --query-compute-apps": Ran(0, ""),
        "nvidia-smi topo": Ran(0, " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n  X    = Self\n"),
        "journalctl --dmesg": Ran(0, LOADED),
    }
    found.image(cuda="13.0.2", driver_branch="580")
    found.gateway()
    found.metrics()
    found.engine()
    found.container("vllm-e2b", 4001)
    found.container("trainer", 4002)
    return found
