# SPDX-License-Identifier: Apache-2.0
"""How a script of this directory asks vLLM: in the lab's image, or with other sources of vLLM, or another Python.

VLLM_JUDGE_SOURCES has directories with the Python package vllm of other releases, with colons between them; each takes
the place of the one in the image. VLLM_JUDGE_PYTHON is a Python that has PyTorch and what vLLM requires, for a machine
without Docker.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from lab import images

HERE = Path(__file__).parent
SOURCES = os.environ.get("VLLM_JUDGE_SOURCES", "").split(":")


def ask(script: str, questions: Any, sources: str, seconds: int = 900) -> Any:
    """What the script prints last, from JSON; `sources` is one of SOURCES, empty for those of the image."""
    python = os.environ.get("VLLM_JUDGE_PYTHON", "")
    environment = {**os.environ, "PYTHONPATH": sources}
    command = [python, "-B", str(HERE / script)]
    if not python:
        more = [f"--volume={sources}:/sources:ro", "--env=PYTHONPATH=/sources"] if sources else []
        command = ["docker", "run", "--rm", "--interactive", "--network", "none", f"--volume={HERE}:/judge:ro", *more]
        command += ["--entrypoint", "python3", images.engine_image(), f"/judge/{script}"]
    asked = json.dumps(questions)
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
