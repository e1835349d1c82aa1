# SPDX-License-Identifier: Apache-2.0
"""A host of files for the switch: engines, units and GPUs in one JSON file, so that a killed program leaves its state.

Generations and live files are the real ones. An engine is what its live engine.json says at its start; what is wrong
with it stands in `quirks`, by name of the engine and input hash or by name alone.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.vllm_edge.generation import committed, live, store
from ansible.module_utils.vllm_edge.generation.build import Rendered
from ansible.module_utils.vllm_edge.generation.model import Generation, GenerationError, Limits, SeenEngine
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.history import list_verified
from ansible.module_utils.vllm_edge.switch.model import (
    Done,
    Downtime,
    Gap,
    Moves,
    Phase,
    PhaseFailed,
    PhaseRecord,
    decide_moves,
)
from generations import UUIDS as GPUS
from generations import activate, engine, put, rendered

TOTAL_MIB = 23034
FOREIGN = {"name": "grafana", "id": "f0e1d2", "started_at": "2026-11-01T00:00:00Z"}
"""Somebody else's container: it must come through everything as it is."""
LIMITS = Limits(free_timeout_s=10.0, healthy_timeout_s=60.0)
PAIR = {"served_names": ["architect", "worker"], "tensor_parallel_size": 2, "gpus": GPUS[:2]}

State = dict[str, Any]

BIG = engine("31b-nvfp4", 8050, vram_budget_mib=22200, **PAIR)
SMALL = engine("31b-w4a16", 8050, vram_budget_mib=20000, **PAIR)
KEPT = engine("e4b", 8060, served_names=["auditor"], gpus=GPUS[2:3], vram_budget_mib=20800)
E2B, E2B_CHANGED = (
    engine("e2b", served_names=["sentry"], gpus=GPUS[3:], note=f"--max-model-len={tokens}\n") for tokens in (8192, 4096)
)

OLD = rendered(BIG, KEPT, E2B, profile="nvfp4-tp2", limits=LIMITS)
NEW = rendered(SMALL, KEPT, E2B_CHANGED, profile="w4a16-tp2", limits=LIMITS)
"""Against OLD: the 31B is another engine, E2B the same one with other arguments, E4B keeps running."""


class FakeWatch:
    """Every role is down from the first stop on; what matters here is its times and that it ends."""

    def __init__(self, wanted: Generation, clock: Callable[[], float]) -> None:
        self.wanted = wanted
        self.clock, self.at = clock, clock()

    def end(self, phases: Iterable[PhaseRecord]) -> dict[str, Downtime]:
        until = self.clock()
        return {role: Downtime(until - self.at, (Gap(self.at, until),), {}, 7) for role in self.wanted.roles}


def action(method: Callable[..., Done]) -> Callable[..., Done]:
    """An action of the machine: it changes `state`, has the name of its method, and is towards its generation."""

    @functools.wraps(method)
    def act(machine: FakeMachine, *arguments: Any, **named: Any) -> Done:
        name = f"hook {arguments[0]}" if method.__name__ == "hook" else method.__name__
        generations = [value.number for value in arguments if isinstance(value, Generation)]
        number = generations[0] if generations else machine.towards
        machine.before(name, number)
        state = machine.load()
        state["log"].append(f"{name}@{number}")
        state["now"] += 1
        try:
            done = method(machine, state, *arguments, **named)
        except GenerationError as error:
            raise PhaseFailed(str(error)) from error
        finally:
            machine.save(state)
        machine.after(name, number)
        return done

    return act


@dataclass
class FakeMachine:
    """See `SwitchedHost`. `before` and `after` are called with the action's name and the generation it is towards."""

    paths: HostPaths
    file: Path
    before: Callable[[str, int | None], None] = lambda name, number: None
    after: Callable[[str, int | None], None] = lambda name, number: None

    def __post_init__(self) -> None:
        self.towards: int | None = None
        self.published: list[Phase | None] = []
        self.alone = False
        """Whether no other host of the fleet serves what would leave."""

    # -- the host

    def load(self) -> State:
        state: State = json.loads(self.file.read_text())
        return state

    def save(self, state: State) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(state, indent=1))
        os.rename(fresh, self.file)

    def change(self, **values: Any) -> None:
        self.save({**self.load(), **values})

    def quirk(self, state: State, name: str) -> str:
        unit = state["units"].get(name, {})
        quirks: Mapping[str, str] = state["quirks"]
        return quirks.get(f"{name}@{unit.get('hash')}") or quirks.get(name) or ""

    def used(self, state: State, uuid: str) -> dict[str, int]:
        """MiB by holder."""
        return {name: mib for name, mib in state["memory"].get(uuid, {}).items() if mib}

    # -- time and the host's life

    def clock(self) -> float:
        return float(self.load()["now"])

    def stamp(self) -> str:
        state = self.load()
        stamps: list[str] = state["stamps"]
        if len(stamps) > 1:
            self.change(stamps=stamps[1:])
        return stamps[0]

    def boot_id(self) -> str:
        return str(self.load()["boot_id"])

    def going_down(self) -> bool:
        return bool(self.load()["going_down"])

    # -- what there is

    def moves(self, wanted: Generation) -> Moves:
        self.towards = wanted.number
        self.before("moves", wanted.number)
        state = self.load()
        state["now"] += 1
        state["log"].append(f"moves@{wanted.number}")
        away = state["docker_away"]
        if away:
            state["docker_away"] = away - 1
        self.save(state)
        if away:
            raise PhaseFailed("The Docker Engine did not answer.")
        seen = [SeenEngine(name, unit["active"], unit["sub"], unit["hash"]) for name, unit in state["units"].items()]
        target = [f"not {what}" for what in ("enabled", "active") if not state["target"][what]]
        return decide_moves(wanted.hashes, seen, live.live_changes(wanted, self.paths), target)

    # -- phases

    @action
    def preflight(self, state: State, wanted: Generation, moves: Moves) -> Done:
        return Done("nothing is in the way")

    def check_peers(self, wanted: Generation, serving: Generation | None, moves: Moves, *, gap: bool = False) -> Done:
        if self.alone and serving is not None and not gap:
            raise PhaseFailed("No other host of the fleet serves architect.")
        return Done()

    @action
    def prepare(self, state: State, wanted: Generation, moves: Moves) -> Done:
        return Done("weights are in the page cache")

    @action
    def hook(self, state: State, name: str, wanted: Generation, former: Generation | None) -> Done:
        if name in state["failing_hooks"]:
            raise PhaseFailed(f"Hook {name}.d/10-gateway ended with status 1: no.")
        return Done(f"{name} told")

    @action
    def away(
        self, state: State, wanted: Generation, serving: Generation | None, moves: Moves, *, gap: bool = False
    ) -> Done:
        self.check_peers(wanted, serving, moves, gap=gap)
        roles = serving.roles if serving else {}
        state["away"] = [role for role, names in roles.items() if set(names).isdisjoint(moves.keep)]
        return Done("requests wait")

    @action
    def back(self, state: State, generation: Generation) -> Done:
        state["away"] = []
        return Done("requests go on")

    def publish(self, phase: Phase | None) -> None:
        self.published.append(phase)

    @action
    def drain(self, state: State, moves: Moves, limits: Limits) -> Done:
        state["log"][-1] += f" {' '.join(sorted(moves.stop))}".rstrip()
        return Done("nothing runs")

    @action
    def stop(self, state: State, moves: Moves) -> Done:
        stuck = []
        for name in moves.stop:
            quirk = self.quirk(state, name)
            if quirk == "cannot be stopped":
                stuck.append(name)
                continue
            unit = state["units"].setdefault(name, {"active": "inactive", "sub": "dead", "hash": None})
            unit.update(active="inactive", sub="dead", hash=None)
            for held in state["memory"].values():
                mib = held.pop(name, 0)
                if mib and quirk == "leaves an orphan":
                    held[f"orphan of {name}"] = mib
        if stuck:
            raise PhaseFailed(f"{', '.join(stuck)} did not stop.", engines=stuck)
        return Done(f"{', '.join(moves.stop) or 'nothing'} stopped")

    @action
    def free(self, state: State, wanted: Generation, moves: Moves) -> Done:
        gpus = {uuid for name in moves.start for uuid in wanted.engines[name].config.gpus}
        warnings = []
        for uuid in gpus:
            held = state["memory"].setdefault(uuid, {})
            for holder in list(held):
                if holder.startswith("orphan"):
                    state["now"] += wanted.limits.free_timeout_s
                    del held[holder]
                    warnings.append(f"{holder} on {uuid[-1]} was killed.")
                elif holder not in wanted.engines or holder in moves.start:
                    raise PhaseFailed(f"{holder} holds {held[holder]} MiB of GPU {uuid[-1]}.")
        return Done("free", warnings=tuple(warnings))

    @action
    def install(self, state: State, wanted: Generation, moves: Moves) -> Done:
        written = live.install(wanted, self.paths, [*moves.start, *moves.keep, *moves.wait], target=False)
        return Done(f"{len(written)} files")

    @action
    def start(self, state: State, moves: Moves) -> Done:
        for name in moves.start:
            try:
                config = json.loads((self.paths.engine_dir(name) / "engine.json").read_text())
            except OSError as error:
                raise PhaseFailed(f"{name} could not be started: {error}", engines=[name]) from error
            unit = state["units"].get(name, {})
            if unit.get("active") == "active":
                continue
            state["pids"] += 1
            state["units"][name] = {
                "active": "activating",
                "sub": "start",
                "hash": config["input_hash"],
                "pid": state["pids"],
            }
        return Done(f"{', '.join(moves.start) or 'nothing'} told to start")

    def _load_engine(self, state: State, name: str) -> str:
        """Ends the loading of one engine; what went wrong, or nothing."""
        unit = state["units"].get(name)
        if unit is None or unit["active"] not in ("activating", "active"):
            return f"{name} is not there"
        if unit["active"] == "active":
            return ""
        config = json.loads((self.paths.engine_dir(name) / "engine.json").read_text())
        quirk = self.quirk(state, name)
        wrong = ""
        if quirk == "crashes while loading":
            wrong = f"{name} ended while it was loading"
        for uuid in config["gpus"]:
            if uuid in state["lost_gpus"]:
                wrong = f"{name}: GPU {uuid[-1]} is lost"
            elif sum(self.used(state, uuid).values()) + config["vram_budget_mib"] - 100 > TOTAL_MIB:
                wrong = f"{name} does not fit on GPU {uuid[-1]}"
        if wrong:
            unit.update(active="failed", sub="failed", hash=None)
            return wrong
        for uuid in config["gpus"]:
            state["memory"].setdefault(uuid, {})[name] = config["vram_budget_mib"] - 100
        unit.update(active="active", sub="running")
        return ""

    @action
    def healthy(
        self,
        state: State,
        wanted: Generation,
        moves: Moves,
        *,
        all_of_them: bool,
        tell: Callable[[str], None] | None = None,
    ) -> Done:
        """The engines load one after the other; clients may reach a sound one before the next has loaded."""
        state["now"] += 20
        wrong = {}
        for name in [*moves.start, *moves.wait]:
            text = self._load_engine(state, name)
            if text:
                wrong[name] = text
                if not all_of_them:
                    break
            elif tell is not None and not self.quirk(state, name):
                self.save(state)
                try:
                    tell(name)
                finally:
                    state.update(self.load())
        if wrong:
            raise PhaseFailed(". ".join(wrong.values()), engines=wrong)
        return Done("healthy")

    def has_gateway(self) -> bool:
        return True

    def return_early(
        self, wanted: Generation, serving: Generation, moves: Moves, engines: Collection[str], phase: Phase | None
    ) -> Done:
        assert phase is not None
        self.before("return_early", wanted.number)
        state = self.load()
        there = {role for name in engines for role in wanted.engines[name].config.served_names}
        state["away"] = [role for role in state["away"] if role not in there]
        state["log"].append(f"return {' '.join(engines)}@{wanted.number}")
        self.save(state)
        self.after("return_early", wanted.number)
        return Done("requests go on")

    @action
    def warm_up(self, state: State, wanted: Generation, moves: Moves) -> Done:
        for name in [*moves.start, *moves.wait]:
            if name not in wanted.engines:
                raise AssertionError(f"{name} is warmed up, which is not of {sorted(wanted.engines)}")
            if self.quirk(state, name) == "grows":
                for uuid in wanted.engines[name].config.gpus:
                    state["memory"][uuid][name] += 600
        return Done("warm")

    @action
    def canary(self, state: State, wanted: Generation) -> Done:
        rows = [
            {"served_name": role, "engine": name, "passed": not self.silent(state, wanted, name)}
            for role, (name, *_) in wanted.roles.items()
        ]
        failed = [row for row in rows if not row["passed"]]
        if failed:
            roles = ", ".join(str(row["served_name"]) for row in failed)
            raise PhaseFailed(f"The canary of {roles} failed.", data={"canary": rows})
        return Done(f"{len(rows)} served names answer", data={"canary": rows})

    def ask_suite(self, wanted: Generation, moves: Moves) -> Done:
        state = self.load()
        if any(self.quirk(state, name) == "answers badly" for name in moves.start):
            raise PhaseFailed("The quality suite was not passed.", data={"quality": [{"case": "a"}]})
        return Done()

    def silent(self, state: State, wanted: Generation, name: str) -> bool:
        unit = state["units"].get(name, {"active": "absent"})
        serves = unit["active"] == "active" and unit["hash"] == wanted.hashes[name]
        return not serves or self.quirk(state, name) == "canary wrong"

    @action
    def measure(self, state: State, wanted: Generation, *, accept: bool = False) -> Done:
        rows, wrong, over = [], [], []
        for index, uuid in enumerate(GPUS):
            if uuid in state["lost_gpus"]:
                wrong.append(f"GPU {index} is lost.")
            used = sum(mib for who, mib in self.used(state, uuid).items() if not who.startswith("foreign"))
            rows.append({"index": index, "used_mib": used})
            if used > wanted.budgets_mib[uuid]:
                over.append(f"GPU {index}: {used} MiB, budget {wanted.budgets_mib[uuid]} MiB.")
        if wrong or (over and not accept):
            raise PhaseFailed(" ".join([*wrong, *over]), data={"gpus": rows})
        data: dict[str, Any] = {"gpus": rows, "over_budget": over}
        if wanted.purpose == "calibration":
            data["measured"] = {"engines": [{"engine": name} for name in wanted.engines], "gpus": rows}
        return Done("over budget" if over else "within budget", data=data)

    @action
    def clean_up(self, state: State, wanted: Generation) -> Done:
        live.install(wanted, self.paths, (), target=True)
        for name in set(live.list_live_engines(self.paths)) - wanted.engines.keys():
            if state["units"].get(name, {}).get("active") not in ("inactive", "failed", None):
                raise PhaseFailed(f"{name} runs and is no engine of generation {wanted.number}.")
            live.remove_engine(name, self.paths)
        store.prune(self.paths, wanted.limits.keep_generations, list_verified(self.paths))
        state["target"] = {"enabled": True, "active": True}
        return Done("clean")

    def what_runs(self, wanted: Generation) -> str:
        state = self.load()
        return ", ".join(f"{name} {state['units'].get(name, {}).get('active', 'absent')}" for name in wanted.engines)

    def watch(self, wanted: Generation, former: Generation | None, clock: Callable[[], float]) -> FakeWatch:
        return FakeWatch(wanted, clock)


def new_host(root: Path) -> FakeMachine:
    """A host on which nothing was ever committed."""
    paths = HostPaths(etc=root / "etc", state=root / "state", units=root / "units")
    for directory in (paths.etc, paths.state, paths.units):
        directory.mkdir(parents=True)
    machine = FakeMachine(paths, root / "host.json")
    machine.save(
        {
            "now": 1000.0,
            "stamps": ["2026-11-21T16:40:00Z"],
            "boot_id": "boot-1",
            "going_down": False,
            "units": {},
            "memory": {},
            "target": {"enabled": False, "active": False},
            "quirks": {},
            "lost_gpus": [],
            "failing_hooks": [],
            "docker_away": 0,
            "pids": 0,
            "foreign": FOREIGN,
            "away": [],
            "log": [],
        }
    )
    return machine


def serve(machine: FakeMachine, value: Rendered) -> Generation:
    """Puts a generation there, committed and serving, as a switch would have left it."""
    generation = store.load(machine.paths, activate(machine.paths, value, chosen_at="2026-11-20T00:00:00Z"))
    moves = Moves(start=tuple(generation.engines))
    machine.start(moves)
    machine.healthy(generation, moves, all_of_them=False)
    machine.change(target={"enabled": True, "active": True}, log=[])
    return generation


def host(root: Path) -> tuple[FakeMachine, Generation, Generation]:
    """OLD serves as generation 1; NEW lies there as generation 2."""
    machine = new_host(root)
    old = serve(machine, OLD)
    return machine, old, store.load(machine.paths, put(machine.paths, NEW))


def unlike(machine: FakeMachine, generation: Generation | None) -> list[str]:
    """What keeps this host from being just what a generation says: nothing where it serves in full, all roles."""
    state = machine.load()
    found = []
    engines = generation.engines if generation else {}
    hashes = generation.hashes if generation else {}
    for name in {*state["units"], *engines}:
        unit = state["units"].get(name, {"active": "absent", "hash": None})
        if name in engines and (unit["active"], unit["hash"]) != ("active", hashes[name]):
            found.append(f"{name} is {unit['active']} with {unit['hash']}, wanted {hashes[name]}")
        if name not in engines and unit["active"] not in ("inactive", "failed"):
            found.append(f"{name} is {unit['active']}, and of no generation that counts")
    now = committed.committed(machine.paths)
    if (now.generation if now else None) != (generation.number if generation else None):
        found.append(f"committed is {now}")
    if generation is not None:
        found += [f"{item.path} differs" for item in live.live_changes(generation, machine.paths)]
        found += [f"target is not {what}" for what in ("enabled", "active") if not state["target"][what]]
        for uuid in GPUS:
            holders = [name for name, value in engines.items() if uuid in value.config.gpus]
            if sorted(machine.used(state, uuid)) != sorted(holders):
                found.append(f"{uuid} is held by {machine.used(state, uuid)}")
    found += [f"{role} is away for clients of the gateway" for role in state["away"]]
    if state["foreign"] != FOREIGN:
        found.append("somebody else's container was touched")
    return found
