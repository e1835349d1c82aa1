# SPDX-License-Identifier: Apache-2.0
"""Bring a simulated GPU server up and take it down again."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lab.docker import (
    LABEL,
    answers,
    can_raise_limits,
    cgroup_arguments,
    docker,
    docker_command,
    docker_output,
    ensure_engine,
    stop_engine_started_by_lab,
)
from lab.engine.build import VERSION
from lab.images import (
    HOST_PACKAGES,
    apt_repositories,
    debian_image,
    engine_image,
    host_image,
    index_wheels,
    models,
    remove_images,
    vendors_image,
)
from lab.nvidia.cards import read_cards
from lab.registry import store
from lab.shell import LAB, alone, as_root, cache_directory, output, remove_cache, run, stage

ENGINE_REPOSITORY = "vllm/vllm-openai"
# Where the host has a carried disk.
MEDIUM = "/media/vllm-edge"
INDEX_CERTIFICATE = "/etc/ssl/lab-index.pem"
"""On the host: what it has to trust for the package index."""
# Longer than any unit of the host may take to stop.
SHUTDOWN_TIMEOUT_S = 300
# Names under which the vendors answer to the host.
VENDORS_ALIASES = ("vendors.lab", "hub.lab", "registry.lab")
# A host that is cut may answer whoever calls it, and calls nobody: nothing new leaves by its interface, not from its
# containers either, and Docker's name server, which is reached otherwise, is closed.
CUT_RULES = (
    "OUTPUT --destination 127.0.0.11 --jump REJECT",
    "OUTPUT --out-interface eth0 --match conntrack --ctstate NEW --jump REJECT",
    "POSTROUTING --table mangle --out-interface eth0 --match conntrack --ctstate NEW --jump DROP",
)

MACHINE_OPTIONS = (
    "--cap-add=ALL",
    "--security-opt=seccomp=unconfined",
    "--security-opt=apparmor=unconfined",
    "--security-opt=systempaths=unconfined",
    "--tmpfs=/run",
    "--tmpfs=/run/lock",
)
"""What systemd in a container needs of `docker create`."""
# What lab-init does of it.
BOOT = "[ ! -e /sys/fs/cgroup/cgroup.controllers ] || mount -o remount,rw /sys/fs/cgroup; exec /lib/systemd/systemd"
# What a command in the host's network gets of this machine's environment.
PASSED = re.compile(
    r"HOME|USER|LOGNAME|LANG|LC_[A-Z]+|TERM|COLUMNS|VIRTUAL_ENV|(ANSIBLE|MOLECULE|VLLM_EDGE|PYTHON)_?[A-Z_]+"
)
ANOTHER = (
    "make another with a name and port of its own: VLLM_EDGE_LAB_NAME=second VLLM_EDGE_LAB_SSH_PORT=22122 make lab"
)
GATEWAY_PORT = 8443
"""Port of the host's gateway, as inventories/lab has it."""
VOLUMES = {"docker": "/var/lib/docker", "data": "/data"}
"""A host's disks, and where it has them."""


@dataclass(frozen=True)
class Server:
    """One simulated host with its vendors, by name."""

    name: str
    ssh_port: int
    medium: str = ""
    """Directory of this machine that is in the host as a carried disk would be, read-only."""
    cpu: str = ""
    """The CPU that a new host's engines compute as on; empty for that of this machine."""
    seed: str = ""
    """What a new host's engines take besides their weights; empty for the default host."""
    gpus: str = ""
    """The GPUs of a new host, as VLLM_EDGE_LAB_GPUS has them; empty for four L4."""
    gateway_port: int = 0
    """Port of this machine that leads to GATEWAY_PORT of a new host; 0 for one that follows from the port of ssh."""
    join: str = ""
    """Name of the lab whose network and vendors the host has; empty for its own."""

    def __post_init__(self) -> None:
        """Refuse names that Docker does not take; the first is also the name of a directory that is removed."""
        for variable, name in (("NAME", self.name), ("JOIN", self.network)):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
                raise SystemExit(
                    f"lab: VLLM_EDGE_LAB_{variable} is {name[:80]!a}; a name has up to 63 letters, digits, '_', '.' "
                    "and '-', and begins with a letter or digit"
                )

    @property
    def published_gateway_port(self) -> int:
        return self.gateway_port or self.ssh_port + 400

    @property
    def host(self) -> str:
        return f"{self.name}-host"

    @property
    def network(self) -> str:
        return self.join or self.name

    @property
    def vendors(self) -> str:
        return f"{self.network}-vendors"

    @property
    def generated(self) -> Path:
        """Directory of what the inventory needs to know of this lab: keys, known hosts, variables."""
        return LAB / "generated" / self.name


def prepare() -> dict[str, str]:
    """Build every image and artefact; returns their names. What is there already is kept."""
    with alone():
        with stage("Docker Engine"):
            ensure_engine()
        # Downloads of the one are waited for while the other computes.
        with ThreadPoolExecutor() as pool:
            around = pool.submit(prepare_surroundings)
            engine = engine_image()
            return {"engine": engine, "hub": str(models(engine)), **around.result()}


def prepare_surroundings() -> dict[str, str]:
    """What the host and its vendors are made of, except for the engine's image."""
    return {
        "distribution": debian_image("trixie", HOST_PACKAGES),
        "host": host_image(),
        "vendors": vendors_image(),
        "apt": str(apt_repositories()),
        "wheels": str(index_wheels()),
    }


def container_state(name: str) -> str:
    """State of a container, `absent` when there is none."""
    done = docker("inspect", "--format", "{{.State.Status}}", name, check=False)
    return done.stdout.strip() if done.returncode == 0 else "absent"


def up(server: Server, copy_of: str = "") -> None:
    """Bring the lab up, or leave it as it is where it already runs; a new host begins as a copy of another lab's."""
    if (
        server.gpus
        and container_state(server.host) != "absent"
        and read_cards(server.gpus) != read_cards(gpus_of(server))
    ):
        raise SystemExit(
            f"lab: VLLM_EDGE_LAB_GPUS is {server.gpus!r}, and the host of the lab {server.name} has other GPUs "
            f"({gpus_of(server) or '4xL4'}). A host keeps its GPUs: remove it by `make lab-down`, or {ANOTHER}"
        )
    names = prepare()
    for lab, name in ((server.name, server.host), (server.network, server.vendors)):
        if container_state(name) != "absent" and not labelled(lab, name):
            raise SystemExit(
                f"lab: there is a container {name} that the lab did not make; it stays as it is: {ANOTHER}"
            )
    if container_state(server.host) != "absent" and not (server.generated / "ssh_config").exists():
        raise SystemExit(
            f"lab: there is a lab {server.name} already, and its keys are not in {server.generated}: another checkout "
            f"made it. Remove it by `make lab-down`, or {ANOTHER}"
        )
    if docker("network", "inspect", server.network, check=False).returncode != 0:
        docker("network", "create", f"--label={LABEL}={server.network}", server.network)
    start_vendors(server, names)
    with alone():
        publish_engine_image(names["engine"])
    start_host(server, names["host"], copy_of=copy_of)
    certificate = server.generated / "index.pem"
    wait = "until test -s /srv/index.pem; do sleep 0.1; done; cat /srv/index.pem"
    certificate.write_text(docker_output("exec", server.vendors, "timeout", "30", "sh", "-c", wait) + "\n")
    copy_in(server, certificate, INDEX_CERTIFICATE, 0)
    write_variables(server, names)


def start_vendors(server: Server, names: dict[str, str]) -> None:
    """Start the vendors' container; one with other contents is replaced."""
    wanted = f"{names['vendors']} {names['apt']} {names['hub']} {names['wheels']}"
    done = docker(
        "inspect",
        "--format",
        '{{.State.Status}} {{index .Config.Labels "vllm-edge-lab.inputs"}}',
        server.vendors,
        check=False,
    )
    if done.stdout.strip() == f"running {wanted}":
        return
    images = cache_directory() / "images"
    images.mkdir(exist_ok=True)
    with stage("vendors: apt repositories, package index, model hub, image registry"):
        for container in labelled(server.network, server.vendors):
            docker("rm", "--force", "--volumes", container, check=False)
        docker(
            "create",
            f"--name={server.vendors}",
            f"--label={LABEL}={server.network}",
            f"--label={LABEL}.inputs={wanted}",
            f"--network={server.network}",
            *[f"--network-alias={alias}" for alias in VENDORS_ALIASES],
            "--publish=127.0.0.1::5000",
            f"--volume={names['apt']}:/srv/apt:ro",
            f"--volume={names['hub']}:/srv/hub:ro",
            f"--volume={names['wheels']}:/srv/wheels:ro",
            f"--volume={images}:/srv/registry:ro",
            names["vendors"],
        )
        # Containers of this machine, in which staging asks the package index, reach it on this network.
        docker("network", "connect", "bridge", server.vendors)
        docker("start", server.vendors)
        wait_for_registry(int(docker_output("port", server.vendors, "5000/tcp").rsplit(":", 1)[1]), 30)


def publish_release(release: str) -> None:
    """Put the engine's image of another release beside that of the default one, into the registry of every lab."""
    with alone():
        publish_engine_image(engine_image(release), release)


def publish_engine_image(image: str, release: str = VERSION) -> None:
    """Put the engine's base image into the directory that the lab's registry serves, unless it is there."""
    images = cache_directory() / "images"
    pushed = images / f"pushed-{release}"
    identity = docker_output("image", "inspect", "--format", "{{.Id}}", image)
    if pushed.exists() and pushed.read_text() == identity:
        return
    with stage(f"copy {ENGINE_REPOSITORY}:v{release} to the lab's registry"):
        store(image, images, ENGINE_REPOSITORY, f"v{release}")
    pushed.write_text(identity)


def start_host(server: Server, image: str, *options: str, copy_of: str = "") -> None:
    """Boot the host and wait until it answers with the known host key; one that is there keeps what it holds."""
    state = container_state(server.host)
    if state == "running":
        return
    with stage("boot the host"):
        if state == "absent":
            create_host(server, copy_disks(server, copy_of) if copy_of else image, *options)
            if copy_of:
                (identity := server.generated / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
                copy_in(server, identity, "/etc/machine-id", 0, mode=0o444)
        docker("start", server.host)
        wait_for_ssh(server, 60)


def copy_disks(server: Server, name: str) -> str:
    """Copy the volumes of the host of the lab `name`, which is paused meanwhile; returns an image of its system."""
    source = Server(name, 0)
    docker("pause", source.host, check=False)  # one that is switched off need not be
    try:
        image = docker_output("commit", "--pause=false", f"--change=LABEL {LABEL}.copy={server.name}", source.host)
        for volume in VOLUMES:
            docker("volume", "create", f"--label={LABEL}={server.name}", f"{server.name}-{volume}")
            disks = [f"--volume={source.name}-{volume}:/from:ro", f"--volume={server.name}-{volume}:/to"]
            docker("run", "--rm", "--cap-add=SYS_ADMIN", *disks, "--entrypoint=cp", image, "-a", "/from/.", "/to")
    finally:
        docker("unpause", source.host, check=False)
    return image


def create_host(server: Server, image: str, *options: str) -> None:
    """Make the host's container, with fresh keys, and leave it switched off. Options are those of `docker create`."""
    keys(server)
    for volume in VOLUMES:
        docker("volume", "create", f"--label={LABEL}={server.name}", f"{server.name}-{volume}")
    docker(
        "create",
        f"--name={server.host}",
        f"--label={LABEL}={server.name}",
        f"--hostname={server.name if server.join else 'xr7620-lab'}",
        "--stop-signal=SIGRTMIN+3",
        # A host that reboots itself comes back; one that this program stopped waits for it.
        "--restart=unless-stopped",
        f"--network={server.network}",
        f"--publish=127.0.0.1:{server.ssh_port}:22",
        f"--publish=127.0.0.1:{server.published_gateway_port}:{GATEWAY_PORT}",
        *machine_options(),
        "--device-cgroup-rule=a *:* rwm",
        "--tmpfs=/var/lib/lab-gpu:mode=0755",
        "--shm-size=1g",
        *([f"--env=VLLM_EDGE_LAB_CPU={server.cpu}"] if server.cpu else []),
        *([f"--env=VLLM_EDGE_LAB_SEED={server.seed}"] if server.seed else []),
        *([f"--env=VLLM_EDGE_LAB_GPUS={server.gpus}"] if server.gpus else []),
        *[f"--volume={server.name}-{volume}:{place}" for volume, place in VOLUMES.items()],
        *([f"--mount=type=bind,readonly,source={server.medium},target={MEDIUM}"] if server.medium else []),
        *options,
        image,
    )
    copy_in(server, server.generated / "ssh_host_ed25519_key", "/etc/ssh/ssh_host_ed25519_key", 0)
    copy_in(server, server.generated / "id_ed25519.pub", "/home/ops/.ssh/authorized_keys", 1000)


def machine_options() -> list[str]:
    return [*MACHINE_OPTIONS, *([] if can_raise_limits() else ["--cap-drop=SYS_RESOURCE"]), *cgroup_arguments()]


def start_neighbour(server: Server) -> str:
    """Boot another machine of the lab, Debian as it is installed; returns the name of its container.

    The port of loopback by which this machine reaches the host's gateway leads there from it, too.
    """
    name, port = f"{server.name}-neighbour", read_gateway_port(server)
    docker("rm", "--force", "--volumes", name, check=False)
    words = [f"--name={name}", f"--label={LABEL}={server.name}", f"--network={server.network}", *machine_options()]
    docker("run", "--detach", *words, "--entrypoint=sh", host_image(), "-c", BOOT)
    booted = "until systemctl is-system-running --wait | grep -qE 'running|degraded'; do sleep 0.2; done"
    docker("exec", name, "timeout", "60", "sh", "-c", booted)
    way = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", "/usr/lib/systemd/systemd-socket-proxyd"]
    docker("exec", name, "systemd-run", "--quiet", "--unit=way", *way, f"{server.host}:{GATEWAY_PORT}")
    return name


def copy_in(server: Server, source: Path, target: str, owner: int, mode: int = 0o600) -> None:
    """Copy a file with the mode, and the owner's ids, into the host's container, which need not run."""
    entry, content, archive = tarfile.TarInfo(Path(target).name), source.read_bytes(), io.BytesIO()
    entry.size, entry.mode, entry.uid, entry.gid, entry.mtime = len(content), mode, owner, owner, int(time.time())
    with tarfile.open(fileobj=archive, mode="w") as packed:
        packed.addfile(entry, io.BytesIO(content))
    command = [*docker_command(), "cp", "-", f"{server.host}:{Path(target).parent}"]
    subprocess.run(command, check=True, input=archive.getvalue(), stdout=subprocess.PIPE)


def keys(server: Server) -> None:
    """A fresh key pair for the operator and one for the host, and the client's configuration that knows the host."""
    shutil.rmtree(server.generated, ignore_errors=True)
    server.generated.mkdir(parents=True)
    for name in ("id_ed25519", "ssh_host_ed25519_key"):
        run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", server.name, "-f", server.generated / name],
            quiet=True,
        )
    public = (server.generated / "ssh_host_ed25519_key.pub").read_text().split()
    (server.generated / "known_hosts").write_text(f"[127.0.0.1]:{server.ssh_port} {public[0]} {public[1]}\n")
    settings = {
        "HostName": "127.0.0.1",
        "Port": server.ssh_port,
        "User": "ops",
        "IdentityFile": server.generated / "id_ed25519",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": server.generated / "known_hosts",
        "StrictHostKeyChecking": "yes",
    }
    lines = [f"Host {server.host}", *[f"  {key} {value}" for key, value in settings.items()]]
    (server.generated / "ssh_config").write_text("\n".join(lines) + "\n")


def wait_for_registry(port: int, timeout_s: float) -> None:
    """Wait until the registry answers; Docker accepts connections on a published port before anything listens there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"lab: the registry on 127.0.0.1:{port} does not answer after {timeout_s:.0f} s"
                ) from None
            time.sleep(0.2)


def ssh_command(server: Server) -> list[str]:
    return ["ssh", "-F", str(server.generated / "ssh_config"), server.host]


def wait_for_ssh(server: Server, timeout_s: float, whole_boot: bool = True) -> None:
    """Wait until the operator can log in and, with `whole_boot`, systemd has finished booting."""
    deadline = time.monotonic() + timeout_s
    # The end of the boot may fall between its question and its waiting, which then lasts for ever: it is asked again.
    question = ["timeout", "5", "systemctl", "is-system-running", "--wait"] if whole_boot else ["true"]
    while True:
        done = run([*ssh_command(server), *question], check=False, quiet=True)
        if done.returncode == 0 or (done.returncode != 255 and done.stdout.split()[-1:] == ["degraded"]):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"lab: {server.host} does not answer over ssh after {timeout_s:.0f} s:\n{done.stdout}")
        time.sleep(0.3)


def reboot(server: Server, hard: bool) -> None:
    """What a reboot is to the host: an orderly shutdown by its systemd, or a power cut, and a boot with the same disk.

    Memory, /run and the simulated GPUs begin anew, faults and claims with them. Returns when the operator can log in;
    units may still be starting.
    """
    if container_state(server.host) != "running":
        raise SystemExit(f"lab: {server.host} does not run, so it cannot reboot; `python -m lab up` starts it")
    was_cut = host_iptables(server, "--check", CUT_RULES[0], check=False)
    with stage("power cut" if hard else "orderly shutdown, as systemctl reboot does it"):
        # SIGRTMIN+5 is systemd's word for reboot.target.
        docker("kill", "--signal=SIGKILL" if hard else "--signal=SIGRTMIN+5", server.host)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while container_state(server.host) == "running":
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"lab: {server.host} is still going down after {SHUTDOWN_TIMEOUT_S} s; `docker exec {server.host} "
                    "systemctl list-jobs` shows what it waits for, `python -m lab reboot --hard` does not wait"
                )
            time.sleep(0.2)
    with stage("boot the host"):
        docker("start", server.host)
        if was_cut:
            cut(server)
        wait_for_ssh(server, 60, whole_boot=False)


def address(container: str, network: str) -> str:
    """Address of a container on a network."""
    form = f'{{{{(index .NetworkSettings.Networks "{network}").IPAddress}}}}'
    return docker_output("inspect", "--format", form, container)


def read_gateway_port(server: Server) -> int:
    return int(docker_output("port", server.host, f"{GATEWAY_PORT}/tcp").splitlines()[0].rpartition(":")[2])


def gpus_of(server: Server) -> str:
    """VLLM_EDGE_LAB_GPUS of the host that is there; empty where it was made without."""
    form = "{{range .Config.Env}}{{println .}}{{end}}"
    settings = docker_output("inspect", "--format", form, server.host).splitlines()
    name = "VLLM_EDGE_LAB_GPUS="
    return next((line.removeprefix(name) for line in settings if line.startswith(name)), "")


def write_variables(server: Server, names: dict[str, str]) -> None:
    """What only this lab knows and the inventory needs: port, keys, fingerprints of the generated vendor keys."""
    fingerprints = json.loads((Path(names["apt"]) / "fingerprints.json").read_text())
    variables = {
        "ansible_port": server.ssh_port,
        "ansible_ssh_private_key_file": str(server.generated / "id_ed25519"),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={server.generated / 'known_hosts'} -o IdentitiesOnly=yes",
        "lab_fingerprints": fingerprints,
        "lab_address": address(server.host, server.network),
        "lab_gateway_port": read_gateway_port(server),
        "lab_gpus": [
            {"name": card["name"], "memory_mib": int(card["total_mib"])} for card in read_cards(gpus_of(server))
        ],
        # Containers do not know the names that the host knows, so they reach the package index by a proxy.
        "lab_proxy": f"http://{address(server.vendors, server.network)}:3128",
        "lab_proxy_of_staging": f"http://{address(server.vendors, 'bridge')}:3128",
        # For whoever downloads on this machine, which does not know the names that the host knows.
        "lab_distribution_image": names["distribution"],
        "lab_index_certificate": str(server.generated / "index.pem"),
        "lab_hub": f"http://{address(server.vendors, server.network)}:8081",
        "lab_registry": docker_output("port", server.vendors, "5000/tcp").splitlines()[0],
    }
    (server.generated / "vars.json").write_text(json.dumps(variables, indent=2) + "\n")


def labelled(lab: str, name: str = "") -> list[str]:
    """Containers that a lab made, or its container of that name."""
    named = [f"--filter=name=^/?{re.escape(name)}$"] if name else []
    return docker_output("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={LABEL}={lab}", *named).split()


def remove(server: Server) -> None:
    """Remove what carries this lab's label: containers, volumes, copies and network; and its keys.

    The network and its vendors stay while a host of another lab has them.
    """
    label, vendors = f"--filter=label={LABEL}={server.name}", labelled(server.network, server.vendors)
    if containers := [container for container in labelled(server.name) if container not in vendors]:
        docker("rm", "--force", "--volumes", *containers, check=False)
    if volumes := docker_output("volume", "ls", "--quiet", label).split():
        docker("volume", "rm", *volumes, check=False)
    if copies := docker_output("image", "ls", "--quiet", f"--filter=label={LABEL}.copy={server.name}").split():
        docker("image", "rm", *copies, check=False)
    users = docker_output("ps", "--all", "--quiet", "--no-trunc", f"--filter=network={server.network}").split()
    if not set(users) - set(vendors):
        if vendors:
            docker("rm", "--force", "--volumes", *vendors, check=False)
        owned = f"--filter=label={LABEL}={server.network}"
        if networks := docker_output("network", "ls", "--quiet", owned).split():
            docker("network", "rm", *networks, check=False)
    shutil.rmtree(server.generated, ignore_errors=True)


def down(server: Server, keep_images: bool) -> None:
    """Remove the lab; without `keep_images` every lab, their images, their cache and an Engine that they started."""
    # Refuses a cache that is not the lab's before anything is removed.
    cache_directory()
    if not answers():
        ensure_engine()
    remove(server)
    if keep_images:
        return
    form = f'{{{{.Label "{LABEL}"}}}}'
    names = set(docker_output("ps", "--all", f"--filter=label={LABEL}", "--format", form).split())
    # Those first whose hosts have the network of another lab.
    for name in sorted(names, key=lambda name: container_state(f"{name}-vendors") != "absent"):
        remove(Server(name, server.ssh_port))
    remove_images()
    stop_engine_started_by_lab()
    remove_cache()


def host_iptables(server: Server, action: str, rule: str, check: bool = True) -> bool:
    """Run iptables in the network namespace of the host, which has no such program of its own; whether it succeeded."""
    pid = docker_output("inspect", "--format", "{{.State.Pid}}", server.host)
    command = [*as_root(), "nsenter", f"--target={pid}", "--net", "iptables", "--wait"]
    return run([*command, action, *rule.split()], check=check, quiet=True).returncode == 0


def cut_rules(server: Server, peer: str = "") -> tuple[str, ...]:
    """What takes the network away from the host, or only the host of the lab `peer`, whose packets are lost."""
    if not peer:
        return CUT_RULES
    other = json.loads((Server(peer, 0).generated / "vars.json").read_text())["lab_address"]
    return (f"INPUT --source {other} --jump DROP", f"OUTPUT --destination {other} --jump DROP")


def cut(server: Server, peer: str = "") -> None:
    """Take the network away from the host: vendors, names and every address; ssh to it goes on.

    Docker's own way, an internal network, would silently take the published ssh port away too. With `peer` the host
    loses that lab's host alone, and connections to it hang.
    """
    if container_state(server.host) != "running":
        raise SystemExit(f"lab: {server.host} does not run, so there is nothing to cut; `python -m lab up` starts it")
    for rule in cut_rules(server, peer):
        if not host_iptables(server, "--check", rule, check=False):
            host_iptables(server, "--append", rule)
    if not peer and server.network in networks(server.vendors):
        docker("network", "disconnect", server.network, server.vendors)


def reconnect(server: Server, peer: str = "") -> None:
    """Give the host its network back, or the host of the lab `peer`."""
    for rule in cut_rules(server, peer):
        if host_iptables(server, "--check", rule, check=False):
            host_iptables(server, "--delete", rule)
    if server.network not in networks(server.vendors):
        aliases = [f"--alias={alias}" for alias in VENDORS_ALIASES]
        docker("network", "connect", *aliases, server.network, server.vendors)


def offline_command(server: Server, words: list[str]) -> list[str]:
    """`words` of this machine in the network of the host: as cut as the host is, which is then at 127.0.0.1.

    A command line can be read by every user, so sudo gets the names of what Ansible and Python need, not the values;
    only PATH, which sudo replaces, is given as a value.
    """
    pid = docker_output("inspect", "--format", "{{.State.Pid}}", server.host)
    enter = ["nsenter", f"--target={pid}", "--net", f"--setuid={os.getuid()}", f"--setgid={os.getgid()}"]
    if not (root := as_root()):
        return [*enter, *words]
    passed = ",".join(sorted(name for name in os.environ if PASSED.fullmatch(name)))
    return [*root, f"--preserve-env={passed}", "env", f"PATH={os.environ['PATH']}", *enter, *words]


def networks(container: str) -> list[str]:
    form = "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}"
    return docker_output("inspect", "--format", form, container).split()


def status(server: Server) -> None:
    """Print what of the lab is there."""
    for name in (server.host, server.vendors):
        print(f"{name}: {container_state(name)}")
    if container_state(server.host) == "running":
        print(f"ssh: {' '.join(ssh_command(server))}")
        print(f"boot: {output([*docker_command(), 'inspect', '--format', '{{.State.StartedAt}}', server.host])}")
