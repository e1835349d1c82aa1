# SPDX-License-Identifier: Apache-2.0
"""Memory measured free before an engine starts, and against budgets after. NVML is the simulated library under the
real client; the processes that hold memory are real, and what is killed is really killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.state import EngineState, stamp, write_state
from ansible.module_utils.vllm_edge.facts.serving import ask_gpus
from ansible.module_utils.vllm_edge.generation.model import Generation, Limits
from ansible.module_utils.vllm_edge.gpu.owners import ENDED, Owner
from ansible.module_utils.vllm_edge.planning.drift import TOLERANCES
from ansible.module_utils.vllm_edge.switch.model import Done, Moves, PhaseFailed
from ansible.module_utils.vllm_edge.switch.steps import gpu_memory
from ansible.module_utils.vllm_edge.switch.steps.gpu_memory import Release
from ansible.module_utils.vllm_edge.system import process
from fake_host import Bench, alive, failure, until
from generations import engine

from lab.nvidia.testing import UUIDS, LabRoot

BUDGET = 20_900


class GpuBench(Bench):
    """Whose each process is, said by the test."""

    def __init__(self, boards: LabRoot, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.boards = boards
        self.uids: dict[int, int] = {}
        monkeypatch.setattr(gpu_memory, "uid_of", self.uids.get)
        monkeypatch.setattr(gpu_memory, "engine_uid", lambda: 8050)

    def release(self, *needed: int, keep: Iterable[str] = ()) -> Release:
        return Release(self.machine, {UUIDS[gpu]: BUDGET for gpu in needed}, set(keep))

    @contextmanager
    def engine_holds(self, mib: int, gpu: int = 0) -> Iterator[int]:
        """e2b holds memory of a GPU."""
        with self.boards.claim(gpu, mib) as pid:
            self.ours(pid)
            yield pid

    def measure(self, wanted: Generation, mib: int, *, accept: bool = False) -> Done:
        """The phase, while e2b holds memory of GPU 1."""
        with self.engine_holds(mib, 1):
            return self.machine.measure(wanted, accept=accept)

    def lost(self, wanted: Generation) -> str:
        return failure(lambda: self.machine.measure(wanted)).text


@pytest.fixture
def bench(gpus: LabRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    return GpuBench(gpus, tmp_path, monkeypatch)


def test_gpus_without_anything_of_what_ends_are_free_at_once(bench: GpuBench) -> None:
    with bench.boards.claim(3, 20_000):
        done = bench.release(0, 1).run(60)
    assert done.detail == "GPU 0, 1 measured free after 0.0 s" and done.warnings == ()
    with bench.boards.claim(2, 5_000) as kept, bench.boards.claim(2, 3_000) as foreign:
        bench.ours(kept, "e4b")
        done = bench.release(2, keep=["vllm-e4b.service"]).run(60)
        assert done.detail == "GPU 2 measured free after 0.0 s"
        assert alive(kept) and alive(foreign)
    bench.boards.set_fault(0, "no-process-memory")
    with bench.boards.claim(0, 4_000):
        assert bench.release(0).run(60).detail == "GPU 0 measured free after 0.0 s"


def test_an_engine_that_ends_is_waited_for(bench: GpuBench) -> None:
    with bench.engine_holds(20_000) as pid:

        def ends() -> None:
            os.kill(pid, 9)
            until(lambda: not alive(pid))

        bench.clock.at(7, ends)
        done = bench.release(0).run(60)
    assert done.detail == "GPU 0 measured free after 7.0 s" and done.warnings == ()


@pytest.mark.parametrize(("fault", "value", "after_s"), [("orphan", 20_000, 12), ("nvml-error", "TIMEOUT", 5)])
def test_what_passes_is_waited_for(bench: GpuBench, fault: str, value: object, after_s: int) -> None:
    """Memory that comes back late, and an NVML that does not answer at the moment."""
    bench.boards.set_fault(1, fault, value)
    bench.clock.at(after_s, lambda: bench.boards.clear_fault(1, fault))
    assert bench.release(1).run(60).detail == f"GPU 1 measured free after {after_s}.0 s"


@pytest.mark.parametrize("how", ["container", "orphan"])
def test_what_is_ours_and_stays_is_named_and_ended(bench: GpuBench, how: str) -> None:
    with bench.boards.claim(0, 9_000) as pid, bench.boards.claim(0, 500) as foreign:
        bench.uids |= {pid: 8050, foreign: 1000}
        if how == "container":
            bench.ours(pid)
        done = bench.release(0).run(60)
        assert not alive(pid) and alive(foreign)
    assert bench.clock.now == 1060
    where = "container vllm-e2b" if how == "container" else "in no container"
    assert f"pid {pid} (" in done.warnings[0] and f"; {where}) holds 9000 MiB 60 s after" in done.warnings[0]
    assert "8050" in done.warnings[0] and done.warnings[0].endswith("it was ended.")


def test_what_is_not_ours_is_never_ended(bench: GpuBench) -> None:
    """Another user's process; ours by user, but in a container that is not; and one that became somebody else's."""
    with (
        bench.boards.claim(0, 100) as other,
        bench.boards.claim(0, 100) as inside,
        bench.boards.claim(0, 100) as turned,
    ):
        bench.uids |= {other: 1000, inside: 8050, turned: 8050}
        bench.kinds[inside] = Owner("foreign", container="somebody")
        release = bench.release(0)
        assert release._still_ours(turned)

        def owners(pids: Iterable[int]) -> Mapping[int, Owner]:
            # When the descriptor is held, the number is another process's.
            seen = bench.owners(pids)
            return {pid: Owner("foreign", "new") if set(pids) == {turned} else seen[pid] for pid in pids}

        release.host.owners = owners
        with pytest.raises(PhaseFailed):
            release.run(5)
        assert alive(other) and alive(inside) and alive(turned)


def test_what_cannot_be_ended_is_named_with_the_remedy(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "kill", lambda pid, still: False)
    with bench.engine_holds(9_000) as pid:
        text = failure(lambda: bench.release(0).run(60)).text
    assert f"GPU 0 (NVIDIA L4, {UUIDS[0]}) is still held by a process of ours that was killed" in text
    assert f"pid {pid} (" in text and "holds 9000 MiB" in text and "then reboot" in text
    assert bench.clock.now == 1070


def test_memory_without_a_process_is_a_warning_where_enough_is_left(bench: GpuBench) -> None:
    for held_mib in (300, 22_564 - BUDGET):
        bench.boards.set_fault(0, "orphan", held_mib)
        done = bench.release(0).run(60)
        assert done.detail == "GPU 0 measured free enough after 60.0 s"
        (warning,) = done.warnings
        assert f"{held_mib} MiB in use that no process holds" in warning and "fits beside that" in warning
    bench.boards.set_fault(0, "orphan", 3_000)
    failed = failure(lambda: bench.release(0, 1).run(60))
    assert "has 3000 MiB in use that no process holds, 60 s after the engines were stopped" in failed.text
    assert f"The 19564 MiB that are left are less than the budget of {BUDGET} MiB" in failed.text
    assert f"'nvidia-smi --gpu-reset -i {UUIDS[0]}', or reboot" in failed.text
    assert UUIDS[1] not in failed.text


def test_containers_that_docker_does_not_name_are_waited_for_and_left_alone(bench: GpuBench) -> None:
    nameless = Owner("unknown", "c0ffee", reason="Docker cannot say whose container c0ffee is: away")
    with bench.boards.claim(0, 9_000) as pid:
        bench.uids[pid], bench.kinds[pid] = 8050, nameless
        bench.clock.at(20, lambda: bench.ours(pid))
        done = bench.release(0).run(60)
        assert "container vllm-e2b) holds 9000 MiB" in done.warnings[0] and not alive(pid)
    with bench.boards.claim(0, 9_000) as pid:
        bench.kinds[pid] = nameless
        text = failure(lambda: bench.release(0).run(60)).text
        assert alive(pid)
    assert "used by processes that may be ours: pid" in text
    assert "They were left alone" in text and "docker.service" in text


def test_a_process_that_ends_while_it_is_looked_up_is_looked_for_again(bench: GpuBench) -> None:
    with bench.boards.claim(0, 9_000) as pid:
        bench.kinds[pid] = Owner("unknown", reason=ENDED)
        # It never comes to an end: then its memory is nobody's, and it is not called somebody's.
        assert "9000 MiB in use that no process holds" in failure(lambda: bench.release(0).run(60)).text
        bench.clock.at(1, lambda: os.kill(pid, 9))
        assert "measured free after" in bench.release(0).run(60).detail


def test_a_lost_gpu_is_named_where_it_is_needed_and_hides_no_other(bench: GpuBench) -> None:
    bench.boards.set_fault(2, "gpu-lost")
    assert bench.release(0).run(60).detail == "GPU 0 measured free after 0.0 s"
    with pytest.raises(PhaseFailed, match=r"The GPU is lost: .* has fallen off the bus\. .*Xid 79"):
        bench.release(2).run(60)
    assert bench.clock.now == 1000
    boards, problem = ask_gpus({UUIDS[0]: BUDGET}, bench.paths)
    assert [board["uuid"] for board in boards] == [UUIDS[0], UUIDS[1], UUIDS[3]]
    assert boards[0]["budget_mib"] == BUDGET
    assert problem is not None and "has fallen off the bus" in problem
    slot = {"slot": 0, "uuid": UUIDS[2], "name": "NVIDIA L4", "pci_bus_id": "00000000:CA:00.0"}
    rows = [slot | {"slot": at, "uuid": uuid} for at, uuid in enumerate(UUIDS)]
    bench.paths.state.mkdir(parents=True)
    (bench.paths.state / "gpu-slots.json").write_text(json.dumps({"version": 1, "gpus": rows}))
    with pytest.raises(PhaseFailed, match=rf"{UUIDS[2]} \(NVIDIA L4 at 00000000:CA:00.0\)"):
        bench.release(2).run(60)
    bench.boards.set_module(None)
    text = failure(lambda: bench.release(0).run(60)).text
    assert "It is not known whether the GPUs are free: The NVIDIA kernel module" in text


@pytest.mark.slow
def test_a_command_is_shown_on_one_line() -> None:
    script = subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(60)"])
    try:
        until(lambda: "import time" in process.command_of(script.pid))
        assert process.command_of(script.pid).endswith("-c import time time.sleep(60)")
    finally:
        script.kill()
        script.wait()
    assert process.command_of(script.pid) == "ended"
    assert [process.get_user_name(uid) for uid in (0, None, 54321)] == ["root", "unknown", "54321"]


def test_killing_spares_a_number_that_was_given_anew(bench: GpuBench) -> None:
    with bench.boards.claim(0, 100) as pid:
        assert process.kill(pid, lambda pid: False) is True
        assert alive(pid)
        assert process.kill(pid, lambda pid: True) is True
        assert not alive(pid)
    assert process.kill(pid, lambda pid: True) is True


def generation_on(bench: Bench, gpu: int = 1, **config: Any) -> Generation:
    return bench.live(engine("e2b", gpus=[UUIDS[gpu]], vram_budget_mib=BUDGET, **config))


def test_the_world_frees_the_gpus_of_what_starts(bench: GpuBench) -> None:
    wanted = replace(generation_on(bench), limits=Limits(free_timeout_s=3))
    with bench.boards.claim(0, 5_000) as other, bench.boards.claim(1, 5_000) as loads:
        bench.ours(other, "other")
        bench.ours(loads, "loads")
        for stays in (Moves(start=("e2b",), keep=("loads",)), Moves(start=("e2b",), wait=("loads",))):
            assert bench.machine.free(wanted, stays).detail == "GPU 1 measured free after 0.0 s"
        assert alive(other) and alive(loads)
    assert bench.machine.free(wanted, Moves(keep=("e2b",))).detail == "no engine has to start"
    bench.boards.set_fault(1, "orphan", 10_000)
    assert (
        "3 s after the engines were stopped" in failure(lambda: bench.machine.free(wanted, Moves(start=("e2b",)))).text
    )


def test_memory_within_its_budget_and_over_it_which_fails_and_can_be_accepted(bench: GpuBench) -> None:
    done = bench.measure(generation_on(bench), 20_600)
    assert done.detail == "within budget: GPU 1 20600 of 20900 MiB"
    row = next(row for row in done.data["gpus"] if row["uuid"] == UUIDS[1])
    assert (row["engine_mib"], row["budget_mib"], row["within_budget"]) == (20_600, BUDGET, True)
    assert row["processes"][0]["unit"] == "vllm-e2b.service" and len(done.data["gpus"]) == 4
    wanted = generation_on(bench)
    failed = failure(lambda: bench.measure(wanted, 21_000))
    assert "is over budget: 21000 MiB are in use where its budget of 20900 MiB: 100 MiB too many" in failed.text
    assert len(failed.data["gpus"]) == 4
    done = bench.measure(wanted, 21_000, accept=True)
    assert done.detail == "over budget: GPU 1 21000 of 20900 MiB"
    (text,) = done.data["over_budget"]
    assert "100 MiB too many" in text and "'vram_budget_mib: 21300' of e2b in serving_engines" in text


def planned(bench: GpuBench, on_drift: str, tokens: int, *, total_mib: int = 20_400, of: str = "") -> Generation:
    """e2b with a plan; it (or an engine `of` another hash) has logged so many tokens."""
    parts = {"weights_mib": 10_024, "graphs_mib": 539, "kv_cache_mib": 8_485, "total_mib": total_mib}
    tolerances = {**TOLERANCES, "total_mib": 300}
    plan = {"gpus": [parts], "kv_cache_tokens": 480_192, "kv_blocks": 30_012, "tolerances": tolerances}
    wanted = generation_on(bench, plan={**plan, "on_drift": on_drift})
    logged = {"model_gib": 9.8, "graphs_gib": 0.5, "kv_cache_tokens": tokens}
    state = EngineState("e2b", "serving", stamp(), input_hash=of or wanted.hashes["e2b"], log_facts=logged)
    write_state(bench.paths.engine_state("e2b"), state)
    return wanted


@pytest.mark.parametrize(
    ("on_drift", "tokens", "said"),
    [
        ("warn", 480_192, ""),
        ("warn", 480_176, "KV cache, tokens of e2b 480,176, planned 480,192"),
        ("ignore", 480_176, ""),
        ("fail", 480_176, "KV cache, tokens of e2b 480,176, planned 480,192"),
    ],
)
def test_what_an_engine_logged_is_held_against_its_plan(bench: GpuBench, on_drift: str, tokens: int, said: str) -> None:
    wanted = planned(bench, on_drift, tokens)
    if on_drift == "fail":
        failed = failure(lambda: bench.measure(wanted, 20_600))
        assert said in failed.text
        rows = failed.data["drift"]
    else:
        done = bench.measure(wanted, 20_600)
        (warning,) = done.warnings or [""]
        assert said in warning and bool(said) == bool(warning)
        rows = done.data["drift"]
    found = {row["component"]: (row["measured"], row["within"]) for row in rows}
    assert found["kv_cache_tokens"] == (tokens, tokens == 480_192)
    assert found["kv_cache_mib"] == (None, None), "no line told"
    assert found["total_mib"] == (20_600, True)


def test_lines_of_another_generations_engine_do_not_count(bench: GpuBench) -> None:
    wanted = planned(bench, "fail", 1, total_mib=20_600, of="another")
    rows = bench.measure(wanted, 20_600).data["drift"]
    assert [row["component"] for row in rows if row["measured"] is not None] == ["total_mib"]


@pytest.mark.parametrize(("gpu", "mib"), [(2, 21_000), (1, 20_800)], ids=["without an engine", "of a crashed engine"])
def test_memory_of_no_process_cannot_be_accepted(bench: GpuBench, gpu: int, mib: int) -> None:
    bench.boards.set_fault(gpu, "orphan", 2_000)
    assert "by no process" in failure(lambda: bench.measure(generation_on(bench), mib, accept=True)).text


def test_other_people_and_a_lost_card_that_nobody_needs_are_warnings(bench: GpuBench) -> None:
    wanted = generation_on(bench)
    bench.boards.set_fault(3, "gpu-lost")
    with bench.boards.claim(1, 1_000):
        done = bench.machine.measure(wanted)
    assert any("also used by others" in text for text in done.warnings)
    assert any("has fallen off the bus" in text for text in done.warnings)
    bench.boards.set_fault(1, "gpu-lost")
    assert "has fallen off the bus" in bench.lost(wanted)
    bench.boards.clear_fault(1, "gpu-lost")
    bench.boards.set_fault(1, "nvml-error", "TIMEOUT")
    now = bench.clock.now
    assert "did not answer NVML in time" in bench.lost(wanted)
    assert bench.clock.now == now + gpu_memory.PASSING_S
    bench.clock.at(3, lambda: bench.boards.clear_fault(1, "nvml-error"))
    assert bench.machine.measure(wanted).detail == "within budget: GPU 1 0 of 20900 MiB"
    bench.boards.set_module(None)
    assert "VRAM cannot be measured: The NVIDIA kernel module is not loaded" in bench.lost(wanted)


def test_one_engine_is_measured_on_its_own_gpus(bench: GpuBench) -> None:
    wanted = generation_on(bench)
    with bench.engine_holds(20_600, 1), bench.boards.claim(0, 5_000):
        assert bench.machine.measure_engine(wanted, "e2b").detail == "GPU 1 20600 of 20900 MiB"
    with bench.engine_holds(21_000, 1):
        failed = failure(lambda: bench.machine.measure_engine(wanted, "e2b"))
    assert failed.engines == ("e2b",) and [row["uuid"] for row in failed.data["gpus"]] == [UUIDS[1]]
