# SPDX-License-Identifier: Apache-2.0
"""What can be known to fail is said before anything is touched, all of it at once."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation.model import Generation, Limits
from ansible.module_utils.vllm_edge.gpu.owners import Owner
from ansible.module_utils.vllm_edge.switch.model import Done, Moves
from ansible.module_utils.vllm_edge.system import space
from ansible.module_utils.vllm_edge.system.docker import parse_listed
from ansible.module_utils.vllm_edge.system.systemd import Systemd
from ansible.module_utils.vllm_edge.weights.record import Record
from ansible.module_utils.vllm_edge.weights.verification import observe
from fake_host import Bench, failure, never, write
from generations import engine

from lab.nvidia.testing import UUIDS, LabRoot

SHARD = "model-00001-of-00001.safetensors"


def recorded(root: Path, model: str = "e2b") -> tuple[Path, Path]:
    """A directory of weights and the record of it."""
    directory = root / "weights" / model
    files = {name: write(directory / name, text) for name, text in ((SHARD, "w" * 4000), ("config.json", "{}"))}
    sums = {name: hashlib.sha256(place.read_bytes()).hexdigest() for name, place in files.items()}
    known = {name: observe(place, sums[name]) for name, place in files.items()}
    record = Record(model, f"google/{model}", "main", "c" * 40, str(directory), "hub", known)
    return directory, write(root / "records" / f"{model}.json", record.to_json())


class ReadyHost(Bench):
    """A host on which everything is as it should be."""

    def __init__(self, root: Path, boards: LabRoot) -> None:
        super().__init__(root)
        self.boards = boards
        self.directory, self.record = recorded(root)

    def generation(self, foreign: str = "warn", **config: Any) -> Generation:
        settings = {"weights_path": str(self.directory), "weights_record": str(self.record), "gpus": [UUIDS[1]]}
        return self.stored(engine("e2b", **(settings | config)), foreign=foreign)

    def check(self, wanted: Generation | None = None, **moves: tuple[str, ...]) -> Done:
        return self.machine.preflight(wanted or self.generation(), Moves(**{"start": ("e2b",), **moves}))

    def refused(self, wanted: Generation | None = None) -> str:
        return failure(lambda: self.check(wanted)).text


@pytest.fixture
def bench(tmp_path: Path, gpus: LabRoot) -> ReadyHost:
    return ReadyHost(tmp_path, gpus)


def test_a_limit_below_the_planned_load_is_a_warning(bench: ReadyHost) -> None:
    wanted, longer = (
        bench.generation(plan={"gpus": [], "load_s": {"low": 40, "mid": 100, "high": high}}) for high in (700, 7000)
    )
    assert bench.check(wanted).warnings == ()
    assert bench.check(longer).warnings == (), "the default limit is raised"
    (warning,) = bench.check(replace(wanted, limits=Limits(healthy_timeout_s=300))).warnings
    assert warning.startswith("vllm_engine_healthy_timeout_s is 300, and engine e2b may take up to 700 s to load")
    assert warning.endswith("the switch fails if it does. Set 700 or more.")


def test_all_that_is_wrong_with_what_starts_is_said_at_once(bench: ReadyHost, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.docker.images = {}
    (bench.directory / SHARD).unlink()
    with bench.boards.claim(1, 20_000):
        assert bench.machine.preflight(bench.generation(foreign="fail"), Moves(keep=("e2b",))).warnings == ()
    bench.boards.set_fault(1, "gpu-lost")
    monkeypatch.setitem(space.STEPS, "switch", space.Step({"state": 10**12}, ""))
    text = bench.refused()
    for part in ("Image vllm-edge/vllm:1", f"{SHARD} is missing", "fallen off", "MiB free"):
        assert part in text


@pytest.mark.parametrize("point", ["before_drain", "after_commit"])
def test_a_hook_that_others_may_write_is_refused_before_anything_is_touched(bench: ReadyHost, point: str) -> None:
    hook = write(bench.machine.paths.hook_dir(point) / "10-ours", "#!/bin/sh\n")
    hook.chmod(0o777)
    assert f"{hook} has mode 0777, so that others may write it" in bench.refused()
    hook.chmod(0o755)
    assert isinstance(bench.check(), Done)


def test_secrets_that_are_gone_and_a_docker_that_does_not_answer_are_refused(bench: ReadyHost) -> None:
    told = bench.refused(bench.generation(secrets_hash="0" * 64))
    assert f"The secrets of engine e2b are not on this host ({bench.machine.paths.secret_file('e2b')})" in told
    mount = f"--mount=type=bind,source={bench.machine.paths.policies / ('0' * 64)},target=/policy,readonly"
    told = bench.refused(bench.generation(note=mount))
    assert "Engine e2b cannot start, the file by which it judges requests" in told and "No such file" in told
    bench.docker.away = "connection refused"
    assert "The Docker Engine did not answer for 60 s (connection refused)" in bench.refused()


def test_an_image_that_is_absent_or_another_one(bench: ReadyHost) -> None:
    bench.docker.images = {}
    assert (
        "Image vllm-edge/vllm:1 (sha256:11) of e2b is not on this host: "
        "'ansible-playbook playbooks/image.yml' brings it." in bench.refused()
    )
    # The name leads elsewhere, and the engine's image is gone: its id is asked for.
    bench.docker.images = {"vllm-edge/vllm:1": "sha256:22"}
    assert "(sha256:11) of e2b is not on this host" in bench.refused()
    bench.docker.images["somebody/else:1"] = "sha256:11"
    assert bench.check(bench.generation())
    # An older generation does not say which image it means.
    assert bench.check(bench.generation(image_id=""))


def test_weights_by_file(bench: ReadyHost) -> None:
    place = bench.directory / SHARD
    place.write_text("w" * 3999)
    text = bench.refused()
    assert f"In {bench.directory}, the weights of e2b (google/e2b): {SHARD} is damaged" in text
    assert "it has 3999 bytes, 4000 are expected" in text and "-e verify_weights=full' brings" in text
    place.write_text("x" * 4000)
    assert f"{SHARD} is damaged (its sha256 is" in bench.refused()
    place.write_text("w" * 4000)
    os.utime(place, (1, 1))
    assert bench.check()
    place.unlink()
    assert f"{SHARD} is missing" in bench.refused()


def test_weights_without_a_record_behind_a_link_or_unreadable(bench: ReadyHost, tmp_path: Path) -> None:
    absent = tmp_path / "absent.json"
    assert f"are not recorded in {absent}: 'ansible-playbook playbooks/weights.yml'" in bench.refused(
        bench.generation(weights_record=str(absent))
    )
    other = bench.generation(weights_path="/data/other")
    assert f"are recorded at {bench.directory}, the engine reads /data/other: run site.yml" in bench.refused(other)
    done = bench.check(bench.generation(weights_record=""))
    assert "were not looked at: the generation names no record" in done.warnings[0]
    # The record has the directory itself, the engine the path of the inventory.
    link = tmp_path / "data"
    link.symlink_to(bench.directory.parent, target_is_directory=True)
    wanted = bench.generation(weights_path=str(link / bench.directory.name))
    assert bench.check(wanted).warnings == ()
    bench.record.unlink()
    bench.record.mkdir()
    assert "cannot be read: " in bench.refused() and "Is the disk mounted?" in bench.refused()


def test_containers_as_docker_lists_them() -> None:
    labels = {"vllm-edge.engine": "e2b", "vllm-edge.input-hash": "ab12"}
    listed = parse_listed({"Id": "c" * 64, "Names": ["/vllm-e2b"], "State": "running", "Labels": labels})
    assert (listed.name, listed.engine, listed.input_hash, listed.running) == ("vllm-e2b", "e2b", "ab12", True)
    bare = parse_listed({"Id": "c" * 64, "Names": None, "Labels": None})
    assert (bare.name, bare.engine, bare.running) == ("c" * 12, None, False)


def test_a_disk_that_is_full(bench: ReadyHost, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bench.generation()
    found = os.statvfs(bench.paths.state)
    frozen = os.statvfs_result((found.f_bsize, 4096, *found[2:4], 100, *found[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: frozen)
    text = bench.refused(wanted)
    assert f"the file system of {bench.paths.state}" in text and "has 0 MiB free, and 64 MiB have to be" in text


def test_a_card_that_was_exchanged_or_has_no_driver(bench: ReadyHost) -> None:
    other = "GPU-00000000-0000-0000-0000-000000000000"
    text = bench.refused(bench.generation(gpus=[other]))
    assert f"NVML does not see {other}; it sees {UUIDS[0]}" in text and "gpu_uuids" in text
    bench.boards.set_module(None)
    assert "The GPUs cannot be read: The NVIDIA kernel module is not loaded." in bench.refused()


@pytest.mark.parametrize(
    ("fault", "told", "remedy"),
    [
        (("compute-mode", "Prohibited"), "CUDA refuses every process", f"'nvidia-smi -i {UUIDS[1]} -c DEFAULT'"),
        (("mig",), "is in MIG mode", f"'nvidia-smi -i {UUIDS[1]} -mig 0'"),
        (("recovery-action", 1), "the recovery action Reset", f"--gpu-reset -i {UUIDS[1]}"),
        (("recovery-action", 2), "the recovery action Reboot", "a reboot of the host"),
    ],
)
def test_a_gpu_that_cuda_refuses(bench: ReadyHost, fault: tuple[Any, ...], told: str, remedy: str) -> None:
    bench.boards.set_fault(2, *fault)
    assert bench.check().warnings == (), "no engine is to use that one"
    bench.boards.set_fault(1, *fault)
    text = bench.refused()
    assert f"GPU 1 (NVIDIA L4, {UUIDS[1]})" in text and told in text and remedy in text
    assert bench.machine.preflight(bench.generation(), Moves(keep=("e2b",))).warnings == ()


def test_a_gpu_for_one_process(bench: ReadyHost) -> None:
    bench.boards.set_fault(1, "compute-mode", "Exclusive_Process")
    assert bench.check().warnings == (), "the engine has it alone"
    with bench.boards.claim(1, 1_000):
        assert "allows one process, and has 2 users" in bench.refused()
    both = bench.stored(*(engine(name, gpus=[UUIDS[1]]) for name in ("e2b", "e4b")))
    assert "allows one process, and has 2 users" in bench.refused(both)
    bench.boards.clear_fault(1, "compute-mode")
    bench.boards.set_fault(1, "recovery-action", 4)
    assert "recovery action Drain and Reset" in bench.check().warnings[0], "it works until then"


def test_other_peoples_processes_by_policy_and_memory_of_engines_that_stop(bench: ReadyHost) -> None:
    with bench.boards.claim(1, 1_000) as pid:
        who = f"GPU 1 (NVIDIA L4, {UUIDS[1]}), which engine e2b is to use, is used by others: pid {pid} ("
        text = bench.refused(bench.generation(foreign="fail"))
        assert who in text and "foreign is fail: stop them" in text
        assert who in bench.check().warnings[0]
        assert bench.check(bench.generation(foreign="ignore")).warnings == ()
        for foreign in ("warn", "ignore"):
            text = bench.refused(bench.generation(foreign=foreign, vram_budget_mib=22_000))
            assert who in text and "The 21564 MiB beside them are less than the budget of 22000 MiB" in text
        bench.boards.set_fault(1, "no-process-memory")
        assert bench.check().warnings[0].endswith("NVML does not say how much they hold.")
    with bench.boards.claim(2, 20_000):
        assert bench.check(bench.generation(foreign="fail")).warnings == ()
    bench.boards.clear_fault(1, "no-process-memory")
    with bench.boards.claim(1, 20_000) as pid:
        bench.kinds[pid] = Owner("ours", "vllm-old", "vllm-old.service")
        assert bench.check(bench.generation(foreign="fail"), stop=("old",)).warnings == ()
        # It ends when the switch stops engines.
        bench.kinds[pid] = Owner("sidecar", "vllm-edge-reference")
        assert bench.check(bench.generation(foreign="fail")).warnings == ()


def test_a_host_that_is_ready_is_asked_nothing_of_systemd(bench: ReadyHost) -> None:
    bench.machine.systemd = Systemd(never)
    bench.check()
    done = bench.check()
    assert done.detail.startswith("image, weights, GPUs and disk as they should be") and done.warnings == ()
