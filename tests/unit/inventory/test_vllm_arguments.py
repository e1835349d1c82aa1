# SPDX-License-Identifier: Apache-2.0
"""The recorded arguments of vLLM are those of the parser in the image that the lab runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab import images

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.docker
def test_recorded_arguments_are_those_of_the_parser() -> None:
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3"]
    command += [f"--volume={ROOT}/tools:/tools:ro", images.engine_image(), "/tools/vllm_arguments.py"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert printed == (ROOT / "plugins/module_utils/vllm_edge/inventory/vllm_arguments.py").read_text()
