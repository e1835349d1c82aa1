#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write module_utils/vllm_edge/inventory/vllm_arguments.py from the parser of the vLLM that is installed here.

Runs inside an image of vLLM, whose own code is asked; nothing is downloaded and no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.metadata import version

from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` of one vLLM release takes: recorded data, never edited by hand.

Written by the image's own parser; IMAGE is any image with that vLLM:

    docker run --rm --network none --volume "$PWD/tools:/tools:ro" --entrypoint python3 IMAGE \\\\
        /tools/vllm_arguments.py > module_utils/vllm_edge/inventory/vllm_arguments.py
    ruff format module_utils/vllm_edge/inventory/vllm_arguments.py
"""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option of `vllm serve`."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other spellings, the `--no-` form among them."""
    takes: str = "one"
    """Values that follow it: `none`, `optional`, `one`, `many`."""
    kind: str = "text"
    """What a value is: `text`, `int`, `float`."""
    choices: tuple[str, ...] = ()
    repeatable: bool = False

'''

TAKES = {0: "none", "?": "optional", "+": "many", "*": "many", None: "one"}


def literal(texts: Iterable[object]) -> str:
    """A tuple as Python writes it."""
    return repr(tuple(map(str, texts)))


def option(action: argparse.Action) -> str:
    """One line of OPTIONS: only what differs from the defaults of Option."""
    names = sorted(action.option_strings, key=lambda name: (not name.startswith("--"), name.startswith("--no-")))
    kind = "int" if action.type is int else "float" if action.type is float else "text"
    # Choices of a plain type are the same on every platform; others are computed for the one that asks.
    fixed = action.choices if action.type in (str, int) else None
    parts = [repr(names[0])]
    if names[1:]:
        parts.append(f"aliases={literal(names[1:])}")
    if TAKES[action.nargs] != "one":
        parts.append(f"takes={TAKES[action.nargs]!r}")
    if kind != "text":
        parts.append(f"kind={kind!r}")
    if fixed:
        parts.append(f"choices={literal(fixed)}")
    if isinstance(action, argparse._AppendAction):
        parts.append("repeatable=True")
    return f"    Option({', '.join(parts)}),"


def main() -> None:
    """Print the file."""
    parser = make_arg_parser(FlexibleArgumentParser())
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    utilization = next(action for action in actions if action.dest == "gpu_memory_utilization")
    print(HEAD)
    print(f"VERSION = {version('vllm').split('+')[0]!r}")
    print(f"DEFAULT_GPU_MEMORY_UTILIZATION = {utilization.default!r}")
    print(f"TOOL_CALL_PARSERS = {literal(sorted(ToolParserManager.list_registered()))}")
    print(f"REASONING_PARSERS = {literal(sorted(ReasoningParserManager.list_registered()))}")
    print("OPTIONS = (")
    print("\n".join(option(action) for action in actions))
    print(")")


if __name__ == "__main__":
    main()
