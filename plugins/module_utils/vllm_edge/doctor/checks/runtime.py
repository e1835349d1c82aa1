# SPDX-License-Identifier: Apache-2.0
"""The checks of Docker, the NVIDIA container toolkit and CDI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...facts.dpkg import parse_upstream_version
from ...facts.model import TOOLKIT, Facts
from ...gpu import toolkit
from ...gpu.access import REMEDY
from ...system.cdi import UVM, compare
from ..contract import HOST_STAGE, Verdict, decline_to_judge, fail, good, known, listed, numbers, warn

# Docker has CDI since 25, and from 28.2.0 on without features.cdi (moby/moby#49963).
CDI_SINCE = (25,)
CDI_DEFAULT_SINCE = (28, 2, 0)
# opencontainers/runc#3671: a regression of 1.1.3, corrected in 1.1.7.
RUNC_WITHOUT_NVIDIA = ((1, 1, 3), (1, 1, 6))
# Settings of daemon.json whose default is true, and what they allow.
ADVICE: Mapping[str, str] = {
    "icc": "those of Docker's default network can reach each other",
    "userland-proxy": "each published port has a process of root that forwards connections",
}


def parse_docker_version(facts: Facts) -> tuple[int, ...]:
    if not facts.runtime.docker_version:
        decline_to_judge("Docker is not installed")
    return numbers(facts.runtime.docker_version)


def check_docker_installed(facts: Facts) -> Verdict:
    if facts.runtime.docker_version:
        return good(f"Docker Engine {facts.runtime.docker_version}")
    return fail("no dockerd", f"{HOST_STAGE} installs it.")


def check_docker_version(facts: Facts) -> Verdict:
    if parse_docker_version(facts) >= CDI_SINCE:
        return good(f"{facts.runtime.docker_version} knows CDI")
    return fail(
        f"Docker Engine {facts.runtime.docker_version} does not know CDI, which came with 25",
        "Install a newer one from Docker's repository; the role container_runtime does so where the distribution's is "
        "too old. It restarts Docker, and the containers with it.",
    )


def check_runc(facts: Facts) -> Verdict:
    version = facts.runtime.runc_version
    if not version:
        decline_to_judge("runc does not say its version")
    first, last = RUNC_WITHOUT_NVIDIA
    if first <= numbers(version) <= last:
        return warn(
            f"runc {version} tells systemd nothing of devices without an entry in /dev/char, as NVIDIA's are "
            "(opencontainers/runc#3671): where systemd manages the cgroups, 'systemctl daemon-reload' takes the GPUs "
            "from all containers, those with CDI too",
            "Install runc 1.1.7 or newer, for example with containerd.io of Docker's repository, and start the "
            "containers again.",
        )
    return good(f"runc {version}")


def check_docker_running(facts: Facts) -> Verdict:
    parse_docker_version(facts)
    unit = known(facts.runtime.docker)
    if unit.active_state != "active":
        return fail(
            f"docker.service is {unit.active_state}",
            "'systemctl start docker.service'; 'journalctl -u docker.service' says why it ended.",
        )
    if not unit.starts_at_boot:
        return warn("docker.service runs and does not start at boot", "'systemctl enable docker.service'")
    return good("docker.service runs and starts at boot")


def check_docker_config(facts: Facts) -> Verdict:
    if facts.runtime.config_error:
        return fail(
            facts.runtime.config_error,
            "Correct it before Docker restarts: it would not start ('dockerd --validate' checks the file).",
        )
    config = known(facts.runtime.config)
    if {**facts.runtime.flags, **config}.get("live-restore") and known(facts.runtime.in_swarm):
        return fail(
            "live-restore is set and this host is a node of a swarm: Docker will not start the next time",
            f"Take live-restore out of /etc/docker/daemon.json and 'systemctl reload docker' ({HOST_STAGE} does so), "
            "or leave the swarm ('docker swarm leave').",
        )
    return good(
        f"/etc/docker/daemon.json is valid: {', '.join(sorted(config))}" if config else "no daemon.json settings"
    )


def check_docker_settings(facts: Facts) -> Verdict:
    parse_docker_version(facts)
    config = {**facts.runtime.flags, **known(facts.runtime.config)}
    hosts = config.get("hosts")
    addresses = [hosts] if isinstance(hosts, str) else hosts if isinstance(hosts, list) else []
    open_to = [ascii(host) for host in addresses if str(host).startswith("tcp:")]
    if open_to and config.get("tlsverify") is not True:
        return warn(
            f"whoever reaches {listed(open_to)} is root on this host, because Docker asks nobody there who they are",
            "Remove the address (hosts in /etc/docker/daemon.json, -H in docker.service), or set tlsverify and "
            "certificates; use 'DOCKER_HOST=ssh://...' from elsewhere.",
        )
    if config.get("seccomp-profile") == "unconfined":
        return warn(
            "seccomp-profile is unconfined: containers, engines too, may use every system call",
            "Remove seccomp-profile from /etc/docker/daemon.json and restart Docker.",
        )
    loose = [text for name, text in ADVICE.items() if config.get(name) is not False]
    remapped = ", outside of its userns-remap" if config.get("userns-remap") else ""
    told = f"engines run as a user of their own without capabilities{remapped}"
    if not loose:
        return good(told)
    return good(
        f"{told}; for the containers of others: {'; '.join(loose)}",
        "On a host that is shared, consider "
        + " and ".join(f'"{name}": false' for name in ADVICE if config.get(name) is not False)
        + " in /etc/docker/daemon.json; it is not set for you, because it changes other people's containers.",
    )


def check_cdi_enabled(facts: Facts) -> Verdict:
    version = parse_docker_version(facts)
    if version < CDI_SINCE:
        decline_to_judge("this Docker does not know CDI")
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
    return {name: parse_upstream_version(str(packages[name]["version"])) for name in TOOLKIT if name in packages}


def check_toolkit(facts: Facts) -> Verdict:
    found = toolkit_packages(facts)
    missing = [name for name in TOOLKIT if name not in found]
    if missing:
        return fail(f"not installed: {', '.join(missing)}", f"{HOST_STAGE} installs the container toolkit.")
    versions = sorted(set(found.values()))
    if len(versions) > 1:
        told = ", ".join(f"{name} {version}" for name, version in found.items())
        return fail(told, f"Its four packages have to be of one version: {HOST_STAGE} installs the pinned one.")
    if versions[0] in toolkit.KNOWN_BAD:
        return warn(
            f"{versions[0]}: {toolkit.KNOWN_BAD[versions[0]]}",
            "Set container_runtime_toolkit_version to another release and run the host stage.",
        )
    if numbers(versions[0]) < toolkit.REFRESH_SINCE:
        return warn(
            f"{versions[0]} has no unit that keeps the CDI specification current; that came with 1.18",
            "Set container_runtime_toolkit_version to a newer release and run the host stage.",
        )
    return good(f"container toolkit {versions[0]}")


def require_toolkit(facts: Facts) -> None:
    if not toolkit_packages(facts):
        decline_to_judge("the container toolkit is not installed")


def check_toolkit_held(facts: Facts) -> Verdict:
    require_toolkit(facts)
    packages = known(facts.system.packages)
    loose = [name for name in TOOLKIT if name in packages and not packages[name]["held"]]
    if loose:
        return warn(f"apt may replace {listed(loose)}", f"{HOST_STAGE} holds them; by hand: 'apt-mark hold'.")
    return good("the packages of the toolkit are held")


def check_cdi_refresh(facts: Facts) -> Verdict:
    require_toolkit(facts)
    unit = known(facts.runtime.refresh)
    if unit.active_state == "active" and unit.starts_at_boot:
        if not facts.runtime.creates_nodes:
            return warn(
                f"nvidia-cdi-refresh.service does not create {UVM}: if nothing else does before it runs at boot, CUDA "
                "fails in containers with error 999",
                f"{HOST_STAGE} installs a drop-in that does.",
            )
        return good("nvidia-cdi-refresh.path watches the driver and starts at boot")
    return warn(
        f"nvidia-cdi-refresh.path is {unit.active_state if unit.loaded else 'not there'}",
        "'systemctl enable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service': the specification in /var/run "
        "is gone after a boot and old after an upgrade of the driver.",
    )


def specifications(facts: Facts) -> Mapping[str, Sequence[str]]:
    found = known(facts.runtime.specifications)
    if not found:
        require_toolkit(facts)
        decline_to_judge("there is no CDI specification of NVIDIA's GPUs")
    return found


def check_cdi_current(facts: Facts) -> Verdict:
    specifications(facts)
    found = facts.driver.versions
    mounted = sorted({version for versions in found.in_use.values() for version in versions})
    if not found.library or not mounted:
        decline_to_judge(
            "the driver's version is not known" if mounted else "the specification mounts no driver's library"
        )
    if found.library not in mounted:
        return fail(
            f"{', '.join(found.in_use)} was made for driver {', '.join(mounted)}, the host has {found.library}",
            "'systemctl restart nvidia-cdi-refresh.service' makes it anew; one in /etc/cdi is made by hand: remove it.",
        )
    return good(f"made for driver {found.library}, which the host has")


def check_cdi_conflict(facts: Facts) -> Verdict:
    found = specifications(facts)
    counts = Counter(device for devices in found.values() for device in devices)
    twice = sorted(device for device, count in counts.items() if count > 1)
    if not twice:
        return good("every device is defined once")
    paths = sorted(path for path, devices in found.items() if {*twice} & {*devices})
    made = [path for path in paths if path.startswith("/etc/")] or paths[1:]
    return fail(
        f"{' and '.join(paths)} both define {listed([f'nvidia.com/gpu={device}' for device in twice], 3)}",
        f"Keep the one that nvidia-cdi-refresh writes in /var/run/cdi and remove {', '.join(made)}: one of the two is "
        "old after the next upgrade of the driver.",
    )


def check_cdi_devices(facts: Facts) -> Verdict:
    gpus = [gpu.uuid for gpu in facts.gpus.answering]
    found = known(facts.runtime.specifications)
    if not found:
        require_toolkit(facts)
        return fail(
            "no CDI specification names NVIDIA's GPUs",
            "'systemctl restart nvidia-cdi-refresh.service' makes one; 'journalctl -u nvidia-cdi-refresh' says why "
            "there is none.",
        )
    devices = [f"nvidia.com/gpu={device}" for names in found.values() for device in names]
    missing, gone = compare(devices, gpus)
    if missing:
        return fail(
            f"no CDI device for {', '.join(missing)}",
            "'systemctl restart nvidia-cdi-refresh.service'; 'nvidia-ctk cdi list' shows what it made.",
        )
    if facts.runtime.without_uvm:
        return fail(
            f"{', '.join(facts.runtime.without_uvm)} does not list {UVM}: NVML works in containers, and CUDA fails "
            "with error 999",
            f"{HOST_STAGE} makes nvidia-cdi-refresh.service create the node at each boot, and the specification anew.",
        )
    if not gpus:
        decline_to_judge("no GPU answers")
    if gone:
        return warn(
            f"CDI devices for {', '.join(gone)}, which the host does not have",
            "'systemctl restart nvidia-cdi-refresh.service' makes the specification anew.",
        )
    return good(f"each of the {len(gpus)} GPUs has a CDI device by its UUID")


def check_gpu_access(facts: Facts) -> Verdict:
    parse_docker_version(facts)
    access = known(facts.runtime.access)
    if access.at_risk:
        return warn(access.risk, REMEDY)
    names = sorted(access.by_device + access.by_hook)
    return good(f"a daemon-reload takes no GPU from {listed(names)}" if names else "no running container has a GPU")


def check_leftovers(facts: Facts) -> Verdict:
    parse_docker_version(facts)
    left = known(facts.runtime.leftovers)
    if not left:
        return good("no benchmark or reference answer has left a container")
    return warn(
        f"{listed(left)}: left by a benchmark or reference answer that was killed",
        f"'docker rm --force {' '.join(left)}'; the next run of the same kind does so, too.",
    )
