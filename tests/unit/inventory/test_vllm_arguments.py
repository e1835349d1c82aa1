# SPDX-License-Identifier: Apache-2.0
"""What is recorded of vLLM's releases: the arguments are those of the parser, the metrics those that we read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine import metrics
from ansible.module_utils.vllm_edge.inventory import engine_arguments, vllm_arguments

from lab import images

HERE = Path(__file__).resolve().parent


@pytest.mark.docker
def test_recorded_arguments_are_those_of_the_parser() -> None:
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3"]
    command += [f"--volume={HERE}:/here:ro", images.engine_image(), "/here/vllm_parser.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    def split(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: split(each) for key, each in value.items()}
        return value.split() if isinstance(value, str) else value

    recorded = split(vllm_arguments.RELEASES[vllm_arguments.VERSION])
    del recorded["metrics"]
    assert json.loads(printed.splitlines()[-1]) == recorded


@pytest.mark.parametrize("version", vllm_arguments.RELEASES)
def test_metrics_that_the_project_reads_are_those_of_the_release(version: str) -> None:
    names = vllm_arguments.RELEASES[version]["metrics"].split()
    lines = [f"vllm:{name}{suffix} 1" for name in names for suffix in ("", "_total", "_count")]
    assert len(metrics.read_figures("\n".join(lines))) == 9 and "cache_config_info" in names
    totals = vars(metrics.read_totals("\n".join(lines)))
    assert totals.pop("in_work") == 2 and set(totals.values()) == {1}


@pytest.mark.parametrize(
    "release, expected",
    [("0.33.0", "0.33.0"), ("0.32.1", "0.32.0"), ("0.99.0", "0.33.0"), ("0.19.0", "0.32.0"), ("", "0.32.0")],
)
def test_a_release_that_nobody_recorded_is_compared_with_the_one_before_it(release: str, expected: str) -> None:
    assert engine_arguments.find_recorded_release(release) == expected
