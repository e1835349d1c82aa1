# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` whose processes are forked from one that has imported vLLM.

vLLM spawns its engine, and the engine each of its ranks; a spawned process imports everything again, ten seconds of a
core each. With real GPUs that is little beside the weights. In the lab it is most of a load, and an engine of four
ranks on two cores would import six times. Here they come from a fork server, which is itself forked before vLLM has
begun anything: no thread, no socket and no event loop of the server is in them, as in spawned ones.

And they wait for each other without computing: vLLM's engine and ranks go round in a loop for a second after each
message, so that with a question every second each of them would keep a core busy; and gloo, which stands for NCCL, has
a thread for each of the dozen process groups of a rank, which looks a hundred times a second whether it has to end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing import context, forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_edge_lab import cpu, gpus

WAITS_IN_A_LOOP_S = 0.01
"""In place of vLLM's 1 s (SpinCondition of vllm/distributed/device_communicators/shm_broadcast.py)."""
# What the server, the engine and a rank import: the last one takes most of the others with it.
MODULES = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm_edge_lab.worker")


class Process(context.ForkServerProcess):
    """A process with the environment of the one that starts it, not that of the fork server."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        vars(process_obj)["environment"] = dict(os.environ)
        return context.ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]

    def _bootstrap(self, *arguments: Any, **options: Any) -> int:
        wanted = vars(self)["environment"]
        for name in set(os.environ) - set(wanted):
            del os.environ[name]
        # Only what differs: setproctitle finds a process's title by the place of the first variable.
        os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})
        return int(super()._bootstrap(*arguments, **options))  # type: ignore[misc]


class Context(context.ForkServerContext):
    """Stands where `multiprocessing.get_context("spawn")` looks: vLLM asks for that one by name."""

    Process = Process  # type: ignore[assignment]


def fork_server() -> None:
    """Start multiprocessing's fork server as a fork of this process instead of as a new Python."""
    server = forkserver._forkserver  # type: ignore[attr-defined]

    def fork_and_serve(path: bytes, arguments: list[str], descriptors: Iterable[int]) -> int:
        child = os.fork()
        if child:
            return child
        util.spawnv_passfds = spawn
        try:
            # Among them its parent's end of the pipe that tells it when nobody is left.
            for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            # A process that it forks starts its own through the same server (Python 3.11 would start another one).
            server.ensure_running = lambda: None
            exec(arguments[-1], {})  # what would follow `python -c`
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    spawn = util.spawnv_passfds
    resource_tracker.ensure_running()  # the fork server's own start would look for it in the way that is replaced now
    util.spawnv_passfds = fork_and_serve
    try:
        server.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def fork_instead_of_spawning() -> None:
    """From now on, in this process and in those that come of it."""
    context._concrete_contexts["spawn"] = Context()  # type: ignore[attr-defined]
    fork_server()


def share_gloo_device() -> None:
    """One thread of gloo for all process groups of a process."""
    gloo = importlib.import_module("torch.distributed").ProcessGroupGloo
    initialise = gloo.__init__
    get_device = functools.cache(gloo.create_default_device)

    def initialise_with_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [get_device()]
        initialise(self, store, rank, size, options)

    gloo.__init__ = initialise_with_device


def main() -> None:
    if cpu.is_lesser(gpus.lab_root()):
        cpu.become_lesser()
    # A quarter of the time of the imports would be the garbage collector's.
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    shared = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    shared.SpinCondition.__init__.__defaults__ = (WAITS_IN_A_LOOP_S,)
    share_gloo_device()
    registry = importlib.import_module("vllm.model_executor.models.registry")
    # vLLM lets another Python, which imports all of it, look at the model, so as not to initialise CUDA; there is none.
    registry._run_in_subprocess = lambda look: look()
    # The garbage collector passes over what was imported: looking at it would also copy its pages in each process.
    gc.freeze()
    gc.enable()
    fork_instead_of_spawning()
    command = importlib.import_module("vllm.entrypoints.cli.main")
    sys.exit(command.main())


if __name__ == "__main__":
    main()
