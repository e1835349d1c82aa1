# SPDX-License-Identifier: Apache-2.0
"""Judgement of a status document: each problem is one paragraph with its remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engine.startup import WORDS, Phase
from ..names import TARGET
from ..planning import drift
from ..switch.render import describe_generation


def add_problems(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of `facts.serving.collect` with its problems: what could not be asked, then what is wrong."""
    return {**status, "problems": [*status["problems"], *judge(status)]}


def judge(status: Mapping[str, Any]) -> list[str]:
    """Return every problem of a status document. What a running switch is changing at the moment is no problem."""
    switching = status.get("switch") is not None
    return [
        *_judge_switch(status),
        *_judge_profile(status),
        *_judge_files(status),
        *[problem for engine in status["engines"] for problem in _judge_engine(engine, switching)],
        *(() if switching or not status["engines"] else _judge_target(status["target"])),
        *[str(board["problem"]) for board in status["gpus"] if board.get("problem")],
        *judge_gateway(status),
        *_judge_drift(status),
    ]


def _is_between_generations(status: Mapping[str, Any]) -> bool:
    """Return whether a switch runs or was killed, so that the host is half of one and half of another generation."""
    return status.get("switch") is not None or status.get("unfinished_switch") is not None


def _judge_switch(status: Mapping[str, Any]) -> Iterator[str]:
    killed = status.get("unfinished_switch")
    if killed is None:
        return
    remedy = "'vllm-edge recover' goes back to the committed generation."
    if not killed["started_at"]:  # its journal cannot be read
        yield f"{killed['message'].rstrip('.')}. {remedy}"
        return
    yield (
        f"A switch to {describe_generation(killed['generation'], killed['profile'])}, which {killed['asked_by']} asked "
        f"for at {killed['started_at']}, was ended in phase {killed['phase'] or 'none'} and left unfinished: {remedy}"
    )


def judge_gateway(status: Mapping[str, Any]) -> Iterator[str]:
    gateway = status.get("gateway")
    if gateway is None:
        return
    if problem := gateway["problem"]:
        yield f"{problem[0].upper()}{problem[1:]}."
    if gateway["active_state"] not in (None, "active", "reloading"):
        yield (
            f"{gateway['unit']} is {gateway['active_state']}: no client is answered. 'journalctl -u {gateway['unit']}' "
            f"says why; 'systemctl start {gateway['unit']}' starts it."
        )
    if _is_between_generations(status):
        return
    away = [name for name, role in gateway["roles"].items() if role["state"] in ("away", "stand-in")]
    if away:
        yield (
            f"The gateway keeps requests for {', '.join(away)} waiting, and no switch runs: 'vllm-edge gateway sync' "
            "lets them go on."
        )
    serving = {engine["engine"] for engine in status.get("engines", ()) if engine["active_state"] == "active"}
    down = [name for name, role in gateway["roles"].items() if role["state"] == "down" and serving & {*role["engines"]}]
    if down:
        yield (
            f"The gateway does not reach the engine of {', '.join(down)}, which runs: requests for it wait, and are "
            "refused. 'vllm-edge doctor' says what is wrong with sockets and links."
        )


def _judge_drift(status: Mapping[str, Any]) -> list[str]:
    """Judge the drift while every engine serves, because an engine that loads holds less memory than it will."""
    settled = all(
        (engine["active_state"], describe_state(engine)) == ("active", "serving") for engine in status["engines"]
    )
    if status.get("switch") is not None or not settled or status.get("on_drift") == "ignore":
        return []
    return drift.sentences(status.get("drift") or [])


CHOSEN = {"inventory": "by the inventory", "-e": "by -e", "host": "on the host"}


def chosen_words(profile: Mapping[str, Any]) -> str:
    when = f" on {profile['chosen_at']}" if profile.get("chosen_at") else ""
    return f"chosen {CHOSEN.get(profile.get('origin', 'inventory'), profile.get('origin'))}{when}"


def is_unrecorded(status: Mapping[str, Any]) -> bool:
    """Return whether engines run, and what the host is committed to is lost: nothing can be compared with it."""
    profile = status["active_profile"]
    up = any(engine["active_state"] in ("active", "activating") for engine in status["engines"])
    # Without root the generation is not read, which leaves `live_files` at None, too.
    lost = profile is None or (profile.get("digest") and status.get("live_files") is None and os.geteuid() == 0)
    return up and bool(lost) and not _is_between_generations(status)


def _judge_profile(status: Mapping[str, Any]) -> Iterator[str]:
    profile, expected, running = status["active_profile"], status["expected_profile"], status.get("switch")
    if profile is None:
        if is_unrecorded(status):
            yield (
                "Engines run, and no profile is recorded on this host: their names stay as they are, and a switch that "
                "fails has nothing to go back to. Run site.yml, which records the profile and restarts no engine."
            )
        elif expected is not None and running is None:
            yield f"The inventory says profile {expected}, and no profile is active on this host: run site.yml."
        return
    runs = profile.get("profile")
    if expected not in (None, runs) and (running is None or running["profile"] != expected):
        option = "" if profile.get("origin", "inventory") == "inventory" else f" -e serving_profile={expected}"
        yield (
            f"The inventory says profile {expected}, this host runs {runs} ({chosen_words(profile)}): run site.yml"
            f"{option} to bring {expected}, or put 'serving_profile: {runs}' into the inventory to keep what runs."
        )
    # If the generation can be read, its files are compared one by one instead of by their hashes.
    if status.get("live_files") is None and running is None:
        yield from _compare_with_record(profile, status["engines"])


def _compare_with_record(profile: Mapping[str, Any], engines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    recorded, number = profile.get("engines"), profile.get("generation")
    if not isinstance(recorded, Mapping):
        return
    hashes = {engine["engine"]: engine["input_hash"] for engine in engines}
    if hashes.keys() != recorded.keys():
        yield (
            f"Generation {number} has the engines {', '.join(sorted(recorded)) or 'none'}, and configured on this host "
            f"are {', '.join(sorted(hashes)) or 'none'}: a run was interrupted, or somebody removed files. Run "
            "site.yml."
        )
    for name, found in hashes.items():
        wanted = (recorded.get(name) or {}).get("input_hash", found)
        if wanted != found:
            yield (
                f"The files of engine {name} are not those of generation {number} (input hash {found[:12]}, recorded "
                f"{wanted[:12]}): a run was interrupted. Run site.yml."
            )


def _judge_files(status: Mapping[str, Any]) -> Iterator[str]:
    generation = (status["active_profile"] or {}).get("generation")
    for row in () if _is_between_generations(status) else status.get("live_files") or ():
        yield (
            f"{row['path']} is not what generation {generation} says: {row['how']}. Run site.yml, or 'vllm-edge switch "
            f"{generation}', to put it back; where the change was meant, put it into the inventory."
        )


def _judge_engine(engine: Mapping[str, Any], switching: bool) -> Iterator[str]:
    """Yield what is wrong with one engine. While a switch runs it may stop, load and differ from its files."""
    unit, running = engine["unit"], engine["running_input_hash"]
    if not switching or engine["active_state"] not in ("activating", "deactivating", "inactive"):
        yield from _judge_state(engine)
    if engine["active_state"] is not None and engine["wanted_by_target"] is False and not switching:
        yield f"{unit} is not wanted by {TARGET}, so it does not start at boot: run site.yml."
    if engine["need_daemon_reload"] and not switching:
        yield f"{unit} was changed on disk and systemd knows the former one: run site.yml."
    if engine["container_ours"] is False:
        yield (
            f"A container named {engine['container']} exists that vllm-edge did not create; it is left alone, and "
            f"{unit} cannot start until somebody renames or removes it."
        )
    if running not in (None, engine["input_hash"]) and not switching:
        yield (
            f"The running container of {unit} was made from other inputs than the files on disk: run site.yml, or "
            f"'systemctl restart {unit}'."
        )


def _judge_state(engine: Mapping[str, Any]) -> Iterator[str]:
    unit, active, state = engine["unit"], engine["active_state"], describe_state(engine)
    explain = f"'vllm-edge explain {engine['engine']}' and 'journalctl -u {unit}' say why"
    if active is None or (active, state) == ("active", "serving"):
        return
    if active == "activating" and engine["sub_state"] != "auto-restart":
        yield f"{unit} does not serve yet: {state}. Wait for it; 'systemctl status {unit}'."
    elif active == "active":
        yield f"{unit} is {state}: {explain}; its watchdog restarts it if it stays so."
    elif engine["load_state"] == "not-found":
        yield f"{unit} is gone from /etc/systemd/system: run site.yml."
    else:
        yield f"{unit} is {state}: {explain}; 'systemctl start {unit}' starts it."


def _judge_target(target: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem if the engines do not all start at boot."""
    unit, state = target["unit"], target["active_state"]
    if state is None or (target["enabled"] and state == "active"):
        return
    if target["enabled"]:
        yield (
            f"{unit} is {state}, as after 'vllm-edge stop': 'systemctl start {unit}' starts its engines, and so does a "
            "boot."
        )
    else:
        yield (
            f"{unit} is {state} and not enabled: engines do not all start at boot. 'systemctl enable --now {unit}', or "
            "run site.yml."
        )


def name_phase(phase: str) -> str:
    return WORDS[Phase(phase)] if phase in list(Phase) else phase


def describe_state(engine: Mapping[str, Any]) -> str:
    """Return the state of an engine in one or two words, such as `serving` or `not answering`."""
    active, phase = engine["active_state"], engine["phase"]
    if active == "active":
        return "not answering" if phase == Phase.UNHEALTHY else "serving"
    if active == "activating":
        if engine["sub_state"] == "auto-restart":
            return "restarting"
        return WORDS[Phase(phase)] if phase in list(Phase) else "starting"
    return str(active or phase or "unknown")
