# SPDX-License-Identifier: Apache-2.0
"""What a switch does: through Ansible with clients that ask meanwhile, and by the host's own program.

In the order that needs the fewest loads: each test begins where the one before has left the host.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import role_client
import yaml
from conftest import (
    BUSY,
    CONTAINER,
    ENGINE,
    GPUS,
    INVENTORY_PROFILE,
    LOADED_S,
    OK,
    PROFILE,
    ROLES,
    ROOT,
    SETTINGS,
    STATE,
    Begun,
    Clients,
    Edge,
    Switched,
    cut_ssh,
    default,
    kill_group,
    play,
    start_play,
)

GROUP_VARS = ROOT / "group_vars" / "all"
SECOND = "e2b-beside"
FORWARD = ["preflight", "prepare", "away", "drain", "stop", "free", "install", "start", "healthy", "warm_up", "canary"]
FORWARD += ["measure", "commit", "back", "clean_up"]


def group_vars(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((GROUP_VARS / f"{name}.yml").read_text()))


def edited(**engines: Mapping[str, Any]) -> str:
    """`-e` with the engines of the project, some of them edited or new, as an operator's edit of the file would be."""
    there = group_vars("engines")["serving_engines"]
    for name, values in engines.items():
        there[name] = {**there.get(name, {}), **values}
    return f"--extra-vars={json.dumps({'serving_engines': there})}"


EDIT = edited(**{ENGINE: {"max_model_len": 2048}})
# One more engine of the same model, which states neither share nor budget: the plan does. It fits on GPU 1 of the
# default lab; what engines take beside their weights differs from card to card, and on GPU 2 it is over its budget.
BESIDE = {**group_vars("engines")["serving_engines"][ENGINE], "gpus": [1], "port": 8060, "served_names": ["scribe"]}
del BESIDE["gpu_memory_utilization"], BESIDE["vram_budget_mib"]
TWO = {
    "serving_profiles": {PROFILE: {**group_vars("profiles")["serving_profiles"][PROFILE], "engines": [ENGINE, SECOND]}}
}
# The engine of the profile twice, on two GPUs where it keeps the budget of the plan.
TWICE = "e2b-twice"
REPLICAS = [f"{TWICE}-0", f"{TWICE}-1"]
PAIR = {**BESIDE, "replicas": 2, "gpus": [1, 3], "served_names": ROLES}
del PAIR["port"]
OTHERS = group_vars("profiles")["serving_profiles"]
WITH_REPLICAS = [
    edited(**{TWICE: PAIR}),
    f"--extra-vars={json.dumps({'serving_profiles': {**OTHERS, TWICE: {**OTHERS[PROFILE], 'engines': [TWICE]}}})}",
    f"--extra-vars=serving_profile={TWICE}",
]
WITH_SECOND = [edited(**{SECOND: BESIDE}), f"--extra-vars={json.dumps(TWO)}"]


def agree(recorded: role_client.Recorded, journal: Mapping[str, Any], roles: Sequence[str]) -> None:
    """One gap for each of these roles, from and to the same moments as the journal says; none for any other."""
    for role, found in default.gaps_of(recorded).items():
        told = journal["downtime"][role]
        if role not in roles:
            assert found == [] and told["seconds"] == 0, (role, found, told)
            continue
        (gap,) = found
        (asked,) = told["gaps"]
        began = journal["began_monotonic_s"]
        assert abs(began + asked["from_s"] - gap.from_s) <= default.AGREE_S, (role, gap, told)
        assert gap.answered_from_s is not None
        assert abs(began + asked["to_s"] - gap.answered_from_s) <= 2 * default.AGREE_S, (
            role,
            gap,
            told,
        )
        assert abs(sum(told["phases"].values()) - told["seconds"]) <= 0.5, told
        assert max(told["phases"], key=lambda name: told["phases"][name]) == "healthy", told


# ---- through Ansible --------------------------------------------------------------------------------------------


def test_the_first_run_is_a_switch(edge: Edge) -> None:
    """What molecule's converge did."""
    first = edge.history()[-1]
    assert (first["result"], first["from_generation"], first["generation"]) == ("committed", None, 1)
    assert first["origin"] == "-e" and "Ansible" in first["asked_by"]
    edge.serves(1)


@pytest.fixture(scope="module")
def edit(edge: Edge, controller: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The stage of the engines with an edit of one of them, while clients ask."""
    clients = Clients(edge)
    clients.start()
    run = play(controller, "playbooks/engines.yml", SETTINGS, EDIT)
    recorded = clients.stop(tmp_path_factory.mktemp("edit"))
    yield {"play": run, "recorded": recorded, "journal": edge.last()}


def test_an_edit_of_one_engine(edge: Edge, edit: dict[str, Any]) -> None:
    run, journal = edit["play"], edit["journal"]
    assert run.rc == 0, run.output[-8000:]
    edge.serves(2)
    assert (journal["result"], journal["from_generation"], journal["generation"]) == ("committed", 1, 2)
    assert (journal["keep"], journal["stop"], journal["start"]) == ([], [ENGINE], [ENGINE])
    assert [row["phase"] for row in journal["phases"]] == FORWARD
    assert {row["outcome"] for row in journal["phases"]} == {"done"}
    assert {row["served_name"] for row in journal["canary"]} == set(ROLES)
    (measured,) = [row for row in journal["gpus"] if row["uuid"] == GPUS[3]]
    assert measured["within_budget"] and measured["engine_mib"] > 20_000


def test_clients_and_journal_agree(edit: dict[str, Any]) -> None:
    agree(edit["recorded"], edit["journal"], ROLES)


def test_a_plain_run_does_not_end_what_was_chosen(edge: Edge, controller: Any) -> None:
    container, last = default.life(edge, CONTAINER), edge.last_id()
    run = play(controller, "site.yml")
    said = " ".join(run.output.split())
    assert run.rc != 0 and run.recap["changed"] == 0
    assert f"runs profile {PROFILE} (generation 2), which was chosen with -e" in said, run.output[-4000:]
    assert f"put 'serving_profile: {PROFILE}' into the inventory" in said
    assert f"run with '-e serving_profile={INVENTORY_PROFILE}'" in said
    assert (default.life(edge, CONTAINER), edge.last_id(), edge.number()) == (container, last, 2)


def test_status_tells_the_switch_and_who_chose(edge: Edge, controller: Any) -> None:
    run = play(controller, "playbooks/status.yml")
    assert run.rc == 0, run.output[-4000:]
    said = " ".join(run.output.split())
    assert f"inventory says {INVENTORY_PROFILE}, host runs {PROFILE} (chosen by -e" in said, run.output
    line = rf"^\S+Z\s+1 {PROFILE}\s+2 {PROFILE}\s+committed\s+\d+ s\s+\d+ s\s+-e$"
    assert re.search(line, run.output, re.MULTILINE), run.output


# ---- by the host's own program ----------------------------------------------------------------------------------


@dataclass
class Busy:
    """A rollback in which much else happened."""

    ended: dict[str, Any]
    second: Switched
    follower: Switched
    status: dict[str, Any]
    progress: str


@pytest.fixture(scope="module")
def busy(edge: Edge) -> Iterator[Busy]:
    """`vllm-edge rollback` is held in its drain by a hook. Meanwhile others ask for a switch, and ssh is cut."""
    number = edge.number()
    edge.hold("before_drain")
    begun: Begun = edge.begin("vllm-edge", "rollback", "--format", "json")
    edge.until(begun.before, "drain")
    status = edge.status()
    progress = edge.run("vllm-edge", "progress")
    second = edge.switch(number)
    follower = None
    for _ in range(3):  # one cut may miss a session that is just being made
        cut_ssh(edge)
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower = begun.end(30)
            break
    assert follower is not None, "the follower went on although ssh was cut"
    edge.let_go()
    ended = edge.ended(begun.before)
    yield Busy(ended, second, follower, status, progress)


def test_rollback_on_the_host(edge: Edge, busy: Busy) -> None:
    """Its follower went with the connection, the switch did not."""
    assert busy.follower.rc == 255 and busy.follower.journal is None
    journal = busy.ended
    assert (journal["result"], journal["from_generation"], journal["generation"]) == ("committed", 2, 1)
    assert (journal["origin"], journal["asked_by"]) == ("host", "vllm-edge rollback by ops")
    edge.serves(1)
    assert (edge.committed()["origin"], edge.committed()["previous_generation"]) == ("host", 2)


def test_two_at_once(busy: Busy) -> None:
    assert busy.second.rc == BUSY
    assert "asked by vllm-edge rollback by ops, phase drain" in busy.second.message, busy.second.message
    assert "Nothing was done" in busy.second.message
    assert (busy.status["switch"]["phase"], busy.status["switch"]["generation"]) == ("drain", 1)
    assert busy.status["problems"] == []
    assert re.match(rf"generation 1 \({PROFILE}\): drain for \d+ s", busy.progress)


# ---- only what differs moves ------------------------------------------------------------------------------------


def test_ansible_killed_while_an_engine_is_added(edge: Edge, controller: Any, clients: Clients, tmp_path: Path) -> None:
    """The profile gets a second engine; the first one is kept, and clients notice nothing. Nor does the host that
    Ansible goes."""
    first = edge.committed()["engines"][ENGINE]
    kept, container = edge.unit("InvocationID", "MainPID"), default.life(edge, CONTAINER)
    clients.start("--interval", "2")
    before = edge.last_id()
    playing = start_play(controller, "playbooks/engines.yml", SETTINGS, *WITH_SECOND)
    edge.until(before, "healthy")
    kill_group(playing)
    journal = edge.ended(before)
    recorded = clients.stop(tmp_path)
    assert journal["result"] == "committed", journal["message"]
    assert (journal["keep"], journal["stop"], journal["start"]) == ([ENGINE], [], [SECOND])
    edge.serves(journal["generation"])
    assert (edge.unit("InvocationID", "MainPID"), default.life(edge, CONTAINER)) == (kept, container)
    assert edge.committed()["engines"][ENGINE] == first, "it keeps its hash and its number"
    # Its KV cache is what the plan found, to the block, and all else is within.
    rows = {(row["what"], row["component"]): row for row in journal["drift"]}
    tokens = rows[SECOND, "kv_cache_tokens"]
    assert tokens["measured"] == tokens["planned"] > 500_000, rows
    assert rows[GPUS[1], "total_mib"]["planned"] > 22_000, "half a GiB stays free"
    assert {row["within"] for row in rows.values()} == {True}, rows
    agree(recorded, journal, [])


def test_an_engine_is_taken_away(edge: Edge, clients: Clients, tmp_path: Path) -> None:
    kept = default.life(edge, CONTAINER)
    clients.start("--interval", "2")
    done = edge.rollback()
    recorded = clients.stop(tmp_path)
    assert (done.rc, done.result) == (OK, "committed"), done.message
    journal = done.journal or {}
    assert (journal["keep"], journal["stop"], journal["start"]) == ([ENGINE], [SECOND], [])
    edge.serves(1)
    assert default.life(edge, CONTAINER) == kept
    assert default.gaps_of(recorded) == {role: [] for role in ROLES}
    assert edge.host.run(f"ls /etc/vllm-edge/engines/{SECOND} /etc/systemd/system/vllm-{SECOND}.service").rc != 0


# ---- another release of vLLM --------------------------------------------------------------------------------------


def test_another_release_is_brought_beside_switched_to_and_left_by_one_command(edge: Edge, controller: Any) -> None:
    """The way of docs/upgrade.md, from the lab's release to the one that it also can be."""
    release, base = "0.33.0", "-e vllm_image_base=registry.lab:5000/vllm/vllm-openai:v0.33.0"
    subprocess.run([sys.executable, "-m", "lab", "publish", release], cwd=ROOT, check=True, timeout=1200)
    number, life, last = edge.number(), default.life(edge, CONTAINER), edge.last_id()

    plan = play(controller, "playbooks/plan.yml", SETTINGS, f"-e vllm_version={release}", f"-e plan_profile={PROFILE}")
    assert f"profile {PROFILE}, vLLM {release}: fits" in plan.output, plan.output[-4000:]

    image = play(controller, "playbooks/image.yml", SETTINGS, base)
    assert image.rc == 0, image.output[-8000:]
    assert (default.life(edge, CONTAINER), edge.last_id()) == (life, last), "the former release serves on"

    run = play(controller, "playbooks/engines.yml", SETTINGS, base)
    assert run.rc == 0, run.output[-8000:]
    journal = edge.last()
    assert journal is not None and journal["result"] == "committed", journal
    assert edge.version() == release
    assert {row["within"] for row in journal["drift"]} == {True}, journal["drift"]
    edge.serves(journal["generation"])

    done = edge.rollback()
    assert (done.rc, done.result) == (OK, "committed"), done.message
    edge.serves(number)
    assert edge.version() == "0.32.0"


# ---- replicas ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_replicas_share_the_requests_and_one_may_stop(edge: Edge, controller: Any) -> None:
    """From one engine to two equal ones and back. The gateway has two servers for each role: a profile of the project
    needs them."""

    def ask(times: int) -> dict[str, int]:
        return dict(Counter(edge.ask_gateway("architect") for _ in range(times)))

    number = edge.number()
    assert ask(2) == {ENGINE: 2}
    run = play(controller, "playbooks/engines.yml", SETTINGS, *WITH_REPLICAS)
    assert run.rc == 0, run.output[-8000:]
    journal = edge.last()
    assert journal is not None and (journal["result"], journal["profile"]) == ("committed", TWICE), journal
    assert (journal["keep"], journal["stop"], sorted(journal["start"])) == ([], [ENGINE], REPLICAS)
    assert sorted((row["engine"], row["served_name"]) for row in journal["canary"]) == [
        (name, role) for name in REPLICAS for role in sorted(ROLES)
    ]
    assert all(gpu["within_budget"] for gpu in journal["gpus"]), journal["gpus"]
    edge.serves(journal["generation"])
    # Each request finds both idle, and takes one by chance: that all take the same one is one case in 32,768.
    both = ask(16)
    assert set(both) == set(REPLICAS), both

    unit = f"vllm-{REPLICAS[0]}.service"
    edge.run("systemctl", "stop", unit)
    one = ask(4)
    assert one == {REPLICAS[1]: 4}, "every request is answered"
    problems = edge.status()["problems"]
    assert any(unit in problem for problem in problems) and REPLICAS[1] not in " ".join(problems), problems
    edge.run("systemctl", "start", "--no-block", unit)
    edge.wait("requests for the engine that came back", lambda: REPLICAS[0] in ask(4), LOADED_S, 2)

    done = edge.rollback()
    assert (done.rc, done.result) == (OK, "committed"), done.message
    edge.serves(number)
    assert ask(2) == {ENGINE: 2}


# ---- calibration ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_calibration_measures_an_engine_and_goes_back(edge: Edge, controller: Any) -> None:
    """The first engine already runs as it would be measured; the second one is started, measured and taken away."""
    (planned,) = edge.engines(max(number for number in edge.numbers() if SECOND in edge.generation(number)["engines"]))[
        SECOND
    ]["plan"]["gpus"]
    kept = default.life(edge, CONTAINER)
    run = play(controller, "playbooks/calibrate.yml", SETTINGS, *WITH_SECOND)
    assert run.rc == 0, run.output[-8000:]
    edge.serves(1)
    assert default.life(edge, CONTAINER) == kept
    measured = edge.history()[0]
    assert measured["result"] == "measured"
    assert (measured["profile"], measured["from_generation"]) == (PROFILE, 1)
    create = edge.run("cat", f"{STATE}/generations/{measured['generation']}/engines/{SECOND}/docker-create").split()
    assert "--gpu-memory-utilization=0.9" in create and not [word for word in create if "kv-cache-memory" in word]
    *_, found = json.loads(edge.run("cat", f"{STATE}/observations.json"))["observations"]
    assert (found["engine"], found["gpu"]) == (SECOND, "NVIDIA L4")
    parts = ("weights", "overhead", "context", "graphs")
    assert found["components"].keys() == {f"{part}_bytes" for part in parts}
    # The plan after it pins what the measurement leaves free.
    difference = sum(found["components"].values()) / 2**20 - sum(planned[f"{part}_mib"] for part in parts)
    pinned = [int(words) for words in re.findall(r"pinned: kv_cache_memory_bytes: (\d+)", run.output)]
    assert any(abs(size / 2**20 - (planned["kv_cache_mib"] - difference)) <= 4 for size in pinned), run.output[-8000:]
    assert f"  {SECOND}:" in run.output and "observed: context_bytes" in run.output
    assert sum(found["nvml_mib"].values()) > 20_000
    last = edge.last_id()
    again = play(controller, "playbooks/calibrate.yml", SETTINGS, *WITH_SECOND)
    assert (again.rc, again.changed, edge.last_id()) == (0, [], last), again.output[-8000:]
