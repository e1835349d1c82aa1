# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve`, or a whole line of it, as an engine in the form of serving_engines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..inventory.engine_arguments import Argument, find_option_errors, find_recorded_release, parse_arguments
from ..names import VARIABLE_NAME
from ..text import shown
from . import planner
from .contract import Speculation
from .memory.vllm_versions import behaviour

ALIASES = {"--context": "--max-model-len", "--text-only": "--language-model-only"}
"""What `vllm-edge plan` calls options of vLLM besides."""
KEYS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("kv_cache_dtype", "dtype", "enforce_eager"),
)
"""Options that serving_engines has as keys; the others are its extra_args."""
NOT_PLANNED = frozenset({"--model", "--revision", "--tensor-parallel-size", "--pipeline-parallel-size"})
SECRET = frozenset({"--api-key", "--hf-token", "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
SERVER_OPTIONS = ("--host", "--port", "--uds", "--served-model-name")
"""Where it serves; `--output` decides the first and third itself."""
SERVER = "vllm.entrypoints.openai.api_server"
"""The module that earlier lines begin with, after `python -m`."""
IMAGE = r"[/\w.:-]*\bvllm-openai(?:[:@]\S+)?"
"""vLLM's image, after which a line of `docker run` has the options of vLLM."""
SHELL = frozenset({"|", "&", "&&", ";", ">", ">>", "2>&1"})
NEW_SHARE, OLD_SHARE, NEW_SHARE_SINCE = 0.92, 0.9, (0, 20)
"""vLLM's default of gpu_memory_utilization (config/cache.py: 0.19.0:41, 0.20.0:66, 0.33.0:215)."""


@dataclass(frozen=True)
class Asked:
    """What is asked for beside the GPUs."""

    model: str
    """Empty if none is named; `revision` too."""
    revision: str
    engine: dict[str, Any]
    """As in serving_engines, without model, GPUs and parallelism."""
    whole: bool
    """Whether it is a line of `vllm serve`, which is planned as it is: what it leaves out is vLLM's default."""
    longest: bool
    """Whether the longest context that fits is looked for."""
    size: int | None
    """tensor_parallel_size; None if the sizes are compared."""
    stages: int
    replicas: int
    speculation: Speculation | None
    server: Mapping[str, list[str]] = field(default_factory=dict)
    """Values of SERVER_OPTIONS, which are no part of `engine`."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of keys of the engine that were not asked for (engine/reasons.py)."""

    @property
    def gpus(self) -> int:
        return (self.size or 1) * self.stages * self.replicas


def read(words: Sequence[str], release: str) -> Asked:
    """Read options of vLLM and a model, or a line of `vllm serve`, as words or as one text.

    Raises ValueError if this release of vLLM would not take them, and UnknownVersion.
    """
    number = behaviour(release).number
    words, environment, whole = _cut_line(words)
    recorded = find_recorded_release(f"{number[0]}.{number[1]}")
    spelled = (re.sub(r"^--[a-z-]+", lambda name: ALIASES.get(name[0], name[0]), word) for word in words)
    found, stray = parse_arguments([*spelled], recorded)
    for argument in found:
        for error in find_option_errors("", argument, (), recorded):
            raise ValueError(error if argument.option else f"{error} vllm-edge plan --help has its own options.")
    given = {argument.option.name: argument for argument in found if argument.option and not argument.dotted}
    if "--config" in given:
        raise ValueError("--config: the plan does not read that file; write its options here.")
    named = [*stray, *(given["--model"].values if "--model" in given else ())]
    if len(named) > 1:
        raise ValueError(f"{shown(named[1])} belongs to no option, and the model is {shown(named[0])}; name one.")
    context = "".join(given["--max-model-len"].values).lower() if "--max-model-len" in given else ""
    longest = context in ("auto", "-1") or not (context or whole)
    kept = [argument for argument in found if not (longest and given.get("--max-model-len") is argument)]
    arguments = planner.arguments_of({"extra_args": [word for argument in kept for word in list_words(argument)]})
    engine: dict[str, Any] = {"extra_args": [], **({"extra_env": environment} if environment else {})}
    server: dict[str, list[str]] = {}
    for argument in kept:
        name = argument.option.name if argument.option else ""
        key = name.removeprefix("--").replace("-", "_")
        if key in KEYS:
            engine[key] = getattr(arguments, key)
        elif name in SERVER_OPTIONS and argument.option and not argument.dotted:
            server[name] = [*argument.values]
        elif name not in NOT_PLANNED | SECRET:
            engine["extra_args"] += list_words(argument)
    reasons = {"max_model_len": "it fits: the longest context that does, or all that the model has"} if longest else {}
    if whole and "gpu_memory_utilization" not in engine:
        reasons["gpu_memory_utilization"] = "vLLM's default: its share of the GPU"
        engine["gpu_memory_utilization"] = NEW_SHARE if number >= NEW_SHARE_SINCE else OLD_SHARE
    size = arguments.tensor_parallel_size if whole or "--tensor-parallel-size" in given else None
    if size is None:
        reasons["tensor_parallel_size"] = "it fits: of the numbers of GPUs that are compared by context, then by speed"
    replicas = int("".join(given["--data-parallel-size"].values)) if "--data-parallel-size" in given else 1
    if replicas < 1:
        raise ValueError(f"--data-parallel-size: {replicas} is no number of replicas; write 1 or more.")
    revision = "".join(given["--revision"].values) if "--revision" in given else ""
    stages = arguments.pipeline_parallel_size
    about = engine, whole, longest, size, stages, replicas
    return Asked("".join(named), revision, *about, arguments.speculation, server, reasons)


def list_words(argument: Argument) -> list[str]:
    """Return an argument as the words of a command line."""
    joined = argument.glued or argument.name.startswith("-O")
    return [argument.text] if joined else [argument.name + argument.dotted, *argument.values]


def _cut_line(words: Sequence[str]) -> tuple[list[str], dict[str, str], bool]:
    """Return the words after `vllm serve`, the environment variables before it, and whether it is there at all."""
    flat: list[str] = []
    for word in words:
        try:
            is_line = re.search(rf"\bvllm\s+serve\b|{SERVER}|\s{IMAGE}\s", word)
            flat += shlex.split(word.replace("\\\n", " ")) if is_line else [word]
        except ValueError as error:
            raise ValueError(f"{shown(word)} is no line of a shell ({error}); put it into single quotes.") from error
    begins = [
        place
        for place, word in enumerate(flat, 1)
        if word == SERVER
        or re.fullmatch(IMAGE, word)
        or (word == "serve" and flat[place - 2].rpartition("/")[2] == "vllm")
    ]
    if not begins:
        return flat, {}, False
    before, after = flat[: begins[-1]], flat[begins[-1] :]
    runs_image = any(re.fullmatch(IMAGE, word) for word in before)
    if options := [word for word in before if word.startswith("--") and not runs_image]:
        raise ValueError(f"{shown(options[0])} stands before vllm serve; give the line from there on.")
    ends = next((place for place, word in enumerate(after) if word in SHELL), len(after))
    pairs = [word.partition("=") for word in before if "=" in word]
    named = {name: value for name, _, value in pairs if re.fullmatch(VARIABLE_NAME, name) and name not in SECRET}
    return after[:ends], named, True
