# SPDX-License-Identifier: Apache-2.0
"""engine.json and docker-create: what is wrong is said, all of it, with key and value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import (
    EngineConfigError,
    list_engine_names,
    load_engine,
    parse_docker_create,
    parse_engine,
)
from ansible.module_utils.vllm_edge.paths import HostPaths, host_paths
from engine_files import CONFIG, CREATE, written


def test_both_files_as_rendered(tmp_path: Path) -> None:
    paths = written(tmp_path)
    engine = load_engine("e2b", paths)
    assert engine.config.served_names == ("sentry",)
    assert (engine.config.socket, engine.config.stands_in_for) == (None, ())
    assert engine.create.arguments == tuple(CREATE)
    assert engine.create.labels["vllm-edge.input-hash"] == "ab12"
    assert list_engine_names(paths) == ["e2b"]
    assert (engine.config.image_id, engine.config.max_model_len, engine.config.shutdown_timeout_s) == ("", None, None)
    assert list_engine_names(HostPaths(etc=tmp_path / "absent")) == []


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


def test_all_defects_at_once() -> None:
    data = {key: value for key, value in CONFIG.items() if key not in ("unit", "image")}
    with pytest.raises(EngineConfigError) as caught:
        parse_engine(json.dumps({**data, "precision": ""}), "engine.json")
    for told in ("unit is missing", "image is missing", "precision is ''"):
        assert told in str(caught.value)


def test_a_budget_may_be_absent_and_seconds_are_numbers_with_a_point() -> None:
    config = parse_engine(json.dumps({**CONFIG, "vram_budget_mib": None, "shutdown_timeout_s": 7}), "x")
    assert config.vram_budget_mib is None
    assert repr((config.stop_timeout_s, config.shutdown_timeout_s)) == "(30.0, 7.0)"


@pytest.mark.parametrize(("text", "told"), [("{", "not JSON"), ("[]", "holds list")])
def test_what_is_no_object(text: str, told: str) -> None:
    with pytest.raises(EngineConfigError, match=told):
        parse_engine(text, "engine.json")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([*CREATE[:2], "", *CREATE[2:]], "line 3 is blank"),
        ([line for line in CREATE if line.startswith("-")], "names no image"),
        (["--rm", *CREATE], "'--rm' must not stand here"),
        (["--restart=always", *CREATE], "systemd restarts the engine"),
        (["--gpus=all", *CREATE], "GPUs are given by CDI"),
        (CREATE[1:], "0 lines `--name=...`"),
        (["--name=other", *CREATE], "2 lines `--name=...`"),
    ],
)
def test_bad_docker_create(lines: list[str], told: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        parse_docker_create("\n".join(lines) + "\n", "docker-create")
    assert told in str(caught.value)


ID, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.mark.parametrize(
    ("line", "image_id", "told"),
    [
        (ID, ID, ""),
        (OTHER, ID, f"the image is '{OTHER}', engine.json says '{ID}'"),
        (OTHER, "", f"the image is '{OTHER}', engine.json says ''"),
        ("somebody/else:1", ID, "the image is 'somebody/else:1', engine.json says 'vllm-edge/vllm:1'"),
        # Generations of earlier releases name the image; the engine is made of the id where it is known.
        ("vllm-edge/vllm:1", ID, ""),
        ("vllm-edge/vllm:1", "", ""),
    ],
)
def test_engines_are_made_of_the_configured_image(tmp_path: Path, line: str, image_id: str, told: str) -> None:
    create = [line if word == CONFIG["image"] else word for word in CREATE]
    paths = written(tmp_path, config=CONFIG | {"image_id": image_id}, create=create)
    if told:
        with pytest.raises(EngineConfigError, match=told):
            load_engine("e2b", paths)
    else:
        arguments = load_engine("e2b", paths).list_arguments()
        assert arguments == [image_id or line if word == line else word for word in create]


def test_what_stands_after_the_image_is_vllms() -> None:
    made = parse_docker_create("\n".join([*CREATE, "--name=its-own", "--rm"]) + "\n", "docker-create")
    assert made.name == "vllm-e2b"


@pytest.mark.parametrize(
    ("index", "line", "told"),
    [
        (0, "--name=vllm-e4b", "--name is 'vllm-e4b', engine.json says 'vllm-e2b'"),
        (1, "--label=vllm-edge.engine=e4b", "vllm-edge.engine is 'e4b'"),
        (2, "--label=vllm-edge.generation=2", "vllm-edge.generation is '2', engine.json says '1'"),
        (3, "--label=vllm-edge.input-hash=cd34", "vllm-edge.input-hash is 'cd34'"),
        (3, "--label=vllm-edge.other=1", "vllm-edge.input-hash is None"),
    ],
)
def test_files_that_contradict_each_other(tmp_path: Path, index: int, line: str, told: str) -> None:
    create = [*CREATE[:index], line, *CREATE[index + 1 :]]
    with pytest.raises(EngineConfigError) as caught:
        load_engine("e2b", written(tmp_path, create=create))
    assert told in str(caught.value)


def test_the_directory_is_the_engines(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="describes engine 'e2b', but lies in the directory of 'e4b'"):
        load_engine("e4b", written(tmp_path, directory="e4b"))


@pytest.mark.parametrize(("name", "told"), [("nobody", "does not exist"), ("../../etc/shadow", "is no engine name")])
def test_no_such_engine(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(EngineConfigError, match=told):
        load_engine(name, written(tmp_path))


def test_where_the_trees_are() -> None:
    assert host_paths(environ={}) == HostPaths()
    env = {"VLLM_EDGE_ETC": "/a", "VLLM_EDGE_STATE": "/b"}
    assert host_paths(environ=env) == HostPaths(Path("/a"), Path("/b"))
    assert host_paths(etc="/c", environ=env).etc == Path("/c")


SOCKET = "unix:/run/vllm-edge/engines/e2b/api.sock"
API = "--mount=type=bind,source=/run/vllm-edge/engines/{},target=/run/api"


@pytest.mark.parametrize(
    ("mounted", "told"),
    [
        ("e2b", ""),
        (
            "other",
            "--mount of /run/api is '/run/vllm-edge/engines/other', engine.json says '/run/vllm-edge/engines/e2b'",
        ),
        (None, "--mount of /run/api is '', engine.json says"),
    ],
)
def test_the_directory_of_the_socket_is_mounted(tmp_path: Path, mounted: str | None, told: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "port"}
    lines = [API.format(mounted)] if mounted else []
    paths = written(tmp_path, {**config, "url": SOCKET, "stands_in_for": ["architect"]}, [*lines, *CREATE])
    if told:
        with pytest.raises(EngineConfigError, match=re.escape(told)):
            load_engine("e2b", paths)
        return
    read = load_engine("e2b", paths).config
    assert read.socket == HostPaths().engine_socket("e2b") and f"unix:{read.socket}" == SOCKET
    assert (read.port, read.stands_in_for) == (None, ("architect",))
