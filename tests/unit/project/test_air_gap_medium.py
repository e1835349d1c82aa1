# SPDX-License-Identifier: Apache-2.0
"""The medium of an air gap: its variables need the hash that was carried, and every changed file is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

Filters = dict[str, Callable[..., Any]]
SCRIPT = ROOT / "playbooks/tasks/verify_medium.sh"
VARIABLES: dict[str, Any] = {
    "vllm_image_base": "registry.lab:5000/vllm/vllm-openai:v0.32.0",
    "vllm_image_base_archive": "image/base.tar",
    "vllm_edge_host_wheels_directory": "wheels/host",
    "vllm_edge_host_distribution_repositories": [{"path": "apt/distribution/", "suite": "trixie", "component": "main"}],
    "nvidia_driver_repository_key_url": "keys/vllm-edge-nvidia-driver.asc",
    "models": {"e2b": {"repo": "o/n", "revision": "b" * 40}},
}
FILES = ["wheels/host/a.whl", "image/base.tar", "weights/N/model.safetensors", "apt/distribution/InRelease"]
WEIGHTS = FILES[2]


@pytest.fixture
def read(filters: Filters, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Reads a document as a medium's file, with its hash unless another is given."""

    def read(document: Any, sha256: str = "", host: str = "/media/m", url: str = "", **models: Any) -> dict[str, Any]:
        file = tmp_path / "air-gap.yml"
        file.write_text("# Written by a test.\n" + json.dumps(document))
        expected = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        found: dict[str, Any] = filters["read_medium"](str(file), expected, host, url, models)
        return found

    return read


def document(**changes: Any) -> dict[str, Any]:
    return {"air_gap_format": 1, "sums_sha256": "0" * 64, "variables": VARIABLES} | changes


def test_paths_become_absolute_and_commits_are_pinned(read: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    models = {"e2b": {"repo": "o/n", "revision": "main"}, "other": {"repo": "x/y", "revision": "main"}}
    medium = read(document(), **models)
    assert (medium["mistake"], medium["sums_sha256"], medium["directory"]) == ("", "0" * 64, str(tmp_path))
    assert medium["variables"] == {
        "vllm_image_base": VARIABLES["vllm_image_base"],
        "vllm_image_base_digest": "",
        "vllm_image_base_archive": "/media/m/image/base.tar",
        "vllm_image_base_archive_on_host": True,
        "vllm_edge_host_wheels_directory": f"{tmp_path}/wheels/host",
        "vllm_edge_host_distribution_repositories": [
            {"url": "file:///media/m/apt/distribution/", "suite": "trixie", "component": "main"}
        ],
        "nvidia_driver_repository_key_url": "file:///media/m/keys/vllm-edge-nvidia-driver.asc",
        "nvidia_driver_repository_key_file": "",
        "model_weights_source_directory": "/media/m/weights",
    }
    assert medium["revisions"] == {"e2b": "b" * 40}
    served = read(document(), url="http://web/m/")["variables"]
    assert served["nvidia_driver_repository_key_url"] == "http://web/m/keys/vllm-edge-nvidia-driver.asc"


def test_a_mistake_names_the_remedy(read: Callable[..., dict[str, Any]], filters: Filters, tmp_path: Path) -> None:
    none = filters["read_medium"](str(tmp_path / "none"), "0" * 64, "/media/m", "", {})
    for found, said in (
        (none, "none, which is no file of the controller: copy the medium there, or set air_gap"),
        (read(document(), sha256="0" * 63), "air_gap_sha256 is '000"),
        (read(document(), sha256="0" * 64), "the file was changed since it was staged, or the hash belongs to another"),
        (read(document(), host="media"), "air_gap_host_directory is 'media': set an absolute path"),
        (read(document(), url="ftp://web"), "air_gap_url is 'ftp://web': set an address"),
        (read(document(air_gap_format=2)), "has the format 2, and this release reads 1: stage again with this release"),
        (read(["other"]), "has the format None"),
        (read(document(), e2b={"repo": "o/n", "revision": "c" * 40}), "vllm_models.e2b.revision pins ccc"),
    ):
        assert said in found["mistake"] and "variables" not in found


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    root = tmp_path / "medium"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  ./{name}\n" for name in FILES]
    (root / "SHA256SUMS").write_text("".join(lines))
    return root


def verify(medium: Path, *below: str, record: str | Path = "", expected: str = "") -> str:
    """What the script says; it says nothing where it finds nothing."""
    found = expected or hashlib.sha256((medium / "SHA256SUMS").read_bytes()).hexdigest()
    words = ["sh", SCRIPT, medium, found, record, *(below or ("apt", "keys", "image", "weights/N", "wheels"))]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, bool(done.stdout)) in {(0, False), (3, True)}, done
    return done.stdout


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda place: (place.unlink(), place.symlink_to("/etc/shadow")), f"{WEIGHTS} is a link"),
    "directory link": (
        lambda place: (shutil.rmtree(place.parent), place.parent.symlink_to("../image")),
        "weights/N is a link",
    ),
    "fifo": (lambda place: (place.unlink(), os.mkfifo(place)), f"{WEIGHTS} is a link, a special file"),
    "added": (lambda place: place.with_name("more").write_text("x"), "weights/N/more is not in SHA256SUMS"),
    "two lines": (lambda place: place.with_name("x\nd\t.").mkdir(), "weights/N/x is a link, a special file or has"),
    "missing": (Path.unlink, f"{WEIGHTS} is missing"),
    "changed": (lambda place: place.write_text("x"), f"{WEIGHTS} was changed since it was staged"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_refused_by_name(medium: Path, kind: str) -> None:
    assert verify(medium) == ""
    change, said = OTHERS[kind]
    change(medium / WEIGHTS)
    found = verify(medium)
    assert found.startswith(f"{medium}/{said}") and found.endswith(("medium again.", "where it was staged.")), found
    assert verify(medium, "apt", "image", "weights/other") == "", "the profile does not use it"


def test_hashes_need_their_own_hash(medium: Path) -> None:
    staged = hashlib.sha256((medium / "SHA256SUMS").read_bytes()).hexdigest()
    (medium / "SHA256SUMS").open("a").write(f"{'0' * 64}  ./x\n")
    assert "SHA256SUMS was changed" in verify(medium, expected=staged)
    (medium / "SHA256SUMS").unlink()
    assert "SHA256SUMS is missing" in verify(medium, expected=staged)


def test_what_was_verified_is_not_read_again_until_it_changes(medium: Path, tmp_path: Path) -> None:
    """Whoever sets the time of a changed file back cannot set that of the change itself."""
    record, image = tmp_path / "state/verified", medium / "image/base.tar"
    assert verify(medium, "apt", record=record) == "" and not record.parent.exists()
    record.parent.mkdir()
    assert verify(medium, "apt", "image", record=record) == "" and len(record.read_text().splitlines()) == 2
    there, size = image.stat(), image.stat().st_size
    # As if the wrong content had been verified: proves that the file is not read.
    lines = record.read_text().replace(hashlib.sha256(b"image/base.tar").hexdigest(), "0" * 64)
    sums = (medium / "SHA256SUMS").read_text().replace(hashlib.sha256(b"image/base.tar").hexdigest(), "0" * 64)
    record.write_text(lines)
    (medium / "SHA256SUMS").write_text(sums)
    assert verify(medium, "image", record=record) == ""
    image.write_text("x" * size)
    os.utime(image, ns=(there.st_atime_ns, there.st_mtime_ns))
    assert "image/base.tar was changed" in verify(medium, "image", record=record)


def test_a_host_without_the_medium_needs_none(tmp_path: Path) -> None:
    (tmp_path / "mount point").mkdir()
    assert verify(tmp_path / "mount point", expected="0" * 64) == verify(tmp_path / "none", expected="0" * 64) == ""
