# SPDX-License-Identifier: Apache-2.0
"""What Docker's daemon.json becomes, and how the daemon that runs takes it over."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Options that dockerd reloads on SIGHUP (docs.docker.com, dockerd reference, "Configuration reload behavior").
# That list contains "features", too, but dockerd only registers the CDI driver at start.
RELOADABLE = frozenset(
    {
        "authorization-plugins",
        "debug",
        "default-runtime",
        "insecure-registries",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "registry-mirrors",
        "runtimes",
        "shutdown-timeout",
    }
)
CDI_DEFAULT_SINCE = (28, 2)


def locate_swarm_state(config: Mapping[str, Any]) -> str:
    """Return the file that a node of a swarm has. While it exists, dockerd does not start with live-restore."""
    return f"{config.get('data-root') or '/var/lib/docker'}/swarm/docker-state.json"


def merge(current: Any, wanted: Any) -> Any:
    """Return the settings with the wanted ones: lists are extended, and nothing else of others is changed."""
    if isinstance(current, dict) and isinstance(wanted, Mapping):
        return {**current, **{key: merge(current.get(key), value) for key, value in wanted.items()}}
    if isinstance(current, list) and isinstance(wanted, list):
        return current + [item for item in wanted if item not in current]
    return wanted


def list_actions(changed: set[str], live_restore: bool, info: Mapping[str, Any]) -> list[str]:
    """Return how the daemon takes the settings over, from what changes and from docker info."""
    behind = live_restore != bool(info.get("LiveRestoreEnabled", False))
    restart = bool(changed - RELOADABLE) or not info.get("CDISpecDirs")
    if not restart:
        return ["reloaded"] if changed or behind else []
    # After a reload with live-restore the containers keep running during the restart that follows.
    return ["reloaded", "restarted"] if live_restore and behind else ["restarted"]


def plan_docker_daemon(
    text: str | None, settings: Mapping[str, Any], version: str, info: str = "", root: Path = Path("/")
) -> dict[str, Any]:
    """Return the next daemon.json and what it needs.

    Args:
        text: content of the file; None if there is none.
        settings: settings to merge into it.
        version: release of Docker, for example "28.5.1".
        info: docker info as JSON; anything else if the daemon is stopped, which reads the file when it starts.
        root: of the host's file system, where the state of a swarm's node lies in Docker's data directory.

    Returns:
        `error`: why the file cannot be read, or empty. With that everything else is missing.
        `before`: the text. `content` and `live_restore` of the next file; `differs`, the names of its settings that
        change; `actions`, in their order, `reloaded` or `restarted`; `left_out`: whether live-restore is, for a swarm's
        sake.
    """
    try:
        before = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        return {"error": str(error)}
    if not isinstance(before, dict):
        return {"error": "it is not an object of settings"}
    try:
        running = json.loads(info)
    except ValueError:
        running = {}
    running = running if running.get("ServerVersion") else {}
    after = merge(before, settings)
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not after.get("features", {}).get("cdi", release >= CDI_DEFAULT_SINCE):
        after = merge(after, {"features": {"cdi": True}})
    if running:
        swarm = (running.get("Swarm") or {}).get("LocalNodeState", "inactive") != "inactive"
    else:
        swarm = (root / locate_swarm_state(after).lstrip("/")).exists()
    left_out = swarm and bool(after.get("live-restore"))
    if left_out:
        del after["live-restore"]
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    # With the indentation of the file, so that a diff only shows what changed.
    indented = re.search(r"^([ \t]+)\S", text or "", re.MULTILINE)
    rendered = json.dumps(after, indent=indented[1] if indented else 2, ensure_ascii=False) + "\n"
    live_restore = bool(after.get("live-restore", False))
    return {
        "error": "",
        "before": text,
        "content": rendered if changed else text,
        "live_restore": live_restore,
        "differs": sorted(changed),
        "actions": list_actions(changed, live_restore, running) if running else [],
        "left_out": left_out,
    }
