# SPDX-License-Identifier: Apache-2.0
"""What validation says: each wrong input is one sentence with variable, value, why, and what would do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import engine_arguments, vllm_arguments
from ansible.module_utils.vllm_edge.inventory.merging import VARIABLES, merge
from ansible.module_utils.vllm_edge.inventory.profiles import (
    Inventory,
    compute_vram_floor,
    find_mistakes,
    find_warnings,
)
from ansible.module_utils.vllm_edge.inventory.replicas import OF_ONE_ENGINE
from ansible.module_utils.vllm_edge.inventory.variables import Project, load
from helpers import ROOT

ABSENT = "<absent>"
UUIDS = [f"GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d000{number}" for number in range(4)]

SOUND: dict[str, Any] = {
    "profile": "pair",
    "profiles": {"pair": {"engines": ["large", "small"], "when": "Always.", "source": "predicted"}},
    "engines": {
        "large": {
            **{"model": "big", "tensor_parallel_size": 2, "gpus": [0, 1], "port": 8050, "served_names": ["architect"]},
            **{"max_model_len": 8192, "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8"},
            **{"tool_call_parser": "gemma4", "vram_budget_mib": 22200},
        },
        "small": {
            **{"model": "tiny", "tensor_parallel_size": 1, "gpus": [2], "port": 8060, "served_names": ["sentry"]},
            **{"vram_budget_mib": 20900, "limit_mm_per_prompt": {"image": 0, "video": {"count": 1, "num_frames": 8}}},
            "extra_args": ["--language-model-only", '--compilation-config={"mode": 3}'],
        },
    },
    "models": {
        "big": {
            **{"repo": "google/gemma-4-31B-it", "revision": "main", "precision": "bf16", "dir": "big"},
            **{"facts": "files"},
            "engine_defaults": {"tool_call_parser": "hermes", "chat_template": "gemma4.jinja", "max_num_seqs": 8},
        },
        "tiny": {"repo": "google/gemma-4-E2B-it", "revision": "main", "precision": "bf16", "dir": "tiny"},
    },
    "roles": ["architect", "sentry"],
    **{f"{kind}_extra": {} for kind in VARIABLES},
    "gpu_name": "NVIDIA L4",
    "gpu_uuids": None,
    "image": "docker.io/vllm/vllm-openai:v0.32.0",
    "settings": {
        "allow_reboot": False,
        "allow_docker_restart": "yes",
        "verify_weights": "size",
        "vram_foreign": "warn",
        "gpu_count": 4,
        "gpu_memory_mib": "23034",
        "serving_gateway_paths": ["/v1/chat/completions", "/v1/messages"],
        "serving_gateway_certificate_names": [],
        "serving_gateway_url": "https://llm.example.org:8443",
        "bench_output_tokens": "16, 32",
        "bench_soak_minutes": "0.5",
        "bench_allow_load": "false",
    },
    "given": {"model_weights_token": False, "model_weights_token_file": True, "vllm_image_base_archive": False},
    "chat_templates": frozenset({"gemma4.jinja"}),
    "gateway": {
        "serving_gateway_listen": [
            {"address": "127.0.0.1", "port": 8000, "tls": False},
            {"address": "::", "port": 443, "tls": True},
        ],
        **dict.fromkeys(("serving_gateway_certificate", "serving_gateway_private_key"), ""),
        "serving_clients": {
            "ci": {"served_names": [], "requests_per_minute": 0, "streams": 4},
            "ui": {"metrics": True},
        },
        "serving_targets": {},
    },
    "names": ["serving_profile", "allow_reboot", "vllm_engine_shm_size", "somebody_elses_variable", "ansible_user"],
}
GATEWAY = SOUND["gateway"]
LISTEN = GATEWAY["serving_gateway_listen"]
METRICS = {"gateway.serving_clients": {"ci": {"metrics": True}}}
Case = tuple[str, dict[str, Any], list[list[str]]]
"""Class of mistake, what is changed of SOUND (dotted, without `engines`), and words of each expected sentence."""


def case(mistake: str, changes: dict[str, Any], *words: str) -> Case:
    """A case with one sentence."""
    return mistake, changes, [list(words)]


def one(mistake: str, path: str, value: Any, *words: str) -> Case:
    """A case with one change and one sentence."""
    return case(mistake, {path: value}, *words)


def small(mistake: str, key: str, value: Any, *words: str) -> Case:
    """A case of one key of the engine `small`."""
    return one(mistake, f"small.{key}", value, f"serving_engines.small.{key}", *words)


def both(mistake: str, changes: dict[str, Any], *words: str) -> Case:
    """A case of several keys of the engine `small`."""
    return case(mistake, {f"small.{key}": value for key, value in changes.items()}, *words)


def named(mistake: str, name: str, words: str) -> Case:
    """A case of another engine with this name."""
    return one(mistake, "engines", SOUND["engines"] | {name: SOUND["engines"]["small"]}, words)


def listen(*entries: Any) -> dict[str, Any]:
    return {"gateway.serving_gateway_listen": list(entries)}


def client(mistake: Any, *words: str) -> Case:
    return one("client of the gateway", "gateway.serving_clients", mistake, "serving_clients", *words)


def target(mistake: Any, *words: str) -> Case:
    return one("target of a role", "gateway.serving_targets", mistake, "serving_targets", *words)


def extra(mistake: str, items: list[Any], *words: str) -> Case:
    return small(mistake, "extra_args", items, *words)


def default(mistake: str, arguments: Any, *words: str) -> Case:
    """A case of the defaults of the model of the engine `small`, which must not be told of the engine again."""
    return one(mistake, "models.tiny.engine_defaults", arguments, "vllm_models.tiny.engine_defaults", *words)


CERTIFIED = {f"gateway.serving_gateway_{name}": f"/x.{name}" for name in ("certificate", "private_key")}
EXTRA = {"model": "tiny"}
OF_ROLES = (("large", "architect"), ("small", "sentry"))
THIRD = SOUND["engines"]["small"] | {"gpus": [3], "port": 8070, "served_names": ["x"], "stands_in_for": ["architect"]}
ALL_THREE = {"profiles.pair.engines": ["large", "small", "third"]}
REPLICATED = {"small.replicas": 2, "small.gpus": [2, 3], "small.port": ABSENT}
CASES: list[Case] = [
    one("unknown name", "profile", "piar", "serving_profile: 'piar'", "did you mean pair?"),
    one("unknown name", "profile", None, "serving_profile: is not set", "to one of pair."),
    one("unknown name", "profile", "", "serving_profile: is not set", "to one of pair."),
    one("unknown name", "profile", 31, "serving_profile: 31 is not a name", "pair"),
    one("unknown name", "profiles.pair.engines", ["large", "smal"], "'smal' is not a key", "did you mean small?"),
    small("unknown name", "model", "tniy", "'tniy'", "did you mean tiny?"),
    small("unknown key", "max-model-len", 4096, "underscores: max_model_len"),
    small("unknown key", "max_modle_len", 4096, "did you mean max_model_len?"),
    small("unknown key", "kv_cache_memory", 4294967296, "vLLM's name for it is kv_cache_memory_bytes"),
    small("unknown key", "served_model_name", ["sentry"], "it is called served_names here"),
    small("unknown key", "api_key", "secret", "nothing reads this key", "the gateway asks clients"),
    one("unknown key", "models.tiny.sha", "0", "vllm_models.tiny.sha: nothing reads", "there are: dir, engine_def"),
    one("unknown key", "profiles.pair.engine", ["small"], "serving_profiles.pair.engine", "did you mean engines?"),
    small("missing key", "gpus", ABSENT, "is missing", "[0]"),
    one("missing key", "models.tiny.repo", ABSENT, "vllm_models.tiny.repo: is missing", "owner/name"),
    one("GPU slot used twice", "small.gpus", [1], "GPU slot 1 is wanted by large and small"),
    case("GPU slot used twice", {"small.gpus": [2, 2], "small.tensor_parallel_size": 2}, "2 is listed 2"),
    small("GPU slot not there", "gpus", [4], "slot 4 does not exist", "gpu_count is 4", "0 to 3"),
    case(
        "GPU slot not there",
        {"gpu_uuids": UUIDS[:2], "settings.gpu_count": ABSENT},
        "slot 2 does not exist, gpu_uuids has 2",
    ),
    one("GPU slot not there", "gpu_uuids", UUIDS[:3], "gpu_count: 4 contradicts gpu_uuids, which has 3"),
    one("GPU name", "gpu_name", 80, "gpu_name: 80 is not a text", "NVIDIA L4"),
    one("GPU UUIDs", "gpu_uuids", ["GPU-0", *UUIDS[1:]], "gpu_uuids[0]: 'GPU-0'", "nvidia-smi -L"),
    one("GPU UUIDs", "gpu_uuids", [*UUIDS[:3], UUIDS[0].upper().replace("GPU-", "GPU-")], "2 times", "another card"),
    one("GPU UUIDs", "gpu_uuids", UUIDS[0], "gpu_uuids", "is not a list"),
    small("GPUs and ranks", "gpus", [2, 3], "are 2 GPUs", "1 x 1 = 1"),
    one("GPUs and ranks", "small.pipeline_parallel_size", 2, "serving_engines.small.gpus: [2] is 1 GPU", "1 x 2 = 2"),
    one("port", "small.port", 8050, "port 8050 is wanted by large and small"),
    small("port", "port", 80, "80 is below 1024", "privileged"),
    small("port", "port", 70000, "70000 is above 65535", "8050, 8060 and 8070"),
    one("role", "small.served_names", ["guard"], "role 'sentry' of serving_roles is served by nobody"),
    one("role", "small.served_names", ["sentry", "architect"], "role 'architect'", "large and small"),
    ("served name", {"small.served_names": []}, [["is an empty list"], ["role 'sentry'", "nobody"]]),
    case("served name", {f"{name}.served_names": [role, "x"] for name, role in OF_ROLES}, "'x' is served by large and"),
    small("budget", "vram_budget_mib", 23035, "23035 is above gpu_memory_mib", "at most 23034"),
    small("budget", "vram_budget_mib", 20000, "20000 is below the 20757 MiB", "0.92, vLLM's default", "22563"),
    both("budget", {"kv_cache_memory_bytes": 8589934592, "vram_budget_mib": 8191}, "below the 8192 MiB", "92 alone"),
    small("wrong type", "tensor_parallel_size", "1", "'1' is text", "write 1 without quotes"),
    small("wrong type", "tensor_parallel_size", 1.0, "write 1."),
    small("wrong type", "port", True, "true is not a number"),
    ("wrong type", {"small.served_names": "sentry"}, [["is not a list; write [sentry]"], ["role 'sentry'"]]),
    small("wrong type", "extra_args", "--language-model-only", "is not a list"),
    one("wrong type", "models.tiny.revision", 1234567, "vllm_models.tiny.revision: 1234567 is a number", "quotes"),
    one("wrong type", "engines.small", ["model"], "serving_engines.small", "is not a mapping"),
    one("wrong type", "models_extra", [], "vllm_models_extra: [] is not a mapping"),
    one("name twice", "models_extra", {"big": {"repo": "x/y"}}, "vllm_models_extra: 'big' is also a name in vllm_m"),
    one("extra", "engines_extra", {"third": EXTRA | {"max_num_seqs": 0}}, "serving_engines_extra.third.max_num_seqs"),
    case(
        "slots beside another engine",
        {"engines_extra": {"third": EXTRA}, "profiles_extra": {"both": {"engines": ["third", "small"]}}},
        "serving_engines_extra.third.gpus: is missing, and both has other engines",
    ),
    case(
        "GPUs not known",
        {"engines_extra": {"third": EXTRA}, "profile": "third", "settings.gpu_count": ABSENT},
        "serving_engines_extra.third: leaves tensor_parallel_size and gpus to the plan",
    ),
    case(
        "more GPUs than there are",
        {"engines_extra": {"third": EXTRA | {"tensor_parallel_size": 8}}, "profile": "third"},
        *("serving_engines_extra.third.tensor_parallel_size: 8 makes 8 GPUs", "gpu_count is 4"),
    ),
    case(
        "GPU of another name",
        {"gpu_name": "NVIDIA L5", "settings.gpu_memory_mib": ABSENT},
        *("gpu_name: 'NVIDIA L5' is no GPU whose memory is known; did you mean NVIDIA L4?", "set gpu_memory_mib"),
    ),
    case(
        "mistyped maker",
        {"gpu_name": "NVIDA L4", "settings.gpu_memory_mib": ABSENT},
        "gpu_name: 'NVIDA L4' is no GPU whose memory is known; did you mean NVIDIA L4?",
    ),
    case(
        "GPU of two sizes",
        {"gpu_name": "RTX 3080", "settings.gpu_memory_mib": ABSENT},
        "gpu_name: cards of 'RTX 3080' have 10240 or 12288 MiB; set gpu_memory_mib",
    ),
    one("wrong type", "roles", "architect", "serving_roles", "write [architect]"),
    small("bad unit", "max_model_len", "16k", "'16k' is text", "write 16384, or 16000", "reads in 16k"),
    small("bad unit", "max_model_len", "16K", "write 16384"),
    small("bad unit", "max_model_len", "auto", "no plan knows"),
    small("bad unit", "vram_budget_mib", "20 GiB", "write 20480"),
    small("bad unit", "kv_cache_memory_bytes", "4G", "4294967296 for 4 GiB, 4000000000 for 4 GB"),
    small("bad unit", "gpu_memory_utilization", "90%", "write 0.90"),
    small("negative", "kv_cache_memory_bytes", -4294967296, "is too small", "4294967296 for 4 GiB"),
    one("negative", "settings.gpu_count", -4, "gpu_count: -4 is too small, the least is 1"),
    small("fraction", "gpu_memory_utilization", 90, "90 is above 1", "did you mean 0.90?"),
    small("fraction", "gpu_memory_utilization", 0, "0 is too small", "above 0"),
    small("fraction", "gpu_memory_utilization", "0,9", "write 0.9 without quotes"),
    one("two sources", "large.kv_cache_memory_bytes", 2**32, "n (0.9) and kv_cache_memory_bytes (4294967296)", "keep"),
    both(
        *("two sources", {"enforce_eager": True, "extra_args": ["--no-enforce-eager"]}),
        *("'--no-enforce-eager' and the key enforce_eager (true) are two", "keep the key"),
    ),
    one(
        *("two sources", "large.extra_args", ["--device_memory_utilization", "0.8"]),
        "'--device_memory_utilization 0.8' and the key gpu_memory_utilization (0.9)",
    ),
    extra("two sources", ["--seed=1", "--seed", "2"], "'--seed=1' and '--seed 2' are two", "--seed, of", "the last"),
    *(
        one("two sources", "given", dict.fromkeys(names, True), " and ".join(names), words)
        for names, words in [
            (("model_weights_token", "model_weights_token_file"), "keep one"),
            (("vllm_image_base_archive", "vllm_image_base_digest"), "vllm_image_base_id"),
        ]
    ),
    extra("unknown to vLLM", ["--max-seqs", "8"], "0.32.0 knows no '--max-seqs'", "did you mean the key max_num_seqs?"),
    extra("unknown to vLLM", ["--language-model-onyl"], "did you mean --language-model-only"),
    extra("unknown to vLLM", ["--brand-new=1"], "knows no '--brand-new'", "none of the", "is like it"),
    small("unknown to vLLM", "kv_cache_dtype", "fp8_e4", "knows no 'fp8_e4'", "fp8_e4m3"),
    extra("unknown to vLLM", ["--performance-mode=fast"], "'fast' is not one of balanced, interactivity, throughput"),
    extra("unknown to vLLM", ["--seed=one"], "takes a whole number"),
    extra("unknown to vLLM", ["--seed"], "--seed needs a value"),
    extra("unknown to vLLM", ["--language-model-only=true"], "takes no value", "--no-language-model-only"),
    extra("renamed or removed", ["--swap-space=4"], "knows no '--swap-space'", "there is no swap"),
    extra("renamed or removed", ["--guided-decoding-backend", "xgrammar"], "--structured-outputs-config.backend now"),
    small("has a place of its own", "language_model_only", True, "write it into extra_args, as --language-model-only"),
    extra("has a place of its own", ["--max-num-seqs=8"], "write max_num_seqs: 8"),
    extra("has a place of its own", ["--kv-cache-memory=4G"], "write kv_cache_memory_bytes: 4294967296"),
    one("wrong type", "engines", 3, "serving_engines: 3 is not a mapping"),
    extra("not free to choose", ["--port=9000"], "'--port=9000' is not free", "the key port"),
    extra("not free to choose", ["--api-key=secret"], "'--api-key=...' is not free", "readable"),
    extra("not free to choose", ["--served-model-name", "a", "b"], "the key served_names"),
    *(
        extra("files of another model", [words], "and below /models the files of its own", remedy)
        for words, remedy in (
            ('-sc={"model": "a/draft", "num_speculative_tokens": 2}', 'and else "ngram"'),
            ("--speculative-config.model=/data/draft", '"method": "mtp"'),
            ("--spec-model=a/draft", '"method": "mtp"'),
            ("--lora-modules=x=a/b", "merged"),
            ('--lora-modules={"name": "x", "path": "/data/x"}', "merged"),
            ('--default-mm-loras={"audio": "a/b"}', "merged"),
        )
    ),
    extra("not free to choose", ["google/gemma"], "belongs to no option", "the key model"),
    small("not free to choose", "extra_env", {"CUDA_VISIBLE_DEVICES": "3"}, "gpus of the engine says"),
    one("nothing reads it", "names", ["serving_profle"], "serving_profle: nothing reads", "mean serving_profile?"),
    small("boolean as text", "enforce_eager", "yes", "write true without quotes"),
    small("boolean as text", "enforce_eager", 1, "1 is a number; write true"),
    one("switch", "settings", {"allow_reboot": "maybe"}, "allow_reboot: 'maybe' is neither true nor false"),
    one("switch", "settings", {"verify_weights": "ful"}, "verify_weights: 'ful'", "did you mean full?"),
    one("fraction", "settings", {"calibrate_gpu_memory_utilization": "90"}, "90 is above 1", "did you mean 0.90?"),
    one("role's variable", "settings", {"vllm_engine_watchdog_s": "soon"}, "'soon' is text", "write a whole number"),
    one("role's variable", "settings", {"vllm_image_pip_source": "indx"}, "did you mean index?"),
    one("role's variable", "settings", {"vllm_image_base_archive_on_host": "yes"}, "write true without quotes"),
    one(
        "image",
        "settings",
        {"vllm_image_base": "vllm/vllm-openai:latest"},
        "write repository and tag, as in",
        "'latest'",
    ),
    one("image", "settings", {"vllm_image_base": "vllm/vllm-openai@sha256:0"}, "holds @; write repository and tag"),
    one("image", "settings", {"vllm_image_base_id": "sha256:0"}, "vllm_image_base_id: 'sha256:0'", "64 hexadecimal"),
    one("image", "settings", {"vllm_image_keep": 0}, "vllm_image_keep: 0 is too small, the least is 1"),
    one("image", "settings", {"vllm_image_pip_source": "directory"}, "vllm_image_wheels_directory: is not set"),
    one("image", "given", {"vllm_image_wheels_directory": True}, "wheels_directory: is set", "is 'index'"),
    case(
        *("image", {"given": {"vllm_image_base_archive": True}, "settings": {"vllm_image_base_archive_on_host": True}}),
        *("vllm_image_base_id: is empty", "a medium is not trusted", "docker image inspect"),
    ),
    *(
        one("role's variable", "settings", {f"vllm_engine_{name}": value}, f"vllm_engine_{name}", words)
        for name, value, words in [
            ("shm_size", "4 GiB", "holds a space; write a size"),
            ("memory", "1\n--rm", "holds a line break"),
            ("cache_directory", "/data/../etc", "leads out of its directory"),
            ("program", "/bin/sh -c", "write an absolute path"),
            ("ulimits", ["rtprio=99"], "write core, memlock"),
            ("request_limits", {"VLLM_MAX_N_SEQUENCES": True}, "true is not a limit"),
            ("request_limits", {"LD_PRELOAD": 1}, "'LD_PRELOAD' is no limit of vLLM"),
            ("uid", 0, "too small, the least is 100"),
            ("oom_score_adj", 1001, "above 1000"),
        ]
    ),
    extra("risk", ["--trust_remote_code"], "'--trust-remote-code' is a risk: it runs Python code", "accept_risk"),
    small("risk", "extra_env", {"LD_PRELOAD": "/x.so"}, "extra_env: 'LD_PRELOAD' is a risk", "accept_risk"),
    small("risk", "accept_risk", ["--middleware"], "a risk that the engine does not have; remove it."),
    named("path traversal", "../x", "serving_engines: '../x' cannot be the name of an engine"),
    one("path traversal", "models.tiny.dir", "../tiny", "vllm_models.tiny.dir: '../tiny' leads out of its directory"),
    small("path traversal", "chat_template", "../../etc/passwd", "leads out", "vllm_engine_chat_templates_directory"),
    small("chat template", "chat_template", "gema4.jinja", "there is no file 'gema4.jinja'", "mean gemma4.jinja?"),
    one("chat template", "chat_template", "gone.jinja", "vllm_engine_chat_template: there is no file 'gone.jinja'"),
    named("reserved name", "edge-switch", "'edge-switch' would be the unit vllm-edge-switch"),
    extra("odd characters", ["--seed 1"], "'--seed 1' holds a space", "one item for each word"),
    extra("odd characters", ["--seed=$(id)"], "holds $ ( )", "no shell reads it"),
    extra("odd characters", ["--seed=1\n--api-key=x"], "holds a line break"),
    extra("odd characters", ["--seed=\x00"], "holds a NUL"),
    extra("odd characters", ["--compilation-config={mode: 3}"], "is not JSON"),
    small("wrong type", "limit_mm_per_prompt", "image=0", "is not a mapping; write {image: 0, video: 0, audio: 0}"),
    small("wrong type", "limit_mm_per_prompt", {"image": -1}, "limit_mm_per_prompt.image: -1 is not a number of items"),
    small("wrong type", "limit_mm_per_prompt", {"images": 0}, "did you mean image?"),
    default("default of a model", {"max_num_seqs": None}, ".max_num_seqs: has no value"),
    default("default of a model", {"max_num_batched_tokens": 4, "max_num_seqs": 8}, "4 is below max_num_seqs 8"),
    *(
        default("default of a model", {key: 1}, f".{key}: belongs to one engine, ", "write it into the engines")
        for key in OF_ONE_ENGINE
    ),
    # What only the engine as a whole has wrong is told of the engine, and so is what it states itself.
    one(
        *("default of a model", "models.tiny.engine_defaults", {"extra_env": {"VLLM_SERVER_DEV_MODE": "1"}}),
        *("serving_engines.small.extra_env: 'VLLM_SERVER_DEV_MODE' is a risk", "accept_risk: ["),
    ),
    (
        "default of a model",
        {"models.tiny.engine_defaults": {"tool_call_parser": "x1"}, "small.tool_call_parser": "x1"},
        [[f"{where}.tool_call_parser"] for where in ("vllm_models.tiny.engine_defaults", "serving_engines.small")],
    ),
    extra("odd characters", [""], "is empty; remove it"),
    small("odd characters", "extra_env", {"A B": "1"}, "'A B' cannot be the name of an environment variable"),
    small("odd characters", "extra_env", {"VLLM_A": "1\n2"}, "extra_env.VLLM_A", "line break"),
    small("odd characters", "extra_env", {"VLLM_A": True}, "would reach the engine as 'True'"),
    *(
        small("secret", "extra_env", {name: "hunter2"}, f"extra_env.{name}: by its name", "secret_env")
        for name in ("VLLM_API_KEY_2", "hf_token", "Db_Password", "MY_SECRET_X", "AWS_CREDENTIALS")
    ),
    small("secret", "extra_env", {"VLLM_PROXY": "http://u:hunter2@p"}, "by its name or form", "vllm_engine_secrets"),
    small("secret", "extra_env", {"VLLM_API_KEY": "hunter2"}, "is not free to choose, the canary, the gateway"),
    small("secret", "secret_env", ["hunter2 x"], "secret_env: is not a mapping", "vllm_engine_secrets"),
    small("secret", "secret_env", {"STORE_KEY": "hunter2 x"}, "secret_env.STORE_KEY: its value is no name of a secret"),
    small("secret", "secret_env", {7: "good"}, "7 cannot be the name of an environment variable"),
    small("secret", "secret_env", {"STORE_KEY": "god"}, "engine_secrets has no 'god'", "did you mean good?", "Vault"),
    small("secret", "secret_env", {"STORE_KEY": "bad"}, "the value of 'bad' in vllm_engine_secrets has 3 characters"),
    one("model", "models.tiny.repo", "gemma", "vllm_models.tiny.repo: 'gemma'", "owner/name"),
    one("model", "models.tiny.repo", "https://huggingface.co/google/gemma", "write google/gemma;", "_weights_endpoint"),
    one("model", "models.tiny.manifest_sha256", "A" * 64, "manifest_sha256: 'AAA", "is no SHA-256", "or leave it out"),
    one("model", "models.tiny.revision", "", "vllm_models.tiny.revision: is empty", "commit of 40 digits"),
    one("model", "models.tiny.precision", "int4", "'int4' is not one of bf16, fp8, nvfp4, w4a16"),
    one("model", "models.tiny.dir", "big", "dir 'big' is used by big and tiny"),
    both("arguments that clash", {"max_num_batched_tokens": 128, "max_num_seqs": 256}, "128 is below max_num_seqs 256"),
    *(
        case("address of the gateway", listen(entry), *words)
        for entry, words in [
            ({"address": "0.0.0.0", "port": 8000, "tls": False}, ("listen[0]: keys and prompts", "127.0.0.1.")),
            ({"address": "10.0.0.5", "port": 8000}, ("listen[0].tls: is missing; write true or false",)),
            ({"address": "llm.example.org", "port": 8000, "tls": True}, ("'llm.example.org' is no IP address",)),
            ({"address": "127.0.0.1", "tls": False}, ("listen[0].port: is missing", "8000 or 443")),
            ({"address": "127.0.0.1", "port": 65536, "tls": False}, ("listen[0].port: 65536 is above 65535",)),
            ({"address": "127.0.0.1", "port": 8050, "tls": False}, ("8050 is the port of the engine large",)),
            ({"address": "127.0.0.1", "port": 8000, "tls": False, "tsl": True}, ("listen[0].tsl", "did you mean tls?")),
            ("127.0.0.1:8000", ("'127.0.0.1:8000' is not a mapping",)),
        ]
    ),
    case("address of the gateway", listen(LISTEN[0], LISTEN[0]), "listen[1].port: 8000 is the port of another entry"),
    case("address of the gateway", listen(LISTEN[1], LISTEN[1] | {"address": "::1"}), "whose address overlaps"),
    case("address of the gateway", listen(), "[] is no list"),
    one("path of the gateway", "settings.serving_gateway_paths", ["/v1/../metrics"], "leads out of its directory"),
    one("path of the gateway", "settings.serving_gateway_paths", ["/v1//x"], "write the path of an interface"),
    one("certificate", "gateway.serving_gateway_certificate", "/x.pem", "private_key: is not set", "set both"),
    one("certificate", "gateway.serving_gateway_certificate", "x.pem", "certificate: 'x.pem' is no absolute path"),
    one("certificate", "settings.serving_gateway_url", "llm:8443", "scheme, host and port"),
    case("certificate", CERTIFIED | {"certificate_fault": "x: fault."}, "x: fault."),
    client({"CI": {}}, "'CI' cannot be the name of a client"),
    client({"bench": {}}, "'bench' is the client that playbooks/bench.yml makes", "for example my-bench."),
    client({"ci": None}, "serving_clients.ci: null is not a mapping"),
    client({"ci": {"served_names": ["sentri"]}}, ".ci.served_names: no engine serves 'sentri'; did you mean sentry?"),
    client({"ci": {"streams": -1}}, ".ci.streams: -1 is too small, the least is 0"),
    client({"ci": {"metrics": "yes"}}, ".ci.metrics: 'yes' is text, and any text", "write true without quotes"),
    case(
        *("client of the gateway", METRICS | {"gateway.serving_metrics": "false"}),
        "serving_clients.ci.metrics: is true, and nothing serves metrics, as serving_metrics is false",
    ),
    target(["sentry"], "is not a mapping; write targets by role"),
    target({"sentri": {}}, "no engine serves 'sentri'; did you mean sentry?"),
    target({"sentry": 1.5}, ".sentry: 1.5 is not a mapping"),
    target({"sentry": {"itl_p95_s": 0}}, ".sentry.itl_p95_s: 0 is too small, the least is 0.001"),
    target({"sentry": {"ttft_p95": 1}}, ".sentry.ttft_p95: nothing reads this key; did you mean ttft_p95_s?"),
    small("stand-in", "stands_in_for", ["sentry"], "the engine serves 'sentry' itself"),
    small("stand-in", "stands_in_for", ["architekt"], "no other engine serves 'architekt'; did you mean architect?"),
    ("stand-in", {"small.stands_in_for": ["a b"]}, [["for[0]: 'a b' holds a space"], ["no other engine serves 'a b'"]]),
    case(
        *("stand-in", {"engines.third": THIRD, "small.stands_in_for": ["architect"]} | ALL_THREE),
        "serving_profiles.pair: small and third stand in for 'architect'",
    ),
    small("replicas", "replicas", 0, "0 is too small"),
    case("replicas", {"small.replicas": 2, "small.gpus": [2, 3]}, "small.port: 8060 is the port of one engine", "is 2"),
    case(
        *("replicas", {"small.replicas": 2, "small.port": ABSENT}),
        *("small.gpus: [2] is 1 GPU", "replicas x tensor_parallel_size x pipeline_parallel_size is 2 x 1 x 1 = 2"),
    ),
    case("replicas", REPLICATED | {"small.gpus": [1, 2]}, "GPU slot 1 is wanted by large and small"),
    case("replicas", REPLICATED | {"engines.small-1": THIRD}, "'small-1' is also the name of a replica of small"),
    ("several at once", {"profile": "x", "small.port": 1, "large.gpus": [0]}, [["'x'"], ["below 1024"], ["[0]"]]),
]


@pytest.fixture(scope="session")
def project() -> Project:
    return load(ROOT)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """SOUND with what is under dotted paths replaced or removed."""
    variables = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *parents, last = (f"engines.{path}" if path.startswith(("small.", "large.")) else path).split(".")
        place = variables
        for key in parents:
            place = place[key]
        if value is ABSENT:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return variables


def inventory(variables: dict[str, Any]) -> Inventory:
    secrets = {"good": "", "bad": "has 3 characters, at least 8 are expected"}
    added = {kind: variables[f"{kind}_extra"] for kind in VARIABLES}
    others = {key: value for key, value in variables.items() if not key.startswith((*VARIABLES, "roles"))}
    others |= {"merged": merge(variables, added, lambda: SOUND, [variables["profile"]])}
    others |= {"extra": {f"{name}_extra": added[kind] for kind, name in VARIABLES.items()}}
    return Inventory(**{"secrets": secrets, **others, "names": frozenset(variables["names"])})


WITHOUT_PORTS = {"small.port": ABSENT, "large.port": ABSENT, "small.stands_in_for": ["architect"]}
LARGE_TWICE = {"large.replicas": 2, "large.gpus": [0, 1, 2, 3], "large.port": ABSENT, "small.gpus": [0]}
TARGETS = {"gateway.serving_targets": {"architect": {"ttft_p95_s": 1.5, "itl_p95_s": 0.08}, "sentry": {}}}
LARGE_TWICE |= {"profiles.pair.engines": ["large"], "roles": ["architect"]}


@pytest.mark.parametrize(
    "changes",
    [{}, WITHOUT_PORTS, REPLICATED | {"small.stands_in_for": ["architect"]}, LARGE_TWICE, TARGETS],
    ids=["as it is", "without ports, with a stand-in", "replicas of small", "replicas of large count once", "targets"],
)
def test_sound_variables_are_accepted(project: Project, changes: dict[str, Any]) -> None:
    assert find_mistakes(inventory(changed(changes)), project) == []
    assert find_warnings(inventory(changed(changes)), project) == []


@pytest.mark.parametrize(
    ("mistake", "changes", "expected"),
    CASES,
    ids=[f"{mistake}: {changes}"[:80] for mistake, changes, _sentences in CASES],
)
def test_mistake_is_one_sentence(
    project: Project, mistake: str, changes: dict[str, Any], expected: list[list[str]], record_property: Any
) -> None:
    found = find_mistakes(inventory(changed(changes)), project)
    record_property("what validation says", [mistake, str(changes), *found])
    assert len(found) == len(expected), found
    for words in expected:
        assert any(all(word in sentence for word in words) for sentence in found), (words, found)


JUNK: list[Any] = [None, True, 3, -1, 2.5, 1e400, "", "x y", "a\nb", "\0", "--", [], [None], [[]], {}, {"a": None}]
JUNK += [{"": {}}]


def paths(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place of nested mappings."""
    for key, item in value.items():
        yield (*prefix, key)
        if isinstance(item, dict):
            yield from paths(item, (*prefix, key))


# What the playbook makes, and no operator writes.
MADE = {(name,) for name in ("names", "chat_templates", "settings", "gateway")}
MADE |= {path for path in paths(SOUND) if path[0] == "given"}


@pytest.mark.parametrize("path", [path for path in paths(SOUND) if path not in MADE], ids=".".join)
def test_no_value_of_any_type_is_a_traceback(project: Project, path: tuple[str, ...]) -> None:
    for junk in JUNK:
        variables = copy.deepcopy(SOUND)
        place = variables
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        for sentence in find_mistakes(inventory(variables), project) + find_warnings(inventory(variables), project):
            assert sentence.isprintable(), repr(sentence)
            assert sentence[-1] in ".?", sentence
            assert ": " in sentence, sentence


WRONG: dict[str, Any] = {"int": 2.5, "float": "much", "bool": "yes", "list": 3, "dict": "x", "str": ["x"]}


def test_a_wrong_type_is_told_of_every_key(project: Project) -> None:
    for key, option in project.engine_keys.items():
        found = find_mistakes(inventory(changed({f"small.{key}": WRONG[option.get("type", "str")]})), project)
        assert found[0].startswith(f"serving_engines.small.{key}: "), (key, found)
        for junk in JUNK:
            find_mistakes(inventory(changed({f"small.{key}": junk})), project)
    for key in project.model_keys:
        found = find_mistakes(inventory(changed({f"models.tiny.{key}": ["x"]})), project)
        assert found[0].startswith(f"vllm_models.tiny.{key}: "), (key, found)


def test_no_secret_is_printed(project: Project) -> None:
    variables = changed({"engines.small.extra_args": ["--api-key", "hunter2", "--hf-token=hunter2 x"]})
    variables["engines"]["small"]["extra_env"] = {"HF_TOKEN": "hunter2\n", "MY_PASSWORD": ["hunter2"]}
    variables["engines"]["small"]["secret_env"] = {"A_KEY": "hunter2 x", "B_KEY": ["hunter2"]}
    found = find_mistakes(inventory(variables), project)
    assert len(found) == 6
    assert not [sentence for sentence in found if "hunter2" in sentence]


# ---- other releases of vLLM ------------------------------------------------------------------------------------------


def test_another_release_of_vllm_makes_its_arguments_a_warning(project: Project) -> None:
    variables = changed({"image": "registry.example:5000/vllm/vllm-openai:v0.34.0"})
    variables["engines"]["small"]["extra_args"] = ["--new-in-0-34=1", "--port=1"]
    variables["engines"]["small"]["tool_call_parser"] = "gemma5"
    assert ["--port" in sentence for sentence in find_mistakes(inventory(variables), project)] == [True]
    told = find_warnings(inventory(variables), project)
    assert len(told) == 2
    for words, sentence in zip(("knows no 'gemma5'", "0.33.0 knows no '--new-in-0-34'"), told, strict=True):
        assert words in sentence
        assert "v0.34.0" in sentence and "those of vLLM 0.33.0 were compared" in sentence


def test_each_recorded_release_has_options_of_its_own(project: Project) -> None:
    """--monokernel came with 0.33; until then --kv-cache-dtype had a list of values."""
    variables = changed({"engines.small.extra_args": ["--monokernel"], "engines.small.kv_cache_dtype": "octave"})
    found = find_mistakes(inventory(variables), project)
    assert ["0.32.0 knows no" in sentence for sentence in found] == [True, True]
    newer = inventory({**variables, "image": "vllm/vllm-openai:v0.33.0"})
    assert find_mistakes(newer, project) == [] and find_warnings(newer, project) == []
    # And a default of its own.
    variables = changed({"engines.small.vram_budget_mib": 20500})
    assert "20757" in find_mistakes(inventory(variables), project)[0]
    assert find_mistakes(inventory({**variables, "image": "vllm/vllm-openai:v0.19.0"}), project) == []


def test_risks_are_read_by_the_release_of_the_image(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = vllm_arguments.RELEASES["0.33.0"]
    options = {**newest["options"], "repeatable one text": "middleware|-mw"}
    monkeypatch.setitem(vllm_arguments.RELEASES, "0.90.0", {**newest, "options": options})
    variables = changed({"engines.small.extra_args": ["-mw=a.b"], "image": "vllm/vllm-openai:v0.90.0"})
    found = find_mistakes(inventory(variables), project)
    assert any("'--middleware' is a risk" in each for each in found), found


def test_recorded_arguments_and_what_is_said_of_them_are_those_of_the_default_release() -> None:
    image = yaml.safe_load((ROOT / "group_vars/all/versions.yml").read_text())["vllm_image_base"]
    assert image.endswith(f":v{vllm_arguments.VERSION}"), "make vllm-release VERSION=... of that image"
    names = set(engine_arguments.read_spellings(engine_arguments.VERSION))
    assert set(engine_arguments.OURS) <= names
    assert set(engine_arguments.KEY_OF_OPTION) <= names
    assert not set(engine_arguments.FORMER) & names
    assert {"--enable-log-requests", "--structured-outputs-config", "--runner", "--reasoning-parser"} <= names


@pytest.mark.parametrize(
    ("items", "values"),
    [
        (["--seed", "-1", "--async-scheduling"], [("-1",), ()]),
        (["--middleware=a", "--middleware=b"], [("a",), ("b",)]),
        (["--allowed-media-domains", "a", "b", "--seed=1"], [("a", "b"), ("1",)]),
        (["--hf-overrides.a.b", "1", "--hf_overrides.c=2"], [("1",), ("2",)]),
        (["-O3", "-sc={}"], [("3",), ("{}",)]),
    ],
)
def test_extra_args_are_read_as_vllm_does(project: Project, items: list[str], values: list[tuple[str, ...]]) -> None:
    found, stray = engine_arguments.parse_arguments(items)
    assert [argument.values for argument in found] == values
    assert all(argument.option for argument in found)
    assert stray == []
    risks = ["--middleware"] if "--middleware=a" in items else []
    engine = {"engines.small.extra_args": items, **({"engines.small.accept_risk": risks} if risks else {})}
    assert find_mistakes(inventory(changed(engine)), project) == []


# ---- the project's own data -------------------------------------------------------------------------------------


def own(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "group_vars" / "all" / f"{name}.yml").read_text()))


@pytest.mark.parametrize("profile", own("profiles")["serving_profiles"])
def test_own_profiles_are_accepted(project: Project, profile: str) -> None:
    data = own("profiles") | own("engines") | own("models") | own("versions")
    mine = {name: data[f"serving_{name}"] for name in ("profiles", "engines", "roles")}
    mine |= {"profile": profile, "models": data["vllm_models"], "image": data["vllm_image_base"], "names": list(data)}
    assert find_mistakes(inventory(SOUND | mine), project) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("inventories/*/group_vars/*/*.yml")), ids=lambda path: path.parts[-4])
def test_own_inventories_hold_no_unknown_variable(project: Project, path: Path) -> None:
    names = list(yaml.safe_load(path.read_text()))
    assert find_mistakes(inventory(changed({"names": names})), project) == []


def test_results_of_plays_are_known(project: Project) -> None:
    assert {"gpu_slots_result", "vllm_image_result", "nvidia_driver_result", "model_weights_result"} <= project.results


def test_floor_of_a_budget_on_a_gpu_that_nobody_measured() -> None:
    assert compute_vram_floor({"gpu_memory_utilization": 0.9}, 40960, 0.92) is None
    floor = compute_vram_floor({"kv_cache_memory_bytes": 1048577}, 40960, 0.92)
    assert floor and floor.mib == 2
