# SPDX-License-Identifier: Apache-2.0
"""What a value may be beside its type and its choices, by the name of a variable or of a key of an engine or a model.

Type, choices and meaning of a key are in the argument specs of the roles and in meta/variables.yml. Ansible and its
linter accept no further keys in an argument spec, so units, bounds and forms are here, once each. Validation and
docs/reference/variables.md read both.
"""

from __future__ import annotations

from typing import NamedTuple

from ..names import VARIABLE_NAME

PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_LINE = r"[^\x00-\x1f\x7f]*"


class Rule(NamedTuple):
    remedy: str = ""
    """What to write instead of a wrong value."""
    pattern: str = r"[A-Za-z0-9][A-Za-z0-9._:/-]*"
    """Of a text, or of each text in a list."""
    may_be_empty: bool = False
    """Of a text or a list."""
    missing: str = ""
    """What to write for a list that is missing or empty, if `remedy` is about its items."""
    unit: str = ""
    """What a number counts."""
    example: str = "1"
    low: float = 0
    high: float | None = None


def _number(
    unit: str, example: object, low: float = 1, high: float | None = None, remedy: str = "", missing: str = ""
) -> Rule:
    return Rule(remedy, unit=unit, example=str(example), low=low, high=high, missing=missing)


_SIZE = r"[1-9]\d{0,12}[bkmgBKMG]?", "write a size in Docker's syntax, such as 4g for 4 GiB"
_PATH = Rule("write an absolute path of letters, digits and . _ @ + -", r"(/(?!\.\.?(/|$))[A-Za-z0-9._@+-]+)+")
_DIGEST = Rule("write sha256: and 64 hexadecimal digits, or leave it empty", "sha256:[0-9a-f]{64}", may_be_empty=True)
_SERVED = r"[A-Za-z0-9][A-Za-z0-9._:/-]*"
_SERVED_REMEDY = "write letters, digits and . _ : / -, without spaces, such as architect"
_HOST = r"[A-Za-z0-9:][A-Za-z0-9.:-]*"
_HOST_REMEDY = "write a host name or an IP address, such as llm.example.org"

RULES: dict[str, Rule] = {
    # Numbers of an engine and of a host.
    "tensor_parallel_size": _number("GPUs", 2),
    "pipeline_parallel_size": _number("GPUs", 2),
    "replicas": _number("engines", 2, 1, 64),
    "gpus": _number(
        *("slot", 0, 0, None, "slots are counted from 0, in the order of gpu_uuids"),
        missing="write the slots of its GPUs, such as [0]",
    ),
    "port": _number("port", 8050, 1024, 65535, "the reference uses 8050, 8060 and 8070"),
    "max_model_len": _number("tokens", 16384),
    "max_num_seqs": _number("requests", 8),
    "max_num_batched_tokens": _number("tokens", 2048),
    "gpu_memory_utilization": _number("fraction", "0.90", 0, 1, "write a fraction of the GPU's memory, such as 0.90"),
    "kv_cache_memory_bytes": _number("bytes", 4294967296, 1048576, None, "write bytes, such as 4294967296 for 4 GiB"),
    "vram_budget_mib": _number("MiB", 22200),
    "gpu_count": _number("GPUs", 4),
    "gpu_memory_mib": _number("MiB", 23034, 1024, None, "write what nvidia-smi prints as the total of one GPU"),
    "gpu_compute_capability": _number("", 8.9, 7.5, 20, "write what nvidia-smi prints as compute_cap, such as 8.9"),
    "gpu_bandwidth_gb_s": _number("GB/s", 864, 100, 50_000, "write GB/s of the card's data sheet, such as 864"),
    # Numbers of roles.
    "vllm_engine_uid": _number("", 8050, 100, 999_999_999, "write the id of a user that owns nothing else: 8050"),
    "vllm_engine_pids_limit": _number("processes", 4096, 64, 4_194_304),
    "vllm_engine_oom_score_adj": _number("", 500, 0, 1000, "write 0 to 1000; the highest is killed first"),
    "vllm_engine_max_logprobs": _number("tokens", 20, 0, 1_000_000),
    "vllm_engine_max_tokens": _number("tokens", 32768),
    "serving_gateway_listen.port": _number("port", 8000, 1, 65535, "write a port, such as 8000 or 443"),
    "serving_fleet_listen.port": _number("port", 8444, 1, 65535, "write a port, such as 8444"),
    "serving_switch_serial": _number("hosts", 1),
    "requests_per_minute": _number("requests", 600, 0, 1_000_000),
    "streams": _number("requests", 64, 0, 1_000_000),
    "ttft_p95_s": _number("seconds", 1.5, 0.001, 3600),
    "itl_p95_s": _number("seconds", 0.08, 0.001, 3600),
    "serving_gateway_wait_s": _number("seconds", 120, 0, 3600),
    "serving_gateway_waiting": _number("requests", 64, 0, 10_000),
    "serving_gateway_max_tokens": _number("tokens", 32768),
    "serving_gateway_rotation_hours": _number("hours", 24, 1, 8760),
    "vllm_image_keep": _number("images", 3),
    # Numbers of plays.
    "plan_margin_mib": _number("MiB", 512, 0),
    "plan_tolerance_mib": _number("MiB", 300, 0),
    "memory_threshold_percent": _number("percent", 85, 1, 100),
    "calibrate_gpu_memory_utilization": _number(
        *("fraction", "0.90", 0, 1),
        "write a fraction of the GPU's memory; 0.90 leaves room for the CUDA context and what libraries allocate late",
    ),
    "bench_soak_minutes": _number("minutes", 30, 0),
    "bench_limit_minutes": _number("minutes", 60, 0),
    "bench_tolerance_percent": _number("percent", 10, 0.1, 99),
    "bench_input_tokens": _number("tokens", 256, 1, 999_999),
    "bench_output_tokens": _number("tokens", 256, 1, 999_999, missing="write [128, 256, 512]"),
    "bench_requests": _number("requests", 3, 1, 9999),
    "quality_repeats": _number("", 3),
    "quality_timeout_s": _number("seconds", 300),
    "quality_reference_tokens": _number("tokens", 64, 1, 9999),
    "quality_reference_timeout_s": _number("seconds", 600, 1, 99_999),
    # Texts of an engine, a model and a profile.
    "repo": Rule("write owner/name, such as google/gemma-4-E2B-it", rf"{PLAIN_NAME}/{PLAIN_NAME}"),
    "dir": Rule("write the plain name of one directory below the root of the weights", PLAIN_NAME),
    "revision": Rule("write a commit of 40 digits, a branch or a tag", rf"{PLAIN_NAME}(/{PLAIN_NAME})*"),
    "chat_template": Rule(
        "write the plain name of a file in vllm_engine_chat_templates_directory", PLAIN_NAME, may_be_empty=True
    ),
    "served_names": Rule(_SERVED_REMEDY, _SERVED, missing="write at least one name, such as [architect]"),
    "stands_in_for": Rule(_SERVED_REMEDY, _SERVED, may_be_empty=True),
    "accept_risk": Rule(
        "write the name of an option or an environment variable, such as --trust-remote-code",
        rf"--?[A-Za-z][A-Za-z0-9_.-]*|{VARIABLE_NAME}",
    ),
    "engines": Rule(missing="name at least one key of serving_engines"),
    "when": Rule("write one line", _LINE),
    "source": Rule("write one line", _LINE),
    "limit_mm_per_prompt": Rule("write {image: 0, video: 0, audio: 0} for text only"),
    "extra_env": Rule("write NAME: value, one line each"),
    "secret_env": Rule("write NAME: <a key of vllm_engine_secrets>, one line each"),  # pragma: allowlist secret
    # Texts of roles, which end in `docker create`, in a unit or in the gateway's configuration as they are.
    "vllm_engine_shm_size": Rule(_SIZE[1], _SIZE[0]),
    "vllm_engine_tmp_size": Rule(_SIZE[1], _SIZE[0]),
    "vllm_engine_memory": Rule(_SIZE[1], _SIZE[0], may_be_empty=True),
    "vllm_engine_ulimits": Rule(
        "write core, memlock, nofile, nproc or stack with a number, such as nofile=65536:65536",
        r"(core|memlock|nofile|nproc|stack)=(-1|\d{1,18})(:(-1|\d{1,18}))?",
        may_be_empty=True,
    ),
    "vllm_engine_request_limits": Rule("write {VLLM_MAX_N_SEQUENCES: 16}"),
    "vllm_engine_configuration_directory": _PATH,
    "vllm_engine_state_directory": _PATH,
    "vllm_engine_cache_directory": _PATH,
    "vllm_engine_program": _PATH,
    "vllm_image_base": Rule(
        "write repository and tag, as in docker.io/vllm/vllm-openai:v0.32.0; 'latest' does not say which release of "
        "vLLM it is, and a digest belongs into vllm_image_base_digest",
        r"[a-z0-9][A-Za-z0-9._:/-]*:(?!latest$)[A-Za-z0-9_][A-Za-z0-9._-]*",
    ),
    "vllm_image_base_digest": _DIGEST,
    "vllm_image_base_id": _DIGEST,
    "serving_gateway_memory": Rule("write MiB or GiB as systemd does, such as 1G", r"[1-9]\d{0,6}[MG]"),
    "serving_gateway_listen.address": Rule(_HOST_REMEDY, _HOST),
    "serving_fleet": Rule(
        "write up to 32 small letters, digits and -, the first one a letter or digit, such as site",
        r"[a-z0-9][a-z0-9-]{0,31}",
        may_be_empty=True,
    ),
    "serving_fleet_listen.address": Rule("write an IP address of the host, such as 192.0.2.11", _HOST),
    "serving_gateway_certificate_names": Rule(_HOST_REMEDY, _HOST, may_be_empty=True),
    "serving_gateway_paths": Rule(
        "write the path of an interface of vLLM, such as /v1/messages", r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
    ),
    "serving_gateway_url": Rule(
        "write scheme, host and port, such as https://llm:8443",
        r"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?",
        may_be_empty=True,
    ),
    "serving_clients.served_names": Rule(_SERVED_REMEDY, _SERVED, may_be_empty=True),
}
DEFAULT = Rule()
"""Of a key without a rule: a text is one word of a command line, a number is from 0."""
