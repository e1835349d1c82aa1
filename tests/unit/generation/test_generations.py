# SPDX-License-Identifier: Apache-2.0
"""Generations: written whole or not at all, read with suspicion, and the live files held against them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.engine.config import add_labels, load_engine
from ansible.module_utils.vllm_edge.engine.reasons import run_why
from ansible.module_utils.vllm_edge.generation import build, committed, live, model, store
from ansible.module_utils.vllm_edge.generation.model import GenerationError, Limits
from ansible.module_utils.vllm_edge.paths import HostPaths
from generations import UUIDS, activate, engine, put, rendered


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"vram_budget_mib": 1}, False),
        ({"plan": {"gpus": [], "load_s": {"low": 40, "mid": 100, "high": 700}}}, False),
        ({"revision": "other"}, False),
        ({"image_id": "sha256:22"}, True),
        ({"stop_timeout_s": 31}, True),
        ({"stall_timeout_s": 31}, True),
        ({"idle_probe_s": 0}, True),
        ({"shutdown_timeout_s": 20}, True),
        ({"chat": "{{ messages }}"}, True),
    ],
)
def test_the_input_hash_is_over_what_reaches_the_container(change: dict[str, Any], restarts: bool) -> None:
    assert (engine().input_hash != engine(**change).input_hash) is restarts
    assert rendered(engine()).digest != rendered(engine(**change)).digest


def test_the_input_hash_covers_the_line_the_unit_and_the_weights_and_no_label() -> None:
    base = engine()
    given = [base.container, base.unit, base.config, None]
    hashes = {
        build.input_hash(*given, "m1"),
        build.input_hash(*given, "m2"),
        build.input_hash([*base.container, "--x"], base.unit, base.config, None, "m1"),
        build.input_hash(base.container, base.unit + "#", base.config, None, "m1"),
    }
    assert len(hashes) == 4
    assert add_labels(base.container, 3, "ab")[1:4] == [
        "--label=vllm-edge.engine=e2b",
        "--label=vllm-edge.generation=3",
        "--label=vllm-edge.input-hash=ab",
    ]


def test_the_digest_is_over_all_of_it() -> None:
    base = rendered(engine())
    assert rendered(engine()).digest == base.digest
    others: dict[str, Any] = {"profile": "q", "target": "x", "budgets_mib": {}, "foreign": "fail", "limits": Limits(1)}
    others["quality"] = {"gate": "warn", "cases": [], "repeats": 3, "timeout_s": 9}
    assert [part for part in others if replace(base, **{part: others[part]}).digest == base.digest] == []


def test_numbers_go_up_and_what_is_known_keeps_its_own(paths: HostPaths) -> None:
    first, second = rendered(engine()), rendered(engine(), engine("e4b", 8060), profile="q")
    assert store.numbers(paths) == []
    assert activate(paths, first) == 1
    assert store.choose_number(first.digest, paths) == 1
    assert put(paths, second) == 2
    assert store.choose_number(second.digest, paths) == 2, "not committed, and the same again"
    assert activate(paths, second) == 2
    assert store.choose_number(first.digest, paths) == 1, "the one before, as it was"
    assert store.choose_number(rendered(engine(), profile="r").digest, paths) == 3
    assert store.numbers(paths) == [1, 2]


def test_an_engine_keeps_the_number_of_its_container(paths: HostPaths) -> None:
    activate(paths, rendered(engine(), engine("e4b", 8060)))
    assert activate(paths, rendered(engine(), engine("e4b", 8060, stop_timeout_s=31))) == 2
    generation = store.load(paths, 2)
    assert {name: item.config.generation for name, item in generation.engines.items()} == {"e2b": 1, "e4b": 2}
    assert "--label=vllm-edge.generation=2" in load_engine("e4b", paths).arguments


def test_the_number_of_a_committed_generation_that_is_gone_is_not_given_again(paths: HostPaths) -> None:
    paths.state.mkdir()
    paths.active_profile.write_text(json.dumps({"profile": "p", "generation": 7, "digest": "", "engines": {}}))
    assert put(paths, rendered(engine())) == 8


def test_commit_remembers_who_chose_and_what_was_before(paths: HostPaths) -> None:
    assert committed.committed(paths) is None
    activate(paths, rendered(engine()))
    activate(paths, rendered(engine(), profile="q"), origin="-e")
    now = committed.committed(paths)
    assert now is not None
    assert (now.generation, now.profile, now.origin, now.previous_generation) == (2, "q", "-e", 1)
    assert (now.inventory_profile, now.chosen_at) == ("q", "2026-11-21T16:41:00Z")
    assert now.engines["e2b"].input_hash == engine().input_hash
    generation = store.load(paths, 2)
    committed.commit(generation, paths, model.Choice("inventory", "q"), "later")
    again = committed.committed(paths)
    assert again is not None and (again.origin, again.previous_generation) == ("inventory", 1)
    assert paths.active_profile.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in paths.state.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value"),
        ("[]", "active-profile.json"),
        ('{"generation": 1, "digest": "", "engines": {}}', "the record has no profile"),
        ('{"profile": "p", "generation": 1, "digest": "", "engines": {}, "origin": "moon"}', "origin is 'moon'"),
    ],
)
def test_a_damaged_record_is_an_error_and_not_a_host_without_one(paths: HostPaths, text: str, told: str) -> None:
    paths.state.mkdir()
    paths.active_profile.write_text(text)
    with pytest.raises(GenerationError, match=r"active-profile\.json") as error:
        committed.committed(paths)
    assert told in str(error.value)


def test_what_is_written_is_what_is_read(paths: HostPaths) -> None:
    value = rendered(engine(chat="{{ messages }}"), foreign="fail", limits=Limits(drain_timeout_s=7.0))
    generation = store.load(paths, put(paths, value))
    assert (generation.profile, generation.digest, generation.number) == ("p", value.digest, 1)
    assert (generation.foreign, generation.limits.drain_timeout_s) == ("fail", 7.0)
    assert generation.budgets_mib == {UUIDS[0]: 20900, **dict.fromkeys(UUIDS[1:], 0)}
    assert generation.hashes == value.hashes
    assert [entry.name for entry in (paths.state / "generations").iterdir()] == ["1"]
    modes = {entry.stat().st_mode & 0o777 for entry in generation.directory.rglob("*") if entry.is_file()}
    assert modes == {0o640}


LOOSE = ["--privileged" if word == "--read-only" else word for word in engine().container]


@pytest.mark.parametrize(
    ("damaged", "text", "told"),
    [
        ("generation.json", "{", "generation.json"),
        ("generation.json", None, "generation.json is missing"),
        ("units/vllm-e2b.service", None, "vllm-e2b.service is missing"),
        ("units/vllm-edge.target", "x", "a file of"),
        ("engines/e2b/engine.json", "{}", "the record has no engine"),
        ("engines/e2b/chat-template.jinja", "{{ other }}", "a file of"),
        ("engines/e2b/chat-template.jinja", None, "a file of"),
        ("engines/e2b/container.json", json.dumps({"arguments": LOOSE}), "a file of"),
        ("engines/e2b/container.json", '{"arguments": "x"}', "arguments is 'x'"),
        ("engines/e2b/container.json", "[]", "an object is expected"),
    ],
)
def test_a_damaged_generation_is_written_again(paths: HostPaths, damaged: str, text: str | None, told: str) -> None:
    value = rendered(engine(chat="{{ messages }}"))
    activate(paths, value)
    now = committed.committed(paths)
    assert store.is_written(value, 1, now, paths) is None
    place = paths.generation_dir(1) / damaged
    place.unlink()
    if text is not None:
        place.write_text(text)
    with pytest.raises(GenerationError, match="generation 1 is damaged") as error:
        store.load(paths, 1)
    assert told in str(error.value)
    assert "damaged" in (store.is_written(value, 1, now, paths) or "")
    assert put(paths, value) == 1
    assert store.load(paths, 1).digest == value.digest
    assert [entry.name for entry in (paths.state / "generations").iterdir()] == ["1"]


def test_what_a_dead_run_left_is_removed_and_a_number_that_is_not_there_is_an_error(paths: HostPaths) -> None:
    left = store.stage(paths)
    (left / "units").mkdir()
    put(paths, rendered(engine()))
    assert not left.exists()
    with pytest.raises(GenerationError, match=r"no generation 9 .* there are: 1"):
        store.load(paths, 9)


def test_pruning_keeps_the_committed_and_the_one_before(paths: HostPaths) -> None:
    for profile in "abcde":
        put(paths, rendered(engine(), profile=profile))
    activate(paths, rendered(engine(), profile="a"))
    activate(paths, rendered(engine(), profile="b"))
    assert store.prune(paths, 5, (4, 1, 2)) == []
    assert store.prune(paths, 4, (4, 1, 2)) == [3], "what was never verified goes first"
    four = paths.generation_dir(4)
    (four / "engines" / "e2b").rename(four / "engines" / "old")
    files = [
        make(name) for name in ("e2b", "old") for make in (paths.engine_state, paths.engine_loads, paths.engine_canary)
    ]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert store.prune(paths, 4, (4, 1, 2)) == [] and all(file.exists() for file in files)
    assert store.prune(paths, 1, (4, 1, 2)) == [4]
    assert [file.exists() for file in files] == [True] * 3 + [False] * 3, "engines that no generation has are forgotten"
    assert store.prune(paths, 0, (4, 1, 2)) == []
    assert store.numbers(paths) == [1, 2, 5], "the number of the newest is not given again"


def test_a_calibration_is_never_committed_and_what_was_is_remembered(paths: HostPaths) -> None:
    for profile in "aba":
        activate(paths, rendered(engine(), profile=profile))
    generation = store.load(paths, put(paths, rendered(engine(), profile="a", purpose="calibration")))
    assert (generation.number, generation.purpose) == (3, "calibration"), "another one than the same for serving"
    with pytest.raises(GenerationError, match="generation 3 is a calibration"):
        committed.commit(generation, paths, model.Choice(), "")
    now = committed.committed(paths)
    assert now is not None and now.verified == (2, 1)
    committed.commit(store.load(paths, 1), paths, model.Choice(), "", over_budget=True)
    over = committed.committed(paths)
    assert over is not None and over.verified == (2,)


def test_the_readable_file_and_why_have_the_reasons(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"gpus": [], "reasons": {"--seed": "your word", "max_num_seqs": "vLLM's default: 256"}}
    activate(paths, rendered(engine(note="--seed=1", plan=plan)))
    text = (paths.engine_dir("e2b") / "docker-create").read_text()
    words = [line for line in text.splitlines() if not line.startswith("# ")]
    assert words == load_engine("e2b", paths).arguments
    assert text.endswith("# your word\n--seed=1\n# vLLM's default: 256 (max_num_seqs is left out)\n")
    assert run_why("e2b", paths) == 0 and capsys.readouterr().out == text
    assert run_why("none", paths) == 1 and "does not exist" in capsys.readouterr().err


FILES = ["engine.json", "container.json", "docker-create"]


def test_differences_of_live_files(paths: HostPaths, tmp_path: Path) -> None:
    activate(paths, rendered(engine()))
    generation = store.load(paths, 1)
    create, config = paths.engine_dir("e2b") / "docker-create", paths.engine_dir("e2b") / "engine.json"
    chat, unit = paths.engine_dir("e2b") / "chat-template.jinja", paths.unit_file("vllm-e2b.service")
    wanted = create.read_text()
    create.write_text("changed")
    chat.write_text("not wanted")
    unit.chmod(0o777)
    config.rename(tmp_path / "elsewhere")
    config.symlink_to(tmp_path / "elsewhere")
    found = {item.path: item for item in live.live_changes(generation, paths)}
    assert found.keys() == {str(place) for place in (create, chat, unit, config)}
    assert (found[str(create)].before, found[str(create)].after) == ("changed", wanted)
    assert (found[str(chat)].before, found[str(chat)].after) == ("not wanted", None)
    assert found[str(unit)].attributes == "mode 0777, wanted 0644"
    assert found[str(unit)].before == found[str(unit)].after
    assert found[str(config)].attributes.startswith("link ")
    live.install(generation, paths, ["e2b"], target=False)
    assert live.live_changes(generation, paths) == []
    assert not config.is_symlink() and (tmp_path / "elsewhere").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_counts_where_it_can_be_mended(paths: HostPaths) -> None:
    activate(paths, rendered(engine()))
    generation = store.load(paths, 1)
    os.chown(paths.unit_file("vllm-edge.target"), 1000, 1000)
    assert [item.attributes for item in live.live_changes(generation, paths)] == ["owner 1000:1000, wanted 0:0"]
    live.install(generation, paths, [], target=True)
    assert live.live_changes(generation, paths) == []


def test_engines_that_are_not_in_it(paths: HostPaths) -> None:
    activate(paths, rendered(engine(), engine("e4b", 8060)))
    foreign = paths.unit_file("vllm-mine.service")
    foreign.write_text("[Service]\nExecStart=/opt/mine run-engine mine\n")
    recover = paths.unit_file("vllm-edge-recover.service")
    recover.write_text(f"# {model.MARK}\n[Service]\nExecStart=/usr/local/bin/vllm-edge recover --boot\n")
    note = paths.engine_dir("e4b") / "NOTES"
    note.write_text("an operator's")
    generation = store.load(paths, put(paths, rendered(engine())))
    gone = [item for item in live.live_changes(generation, paths, target=False) if item.after is None]
    assert {Path(item.path).name for item in gone} == {*FILES, "vllm-e4b.service"}
    assert live.list_live_engines(paths) == ["e2b", "e4b"]
    assert len(live.remove_engine("e4b", paths)) == 4
    assert live.remove_engine("e4b", paths) == []
    assert live.list_live_engines(paths) == ["e2b"]
    assert note.exists() and foreign.exists() and recover.exists()
    note.unlink()
    assert live.remove_engine("e4b", paths) == [str(paths.engine_dir("e4b"))]


def test_a_file_that_cannot_be_written_is_named_and_stays(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(paths, rendered(engine()))
    before = paths.active_profile.read_text()

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(GenerationError, match=r"active-profile\.json could not be written: .*No space left") as error:
        committed.commit(store.load(paths, 1), paths, model.Choice(), "")
    assert isinstance(error.value.__cause__, OSError)
    assert paths.active_profile.read_text() == before
    assert [entry.name for entry in paths.state.iterdir() if entry.name.startswith(".")] == []
