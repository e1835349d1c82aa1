# SPDX-License-Identifier: Apache-2.0
"""Where the controller keeps keys, reports and records."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.vllm_edge.inventory import reports


def test_each_inventory_has_a_directory_of_its_own() -> None:
    files = ["/site/hosts.yml", "/site/prod.yml", "/site/staging.yml", "/site/prod.ini", "/lab/hosts.yml"]
    places = [reports.locate_reports(file) for file in files]
    assert places[:2] == ["/site/reports", "/site/reports/prod.yml"] and len({*places}) == len(places)
    assert [reports.locate_reports(given) for given in ("gpu1,", "", None)] == [""] * 3


def test_hosts_that_would_write_one_file_are_refused() -> None:
    assert reports.find_fault("/r", [], [], ["gpu", "gpu-2", "gpu-ca", "indexed"]) == ""
    for hosts, said in (
        (["gpu", "gpu-status"], "gpu-status.json of host gpu-status is that of host gpu, too"),
        (["gpu-status", "gpu"], "gpu-status.json of host gpu is that of host gpu-status, too"),
        (["Index"], "index.html of host Index is that of the index, too"),
        (["gpu", "GPU"], "gpu.html of host GPU is that of host gpu, too"),
        (["a.row"], "a.row.json of host a.row is that of the row of host a, too"),
    ):
        fault = reports.find_fault("/r", [], [], hosts)
        assert fault.startswith("serving_reports_directory: '/r' ") and f" hosts: {said}; rename one of them" in fault
    hostvars = {"a": {"serving_reports_directory": "/r/"}, "A": {"serving_reports_directory": "/other"}, "b": {}}
    assert reports.list_hosts("/r", {"gpu_hosts": list(hostvars)}, hostvars) == ["a", "b"]


def test_a_place_where_keys_are_lost_or_read_is_refused(tmp_path: Path) -> None:
    """A checkout whose collection is a link to itself, and a collection that ansible-galaxy has installed."""
    inventory = tmp_path / "project/inventories/lab"
    inventory.mkdir(parents=True)
    linked = tmp_path / "project/collections/ansible_collections/edge/vllm_edge"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(tmp_path / "project")
    ignored = ["^(model_facts|reports)$"]
    for place in (inventory, linked / "inventories/lab"):
        assert reports.find_fault(f"{place}/reports/prod.yml", [str(place)], ignored) == ""
    assert reports.find_fault(f"{inventory}/reports", [f"{inventory}/hosts.yml"], []) == ""
    for directory, patterns, said in (
        (f"{inventory}/reports", ["^facts$"], "whose files Ansible reads as inventories"),
        ("/usr/share/ansible_collections/edge/vllm_edge/inventories/x/reports", ignored, "an installed collection"),
        ("out/reports", ignored, "is no absolute path"),
        ("", ignored, "no inventory file defines this host"),
    ):
        fault = reports.find_fault(directory, [str(inventory)], patterns)
        assert fault.startswith(f"serving_reports_directory: {directory!r} ") and said in fault
        assert f"such as {Path.home()}/vllm-edge-reports." in fault
