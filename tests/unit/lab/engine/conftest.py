# SPDX-License-Identifier: Apache-2.0
"""The lab's engine code lives in no package of this project: it is put into an image, and here onto the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[4] / "lab" / "engine")]

from lab_engine_boards import make_gpus


@pytest.fixture
def lab_gpu_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make_gpus(tmp_path)
