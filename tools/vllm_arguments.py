#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write inventory/vllm_arguments.py of the package from the parser of the vLLM that is installed here.

Runs inside an image of vLLM, whose own code is asked; nothing is downloaded and no GPU is needed:

    docker run --rm --network none --volume "$PWD/tools:/tools:ro" --entrypoint python3 IMAGE \\
        /tools/vllm_arguments.py > plugins/module_utils/vllm_edge/inventory/vllm_arguments.py
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from importlib.metadata import version

from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` of one vLLM release takes: data that tools/vllm_arguments.py writes, never edited by hand.

OPTIONS has the names of the options without `--`, with their aliases, by what follows them: `none`, `one`, `many` or
`optional` values of the kind `text`, `int` or `float`. A `switch` takes no value and has a `--no-` form.
"""
'''
TAKES = {0: "none", "?": "optional", "+": "many", "*": "many", None: "one"}


def words(items: Iterable[object]) -> str:
    """Write words as one string, over several lines if it is long."""
    text = " ".join(map(str, items))
    if len(text) <= 80:
        return f'"{text}"'
    return '"""\n' + textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + '\n"""'


def option(action: argparse.Action) -> tuple[str, str]:
    """Return the group of an option, and its name with its aliases."""
    name, *aliases = sorted(
        action.option_strings, key=lambda name: (not name.startswith("--"), name.startswith("--no-"))
    )
    kind = "int" if action.type is int else "float" if action.type is float else "text"
    group = f"{TAKES[action.nargs]} {kind}"
    if isinstance(action, argparse._AppendAction):
        group = f"repeatable {group}"
    if group == "none text" and f"--no-{name[2:]}" in aliases:
        group = "switch"
        aliases.remove(f"--no-{name[2:]}")
    return group, "|".join([name[2:], *aliases])


def main() -> None:
    """Print the file."""
    parser = make_arg_parser(FlexibleArgumentParser())
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    utilization = next(action for action in actions if action.dest == "gpu_memory_utilization")
    groups: dict[str, list[str]] = {}
    choices: dict[str, str] = {}
    for action in actions:
        group, spelled = option(action)
        groups.setdefault(group, []).append(spelled)
        # Choices of a plain type are the same on every platform; others are computed for the one that asks.
        if action.choices and action.type in (str, int):
            choices[spelled.split("|")[0]] = words(action.choices)
    print(HEAD)
    print(f'VERSION = "{version("vllm").split("+")[0]}"')
    print(f"DEFAULT_GPU_MEMORY_UTILIZATION = {utilization.default!r}")
    print(f"TOOL_CALL_PARSERS = {words(sorted(ToolParserManager.list_registered()))}")
    print(f"REASONING_PARSERS = {words(sorted(ReasoningParserManager.list_registered()))}")
    for name, entries in (("OPTIONS", {key: words(names) for key, names in groups.items()}), ("CHOICES", choices)):
        print(f"{name} = {{")
        print("\n".join(f'    "{key}": {text},' for key, text in entries.items()))
        print("}")


if __name__ == "__main__":
    main()
