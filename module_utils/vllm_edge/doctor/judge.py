# SPDX-License-Identifier: Apache-2.0
"""Every check by its name: facts in, verdict out. Nothing here reads the host.

A check whose premise is missing does not repeat the fault: without a driver one check fails, and those of its module
are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from .. import container_toolkit
from ..cdi import compare
from ..driver_packages import upstream, versioned
from ..driver_versions import explain_mismatch
from ..nvml import ERRORS
from ..systemd import Unit
from . import topology
from .contract import Finding, NotKnown, Unread, Verdict, fail, good, known, warn
from .facts import TOOLKIT, Engine, Facts, Kernel, Specification

HOST_STAGE = "'ansible-playbook playbooks/host.yml'"
GIB = 1024**3
# Thresholds of ours: below the first apt, Docker and the journal begin to fail, below the second an update may not fit.
SPACE_FAIL_BYTES = 1 * GIB
SPACE_WARN_BYTES = 5 * GIB
INODES_WARN = 10_000
# vLLM raises its limit of open files to this at its start, as far as it may (set_ulimit in vllm/utils).
FILES_WANTED = 65_535
SUPPORTED = {
    "debian-12": "Debian 12",
    "debian-13": "Debian 13",
    "ubuntu-24.04": "Ubuntu 24.04",
}
RED_HAT = ("rhel", "rocky", "almalinux", "centos", "fedora", "ol")
# CDI came with Docker 25, and is on without features.cdi from 28.2.0 (moby/moby#49963).
CDI_SINCE = (25,)
CDI_DEFAULT_SINCE = (28, 2, 0)
# Packages of a branch whose version is not that of the driver, since they serve several.
HELPERS = frozenset({"nvidia-persistenced", "nvidia-modprobe", "nvidia-settings", "nvidia-xconfig"})
ENABLED = ("enabled", "enabled-runtime", "static", "alias", "generated")


@dataclass(frozen=True)
class Check:
    """One check: its stable name, what it means for an operator, and how it is judged."""

    name: str
    meaning: str
    judge: Callable[[Facts], Verdict]


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, as far as it has them."""
    return tuple(int(part) for part in re.findall(r"\d+", upstream(version) if "-" in version else version))


def listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def not_judged(why: str) -> NoReturn:
    raise NotKnown(f"not judged: {why}")


# -- system


def system_distribution(facts: Facts) -> Verdict:
    system = facts.system
    if system.distribution in SUPPORTED:
        return good(system.name)
    if system.distribution.split("-")[0] in RED_HAT:
        return fail(
            system.name,
            "The RHEL family is not supported, nobody has run these roles there: use Debian 12 or 13, or Ubuntu 24.04.",
        )
    return fail(system.name, f"Install {', '.join(SUPPORTED.values())}: package names and sources are known for those.")


def system_dpkg(facts: Facts) -> Verdict:
    if known(facts.system.dpkg_interrupted):
        return fail(
            "a run of dpkg was cut off: /var/lib/dpkg/updates is not empty",
            "'dpkg --configure -a', then see that 'dpkg --audit' is silent.",
        )
    known(facts.system.packages)
    half = list(facts.system.half_installed)
    if half:
        return fail(
            f"half installed or half removed: {listed(half)}",
            "'dpkg --configure -a', then 'apt-get --fix-broken install', until 'dpkg --audit' is silent.",
        )
    return good("every package is whole")


def system_apt_lock(facts: Facts) -> Verdict:
    locks = known(facts.system.locks)
    if not locks:
        return good("nobody holds a lock of apt or dpkg")
    told = "; ".join(f"{lock.command} (pid {lock.pid}) holds {lock.path}" for lock in locks)
    return warn(
        told,
        f"Let it finish: 'ps -fp {locks[0].pid}' shows what it does. Do not remove the file, two programs at once ruin "
        "dpkg's database.",
    )


def system_time(facts: Facts) -> Verdict:
    if known(facts.system.synchronized):
        return good("the clock is synchronised")
    return warn(
        "the clock is not synchronised",
        "'timedatectl set-ntp true', or install chrony: signatures of repositories, TLS and the times in the journal "
        "depend on it.",
    )


def system_file_limits(facts: Facts) -> Verdict:
    limit = known(facts.system.files_limit)
    if limit is None or limit >= FILES_WANTED:
        return good(f"containers may open {'any number of' if limit is None else limit} files")
    return warn(
        f"docker.service limits containers to {limit} open files, vLLM wants {FILES_WANTED}",
        "Raise LimitNOFILE of docker.service ('systemctl edit docker.service'); it counts from Docker's next start on.",
    )


# -- driver


def installed_driver(facts: Facts) -> list[str]:
    return [] if isinstance(facts.system.packages, Unread) else versioned(facts.system.packages)


def need_driver(facts: Facts) -> None:
    if not facts.driver.versions.library and not installed_driver(facts):
        not_judged("no driver is installed")


def driver_installed(facts: Facts) -> Verdict:
    library, packages = facts.driver.versions.library, installed_driver(facts)
    if library:
        return good(f"libnvidia-ml.so.1 is of driver {library}")
    if packages:
        return fail(
            f"{listed(packages)} are installed and libnvidia-ml.so.1 is not there",
            f"{HOST_STAGE} installs what is missing of the driver.",
        )
    return fail("no libnvidia-ml.so.1 and no package of a driver", f"{HOST_STAGE} installs the driver.")


def driver_one_source(facts: Facts) -> Verdict:
    need_driver(facts)
    driver = facts.driver
    if driver.installer:
        return fail(
            f"{driver.installer} was left by NVIDIA's .run installer",
            f"Run '{driver.installer}' with the engines stopped, then {HOST_STAGE}: files of both would be mixed.",
        )
    packages, origins = known(facts.system.packages), known(driver.origins)
    names = [name for name in installed_driver(facts) if name not in HELPERS]
    branches: dict[str, list[str]] = {}
    for name in names:
        branches.setdefault(upstream(str(packages[name]["version"])).split(".")[0], []).append(name)
    if len(branches) > 1:
        told = "; ".join(f"branch {branch}: {listed(members)}" for branch, members in sorted(branches.items()))
        return fail(told, "Keep one branch: remove the packages of the other ones, then run " + HOST_STAGE + ".")
    offered = {name: set(origins.get(name, ())) for name in names if origins.get(name)}
    if offered and not set.intersection(*offered.values()):
        sources: dict[str, list[str]] = {}
        for name, who in offered.items():
            sources.setdefault(" or ".join(sorted(who)), []).append(name)
        told = "; ".join(f"from {source}: {listed(members)}" for source, members in sorted(sources.items()))
        return fail(
            told,
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
    common = sorted(set.intersection(*offered.values())) if offered else []
    return good(f"one source: {', '.join(common)}" if common else "no package of a driver, so no mix")


def driver_packages_whole(facts: Facts) -> Verdict:
    known(facts.system.packages)
    half = [name for name in facts.system.half_installed if re.search("nvidia|cuda", name)]
    if half:
        return fail(
            f"half installed: {listed(half)}",
            "'dpkg --configure -a' ends what was begun; where a module does not build, /var/lib/dkms/nvidia/*/build/"
            "make.log says why.",
        )
    return good("no package of the driver is half installed")


def driver_held(facts: Facts) -> Verdict:
    need_driver(facts)
    packages = known(facts.system.packages)
    # Prebuilt modules have the kernel's version; the helpers do no harm by being newer.
    prebuilt = {name for name in packages if name.startswith("linux-modules-nvidia-")}
    names = sorted((prebuilt | set(installed_driver(facts))) - HELPERS)
    loose = [name for name in names if not packages[name]["held"]]
    if loose:
        return warn(
            f"apt may replace {listed(loose)}",
            f"{HOST_STAGE} holds them; by hand: 'apt-mark hold'. An upgrade under running engines leaves libraries "
            "that do not fit the loaded module.",
        )
    return good("every package of the driver is held")


def driver_module_loaded(facts: Facts) -> Verdict:
    need_driver(facts)
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


def driver_nouveau(facts: Facts) -> Verdict:
    if facts.driver.nouveau:
        return fail(
            "the module nouveau is loaded and holds the GPUs",
            f"Reboot: the driver's packages keep nouveau away from then on. Without them, {HOST_STAGE} first.",
        )
    return good("nouveau is not loaded")


def driver_versions(facts: Facts) -> Verdict:
    found = facts.driver.versions
    need_driver(facts)
    if not found.module:
        not_judged("no module is loaded")
    if not found.libraries:
        not_judged("the driver's libraries are not there")
    mismatch = explain_mismatch(type(found)(found.module, found.libraries))
    if mismatch:
        return fail(mismatch.reason, f"{mismatch.remedy}.")
    return good(f"module and libraries are {found.module}")


def driver_cuda(facts: Facts) -> Verdict:
    need_driver(facts)
    library = facts.driver.versions.library
    if not library:
        not_judged("the driver's libraries are not there")
    image = known(facts.image)
    if image is None:
        not_judged("no image is recorded on this host")
    if not image.cuda:
        not_judged(f"the record of {image.name} names no CUDA")
    branch = numbers(image.driver_branch)
    if not branch:
        not_judged(
            f"{image.name} is made with CUDA {image.cuda}, and vllm_image_cuda_floors names no driver branch for it"
        )
    if numbers(library) < branch:
        return fail(
            f"{image.name} is made with CUDA {image.cuda}, which needs a driver of branch {image.driver_branch} or "
            f"newer, and the host has {library}",
            f"Set nvidia_driver_branch to {image.driver_branch} or newer and run 'ansible-playbook "
            "playbooks/driver_upgrade.yml', or take an image with an older CUDA (vllm_image_base): with this driver "
            "engines end with CUDA's error 803 or 804.",
        )
    return good(f"{image.name} is made with CUDA {image.cuda}, and driver {library} is new enough for it")


def driver_secure_boot(facts: Facts) -> Verdict:
    driver = facts.driver
    state = driver.secure_boot
    if state is None:
        return good("the host was not started by UEFI, so nothing asks for signatures")
    if not known(state):
        return good("Secure Boot is off")
    need_driver(facts)
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


def driver_next_kernel(facts: Facts) -> Verdict:
    need_driver(facts)
    kernels = facts.driver.kernels
    if not kernels:
        not_judged("no installed kernel was found")
    newest: Kernel = kernels[-1]
    if newest.has_module:
        return good(f"the newest installed kernel, {newest.release}, has the module")
    if newest.release == facts.driver.running_kernel:
        found = "the running kernel, the newest one,"
        return (good if facts.driver.loaded else fail)(
            f"{found} {newest.release}, has no module of the driver on disk",
            f"{HOST_STAGE} installs it; without one the host has no GPU after a reboot.",
        )
    return warn(
        f"the newest installed kernel, {newest.release}, has no module; {facts.driver.running_kernel} runs",
        f"Before the next reboot: {HOST_STAGE} installs this kernel's headers or modules, or remove that kernel. "
        "Otherwise the host comes back without GPUs.",
    )


def driver_persistence(facts: Facts) -> Verdict:
    need_driver(facts)
    unit = facts.driver.persistence
    answering = facts.gpus.answering
    if isinstance(unit, Unit) and unit.active_state == "active" and unit.file_state in ENABLED:
        return good(f"{unit.id} runs and starts at boot")
    if answering and all(gpu.persistent for gpu in answering):
        return good("persistence mode is on for every GPU", "nvidia-persistenced.service keeps it on after a reboot.")
    known(unit)
    return warn(
        "nvidia-persistenced.service does not run, or not at boot",
        "'systemctl enable --now nvidia-persistenced.service': without it the driver initialises the cards anew for "
        "every first process.",
    )


# -- gpus


def gpus_answer(facts: Facts) -> Verdict:
    need_driver(facts)
    if not facts.driver.loaded and not facts.gpus.answering:
        not_judged("the module nvidia is not loaded")
    said = facts.gpus.problem
    if not said:
        return good(f"nvidia-smi names {len(facts.gpus.answering)} GPUs")
    code = next((code for words, code in SMI_WORDS.items() if words in said), "UNKNOWN")
    return fail(f"nvidia-smi says: {said}", ERRORS[code].remedy.format(gpu="the card"))


SMI_WORDS: Mapping[str, str] = {
    "cannot be run": "LIBRARY_NOT_FOUND",
    "couldn't find libnvidia-ml": "LIBRARY_NOT_FOUND",
    "couldn't communicate with the NVIDIA driver": "DRIVER_NOT_LOADED",
    "library version mismatch": "LIB_RM_VERSION_MISMATCH",
    "No devices were found": "GPU_NOT_FOUND",
    "GPU is lost": "GPU_IS_LOST",
    "Reset the GPU": "RESET_REQUIRED",
    "requires reset": "RESET_REQUIRED",
    "Insufficient Permissions": "NO_PERMISSION",
    "Timeout": "TIMEOUT",
}


def gpus_present(facts: Facts) -> Verdict:
    gpus = facts.gpus
    if not gpus.on_bus and not gpus.answering:
        return fail(
            "no GPU of NVIDIA on the PCI bus, and none answers",
            "'lspci -d 10de:' lists cards; one that is missing is not seated, not powered, or given to a virtual "
            "machine.",
        )
    names = sorted({gpu.name for gpu in gpus.answering})
    given = sorted(bus for bus, driver in gpus.on_bus.items() if driver == "vfio-pci")
    silent = sorted(set(gpus.on_bus) - {gpu.bus for gpu in gpus.answering} - set(given))
    if gpus.answering and silent:
        return fail(
            f"{len(gpus.on_bus)} GPUs on the PCI bus, {len(gpus.answering)} answer; silent: {', '.join(silent)}",
            "'journalctl -k | grep -i nvrm' says why the driver left them.",
        )
    count = len(gpus.answering) or len(gpus.on_bus) - len(given)
    if count < gpus.needed:
        return fail(
            f"{count} GPUs are there, the profile needs {gpus.needed}",
            "Choose a serving_profile for fewer GPUs ('ansible-playbook playbooks/advise.yml' ranks them), or look for "
            "the missing cards in 'lspci -d 10de:'.",
        )
    told = f"{count} of {', '.join(names)}" if names else f"{count} GPUs on the PCI bus"
    return good(told + (f"; kept for virtual machines (vfio-pci): {', '.join(given)}" if given else ""))


def gpus_expected(facts: Facts) -> Verdict:
    gpus = facts.gpus
    if not gpus.expected:
        return good("no engine, record or inventory names a GPU by its UUID yet")
    if not gpus.answering:
        not_judged("no GPU answers")
    there = {gpu.uuid: gpu for gpu in gpus.answering}
    gone = [f"{uuid} ({who})" for uuid, who in gpus.expected.items() if uuid not in there]
    new = [f"{gpu.uuid} ({gpu.name} at {gpu.bus})" for gpu in gpus.answering if gpu.uuid not in gpus.expected]
    if gone:
        swapped = f"; there without being expected: {', '.join(new)}" if new else ""
        remedy = (
            "If that is the exchanged card, put its UUID in the place of the old one in gpu_uuids and run site.yml."
            if new
            else "Look for the card in 'lspci -d 10de:' and for Xid messages in 'journalctl -k'; choose a profile "
            "without it while it is gone."
        )
        return fail(f"not there: {', '.join(gone)}{swapped}", remedy)
    if new:
        return good(f"every expected GPU is there; unused: {', '.join(new)}", "Add it to gpu_uuids to use it.")
    return good(f"the {len(gpus.expected)} expected GPUs are there")


def gpus_holders(facts: Facts) -> Verdict:
    if not facts.gpus.answering:
        not_judged("no GPU answers")
    others = [f"{holder.who} on {holder.uuid}" for holder in known(facts.gpus.holders) if not holder.ours]
    if not others:
        return good("nobody but our engines uses a GPU")
    return good(
        f"used by others too: {listed(others)}",
        "They are left alone; what they hold is missing to an engine on the same GPU.",
    )


# -- runtime


def docker_parts(facts: Facts) -> tuple[int, ...]:
    if not facts.runtime.docker_version:
        not_judged("Docker is not installed")
    return numbers(facts.runtime.docker_version)


def runtime_docker_installed(facts: Facts) -> Verdict:
    if facts.runtime.docker_version:
        return good(f"Docker Engine {facts.runtime.docker_version}")
    return fail("no dockerd", f"{HOST_STAGE} installs it.")


def runtime_docker_version(facts: Facts) -> Verdict:
    if docker_parts(facts) >= CDI_SINCE:
        return good(f"{facts.runtime.docker_version} knows CDI")
    return fail(
        f"Docker Engine {facts.runtime.docker_version} does not know CDI, which came with 25",
        "Install a newer one from Docker's repository; the role container_runtime does so where the distribution's is "
        "too old. It restarts Docker, and the containers with it.",
    )


def runtime_docker_running(facts: Facts) -> Verdict:
    docker_parts(facts)
    unit = known(facts.runtime.docker)
    if unit.active_state != "active":
        return fail(
            f"docker.service is {unit.active_state}",
            "'systemctl start docker.service'; 'journalctl -u docker.service' says why it ended.",
        )
    if unit.file_state not in ENABLED:
        return warn("docker.service runs and does not start at boot", "'systemctl enable docker.service'")
    return good("docker.service runs and starts at boot")


def runtime_docker_config(facts: Facts) -> Verdict:
    if facts.runtime.config_error:
        return fail(
            facts.runtime.config_error,
            "Correct it before Docker restarts: it would not start ('dockerd --validate' checks the file).",
        )
    config = known(facts.runtime.config)
    return good(
        f"/etc/docker/daemon.json is valid: {', '.join(sorted(config))}" if config else "no daemon.json settings"
    )


def runtime_cdi_enabled(facts: Facts) -> Verdict:
    version = docker_parts(facts)
    if version < CDI_SINCE:
        not_judged("this Docker does not know CDI")
    features = known(facts.runtime.config).get("features")
    said = features.get("cdi") if isinstance(features, dict) else None
    if said is True or (said is None and version >= CDI_DEFAULT_SINCE):
        return good("Docker gives devices by CDI")
    why = "features.cdi is false" if said is False else "features.cdi is not set, and the default is off before 28.2"
    return fail(
        f"{why} in /etc/docker/daemon.json",
        f'Add {{"features": {{"cdi": true}}}} to it; it counts from Docker\'s next start on. {HOST_STAGE} does so.',
    )


def toolkit_packages(facts: Facts) -> dict[str, str]:
    packages = known(facts.system.packages)
    return {name: upstream(str(packages[name]["version"])) for name in TOOLKIT if name in packages}


def runtime_toolkit(facts: Facts) -> Verdict:
    found = toolkit_packages(facts)
    missing = [name for name in TOOLKIT if name not in found]
    if missing:
        return fail(f"not installed: {', '.join(missing)}", f"{HOST_STAGE} installs the container toolkit.")
    versions = sorted(set(found.values()))
    if len(versions) > 1:
        told = ", ".join(f"{name} {version}" for name, version in found.items())
        return fail(told, f"Its four packages have to be of one version: {HOST_STAGE} installs the pinned one.")
    if versions[0] in container_toolkit.KNOWN_BAD:
        return warn(
            f"{versions[0]}: {container_toolkit.KNOWN_BAD[versions[0]]}",
            "Set container_runtime_toolkit_version to another release and run the host stage.",
        )
    if numbers(versions[0]) < container_toolkit.REFRESH_SINCE:
        return warn(
            f"{versions[0]} has no unit that keeps the CDI specification current; that came with 1.18",
            "Set container_runtime_toolkit_version to a newer release and run the host stage.",
        )
    return good(f"container toolkit {versions[0]}")


def need_toolkit(facts: Facts) -> None:
    if not toolkit_packages(facts):
        not_judged("the container toolkit is not installed")


def runtime_toolkit_held(facts: Facts) -> Verdict:
    need_toolkit(facts)
    packages = known(facts.system.packages)
    loose = [name for name in TOOLKIT if name in packages and not packages[name]["held"]]
    if loose:
        return warn(f"apt may replace {listed(loose)}", f"{HOST_STAGE} holds them; by hand: 'apt-mark hold'.")
    return good("the packages of the toolkit are held")


def runtime_cdi_refresh(facts: Facts) -> Verdict:
    need_toolkit(facts)
    unit = known(facts.runtime.refresh)
    if unit.active_state == "active" and unit.file_state in ENABLED:
        return good("nvidia-cdi-refresh.path watches the driver and starts at boot")
    return warn(
        f"nvidia-cdi-refresh.path is {unit.active_state if unit.loaded else 'not there'}",
        "'systemctl enable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service': the specification in /var/run "
        "is gone after a boot and old after an upgrade of the driver.",
    )


def specifications(facts: Facts) -> tuple[Specification, ...]:
    found = known(facts.runtime.specifications)
    if not found:
        need_toolkit(facts)
        not_judged("there is no CDI specification of NVIDIA's GPUs")
    return found


def runtime_cdi_conflict(facts: Facts) -> Verdict:
    seen: dict[str, list[str]] = {}
    for specification in specifications(facts):
        for device in specification.devices:
            seen.setdefault(device, []).append(specification.path)
    twice = {device: paths for device, paths in seen.items() if len(paths) > 1}
    if not twice:
        return good("every device is defined once")
    paths = sorted({path for found in twice.values() for path in found})
    made = [path for path in paths if path.startswith("/etc/")] or paths[1:]
    return fail(
        f"{' and '.join(paths)} both define {listed([f'nvidia.com/gpu={device}' for device in sorted(twice)], 3)}",
        f"Keep the one that nvidia-cdi-refresh writes in /var/run/cdi and remove {', '.join(made)}: one of the two is "
        "old after the next upgrade of the driver.",
    )


def runtime_cdi_current(facts: Facts) -> Verdict:
    specifications(facts)
    found = facts.driver.versions
    mounted = sorted({version for versions in found.in_use.values() for version in versions})
    if not found.library or not mounted:
        not_judged("the driver's version is not known" if mounted else "the specification mounts no driver's library")
    if found.library not in mounted:
        return fail(
            f"{', '.join(found.in_use)} was made for driver {', '.join(mounted)}, the host has {found.library}",
            "'systemctl restart nvidia-cdi-refresh.service' makes it anew; one in /etc/cdi is made by hand: remove it.",
        )
    return good(f"made for driver {found.library}, which the host has")


def runtime_cdi_devices(facts: Facts) -> Verdict:
    gpus = [gpu.uuid for gpu in facts.gpus.answering]
    found = known(facts.runtime.specifications)
    if not found:
        need_toolkit(facts)
        return fail(
            "no CDI specification names NVIDIA's GPUs",
            "'systemctl restart nvidia-cdi-refresh.service' makes one; 'journalctl -u nvidia-cdi-refresh' says why "
            "there is none.",
        )
    devices = [f"nvidia.com/gpu={device}" for specification in found for device in specification.devices]
    missing, gone = compare(devices, gpus)
    if missing:
        return fail(
            f"no CDI device for {', '.join(missing)}",
            "'systemctl restart nvidia-cdi-refresh.service'; 'nvidia-ctk cdi list' shows what it made.",
        )
    if not gpus:
        not_judged("no GPU answers")
    if gone:
        return warn(
            f"CDI devices for {', '.join(gone)}, which the host does not have",
            "'systemctl restart nvidia-cdi-refresh.service' makes the specification anew.",
        )
    return good(f"each of the {len(gpus)} GPUs has a CDI device by its UUID")


def runtime_gpu_access(facts: Facts) -> Verdict:
    docker_parts(facts)
    asked = known(facts.runtime.access)
    lost = [one for one in asked if one.denied]
    if lost:
        told = "; ".join(f"container {one.name} may not use {', '.join(one.denied)}, which it has" for one in lost)
        remedies = [f"'systemctl restart {one.unit}' starts the engine anew." for one in lost if one.engine]
        others = [one.name for one in lost if not one.engine]
        if others:
            remedies.append(
                f"Nothing of ours restarts {listed(others)}: the owner does ('docker restart {others[0]}'). systemd "
                "closes such devices when it is told daemon-reload; a container keeps those that it gets by CDI "
                "('--device nvidia.com/gpu=...'), and all of them with the links that 'nvidia-ctk system "
                "create-dev-char-symlinks --create-all' makes, after each boot."
            )
        return (warn if len(others) == len(lost) else fail)(told, " ".join(remedies))
    unsure = [f"{one.name} ({one.unknown})" for one in asked if one.unknown]
    if unsure:
        raise NotKnown(f"{len(unsure)} of {len(asked)} containers with GPUs could not be asked: {listed(unsure)}")
    names = [one.name for one in asked]
    return good(f"those that have GPUs may use them: {listed(names)}" if names else "no running container has a GPU")


# -- storage


def space_check(what: str, variable: str) -> Callable[[Facts], Verdict]:
    def judge(facts: Facts) -> Verdict:
        for space in facts.spaces:
            if isinstance(space, Unread) or space.what != what:
                continue
            told = f"{space.path} has {space.free_bytes // 1024**2} MiB free"
            remedy = f"'du -xh --max-depth=2 {space.path} | sort -h | tail' shows where it went{variable}."
            if space.free_bytes < SPACE_FAIL_BYTES:
                return fail(told, remedy)
            if space.free_inodes is not None and space.free_inodes < INODES_WARN:
                return warn(f"{space.path} has {space.free_inodes} inodes left", remedy)
            if space.free_bytes < SPACE_WARN_BYTES:
                return warn(told, remedy)
            return good(told)
        raise NotKnown(next((space.why for space in facts.spaces if isinstance(space, Unread)), "nobody looked"))

    return judge


# -- serving


def engines(facts: Facts) -> tuple[Engine, ...]:
    found = known(facts.serving.engines)
    if not found:
        not_judged("no engine is configured on this host")
    return found


def serving_configuration(facts: Facts) -> Verdict:
    if facts.serving.errors:
        return fail("; ".join(facts.serving.errors), "Run site.yml, which renders the files of every engine anew.")
    return good(f"every engine's files are valid: {listed([engine.name for engine in engines(facts)])}")


def settled(facts: Facts) -> tuple[Engine, ...]:
    if facts.serving.switching:
        not_judged("a switch runs; 'vllm-edge progress' says how far it is")
    return engines(facts)


def serving_units(facts: Facts) -> Verdict:
    found = settled(facts)
    failed = [engine for engine in found if engine.unit.active_state == "failed" or engine.unit.auto_restart]
    if failed:
        told = ", ".join(f"{engine.unit.id} {engine.unit.active_state} ({engine.unit.result})" for engine in failed)
        return fail(told, f"'vllm-edge explain {failed[0].name}' says why it ended last, and what to do.")
    down = [engine for engine in found if engine.unit.active_state != "active"]
    if not down:
        return good(f"{len(found)} engines run")
    told = ", ".join(f"{engine.unit.id} is {engine.unit.active_state}" for engine in down)
    if all(engine.unit.active_state == "activating" for engine in down):
        return good(told, "'vllm-edge status' shows how far it is.")
    return warn(told, f"'systemctl start {down[0].unit.id}', or site.yml, which starts all of them.")


def serving_ports(facts: Facts) -> Verdict:
    found = settled(facts)
    taken = [
        f"port {engine.port} of {engine.name} is listened on at {', '.join(engine.listeners)} while its unit is "
        f"{engine.unit.active_state}"
        for engine in found
        if engine.listeners and engine.unit.down
    ]
    if taken:
        return fail("; ".join(taken), "Stop who has it ('ss -ltnp' names it), or give the engine another port.")
    silent = [f"{engine.name} on {engine.port}" for engine in found if not engine.listeners and up(engine)]
    if silent:
        return fail(
            f"nobody listens for {', '.join(silent)} although the unit is active",
            "'docker ps' shows what the container publishes; 'systemctl restart' of the unit makes a new one.",
        )
    return good(", ".join(f"{engine.name} on {engine.port}" for engine in found))


def up(engine: Engine) -> bool:
    return engine.unit.active_state == "active"


def serving_boot(facts: Facts) -> Verdict:
    engines(facts)
    target = known(facts.serving.target)
    if target.file_state in ENABLED:
        return good("vllm-edge.target starts the engines at boot")
    return warn("vllm-edge.target is not enabled", "'systemctl enable vllm-edge.target', or run site.yml.")


def serving_switch(facts: Facts) -> Verdict:
    known(facts.serving.engines)
    if facts.serving.unfinished_switch:
        return fail(
            f"a switch was killed and not ended: {facts.serving.unfinished_switch}",
            "'vllm-edge recover' goes back to the committed generation.",
        )
    return good("no switch was left unfinished")


CHECKS: tuple[Check, ...] = (
    Check("system.distribution", "The roles know this distribution.", system_distribution),
    Check("system.dpkg", "No run of dpkg was cut off, no package is half installed.", system_dpkg),
    Check("system.apt-lock", "Nobody holds apt's or dpkg's locks now.", system_apt_lock),
    Check("system.time", "The clock is synchronised.", system_time),
    Check("system.file-limits", "Containers may open as many files as vLLM wants.", system_file_limits),
    Check("driver.installed", "The driver's libraries are there.", driver_installed),
    Check("driver.one-source", "All packages of the driver are of one branch, from one source.", driver_one_source),
    Check("driver.half-installed", "dpkg has left no package of the driver half installed.", driver_packages_whole),
    Check("driver.held", "apt cannot replace the driver by itself.", driver_held),
    Check("driver.module-loaded", "The kernel module `nvidia` is loaded.", driver_module_loaded),
    Check("driver.nouveau", "The module `nouveau` does not hold the GPUs.", driver_nouveau),
    Check("driver.versions", "Loaded module and libraries have one version; else a reboot is due.", driver_versions),
    Check("driver.cuda", "The driver is new enough for the CUDA of the image.", driver_cuda),
    Check(
        "driver.secure-boot",
        "With Secure Boot on, the module is signed by a key that the kernel takes.",
        driver_secure_boot,
    ),
    Check("driver.next-kernel", "The newest installed kernel has a module too.", driver_next_kernel),
    Check("driver.persistence", "The driver stays initialised while nobody uses a GPU.", driver_persistence),
    Check("gpus.present", "Every GPU on the PCI bus answers, and there are enough.", gpus_present),
    Check("gpus.answer", "nvidia-smi answers for every GPU, without an error.", gpus_answer),
    Check("gpus.expected", "The UUIDs that engines, record and inventory name are there.", gpus_expected),
    Check("gpus.holders", "Who else uses a GPU. Advice: other people's processes are left alone.", gpus_holders),
    Check("runtime.docker-installed", "There is a Docker Engine.", runtime_docker_installed),
    Check("runtime.docker-version", "It is 25 or newer, which CDI needs.", runtime_docker_version),
    Check("runtime.docker-running", "`docker.service` runs and starts at boot.", runtime_docker_running),
    Check("runtime.docker-config", "`/etc/docker/daemon.json` can be read by Docker.", runtime_docker_config),
    Check("runtime.cdi-enabled", "Docker gives devices by CDI.", runtime_cdi_enabled),
    Check(
        "runtime.toolkit",
        "The container toolkit is whole, of one version that is not known to be bad.",
        runtime_toolkit,
    ),
    Check("runtime.toolkit-held", "apt cannot replace the toolkit by itself.", runtime_toolkit_held),
    Check("runtime.cdi-refresh", "The CDI specification is renewed at boot and with the driver.", runtime_cdi_refresh),
    Check("runtime.cdi-current", "The CDI specification was made for this driver.", runtime_cdi_current),
    Check("runtime.cdi-conflict", "No two CDI specifications define the same device.", runtime_cdi_conflict),
    Check("runtime.cdi-devices", "Every GPU has a CDI device by its UUID.", runtime_cdi_devices),
    Check("runtime.gpu-access", "No running container has lost its GPUs.", runtime_gpu_access),
    Check(
        "topology.pcie",
        "No PCIe link is narrower, or slower under load, than it can be.",
        lambda facts: topology.judge_link(facts.topology),
    ),
    Check(
        "topology.numa", "GPUs of one engine are on one NUMA node.", lambda facts: topology.judge_numa(facts.topology)
    ),
    Check(
        "topology.iommu",
        "IOMMU and Access Control Services leave reads between GPUs alone; else engines need other arguments.",
        lambda facts: topology.judge_iommu(facts.topology),
    ),
    Check(
        "topology.peer-to-peer",
        "Whether the driver offers reads between GPUs.",
        lambda facts: topology.judge_peers(facts.topology),
    ),
    Check("topology.ecc", "No uncorrected memory errors.", lambda facts: topology.judge_ecc(facts.topology)),
    Check(
        "topology.xid", "The kernel's log has no Xid since the boot.", lambda facts: topology.judge_xids(facts.topology)
    ),
    Check(
        "topology.power", "No card is slowed down by heat or power.", lambda facts: topology.judge_power(facts.topology)
    ),
    Check(
        "topology.shared-memory",
        "`/dev/shm` is there, and engines over several GPUs have enough of it.",
        lambda facts: topology.judge_shared_memory(facts.topology),
    ),
    Check("storage.root", "`/` has room.", space_check("/", "")),
    Check(
        "storage.images",
        "Docker's directory has room.",
        space_check("images", "; 'docker system df' says what images take"),
    ),
    Check(
        "storage.data",
        "The directory of weights and caches has room.",
        space_check("weights and caches", "; vllm_edge_host_data_directory names another place"),
    ),
    Check("serving.configuration", "The files of every engine are valid.", serving_configuration),
    Check("serving.units", "The unit of every engine runs.", serving_units),
    Check("serving.ports", "Each engine, and nobody else, listens on its port.", serving_ports),
    Check("serving.boot", "The engines start at boot.", serving_boot),
    Check("serving.switch", "No switch was killed and left unfinished.", serving_switch),
)


def judge(facts: Facts) -> list[Finding]:
    """Every check, in the order of the table."""
    found = []
    for check in CHECKS:
        try:
            verdict = check.judge(facts)
        except NotKnown as error:
            verdict = Verdict("unknown", str(error))
        # What programs say may have several lines.
        evidence = " ".join(verdict.evidence.split())
        found.append(Finding(check.name, verdict.state, evidence, verdict.remedy))
    return found
