# SPDX-License-Identifier: Apache-2.0
"""Faults of a host, each with the checks that name it, and what only looks like a fault."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ansible.module_utils.vllm_edge.facts.model import TOOLKIT
from ansible.module_utils.vllm_edge.facts.reader import GPU_FIELDS
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, DRIVER, DROP_IN, GPUS, KERNEL, LOADED, NEW_GPU, NODES, FakeHost, card, specification

Change = Callable[[FakeHost], Any]
ENGINE, TARGET = "vllm-e2b.service", "vllm-edge.target"
RUN = "run/vllm-edge/engines"
SOCKET = f"{RUN}/e2b/api.sock"
FILES = "etc/vllm-edge/engines/e2b"


def write(path: str, text: str = "") -> Change:
    return lambda host: host.write(path, text)


def os_release(name: str, distribution: str, version: str) -> Change:
    return write("etc/os-release", f'PRETTY_NAME="{name}"\nID="{distribution}"\nVERSION_ID="{version}"\n')


def package(version: str, *names: str) -> Change:
    """`version` as in `hi 2.41-12`: what dpkg says of the state, and the version."""
    status, number = version.split()
    return lambda host: host.packages.update(dict.fromkeys(names, (status, number)))


def source(path: str) -> Change:
    """Who offers libcuda1."""
    return lambda host: host.sources.update(libcuda1=path)


def answer(command: str, out: str, status: int = 0) -> Change:
    return lambda host: host.answers.update({command: Ran(status, out)})


def unit(name: str, **changes: str) -> Change:
    return lambda host: host.unit(name, **changes)


def gpu(number: int, **values: str) -> Change:
    """What nvidia-smi says of one GPU; `__` in a name stands for a dot."""
    return lambda host: host.gpus[number].update({key.replace("__", "."): value for key, value in values.items()})


def removed(path: str) -> Change:
    return lambda host: host.remove(path)


def set_to(**values: Any) -> Change:
    return lambda host: [setattr(host, name, value) for name, value in values.items()]


def image(cuda: str, branch: str) -> Change:
    return lambda host: host.image(cuda=cuda, driver_branch=branch)


def of_branch(version: str) -> Change:
    """The whole driver is of this version."""
    return several(lambda host: [host.module(version), host.library(version)], cdi(*GPUS, driver=version))


def kernel(release: str) -> Change:
    """A kernel without a module."""
    return lambda host: host.kernel(release, module=False)


def held_kernel(candidate: str) -> Change:
    """A kernel metapackage that is held in version 6.8.0-79.79, and the version that apt offers."""
    shown = f"Package: linux-image-generic\nVersion: {candidate}\nDepends: linux-image-6.8.0-100-generic\n"
    return several(
        package("hi 6.8.0-79.79", "linux-image-generic"),
        answer("apt-cache show --no-all-versions linux-image-generic", shown),
    )


def docker_config(text: str) -> Change:
    return write("etc/docker/daemon.json", text)


def in_swarm(host: FakeHost) -> None:
    settings(**{"data-root": "/data/docker", "live-restore": True})(host)
    host.write("data/docker/swarm/docker-state.json")


# What only looks like a library: a file of nobody, of /tmp and of the program's own environment.
MAPS = """\
55d0a0000000-55d0a0001000 r-xp 00000000 fe:00 100   /usr/bin/python3.13 (deleted)
7f0000000000-7f0000001000 r-xp 00000000 fe:00 101   /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)
7f0000001000-7f0000002000 r--p 00001000 fe:00 101   /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)
7f0000002000-7f0000003000 r-xp 00000000 fe:00 102   /usr/lib/x86_64-linux-gnu/libc.so.6
7f0000003000-7f0000004000 rw-s 00000000 00:01 103   /memfd:arena (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:20 104   /tmp/scratch (deleted)
7f0000005000-7f0000006000 r-xp 00000000 fe:00 105   /opt/vllm-edge/releases/1/venv/lib/x.so (deleted)
7f0000006000-7f0000007000 rw-p 00000000 00:00 0     [stack]
"""


def dockerd(out: str, status: int = 0) -> Change:
    return answer("dockerd --version", out, status)


def dockerd_with(*flags: str) -> Change:
    return several(docker(MainPID="812"), write("proc/812/cmdline", "\0".join(["dockerd", *flags])))


docker = partial(unit, "docker.service")


def several(*changes: Change) -> Change:
    return lambda host: [change(host) for change in changes]


def down(**state: str) -> Change:
    """The engine is in this state, and its socket is gone."""
    return several(unit(ENGINE, Result="exit-code", **state), lambda host: host.remove(SOCKET))


def in_place(mode: int, path: str) -> Change:
    return lambda host: (host.root / path).chmod(mode)


def replaced(make: Callable[[Path], object]) -> Change:
    """Something else where the socket should be."""
    return several(lambda host: host.remove(SOCKET), lambda host: make(host.root / SOCKET))


def cdi(*devices: str, path: str = "var/run/cdi/nvidia.yaml", **more: Any) -> Change:
    return write(path, specification(*devices, **more))


def logged(*xids: str) -> Change:
    return answer("journalctl --dmesg", LOADED + "".join(f"NVRM: Xid (PCI:0000:31:00): {xid}\n" for xid in xids))


def kernel_log(*xids: str) -> Change:
    """What the driver does not say is what the GPUs need now."""
    return several(logged(*xids), *[gpu(number, gpu_recovery_action="[N/A]") for number in range(len(GPUS))])


CHANGED = "154, GPU recovery action changed from 0x0 (None) to {}"


def twice(host: FakeHost) -> None:
    """Two engines on one GPU."""
    host.engine("e4b", 8071, GPUS[:1])


def no_module(host: FakeHost) -> None:
    host.remove("sys/module/nvidia")
    host.gpus.clear()
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    host.answers["nvidia-smi --query-gpu"] = Ran(9, said)


def lose_gpu(host: FakeHost) -> None:
    alive = ", ".join(host.gpus[0][field] for field in GPU_FIELDS)
    said = "Unable to determine the device handle for GPU0000:31:00.0: GPU is lost. Reboot the system"
    host.answers["nvidia-smi --query-gpu=uuid,name"] = Ran(15, f"{alive}\n{said}\n")


def swap(host: FakeHost) -> None:
    host.gpus[0] = card(NEW_GPU, BUSES[0])
    host.write("var/run/cdi/nvidia.yaml", specification(NEW_GPU, GPUS[1]))


def lock(host: FakeHost, path: str = "var/lib/dpkg/lock-frontend", name: str = "unattended-upgr") -> None:
    seen = (host.root / path).stat()
    device = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    host.write("proc/locks", f"1: POSIX  ADVISORY  WRITE 4711 {device} 0 EOF\n")
    host.write("proc/4711/comm", f"{name}\n")


def measured(host: FakeHost) -> None:
    """The benchmark was killed, and a reference answer is being computed."""
    for purpose in ("bench", "reference"):
        host.write(f"run/vllm-edge/{purpose}.lock")
    lock(host, "run/vllm-edge/reference.lock", "vllm-edge")
    host.answers["docker ps --all"] = Ran(0, "vllm-edge-bench bench\nvllm-edge-reference reference\n")


def secure_boot(host: FakeHost, signer: str = "") -> None:
    path = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    host.write(path, b"\x06\x00\x00\x00\x01")
    host.answers["modinfo"] = Ran(0, f"{signer}\n")
    no_module(host)


def no_driver(host: FakeHost) -> None:
    for name in [
        name for name in host.packages if name.startswith(("libnvidia-ml", "libcuda", "nvidia-k", "nvidia-p"))
    ]:
        del host.packages[name]
    for name in ("libnvidia-ml", "libcuda"):
        host.remove(f"usr/lib/x86_64-linux-gnu/{name}.so.1")
    host.remove("sys/module/nvidia")
    host.gpus.clear()
    host.answers["nvidia-smi"] = Ran(127, "", "nvidia-smi: not found")


not_enrolled = partial(secure_boot, signer="DKMS key")


def no_persistence(host: FakeHost) -> None:
    host.unit("nvidia-persistenced.service", ActiveState="inactive")
    for found in host.gpus:
        found["persistence_mode"] = "Disabled"


def silent_gpu(host: FakeHost) -> None:
    host.gpus.pop()
    host.answers["nvidia-smi topo"] = Ran(0, "")


def legacy_trainer(host: FakeHost) -> None:
    host.container("trainer", 4002, driver="")


def accept_risk(host: FakeHost) -> None:
    config = json.loads((host.root / FILES / "engine.json").read_text())
    host.write(f"{FILES}/engine.json", json.dumps({**config, "accept_risk": ["--trust-remote-code"]}))


def cache_aside(host: FakeHost) -> None:
    use_cache(host)
    (host.root / "data/vllm/cache/e2b/0a.set-aside").mkdir(parents=True)


def cache_too_large(host: FakeHost) -> None:
    use_cache(host)
    host.write("data/vllm/cache/e2b/0a/vllm/graph", "")
    os.truncate(host.root / "data/vllm/cache/e2b/0a/vllm/graph", 20 * 2**30 + 1)


def use_cache(host: FakeHost) -> None:
    path = host.root / FILES / "container.json"
    document = json.loads(path.read_text())
    document["arguments"].insert(0, "--mount=type=bind,source=/data/vllm/cache/e2b/0a,target=/cache")
    host.write(f"{FILES}/container.json", json.dumps(document))


def without_policy(host: FakeHost) -> None:
    path = host.root / FILES / "container.json"
    mount = f"--mount=type=bind,source={host.root}/etc/vllm-edge/policy/{'0' * 64},target=/policy,readonly"
    host.write(
        f"{FILES}/container.json", json.dumps({"arguments": [mount, *json.loads(path.read_text())["arguments"]]})
    )


def open_secrets(host: FakeHost) -> None:
    (host.root / "etc/vllm-edge/secrets").mkdir(mode=0o755)


def open_to(**users: int) -> Change:
    """Device nodes that everybody may open, and users with a shell beside those of the system."""
    rows = [f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash" for name, uid in {"root": 0, **users}.items()]
    passwd = write("etc/passwd", "\n".join([*rows, "svc:x:1500:1500::/:/usr/sbin/nologin"]))
    return several(in_place(0o666, "dev/nvidia0"), in_place(0o666, "dev/nvidiactl"), passwd)


HOOK = "etc/vllm-edge/hooks/before_drain.d/tell"
open_hook = several(write(HOOK), in_place(0o777, HOOK))
with_maps = several(unit(ENGINE, MainPID="4711"), write("proc/4711/maps", MAPS))
restarting = down(ActiveState="activating", SubState="auto-restart")


def settings(**values: Any) -> Change:
    """Docker's settings, beside those of the healthy host."""
    return docker_config(json.dumps({"features": {"cdi": True}} | values))


SETTINGS = "runtime.docker-settings"
OLD, NEWER = "570.211.01", "6.12.63+deb13-amd64"
WITHOUT_MODULE = (
    "; unknown driver.versions gpus.answer gpus.expected gpus.holders runtime.cdi-devices topology.pcie topology.numa "
    "topology.iommu topology.peer-to-peer topology.ecc topology.power topology.recovery gpus.mode"
)
WITHOUT_DRIVER = (
    f"fail driver.installed{WITHOUT_MODULE} driver.one-source driver.held driver.module-loaded driver.cuda "
    "driver.next-kernel driver.kernel-updates driver.persistence runtime.cdi-current"
)
UNLOADED = "fail driver.module-loaded"
NO_KERNEL = f"{UNLOADED} driver.next-kernel{WITHOUT_MODULE}"
CUDA = "vllm-edge:1 is made with CUDA {}, which needs a driver of branch {} or newer, and the host has"
HELD = "linux-image-generic 6.8.0-79.79 is held, and apt has 6.8.0-100.100"
OPEN_NODES = "may open /dev/nvidia0 (0666), /dev/nvidiactl (0666) and fill the memory of a GPU; ops, ada"
STALE = f"/var/run/cdi/nvidia.yaml was made for driver {OLD}, the host has {DRIVER}"
CDI, ETC_CDI = "/var/run/cdi/nvidia.yaml", "etc/cdi/nvidia.yaml"
NO_CDI = "fail runtime.cdi-devices; unknown runtime.cdi-current runtime.cdi-conflict"
OLD_DOCKER = "fail runtime.docker-version; unknown runtime.cdi-enabled"
ASKED = "runtime.gpu-access runtime.leftovers"
NO_ENGINE = (
    "fail serving.configuration; unknown serving.units serving.sockets serving.libraries serving.boot serving.profile "
    "serving.risks"
)
NO_DOCKER = (
    "unknown runtime.docker-version runtime.docker-running runtime.cdi-enabled "
    "runtime.gpu-access runtime.leftovers runtime.docker-settings"
)
DEBIAN = "http://deb.example.org/debian trixie/non-free amd64 Packages"
DKMS, PREBUILT = "nvidia-kernel-open-dkms", "linux-modules-nvidia-580-server-open-generic"
RUNNING = "runtime.docker-running"
REFRESH = "nvidia-cdi-refresh.path"

# What is broken, the checks that are not ok and how, and what a finding says: evidence and remedy.
FAULTS: tuple[tuple[Change, str, str, str], ...] = (
    # The system.
    (os_release("Rocky Linux 9", "rocky", "9.5"), "fail system.distribution", "Rocky Linux 9", "RHEL family is not"),
    (os_release("Ubuntu 22.04", "ubuntu", "22.04"), "fail system.distribution", "Ubuntu 22.04", "Ubuntu 24.04"),
    (write("var/lib/dpkg/updates/0001"), "fail system.dpkg", "cut off", "dpkg --configure -a"),
    (package("iU 2.41-12", "libc6"), "fail system.dpkg", "libc6", "dpkg --audit"),
    (lock, "warn system.apt-lock", "unattended-upgr (pid 4711)", "Let it finish"),
    (answer("timedatectl", "no\n"), "warn system.time", "not synchronised", "set-ntp"),
    (docker(LimitNOFILE="1024"), "warn system.file-limits", "1024", "LimitNOFILE"),
    # The driver.
    (package(f"iF {DRIVER}-1", DKMS), "fail system.dpkg driver.half-installed", DKMS, "make.log"),
    (no_driver, WITHOUT_DRIVER, "no package of a driver", "playbooks/host.yml"),
    (write("usr/bin/nvidia-uninstall"), "fail driver.one-source", "/usr/bin/nvidia-uninstall", "files of both"),
    (source(DEBIAN), "fail driver.one-source", "from Debian: libcuda1; from NVIDIA: libnvidia-ml1", "apt-get purge"),
    (package("hi 590.48.01-1", "libcuda1"), "fail driver.one-source", "branch 590: libcuda1", "one branch"),
    (source("/var/lib/dpkg/status"), "warn driver.one-source", "libcuda1", "gets no updates"),
    (package(f"ii {DRIVER}-1", "libcuda1"), "warn driver.held", "libcuda1", "apt-mark hold"),
    (package("ii 6.8.0-87.88", PREBUILT), "warn driver.held", PREBUILT, "apt-mark hold"),
    (write("sys/module/nouveau/version"), "fail driver.nouveau", "nouveau", "Reboot"),
    (lambda host: host.module(OLD), "fail driver.versions", f"{OLD} and libcuda.so.1 is {DRIVER}", "allow_reboot=true"),
    (image("14.0.1", "615"), "warn driver.cuda", f"{CUDA.format('14.0.1', 615)} {DRIVER}", "branch to 615 or newer"),
    (of_branch(OLD), "warn driver.cuda", f"{CUDA.format('13.0.2', 580)} {OLD}", "playbooks/driver_upgrade.yml"),
    (secure_boot, f"{UNLOADED} driver.secure-boot{WITHOUT_MODULE}", "no signature", "mokutil"),
    (not_enrolled, f"{UNLOADED}; warn driver.secure-boot{WITHOUT_MODULE}", "DKMS key", "mokutil --test-key"),
    (several(kernel(KERNEL), no_module), NO_KERNEL, f"none for the running kernel {KERNEL}", "or the prebuilt modules"),
    (kernel(NEWER), "warn driver.next-kernel", f"{NEWER}, has no module; {KERNEL} runs", "Before the next reboot"),
    (held_kernel("6.8.0-100.100"), "warn driver.kernel-updates", HELD, "driver_upgrade.yml -e driver_upgrade=HOST"),
    (no_persistence, "warn driver.persistence", "does not run", "enable --now nvidia-persistenced.service"),
    # The GPUs.
    (silent_gpu, "fail gpus.present; warn runtime.cdi-devices", f"silent: {BUSES[1]}", "journalctl -k"),
    (lose_gpu, "fail gpus.present gpus.answer; warn runtime.cdi-devices", "GPU is lost", "Xid 79"),
    (swap, "fail gpus.expected", f"{GPUS[0]} (engine e2b); there without being expected", "gpu_uuids"),
    (open_to(ops=1000, ada=1001, nobody=65534), "warn gpus.device-nodes", OPEN_NODES, "NVreg_DeviceFileMode=0660"),
    # The runtime.
    *(
        (settings(**changes), f"warn {check}", evidence, remedy)
        for changes, check, evidence, remedy in (
            ({"hosts": ["fd://", "tcp://0.0.0.0:2375"]}, SETTINGS, "'tcp://0.0.0.0:2375' is root", "tlsverify"),
            ({"hosts": "tcp://127.0.0.1:2375", "tlsverify": "yes"}, SETTINGS, "is root on this host", "ssh://"),
            ({"hosts": ["tcp://\x1b[2J"]}, SETTINGS, "'tcp://\\x1b[2J' is root", "tlsverify"),
            ({"seccomp-profile": "unconfined"}, SETTINGS, "every system call", "seccomp-profile"),
        )
    ),
    *(
        (dockerd_with(*flags), f"warn {SETTINGS}", f"'{address}' is root", "docker.service")
        for address, *flags in (
            ("tcp://0.0.0.0:2375", "-H", "fd://", "-H", "tcp://0.0.0.0:2375"),
            ("tcp://[::]:2376", "--host=tcp://[::]:2376", "--tls"),
        )
    ),
    (dockerd("", 127), f"fail runtime.docker-installed; {NO_DOCKER}", "no dockerd", "installs it"),
    (dockerd("Docker version 20.10.24, build 2"), OLD_DOCKER, "20.10.24 does not know CDI", "Docker's repository"),
    (docker(ActiveState="failed"), f"fail {RUNNING}; unknown {ASKED}", "failed", "systemctl start docker"),
    (docker(UnitFileState="disabled"), f"warn {RUNNING}", "does not start at boot", "systemctl enable docker.service"),
    (in_swarm, "fail runtime.docker-config", "a node of a swarm", "'docker swarm leave'"),
    (docker_config("{,}"), "fail runtime.docker-config runtime.cdi-enabled", "is no JSON", "dockerd --validate"),
    (docker_config("{}"), "fail runtime.cdi-enabled", "the default is off before 28.2", '"cdi": true'),
    (package("hi 1.19.1-1", *TOOLKIT), "warn runtime.toolkit", "toolkit#1967", "container_runtime_toolkit_version"),
    (package("hi 1.17.8-1", *TOOLKIT), "warn runtime.toolkit", "that came with 1.18", "newer release"),
    (package("hi 1.17.8-1", TOOLKIT[3]), "fail runtime.toolkit", "libnvidia-container1 1.17.8", "one version"),
    (package("ii 1.18.2-1", TOOLKIT[3]), "warn runtime.toolkit-held", "libnvidia-container1", "apt-mark hold"),
    (answer("runc --version", "runc version 1.1.6\n"), "warn runtime.runc", "runc 1.1.6", "1.1.7 or newer"),
    (removed(DROP_IN), "warn runtime.cdi-refresh", "does not create /dev/nvidia-uvm", "a drop-in"),
    (unit(REFRESH, ActiveState="inactive"), "warn runtime.cdi-refresh", "inactive", "systemctl enable --now"),
    (cdi(*GPUS, driver=OLD), "fail runtime.cdi-current", STALE, "nvidia-cdi-refresh.service"),
    (cdi("0", *GPUS, path=ETC_CDI), "fail runtime.cdi-conflict", f"/{ETC_CDI} and {CDI} both", f"remove /{ETC_CDI}"),
    (cdi("0", GPUS[0]), "fail runtime.cdi-devices", GPUS[1], "nvidia-ctk cdi list"),
    (cdi("0", *GPUS, nodes=NODES[::2]), "fail runtime.cdi-devices", f"{CDI} does not list /dev/nvidia-uvm:", "boot"),
    (removed("sys/module/nvidia_uvm"), UNLOADED, "nvidia-uvm is not: NVML answers", "modprobe nvidia-uvm"),
    # What serves.
    (down(ActiveState="failed"), "fail serving.units", f"{ENGINE} failed (exit-code)", "vllm-edge explain e2b"),
    (restarting, "fail serving.units", f"{ENGINE} activating (exit-code)", "vllm-edge explain e2b"),
    *(
        (change, "fail serving.sockets", evidence, remedy)
        for change, evidence, remedy in (
            (removed(SOCKET), "api.sock: No such file or directory", "restart' of the unit"),
            (in_place(0o755, SOCKET), "api.sock has mode 0755, with which the gateway", "restart' of the unit"),
            (replaced(lambda place: place.symlink_to("x")), "it is a link and no socket", "restart' of the unit"),
            (set_to(silent="connection refused"), "e2b: /health: connection refused", "journalctl"),
            (in_place(0o755, RUN), "engines has mode 0755, wanted 0710", "systemd-tmpfiles --create"),
            (in_place(0o777, f"{RUN}/e2b"), "engines/e2b has mode 0777, wanted 0755", "systemd-tmpfiles"),
            (in_place(0o777, "run/vllm-edge"), "vllm-edge has mode 0777", "systemd-tmpfiles"),
        )
    ),
    (unit(ENGINE, ActiveState="inactive"), "warn serving.units", "inactive", "systemctl start"),
    (unit(TARGET, UnitFileState="disabled"), "warn serving.boot", "not enabled", f"systemctl enable {TARGET}"),
    (open_secrets, "fail serving.permissions", "secrets has mode 0755, wanted 0700", "chmod"),
    (open_hook, "fail serving.permissions", "before_drain.d/tell has mode 0777, so that others may", "chmod go-w"),
    # Bus, memory and power.
    (gpu(1, pcie__link__width__current="8"), "warn topology.pcie", f"{BUSES[1]} has 8 of 16 lanes", "Reseat"),
    (gpu(1, pcie__link__gen__current="3", pstate="P0"), "warn topology.pcie", "generation 3 of 4", "Reseat"),
    (gpu(0, ecc__errors__uncorrected__volatile__total="3"), "warn topology.ecc", "3 uncorrected", "--gpu-reset"),
    (gpu(0, remapped_rows__failure="Yes"), "fail topology.ecc", "remapping a row failed", "replaced"),
    *(
        (kernel_log(*xids), f"{state} topology.xid; unknown topology.recovery", told, remedy)
        for xids, state, told, remedy in (
            (["79, GPU is gone."], "fail", "Xid 79 (fallen off the bus) of 0000:31:00", "a reboot of the host"),
            (["119, Timeout"], "fail", "Xid 119 (GSP does not answer)", f"--gpu-reset -i {GPUS[1]}"),
            (["158, GPU", "31, pid=7"], "fail", "Xid 158 of", "systemctl stop nvidia-persistenced"),
            # The driver's own words count more than the table.
            (["79, GPU is gone.", CHANGED.format("0x1 (GPU Reset Required)")], "fail", "Reset Required", "--gpu-reset"),
            (["119, Timeout", CHANGED.format("0x2 (Node Reboot Required)")], "fail", "Node Reboot", "a reboot of the"),
            ([CHANGED.format("0x4 (Drain and Reset)")], "fail", "asks for Drain and Reset", "At a good time: stop"),
            ([CHANGED.format("0x3 (Drain P2P)")], "fail", "asks for Drain P2P", "engines over several GPUs"),
            ([CHANGED.format("0x1 (PF FLR)")], "fail", "asks for PF FLR", "--gpu-reset"),
            ([CHANGED.format("0x9 (Pray)")], "fail", "asks for Pray", "documentation"),
            (["119, Timeout", CHANGED.format("0x0 (None)")], "warn", "asks for None", "asks for no recovery"),
            ([CHANGED.format("0x0 (None)"), "119, Timeout"], "fail", "Xid 119", "--gpu-reset"),
            (["31, pid=7, MMU Fault"] * 2, "warn", "Xid 31 of 0000:31:00, 2 times", "crashed"),
        )
    ),
    (logged("119, Timeout"), "warn topology.xid", "Xid 119", "asks for no recovery of that GPU now"),
    (gpu(1, gpu_recovery_action="Reboot"), "fail topology.recovery", "recovery action Reboot", "a reboot of the host"),
    (gpu(1, gpu_recovery_action="Reset"), "fail topology.recovery", f"{GPUS[1]} at", "stop nvidia-persistenced"),
    (gpu(0, compute_mode="Prohibited"), "fail gpus.mode", "CUDA refuses every process", f"-i {GPUS[0]} -c DEFAULT"),
    (gpu(0, compute_mode="Exclusive_Process"), "warn gpus.mode", "allows one process", f"-i {GPUS[0]} -c DEFAULT"),
    (several(gpu(0, compute_mode="Exclusive_Process"), twice), "fail gpus.mode", "and has 2 users", "-c DEFAULT"),
    (gpu(1, mig__mode__current="Enabled"), "fail gpus.mode", "is in MIG mode", f"'nvidia-smi -i {GPUS[1]} -mig 0'"),
    (gpu(0, clocks_event_reasons__active="0x40"), "warn topology.power", "hardware thermal slowdown", "air flow"),
    (lambda host: host.engine("31b", 8050, GPUS, shm=""), "warn topology.shared-memory", "31b", "vllm_engine_shm_size"),
    # The configuration, and containers.
    (removed("var/run/cdi/nvidia.yaml"), NO_CDI, "no CDI specification", "nvidia-cdi-refresh"),
    (legacy_trainer, "warn runtime.gpu-access", "may take the GPUs from trainer, which", "create-dev-char-symlinks"),
    (measured, "warn runtime.leftovers", "vllm-edge-bench: left by a", "'docker rm --force vllm-edge-bench'"),
    (with_maps, "warn serving.libraries", f"{ENGINE} runs with a former libssl.so.3, python3.13", f"restart {ENGINE}'"),
    (without_policy, "fail serving.configuration", "edge_policy.py: No such file", "site.yml"),
    (cache_aside, "warn serving.units", "/data/vllm/cache/e2b/0a.set-aside", "'vllm-edge explain e2b'"),
    (cache_too_large, "warn serving.units", "/data/vllm/cache/e2b/0a has more than 20 GiB", "The next start empties"),
    (accept_risk, "warn serving.risks", "e2b runs with --trust-remote-code", "accept_risk"),
    (write(f"{FILES}/container.json"), NO_ENGINE, "container.json", "site.yml"),
)


GATEWAY = "vllm-edge-gateway.service"


def certificate(days: int, begins: int = -1, **more: str) -> Change:
    return lambda host: host.certificate(timedelta(days=days), timedelta(days=begins), **more)


def gateway_file(name: str, text: str) -> Change:
    return write(f"etc/vllm-edge/gateway/{name}", text)


def replicate(host: FakeHost) -> None:
    """Two engines serve the name for which the configuration has one server."""
    host.gateway("e2b-1")


def old_facts(host: FakeHost) -> None:
    moment = time.time() - 90
    os.utime(host.root / "run/vllm-edge-exporter/facts.json", (moment, moment))


def open_to_others(host: FakeHost) -> None:
    (host.root / "run/vllm-edge-exporter/exporter.sock").chmod(0o666)


FACTS, METRICS = "vllm-edge-facts.service", "warn gateway.metrics"
PROFILE = "var/lib/vllm-edge/active-profile.json"
DEAF = "fail gateway.unit; unknown gateway.maps"
CERTIFICATE, MAPS_WRONG = "fail gateway.certificate", "fail gateway.maps"
GATEWAY_FAULTS: tuple[tuple[Change, str, str, str], ...] = (
    (unit(GATEWAY, ActiveState="failed", Result="exit-code"), "fail gateway.unit", "failed (exit-code)", "journalctl"),
    (set_to(gateway_down=True), DEAF, "does not answer on its socket", "systemctl restart"),
    (unit(GATEWAY, UnitFileState="disabled"), "warn gateway.unit", "does not start at boot", "systemctl enable"),
    (certificate(20), "warn gateway.certificate", "ends on", "reloads the gateway"),
    (certificate(5), CERTIFICATE, "ends on", "reloads the gateway"),
    (certificate(-1, begins=-9), CERTIFICATE, "ended on", "Renew it"),
    (certificate(90, begins=1), CERTIFICATE, "counts from", "timedatectl"),
    (certificate(90, key="OTHER"), CERTIFICATE, "is not that of the certificate", "Renew it"),
    (answer("openssl x509", "", 1), CERTIFICATE, "openssl cannot read it", "Renew it"),
    (answer("openssl x509", "notBefore=never\n"), CERTIFICATE, "openssl says no notBefore", "Renew it"),
    (removed("etc/vllm-edge/gateway/tls"), CERTIFICATE, "is missing", "gateway.yml"),
    (gateway_file("models.map", "damaged"), MAPS_WRONG, "models.map", "vllm-edge gateway sync"),
    (set_to(maintenance=("sentry",)), MAPS_WRONG, "server of sentry back", "vllm-edge gateway sync"),
    (removed("run/vllm-edge/roles/sentry.sock"), MAPS_WRONG, "link sentry.sock", "gateway sync"),
    (gateway_file("clients.json", "{"), MAPS_WRONG, "clients.yml writes it anew", "vllm-edge gateway sync"),
    (
        gateway_file("clients.map", f"{'0' * 64} ci 600 64\n"),
        MAPS_WRONG,
        "clients.json: No such file",
        "vllm-edge gateway sync",
    ),
    (removed("etc/vllm-edge/gateway/haproxy.cfg"), MAPS_WRONG, "haproxy.cfg is missing", "vllm-edge gateway sync"),
    (gateway_file("haproxy.cfg", "  bind :8000\n"), "fail gateway.names", "no backend for sentry", "gateway.yml"),
    (
        removed("var/lib/vllm-edge/generations"),
        f"fail serving.profile; {MAPS_WRONG}",
        "there is no generation",
        "site.yml",
    ),
    (removed(PROFILE), f"fail serving.profile; {MAPS_WRONG}", "no profile is recorded on this host", "site.yml"),
    (
        write("proc/net/tcp", f"sl\n 0: {'0100007F:0001 00000000:0000 0A 00000000:00000000'} 00:0 0 0 0 9\n"),
        "warn gateway.port",
        "port 1 of 127.0.0.1 is taken: a process that is not visible",
        "another port",
    ),
    (unit(FACTS, ActiveState="failed", Result="signal"), METRICS, "facts.service is failed (signal)", "metrics.yml"),
    (
        unit("vllm-edge-exporter.service", ActiveState="activating"),
        METRICS,
        "exporter.service is activating",
        "journalctl",
    ),
    (old_facts, METRICS, "facts.json is 90 s old", "journalctl -u vllm-edge-facts"),
    (open_to_others, METRICS, "exporter.sock is not as", "metrics.yml"),
    (removed("run/vllm-edge-exporter/exporter.sock"), METRICS, "exporter.sock: No such file", "metrics.yml"),
    (replicate, "warn gateway.names serving.units", "fewer servers for sentry than there are engines", "gateway.yml"),
)


def slots(uuid: str, *more: Change) -> Change:
    """The host has one slot."""
    record = {"version": 1, "gpus": [{"uuid": uuid}]}
    return several(write("var/lib/vllm-edge/gpu-slots.json", json.dumps(record)), *more)


def parse_states(text: str) -> dict[str, str]:
    """`fail a b; warn c` as a state by check."""
    parts = [part.split() for part in text.split(";")]
    return {check: state for state, *checks in parts for check in checks}


BROKEN = [(change, parse_states(states), *told) for change, states, *told in FAULTS + GATEWAY_FAULTS]
"""The change, a state by check, evidence and remedy."""

PLAIN = "  bind :80\nbackend role_sentry\n"
# What looks like a fault and is none: the check, and what it says.
FINE: tuple[tuple[Change, str, str], ...] = (
    (several(gateway_file("haproxy.cfg", PLAIN), certificate(-1)), "gateway.certificate", "without TLS"),
    # A helper of another branch.
    (package("ii 535.171.04-1", "nvidia-persistenced"), "driver.one-source", "one source: NVIDIA"),
    # Advice, where only one person can log in.
    (open_to(ops=1000), "gpus.device-nodes", "every local user may open /dev/nvidia0 (0666)"),
    (settings(hosts=["tcp://0.0.0.0:2376"], tlsverify=True), SETTINGS, "of Docker's default network"),
    (settings(icc=False, hosts=7), SETTINGS, "each published port has a process of root"),
    (dockerd_with("--userland-proxy=false"), SETTINGS, "the containers of others: those of Docker's default network"),
    # Docker's default.
    (several(removed("etc/docker/daemon.json"), dockerd("Docker version 28.2.0")), "runtime.cdi-enabled", "by CDI"),
    (several(unit(ENGINE, ActiveState="activating"), removed(SOCKET)), "serving.units", f"{ENGINE} is activating"),
    # A module that is loaded and no longer on disk.
    (lambda host: host.kernel(KERNEL, module=False), "driver.next-kernel", "has no module of the driver on disk"),
    (answer("modinfo", "", 1), "driver.secure-boot", "not started by UEFI"),
    (held_kernel("6.8.0-79.79"), "driver.kernel-updates", "every held kernel is the newest that apt has"),
    # It comes with the updates of the distribution, or whenever its operator wants.
    (package("ii 6.12.48-1", "linux-image-amd64"), "driver.kernel-updates", "no kernel is held"),
    (package("hi 6.8.0-87.88", PREBUILT), "driver.held", "held"),
    # A branch far below the driver's whose digits would come later as text.
    (image("12.9.1", "99"), "driver.cuda", f"driver {DRIVER} is new enough for it"),
    (several(), "driver.cuda", f"vllm-edge:1 is made with CUDA 13.0.2, and driver {DRIVER} is new enough for it"),
    (several(), "runtime.gpu-access", "a daemon-reload takes no GPU from trainer, vllm-e2b"),
    (lambda host: host.containers.clear(), "runtime.gpu-access", "no running container has a GPU"),
    # The last word counts, that of the driver before all.
    (answer("journalctl --dmesg", f"NVRM: Xid (PCI:0000:31:00): 79, x\n{LOADED}"), "topology.xid", "no Xid since"),
    (slots(GPUS[0], gpu(1, compute_mode="Prohibited")), "gpus.mode", "every GPU is whole"),
    # Advice: somebody else on a GPU.
    (
        several(answer("nvidia-smi --query-compute-apps", f"{GPUS[1]}, 4242\n"), write("proc/4242/comm", "python3\n")),
        "gpus.holders",
        f"pid 4242 (python3; in no container) on {GPUS[1]}",
    ),
)
