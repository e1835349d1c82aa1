# SPDX-License-Identifier: Apache-2.0
"""Which GPU is which slot: the pure plan, and the module over simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.gpu.slots import SlotError, parse, plan
from ansible.module_utils.vllm_edge.system.nvml import GpuIdentity

from lab.nvidia.testing import UUIDS, LabRoot

Run = Callable[..., dict[str, Any]]

CARDS = [GpuIdentity(number, uuid, "NVIDIA L4", f"00000000:{number:02X}:00.0") for number, uuid in enumerate(UUIDS)]
RECORD = plan(None, "", CARDS).after
NEW = GpuIdentity(3, "GPU-00000000-0000-0000-0000-00000000ffff", "NVIDIA L4", "00000000:CA:00.0")


def test_the_first_run_orders_by_bus_and_records() -> None:
    first = plan(None, "", list(reversed(CARDS)), minimum=4)
    assert (first.uuids, first.source, first.changed) == (list(UUIDS), "discovered", True)
    assert [slot.uuid for slot in parse(first.after)] == list(UUIDS)
    assert yaml.safe_load(first.paste) == {"gpu_uuids": list(UUIDS)}, "the lines that an operator pastes"


def test_a_later_run_uses_the_record_whatever_the_buses_are() -> None:
    moved = [GpuIdentity(3 - card.index, card.uuid, card.name, card.pci_bus_id) for card in CARDS]
    again = plan(None, RECORD, moved)
    assert (again.uuids, again.source, again.changed) == (list(UUIDS), "recorded", False)
    # A card in another place keeps its slot, and the record learns the place.
    again = plan(None, RECORD, [*CARDS[:3], GpuIdentity(3, UUIDS[3], "NVIDIA L4", "00000000:FF:00.0")])
    assert (again.uuids, again.changed) == (list(UUIDS), True)
    assert '"00000000:FF:00.0"' in again.after


def test_the_inventory_decides_and_the_record_follows() -> None:
    turned = list(reversed(UUIDS))
    declared = plan(turned, RECORD, CARDS)
    assert (declared.uuids, declared.source, declared.changed) == (turned, "declared", True)
    assert plan(turned, declared.after, CARDS).changed is False
    assert plan(None, declared.after, CARDS).uuids == turned
    assert plan(UUIDS, "{", CARDS).uuids == list(UUIDS), "it does not need the record"


@pytest.mark.parametrize(
    ("declared", "record", "present", "minimum", "teaches"),
    [
        pytest.param(
            None, RECORD, [*CARDS[:3], NEW], 1,
            f"It sees without a slot: {NEW.uuid} (NVIDIA L4 at 00000000:CA:00.0). If that is the exchanged card",
            id="card exchanged",
        ),
        pytest.param(UUIDS, RECORD, CARDS[1:], 1, f"slot 0, {UUIDS[0]} (NVIDIA L4, last seen", id="declared card gone"),
        pytest.param([NEW.uuid], "", CARDS, 1, f"slot 0, {NEW.uuid} (never seen on this host)", id="declared, unknown"),
        pytest.param([UUIDS[0], UUIDS[0].replace("f", "F")], "", CARDS, 1, "2 times, as slots 0 and 1", id="twice"),
        pytest.param([UUIDS[0], "00000000:17:00.0"], "", CARDS, 1, "gpu_uuids[1] is '00000000:17:00.0'", id="a bus id"),
        pytest.param(UUIDS[:2], "", CARDS, 3, "add to gpu_uuids what the profile may use", id="too few declared"),
        pytest.param(None, "", [], 1, "needs 1 GPUs, but NVML has 0", id="none"),
        pytest.param(None, "{", CARDS, 1, "is not a record of GPU slots", id="no JSON"),
        pytest.param(None, "[]", CARDS, 1, "is not a record of GPU slots", id="other JSON"),
        pytest.param(None, '{"version": 1, "gpus": [{}]}', CARDS, 1, "is not a record of GPU slots", id="no uuid"),
        pytest.param(None, '{"version": 9, "gpus": []}', CARDS, 1, "is of version 9", id="newer record"),
        pytest.param(
            None, RECORD.replace(UUIDS[1], UUIDS[0]), CARDS, 1, f"names {UUIDS[0]} 2 times", id="recorded twice"
        ),
    ],
)  # fmt: skip
def test_refused(
    declared: list[str] | None, record: str, present: list[GpuIdentity], minimum: int, teaches: str
) -> None:
    with pytest.raises(SlotError) as refused:
        plan(declared, record, present, minimum)
    assert teaches in str(refused.value)


# ---- the module -------------------------------------------------------------------------------------------------


@pytest.fixture
def settle_slots(run_module: Run, tmp_path: Path) -> Run:
    def run(*, check: bool = False, **options: Any) -> dict[str, Any]:
        return run_module("gpu_slots", {"path": str(tmp_path / "gpu-slots.json"), **options}, check=check)

    return run


def test_check_apply_again(
    gpus: LabRoot, settle_slots: Run, tmp_path: Path, on_the_disk: Callable[[Path], bool]
) -> None:
    path = tmp_path / "gpu-slots.json"
    foreseen = settle_slots(check=True)
    assert not path.exists()
    applied = settle_slots()
    assert (foreseen["changed"], applied["changed"]) == (True, True)
    assert foreseen["diff"] == applied["diff"]
    assert path.read_text() == applied["diff"]["after"]
    assert path.stat().st_mode & 0o7777 == 0o644
    assert on_the_disk(path)
    path.chmod(0o600)
    assert settle_slots(check=True)["changed"] and settle_slots()["changed"], "others read it, too"
    again = settle_slots()
    assert (again["changed"], again["uuids"], again["source"]) == (False, list(UUIDS), "recorded")
    assert settle_slots(check=True)["changed"] is False
    turned = list(reversed(UUIDS))
    assert settle_slots(gpu_uuids=turned, check=True)["changed"] is True
    updated = settle_slots(gpu_uuids=turned)
    assert (updated["changed"], updated["uuids"], updated["source"]) == (True, turned, "declared")


def test_a_card_that_is_gone_or_lost_is_an_error_and_the_record_stays(
    gpus: LabRoot, settle_slots: Run, tmp_path: Path
) -> None:
    settle_slots()
    before = (tmp_path / "gpu-slots.json").read_text()
    gpus.set_fault(1, "gpu-lost")
    result = settle_slots()
    assert (result["rc"], result["nvml"]["code"], result["nvml"]["gpu"]) == (1, "GPU_IS_LOST", UUIDS[1])
    assert "slot 1" in result["msg"]
    (gpus.gpu(1) / "board").unlink()
    result = settle_slots()
    assert result["rc"] == 1
    assert f"slot 1, {UUIDS[1]} (NVIDIA L4, last seen at 00000000:31:00.0)" in result["msg"]
    assert (tmp_path / "gpu-slots.json").read_text() == before


def test_too_few_cards_fail_and_a_new_one_is_a_warning(gpus: LabRoot, settle_slots: Run, tmp_path: Path) -> None:
    for options, *told in (
        ({"minimum": 5}, "needs 5 GPUs, but NVML has 4"),
        ({"gpu_uuids": [UUIDS[0], UUIDS[0]], "python": "/nonexistent/python"}, "Every slot is another card"),
        ({"path": str(tmp_path / "absent" / "slots.json")}, "does not exist", "vllm_edge_host"),
    ):
        result = settle_slots(**options)
        assert result["rc"] == 1 and all(text in result["msg"] for text in told), result
    result = settle_slots(gpu_uuids=list(UUIDS[:3]), minimum=3)
    assert (result["rc"], result["uuids"]) == (0, list(UUIDS[:3]))
    assert f"{UUIDS[3]} (NVIDIA L4 at 00000000:CA:00.0) has no slot and stays unused" in result["warnings"][0]
    gpus.set_fault(0, "compute-mode", "Prohibited")
    assert f"'nvidia-smi -i {UUIDS[0]} -c DEFAULT'" in settle_slots(check=True)["warnings"][0]


@pytest.mark.parametrize(("check", "rc"), [(True, 0), (False, 1)])
def test_without_a_driver(gpus: LabRoot, settle_slots: Run, tmp_path: Path, check: bool, rc: int) -> None:
    gpus.set_module(None)
    result = settle_slots(check=check, gpu_uuids=list(UUIDS[:2]))
    assert (result["rc"], result.get("skipped", False)) == (rc, check)
    assert "The NVIDIA kernel module is not loaded." in result["msg"]
    if check:
        assert result["uuids"] == list(UUIDS[:2])
