# SPDX-License-Identifier: Apache-2.0
"""What clients of the gateway should see, and the maps and links that say so: pure functions of generation and clients.

Every map has one entry a line, `key value`; HAProxy looks keys up as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..engine.config import EngineConfig
from ..generation.model import Generation
from ..names import TEMPORARY_CLIENT
from .clients import Client
from .names import backend_name, name_link

MODELS, CLIENTS, RIGHTS, LISTS, STATE, PORTS = (
    f"{name}.map" for name in ("models", "clients", "rights", "lists", "state", "ports")
)
RETRY_S = 120
"""Seconds after which a client asks again where no load of the engine is recorded, and none is planned."""
MOST_RETRY_S = 3600
METRICS = "@metrics"
"""After the name of a client, in rights.map: that it may read metrics. Names of clients have no such character."""
Maps = dict[str, dict[str, str]]
State = Literal["up", "provisional", "away", "stand-in"]
"""`provisional`: an engine answers whose generation is not committed yet, and may be taken away again."""
LEAVING = "leaving"
"""What a map says instead (`sync.publish_leaving`): everything goes on, but other hosts send no more requests."""


@dataclass(frozen=True)
class Role:
    name: str
    engines: tuple[str, ...]
    """The engines that answer now; that will answer, while the role is away. At least one."""
    state: State
    retry_after_s: int
    port: int | None
    max_model_len: int | None

    @property
    def address(self) -> str:
        return f"/roles/{backend_name(self.name)}/v1"

    @property
    def links(self) -> dict[str, str]:
        engines = () if self.state == "away" else self.engines
        return {name_link(self.name, place): f"../engines/{name}/api.sock" for place, name in enumerate(engines)}


@dataclass(frozen=True)
class View:
    """What clients see. An empty one has no profile: every name is unknown."""

    host: str
    profile: str | None = None
    generation: int | None = None
    switch: str | None = None
    """Phase of the switch that runs."""
    roles: tuple[Role, ...] = ()
    ports: Mapping[int, str] = field(default_factory=dict)
    engines: tuple[tuple[EngineConfig, str], ...] = ()
    """The engines that serve now, each with the profile that it is of."""
    fleet: str | None = None
    digest: str | None = None
    """Of what serves, as `sync.hash_service` makes it."""
    release: str | None = None
    """Version of vllm-edge. Like `fleet` and `digest` it is for the other hosts of the fleet: None without one."""

    @property
    def links(self) -> dict[str, str]:
        return {f"{place}.sock": target for role in self.roles for place, target in role.links.items()}


@dataclass(frozen=True)
class SwitchProgress:
    """A switch that has not ended, as far as clients notice it."""

    phase: str | None
    keep: Collection[str] | None = None
    """Engines that stay; None while no engine is away."""
    wanted: Generation | None = None
    """The generation at its other end, if that is known."""
    back: Collection[str] = ()
    """Engines of `wanted`, otherwise of the committed generation, that were away and serve before the switch ends."""


def build_view(
    host: str, live: Generation | None, progress: SwitchProgress | None, load_seconds: Callable[[str], float | None]
) -> View:
    """Return what clients should see.

    A name of which no engine stays or is back is away, unless such engines stand in for it. `live` is the generation
    whose names are known, `progress` the switch that has not ended. `load_seconds` returns the seconds that the last
    load of an engine took, otherwise those that are expected; None if neither is known.
    """
    progress = progress or SwitchProgress(None)
    if live is None:
        return View(host, switch=progress.phase)
    wanted = progress.wanted or live
    keep = {*live.engines} if progress.keep is None else {*live.engines} & {*progress.keep}
    back = {*wanted.engines} & {*progress.back} - keep
    changes = wanted.number != live.number
    coming = {name: engine.config for name, engine in wanted.engines.items() if name not in keep}
    configs = {name: engine.config for name, engine in live.engines.items()} | coming
    serving = {name: configs[name] for name in sorted(keep | back)}
    # Without an early return, the slowest engine brings back all that are away.
    together = [*coming] if changes and not wanted.returns_early else []
    roles = []
    for name, now in sorted(live.roles.items()):
        there = (*(one for one in now if one in keep), *(one for one in wanted.roles.get(name, ()) if one in back))
        owners = there or wanted.roles.get(name, now)
        standing = tuple(other for other, config in serving.items() if name in config.stands_in_for)
        state: State = "up" if there else "stand-in" if standing else "away"
        if changes and back.intersection(there):
            state = "provisional"
        seconds = [known for owner in (not there and together) or owners if (known := load_seconds(owner)) is not None]
        known_s = (max if together else min)(seconds, default=RETRY_S)  # one of several engines suffices
        roles.append(
            Role(
                name,
                standing if state == "stand-in" else owners,
                state,
                min(MOST_RETRY_S, max(1, math.ceil(known_s))),
                configs[owners[0]].port,
                configs[owners[0]].max_model_len,
            )
        )
    return View(
        host,
        live.profile,
        live.number,
        progress.phase,
        tuple(roles),
        # Two engines have the same port if one of them leaves: the one that comes counts.
        {
            port: name
            for name in sorted(configs, key=lambda name: name in coming or name in keep)
            if (port := configs[name].port)
        },
        tuple((config, (wanted if name in back else live).profile) for name, config in serving.items()),
    )


def _to_json(value: Any) -> str:
    # HAProxy's command line splits `set map` at blanks and has no quotes, so short values have none.
    return json.dumps(value, separators=(",", ":")).replace(" ", "\\u0020")


def render_models(view: View) -> Maps:
    keys = ("host", "profile", "generation", "switch", *(("fleet", "digest", "release") if view.fleet else ()))
    state = {key: _to_json(getattr(view, key)) for key in keys}
    models = {}
    for role in view.roles:
        words = (
            *(backend_name(role.name), ",".join(role.engines), role.state),
            *(role.name if role.state == "stand-in" else "-", str(role.retry_after_s), str(role.port or "-")),
        )
        models[role.name] = " ".join(words)
        # Its state, and the seconds until it is back, are for HAProxy to say: it knows which engines it reaches.
        state[f"role:{role.name}"] = _to_json({"engine": role.engines[0], "engines": role.engines})[1:-1]
    state["targets"] = _to_json([_describe_target(engine, profile) for engine, profile in view.engines])
    return {MODELS: models, STATE: state, PORTS: {str(port): engine for port, engine in view.ports.items()}}


def _describe_target(engine: EngineConfig, profile: str) -> dict[str, Any]:
    """Return an engine as a group of Prometheus' HTTP service discovery; HAProxy writes its address for the empty text.

    https://prometheus.io/docs/prometheus/latest/http_sd/
    """
    labels = {"engine_name": engine.engine, "profile": profile, "roles": ",".join(engine.served_names)}
    labels |= {"model": engine.model, "precision": engine.precision}
    return {"targets": [""], "labels": {"__metrics_path__": f"/metrics/engine/{engine.engine}", **labels}}


def _list_models(roles: Sequence[Role]) -> str:
    models = [
        {"id": role.name, "object": "model", "created": 0, "owned_by": "vllm-edge"}
        | ({"max_model_len": role.max_model_len} if role.max_model_len else {})
        for role in roles
    ]
    return _to_json({"object": "list", "data": models})


def keep_seconds(maps: Maps, text: str) -> Maps:
    """Return the maps with the former seconds of names that are up, where nothing else of their entries is new.

    An engine that was loaded again by itself has another load time, which alone is no difference. `text` is the former
    content of models.map.
    """
    former = {name: line.split(" ") for name, line in parse_text(text).items()}
    kept = {}
    for name, line in maps[MODELS].items():
        now, then = line.split(" "), former.get(name, [])
        same = (
            now[2] in ("up", "provisional") and len(then) == len(now) and (*now[:4], *now[5:]) == (*then[:4], *then[5:])
        )
        kept[name] = " ".join(then) if same and then[4].isdigit() else line
    return {**maps, MODELS: kept}


def render_keys(clients: Mapping[str, Client], now: str) -> dict[str, str]:
    """Return clients.map: `<client> <requests_per_minute> <streams>` by the SHA-256 of each key, without those that
    have ended by `now` (a stamp). A fourth word is the end of a key that has one, for `drop_ended`."""
    return {
        key.sha256: f"{name} {client.requests_per_minute} {client.streams}{f' {key.until}' if key.until else ''}"
        for name, client in clients.items()
        for key in client.keys
        if key.valid(now)
    }


def drop_ended(keys: Mapping[str, str], now: str) -> dict[str, str]:
    """Return the entries of clients.map that count without `clients.json`: not those that have ended by `now`, nor
    those of a program, which `render_keys` gives as long as it runs."""
    rows = {key: words.split(" ") for key, words in keys.items()}
    return {
        key: keys[key] for key, row in rows.items() if row[0] != TEMPORARY_CLIENT and (len(row) < 4 or row[3] > now)
    }


def narrow_rights(rights: Mapping[str, str], clients: Mapping[str, Client]) -> dict[str, str]:
    """Return the entries of a former rights.map that the clients still have, where no view says which are new."""
    kept = {}
    for entry, value in rights.items():
        name, _, served = entry.partition(":")
        client = clients.get(name.removesuffix(METRICS))
        if client and (client.may((served,)) if served else client.metrics):
            kept[entry] = value
    return kept


def render_rights(view: View, clients: Mapping[str, Client]) -> Maps:
    """Return the maps of rights and lists.

    In lists `<client>@<engine>` is the list at the engine's own port, `:<served name>` that at the address of the role,
    and `<client>:` the addresses of the client's roles, for messages.
    """
    rights: dict[str, str] = {}
    lists = {f":{role.name}": _list_models([role]) for role in view.roles}
    for name, client in clients.items():
        roles = [role for role in view.roles if client.may((role.name,))]
        rights |= {f"{name}:{role.name}": "1" for role in roles} | ({f"{name}{METRICS}": "1"} if client.metrics else {})
        lists[name] = _list_models(roles)
        lists[f"{name}:"] = ", ".join(role.address for role in roles)
        for engine in view.ports.values():
            lists[f"{name}@{engine}"] = _list_models([role for role in roles if engine in role.engines])
    return {RIGHTS: rights, LISTS: lists}


def to_text(entries: Mapping[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in sorted(entries.items()))


def parse_text(text: str) -> dict[str, str]:
    lines = (line.partition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in lines}
