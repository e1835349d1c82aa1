# SPDX-License-Identifier: Apache-2.0
"""The host, asked over plain ssh, and the controller, which runs playbooks as an operator does."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

import role_client

from lab.docker import docker_command
from lab.server import Server, start_neighbour

INVENTORY = ROOT / "inventories" / "lab"
INVENTORY_HOST = "xr7620-lab"
LAB = os.environ.get("VLLM_EDGE_LAB_NAME", "vllm-edge-molecule")

# The boards of the reference host, in the order of their PCI bus ids.
GPUS = [
    "GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000",
    "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001",
    "GPU-c0d97e36-3b48-5e12-8c6d-a7f4e1930002",
    "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003",
]


@dataclass(frozen=True)
class Served:
    """One engine of the reference profile, as `measured.md` describes it and the inventory states it."""

    name: str
    model: str
    repo: str
    slots: list[int]
    port: int
    served_names: list[str]
    measured_mib: range
    """What the reference host measured on each of its GPUs, and some."""

    @property
    def unit(self) -> str:
        return f"vllm-{self.name}.service"

    @property
    def container(self) -> str:
        return f"vllm-{self.name}"

    @property
    def gpus(self) -> list[str]:
        return [GPUS[slot] for slot in self.slots]

    @property
    def url(self) -> str:
        return f"unix:/run/vllm-edge/engines/{self.name}/api.sock"

    @property
    def etc(self) -> str:
        return f"/etc/vllm-edge/engines/{self.name}"

    @property
    def weights(self) -> str:
        return f"/data/vllm/weights/{self.repo.partition('/')[2]}"


PROFILE = "nvfp4-tp2"
NVFP4 = "nvidia/Gemma-4-31B-IT-NVFP4"
ENGINES = [
    Served("31b-nvfp4-tp2", "31b-nvfp4", NVFP4, [0, 1], 8050, ["architect", "worker"], range(21_600, 22_351)),
    Served("e4b", "e4b", "google/gemma-4-E4B-it", [2], 8060, ["auditor"], range(20_200, 20_800)),
    Served("e2b", "e2b", "google/gemma-4-E2B-it", [3], 8070, ["sentry"], range(20_300, 20_900)),
]
ROLES = {name: engine for engine in ENGINES for name in engine.served_names}
# The one that is damaged and broken: it loads in the shortest time. What the others do meanwhile is looked at, too.
VICTIM = ENGINES[2]
ENGINE, UNIT, CONTAINER, SERVED_NAMES = VICTIM.name, VICTIM.unit, VICTIM.container, VICTIM.served_names
BYSTANDER = "somebody-elses-program"

SSH_OPTIONS = "-o ControlMaster=auto -o ControlPath=~/.ansible/cp/vllm-edge-%C -o ControlPersist=60"
"""One connection for some hundred questions, in Ansible's own directory for that."""

LOADED_S = 240
"""The longest that one engine may take from its start until it answers, on a slow machine beside other tests."""

ASK = (ROOT / "tests" / "tools" / "ask.py").read_text()
"""Runs on the host, with its Python and as root."""


# ---- the controller ---------------------------------------------------------------------------------------------


@dataclass
class Play:
    """One run of ansible-playbook, as it looks on the operator's terminal."""

    rc: int
    output: str
    changed: list[str] = field(default_factory=list)
    """Names of changed tasks in order; of a loop also the item: `Render the units (e2b)`."""

    @property
    def recap(self) -> dict[str, int]:
        line = re.search(rf"^{INVENTORY_HOST}\s+:(.*)$", self.output, re.MULTILINE)
        assert line, f"no recap in:\n{self.output[-4000:]}"
        return {key: int(value) for key, value in (word.split("=") for word in line.group(1).split())}

    @property
    def diffs(self) -> list[str]:
        """Lines that show a difference."""
        return [line for line in self.output.splitlines() if re.match(r"^(--- (before|/)|\+\+\+ (after|/)|@@ )", line)]


def changed_tasks(output: str) -> list[str]:
    """What ansible's default output says was changed."""
    changed, task = [], ""
    for line in output.splitlines():
        if heading := re.match(r"^(?:TASK|RUNNING HANDLER) \[(.*)\] \**$", line):
            task = heading.group(1)
        elif mark := re.match(r"^changed: \[[^\]]+\](?: => \(item=(.*)\))?\s*$", line):
            item = f" ({mark.group(1)})" if mark.group(1) else ""
            if f"{task}{item}" not in changed:
                changed.append(f"{task}{item}")
    return changed


class Controller:
    """Runs Ansible from the repository's root against this lab's host."""

    def __init__(self) -> None:
        # Without molecule's own settings of Ansible (colours among them): an operator has none.
        operators = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        self.environment = operators | {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callbacks"),
            "VLLM_EDGE_LAB_NAME": LAB,
        }

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [program, f"--inventory={INVENTORY}", *arguments]

    def start_play(self, playbook: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command("ansible-playbook", "--diff", *arguments, str(ROOT / playbook)),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def play(self, playbook: str, *arguments: str) -> Play:
        return play_result(self.start_play(playbook, *arguments))


def play_result(process: subprocess.Popen[str], seconds: float = 900) -> Play:
    output, _ = process.communicate(timeout=seconds)
    return Play(process.returncode, output, changed_tasks(output))


@pytest.fixture(scope="session")
def controller() -> Controller:
    return Controller()


# ---- the host ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Host:
    """testinfra's fixture with the scope of the session: it is one host, and what lives through it is looked at."""
    option = request.config.option
    assert option.hosts, "give the host as molecule does: --hosts=ssh://NAME --ssh-config=FILE --sudo"
    return testinfra.get_host(
        option.hosts,
        ssh_config=option.ssh_config,
        ssh_extra_args=option.ssh_extra_args or SSH_OPTIONS,
        sudo=option.sudo,
    )


class Machine:
    """The serving host, by the programs that an operator uses there."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def run(self, *command: str) -> str:
        return str(self.host.check_output(shlex.join(command)))

    def shell(self, command: str) -> str:
        return str(self.host.check_output(command))

    def put(self, path: str, text: str, mode: str = "0644") -> None:
        coded = base64.b64encode(text.encode()).decode()
        self.shell(f"mkdir -p {shlex.quote(str(Path(path).parent))} && echo {coded} | base64 -d > {shlex.quote(path)}")
        self.run("chmod", mode, path)

    def unit(self, *properties: str, unit: str = UNIT) -> dict[str, str]:
        shown = self.run("systemctl", "show", unit, f"--property={','.join(properties)}")
        return dict(line.split("=", 1) for line in shown.splitlines())

    def container(self, name: str = CONTAINER) -> dict[str, Any] | None:
        done = self.host.run(shlex.join(["docker", "inspect", "--type=container", name]))
        return json.loads(done.stdout)[0] if done.rc == 0 else None

    def ask(
        self, path: str, payload: dict[str, Any] | None = None, seconds: int = 60, engine: Served = VICTIM
    ) -> tuple[int, Any]:
        """HTTP status (0 without an answer) and what was answered, as seen from the host itself."""
        arguments = [engine.url + path, json.dumps(payload) if payload else "", str(seconds)]
        status, answer = json.loads(self.run("python3", "-c", ASK, *arguments))
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
        return status, answer

    def health(self, engine: Served = VICTIM) -> int:
        return self.ask("/health", seconds=3, engine=engine)[0]

    def complete(self, name: str, seconds: int = 60) -> tuple[int, Any]:
        question = {"messages": [{"role": "user", "content": "Count to three."}], "max_tokens": 8, "temperature": 0}
        return self.ask("/v1/chat/completions", {"model": name, **question}, seconds, ROLES.get(name, VICTIM))

    def cursor(self) -> str:
        text = self.run("journalctl", "--show-cursor", "--lines=0", "--quiet")
        return re.sub(r"^-- cursor: ", "", text.strip())

    def journal(self, after: str | None = None, unit: str = UNIT) -> str:
        since = [f"--after-cursor={after}"] if after else ["--lines=60"]
        return self.run("journalctl", "--quiet", "--no-pager", "--output=short-iso", f"--unit={unit}", *since)

    def unit_ended_at(self, after: str) -> float | None:
        """When the unit's main process ended, by systemd's own line in the journal."""
        words = ["journalctl", "--quiet", "--output=json", f"--unit={UNIT}", f"--after-cursor={after}"]
        entries = [json.loads(line) for line in self.run(*words).splitlines()]
        ends = [entry for entry in entries if "Main process exited" in str(entry["MESSAGE"])]
        return int(ends[-1]["__REALTIME_TIMESTAMP"]) / 1e6 if ends else None

    def now(self) -> float:
        return float(self.run("date", "+%s.%N"))

    def clear_faults(self) -> None:
        self.run("lab-gpu", "fault", "clear")

    def gpu_memory(self) -> dict[str, int]:
        text = self.run("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
        return {uuid: int(used) for uuid, used in (line.split(", ") for line in text.splitlines())}

    def wait(self, what: str, condition: Callable[[], object], seconds: float, every: float = 0.5) -> float:
        """Seconds until the condition held. Past the deadline the unit's journal says why it does not."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > seconds:
                status = self.host.run(f"systemctl status --no-pager --lines=0 {UNIT}").stdout
                pytest.fail(f"not within {seconds:.0f} s: {what}\n{status}\n{self.journal()}", pytrace=False)
            time.sleep(every)
        return time.monotonic() - begin

    def wait_until_serving(self, seconds: float = LOADED_S) -> float:
        return self.wait(
            f"{UNIT} active and answering",
            lambda: self.unit("ActiveState")["ActiveState"] == "active" and self.health() == 200,
            seconds,
        )


@pytest.fixture(scope="session")
def machine(host: Host) -> Machine:
    return Machine(host)


@dataclass(frozen=True)
class Life:
    """What tells one run of a container from the next."""

    id: str
    started_at: str


def life(machine: Machine, name: str = CONTAINER) -> Life | None:
    found = machine.container(name)
    return Life(found["Id"], found["State"]["StartedAt"]) if found and found["State"]["Running"] else None


@pytest.fixture(scope="session")
def bystander(machine: Machine) -> Iterator[Life]:
    """Somebody else's container, which must never notice us. It lives through healing and faults."""
    image = machine.run("docker", "image", "ls", "--quiet", "--filter=reference=*/vllm/vllm-openai").split()[0]
    machine.host.run(f"docker rm --force {BYSTANDER}")
    run = ["docker", "run", "--detach", f"--name={BYSTANDER}", "--stop-signal=SIGKILL", "--entrypoint=sleep"]
    machine.run(*run, image, "infinity")
    begun = life(machine, BYSTANDER)
    assert begun is not None
    yield begun
    machine.run("docker", "rm", "--force", BYSTANDER)


@pytest.fixture
def undisturbed(machine: Machine, bystander: Life) -> Iterator[None]:
    """Whatever the test does, the bystander's container goes on, and so do the engines beside the one it is about."""
    names = [BYSTANDER, *(engine.container for engine in ENGINES if engine is not VICTIM)]
    before = {name: life(machine, name) for name in names}
    assert before[BYSTANDER] is not None
    yield
    assert {name: life(machine, name) for name in names} == before, "somebody else's container was disturbed"


# ---- clients ----------------------------------------------------------------------------------------------------

AGREE_S = 2.0
"""Client and journal ask at other moments, the one every second or two, the other twice a second."""


class Clients:
    """Asks every role once a second, on the host, over whatever happens to the ssh connections."""

    LOG = "/var/tmp/role-client.jsonl"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def start(self, *options: str) -> None:
        self.machine.put("/usr/local/bin/ask.py", ASK)
        self.machine.put("/usr/local/bin/role_client.py", Path(role_client.__file__).read_text(), "0755")
        self.machine.run("rm", "--force", self.LOG)
        words = ["/usr/local/bin/role_client.py", "--log", self.LOG, *options]
        self.machine.run("systemd-run", "--quiet", "--collect", "--unit=role-client", *words)
        time.sleep(2)

    def stop(self, directory: Path) -> role_client.Recorded:
        self.machine.run("systemctl", "stop", "role-client")
        log = directory / "role-client.jsonl"
        log.write_text(self.machine.run("cat", self.LOG))
        return role_client.read(log)


def gaps_of(recorded: role_client.Recorded) -> dict[str, list[role_client.Gap]]:
    found: dict[str, list[role_client.Gap]] = {role: [] for role in ROLES}
    for gap in role_client.find_gaps(recorded):
        found[gap.role].append(gap)
    return found


def no_gap_beyond(
    journals: Sequence[Mapping[str, Any]], recorded: role_client.Recorded, away: Sequence[Sequence[str]]
) -> None:
    """What clients missed of each role is what the journal of each switch says, and there is nothing between them.

    A gap ends here when the question is asked that gets an answer. How long the first answer takes is no matter of the
    switch: it comes before or beside the warm-up.
    """
    found = gaps_of(recorded)
    inside: list[role_client.Gap] = []
    for journal, roles in zip(journals, away, strict=True):
        began, ended = role_client.get_span(journal)
        for role in ROLES:
            during = [gap for gap in found[role] if began - 1 <= gap.from_s <= ended + 1]
            inside += during
            told = journal["downtime"][role]["seconds"]
            if role not in roles:
                assert during == [] and told == 0, (journal["profile"], role, during, told)
                continue
            assert None not in [gap.answered_from_s for gap in during], during
            total = sum((gap.answered_from_s or 0.0) - gap.from_s for gap in during)
            assert abs(total - told) <= 2 * AGREE_S, (journal["profile"], role, during, told)
    assert [gap for gaps in found.values() for gap in gaps if gap not in inside] == []


# ---- the operator's Prometheus ----------------------------------------------------------------------------------

MONITORING = ROOT / "lab" / "generated" / LAB / "monitoring"
"""What `playbooks/monitoring.yml` writes; it goes with the lab."""
TARGETS = {"serving_targets": {"sentry": {"ttft_p95_s": 0.001, "itl_p95_s": 0.001}}}
"""Of the operator. Nothing answers so fast: whoever asks for this role finds it slow."""
# On the other machine: what Prometheus says to each path of its API, in a list as they came; an error is a text.
ASK_API = """
import json, sys, urllib.error, urllib.request
said = []
for path in json.load(sys.stdin):
    try:
        said.append(json.load(urllib.request.urlopen("http://127.0.0.1:9090/api/v1/" + path, timeout=60))["data"])
    except urllib.error.HTTPError as error:
        said.append(error.read().decode())
print(json.dumps(said))
"""


class Prometheus:
    """Prometheus of the distribution on a machine of its own, installed by the lines that were written for that."""

    def __init__(self, container: str) -> None:
        self.container = container

    def run(self, *words: str, text: str | None = None) -> str:
        command = [*docker_command(), "exec", "--interactive", self.container, *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def ask(self, *paths: str) -> list[Any]:
        return list(json.loads(self.run("python3", "-c", ASK_API, text=json.dumps(paths))))

    def query(self, *expressions: str, path: str = "query", **options: float) -> list[Any]:
        """What each expression finds; in place of what Prometheus refuses, its reason."""
        said = self.ask(*(f"{path}?" + urllib.parse.urlencode({"query": one, **options}) for one in expressions))
        return [one if isinstance(one, str) else one["result"] for one in said]

    def series(self, expression: str, **options: float) -> list[dict[str, Any]]:
        """Now, or as it was at `time`."""
        (found,) = self.query(expression, **options)
        assert isinstance(found, list), found
        return found

    def wait_until_up(self, engines: Iterable[str], seconds: float = 60) -> None:
        """Until these engines, the host and its gateway are all targets, and each answered the last scrape."""
        instances = [f"vllm-edge-{job} {INVENTORY_HOST}" for job in ("host", "gateway")]
        instances += [f"vllm-edge-engine {INVENTORY_HOST}/{engine}" for engine in engines]
        health, until = dict[str, str](), time.monotonic() + seconds
        while health != dict.fromkeys(instances, "up"):
            assert time.monotonic() < until, health
            (said,) = self.ask("targets?state=active")
            found = said["activeTargets"]
            health = {f"{one['labels']['job']} {one['labels']['instance']}": one["health"] for one in found}
            time.sleep(1)


@pytest.fixture(scope="session")
def prometheus(controller: Controller) -> Prometheus:
    play = controller.play(
        "playbooks/monitoring.yml",
        f"--extra-vars={json.dumps({'serving_monitoring_directory': str(MONITORING), **TARGETS})}",
    )
    assert play.rc == 0, play.output[-4000:]
    (lines,) = re.findall(r"^```sh\n(.*?)^```$", (MONITORING / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    prometheus = Prometheus(start_neighbour(Server(LAB, 0)))
    subprocess.run([*docker_command(), "cp", str(MONITORING), f"{prometheus.container}:/root/monitoring"], check=True)
    prometheus.run("bash", "-euc", f"cd /root/monitoring\n{lines}")
    return prometheus


@dataclass(frozen=True)
class Provoked:
    """Faults of the GPU and the engine that the tests meanwhile leave alone, and since when."""

    since: float
    alerts: tuple[str, ...] = ("VllmEdgeGpuForeignProcess", "VllmEdgeGpuOverBudget", "VllmEdgeCanaryFailed")


@pytest.fixture(scope="session")
def provoked(machine: Machine, prometheus: Prometheus) -> Provoked:
    """Each is an alert once it has been there for some minutes, which pass beside other tests."""
    spared = next(engine for engine in ENGINES if engine.slots == [2])
    machine.run("lab-gpu", "foreign", "start", "--gpu=2", "--mib=200")
    machine.run("lab-gpu", "fault", "set", "--gpu=2", "orphan=2048")
    machine.run("lab-gpu", "fault", "set", "--gpu=2", "engine-nan-logits")
    assert machine.host.run(f"vllm-edge canary {spared.name}").rc != 0
    machine.run("lab-gpu", "fault", "clear", "--gpu=2", "engine-nan-logits")
    return Provoked(time.time())
