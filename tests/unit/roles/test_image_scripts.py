# SPDX-License-Identifier: Apache-2.0
"""The scripts that run inside an image, run here over packages made for the purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FILES = Path(__file__).resolve().parents[3] / "roles/vllm_image/files"

TRANSFORMERS = """
class AutoConfig:
    @staticmethod
    def for_model(name):
        if name not in ("gemma4", "llama"):
            raise ValueError(f"Unrecognized model identifier: {name}")
"""


class Image:
    """A directory on the Python path in place of an image's packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package("torch", "2.13.0+cpu", "")
        self.package("transformers", "5.19.0", TRANSFORMERS)
        self.package("vllm", "0.32.0+cpu", "__version__ = '0.32.0'\n")
        (root / "vllm/transformers_utils").mkdir()
        (root / "vllm/transformers_utils/__init__.py").touch()
        (root / "vllm/transformers_utils/config.py").touch()
        (root / "torch/lib").mkdir()
        self.library("torch/lib/libtorch.so")
        self.library("vllm/_C.abi3.so", "-L", str(root / "torch/lib"), "-l:libtorch.so")

    def package(self, name: str, version: str, text: str) -> None:
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "__init__.py").write_text(text)
        notes = self.root / f"{name}.dist-info"
        notes.mkdir(exist_ok=True)
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def library(self, path: str, *arguments: str) -> Path:
        target = self.root / path
        command = ["gcc", "-shared", "-Wl,--no-as-needed", "-o", str(target), "-x", "c", "/dev/null", "-x", "none"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)
        return target

    def run(self, script: str, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-", *arguments],
            input=(FILES / script).read_text(),
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(self.root), "LD_LIBRARY_PATH": ""},
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def test(self, **changed: Any) -> list[str]:
        asked = {
            "driver_libraries": ["libcuda.so.1"],
            "model_types": ["gemma4"],
            "movable": ["transformers"],
            "packages": {"torch": "2.13.0+cpu", "transformers": "5.16.0", "vllm": "0.32.0+cpu"},
            **changed,
        }
        failures: list[str] = self.run("smoke_test.py", json.dumps(asked))["failures"]
        return failures


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_inspection_names_python_platforms_and_packages(image: Image) -> None:
    found = image.run("inspect_image.py")
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found["packages"]["vllm"] == "0.32.0+cpu"
    assert "huggingface-hub" in found["packages"], "names are canonical"
    machine = os.uname().machine
    assert found["platforms"][-1] == f"linux_{machine}"
    assert f"manylinux_2_17_{machine}" in found["platforms"]


def test_good_image_passes_and_a_model_type_that_it_does_not_know_is_named(image: Image) -> None:
    assert image.test() == []
    (failure,) = image.test(model_types=["gemma4", "gemma5"])
    assert "does not know the model type gemma5" in failure and "Unrecognized" in failure


def test_what_cannot_be_imported_and_a_vllm_without_its_compiled_part_are_named(image: Image) -> None:
    image.package("transformers", "5.19.0", "import no_such_package\n")
    (image.root / "vllm/transformers_utils/config.py").write_text("raise AttributeError('ambiguous')\n")
    (image.root / "vllm/_C.abi3.so").unlink()
    transformers, vllm, compiled = image.test()
    assert "transformers cannot be imported: ModuleNotFoundError" in transformers
    assert "vllm cannot be imported: AttributeError: ambiguous" in vllm
    assert "no compiled library" in compiled
    (image.root / "vllm/transformers_utils/config.py").write_text("raise KeyError('getpwuid(): uid not found: 8050')\n")
    assert "set USER or LOGNAME" in image.test()[1]


def test_package_that_the_layer_changed(image: Image) -> None:
    failures = image.test(packages={"torch": "2.14.0", "numpy": "9", "transformers": "1", "vllm": "0.32.0+cpu"})
    assert len(failures) == 2
    assert "torch was 2.14.0 in the base image and is 2.13.0+cpu" in failures[1]


def test_missing_library_is_named_with_what_needs_it_unless_it_is_the_drivers(image: Image) -> None:
    driver = image.library("torch/lib/libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    image.library("torch/lib/libc10_cuda.so", str(driver))
    gone = image.library("torch/lib/libgone.so")
    image.library("vllm/_C_extra.so", str(gone))
    driver.unlink()
    gone.unlink()
    (failure,) = image.test()
    assert "libgone.so" in failure and "_C_extra.so" in failure
    assert image.test(driver_libraries=[]) == [failure, "libcuda.so.1, which libc10_cuda.so needs, is not found"]


def test_packages_for_the_sbom_pass_the_border(image: Image, filters: dict[str, Callable[..., Any]]) -> None:
    found = image.run("list_packages.py")
    assert found["packages"]["vllm"] == "0.32.0+cpu"
    read = filters["read_image_answer"]
    assert read(json.dumps(found), "inventory", "it") == {"value": found, "error": ""}
    for row in (["libc6", "1 2", "amd64"], ["libc6\n", "1", "amd64"], ["libc6", "1"], "libc6", ["-x", "1", "amd64"]):
        assert read(json.dumps({**found, "debian": [row]}), "inventory", "it")["error"]
