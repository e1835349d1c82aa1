#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: gather the state of Docker, the NVIDIA container toolkit and CDI on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_runtime_state
short_description: Gather the state of Docker, the container toolkit and CDI
version_added: "0.1.0"
description:
  - Gathers versions, packages, systemd units and CDI devices, and compares the devices with the GPUs of the host.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.root
options:
  packages:
    description: Names of the packages to look for.
    type: list
    elements: str
    required: true
  units:
    description: Names of the systemd units to look for.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Gather the state of the container runtime
  edge.vllm_edge.container_runtime_state:
    packages: [docker.io, nvidia-container-toolkit]
    units: [nvidia-cdi-refresh.path]
"""

RETURN = r"""
docker_version:
  description: Version of the Docker Engine. Empty if it is not installed.
  returned: success
  type: str
docker_major:
  description: Major version of the Docker Engine. V(0) if it is not installed.
  returned: success
  type: int
packages:
  description: Those of O(packages) that are installed, by name, each with C(version) and C(held).
  returned: success
  type: dict
units:
  description: Those of O(units) that exist, by name, each with C(enabled) and C(active).
  returned: success
  type: dict
cdi_devices:
  description: CDI devices of GPUs that C(nvidia-ctk cdi list) prints.
  returned: success
  type: list
  elements: str
gpus:
  description: UUIDs of the GPUs that C(nvidia-smi) reports.
  returned: success
  type: list
  elements: str
nvml_error:
  description: What C(nvidia-smi) printed instead of GPUs. Empty if it reported them.
  returned: success
  type: str
cdi_missing:
  description: UUIDs of GPUs that no CDI device names.
  returned: success
  type: list
  elements: str
cdi_gone:
  description: UUIDs in CDI devices that do not belong to a GPU of the host.
  returned: success
  type: list
  elements: str
cdi_static:
  description: CDI specifications of NVIDIA GPUs below C(/etc/cdi).
  returned: success
  type: list
  elements: str
cdi_driver:
  description: Driver versions whose libraries the generated CDI specifications below C(/var/run/cdi) mount.
  returned: success
  type: list
  elements: str
driver:
  description: Version of the driver that C(nvidia-smi) reports.
  returned: success
  type: str
toolkit_known_bad:
  description: Releases of the container toolkit that do not work, each with the reason.
  returned: success
  type: dict
cdi_stale:
  description: Why the CDI specification does not match the host. Empty if it does.
  returned: success
  type: str
"""

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.toolkit import KNOWN_BAD
from ..module_utils.vllm_edge.system.cdi import UVM, compare, driver_versions, gpu_specs, lists_uvm
from ..module_utils.vllm_edge.system.dpkg import FORMAT, parse_packages
from ..module_utils.vllm_edge.system.host import run_in_english
from ..module_utils.vllm_edge.system.systemd import Systemd, SystemdError


def show_units(names: list[str]) -> dict[str, dict[str, bool]]:
    """Return which units are enabled and active. Units that do not exist are left out."""
    try:
        units = Systemd(run_in_english).show(names)
    except SystemdError:
        return {}
    return {
        name: {
            "enabled": unit.file_state in ("enabled", "enabled-runtime", "static", "alias"),
            "active": unit.active_state == "active",
        }
        for name, unit in units.items()
        if unit.load_state == "loaded"
    }


def parse_devices(text: str) -> list[str]:
    return sorted({word for word in text.split() if re.fullmatch(r"nvidia\.com/gpu=\S+", word)})


def parse_smi(code: int, out: str, err: str) -> tuple[list[str], str, str]:
    """Return the UUIDs of the GPUs, the driver's version, and what nvidia-smi printed instead of them."""
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.startswith("GPU-")]
    if code == 0 and rows:
        return [row[0] for row in rows], rows[0][1], ""
    said = " ".join((out.strip() + " " + err.strip()).split())
    return [], "", said or f"nvidia-smi ended with {code} and said nothing"


def explain(
    devices: list[str], missing: list[str], gone: list[str], versions: list[str], driver: str, cuda: str = ""
) -> str:
    """Return why the CDI specification has to be generated again. Empty if it matches the host."""
    if not devices:
        return "no CDI specification names a GPU"
    if missing:
        return f"it does not name {', '.join(missing)}"
    if gone:
        return f"it names {', '.join(gone)}, which the host does not have"
    if driver and versions and driver not in versions:
        return f"it was made for driver {', '.join(versions)}, the host has {driver}"
    return cuda and f"{cuda}, so that NVML works in containers and CUDA fails with error 999"


def gather(module: AnsibleModule) -> dict[str, Any]:
    plain = {"LC_ALL": "C"}
    root = module.params["root"]

    version = ""
    if dockerd := module.get_bin_path("dockerd"):
        _, out, _ = module.run_command([dockerd, "--version"], environ_update=plain)
        match = re.search(r"version (\d+(?:\.\d+)+)", out)
        version = match[1] if match else ""

    query = ["dpkg-query", "-W", "-f", FORMAT, *module.params["packages"]]
    code, out, err = module.run_command(query, environ_update=plain)
    if code not in (0, 1):
        module.fail_json(msg=f"dpkg-query failed: {err.strip()}")
    packages, _ = parse_packages(out)

    gpus: list[str] = []
    driver, nvml_error = "", "nvidia-smi is not installed"
    if smi := module.get_bin_path("nvidia-smi"):
        query = ["timeout", "60", smi, "--query-gpu=uuid,driver_version", "--format=csv,noheader"]
        gpus, driver, nvml_error = parse_smi(*module.run_command(query, environ_update=plain))

    devices: list[str] = []
    if ctk := module.get_bin_path("nvidia-ctk"):
        _, out, _ = module.run_command([ctk, "cdi", "list"], environ_update=plain)
        devices = parse_devices(out)
    missing, gone = compare(devices, gpus)
    generated = gpu_specs(os.path.join(root, "var/run/cdi"))
    versions = sorted({version for text in generated.values() for version in driver_versions(text)})
    blind = sorted(path for path, text in generated.items() if not lists_uvm(text))
    cuda = f"{', '.join(blind)} does not list {UVM}" if blind else ""
    if not os.path.exists(os.path.join(root, UVM.lstrip("/"))):
        cuda = f"there is no {UVM}"
    return {
        "docker_version": version,
        "docker_major": int(version.split(".")[0]) if version else 0,
        "packages": packages,
        "units": show_units(module.params["units"]),
        "cdi_devices": devices,
        "gpus": gpus,
        "nvml_error": nvml_error,
        "driver": driver,
        "cdi_missing": missing,
        "cdi_gone": gone,
        "cdi_static": sorted(gpu_specs(os.path.join(root, "etc/cdi"))),
        "cdi_driver": versions,
        "toolkit_known_bad": dict(KNOWN_BAD),
        "cdi_stale": explain(devices, missing, gone, versions, driver, cuda),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "units": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **gather(module))


if __name__ == "__main__":
    main()
