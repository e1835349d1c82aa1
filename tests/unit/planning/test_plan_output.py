# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge plan --output`: what it writes is run, or read as its reader reads it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.engine.reasons import KINDS
from ansible.module_utils.vllm_edge.inventory.engine_arguments import find_argument_errors
from ansible.module_utils.vllm_edge.planning import output
from test_model_facts import write

E2B = ("google/gemma-4-E2B-it", "--gpu", "L4", "--count", "2")
START = re.compile(re.escape(output.KEY_FILE))
RECORD = """#!/usr/bin/env python3
import json, os, sys
json.dump({"words": sys.argv[1:], "environment": dict(os.environ)}, open(os.environ["RECORD"], "w"))
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(["plan", *words]) == status, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def execute(place: Path, command: list[str], key: str = "a key\n") -> dict[str, Any]:
    """What `vllm` or `docker` are called with by a command in a directory with the key."""
    for name in ("vllm", "docker"):
        (place / name).write_text(RECORD)
        (place / name).chmod(stat.S_IRWXU)
    (place / "api-key").write_text(key)
    called = place / "called"
    called.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "RECORD": str(called)}
    done = subprocess.run(command, cwd=place, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is called.exists(), done.stderr
    return json.loads(called.read_text()) if called.exists() else {"refused": done.stderr}


ASKED = ("--max-num-seqs", "8", "--port", "9000", "--chat-template={{ '$HOME' }}")


def test_the_scripts_call_vllm_and_docker_with_what_the_plan_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planned = json.loads(plan(capsys, *E2B, *ASKED, "--format", "json"))["plans"]["tp2"]["engines"][0]
    pinned = [
        f"--{key.replace('_', '-')}={planned['settings'][key]}"
        for key in ("gpu_memory_utilization", "kv_cache_memory_bytes")
    ]
    script = plan(capsys, *E2B, *ASKED, "--output", "vllm")
    served = execute(tmp_path, ["bash", "-c", script])
    words = served["words"]
    assert words[:7] == [
        "serve",
        E2B[0],
        "--served-model-name",
        E2B[0],
        "--host=127.0.0.1",
        "--port=9000",
        "--tensor-parallel-size=2",
    ]
    assert {"--max-num-seqs=8", ASKED[-1], "--max-model-len=131072", *pinned} <= {*words}
    environment = served["environment"]
    assert (environment["VLLM_API_KEY"], environment["CUDA_VISIBLE_DEVICES"]) == ("a key", "0,1")
    assert "it is empty" in execute(tmp_path, ["bash", "-c", script], "\n")["refused"]

    docker = execute(tmp_path, ["bash", "-c", plan(capsys, *E2B, *ASKED, "--output", "docker")])["words"]
    image = docker.index("docker.io/vllm/vllm-openai:v0.32.0")
    assert docker[:3] == ["run", "--detach", "--name=gemma-4-e2b-it"]
    assert {'--gpus="device=0,1"', "--publish=127.0.0.1:9000:9000", "--shm-size=4g", "--read-only"} <= {*docker[:image]}
    assert f"--mount=type=bind,source={tmp_path}/api-key,target={output.KEY_FILE},readonly" in docker
    assert "a key" not in " ".join(docker)
    start = [word.replace(output.KEY_FILE, "api-key") for word in docker[image + 1 :]]
    inside = execute(tmp_path, ["/bin/sh", *start])
    assert inside["words"] == [word.replace("127.0.0.1", "0.0.0.0") for word in words]
    assert inside["environment"]["VLLM_API_KEY"] == "a key"
    assert "it is empty" in execute(tmp_path, ["/bin/sh", *start], "")["refused"]


def test_a_compose_file_says_the_same_as_docker(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each option has its key, and what a shell or compose would replace arrives as it is."""
    docker = execute(tmp_path, ["bash", "-c", plan(capsys, *E2B, *ASKED, "--output", "docker")])["words"]
    text = plan(capsys, *E2B, *ASKED, "--output", "compose")
    assert text.startswith("# Docker Compose 2.30") and "# Advice: memory holds" in text
    document = yaml.safe_load(text)
    service = document["services"]["vllm"]
    image = docker.index(service["image"])
    command = [re.sub(r"[$]([$]?)", r"\1", word) for word in [*service["entrypoint"], *service["command"]]]
    assert ["--entrypoint=/bin/sh", *docker[image + 1 :]] == [f"--entrypoint={command[0]}", *command[1:]]
    options = dict(word.partition("=")[::2] for word in docker[3:image])
    assert service["devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert service["volumes"][0] == {
        **{"type": "bind", "source": "./api-key", "target": output.KEY_FILE, "read_only": True},
        "bind": {"create_host_path": False},
    }
    assert service["healthcheck"]["test"] == ["CMD-SHELL", options["--health-cmd"]]
    assert service["ulimits"]["core"] == {"soft": 0, "hard": 0}
    same = {"mem_limit": "--memory", "shm_size": "--shm-size", "restart": "--restart", "memswap_limit": "--memory-swap"}
    assert {key: service[key] for key in same} == {key: options[option] for key, option in same.items()}
    several = {"environment": "--env=", "cap_drop": "--cap-drop=", "ports": "--publish=", "tmpfs": "--tmpfs="}
    for key, option in several.items():
        assert service[key] == [word.removeprefix(option) for word in docker if word.startswith(option)]
    known = {*same, *several, "image", "entrypoint", "command", "devices", "volumes", "healthcheck", "ulimits"}
    known |= {"read_only", "cap_add", "security_opt", "pids_limit", "oom_score_adj", "logging"}
    assert service.keys() == known and document["volumes"] == {"vllm-cache": {"name": "vllm-cache"}}


@pytest.mark.parametrize("kind", ["vllm", "docker", "compose"])
@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (
            (*E2B, "--max-num-seqs", "8"),
            {
                "--max-model-len": "it fits: the longest context that does",
                "--kv-cache-memory-bytes": "it fits: this leaves 512 MiB free",
                "--tensor-parallel-size": "it fits: of the numbers of GPUs",
                "--max-num-seqs": "your word",
                "--max-logprobs": "vllm-edge: ",
                "--tool-call-parser": "vLLM's default: what its documents name",
            },
        ),
        (
            ("--gpu", "H100", f"vllm serve {E2B[0]} --max-model-len 8k --max-logprobs=3"),
            {
                "--max-model-len": "your word",
                "--max-logprobs": "your word",
                "--gpu-memory-utilization": "vLLM's default: ",
                "--kv-cache-memory-bytes": "it fits: what the share of the GPU leaves",
                "(max_num_seqs is left out)": "rule of the card: 1,024 on this GPU",
                "(dtype is left out)": "vLLM's default: bfloat16",
            },
        ),
    ],
)
def test_each_argument_has_its_reason(
    capsys: pytest.CaptureFixture[str], kind: str, words: tuple[str, ...], reasons: dict[str, str]
) -> None:
    lines = [line.lstrip(" '") for line in plan(capsys, *words, "--output", kind).splitlines()]
    said, found = "", {}
    for line in lines:
        said = line.removeprefix("# ") if line.startswith("#") else said
        argument = re.search(r"\(\w+ is left out\)$", line) or re.match(r"--[\w-]+", line.removeprefix('- "'))
        if argument:
            found[argument[0]] = said
    assert {key: found.get(key, "")[: len(said)] for key, said in reasons.items()} == reasons
    assert [said for said in found.values() if not said.startswith(KINDS)] == []


@pytest.mark.parametrize("kind", ["vllm", "docker", "compose", "inventory"])
def test_a_commit_that_is_known_is_pinned(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    assert cli.main(["facts", "--model", E2B[0]]) == 0
    record = json.loads(capsys.readouterr().out) | {"revision": "0a" * 20}
    (tmp_path / "google--gemma-4-E2B-it.json").write_text(json.dumps(record))
    text = plan(capsys, str(tmp_path / "google--gemma-4-E2B-it.json"), *E2B[1:], "--output", kind)
    assert ("revision: " if kind == "inventory" else "--revision=") + "0a" * 20 in text and "not pinned" not in text


def test_a_directory_is_mounted_and_a_token_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint, token = write(tmp_path / "tiny"), tmp_path / "token"
    token.write_text("hf_abcdefghijkl")
    token.chmod(0o600)
    words = ("--model", str(checkpoint), "--gpu", "L4", "--token-file", str(token), "--endpoint", "https://hub.example")
    service = yaml.safe_load(plan(capsys, *words, "--output", "compose"))["services"]["vllm"]
    mounted = {volume["target"]: volume["source"] for volume in service["volumes"]}
    assert (
        mounted[f"/models/{checkpoint.name}"] == str(checkpoint)
        and service["command"][0] == f"/models/{checkpoint.name}"
    )
    assert mounted["/run/secrets/hf-token"] == str(token)
    assert {"HF_TOKEN_PATH=/run/secrets/hf-token", "HF_ENDPOINT=https://hub.example"} <= {*service["environment"]}
    assert "is a directory" in plan(capsys, *words, "--output", "inventory", status=2)


@pytest.mark.parametrize("name", ["$PWD, \"$HOME' #1", "new\nline: x", "模型😀", "123"])
def test_a_directory_of_any_name_is_written_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    words = ("--model", str(write(tmp_path / name)), "--gpu", "L4", "--output")
    text = plan(capsys, *words, "compose")
    document = yaml.safe_load(text)
    volume = document["services"]["vllm"]["volumes"][1]
    assert re.fullmatch("[a-z0-9-]+", document["name"]) and volume["target"] == f"/models/{document['name']}"
    assert volume["source"].replace("$$", "$") == str(tmp_path / name)
    assert not re.search(r"(?<!\$)\$(?!\$)", str(document))
    docker = execute(tmp_path, ["bash", "-c", plan(capsys, *words, "docker")])["words"]
    mounts = [next(csv.reader([word])) for word in docker if word.startswith("--mount=type=bind,")]
    assert mounts[0][1] == f"source={tmp_path}/api-key"
    mount = next(word for word in docker if f"target={volume['target']}" in word).removeprefix("--mount=")
    assert next(csv.reader(io.StringIO(mount, newline="")))[1] == f"source={tmp_path / name}"
    assert docker[docker.index("--served-model-name") + 1] == name
    assert execute(tmp_path, ["bash", "-c", plan(capsys, *words, "vllm")])["words"][1] == str(tmp_path / name)


LINE = (
    "HF_TOKEN=hf_x vllm serve google/gemma-4-E2B-it --max-model-len 16k --tool-call-parser gemma4 --seed 3 --api-key k "
)


@pytest.mark.parametrize(
    ("words", "more", "engine"),
    [
        (("google/gemma-4-E2B-it", "--gpu", "l4"), {}, None),
        (
            (
                LINE + "--enable-auto-tool-choice --limit-mm-per-prompt '{\"image\": 0}' --served-model-name a b",
                "--gpu",
                "l4",
            ),
            {},
            {
                **{"max_model_len": 16000, "tool_call_parser": "gemma4", "limit_mm_per_prompt": {"image": 0}},
                **{"served_names": ["a", "b"], "extra_args": ["--seed", "3"]},
            },
        ),
        (
            ("google/gemma-4-E2B-it", "--gpu", "l4", "--trust-remote-code", "--chat-template", "of/mine.jinja"),
            {},
            {
                **{"chat_template": "mine.jinja", "extra_args": ["--trust-remote-code"]},
                "accept_risk": ["--trust-remote-code"],
            },
        ),
        (("google/gemma-4-E2B-it", "--gpu", "l4", "--count", "2", "-dp", "2"), {"gpu_count": 2}, {"replicas": 2}),
        (
            ("google/gemma-4-E2B-it", "-tp", "1", "--vllm", "0.30.0", "--gpu", "X", "--gpu-memory-mib", "23034"),
            {"vllm_image_base": "docker.io/vllm/vllm-openai:v0.30.0", "gpu_name": "X", "gpu_memory_mib": 23034},
            None,
        ),
    ],
)
def test_the_inventory_has_the_card_the_model_and_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], more: dict[str, Any], engine: dict[str, Any] | None
) -> None:
    text = plan(capsys, *words, "--output", "inventory")
    key, host = "gemma-4-e2b-it", yaml.safe_load(text)["gpu_hosts"]["hosts"]["gpu1"]
    engines = host.pop("serving_engines_extra", {key: {"model": key}})
    assert host == {
        **{"ansible_host": "192.0.2.10", "gpu_name": "NVIDIA L4", "gpu_count": 1},
        **{"vllm_models_extra": {key: {"repo": "google/gemma-4-E2B-it"}}, **more},
    }
    assert engines == {key: {"model": key, **(engine or {})}}
    assert [*find_argument_errors("", engines[key], {"tool_call_parser": 0, "max_model_len": 0})] == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("google/gemma-4-31B-it", "--gpu", "L4"), 1, "tp1: oom_weights. "),
        ((*E2B, "--format", "json"), 2, "--output inventory takes neither --format json nor --details"),
        (
            (*E2B, "--ssl-keyfile", "key"),
            2,
            "--output inventory.extra_args: '--ssl-keyfile key' is not free to choose: ",
        ),
        ((*E2B, "--lora-modules", "a=b/c"), 2, "--output inventory.extra_args: '--lora-modules a=b/c' "),
    ],
)
def test_what_does_not_fit_or_cannot_be_written_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, said: str
) -> None:
    assert cli.main(["plan", *words, "--output", "inventory"]) == status
    printed = capsys.readouterr()
    assert (printed.out, said in printed.err) == ("", True), printed
