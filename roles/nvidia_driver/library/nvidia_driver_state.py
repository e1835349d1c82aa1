#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a host has of an NVIDIA driver, in one look that changes nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver_state
short_description: Looks at the NVIDIA driver of a host
description:
  - Packages, the loaded kernel module, what NVML answers, the kernel's headers and the boot id. Reads only.
attributes:
  check_mode: {support: full, description: Reads only.}
options:
  lead_package: {description: Package whose version is the driver's version., type: str, required: true}
  repository: {description: Address of the vendor's repository., type: str, required: true}
  mark: {description: File that says that the driver was installed by us., type: path, required: true}
  headers: {description: Kernel header packages that are wanted; empty lets us choose., type: list, elements: str}
  metapackages: {description: Metapackages of kernels to those of their headers., type: dict, default: {}}
  unit: {description: systemd unit of the persistence daemon., type: str, default: nvidia-persistenced.service}
  root: {description: Directory that holds C(sys), C(proc), C(lib); not V(/) only in tests., type: path, default: /}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Look at the driver
  nvidia_driver_state:
    lead_package: nvidia-driver-cuda
    repository: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/
    mark: /etc/apt/apt.conf.d/52vllm-edge-nvidia-driver
"""

RETURN = r"""
packages:
  description: Installed packages around the driver and the kernel; name to version and held.
  returned: success
  type: dict
unconfigured: {description: Packages that dpkg left half installed., returned: success, type: list, elements: str}
version: {description: Version of the driver in user space; empty without one., returned: success, type: str}
driver_packages: {description: Installed packages of that version., returned: success, type: list, elements: str}
unheld: {description: Those of them that apt may still replace., returned: success, type: list, elements: str}
foreign:
  description: Driver packages whose version other sources offer and the repository does not; name to sources.
  returned: success
  type: dict
unknown:
  description: Driver packages whose version no configured source offers.
  returned: success
  type: list
  elements: str
installer: {description: Trace of a driver installed without packages; empty without one., returned: success, type: str}
module_version:
  description: Version of the loaded kernel module; empty where none is loaded.
  returned: success
  type: str
nouveau: {description: Whether nouveau holds the GPUs., returned: success, type: bool}
kernel: {description: Release of the running kernel., returned: success, type: str}
headers: {description: Whether modules can be built for the running kernel., returned: success, type: bool}
headers_to_install:
  description: Header packages that are wanted, not installed and known to apt.
  returned: success
  type: list
  elements: str
persistence: {description: Whether the persistence daemon is enabled and runs., returned: success, type: bool}
boot_id: {description: Identity of this boot., returned: success, type: str}
gpus: {description: UUIDs of the GPUs that NVML names., returned: success, type: list, elements: str}
nvml_error: {description: What NVML said instead; empty where it answered., returned: success, type: str}
"""

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_edge.driver_packages import (
    FORMAT,
    INSTALLERS,
    PATTERNS,
    driver_packages,
    is_driver,
    is_versioned,
    parse_packages,
    parse_policy,
    upstream,
)


def from_elsewhere(offered: dict[str, list[str]], repository: str) -> tuple[dict[str, list[str]], list[str]]:
    """Packages whose version other sources offer and the repository does not; and those that nobody offers."""
    home = re.sub(r"^file:/+", "file:/", repository).rstrip("/")
    foreign, unknown = {}, []
    for name, sources in sorted(offered.items()):
        if any(source.rstrip("/").startswith(home) for source in sources):
            continue
        if sources:
            foreign[name] = sources
        else:
            unknown.append(name)
    return foreign, unknown


def parse_smi(code: int, out: str, err: str) -> tuple[list[str], str]:
    """UUIDs of the GPUs, or what nvidia-smi said instead."""
    uuids = [line.strip() for line in out.splitlines() if line.strip().startswith("GPU-")]
    if code == 0 and uuids:
        return uuids, ""
    said = " ".join((out.strip() + " " + err.strip()).split())
    return uuids, said or f"nvidia-smi ended with {code} and said nothing"


def wanted_headers(
    given: list[str], built: bool, release: str, packages: dict[str, Any], metapackages: dict[str, str]
) -> list[str]:
    """Header packages that DKMS needs.

    Those of the running kernel, unless they are there, from a package or not. And the metapackage beside each installed
    kernel metapackage: without it the next kernel starts without a driver, because DKMS had nothing to build against.
    """
    if given:
        return given
    running = [] if built else [f"linux-headers-{release}"]
    return running + sorted(headers for kernel, headers in metapackages.items() if kernel in packages)


def parse_madison(text: str) -> set[str]:
    """Packages that apt can install, from lines such as "linux-headers-amd64 | 6.12.48-1 | http://..."."""
    return {line.split("|")[0].strip() for line in text.splitlines() if "|" in line}


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def look(module: AnsibleModule) -> dict[str, Any]:
    root: str = module.params["root"]

    def at(path: str) -> str:
        return os.path.join(root, path.lstrip("/"))

    plain = {"LC_ALL": "C"}
    code, out, err = module.run_command(["dpkg-query", "-W", "-f", FORMAT, *PATTERNS], environ_update=plain)
    # 1 says that one of the patterns names nothing, which is usual.
    if code not in (0, 1):
        module.fail_json(msg=f"dpkg-query failed: {err.strip()}")
    packages, half = parse_packages(out)
    lead = packages.get(module.params["lead_package"])
    version = upstream(lead["version"]) if lead else ""
    ours = driver_packages(packages, version) if lead else []

    foreign: dict[str, list[str]] = {}
    unknown: list[str] = []
    # Helpers such as nvidia-installer-cleanup have dates for versions and may come from the distribution.
    candidates = sorted(name for name in packages if is_driver(name) and is_versioned(packages[name]["version"]))
    if candidates and not os.path.exists(at(module.params["mark"])):
        _, out, _ = module.run_command(["apt-cache", "policy", *candidates], environ_update=plain, check_rc=True)
        foreign, unknown = from_elsewhere(parse_policy(out), module.params["repository"])

    release = read(at("/proc/sys/kernel/osrelease"))
    headers = os.path.exists(at(f"/lib/modules/{release}/build/Makefile"))
    metapackages = module.params["metapackages"]
    wanted = wanted_headers(module.params["headers"] or [], headers, release, packages, metapackages)
    missing = [name for name in wanted if name not in packages]
    if missing:
        _, out, _ = module.run_command(["apt-cache", "madison", *missing], environ_update=plain)
        known = parse_madison(out)
        missing = [name for name in missing if name in known]

    unit = ["systemctl", "show", "--property=UnitFileState,ActiveState", module.params["unit"]]
    _, out, _ = module.run_command(unit, environ_update=plain)
    persistence = {"UnitFileState=enabled", "ActiveState=active"} <= set(out.split())

    gpus: list[str] = []
    nvml_error = "nvidia-smi is not installed"
    smi = module.get_bin_path("nvidia-smi")
    if smi:
        query = ["timeout", "60", smi, "--query-gpu=uuid", "--format=csv,noheader"]
        code, out, err = module.run_command(query, environ_update=plain)
        gpus, nvml_error = parse_smi(code, out, err)
    return {
        "packages": packages,
        "unconfigured": half,
        "version": version,
        "driver_packages": ours,
        "unheld": [name for name in ours if not packages[name]["held"]],
        "foreign": foreign,
        "unknown": unknown,
        "installer": next((path for path in INSTALLERS if os.path.exists(at(path))), ""),
        "module_version": read(at("/sys/module/nvidia/version")),
        "nouveau": os.path.isdir(at("/sys/module/nouveau")),
        "kernel": release,
        "headers": headers,
        "headers_to_install": missing,
        "persistence": persistence,
        "boot_id": read(at("/proc/sys/kernel/random/boot_id")),
        "gpus": gpus,
        "nvml_error": nvml_error,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lead_package": {"type": "str", "required": True},
            "repository": {"type": "str", "required": True},
            "mark": {"type": "path", "required": True},
            "headers": {"type": "list", "elements": "str"},
            "metapackages": {"type": "dict", "default": {}},
            "unit": {"type": "str", "default": "nvidia-persistenced.service"},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **look(module))


if __name__ == "__main__":
    main()
