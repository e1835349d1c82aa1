# SPDX-License-Identifier: Apache-2.0
"""The checks of the operating system: distribution, dpkg, clock and limits."""

from __future__ import annotations

from ...facts.model import Facts
from ..contract import NotKnown, Verdict, fail, good, known, listed, warn

# vLLM raises its limit of open files to this when it starts, as far as it may (set_ulimit in vllm/utils).
FILES_WANTED = 65_535
SUPPORTED = {
    "debian-12": "Debian 12",
    "debian-13": "Debian 13",
    "ubuntu-24.04": "Ubuntu 24.04",
}
RED_HAT = ("rhel", "rocky", "almalinux", "centos", "fedora", "ol")


def check_distribution(facts: Facts) -> Verdict:
    system = facts.system
    if system.distribution in SUPPORTED:
        return good(system.name)
    if system.distribution.split("-")[0] in RED_HAT:
        return fail(
            system.name,
            "The RHEL family is not supported, nobody has run these roles there: use Debian 12 or 13, or Ubuntu 24.04.",
        )
    return fail(system.name, f"Install {', '.join(SUPPORTED.values())}: package names and sources are known for those.")


def check_dpkg(facts: Facts) -> Verdict:
    if known(facts.system.dpkg_interrupted):
        return fail(
            "a run of dpkg was cut off: /var/lib/dpkg/updates is not empty",
            "'dpkg --configure -a', then see that 'dpkg --audit' is silent.",
        )
    known(facts.system.packages)
    if half := facts.system.half_installed:
        return fail(
            f"half installed or half removed: {listed(half)}",
            "'dpkg --configure -a', then 'apt-get --fix-broken install', until 'dpkg --audit' is silent.",
        )
    return good("every package is whole")


def check_apt_lock(facts: Facts) -> Verdict:
    locks = known(facts.system.locks)
    if not locks:
        return good("nobody holds a lock of apt or dpkg")
    return warn(
        "; ".join(f"{lock.command} (pid {lock.pid}) holds {lock.path}" for lock in locks),
        f"Let it finish: 'ps -fp {locks[0].pid}' shows what it does. Do not remove the file, two programs at once ruin "
        "dpkg's database.",
    )


def check_time(facts: Facts) -> Verdict:
    if known(facts.system.synchronized):
        return good("the clock is synchronised")
    return warn(
        "the clock is not synchronised",
        "'timedatectl set-ntp true', or install chrony: signatures of repositories, TLS and the times in the journal "
        "depend on it.",
    )


def check_file_limits(facts: Facts) -> Verdict:
    docker = known(facts.runtime.docker)
    limit = docker.files_limit
    if not docker.loaded:
        raise NotKnown("systemd knows no docker.service")
    if limit is None or limit >= FILES_WANTED:
        return good(f"containers may open {'any number of' if limit is None else limit} files")
    return warn(
        f"docker.service limits containers to {limit} open files, vLLM wants {FILES_WANTED}",
        "Raise LimitNOFILE of docker.service ('systemctl edit docker.service'); it counts from Docker's next start on.",
    )
