# SPDX-License-Identifier: Apache-2.0
"""The container of an engine: every argument of `docker create`, from data, and no value that becomes another one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.engine import policy
from ansible.module_utils.vllm_edge.engine.config import EngineConfigError, read_config
from ansible.module_utils.vllm_edge.engine.reasons import ASKED, KINDS, OURS, explain_plan, explain_words
from ansible.module_utils.vllm_edge.engine.render import (
    DEFAULTS,
    Settings,
    describe_engine,
    list_create_arguments,
    read_settings,
)
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.trials.sidecar import Sidecar, build_create_arguments
from helpers import ROOT

IMAGE = f"sha256:{'0a' * 32}"
UUIDS = [f"GPU-f52a6b98-d1e7-5b3c-a05f-38c2d471000{slot}" for slot in range(3)]
MODEL = {
    **{"path": "/data/vllm/weights/m", "manifest_sha256": "0", "precision": "bf16", "record": "/r"},
    **{"repo": "o/n", "revision": "main"},
}
SETTINGS = Settings(
    uid=8050,
    image="vllm-edge/vllm:1",
    image_id=IMAGE,
    gpu_uuids=UUIDS,
    shm_size="4g",
    tmp_size="5g",
    pids_limit=4096,
    oom_score_adj=500,
    max_logprobs=20,
    max_tokens=32768,
    cache_directory="/data/vllm/cache",
    ulimits=["memlock=1073741824:1073741824"],
    request_limits={"VLLM_MAX_N_SEQUENCES": 16},
    stop_timeout_s=30,
    shutdown_timeout_s=20,
    stall_timeout_s=300,
    progress_timeout_s=301,
    idle_probe_s=302,
    bus_environment={"NCCL_P2P_DISABLE": "1"},
    bus_arguments=["--disable-custom-all-reduce"],
)
ONE = {"name": "one", "model": "m", "gpus": [2], "tensor_parallel_size": 1, "served_names": ["worker"]}
TWO = {**ONE, "name": "two", "gpus": [0, 1], "tensor_parallel_size": 2}


def render(engine: dict[str, Any] = ONE, chat: bool = False, **settings: Any) -> list[str]:
    given = read_settings({**asdict(SETTINGS), **settings})
    model = {**MODEL, "path": engine.get("path", MODEL["path"])}
    return list_create_arguments(engine, model, given, HostPaths(), chat_template=chat)


def test_every_argument_of_an_engine_and_json_that_keeps_its_types() -> None:
    engine = {
        **{**ONE, "max_model_len": 4096, "gpu_memory_utilization": 0.85, "tool_call_parser": "gemma4"},
        **{"enforce_eager": True, "dtype": "bfloat16", "stands_in_for": ["architect"], "secret_env": {"KEY": "store"}},
        **{"limit_mm_per_prompt": {"image": 0, "audio": 0}, "extra_env": {"A": "b=c, d"}, "extra_args": ["--seed=1"]},
    }
    assert render(engine, chat=True, memory="96g") == [
        *("--name=vllm-one", "--label=vllm-edge.engine=one", "--user=8050:8050", "--read-only", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", "--network=none", "--userns=host", f"--device=nvidia.com/gpu={UUIDS[2]}"),
        *("--shm-size=4g", "--ulimit=memlock=1073741824:1073741824", "--pids-limit=4096", "--oom-score-adj=500"),
        *("--memory=96g", "--memory-swap=96g", "--tmpfs=/tmp:exec,mode=1777,size=5g"),
        "--mount=type=bind,source=/data/vllm/weights/m,target=/models/m,readonly",
        "--mount=type=bind,source=/data/vllm/cache/one/0a0a0a0a0a0a,target=/cache",
        "--mount=type=bind,source=/run/vllm-edge/engines/one,target=/run/api",
        "--mount=type=bind,source=/etc/vllm-edge/engines/one/chat-template.jinja,target=/chat-template.jinja,readonly",
        f"--mount=type=bind,source=/etc/vllm-edge/policy/{policy.HASH},target=/policy,readonly",
        "--env-file=/etc/vllm-edge/secrets/one.env",
        *("--env=HOME=/tmp", "--env=USER=vllm-edge", "--env=LOGNAME=vllm-edge", "--env=PYTHONPATH=/policy"),
        *("--env=PYTHONNOUSERSITE=1", "--env=PYTHONSAFEPATH=1"),
        *("--env=XDG_CACHE_HOME=/cache/.cache", "--env=CUDA_CACHE_PATH=/cache/.nv/ComputeCache"),
        *("--env=FLASHINFER_WORKSPACE_BASE=/cache", "--env=VLLM_CACHE_ROOT=/cache/vllm"),
        *("--env=TORCHINDUCTOR_CACHE_DIR=/cache/inductor",),
        *("--env=TRITON_CACHE_DIR=/cache/triton", "--env=HF_HUB_OFFLINE=1", "--env=VLLM_NO_USAGE_STATS=1"),
        *("--env=DO_NOT_TRACK=1", "--env=VLLM_MEDIA_URL_ALLOW_REDIRECTS=0", "--env=VLLM_HOST_IP=127.0.0.1"),
        *("--env=VLLM_MAX_N_SEQUENCES=16", "--env=A=b=c, d"),
        *("--log-driver=json-file", "--log-opt=max-size=16m", "--log-opt=max-file=2"),
        *(IMAGE, "/models/m", "--served-model-name", "worker", "architect", "--uds=/run/api/api.sock"),
        *("--tensor-parallel-size=1", "--dtype=bfloat16", "--max-model-len=4096", "--gpu-memory-utilization=0.85"),
        *("--enforce-eager", '--limit-mm-per-prompt={"audio": 0, "image": 0}', "--tool-call-parser=gemma4"),
        *("--enable-auto-tool-choice", "--shutdown-timeout=20", "--chat-template=/chat-template.jinja"),
        *("--max-logprobs=20", "--allowed-media-domains=none.invalid"),
        *('--override-generation-config={"max_new_tokens": 32768}', "--seed=1", "--middleware=edge_policy.Policy"),
    ]
    (line,) = [word for word in render({**ONE, "limit_mm_per_prompt": {"video": {"count": 0}}}) if "limit-mm" in word]
    assert json.loads(line.partition("=")[2]) == {"video": {"count": 0}}


def test_what_may_be_absent_is_absent() -> None:
    words = "\n".join(render({**ONE, "enforce_eager": False}, shutdown_timeout_s=0, ulimits=[]))
    absent = ("--env-file", "chat-template", "--enforce-eager", "--shutdown", "--enable-auto", "--ulimit")
    assert [word for word in absent if word in words] == []


def test_every_argument_of_an_engine_has_a_reason_of_a_known_kind() -> None:
    """Ours are in the table; what the engine states or the plan adds is told apart from them."""
    engine = {
        **{**TWO, "max_model_len": 4096, "secret_env": {"KEY": "store"}, "extra_env": {"A": "b"}},
        **{"tool_call_parser": "gemma4", "extra_args": ["--seed", "1", "--max_logprobs=5"]},
    }
    added = {"kv_cache_memory_bytes": 7, "gpu_memory_utilization": 0.9}
    defaults = {"max_num_seqs": "vLLM's default: 256", "max_model_len": "vLLM's default: 8192"}
    reasons = explain_plan(engine, added, defaults, ("weights_bytes",), "512 MiB")
    words = render({**engine, **added}, chat=True, memory="9g")
    explained = [*explain_words(words, reasons, ("image", "model"))]
    assert [word for _, group in explained for word in group] == words
    assert [reason for reason, _ in explained if not reason.startswith(KINDS)] == []
    found = {word: reason for reason, group in explained for word in group}
    by_the_plan = {
        **dict.fromkeys(("--max-model-len=4096", "--seed", "1", "--max_logprobs=5", "--env=A=b"), ASKED),
        "--kv-cache-memory-bytes=7": "measured: by weights_bytes it leaves 512 MiB free on the fullest GPU",
        "--gpu-memory-utilization=0.9": reasons["gpu_memory_utilization"],
        **dict.fromkeys(("--tensor-parallel-size=2", "--tool-call-parser=gemma4"), ASKED),
    }
    assert {word: reason for word, reason in found.items() if reason not in OURS.values()} == by_the_plan
    assert found["--disable-custom-all-reduce"] == found["--env=NCCL_P2P_DISABLE=1"] == OURS["NCCL_P2P_DISABLE"]
    assert found["/models/m"] == OURS["model"] and found["worker"] == OURS["--served-model-name"]
    assert explained[-1] == ("vLLM's default: 256 (max_num_seqs is left out)", [])


def test_what_is_written_without_a_host_has_the_defaults_of_the_role() -> None:
    given = yaml.safe_load((ROOT / "roles/vllm_engine/defaults/main.yml").read_text())
    role = {name.removeprefix("vllm_engine_"): value for name, value in given.items()}
    assert {key: role[key] for key in DEFAULTS} == {**DEFAULTS, "ulimits": [*DEFAULTS["ulimits"]]}


def test_what_the_bus_wants_and_what_an_engine_states_itself_stands_once() -> None:
    words = render(TWO)
    assert words.index("--env=NCCL_P2P_DISABLE=1") < words.index(IMAGE) < words.index("--disable-custom-all-reduce")
    assert [word for word in words if word.startswith("--device=")] == [
        f"--device=nvidia.com/gpu={uuid}" for uuid in UUIDS[:2]
    ]
    assert not [word for word in render() if "P2P" in word or "all-reduce" in word]
    stated = ["--disable-custom-all-reduce", "--max_logprobs=5", "--allowed-media-d=pictures.example"]
    words = render({**TWO, "extra_env": {"NCCL_P2P_DISABLE": "0", "VLLM_MAX_N_SEQUENCES": 2}, "extra_args": stated})
    assert words[-4:] == [*stated, policy.MIDDLEWARE]
    for part, expected in (
        ("P2P", ["--env=NCCL_P2P_DISABLE=0"]),
        ("N_SEQUENCES", ["--env=VLLM_MAX_N_SEQUENCES=2"]),
        ("logprobs", ["--max_logprobs=5"]),
        ("media-d", ["--allowed-media-d=pictures.example"]),
        ("all-reduce", ["--disable-custom-all-reduce"]),
    ):
        assert [word for word in words if part in word] == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], ['--override-generation-config={"max_new_tokens": 9}']),
        (
            ["--seed=1", '--override-gen={"top_k": 2}'],
            ["--seed=1", '--override-generation-config={"max_new_tokens": 9, "top_k": 2}'],
        ),
        (
            ["--override_generation_config", '{"max_new_tokens": 99}', "--seed=1"],
            ['--override-generation-config={"max_new_tokens": 99}', "--seed=1"],
        ),
        (
            ["--override-generation-config.top_k=2"],
            ["--override-generation-config.max_new_tokens=9", "--override-generation-config.top_k=2"],
        ),
        (["--override-generation-config.max_new_tokens", "99"], ["--override-generation-config.max_new_tokens", "99"]),
        (["--runner", "pooling"], ["--runner", "pooling"]),
    ],
)
def test_the_most_tokens_of_an_answer_and_what_an_engine_says_of_its_own(own: list[str], expected: list[str]) -> None:
    words = render({**ONE, "extra_args": own}, max_tokens="9")
    assert words[words.index("--allowed-media-domains=none.invalid") + 1 : -1] == expected


def test_an_engine_always_has_a_limit_of_memory() -> None:
    def limit(*own: str, gpus: int = 1) -> list[str]:
        engine = {**ONE, "gpus": [*range(gpus)], "extra_args": own}
        words = list_create_arguments(
            engine, {**MODEL, "bytes": 10 * 2**30}, SETTINGS, HostPaths(), chat_template=False
        )
        return [word for word in words if word.startswith("--memory")]

    # 10 GiB of weights, 4 for each of three processes, 8 for media, 4 and 5 in memory, 8 in reserve.
    assert limit() == ["--memory=47g", "--memory-swap=47g"]
    assert limit("--mm-processor-cache-gb=0", gpus=2) == ["--memory=43g", "--memory-swap=43g"]
    assert limit("--cpu_offload_gb", "10", "--kv-offloading-size=3.5", gpus=2)[0] == "--memory=75g"


def test_every_container_of_ours_has_a_user_with_a_name_and_dumps_no_core() -> None:
    images = yaml.safe_load((ROOT / "roles/vllm_image/vars/main.yml").read_text())["__vllm_image_cage"]
    sidecar = build_create_arguments(Sidecar("test", "image", 8050, program=""), Path("/job"), Path("/out"))
    ulimits = yaml.safe_load((ROOT / "roles/vllm_engine/defaults/main.yml").read_text())["vllm_engine_ulimits"]
    for words in (images, sidecar, render(ulimits=ulimits)):
        assert {"--env=USER=vllm-edge", "--env=LOGNAME=vllm-edge", "--ulimit=core=0:0", "--userns=host"} <= {*words}


def test_engine_json_has_what_the_program_reads() -> None:
    given = replace(SETTINGS, secrets_hashes={"one": "ab" * 32})
    config = describe_engine({**ONE, "port": 8050}, MODEL, given, HostPaths())
    read_config({**config, "input_hash": "ab", "generation": 1})
    found = {key: value for key, value in config.items() if value not in (None, [])}
    assert found == {
        **{"engine": "one", "unit": "vllm-one.service", "container": "vllm-one", "port": 8050, "model": "m"},
        **{"url": "unix:/run/vllm-edge/engines/one/api.sock", "served_names": ["worker"], "repo": "o/n"},
        **{"revision": "main", "precision": "bf16", "tensor_parallel_size": 1, "gpus": [UUIDS[2]]},
        **{"weights_path": "/data/vllm/weights/m", "weights_record": "/r", "image": "vllm-edge/vllm:1"},
        **{"image_id": IMAGE, "stop_timeout_s": 30, "stall_timeout_s": 300, "health_timeout_s": 5},
        **{"progress_timeout_s": 301, "idle_probe_s": 302, "shutdown_timeout_s": 20, "secrets_hash": "ab" * 32},
    }
    assert "secrets_hash" not in describe_engine(ONE, MODEL, SETTINGS, HostPaths())


UNPRINTABLE = ["a\n--rm", "a\r--x", "a\0b", "a\u2028b", "a\x1b[2K"]
HOSTILE = [*UNPRINTABLE, "", "x --rm", "--rm", "${X}", 'a"b', "a,target=/etc", "../x"]
FIELDS: dict[str, Any] = {
    **{key: lambda odd, key=key: {**ONE, key: odd} for key in ("name", "dtype", "tool_call_parser", "path")},
    "path ": lambda odd: {**ONE, "path": f"/data/{odd}"},
    **{key: lambda odd, key=key: {**ONE, key: [odd]} for key in ("served_names", "stands_in_for")},
    "extra_args": lambda odd: {**ONE, "extra_args": [f"--seed={odd}"]},
    "extra_env": lambda odd: {**ONE, "extra_env": {"A": odd}},
    "name of extra_env": lambda odd: {**ONE, "extra_env": {odd: "1"}},
    "limit_mm_per_prompt": lambda odd: {**ONE, "limit_mm_per_prompt": {odd: 1}},
}
LISTS = ("gpu_uuids", "ulimits", "bus_arguments")
MAPS = ("request_limits", "bus_environment")
TEXTS = ("image", "shm_size", "tmp_size", "memory", "cache_directory", "uid", "pids_limit", "oom_score_adj")
FULL = render({**TWO, "secret_env": {"A": "b"}}, chat=True, memory="1g")
OPTIONS = {word.partition("=")[0] for word in FULL[: FULL.index(IMAGE)]}
STRICT = {"name", "name of extra_env", "gpu_uuids", "ulimits", *TEXTS}
"""Fields that take no hostile value at all; only `memory` may be empty."""


@pytest.mark.parametrize("odd", HOSTILE)
def test_no_value_becomes_another_argument(odd: str) -> None:
    """In every field: refused with a sentence that names it, or one argument that Docker reads as it was meant."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [(name, make(odd), {}) for name, make in FIELDS.items()]
    cases += [(key, TWO, {key: odd, **({"image_id": ""} if key == "image" else {})}) for key in TEXTS]
    cases += [(key, TWO, {key: [odd] * 3}) for key in LISTS]
    cases += [(key, TWO, {key: {"VLLM_A": odd}}) for key in MAPS]
    for name, engine, settings in cases:
        sound = render(TWO if engine is TWO else ONE)
        try:
            words = render(engine, **settings)
        except EngineConfigError as error:
            assert str(error).isprintable() and len(str(error)) < 600, name
            continue
        assert name not in STRICT or (name, odd) == ("memory", ""), (name, odd)
        assert all(word.isprintable() for word in words), (name, odd)
        image = words.index(settings.get("image") or IMAGE)
        assert {word.partition("=")[0] for word in words[:image]} <= OPTIONS, (name, odd)
        assert len(words) <= len(sound) + 2 and "--rm" not in words[:image], (name, odd)
        mounts = [word for word in words if word.startswith("--mount=")]
        assert all(word.count(",target=") == 1 and word.count(",") <= 3 for word in mounts), (name, odd)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"uid": 0}, "vllm_engine_uid is '0': a user id from 100 on"),
        ({"gpu_uuids": ["all"] * 3}, "vllm_engine_gpu_uuids is 'all': GPU-<UUID>"),
        ({"pids_limit": -1}, "vllm_engine_pids_limit is '-1': a number of processes from 1"),
        ({"oom_score_adj": -1000}, "vllm_engine_oom_score_adj is '-1000': a score from 0 to 1000"),
        ({"ulimits": ["rtprio=99"]}, "vllm_engine_ulimits is 'rtprio=99': a limit such as nofile"),
        ({"memory": "0"}, "vllm_engine_memory is '0': a size such as 96g"),
        (
            {"cache_directory": "/etc/cron.d"},
            "vllm_engine_cache_directory is '/etc/cron.d/one/0a0a0a0a0a0a': a directory",
        ),
        ({"idle_probe_s": "soon"}, "vllm_engine_idle_probe_s is 'soon': a whole number from 0"),
        ({"shm": "4g"}, "settings: shm is none of uid, image,"),
        ({"image_id": "sha256:12"}, "vllm_engine_image is 'sha256:12': a name such as"),
    ],
)
def test_a_setting_that_reaches_further_than_an_engine_may_is_refused(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        render(**setting)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "path", ["/etc", "/m", "/var/run/m", "/data/../etc/m", "/data/m,readonly", "data/m", "/root/m"]
)
def test_weights_come_from_a_directory_of_their_own(path: str) -> None:
    with pytest.raises(EngineConfigError, match="path of the model m is"):
        render({**ONE, "path": path})
