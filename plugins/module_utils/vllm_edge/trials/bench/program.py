# SPDX-License-Identifier: Apache-2.0
"""The program in the benchmark's container: runs `vllm bench serve` for each step of /job/steps.json.

It is a file of its own that imports nothing of this package, because its text runs in the image of an engine. The
container has no network, and `vllm bench serve` knows TCP only, so connections to a port of the loopback interface are
relayed to a Unix socket. The host uses the same relay the other way round, in front of the gateway.

vLLM takes long to import, so it is imported once, and each step is a child of this process that calls vLLM's own
command. Lines that begin with MARK tell the host when a step begins and what it measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import io
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

MARK = "@bench "
HOST = "127.0.0.1"
PORT = 8000
SETTLE_S = 1.5
"""Seconds before and after the requests of a step, in which the host reads its figures."""
SATURATED = 1.05
"""A sweep ends if a step has less than so many times the tokens per second of the step before."""
PERCENTILES = ("50", "95", "99")
METRICS = ("ttft", "tpot", "itl", "e2el")
LOG_LINES = 6

Address = Path | tuple[str, int]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of `reader`, and pass the end on.

    A connection that breaks off is an end, too: nobody else tells the other side, which would wait for its answer. So
    ends a connection that an engine has not accepted before it dies.
    """
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()


def start_relay(listen: Address, target: Address, context: ssl.SSLContext | None = None) -> Callable[[], None]:
    """Relay connections in a thread, and return the function that ends it. Raises OSError if it cannot listen.

    Args:
        listen: path of a Unix socket, or host and port
        target: the same
        context: for a target that speaks TLS
    """

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            if isinstance(target, Path):
                back, there = await asyncio.open_unix_connection(target)
            else:
                back, there = await asyncio.open_connection(*target, ssl=context)
            await asyncio.gather(_pump(reader, there), _pump(back, writer))
        except OSError:
            pass  # the client sees that the connection is closed
        finally:
            for one in (writer, there):
                if one is not None:
                    one.close()

    async def serve() -> None:
        try:
            if isinstance(listen, Path):
                server = await asyncio.start_unix_server(relay, listen)
            else:
                server = await asyncio.start_server(relay, *listen)
        except Exception as error:  # whatever it is: the caller waits for it
            started.set_exception(error)
            return
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        async with server:
            await stop.wait()

    started: Future[Callable[[], object]] = Future()
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    stop_serving = started.result()

    def end() -> None:
        stop_serving()
        thread.join(timeout=5)

    return end


def build_command(step: Mapping[str, Any], model: str, tokenizer: str, results: Path) -> list[str]:
    """Return the command line of `vllm bench serve` for a step. The options exist from 0.19 to 0.33.

    Args:
        model: served name
        tokenizer: directory of the checkpoint
    """
    if step["prefix_tokens"]:
        requests, prefixes = step["requests"], max(1, step["requests"] // 8)
        dataset = {
            "dataset-name": "prefix_repetition",
            "prefix-repetition-prefix-len": step["prefix_tokens"],
            "prefix-repetition-suffix-len": step["input_tokens"] - step["prefix_tokens"],
            "prefix-repetition-num-prefixes": prefixes,
            "prefix-repetition-output-len": step["output_tokens"],
            # vLLM makes a whole number of prompts for each prefix.
            "num-prompts": requests - requests % prefixes,
        }
    else:
        dataset = {
            "dataset-name": "random",
            "random-input-len": step["input_tokens"],
            "random-output-len": step["output_tokens"],
            "num-prompts": step["requests"],
        }
    options = {
        **{"backend": "openai", "base-url": f"http://{HOST}:{PORT}", "endpoint": "/v1/completions"},
        **{"model": model, "served-model-name": model, "tokenizer": tokenizer, "seed": step["seed"]},
        **dataset,
        **{"max-concurrency": step["concurrency"], "percentile-metrics": ",".join(METRICS)},
        **{"metric-percentiles": ",".join(PERCENTILES), "ready-check-timeout-sec": 0},
        **{"result-dir": str(results.parent), "result-filename": results.name, "temperature": 0},
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return ["vllm", "bench", "serve", *words, "--ignore-eos", "--disable-tqdm", "--save-result"]


def read_result(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of vLLM's result file that the host keeps. Raises KeyError."""

    def percentiles(metric: str) -> dict[str, float] | None:
        found = {f"p{at}": data.get(f"p{at}_{metric}_ms") for at in PERCENTILES}
        return found if all(isinstance(value, int | float) for value in found.values()) else None  # type: ignore[return-value]

    return {
        "seconds": data["duration"],
        "completed": data["completed"],
        "output_tokens": data["total_output_tokens"],
        "tpot_ms": data.get("median_tpot_ms"),
        **{name: percentiles(metric) for name, metric in (("ttft", "ttft"), ("itl", "itl"), ("e2e", "e2el"))},
    }


def run_step(step: Mapping[str, Any], call: Callable[[Sequence[str]], None], model: str, tokenizer: str) -> Any:
    """Run one step in a child process, and return its figures, or `{"error": text}`."""
    results = Path("/tmp/result.json")  # noqa: S108 - the container's own
    log = Path("/tmp/log")  # noqa: S108
    results.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            call(build_command(step, model, tokenizer, results))
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    try:
        return read_result(json.loads(results.read_text()))
    except (OSError, ValueError, KeyError) as error:
        tail = " / ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:] if line)
        return {"error": f"vllm bench serve ended with status {status} ({type(error).__name__}): {tail}"[:1500]}


def run_steps(
    steps: Sequence[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    tell: Callable[[str, Mapping[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run all steps, tell when each begins and what it measured.

    The steps of a sweep after the one that saturates the engine are left out. A step with `for_s` is repeated until so
    many seconds have passed.
    """
    former: float | None = None
    full = False
    for number, step in enumerate(steps):
        if step["case"] == "sweep" and full:
            continue
        until = clock() + step["for_s"]
        while True:
            tell("begin", {"step": number})
            found = measure(step)
            tell("end", {"step": number, **found})
            if clock() >= until or "error" in found:
                break
        if step["case"] == "sweep":
            speed = found["output_tokens"] / found["seconds"] if found.get("seconds") else 0.0
            full = former is not None and speed < SATURATED * former
            former = speed


def load_vllm() -> Callable[[Sequence[str]], None]:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="vllm")
    command = entry.load()

    def call(words: Sequence[str]) -> None:
        sys.argv = list(words)
        command()

    # The parsers of its subcommands import the rest.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
        call(["vllm", "bench", "serve", "--help"])
    return call


def main() -> None:
    job = json.loads(Path("/job/steps.json").read_text())
    if Path("/job/key").exists():
        os.environ["OPENAI_API_KEY"] = Path("/job/key").read_text().strip()
    relay = os.fork()
    if relay == 0:
        start_relay((HOST, PORT), Path("/run/api/api.sock"))
        threading.Event().wait()

    def tell(what: str, data: Mapping[str, Any]) -> None:
        print(f"{MARK}{json.dumps({'what': what, **data})}", flush=True)
        time.sleep(SETTLE_S if what == "begin" else 0)

    call = load_vllm()

    def measure(step: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = run_step(step, call, job["model"], job["tokenizer"])
        time.sleep(SETTLE_S)
        return found

    run_steps(job["steps"], measure, tell)


if __name__ == "__main__":
    main()
