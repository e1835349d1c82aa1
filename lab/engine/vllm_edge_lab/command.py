# SPDX-License-Identifier: Apache-2.0
"""What the lab changes of a `vllm serve` before it runs it: as little as the CPU build needs.

* `--quantization` is dropped: the tiny checkpoint is not quantized, whatever the one it stands for is.
* `--max-num-seqs` and `--max-num-batched-tokens` get the defaults of the GPU (256, 2048 on an L4) where they are not
  given; the CPU build has others. For a model that sees videos both ways vLLM raises the latter to one video; the tiny
  checkpoint sees nothing.
* The worker becomes the lab's. Nothing is compiled: it would take most of the time of a start.
* Its arguments are kept in the environment, by which a fault can be meant for one engine and not for another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_edge_lab import encoders, gpus, physics

REAL = "/usr/local/bin/vllm.real"
PROCESSES = "vllm_edge_lab.processes"
WORKER = "vllm_edge_lab.worker.LabWorker"
# Options of the real command that the CPU build or the tiny text-only checkpoint cannot take, with their values.
DROPPED = ("--quantization", "-q")
NO_GPU = (
    "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn "
    "on verbose logging to help debug the issue."
)


def spelled(option: str) -> str:
    """vLLM takes underscores for dashes."""
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else option


def value_of(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments):
        option, equals, value = spelled(argument).partition("=")
        if option == name:
            return value if equals else next(iter(arguments[position + 1 :]), None)
    return None


def without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, _ = spelled(argument).partition("=")
        if option not in names:
            kept.append(argument)
        elif not equals:
            next(rest, None)
    return kept


def rewrite(arguments: Sequence[str]) -> list[str]:
    """The real command's arguments for those of the unit."""
    result = without(arguments, DROPPED)
    if value_of(arguments, "--config") is None:
        sequences, tokens = batch_defaults(gpus.visible_gpus())
        for name, value in (("--max-num-seqs", sequences), ("--max-num-batched-tokens", batch_of(arguments, tokens))):
            if value_of(arguments, name) is None:
                result += [name, str(value)]
    return [*result, "--worker-cls", WORKER]


def batch_defaults(visible: Sequence[gpus.Gpu]) -> tuple[int, int]:
    """vLLM's sequences and tokens of one batch, by NVML's total of the first GPU (engine/arg_utils.py, 2894)."""
    total_gib = visible[0].total_mib / 1024 if visible else 0
    if total_gib >= 160:
        return 1024, 16384
    return (1024, 8192) if total_gib >= 70 and "a100" not in visible[0].name.lower() else (256, 2048)


def batch_of(arguments: Sequence[str], tokens: int) -> int:
    """Tokens of one batch: the GPU's default, or at least one video of Gemma 4 if it takes any."""
    try:
        family = physics.model_of(repository_of(arguments[0])).family
    except (OSError, ValueError, IndexError):
        family = ""
    text_only = encoders.takes_text_only(value_of(arguments, "--limit-mm-per-prompt"))
    return max(tokens, 2496) if family in physics.SEES_BOTH_WAYS and not text_only else tokens


def repository_of(model_directory: str) -> str:
    """The repository whose weights a tiny checkpoint stands for: `_name_or_path` of its config.json."""
    config = json.loads((Path(model_directory) / "config.json").read_text())
    return str(config.get("_name_or_path", model_directory))


def identity(arguments: Sequence[str]) -> dict[str, list[str]]:
    """What a fault can ask for: options of the command line with underscores, and `model`, the repository."""
    known: dict[str, list[str]] = {}
    words: list[str] = []
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = spelled(argument).partition("=")
            words = known.setdefault(name.lstrip("-").replace("-", "_"), [])
            words += [value] if equals else []
        elif words or known:
            words.append(argument)
        else:
            try:
                known["model"] = [repository_of(argument)]
            except (OSError, ValueError):
                known["model"] = [argument]
    return known


def is_serve(arguments: Sequence[str]) -> bool:
    return arguments[:1] == ["serve"] and not any(word.split("=")[0] in ("--help", "-h") for word in arguments)


def main() -> None:
    arguments = sys.argv[1:]
    if is_serve(arguments):
        visible = gpus.visible_gpus()
        if not Path(gpus.lab_root()).is_dir():
            sys.exit(
                "This image belongs to the lab of vllm-edge: its GPUs are simulated, and it serves only where the lab "
                f"has put them ({gpus.lab_root()} is missing). On a real host use the image vllm/vllm-openai."
            )
        if not visible:
            sys.exit(NO_GPU)
        os.environ[gpus.IDENTITY] = json.dumps(identity(arguments[1:]))
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", PROCESSES, "serve", *rewrite(arguments[1:])])
    os.execv(REAL, [REAL, *arguments])
