#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a host has of Docker, the container toolkit and CDI, in one look that changes nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_runtime_state
short_description: Looks at Docker, the container toolkit and CDI
description:
  - Versions, packages, units, CDI devices and the GPUs that they should name. Reads only.
attributes:
  check_mode: {support: full, description: Reads only.}
options:
  packages: {description: Packages to look for., type: list, elements: str, required: true}
  units: {description: systemd units to look at., type: list, elements: str, default: []}
  root: {description: Directory that holds CDI's specifications; not V(/) only in tests., type: path, default: /}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Look at the container runtime
  container_runtime_state:
    packages: [docker.io, nvidia-container-toolkit]
    units: [nvidia-cdi-refresh.path]
"""

RETURN = r"""
docker_version: {description: Version of the Docker Engine; empty without one., returned: success, type: str}
docker_major: {description: Its first number; 0 without one., returned: success, type: int}
packages: {description: Installed ones of the packages; name to version and held., returned: success, type: dict}
units: {description: Unit to enabled and active., returned: success, type: dict}
cdi_devices: {description: CDI devices that nvidia-ctk lists., returned: success, type: list, elements: str}
gpus: {description: UUIDs of the GPUs that NVML names., returned: success, type: list, elements: str}
nvml_error: {description: What NVML said instead; empty where it answered., returned: success, type: str}
cdi_missing: {description: GPUs whose UUID no CDI device has., returned: success, type: list, elements: str}
cdi_gone: {description: UUIDs in CDI devices that no GPU has., returned: success, type: list, elements: str}
cdi_static: {description: Specifications of NVIDIA's GPUs below /etc/cdi., returned: success, type: list, elements: str}
cdi_driver:
  description: Driver versions that the generated specification mounts.
  returned: success
  type: list
  elements: str
driver: {description: Version of the driver as NVML names it., returned: success, type: str}
toolkit_known_bad: {description: Releases of the toolkit that do not work and why., returned: success, type: dict}
cdi_stale:
  description: Why the generated specification does not fit the host; empty where it does.
  returned: success
  type: str
"""

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.toolkit import KNOWN_BAD
from ..module_utils.vllm_edge.system.cdi import compare, driver_versions, gpu_specs
from ..module_utils.vllm_edge.system.dpkg import FORMAT, parse_packages


def parse_units(text: str) -> dict[str, dict[str, bool]]:
    """Whether units are enabled and active, from systemctl show; units that do not exist are left out."""
    found: dict[str, dict[str, bool]] = {}
    for block in text.strip().split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            found[fields["Id"]] = {
                "enabled": fields.get("UnitFileState") in ("enabled", "enabled-runtime", "static", "alias"),
                "active": fields.get("ActiveState") == "active",
            }
    return found


def parse_devices(text: str) -> list[str]:
    """CDI devices in what nvidia-ctk cdi list prints."""
    return sorted({word for word in text.split() if re.fullmatch(r"nvidia\.com/gpu=\S+", word)})


def parse_smi(code: int, out: str, err: str) -> tuple[list[str], str, str]:
    """UUIDs of the GPUs and the driver's version, or what nvidia-smi said instead."""
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.startswith("GPU-")]
    if code == 0 and rows:
        return [row[0] for row in rows], rows[0][1], ""
    said = " ".join((out.strip() + " " + err.strip()).split())
    return [], "", said or f"nvidia-smi ended with {code} and said nothing"


def explain(devices: list[str], missing: list[str], gone: list[str], versions: list[str], driver: str) -> str:
    """Why the specification has to be made again; empty where it fits."""
    if not devices:
        return "no CDI specification names a GPU"
    if missing:
        return f"it does not name {', '.join(missing)}"
    if gone:
        return f"it names {', '.join(gone)}, which the host does not have"
    if driver and versions and driver not in versions:
        return f"it was made for driver {', '.join(versions)}, the host has {driver}"
    return ""


def look(module: AnsibleModule) -> dict[str, Any]:
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

    units: dict[str, dict[str, bool]] = {}
    if module.params["units"]:
        show = ["systemctl", "show", "--property=Id,LoadState,UnitFileState,ActiveState", *module.params["units"]]
        _, out, _ = module.run_command(show, environ_update=plain)
        units = parse_units(out)

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
    return {
        "docker_version": version,
        "docker_major": int(version.split(".")[0]) if version else 0,
        "packages": packages,
        "units": units,
        "cdi_devices": devices,
        "gpus": gpus,
        "nvml_error": nvml_error,
        "driver": driver,
        "cdi_missing": missing,
        "cdi_gone": gone,
        "cdi_static": sorted(gpu_specs(os.path.join(root, "etc/cdi"))),
        "cdi_driver": versions,
        "toolkit_known_bad": dict(KNOWN_BAD),
        "cdi_stale": explain(devices, missing, gone, versions, driver),
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
    module.exit_json(changed=False, **look(module))


if __name__ == "__main__":
    main()
