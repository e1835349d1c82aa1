# SPDX-License-Identifier: Apache-2.0
"""The pure part: budgets, verdicts, and waiting until memory stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu.budget import (
    IDLE_MIB,
    BudgetError,
    Evaluation,
    Foreign,
    Limits,
    evaluate,
    resolve_mib,
    settle,
)
from ansible.module_utils.vllm_edge.gpu.owners import ENDED, Owner
from ansible.module_utils.vllm_edge.system.nvml import GpuReading, HostReading, ProcessReading
from fake_host import Clock

OURS = Owner("ours", "vllm-e2b", "vllm-e2b.service")
THEIRS = Owner("foreign", "notebook")
UNKNOWN = Owner("unknown", "abc", None, "Docker does not answer")


def gpu(used: int, *processes: tuple[int, int | None], index: int = 0, v1: bool = False, **more: Any) -> GpuReading:
    """A reading of an L4; processes are (pid, MiB)."""
    reserved = None if v1 else 470
    return replace(
        GpuReading(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA L4",
            pci_bus_id=f"00000000:{index:02X}:00.0",
            total_mib=23034,
            reserved_mib=reserved,
            used_mib=used,
            free_mib=23034 - (reserved or 0) - used,
            memory_version="v1" if v1 else "v2",
            processes=tuple(ProcessReading(*process) for process in processes),
            compute_capability="8.9",
        ),
        **more,
    )


def verdict(
    reading: GpuReading, owners: Mapping[int, Owner], budget: int = 0, foreign: Foreign = "warn", expected: Any = None
) -> Evaluation:
    limits = Limits({reading.uuid: budget} if budget else {}, {reading.uuid: expected}, foreign)
    return evaluate([reading], owners, limits, [reading.uuid])


@pytest.mark.parametrize(
    ("reading", "owners", "budget", "engine", "foreign", "within"),
    [
        pytest.param(gpu(20900, (7, 20900)), {7: OURS}, 20900, 20900, 0, True, id="exactly the budget"),
        pytest.param(gpu(20901, (7, 20901)), {7: OURS}, 20900, 20901, 0, False, id="one MiB over"),
        pytest.param(gpu(21900, (7, 20600), (8, 1300)), {7: OURS, 8: THEIRS}, 20900, 20600, 1300, True, id="foreign"),
        pytest.param(gpu(20700, (7, 20600)), {7: OURS}, 20600, 20700, 0, False, id="memory of nobody is ours"),
        pytest.param(gpu(300), {}, 0, 300, 0, False, id="orphan on a GPU without an engine"),
        pytest.param(gpu(300, (7, 300)), {7: OURS}, 0, 300, 0, False, id="ours on a GPU without an engine"),
        pytest.param(gpu(300, (7, 300)), {7: THEIRS}, 0, 0, 300, True, id="theirs on a GPU without an engine"),
        pytest.param(gpu(IDLE_MIB), {}, 0, 0, 0, True, id="idle"),
        pytest.param(gpu(IDLE_MIB + 1), {}, 0, IDLE_MIB + 1, 0, False, id="more than idle"),
        pytest.param(gpu(IDLE_MIB, (7, 2)), {7: OURS}, 0, IDLE_MIB, 0, False, id="idle is not for a process of ours"),
        pytest.param(
            gpu(21000, (7, None), (8, 900)), {7: OURS, 8: THEIRS}, 20900, 21000, None, False, id="upper bound"
        ),
        pytest.param(gpu(900, (7, 900)), {7: UNKNOWN}, 0, 900, None, False, id="owner unknown"),
        pytest.param(gpu(900, (7, 900)), {}, 0, 900, None, False, id="owner not looked up"),
        pytest.param(gpu(900, processes=None), {}, 1000, 900, None, True, id="no list of processes"),
        pytest.param(gpu(900, (7, 950)), {7: THEIRS}, 0, 0, 950, True, id="processes claim more than is used"),
        pytest.param(gpu(471, v1=True), {}, 0, 0, 0, True, id="v1: the reserve alone is idle"),
        pytest.param(gpu(1200, v1=True), {}, 0, 1200, 0, False, id="v1: more than the reserve"),
    ],
)
def test_verdict(
    reading: GpuReading, owners: dict[int, Owner], budget: int, engine: int, foreign: int | None, within: bool
) -> None:
    evaluation = verdict(reading, owners, budget)
    (found,) = evaluation.gpus
    assert (found.engine_mib, found.foreign_mib, found.within_budget) == (engine, foreign, within)
    assert found.headroom_mib == budget - engine
    assert bool(evaluation.failures) is not within


@pytest.mark.parametrize(
    ("owner", "policy", "failures", "warnings"),
    [
        (THEIRS, "ignore", 0, 0),
        (THEIRS, "warn", 0, 1),
        (THEIRS, "fail", 1, 0),
        (UNKNOWN, "fail", 1, 0),
        (OURS, "fail", 0, 0),
    ],
)
def test_foreign_policy(owner: Owner, policy: Foreign, failures: int, warnings: int) -> None:
    evaluation = verdict(gpu(500, (7, 500)), {7: owner}, 1000, policy)
    assert (len(evaluation.failures), len(evaluation.warnings)) == (failures, warnings)
    for text in (*evaluation.failures, *evaluation.warnings):
        assert "pid 7" in text and str(owner.container) in text


@pytest.mark.parametrize(("used", "warned"), [(20600, False), (20300, False), (20299, True), (0, True), (20900, False)])
def test_far_below_the_expected_is_a_warning(used: int, warned: bool) -> None:
    evaluation = verdict(gpu(used, (7, used)), {7: OURS}, 20900, expected=20600)
    assert not evaluation.failures
    assert [f"{20600 - used} MiB less than the expected 20600" in text for text in evaluation.warnings] == [
        True
    ] * warned


def test_the_paragraph_says_which_how_much_who_and_what_to_do() -> None:
    reading = gpu(21904, (4711, 20604), (99, 1000), index=3)
    evaluation = verdict(reading, {4711: OURS, 99: THEIRS}, 20500)
    for part in (
        "GPU 3 (slot 0, NVIDIA L4, GPU-3)",
        "20904 MiB are in use where its budget of 20500 MiB: 404 MiB too many",
        "20604 MiB by pid 4711, container vllm-e2b, unit vllm-e2b.service",
        "1000 MiB by pid 99, container notebook, not ours",
        "300 MiB by no process",
        "journalctl -u vllm-e2b.service",
    ):
        assert part in evaluation.message
    assert "\n" not in evaluation.message
    replica = Owner("ours", "vllm-e4b-each-1", "vllm-e4b-each-1.service")
    (problem,) = verdict(gpu(21000, (7, 21000)), {7: replica}, 20900).failures
    assert "'vram_budget_mib: 21300' of e4b-each-1 (of e4b-each, if that has replicas) in serving_engines" in problem


def test_every_gpu_over_budget_is_named_and_a_slot_that_nvml_does_not_see_is_a_warning() -> None:
    boards = [gpu(500, index=0), gpu(0, index=1), gpu(700, index=2)]
    evaluation = evaluate(boards, {}, Limits({}, {}), ["GPU-1", "GPU-gone"])
    assert len(evaluation.failures) == 2
    assert "GPU 0 (no slot" in evaluation.message and "GPU 2 (no slot" in evaluation.message
    assert evaluation.warnings == ("NVML does not see slot 1, GPU-gone; nothing is known about it.",)


# ---- budgets ----------------------------------------------------------------------------------------------------

BOARDS = (gpu(0, index=0), gpu(0, index=1), gpu(0, index=2))
SLOTS = ["GPU-1", "GPU-0", "GPU-gone"]


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({"0": 5}, {"GPU-1": 5}),
        ({0: 5, 1: 6}, {"GPU-1": 5, "GPU-0": 6}),
        ({"GPU-0": "20900"}, {"GPU-0": 20900}),
        ({"GPU-0": 23034}, {"GPU-0": 23034}),
        ({"1": 0}, {"GPU-0": 0}),
    ],
)
def test_budgets_by_slot_and_uuid(budgets: dict[Any, Any], expected: dict[str, int]) -> None:
    assert resolve_mib("budgets", budgets, BOARDS, SLOTS) == expected


@pytest.mark.parametrize(
    ("budgets", "teaches"),
    [
        ({"3": 5}, "names slot 3, but this host has the slots 0 to 2"),
        ({2: 5}, "names slot 2, which is GPU-gone, but NVML does not see that GPU"),
        ({"0": 23035}, "GPU-1 (NVIDIA L4) has 23034 MiB in all, so it could never be exceeded. Is it in another unit"),
        ({"GPU-9": 5}, "names GPU-9, but NVML does not see that GPU. It sees GPU-0 (slot 1, NVIDIA L4"),
        ({"GPU-9": 5}, "GPU-2 (no slot, NVIDIA L4 at 00000000:02:00.0)"),
        ({"0": -1}, "budgets[0] is -1: MiB cannot be negative"),
        ({"0": 20.5}, "budgets[0] is 20.5: write a whole number of MiB"),
        ({"0": 0.9}, "A share of the GPU is no budget"),
        ({"0": "20GiB"}, "GB and GiB are never guessed"),
        ({"0": True}, "budgets[0] is True: write a whole number of MiB"),
        ({"0": 5, "GPU-1": 5}, "names the same GPU twice, as 0 and as GPU-1"),
    ],
)
def test_budgets_that_are_refused(budgets: dict[str, Any], teaches: str) -> None:
    with pytest.raises(BudgetError) as refused:
        resolve_mib("budgets", budgets, BOARDS, SLOTS)
    assert teaches in str(refused.value)


# ---- standing still ---------------------------------------------------------------------------------------------


STILL, OVER = gpu(100, (7, 100)), gpu(500, (7, 500))
HAS_ENDED = Owner("unknown", reason=ENDED)


@pytest.mark.parametrize(
    ("samples", "owner", "budget", "timeout_s", "expected"),
    [
        pytest.param([STILL], OURS, 200, 30, (True, 2, 1.0, 0), id="two equal samples"),
        pytest.param([STILL], OURS, 200, 0, (False, 1, 0.0, 0), id="no time"),
        *(
            pytest.param(
                [gpu(1000 + step * n, (7, 1000)) for n in range(4)], OURS, 20000, 30, expected, id=f"{step} MiB more"
            )
            for step, expected in ((15, (True, 2, 1.0, 0)), (16, (True, 5, 4.0, 0)))
        ),
        pytest.param(
            [gpu(1000 * n, (7, 1000 * n)) for n in range(20)], OURS, 20000, 5, (False, 6, 5.0, 0), id="never still"
        ),
        pytest.param([gpu(500)] * 6 + [gpu(0)], OURS, 0, 30, (True, 8, 7.0, 0), id="what no process holds has time"),
        pytest.param([gpu(500)], OURS, 0, 10, (True, 11, 10.0, 1), id="what stays is an orphan"),
        pytest.param([OVER], OURS, 400, 30, (True, 2, 1.0, 1), id="a process is not waited for"),
        pytest.param(
            [OVER] * 2 + [gpu(0)], HAS_ENDED, 0, 30, (True, 4, 3.0, 0), id="one that ended is looked at again"
        ),
    ],
)
def test_samples_are_taken_until_the_memory_stands_still(
    samples: list[GpuReading], owner: Owner, budget: int, timeout_s: float, expected: tuple[bool, int, float, int]
) -> None:
    """One a second; the last one repeats, and is the one that is judged."""
    clock, limits = Clock(), Limits({"GPU-0": budget}, {})
    clock.now = 0.0

    def read() -> HostReading:
        return HostReading("580", (samples[min(int(clock.now), len(samples) - 1)],))

    found = settle(
        read, lambda seen: evaluate(seen.gpus, {7: owner}, limits), timeout_s, clock=clock, sleep=clock.sleep
    )
    assert (found.settled, found.samples, clock.now, len(found.evaluation.failures)) == expected
    assert found.evaluation.gpus[0].reading == read().gpus[0]
