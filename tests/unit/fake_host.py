# SPDX-License-Identifier: Apache-2.0
"""A host in this process: systemd as `systemctl` prints it, Docker, a clock that only sleeping moves, HTTP answers.

All of them under the real SwitchedHost: `Bench`.
"""

from __future__ import annotations

import errno
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.state import EngineState, Failure, write_state
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.gpu.owners import Owner
from ansible.module_utils.vllm_edge.names import TARGET
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.host import SwitchedHost
from ansible.module_utils.vllm_edge.switch.model import Done, Moves, PhaseFailed
from ansible.module_utils.vllm_edge.system.docker import Container, DockerAway, DockerRefused, DockerUnit
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.systemd import Ran, Systemd, SystemdError
from generations import activate, engine, put, rendered


class Clock:
    """Seconds pass where somebody sleeps; `at` says what happens meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, seconds: float, what: Callable[[], object]) -> None:
        self.events.append((self.now + seconds, what))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.events if event[0] <= self.now]
        self.events = [event for event in self.events if event[0] > self.now]
        for _, what in due:
            what()


class FakeSystemctl:
    """Stands in for the program: prints what the real one prints."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.units: dict[str, dict[str, str]] = {}
        """Properties of units, as far as a test gives them."""
        self.calls: list[list[str]] = []
        self.refuse: dict[str, str] = {}
        """By verb: what it says when it fails."""
        self.on: dict[str, Callable[[list[str]], None]] = {}
        """By verb: what an order does."""
        self.patience_s = 0.0
        """With the last order."""
        self.state = "running"
        self.busy = 0
        """So many questions fail, as while systemd executes itself again."""

    def unit(self, name: str, **values: object) -> None:
        self.units.setdefault(name, {}).update({key: str(value) for key, value in values.items()})

    def orders(self, verb: str) -> list[list[str]]:
        return [call[1:] for call in self.calls if call[0] == verb]

    def __call__(self, command: Sequence[str], timeout_s: float) -> Ran:
        assert command[0] == "systemctl"
        verb, *rest = command[1:]
        options = [word for word in rest if word.startswith("--") and word != "--"]
        names = [word for word in rest if not word.startswith("--")]
        if verb == "show":
            return self._show(names)
        if verb == "list-units":
            return Ran(0, "".join(f"{name} loaded active running A unit\n" for name in sorted(self.units)))
        if verb == "is-system-running":
            return Ran(0 if self.state == "running" else 1, f"{self.state}\n")
        self.calls.append([verb, *options, *names])
        self.patience_s = timeout_s
        if verb in self.refuse:
            return Ran(1, "", self.refuse[verb])
        if verb in self.on:
            self.on[verb](names)
        return Ran(0)

    def _show(self, names: Sequence[str]) -> Ran:
        if self.busy:
            self.busy -= 1
            return Ran(1, "", "Failed to get properties: Connection reset by peer")
        blocks = []
        for name in names:
            values = self.units.get(name, {})
            shown = {"LoadState": "loaded" if values else "not-found", "ActiveState": "inactive", "SubState": "dead"}
            blocks.append("".join(f"{key}={value}\n" for key, value in {**shown, **values, "Id": name}.items()))
        return Ran(0, "\n".join(blocks))


def never(command: Sequence[str], timeout_s: float) -> Ran:
    raise SystemdError(f"'{' '.join(command)}' did not end within {timeout_s:g} s")


class FakeDocker:
    def __init__(self) -> None:
        self.away = ""
        self.containers: list[Container] = []
        self.images: dict[str, str] = {"vllm-edge/vllm:1": "sha256:11"}
        self.removed: list[str] = []
        self.killed: list[str] = []
        self.refuse_remove = ""

    def engine(self, name: str, input_hash: str = "h", state: str = "running") -> Container:
        labels = {"vllm-edge.engine": name, "vllm-edge.input-hash": input_hash}
        made = Container(f"id-{name}", f"vllm-{name}", state, labels)
        self.containers.append(made)
        return made

    def _answer(self) -> None:
        if self.away:
            raise DockerAway(self.away)

    def ping(self, timeout_s: float) -> None:
        self._answer()

    def find(self, name: str) -> Container | None:
        self._answer()
        return next((one for one in self.containers if one.name == name), None)

    def listed(self) -> list[Container]:
        self._answer()
        return list(self.containers)

    def image_id(self, name: str) -> str | None:
        self._answer()
        return name if name in self.images.values() else self.images.get(name)

    def kill(self, container_id: str) -> None:
        self._answer()
        self.killed.append(container_id)

    def remove(self, container_id: str) -> None:
        self._answer()
        if self.refuse_remove:
            raise DockerRefused(self.refuse_remove)
        self.removed.append(container_id)
        self.containers = [container for container in self.containers if container.id != container_id]


class Http:
    """Answers by the path of the question, or of one address; remembers what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, url: str, path: str, timeout_s: float, *, method: str = "GET", payload: Any = None) -> Answer:
        self.asked.append((url, path, payload))
        answer = self.answers.get(url + path, self.answers.get(path, Answer(None, error="connection refused")))
        return answer(payload) if callable(answer) else answer


def ok(body: object) -> Answer:
    return Answer(200, (body if isinstance(body, str) else json.dumps(body)).encode())


def models(*names: str) -> Answer:
    return ok({"data": [{"id": name} for name in names]})


class SmallDisk:
    """A real disk of 3 MiB below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.filler = path / "filler"

    def fill(self) -> None:
        with self.filler.open("ab", buffering=0) as file:
            for size in (65536, 4096):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError as error:
                    assert error.errno == errno.ENOSPC


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


class Bench:
    """The host of a switch, of which only files, processes and GPUs are real. `kinds` says whose each process is."""

    def __init__(self, root: Path) -> None:
        self.paths = HostPaths(root / "etc", root / "state", root / "units", root / "run")
        self.clock, self.docker, self.http = Clock(), FakeDocker(), Http()
        self.systemctl = FakeSystemctl(self.clock)
        self.docker_runs = True
        self.kinds: dict[int, Owner] = {}
        self.machine = SwitchedHost(
            self.paths,
            systemd=Systemd(self.systemctl),
            docker=self.docker,
            docker_unit=lambda: DockerUnit(self.docker_runs, "1"),
            owners=self.owners,
            ask=self.http,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def owners(self, pids: Iterable[int]) -> Mapping[int, Owner]:
        return {pid: self.kinds.get(pid, Owner("foreign")) for pid in pids}

    def ours(self, pid: int, name: str = "e2b") -> None:
        self.kinds[pid] = Owner("ours", f"vllm-{name}", f"vllm-{name}.service")

    def let_pass(self, *steps: str) -> None:
        """Every engine that serves passes these of its steps."""
        for step in steps:
            setattr(self.machine, step, lambda *_, **__: Done(data={"canary": ()}))

    def stored(self, *engines: Any, **more: Any) -> Generation:
        return store.load(self.paths, put(self.paths, rendered(*engines, **more)))

    def live(self, *engines: Any, **more: Any) -> Generation:
        """Stored, committed, and with its files in place."""
        return store.load(self.paths, activate(self.paths, rendered(*engines, **more)))


def failure(act: Callable[[], object]) -> PhaseFailed:
    """The failure of a phase."""
    with pytest.raises(PhaseFailed) as failed:
        act()
    return failed.value


OOM = Failure("2026-11-21T03:00:00Z", 1, "oom", "the GPU has too little memory", "Lower max_num_seqs", "loading", [])


class ServingHost(Bench):
    """A generation with e2b, committed and serving, and everything that a test can change of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.paths.units.mkdir(parents=True)
        self.generation = self.live(engine("e2b"))
        self.serve("e2b")
        self.systemctl.unit(TARGET, ActiveState="active", SubState="active", UnitFileState="enabled")

    def serve(self, name: str, **values: object) -> None:
        unit = f"vllm-{name}.service"
        shown = {"ActiveState": "active", "SubState": "running", "InvocationID": f"{name}-1", "NRestarts": 0}
        self.systemctl.unit(unit, FragmentPath=self.paths.unit_file(unit), **(shown | values))
        self.docker.engine(name, self.generation.hashes.get(name, "other"))

    def loads(self, name: str, *later: tuple[float, dict[str, object]], **values: object) -> None:
        """systemd shows that the engine loads, except for these values; and `later`, after so many seconds, others."""
        shown = {"ActiveState": "activating", "SubState": "start", "InvocationID": f"{name}-2", "Job": 0}
        self.systemctl.unit(f"vllm-{name}.service", **(shown | values))
        for after_s, others in later:
            self.clock.at(after_s, functools.partial(self.loads, name, **others))

    def generation_with(self, *names: str) -> Generation:
        return self.stored(*(engine(name, 8050 + at) for at, name in enumerate(names)), profile="other")

    def on_stop(
        self,
        state: str = "inactive",
        *,
        containers: Sequence[Container] | None = None,
        during: Callable[[], object] = lambda: None,
    ) -> None:
        """What an order to stop does to the units; `containers` are left then."""

        def stop(names: list[str]) -> None:
            during()
            for name in names:
                self.systemctl.unit(name, ActiveState=state, SubState="dead")
            if containers is not None:
                self.docker.containers = list(containers)

        self.systemctl.on["stop"] = stop

    def wait_for_kill(self, limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not self.docker.killed and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self, *engines: str) -> Done:
        return self.machine.stop(Moves(stop=engines or ("e2b",)))

    def failed(self, name: str, failure: Failure = OOM, phase: str = "failed") -> None:
        state = EngineState(name, phase, failure.time, input_hash="h", last_failure=failure)
        write_state(self.paths.engine_state(name), state)
