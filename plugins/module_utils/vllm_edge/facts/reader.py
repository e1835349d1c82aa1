# SPDX-License-Identifier: Apache-2.0
"""The reader of a host, for everything that judges one. It changes nothing.

It works as any user, and what this user may not see becomes an Unread. It needs only Python, because it also runs on a
host that has no driver and nothing of this project yet. For that reason it uses nvidia-smi, which comes with every
driver, and not nvidia-ml-py.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine.api_socket import MODE, PARENT_MODE, SOCKET_MODE, find_gateway_group
from ..engine.compile_cache import find_aside, find_excess
from ..engine.config import CONTAINER_FILE, Engine, EngineConfig, EngineConfigError, list_engine_names, load_engine
from ..engine.policy import find_problem as find_policy_problem
from ..gateway import peers
from ..gateway.admin import GatewayDown, HAProxy
from ..gateway.certificate import Certificate, read_certificate, server_pem
from ..gateway.clients import GatewayError
from ..gateway.command import synchronize
from ..gateway.describe import find_metrics_fault, list_addresses, list_places
from ..gateway.fleet import read_fleet
from ..gateway.names import name_link
from ..gateway.sync import CONFIGURATION, Report, is_installed, open_proxy, read_map
from ..gateway.view import STATE
from ..generation.model import GenerationError
from ..generation.store import load_committed
from ..gpu import slots, topology
from ..gpu.access import CannotAsk, ask_docker, refuse_stopped_docker
from ..gpu.owners import Owner, find_owners
from ..gpu.topology import Card, Topology, Xid
from ..names import EXPORTER_SOCKET, EXPORTER_UNIT, FACTS_UNIT, GATEWAY_UNIT, GATEWAY_USER, LABEL_SIDECAR, TARGET
from ..paths import HostPaths
from ..switch.history import read_switch_progress, read_switches
from ..switch.model import Result
from ..switch.steps import hooks
from ..system import cdi
from ..system.files import find_wrong_attributes
from ..system.host import Unread
from ..system.http import Answer, get_health
from ..system.listeners import find_port_users
from ..system.process import engine_uid
from ..system.sockets import pin
from ..system.space import STEPS, Space, locate_images, measure_step
from ..system.systemd import SystemdError
from . import model
from .docker_daemon import locate_swarm_state
from .driver import REFUSAL, switch
from .runtime import RuntimeReader

GPU_CLASS = "0x03"
NVIDIA = "0x10de"
LOCKS = (
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/lock",
    "var/lib/apt/lists/lock",
    "var/cache/apt/archives/lock",
)
ECC_FIELDS = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.failure", "remapped_rows.pending")
# The second is the name of drivers before R535.
REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
LOADING = "loading NVIDIA"
"""What the kernel module says of itself, after NVRM, when it is loaded."""
NODE = re.compile(r"nvidia(ctl|-uvm|-uvm-tools|-modeset|\d{1,4})")
NO_SHELL = re.compile(r"(^|/)(nologin|false|sync|shutdown|halt)?$")
REFRESH = "systemd/system/nvidia-cdi-refresh.service"
REFRESH_FILES = (f"usr/lib/{REFRESH}", f"lib/{REFRESH}", f"etc/{REFRESH}", f"etc/{REFRESH}.d/*.conf")


def parse_dockerd_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings on the command line of dockerd: `hosts`, and every `--name=value`; a flag alone is True."""
    found: dict[str, Any] = {"hosts": re.findall(r"(?<!\S)(?:-H|--host)[ =]?([a-z]+:\S*)", " ".join(words))}
    for name, value in re.findall(r"(?m)^--([a-z-]+)(?:=(.*))?$", "\n".join(words)):
        found[name] = {"": True, "true": True, "false": False}.get(value, value)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or ValueError if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def find_shm_bytes(given: str) -> int:
    """Return the size of a container's /dev/shm in bytes, from the value of --shm-size; empty is Docker's default."""
    match = re.fullmatch(r"(\d+)([kmg]?)b?", given.lower())
    units = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
    return int(match[1]) * units[match[2]] if match else model.DEFAULT_SHM_BYTES


def find_replaced_libraries(maps: str) -> tuple[str, ...]:
    """Return the names of the distribution's files in /proc/<pid>/maps that are no longer on disk."""
    paths = re.findall(r"^(?:\S+\s+){5}(/(?:usr|lib\w*)/.*) \(deleted\)$", maps, re.MULTILINE)
    return tuple(sorted({path.rpartition("/")[2] for path in paths}))


def number(word: str) -> int | None:
    return int(word) if word.isdigit() else None


def said(word: str) -> str | None:
    """Return what nvidia-smi says; None if it says that there is nothing to say."""
    return None if not word or (word.startswith("[") and not REFUSAL.fullmatch(word)) else word


def amount(word: str) -> float | None:
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


CARD_FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "ecc": ("ecc.mode.current", switch),
    "power_limit_w": ("power.limit", amount),
    "power_default_w": ("power.default_limit", amount),
    "generation": ("pcie.link.gen.current", number),
    "generation_possible": ("pcie.link.gen.max", number),
    "width": ("pcie.link.width.current", number),
    "width_possible": ("pcie.link.width.max", number),
    "compute_mode": ("compute_mode", said),
    "mig": ("mig.mode.current", switch),
}
"""Fields of a Card, each with that of nvidia-smi and its parser."""
GPU_FIELDS = ("uuid", "name", "pci.bus_id", "persistence_mode", "pstate", *(name for name, _ in CARD_FIELDS.values()))


@dataclass(frozen=True)
class Reader(RuntimeReader):
    """Reads the facts of a host, or of a directory that looks like one.

        read() -> Facts
          system()    os-release, dpkg-query, /proc/locks, timedatectl
          driver()    versions of libraries and module, apt-cache, modinfo, kernels, Secure Boot
          gpus()      PCI bus, nvidia-smi, recorded slots, who uses the GPUs
          runtime()   dockerd, runc, daemon.json, CDI specifications and their unit, GPUs of running containers
          topology()  PCIe, NUMA, IOMMU and ACS of each GPU, ECC, Xid messages, /dev/shm
          image()     the record of the engines' image
          serving()   engines, their units and sockets, switches
          gateway()   the unit, maps, links and certificate of the gateway
          fleet()     the certificate for the other hosts of the fleet, and what their gateways answer

    Each method returns a part of Facts, and an Unread where something could not be read; none raises for that.
    The support report uses `at` and `ask`. `root` and the callables are fields, so that tests can replace them.
    """

    paths: HostPaths = field(default_factory=HostPaths)
    owners: Callable[[Iterable[int]], Mapping[int, Owner]] = find_owners
    engine_uid: Callable[[], int | None] = engine_uid
    measure: Callable[..., Sequence[Space]] = measure_step
    proxy: Callable[[HostPaths], HAProxy] = open_proxy
    health: Callable[[str, float], Answer] = get_health

    def read(self, expected: model.Expectation) -> model.Facts:
        system, serving = self.system(), self.serving()
        engines = () if isinstance(serving.engines, Unread) else serving.engines
        rows, problem = self.smi(GPU_FIELDS)
        gpus = self.gpus(rows, problem, engines, expected)
        runtime = self.runtime()
        return model.Facts(
            as_root=os.geteuid() == 0,
            system=system,
            driver=self.driver(system.packages),
            gpus=gpus,
            runtime=runtime,
            image=self.image(),
            topology=self.topology(rows),
            spaces=self.spaces(expected.data),
            serving=serving,
            gateway=self.gateway(),
            fleet=self.fleet(),
        )

    def system(self) -> model.System:
        release = dict(
            line.split("=", 1) for line in self.plain("etc/os-release").splitlines() if "=" in line and line[0] != "#"
        )
        release = {key: value.strip("\"'") for key, value in release.items()}
        packages, half = self.packages()
        return model.System(
            name=release.get("PRETTY_NAME", "a system without /etc/os-release"),
            distribution=f"{release.get('ID', '')}-{release.get('VERSION_ID', '')}",
            packages=packages,
            half_installed=half,
            dpkg_interrupted=self.dpkg_interrupted(),
            locks=self.locks(),
            synchronized=self.synchronized(),
            accounts=self.accounts(),
        )

    def accounts(self) -> tuple[str, ...]:
        """Return the users of /etc/passwd who can log in and are no part of the system."""
        rows = [line.split(":") for line in self.plain("etc/passwd").splitlines()]
        return tuple(
            row[0]
            for row in rows
            if len(row) == 7 and row[2].isdigit() and 1000 <= int(row[2]) < 65534 and not NO_SHELL.search(row[6])
        )

    def dpkg_interrupted(self) -> bool | Unread:
        """Return whether dpkg was cut off: it keeps what it has not merged into its database in numbered files."""
        try:
            return any(entry.name.isdigit() for entry in self.at("var/lib/dpkg/updates").iterdir())
        except FileNotFoundError:
            return False
        except OSError as error:
            return Unread(f"/var/lib/dpkg/updates: {error.strerror}")

    def locks(self, paths: Iterable[str] = LOCKS) -> tuple[model.HeldLock, ...] | Unread:
        """Return who holds the locks. It reads /proc/locks, because trying a lock would take it."""
        text = self.text("proc/locks")
        if isinstance(text, Unread):
            return text
        held: dict[str, int] = {}
        for words in (line.split() for line in text.splitlines()):
            # A waiting process has an arrow before its line.
            if len(words) >= 8 and words[1] in ("POSIX", "FLOCK", "OFDLCK"):
                held[words[5]] = int(words[4])
        found = []
        for path in paths:
            try:
                seen = self.at(path).stat()
            except OSError:
                continue
            pid = held.get(f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}")
            if pid is not None:
                found.append(model.HeldLock(f"/{path}", pid, self.plain(f"proc/{pid}/comm") or "a process"))
        return tuple(found)

    def synchronized(self) -> bool | Unread:
        ran = self.ask("timedatectl", "show", "--property=NTPSynchronized", "--value")
        if isinstance(ran, Unread):
            return ran
        word = ran.out.strip()
        return word == "yes" if word in ("yes", "no") else Unread(f"timedatectl: {ran.err or 'it said nothing'}")

    def gpus(
        self, rows: Sequence[Sequence[str]], problem: str, engines: Sequence[model.Engine], expected: model.Expectation
    ) -> model.Gpus:
        counted: dict[str, str] = {uuid: "gpu_uuids of the inventory" for uuid in expected.uuids}
        recorded = self.slots()
        for number, slot in enumerate(() if isinstance(recorded, Unread) else recorded):
            counted.setdefault(slot.uuid, f"slot {number} of this host")
        for engine in engines:
            counted |= {uuid: f"engine {engine.name}" for uuid in engine.gpus}
        return model.Gpus(
            on_bus=self.on_bus(),
            answering=tuple(
                model.Gpu(row[0], row[1], topology.convert_address(row[2]), switch(row[3])) for row in rows
            ),
            problem=problem,
            expected=recorded if isinstance(recorded, Unread) and not expected.uuids else counted,
            needed=expected.gpus,
            others=self.others() if rows else (),
            nodes=self.device_nodes(),
        )

    def device_nodes(self) -> dict[str, int] | Unread:
        """Return the mode of each device node of the driver, by path."""
        try:
            seen = {
                entry.name: entry.lstat().st_mode for entry in self.at("dev").iterdir() if NODE.fullmatch(entry.name)
            }
        except OSError as error:
            return Unread(f"/dev: {error.strerror}")
        return {
            f"/dev/{name}": stat.S_IMODE(mode)
            for name, mode in sorted(seen.items())
            if not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode)
        }

    def on_bus(self) -> dict[str, str]:
        """Return the kernel driver of each NVIDIA GPU on the PCI bus, by address; empty if no driver has it."""
        return {
            device.name: (device / "driver").resolve().name if (device / "driver").exists() else ""
            for device in sorted(self.at("sys/bus/pci/devices").glob("*"))
            if self.plain(f"sys/bus/pci/devices/{device.name}/vendor") == NVIDIA
            and self.plain(f"sys/bus/pci/devices/{device.name}/class").startswith(GPU_CLASS)
        }

    def others(self) -> tuple[str, ...] | Unread:
        """Return the processes on the GPUs that are not of engines."""
        ran = self.ask("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits")
        if isinstance(ran, Unread):
            return ran
        rows = [re.fullmatch(r"(GPU-\S+), *(\d+)", line) for line in ran.out.splitlines() if "," in line]
        if ran.status != 0 or None in rows:
            return Unread(f"nvidia-smi does not list the processes: {' '.join((ran.out + ran.err).split())[:200]}")
        pairs = [(row[1], int(row[2])) for row in rows if row]
        owners = self.owners({pid for _, pid in pairs})
        return tuple(
            f"{self.who(pid, owners[pid])} on {uuid}" for uuid, pid in pairs if not self.is_ours(pid, owners[pid])
        )

    def is_ours(self, pid: int, owner: Owner) -> bool:
        """Return whether a process is an engine: by its user where Docker cannot say whose container it is."""
        if owner.kind != "unknown":
            return owner.kind == "ours"
        found = re.search(r"^Uid:\s+(\d+)", self.plain(f"proc/{pid}/status"), re.MULTILINE)
        return found is not None and int(found[1]) == self.engine_uid()

    def who(self, pid: int, owner: Owner) -> str:
        name = self.plain(f"proc/{pid}/comm") or "ended"
        where = f"container {owner.container}" if owner.container else owner.unit or "in no container"
        return f"pid {pid} ({name}; {where})"

    def topology(self, rows: Sequence[Sequence[str]]) -> Topology:
        values = [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows]
        bus = self.bus((value["uuid"], value["pci.bus_id"]) for value in values)
        # A driver that does not answer may take its time to say so: it is asked once.
        ecc = self.by_uuid(ECC_FIELDS) if rows else {}
        reasons = (self.by_uuid(REASONS_FIELDS[:1]) or self.by_uuid(REASONS_FIELDS[1:])) if rows else {}
        # Drivers before branch 565 refuse a query with it.
        recovery = self.by_uuid(["gpu_recovery_action"]) if rows else {}
        cards = []
        for card, value in zip(bus.cards, values, strict=True):
            errors = ecc.get(card.uuid, ("", "", ""))
            active = reasons.get(card.uuid, ("",))[0]
            slow = int(active, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", active) else None
            cards.append(
                replace(
                    card,
                    **{name: parse(value[field]) for name, (field, parse) in CARD_FIELDS.items()},
                    idle=value["pstate"] not in ("P0", "P1", "P2"),
                    recovery=said(recovery.get(card.uuid, ("",))[0]),
                    uncorrected=number(errors[0]),
                    remap_failed=switch(errors[1]),
                    remap_pending=switch(errors[2]),
                    slowdown=None if slow is None else slow & sum(topology.SLOWDOWNS),
                    numa=topology.read_numa(self.at(f"sys/bus/pci/devices/{card.bus}")),
                )
            )
        memory = re.search(r"^MemTotal:\s+(\d+) kB", self.plain("proc/meminfo"), re.MULTILINE)
        return replace(
            bus,
            cards=tuple(cards),
            xids=self.xids(),
            memory_bytes=int(memory[1]) * 1024 if memory else None,
            shm_bytes=self.shm_bytes(),
            unassigned=self.unassigned(bus.cards),
            numa_nodes=len(list(self.root.glob("sys/devices/system/node/node[0-9]*"))),
        )

    def unassigned(self, cards: Iterable[Card]) -> frozenset[str]:
        """Return the PCI addresses of GPUs that are not ours: without a slot where slots are recorded, or passed on."""
        recorded = self.slots()
        ours = set() if isinstance(recorded, Unread) else {slot.uuid for slot in recorded}
        passed_on = {bus for bus, driver in self.on_bus().items() if driver == "vfio-pci"}
        return frozenset(passed_on | {card.bus for card in cards if ours and card.uuid not in ours})

    def slots(self) -> tuple[slots.Slot, ...] | Unread:
        """Return the recorded slots; none without a record."""
        try:
            return slots.load(str(self.paths.state / "gpu-slots.json"))
        except (slots.SlotError, OSError) as error:
            return Unread(str(error))

    def xids(self) -> tuple[Xid, ...] | Unread:
        """Return the Xids since the kernel module was loaded, whose message shows that the log reaches back to it."""
        words = f"--grep=NVRM: (Xid|{LOADING})"
        ran = self.ask("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat", words)
        if isinstance(ran, Unread):
            return ran
        if re.search(r"not seeing messages|insufficient permissions|Permission denied", ran.err):
            return Unread("the kernel's log is shown to root and the group systemd-journal")
        _, began, since = ran.out.rpartition(f"NVRM: {LOADING}")
        found = topology.parse_xids(since)
        if found or began:
            return found
        # Without a match it ends with 1 and says so, or nothing.
        if ran.status != 0 and ran.err and "No entries" not in ran.out + ran.err:
            return Unread(f"journalctl: {ran.err.splitlines()[-1]}")
        return Unread(
            "the kernel's log of this boot does not have the message of the kernel module nvidia when it is loaded, so "
            "that an older Xid may be gone from it, too"
        )

    def shm_bytes(self) -> int | None:
        """Return the size of the host's /dev/shm; None if it is not mounted."""
        if not re.search(r"^\S+ /dev/shm ", self.plain("proc/mounts"), re.MULTILINE):
            return None
        try:
            found = os.statvfs(self.at("dev/shm"))
        except OSError:
            return None
        return found.f_blocks * found.f_frsize

    def runtime(self) -> model.Runtime:
        config, error = self.docker_config()
        texts = self.specifications()
        read = {} if isinstance(texts, Unread) else texts
        docker = self.unit("docker.service")
        pid = 0 if isinstance(docker, Unread) else docker.main_pid
        return model.Runtime(
            docker_version=self.version("dockerd"),
            docker=docker,
            flags=parse_dockerd_flags(self.plain(f"proc/{pid}/cmdline").split("\0") if pid else ()),
            config=config,
            config_error=error,
            in_swarm=self.in_swarm({} if isinstance(config, Unread) else config),
            refresh=self.unit("nvidia-cdi-refresh.path"),
            creates_nodes=any(
                "create-device-nodes" in self.plain(str(path.relative_to(self.root)))
                for pattern in REFRESH_FILES
                for path in self.root.glob(pattern)
            ),
            runc_version=self.version("runc"),
            specifications=texts
            if isinstance(texts, Unread)
            else {path: cdi.parse_device_names(text) for path, text in read.items()},
            without_uvm=tuple(path for path, text in read.items() if not cdi.lists_uvm(text)),
            access=self.access(),
            leftovers=self.leftovers(),
        )

    def spaces(self, data: str) -> dict[str, Sequence[Space] | Unread]:
        """Return the file systems of each step, by its name; `data` is the directory of weights and caches."""
        places = {name: f"/{getattr(self.paths, name).relative_to(self.root)}" for name in ("etc", "run", "state")}
        at = {**places, **locate_images(self), "data": data}
        found: dict[str, Sequence[Space] | Unread] = {}
        for step in STEPS:
            try:
                found[step] = self.measure(step, at, root=self.root)
            except OSError as error:
                found[step] = Unread(str(error))
        return found

    def in_swarm(self, config: Mapping[str, Any]) -> bool | Unread:
        """Return whether there is the file of a node, with which dockerd does not start where live-restore is set."""
        place = locate_swarm_state(config)
        try:
            self.at(place).stat()
        except PermissionError:
            return Unread(f"{place} is for root")
        except OSError:
            return False
        return True

    def leftovers(self) -> tuple[str, ...] | Unread:
        """Return the containers of benchmarks and reference answers whose command has ended without removing them."""
        shown = f'{{{{.Names}}}} {{{{.Label "{LABEL_SIDECAR}"}}}}'
        try:
            refuse_stopped_docker(self.run)
            text = ask_docker(self.run, "ps", "--all", "--filter", f"label={LABEL_SIDECAR}", "--format", shown)
        except (CannotAsk, SystemdError) as error:
            return Unread(str(error))
        locks = {name: f"run/vllm-edge/{purpose}.lock" for name, purpose in map(str.split, text.splitlines())}
        held = self.locks(locks.values())
        if isinstance(held, Unread):
            return held
        running = {lock.path for lock in held}
        return tuple(name for name, path in locks.items() if f"/{path}" not in running)

    def docker_config(self) -> tuple[Mapping[str, Any] | Unread, str]:
        """Return the content of daemon.json, and why it is not valid (empty if it is)."""
        path = self.at("etc/docker/daemon.json")
        try:
            return (read_object(path) if path.exists() and path.read_text(encoding="utf-8").strip() else {}), ""
        except OSError as error:
            return Unread(f"{path}: {error.strerror or error}"), ""
        except ValueError as error:
            return {}, str(error)

    def image(self) -> model.Image | Unread | None:
        path = self.paths.state / "image.json"
        try:
            found = read_object(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unread(f"{path}: {error.strerror or error}")
        except ValueError as error:
            return Unread(str(error))
        # A record of an earlier release has the name alone.
        name, cuda, branch = (str(found.get(key) or "") for key in ("name", "cuda", "driver_branch"))
        return model.Image(name, cuda, branch)

    def _find_open_directories(self, engines: Iterable[str]) -> tuple[str, ...] | Unread:
        """Return what is wrong with the directories of sockets; that of an engine may still be the engine's own."""
        above = self.paths.engine_socket("any").parent.parent
        places = {self.paths.run: 0o755, above: PARENT_MODE, **{above / name: MODE for name in engines}}
        wrong = []
        for place, mode in places.items():
            try:
                found = place.lstat()
            except FileNotFoundError:
                if place.parent != above:
                    return (f"{place} does not exist",)
                continue
            except OSError as error:
                return Unread(f"{place}: {error.strerror}")
            if not stat.S_ISDIR(found.st_mode):
                wrong.append(f"{place} is no directory")
            elif (have := stat.S_IMODE(found.st_mode)) != mode:
                wrong.append(f"{place} has mode {have:04o}, wanted {mode:04o}")
            elif place == above and os.geteuid() == 0 and found.st_gid != find_gateway_group():
                wrong.append(f"{place} belongs to group {found.st_gid}, wanted {GATEWAY_USER}")
        return tuple(wrong)

    def _find_silence(self, config: EngineConfig) -> str | Unread:
        """Return why an engine does not answer; empty if it does."""
        if config.socket is not None:
            place = self.paths.engine_socket(config.engine)
            try:
                with pin(place):
                    mode = stat.S_IMODE(place.lstat().st_mode)
            except PermissionError:
                return Unread(f"{place} is for root")
            except OSError as error:
                return f"{place}: {error.strerror}"
            if mode != SOCKET_MODE:
                return f"{place} has mode {mode:04o}, with which the gateway cannot connect, wanted {SOCKET_MODE:04o}"
        answer = self.health(config.url, config.health_timeout_s)
        return "" if answer.ok else f"/health: {answer.words()}"

    def _find_open(self) -> Iterator[str]:
        """Yield what others than root could read of the engines' secrets, or change of hooks."""
        for hook in hooks.HOOKS:
            yield from hooks.find_unsafe(self.paths.hook_dir(hook))
        secrets = self.paths.secrets
        for path in (secrets, *sorted(secrets.iterdir())) if secrets.is_dir() else ():
            if wrong := find_wrong_attributes(path, 0o700 if path == secrets else 0o600):
                yield f"{path} has {wrong}."

    def _list_engines(self) -> list[str] | Unread:
        try:
            names = list_engine_names(self.paths)
        except OSError as error:
            return Unread(f"{error.filename}: {error.strerror}")
        files = [self.paths.engine_dir(name) / CONTAINER_FILE for name in names]
        hidden = [file for file in files if not os.access(file, os.R_OK)]
        return Unread(f"{hidden[0]} is for root") if hidden and os.geteuid() != 0 else names

    def _engine(self, engine: Engine) -> model.Engine | Unread:
        unit = self.unit(engine.config.unit)
        if isinstance(unit, Unread):
            return unit
        maps = self.text(f"proc/{unit.main_pid}/maps") if unit.main_pid else ""
        return model.Engine(
            name=engine.config.engine,
            unit=unit,
            silent=self._find_silence(engine.config) if unit.active_state == "active" else "",
            gpus=engine.config.gpus,
            shm_bytes=find_shm_bytes(engine.get_option("--shm-size")),
            accept_risk=engine.config.accept_risk,
            cache=self._examine_cache(engine.cache),
            replaced=maps if isinstance(maps, Unread) else find_replaced_libraries(maps),
        )

    def _examine_cache(self, cache: Path | None) -> tuple[str, ...] | Unread:
        if cache is None:
            return ()
        aside, place = find_aside(cache), self.at(str(cache).lstrip("/"))
        try:
            excess = find_excess(place) if os.path.lexists(place) else ""
        except OSError as error:
            return Unread(str(error))
        told = f"{aside} is set aside" if os.path.lexists(find_aside(place)) else ""
        return tuple(filter(None, (told, f"{cache} has {excess}" if excess else "")))

    def serving(self) -> model.Serving:
        names = self._list_engines()
        if isinstance(names, Unread):
            return model.Serving(names, (), self.unit(TARGET), "")
        errors: list[str] = []
        loaded: list[Engine] = []
        for name in names:
            try:
                loaded.append(load_engine(name, self.paths))
            except EngineConfigError as error:
                errors.append(str(error))
                continue
            if problem := find_policy_problem(loaded[-1].container):
                errors.append(f"{name}: {problem}")
        read = [self._engine(engine) for engine in loaded]
        unread = next((engine for engine in read if isinstance(engine, Unread)), None)
        sockets = [engine.config.engine for engine in loaded if engine.config.socket is not None]
        switches, _ = read_switches(self.paths)
        killed = switches.get("unfinished_switch")
        kept = [row for row in switches.get("history", ()) if row["result"] in (Result.COMMITTED, Result.OVER_BUDGET)]
        return model.Serving(
            engines=unread or tuple(engine for engine in read if not isinstance(engine, Unread)),
            errors=tuple(errors),
            target=self.unit(TARGET),
            unfinished_switch=str(killed["message"] or killed["id"]) if killed else "",
            switching=switches.get("switch") is not None,
            unrecorded=self._find_record_fault(),
            open_to_others=tuple(self._find_open()),
            socket_directories=self._find_open_directories(sockets) if sockets else (),
            over_budget=kept[0]["message"] if kept and kept[0]["result"] == Result.OVER_BUDGET else "",
        )

    def _find_record_fault(self) -> str | Unread:
        try:
            return "" if load_committed(self.paths) else "no profile is recorded on this host"
        except GenerationError as error:
            return str(error) if os.geteuid() == 0 else Unread(str(error))

    def gateway(self) -> model.Gateway | Unread | None:
        place = self.paths.gateway
        if place.is_dir() and not os.access(place, os.R_OK | os.X_OK):
            return Unread(f"{place} is for root")
        unit, text, problems = self.unit(GATEWAY_UNIT), "", tuple[str, ...]()
        if is_installed(self.paths):
            try:
                text = (place / CONFIGURATION).read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                return Unread(f"{place / CONFIGURATION}: {error.strerror}")
        elif isinstance(unit, Unread) or unit.active_state not in ("active", "reloading"):
            return None
        else:
            problems = (
                f"{place / CONFIGURATION} is missing: the gateway runs, and does not start again. Run site.yml.",
            )
        try:
            read_fleet(self.paths)
        except GatewayError as error:
            problems = (*problems, str(error))
        try:
            report = synchronize(self.paths, read_switch_progress, check=True, proxy=self.proxy(self.paths))
        except GatewayError as error:
            report, problems = Report(True), (*problems, str(error))
        places = list_places(text)
        return model.Gateway(
            unit=unit,
            answers=report.answers or not report.installed,
            differences=report.changes,
            problems=problems + report.warnings,
            without_backend=tuple(name for name in report.served if name_link(name, 0) not in places),
            too_few_servers=tuple(
                name for name, engines in report.served.items() if name_link(name, engines - 1) not in places
            ),
            port_users=tuple(find_port_users([("127.0.0.1", 1)], GATEWAY_UNIT, self.at("proc"))),
            with_tls=not text or any(address.startswith("https:") for address in list_addresses(text)),
            certificate=self._certificate(server_pem(self.paths)),
            metrics=self._metrics(),
        )

    def _certificate(self, path: Path) -> Certificate | Unread | None:
        try:
            return read_certificate(path, self.run) if path.exists() else None
        except ValueError as error:
            return Unread(str(error))

    def fleet(self) -> model.Fleet | None:
        try:
            found = read_fleet(self.paths)
        except GatewayError:  # the checks of the gateway tell it
            return None
        if found is None:
            return None
        try:
            seen: tuple[peers.Seen, ...] | Unread = peers.ask_peers(self.paths, found)
        except OSError as error:
            seen = Unread(str(error))
        state = read_map(self.paths, STATE)
        try:
            said = {key: json.loads(state[key]) for key in peers.SAID}
        except (KeyError, ValueError):
            said = {}
        try:
            unserved: tuple[str, ...] | Unread = peers.list_unserved(self.paths, self.proxy(self.paths))
        except GatewayDown as error:
            unserved = Unread(f"HAProxy does not say what it reaches: {error}")
        return model.Fleet(said, self._certificate(self.paths.gateway / "tls/fleet.pem"), seen, unserved)

    def _metrics(self) -> model.Metrics | Unread | None:
        if (fault := find_metrics_fault(self.paths)) is None:
            return None
        units = self.units(FACTS_UNIT, EXPORTER_SOCKET, EXPORTER_UNIT)
        return units if isinstance(units, Unread) else model.Metrics((*units.values(),), fault)
