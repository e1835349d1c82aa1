# SPDX-License-Identifier: Apache-2.0
"""The SBOM of an image: everything that went into it, once, in the form of CycloneDX."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture
def write(run_module: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return lambda check=False, **changes: run_module(
        "image_sbom", {**GIVEN, **changes, "path": str(tmp_path / "sbom/x.cdx.json")}, check=check
    )


def test_everything_in_the_image_is_written_once(write: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "sbom/x.cdx.json"
    assert write(check=True)["changed"] is True and not file.exists()
    assert write()["changed"] is True and write()["changed"] is False
    assert file.stat().st_mode & 0o777 == 0o644
    bom = json.loads(file.read_text())
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


def test_host_whose_program_has_no_such_library_gets_a_warning(
    write: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cyclonedx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclonedx", None)
    found = write()
    assert found["changed"] is False and "Run playbooks/host.yml" in found["warnings"][0]
    assert not (tmp_path / "sbom").exists()
