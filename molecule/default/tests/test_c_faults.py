# SPDX-License-Identifier: Apache-2.0
"""What breaks by itself: provoked, seen as an operator sees it, over again.

In the order that needs the fewest loads of the engine: each test provokes its own fault from whatever state the one
before left, and the last ones leave a host on which everything serves.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import (
    BYSTANDER,
    CONTAINER,
    ENGINE,
    ENGINES,
    GPUS,
    LOADED_S,
    ROLES,
    SERVED_NAMES,
    UNIT,
    Controller,
    Machine,
    life,
    module_result,
)
from test_b_heal import DAMAGE, DOCKER_CREATE, HEALED, UNIT_FILE, differing, last_switch

GPU = GPUS[3]
BUDGETS = {str(slot): engine.budget_mib for engine in ENGINES for slot in engine.slots}
WATCHDOG_S = 30
DAEMON_JSON = "/etc/docker/daemon.json"
STABLE = ("InvocationID", "MainPID", "NRestarts", "ActiveState")

Seen = Callable[..., None]


@pytest.fixture(autouse=True)
def calm(machine: Machine) -> Iterator[None]:
    """No fault outlives its test."""
    yield
    machine.host.run(f"docker unpause {CONTAINER}")
    machine.clear_faults()
    machine.run("lab-gpu", "foreign", "stop")


def restart(machine: Machine) -> None:
    """What an operator does; former failures no longer count against the unit."""
    machine.host.run(f"systemctl reset-failed {UNIT}")
    machine.run("systemctl", "restart", "--no-block", UNIT)


def wait_for_the_end(machine: Machine, cursor: str, seconds: float = LOADED_S) -> float:
    """Seconds until the unit's main process has ended."""
    return machine.wait("the unit's end", lambda: machine.unit_ended_at(cursor) is not None, seconds)


def test_over_budget(controller: Controller, machine: Machine, undisturbed: None, seen: Seen) -> None:
    used = machine.gpu_memory()[GPU]
    result = controller.module("vram_budget", {"budgets": BUDGETS | {"3": 20_000}})
    assert result["failed"]
    message = result["msg"]
    assert "\n" not in message
    assert f"GPU 3 (slot 3, NVIDIA L4, {GPU}) is over budget: {used} MiB are in use" in message
    assert f"its budget of 20000 MiB: {used - 20_000} MiB too many" in message
    assert f"container {CONTAINER}, unit {UNIT}" in message
    assert not controller.module("vram_budget", {"budgets": BUDGETS})["failed"]
    seen(message)


def test_engine_computes_nothing(controller: Controller, machine: Machine, undisturbed: None, seen: Seen) -> None:
    """It answers /health, and has passed the canary before: a run asks it for one token, and does not wait long."""
    machine.run("lab-gpu", "fault", "set", "--gpu", GPU, "engine-hangs")
    begin = machine.now()
    play = controller.play("playbooks/engines.yml")
    seconds = machine.now() - begin
    assert (play.rc, play.recap["changed"]) == (2, 0), play.output[-6000:]
    assert machine.health() == 200
    said = " ".join(play.output.split())
    message = rf"canary of engine {ENGINE} failed\. The engine keeps running and was not changed: .*? repeats the test"
    told = re.search(message, said)
    assert told and "no answer within 20 s" in told.group() and "the request hangs" in told.group(), said[-3000:]
    machine.clear_faults()

    def ask_again() -> float | None:
        answer = json.loads(machine.run("vllm-edge", "canary", ENGINE, "--unless-passed", "--format", "json"))
        return answer["results"][0]["token_s"]

    assert ask_again() is None, "after a failure everything is asked"
    assert ask_again() is not None
    seen(told.group(), failed_after=seconds)


def test_gpu_lost_while_measuring(controller: Controller, machine: Machine, undisturbed: None, seen: Seen) -> None:
    """Memory without a process keeps the measurement waiting for it to come back; meanwhile the card goes."""
    readers = "grep --files-with-matches --no-messages libnvidia-ml.so /proc/[0-9]*/maps"
    before = set(machine.host.run(readers).stdout.split())
    machine.run("lab-gpu", "fault", "set", "--gpu", GPUS[0], "orphan=500")
    process = controller.start_module("vram_budget", {"budgets": BUDGETS, "settle_timeout_s": 60})
    machine.wait(
        "the module to open NVML", lambda: set(machine.host.run(readers).stdout.split()) - before, 30, every=0.2
    )
    lost = machine.now()
    machine.run("lab-gpu", "fault", "set", "--gpu", GPUS[0], "gpu-lost")
    result = module_result(process)
    seconds = machine.now() - lost
    assert result["failed"]
    assert result["msg"].startswith("VRAM cannot be measured: The GPU is lost: ")
    assert f"{GPUS[0]} (NVIDIA L4 at 00000000:17:00.0) has fallen off the bus" in result["msg"]
    assert (result["nvml"]["code"], result["nvml"]["gpu"]) == ("GPU_IS_LOST", GPUS[0])
    assert seconds < 20, "it must not wait for all of settle_timeout_s"
    machine.clear_faults()
    assert not controller.module("vram_budget", {"budgets": BUDGETS})["failed"]
    seen(result["msg"], failed_after=seconds)


def test_docker_restarted_with_live_restore(machine: Machine, undisturbed: None, seen: Seen) -> None:
    before, unit, cursor = life(machine), machine.unit(*STABLE), machine.cursor()
    assert before is not None and unit["ActiveState"] == "active"
    begin = machine.now()
    machine.run("systemctl", "restart", "docker.service")
    machine.wait("the supervisor to see Docker again", lambda: "Docker Engine is back" in machine.journal(cursor), 30)
    machine.wait_until_serving(30)
    assert (life(machine), machine.unit(*STABLE)) == (before, unit)
    assert machine.complete("sentry")[0] == 200
    back = re.search(r"the Docker Engine is back after \d+ s", machine.journal(cursor))
    assert back
    seen(f"{back.group()}; same container, unit never restarted", serving_after=machine.now() - begin)


def test_engine_hangs(machine: Machine, undisturbed: None, seen: Seen) -> None:
    before, cursor, begin = life(machine), machine.cursor(), machine.now()
    assert before is not None
    machine.run("docker", "pause", CONTAINER)
    machine.wait(
        "the status to tell it", lambda: "not answering /health" in machine.run("vllm-edge", "status"), WATCHDOG_S
    )
    wait_for_the_end(machine, cursor, WATCHDOG_S + 30)
    ended = machine.unit_ended_at(cursor)
    assert ended is not None and WATCHDOG_S - 12 < ended - begin < WATCHDOG_S + 15
    why = re.search(r"The engine has not answered /health for \d+ s.*ended it", machine.journal(cursor))
    assert why, machine.journal(cursor)
    assert "Watchdog timeout" in machine.journal(cursor)
    machine.wait_until_serving()
    # Nobody has asked this engine yet. It takes any length after a single token, as the supervisor's probe sends.
    for tokens in (1, 32):
        probe = {"model": SERVED_NAMES[0], "prompt": [5] * tokens, "max_tokens": 1}
        assert machine.ask("/v1/completions", probe)[0] == 200, machine.journal(cursor)
    after = life(machine)
    assert after is not None and after.id != before.id
    assert machine.run("docker", "ps", "--all", "--quiet", "--filter", f"name={CONTAINER}").split() == [after.id[:12]]
    seen(why.group(), failed_after=ended - begin, serving_after=machine.now() - begin)


@pytest.mark.thorough
def test_engine_process_is_stopped(machine: Machine, undisturbed: None, seen: Seen) -> None:
    """vLLM's API server goes on answering /health. The limits are lowered in the live file, for this start only."""
    path = f"/etc/vllm-edge/engines/{ENGINE}/engine.json"
    rendered = machine.host.file(path).content_string
    quick = json.loads(rendered) | {"progress_timeout_s": 10, "idle_probe_s": 5}
    machine.shell(f"printf %s {shlex.quote(json.dumps(quick))} > {path}")
    restart(machine)
    machine.wait_until_serving()
    machine.shell(f"printf %s {shlex.quote(rendered)} > {path}")
    before, cursor, begin = life(machine), machine.cursor(), machine.now()
    processes = machine.run("docker", "top", CONTAINER, "-eo", "pid,args").splitlines()
    cores = [line.split()[0] for line in processes if "VLLM::EngineCore" in line]
    assert len(cores) == 1, processes
    machine.run("kill", "-STOP", cores[0])
    machine.wait("the status to tell it", lambda: "requests make no progress" in machine.run("vllm-edge", "status"), 60)
    wait_for_the_end(machine, cursor, WATCHDOG_S + 30)
    why = re.search(r"The engine answered /health, but none of its requests .*ended it", machine.journal(cursor))
    assert why, machine.journal(cursor)
    assert "by=vllm-edge" not in machine.journal(cursor), "the supervisor's own requests fill the journal"
    machine.wait_until_serving()
    after = life(machine)
    assert before is not None and after is not None and after.id != before.id
    assert machine.complete("sentry")[0] == 200
    assert machine.host.file(path).content_string == rendered
    seen(why.group(), serving_after=machine.now() - begin)


def test_engine_crashes_while_loading(machine: Machine, undisturbed: None, seen: Seen) -> None:
    machine.fault("engine-crash-loading")
    cursor, begin = machine.cursor(), machine.now()
    restart(machine)
    wait_for_the_end(machine, cursor)
    machine.wait("the death in Docker's events", lambda: machine.died_at(begin), 5)
    dead, ended = machine.died_at(begin), machine.unit_ended_at(cursor)
    assert dead is not None and ended is not None
    assert ended - dead < 3, "the unit ends with its container, not at a timeout"
    assert machine.unit("Result", "StatusText")["Result"] == "exit-code"
    assert "The GPU reported an error: an illegal memory access" in machine.journal(cursor)
    explained = machine.explain()
    assert "the GPU reported an error: an illegal memory access" in explained
    assert "journalctl -k" in explained
    assert "CUDA error: an illegal memory access was encountered" in machine.journal(cursor), "vLLM's own words"
    seen(explained, failed_after=ended - dead)


@pytest.mark.thorough
def test_engine_does_not_fit(machine: Machine, undisturbed: None, seen: Seen) -> None:
    pid = machine.run("lab-gpu", "foreign", "start", "--gpu", "3", "--mib", "8000").strip()
    cursor, begin = machine.cursor(), machine.now()
    restart(machine)
    refusal = re.compile(
        r"Free memory on device cuda:0 \(1\d\.\d+/22\.03 GiB\) on startup is less than desired GPU memory "
        r"utilization \(0\.9, 19\.83 GiB\)"
    )
    machine.wait("vLLM's own refusal", lambda: refusal.search(machine.journal(cursor)), LOADED_S)
    wait_for_the_end(machine, cursor, 45)
    explained, ended = machine.explain(), machine.unit_ended_at(cursor)
    assert ended is not None
    assert re.search(r"the GPU has 1\d\.\d+ of 22\.03 GiB free, 19\.83 GiB are wanted", explained), explained
    assert "Remedy: Something else holds memory there" in explained and "nvidia-smi" in explained
    apps = machine.run("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    assert f"{pid}, 8000" in apps.splitlines(), "somebody else's process is left alone"
    seen(explained, failed_after=ended - begin)


@pytest.mark.thorough
def test_live_restore_turned_off(machine: Machine, undisturbed: None) -> None:
    """Somebody does that, and nobody notices until Docker is restarted, below."""
    options = json.loads(machine.host.file(DAEMON_JSON).content_string) | {"live-restore": False}
    machine.shell(f"printf %s {shlex.quote(json.dumps(options))} > {DAEMON_JSON}")
    machine.run("systemctl", "reload", "docker.service")
    assert json.loads(machine.run("docker", "info", "--format={{json .LiveRestoreEnabled}}")) is False


@pytest.mark.thorough
def test_first_completion_kills_the_engine(machine: Machine, undisturbed: None, seen: Seen) -> None:
    machine.fault("engine-dies-on-first-completion")
    restart(machine)
    machine.wait_until_serving()
    before, cursor, begin = life(machine), machine.cursor(), machine.now()
    assert machine.complete("sentry")[0] != 200
    wait_for_the_end(machine, cursor, 30)
    machine.clear_faults()
    explained = machine.explain()
    assert "the engine needed a C compiler" in explained and "Add g++" in explained
    ended = machine.unit_ended_at(cursor)
    assert ended is not None
    machine.wait_until_serving()
    after = life(machine)
    assert before is not None and after is not None and after.id != before.id
    assert machine.unit("NRestarts")["NRestarts"] == "1", "systemd restarted it, nobody else"
    assert [machine.complete(name)[0] for name in ROLES] == [200] * 4
    seen(explained, failed_after=ended - begin, serving_after=machine.now() - begin)


@pytest.mark.thorough
def test_docker_restarted_without_live_restore(machine: Machine, bystander: object, seen: Seen) -> None:
    """Then every container ends with Docker, the bystander's, too."""
    assert json.loads(machine.run("docker", "info", "--format={{json .LiveRestoreEnabled}}")) is False
    machine.host.run(f"systemctl reset-failed {UNIT}")
    before, cursor, begin = life(machine), machine.cursor(), machine.now()
    machine.run("systemctl", "restart", "docker.service")
    wait_for_the_end(machine, cursor, 30)
    explained = machine.explain()
    assert "the Docker Engine stopped and took the engine's container with it" in explained
    assert "live-restore" in explained
    machine.wait(
        "every engine serving again", lambda: all(machine.health(engine) == 200 for engine in ENGINES), 2 * LOADED_S
    )
    machine.wait_until_serving()
    after = life(machine)
    assert before is not None and after is not None and after.id != before.id
    assert [machine.complete(name)[0] for name in ROLES] == [200] * 4
    assert life(machine, BYSTANDER) is None
    machine.run("docker", "start", BYSTANDER)
    seen(explained, serving_after=machine.now() - begin)


@pytest.mark.thorough
def test_last_run_repairs_it_without_a_restart(machine: Machine, controller: Controller) -> None:
    """live-restore is set again, and files are repaired beside it: nothing of that reaches a running container."""
    machine.run("rm", UNIT_FILE)
    machine.run("chmod", "0777", DOCKER_CREATE)
    engine, stranger, unit = life(machine), life(machine, BYSTANDER), machine.unit(*STABLE)
    play = controller.play("site.yml")
    assert play.rc == 0, play.output[-6000:]
    assert play.changed == ["container_runtime : Configure the Docker daemon", *HEALED]
    assert differing(play) == DAMAGE | {DAEMON_JSON: "content"}
    assert (last_switch(machine)["start"], last_switch(machine)["stop"]) == ([], [])
    options = json.loads(machine.host.file(DAEMON_JSON).content_string)
    assert (options["live-restore"], options["max-concurrent-uploads"]) == (True, 2)
    assert json.loads(machine.run("docker", "info", "--format={{json .LiveRestoreEnabled}}")) is True
    assert (life(machine), life(machine, BYSTANDER), machine.unit(*STABLE)) == (engine, stranger, unit)
    assert engine is not None and stranger is not None and unit["ActiveState"] == "active"


FORKS = """
import os, time
made = []
try:
    for _ in range(6000):
        child = os.fork()
        if not child:
            time.sleep(120)
            os._exit(0)
        made.append(child)
except OSError as error:
    print(type(error).__name__, len(made) < 4096)
for child in made:
    os.kill(child, 9)
"""
FILL = """
import os
with open("/tmp/filled", "wb", buffering=0) as file:
    try:
        for _ in range(5 * 1024):
            file.write(b"x" * 1048576)
    except OSError as error:
        print(error.strerror, file.tell() // 1048576 <= 4096)
os.unlink("/tmp/filled")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "answer"), [(FORKS, "BlockingIOError True"), (FILL, "No space left on device True")]
)
def test_an_engine_takes_no_more_than_its_share_of_the_host(machine: Machine, program: str, answer: str) -> None:
    """What runs in the container meets its limit; the host starts processes, and the engine serves on."""
    if "os.fork" in program and not (machine.container() or {})["HostConfig"]["PidsLimit"]:
        pytest.skip("the kernel of this machine has no pids controller, so Docker dropped the limit")
    done = machine.run("docker", "exec", CONTAINER, "python3", "-c", program)
    assert done.strip() == answer
    assert machine.complete(SERVED_NAMES[0])[0] == 200


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [
        {"n": 100_000},
        {"logprobs": True, "top_logprobs": 100_000},
        {"max_tokens": 10**12},
        {"stop": ["a"] * 20_000, "n": -1},
        *(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
            for url in ("http://172.17.0.1:8081/x.png", "file:///models/config.json", "data:image/png;base64,AAAA")
        ),
    ],
    ids=["answers", "log-probabilities", "tokens", "stop words", "address", "file", "broken picture"],
)
def test_a_client_that_asks_for_too_much_is_refused(machine: Machine, asked: dict[str, Any]) -> None:
    question = {"model": SERVED_NAMES[0], "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    status, answer = machine.ask("/v1/chat/completions", question | asked, 30)
    assert 400 <= status < 500, (status, answer)
    assert machine.complete(SERVED_NAMES[0])[0] == 200
