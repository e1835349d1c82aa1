# SPDX-License-Identifier: Apache-2.0
"""A host in a directory, with programs that answer as the real ones do: healthy, until a test breaks something."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import generations
from ansible.module_utils.vllm_edge.doctor import registry
from ansible.module_utils.vllm_edge.engine.api_socket import find_gateway_group
from ansible.module_utils.vllm_edge.facts.model import TOOLKIT, Expectation
from ansible.module_utils.vllm_edge.facts.reader import Reader
from ansible.module_utils.vllm_edge.gateway.admin import Check, GatewayDown, HAProxy, Server
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.view import parse_text
from ansible.module_utils.vllm_edge.gpu.owners import Owner
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.space import Space, measure_step
from ansible.module_utils.vllm_edge.system.systemd import Ran, SystemdError
from engine_files import CAGE, CONFIG
from generations import activate, rendered

KERNEL = "6.12.48+deb13-amd64"
DRIVER = "580.173.02"
GPUS = ("GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000", "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001")
BUSES = ("0000:17:00.0", "0000:31:00.0")
NOTHING = Expectation()
SOMEBODY = Owner("foreign")
NEW_GPU = "GPU-00000000-0000-4000-8000-000000000009"
ENGINES = 23_000
"""User of the engines."""
LIBRARIES = "usr/lib/x86_64-linux-gnu"

DRIVER_PACKAGES = ("libnvidia-ml1", "libcuda1", "nvidia-kernel-open-dkms", "nvidia-persistenced")
PACKAGES = {
    "libc6": ("ii", "2.41-12"),
    **dict.fromkeys(DRIVER_PACKAGES, ("hi", f"{DRIVER}-1")),
    **dict.fromkeys(TOOLKIT, ("hi", "1.18.2-1")),
}
LOADED = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.173.02  Release Build  (root@debian)\n"
"""What the kernel module writes to the kernel's log when it is loaded."""
SOURCES = """Package files:
 100 /var/lib/dpkg/status
     release a=now
 500 http://vendor.example/cuda  Packages
     release v=1.0,o=NVIDIA,a=,n=,l=NVIDIA CUDA,c=,b=amd64
     origin vendor.example
 500 http://deb.example.org/debian trixie/non-free amd64 Packages
     release v=13.1,o=Debian,a=stable,n=trixie,l=Debian,c=non-free,b=amd64
     origin deb.example.org
Pinned packages:
"""


VENDOR = "http://vendor.example/cuda  Packages"


def policy(name: str, version: str, source: str) -> str:
    return (
        f"{name}:\n  Installed: {version}\n  Candidate: {version}\n  Version table:\n"
        f" *** {version} 500\n        500 {source}\n        100 /var/lib/dpkg/status\n"
    )


DROP_IN = "etc/systemd/system/nvidia-cdi-refresh.service.d/vllm-edge.conf"
NODES = ("/dev/nvidia-uvm-tools", "/dev/nvidia-uvm", "/dev/nvidiactl")


def specification(*devices: str, driver: str = DRIVER, nodes: Sequence[str] = NODES) -> str:
    """As nvidia-ctk writes it, which sorts the keys."""
    listed = "".join(f"  - path: {node}\n" for node in nodes)
    items = "".join(
        "- containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n      name: no-device\n"
        f"  name: {json.dumps(name)}\n"
        for name in devices
    )
    return (
        f"---\ncdiVersion: 0.5.0\ncontainerEdits:\n  deviceNodes:\n{listed}  mounts:\n"
        f"  - hostPath: /{LIBRARIES}/libcuda.so.{driver}\n    containerPath: /{LIBRARIES}/libcuda.so.{driver}\n"
        f"devices:\n{items}kind: nvidia.com/gpu\n"
    )


@dataclass
class FakeHost:
    """The tree, what the programs answer, and who reads it."""

    root: Path
    packages: dict[str, tuple[str, str]] = field(default_factory=lambda: dict(PACKAGES))
    sources: dict[str, str] = field(default_factory=dict)
    """Package to the source that offers it; NVIDIA's where nothing is said."""
    gpus: list[dict[str, str]] = field(default_factory=list)
    answers: dict[str, Ran] = field(default_factory=dict)
    """Beginning of a command to what it says."""
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    never: str = ""
    """A program that this host does not have."""

    # -- the tree

    def write(self, path: str, text: str | bytes = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def link(self, path: str, target: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    def remove(self, path: str) -> None:
        file = self.root / path
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()

    def module(self, version: str) -> None:
        self.write("sys/module/nvidia/version", f"{version}\n")

    def library(self, version: str) -> None:
        for name in ("libnvidia-ml", "libcuda"):
            self.write(f"{LIBRARIES}/{name}.so.{version}", b"\x7fELF")
            self.link(f"{LIBRARIES}/{name}.so.1", f"{name}.so.{version}")

    def kernel(self, release: str, *, module: bool = True) -> None:
        self.write(f"boot/vmlinuz-{release}")
        dep = "updates/dkms/nvidia.ko.xz:\n" if module else ""
        self.write(f"lib/modules/{release}/modules.dep", f"kernel/drivers/video/nvidiafb.ko.xz:\n{dep}")

    def bus(self, address: str) -> Path:
        """A GPU below a bridge; gives the bridge's directory."""
        bridge = f"sys/devices/pci0000:{address[5:7]}/0000:{address[5:7]}:01.0"
        self.write(f"{bridge}/config", bytes(4096))
        self.write(f"{bridge}/{address}/vendor", "0x10de\n")
        self.write(f"{bridge}/{address}/class", "0x030200\n")
        self.write(f"{bridge}/{address}/numa_node", "0\n")
        self.link(f"sys/bus/pci/devices/{address}", f"../../../../{bridge}/{address}")
        return self.root / bridge

    def engine(self, name: str = "e2b", port: int = 8070, gpus: Sequence[str] = GPUS[:1], shm: str = "4g") -> None:
        url = f"unix:/run/vllm-edge/engines/{name}/api.sock"
        config = CONFIG | {"engine": name, "unit": f"vllm-{name}.service", "container": f"vllm-{name}", "model": name}
        config |= {"url": url, "port": port, "gpus": list(gpus), "tensor_parallel_size": len(gpus)}
        config |= {"image": "vllm-edge:1"}
        create = [f"--name=vllm-{name}", f"--label=vllm-edge.engine={name}", *CAGE]
        create += [f"--device=nvidia.com/gpu={gpu}" for gpu in gpus] + ([f"--shm-size={shm}"] if shm else [])
        create += [f"--mount=type=bind,source=/run/vllm-edge/engines/{name},target=/run/api", "vllm-edge:1"]
        create += ["/models/e2b"]
        files = f"etc/vllm-edge/engines/{name}"
        self.write(f"{files}/engine.json", json.dumps(config))
        self.write(f"{files}/container.json", json.dumps({"arguments": create}, indent=2))
        self.write(f"{files}/docker-create", "\n".join(create) + "\n")
        self.unit(f"vllm-{name}.service")
        self.listen(name)

    containers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Pid to what Docker says of the container."""

    def container(self, name: str, pid: int, driver: str = "cdi") -> None:
        """One that runs and has a GPU, by CDI or, with another driver, from NVIDIA's hook."""
        devices = ["nvidia.com/gpu=all"] if driver == "cdi" else None
        request = {"Driver": driver, "DeviceIDs": devices, "Capabilities": [["gpu"]]}
        said = {"Id": f"{pid:064x}", "Name": f"/{name}", "State": {"Pid": pid}}
        self.containers[pid] = {**said, "HostConfig": {"DeviceRequests": [request]}}

    def image(self, **record: str) -> None:
        self.write("var/lib/vllm-edge/image.json", json.dumps({"name": "vllm-edge:1", **record}))

    # -- the gateway

    gateway_down = False
    maintenance: tuple[str, ...] = ()
    """Served names whose server HAProxy has in maintenance."""
    checked: dict[tuple[str, str], Check] = field(default_factory=dict)
    """What HAProxy's checks say, by backend and server."""

    def gateway(self, *replicas: str) -> None:
        """A gateway with TLS, in front of e2b and of these engines."""
        paths = self.reader.paths
        config = {"served_names": ["sentry"], "gpus": list(GPUS[:1])}
        activate(paths, rendered(*(generations.engine(name, **config) for name in ("e2b", *replicas))))
        self.write("etc/vllm-edge/gateway/haproxy.cfg", "  bind 10.0.0.1:8000 ssl crt x\nbackend role_sentry\n")
        self.unit("vllm-edge-gateway.service")
        synchronize(paths, lambda paths: None, proxy=self.proxy(paths))
        self.certificate(timedelta(days=90))

    def metrics(self) -> None:
        for name in ("facts.service", "exporter.socket", "exporter.service"):
            self.unit(f"vllm-edge-{name}")
        self.write("etc/systemd/system/vllm-edge-facts.service")
        self.write("run/vllm-edge-exporter/facts.json", "{}")
        socket = self.root / "run/vllm-edge-exporter/exporter.sock"
        os.mknod(socket, 0o140660)
        socket.chmod(0o660)
        os.chown(socket, 0, find_gateway_group())

    def certificate(self, ends: timedelta, begins: timedelta = -timedelta(days=1), key: str = "KEY") -> None:
        self.write("etc/vllm-edge/gateway/tls/server.pem")
        times = [f"{datetime.now(UTC) + after:%b %d %H:%M:%S %Y} GMT" for after in (begins, ends)]
        public = "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n"
        said = f"notBefore={times[0]}\nnotAfter={times[1]}\n{public.format('KEY')}"
        self.answers |= {"openssl x509": Ran(0, said), "openssl pkey": Ran(0, public.format(key))}

    def proxy(self, paths: HostPaths) -> HAProxy:
        """This host as the only worker of the gateway's HAProxy."""
        return cast(HAProxy, self)

    pid = 1

    def list_workers(self) -> list[FakeHost]:
        return [self]

    def is_stopped(self) -> bool:
        return self.units["vllm-edge-gateway.service"]["ActiveState"] != "active"

    def read_map(self, path: Path) -> dict[str, str]:
        return parse_text(path.read_text()) if path.exists() else {}

    def read_servers(self) -> dict[str, Server]:
        if self.gateway_down or self.is_stopped():
            raise GatewayDown("nobody answers")
        return {"sentry": Server("sentry" in self.maintenance, True)}

    def read_checks(self, prefix: str) -> dict[tuple[str, str], Check]:
        return {key: check for key, check in self.checked.items() if key[0].startswith(prefix)}

    def replace_map(self, path: Path, entries: dict[str, str]) -> None:
        pass

    def set_away(self, backend: str, away: bool) -> None:
        pass

    free_bytes: int = 100 * 1024**3
    free_inodes: int | None = None
    owner: Owner = SOMEBODY
    """Whose every process on a GPU is."""

    silent: str = ""
    """Why engines do not answer."""

    def listen(self, name: str = "e2b") -> Path:
        """The socket of an engine, in directories as the supervisor makes them."""
        place = self.root / f"run/vllm-edge/engines/{name}/api.sock"
        place.parent.mkdir(parents=True, exist_ok=True)
        for directory, mode in zip(place.parents, (0o755, 0o710, 0o755), strict=False):
            directory.chmod(mode)
        if not place.exists():
            os.mknod(place, 0o140666)
        place.chmod(0o666)
        return place

    # -- the programs

    def unit(self, name: str, **changes: str) -> None:
        healthy = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"}
        self.units[name] = {**healthy, **self.units.get(name, {}), **changes}

    def __call__(self, command: Sequence[str], timeout_s: float) -> Ran:
        assert timeout_s <= 60, "nobody waits longer for a program that hangs"
        line = " ".join(command)
        self.asked.append(line)
        if command[0] == self.never:
            raise SystemdError(f"'{command[0]}' cannot be run: No such file or directory")
        for beginning in sorted(self.answers, key=len, reverse=True):
            if line.startswith(beginning):
                return self.answers[beginning]
        if line.startswith("systemctl show --property=Id"):
            return Ran(0, "\n\n".join(self._shown(unit) for unit in command[command.index("--") + 1 :]))
        if "label=vllm-edge.companion" in line or line.startswith("apt-cache search"):
            return Ran(0)
        if line.startswith("docker ps"):
            return Ran(0, "".join(f"{said['Id']}\n" for said in self.containers.values()))
        if line.startswith("docker inspect"):
            return Ran(0, json.dumps(list(self.containers.values())))
        if line.startswith("docker info"):
            return Ran(0, "systemd\n")
        if command[0] == "dpkg-query":
            return Ran(0, "".join(f"{name}\t{state} \t{version}\n" for name, (state, version) in self.packages.items()))
        if line == "apt-cache policy":
            return Ran(0, SOURCES)
        if command[0] == "apt-cache":
            found = [(name, self.packages[name][1], self.sources.get(name, VENDOR)) for name in command[2:]]
            return Ran(0, "".join(policy(*each) for each in found))
        if line.startswith("nvidia-smi --query-gpu="):
            fields = command[1].removeprefix("--query-gpu=").split(",")
            unknown = [one for one in fields if self.gpus and one not in self.gpus[0]]
            if unknown:
                return Ran(2, f'Field "{unknown[0]}" is not a valid field to query.\n\n')
            return Ran(0, "".join(", ".join(gpu[one] for one in fields) + "\n" for gpu in self.gpus))
        raise SystemdError(f"'{command[0]}' cannot be run: No such file or directory")

    def _shown(self, name: str) -> str:
        shown = {"Id": name, "LoadState": "not-found", "ActiveState": "inactive", **self.units.get(name, {})}
        return "\n".join(f"{key}={value}" for key, value in shown.items())

    # -- reading it

    @property
    def reader(self) -> Reader:
        places = ("etc/vllm-edge", "var/lib/vllm-edge", "etc/systemd/system", "run/vllm-edge")
        of_services = ("run/vllm-edge-gateway", "run/vllm-edge-exporter")
        return Reader(
            self.root,
            self,
            HostPaths(*(self.root / place for place in (*places, *of_services))),
            owners=lambda pids: {pid: self.owner for pid in pids},
            engine_uid=lambda: ENGINES,
            proxy=self.proxy,
            measure=self.measure,
            health=lambda url, timeout_s: Answer(None, error=self.silent) if self.silent else Answer(200),
        )

    def measure(self, *step: Any, **root: Path) -> list[Space]:
        return [
            replace(space, free_bytes=self.free_bytes, free_inodes=self.free_inodes, read_only=False)
            for space in measure_step(*step, **root)
        ]

    def examine(self, expected: Expectation = NOTHING) -> dict[str, Any]:
        return registry.examine(self.reader.read(expected))

    def checks(self, expected: Expectation = NOTHING) -> dict[str, dict[str, str]]:
        return {check["check"]: check for check in self.examine(expected)["checks"]}

    def not_ok(self) -> dict[str, str]:
        return {name: check["state"] for name, check in self.checks().items() if check["state"] != "ok"}


def card(uuid: str, bus: str) -> dict[str, str]:
    return {
        **{"uuid": uuid, "name": "NVIDIA L4", "pci.bus_id": f"0000{bus.upper()}", "persistence_mode": "Enabled"},
        **{"pstate": "P8", "ecc.mode.current": "Enabled", "power.limit": "72.00", "power.default_limit": "72.00"},
        **{"pcie.link.gen.current": "1", "pcie.link.gen.max": "4", "pcie.link.width.current": "16"},
        **{"pcie.link.width.max": "16", "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.failure": "No"},
        **{"remapped_rows.pending": "No", "clocks_event_reasons.active": "0x0000000000000001"},
        **{"compute_mode": "Default", "mig.mode.current": "[N/A]", "gpu_recovery_action": "None"},
        "driver_version": DRIVER,
    }
