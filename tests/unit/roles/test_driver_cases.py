# SPDX-License-Identifier: Apache-2.0
"""What the role nvidia_driver makes of each state of a host: its tasks, over states that its look would give."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.vllm_edge.facts.driver_state import DriverState
from helpers import write_program
from role_cases import Case, Role, Run, Steps, platform

GPUS = [f"GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e82000{index}" for index in range(4)]
KERNEL = "6.8.0-79-generic"
NEWER = "6.8.0-100-generic"
PREBUILT = "linux-modules-nvidia-580-server-open-"
NVIDIA_URL = "https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/"
OFFERED = "6.8.0-111-generic"
COMMAND = "playbooks/driver_upgrade.yml -e driver_upgrade=localhost -e driver_newest=true -e allow_reboot=true"
LIBRARIES = {"libnvidia-ml1": {"version": "550.163.01-2", "held": False}}

UBUNTU = platform("Ubuntu", "24.04")
DEBIAN_13 = platform("Debian", "13.1")

BARE = {"packages": {}, "gpus": [], **asdict(DriverState())} | {
    "kernel": KERNEL,
    "next_kernel": KERNEL,
    "candidate": "580.173.02",
    "headers": True,
    "nvml_error": "nvidia-smi is not installed",
}
OF_UBUNTU = ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"]
OF_NVIDIA = ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced"]
SERVING = BARE | {
    "packages": {name: {"version": "580.173.02-0ubuntu0.24.04.1", "held": True} for name in OF_UBUNTU},
    "version": "580.173.02",
    "installed": "580.173.02",
    "driver_packages": OF_UBUNTU,
    "recorded": "distribution",
    "module_version": "580.173.02",
    "uvm": True,
    "modules_on_disk": {KERNEL: "580.173.02"},
    "signer": "Canonical Ltd. Kernel Module Signing",
    "persistence": True,
    "gpus": GPUS,
    "nvml_error": "",
}
DEBIAN_SERVING = SERVING | {
    "packages": {name: {"version": "580.173.02-1", "held": True} for name in OF_NVIDIA},
    "driver_packages": OF_NVIDIA,
    "recorded": "nvidia",
    "signer": "",
}


# The archive has a newer kernel, and a driver release that has modules for it alone.
MOVED = {
    "candidate": "580.178.04",
    "module_releases": {f"{PREBUILT}{KERNEL}": "580.173.02", f"{PREBUILT}generic": "580.178.04"},
    "next_modules": [f"{PREBUILT}generic"],
    "offered_kernel": OFFERED,
    "kernel_updates": ["linux-image-generic"],
}
BY_HAND = {
    **(SERVING | MOVED),
    "next_kernel": OFFERED,
    "bare_kernels": [OFFERED],
    "modules_to_install": [f"{PREBUILT}{OFFERED}"],
    "module_releases": {**MOVED["module_releases"], f"{PREBUILT}{OFFERED}": "580.178.04"},
    "kernel_updates": [],
}
NEWEST = {"nvidia_driver_newest": True}
HOOK = "echo 'Hook before_drain failed: the gateway says no.' >&2; exit 2"


STATES = [
    Case("a host that serves: nothing is refused", "assert"),
    Case("a host that serves: the evidence is there", "verify", given={"nvidia_driver_gpus": 4}),
    Case("fresh host: nothing is refused", "assert", state=BARE),
    Case(
        "driver of another source, which can be kept",
        "assert",
        (
            "another source than the archive of Ubuntu-24.04: libnvidia-ml1 550.163.01-2 from http://vendor.example",
            "To keep that driver, set nvidia_driver_source to nvidia. To replace it, remove",
            '"apt-get purge libnvidia-ml1"',
        ),
        BARE | {"packages": LIBRARIES, "foreign": {"libnvidia-ml1": ["http://vendor.example"]}, "fitting": "nvidia"},
    ),
    Case(
        "driver of a third source",
        "assert",
        ("Mixing sources ends in broken dependencies and mismatched versions. Remove them with",),
        BARE | {"packages": LIBRARIES, "foreign": {"libnvidia-ml1": ["http://ppa.example"]}},
    ),
    Case(
        "driver that this role took from the other source",
        "assert",
        (
            "took the driver of this host (580.173.02) from the source nvidia; nvidia_driver_source is distribution",
            "set nvidia_driver_source to nvidia",
            "playbooks/driver_remove.yml -e driver_remove=localhost",
        ),
        SERVING | {"recorded": "nvidia"},
    ),
    Case(
        "driver of NVIDIA's .run installer",
        "assert",
        ('"/usr/bin/nvidia-uninstall --silent"',),
        BARE | {"installer": "/usr/bin/nvidia-uninstall"},
    ),
    Case(
        "half installed packages",
        "assert",
        ("dpkg left nvidia-utils-580-server half installed", 'run "dpkg --configure -a"'),
        BARE | {"unconfigured": ["nvidia-utils-580-server"]},
    ),
    Case("Secure Boot with prebuilt modules", "assert", state=BARE | {"secure_boot": True}),
    Case(
        "Secure Boot with modules of DKMS, where signed ones exist",
        "assert",
        (
            'the kernel would refuse the module ("Key was rejected by service"). Nothing was installed.',
            "Set nvidia_driver_source to distribution: its modules are signed",
        ),
        BARE | {"secure_boot": True},
        given={"nvidia_driver_source": "nvidia"},
    ),
    Case(
        "Secure Boot with modules of DKMS, where there are no others",
        "assert",
        ("Either enrol the key of DKMS", "mokutil --import /var/lib/dkms/mok.pub", "or turn Secure Boot off"),
        BARE | {"secure_boot": True},
        DEBIAN_13,
    ),
    Case(
        "Secure Boot with modules of DKMS, whose key is enrolled",
        "assert",
        state=BARE | {"secure_boot": True, "key_enrolled": True},
        facts=DEBIAN_13,
    ),
    Case(
        "Secure Boot, and a module without a signature",
        "verify",
        ("Secure Boot is on and the module nvidia that is installed for kernel 6.8.0-79-generic has no signature",),
        SERVING | {"secure_boot": True, "signer": ""},
    ),
    Case(
        "newer branch wanted",
        "install",
        (
            "has driver 580.173.02, and 615.* is requested",
            "Nothing was changed: playbooks/driver_upgrade.yml stops the engines",
            "or set nvidia_driver_branch to the installed driver",
        ),
        # Names carry the branch: the look for the wanted one finds another instead.
        SERVING | {"version": "", "other_branch": OF_UBUNTU},
        given={"nvidia_driver_branch": "615", "nvidia_driver_allow_reboot": True},
    ),
    Case(
        "newer branch wanted by the play that may change it, and no reboot allowed",
        "install",
        ("Kernel module 580.173.02 is loaded, and only a reboot loads another one (590.*)", "-e allow_reboot=true"),
        DEBIAN_SERVING,
        DEBIAN_13,
        {"nvidia_driver_branch": "590", "nvidia_driver_allow_change": True},
    ),
    Case(
        "first install on a kernel that is not the newest",
        "fit",
        (
            f"{PREBUILT}{KERNEL} of the archive of Ubuntu-24.04 is built for driver 580.173.02, and the driver to "
            "install is 580.178.04. Nothing was changed.",
            f'Kernel {KERNEL} runs here: boot the newest kernel first ("apt-get install linux-image-generic" brings '
            f"{OFFERED}, then reboot), and run again.",
        ),
        BARE | MOVED | {"modules_to_install": [f"{PREBUILT}generic", f"{PREBUILT}{KERNEL}"]},
    ),
    Case(
        "first install on an older kernel, of the release that its module needs",
        "fit",
        state=BARE | MOVED | {"modules_to_install": [f"{PREBUILT}generic", f"{PREBUILT}{KERNEL}"]},
        given={"nvidia_driver_version": "580.173.02"},
    ),
    Case("held driver, and the archive has moved on: goes on", "fit", state=SERVING | MOVED),
    Case(
        "kernel installed by hand, whose module needs a newer release than the held one",
        "fit",
        (
            f"{PREBUILT}{OFFERED} of the archive of Ubuntu-24.04 is built for driver 580.178.04, and the driver of "
            "this host is 580.173.02. Nothing was changed.",
            f"{COMMAND} moves kernel, modules and driver to one release.",
        ),
        BY_HAND,
    ),
    Case("the same, by the play that moves kernel and driver", "fit", state=BY_HAND, given=NEWEST),
    Case(
        "newest release, and the archive has no modules for it yet",
        "fit",
        (f"{PREBUILT}generic of", "580.173.02, and the driver to install is 580.178.04", "try again when it has both"),
        SERVING | MOVED | {"module_releases": {f"{PREBUILT}generic": "580.173.02"}},
        given=NEWEST,
    ),
    Case(
        "newest release and an exact version",
        "validate",
        ("driver_newest", "nvidia_driver_version is 580.173.02", "Empty nvidia_driver_version"),
        given={**NEWEST, "nvidia_driver_version": "580.173.02"},
    ),
    Case(
        "old module, and the running kernel's is gone: the next boot has one",
        "fit",
        state=SERVING
        | {
            "version": "580.178.04",
            "installed": "580.178.04",
            "next_kernel": OFFERED,
            "bare_kernels": [KERNEL],
            "modules_on_disk": {OFFERED: "580.178.04"},
            "modules_to_install": [f"{PREBUILT}{KERNEL}"],
            "module_releases": {f"{PREBUILT}{KERNEL}": "580.173.02"},
        },
    ),
    Case(
        "module of the running kernel built for another release, by the archive",
        "load",
        (
            "The libraries are 580.178.04, the loaded kernel module is 580.173.02, and the installed module of the "
            f"running kernel {KERNEL} is 580.173.02",
            f"the archive built the module of this kernel for another release of the driver. {COMMAND}",
        ),
        SERVING | {"version": "580.178.04"},
        given={"nvidia_driver_allow_reboot": True},
    ),
    Case(
        "module of the running kernel that DKMS did not build",
        "load",
        ("DKMS did not build the module of this release for this kernel", f'"dkms autoinstall -k {KERNEL}"'),
        DEBIAN_SERVING | {"version": "580.178.04"},
        DEBIAN_13,
    ),
    Case(
        "module that DKMS built for the newest kernel alone",
        "verify",
        (
            f"installed module of the running kernel {KERNEL} is none",
            f"the module was built for kernel {NEWER} alone, and a reboot starts that kernel",
        ),
        DEBIAN_SERVING | {"module_version": "", "next_kernel": NEWER, "modules_on_disk": {NEWER: "580.173.02"}},
        DEBIAN_13,
    ),
    Case(
        "old module still loaded",
        "verify",
        ("the loaded kernel module is 580.100.01", "an old module is still loaded, and a reboot loads the new one"),
        SERVING | {"module_version": "580.100.01"},
    ),
    Case(
        "nouveau holds the GPUs",
        "load",
        ("No engine can run on this host until it is rebooted: nouveau holds the GPUs",),
        SERVING | {"nouveau": True, "module_version": ""},
    ),
    Case(
        "a reboot that would lose the GPUs",
        "load",
        (f"Kernel {NEWER} is installed without a module", "after the next reboot this host would have no GPU"),
        SERVING | {"module_version": "580.100.01", "next_kernel": NEWER, "bare_kernels": [NEWER]},
        given={"nvidia_driver_allow_reboot": True},
    ),
    Case(
        "a reboot that a hook of the engines forbids",
        "load",
        (
            "A reboot is needed (the loaded kernel module is 580.100.01, user space is 580.173.02) and was not done,",
            "failed: Hook before_drain failed: the gateway says no.",
        ),
        SERVING | {"module_version": "580.100.01"},
        given={"nvidia_driver_allow_reboot": True, "nvidia_driver_before_reboot": ["sh", "-c", HOOK]},
    ),
    Case(
        "kernel updated without a module for it",
        "verify",
        (
            f"Kernel {NEWER} is installed without a module of the NVIDIA driver ({KERNEL} runs): after the next reboot",
            f"remove that kernel, or bring {PREBUILT}{NEWER} to the mirror",
            "Until then this host serves",
        ),
        SERVING | {"bare_kernels": [NEWER]},
    ),
    Case(
        "kernel updated without headers for DKMS",
        "verify",
        (f'Install its headers ("apt-get install linux-headers-{NEWER}")',),
        DEBIAN_SERVING | {"bare_kernels": [NEWER]},
        DEBIAN_13,
    ),
    Case(
        "no GPU",
        "load",
        ("NVML does not answer: No devices were found", "journalctl -k -g NVRM"),
        SERVING | {"gpus": [], "nvml_error": "No devices were found"},
    ),
    Case(
        "fewer GPUs than are expected",
        "verify",
        ("NVML names 3 GPUs, and 4 are expected", GPUS[0], "lspci -d 10de:"),
        SERVING | {"gpus": GPUS[:3]},
        given={"nvidia_driver_gpus": 4},
    ),
    Case(
        "persistence off",
        "verify",
        (f"persistence mode is off for {GPUS[1]}", "--no-persistence-mode turns it off"),
        SERVING | {"volatile_gpus": [GPUS[1]]},
    ),
    Case(
        "archive moved to another branch behind the name",
        "verify",
        ("Driver 580.* is requested, and 615.71.09 is installed", "transitional package"),
        SERVING | {"version": "615.71.09", "installed": "615.71.09", "module_version": "615.71.09"},
    ),
    Case(
        "unsupported distribution",
        "validate",
        ("This role installs the driver on Debian-12, Debian-13, Ubuntu-24.04; this host is Rocky-9, whose package",),
        facts=platform("Rocky", "9.4"),
    ),
    Case(
        "branch that Debian's archive does not have",
        "validate",
        ("Debian-12 has branch 535 alone; nvidia_driver_branch is 580", "Set nvidia_driver_source to nvidia"),
        facts=platform("Debian", "12.11"),
        given={"nvidia_driver_source": "distribution"},
    ),
    Case(
        "NVIDIA's repository without an address",
        "validate",
        ("nvidia_driver_source is nvidia and nvidia_driver_repository_url is empty",),
        facts=DEBIAN_13,
        given={"nvidia_driver_repository_url": ""},
    ),
    Case(
        "air gap with prebuilt modules, and no kernel is named",
        "staging",
        (
            "The archive of Ubuntu-24.04 has the driver's modules prebuilt, a package for each kernel, and "
            "staging_kernel_packages (linux-headers-generic) contains none of them",
            f"Add {PREBUILT}KERNEL, with KERNEL as",
        ),
        given={"nvidia_driver_kernel_packages": ["linux-headers-generic"]},
    ),
]


VARIABLES = {
    "nvidia_driver_repository_url": NVIDIA_URL,
    "nvidia_driver_source": "",
    "nvidia_driver_branch": "580",
    "nvidia_driver_version": "",
    "nvidia_driver_gpus": 0,
    "nvidia_driver_allow_change": False,
    "nvidia_driver_newest": False,
    "nvidia_driver_allow_reboot": False,
    # The cases are hosts that are this machine, and stand for others.
    "__nvidia_driver_local": False,
}


CASES = Role("nvidia_driver", "__nvidia_driver_state", SERVING, UBUNTU, VARIABLES, STATES)


@CASES.add
def module_of_cuda_is_loaded_where_only_nvidia_is(place: Path) -> Steps:
    said = "modprobe: FATAL: Module nvidia-uvm not found"
    write_program(place / "bin/modprobe", f'echo "$@" > "$STATE/asked"; echo "{said}" >&2; exit 1')
    given = {"__nvidia_driver_state": SERVING | {"uvm": False}, "ansible_facts": UBUNTU}
    played = yield Run(["load"], False, VARIABLES | given)
    assert (place / "asked").read_text() == "--all nvidia nvidia-uvm\n"
    assert "A kernel module of driver 580.173.02 does not load" in played.message and said in played.message


@CASES.add
def the_reboot_of_this_machine_is_left_to_its_operator(place: Path) -> Steps:
    state = SERVING | {"nouveau": True, "module_version": ""}
    given = {"__nvidia_driver_state": state, "ansible_facts": UBUNTU, "__nvidia_driver_local": True}
    played = yield Run(["load"], False, VARIABLES | given)
    assert not played.failed and played.result is None, "the play has ended for the host"
    assert played.text.endswith(
        "Reboot this machine (sudo systemctl reboot), since nouveau holds the GPUs; then run the same command again, "
        "which goes on from there."
    )
    played = yield Run(["load"], True, VARIABLES | given)
    assert not played.failed and played.text.endswith("A reboot is needed: nouveau holds the GPUs.")


test_case = CASES.make_test()
