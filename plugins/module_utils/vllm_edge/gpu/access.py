# SPDX-License-Identifier: Apache-2.0
"""Which running containers may lose their GPUs at the next `systemctl daemon-reload`, by what Docker says of them.

NVIDIA's legacy runtime hook grants GPUs to a container without the knowledge of runc and systemd. When systemd is
reloaded, it applies the device rules that it knows to the control groups that it manages. The container then keeps its
device nodes but may no longer open them, and NVML in it fails with "Unknown Error"
(NVIDIA/nvidia-container-toolkit#48). Not affected are devices that runc was told of (CDI, `--device`), Docker's cgroup
driver `cgroupfs`, and hosts where `/dev/char` has links to NVIDIA's devices.

The result errs on the side of a warning: Docker 29 can serve `--gpus` by CDI, and so can NVIDIA's runtime since 1.18,
which `docker inspect` does not show.

The host stage runs this before it has rejected a Python that is too old, so this file and everything that it imports
must work with Python 3.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.host import run_in_english
from ..system.systemd import Run, Systemd, SystemdError
from ..text import printable

DOCKER = "docker.service"
DOCKER_S = 30.0
"""Seconds that a command of Docker may take. Our choice."""
NVIDIA_MAJOR = 195
"""Major number of /dev/nvidia<number> and /dev/nvidiactl (Documentation/admin-guide/devices.txt of the kernel)."""
REMEDY = (
    "Their owner can start them with CDI ('--device nvidia.com/gpu=...') or run 'nvidia-ctk system "
    "create-dev-char-symlinks --create-all' on this host after each boot. vllm-edge does not touch them; one that has "
    "lost its GPUs needs 'docker restart'."
)


class CannotAsk(Exception):
    """The containers of this host cannot be read; the text says why."""


@dataclass(frozen=True)
class Access:
    """Names of the running containers that have GPUs, sorted."""

    by_device: tuple[str, ...] = ()
    """Those that got them by CDI or as plain devices."""
    by_hook: tuple[str, ...] = ()
    """Those that got them from NVIDIA's legacy runtime hook."""
    reload_safe: bool = False
    """Whether those of the hook keep them, because of Docker's cgroup driver or the links in /dev/char."""

    @property
    def at_risk(self) -> tuple[str, ...]:
        return () if self.reload_safe else self.by_hook

    @property
    def risk(self) -> str:
        """One sentence without its full stop about the containers at risk; empty if there are none."""
        if not self.at_risk:
            return ""
        return (
            f"'systemctl daemon-reload' may take the GPUs from {', '.join(self.at_risk)}, which NVIDIA's legacy "
            "runtime hook granted ('--gpus' or '--runtime=nvidia'), because /dev/char has no links to NVIDIA's devices"
        )


def _classify_request(request: Mapping[str, Any]) -> str:
    """Return `device`, `hook` or empty for one entry of DeviceRequests (`--device <CDI name>`, `--gpus`)."""
    driver = request.get("Driver") or "nvidia"
    if driver == "nvidia.cdi" or any(name.startswith("nvidia.com/") for name in request.get("DeviceIDs") or []):
        return "device"
    gpu = any("gpu" in names for names in request.get("Capabilities") or [])
    return "hook" if gpu and driver.startswith("nvidia") else ""


def _classify_runtime(host: Mapping[str, Any], env: Sequence[str]) -> str:
    """Return `device`, `hook` or empty for the runtime of a container (`--runtime=nvidia`)."""
    variables = dict(line.split("=", 1) for line in env if "=" in line)
    visible = variables.get("NVIDIA_VISIBLE_DEVICES", "")
    runtime = host.get("Runtime") or ""
    if not runtime.startswith("nvidia") or visible in ("", "void", "none"):
        return ""
    annotated = any(name.startswith("cdi.k8s.io/") for name in host.get("Annotations") or {})
    return "device" if "cdi" in runtime or visible.startswith("nvidia.com/") or annotated else "hook"


def find_method(container: Mapping[str, Any]) -> str:
    """Return how a container got its NVIDIA GPUs: `device` (CDI included), `hook`, or empty if it has none of its own.

    `container` is one object of `docker inspect`.
    """
    host = container.get("HostConfig") or {}
    if host.get("Privileged"):
        return ""  # it may open every device of the host, with or without a hook
    if any(device.get("PathOnHost", "").startswith("/dev/nvidia") for device in host.get("Devices") or []):
        return "device"
    ways = {_classify_request(request) for request in host.get("DeviceRequests") or []}
    ways.add(_classify_runtime(host, (container.get("Config") or {}).get("Env") or []))
    return next((way for way in ("device", "hook") if way in ways), "")


def look(run: Run = run_in_english, root: Path = Path("/")) -> Access:
    """Return which running containers have GPUs and which of them may lose them.

    Raises CannotAsk: systemd or Docker cannot be queried.
    """
    try:
        refuse_stopped_docker(run)
        containers = _inspect(run)
        found: dict[str, list[str]] = {}
        for container in containers:
            found.setdefault(find_method(container), []).append(str(container["Name"]).lstrip("/"))
        by_hook = tuple(sorted(found.get("hook", ())))
        safe = not by_hook or any((root / "dev/char").glob(f"{NVIDIA_MAJOR}:*"))
        safe = safe or ask_docker(run, "info", "--format", "{{.CgroupDriver}}").strip() == "cgroupfs"
    except SystemdError as error:
        raise CannotAsk(str(error)) from error
    except (ValueError, LookupError, AttributeError, RecursionError, TypeError) as error:
        problem = printable(repr(error)[:300])
        raise CannotAsk(f"docker inspect printed something else than containers: {problem}") from error
    return Access(tuple(sorted(found.get("device", ()))), by_hook, safe)


def refuse_stopped_docker(run: Run) -> None:
    """Raise CannotAsk if Docker does not run: its socket would start what was stopped. Also raises SystemdError."""
    unit = Systemd(run).show([DOCKER])[DOCKER]
    if unit.loaded and unit.active_state not in ("active", "activating", "reloading"):
        raise CannotAsk(f"{DOCKER} is {unit.active_state}")


def _inspect(run: Run) -> list[dict[str, Any]]:
    """Return the running containers as `docker inspect` shows them. Raises CannotAsk, SystemdError, ValueError."""
    ids = ask_docker(run, "ps", "--quiet", "--no-trunc").split()
    if not ids:
        return []
    listed = json.loads(ask_docker(run, "inspect", "--type=container", *ids, ended="no such"))
    return [container for container in listed if container["State"].get("Pid")]


def ask_docker(run: Run, *arguments: str, ended: str = "") -> str:
    """Return the output of a `docker` command. Raises CannotAsk, SystemdError.

    `ended` are words of an error message that is tolerated, as of containers that have ended since they were listed.
    """
    ran = run(["docker", *arguments], DOCKER_S)
    refused = [line for line in ran.err.splitlines() if line.strip() and not (ended and ended in line.lower())]
    if ran.status != 0 and (refused or not ended):
        raise CannotAsk(f"docker {arguments[0]}: {refused[0].strip() if refused else f'ended with {ran.status}'}")
    return ran.out
