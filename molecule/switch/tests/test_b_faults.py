# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a switch: provoked on the host, and who serves afterwards.

All of it by `vllm-edge switch` between two generations of one small engine. A fault of an engine is meant for one of
the two, by its `max_model_len`, so that the other does not meet it on the way back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from conftest import (
    CONTAINER,
    ENGINE,
    FAILED,
    GPU,
    LOADED_S,
    OK,
    REFUSED,
    ROLES,
    ROLLED_BACK,
    ROOT,
    STATE,
    UNIT,
    Edge,
    Pair,
    Switched,
    default,
    edit_of,
)

Seen = Callable[..., None]

WEIGHTS = "/data/vllm/weights/gemma-4-E2B-it"


def back(edge: Edge, done: Switched, pair: Pair, phase: str) -> str:
    """It failed in that phase, and the former generation serves again, verified; in words for the table."""
    assert (done.rc, done.result, done.failed_in()) == (ROLLED_BACK, "rolled_back", phase), done.message
    assert f"failed in phase {phase}" in done.message and "It was undone" in done.message
    assert f"generation {pair.here}" in done.message and "serves again and is verified" in done.message
    assert "\n" not in done.message
    for name in ("healthy", "canary", "measure"):
        assert done.phase(name, "back")["outcome"] == "done"
    return edge.serves(pair.here)


def forth(edge: Edge, done: Switched, pair: Pair) -> str:
    assert (done.rc, done.result) == (OK, "committed"), done.message
    return edge.serves(pair.there)


def utilization(share: str) -> tuple[str, str]:
    """Another share of the GPU's memory for the new engine than the 0.9 of the profile."""
    return "--gpu-memory-utilization=0.9\n", f"--gpu-memory-utilization={share}\n"


def cause(message: str) -> str:
    """Of a message what was seen and what would do."""
    return re.sub(r"^.*? failed in phase \S+\. |^.*? was refused in phase \S+\. | It was undone: .*$", "", message)


# ---- known before anything is touched ---------------------------------------------------------------------------


class Faults:
    """Ways to spoil a host, each as a generator: set up, the generation to switch to, taken back."""

    def __init__(self, edge: Edge, pair: Pair) -> None:
        self.edge = edge
        self.pair = pair

    def weights_damaged(self) -> Iterator[int]:
        path = self.edge.shell(f"ls {WEIGHTS}/*.safetensors").split()[0]
        self.edge.run("cp", "--archive", path, "/data/kept-by-the-test")
        self.edge.shell(f"mv {path} /data/moved && cp --archive /data/moved {path} && echo damage >> {path}")
        try:
            yield self.pair.there
        finally:
            self.edge.run("mv", "--force", "/data/moved", path)
            self.edge.run("rm", "/data/kept-by-the-test")

    def foreign_on_the_gpu(self) -> Iterator[int]:
        pid = self.edge.run("lab-gpu", "foreign", "start", "--gpu", "3", "--mib", "1900").strip()
        try:
            yield self.pair.there
            assert self.edge.host.run(f"test -d /proc/{pid}").rc == 0, "somebody else's process is left alone"
        finally:
            self.edge.run("lab-gpu", "foreign", "stop", pid)

    def gpu_lost(self) -> Iterator[int]:
        self.edge.run("lab-gpu", "fault", "set", "--gpu", "3", "gpu-lost")
        try:
            yield self.pair.there
        finally:
            self.edge.clear_faults()

    def disk_full(self) -> Iterator[int]:
        with_small_disk(self.edge)
        try:
            self.edge.run("fallocate", "--length=40M", f"{STATE}/somebody-filled-it")
            yield self.pair.there
        finally:
            self.edge.run("rm", "--force", f"{STATE}/somebody-filled-it")
            with_large_disk(self.edge)


def with_small_disk(edge: Edge, mib: int = 96) -> None:
    """The state directory on a small disk of its own."""
    edge.run("mkdir", "--parents", "/run/small-disk")
    edge.run("mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "small-disk", "/run/small-disk")
    edge.shell(f"cp --archive {STATE}/. /run/small-disk/")
    edge.run("mount", "--bind", "/run/small-disk", STATE)


def with_large_disk(edge: Edge) -> None:
    """Back on the former disk, with everything that was written meanwhile."""
    edge.run("umount", "--lazy", STATE)
    edge.shell(f"rm -rf {STATE}/* && cp --archive /run/small-disk/. {STATE}/")
    edge.run("umount", "--lazy", "/run/small-disk")


REFUSALS = {
    "weights_damaged": r"weights of e2b .*is damaged .*playbooks/weights\.yml -e verify_weights=full",
    "foreign_on_the_gpu": r"GPU 3 .* is used by others: pid \d+ \(foreign-cuda-job .*less than the budget of 20900 MiB",
    "gpu_lost": rf"The GPU is lost: {GPU}|{GPU}.*has fallen off the bus",
    "disk_full": r"has \d+ MiB free, a switch wants 64 .*make room",
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_refused_before_anything_is_touched(edge: Edge, pair: Pair, fault: str, seen: Seen) -> None:
    container, unit = default.life(edge, CONTAINER), edge.unit("InvocationID", "MainPID", unit=UNIT)
    (spoilt := getattr(Faults(edge, pair), fault)())
    number = next(spoilt)
    try:
        done = edge.switch(number)
    finally:
        for _ in spoilt:
            pass
    assert (done.rc, done.result, done.failed_in()) == (REFUSED, "refused", "preflight"), done.message
    assert re.search(REFUSALS[fault], done.message), done.message
    assert "Nothing was touched" in done.message
    assert (default.life(edge, CONTAINER), edge.unit("InvocationID", "MainPID", unit=UNIT)) == (container, unit)
    seen(fault.replace("_", " ") + ", before the switch", cause(done.message), edge.serves(pair.here), done.seconds)


# ---- the new engine ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_new_engine_crashes_while_loading(edge: Edge, pair: Pair, seen: Seen) -> None:
    edge.engine_fault("engine-crash-loading", pair.there_len)
    done = edge.switch(pair.there)
    assert "The GPU reported an error: an illegal memory access" in done.message, done.message
    seen("new engine crashes while loading", cause(done.message), back(edge, done, pair, "healthy"), done.seconds)


@pytest.mark.thorough
def test_new_engine_does_not_fit(edge: Edge, pair: Pair, seen: Seen) -> None:
    number = edge.variant(
        pair.here,
        *edit_of(pair.here_len, pair.there_len),
        utilization("0.999"),
    )
    edge.run("lab-gpu", "fault", "set", "--gpu", "3", "orphan=60")
    done = edge.switch(number)
    edge.clear_faults()
    assert re.search(r"GPU has \d+\.\d+ of 22\.03 GiB free, 22\.0\d GiB are wanted", done.message), done.message
    seen("new engine does not fit", cause(done.message), back(edge, done, pair, "healthy"), done.seconds)


def test_new_engine_is_never_healthy(edge: Edge, pair: Pair, seen: Seen) -> None:
    number = edge.variant(pair.there, limits={"healthy_timeout_s": 25})
    edge.engine_fault("engine-never-healthy", pair.there_len)
    done = edge.switch(number)
    assert re.search(
        r"Engine e2b-all does not serve after 2\d s .*vllm_engine_healthy_timeout_s is 25", done.message
    ), done.message
    seen("new engine is never healthy", cause(done.message), back(edge, done, pair, "healthy"), done.seconds)


def test_new_engine_answers_nonsense(edge: Edge, pair: Pair, seen: Seen) -> None:
    edge.engine_fault("engine-nan-logits", pair.there_len)
    done = edge.switch(pair.there)
    assert "failed the canary's check" in done.message and "'vllm-edge canary e2b-all'" in done.message, done.message
    seen("canary wrong", cause(done.message), back(edge, done, pair, "canary"), done.seconds)


def test_new_engine_grows_over_its_budget(edge: Edge, pair: Pair, seen: Seen) -> None:
    """Within it when it has loaded, beyond it after its first requests."""
    edge.engine_fault("engine-grows", pair.there_len, "1500")
    done = edge.switch(pair.there)
    assert f"{GPU}) is over budget" in done.message and "its budget of 20900 MiB" in done.message, done.message
    seen("over budget after warm-up", cause(done.message), back(edge, done, pair, "measure"), done.seconds)


@pytest.mark.thorough
def test_new_engine_hangs_after_the_commit(edge: Edge, pair: Pair, seen: Seen) -> None:
    """The commit stands; systemd's watchdog brings the engine back."""
    done = edge.switch(pair.there)
    assert done.rc == OK, done.message
    cursor, restarts = edge.cursor(), edge.unit("NRestarts", unit=UNIT)["NRestarts"]
    began = edge.now()
    edge.run("docker", "pause", CONTAINER)
    edge.wait(
        "the watchdog", lambda: edge.unit("NRestarts", unit=UNIT)["NRestarts"] != restarts, default.LOADED_S, every=1
    )
    edge.wait("the engine to serve again", lambda: edge.status()["problems"] == [], LOADED_S, every=1)
    why = re.search(r"The engine has not answered /health for \d+ s[^\n]*", edge.journal(cursor, UNIT))
    assert why and "Watchdog timeout" in edge.journal(cursor, UNIT)
    seen("hangs after the commit", why.group(), edge.serves(pair.there), edge.now() - began)


# ---- the old engine ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_old_engine_leaves_an_orphan(edge: Edge, pair: Pair, seen: Seen) -> None:
    """A process of the engines' user holds memory after its container has gone."""
    pid = edge.run("lab-gpu", "orphan-process", "start", "--gpu", "3", "--mib", "900").strip()
    done = edge.switch(pair.there)
    served = forth(edge, done, pair)
    (warning,) = [text for text in (done.journal or {})["warnings"] if f"pid {pid} " in text]
    assert re.search(r"VLLM::Worker.*user vllm-edge; in no container\) holds 900 MiB 8 s after .* was ended", warning)
    assert edge.host.run(f"test -d /proc/{pid}").rc != 0
    assert 8 <= done.phase("free")["seconds"] < 25
    seen("old engine leaves an orphan", warning, served, done.seconds)


@pytest.mark.thorough
def test_old_engine_ignores_sigterm(edge: Edge, pair: Pair, seen: Seen) -> None:
    edge.engine_fault("engine-ignores-sigterm", pair.here_len)
    edge.run("sleep", "2")
    done = edge.switch(pair.there)
    served = forth(edge, done, pair)
    stop = done.phase("stop")
    assert stop["seconds"] < 90, stop
    seen("old engine ignores SIGTERM", stop["detail"], served, done.seconds)


@pytest.mark.thorough
def test_old_engine_releases_slowly(edge: Edge, pair: Pair, seen: Seen) -> None:
    edge.run("lab-gpu", "fault", "set", "--gpu", "3", "slow-release=6")
    done = edge.switch(pair.there)
    served = forth(edge, done, pair)
    free = done.phase("free")
    assert free["seconds"] >= 4 and re.search(r"GPU 3 measured free after [4-9]\.\d s", free["detail"]), free
    seen("old engine releases slowly", free["detail"], served, done.seconds)


# ---- the host ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_disk_fills_while_journalling(edge: Edge, pair: Pair, seen: Seen) -> None:
    """Somebody fills the journal's disk in the drain, and goes on filling it when the switch gives up its spare."""
    with_small_disk(edge)
    try:
        filler = f"while [ -e /run/fill ]; do cat /dev/zero >> {STATE}/filled 2>/dev/null; sleep 0.05; done"
        edge.run("touch", "/run/fill")
        edge.hook("before_drain", f"systemd-run --quiet --collect --unit=filler sh -c {shlex.quote(filler)}; sleep 3")
        done = edge.switch(pair.there)
        edge.run("rm", "/run/fill")
        edge.host.run("systemctl stop filler")
        edge.run("rm", "--force", f"{STATE}/filled")
        said = edge.journal(unit="vllm-edge-switch.service")
        assert "No space left on device" in said and "df -h" in said, said
        # Its last words may only be in the unit's journal; the recovery or the next switch finishes its journal.
        edge.host.run("vllm-edge recover")
        assert done.rc in (ROLLED_BACK, FAILED), done.message
        assert edge.number() == pair.here
        edge.wait("the former generation to serve", lambda: edge.status()["problems"] == [], LOADED_S)
        text = next(line for line in said.splitlines() if "No space left on device" in line)
    finally:
        edge.host.run("rm -f /run/fill; systemctl stop filler; rm -f " + f"{STATE}/filled")
        with_large_disk(edge)
    seen("disk full while journalling", text.partition("]: ")[2], edge.serves(pair.here), done.seconds)


@pytest.mark.thorough
def test_docker_restarted_in_the_middle(edge: Edge, pair: Pair, seen: Seen) -> None:
    """With live-restore, which the host has: while the new engine loads."""
    before = edge.unit("InvocationID", unit="docker.service")
    begun = edge.begin_switch(pair.there)
    edge.until(begun.before, "healthy")
    edge.wait("the new container", lambda: default.life(edge, CONTAINER), 30, every=0.2)
    container = default.life(edge, CONTAINER)
    edge.run("systemctl", "restart", "docker.service")
    done = begun.end()
    # The supervisor need not have noticed: a Docker that is back within its poll was never away for it.
    assert edge.unit("InvocationID", unit="docker.service") != before
    assert default.life(edge, CONTAINER) == container, "it went on loading"
    seen("Docker restarted in the middle, in phase healthy", done.message, forth(edge, done, pair), done.seconds)


@pytest.mark.thorough
def test_gpu_lost_in_the_middle(edge: Edge, pair: Pair, seen: Seen) -> None:
    """Neither generation can have it: the message is what an operator must do, and then one command is enough."""
    edge.hook("before_drain", "lab-gpu fault set --gpu 3 gpu-lost")
    done = edge.switch(pair.there)
    assert (done.rc, done.result) == (FAILED, "failed"), done.message
    assert "has fallen off the bus" in done.message and "\n" not in done.message
    assert re.search(rf"What runs now: {ENGINE} \({', '.join(ROLES)}\) does not serve", done.message), done.message
    assert f"'vllm-edge switch {pair.here}' brings back what is missing" in done.message
    assert edge.number() == pair.here
    edge.calm()
    again = edge.switch(pair.here)
    assert (again.rc, again.result) == (OK, "committed"), again.message
    seen(
        "GPU lost in the middle, in phase drain",
        cause(done.message),
        edge.serves(pair.here) + ", once it is back",
        done.seconds,
    )


@pytest.mark.thorough
def test_foreign_process_comes_in_the_middle(edge: Edge, pair: Pair, seen: Seen) -> None:
    """After the preflight: neither engine fits beside it, and it is not ours to end."""
    # Of a unit of its own: what a hook leaves behind ends with the unit of the switch.
    come = "lab-gpu foreign start --gpu 3 --mib 1500 > /run/comer"
    edge.hook("before_drain", f"systemd-run --quiet --wait --property=KillMode=none sh -c '{come}'")
    number = edge.variant(
        pair.here,
        *edit_of(pair.here_len, pair.there_len),
        utilization("0.95"),
    )
    done = edge.switch(number)
    pid = edge.run("cat", "/run/comer").strip()
    alive = edge.host.run(f"test -d /proc/{pid}").rc == 0
    edge.run("lab-gpu", "foreign", "stop", pid)
    assert alive, "it is somebody else's"
    assert re.search(r"GPU has \d+\.\d+ of 22\.03 GiB free", done.message), done.message
    assert "nvidia-smi" in done.message
    seen(
        "foreign process on the GPU, in phase drain",
        cause(done.message),
        back(edge, done, pair, "healthy"),
        done.seconds,
    )


def test_clock_jumps_are_tested_elsewhere(seen: Seen) -> None:
    """The lab's host has the kernel, and so the clock, of the machine that runs it."""
    found = [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests" / "unit" / "switch").glob("test_*.py"))
        for name in re.findall(r"^def (test_\w*clock\w*)\(", path.read_text(), re.MULTILINE)
        if "switch" in path.name
    ]
    assert found, "no unit test of the switch has a clock that jumps"
    seen("clock jumps", f"not here, the clock is the machine's: {', '.join(found)}", "-")
