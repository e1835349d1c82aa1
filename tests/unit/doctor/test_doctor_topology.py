# SPDX-License-Identifier: Apache-2.0
"""IOMMU, bridges and peer-to-peer: what becomes environment and arguments of engines, and what is only advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.doctor.checks import topology as checks_of
from ansible.module_utils.vllm_edge.doctor.contract import Verdict
from ansible.module_utils.vllm_edge.facts.model import DEFAULT_SHM_BYTES as SMALL
from ansible.module_utils.vllm_edge.facts.reader import Reader
from ansible.module_utils.vllm_edge.gpu import topology
from ansible.module_utils.vllm_edge.gpu.topology import Card, Recommendation, Topology, Xid
from ansible.module_utils.vllm_edge.system.host import Unread
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, GPUS, FakeHost

GIB = 1024**3
ONE = Card(GPUS[0], BUSES[0], iommu="off", redirecting=())
TWO = Card(GPUS[1], BUSES[1], iommu="off", redirecting=())
OK = {GPUS: "OK"}
TRANSLATES = replace(TWO, iommu="DMA-FQ")
BRIDGED = replace(TWO, redirecting=("0000:30:01.0",))


def together(*cards: Card, peers: dict[tuple[str, str], str] | Unread | None = None) -> Topology:
    return Topology(cards, OK if peers is None else peers, ())


def check(judge: Callable[[Any], Verdict], given: Topology, *engines: Any) -> Verdict:
    return judge(SimpleNamespace(topology=given, serving=SimpleNamespace(engines=engines)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (together(ONE, TWO), ""),
        (together(ONE, replace(TWO, iommu="identity")), ""),
        (together(ONE, replace(TWO, iommu=Unread("x"), redirecting=Unread("x"))), ""),
        (together(ONE, TRANSLATES), f"the IOMMU translates the addresses of {BUSES[1]} (DMA-FQ)"),
        (together(ONE, BRIDGED), "Access Control Services of 0000:30:01.0"),
        # What the driver offers is not known: to be careful costs speed, to be careless results.
        (together(ONE, TRANSLATES, peers=Unread("x")), "the IOMMU translates"),
        # No peer-to-peer is offered, so nobody uses it.
        (together(ONE, TRANSLATES, peers={GPUS: "CNS"}), ""),
        # One GPU has no peer.
        (together(TRANSLATES), ""),
    ],
)
def test_what_engines_over_several_gpus_need(given: Topology, reason: str) -> None:
    found = topology.correctness(given)
    assert any(reason in told for told in found.reasons) if reason else found == Recommendation()
    if reason:
        assert found.environment == {"NCCL_P2P_DISABLE": "1"}
        assert found.arguments == ["--disable-custom-all-reduce"]
        assert check(checks_of.check_iommu, given).state == "warn"


def acs(control: int, *, at: int = 0x148, before: int = 0x0001) -> bytes:
    """A configuration space with one capability before Access Control Services."""
    config = bytearray(4096)
    config[0x100:0x104] = (before | 1 << 16 | at << 20).to_bytes(4, "little")
    config[at : at + 4] = (topology.ACS_CAPABILITY | 1 << 16).to_bytes(4, "little")
    config[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(config)


CIRCLE = acs(1)[:0x148] + (0x0002 | 0x100 << 20).to_bytes(4, "little") + acs(1)[0x14C:]


@pytest.mark.parametrize(
    ("config", "control"),
    [(acs(0x1D), 0x1D), (acs(0), 0), (bytes(4096), None), (bytes(256), None), (acs(1, at=0x100), 1), (CIRCLE, None)],
)
def test_access_control_services_in_a_configuration_space(config: bytes, control: int | None) -> None:
    assert topology.find_acs_control(config) == control


def test_a_bridge_that_keeps_the_gpus_apart(host: FakeHost) -> None:
    bridge = host.bus(BUSES[1])
    (bridge / "config").write_bytes(acs(0x01))  # it only checks who speaks
    assert host.not_ok() == {}
    (bridge / "config").write_bytes(acs(0x1D))
    found = host.examine()
    check = next(check for check in found["checks"] if check["check"] == "topology.iommu")
    assert (check["state"], bridge.name in check["evidence"]) == ("warn", True)
    assert "NCCL_P2P_DISABLE=1" in check["remedy"] and "--disable-custom-all-reduce" in check["remedy"]
    assert found["recommendation"]["environment"] == {"NCCL_P2P_DISABLE": "1"}
    assert bridge.name in found["recommendation"]["reasons"][0]


@pytest.fixture
def ask(run_module: Callable[..., dict[str, Any]], host: FakeHost) -> Callable[..., dict[str, Any]]:
    """Runs the module for roles on the host."""
    return partial(run_module, "host_facts", replace={"RuntimeReader": lambda root: host.reader})


def test_the_module_reads_what_it_judges_and_no_more(
    ask: Callable[..., dict[str, Any]], host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "plain", lambda self, path: pytest.fail(f"{path} was read"))
    assert ask({"peer_to_peer": "auto"})["environment"] == {}
    assert [line.split(" --format")[0] for line in host.asked] == [
        "nvidia-smi --query-gpu=uuid,pci.bus_id",
        "nvidia-smi topo -p2p r",
    ]
    bridge = host.bus(BUSES[1])
    (bridge / "config").write_bytes(acs(0x1D))
    found = ask({"peer_to_peer": "auto"}, check=True)
    assert (found["rc"], found["changed"], found["environment"]) == (0, False, {"NCCL_P2P_DISABLE": "1"})
    assert found["arguments"] == ["--disable-custom-all-reduce"] and bridge.name in found["reasons"][0]


def test_the_module_forbids_without_a_look(ask: Callable[..., dict[str, Any]], host: FakeHost) -> None:
    found = ask({"peer_to_peer": "forbidden"})
    assert host.asked == []
    assert (found["rc"], found["changed"], found["environment"]) == (0, False, {"NCCL_P2P_DISABLE": "1"})
    assert found["arguments"] == ["--disable-custom-all-reduce"]
    assert found["reasons"] == ["vllm_engine_peer_to_peer says so"]
    refused = ask({"peer_to_peer": "allowed"})
    assert refused["rc"] != 0 and "must be one of: auto, forbidden" in refused["msg"]


@pytest.mark.parametrize(("kind", "state"), [("identity", "ok"), ("DMA", "warn"), ("DMA-FQ", "warn")])
def test_iommu_groups(host: FakeHost, kind: str, state: str) -> None:
    for number, bus in enumerate(BUSES):
        host.write(f"sys/kernel/iommu_groups/{number}/type", f"{kind}\n")
        host.link(f"sys/bus/pci/devices/{bus}/iommu_group", f"../../../../kernel/iommu_groups/{number}")
    check = host.checks()["topology.iommu"]
    assert (check["state"], kind in check["evidence"]) == (state, True)
    host.answers["nvidia-smi topo"] = Ran(0, " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n")
    checks = host.checks()
    assert (checks["topology.iommu"]["state"], checks["topology.peer-to-peer"]["state"]) == ("ok", "ok")
    assert f"no peer-to-peer between {BUSES[0]} and {BUSES[1]} (CNS)" in checks["topology.peer-to-peer"]["evidence"]


def test_the_matrix_of_peers() -> None:
    text = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tNS\t\n GPU1\tOK\tX\tOK\t\n GPU2\tNS\tOK\tX\t\n\nLegend:\n"
    assert topology.parse_peers(text, ["a", "b", "c"]) == {("a", "b"): "OK", ("a", "c"): "NS", ("b", "c"): "OK"}
    assert topology.parse_peers("Invalid combination of input arguments.", ["a", "b"]) == {}


def test_a_driver_that_names_no_pairs_is_not_known(host: FakeHost) -> None:
    host.answers["nvidia-smi topo"] = Ran(2, "Invalid combination of input arguments. Please run 'nvidia-smi -h'")
    assert host.not_ok() == {"topology.peer-to-peer": "unknown"}


def test_xids() -> None:
    text = (
        "kernel: NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "kernel: NVRM: GPU at PCI:0000:17:00: GPU-1\n"
        "kernel: NVRM: Xid (PCI:0000:B1:00): 31, Ch 00000008\n"
    )
    found = topology.parse_xids(text)
    assert [(xid.bus, xid.number) for xid in found] == [("0000:17:00", 79), ("0000:b1:00", 31)]
    assert "fallen off the bus" in found[0].line
    (instance,) = topology.parse_xids("NVRM: Xid (PCI:0009:01:00.0 GPU-I:05): 43, pid=7")
    assert (instance.bus, instance.number) == ("0009:01:00", 43)
    grave_first = Topology((ONE,), {}, (Xid("0000:17:00", 48, "48"), Xid("0000:17:00", 31, "31")))
    assert check(checks_of.check_xid, grave_first).state == "fail", "it is not hidden by others"


def test_gpus_of_one_engine_on_two_nodes(host: FakeHost) -> None:
    device = host.root / "sys/bus/pci/devices" / BUSES[1] / "numa_node"
    device.write_text("1\n")
    assert host.not_ok() == {}  # nobody uses both
    host.engine("31b", 8050, GPUS)
    check = host.checks()["topology.numa"]
    assert (check["state"], "GPUs of 31b are on more than one node" in check["evidence"]) == ("warn", True)
    for bus in BUSES:
        (host.root / "sys/bus/pci/devices" / bus / "numa_node").write_text("-1\n")
    assert host.checks()["topology.numa"]["evidence"] == "the host has one NUMA node"
    for node in (0, 1):
        host.write(f"sys/devices/system/node/node{node}/cpulist", "0\n")
    check = host.checks()["topology.numa"]
    assert check["state"] == "unknown" and f"on which are {BUSES[0]}, {BUSES[1]}" in check["evidence"]


def test_a_driver_with_the_older_name_of_the_clocks_that_counts_no_errors(host: FakeHost) -> None:
    assert {gpu["pcie.link.gen.current"] for gpu in host.gpus} == {"1"}, "an idle GPU saves power"
    check = host.checks()["topology.pcie"]
    assert (check["group"], check["state"], check["remedy"]) == ("topology", "ok", "")
    for gpu in host.gpus:
        gpu["clocks_throttle_reasons.active"] = gpu.pop("clocks_event_reasons.active").replace("1", "8")
    assert host.not_ok() == {"topology.power": "warn"}
    for gpu in host.gpus:
        del gpu["remapped_rows.failure"]
    assert "errors are not counted" in host.checks()["topology.ecc"]["evidence"]


def test_a_lower_power_limit_and_ecc_off_are_advice(host: FakeHost) -> None:
    host.gpus[0] |= {"power.limit": "60.00", "ecc.mode.current": "Disabled"}
    checks = host.checks()
    assert host.not_ok() == {}
    assert "60 of 72 W" in checks["topology.power"]["evidence"] and checks["topology.power"]["remedy"]
    assert "ECC is off" in checks["topology.ecc"]["evidence"] and checks["topology.ecc"]["remedy"]


@pytest.mark.parametrize(
    ("gpus", "shm_bytes", "state"),
    [(GPUS, 4 * GIB, "ok"), (GPUS, SMALL, "warn"), (GPUS[:1], SMALL, "ok"), (GPUS, 17 * GIB, "warn")],
)
def test_shared_memory(gpus: tuple[str, ...], shm_bytes: int, state: str) -> None:
    engine = SimpleNamespace(name="a", gpus=gpus, shm_bytes=shm_bytes)
    given = Topology((ONE, TWO), OK, (), 16 * GIB, 8 * GIB)
    assert check(checks_of.check_shared_memory, given, engine).state == state
    assert check(checks_of.check_shared_memory, replace(given, shm_bytes=None), engine).state == "fail"
