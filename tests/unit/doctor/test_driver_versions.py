# SPDX-License-Identifier: Apache-2.0
"""Module, libraries and CDI specifications: which versions they are of, and which of them cannot work together."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.gpu.driver import (
    LIBRARIES,
    DriverVersions,
    explain_mismatch,
    read_versions,
)
from ansible.module_utils.vllm_edge.system import cdi
from doctor_host import DRIVER, GPUS, FakeHost, specification

BOTH = dict.fromkeys(LIBRARIES, DRIVER)
GENERATED, STATIC = "/var/run/cdi/nvidia.yaml", "/etc/cdi/nvidia.yaml"


def test_libraries_behind_alternatives_with_absolute_links(tmp_path: Path) -> None:
    """As Debian's archive lays them out."""
    host = FakeHost(tmp_path)
    host.write("usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.550.163.01")
    host.link("usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1", "libnvidia-ml.so.550.163.01")
    host.link(
        "etc/alternatives/nvidia--libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1"
    )
    host.link("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "/etc/alternatives/nvidia--libnvidia-ml.so.1")
    assert read_versions(tmp_path).libraries == {"libnvidia-ml.so.1": "550.163.01"}
    # In a circle, and into nothing.
    host.link("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "libnvidia-ml.so.1")
    host.link("usr/lib/x86_64-linux-gnu/libcuda.so.1", "../../../gone")
    assert read_versions(tmp_path).libraries == {}


@pytest.mark.parametrize(
    ("found", "told", "heals"),
    [
        # A specification that names no library says nothing.
        (DriverVersions(DRIVER, BOTH, {GENERATED: ()}), "", None),
        (DriverVersions("", BOTH, {GENERATED: ("570.1",)}), "", None),
        (DriverVersions(DRIVER, {}, {}), "", None),
        (DriverVersions("570.1", BOTH), f"kernel module is 570.1 and libcuda.so.1 is {DRIVER}", False),
        (DriverVersions(DRIVER, BOTH | {"libcuda.so.1": "570.1"}), "libcuda.so.1 is 570.1", False),
        (DriverVersions(DRIVER, BOTH, {GENERATED: ("570.1",)}), f"{GENERATED} mounts 570.1", True),
        # What was made at boot counts; the old one beside it is the doctor's matter.
        (DriverVersions(DRIVER, BOTH, {GENERATED: (DRIVER,), STATIC: ("570.1",)}), "", None),
        (DriverVersions(DRIVER, BOTH, {GENERATED: ("570.1",), STATIC: (DRIVER,)}), f"{GENERATED} mounts 570.1", True),
        (DriverVersions(DRIVER, BOTH, {STATIC: ("570.1",)}), f"{STATIC} mounts 570.1", True),
        # Module and libraries first: to make the specification anew would not help.
        (DriverVersions("570.1", BOTH, {GENERATED: (DRIVER,)}), "not rebooted", False),
    ],
)
def test_what_cannot_work_together(found: DriverVersions, told: str, heals: bool | None) -> None:
    mismatch = explain_mismatch(found)
    assert (mismatch.heals if mismatch else None) is heals
    assert told in str(mismatch)
    if mismatch:
        assert str(mismatch).endswith(".") and mismatch.remedy in str(mismatch)


def test_a_specification_that_may_not_be_read_is_not_known(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: str) -> dict[str, str]:
        raise PermissionError(13, "Permission denied", directory)

    monkeypatch.setattr(cdi, "gpu_specs", refuse)
    host.module("570.1")
    assert read_versions(host.root).specifications == {}


INDENTED = f"""---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
    - name: "0"
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
    - name: {GPUS[0]}
      containerEdits:
        hooks:
            - hookName: createContainer
containerEdits:
    env:
        - name: no-device
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (INDENTED, ["0", GPUS[0]]),
        (specification("0", *GPUS, "all"), ["0", *GPUS, "all"]),
        ('{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}, {"name": "all"}]}', ["0", "all"]),
        ("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n", []),
        ("kind: nvidia.com/gpu\n", []),
        ("{", []),
    ],
)
def test_devices_that_a_specification_defines(text: str, names: list[str]) -> None:
    assert cdi.parse_device_names(text) == names
