# SPDX-License-Identifier: Apache-2.0
"""The simulated NVIDIA world under test: nvidia-ml-py over the library, nvidia-smi, lab-gpu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from lab.nvidia import testing

NVIDIA = Path(testing.__file__).parent
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_runner(environment: dict[str, str], *program: str | Path) -> Run:
    return lambda *words: subprocess.run([*program, *words], capture_output=True, text=True, env=environment)


@pytest.fixture
def nvml(gpus: testing.LabRoot) -> Iterator[ModuleType]:
    """The unmodified client, initialised over this test's GPUs."""
    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture(scope="session")
def smi_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.build_smi(tmp_path_factory.mktemp("smi"))


@pytest.fixture
def smi(smi_program: Path, nvml_library: Path, gpus: testing.LabRoot) -> Run:
    return make_runner(gpus.environment(nvml_library), smi_program)


@pytest.fixture
def lab_gpu(nvml_library: Path, gpus: testing.LabRoot) -> Run:
    return make_runner(gpus.environment(nvml_library), sys.executable, NVIDIA / "lab-gpu")
