# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: engines, models and GPUs in the form that a role or the report needs.

group_vars/all/wiring.yml calls them, and says which variable is made of what. Every public function here is a filter.
"""

from __future__ import annotations

DOCUMENTATION = """
name: serving
short_description: engines, models and GPUs in the form that a role or the report needs
extends_documentation_fragment: edge.vllm_edge.filters
"""

import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.constants import INVENTORY_IGNORE_PATTERNS
from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean as _boolean

from ..module_utils.vllm_edge import text
from ..module_utils.vllm_edge.gateway.names import backend_name
from ..module_utils.vllm_edge.gateway.names import host_server as _host_server
from ..module_utils.vllm_edge.gpu import models
from ..module_utils.vllm_edge.inventory import engine_inputs, merging, profiles, replicas, reports, variables
from ..module_utils.vllm_edge.inventory.fleet import describe_host as _describe_fleet_host
from ..module_utils.vllm_edge.inventory.merging import choose_profile  # noqa: F401 filters
from ..module_utils.vllm_edge.inventory.monitoring import describe_host as _describe_host
from ..module_utils.vllm_edge.inventory.replicas import count_places, expand_observations  # noqa: F401 filters
from ..module_utils.vllm_edge.inventory.reports import locate_reports  # noqa: F401 filters
from ..module_utils.vllm_edge.planning.checkpoint import recording
from ..module_utils.vllm_edge.planning.checkpoint.headers import FactsError

Entry = Mapping[str, Any]
PROJECT = Path(__file__).resolve().parents[2]


def name_entries(names: Iterable[str], entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Return the entries with these names, each with its name as the key `name`."""
    return [{"name": name, **dict(entries[name].items())} for name in names]


def expand_inventory(
    given: Entry, extra: Entry, chosen: str | None, shown: str, completed: Mapping[str, Entry], revisions: Entry
) -> dict[str, Any]:
    """Return what `merging.merge` does, each engine with the defaults of its model, each replica as one of its own.

    Args:
        chosen: serving_profile.
        shown: plan_profile.
        completed: what the plan adds to engines.
        revisions: commits by model that replace those of the inventory.
    """
    merged = merging.merge(given, extra, functools.partial(variables.read_shipped, PROJECT), [chosen, shown])
    pins = {name: {"revision": revision} for name, revision in revisions.items()}
    models = {
        name: {**model, **pins.get(name, {})} for name, model in engine_inputs.select_mappings(merged.models).items()
    }
    stated = engine_inputs.select_mappings(merged.engines)
    left = {name: replicas.add_defaults(stated[name], models) for name in merged.incomplete if name not in completed}
    stated = {name: {**completed.get(name, {}), **engine} for name, engine in stated.items()}
    engines, named = replicas.expand(stated, merged.profiles, models)
    needed = merging.list_engines(merged, shown or chosen)
    about = {"roles": merging.list_roles(merged, chosen), "incomplete": left, "needed": needed}
    return {"models": models, "engines": engines, "profiles": named, **about}


def plan_profiles(every: Mapping[str, Entry], engines: Mapping[str, Entry], only: str = "") -> dict[str, Any]:
    """Return the profiles, or one of them only, each with its engines as `name_entries` returns them."""
    return {name: {"engines": name_entries(every[name]["engines"], engines)} for name in ([only] if only else every)}


def read_recorded_facts(models: Any, directory: str) -> dict[str, Any]:
    """Return the recorded facts in a directory by repository. Raises AnsibleFilterError: a file is no record."""
    try:
        return recording.read_directory(models, Path(directory).expanduser())
    except FactsError as error:
        raise AnsibleFilterError(str(error)) from error


def list_containers(engines: Iterable[Entry], uuids: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": f"vllm-{engine['name']}", "gpus": [uuids[slot] for slot in engine["gpus"]]} for engine in engines]


def list_ports(every: Mapping[str, Entry], engines: Mapping[str, Entry]) -> list[int]:
    names = {name for profile in every.values() for name in profile["engines"]}
    return sorted({engines[name]["port"] for name in names if engines[name].get("port")})


def list_served_names(every: Mapping[str, Entry], engines: Mapping[str, Entry]) -> list[str]:
    names = {name for profile in every.values() for name in profile["engines"]}
    return sorted({served for name in names for served in engines[name]["served_names"]})


def client_models(status: Iterable[Entry], engines: Mapping[str, Entry], url: str, max_tokens: int) -> dict[str, Any]:
    """Return what a client needs to know of each served name: endpoints, model, context and max tokens.

    `status` are engines of `vllm-edge status`. One that the inventory (`engines`) does not state has no context here.
    """
    found = {}
    for engine in status:
        context = engines.get(engine["engine"], {}).get("max_model_len")
        for name in engine["served_names"]:
            limits = {"context": context, "max_tokens": min(context, int(max_tokens))} if context else {}
            of_role = f"{url}/roles/{backend_name(name)}/v1"
            found[name] = {"endpoint": f"{url}/v1", "role_endpoint": of_role, "model": name, **limits}
    return dict(sorted(found.items()))


def describe_gpus(slots: Iterable[Entry]) -> list[dict[str, Any]]:
    names = {"nvml_total_mib": "total_mib", "name": "name", "nvml_reserved_mib": "reserved_mib"}
    names |= {"compute_capability": "compute_capability"}
    return [{key: slot[name] for key, name in names.items() if slot.get(name) not in (None, "")} for slot in slots]


def declare_gpus(count: int, memory_mib: int, name: str, capability: str, bandwidth: float) -> list[dict[str, Any]]:
    """Return the GPUs that an inventory states; none if their number or memory is not known."""
    given = {"nvml_total_mib": memory_mib, "name": name, "compute_capability": capability, "bandwidth_gb_s": bandwidth}
    known = models.find_total_mib(name, memory_mib)
    return [{key: value for key, value in given.items() if value}] * count if known else []


def add_settings(engines: Iterable[Entry], planned: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the engines with the settings that the plan adds. An engine that is not planned stays as it is."""
    settings = {plan["engine"]: plan["settings"] for plan in planned}
    return [{**dict(engine.items()), **dict(settings.get(engine["name"], {}).items())} for engine in engines]


def calibrate(
    engines: Iterable[Entry], names: Iterable[str], share: float, slots: Sequence[Entry]
) -> list[dict[str, Any]]:
    """Return the engines as they are measured: those in `names` may use all of their GPUs.

    `share` is the gpu_memory_utilization of engines that state none.
    """
    every = [dict(engine.items()) for engine in engines]
    users = [slot for engine in every for slot in engine["gpus"]]
    measured = set(names)

    def get_room(slot: int) -> int:
        return int(slots[slot]["total_mib"] - (slots[slot]["reserved_mib"] or 0)) // users.count(slot)

    return [
        {
            "gpu_memory_utilization": share,
            **{key: value for key, value in engine.items() if key != "kv_cache_memory_bytes"},
            "vram_budget_mib": min(map(get_room, engine["gpus"])),
        }
        if engine["name"] in measured
        else engine
        for engine in every
    ]


def sum_budgets(engines: Iterable[Entry], slots: Sequence[Entry]) -> dict[str, int]:
    """Return the sum of the budgets by slot in MiB. An engine without one, which had no plan, gets the whole GPU."""
    budgets: Counter[str] = Counter()
    for engine in engines:
        for slot in engine["gpus"]:
            budgets[str(slot)] += engine["vram_budget_mib"] if "vram_budget_mib" in engine else slots[slot]["total_mib"]
    return dict(budgets)


def assign_budgets(budgets: Mapping[str, int], uuids: Iterable[str]) -> dict[str, int]:
    """Return the budgets in MiB by UUID instead of by slot; 0 for a GPU without an engine."""
    return {uuid: budgets.get(str(slot), 0) for slot, uuid in enumerate(uuids)}


def describe_weights(
    weights: Mapping[str, Entry], models: Mapping[str, Entry], planned: Iterable[Entry], state: str
) -> dict[str, Any]:
    """Return what the role vllm_engine needs to know of each model, from the result of the role model_weights.

    The precision that a model does not state is that of its checkpoint, if its engine could be planned.
    """
    precisions = {plan["model"]: plan["precision"] for plan in planned}
    return {
        name: {
            **dict(facts.items()),
            "precision": models[name].get("precision") or precisions.get(name, "unknown"),
            "record": f"{state}/weights/{name}.json",
        }
        for name, facts in weights.items()
    }


def resolve_secrets(engines: Iterable[Entry], secrets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the secret values by environment variable, by engine; engines without `secret_env` are left out."""
    return {
        engine["name"]: {name: secrets[secret] for name, secret in engine["secret_env"].items()}
        for engine in engines
        if engine.get("secret_env")
    }


def list_mount_units(paths: Iterable[str]) -> list[str]:
    """Return the names of systemd's mount units for directories and all directories above them but the root.

    They are escaped as `systemd-escape --path --suffix=mount` does.
    """
    units = {}
    for path in paths:
        parts = [part for part in path.split("/") if part]
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end]).encode()
            escaped = re.sub(rb"^\.|[^A-Za-z0-9:_./]", lambda found: b"\\x%02x" % ord(found[0]), name)
            units[escaped.replace(b"/", b"-").decode() + ".mount"] = True
    return list(units)


def find_release(image: str, version: str = "") -> str:
    """Return the release of vLLM in the tag of an image, else of the version that was found in it, else nothing."""
    release = re.match(r"\d+\.\d+\.\d+", version)
    return profiles.find_release(image) or (release.group() if release else "")


def report_engines(
    engines: Iterable[Entry], status: Iterable[Entry], gpu_uuids: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of the report. `status` are the engines of `vllm-edge status --format json`.

    Args:
        engines: those of the profile; none where the former ones serve, of which only `status` tells.
        gpu_uuids: the GPUs in the order of their slots.
    """
    found = {engine["engine"]: engine for engine in status}
    slots = {uuid: slot for slot, uuid in enumerate(gpu_uuids)}
    former = [
        {**state, "name": name, "gpus": [slots.get(uuid, uuid) for uuid in state["gpus"]]}
        for name, state in found.items()
        if not engines
    ]
    return [
        {
            "engine": engine["name"],
            "unit": state["unit"],
            "model": engine["model"],
            "precision": state["precision"],
            "tensor_parallel_size": engine["tensor_parallel_size"],
            "slots": engine["gpus"],
            "port": engine.get("port"),
            "served_names": engine["served_names"],
            "state": state["active_state"],
            "load_seconds": state["load_seconds"],
            "since": state["active_since"],
            "peer_to_peer_off": state.get("peer_to_peer_off", []),
            "accept_risk": state.get("accept_risk", []),
            "start_warnings": state.get("start_warnings", []),
        }
        for engine, state in ((engine, found[engine["name"]]) for engine in engines or former)
    ]


def take_turns(hosts: Iterable[str], hostvars: Mapping[str, Entry]) -> list[list[str]]:
    """Return which hosts switch together, turn by turn: single ones in the first turn, and of each fleet as many in one
    turn as the least serving_switch_serial of its hosts says."""
    fleets: dict[str, list[str]] = {}
    for host in hosts:
        fleets.setdefault(hostvars[host]["serving_fleet"], []).append(host)
    turns: list[list[str]] = [fleets.pop("", [])]
    for members in fleets.values():
        size = min(int(hostvars[host]["serving_switch_serial"]) for host in members)
        parts = [members[at : at + size] for at in range(0, len(members), size)]
        turns += [[] for _ in parts[len(turns) :]]
        for turn, part in zip(turns, parts, strict=False):
            turn += part
    return turns


def explain_stop(
    host: str, hostvars: Mapping[str, Entry], hosts: Iterable[str], left: Sequence[str], partial: bool
) -> str:
    """Return why the host stays as it is in its turn, or "": another host of its fleet did not commit in this run.

    Args:
        hosts: those of the run.
        left: those of them that Ansible has not dropped.
        partial: serving_fleet_partial; a host that was dropped before its turn stops no other.
    """
    fleet = hostvars[host]["serving_fleet"]
    stays = (
        f"{host} was not switched and serves what it served before, since {{}}. Run again when that is mended: hosts "
    )
    stays += "that are switched stay as they are."
    for other in hosts:
        theirs = hostvars[other]
        if not fleet or other == host or theirs["serving_fleet"] != fleet:
            continue
        if theirs["serving_switch_error"]:
            return stays.format(f"the switch of {other}, a host of the same fleet {fleet}, failed")
        if other not in left and "serving_switch_stop" in theirs:
            return stays.format(f"{other}, a host of the same fleet {fleet}, was lost in its switch")
        if other not in left and not partial:
            why = f"{other}, a host of the same fleet {fleet}, failed before its switch or is not reached"
            return f"{stays.format(why)} To go on without {other}: -e serving_fleet_partial=true."
    return ""


def list_versions(driver: Entry, runtime: Entry, image: Entry) -> dict[str, str]:
    """Return the versions of the report by what has them, from the results of the roles that have run; else empty."""
    found = {"driver": driver["version"]} if driver else {}
    if runtime:
        found |= {"Docker": runtime["docker_version"], "container toolkit": runtime["toolkit_version"]}
    if image:
        became = f"{image['transformers']} ({image['requirement']} became {image['constraint']})"
        found |= {"vLLM": image["vllm"], "transformers": became, "image": image["name"], "image id": image["id"]}
    return found


def list_removal(parts: Sequence[Entry], host: str, check: bool) -> list[str]:
    """Return what roles have removed, kept and left as lines. A removed directory is listed without its content."""
    removed = [path for part in parts for path in part["removed"]]
    directories = tuple(path for path in removed if path.endswith("/"))
    listed = [path for path in removed if not any(path.startswith(each) for each in directories if each != path)]
    left = {path: why for part in parts for path, why in part["left"].items()}
    heading = ("would remove" if check else "removed") if removed else "nothing of vllm-edge is left to remove"
    kept = [line for part in parts for line in part["kept"]]
    kept.append("NVIDIA driver, Docker, container toolkit, their apt repositories, daemon.json: others use them")
    others = [f"{path}: {why}" for path, why in sorted(left.items())]
    return [
        f"{host}: {heading}",
        *(f"  {path}" for path in listed),
        "kept",
        *(line for entry in kept for line in text.wrapped(entry, "  ")),
        *(["not ours, left alone"] if others else []),
        *(line for entry in others for line in text.wrapped(entry, "  ")),
    ]


def render_report(report: Entry) -> list[str]:
    """Return what playbooks/tasks/report.yml has collected as lines for the terminal, of at most 100 columns."""
    from ..module_utils.vllm_edge.status.tables import render

    return render(json.loads(json.dumps(report, default=dict)))  # plain data: Ansible's texts have types of their own


def tabulate_hosts(hosts: Iterable[str], kind: str, hostvars: Mapping[str, Entry], group: Sequence[str]) -> list[str]:
    """Return lines with a table of the hosts of a play, as `page.hosts_table.render` does."""
    from ..module_utils.vllm_edge.page.hosts_table import render

    return render(kind, list(hosts), hostvars, group)


def unit_word(value: object, name: str) -> str:
    """Return a value as one word of a systemd unit, in which systemd expands nothing.

    Raises ValueError: systemd would split, unquote or expand it.
    """
    word = str(value)
    if not re.fullmatch(r"[A-Za-z0-9/@:._+%-]+", word):
        raise ValueError(
            f"{name} is {text.shown(word)}: systemd splits at spaces and line breaks, removes quotes and expands $; "
            "write a word of letters, digits and / @ : . _ + -"
        )
    return word.replace("%", "%%")


def list_prompts(cases: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the cases of a quality suite that are plain text, as prompts of `vllm-edge quality reference`."""
    of_role = {"system": "system", "user": "prompt"}
    return [
        {
            "case": case["name"],
            "messages": [{"role": role, "content": case[key]} for role, key in of_role.items() if key in case],
        }
        for case in cases
        if "tools" not in case and "context" not in case
    ]


def find_reports_fault(
    directory: str, sources: Sequence[str], groups: Mapping[str, Any], hostvars: Mapping[str, Any]
) -> str:
    """Return why this is no directory for reports, by the inventories of the run and Ansible's configuration, or ""."""
    hosts = reports.list_hosts(directory, groups, hostvars)
    return reports.find_fault(directory, sources, INVENTORY_IGNORE_PATTERNS, hosts)


def describe_monitored(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what Prometheus needs to know of each host that has metrics."""
    needed = ("serving_metrics", "serving_gateway")
    wanted = [host for host in hosts if all(_boolean(hostvars[host].get(name, True)) for name in needed)]
    return [_describe_host(host, hostvars[host]) for host in wanted]


def describe_fleet(host: str, hostvars: Mapping[str, Any], hosts: Iterable[str]) -> dict[str, Any]:
    """Return what a host of a fleet has to know of itself and its peers; `hosts` are those of gpu_hosts."""
    return _describe_fleet_host(host, hosts, hostvars, _host_server)


NEWEST_RECORDS = 20


def find_new_records(files: Sequence[Entry], directory: str, host: str) -> list[str]:
    """Return the paths of a host's newest records that its directories below this one do not have in the same size.

    Names begin with the time. A record of another size was not complete when it was fetched.
    """
    newest: list[Entry] = []
    for kind in ("bench", "quality"):
        records = [file for file in files if Path(file["path"]).parent.name == kind]
        newest += sorted(records, key=lambda file: str(file["path"]), reverse=True)[:NEWEST_RECORDS]

    def is_here(file: Entry) -> bool:
        path = Path(file["path"])
        here = Path(directory, path.parent.name, host, path.name)
        return here.exists() and here.stat().st_size == file["size"]

    return [file["path"] for file in newest if not is_here(file)]


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return every public function of this file."""
        return {name: it for name, it in globals().items() if inspect.isfunction(it) and not name.startswith("_")}
