#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a host has of an NVIDIA driver, in one look that changes nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver_state
short_description: Looks at the NVIDIA driver of a host
description:
  - Packages and where they came from, the loaded kernel module and who signed it, Secure Boot, the modules of the
    installed kernels, what NVML answers, and the boot id. Reads only.
attributes:
  check_mode: {support: full, description: Reads only.}
options:
  lead_package: {description: Package whose version is the driver's version., type: str, required: true}
  packages: {description: All packages that make up the driver., type: list, elements: str, default: []}
  source:
    description: Where the packages are to come from.
    type: str
    required: true
    choices: [distribution, nvidia]
  archive: {description: Who signs the distribution's archive (C(Origin) of its index)., type: str, default: ''}
  repository: {description: Address of NVIDIA's repository., type: str, default: ''}
  branch: {description: Driver branch that is wanted., type: str, required: true}
  prebuilt: {description: How names of packages with prebuilt modules begin; empty for DKMS., type: str, default: ''}
  mark: {description: File that says that the driver was installed by us., type: path, required: true}
  headers: {description: Kernel header packages that are wanted; empty lets us choose., type: list, elements: str}
  metapackages: {description: Metapackages of kernels to those of their headers., type: dict, default: {}}
  root: {description: Directory that holds C(sys), C(proc), C(lib); not V(/) only in tests., type: path, default: /}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Look at the driver
  nvidia_driver_state:
    lead_package: nvidia-driver-cuda
    source: nvidia
    branch: "580"
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
installed:
  description: The same; where the lead package is absent, the version of what else there is of a driver.
  returned: success
  type: str
driver_packages: {description: Installed packages of that version., returned: success, type: list, elements: str}
unheld:
  description: >-
    Packages that apt may still replace. Those of the driver and, where modules are prebuilt, these and the kernel's
    metapackages.
  returned: success
  type: list
  elements: str
held:
  description: Packages of a driver that are held, and the kernel's metapackages where modules are prebuilt.
  returned: success
  type: list
  elements: str
of_the_driver: {description: Installed packages of any driver., returned: success, type: list, elements: str}
other_branch:
  description: Installed packages with another branch in their names, which the wanted branch does not replace.
  returned: success
  type: list
  elements: str
recorded: {description: Where we took the driver from; empty where we did not., returned: success, type: str}
foreign:
  description: Driver packages whose version other sources offer and the wanted one does not; name to sources.
  returned: success
  type: dict
unknown:
  description: Driver packages whose version no configured source offers.
  returned: success
  type: list
  elements: str
fitting:
  description: The source that the foreign packages came from, where it is one that can be asked for.
  returned: success
  type: str
installer: {description: Trace of a driver installed without packages; empty without one., returned: success, type: str}
module_version:
  description: Version of the loaded kernel module; empty where none is loaded.
  returned: success
  type: str
signer: {description: Who signed the module that is installed; empty without., returned: success, type: str}
secure_boot: {description: Whether Secure Boot is on., returned: success, type: bool}
key_enrolled: {description: Whether the firmware's list has the key of this host's DKMS., returned: success, type: bool}
nouveau: {description: Whether nouveau holds the GPUs., returned: success, type: bool}
kernel: {description: Release of the running kernel., returned: success, type: str}
bare_kernels:
  description: Kernels without a module that can be started, of those that are not older than the running one.
  returned: success
  type: list
  elements: str
headers: {description: Whether modules can be built for the running kernel., returned: success, type: bool}
headers_to_install:
  description: Header packages that are wanted, not installed and known to apt.
  returned: success
  type: list
  elements: str
modules_to_install:
  description: Packages of prebuilt modules that are wanted, not installed and known to apt.
  returned: success
  type: list
  elements: str
unit_enabled: {description: Whether the persistence daemon starts at boot., returned: success, type: bool}
persistence: {description: Whether that daemon is enabled and runs., returned: success, type: bool}
boot_id: {description: Identity of this boot., returned: success, type: str}
gpus: {description: UUIDs of the GPUs that NVML names., returned: success, type: list, elements: str}
volatile_gpus:
  description: Those of them that forget their state when nobody uses them, as persistence mode is off.
  returned: success
  type: list
  elements: str
nvml_error: {description: What NVML said instead; empty where it answered., returned: success, type: str}
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.driver_facts import DriverReader, Kernel, switch
from ..module_utils.vllm_edge.system import dpkg as packaging
from ..module_utils.vllm_edge.system.host import Unread

SOURCE = re.compile(r"^// Source: (\w+)", re.MULTILINE)
"""In our file of apt's configuration; one without the line is of a time when there was NVIDIA's repository alone."""
# The certificate that DKMS signs with on this host, in Debian and in Ubuntu, and what the firmware's shim trusts.
KEYS = ("var/lib/dkms/mok.pub", "var/lib/shim-signed/mok/MOK.der")
TRUSTED = ("sys/firmware/efi/efivars/MokListRT*", "sys/firmware/efi/mok-variables/MokListRT*")


def from_elsewhere(
    offered: Mapping[str, Sequence[str]], home: Mapping[str, bool]
) -> tuple[dict[str, list[str]], list[str]]:
    """Packages whose version other sources offer and the wanted one does not; and those that nobody offers."""
    foreign: dict[str, list[str]] = {}
    unknown = []
    for name, sources in sorted(offered.items()):
        if any(home[source] for source in sources):
            continue
        if sources:
            foreign[name] = list(sources)
        else:
            unknown.append(name)
    return foreign, unknown


def homes(
    source: str, uris: Sequence[str], repository: str, archive: str, owners: Mapping[str, set[str]]
) -> dict[str, bool]:
    """Whether each address belongs to a source: NVIDIA's by its address, the distribution's by who signs it."""
    home = re.sub(r"^file:/+", "file:/", repository).rstrip("/")
    if source == "nvidia":
        return {uri: bool(home) and uri.rstrip("/").startswith(home) for uri in uris}
    return {uri: archive in owners.get(uri, set()) for uri in uris}


def wanted_headers(
    given: list[str], built: bool, release: str, packages: Mapping[str, Any], metapackages: Mapping[str, str]
) -> list[str]:
    """Header packages that DKMS needs.

    Those of the running kernel, unless they are there, from a package or not. And the metapackage beside each installed
    kernel metapackage: without it the next kernel starts without a driver, because DKMS had nothing to build against.
    """
    if given:
        return given
    running = [] if built else [f"linux-headers-{release}"]
    return running + sorted(headers for kernel, headers in metapackages.items() if kernel in packages)


def not_older(kernels: Sequence[Kernel], running: str) -> list[Kernel]:
    """From the running kernel to the newest: a host is not started with an older one."""
    releases = [kernel.release for kernel in kernels]
    return list(kernels[releases.index(running) :]) if running in releases else list(kernels)


def parse_madison(text: str) -> set[str]:
    """Packages that apt can install, from lines such as "linux-headers-amd64 | 6.12.48-1 | http://..."."""
    return {line.split("|")[0].strip() for line in text.splitlines() if "|" in line}


def key_enrolled(root: Path) -> bool:
    """Whether a certificate of this host's DKMS stands in the list of those that the firmware's shim trusts."""
    trusted = b"".join(read_bytes(path) for pattern in TRUSTED for path in sorted(root.glob(pattern)))
    return any(key and key in trusted for key in map(read_bytes, (root / path for path in KEYS)))


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Look:
    """One look at a host. What the doctor reads too is read by its eyes."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.reader = DriverReader(Path(module.params["root"]))

    def ask(self, *command: str) -> str:
        return str(self.module.run_command(list(command), environ_update={"LC_ALL": "C"})[1])

    def known_to_apt(self, names: list[str]) -> list[str]:
        known = parse_madison(self.ask("apt-cache", "madison", *names)) if names else set()
        return [name for name in names if name in known]

    def origins(self, packages: packaging.Packages) -> dict[str, Any]:
        """Whether what is installed came from the wanted source; what we installed ourselves did."""
        mark = self.reader.text(self.params["mark"])
        if not isinstance(mark, Unread):
            found = SOURCE.search(mark)
            return {"recorded": found[1] if found else "nvidia", "foreign": {}, "unknown": [], "fitting": ""}
        # Helpers such as nvidia-installer-cleanup have dates for versions and may come from the distribution.
        names = packaging.versioned(packages)
        offered = packaging.parse_policy(self.ask("apt-cache", "policy", *names)) if names else {}
        uris = sorted({uri for found in offered.values() for uri in found})
        owners = packaging.parse_origins(self.ask("apt-cache", "policy")) if uris else {}
        foreign: dict[str, tuple[dict[str, list[str]], list[str]]] = {
            source: from_elsewhere(
                offered, homes(source, uris, self.params["repository"], self.params["archive"], owners)
            )
            for source in ("distribution", "nvidia")
        }
        wanted = self.params["source"]
        fitting = [source for source, found in foreign.items() if source != wanted and found == ({}, [])]
        return {
            "recorded": "",
            "foreign": foreign[wanted][0],
            "unknown": foreign[wanted][1],
            "fitting": fitting[0] if fitting and foreign[wanted][0] else "",
        }

    def look(self) -> dict[str, Any]:
        plain = {"LC_ALL": "C"}
        query = ["dpkg-query", "-W", "-f", packaging.FORMAT, *packaging.PATTERNS]
        code, out, err = self.module.run_command(query, environ_update=plain)
        # 1 says that one of the patterns names nothing, which is usual.
        if code not in (0, 1):
            self.module.fail_json(msg=f"dpkg-query failed: {err.strip()}")
        packages, half = packaging.parse_packages(out)
        lead = packages.get(self.params["lead_package"])
        version = packaging.upstream(lead["version"]) if lead else ""
        ours = packaging.driver_packages(packages, version) if lead else []
        others = packaging.versioned(packages)
        prebuilt = self.params["prebuilt"]

        driver = self.reader.driver({})
        kernels = not_older(driver.kernels, driver.running_kernel)
        headers = self.reader.at(f"lib/modules/{driver.running_kernel}/build/Makefile").exists()
        modules: list[str] = []
        wanted: list[str] = []
        if prebuilt:
            releases = [driver.running_kernel, *(kernel.release for kernel in kernels)]
            modules = packaging.wanted_modules(prebuilt, packages, releases)
        else:
            given, metapackages = self.params["headers"] or [], self.params["metapackages"]
            wanted = wanted_headers(given, headers, driver.running_kernel, packages, metapackages)

        drivers = [name for name in packages if packaging.is_driver(name)]
        built = [name for name in packages if packaging.PREBUILT.fullmatch(name)]
        # A newer kernel would start without a module.
        kernel = [*built, *(packaging.kernel_flavours(packages) if built else ())]
        hold = [name for name in (*ours, *self.params["packages"]) if name in packages] if lead else []
        if prebuilt and lead:
            hold += kernel

        unit = driver.persistence
        enabled = not isinstance(unit, Unread) and unit.file_state.startswith("enabled")
        rows, said = self.reader.smi(("uuid", "persistence_mode"))
        return {
            "packages": packages,
            "unconfigured": half,
            "version": version,
            "installed": version or next((packaging.upstream(packages[name]["version"]) for name in others), ""),
            "driver_packages": ours,
            "unheld": sorted({name for name in hold if not packages[name]["held"]}),
            "held": sorted({name for name in (*drivers, *kernel) if packages[name]["held"]}),
            "of_the_driver": sorted(drivers),
            "other_branch": packaging.other_branches(sorted(drivers), self.params["branch"]),
            **self.origins(packages),
            "installer": f"/{driver.installer.lstrip('/')}" if driver.installer else "",
            "module_version": driver.versions.module,
            "signer": driver.signer if isinstance(driver.signer, str) else "",
            "secure_boot": driver.secure_boot is True,
            "key_enrolled": key_enrolled(self.reader.root),
            "nouveau": driver.nouveau,
            "kernel": driver.running_kernel,
            "bare_kernels": [kernel.release for kernel in kernels if not kernel.has_module],
            "headers": headers,
            "headers_to_install": self.known_to_apt([name for name in wanted if name not in packages]),
            "modules_to_install": self.known_to_apt([name for name in modules if name not in packages]),
            "unit_enabled": enabled,
            "persistence": enabled and not isinstance(unit, Unread) and unit.active_state == "active",
            "boot_id": self.reader.plain("proc/sys/kernel/random/boot_id"),
            "gpus": [row[0] for row in rows],
            "volatile_gpus": [row[0] for row in rows if switch(row[1]) is False],
            "nvml_error": said if said or rows else "nvidia-smi named no GPU",
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lead_package": {"type": "str", "required": True},
            "packages": {"type": "list", "elements": "str", "default": []},
            "source": {"type": "str", "required": True, "choices": ["distribution", "nvidia"]},
            "archive": {"type": "str", "default": ""},
            "repository": {"type": "str", "default": ""},
            "branch": {"type": "str", "required": True},
            "prebuilt": {"type": "str", "default": ""},
            "mark": {"type": "path", "required": True},
            "headers": {"type": "list", "elements": "str"},
            "metapackages": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **Look(module).look())


if __name__ == "__main__":
    main()
