# SPDX-License-Identifier: Apache-2.0
"""Runs inside a container in vLLM's place: its HTTP routes and its log lines, and one way to go wrong per mode.

Modes: good, slow (loads for --load seconds, a line each half second), ignore-term,
freeze (the engine's process stops after --hang-after seconds, the API server does not),
read (reads --file for --load seconds without a line, then stands still).

As in vLLM, an API server answers and an engine process works: step by step, each a tenth of a second, one request after
the other. A step prefills 100 characters of a prompt or makes the answer's first token. The server sets the figures of
/metrics only from what the engine reports after a step, and counts a prompt's tokens with the first token.
"""

import argparse
import json
import mmap
import os
import signal
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="good")
parser.add_argument("--load", type=float, default=0.5)
parser.add_argument("--hang-after", type=float, default=2.0)
parser.add_argument("--file", default="")
options = parser.parse_args()

CHUNK = 100


class Core(threading.Thread):
    """The engine's process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.frozen = threading.Event()
        self.queue: list[tuple[int, threading.Event]] = []
        self.figures = {"running": 0, "blocks": 0, "prompt": 0, "generation": 0, "iterations": 0}

    def answer(self, length: int) -> None:
        done = threading.Event()
        self.queue.append((length, done))
        done.wait()

    def run(self) -> None:
        left = None
        while True:
            time.sleep(0.1)
            if self.frozen.is_set() or not self.queue:
                continue
            length, done = self.queue[0]
            left = length if left is None else left - CHUNK
            reported = {**self.figures, "running": len(self.queue), "blocks": self.figures["blocks"] + 1}
            if left <= 0:
                reported |= {"running": len(self.queue) - 1, "blocks": 0, "prompt": self.figures["prompt"] + length}
                reported |= {name: self.figures[name] + 1 for name in ("generation", "iterations")}
                left = None
                self.queue.pop(0)
                done.set()
            self.figures = reported

    def metrics(self) -> str:
        labels = '{engine="0",model_name="tiny"}'
        return "".join(
            f"{line}\n"
            for line in (
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="4452"} 1.0',
                f"vllm:num_requests_running{labels} {self.figures['running']}.0",
                f"vllm:num_requests_waiting{labels} 0.0",
                f"vllm:kv_cache_usage_perc{labels} {self.figures['blocks'] / 4452}",
                f"vllm:prompt_tokens_total{labels} {self.figures['prompt']}.0",
                f"vllm:generation_tokens_total{labels} {self.figures['generation']}.0",
                f"vllm:iteration_tokens_total_count{labels} {self.figures['iterations']}.0",
            )
        )


core = Core()


def say(text: str) -> None:
    print(text, flush=True)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, data: object) -> None:
        """JSON, or text as it is."""
        body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(data, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, template: str, *values: object) -> None:
        say(f'INFO:      - "{self.requestline}" {values[1]} OK')

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self.answer(200, {})
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "sentry", "object": "model"}]})
        elif path == "/metrics":
            self.answer(200, core.metrics())
        else:
            self.answer(404, {"error": {"message": "Not Found"}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        core.answer(len(asked["prompt"]))
        self.answer(200, {"choices": [{"text": "a"}]})


if options.mode != "ignore-term":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say("INFO 11-21 03:00:00 [gpu_model_runner.py:4735] Starting to load model /models/tiny...")
if options.mode == "read":
    say("Loading safetensors checkpoint shards:  0% Completed | 0/1 [00:00<00:01]")
    deadline = time.monotonic() + options.load
    with open(options.file, "rb") as file:
        while time.monotonic() < deadline:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                read = [mapped[at] for at in range(0, len(mapped), 64 * 1024)]
            time.sleep(0.3)
    say("it reads no more")
    time.sleep(3600)
steps = max(1, int(options.load / 0.5))
for step in range(steps):
    say(f"Loading safetensors checkpoint shards:  {100 * step // steps}% Completed | {step}/{steps} [00:00<00:01]")
    time.sleep(options.load / steps)
say("INFO 11-21 03:00:00 [gpu_model_runner.py:4821] Model loading took 9.9 GiB memory and 1.5 seconds")
say("INFO 11-21 03:00:00 [gpu_worker.py:773] Available KV cache memory: 5.25 GiB")
say(
    "INFO 11-21 03:00:00 [kv_cache_utils.py:1] GPU KV cache size: 71,234 tokens, Maximum concurrency for 4,096 tokens "
    "per request: 17.39x"
)
server = Server("/run/api/api.sock", Handler)
say("INFO:     Application startup complete.")
core.start()
if options.mode == "freeze":
    threading.Timer(options.hang_after, core.frozen.set).start()
server.serve_forever()
