# SPDX-License-Identifier: Apache-2.0
"""The container of an engine and its engine.json, from the engine, its model and the settings of the host.

This is the only place that writes arguments of `docker create` for an engine. What is not written here no container
gets: no privileges, no network, no other directories. Users' own `extra_args` and `extra_env` are judged before, by
`inventory.risks`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..names import ENGINE_NAME, ENGINE_USER, LABEL_ENGINE, VARIABLE_NAME, unit_name
from ..paths import HostPaths
from ..text import shown
from . import policy
from .config import EngineConfigError, list_passed

FIXED_ENVIRONMENT = {
    "HOME": "/tmp",
    # No image has their user in /etc/passwd, and torch before 2.13 asks for its name while it is imported.
    "USER": ENGINE_USER,
    "LOGNAME": ENGINE_USER,
    # With vLLM, the class that judges requests.
    "PYTHONPATH": policy.DIRECTORY,
    # An engine loads no code that it or another process wrote below its home or its working directory.
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    # What it compiles is kept in the directory of its cache.
    "XDG_CACHE_HOME": "/cache/.cache",
    "CUDA_CACHE_PATH": "/cache/.nv/ComputeCache",
    "FLASHINFER_WORKSPACE_BASE": "/cache",
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
    "TRITON_CACHE_DIR": "/cache/triton",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Variables of every container."""
DEFAULT_ENVIRONMENT = {
    # Beside --allowed-media-domains, which allows no site: a site that is allowed must not send the engine to another.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # It has no network: vLLM would look for an address that others reach, and warn.
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Variables that an engine's `extra_env` may set otherwise, as it may the limits of requests and those of the bus."""
DEFAULTS: Mapping[str, Any] = {
    **{"uid": 8050, "shm_size": "4g", "tmp_size": "4g", "pids_limit": 4096, "oom_score_adj": 500, "max_logprobs": 20},
    **{"max_tokens": 32768, "cache_directory": "/data/vllm/cache", "stop_timeout_s": 30, "stall_timeout_s": 300},
    **{"progress_timeout_s": 300, "idle_probe_s": 300},
    "request_limits": dict.fromkeys(("VLLM_MAX_N_SEQUENCES", "VLLM_MAX_COMPLETION_PROMPTS"), 16)
    | {"VLLM_MAX_IMAGE_PIXELS": 50000000},
    "ulimits": ("core=0:0", "memlock=1073741824:1073741824", "nofile=65536:65536"),
}
"""The defaults of the role, for what is written without a host."""
CLOSED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
HEALTH_TIMEOUT_S = 5
"""Seconds in which /health has to answer."""

PROCESS_GIB = 4
"""Host memory of the API server, of the engine's core and of the worker of each GPU, without weights; our choice. The
CPU build of vLLM 0.32 took 1.7 GiB for all of them with a tiny model, and the libraries of CUDA take more."""
RESERVE_GIB = 8
"""For requests that wait, for pictures and sound that are decoded, and for compiling; our choice."""
_IN_HOST_MEMORY = re.compile(
    r"--(mm[-_]processor[-_]cache[-_]gb|cpu[-_]offload[-_]gb|kv[-_]offloading[-_]size|swap[-_]space)[= ]"
    r"(\d+(?:[.]\d+)?)"
)
_POOLING = re.compile(r"--(runner[= ]pooling|convert[= ](?!none|auto))")

_SIZE = r"[1-9]\d{0,15}[bkmgBKMG]?"
_WHOLE = (r"\d{1,9}", "a whole number from 0")
_FORMS = {
    "uid": (r"[1-9]\d{2,8}", "a user id from 100 on"),
    **dict.fromkeys(("max_logprobs", "max_tokens", "stop_timeout_s", "shutdown_timeout_s", "stall_timeout_s"), _WHOLE),
    **dict.fromkeys(("progress_timeout_s", "idle_probe_s"), _WHOLE),
    "gpu_uuids": (r"GPU-[0-9A-Fa-f-]{36}", "GPU-<UUID>, as `nvidia-smi -L` prints it"),
    "shm_size": (_SIZE, "a size such as 4g"),
    "tmp_size": (_SIZE, "a size such as 4g"),
    "memory": (_SIZE, "a size such as 96g, or nothing"),
    "pids_limit": (r"[1-9]\d{0,6}", "a number of processes from 1"),
    "oom_score_adj": (r"\d{1,3}|1000", "a score from 0 to 1000"),
    "ulimits": (
        r"(core|memlock|nofile|nproc|stack)=(-1|\d{1,18})(:(-1|\d{1,18}))?",
        "a limit such as nofile=65536:65536, of core, memlock, nofile, nproc or stack",
    ),
    "image": (
        r"sha256:[0-9a-f]{64}|(?!sha256:)[a-z0-9][A-Za-z0-9._:/@-]{0,511}",
        "a name such as vllm-edge/vllm:1, or sha256: and 64 digits",
    ),
}
"""What a setting may be, where Docker takes more: root, every GPU, no limit."""
_SYSTEM = r"(?!/(?:bin|boot|dev|etc|lib\w*|proc|root|run|sbin|sys|usr|var/run|var/lib/docker)/)"
_DIRECTORY = _SYSTEM + r"(?:/(?!\.\.?(?:/|$))[^/,\"=]+){%d,}"
"""Directories on the host that a container may get: none of the system's, and so many levels below the root."""
_LONGEST = 100_000
"""Characters of an argument; Linux takes 131,071 bytes."""


@dataclass(frozen=True)
class Settings:
    """What a host gives to all its engines. Each is the variable `vllm_engine_<name>` of the role."""

    uid: int
    """User id, and group id, of the engines' processes."""
    image: str
    gpu_uuids: Sequence[str]
    """UUID of the GPU in each slot."""
    shm_size: str
    """Size of /dev/shm, such as 4g."""
    tmp_size: str
    """Size of /tmp, which is in memory."""
    pids_limit: int
    oom_score_adj: int
    """Score of the kernel's OOM killer, from 0; 1000 is ended first."""
    max_logprobs: int
    """Most log-probabilities that a request gets for a token."""
    max_tokens: int
    """Most tokens of an answer, also of a request that states none."""
    cache_directory: str
    stop_timeout_s: int
    """Seconds from SIGTERM to SIGKILL."""
    stall_timeout_s: int
    progress_timeout_s: int
    idle_probe_s: int
    image_id: str = ""
    """Id of the image; empty in check mode, where it may not be built yet."""
    memory: str = ""
    """Limit of the host memory, such as 96g; empty for what `compute_memory_gib` says."""
    ulimits: Sequence[str] = ()
    request_limits: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables by which vLLM bounds what a request may ask."""
    shutdown_timeout_s: int = 0
    """Seconds that vLLM waits for running requests after SIGTERM; 0 for a release without this option."""
    bus_environment: Mapping[str, Any] = field(default_factory=dict)
    """Environment of engines over several GPUs, as the host's topology requires (module host_facts)."""
    bus_arguments: Sequence[str] = ()
    """Arguments of vLLM for the same reason."""
    secrets_hashes: Mapping[str, str] = field(default_factory=dict)
    """Keyed hash of the secrets by engine (`generation.secrets.compute_hash`)."""


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Return the settings of the option `settings` of serving_switch; whole numbers may be texts, as -e gives them.

    Raises EngineConfigError: one is missing, unknown or has another form; the text names them.
    """
    known = {item.name: item for item in fields(Settings)}
    missing = [name for name, item in known.items() if item.default is item.default_factory and name not in given]
    problems = [f"vllm_engine_{name} is missing" for name in missing]
    problems += [f"settings: {name} is none of {', '.join(known)}" for name in given if name not in known]
    if problems:
        raise EngineConfigError("; ".join(problems))
    numbers = {
        name: int(_check(given[name], name)) for name, item in known.items() if item.type == "int" and name in given
    }
    return Settings(**{**given, **numbers})


def list_create_arguments(
    engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings, paths: HostPaths, *, chat_template: bool
) -> list[str]:
    """Return the arguments of `docker create`: options, image, arguments of vLLM.

    The labels of generation and input hash are not among them, because the hash is over these (`config.add_labels`).
    `engine` is as the inventory has it, with its name and the settings of the plan; `model` has the `path` of its
    weights on the host; with `chat_template` it gets a chat template instead of that of the checkpoint. Raises
    EngineConfigError: a value is no single printable line, or would be read as something else; the text names it.
    """
    if not ENGINE_NAME.fullmatch(engine["name"]):
        raise EngineConfigError(f"name is {shown(engine['name'])}: small letters, digits and '-', at most 63")
    words = [
        *_list_options(engine, model, settings, paths, chat_template),
        _check(settings.image_id or settings.image, "image"),
        *_list_vllm_arguments(engine, model, settings, chat_template),
    ]
    if "" in words:
        raise EngineConfigError(f"the argument after {shown(words[words.index('') - 1])} is empty; remove it")
    return words


def _list_options(
    engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings, paths: HostPaths, chat_template: bool
) -> Iterator[str]:
    """Yield the options: no network, no capabilities, read-only, its own GPUs, weights, cache and socket."""
    name = engine["name"]
    yield f"--name=vllm-{name}"
    yield f"--label={LABEL_ENGINE}={name}"
    yield f"--user={settings.uid}:{settings.uid}"
    yield from (*CLOSED, "--network=none")
    # Where dockerd has userns-remap, its files stay those of this user. Without it, this is the default.
    yield "--userns=host"
    for slot in engine["gpus"]:
        yield f"--device=nvidia.com/gpu={_check(settings.gpu_uuids[slot], 'gpu_uuids')}"
    yield from list_limits(engine, model, settings)
    weights = _check_directory(model["path"], f"path of the model {engine['model']}")
    yield f"--mount=type=bind,source={weights},target=/models/{_get_base(model)},readonly"
    # What was compiled with one image is of no use to another one.
    cache = f"{settings.cache_directory}/{name}/{settings.image_id.rpartition(':')[2][:12]}".rstrip("/")
    yield f"--mount=type=bind,source={_check_directory(cache, 'vllm_engine_cache_directory', 3)},target=/cache"
    yield f"--mount=type=bind,source={paths.engine_socket(name).parent},target=/run/api"
    if chat_template:
        template = paths.engine_dir(name) / "chat-template.jinja"
        yield f"--mount=type=bind,source={template},target=/chat-template.jinja,readonly"
    yield policy.make_mount(paths)
    if engine.get("secret_env"):
        yield f"--env-file={paths.secret_file(name)}"
    own = engine.get("extra_env") or {}
    environment = build_environment(engine, settings)
    for key, value in environment.items():
        if not re.fullmatch(VARIABLE_NAME, str(key)):
            raise EngineConfigError(f"{shown(key)} is no name of an environment variable: letters, digits and _")
        yield f"--env={key}={_check_line(value, f'extra_env.{key}' if key in own else f'{key}')}"
    yield from ("--log-driver=json-file", "--log-opt=max-size=16m", "--log-opt=max-file=2")


def build_environment(engine: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    own = engine.get("extra_env") or {}
    bus = settings.bus_environment if len(engine["gpus"]) > 1 else {}
    default = {**DEFAULT_ENVIRONMENT, **settings.request_limits, **bus}
    environment = {**FIXED_ENVIRONMENT, **default, **own}
    if "PYTHONPATH" in own:  # a risk that the engine accepts
        environment["PYTHONPATH"] = f"{policy.DIRECTORY}:{own['PYTHONPATH']}"
    return environment


def list_limits(engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """Yield the options that bound what a container takes of the host. Raises EngineConfigError."""
    yield f"--shm-size={_check(settings.shm_size, 'shm_size')}"
    for limit in settings.ulimits:
        yield f"--ulimit={_check(limit, 'ulimits')}"
    yield f"--pids-limit={settings.pids_limit}"
    yield f"--oom-score-adj={settings.oom_score_adj}"
    memory = settings.memory or f"{compute_memory_gib(engine, model, settings)}g"
    yield f"--memory={_check(memory, 'memory')}"
    yield f"--memory-swap={memory}"  # no swap beside it
    yield f"--tmpfs=/tmp:exec,mode=1777,size={_check(settings.tmp_size, 'tmp_size')}"


def compute_memory_gib(engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings) -> int:
    """Return the host memory that an engine may use: what it is expected to need at most, with a reserve.

    The weights count, because the page cache of a load counts against the limit, and with less every load would read
    them twice.
    """
    workers = len(engine["gpus"])
    options = " ".join(map(str, engine.get("extra_args") or ()))
    stated = {name.replace("_", "-"): float(gib) for name, gib in _IN_HOST_MEMORY.findall(options)}
    # vLLM's default, once in the API server and once in the engine's core (config/multimodal.py).
    media = 2 * stated.get("mm-processor-cache-gb", 4)
    offloaded = workers * (stated.get("cpu-offload-gb", 0) + stated.get("swap-space", 0)) + stated.get(
        "kv-offloading-size", 0
    )
    in_memory = _read_gib(settings.shm_size, "shm_size") + _read_gib(settings.tmp_size, "tmp_size")
    weights = int(model.get("bytes") or 0) / 2**30
    return math.ceil(weights + (2 + workers) * PROCESS_GIB + media + offloaded + in_memory + RESERVE_GIB)


def _read_gib(size: str, name: str) -> float:
    unit = _check(size, name)[-1].lower()
    return int(size.rstrip("bkmgBKMG")) * {"k": 2**-20, "m": 2**-10, "g": 1.0}.get(unit, 2**-30)


def _bound_generation(own: list[str], most: int) -> list[str]:
    """Return the engine's own arguments with the most tokens of an answer, unless they say so themselves.

    vLLM takes the last option as a whole, or all that are written with dots together; one in JSON is extended.
    """
    name = "--override-generation-config"
    written = re.compile(r"--override[-_]g[a-z_-]*")
    text = f'{{"max_new_tokens": {most}}}'
    if _POOLING.search(" ".join(own)):
        return own
    places = [at for at, word in enumerate(own) if written.match(word)]
    if not places:
        return [f"{name}={text}", *own]
    if "." in own[places[-1]].partition("=")[0]:
        dotted = (
            []
            if any(re.search(r"[.]max_new_tokens(=|$)", own[at]) for at in places)
            else [f"{name}.max_new_tokens={most}"]
        )
        return [*dotted, *own]
    at = places[-1]
    glued, value = "=" in own[at], own[at].partition("=")[2] if "=" in own[at] else "".join(own[at + 1 : at + 2])
    try:
        merged = {"max_new_tokens": most, **json.loads(value)}
    except (ValueError, TypeError):
        return own  # vLLM refuses it with a sentence
    return [*own[:at], f"{name}={json.dumps(merged)}", *own[at + (1 if glued else 2) :]]


def _list_vllm_arguments(
    engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings, chat_template: bool
) -> Iterator[str]:
    """Yield the arguments of `vllm serve`. What an engine states of its own comes last: vLLM takes the last."""
    yield f"/models/{_get_base(model)}"
    yield "--served-model-name"
    for name in (*engine["served_names"], *(engine.get("stands_in_for") or ())):
        if _check_line(name, "served_names").startswith("-"):
            raise EngineConfigError(f"served_names is {shown(name)}: vLLM would read it as an option")
        yield name
    yield "--uds=/run/api/api.sock"
    yield from list_serve_arguments(engine, settings, chat_template=chat_template)
    # vLLM makes the last one the outermost.
    yield policy.MIDDLEWARE


def list_serve_arguments(
    engine: Mapping[str, Any], settings: Settings, *, chat_template: bool = False
) -> Iterator[str]:
    """Yield the arguments of `vllm serve` that are the same wherever it runs. Raises EngineConfigError."""
    own = [_check_line(word, "extra_args") for word in engine.get("extra_args") or ()]
    yield from (_check_line(word, name) for name, word in list_passed(engine))
    if engine.get("tool_call_parser"):
        yield "--enable-auto-tool-choice"
    if settings.shutdown_timeout_s > 0:
        yield f"--shutdown-timeout={settings.shutdown_timeout_s}"
    if chat_template:
        yield "--chat-template=/chat-template.jinja"
    # Of its own, it may state these abbreviated.
    if not any(re.match(r"--max[-_]logprobs", word) for word in own):
        yield f"--max-logprobs={settings.max_logprobs}"
    if not any(re.match(r"--allowed[-_]m", word) for word in own):
        # RFC 2606 keeps .invalid free: nobody can own the only address that vLLM may fetch.
        yield "--allowed-media-domains=none.invalid"
    bus = settings.bus_arguments if len(engine["gpus"]) > 1 else ()
    yield from (_check_line(word, "vllm_engine_peer_to_peer") for word in bus if word not in own)
    yield from _bound_generation(own, settings.max_tokens)


def _get_base(model: Mapping[str, Any]) -> str:
    return str(model["path"]).rpartition("/")[2]


def _check(value: object, name: str) -> str:
    """Return a setting as text. Raises EngineConfigError if it does not have its form."""
    pattern, wanted = _FORMS[name]
    if not re.fullmatch(pattern, str(value)):
        raise EngineConfigError(f"vllm_engine_{name} is {shown(str(value))}: {wanted} is expected")
    return str(value)


def _check_directory(value: object, name: str, levels: int = 2) -> str:
    text = _check_line(value, name)
    if not re.fullmatch(_DIRECTORY % levels, text):
        raise EngineConfigError(
            f"{name} is {shown(text)}: a directory of its own such as /data/vllm is expected, none of the system's, "
            'without , " and ='
        )
    return text


def _check_line(value: object, name: str) -> str:
    """Return a value as one printable line. Raises EngineConfigError."""
    text = str(value)
    if not text.isprintable():
        raise EngineConfigError(
            f"{name} is {shown(text)}: it holds a line break or another character that cannot be printed; write one "
            "line of printable characters"
        )
    if len(text) > _LONGEST:
        raise EngineConfigError(f"{name} has {len(text)} characters, the most is {_LONGEST}; shorten the value")
    return text


def describe_engine(
    engine: Mapping[str, Any], model: Mapping[str, Any], settings: Settings, paths: HostPaths
) -> dict[str, Any]:
    """Return the content of engine.json, without `input_hash` and `generation`.

    `engine` is as the inventory has it, with its name and the settings of the plan; `model` has `repo`, `revision`,
    `precision`, and `path` and `record` on the host.
    """
    name = engine["name"]
    secrets = settings.secrets_hashes.get(name)
    stated = ("port", "tool_call_parser", "reasoning_parser", "max_model_len", "vram_budget_mib", "plan")
    of_host = ("image", "image_id", "stop_timeout_s", "stall_timeout_s", "progress_timeout_s", "idle_probe_s")
    return {
        **{key: engine.get(key) for key in stated},
        **{key: model[key] for key in ("repo", "revision", "precision")},
        **{key: getattr(settings, key) for key in of_host},
        "engine": name,
        "unit": unit_name(name),
        "container": f"vllm-{name}",
        "url": f"unix:{paths.engine_socket(name)}",
        "served_names": engine["served_names"],
        "stands_in_for": engine.get("stands_in_for", []),
        "model": engine["model"],
        "tensor_parallel_size": engine["tensor_parallel_size"],
        "gpus": [settings.gpu_uuids[slot] for slot in engine["gpus"]],
        "weights_path": model["path"],
        "weights_record": model["record"],
        "accept_risk": engine.get("accept_risk", []),
        "health_timeout_s": HEALTH_TIMEOUT_S,
        "shutdown_timeout_s": settings.shutdown_timeout_s or None,
        **({"secrets_hash": secrets} if secrets else {}),
    }
