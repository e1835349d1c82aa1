# SPDX-License-Identifier: Apache-2.0
"""The border to what an image says: whatever could be more than a name, a version or a text is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.inventory import image_answer

PACKAGES = {"vllm": "0.32.0+cu130", "transformers": "5.16.0", "python-apt": "2.7.7+ubuntu5", "a": "1!2.0rc1.post2.dev3"}
CONTENTS = {
    **{"python": "3.12", "implementation": "cpython"},
    "externally_managed": "/usr/lib/python3.12/EXTERNALLY-MANAGED",
    "platforms": ["manylinux_2_35_x86_64", "manylinux2014_x86_64", "linux_x86_64"],
    "packages": PACKAGES,
}
TESTS = {"failures": [], "versions": {"torch": "2.13.0", "transformers": "", "vllm": "0.32.0"}, "libraries": 3}
ID = "sha256:" + "a" * 64
INSPECTED = {"Id": ID, "RepoDigests": [f"r/b@{ID}"], "Config": {"User": "1000:0", "Env": ["CUDA_VERSION=13.0.2"]}}
WHEEL = "tokenizers-0.23.3-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"


@pytest.fixture
def read(filters: dict[str, Callable[..., Any]]) -> Callable[[object, str], tuple[Any, str]]:
    """What a text, or an object as JSON, becomes, and why it is refused; never later than within 2 s."""

    def ask(answer: object, kind: str = "contents") -> tuple[Any, str]:
        began = time.process_time()
        text = answer if isinstance(answer, str) else json.dumps(answer)
        found = filters["read_image_answer"](text, kind, "What r/image:1 says")
        assert time.process_time() - began < 2
        assert found["error"].isprintable() and len(found["error"]) < 400
        assert not found["error"] or found["error"].startswith("What r/image:1 says cannot be used: ")
        return found["value"], found["error"]

    return ask


def change(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**data, **changes}


def pack(name: object, version: object = "1.0") -> dict[str, Any]:
    return change(CONTENTS, packages={**PACKAGES, name: version})


def test_what_the_scripts_print_is_accepted(read: Any) -> None:
    assert read(CONTENTS) == (CONTENTS, "")
    assert read({key: CONTENTS[key] for key in ("python", "platforms", "packages")})[1] == ""
    assert read(TESTS, "tests") == (TESTS, "")
    identity, error = read([INSPECTED], "identity")
    assert (identity, error) == ({"id": ID, "digests": [ID], "user": "1000:0", "cuda": "13.0.2"}, "")
    record = {"base_id": ID, "base_contents": CONTENTS, "wheels": {WHEEL: "b" * 64}}
    record["tested"] = {**TESTS, "test": "a" * 64}
    assert read(record, "record") == (record, "")
    assert read({}, "record") == ({}, "")
    # Texts of the tests cannot write to a terminal.
    value, _ = read(change(TESTS, failures=["gone\x1b[2J\nPLAY RECAP \u202e" + "x" * 1000]), "tests")
    assert value["failures"][0].isprintable() and len(value["failures"][0]) == 300


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (pack("zz", "1\ntransformers @ https://attacker.example/x.tar.gz"), "the version of zz"),
        (pack("zz", "1.0\n"), "the version of zz"),
        (pack("zz\n--index-url=https://attacker.example"), "the name of a package"),
        (pack("--index-url"), "the name of a package"),
        (pack("zz", "\u0661.0"), "the version of zz"),
        (pack("zz", "9" * 200), "the version of zz"),
        (pack("zz", "..."), "the version of zz"),
        (pack("zz", None), "the version of zz is 'NoneType'"),
        (pack("Transformers"), "the name of a package"),
        (pack("trans_formers"), "the name of a package"),
        (pack("zz-"), "the name of a package"),
        (pack("\u212a"), "the name of a package"),
        (change(CONTENTS, packages={f"p{n}": "1" for n in range(3000)}), "packages is no JSON object of at most 2000"),
        (change(CONTENTS, packages=[]), "packages is no JSON object"),
        (change(CONTENTS, platforms=["linux_x86_64\n"]), "a platform"),
        (change(CONTENTS, platforms=["win_amd64"]), "a platform"),
        (change(CONTENTS, platforms=[]), "platforms is empty"),
        (change(CONTENTS, platforms=["linux_x86_64"] * 101), "platforms is no list of at most 100"),
        (change(CONTENTS, platforms="linux_x86_64"), "platforms is no list"),
        (change(CONTENTS, python="3.12 --platform=x"), "python is"),
        (change(CONTENTS, python="2.7"), "python is"),
        (change(CONTENTS, externally_managed="{{ lookup('pipe', 'id') }}"), "externally_managed is"),
        (change(CONTENTS, more="x"), "unknown key 'more'"),
        ({"python": "3.12"}, "the answer has no platforms"),
        ([CONTENTS], "the answer is 'list'"),
        (json.dumps(CONTENTS) + "\nmore", "it is no JSON"),
        ('{"python": "3.12", "python": "3.13"}', "an object has a key twice"),
        ('{"python": NaN}', "NaN is no number"),
        ('{"python": ' + "9" * 5000 + "}", "it is no JSON"),
        ("[" * 100_000, "nested deeper than 8 levels"),
        ('{"a":' * 100_000, "nested deeper than 8 levels"),
        ('"' + '\\"' * 1_000_000 + "\\", "it is no JSON"),
        ('{"python": "' + "3" * 4_194_304 + '"}', "more than 4194304 characters"),
    ],
)
def test_hostile_contents_are_refused(read: Any, answer: object, why: str) -> None:
    value, error = read(answer)
    assert value == {} and why in error
    if isinstance(answer, dict):
        assert "base_contents" not in answer and read({"base_contents": answer}, "record")[1], "nor from an old record"


@pytest.mark.parametrize(
    ("kind", "answer", "why"),
    [
        ("tests", change(TESTS, versions={**TESTS["versions"], "vllm": "1\nx"}), "the version of vllm"),
        ("tests", change(TESTS, versions={"vllm": "1"}), "versions has no torch"),
        ("tests", change(TESTS, libraries=True), "libraries is 'bool'"),
        ("tests", change(TESTS, libraries=-1), "libraries is"),
        ("tests", change(TESTS, failures=[1]), "no text"),
        ("tests", change(TESTS, failures=["x"] * 101), "failures is no list"),
        ("identity", [change(INSPECTED, Config={"User": "0\nRUN curl x"})], "its user is"),
        ("identity", [change(INSPECTED, Config={"Env": 1})], "not what `docker image inspect` prints"),
        ("identity", [change(INSPECTED, Id="sha256:../x")], "the id is"),
        ("identity", [], "not what `docker image inspect` prints"),
        ("record", {"base_id": "x"}, "base_id is"),
        ("record", {"name": "a\nb"}, "name is"),
        ("record", {"tested": {"versions": {}}}, "has no failures"),
        ("record", {"wheels": {"x.tar.gz": "a" * 64}}, "the name of a wheel"),
        ("wheels", {WHEEL: "A" * 64}, "the hash of"),
        ("wheels", {f"../{WHEEL}": "a" * 64}, "the name of a wheel"),
        ("wheels", {"a-1\n-py3-none-any.whl": "a" * 64}, "the name of a wheel"),
        (
            "pip report",
            {"install": [{"download_info": {"url": "https://x/y.tar.gz", "vcs_info": {}}}]},
            "not what `pip",
        ),
    ],
)
def test_other_hostile_answers_are_refused(read: Any, kind: str, answer: object, why: str) -> None:
    value, error = read(answer, kind)
    assert value == {} and why in error


def test_wheels_are_held_to_what_is_pinned_or_recorded(filters: dict[str, Callable[..., Any]]) -> None:
    explain, found = filters["explain_wheels"], {WHEEL: "a" * 64}
    assert explain(found, {}, {}) == "" == explain(found, found, {"x": "old"}) == explain(found, {}, found)
    assert "instead of" in explain(found, {WHEEL: "b" * 64}, found)
    assert "is missing" in explain({}, {}, found)
    assert "is not among them" in explain({**found, "a-1-py3-none-any.whl": "c" * 64}, found, {})
    assert image_answer.list_requirements(found) == [f"tokenizers==0.23.3 --hash=sha256:{'a' * 64}"]
    # A report of pip becomes wheels.
    url = "https://user:secret@index.example/a/torch-2.0%2Bcu130-cp312-cp312-linux_x86_64.whl#sha256=x"
    item = {"download_info": {"url": url, "archive_info": {"hashes": {"sha256": "a" * 64}}}, "metadata": {}}
    found = image_answer.read_pip_report({"install": [item]})
    assert found == {"torch-2.0+cu130-cp312-cp312-linux_x86_64.whl": "a" * 64}


def test_names_of_images_that_moved(filters: dict[str, Callable[..., Any]]) -> None:
    before = ["vllm/vllm-openai:1 sha256:old", "prom/prometheus:v3 sha256:1", "<none>:<none> sha256:7", "a:1 sha256:2"]
    after = ["vllm/vllm-openai:1 sha256:new", "prom/prometheus:v3 sha256:9", "somebody/app:2 sha256:9", "a:1 sha256:2"]
    found = filters["compare_image_names"](before, after, "docker.io/vllm/vllm-openai:1")
    assert found == {"moved": {"prom/prometheus:v3": "sha256:1"}, "added": {"somebody/app:2": "sha256:9"}}
