# SPDX-License-Identifier: Apache-2.0
"""The SBOM of an image: everything that went into it, in the form of CycloneDX."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

BASE_ID, ID = "sha256:" + "a" * 64, "sha256:" + "b" * 64
GIVEN: dict[str, Any] = {
    "name": "vllm-edge/vllm-openai:0.32.0-0123",
    "id": ID,
    "base": "registry.example:5000/vllm/vllm-openai:v0.32.0",
    "base_id": BASE_ID,
    "base_digest": "sha256:" + "d" * 64,
    "packages": {"vllm": "0.32.0+cu130", "transformers": "5.19.0"},
    "base_packages": {"vllm": "0.32.0+cu130", "transformers": "5.16.0"},
    "debian": [["libstdc++6", "14.2.0-4", "amd64"], ["libc6", "1:2.39", "amd64"], ["libc6", "1:2.39", "i386"]],
    "wheels": {"transformers-5.19.0-py3-none-any.whl": "c" * 64},
}


def run(before: str = "") -> subprocess.CompletedProcess[str]:
    """As the role runs it, after some other code."""
    script = (ROOT / "roles/vllm_image/files/make_sbom.py").read_text()
    words = [sys.executable, "-I", "-c", f"import sys; {before or 0}; exec(sys.argv[1])", script]
    return subprocess.run(words, input=json.dumps(GIVEN), capture_output=True, text=True, check=False)


def test_everything_in_the_image_is_listed() -> None:
    bom = json.loads(run().stdout)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["bom-ref"] == ID
    found = {item["bom-ref"]: item for item in bom["components"]}
    assert len(found) == len(bom["components"]) == 6
    layer, base = found["pkg:pypi/transformers@5.19.0"], found[BASE_ID]
    assert layer["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert layer["properties"] == [{"name": "vllm-edge:from", "value": "layer"}]
    assert found["pkg:pypi/vllm@0.32.0%2Bcu130"]["properties"][0]["value"] == "base"
    assert ":".join((base["name"], base["version"])) == GIVEN["base"] and base["type"] == "container"
    assert GIVEN["base_digest"] in json.dumps(base)
    assert {"pkg:deb/debian/libc6@1:2.39?arch=amd64", "pkg:deb/debian/libc6@1:2.39?arch=i386"} <= found.keys()


def test_a_host_whose_program_has_no_such_library_is_told_apart() -> None:
    done = run("sys.modules['cyclonedx'] = None")
    assert (done.returncode, done.stdout) == (3, "") and "cyclonedx" in done.stderr
