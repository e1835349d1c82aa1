# SPDX-License-Identifier: Apache-2.0
"""engine.json and container.json: what is wrong is said, with key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import EngineConfigError, list_engine_names, load_engine, parse_engine
from ansible.module_utils.vllm_edge.paths import HostPaths
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
        ({"engine": None}, "engine is None, str is expected"),
        ({"served_names": []}, "served_names is (), a value is expected"),
        ({"served_names": "sentry"}, "served_names is 'sentry'"),
        ({"port": "8070"}, "port is '8070', int is expected"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True, int is expected"),
        ({"stall_timeout_s": 0}, "stall_timeout_s is 0.0, more than 0 is expected"),
        ({"precision": "", "port": 0}, "port is 0, a TCP port from 1 to 65535"),
        ({"precision": "", "port": 0}, "precision is '', a value is expected"),
        ({"tool_call_parser": ""}, "tool_call_parser is '', a value is expected"),
    ],
)
def test_a_bad_value_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        parse_engine(json.dumps({**CONFIG, **change}), "engine.json")
    assert str(caught.value).startswith("engine.json: ") and told in str(caught.value)


def test_what_is_missing_is_named_and_what_may_be_absent_is_not() -> None:
    data = {key: value for key, value in CONFIG.items() if key not in ("unit", "image")}
    with pytest.raises(EngineConfigError, match="has no unit, image"):
        parse_engine(json.dumps(data), "engine.json")
    config = parse_engine(json.dumps({**CONFIG, "vram_budget_mib": None, "shutdown_timeout_s": 7}), "x")
    assert config.vram_budget_mib is None
    assert repr((config.stop_timeout_s, config.shutdown_timeout_s)) == "(30.0, 7.0)"


def test_files_that_cannot_be_read_or_belong_to_another_engine_are_named(tmp_path: Path) -> None:
    for text, told in (("{", "not JSON"), ("[]", "an object is expected")):
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
    for text, told in (
        ("{", "container.json: Expecting"),
        ('{"arguments": [1]}', r"arguments\[0\] is 1, str is expected"),
    ):
        file.write_text(text)
        with pytest.raises(EngineConfigError, match=told):
            load_engine("e2b", paths)
    file.unlink()
    with pytest.raises(EngineConfigError, match=r"container\.json does not exist"):
        load_engine("e2b", paths)
