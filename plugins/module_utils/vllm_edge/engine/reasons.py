# SPDX-License-Identifier: Apache-2.0
"""Why an engine has each of its arguments: in the readable file of a host, `vllm-edge why` and `vllm-edge plan
--output`.

A reason begins with its kind, one of KINDS. The planner gives those of what it decides and of what was asked for
(`explain_plan`); what the program itself writes has its reason in OURS.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..paths import HostPaths
from .config import PASSED, EngineConfigError, load_engine
from .render import DEFAULTS

KINDS = ("it fits", "measured", "vLLM's default", "rule of the card", "your word", "vllm-edge")
ASKED = "your word"
NAMED = "vLLM's default: what its documents name for this model"
"""Of parsers."""
OURS: Mapping[str, str] = {
    option: reason
    for reason, options in {
        "vllm-edge: by these it finds its own container": "--name --label",
        "vllm-edge: what breaks out of vLLM has no rights, and nothing to write": (
            "--user --read-only --cap-drop --security-opt --userns"
        ),
        "vllm-edge: the key is read, whoever owns its file": "--cap-add",
        "vllm-edge: requests come by a socket, so no network is needed": "--network",
        "it fits: one GPU for each part of the model": "--device --gpus CUDA_VISIBLE_DEVICES",
        "vllm-edge: the processes of an engine exchange data there": "--shm-size",
        "vllm-edge: enough for vLLM, and the host survives the rest": "--ulimit --pids-limit --oom-score-adj",
        "it fits: weights, processes, media and a reserve in host memory; no swap": "--memory --memory-swap",
        "vllm-edge: the only other place to write, and it is in memory": "--tmpfs",
        "your word: the model, which the engine cannot change": "/models",
        "vllm-edge: what is compiled or downloaded is kept for the next start": "/cache",
        "vllm-edge: the socket on which it serves": "/run/api",
        "vllm-edge: the class that judges requests": "/policy",
        "vllm-edge: a secret is in no argument, and in no environment that Docker shows": "/run/secrets",
        "vllm-edge: caches in one place, and nothing is reported to others": "--env",
        "vllm-edge: the most that one request may ask for": " ".join(DEFAULTS["request_limits"]),
        "vllm-edge: a site cannot send the engine to another one": "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
        "your word: where the model comes from": "HF_ENDPOINT HF_TOKEN_PATH",
        "vllm-edge: logs cannot fill the disk": "--log",
        "vllm-edge: it runs until you stop it, also after a reboot": "--restart",
        "vllm-edge: this machine alone reaches it": "--publish",
        "vllm-edge: /health answers once the model is loaded; the first start downloads it": "--health",
        "your word: the image": "image",
        "your word: the model": "model",
        "measured: the commit whose files were planned": "--revision",
        "your word: the names that clients ask for": "--served-model-name",
        "vllm-edge: where it serves": "--uds --host --port",
        "vLLM's default: it needs this beside a tool_call_parser": "--enable-auto-tool-choice",
        "vllm-edge: running requests may finish before it stops": "--shutdown-timeout",
        "your word: chat_template": "--chat-template /chat-template.jinja",
        "your word: secret_env": "--env-file",
        "vllm-edge: the most that one request may get": "--max-logprobs --override-generation-config",
        "vllm-edge: requests cannot make the engine fetch addresses": "--allowed-media-domains",
        "vllm-edge: requests that would harm others are refused": "--middleware",
        "rule of the card: these GPUs cannot reach each other's memory (module host_facts)": (
            "--disable-custom-all-reduce NCCL_P2P_DISABLE"
        ),
    }.items()
    for option in options.split()
}
"""By option, by variable of the environment, by target of a mount (or their beginning up to a dash or slash)."""


def explain_plan(
    engine: Mapping[str, Any], added: Mapping[str, Any], defaults: Mapping[str, str], observed: Sequence[str], free: str
) -> dict[str, str]:
    """Return the reason of each key of PASSED, option of extra_args and variable of extra_env of an engine.

    Args:
        engine: as in serving_engines.
        added: what the plan adds to it.
        defaults: what vLLM takes for keys that are not stated, with the kind of the reason.
        observed: figures that were measured.
        free: what the plan leaves on each GPU, in words.
    """
    stated = [key for key in PASSED if engine.get(key) is not None]
    stated += [_list_keys(str(word))[1] for word in engine.get("extra_args") or () if str(word).startswith("-")]
    stated += engine.get("extra_env") or ()
    reasons = {key: said for key, said in defaults.items() if key not in stated} | dict.fromkeys(stated, ASKED)
    if "kv_cache_memory_bytes" in added:
        kind = f"measured: by {', '.join(observed)} it" if observed else "it fits: this"
        reasons["kv_cache_memory_bytes"] = f"{kind} leaves {free} free on the fullest GPU"
    if "gpu_memory_utilization" in added:
        reasons["gpu_memory_utilization"] = "it fits: must be free at the start; the KV cache has a size of its own"
    return reasons


def explain_completed(added: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons of what an inventory leaves to the plan (planning/completion.py)."""
    return {key: NAMED if key.endswith("_parser") else "it fits: the inventory leaves it to the plan" for key in added}


def explain_words(
    words: Iterable[str], reasons: Mapping[str, str], named: Sequence[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Yield reasons with their arguments in order, neighbours of one reason together, at last what was left to vLLM.

    Args:
        words: options of `docker create`, the image and arguments of `vllm serve`, or a part of them.
        reasons: of `explain_plan`.
        named: which of "image" and "model" are among the words.
    """
    said, group, left = "", list[str](), dict(reasons)
    places = iter(named)
    for word in words:
        is_option = re.match("--?[A-Za-z]", word)
        keys = _list_keys(word) if is_option else [next(places, "")]
        found = next((each[key] for each in (reasons, OURS) for key in keys if key in each), ASKED)
        found = said if keys == [""] else found  # a further value of an option
        if group and found != said:
            yield said, group
            group = []
        said = found
        group.append(word)
        left = {key: reason for key, reason in left.items() if key not in keys}
    yield said, group
    yield from ((f"{said} ({key} is left out)", []) for key, said in left.items() if not said.startswith(ASKED))


def _list_keys(word: str) -> list[str]:
    """Return the keys under which an option may have its reason, the best first."""
    option, _, value = word.partition("=")
    if option == "--env":
        return [value.partition("=")[0], option]
    if option == "--mount":
        target = PurePosixPath(value.rpartition("target=")[2].partition(",")[0])
        return [str(target), str(target.parent)]
    name = option.replace("_", "-").partition(".")[0]
    return [name.removeprefix("--").replace("-", "_"), name, name[: name.find("-", 2)]]


def list_lines(arguments: Iterable[str], plan: Mapping[str, Any] | None) -> list[str]:
    """Return all arguments of `docker create`, one a line, below their reasons.

    `plan` is that of engine.json; one that an earlier release wrote has no reasons.
    """
    explained = explain_words(arguments, (plan or {}).get("reasons") or {}, ("image", "model"))
    return [line for reason, words in explained for line in (f"# {reason}", *words)]


def run_why(name: str, paths: HostPaths) -> int:
    """Print why an engine has each of its arguments. The exit status is 1 if its files cannot be read."""
    try:
        engine = load_engine(name, paths)
    except EngineConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(list_lines(engine.arguments, engine.config.plan)))
    return 0
