# SPDX-License-Identifier: Apache-2.0
"""The host of this scenario: switched by its own program over ssh, and by Ansible as the default scenario runs it.

Two generations of one small engine are what most tests need; they differ in `max_model_len`, by which a fault of the
simulated GPU is meant for one of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("default_scenario", ROOT / "molecule/default/tests/conftest.py")
assert _spec is not None and _spec.loader is not None
default = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = default
_spec.loader.exec_module(default)
host = default.host
"""A fixture of the default scenario that this one has as it is."""

GPUS: list[str] = default.GPUS
Play = default.Play
Clients = default.Clients
Controller = default.Controller

SETTINGS = f"--extra-vars=@{ROOT / 'molecule' / 'switch' / 'settings.yml'}"
PROFILE = "e2b-only"
INVENTORY_PROFILE = "nvfp4-tp2"
ENGINE, CONTAINER, UNIT = "e2b-all", "vllm-e2b-all", "vllm-e2b-all.service"
SOCKETS = "unix:/run/vllm-edge/engines"
ROLES = ["architect", "worker", "auditor", "sentry"]
SWITCH_UNIT = "vllm-edge-switch.service"
STATE = "/var/lib/vllm-edge"
HOOKS = "/etc/vllm-edge/hooks"
PYTHON = "/opt/vllm-edge/current/venv/bin/python"
"""Has the host's program and its packages."""
BYSTANDER = "somebody-elses-program"
FOREIGN_MIB = 100
LAB = os.environ.get("VLLM_EDGE_LAB_NAME", "vllm-edge-switch")

LOADED_S = 600
"""The longest that one engine may take from its start until it answers, on a machine that does other things, too."""
SWITCHED_S = 2 * LOADED_S
"""A switch with its way back."""

OK, ROLLED_BACK, _, _, BUSY = range(5)
"""Exit status of the commands that switch."""

# On the host: waits until a switch that began after the given one is in a phase, and may then kill its program.
UNTIL = """
import json, os, sys, time
before, phase, number = sys.argv[1:]
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    try:
        journal = json.load(open("/var/lib/vllm-edge/switch.json"))
    except (OSError, ValueError):
        journal = {"id": before}
    if journal["id"] != before:
        if journal["result"]:
            sys.exit(f"the switch was never seen in phase {phase}, it has ended: {journal['message']}")
        if (journal["direction"], journal["phase"]) == ("forward", phase):
            if int(number):
                os.kill(journal["pid"], int(number))
            sys.exit()
    time.sleep(0.02)
sys.exit(f"no switch was seen in phase {phase} within 600 s")
"""


# ---- the host ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switched:
    """How `vllm-edge switch` or `rollback` ended."""

    rc: int
    journal: dict[str, Any] | None
    errors: str

    @property
    def message(self) -> str:
        return str(self.journal["message"]) if self.journal else self.errors

    @property
    def result(self) -> str:
        return str(self.journal["result"]) if self.journal else ""

    def phase(self, name: str, direction: str = "forward") -> dict[str, Any]:
        """The last record of a phase."""
        assert self.journal is not None, self.errors
        found = [row for row in self.journal["phases"] if (row["phase"], row["direction"]) == (name, direction)]
        assert found, f"no phase {name} ({direction}) in {json.dumps(self.journal['phases'], indent=2)}"
        return dict(found[-1])


@dataclass
class Begun:
    """A switch that goes on in the background, followed over an ssh connection of its own."""

    process: subprocess.Popen[str]
    before: str

    def end(self, seconds: float = SWITCHED_S) -> Switched:
        output, errors = self.process.communicate(timeout=seconds)
        return switched(self.process.returncode, output, errors)


def switched(rc: int, output: str, errors: str) -> Switched:
    try:
        journal = json.loads(output)
    except ValueError:
        journal = None
    return Switched(rc, journal, errors.strip() or output.strip())


class Edge(default.Machine):  # type: ignore[misc, name-defined, unused-ignore]
    """The host by its own program."""

    # -- connections

    def ssh(self, *words: str, own: bool = True) -> list[str]:
        """An ssh command line; a connection of its own is not shared with the other questions."""
        alone = ["-o", "ControlPath=none", "-o", "ServerAliveInterval=2"] if own else []
        config = ROOT / "lab" / "generated" / LAB / "ssh_config"
        return ["ssh", "-F", str(config), *alone, f"{LAB}-host", *words]

    def forget_connection(self) -> None:
        """The shared one, before the host goes away under it."""
        words = [*self.ssh(own=False)]
        command = [*words[:-1], *shlex.split(default.SSH_OPTIONS), "-O", "exit", words[-1]]
        subprocess.run(command, capture_output=True, check=False, timeout=30)

    def python(self, program: str, *arguments: str, interpreter: str = "python3") -> str:
        return self.run(interpreter, "-c", program, *arguments).strip()

    # -- what is there

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("vllm-edge", "status", "--format", "json"))
        return found

    def committed(self) -> dict[str, Any]:
        return dict(json.loads(self.run("cat", f"{STATE}/active-profile.json")))

    def number(self) -> int:
        return int(self.committed()["generation"])

    def history(self) -> list[dict[str, Any]]:
        return list(json.loads(self.run("vllm-edge", "history", "--format", "json")))

    def last(self) -> dict[str, Any] | None:
        """The journal of the running or last switch."""
        done = self.host.run(f"cat {STATE}/switch.json")
        return dict(json.loads(done.stdout)) if done.rc == 0 else None

    def last_id(self) -> str:
        return str((self.last() or {}).get("id", ""))

    def generation(self, number: int) -> dict[str, Any]:
        return dict(json.loads(self.run("cat", f"{STATE}/generations/{number}/generation.json")))

    def numbers(self) -> list[int]:
        return sorted(int(word) for word in self.run("ls", f"{STATE}/generations").split())

    def engines(self, number: int) -> dict[str, dict[str, Any]]:
        """engine.json of each engine of a generation."""
        names = self.generation(number)["engines"]
        place = f"{STATE}/generations/{number}/engines"
        return {name: json.loads(self.run("cat", f"{place}/{name}/engine.json")) for name in names}

    def our_containers(self) -> dict[str, default.Life]:  # type: ignore[name-defined, unused-ignore]
        words = ["docker", "ps", "--all", "--filter", "label=vllm-edge.engine", "--format", "{{.Names}}"]
        return {name: default.life(self, name) for name in sorted(self.run(*words).split())}

    def complete_at(self, engine: str, role: str) -> int:
        question = {
            "model": role,
            "messages": [{"role": "user", "content": "Count to three."}],
            "max_tokens": 8,
            "temperature": 0,
        }
        arguments = [f"{SOCKETS}/{engine}/api.sock/v1/chat/completions", json.dumps(question), "60"]
        return int(json.loads(self.run("python3", "-c", default.ASK, *arguments))[0])

    def version(self) -> str:
        """The release that the engine says it is, without what follows the number."""
        _, text = json.loads(self.run("python3", "-c", default.ASK, f"{SOCKETS}/{ENGINE}/api.sock/version", "", "30"))
        return str(json.loads(text)["version"]).partition("+")[0]

    def serves(self, number: int) -> None:
        """Just this generation serves, all of it, and nothing is left of another."""
        status = self.status()
        active = status["active_profile"]
        assert active["generation"] == number, (active, (self.last() or {}).get("message"))
        assert status["problems"] == []
        assert status["live_files"] == []
        assert (status["switch"], status["unfinished_switch"]) == (None, None)
        hashes = {name: engine["input_hash"] for name, engine in active["engines"].items()}
        assert {engine["engine"]: engine["running_input_hash"] for engine in status["engines"]} == hashes
        answers = {
            (role, engine["engine"]): self.complete_at(engine["engine"], role)
            for engine in status["engines"]
            for role in engine["served_names"]
        }
        assert {role for role, _ in answers} >= set(ROLES) and set(answers.values()) == {200}, answers
        assert set(self.our_containers()) == {f"vllm-{name}" for name in hashes}, "a container was left over"
        used = {uuid for engine in status["engines"] for uuid in engine["gpus"]}
        left = {board["index"]: board["engine_mib"] for board in status["gpus"] if board["uuid"] not in used}
        assert set(left.values()) <= {0}, f"memory of ours is left on GPUs without an engine: {left}"
        last = self.last()
        assert last is not None and last["result"] is not None
        assert self.history()[0]["id"] == last["id"], "the history lacks the last switch"
        assert self.host.run(f"ls {STATE}/.switch.ballast").rc != 0, "the journal's ballast was left over"

    def ask_gateway(self, role: str) -> str:
        """The engine that answered a client of the gateway, on the machine that runs the lab."""
        file = ROOT / "lab" / "generated" / LAB / "clients" / f"{default.INVENTORY_HOST}-default.env"
        lines = [line for line in file.read_text().splitlines() if "=" in line and not line.startswith("#")]
        found = dict(line.split("=", 1) for line in lines)
        question = {"model": role, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 4}
        asked = urllib.request.Request(
            f"{found['OPENAI_BASE_URL']}/chat/completions",
            json.dumps(question).encode(),
            {"Authorization": f"Bearer {found['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        trusted = ssl.create_default_context(cafile=found["SSL_CERT_FILE"])
        with urllib.request.urlopen(asked, timeout=60, context=trusted) as answer:
            json.load(answer)
            return str(answer.headers["X-Served-By"])

    # -- switching

    def switch(self, number: int) -> Switched:
        done = self.host.run(f"vllm-edge switch {number} --format json")
        return switched(done.rc, done.stdout, done.stderr)

    def rollback(self) -> Switched:
        done = self.host.run("vllm-edge rollback --format json")
        return switched(done.rc, done.stdout, done.stderr)

    def begin(self, *command: str) -> Begun:
        """`vllm-edge switch 2 --format json` and the like, over its own connection."""
        before = self.last_id()
        process = subprocess.Popen(
            self.ssh(shlex.join(["sudo", *command])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Begun(process, before)

    def begin_switch(self, number: int) -> Begun:
        return self.begin("vllm-edge", "switch", str(number), "--format", "json")

    def until(self, before: str, phase: str, *, kill: bool = False) -> None:
        """Until a switch later than `before` is in a phase. With `kill` its program is killed there."""
        self.python(UNTIL, before, phase, str(int(signal.SIGKILL) if kill else 0))

    def ended(self, before: str) -> dict[str, Any]:
        """The journal of the switch after `before`, once systemd has ended its unit and its recovery."""

        def over() -> bool:
            journal = self.last()
            if journal is None or journal["id"] == before or journal["result"] is None:
                return False
            state = self.unit("ActiveState", unit=SWITCH_UNIT)["ActiveState"]
            return state in ("inactive", "failed")

        self.wait("the end of the switch", over, SWITCHED_S)
        journal = self.last()
        assert journal is not None
        return journal

    def wait(self, what: str, condition: Callable[[], object], seconds: float, every: float = 0.5) -> None:
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > seconds:
                journal = self.journal(unit=SWITCH_UNIT)
                pytest.fail(f"not within {seconds:.0f} s: {what}\n{journal}\n{self.journal(unit=UNIT)}", pytrace=False)
            time.sleep(every)

    # -- hooks and faults

    def hook(self, name: str, script: str) -> None:
        self.put(f"{HOOKS}/{name}.d/50-test", f"#!/bin/sh\n{script}\n", "0755")

    def hold(self, hook: str) -> None:
        """A hook that stays until `let_go`, so that its phase lasts."""
        self.run("touch", "/run/hold")
        here = '[ -e /run/hold ] && [ "$(systemctl is-system-running)" != stopping ]'
        self.hook(hook, f"while {here}; do sleep 0.1; done")

    def let_go(self) -> None:
        self.run("rm", "--force", "/run/hold")

    def calm(self) -> None:
        """No hook, fault or helper of a test outlives it."""
        self.let_go()
        self.shell(f"[ ! -e {HOOKS} ] || find {HOOKS} -type f -delete")
        self.clear_faults()

    def engine_fault(self, name: str, max_model_len: int) -> None:
        """For the engine of one generation only."""
        self.run("lab-gpu", "fault", "set", "--gpu", "3", f"{name}=max_model_len={max_model_len}")


@pytest.fixture(scope="session")
def edge(host: Host) -> Edge:
    return Edge(host)


@pytest.fixture(scope="session")
def controller() -> Any:
    found = Controller()
    found.environment["VLLM_EDGE_LAB_NAME"] = LAB
    return found


# ---- other people -----------------------------------------------------------------------------------------------


class Bystanders:
    """Somebody else's container and somebody else's process on a GPU; nothing of ours may touch them."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.expected: tuple[Any, Any] = (None, None)
        self.pid = ""

    def start(self) -> None:
        image = self.edge.run("docker", "image", "ls", "--quiet", "--filter=reference=*/vllm/vllm-openai").split()[0]
        self.edge.host.run(f"docker rm --force {BYSTANDER}")
        # It ends on SIGTERM: with live-restore it outlives Docker, and a shutdown would wait 90 s for it.
        program = "trap exit TERM; sleep infinity & wait"
        words = [f"--name={BYSTANDER}", "--stop-signal=SIGKILL", "--entrypoint=sh", image, "-c", program]
        self.edge.run("docker", "run", "--detach", *words)
        self.edge.run("lab-gpu", "foreign", "stop")
        self.pid = self.edge.run("lab-gpu", "foreign", "start", "--gpu", "0", "--mib", str(FOREIGN_MIB)).strip()
        self.expected = self.look()

    def again(self) -> None:
        """After the host went down with all that ran on it: the container is there still, and starts."""
        self.edge.run("docker", "start", BYSTANDER)
        self.pid = self.edge.run("lab-gpu", "foreign", "start", "--gpu", "0", "--mib", str(FOREIGN_MIB)).strip()
        after = self.look()
        assert after[0].id == self.expected[0].id, "the bystander's container is another one"
        self.expected = after

    def look(self) -> tuple[Any, Any]:
        container = default.life(self.edge, BYSTANDER)
        # Name and the time of its start, the 22nd field.
        stat = self.edge.host.run(f"cat /proc/{self.pid}/stat").stdout.rpartition(")")
        return container, (stat[0], stat[2].split()[19:20])

    def stop(self) -> None:
        self.edge.run("docker", "rm", "--force", BYSTANDER)
        self.edge.run("lab-gpu", "foreign", "stop")


@pytest.fixture(scope="session")
def bystanders(edge: Edge) -> Iterator[Bystanders]:
    found = Bystanders(edge)
    found.start()
    assert found.expected[0] is not None and found.expected[1][1], found.expected
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def undisturbed(edge: Edge, bystanders: Bystanders) -> Iterator[None]:
    """Around every test: other people's container and process live on, and nothing of the test stays."""
    yield
    edge.calm()
    assert bystanders.look() == bystanders.expected, "somebody else was disturbed"


# ---- ends of those who ask -------------------------------------------------------------------------------------


def start_play(controller: Any, playbook: str, *arguments: str) -> subprocess.Popen[str]:
    """A run with a process group of its own, so that all of it can be killed at once."""
    return subprocess.Popen(
        controller._command("ansible-playbook", *arguments, str(ROOT / playbook)),
        cwd=ROOT,
        env=controller.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def play(controller: Any, playbook: str, *arguments: str) -> Any:
    """A run to its end; what it loads may take long beside other tests."""
    return default.play_result(controller.start_play(playbook, *arguments), 1500)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Nothing of it may say goodbye. A task of Ansible has a session of its own."""
    words = ["pgrep", "--parent", str(process.pid)]
    tasks = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    os.killpg(process.pid, signal.SIGKILL)
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(task), signal.SIGKILL)
    process.wait(30)


def cut_ssh(edge: Edge) -> None:
    """Every ssh session of the host ends, ours among them: those of operators, of Ansible, of followers."""
    # Each has a privileged process, a child of the daemon, and one below it that holds the connection.
    cut = """sleep 2
    for session in $(pgrep --parent $(systemctl show --property=MainPID --value ssh.service)); do
        kill -9 $(pgrep --parent $session) $session
    done"""
    with contextlib.suppress(RuntimeError):  # its own answer may be cut off, too
        edge.run("systemd-run", "--quiet", "--collect", "sh", "-c", cut)
    time.sleep(4)
    edge.forget_connection()  # whose other end is gone, which it would only notice at the next question


# ---- two generations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Where the host is, and where a test wants it to go: two generations of one engine."""

    here: int
    there: int
    there_len: int
    """`max_model_len` of the engine in the second one, by which a fault is meant for it."""


@pytest.fixture
def pair(edge: Edge) -> Pair:
    """The committed generation, which serves first, and one of another `max_model_len` (that of test_a_switch.py)."""
    lengths = {
        number: int(edge.engines(number)[ENGINE]["max_model_len"])
        for number in edge.numbers()
        if set(edge.generation(number)["engines"]) == {ENGINE}
    }
    here = edge.number()
    if here not in lengths or edge.status()["problems"]:
        here = here if here in lengths else 1
        back = edge.switch(here)
        assert back.rc == OK, back.message
    there = next(number for number, length in lengths.items() if length != lengths[here])
    return Pair(here, there, lengths[there])


# ---- clients ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clients(edge: Edge) -> Iterator[Any]:
    yield Clients(edge)
    edge.host.run("systemctl stop role-client")
