# SPDX-License-Identifier: Apache-2.0
"""Pure parts of the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.weights import record as weights_record
from ansible.module_utils.vllm_edge.weights import sources, transfer


def listing(*paths: str) -> weights_record.Listing:
    return weights_record.Listing("a" * 40, tuple(weights_record.RemoteFile(path, 1) for path in paths))


def test_selection_takes_what_vllm_reads() -> None:
    taken, left = transfer.select(
        listing("b/model.safetensors", "tokenizer.model", "x.bin", "chat_template.jinja", ".git/x.json", "pic.png"),
        "o/n",
    )
    assert [item.path for item in taken] == ["b/model.safetensors", "chat_template.jinja", "tokenizer.model"]
    assert left == [".git/x.json", "pic.png", "x.bin"]
    with pytest.raises(weights_record.WeightsError, match=r"no \.safetensors"):
        transfer.select(listing("README.md"), "o/n")


FILES = {"a.json": weights_record.RecordedFile(3, "1" * 64, 5, 6)}
RECORD = weights_record.Record("m", "o/n", "main", "a" * 40, "/w/m", "hub", FILES)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', RECORD.to_json().replace('"a.json"', '"../a.json"')])
def test_what_is_no_record_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(ValueError):
        weights_record.parse_record(text)


MODELOPT = {"producer": {"name": "modelopt", "version": "0.37.0"}}


@pytest.mark.parametrize(
    ("file", "config", "told"),
    [
        ("config.json", {"quantization_config": MODELOPT}, "modelopt 0.37.0"),
        ("hf_quant_config.json", MODELOPT, "modelopt 0.37.0"),
        ("config.json", {"quant_method": "compressed-tensors", "version": "0.15.0.1"}, "compressed-tensors 0.15.0.1"),
        ("config.json", {"quant_method": "awq", "version": "gemm"}, ""),
        ("config.json", {"producer": {"name": "a\nb", "version": "1"}}, ""),
        ("config.json", ["modelopt"], ""),
    ],
)
def test_the_program_that_quantized_weights(tmp_path: Path, file: str, config: object, told: str) -> None:
    (tmp_path / file).write_text(json.dumps(config))
    assert weights_record.read_quantizer(tmp_path) == told


def test_manifest_goes_by_names_and_contents_alone() -> None:
    files = {"a.json": weights_record.RecordedFile(3, "1" * 64, 99, 98)}
    same = replace(RECORD, files=files, path="/elsewhere", model="other")
    assert same.manifest_sha256 == RECORD.manifest_sha256
    other = replace(RECORD, files={"a.json": weights_record.RecordedFile(3, "3" * 64, 5, 6)})
    assert other.manifest_sha256 != RECORD.manifest_sha256


@pytest.mark.parametrize(
    ("status", "text"), [(401, "there is no such repository, or it is private or gated"), (429, "limits the rate")]
)
def test_answers_of_the_hub_become_sentences(status: int, text: str) -> None:
    message = sources.HUB_ERRORS[sources.classify_hub_error(status, None, False)]
    values = {"repo": "o/n", "revision": "v1", "endpoint": "https://hub", "failed": "cannot be reached for"}
    others = dict.fromkeys(("model", "variable", "what", "text"), "x")
    assert text in message.format(status=status, **values, **others)
