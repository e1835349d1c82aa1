# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a simulated host, by the text of VLLM_EDGE_LAB_GPUS; hardware.sh alone knows what it means."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

HARDWARE = Path(__file__).with_name("hardware.sh")


def write_boards(root: Path, gpus: str = "") -> None:
    """Write the boards of these GPUs below a directory; four L4 for an empty text.

    Raises ValueError with what hardware.sh says of a text that it does not take; nothing is written then.
    """
    environment = {**os.environ, "LAB_GPU_ROOT": str(root), "VLLM_EDGE_LAB_GPUS": gpus}
    done = subprocess.run(["sh", str(HARDWARE)], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip())


def read_cards(gpus: str = "") -> list[dict[str, str]]:
    """What each of these GPUs says about itself, in the order of their slots. Raises ValueError as write_boards."""
    with tempfile.TemporaryDirectory() as directory:
        write_boards(Path(directory), gpus)
        texts = [path.read_text() for path in Path(directory).glob("gpus/*/board")]
    boards = [dict(line.split("=", 1) for line in text.splitlines()) for text in texts]
    return sorted(boards, key=lambda board: int(board["index"]))
