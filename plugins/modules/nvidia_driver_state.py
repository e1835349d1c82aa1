#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: gather the state of the NVIDIA driver on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver_state
short_description: Gather the state of the NVIDIA driver
version_added: "0.1.0"
description:
  - Gathers the driver's packages and the source that they were installed from, the loaded kernel module and its signer,
    the state of Secure Boot, the modules of the installed kernels, what C(nvidia-smi) reports, and the boot id.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.root
options:
  lead_package:
    description: Package whose version is the version of the driver.
    type: str
    required: true
  packages:
    description: All packages that make up the driver.
    type: list
    elements: str
    default: []
  source:
    description: Source that the packages should come from.
    type: str
    required: true
    choices:
      distribution: The archive of the distribution.
      nvidia: NVIDIA's apt repository.
  archive:
    description: Signer of the distribution's archive (C(Origin) of its index).
    type: str
    default: ''
  repository:
    description: Address of NVIDIA's repository.
    type: str
    default: ''
  branch:
    description: Driver branch that the host should have, for example V(580).
    type: str
    required: true
  prebuilt:
    description: Prefix of the names of packages with prebuilt kernel modules. Empty if DKMS builds the modules.
    type: str
    default: ''
  mark:
    description: File that exists if vllm-edge installed the driver. It names the source.
    type: path
    required: true
  headers:
    description: Kernel header packages that DKMS needs. If the list is empty, the module determines them.
    type: list
    elements: str
  metapackages:
    description: Kernel metapackages, each with the metapackage of its headers.
    type: dict
    default: {}
seealso:
  - module: edge.vllm_edge.host_doctor
    description: Check the driver and everything else that serving needs.
"""

EXAMPLES = r"""
- name: Gather the state of the driver
  edge.vllm_edge.nvidia_driver_state:
    lead_package: nvidia-driver-cuda
    source: nvidia
    branch: "580"
    repository: https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/
    mark: /etc/apt/apt.conf.d/52vllm-edge-nvidia-driver
"""

RETURN = r"""
packages:
  description: Installed packages that belong to a driver or a kernel, by name, each with C(version) and C(held).
  returned: success
  type: dict
unconfigured:
  description: Packages that dpkg left half installed.
  returned: success
  type: list
  elements: str
version:
  description: Version of the lead package. Empty if it is not installed.
  returned: success
  type: str
installed:
  description: The same. If the lead package is not installed, the version of another installed driver package.
  returned: success
  type: str
driver_packages:
  description: Installed packages of that version.
  returned: success
  type: list
  elements: str
unheld:
  description: >-
    Packages that should be held but are not. These are the packages of the driver and, if modules are prebuilt, the
    packages with modules and the kernel's metapackages.
  returned: success
  type: list
  elements: str
held:
  description: Packages of any driver that are held, and held packages with prebuilt modules and kernel metapackages.
  returned: success
  type: list
  elements: str
of_the_driver:
  description: Installed packages of any driver.
  returned: success
  type: list
  elements: str
other_branch:
  description: Installed packages with another branch in their names. Packages of O(branch) do not replace these.
  returned: success
  type: list
  elements: str
recorded:
  description: Source that vllm-edge installed the driver from. Empty if vllm-edge did not install it.
  returned: success
  type: str
foreign:
  description: Driver packages whose version is offered by other sources but not by O(source), each with these sources.
  returned: success
  type: dict
unknown:
  description: Driver packages whose version is not offered by any configured source.
  returned: success
  type: list
  elements: str
fitting:
  description: Value of O(source) that matches the installed packages, if RV(foreign) is not empty and there is one.
  returned: success
  type: str
installer:
  description: Path of a trace of a driver that was installed without packages. Empty if there is none.
  returned: success
  type: str
module_version:
  description: Version of the loaded kernel module. Empty if none is loaded.
  returned: success
  type: str
uvm:
  description: Whether the kernel module C(nvidia-uvm) is loaded, which CUDA needs and NVML does not.
  returned: success
  type: bool
signer:
  description: Signer of the installed kernel module. Empty if it is not signed or not installed.
  returned: success
  type: str
secure_boot:
  description: Whether Secure Boot is enabled.
  returned: success
  type: bool
key_enrolled:
  description: Whether the key that DKMS signs modules with is enrolled in the firmware's list of machine owner keys.
  returned: success
  type: bool
nouveau:
  description: Whether the nouveau driver holds the GPUs.
  returned: success
  type: bool
kernel:
  description: Release of the running kernel.
  returned: success
  type: str
bare_kernels:
  description: Bootable kernels without a driver module, from the running kernel to the newest.
  returned: success
  type: list
  elements: str
next_kernel:
  description: Release of the newest bootable kernel, which the next boot starts.
  returned: success
  type: str
modules_on_disk:
  description: >-
    Version of the module that is installed for each kernel from the running one to the newest. Kernels without a module
    are left out.
  returned: success
  type: dict
headers:
  description: Whether the headers of the running kernel are installed, so that modules can be built.
  returned: success
  type: bool
headers_to_install:
  description: Header packages that are needed and not installed, and that apt can install.
  returned: success
  type: list
  elements: str
modules_to_install:
  description: Packages with prebuilt modules that are needed and not installed, and that apt can install.
  returned: success
  type: list
  elements: str
candidate:
  description: Version of O(lead_package) that apt would install. Empty if apt does not know the package.
  returned: success
  type: str
module_releases:
  description: >-
    Driver release that each package with prebuilt modules is built for. These are the installed ones and those that the
    kernels need, each in the version that apt would install.
  returned: success
  type: dict
next_modules:
  description: >-
    Packages that bring the newest kernel its prebuilt module. These are those of the kernel's flavours, or the one of
    RV(next_kernel) if no kernel metapackage is installed.
  returned: success
  type: list
  elements: str
offered_kernel:
  description: Release of the newest kernel that apt has prebuilt modules for, by the packages of the flavours.
  returned: success
  type: str
kernel_updates:
  description: Installed kernel metapackages of which apt has another version, if modules are prebuilt.
  returned: success
  type: list
  elements: str
module_updates:
  description: Installed packages with prebuilt modules of which apt has another version, built for RV(candidate).
  returned: success
  type: list
  elements: str
outdated_modules:
  description: Installed packages with prebuilt modules of one kernel, which apt does not have for RV(candidate).
  returned: success
  type: list
  elements: str
unit_enabled:
  description: Whether the persistence daemon is enabled at boot.
  returned: success
  type: bool
persistence:
  description: Whether the persistence daemon is enabled and running.
  returned: success
  type: bool
boot_id:
  description: Id of the current boot.
  returned: success
  type: str
gpus:
  description: UUIDs of the GPUs that C(nvidia-smi) reports.
  returned: success
  type: list
  elements: str
volatile_gpus:
  description: UUIDs of GPUs with persistence mode disabled. They lose their state when no process uses them.
  returned: success
  type: list
  elements: str
nvml_error:
  description: What C(nvidia-smi) printed instead of GPUs. Empty if it reported them.
  returned: success
  type: str
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.facts import dpkg as packaging
from ..module_utils.vllm_edge.facts.driver import DriverReader, Kernel, switch
from ..module_utils.vllm_edge.system.host import Unread

SOURCE = re.compile(r"^// Source: (\w+)", re.MULTILINE)
"""A line of our apt configuration. Files without it were written when only NVIDIA's repository was supported."""
# The certificate that DKMS signs with, on Debian and on Ubuntu, and the list of certificates that shim trusts.
KEYS = ("var/lib/dkms/mok.pub", "var/lib/shim-signed/mok/MOK.der")
TRUSTED = ("sys/firmware/efi/efivars/MokListRT*", "sys/firmware/efi/mok-variables/MokListRT*")


def from_elsewhere(
    offered: Mapping[str, Sequence[str]], home: Mapping[str, bool]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return packages whose version is offered by other sources only, and packages whose version no source offers."""
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
    """Return which addresses belong to a source: NVIDIA's by the address, the distribution's by the signer."""
    home = re.sub(r"^file:/+", "file:/", repository).rstrip("/")
    if source == "nvidia":
        return {uri: bool(home) and uri.rstrip("/").startswith(home) for uri in uris}
    return {uri: archive in owners.get(uri, set()) for uri in uris}


def wanted_headers(
    given: list[str], built: bool, release: str, packages: Mapping[str, Any], metapackages: Mapping[str, str]
) -> list[str]:
    """Return the header packages that DKMS needs.

    These are the package for the running kernel, unless its headers are installed in some way, and the headers
    metapackage for each installed kernel metapackage. Without the latter DKMS could not build a module for the next
    kernel.
    """
    if given:
        return given
    running = [] if built else [f"linux-headers-{release}"]
    return running + sorted(headers for kernel, headers in metapackages.items() if kernel in packages)


def not_older(kernels: Sequence[Kernel], running: str) -> list[Kernel]:
    """Return the kernels from the running one to the newest. A host is not expected to boot an older one."""
    releases = [kernel.release for kernel in kernels]
    return list(kernels[releases.index(running) :]) if running in releases else list(kernels)


def list_kernel_packages(packages: packaging.Packages) -> list[str]:
    """Return the packages with prebuilt modules and, if there are any, the kernel's metapackages.

    Without a hold on these, a newer kernel could be installed without a module.
    """
    built = [name for name in packages if packaging.PREBUILT.fullmatch(name)]
    return [*built, *(packaging.find_kernel_flavours(packages) if built else ())]


def key_enrolled(root: Path) -> bool:
    """Whether the certificate that DKMS signs with is in the list of certificates that shim trusts."""
    trusted = b"".join(read_bytes(path) for pattern in TRUSTED for path in sorted(root.glob(pattern)))
    return any(key and key in trusted for key in map(read_bytes, (root / path for path in KEYS)))


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class DriverFactsCollector:
    """Collects the driver facts of a host. Shares its readers with the doctor."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.reader = DriverReader(Path(module.params["root"]))
        self.driver = self.reader.driver({})
        self.kernels = not_older(self.driver.kernels, self.driver.running_kernel)
        query = ["dpkg-query", "-W", "-f", packaging.FORMAT, *packaging.PATTERNS]
        code, out, err = module.run_command(query, environ_update={"LC_ALL": "C"})
        # Exit status 1 means that a pattern matches no package, which is usual.
        if code not in (0, 1):
            module.fail_json(msg=f"dpkg-query failed: {err.strip()}")
        self.packages, self.half_installed = packaging.parse_packages(out)

    def ask(self, *command: str) -> str:
        return str(self.module.run_command(list(command), environ_update={"LC_ALL": "C"})[1])

    def known_to_apt(self, names: list[str]) -> list[str]:
        known = packaging.parse_madison(self.ask("apt-cache", "madison", *names)) if names else {}
        return [name for name in names if name in known]

    def collect_origins(self) -> dict[str, Any]:
        """Return where the installed packages came from. If vllm-edge installed them, that is recorded."""
        mark = self.reader.text(self.params["mark"])
        if not isinstance(mark, Unread):
            found = SOURCE.search(mark)
            return {"recorded": found[1] if found else "nvidia", "foreign": {}, "unknown": [], "fitting": ""}
        # Helpers such as nvidia-installer-cleanup have dates as versions and may come from the distribution.
        names = packaging.versioned(self.packages)
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

    def collect_packages(self) -> dict[str, Any]:
        """Return which packages are installed, in which versions, and which of them are (or should be) held."""
        packages, prebuilt = self.packages, self.params["prebuilt"]
        lead = packages.get(self.params["lead_package"])
        version = packaging.parse_upstream_version(lead["version"]) if lead else ""
        ours = packaging.driver_packages(packages, version) if lead else []
        others = (packaging.parse_upstream_version(packages[name]["version"]) for name in packaging.versioned(packages))
        drivers = sorted(name for name in packages if packaging.is_driver(name))
        kernel = list_kernel_packages(packages)
        hold = {*ours, *self.params["packages"], *(kernel if prebuilt else ())} if lead else set()
        return {
            "packages": packages,
            "unconfigured": self.half_installed,
            "version": version,
            "installed": version or next(others, ""),
            "driver_packages": ours,
            "unheld": sorted(name for name in hold & packages.keys() if not packages[name]["held"]),
            "held": sorted({name for name in (*drivers, *kernel) if packages[name]["held"]}),
            "of_the_driver": drivers,
            "other_branch": packaging.find_other_branches(drivers, self.params["branch"]),
        }

    def collect_kernel_needs(self) -> dict[str, Any]:
        """Return which packages the kernels need for a module, and whether apt can install them."""
        running, prebuilt = self.driver.running_kernel, self.params["prebuilt"]
        built = self.reader.at(f"lib/modules/{running}/build/Makefile").exists()
        modules: list[str] = []
        headers: list[str] = []
        if prebuilt:
            releases = [running, *(kernel.release for kernel in self.kernels)]
            modules = packaging.list_wanted_modules(prebuilt, self.packages, releases)
        else:
            given, metapackages = self.params["headers"] or [], self.params["metapackages"]
            headers = wanted_headers(given, built, running, self.packages, metapackages)
        on_disk = {name: self.reader.module_on_disk(name) for name in [running, *(k.release for k in self.kernels)]}
        return {
            **self.reader.offers(self.params["lead_package"], prebuilt, self.packages, modules),
            "kernel": running,
            "next_kernel": self.kernels[-1].release if self.kernels else running,
            "modules_on_disk": {name: version for name, version in on_disk.items() if version},
            "bare_kernels": [kernel.release for kernel in self.kernels if not kernel.has_module],
            "headers": built,
            "headers_to_install": self.known_to_apt([name for name in headers if name not in self.packages]),
            "modules_to_install": self.known_to_apt([name for name in modules if name not in self.packages]),
        }

    def collect_runtime(self) -> dict[str, Any]:
        """Return what the kernel, the firmware, systemd and NVML say."""
        driver, unit = self.driver, self.driver.persistence
        enabled = not isinstance(unit, Unread) and unit.file_state.startswith("enabled")
        rows, said = self.reader.smi(("uuid", "persistence_mode"))
        return {
            "installer": f"/{driver.installer.lstrip('/')}" if driver.installer else "",
            "module_version": driver.versions.module,
            "uvm": driver.uvm,
            "signer": driver.signer if isinstance(driver.signer, str) else "",
            "secure_boot": driver.secure_boot is True,
            "key_enrolled": key_enrolled(self.reader.root),
            "nouveau": driver.nouveau,
            "unit_enabled": enabled,
            "persistence": enabled and not isinstance(unit, Unread) and unit.active_state == "active",
            "boot_id": self.reader.plain("proc/sys/kernel/random/boot_id"),
            "gpus": [row[0] for row in rows],
            "volatile_gpus": [row[0] for row in rows if switch(row[1]) is False],
            "nvml_error": said if said or rows else "nvidia-smi named no GPU",
        }

    def collect(self) -> dict[str, Any]:
        return {
            **self.collect_packages(),
            **self.collect_origins(),
            **self.collect_kernel_needs(),
            **self.collect_runtime(),
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
    module.exit_json(changed=False, **DriverFactsCollector(module).collect())


if __name__ == "__main__":
    main()
