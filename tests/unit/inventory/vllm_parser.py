#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the options of the vLLM that is installed here as JSON, from its own parser.

test_vllm_arguments.py runs this in the lab's image: what tools/vllm_release.py read from the sources must be the same.
"""

from __future__ import annotations

import argparse
import json

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:  # since 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

TAKES = {0: "none", "?": "optional", "+": "many", "*": "many", None: "one"}


def option(action: argparse.Action, spelled: list[str]) -> tuple[str, str]:
    """Return the group of an option, and its name with its aliases."""
    name, *aliases = sorted(spelled, key=lambda name: (not name.startswith("--"), name.startswith("--no-")))
    kind = "int" if action.type is int else "float" if action.type is float else "text"
    group = f"{TAKES[action.nargs]} {kind}"
    if isinstance(action, argparse._AppendAction):
        group = f"repeatable {group}"
    if group == "none text" and f"--no-{name[2:]}" in aliases:
        group = "switch"
        aliases.remove(f"--no-{name[2:]}")
    return group, "|".join([name[2:], *aliases])


def main() -> None:
    """Print the entry of this release in vllm_arguments.RELEASES, without its metrics."""
    parser = make_arg_parser(FlexibleArgumentParser())
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    groups: dict[str, list[str]] = {}
    choices: dict[str, list[str]] = {}
    for action in actions:
        # Hidden spellings are not in option_strings.
        group, spelled = option(
            action, [name for name, each in parser._option_string_actions.items() if each is action]
        )
        groups.setdefault(group, []).append(spelled)
        # Choices of a plain type are the same on every platform; others are computed for the one that asks.
        if action.choices and action.type in (str, int):
            choices[spelled.split("|")[0]] = list(map(str, action.choices))
    found = {
        "gpu_memory_utilization": parser.get_default("gpu_memory_utilization"),
        "tool_call_parsers": sorted(ToolParserManager.list_registered()),
        "reasoning_parsers": sorted(ReasoningParserManager.list_registered()),
        "options": groups,
        "choices": choices,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
