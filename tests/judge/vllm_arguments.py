# SPDX-License-Identifier: Apache-2.0
"""Inside an image with vLLM: what `vllm serve` makes of command lines on standard input.

Reads a JSON list of lists of words, prints {"version": ..., "answers": [...]} with the values of each by
vLLM's own names. Nothing is imported from this project.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})

import vllm
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

answers = []
for words in json.load(sys.stdin):
    parser = FlexibleArgumentParser()
    (command,) = serve.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *words])
    command.validate(parsed)
    answers.append({name: value for name, value in vars(parsed).items() if isinstance(value, str | int | float | list)})
print(json.dumps({"version": vllm.__version__, "answers": answers}))
