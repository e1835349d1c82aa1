# SPDX-License-Identifier: Apache-2.0
"""The reference answer: comparison token by token, refusals before anything starts, and decisions of the script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import load_engine
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.long_run import CommandRefused, LongRun
from ansible.module_utils.vllm_edge.trials import reference_run, reference_script
from ansible.module_utils.vllm_edge.trials.reference import (
    Answer,
    Checkpoint,
    Compared,
    Options,
    Place,
    choose_place,
    choose_status,
    compare,
    describe_quantized,
    find_quantization,
    find_refusal,
    parse_script_answers,
)
from engine_files import CONFIG, CREATE, written

WORDS = {1: "one", 2: "two", 3: "three", 7: "<user>", 8: "<human>", 9: "hello"}
CLOSE = {1: -0.9, 2: -1.0, 3: -4.0}
FAR = {1: -0.1, 2: -3.0, 3: -4.0}


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def side(
    tokens: Sequence[int], *tops: Mapping[int, float], prompt: Sequence[int] = (7, 9), finish: str = "length"
) -> Answer:
    return Answer(tuple(prompt), tuple(tokens), tops or tuple(CLOSE for _ in tokens), finish)


def ask(reference: Answer, engine: Answer, quantized: str = "") -> Compared:
    return compare("count", reference, engine, quantized=quantized, decode=decode)


# ---- comparison


def test_equal_answers_are_equal() -> None:
    found = ask(side([1, 2]), side([1, 2]))
    assert (found.finding, found.first_difference, found.agreed, found.compared) == ("equal", None, 2, 2)
    assert found.text == "Prompt count: all 2 tokens are equal."


def test_another_chat_template_is_named_with_both_ends() -> None:
    found = ask(side([1], prompt=[8, 9]), side([1], prompt=[7, 9]))
    assert (found.finding, found.prompt_equal, found.first_difference) == ("template", False, None)
    assert "from token 1 on the engine has '<user> hello' and transformers has '<human> hello'" in found.text
    longer = ask(side([1], prompt=[7, 9, 1]), side([1], prompt=[7, 9]))
    assert "from token 3 on the engine has its end and transformers has 'one'" in longer.text


def test_tokens_that_both_rate_alike_are_a_tie() -> None:
    found = ask(side([3, 2], FAR, CLOSE), side([3, 1], FAR, CLOSE), "weights in nvfp4")
    assert (found.finding, found.first_difference, found.agreed, found.compared) == ("tie", 1, 1, 2)
    for told in ("1 tokens are equal", "the engine has 'one' and transformers has 'two' as token 2", "'one' -0.90"):
        assert told in found.text


@pytest.mark.parametrize(
    ("reference", "engine"),
    [(FAR, CLOSE), (CLOSE, FAR), (CLOSE, {1: -0.9, 3: -1.0})],
    ids=["transformers is sure", "the engine is sure", "the engine does not list the other"],
)
def test_a_clear_difference_blames_what_differs(reference: Mapping[int, float], engine: Mapping[int, float]) -> None:
    sides = side([2], reference), side([1], engine)
    assert ask(*sides).finding == "engine"
    found = ask(*sides, quantized="weights in nvfp4 where the reference is not quantized")
    assert found.finding == "quantization"
    assert "the engine has weights in nvfp4" in found.text


def test_an_answer_that_ends_early_is_a_difference() -> None:
    found = ask(side([1, 2]), side([1], finish="stop"))
    assert (found.finding, found.first_difference, found.compared) == ("engine", 1, 2)
    assert "the engine ends its answer and the other goes on with 'two' as token 2" in found.text


def test_what_the_time_limit_cut_is_compared_as_far_as_it_goes() -> None:
    found = ask(side([1], finish="time"), side([1, 2]))
    assert (found.finding, found.compared) == ("equal", 1)
    assert "within the time limit of a prompt, where 2 were due" in found.text
    none = ask(side([], finish="time"), side([1, 2]))
    assert none.finding == "unknown"
    assert choose_status([found, none]) == 2
    assert choose_status([none, ask(side([2], FAR), side([1], FAR))]) == 1
    assert choose_status([found]) == 0
    assert choose_status([]) == 2


def test_a_quantized_kv_cache_counts_as_quantization() -> None:
    assert describe_quantized(True, "bf16", "auto") == ""
    assert describe_quantized(True, "bf16", "fp8") == "a KV cache in fp8"
    both = describe_quantized(False, "nvfp4", "fp8_e4m3")
    assert both == "weights in nvfp4 where the reference is not quantized and a KV cache in fp8_e4m3"


def test_answers_of_the_container_are_read_strictly() -> None:
    item = {"case": "a", "prompt_ids": [7], "token_ids": [1], "logprobs": [{"1": -0.5}], "finish": "stop"}
    document = {"device": "cpu", "dtype": "bfloat16", "torch": "2", "transformers": "5", "load_seconds": 1}
    _, answers = parse_script_answers({**document, "answers": [item]})
    assert answers == {"a": Answer((7,), (1,), ({1: -0.5},), "stop")}
    for wrong in ({**item, "logprobs": [3]}, {"case": "a"}, {**item, "token_ids": ["x"]}):
        with pytest.raises(ValueError, match=r"answers\.json|invalid literal"):
            parse_script_answers({**document, "answers": [wrong]})


# ---- refusals

SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048}


def checkpoint(name: str, quantization: str = "", **config: Any) -> Checkpoint:
    return Checkpoint(name, f"/models/{name}", 100, {**SHAPE, **config}, quantization)


def test_quantization_is_read_from_either_file() -> None:
    assert find_quantization({}, None) == ""
    declared = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert find_quantization(declared, None) == "modelopt NVFP4"
    assert find_quantization({"text_config": declared}, None) == "modelopt NVFP4"
    assert find_quantization({}, {"quantization": {"quant_algo": "NVFP4"}}) == "modelopt NVFP4"


def test_nvfp4_is_refused_and_the_model_that_would_do_is_named() -> None:
    engine = checkpoint("31b-nvfp4", "modelopt NVFP4")
    known = [
        engine,
        checkpoint("31b-bf16"),
        checkpoint("31b-fp8", "compressed-tensors"),
        checkpoint("e2b", vocab_size=7),
    ]
    text = find_refusal(engine, engine, known)
    assert text is not None
    assert "31b-nvfp4 at /models/31b-nvfp4 is quantized (modelopt NVFP4): transformers has no loader" in text
    assert text.endswith("Unquantized models of the same base on this host: 31b-bf16 (100 MiB).")
    alone = find_refusal(engine, engine, [engine])
    assert alone is not None
    assert "playbooks/weights.yml -e serving_profile=" in alone
    assert find_refusal(checkpoint("31b-bf16"), engine, known) is None


def test_a_model_of_another_base_is_refused() -> None:
    other = checkpoint("e2b", text_config={**SHAPE, "num_hidden_layers": 35})
    assert "num_hidden_layers is 35 where the engine's is 4" in (find_refusal(other, checkpoint("31b"), []) or "")


def test_the_place_is_free_gpus_or_the_cpu_or_refused_with_figures() -> None:
    gpus = {"GPU-a": 23_000, "GPU-b": 22_000}
    assert choose_place("auto", 9_000, 100_000, gpus) == Place("either", ("GPU-a",), 13_096)
    assert choose_place("gpu", 30_000, 8_000, gpus) == Place("gpu", ("GPU-a", "GPU-b"), 8_192)
    assert choose_place("auto", 62_000, 100_000, gpus) == Place("cpu", (), 66_096)
    assert choose_place("cpu", 9_000, 100_000, gpus) == Place("cpu", (), 13_096)
    text = choose_place("auto", 62_000, 60_000, gpus)
    assert isinstance(text, str)
    for told in ("62,000 MiB", "needs 66,096 MiB", "60,000 MiB are available", "without an engine: 2, with 40,904"):
        assert told in text
    assert "every GPU has an engine" in str(choose_place("gpu", 9_000, 100_000, {}))


@pytest.fixture
def host(tmp_path: Path) -> HostPaths:
    """A host with engine e2b, whose model is in `weights`."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(SHAPE))
    (weights / "model.safetensors").write_bytes(b"0" * 3 * 2**20)
    arguments = ["--chat-template=/chat-template.jinja", "--max-logprobs=7", "--kv-cache-dtype=fp8"]
    paths = written(tmp_path, {**CONFIG, "weights_path": str(weights)}, [*CREATE, *arguments])
    (paths.engine_dir("e2b") / "chat-template.jinja").write_text("{{ messages }}")
    return HostPaths(etc=paths.etc, state=paths.state, run=tmp_path / "run")


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_run, "ask_models", lambda config, timeout_s: (["sentry"], None))


def test_everything_is_read_before_anything_starts(host: HostPaths, serves: None) -> None:
    plan = reference_run.prepare(Options("e2b", device="cpu"), host)
    assert (plan.reference.name, plan.reference.weights_mib, plan.quantized) == ("e2b", 3, "a KV cache in fp8")
    assert (plan.chat_template, plan.top, plan.cases) == ("{{ messages }}", 7, reference_run.PROMPTS)
    assert plan.limit_s == pytest.approx(300 + 3 / 50 + 2 * 600)
    create = host.engine_dir("e2b") / "container.json"
    create.write_text(create.read_text().replace("--max-logprobs=7", "--max-logprobs=-1"))
    assert reference_run.prepare(Options("e2b", device="cpu"), host).top == 20


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "e3b"}, "no engine 'e3b'; did you mean e2b?"),
        ({"engine": "e2b", "model": "31b-bf16"}, "'31b-bf16' are not on this host"),
        ({"engine": "e2b", "model": "/nowhere/x"}, "/nowhere/x holds no readable model"),
        ({"engine": "e2b", "prompts": "/nowhere/x"}, "/nowhere/x cannot be read"),
        ({"engine": "e2b", "chat_template": "/nowhere/x"}, "/nowhere/x cannot be read"),
        ({"engine": "e2b", "device": "gpu"}, "every GPU has an engine"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    host: HostPaths, serves: None, options: dict[str, str], told: str
) -> None:
    with pytest.raises(CommandRefused, match=told.replace("?", r"\?")):
        reference_run.prepare(Options(**options), host)


def test_an_engine_that_does_not_serve_is_refused(host: HostPaths, tmp_path: Path) -> None:
    with pytest.raises(CommandRefused, match=r"Engine e2b does not serve: no answer to GET"):
        reference_run.prepare(Options("e2b", device="cpu"), host)
    empty = HostPaths(etc=tmp_path / "none", state=tmp_path)
    with pytest.raises(CommandRefused, match="This host has no engine"):
        reference_run.prepare(Options("e2b"), empty)


def test_a_file_of_prompts_is_read_strictly() -> None:
    good = [{"case": "a", "messages": [{"role": "user", "content": "hi"}]}]
    assert reference_run.parse_prompts(json.dumps(good), "f") == tuple(good)
    for wrong in ([], [{"case": "a"}], good * 2, {"a": 1}, [{"case": "a", "messages": []}]):
        with pytest.raises(CommandRefused, match="f: a list of 1 to 100 objects"):
            reference_run.parse_prompts(json.dumps(wrong), "f")


def test_one_reference_at_a_time(
    host: HostPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    long_run = LongRun(host.run, "reference")
    with long_run.alone():
        long_run.say("computes")
        assert reference_run.run_reference(Options("e2b"), host, long_run, output="text") == 2
        long_run.follow()
    said = capsys.readouterr()
    assert "`vllm-edge quality reference` runs on this host already" in said.err and said.out == "computes\n", (
        "the first one's progress stays"
    )


def test_the_engine_is_asked_for_the_tokens_of_prompt_and_answer(host: HostPaths) -> None:
    asked: dict[str, Any] = {}

    class Client(reference_run.Client):
        def post(self, path: str, what: str, **payload: Any) -> Any:
            asked.update(payload, path=path)
            top = [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:6", "logprob": -1.5}]
            content = [{**top[0], "top_logprobs": top}]
            choice = {"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [5]}
            return {"prompt_token_ids": [7, 9], "choices": [{**choice, "logprobs": {"content": content}}]}

    client = Client(load_engine("e2b", host).config, "sentry", 1.0, lambda *given, **more: None)  # type: ignore[arg-type,return-value]
    found = reference_run.ask_engine(client, reference_run.PROMPTS[0], 8, 20)
    assert found == Answer((7, 9), (5,), ({5: -0.5, 6: -1.5},), "stop")
    wanted = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 8, "top_logprobs": 20}
    assert asked.items() >= wanted.items()


# ---- the script


def test_the_script_chooses_the_device() -> None:
    assert reference_script.choose_device("either", False, 0) == "cpu"
    assert reference_script.choose_device("either", True, 1) == "cuda:0"
    assert reference_script.choose_device("gpu", True, 2) == "auto"
    assert reference_script.choose_device("cpu", True, 2) == "cpu"
    with pytest.raises(SystemExit, match="finds no CUDA device"):
        reference_script.choose_device("gpu", False, 0)


def test_the_script_says_why_an_answer_ended() -> None:
    ends = reference_script.list_ends(1) + reference_script.list_ends([5]) + reference_script.list_ends(None)
    assert ends == [1, 5]
    assert reference_script.name_finish([3, 5], ends, 2) == "stop"
    assert reference_script.name_finish([3, 4], ends, 2) == "length"
    assert reference_script.name_finish([3], ends, 2) == "time"
