# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that somebody made to harm: each ends with a sentence, with little memory and soon."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import inputs, separate_process
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ansible.module_utils.vllm_edge.planning.contract import Facts
from test_model_facts import CONFIG, write, write_sharded

MIB = 2**20


def config(text: str | bytes) -> Callable[[Path], object]:
    return lambda at: (at / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


def changed(**values: Any) -> Callable[[Path], object]:
    return config(json.dumps({**CONFIG, **values}))


def header(raw: bytes, length: int | None = None) -> Callable[[Path], object]:
    size = len(raw) if length is None else length
    return lambda at: (at / "model.safetensors").write_bytes(size.to_bytes(8, "little") + raw)


def tensor(
    shape: object, offsets: object = (0, 0), dtype: object = "BF16", name: str = "x"
) -> Callable[[Path], object]:
    return header(json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode())


def index(value: object) -> Callable[[Path], object]:
    def make(at: Path) -> None:
        write_sharded(at)
        (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))

    return make


def special(name: str) -> Callable[[Path], object]:
    def make(at: Path) -> None:
        (at / name).unlink()
        os.mkfifo(at / name)

    return make


MINIMAL = json.dumps(CONFIG)[1:]
CASES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "layers: a million": (changed(num_hidden_layers=10**6), "num_hidden_layers in config.json is 1000000; a whole"),
    "layers: of the text config": (changed(text_config={"num_hidden_layers": 10**9}), "text_config.num_hidden_layers"),
    "layers: true": (changed(num_hidden_layers=True), "num_hidden_layers in config.json is true"),
    "heads: none": (changed(num_attention_heads=0), "num_attention_heads in config.json is 0"),
    "size: 2^41": (changed(hidden_size=2**41), "hidden_size"),
    "size: a hundred thousand digits": (config('{"hidden_size": ' + "9" * 100_000 + "}"), "not valid JSON"),
    "number: NaN": (config('{"vocab_size": NaN, ' + MINIMAL), "NaN is no number"),
    "rope: huge": (changed(rope_parameters={"rope_type": "linear", "factor": 1e300}), "rope_parameters"),
    "rope: a list": (changed(rope_parameters=[1]), "rope_parameters .* an object"),
    "rope: text": (changed(rope_parameters={"rope_type": "linear", "factor": "x"}), "cannot read"),
    "key twice": (config('{"vocab_size": 1, ' + MINIMAL), "a key twice"),
    "nesting: lists": (config("[" * 200_000), "nested deeper than 64"),
    "Latin-1": (config(b'{"a": "\xff"}'), "not valid JSON"),
    "a list": (config("[]"), "does not contain a JSON object"),
    "100 MB": (lambda at: os.truncate(at / "config.json", 100 * MIB), "has more than 4,194,304 bytes"),
    "a FIFO": (special("config.json"), "no regular file"),
    "text config: text": (changed(text_config="x"), "text_config is .*an object"),
    "quantization: text": (changed(quantization_config="x"), "quantization_config is .*an object"),
    "quantization: bits": (changed(quantization_config={"quant_method": "awq", "bits": 2**70}), "'awq of 11805"),
    "quantization: groups": (
        changed(quantization_config={"quant_method": "awq", "bits": 4, "group_size": -7}),
        "group size of its quantization is -7",
    ),
    "quantization: a list": (changed(quantization_config={"quant_method": "fp8", "weight_block_size": [1]}), "cannot"),
    "architectures: a number": (changed(architectures=[7]), "no list of names"),
    "feature layer: text": (changed(vision_feature_layer="last"), "vision_feature_layer .*; the number of a layer"),
    "layers without RoPE: texts": (changed(no_rope_layers=["1"]), "no_rope_layers .*; a list of .* whole numbers"),
    "rotary factor: 2": (changed(partial_rotary_factor=2), "partial_rotary_factor .* is 2; a number above 0"),
    "pattern: LLX": (changed(sliding_window_pattern="LLX"), "sliding_window_pattern .*LLX.*; a whole number, or L"),
    "layer types: numbers": (changed(layer_types=[1, 2]), "a list of .* texts"),
    "escapes": (
        changed(dtype="\x1b]0;x\x07", architectures=["\x1b[2J\u202e"], vocab_size=None),
        "which the planner does not know",
    ),
    "header: 100 MB": (header(b"{", 100_000_000), "does not begin with the length"),
    "header: more than it is": (header(b"{}", 2**63), "does not begin with the length"),
    "header: a FIFO": (special("model.safetensors"), "no regular file"),
    "tensor: a key twice": (header(b'{"a": 1, "a": 2}'), "a key twice"),
    "tensor: negative": (tensor([-1]), r"shape \[-1\]"),
    "tensor: true": (tensor([True], (0, 2)), r"shape \[true\]"),
    "tensor: huge": (tensor([2**41] * 3, (0, 2**60)), "has shape"),
    "tensor: offsets": (tensor([1], (-2, 0)), "lies at"),
    "tensor: dtype is a list": (tensor([1], (0, 2), ["BF16"]), "no valid safetensors header"),
    "tensor: long name": (tensor([0], name="layers." * 10_000), "more than 300 characters"),
    "tensor: long number": (tensor([0], name=f"model.layers.{'9' * 250}.x"), "the tensors are of 0"),
    "index: another directory": (index({"a": "../../etc/x.safetensors"}), "no safetensors file beside it"),
    "index: numbers": (index({"a": [1]}), "no safetensors file beside it"),
}  # fmt: skip
LARGE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "config: lists": (lambda at: config("[" + "[]," * 1_300_000 + "0]")(at), "more than 1,000,000 values"),
    "header: lists": (lambda at: header(b'{"a":[' + b"[]," * 5_000_000 + b"0]}")(at), "more than 1,000,000 values"),
    "header: pairs": (
        lambda at: header(b"{%s}" % b",".join(b'"%x":{}' % n for n in range(499_000)))(at),
        "no valid safetensors head",
    ),
    "layers: ten thousand": (changed(num_hidden_layers=10_000, sliding_window=8), "the tensors are of 2"),
}
"""Made when they are asked for, because most runs leave them out."""


def read_and_interpret(at: Path) -> None:
    families.interpret(model_facts.read(at, "o/n"))


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused_with_a_sentence(case: str, tmp_path: Path) -> None:
    make, sentence = CASES[case]
    make(write(tmp_path))
    began = time.process_time()
    with pytest.raises(ValueError, match=sentence) as refused:
        read_and_interpret(tmp_path)
    assert time.process_time() - began < 2.0
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000
    assert "o/n" in str(refused.value) or str(tmp_path) in str(refused.value) or "config.json" in str(refused.value)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.thorough) for case in LARGE])
def test_a_large_one_is_refused_within_256_mib(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sentence = LARGE[case]
    make(write(tmp_path))
    used = [
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line
    ]
    monkeypatch.setattr(separate_process, "MEMORY_BYTES", used[0] + 256 * MIB)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

    def read() -> Facts:
        read_and_interpret(tmp_path)
        raise AssertionError

    with pytest.raises(FactsError, match=sentence):
        separate_process.read_in_subprocess(str(tmp_path), read)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda: bytearray(2**40), r"has a form that was not expected \(MemoryError"),
        (lambda: os.kill(os.getpid(), 9), "signal SIGKILL"),
        (lambda: {}["x"], r"KeyError"),
        (lambda: os._exit(3), "status 3"),
    ],
)
def test_what_happens_to_the_reader_is_a_sentence(harm: Callable[[], object], sentence: str) -> None:
    def read() -> Facts:
        harm()
        raise AssertionError

    with pytest.raises(FactsError, match=sentence):
        separate_process.read_in_subprocess("/data/model", read)


def test_facts_come_back_whole_and_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sharded(tmp_path)
    direct = model_facts.read(tmp_path, "o/n", "abc")
    model = {"repo": "o/n", "dir": tmp_path.name, "revision": "abc"}
    assert inputs.facts_of(model, tmp_path.parent, "files") == direct
    if os.geteuid() == 0:
        monkeypatch.setattr(separate_process, "ENGINE_USER", "nobody")
        (tmp_path / "config.json").chmod(0o600)
        with pytest.raises(FactsError, match=r"config\.json cannot be read: Permission denied"):
            separate_process.read_in_subprocess("x", lambda: model_facts.read(tmp_path))


def test_a_checkpoint_is_read_where_the_system_refuses_a_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS does (python/cpython#84698)."""
    write_sharded(tmp_path)
    limit = resource.setrlimit

    def refuse(which: int, limits: tuple[int, int]) -> None:
        if which == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        limit(which, limits)

    monkeypatch.setattr(resource, "setrlimit", refuse)
    read = separate_process.read_in_subprocess("x", lambda: model_facts.read(tmp_path, "o/n"), drop_root=False)
    assert read == model_facts.read(tmp_path, "o/n")


def test_code_of_a_repository_is_named() -> None:
    facts = Facts("o/n", "", {**CONFIG, "auto_map": {"AutoModel": "modeling_x.X"}}, ())
    assert "auto_map" in families.warn_of_code(facts)
    assert families.warn_of_code(Facts("o/n", "", CONFIG, ())) == ""
