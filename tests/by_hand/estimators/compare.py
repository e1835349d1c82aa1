#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What this planner and other people's estimators say of the same checkpoints, side by side, as Markdown.

    compare.py --image IMAGE [--scratch DIR] [--only NAME...]

Checkpoints of the released sizes, headers without weights, are made in the engine image (lab/models/real_shapes.py) and
served on loopback by the lab's hub. Every estimator is the published program, unchanged: those of requirements.txt in a
virtual environment of their own, accelerate in the engine image, which has torch and transformers. For all of them
huggingface.co is this hub: by HF_ENDPOINT, and for those that have the address written into them by a proxy that ends
their TLS with a certificate made for this run. It knows no other host. The planner reads the hub as
playbooks/record_facts.yml does.

Everything is kept in --scratch (~/.cache/vllm-edge-estimators) and made once; remove it to begin anew. Needs Docker,
openssl and, the first time, a package index. Figures are compared with references.yml and, for the KV cache, with what
vLLM's own functions answered (tests/unit/planning/kv_oracle.yaml).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import socket
import socketserver
import ssl
import statistics
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import ansible.module_utils
import ansible.modules
import yaml

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
ansible.modules.__path__.append(str(ROOT / "plugins" / "modules"))

from ansible.module_utils.vllm_edge.planning import families, kv_cache, overhead, planner, weights
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Gpu, Model
from ansible.modules.model_facts import from_hub

from lab.docker import docker_command
from lab.hub.server import Hub

GIB = 2**30
HUB_HOST = "huggingface.co"
VLLM = "0.19.0"
"""Of the modelled figures and of the reference host's; a logged one may be another release's."""
L4 = Gpu("NVIDIA L4", 23_659_151_360)
L4_GIB = "22"
"""CUDA's total of an L4 for those who take whole GiB: 22.03."""
TIMEOUT_S = 120

REFERENCES = yaml.safe_load((HERE / "references.yml").read_text())
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = REFERENCES["checkpoints"]
ORACLE: Mapping[str, Any] = yaml.safe_load((ROOT / "tests/unit/planning/kv_oracle.yaml").read_text())


# ---- what is asked, and what comes back --------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What one checkpoint takes of each GPU."""

    repo: str
    tensor_parallel_size: int = 1
    max_model_len: int = 4096
    fp8_kv_cache: bool = False
    gpu_memory_utilization: float = 0.9

    @property
    def precision(self) -> str:
        return str(CHECKPOINTS[self.repo]["precision"])


@dataclass(frozen=True)
class Answer:
    """GiB: of one GPU, or of all together where the estimator knows of no parallelism."""

    weights: float | None = None
    kv_cache: float | None = None
    """One request of max_model_len tokens, over all GPUs."""
    left_for_kv_cache: float | None = None
    """On one GPU."""
    failure: str = ""


@dataclass(frozen=True)
class Estimator:
    name: str
    command: Callable[[Question], Sequence[str]]
    parse: Callable[[str], Answer]
    """Raises ValueError, KeyError or IndexError where the output has no figure."""
    in_image: bool = False
    parallel: bool = False
    """Whether it knows of tensor parallelism."""
    kv_cache: bool = True


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"its output has no {pattern!r}")
    return float(found[1].replace(",", ""))


def hf_mem(question: Question) -> list[str]:
    dtype = "fp8" if question.fp8_kv_cache else "bfloat16"
    length = str(question.max_model_len)
    words = ["hf-mem", "--model-id", question.repo, "--experimental", "--json-output", "--kv-cache-dtype", dtype]
    return [*words, "--max-model-len", length]


def parse_hf_mem(text: str) -> Answer:
    answer = json.loads(text[text.index("{") :])
    kv = answer["kv_cache"]
    return Answer(answer["memory"] / GIB, None if kv is None else kv / GIB)


def accelerate(question: Question) -> list[str]:
    dtype = {"bf16": "float16", "fp8": "int8"}.get(question.precision, "int4")
    module = "accelerate.commands.accelerate_cli"
    return [
        "python3",
        "-m",
        module,
        "estimate-memory",
        question.repo,
        "--library_name",
        "transformers",
        "--dtypes",
        dtype,
    ]


def parse_accelerate(text: str) -> Answer:
    row = next(line for line in text.splitlines() if re.search(r"\b(float16|int8|int4)\b", line) and "│" in line)
    size, unit = row.split("│")[3].split()
    return Answer(float(size) * {"KB": 2**10, "MB": 2**20, "GB": 2**30}[unit] / GIB)


def llm_d_planner(question: Question) -> list[str]:
    ranks, length = str(question.tensor_parallel_size), str(question.max_model_len)
    words = ["planner", "plan", "--model", question.repo, "--gpu-memory", L4_GIB, "--tp", ranks]
    return [*words, "--max-model-len", length, "--gpu-mem-util", str(question.gpu_memory_utilization)]


def parse_llm_d_planner(text: str) -> Answer:
    answer = json.loads(text[text.index("{") :])
    ranks = answer["input_parameters"]["tp"]
    return Answer(
        answer["per_gpu_model_memory_gb"],
        answer["kv_cache_detail"]["per_request_kv_cache_gb"],
        answer["allocatable_kv_cache_memory_gb"] / ranks,
    )


def llm_mem(question: Question) -> list[str]:
    dtype = {"bf16": "float16", "fp8": "float8"}.get(question.precision, "int4")
    if question.fp8_kv_cache:
        # It has one dtype for weights and KV cache.
        dtype = "float8"
    return ["llm-mem", "-m", question.repo, "-d", dtype, "-c", str(question.max_model_len)]


def parse_llm_mem(text: str) -> Answer:
    weights_gb = number(r"Model VRAM: ([\d.]+) GB", text)
    return Answer(weights_gb * 1e9 / GIB, number(r"Context VRAM: ([\d.]+) GB", text) * 1e9 / GIB)


def llm_x(question: Question) -> list[str]:
    words = ["llm-x", "-m", question.repo, "-c", str(question.max_model_len)]
    return [*words, *(["--kv-quant", "fp8"] if question.fp8_kv_cache else [])]


def parse_llm_x(text: str) -> Answer:
    return Answer(
        number(r"Weights Usage:\s+([\d.,]+) GiB", text), number(r"KV Cache \([\d.,]+\):\s+([\d.,]+) GiB", text)
    )


def llm_resource_planner(question: Question) -> list[str]:
    return ["llm-plan", question.repo]


def parse_llm_resource_planner(text: str) -> Answer:
    return Answer(number(r"Memory \(Weights\): ([\d.]+) GB", text))


ESTIMATORS = (
    Estimator("hf-mem", hf_mem, parse_hf_mem),
    Estimator("accelerate", accelerate, parse_accelerate, in_image=True, kv_cache=False),
    Estimator("llm-d-planner", llm_d_planner, parse_llm_d_planner, parallel=True),
    Estimator("llm-mem", llm_mem, parse_llm_mem),
    Estimator("llm-x-py", llm_x, parse_llm_x),
    Estimator("llm-resource-planner", llm_resource_planner, parse_llm_resource_planner, kv_cache=False),
)


# ---- the hub, under its real name --------------------------------------------------------------------------------


class Front(socketserver.ThreadingTCPServer):
    """A proxy that is huggingface.co: it ends TLS and passes what comes on to the hub. Other hosts are refused."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, hub_port: int, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.hub_port, self.context = hub_port, context


class Tunnel(socketserver.StreamRequestHandler):
    server: Front

    def handle(self) -> None:
        words = self.rfile.readline().decode("latin-1").split()
        while self.rfile.readline().strip():
            pass
        if words[:2] != ["CONNECT", f"{HUB_HOST}:443"]:
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with (
            contextlib.suppress(OSError),
            self.server.context.wrap_socket(self.connection, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self.server.hub_port)) as hub,
        ):
            answers = threading.Thread(target=pump, args=(hub, client), daemon=True)
            answers.start()
            pump(client, hub)
            answers.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def certificate(scratch: Path) -> tuple[Path, Path]:
    """A certificate for the hub's name, its own authority, and its key."""
    key, cert = scratch / "hub.key", scratch / "hub.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HUB_HOST}"]
    words += ["-addext", f"subjectAltName=DNS:{HUB_HOST}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


@contextlib.contextmanager
def serving(checkpoints: Path, scratch: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The hub's address, and the environment in which a program takes it for huggingface.co."""
    cert, key = certificate(scratch)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(checkpoints, 0, "127.0.0.1", scratch / "state"))
        hub.log = io.StringIO()
        front = stack.enter_context(Front(hub.server_address[1], context))
        for server in (hub, front):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        url = f"http://127.0.0.1:{hub.server_address[1]}"
        yield (
            url,
            {
                "HF_ENDPOINT": url,
                "HTTPS_PROXY": f"http://127.0.0.1:{front.server_address[1]}",
                "NO_PROXY": "127.0.0.1",
                "SSL_CERT_FILE": str(cert),
                "REQUESTS_CA_BUNDLE": str(cert),
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "PYTHONWARNINGS": "ignore",
                "COLUMNS": "200",
                "TERM": "xterm-256color",
            },
        )


# ---- running them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Where estimators run."""

    scratch: Path
    image: str
    environment: Mapping[str, str]
    url: str
    _answers: dict[tuple[str, ...], Answer] = field(default_factory=dict)

    def ask(self, estimator: Estimator, question: Question) -> Answer:
        words = tuple(estimator.command(question))
        if words not in self._answers:
            self._answers[words] = self.run(estimator, words)
        return self._answers[words]

    def run(self, estimator: Estimator, words: Sequence[str]) -> Answer:
        home = self.scratch / "home"
        home.mkdir(exist_ok=True)
        environment = {
            **self.environment,
            "HOME": str(home),
            "PATH": f"{self.scratch / 'venv/bin'}:{os.environ['PATH']}",
        }
        if estimator.in_image:
            cert = self.environment["SSL_CERT_FILE"]
            command = [
                *docker_command(),
                "run",
                "--rm",
                "--network=host",
                "--tmpfs=/tmp:exec,mode=1777",
                "--workdir=/tmp",
            ]
            command += [f"--user={os.getuid()}:{os.getgid()}", f"--volume={cert}:{cert}:ro"]
            command += [f"--volume={self.scratch / 'image'}:/estimators:ro", "--env=PYTHONPATH=/estimators"]
            command += ["--env=HOME=/tmp", *(f"--env={name}={value}" for name, value in self.environment.items())]
            words = [*command, f"--entrypoint={words[0]}", self.image, *words[1:]]
            environment = dict(os.environ)
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Answer(failure=f"no answer within {TIMEOUT_S} s")
        output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
        try:
            return estimator.parse(output)
        except (ValueError, KeyError, IndexError, StopIteration):
            return Answer(failure=last_words(output, done.stderr))


def last_words(*outputs: str) -> str:
    """The line of an output that most likely says what went wrong."""
    lines = [line.strip(" │|╰─╯") for output in outputs for line in output.splitlines()]
    said = [line for line in lines if re.search(r"error|not |unsupported|missing", line, re.IGNORECASE)]
    return re.sub(r"\s+", " ", (said or [line for line in lines if line] or ["no output"])[-1])[:200]


def prepare(scratch: Path, image: str) -> Path:
    """Virtual environment, accelerate and checkpoints; returns the directory of these."""
    scratch.mkdir(parents=True, exist_ok=True)
    if not (scratch / "venv/.complete").exists():
        venv.create(scratch / "venv", with_pip=True, clear=True)
        install(scratch, "-r", str(HERE / "requirements.txt"))
        # Its dependencies, torch among them, are in the image.
        install(scratch, "--no-deps", "--target", str(scratch / "image"), "-r", str(HERE / "requirements-image.txt"))
        (scratch / "venv/.complete").touch()
    checkpoints = scratch / "checkpoints"
    if not checkpoints.exists():
        words = [sys.executable, str(ROOT / "lab/models/build.py"), "--headers-only", "--image", image]
        subprocess.run([*words, "--out", str(checkpoints)], check=True)
    return checkpoints


def install(scratch: Path, *words: str) -> None:
    pip = [str(scratch / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *words], check=True)


# ---- this planner ------------------------------------------------------------------------------------------------


@cache
def model_of(repo: str, url: str) -> Model:
    return families.interpret(from_hub(repo, "main", url, None))


def planned_weights(model: Model, ranks: int) -> float:
    """GiB of each GPU as vLLM logs them: tensors, and what its allocator adds."""
    reference = CHECKPOINTS[model.facts.repo]
    version = reference.get("vllm", VLLM) if ranks in reference.get("logged", {}) else VLLM
    loaded = weights.per_rank(model, Arguments(tensor_parallel_size=ranks), version)
    return (loaded[0].bytes + overhead.ALLOCATOR_BYTES.value) / GIB


def planned_request(model: Model, case: Mapping[str, Any], version: str) -> float:
    """GiB of KV cache for one request over all GPUs, of what vLLM hands out: whole blocks of its groups."""
    arguments = Arguments(
        tensor_parallel_size=case["tensor_parallel_size"],
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        kv_cache_dtype="fp8" if case["kv_cache_dtype"] == "fp8" else "auto",
        block_size=case["block_size"],
        async_scheduling=True,
    )
    found = kv_cache.capacity(model, arguments, case["available_bytes"], version)
    return float(found.available_bytes / found.max_concurrency * case["tensor_parallel_size"] / GIB)


def planned_left(row: Mapping[str, Any], model: Model) -> float:
    """GiB of KV cache that an engine of the reference host has left on each GPU."""
    names = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager")
    ranks = row["tensor_parallel_size"]
    engine = {"name": "engine", "model": "model", "gpus": list(range(ranks)), **{name: row[name] for name in names}}
    plan = planner.plan("reference", [engine], {"model": model}, [L4] * ranks, VLLM)
    return plan.engines[0].gpus[0].kv_cache_bytes / GIB


# ---- tables ------------------------------------------------------------------------------------------------------


class Errors:
    """Deviations in percent, by column."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def cell(self, column: str, value: float | None, true: float, failure: str = "") -> str:
        if value is None:
            return f"failed: {failure}" if failure else ""
        error = (value / true - 1) * 100
        self.found.setdefault(column, []).append(error)
        return f"{value:,.2f} ({error:+.1f} %)"

    def rows(self, columns: Sequence[str], before: int) -> Iterator[list[str]]:
        """Median and largest deviation of each column."""
        for name, of in (("median deviation", statistics.median), ("largest deviation", max)):
            cells = [f"{of([abs(e) for e in self.found[c]]):.1f} %" if self.found.get(c) else "" for c in columns]
            yield [f"**{name}**", *[""] * before, *cells]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def failures(answers: Mapping[str, Sequence[Answer]]) -> str:
    """Why estimators failed, each reason once."""
    said = [f"{name}: {answer.failure}" for name, many in answers.items() for answer in many if answer.failure]
    # The same reason for another repository is not another reason.
    return "\n".join(f"* {line}" for line in dict.fromkeys(re.sub(r"`[\w.-]+/[\w.-]+`", "it", line) for line in said))


def weights_table(bench: Bench, chosen: Sequence[Estimator]) -> str:
    names = ["this planner", *(estimator.name for estimator in chosen)]
    errors, rows = Errors(), []
    for repo, reference in CHECKPOINTS.items():
        logged, modelled = reference.get("logged", {}).get(1), reference.get("modelled", [None])[0]
        true = logged or modelled
        own = errors.cell("this planner", planned_weights(model_of(repo, bench.url), 1), true)
        cells = [own + (" *" if reference.get("fitted") else "")]
        for estimator in chosen:
            answer = bench.ask(estimator, Question(repo))
            cells.append("failed" if answer.failure else errors.cell(estimator.name, answer.weights, true))
        rows.append([repo, str(logged or ""), str(modelled or ""), *cells])
    return table(["checkpoint", "logged", "modelled", *names], [*rows, *errors.rows(names, 2)])


def parallel_table(bench: Bench, chosen: Sequence[Estimator]) -> str:
    """Weights of each GPU over two and four; totals of those that know no parallelism are divided by hand."""
    names = ["this planner", *(e.name if e.parallel else f"{e.name} / GPUs" for e in chosen)]
    errors, rows = Errors(), []
    for repo, reference in CHECKPOINTS.items():
        for place, ranks in enumerate((1, 2, 4)):
            true = reference.get("logged", {}).get(ranks) or reference.get("modelled", [None] * 3)[place]
            if ranks == 1 or true is None:
                continue
            cells = [errors.cell("this planner", planned_weights(model_of(repo, bench.url), ranks), true)]
            for estimator, name in zip(chosen, names[1:], strict=True):
                answer = bench.ask(estimator, Question(repo, ranks if estimator.parallel else 1))
                divided = answer.weights and answer.weights / (1 if estimator.parallel else ranks)
                cells.append("failed" if answer.failure else errors.cell(name, divided, true))
            logged = " (logged)" if ranks in reference.get("logged", {}) else ""
            rows.append([repo, str(ranks), f"{true}{logged}", *cells])
    return table(["checkpoint", "GPUs", "reference", *names], [*rows, *errors.rows(names, 2)])


def request_table(bench: Bench, chosen: Sequence[Estimator]) -> str:
    """KV cache of one request of full length, over all GPUs; deviations are from the newest release in the oracle."""
    names = ["this planner", *(estimator.name for estimator in chosen)]
    errors, rows = Errors(), []
    # Cases that differ in the memory alone ask for the same request.
    for case in {of_case(case): case for case in reversed(ORACLE["cases"])}.values():
        repo, ranks = f"google/{case['model']}", case["tensor_parallel_size"]
        true = {
            version: case["available_bytes"] / answer["max_concurrency"] * ranks / GIB
            for version, answer in case["releases"].items()
            if answer.get("max_concurrency")
        }
        newest = max(true, key=lambda version: [int(part) for part in version.split(".")])
        cells = [errors.cell("this planner", planned_request(model_of(repo, bench.url), case, newest), true[newest])]
        question = of_case(case)
        for estimator in chosen:
            answer = bench.ask(estimator, question)
            cells.append("failed" if answer.failure else errors.cell(estimator.name, answer.kv_cache, true[newest]))
        said = [f"{true[version]:.2f}" if version in true else "" for version in ("0.19.0", "0.33.0")]
        length = f"{case['max_model_len']:,}"
        rows.append([case["model"], str(ranks), case["kv_cache_dtype"], length, *said, *cells])
    head = ["model", "GPUs", "KV cache", "tokens", "vLLM 0.19.0", "vLLM 0.33.0"]
    return table([*head, *names], [*rows, *errors.rows(names, 5)])


def left_table(bench: Bench, chosen: Sequence[Estimator]) -> str:
    names = ["this planner (fitted to it)", *(estimator.name for estimator in chosen)]
    errors, rows = Errors(), []
    for row in REFERENCES["left_for_kv_cache"]:
        question = of_row(row)
        cells = [errors.cell(names[0], planned_left(row, model_of(row["repo"], bench.url)), row["logged"])]
        for estimator in chosen:
            answer = bench.ask(estimator, question)
            left = answer.left_for_kv_cache
            cells.append("failed" if answer.failure else errors.cell(estimator.name, left, row["logged"]))
        rows.append([row["repo"], str(row["tensor_parallel_size"]), str(row["logged"]), *cells])
    return table(["checkpoint", "GPUs", "logged", *names], rows)


def versions(scratch: Path, chosen: Sequence[Estimator]) -> str:
    places = [str(path) for path in (*(scratch / "venv/lib").glob("python*/site-packages"), scratch / "image")]
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions(path=places)}
    return ", ".join(f"{estimator.name} {found[estimator.name]}" for estimator in chosen)


def questions(chosen: Sequence[Estimator]) -> Iterator[tuple[Estimator, Question]]:
    """Everything that the tables ask, those of the first table first."""
    yield from ((estimator, Question(repo)) for estimator in chosen for repo in CHECKPOINTS)
    parallel = [estimator for estimator in chosen if estimator.parallel]
    yield from (
        (estimator, Question(repo, ranks)) for estimator in parallel for repo in CHECKPOINTS for ranks in (2, 4)
    )
    with_kv = [estimator for estimator in chosen if estimator.kv_cache]
    yield from ((estimator, of_case(case)) for estimator in with_kv for case in ORACLE["cases"])
    yield from ((estimator, of_row(row)) for estimator in parallel for row in REFERENCES["left_for_kv_cache"])


def of_case(case: Mapping[str, Any]) -> Question:
    fp8 = case["kv_cache_dtype"] == "fp8"
    return Question(f"google/{case['model']}", case["tensor_parallel_size"], case["max_model_len"], fp8)


def of_row(row: Mapping[str, Any]) -> Question:
    return Question(
        row["repo"],
        row["tensor_parallel_size"],
        row["max_model_len"],
        gpu_memory_utilization=row["gpu_memory_utilization"],
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", required=True, help="engine image: makes the checkpoints, runs accelerate")
    parser.add_argument("--scratch", type=Path, default=Path.home() / ".cache/vllm-edge-estimators")
    parser.add_argument("--only", nargs="+", choices=[e.name for e in ESTIMATORS], help="these estimators alone")
    arguments = parser.parse_args(argv)
    scratch = arguments.scratch.resolve()
    chosen = [estimator for estimator in ESTIMATORS if not arguments.only or estimator.name in arguments.only]
    checkpoints = prepare(scratch, arguments.image)
    with serving(checkpoints, scratch) as (url, environment), ThreadPoolExecutor(2) as pool:
        bench = Bench(scratch, arguments.image, environment, url)
        # Each answer is asked for once; tables then find it.
        asked = list(questions(chosen))
        answers = list(pool.map(lambda each: bench.ask(*each), asked))
        print(f"Versions: {versions(scratch, chosen)}.")
        print(f"\n### Weights on one GPU, GiB\n\n{weights_table(bench, chosen)}")
        by_name: dict[str, list[Answer]] = {}
        for (estimator, _), answer in zip(asked, answers, strict=True):
            by_name.setdefault(estimator.name, []).append(answer)
        if why := failures(by_name):
            print(f"\nWhy some failed:\n\n{why}")
        print(f"\n### Weights on each of several GPUs, GiB\n\n{parallel_table(bench, chosen)}")
        with_kv = [estimator for estimator in chosen if estimator.kv_cache]
        print(
            f"\n### KV cache of one request of full length, all GPUs together, GiB\n\n{request_table(bench, with_kv)}"
        )
        parallel = [estimator for estimator in chosen if estimator.parallel]
        print(f"\n### KV cache that is left on each GPU, GiB\n\n{left_table(bench, parallel)}")


if __name__ == "__main__":
    main()
