# SPDX-License-Identifier: Apache-2.0
"""Module serving_switch: what it writes, when it asks for a switch, and what it says under check mode."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import generations
import pytest
from ansible.module_utils.vllm_edge.engine import edge_policy, policy
from ansible.module_utils.vllm_edge.generation import committed as generation_committed
from ansible.module_utils.vllm_edge.generation import live, store
from ansible.module_utils.vllm_edge.generation.model import Choice
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.journal import take_lock
from fake_host import write

UUID = generations.UUIDS[0]
Result = dict[str, Any]

PROGRAM = """#!/bin/sh
echo "$@" >> "{root}/asked"
case "$1" in
  status) cat "{root}/status.json" ;;
  switch) cat "{root}/journal.json"; cat "{root}/error" >&2; exit "$(cat "{root}/exit")" ;;
esac
"""


SETTINGS = {
    **{"uid": 8050, "gpu_uuids": [UUID], "image": "vllm-edge/vllm:1", "image_id": f"sha256:{'11' * 32}"},
    **{"cache_directory": "/data/vllm/cache", "shm_size": "4g", "tmp_size": "4g", "pids_limit": 4096},
    **{"oom_score_adj": 500, "max_logprobs": 20, "max_tokens": 32768, "stop_timeout_s": 30, "stall_timeout_s": 300},
    **{"progress_timeout_s": 300, "idle_probe_s": 300},
}
MODEL = {
    **{"repo": "google/m", "revision": "main", "precision": "bf16", "path": "/data/vllm/weights/m"},
    **{"record": "/var/lib/vllm-edge/weights/m.json", "manifest_sha256": generations.MANIFEST},
}


def engine(name: str = "e2b", port: int = 8070, chat: str | None = None, **more: Any) -> dict[str, Any]:
    """An engine as the role passes it to the module."""
    given = {"name": name, "model": "m", "tensor_parallel_size": 1, "gpus": [0], "served_names": [name], "port": port}
    unit = generations.engine(name).unit
    return {"engine": {**given, "vram_budget_mib": 20900, **more}, "unit": unit, "chat_template": chat}


class Host:
    """A host in a directory, whose program says what this test wants."""

    def __init__(self, root: Path, run: Callable[..., Result]) -> None:
        self.root, self._run = root, run
        self.paths = HostPaths(root / "etc", root / "state", root / "units")
        self.program = root / "vllm-edge"
        self.program.write_text(PROGRAM.format(root=root))
        self.program.chmod(0o755)
        self.answer("", 4, "not asked for")
        self.status([])

    def status(self, running: list[str], need_reload: bool = False) -> None:
        """As the host shows it when these engines run with their installed files."""
        rows = []
        for name in live.list_live_engines(self.paths):
            config = json.loads((self.paths.engine_dir(name) / "engine.json").read_text())
            up = name in running
            active, sub, hash_ = ("active", "running", config["input_hash"]) if up else ("inactive", "dead", None)
            row = {"engine": name, "active_state": active, "sub_state": sub, "running_input_hash": hash_}
            rows.append({**row, "need_daemon_reload": need_reload})
        target = {"active_state": "active" if running else "inactive", "enabled": bool(running)}
        (self.root / "status.json").write_text(json.dumps({"engines": rows, "target": target}))

    def answer(self, stdout: str | Mapping[str, Any], status: int, stderr: str = "") -> None:
        (self.root / "journal.json").write_text(stdout if isinstance(stdout, str) else json.dumps(stdout))
        (self.root / "exit").write_text(str(status))
        (self.root / "error").write_text(stderr)

    def journal(self, result: str, status: int, message: str = "said") -> None:
        self.answer({"result": result, "message": message, "warnings": ["a hook failed"], "canary": []}, status)

    @property
    def asked(self) -> list[str]:
        path = self.root / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def run(self, *engines: dict[str, Any], check: bool = False, **more: Any) -> Result:
        given = {
            "profile": "p",
            "engines": list(engines),
            "models": {"m": MODEL},
            "settings": SETTINGS,
            "target": "[Unit]\n" + "".join(f"Wants=vllm-{item['engine']['name']}.service\n" for item in engines),
            "budgets_mib": {UUID: 20900},
            "state_directory": str(self.paths.state),
            "configuration_directory": str(self.paths.etc),
            "units_directory": str(self.paths.units),
            "program": str(self.program),
            **more,
        }
        return self._run("serving_switch", given, check=check)

    def settle(self, *engines: dict[str, Any], **more: Any) -> None:
        """As it is after a switch: files in place, committed, everything runs."""
        self.journal("committed", 0)
        result = self.run(*engines, **more)
        assert result["result"] == "committed", result
        generation = store.load(self.paths, result["generation"])
        live.install(generation, self.paths, generation.engines, target=True)
        choice = Choice(more.get("origin", "inventory"), more.get("inventory_profile"))
        generation_committed.commit(generation, self.paths, choice, "then")
        self.status(list(generation.engines))
        self.answer("", 9, "the program was asked for a switch that nobody needs")
        _ = self.asked

    def everything(self) -> dict[str, str]:
        return {str(path): path.read_text() for path in self.root.rglob("*") if path.is_file() and path.name != "asked"}


@pytest.fixture
def host(tmp_path: Path, run_module: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Host:
    analyze = write(
        tmp_path / "bin" / "systemd-analyze",
        '#!/bin/sh\n! grep -q BROKEN "$2" || { echo "unit is broken" >&2; exit 1; }\n',
    )
    analyze.chmod(0o755)
    monkeypatch.setenv("PATH", f"{analyze.parent}:/usr/bin:/bin")
    return Host(tmp_path, run_module)


def paths_of(result: Result) -> set[str]:
    """Files that the diff shows."""
    return {Path(row.get("after_header") or row["after"]["path"]).name for row in result["diff"]}


def test_the_first_run_writes_the_generation_and_asks_for_the_switch(host: Host) -> None:
    host.journal("committed", 0, "nvfp4 serves")
    asked: dict[str, Any] = {"inventory_profile": "q", "asked_by": "site.yml by alice", "gap": True}
    result = host.run(engine(), engine("e4b", 8060), origin="-e", **asked)
    assert (result["rc"], result["changed"], result["result"], result["generation"]) == (0, True, "committed", 1)
    assert result["msg"] == "nvfp4 serves" and result["warnings"] == ["a hook failed"]
    assert result["moves"]["start"] == ["e2b", "e4b"] and result["moves"]["target"] == ["not enabled", "not active"]
    assert host.asked == [
        "status --format json",
        "switch 1 --format json --origin=-e --asked-by=site.yml by alice --gap --inventory-profile=q",
    ]
    assert store.load(host.paths, 1).hashes.keys() == {"e2b", "e4b"}


def test_the_second_run_starts_nothing(host: Host) -> None:
    host.settle(engine(), engine("e4b", 8060))
    before = host.everything()
    for check in (True, False):
        result = host.run(engine(), engine("e4b", 8060), check=check)
        assert (result["changed"], result["result"], result["diff"]) == (False, "unchanged", []), result
        assert result["msg"] == "generation 1 (p) runs as rendered."
        assert host.asked == ["status --format json"]
    live_files = [
        path for root in (host.paths.etc / "engines", host.paths.units) for path in root.rglob("*") if path.is_file()
    ]
    assert {row["path"]: row["diff"] for row in result["files"]} == {str(path): {} for path in live_files}
    assert len(live_files) == 2 * 4 + 1, "engine.json, container.json, docker-create and the unit of each; the target"
    lock = str(host.paths.switch_lock)
    assert {**before, lock: ""} == {**host.everything(), lock: ""}


ALL = {"engine.json", "container.json", "docker-create", "active-profile.json"}


@pytest.mark.parametrize(
    ("change", "start", "shown"),
    [
        ({"max_num_seqs": 3}, ["e2b"], ALL),
        ({"vram_budget_mib": 1}, [], {"engine.json", "active-profile.json"}),
        ({"chat": "{{ x }}"}, ["e2b"], ALL | {"chat-template.jinja"}),
    ],
)
def test_check_mode_only_tells_the_truth(host: Host, change: dict[str, Any], start: list[str], shown: set[str]) -> None:
    host.settle(engine(), engine("e4b", 8060))
    before = host.everything()
    foreseen = host.run(engine(**change), engine("e4b", 8060), check=True)
    assert host.asked == ["status --format json"]
    assert host.everything() == before
    assert foreseen["changed"] and paths_of(foreseen) == shown
    assert foreseen["moves"]["start"] == start and foreseen["moves"]["stop"] == start
    assert ("stop e2b; start e2b" in foreseen["msg"]) is bool(start)
    assert ("e2b: restart because of --" in foreseen["msg"]) is bool(start)
    host.journal("committed", 0)
    done = host.run(engine(**change), engine("e4b", 8060))
    assert (done["moves"], done["diff"], done["generation"]) == (foreseen["moves"], foreseen["diff"], 2)
    assert done["engines"]["e4b"]["generation"] == 1


def test_check_mode_on_a_host_without_anything(host: Host) -> None:
    host.program.unlink()
    result = host.run(engine(), check=True)
    assert result["changed"] and result["moves"]["start"] == ["e2b"]
    assert all("before_header" not in row for row in result["diff"])
    assert not host.paths.state.exists() and not host.paths.etc.exists()
    refused = host.run(engine())
    assert refused["rc"] == 1 and "playbooks/host.yml installs it" in refused["msg"]


def test_a_limit_alone_is_a_new_generation_and_no_engine_moves(host: Host) -> None:
    host.settle(engine())
    host.journal("committed", 0)
    result = host.run(engine(), limits={"drain_timeout_s": "7", "keep_generations": "3"})
    assert result["changed"] and result["generation"] == 2
    assert (result["moves"]["start"], result["moves"]["keep"]) == ([], ["e2b"])
    assert paths_of(result) == {"active-profile.json"}
    limits = store.load(host.paths, 2).limits
    assert (limits.drain_timeout_s, limits.keep_generations) == (7.0, 3)


def with_order(order: str, **config: Any) -> dict[str, Any]:
    """An engine whose unit has this line in its section [Unit]."""
    made = engine(**config)
    return {**made, "unit": made["unit"].replace("[Service]", f"[Unit]\n{order}\n[Service]")}


def test_a_change_of_the_section_unit_restarts_nothing(host: Host) -> None:
    """systemd applies it at daemon-reload. The engine keeps its hash in later runs, and through damage."""
    host.settle(engine())
    for changed in (with_order("After=a.mount"), with_order("After=b.mount")):
        done = host.run(changed, check=True)
        assert done["changed"] and done["moves"]["keep"] == ["e2b"] and done["moves"]["start"] == []
        assert paths_of(done) == {"vllm-e2b.service", "active-profile.json"}
        host.settle(changed)
        assert not host.run(changed)["changed"]
    (host.paths.generation_dir(3) / "units" / "vllm-e2b.service").write_text("damaged")
    assert host.run(changed)["result"] == "unchanged"
    restarted = host.run(with_order("After=b.mount", max_num_seqs=3), check=True)
    assert restarted["moves"]["start"] == ["e2b"]
    back = host.run(engine(), check=True)
    assert (back["moves"]["start"], back["generation"]) == ([], 1)


def test_damaged_live_files_are_named_as_ansible_does(host: Host) -> None:
    host.settle(engine())
    unit, create = host.paths.unit_file("vllm-e2b.service"), host.paths.engine_dir("e2b") / "docker-create"
    unit.chmod(0o777)
    wanted = create.read_text()
    create.unlink()
    result = host.run(engine(), check=True)
    rows = [
        {"before": "", "after": wanted, "after_header": str(create)},
        {"before": {"path": str(unit), "mode": "0777"}, "after": {"path": str(unit), "mode": "0644"}},
    ]
    assert sorted(result["diff"], key=str) == sorted(rows, key=str)
    assert {row["path"] for row in result["files"] if row["diff"]} == {str(unit), str(create)}
    host.journal("committed", 0)
    assert host.run(engine())["generation"] == 1
    assert host.asked[-1].startswith("switch 1 ")


def test_a_damaged_generation_is_written_again_without_a_switch(host: Host) -> None:
    host.settle(engine())
    damaged = host.paths.generation_dir(1) / "units" / "vllm-e2b.service"
    damaged.write_text("else")
    foreseen = host.run(engine(), check=True)
    assert foreseen["changed"] and paths_of(foreseen) == {"active-profile.json"} and damaged.read_text() == "else"
    assert any(row["path"].endswith("active-profile.json") for row in foreseen["files"])
    result = host.run(engine())
    assert (result["changed"], result["result"]) == (True, "unchanged") and "written again" in result["msg"]
    assert store.load(host.paths, 1)
    assert not host.run(engine())["changed"]


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_the_policy_of_engines_is_there_before_they_start(
    host: Host, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.settle(engine())
    container = store.load(host.paths, 1).engines["e2b"].container
    file = host.paths.policies / hashlib.sha256(Path(edge_policy.__file__).read_bytes()).hexdigest() / "edge_policy.py"
    assert f"--mount=type=bind,source={file.parent},target=/policy,readonly" in container
    assert file.read_bytes() == Path(edge_policy.__file__).read_bytes() and not policy.find_problem(container)
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o644, 0o755, 0o755]
    file.write_text("else")
    assert "another content" in policy.find_problem(container)
    assert host.run(engine(), check=True)["changed"] and file.read_text() == "else"
    result = host.run(engine())
    assert (result["changed"], result["result"]) == (True, "unchanged") and "written again" in result["msg"]
    assert not policy.find_problem(container)
    # Another text is another directory, and so another container. The former one goes with the last that names it.
    monkeypatch.setattr(policy, "TEXT", "else")
    monkeypatch.setattr(policy, "HASH", hashlib.sha256(b"else").hexdigest())
    host.settle(engine())
    store.prune(host.paths, 1, ())
    assert file.exists() and "else" in [path.read_text() for path in host.paths.policies.glob("*/*")]
    shutil.rmtree(host.paths.generation_dir(1))
    store.prune(host.paths, 1, ())
    assert [path.name for path in host.paths.policies.iterdir()] == [policy.HASH]


def test_what_systemd_does_not_know_yet_is_a_move_and_a_switch_that_touched_nothing_changed_nothing(host: Host) -> None:
    host.settle(engine())
    host.status(["e2b"], need_reload=True)
    result = host.run(engine(), check=True)
    assert result["changed"] and result["moves"]["target"] == ["needs daemon-reload"]
    # An engine was still loading when the module looked, and served when the switch did.
    host.settle(engine())
    host.status([])
    host.journal("unchanged", 0, "Generation 1 serves already; nothing was touched.")
    result = host.run(engine())
    assert (result["changed"], result["result"]) == (False, "unchanged") and "nothing was touched" in result["msg"]
    assert "journal" not in result, "the report would take its answers, of which it has none"


@pytest.mark.parametrize(
    ("was", "now", "changes"),
    [
        ("-e", "inventory", True),
        ("host", "inventory", True),
        ("inventory", "inventory", False),
        ("inventory", "-e", False),
    ],
)
def test_an_inventory_that_says_the_same_becomes_the_origin(host: Host, was: str, now: str, changes: bool) -> None:
    host.settle(engine(), origin=was, inventory_profile="other")
    foreseen = host.run(engine(), origin=now, inventory_profile="p", check=True)
    result = host.run(engine(), origin=now, inventory_profile="p")
    assert (foreseen["changed"], foreseen["diff"]) == (result["changed"], result["diff"])
    assert (result["changed"], result["result"]) == (changes, "unchanged")
    committed = generation_committed.committed(host.paths)
    assert committed is not None
    assert (committed.origin, committed.inventory_profile) == (("inventory", "p") if changes else (was, "other"))
    assert ("only " + was in result["msg"]) is changes
    assert all(line.startswith("status") for line in host.asked)


@pytest.mark.parametrize(
    ("result", "status", "changed"),
    [("rolled_back", 1, True), ("refused", 2, False), ("failed", 3, True), ("over_budget", 5, True)],
)
def test_a_switch_that_did_not_commit_fails_with_its_words(host: Host, result: str, status: int, changed: bool) -> None:
    host.journal(result, status, "e2b does not fit")
    said = host.run(engine())
    assert (said["rc"], said["result"], said["changed"], said["msg"]) == (1, result, changed, "e2b does not fit")
    assert said["journal"]["result"] == result


@pytest.mark.parametrize(("status", "result"), [(4, "busy"), (2, "refused"), (3, "failed"), (77, "failed")])
def test_a_program_that_refuses_is_quoted(host: Host, status: int, result: str) -> None:
    host.answer("", status, "another switch runs, phase start")
    said = host.run(engine())
    assert (said["rc"], said["result"], said["msg"]) == (1, result, "another switch runs, phase start")


def test_nothing_is_written_while_another_switch_runs_and_one_that_lasts_goes_on(host: Host) -> None:
    with take_lock(host.paths):
        before = host.everything()
        for check in (False, True):
            said = host.run(engine(), check=check)
            assert (said["rc"], said["result"]) == (1, "busy") and "Another switch runs" in said["msg"]
        assert host.everything() == before
    assert host.asked == []
    host.program.write_text(host.program.read_text().replace("switch) ", "switch) exec sleep 5; "))
    said = host.run(engine(), timeout_s=1)
    assert said["rc"] == 1 and "goes on without Ansible" in said["msg"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"port": 80700}, "engine e2b: port is 80700"),
        ({"model": "n"}, "engine e2b: its model is 'n'; there are: m."),
        ({"gpus": [4]}, "engine e2b: gpus has the slot 4, the host has 1 GPUs"),
        ({"served_names": []}, "engine e2b: it has no served_names"),
        ({"extra_args": ["--seed=1\n--rm"]}, "engine e2b: extra_args is '--seed=1\\n--rm': it holds a line break"),
        ({"vram_budget_mib": "x"}, "engine e2b: vram_budget_mib is 'x'"),
    ],
)
def test_what_was_rendered_wrongly_is_refused_and_not_written(host: Host, wrong: dict[str, Any], told: str) -> None:
    said = host.run(engine(**wrong))
    assert said["rc"] == 1 and told in said["msg"]
    assert not (host.paths.state / "generations").exists()


def test_a_unit_that_systemd_refuses_leaves_nothing_and_a_record_that_cannot_be_read_is_kept(host: Host) -> None:
    broken = engine()
    broken["unit"] += "BROKEN\n"
    said = host.run(broken)
    assert said["rc"] == 1 and "systemd does not accept vllm-e2b.service: unit is broken" in said["msg"]
    assert list((host.paths.state / "generations").iterdir()) == []
    host.paths.active_profile.write_text("{")
    said = host.run(engine())
    assert said["rc"] == 1 and "does not say which generation is committed" in said["msg"]
    assert host.paths.active_profile.read_text() == "{"
    assert host.asked == []
