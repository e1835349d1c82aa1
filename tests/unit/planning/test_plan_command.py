# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge plan`, `advise` and `facts`, as they run on a laptop: no Ansible, no package of a host, no network."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.gpu.cards import CARDS
from ansible.module_utils.vllm_edge.gpu.models import GPU_MODELS, OTHER_MAKERS, find_by_short_name
from ansible.module_utils.vllm_edge.planning import command, planner, render
from ansible.module_utils.vllm_edge.planning.advice import known
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.inputs import build_gpu
from helpers import ROOT
from test_model_facts import hub, write  # noqa: F401 (the fixture)

from lab.hub.server import Hub

LAPTOP = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {absent!r} else find_spec(name, package)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from vllm_edge.cli import main
sys.exit(main(sys.argv[1:]))
"""
# None of the packages of the extra `host` can be imported.
OF_A_HOST = ("ansible", "cyclonedx", "docker", "packaging", "pynvml", "requests", "urllib3")


MANY = ("--by", "together", "--min-tok-s", "40", "--max-num-seqs", "2,4")
WORDS: dict[tuple[str, ...], tuple[int, str]] = {
    ("plan", "--model", "google/gemma-4-31B-it", "--gpu", "L4", "--count", "4"): (0, "tp4      fits"),
    ("advise", "--model", "google/gemma-4-E4B-it", "--gpu", "L4", "--count", "4", *MANY): (0, "e4b-it tp2 seqs=4 x2"),
    ("facts", "--model", "Qwen/Qwen3-8B"): (0, '"tensors"'),
    ("status",): (2, "vllm-edge status is for a serving host"),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_a_laptop_needs_no_package_of_a_host(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAPTOP.format(absent=OF_A_HOST), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "plugins/module_utils")},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    status, printed = WORDS[words]
    assert (done.returncode, printed in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and output of the command in this process."""
    status = cli.main(words)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


E2B = ("plan", "--model", "google/gemma-4-E2B-it", "--gpu", "L4")


def test_without_a_context_the_longest_that_fits_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", "google/gemma-4-31B-it", "--gpu", "L4", "--count", "4", "--format", "json")
    (longest,) = json.loads(run(capsys, *words, "--tensor-parallel-size", "4")[1])["plans"]["tp4"]["engines"]
    assert longest["verdict"] == "fits" and longest["max_model_len"] > 32768 and longest["max_concurrency"] >= 1
    document = json.loads(run(capsys, *words, "--context", "16384")[1])
    assert document["plans"].keys() == {"tp1", "tp2", "tp4"} and document["vllm_version"] == "0.32.0"
    (given,) = document["plans"]["tp4"]["engines"]
    assert given["max_model_len"] == 16384 and given["max_concurrency"] > longest["max_concurrency"]
    too_long = str(longest["max_model_len"] + 8192)
    assert run(capsys, *words, "--context", too_long)[0] == 1
    status, printed = run(capsys, *words[:5], "--count", "2")
    assert status == 1 and "tp2: oom_weights. Weights" in printed
    # Without a context, what helps is not asked to hold the longest that the model has.
    assert "Set --tensor-parallel-size=4 (2 more NVIDIA L4 than there are)." in " ".join(printed.split())
    assert "tp4: 262,144 tokens of context fit with --" in run(capsys, *words[:7])[1]
    status, printed = run(capsys, "advise", *words[1:5])
    assert status == 1 and "oom_weights" in printed


def test_the_answer_is_a_command_or_options_that_make_it_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--model", "google/gemma-4-31B-it", "--gpu", "L4", "--count", "4", "--context", "131072")
    status, printed = run(capsys, *words)
    said = " ".join(printed.split())
    for option in (
        "max-num-seqs=128 (at most 128",
        "kv-cache-dtype=fp8 (quality: small",
        "language-model-only (no images",
    ):
        assert f"--{option}" in said.partition("; or --enforce-eager; or --max-model-len=79872.")[0], said
    assert status == 1 and "vllm serve" not in said and "memory_threshold" not in said
    status, printed = run(capsys, *words, "--text-only")
    (line,) = [line for line in printed.splitlines() if "vllm serve" in line]
    assert status == 0 and line.startswith(
        "tp4: vllm serve google/gemma-4-31B-it --tensor-parallel-size=4 --max-model-len"
    )
    assert line.endswith("--language-model-only")
    plans = json.loads(run(capsys, *words, "--text-only", "--format", "json")[1])["plans"]
    assert (plans["tp1"]["serve"], f"tp4: {plans['tp4']['serve']}") == (None, line)
    assert plans["tp4"]["engines"][0]["at_once"].keys() == {"8192", "32768"}
    assert "tp4: GPU 0-3 will each hold" in run(capsys, *words, "--kv-cache-dtype", "fp8")[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-model-len", "-5"], "'--max-model-len -5' is not a whole number above 0"),
        (["--context", "0"], "'--max-model-len 0' is not a whole number above 0"),
        (["--max-num-seqs", "0"], "'--max-num-seqs 0' is not a whole number above 0"),
        (["--tensor-parallel-size", "nan"], "--tensor-parallel-size takes a whole number, and 'nan' is none"),
        (["--gpu-memory-utilization", "95"], "above 0 and at most 1; write 0.95."),
        (["--data-parallel-size", "0"], "--data-parallel-size: 0 is no number of replicas"),
        (["--data-parallel-size", "2"], "--tensor-parallel-size: tp1, times --data-parallel-size 2, needs more GPUs"),
        (["--dtype", "float17"], "did you mean float16"),
        (["--max-modl-len", "4096"], "vLLM 0.32.0 knows no '--max-modl-len'; did you mean --max-model-len?"),
        (["--config", "a.yml"], "--config: the plan does not read that file"),
        (["google/gemma-4-E4B-it"], "are two models; name one"),
        (["vllm serve 'a/b"], "is no line of a shell (No closing quotation)"),
        (["--max-num-seqs", "8", "vllm", "serve"], "'--max-num-seqs' stands before vllm serve"),
        (["--token-file", "/nonexistent", "--model", "a/b"], "--token-file: /nonexistent cannot be read: No such file"),
        *((["--model", name], f"{name} is GGUF") for name in ("a/b:Q4_K_M", "a/Qwen3-8B-GGUF", "./m-Q4_K_M.gguf")),
        (["--gpu", "L5"], "--gpu: 'L5' is not a GPU that the planner knows. For another one give --gpu-memory-mib"),
        # Only variants of what is written are named, not another card with a similar name and other memory.
        (["--gpu", "RTX 4090 Laptop"], "knows. Write one of NVIDIA GeForce RTX 4090 Laptop GPU."),
        (["--gpu", "RTX 4060 Ti"], "NVIDIA GeForce RTX 4060 Ti has 8188 or 16380 MiB; write which"),
        (["--gpu", "MI300X", "--gpu-memory-mib", "196288"], "'MI300X' is no GPU of NVIDIA"),
        (["--gpu", "L4", "--compute-capability", "Ada"], "--compute-capability: 'Ada' is none"),
        (["--count", "65"], "--count: 65 is not a number of GPUs"),
        (["--tensor-parallel-size", "2"], "needs more GPUs than --count 1"),
        (["--vllm", "0.1.0"], "0.1.0"),
        (["--model", "no-such-thing"], "write owner/name"),
        (["--model", "/nonexistent"], "'/nonexistent' is neither a path that exists nor a repository"),
        (["--model", "example/none", "--endpoint", "http://127.0.0.1:9"], "cannot be read at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_said_is_status_2(capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    status, printed = run(capsys, *E2B, *more)
    assert status == 2 and said in printed, printed


ZERO = (
    *((*E2B, f"--{name}") for name in ("count", "gpu-memory-mib")),
    *(("bench", f"--{name}") for name in ("limit-minutes", "input-tokens", "requests", "tolerance-percent")),
    *(("quality", "--repeats"), ("quality", "--timeout"), ("quality", "reference", "--tokens")),
    ("canary", "e2b", "--timeout"),
)
"""Options of which 0 does not count as not given."""
USAGE: list[tuple[tuple[str, ...], str]] = [
    *(
        ((*words, number), f"argument {words[-1]}: '{number}' is not a ")
        for words in ZERO
        for number in ("0", "-5", "nan")
    ),
    ((*E2B, "--gpu-memory-mib", "24"), "24 MiB is no memory of a GPU; for 24 GiB write 24576"),
    (
        ("advise", *E2B[1:], "--max-model-len", "9"),
        "vllm-edge advise: error: unrecognized arguments: --max-model-len 9",
    ),
]


def test_what_no_command_takes_is_refused_with_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in USAGE:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err, words


LINE = (
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 /opt/venv/bin/vllm serve google/gemma-4-E2B-it -tp 2 --max-model-len 32k \\\n"
    """ --max-num-seqs=16 --kv-cache-dtype fp8 --limit-mm-per-prompt '{"image": 0, "video": 0, "audio": 0}' """
    "--api-key s3cret --port 8000 --gpu-memory-utilization .9 2>&1 | tee log"
)


def test_a_line_of_vllm_is_planned_as_the_engine_of_an_inventory(capsys: pytest.CaptureFixture[str]) -> None:
    """Quoted, word by word, or as options of this command: the plan is that of the module's mapping."""
    mapping = {
        "name": "tp2",
        "model": "model",
        "gpus": [0, 1],
        "tensor_parallel_size": 2,
        "max_model_len": 32000,
        "max_num_seqs": 16,
        "kv_cache_dtype": "fp8",
        "limit_mm_per_prompt": dict.fromkeys(("image", "video", "audio"), 0),
        "gpu_memory_utilization": 0.9,
    }
    model = families.interpret(model_facts.recorded("google/gemma-4-E2B-it"))  # type: ignore[arg-type]
    l4 = build_gpu("gpus[0]", {"nvml_total_mib": 23034, "name": "L4"}, pytest.fail)
    expected = render.document(planner.plan("tp2", [mapping], {"model": model}, [l4] * 2, "0.32.0"))
    options = ["--count", "2", "-tp", "2", "--context", "32k", "--max-num-seqs", "16", "--kv-cache-dtype", "fp8"]
    for words in (
        [LINE],
        shlex.split(LINE.replace("\\\n", "")),
        [LINE.replace("/opt/venv/bin/vllm serve", "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.32.0")],
        ["google/gemma-4-E2B-it", *options, "--text-only", "--gpu-memory-utilization", "0.9"],
    ):
        printed = run(capsys, "plan", "--gpu", "L4", "--format", "json", *words)[1]
        (planned,) = json.loads(printed)["plans"].values()
        assert "vllm serve google/gemma-4-E2B-it --tensor-parallel-size=2 " in planned.pop("serve")
        planned["engines"][0]["reasons"] = expected["engines"][0]["reasons"]  # of options, and not of keys
        assert planned == expected and "s3cret" not in printed


def test_what_a_line_leaves_out_is_the_default_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """Not what would fit best: vLLM takes its share of the GPU, the model's own context and one GPU."""
    for release, share in {"0.19.0": 0.9, "v0.32.0": 0.92}.items():
        words = ("plan", "--gpu", "L4", "--vllm", release, "--format", "json")
        given = ("google/gemma-4-E4B-it", "--gpu-memory-utilization", str(share), "--max-model-len", "131072")
        line, options = (
            json.loads(run(capsys, *words, *asked)[1])["plans"]["tp1"]
            for asked in (("vllm serve google/gemma-4-E4B-it",), given)
        )
        reasons = [one["engines"][0].pop("reasons")["gpu_memory_utilization"] for one in (line, options)]
        assert line | {"serve": ""} == options | {"serve": ""}
        assert reasons == ["vLLM's default: its share of the GPU", "your word"]
    whole = json.loads(run(capsys, *words, "vllm serve google/gemma-4-31B-it -tp 4 --max-model-len auto")[1])["plans"]
    assert whole["tp4"]["engines"][0]["verdict"] == "fits" and whole["tp4"]["engines"][0]["max_model_len"] < 131072


def test_replicas_and_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, *E2B, "--count", "2", "-dp", "2")
    assert status == 0 and "Each of 2 replicas has this plan" in printed and "tp2" not in printed
    mixture = ("plan", "google/gemma-4-26B-A4B-it", "--gpu", "H100", "--count", "2", "-ep", "--max-num-seqs", "16")
    assert run(capsys, *mixture, "--data-parallel-size=1")[0] == 0
    said = " ".join(run(capsys, *mixture, "-dp", "2")[1].split())
    assert "the experts, which vLLM shares out" in said and "Each of 2 replicas" not in said
    assert "Without it it would fit" in said and "Set tensor_parallel_size in place of --data-parallel-size." in said
    status, printed = run(capsys, *E2B, "--enable-dbo")
    assert status == 2 and "Leave out '--enable-dbo'" in " ".join(printed.split())


def test_a_release_that_nobody_examined_stands_in_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    first = "Nobody has examined how vLLM 0.99.0 uses memory"
    for words in (E2B, (*E2B, "--details"), ("advise", *E2B[1:])):
        assert run(capsys, *words, "--vllm", "0.99.0")[1].startswith(first)
        assert json.loads(run(capsys, *words, "--vllm", "0.99.0", "--format", "json")[1])["warning"].startswith(first)


def test_advice_goes_on_without_a_model_that_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unknown = ("--model", "a/b-GGUF")
    status, printed = run(capsys, "advise", *E2B[1:], *unknown)
    said = " ".join(printed.split())
    assert status == 0 and "Left out, because it cannot be planned (see below): a/b-GGUF." in said
    assert "a/b-GGUF: unknown. a/b-GGUF is GGUF" in said and "vllm serve google/gemma-4-E2B-it" in said
    assert run(capsys, "advise", *unknown, "--gpu", "L4")[0] == 2
    record = tmp_path / "other--gemma-4-E2B-it.json"
    record.write_text(run(capsys, "facts", *E2B[1:3])[1])
    both = run(capsys, "advise", *E2B[1:], "--count", "2", "--model", str(record), "--format", "json")[1]
    assert json.loads(both)["main_models"] == ["gemma-4-e2b-it", "other-gemma-4-e2b-it"]


@pytest.mark.slow
def test_advice_without_a_model_ranks_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, "advise", "--gpu", "L4", "--count", "4")
    titles = [line.split(":")[0].strip() for line in printed.splitlines() if " tokens or more" in line]
    assert status == 0 and titles == ["chat", "tools", "long context"]
    assert re.findall(r">1  (\S+) .* yes\n", printed) == 3 * ["openai/gpt-oss-120b"]
    assert "\nchat, tools, long context: vllm-edge plan --model openai/gpt-oss-120b --gpu L4 --count 4 " in printed


def test_what_is_known_is_ranked_by_what_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = "Qwen/Qwen3.5-9B* google/gemma-4-E2B-it* google/gemma-4-26B-A4B-it nvidia/Gemma-4-26B-A4B-NVFP4*"
    old = "Qwen/Qwen3-14B-AWQ* Qwen/Qwen2.5-VL-7B-Instruct* LGAI-EXAONE/EXAONE-4.0-1.2B"
    monkeypatch.setattr(known, "RELEASED", {2025: old, 2026: new})
    one = ("advise", "--gpu", "L4", "--format", "json")

    def uses(*more: str) -> Any:
        return json.loads(run(capsys, *one, *more)[1])["uses"]

    found = uses()
    chat, tools = ([row["model"] for row in found[use]["checkpoints"]] for use in ("chat", "tools"))
    # Of 26B the precision that fits. The 14 billion parameters are a year older, and count as 7.
    best, gemma = "nvidia/Gemma-4-26B-A4B-NVFP4", "google/gemma-4-E2B-it"
    assert chat[:4] == [best, "Qwen/Qwen3.5-9B", "Qwen/Qwen3-14B-AWQ", gemma]
    # Of the next the encoder takes more for a longer context, and nobody names a parser for the last.
    assert chat[4:] == ["Qwen/Qwen2.5-VL-7B-Instruct", "LGAI-EXAONE/EXAONE-4.0-1.2B"] and tools == chat[:4]
    assert min(row["context"] for row in found["chat"]["checkpoints"][5:]) > found["tools"]["min_context"]
    assert [row["model"] for row in found["long context"]["checkpoints"]] == [best, gemma]
    # The command of a row has its figures.
    for row in found["chat"]["checkpoints"]:
        words = shlex.split(row["next"])
        assert words[0] == "vllm-edge" and words[-2:] == ["--output", "vllm"]
        assert f"--max-model-len={row['context']}" in run(capsys, *words[1:])[1]
        (plan,) = json.loads(run(capsys, *words[1:-2], "--format", "json")[1])["plans"].values()
        (engine,) = plan["engines"]
        assert (engine["verdict"], engine["max_model_len"]) == ("fits", row["context"])
        assert engine["decode_tok_s"] == row["tok_s_estimate"]
    fast = [round(row["tok_s_estimate"]["mid"], 1) for row in uses("--by", "tok_s")["chat"]["checkpoints"]]
    assert fast == sorted(fast, reverse=True)
    contexts = [row["context"] for row in uses("--by", "context", "--min-context", "60000")["tools"]["checkpoints"]]
    assert contexts == sorted(contexts, reverse=True) and min(contexts) >= 60000
    assert [row["model"] for row in uses("--min-tok-s", "40")["chat"]["checkpoints"]] == [gemma, chat[-1]]
    status, printed = run(capsys, *one, "--min-tok-s", "9999")
    assert status == 1 and "0 of 7 known checkpoints fit on 1 x NVIDIA L4" in printed
    unknown = ("--gpu", "Some GPU", "--gpu-memory-mib", "31000", "--compute-capability", "8.9")
    assert run(capsys, "advise", *unknown)[0] == 0
    for words, said in {
        (*unknown, "--by", "tok_s"): "needs the bandwidth of the GPU",
        (*unknown, "--min-tok-s", "9"): "needs the bandwidth of the GPU",
        ("--gpu", "L4", "--choose", "99"): "write 1 to 6",
        ("--gpu", "L4", "--main", "e2b"): "name some with --model",
    }.items():
        status, printed = run(capsys, "advise", *words)
        assert status == 2 and said in printed


ANSIBLE = re.compile(
    r"\bplan_\w+|playbooks?/|\badvise_|-e \w+=|group_vars|CONTRIBUTING|model_weights_|vllm_models|vllm_image_base"
    r"|\bextra_(?:args|env)\b(?!:)"
)
OF_ANSIBLE = {"inputs", "observations", "drift"}
"""Modules of the planner that no command runs."""
NEVER_SAID = (
    "ansible-playbook -i FILE",
    "plan_observations",
    "predicted by playbooks/advise.yml",
    "# For group_vars",
    r"\s",
)
"""Of sentences about an inventory or what no command has: observations and the YAML of a profile; the last is a
pattern."""


def test_no_sentence_of_the_planner_is_said_in_the_words_of_ansible() -> None:
    found = {}
    for path in sorted((ROOT / "plugins/module_utils/vllm_edge/planning").rglob("*.py")):
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # documentation
        for node in ast.walk(tree):
            whole = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in parts else []
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "1" for one in whole)
            is_sentence = " " in text and "\n" not in text and not any(never in text for never in NEVER_SAID)
            if is_sentence and path.stem not in OF_ANSIBLE and (words := ANSIBLE.search(command.spell(text))):
                found[f"{path.name}: {words[0]}"] = text
    assert found == {}


def test_gpus_have_short_names_and_another_is_planned_by_its_memory_and_without_a_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, str | None] = {"l4": "NVIDIA L4", "NVIDIA L4": "NVIDIA L4", "T4": "Tesla T4", "L": None, "": None}
    names |= dict.fromkeys(("rtx 4090", "4090"), "NVIDIA GeForce RTX 4090") | {"H100": "NVIDIA H100 80GB HBM3"}
    assert {name: find_by_short_name(name) for name in names} == names
    some = (*E2B, "--gpu", "Some GPU", "--gpu-memory-mib", "31000")
    status, printed = run(capsys, *some)
    assert status == 0 and "fits" in printed and "not known" in printed and "1 x Some GPU" in printed
    # What not every card computes is left open, and not taken for possible.
    status, printed = run(capsys, *some, "--kv-cache-dtype", "fp8")
    assert status == 2 and "cannot_say. An FP8 KV cache needs compute capability 8.9" in printed
    assert "would fit: 512 MiB stay free" in " ".join(printed.split()) and "--compute-capability" in printed
    told = ("--compute-capability", "8.9", "--gpu-bandwidth", "900")
    status, printed = run(capsys, *some, "--kv-cache-dtype", "fp8", *told)
    assert status == 0 and "not known for Some GPU; the plan assumes" in printed and "compute capability" not in printed
    status, printed = run(capsys, "advise", *some[1:])
    assert status == 2 and "(--gpu-bandwidth)" in printed
    assert run(capsys, "advise", *some[1:], *told)[0] == 0


def test_cards_have_what_logs_print_and_never_more() -> None:
    """GiB that vLLM printed as the total of the card, of public logs; an estimate is never above what was read."""
    logs = {"T4": 14.56, "A10G": 22.06, "L40S": 44.39, "3090": 23.56, "4090": 23.52, "5090": 31.36, "H100": 79.19}
    logs |= {"A100 40GB": 39.49, "RTX PRO 6000": 95.01, "H200": 139.8, "B300": 267.69, "GB10": 121.69, "L4": 22.03}
    logs |= {"L20": 44.5, "GH200": 94.5, "A100": 79.25}
    warned: list[str] = []
    for name, printed in logs.items():
        offered = build_gpu("", {"name": name}, warned.append).cuda_total_bytes / 2**30
        assert printed * 0.998 < offered < printed + 0.005, name
    assert [sentence for sentence in warned if "shares its memory" not in sentence] == []
    assert len(GPU_MODELS) == CARDS.strip().count("\n") + 1
    for name, card in GPU_MODELS.items():
        assert find_by_short_name(name) == name and not OTHER_MAKERS.search(name)
        assert card.compute_capability >= (7, 5) and 200e9 <= card.bandwidth_bytes_per_s <= 8e12, name
        assert all(total > 8000 for total in card.totals_mib) and (card.totals_mib or card.cuda_mib), name
        if card.cuda_mib and card.totals_mib:
            total = card.totals_mib[-1]
            unknown = build_gpu("", {"name": "X", "nvml_total_mib": total}, warned.append)
            assert total * 0.94 < unknown.cuda_total_bytes / 2**20 <= card.cuda_mib < total, name
    # ECC takes a part of the total, not of what the driver keeps: 44.427 GiB of another log.
    with_ecc = build_gpu("", {"name": "A6000", "nvml_total_mib": 46068}, warned.append)
    assert with_ecc.cuda_total_bytes / 2**30 == pytest.approx(44.427, abs=0.001)
    # A driver that keeps more than that of the log is believed.
    more = build_gpu("", {"name": "T4", "nvml_total_mib": 15360, "nvml_reserved_mib": 500}, warned.append)
    assert more.cuda_total_bytes == (15360 - 500) * 2**20


def test_the_source_is_a_hub_a_directory_or_a_file(
    capsys: pytest.CaptureFixture[str],
    hub: Hub,  # noqa: F811
    tmp_path: Path,
) -> None:
    directory = write(tmp_path / "hub" / "example" / "tiny")
    (directory / "modules.json").write_text("[]")
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    of_hub = json.loads(run(capsys, "facts", "--model", "example/tiny", "--endpoint", endpoint)[1])
    of_directory = json.loads(run(capsys, "facts", "--model", str(directory))[1])
    of_config = json.loads(run(capsys, "facts", "--model", str(directory / "config.json"))[1])
    record = tmp_path / "example--tiny.json"
    record.write_text(json.dumps(of_hub))
    of_record = json.loads(run(capsys, "facts", "--model", str(record))[1])
    assert of_hub["tensors"] == of_directory["tensors"] == of_config["tensors"]
    assert of_hub["pooling"] and of_directory["pooling"]
    assert of_record == of_hub and of_hub["source"].startswith(endpoint)
    assert model_facts.parse_record("a/b", of_record, "").repo == "a/b"


def test_the_extra_of_a_host_is_what_the_lock_file_of_hosts_has() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["host"]]
    names = {word.split(">")[0].split("<")[0].replace("_", "-") for word in wanted}
    locked = (ROOT / "roles/vllm_edge_host/files/requirements.txt").read_text().splitlines()
    assert names <= {line.split("==")[0].replace("_", "-") for line in locked}
    assert {"docker", "nvidia-ml-py"}.isdisjoint(word.split(">")[0] for word in project["dependencies"])
    build = (ROOT / "roles/vllm_edge_host/tasks/build.yml").read_text()
    assert "'vllm-edge[host] @ file://' ~ __vllm_edge_host_program ~ '#sha256='" in build
