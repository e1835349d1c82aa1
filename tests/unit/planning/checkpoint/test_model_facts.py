# SPDX-License-Identifier: Apache-2.0
"""Facts of checkpoints: from files that are whole, from files that are not, and recorded ones."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import yaml
from ansible.module_utils.vllm_edge.planning import inputs
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts, recorded_facts, recording
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import (
    DTYPE_BITS,
    FactsError,
    compute_bytes,
    parse_header,
)
from ansible.module_utils.vllm_edge.planning.checkpoint.hub import read as read_hub
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Facts, Tensor
from ansible.module_utils.vllm_edge.planning.memory import weights
from helpers import ROOT

from lab.hub.server import Hub

Shapes = Mapping[str, tuple[str, Sequence[int]]]
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "vocab_size": 100,
}
TENSORS: Shapes = {
    "model.embed_tokens.weight": ("BF16", [100, 8]),
    "model.norm.weight": ("BF16", [8]),
    **{f"model.layers.{n}.self_attn.{p}_proj.weight": ("BF16", [8, 8]) for n in range(2) for p in "qo"},
    **{f"model.layers.{n}.self_attn.{p}_proj.weight": ("BF16", [4, 8]) for n in range(2) for p in "kv"},
    **{f"model.layers.{n}.mlp.{p}_proj.weight": ("BF16", [16, 8]) for n in range(2) for p in ("gate", "up")},
    **{f"model.layers.{n}.mlp.down_proj.weight": ("BF16", [8, 16]) for n in range(2)},
}


def write_shard(path: Path, tensors: Shapes) -> None:
    """A safetensors file of which only the header is written; its data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


def write(directory: Path, tensors: Shapes = TENSORS, config: Mapping[str, Any] = CONFIG) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_shard(directory / "model.safetensors", tensors)
    return directory


def write_sharded(directory: Path, tensors: Shapes = TENSORS, config: Mapping[str, Any] = CONFIG) -> Path:
    (write(directory, config=config) / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        write_shard(directory / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


# -- files


def test_layers_of_the_decoder_are_told_apart_from_everything_else_in_one_file_and_in_shards(tmp_path: Path) -> None:
    facts = model_facts.read(write(tmp_path / "one"), "example/tiny", "0123abcd")
    assert model_facts.read(write_sharded(tmp_path / "two"), "example/tiny", "0123abcd") == facts
    assert (facts.repo, facts.revision, facts.source) == ("example/tiny", "0123abcd", "files")
    by_name = {tensor.name: tensor for tensor in facts.tensors}
    assert by_name["model.layers.*.self_attn.k_proj.weight"] == Tensor(
        "model.layers.*.self_attn.k_proj.weight", "BF16", (4, 8), (0, 1)
    )
    assert by_name["model.norm.weight"].layers is None
    assert model_facts.parameters(facts) == sum(math.prod(shape) for _, shape in TENSORS.values())
    assert model_facts.checkpoint_bytes(facts) == 2 * model_facts.parameters(facts)


@pytest.mark.parametrize(
    "prefix", ["model.layers", "model.language_model.layers", "language_model.model.layers", "layers"]
)
def test_layers_experts_and_shapes_are_told_apart(prefix: str) -> None:
    experts = [f"{prefix}.{layer}.mlp.experts.{n}.up_proj.weight" for layer in (1, 2, 5) for n in range(4)]
    tower = [f"model.vision_tower.encoder.layers.{n}.mlp.fc1.weight" for n in range(27)]
    headers = [(name, "BF16", (2, 2)) for name in (*experts, *tower)]
    headers += [(f"{prefix}.{n}.self_attn.q_proj.weight", "BF16", (8 if n == 1 else 4, 2)) for n in range(3)]
    assert {(*vars(tensor).values(),) for tensor in model_facts.build_facts("a/b", "", {}, headers).tensors} == {
        (f"{prefix}.*.mlp.experts.*.up_proj.weight", "BF16", (2, 2), (1, 2, 5), 4),
        ("model.vision_tower.encoder.layers.*.mlp.fc1.weight", "BF16", (2, 2), None, 27),
        (f"{prefix}.*.self_attn.q_proj.weight", "BF16", (4, 2), (0, 2), 1),
        (f"{prefix}.*.self_attn.q_proj.weight", "BF16", (8, 2), (1,), 1),
    }


def overwrite(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)


SHARD_2 = "model-2.safetensors"
DAMAGE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda at: (at / SHARD_2).unlink(), rf"lacks {SHARD_2}, which .*index.json names.*[Ff]etch"),
    "data cut off": (
        lambda at: os.truncate(at / SHARD_2, (at / SHARD_2).stat().st_size - 1),
        rf"{SHARD_2} has [\d,]+ bytes, and its header says .*fetch it again",
    ),
    "a pointer of git-lfs": (
        lambda at: overwrite(at, SHARD_2, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        rf"{SHARD_2} does not begin .*fetch it again",
    ),
    "twice": (
        lambda at: write_shard(at / SHARD_2, {next(iter(TENSORS)): ("BF16", [100, 8])}),
        r"model\.embed_tokens\.weight appears twice",
    ),
    "no config": (lambda at: (at / "config.json").unlink(), r"config\.json is missing"),
    "no weights": (
        lambda at: [path.unlink() for path in at.glob("model*")],
        r"has neither model\.safetensors nor .*index\.json.*[Ff]etch",
    ),
    "index without a map": (
        lambda at: overwrite(at, "model.safetensors.index.json", b"{}"),
        r"index\.json has no weight_map.*[Ff]etch",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused_by_file_and_remedy(damage: str, tmp_path: Path) -> None:
    write_sharded(tmp_path)
    assert model_facts.read(tmp_path).tensors
    harm, message = DAMAGE[damage]
    harm(tmp_path)
    with pytest.raises(FactsError, match=message):
        model_facts.read(tmp_path)


def test_dtypes_and_their_bytes() -> None:
    assert compute_bytes(Tensor("x", "F4", (3, 3))) == 5
    assert compute_bytes(Tensor("x", "F32", ())) == 4
    raw = json.dumps({"x": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]}}).encode()
    with pytest.raises(FactsError, match=r"here: x is BF16 \[4\], but has 4 bytes"):
        parse_header(raw, "here")
    with pytest.raises(FactsError, match="tensor x has dtype Q3"):
        model_facts.build_facts("a/b", "", {}, [("x", "Q3", (4,))])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {"quant_method": "fp8"}),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, {"quant_method": "awq"}),
        ({"compression_config": {"quant_method": "x"}}, {"quant_method": "x"}),
        ({}, {}),
    ],
)
def test_quantization_is_said_by_config_json_before_any_other_file(
    config: Mapping[str, Any], expected: Mapping[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, config={**CONFIG, **config})
    assert model_facts.read(tmp_path).quantization == expected
    beside = {"producer": {"name": "modelopt"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert model_facts.read(tmp_path).quantization == (expected or beside)


# -- recorded


def test_what_is_recorded_is_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = model_facts.read(write(tmp_path, config={**CONFIG, "unused": 1}), "example/tiny", "abc")
    text = recording.render({"example/tiny": recording.record(facts, "a test")})
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    monkeypatch.setattr(recorded_facts, "RECORDS", namespace["RECORDS"])
    recorded = model_facts.recorded("example/tiny")
    assert recorded is not None
    assert recorded.source == "recorded: a test"
    assert recorded.config == CONFIG
    assert (recorded.repo, recorded.revision, recorded.tensors) == (facts.repo, facts.revision, facts.tensors)
    assert families.interpret(recorded).components == families.interpret(facts).components
    assert model_facts.recorded("example/other") is None


def test_an_embedding_model_is_one_by_a_file_beside_the_others(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    facts = model_facts.read(tmp_path)
    again = model_facts.parse_record("a/b", json.loads(json.dumps(recording.record(facts, "here"))), "")
    assert (facts.pooling, again.pooling) == (True, True)
    (tmp_path / "modules.json").unlink()
    assert not model_facts.read(tmp_path).pooling


def test_every_model_of_the_project_is_recorded_as_it_would_be_written_now() -> None:
    path = ROOT / "module_utils/vllm_edge/planning/checkpoint/recorded_facts.py"
    assert path.read_text() == recording.render(recorded_facts.RECORDS)
    models = yaml.safe_load((ROOT / "group_vars/all/models.yml").read_text())["vllm_models"]
    assert {model["repo"] for model in models.values()} <= recorded_facts.RECORDS.keys()


def test_changes_are_told() -> None:
    before = recording.record(model_facts.build_facts("a/b", "1", CONFIG, [("x", "BF16", (4,))]), "here")
    changed = {**CONFIG, "vocab_size": 7}
    after = recording.record(model_facts.build_facts("a/b", "2", changed, [("x", "F32", (4,))]), "here")
    assert recording.changes(before, before) == []
    assert recording.changes(None, before) == ["new: 1 kinds of tensors"]
    assert recording.changes(before, after) == [
        "revision differs",
        "vocab_size: 100 -> 7",
        "- ('x', 'BF16', (4,), None, 1)",
        "+ ('x', 'F32', (4,), None, 1)",
    ]


def test_the_module_reads_a_directory_and_changes_nothing(run_module: Callable[..., Any], tmp_path: Path) -> None:
    given = {"repo": "example/tiny", "path": str(write(tmp_path))}
    result = run_module("model_facts", given)
    assert result["rc"] == 0, result
    assert not result["changed"]
    assert result["architecture"] == "LlamaForCausalLM"
    assert result["changes"] == ["new: 9 kinds of tensors"]
    assert result["msg"] == "example/tiny: 1,960 elements in 0.0 GB."
    assert result["recorded_facts"] == recording.render({**recorded_facts.RECORDS, "example/tiny": result["record"]})
    # What is recorded in the inventory already is no change.
    again = run_module("model_facts", {**given, "recorded": {"example/tiny": result["record"]}})
    assert (again["rc"], again["changes"]) == (0, [])


# -- a hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub", 0, "127.0.0.1", tmp_path / "state") as served:
        served.log = io.StringIO()  # type: ignore[assignment]
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def asked(run_module: Callable[..., Any], hub: Hub, **arguments: str) -> Any:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    return run_module("model_facts", {"repo": "example/tiny", "endpoint": endpoint, **arguments})


def test_of_a_hub_only_headers_are_read(run_module: Callable[..., Any], hub: Hub, tmp_path: Path) -> None:
    # Large enough that whoever reads weights is seen to.
    large = {name: (dtype, [5000 * shape[0], *shape[1:]]) for name, (dtype, shape) in TENSORS.items()}
    config = {**CONFIG, "vocab_size": 500000, "num_key_value_heads": 5000}
    directory = write_sharded(tmp_path / "hub" / "example" / "tiny", large, config)
    result = asked(run_module, hub)
    assert result["rc"] == 0, result
    requests = [json.loads(line) for line in hub.log.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert sum(request["bytes"] for request in requests) < 300_000 < result["checkpoint_bytes"]
    assert result["elements"] == 5000 * 1960
    assert len(result["revision"]) == 40
    assert result["record"]["source"].endswith(f", commit {result['revision']}")
    from_files = model_facts.read(directory, "example/tiny")
    assert result["record"]["tensors"] == json.loads(json.dumps(recording.record(from_files, "")["tensors"]))


def test_an_engine_is_completed_by_what_the_hub_says_and_later_without_it(
    run_module: Callable[..., Any], hub: Hub, tmp_path: Path
) -> None:
    write(tmp_path / "hub" / "example" / "tiny")
    given: dict[str, Any] = {"engines": {"chat": {"model": "chat"}, "other": {"model": "none"}}, "required": ["chat"]}
    given |= {"models": {"chat": {"repo": "example/tiny"}, "none": {"repo": "example/none"}}, "gpus": [{"name": "L4"}]}
    given |= {"vllm_version": "0.32.0", "weights_root": "/nowhere"}
    done = run_module("serving_complete", given | {"endpoint": f"http://127.0.0.1:{hub.server_address[1]}"})
    assert done["rc"] == 0 and done["engines"].keys() == {"chat"}, done
    assert "other cannot be completed. example/none cannot be read at" in " ".join(done["lines"])
    again = run_module("serving_complete", given | {"recorded": done["records"]})
    assert (again["engines"], again["records"]) == (done["engines"], {})
    refused = run_module("serving_complete", given)
    assert refused["rc"] == 1 and "nothing is recorded of example/tiny. Record its facts once" in refused["msg"]


def test_token_of_the_user_is_not_sent_and_quantization_may_be_in_its_own_file(
    run_module: Callable[..., Any], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's hub refuses a token that it does not know."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (write(tmp_path / "hub" / "example" / "tiny") / "hf_quant_config.json").write_text(json.dumps(said))
    result = asked(run_module, hub)
    assert (result["rc"], result.get("quantization")) == (0, "modelopt"), result
    assert "401" in asked(run_module, hub, token="hf_unknown")["msg"]
    assert "is no token" in asked(run_module, hub, token="hf_a b")["msg"]


def test_why_a_hub_gives_nothing_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "")
    (tmp_path / "state").mkdir()
    for repo in ("gguf", "bare"):
        (tmp_path / "hub" / "example" / repo).mkdir(parents=True)
    write(tmp_path / "hub" / "example" / "gated")
    (tmp_path / "state" / "gated.json").write_text('{"example/gated": "hf_right"}')
    (tmp_path / "hub" / "example" / "gguf" / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "hub" / "example" / "bare" / "README.md").write_text("")
    here, away = f"http://127.0.0.1:{hub.server_address[1]}", "http://127.0.0.1:9"
    for said, (repo, revision, endpoint, token) in {
        "there is no such repository, or it is private": ("example/tiny", "", here, ""),
        "no hub answers there (": ("example/tiny", "", away, ""),
        "it is gated. Accept its licence": ("example/gated", "", here, ""),
        "the hub refuses with status 401": ("example/gated", "", here, "hf_wrong"),
        "it has no revision v9": ("example/gated", "v9", here, "hf_right"),
        "it lacks config.json, or weights in safetensors": ("example/bare", "", here, ""),
        "example/gguf is GGUF": ("example/gguf", "", here, ""),
    }.items():
        with pytest.raises(FactsError) as refused:
            read_hub(repo, revision, endpoint, token)
        start = said if "GGUF" in said else f"{repo} cannot be read at {endpoint}: {said}"
        assert str(refused.value).startswith(start), refused.value


# -- what an operator has: an index without weights, and records in the inventory


def list_names(facts: Facts) -> list[str]:
    """The names of all tensors of recorded facts, as an index has them."""
    names = []
    for tensor in facts.tensors:
        for layer in tensor.layers or (None,):
            for number in range(tensor.count):
                parts = tensor.name.replace("*", str(layer), 1) if layer is not None else tensor.name
                names.append(parts.replace("*", str(number)))
    return names


INFERRED = {
    "Qwen/Qwen3-30B-A3B": 0.0,
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": 0.001,
    "google/gemma-4-31B-it-qat-w4a16-ct": 0.001,
    "nvidia/Gemma-4-31B-IT-NVFP4": 0.003,
    "google/gemma-4-E4B-it": 0.001,
    "google/gemma-3-27b-it": 0.02,
}
"""By repository, how far the weights of a rank of four may be from those of the headers."""


@pytest.mark.parametrize("repo", INFERRED)
def test_an_index_without_weights_is_enough_for_approximate_facts(tmp_path: Path, repo: str) -> None:
    exact = checkpoints.recorded(repo)
    config = {**exact.config, **({"quantization_config": exact.quantization} if exact.quantization else {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {
        "metadata": {"total_size": model_facts.checkpoint_bytes(exact)},
        "weight_map": {name: "model-00001-of-00002.safetensors" for name in list_names(exact)},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = model_facts.read(tmp_path, repo)
    assert facts.source.startswith("approximate: ")
    for ranks in (1, 4):
        arguments = Arguments(tensor_parallel_size=ranks)
        wanted, found = (
            weights.per_rank(families.interpret(each), arguments, "0.32.0")[0].bytes for each in (exact, facts)
        )
        assert abs(found / wanted - 1) <= INFERRED[repo], (ranks, found / wanted)
    index["metadata"]["total_size"] //= 2
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FactsError, match="its shapes cannot be inferred"):
        model_facts.read(tmp_path, repo)


def test_records_of_the_inventory_come_first_and_are_checked(tmp_path: Path) -> None:
    repo = "example/tiny"
    facts = model_facts.read(write(tmp_path / "model"), repo, "abc")
    record = json.loads(json.dumps(recording.record(facts, recording.describe_origin(facts))))
    models = {"tiny": {"repo": repo}, "other": {"repo": "example/other"}, "odd": "text"}
    file = recording.find_file(tmp_path, repo)
    file.write_text(json.dumps(record))
    records = recording.read_directory(models, tmp_path)
    assert records == {repo: record}
    read = model_facts.recorded(repo, records)
    assert read is not None and (read.tensors, read.source) == (facts.tensors, "recorded: its files")
    assert inputs.facts_of(models["tiny"], Path("/nowhere"), "files", records) == read
    for damage in (
        {"tensors": [["x", "BF16", [-1], None, 1]]},
        {"tensors": [["x", "WRONG", [1], None, 1]]},
        {"tensors": [["x", "BF16", [1], "0-99999999", 1]]},
        {"config": "text"},
        {"tensors": None},
    ):
        file.write_text(json.dumps({**record, **damage}))
        with pytest.raises(FactsError, match=r"example--tiny\.json is no record of a checkpoint"):
            recording.read_directory(models, tmp_path)
