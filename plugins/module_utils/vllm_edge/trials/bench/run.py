# SPDX-License-Identifier: Apache-2.0
"""One run of the benchmark: checks that it may run, measures engine after engine, records and compares."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...answers.engines import choose_engines, describe_engine
from ...engine.config import Engine, EngineConfig
from ...engine.metrics import requests_in_work
from ...engine.state import read_state, stamp
from ...gateway.clients import GatewayError
from ...gateway.describe import list_addresses
from ...gateway.sync import CONFIGURATION, is_installed
from ...generation.model import Generation
from ...gpu.driver import module_version
from ...paths import HostPaths
from ...switch.steps.gpu_memory import load_slots
from ...system.docker import Container, DockerAway, DockerEngine, DockerRefused
from ...system.files import make_directories
from ...system.http import request
from ...system.long_run import CommandRefused, LongRun
from ...system.records import read_record
from ...weights.record import WeightsError, load_record
from ..sidecar import Sidecar, SidecarError, run_sidecar
from . import program
from .cases import Options, Step, build_steps, find_max_num_seqs
from .client import temporary_client
from .compare import Reference, find_findings, list_incomparable, read_reference
from .model import (
    End,
    EngineRecord,
    GpuFigures,
    Measurement,
    Percentiles,
    Recorded,
    Run,
    Through,
    Verdict,
    add_record,
    list_files,
    prune_runs,
    read_runs,
)
from .sampling import Sample, Sampler, find_kv_peak, open_sampler, subtract, summarize_gpu

ASK_S = 5.0
IMPORT_S = 300.0
"""Seconds that vLLM may take to be imported in the container, and a step to send its first request."""
PREVIOUS = 20
"""Former runs that a run is compared with, newest first."""


def describe(engine: Engine, paths: HostPaths, slots: Mapping[str, int]) -> EngineRecord:
    config, state = engine.config, read_state(paths.engine_state(engine.config.engine))
    record = None
    with contextlib.suppress(OSError, WeightsError):
        record = load_record(Path(config.weights_record)) if config.weights_record else None
    return read_record(
        EngineRecord,
        {
            **describe_engine(engine),
            "gpus": config.gpus,
            "slots": [slots[uuid] for uuid in config.gpus if uuid in slots],
            "weights_digest": record.manifest_sha256 if record else None,
            "max_model_len": config.max_model_len,
            "plan": config.plan,
            "load_seconds": state.load_seconds if state else None,
            "load_phases": (state.load_phases if state else None) or None,
        },
    )


def ask_version(config: EngineConfig) -> str:
    answer = request(config.url, "/version", ASK_S)
    with contextlib.suppress(ValueError, AttributeError):
        return str(answer.json().get("version", "")) if answer.ok else ""
    return ""


@contextlib.contextmanager
def relay_to_gateway(paths: HostPaths) -> Iterator[Path]:
    """Relay a socket in a directory of its own to the gateway, and yield the directory.

    Raises CommandRefused: the gateway has no address that this host reaches.
    """
    addresses = list_addresses((paths.gateway / CONFIGURATION).read_text(encoding="utf-8"))
    if not addresses:
        raise CommandRefused("The gateway listens on no address; serving_gateway_listen names them.")
    parts = urlsplit(min(addresses, key=lambda url: (not url.startswith("http://"), addresses.index(url))))
    host = parts.hostname or ""
    if host in ("*", str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))):
        host = "::1" if ":" in host else "127.0.0.1"
    context = None
    if parts.scheme == "https":
        # The certificate is for the host's name, and the connection stays on this host.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    place = paths.run / "companions" / "bench-gateway"
    shutil.rmtree(place, ignore_errors=True)
    make_directories(place)
    end = program.start_relay(place / "api.sock", (host, parts.port or 80), context)
    try:
        (place / "api.sock").chmod(0o666)
        yield place
    finally:
        end()
        shutil.rmtree(place, ignore_errors=True)


@dataclass
class Bench:
    """One run over some engines, and what it has recorded by now."""

    paths: HostPaths
    options: Options
    generation: Generation
    engines: Mapping[str, Engine]
    docker: DockerEngine
    long_run: LongRun
    reference: Sequence[Reference] = ()

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._names_measured: set[str] = set()
        self.slots = {slot.uuid: number for number, slot in enumerate(load_slots(self.paths))}
        self.measurements: list[Measurement] = []
        at = stamp()
        first = next(iter(self.engines.values())).config
        self.description = Run(
            run=f"{at.replace('-', '').replace(':', '')}-{self.generation.profile}",
            at=at,
            host=socket.gethostname(),
            profile=self.generation.profile,
            generation=self.generation.number,
            image=first.image,
            image_id=first.image_id,
            vllm=ask_version(first),
            driver=module_version(Path("/")) or None,
            engines={name: describe(engine, self.paths, self.slots) for name, engine in self.list_measured().items()},
            note=self.options.note,
            gateway=is_installed(self.paths),
            cases=(*self.options.case, *(["soak"] if self.options.soak_minutes else [])),
            asked_by=self.options.asked_by,
        )
        self.path = self.paths.bench / f"{self.description.run}.jsonl"

    def run(self) -> tuple[Recorded, list[str]]:
        """Measure everything, and return what is recorded, and sentences on what could not be compared, and why."""
        former = list_files(self.paths)[::-1][:PREVIOUS]
        add_record(self.path, self.description)
        error = ""
        try:
            for name, engine in self.engines.items():
                for through in self.options.ways:
                    if through == "engine" or self.description.gateway:
                        self._measure(name, engine, through)
        except CommandRefused as failed:
            error = f"The benchmark ended early: {str(failed).rstrip('.')}."
        except GatewayError as refused:
            error = f"The benchmark ended early: {refused}"
        except OSError as failed:
            error = f"The benchmark ended early: {failed}."
        except KeyboardInterrupt as asked:
            error = f"The benchmark was interrupted{f' by {asked}' if str(asked) else ''}."
        compared = (self.description, self.measurements, read_runs(former), self.reference)
        findings = find_findings(*compared, self.options.tolerance_percent)
        verdict: Verdict = "interrupted" if error else "findings" if findings else "passed"
        end = End(stamp(), round(time.monotonic() - self._began, 1), verdict, error, tuple(findings))
        add_record(self.path, end)
        prune_runs(self.paths, self.path)
        return Recorded(self.description, tuple(self.measurements), end), list_incomparable(*compared)

    def _measure(self, name: str, engine: Engine, through: Through) -> None:
        """Measure an engine, or through the gateway all engines of its name. Raises SidecarError, KeyboardInterrupt."""
        config, options = engine.config, self.options
        configs = [config]
        if through == "gateway":
            # The gateway is asked for a name: once, however many engines it has.
            if config.served_names[0] in self._names_measured:
                return
            self._names_measured.add(config.served_names[0])
            replicas = self._find_replicas(engine)
            configs += [self.generation.engines[other].config for other in replicas if other != name]
        if through == "gateway" and options.through == "both":
            # What the gateway adds is seen in the protocol.
            protocol = tuple(case for case in options.case if case == "protocol")
            options = replace(options, case=protocol, soak_minutes=0.0)
        most = find_max_num_seqs(engine.vllm_arguments)
        steps = build_steps(options, max_model_len=config.max_model_len, max_num_seqs=most)
        if len(steps) == 1 or config.socket is None:
            return
        weights = Path(config.weights_path)
        job = {
            "steps": list(map(asdict, steps)),
            "model": config.served_names[0],
            "tokenizer": f"/models/{weights.name}",
        }
        files, sockets = {"steps.json": json.dumps(job).encode()}, config.socket.parent
        with contextlib.ExitStack() as stack:
            if through == "gateway":
                sockets = stack.enter_context(relay_to_gateway(self.paths))
                files["key"] = stack.enter_context(temporary_client(self.paths)).encode()
            measuring = Measuring(self, configs, through, steps, stack.enter_context(open_sampler(configs)))
            ended = run_sidecar(
                Sidecar(
                    "bench",
                    config.image_id or config.image,
                    engine.uid,
                    Path(program.__file__).read_text(encoding="utf-8"),
                    weights=weights,
                    sockets={"api": sockets},
                    files=files,
                ),
                self.docker,
                self.paths,
                timeout_s=max(1.0, self._began + 60 * self.options.limit_minutes - time.monotonic()),
                on_line=measuring.read,
                find_trouble=measuring.find_trouble,
            )
            if trouble := measuring.find_trouble():
                raise SidecarError(trouble)
            if ended.status != 0:
                raise SidecarError(f"The benchmark's program ended with status {ended.status}: {ended.lines[-3:]}")
            if measuring.open_steps or not self.measurements:
                raise SidecarError("The lines with measurements were lost, although the program ended well.")

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        add_record(self.path, measurement)
        self.long_run.say(describe_measurement(measurement))

    def list_measured(self) -> dict[str, Engine]:
        """Return the engines, and those with which the gateway shares their requests, if that is asked."""
        names = dict.fromkeys(self.engines)
        if "gateway" in self.options.ways and is_installed(self.paths):
            names |= dict.fromkeys(name for engine in self.engines.values() for name in self._find_replicas(engine))
        return {name: self.generation.engines[name] for name in names}

    def _find_replicas(self, engine: Engine) -> tuple[str, ...]:
        """Return the engines of the name by which this one is asked; it is one of them."""
        return self.generation.roles[engine.config.served_names[0]]


@dataclass
class Measuring:
    """Turns the lines of the container's program into measurements. Raises SidecarError if an engine runs not."""

    bench: Bench
    configs: Sequence[EngineConfig]
    """Those that the requests reach."""
    through: Through
    steps: Sequence[Step]
    sampler: Sampler
    open_steps: int = 0
    """Steps that began and of which no measurement came."""

    def __post_init__(self) -> None:
        self._began = self._find_containers()
        for name, container in self._began.items():
            if container is None:
                raise SidecarError(f"Engine {name} does not run; `vllm-edge explain {name}` says why.")

    def find_trouble(self) -> str:
        """Return why the engine can no longer be measured; empty if it can. Raises SidecarError."""
        if trouble := self.bench.long_run.find_trouble():
            return trouble
        for name, now in self._find_containers().items():
            began = self._began[name]
            # The same container may have been started again.
            if now is None or began is None or (now.id, now.started_at) != (began.id, began.started_at):
                return (
                    f"engine {name} no longer runs in the container that it began with; `vllm-edge explain {name}` "
                    "says why"
                )
        if problem := self.sampler.find_problem():
            return f"engine {self._label} cannot be measured: {problem}"
        # Each step of an engine moves a figure, and its supervisor gives one as long.
        if (still := self.sampler.get_still_s()) >= max(IMPORT_S, *(one.progress_timeout_s for one in self.configs)):
            return f"engine {self._label} has made no progress with the benchmark's requests for {still:.0f} s"
        return ""

    @property
    def _label(self) -> str:
        return " + ".join(config.engine for config in self.configs)

    def _find_containers(self) -> dict[str, Container | None]:
        """Return the engines' containers that run. Raises SidecarError."""
        found = {}
        for config in self.configs:
            try:
                container = self.bench.docker.find(config.container)
            except (DockerAway, DockerRefused) as error:
                raise SidecarError(
                    f"Docker does not say whether engine {config.engine} still runs: {error}."
                ) from error
            found[config.engine] = container if container is not None and container.running else None
        return found

    def read(self, line: str) -> None:
        """Read one line of the program: a step begins, or has ended."""
        if not line.startswith(program.MARK):
            return
        data = json.loads(line.removeprefix(program.MARK))
        step = self.steps[data["step"]]
        if data["what"] == "begin":
            self.open_steps += 1
            self.sampler.begin()
            self.bench.long_run.say(f"{self._label} through {self.through}: {describe_step(step)}")
        else:
            self.bench.add(self._build(step, data, self.sampler.end()))
            self.open_steps -= 1

    def _build(self, step: Step, data: Mapping[str, Any], samples: Sequence[Sample]) -> Measurement:
        seconds, tokens = data.get("seconds") or 0.0, data.get("output_tokens") or 0
        # vLLM's command first reads the tokenizer and makes prompts; it ends with the last answer.
        ended = samples[-1].at - program.SETTLE_S
        busy = (ended - seconds, ended)
        uuids = dict.fromkeys(uuid for config in self.configs for uuid in config.gpus)
        gpus = tuple(summarize_gpu(uuid, self.bench.slots.get(uuid), samples, busy) for uuid in uuids)
        completed = data.get("completed") or 0
        times: dict[str, Any] = {
            f"{key}_ms": Percentiles(**{name: round(value, 2) for name, value in data[key].items()})
            for key in ("ttft", "itl", "e2e")
            if data.get(key)
        }
        totals: dict[str, Any] = {
            name: subtract(samples, name) for name in ("preemptions", "prefix_hits", "prefix_queries")
        }
        finished = subtract(samples, "finished")
        return Measurement(
            at=stamp(),
            engine=self.configs[0].engine,
            served_name=self.configs[0].served_names[0],
            through=self.through,
            case=step.case,
            input_tokens=step.input_tokens,
            output_tokens=step.output_tokens,
            concurrency=step.concurrency,
            requests=step.requests,
            completed=completed,
            failed=step.requests if data.get("error") else step.requests - completed,
            seconds=round(seconds, 3),
            tok_s=round(tokens / seconds, 2) if seconds else 0.0,
            decode_tok_s=round(1000 / data["tpot_ms"], 2) if data.get("tpot_ms") else None,
            **times,
            kv_use_peak=find_kv_peak(samples),
            **totals,
            other_requests=None if finished is None else max(0, finished - completed),
            gpus=gpus,
            joules_per_token=_divide_energy(gpus, tokens),
            error=str(data.get("error", "")),
            with_engines=tuple(config.engine for config in self.configs[1:]),
        )


def _divide_energy(gpus: Sequence[GpuFigures], tokens: int) -> float | None:
    """Return joules for each token; None if a GPU does not report its energy."""
    joules = [gpu.joules for gpu in gpus]
    return None if not tokens or not joules or None in joules else round(sum(filter(None, joules)) / tokens, 3)


def describe_step(step: Step) -> str:
    at_once = "one stream" if step.concurrency == 1 else f"{step.concurrency} at once"
    return f"{step.case}, {step.input_tokens} + {step.output_tokens} tokens, {at_once}"


def describe_measurement(measurement: Measurement) -> str:
    if measurement.error:
        return f"{measurement.label}: {measurement.case} has no figures: {measurement.error}"
    return (
        f"{measurement.label}: {measurement.case} {measurement.output_tokens} tokens x {measurement.concurrency}: "
        f"{measurement.tok_s:.1f} tok/s"
    )


def prepare(paths: HostPaths, options: Options, docker: DockerEngine, long_run: LongRun) -> Bench:
    """Check that the benchmark may run, and return it. Raises CommandRefused."""
    try:
        reference = read_reference(json.loads(Path(options.reference).read_text()) if options.reference else [])
    except (OSError, ValueError) as error:
        raise CommandRefused(
            f"The table of reference measurements (bench_reference) cannot be used: {error}."
        ) from error
    if os.geteuid() != 0:
        raise CommandRefused(
            "The benchmark starts containers and opens the engines' sockets, which only root may: sudo."
        )
    generation, engines = choose_engines(paths, options.engine)
    bench = Bench(paths, options, generation, engines, docker, long_run, reference)
    for name, engine in bench.list_measured().items():
        answer = request(engine.config.url, "/metrics", ASK_S)
        if not answer.ok:
            raise CommandRefused(f"Engine {name} does not serve ({answer.words()}); `vllm-edge status` says why.")
        busy = requests_in_work(answer.body.decode("utf-8", "replace"))
        if busy and not options.allow_load:
            raise CommandRefused(
                f"Engine {name} works on {busy} requests of clients. A benchmark would slow them down, and they would "
                "spoil its figures. Run it when they have ended, or with --allow-load (bench_allow_load=true)."
            )
    return bench
