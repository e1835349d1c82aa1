# SPDX-License-Identifier: Apache-2.0
"""What vLLM spawns in the lab is forked, and is as a spawned process would be: nothing of the server's is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import json, multiprocessing, os, socket, sys, threading, types

def seen():
    return {
        "parent_is_server": os.getppid() == int(os.environ["SERVER"]),
        "imported_before": "heavy" in sys.modules,
        "environment": [os.environ.get("LATER"), os.environ.get("REMOVED")],
        "sockets": sum("socket" in link(name) for name in os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }

def link(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""

def rank(results):
    results.put(seen())
    results.close()
    results.join_thread()
    os._exit(7)

def engine(results):
    results.put(seen())
    os.environ["LATER"] = "the engine's"
    process = multiprocessing.get_context("spawn").Process(target=rank, args=(results,))
    process.start()
    process.join(20)
    results.put(process.exitcode)

if __name__ == "__main__":
    from vllm_edge_lab import processes

    # Stands for what takes seconds to import.
    sys.modules["heavy"] = types.ModuleType("heavy")
    os.environ["REMOVED"] = "before"
    if sys.argv[1:] == ["forked"]:
        processes.fork_instead_of_spawning()
    del os.environ["REMOVED"]
    os.environ["LATER"], os.environ["SERVER"] = "the server's", str(os.getpid())
    port = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=engine, args=(results,))
    process.start()
    answers = [results.get(timeout=30) for _ in range(3)]
    process.join(20)
    print(json.dumps([*answers, process.exitcode]))
"""


@pytest.mark.parametrize("way", ["spawned", "forked"])
def test_processes_are_as_if_they_had_been_spawned_but_need_not_import_again(way: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "lab/engine"))
    done = subprocess.run(
        [sys.executable, str(program), way], env=environment, stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    engine, rank, exit_code_of_rank, exit_code = json.loads(done.stdout)
    forked = way == "forked"
    common: dict[str, Any] = {"imported_before": forked, "sockets": 0, "threads": 1}
    assert engine == common | {"environment": ["the server's", None], "parent_is_server": not forked}
    assert rank == common | {"environment": ["the engine's", None], "parent_is_server": False}
    assert (exit_code_of_rank, exit_code) == (7, 0)
