# SPDX-License-Identifier: Apache-2.0
"""The checks of the NVIDIA driver: packages, kernel modules, versions and Secure Boot."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...facts.dpkg import parse_upstream_version, versioned
from ...facts.model import Facts
from ...gpu.driver import explain_mismatch
from ...system.host import Unread
from ...system.systemd import Unit
from ..contract import HOST_STAGE, Verdict, decline_to_judge, fail, good, known, listed, numbers, warn

# Packages whose version is not that of the driver, because they serve several branches.
HELPERS = frozenset({"nvidia-persistenced", "nvidia-modprobe", "nvidia-settings", "nvidia-xconfig"})


def list_driver_packages(facts: Facts) -> list[str]:
    return [] if isinstance(facts.system.packages, Unread) else versioned(facts.system.packages)


def require_driver(facts: Facts) -> None:
    if not facts.driver.versions.library and not list_driver_packages(facts):
        decline_to_judge("no driver is installed")


def check_installed(facts: Facts) -> Verdict:
    library, packages = facts.driver.versions.library, list_driver_packages(facts)
    if library:
        return good(f"libnvidia-ml.so.1 is of driver {library}")
    if packages:
        return fail(
            f"{listed(packages)} are installed and libnvidia-ml.so.1 is not there",
            f"{HOST_STAGE} installs what is missing of the driver.",
        )
    return fail("no libnvidia-ml.so.1 and no package of a driver", f"{HOST_STAGE} installs the driver.")


def _tell_groups(word: str, groups: Mapping[str, str]) -> str:
    """Return which names are of which group. `groups` is the group by name, `word` stands before a group."""
    members = {group: [name for name in groups if groups[name] == group] for group in sorted(set(groups.values()))}
    return "; ".join(f"{word} {group}: {listed(names)}" for group, names in members.items())


def check_one_source(facts: Facts) -> Verdict:
    require_driver(facts)
    driver = facts.driver
    if driver.installer:
        return fail(
            f"{driver.installer} was left by NVIDIA's .run installer",
            f"Run '{driver.installer}' with the engines stopped, then {HOST_STAGE}: files of both would be mixed.",
        )
    packages, origins = known(facts.system.packages), known(driver.origins)
    names = [name for name in list_driver_packages(facts) if name not in HELPERS]
    branches = {name: parse_upstream_version(str(packages[name]["version"])).split(".")[0] for name in names}
    if len(set(branches.values())) > 1:
        told = _tell_groups("branch", branches)
        return fail(told, f"Keep one branch: remove the packages of the other ones, then run {HOST_STAGE}.")
    offered = {name: set(origins.get(name, ())) for name in names if origins.get(name)}
    if offered and not set.intersection(*offered.values()):
        return fail(
            _tell_groups("from", {name: " or ".join(sorted(who)) for name, who in offered.items()}),
            "Remove the driver's packages of one source ('apt-get purge'), and its entry in /etc/apt/sources.list.d: "
            "their dependencies do not fit each other at the next upgrade.",
        )
    nobody = sorted(set(names) - set(offered))
    if nobody:
        return warn(
            f"no source of apt offers the installed version of {listed(nobody)}",
            "Add the repository that they came from, or install the version that the repositories have: what nobody "
            "offers gets no updates and cannot be installed again.",
        )
    if not offered:
        return good("no package of a driver, so no mix")
    return good(f"one source: {', '.join(sorted(set.intersection(*offered.values())))}")


def check_half_installed(facts: Facts) -> Verdict:
    known(facts.system.packages)
    half = [name for name in facts.system.half_installed if re.search("nvidia|cuda", name)]
    if half:
        return fail(
            f"half installed: {listed(half)}",
            "'dpkg --configure -a' ends what was begun; where a module does not build, /var/lib/dkms/nvidia/*/build/"
            "make.log says why.",
        )
    return good("no package of the driver is half installed")


def check_held(facts: Facts) -> Verdict:
    require_driver(facts)
    packages = known(facts.system.packages)
    # Prebuilt modules have the version of the kernel. A newer version of the helpers does no harm.
    prebuilt = {name for name in packages if name.startswith("linux-modules-nvidia-")}
    names = sorted((prebuilt | set(list_driver_packages(facts))) - HELPERS)
    loose = [name for name in names if not packages[name]["held"]]
    if loose:
        return warn(
            f"apt may replace {listed(loose)}",
            f"{HOST_STAGE} holds them; by hand: 'apt-mark hold'. An upgrade under running engines leaves libraries "
            "that do not fit the loaded module.",
        )
    return good("every package of the driver is held")


def check_module_loaded(facts: Facts) -> Verdict:
    require_driver(facts)
    if facts.driver.loaded and not facts.driver.uvm:
        return fail(
            "the module nvidia is loaded, and nvidia-uvm is not: NVML answers, and CUDA fails with error 999",
            f"'modprobe nvidia-uvm' and 'systemctl restart nvidia-cdi-refresh.service'; {HOST_STAGE} loads it at boot.",
        )
    if facts.driver.loaded:
        return good(f"the module nvidia {facts.driver.versions.module} is loaded".replace("  ", " "))
    here = [kernel for kernel in facts.driver.kernels if kernel.release == facts.driver.running_kernel]
    if here and not here[0].has_module:
        return fail(
            f"the module nvidia is not loaded, and there is none for the running kernel {here[0].release}",
            f"{HOST_STAGE} installs the headers or the prebuilt modules of this kernel; or boot a kernel that has one.",
        )
    return fail(
        "the module nvidia is not loaded",
        "'modprobe nvidia', or reboot; 'journalctl -k | grep -iE \"nvidia|nvrm\"' says why it does not load.",
    )


def check_nouveau(facts: Facts) -> Verdict:
    if facts.driver.nouveau:
        return fail(
            "the module nouveau is loaded and holds the GPUs",
            f"Reboot: the driver's packages keep nouveau away from then on. Without them, {HOST_STAGE} first.",
        )
    return good("nouveau is not loaded")


def check_versions(facts: Facts) -> Verdict:
    require_driver(facts)
    found = facts.driver.versions
    if not found.module:
        decline_to_judge("no module is loaded")
    if not found.libraries:
        decline_to_judge("the driver's libraries are not there")
    mismatch = explain_mismatch(type(found)(found.module, found.libraries))
    if mismatch:
        return fail(mismatch.reason, f"{mismatch.remedy}.")
    return good(f"module and libraries are {found.module}")


def check_cuda(facts: Facts) -> Verdict:
    require_driver(facts)
    library = facts.driver.versions.library
    if not library:
        decline_to_judge("the driver's libraries are not there")
    image = known(facts.image)
    if image is None:
        decline_to_judge("no image is recorded on this host")
    if not image.cuda:
        decline_to_judge(f"the record of {image.name} names no CUDA")
    if not numbers(image.driver_branch):
        decline_to_judge(
            f"{image.name} is made with CUDA {image.cuda}, and vllm_image_cuda_floors names no driver branch for it"
        )
    if numbers(library) < numbers(image.driver_branch):
        return warn(
            f"{image.name} is made with CUDA {image.cuda}, which needs a driver of branch {image.driver_branch} or "
            f"newer, and the host has {library}: only the image's compatibility libraries help, on data-center cards",
            "The engine stage tries that in a container. If CUDA's error is 35 (no such library was loaded), 803 (it "
            "does not support this driver) or 804 (the card has no forward compatibility), set nvidia_driver_branch to "
            f"{image.driver_branch} or newer and run 'ansible-playbook playbooks/driver_upgrade.yml', or take an image "
            "with an older CUDA (vllm_image_base).",
        )
    return good(f"{image.name} is made with CUDA {image.cuda}, and driver {library} is new enough for it")


def check_secure_boot(facts: Facts) -> Verdict:
    driver = facts.driver
    state = driver.secure_boot
    if state is None:
        return good("the host was not started by UEFI, so nothing asks for signatures")
    if not known(state):
        return good("Secure Boot is off")
    require_driver(facts)
    signer = known(driver.signer)
    if driver.loaded:
        return good(f"Secure Boot is on, and the kernel took the module, signed by {signer or 'a key of this host'}")
    if not signer:
        return fail(
            "Secure Boot is on and the module has no signature",
            "Install prebuilt signed modules (Ubuntu's linux-modules-nvidia-*), or enrol a key for DKMS: 'mokutil "
            "--import /var/lib/dkms/mok.pub', reboot, and confirm on the console.",
        )
    return warn(
        f"Secure Boot is on and the module, signed by {signer}, is not loaded",
        "Where DKMS signed it, its key may not be enrolled: 'mokutil --test-key /var/lib/dkms/mok.pub'; 'mokutil "
        "--import' and a reboot with the console enrol it.",
    )


def check_next_kernel(facts: Facts) -> Verdict:
    require_driver(facts)
    kernels = facts.driver.kernels
    if not kernels:
        decline_to_judge("no installed kernel was found")
    newest = kernels[-1]
    if newest.has_module:
        return good(f"the newest installed kernel, {newest.release}, has the module")
    if newest.release == facts.driver.running_kernel:
        return (good if facts.driver.loaded else fail)(
            f"the running kernel, the newest one, {newest.release}, has no module of the driver on disk",
            f"{HOST_STAGE} installs it; without one the host has no GPU after a reboot.",
        )
    return warn(
        f"the newest installed kernel, {newest.release}, has no module; {facts.driver.running_kernel} runs",
        f"Before the next reboot: {HOST_STAGE} installs this kernel's headers or modules, or remove that kernel. "
        "Otherwise the host comes back without GPUs.",
    )


def check_kernel_updates(facts: Facts) -> Verdict:
    require_driver(facts)
    held = known(facts.driver.held_kernels)
    older = [
        f"{name} {installed} is held, and apt has {new}" for name, (installed, new) in held.items() if installed != new
    ]
    if older:
        return warn(
            "; ".join(older),
            "This host gets no new kernel, security updates included. 'ansible-playbook playbooks/driver_upgrade.yml "
            "-e driver_upgrade=HOST -e driver_newest=true -e allow_reboot=true' installs the newest kernel, its "
            "modules and the driver release that they are built for.",
        )
    return good("every held kernel is the newest that apt has" if held else "no kernel is held")


def check_persistence(facts: Facts) -> Verdict:
    require_driver(facts)
    unit = facts.driver.persistence
    answering = facts.gpus.answering
    if isinstance(unit, Unit) and unit.active_state == "active" and unit.starts_at_boot:
        return good(f"{unit.id} runs and starts at boot")
    if answering and all(gpu.persistent for gpu in answering):
        return good("persistence mode is on for every GPU", "nvidia-persistenced.service keeps it on after a reboot.")
    known(unit)
    return warn(
        "nvidia-persistenced.service does not run, or not at boot",
        "'systemctl enable --now nvidia-persistenced.service': without it the driver initialises the cards anew for "
        "every first process.",
    )
