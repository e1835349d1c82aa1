# SPDX-License-Identifier: Apache-2.0
"""engine.json and container.json: what is wrong is said, all of it, with key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import (
    EngineConfigError,
    list_engine_names,
    load_engine,
    parse_engine,
)
from ansible.module_utils.vllm_edge.paths import HostPaths, host_paths
from engine_files import CONFIG, CREATE, written


def test_both_files_as_rendered_and_a_socket_in_the_url(tmp_path: Path) -> None:
    paths = written(tmp_path)
    engine = load_engine("e2b", paths)
    assert engine.config.served_names == ("sentry",)
    assert (engine.config.socket, engine.config.stands_in_for) == (None, ())
    labels = ["--label=vllm-edge.generation=1", "--label=vllm-edge.input-hash=ab12"]
    assert engine.arguments == [*CREATE[:2], *labels, *CREATE[2:]]
    assert (engine.uid, engine.vllm_arguments) == (8050, ("/models/e2b", "--served-model-name", "sentry"))
    assert (engine.get_option("--network"), engine.get_option("--shm-size")) == ("none", "")
    assert list_engine_names(paths) == ["e2b"]
    assert (engine.config.image_id, engine.config.max_model_len, engine.config.shutdown_timeout_s) == ("", None, None)
    assert list_engine_names(HostPaths(etc=tmp_path / "absent")) == []
    config = {key: value for key, value in CONFIG.items() if key != "port"}
    config |= {"url": "unix:/run/vllm-edge/engines/e2b/api.sock", "stands_in_for": ["architect"]}
    read = load_engine("e2b", written(tmp_path / "other", config)).config
    assert read.socket == HostPaths().engine_socket("e2b") and f"unix:{read.socket}" == config["url"]
    assert (read.port, read.stands_in_for) == (None, ("architect",))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"engine": None}, "engine is None: a text that is not empty"),
        ({"engine": "../etc"}, "engine is '../etc': small letters"),
        ({"served_names": []}, "served_names is []: a list of at least one name"),
        ({"served_names": "sentry"}, "served_names is 'sentry': a list"),
        ({"gpus": [1]}, "gpus is [1]: a list"),
        ({"port": 80700}, "port is 80700: a TCP port"),
        ({"port": "8070"}, "port is '8070': a TCP port"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True: a whole number from 1"),
        ({"generation": -1}, "generation is -1: a whole number from 0"),
        ({"stall_timeout_s": 0}, "stall_timeout_s is 0: seconds, more than 0"),
        ({"progress_timeout_s": 0}, "progress_timeout_s is 0: seconds, more than 0"),
        ({"idle_probe_s": -1}, "idle_probe_s is -1: seconds, 0 for never"),
        ({"stop_timeout_s": "30"}, "stop_timeout_s is '30': seconds"),
        ({"vram_budget_mib": 20.5}, "vram_budget_mib is 20.5: MiB"),
        ({"weights_path": None}, "weights_path is None: a text"),
        ({"max_model_len": "8k"}, "max_model_len is '8k': tokens"),
        ({"shutdown_timeout_s": 0}, "shutdown_timeout_s is 0: seconds, more than 0, or null"),
        ({"stands_in_for": "architect"}, "stands_in_for is 'architect': a list"),
        *(
            ({"url": url}, f"url is '{url}': unix:/<path of its socket>, or http://")
            for url in (
                *("https://127.0.0.1:8070", "http://127.0.0.1:8070/v1"),
                *("unix:", "unix:run/a.sock", "unix://host/run/a.sock", "unix:/run/a.sock?x", "unix:/run/a.sock#x"),
            )
        ),
    ],
)
def test_a_bad_value_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        parse_engine(json.dumps({**CONFIG, **change}), "engine.json")
    assert told in str(caught.value)


def test_all_defects_at_once_and_what_may_be_absent() -> None:
    data = {key: value for key, value in CONFIG.items() if key not in ("unit", "image")}
    with pytest.raises(EngineConfigError) as caught:
        parse_engine(json.dumps({**data, "precision": ""}), "engine.json")
    for told in ("unit is missing", "image is missing", "precision is ''"):
        assert told in str(caught.value)
    config = parse_engine(json.dumps({**CONFIG, "vram_budget_mib": None, "shutdown_timeout_s": 7}), "x")
    assert config.vram_budget_mib is None
    assert repr((config.stop_timeout_s, config.shutdown_timeout_s)) == "(30.0, 7.0)"


def test_files_that_cannot_be_read_or_belong_to_another_engine_are_named(tmp_path: Path) -> None:
    for text, told in (("{", "not JSON"), ("[]", "holds list")):
        with pytest.raises(EngineConfigError, match=told):
            parse_engine(text, "engine.json")
    paths = written(tmp_path, directory="e4b")
    for name, told in (
        ("e4b", "describes engine 'e2b', but lies in the directory of 'e4b'"),
        ("nobody", "does not exist"),
        ("../../etc/shadow", "is no engine name"),
    ):
        with pytest.raises(EngineConfigError, match=told):
            load_engine(name, paths)
    paths = written(tmp_path)
    file = paths.engine_dir("e2b") / "container.json"
    for text, told in (("{", "not JSON"), ('{"arguments": [""]}', "a list of at least one name")):
        file.write_text(text)
        with pytest.raises(EngineConfigError, match=told):
            load_engine("e2b", paths)
    file.unlink()
    with pytest.raises(EngineConfigError, match=r"container\.json does not exist"):
        load_engine("e2b", paths)


def test_where_the_trees_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ETC", "STATE", "UNITS", "RUN", "GATEWAY_RUN"):
        monkeypatch.delenv(f"VLLM_EDGE_{name}", raising=False)
    assert host_paths() == HostPaths()
    monkeypatch.setenv("VLLM_EDGE_ETC", "/a")
    monkeypatch.setenv("VLLM_EDGE_STATE", "/b")
    assert host_paths() == HostPaths(Path("/a"), Path("/b"))
    assert host_paths(etc="/c").etc == Path("/c")
