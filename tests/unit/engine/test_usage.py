# SPDX-License-Identifier: Apache-2.0
"""What a container's processes use, on made-up trees of control groups. Nothing of /proc, which may hide them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.usage import Usage, read_usage
from fake_host import write

ID = "c0" * 32
SCOPE = f"system.slice/docker-{ID}.scope"
OTHER = f"system.slice/docker-{'c1' * 32}.scope/io.stat"
V2 = {
    "cgroup.controllers": "cpu io memory\n",
    OTHER: "259:0 rbytes=7\n",
    f"{SCOPE}/io.stat": "259:0 rbytes=4096 wbytes=9\n8:0 rbytes=1000 wbytes=0 rios=3\n",
    f"{SCOPE}/memory.stat": "anon 9\npgfault 70\npgmajfault 60\n",
    f"{SCOPE}/cpu.stat": "usage_usec 1500000\nuser_usec 1000000\n",
}
V1 = {
    f"blkio/docker/{ID}/blkio.throttle.io_service_bytes_recursive": "8:0 Read 5096\n8:0 Write 9\nTotal 5105\n",
    f"memory/docker/{ID}/memory.stat": "pgmajfault 2\ntotal_pgmajfault 60\n",
    f"cpuacct/docker/{ID}/cpuacct.usage": "1500000000\n",
}


@pytest.mark.parametrize("tree", [V2, V1], ids=["version 2", "version 1"])
def test_the_control_group_of_the_container_counts(tmp_path: Path, tree: dict[str, str]) -> None:
    for path, text in tree.items():
        write(tmp_path / "sys/fs/cgroup" / path, text)
    assert read_usage(ID, tmp_path) == Usage(5096, 60, 1.5)
    assert read_usage("c2" * 32, tmp_path) is None
    (tmp_path / "sys/fs/cgroup" / list(tree)[-1]).unlink()
    assert read_usage(ID, tmp_path) is None, "one that is not counted is not nothing"
