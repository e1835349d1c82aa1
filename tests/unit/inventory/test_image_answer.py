# SPDX-License-Identifier: Apache-2.0
"""What programs print that run in an image: only names, versions, hashes and texts of bounded length are accepted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.inventory import image_answer

PACKAGES = {"vllm": "0.32.0+cu130", "transformers": "5.16.0", "python-apt": "2.7.7+ubuntu5", "a": "1!2.0rc1.post2.dev3"}
IMAGE = {"packages": PACKAGES, "debian": [["libc6", "1:2.41-12~deb13u1", "amd64"]], "failures": [], "libraries": 3}
WHEEL = "tokenizers-0.23.3-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"


@pytest.fixture
def read(filters: dict[str, Callable[..., Any]]) -> Callable[[object, str], tuple[Any, str]]:
    """What a text, or an object as JSON, becomes, and why it is refused; never later than within 2 s."""

    def ask(answer: object, kind: str = "image") -> tuple[Any, str]:
        began = time.process_time()
        text = answer if isinstance(answer, str) else json.dumps(answer)
        found = filters["read_image_answer"](text, kind, "What r/image:1 says")
        assert time.process_time() - began < 2
        assert found["error"].isprintable() and len(found["error"]) < 400
        assert not found["error"] or found["error"].startswith("What r/image:1 says cannot be used: ")
        return found["value"], found["error"]

    return ask


def test_what_the_scripts_print_is_accepted(read: Any) -> None:
    assert read(IMAGE) == (IMAGE, "")
    assert read({}, "record") == ({}, "")
    # Texts of the tests cannot write to a terminal.
    value, _ = read({**IMAGE, "failures": ["gone\x1b[2J\nPLAY RECAP \u202e" + "x" * 1000]})
    assert value["failures"][0].isprintable() and len(value["failures"][0]) == 300


def pack(name: str, version: object = "1.0") -> dict[str, Any]:
    return {**IMAGE, "packages": {**PACKAGES, name: version}}


@pytest.mark.parametrize(
    ("kind", "answer", "why"),
    [
        ("image", pack("zz", "1\ntransformers @ https://attacker.example/x.tar.gz"), "the version of zz"),
        ("image", pack("zz", None), "the version of zz"),
        ("image", pack("zz\n--index-url=https://attacker.example"), "the name of a package"),
        ("image", {**IMAGE, "packages": {f"p{n}": "1" for n in range(20_001)}}, "more than 20000 packages"),
        ("image", {"packages": PACKAGES}, "not what read_image.py prints"),
        ("image", [IMAGE], "not what read_image.py prints"),
        ("image", {**IMAGE, "debian": [["libc6", "1 2", "amd64"]]}, "a word of a Debian package"),
        ("image", {**IMAGE, "debian": [["libc6", "1"]]}, "not name, version and architecture"),
        ("image", json.dumps(IMAGE) + "\nmore", "it is no JSON"),
        ("image", '{"packages": {}, "packages": {}}', "an object has a key twice"),
        ("image", "[" * 100_000, "nested deeper than 8 levels"),
        ("image", '"' + "3" * 4_194_304 + '"', "more than 4194304 characters"),
        ("image", {**IMAGE, "libraries": "many"}, "not what read_image.py prints"),
        ("record", ["x"], "no JSON object"),
        ("pip report", {"install": [{"download_info": {"url": "https://x/y", "vcs_info": {}}}]}, "not what `pip"),
    ],
)
def test_hostile_answers_are_refused(read: Any, kind: str, answer: object, why: str) -> None:
    value, error = read(answer, kind)
    assert value == {} and why in error


@pytest.mark.parametrize(
    ("wheels", "why"),
    [
        ({"x.tar.gz": "a" * 64}, "the name of a wheel"),
        ({WHEEL: "A" * 64}, "the hash of"),
        ({"a-1\n-py3-none-any.whl": "a" * 64}, "the name of a wheel"),
    ],
)
def test_wheels_have_names_and_hashes(wheels: dict[str, str], why: str) -> None:
    with pytest.raises(image_answer.ImageAnswerError, match=why):
        image_answer.check_wheels(wheels)


def test_a_report_of_pip_becomes_requirements_with_hashes() -> None:
    url = "https://user:secret@index.example/a/torch-2.0%2Bcu130-cp312-cp312-linux_x86_64.whl#sha256=x"
    item = {"download_info": {"url": url, "archive_info": {"hashes": {"sha256": "a" * 64}}}, "metadata": {}}
    found = image_answer.read_pip_report({"install": [item]})
    assert found == {"torch-2.0+cu130-cp312-cp312-linux_x86_64.whl": "a" * 64}
    assert image_answer.list_requirements(found) == [f"torch==2.0+cu130 --hash=sha256:{'a' * 64}"]
