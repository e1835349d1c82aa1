# SPDX-License-Identifier: Apache-2.0
"""The medium of an air gap: only known plain values are taken, and every changed file is refused by its name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import air_gap
from ansible.module_utils.vllm_edge.system.air_gap import MediumError

RunModule = Callable[..., dict[str, Any]]
VARIABLES: dict[str, Any] = {
    "vllm_image_base": "registry.lab:5000/vllm/vllm-openai:v0.32.0",
    "vllm_image_base_id": f"sha256:{'a' * 64}",
    "vllm_image_base_archive": "image/base.tar",
    "vllm_edge_host_wheels_directory": "wheels/host",
    "vllm_edge_host_distribution_repositories": [{"path": "apt/distribution/", "suite": "trixie", "component": "main"}],
    "nvidia_driver_repository_url": "apt/vllm-edge-nvidia-driver/",
    "nvidia_driver_repository_key_url": "keys/vllm-edge-nvidia-driver.asc",
    "nvidia_driver_repository_key_fingerprint": "A" * 40,
    "models": {"e2b": {"repo": "o/n", "revision": "b" * 40}},
}
FILES = ["wheels/host/a.whl", "image/base.tar", "weights/N/model.safetensors", "apt/distribution/InRelease"]


def document(**changes: Any) -> bytes:
    whole = {"air_gap_format": 1, "sums_sha256": "0" * 64, "variables": VARIABLES} | changes
    return b"# Written by a test.\n" + json.dumps(whole).encode()


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    root = tmp_path / "medium"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  ./{name}\n" for name in FILES]
    (root / "SHA256SUMS").write_text("".join(lines))
    return root


def get_sums_hash(medium: Path) -> str:
    return hashlib.sha256((medium / "SHA256SUMS").read_bytes()).hexdigest()


def test_paths_become_absolute_and_pins_are_kept() -> None:
    found = air_gap.resolve(air_gap.parse_document(document()), Path("/srv/m"), "/media/m", "")
    assert found["vllm_image_base_archive"] == "/media/m/image/base.tar"
    assert found["vllm_edge_host_wheels_directory"] == "/srv/m/wheels/host"
    assert found["nvidia_driver_repository_url"] == "file:///media/m/apt/vllm-edge-nvidia-driver/"
    assert (found["nvidia_driver_repository_key_file"], found["vllm_image_base_digest"]) == ("", "")
    assert found["vllm_image_base_id"] == VARIABLES["vllm_image_base_id"]
    assert found["vllm_edge_host_distribution_repositories"][0]["url"] == "file:///media/m/apt/distribution/"
    served = air_gap.resolve(air_gap.parse_document(document()), Path("/srv/m"), "/media/m", "http://web/m/")
    assert served["nvidia_driver_repository_key_url"] == "http://web/m/keys/vllm-edge-nvidia-driver.asc"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm_image_base": "{{ lookup('pipe', 'id') }}"}, "vllm_image_base"),
        ({"vllm_image_base": "a:b\n"}, "vllm_image_base"),
        ({"vllm_image_base": ["a:b"]}, "vllm_image_base"),
        ({"vllm_image_base_id": ""}, "vllm_image_base_id"),
        ({"vllm_image_base_archive": "/etc/shadow"}, "not a relative path"),
        ({"vllm_image_base_archive": "image/../../etc/shadow"}, "leaves the medium"),
        ({"vllm_image_base_archive": "image//base.tar"}, "leaves the medium"),
        ({"vllm_image_base_archive": "image/\u202egnp"}, "not a relative path"),
        ({"ansible_connection": "local"}, "ansible_connection"),
        ({"nvidia_driver_repository_key_fingerprint": ""}, "no fingerprint"),
        ({"nvidia_driver_repository_key_fingerprint": "ABCD"}, "not a fingerprint"),
        ({"models": {"e2b": {"repo": "o/n", "revision": "main"}}}, "models"),
        ({"models": {"{{x}}": {"repo": "o/n", "revision": "b" * 40}}}, "models"),
        ({"models": {"e2b": {"repo": "o/n", "revision": "b" * 40, "dir": "x"}}}, "models"),
        ({"vllm_edge_host_distribution_repositories": [{"path": "apt/"}]}, "an entry has"),
        ({"vllm_image_wheel_hashes": {"../x.whl": "0" * 64}}, "vllm_image_wheel_hashes"),
        ({"vllm_image_base_digest": True}, "vllm_image_base_digest"),
    ],
)
def test_anything_but_known_plain_values_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MediumError) as refused:
        air_gap.parse_document(document(variables=VARIABLES | changes))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b"vllm_image_base: !!python/object/apply:os.system [id]\n",
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
        b"null",
        document(air_gap_format=True),
        document(air_gap_format=2),
        document(sums_sha256="0" * 63),
        document(more=1),
        document(variables=[]),
        b'{"air_gap_format": 1, "air_gap_format": 1}',
    ],
)
def test_another_document_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(MediumError) as refused:
        air_gap.parse_document(data)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("expected", ["", "0" * 64, "0" * 63])
def test_document_needs_the_hash_that_was_carried(tmp_path: Path, expected: str) -> None:
    file = tmp_path / "air-gap.yml"
    file.write_bytes(document())
    assert air_gap.read_document(file, hashlib.sha256(document()).hexdigest()).sums_sha256 == "0" * 64
    with pytest.raises(MediumError, match="air_gap_sha256"):
        air_gap.read_document(file, expected)
    (tmp_path / "link").symlink_to(file)
    for other in (tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(MediumError):
            air_gap.read_document(other, hashlib.sha256(document()).hexdigest())


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit_is_refused_by_name(medium: Path, name: str) -> None:
    below = ["wheels", "image", "weights/N", "apt", "keys"]
    sums = air_gap.read_sums(medium, get_sums_hash(medium))
    known = air_gap.verify(medium, sums, below, {})
    assert sorted(known) == sorted(FILES)
    data = bytearray((medium / name).read_bytes())
    data[-1] ^= 1
    there = (medium / name).stat()
    (medium / name).write_bytes(data)
    os.utime(medium / name, ns=(there.st_atime_ns, there.st_mtime_ns))
    with pytest.raises(MediumError, match=f"{name}' was changed"):
        air_gap.verify(medium, sums, below, known)


OTHERS: dict[str, Callable[[Path], object]] = {
    "link": lambda place: (place.unlink(), place.symlink_to("/etc/shadow")),
    "directory link": lambda place: (shutil.rmtree(place.parent), place.parent.symlink_to("../image")),
    "fifo": lambda place: (place.unlink(), os.mkfifo(place)),
    "added": lambda place: place.with_name("more.safetensors").write_text("x"),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_refused_by_name(medium: Path, kind: str) -> None:
    sums = air_gap.read_sums(medium, get_sums_hash(medium))
    OTHERS[kind](medium / "weights/N/model.safetensors")
    with pytest.raises(MediumError, match=r"medium/weights/N"):
        air_gap.verify(medium, sums, ["weights/N"], {})


@pytest.mark.parametrize("line", ["0" * 64 + "  ./../x", "0" * 64 + "  /etc/x", "x", "0" * 64 + f"  ./{FILES[0]}"])
def test_hashes_name_files_of_the_medium_once(medium: Path, line: str) -> None:
    with (medium / "SHA256SUMS").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(MediumError):
        air_gap.read_sums(medium, get_sums_hash(medium))


def test_pinned_commit_and_staged_commit_must_agree() -> None:
    found = air_gap.parse_document(document())
    models = {"e2b": {"repo": "o/n", "revision": "main"}, "other": {"repo": "x/y"}}
    assert air_gap.pin_models(found, models)["e2b"]["revision"] == "b" * 40
    assert air_gap.pin_models(found, models)["other"] == {"repo": "x/y"}
    with pytest.raises(MediumError, match="revision pins cccc"):
        air_gap.pin_models(found, {"e2b": {"repo": "o/n", "revision": "c" * 40}})


def test_module_remembers_what_it_verified_and_needs_no_medium(
    run_module: RunModule, medium: Path, tmp_path: Path
) -> None:
    record = tmp_path / "state" / "air-gap.json"
    args = {"path": str(medium), "sums_sha256": get_sums_hash(medium), "below": ["apt", "image"], "record": str(record)}
    assert run_module("air_gap_files", args)["verified"] == 2
    record.parent.mkdir()
    run_module("air_gap_files", args, check=True)
    assert not record.exists()
    run_module("air_gap_files", args)
    assert sorted(json.loads(record.read_text())) == ["apt/distribution/InRelease", "image/base.tar"]
    record.write_text('{"a": 1}')
    (medium / "image/base.tar").write_text("other")
    result = run_module("air_gap_files", args)
    assert result["rc"] == 1 and "image/base.tar' was changed" in result["msg"]
    assert run_module("air_gap_files", args | {"path": str(tmp_path / "none")})["verified"] == 0
    (tmp_path / "mount point").mkdir()
    assert run_module("air_gap_files", args | {"path": str(tmp_path / "mount point")})["verified"] == 0
    (medium / "SHA256SUMS").unlink()
    assert "SHA256SUMS' cannot be read" in run_module("air_gap_files", args)["msg"]
