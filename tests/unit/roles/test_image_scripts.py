# SPDX-License-Identifier: Apache-2.0
"""The scripts that run inside an image, run here over packages made for the purpose."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
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

    def read(self, asked: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-", json.dumps(asked)],
            input=(FILES / "read_image.py").read_text(),
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
        failures: list[str] = self.read(asked)["failures"]
        return failures


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


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
    assert "vllm cannot be imported: AttributeError: ambiguous" in vllm and "another transformers" not in vllm
    assert "another transformers by vllm_image_requirement" in transformers
    assert "no compiled library" in compiled
    (image.root / "vllm/transformers_utils/config.py").write_text("raise KeyError('getpwuid(): uid not found: 8050')\n")
    assert "set USER or LOGNAME" in image.test()[1] and "another transformers" not in image.test()[1]


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


def test_listed_packages_can_be_used(image: Image, filters: dict[str, Callable[..., Any]]) -> None:
    found = image.read({})
    assert found["packages"]["vllm"] == "0.32.0+cpu"
    assert "huggingface-hub" in found["packages"], "names are canonical"
    assert filters["read_image_answer"](json.dumps(found), "image", "it") == {"value": found, "error": ""}


# ---- the archive of an image ------------------------------------------------------------------------------------

BASE = "docker.io/vllm/vllm-openai:v0.32.0"
SHORT = "vllm/vllm-openai:v0.32.0"
Blob = tuple[str, bytes]


def blob(content: object) -> tuple[str, Blob]:
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    return f"sha256:{digest}", (f"blobs/sha256/{digest}", data)


CONFIG, CONFIG_BLOB = blob({"config": {}})
EVIL, _ = blob({"config": {"User": "0"}})
MANIFEST, MANIFEST_BLOB = blob({"config": {"digest": CONFIG}})
EVIL_MANIFEST, EVIL_MANIFEST_BLOB = blob({"config": {"digest": EVIL}})
LIST, LIST_BLOB = blob({"manifests": [{"digest": MANIFEST}, {"digest": "sha256:" + "0" * 64}]})
EVIL_LIST, EVIL_LIST_BLOB = blob({"manifests": [{"digest": MANIFEST}, {"digest": EVIL_MANIFEST}]})


def listing(names: list[str] | None, **changes: Any) -> list[dict[str, Any]]:
    return [{"Config": f"blobs/sha256/{CONFIG[7:]}", "RepoTags": names, "Layers": [], **changes}]


UNNAMED: dict[str, object] = {"manifest.json": listing(None)}


def index(digest: str, name: str = "", reference: str = "") -> dict[str, Any]:
    notes = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": reference}
    return {"manifests": [{"digest": digest, "annotations": notes}]}


def read_archive(path: Path, members: dict[str, object], *blobs: Blob, **options: Any) -> tuple[Any, str]:
    """The ids in an archive of these documents, and why it is refused."""
    documents = [(name, json.dumps(content).encode()) for name, content in members.items()]
    with tarfile.open(path, "w", **options) as tar:
        for name, data in (*documents, CONFIG_BLOB, MANIFEST_BLOB, *blobs):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return run_reader(path)


def run_reader(path: Path) -> tuple[Any, str]:
    command = [sys.executable, str(FILES / "read_archive.py"), str(path), BASE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and len(done.stderr) < 600
    return (json.loads(done.stdout)["ids"] if done.returncode == 0 else None), done.stderr


def test_ids_of_an_archive_with_the_own_name_or_none(tmp_path: Path) -> None:
    path = tmp_path / "base.tar"
    named = index(MANIFEST, BASE, "v0.32.0")
    repositories = {"vllm/vllm-openai": {"v0.32.0": "a"}}
    full = {"manifest.json": listing([SHORT]), "index.json": named, "repositories": repositories}
    assert read_archive(path, full) == ([CONFIG, MANIFEST], "")
    assert read_archive(path, {**UNNAMED, "index.json": index(LIST)}, LIST_BLOB) == ([CONFIG, LIST], "")
    assert read_archive(path, UNNAMED) == ([CONFIG], ""), "of Docker before 25"


@pytest.mark.parametrize(
    ("members", "blobs", "why"),
    [
        ({"manifest.json": listing([SHORT, "prom/prometheus:v3"])}, [], "it has the name 'prom/prometheus:v3'"),
        ({"manifest.json": listing([SHORT], repotags=["prom/prometheus:v3"])}, [], "a key stands in a document twice"),
        ({"manifest.json": listing([SHORT]) * 2}, [], "of one image"),
        ({**UNNAMED, "repositories": {"prom/prometheus": {"v3": "a"}}}, [], "'prom/prometheus:v3'"),
        ({**UNNAMED, "index.json": index(MANIFEST, "a:1\x1b[2J")}, [], r"it has the name 'a:1\x1b[2J'"),
        ({**UNNAMED, "index.json": index(EVIL_MANIFEST)}, [EVIL_MANIFEST_BLOB], "another image than manifest.json"),
        ({**UNNAMED, "index.json": index(EVIL_LIST)}, [EVIL_LIST_BLOB, EVIL_MANIFEST_BLOB], "another image than"),
        ({**UNNAMED, "index.json": index(LIST)}, [(LIST_BLOB[0], MANIFEST_BLOB[1])], "content than its name says"),
        ({"manifest.json": listing([SHORT])}, [("./manifest.json", b"[]")], "'manifest.json' twice"),
        ({"manifest.json": listing([SHORT])}, [("../x", b"")], "outside of itself"),
        ({"manifest.json": [" " * (9 << 20)]}, [], "no document of at most"),
        ({}, [], "no archive of one image"),
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, members: dict[str, object], blobs: list[Blob], why: str) -> None:
    ids, said = read_archive(tmp_path / "base.tar", members, *blobs)
    assert ids is None and why in said


def test_what_two_readers_could_understand_differently_or_cannot_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.tar"
    good: dict[str, object] = {"manifest.json": listing([SHORT])}
    assert "headers" in read_archive(path, good, pax_headers={"path": "manifest.json"})[1]
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert "no uncompressed archive" in run_reader(path)[1]
    assert "no uncompressed archive" in run_reader(tmp_path / "absent.tar")[1]
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 6 << 30
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + b"x" * 512)
    assert "no uncompressed archive" in run_reader(path)[1], "and does not take the memory that it asks for"
