# SPDX-License-Identifier: Apache-2.0
"""The lab's engine code lives in no package of this project: it is put into an image, and here onto the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import ROOT

from lab.nvidia import testing

sys.path.insert(0, str(ROOT / "lab" / "engine"))


@pytest.fixture
def lab_gpu_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> testing.LabRoot:
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return testing.create_root(tmp_path)
