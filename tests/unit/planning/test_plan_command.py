# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge plan`, `advise` and `facts`, as they run on a laptop: no Ansible, no package of a host, no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.gpu.cards import CARDS
from ansible.module_utils.vllm_edge.gpu.models import GPU_MODELS, OTHER_MAKERS, find_by_short_name
from ansible.module_utils.vllm_edge.planning.checkpoint import model_facts
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
        (["--gpu", "L5"], "--gpu: 'L5' is not a GPU that the planner knows. For another one give --gpu-memory-mib"),
        # Only variants of what is written are named, not another card with a similar name and other memory.
        (["--gpu", "RTX 4090 Laptop"], "knows. Write one of NVIDIA GeForce RTX 4090 Laptop GPU."),
        (["--gpu", "RTX 4060 Ti"], "NVIDIA GeForce RTX 4060 Ti has 8188 or 16380 MiB; write which"),
        (["--gpu", "MI300X", "--gpu-memory-mib", "196288"], "'MI300X' is no GPU of NVIDIA"),
        (["--gpu", "L4", "--compute-capability", "Ada"], "'Ada' is no compute capability"),
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


@pytest.mark.parametrize(
    "words",
    [
        *[(*E2B, f"--{name}") for name in ("context", "max-num-seqs", "tensor-parallel-size", "count")],
        *[(*E2B, f"--{name}") for name in ("gpu-memory-mib", "gpu-memory-utilization")],
        *[("bench", f"--{name}") for name in ("limit-minutes", "input-tokens", "requests", "tolerance-percent")],
        *[
            ("quality", "--repeats"),
            ("quality", "--timeout"),
            ("quality", "reference", "--tokens"),
            ("canary", "e2b", "--timeout"),
        ],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_zero_is_refused_and_not_taken_for_not_given(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("0", "-5", "nan"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, number])
        assert ended.value.code == 2 and f"argument {words[-1]}: '{number}' is not a " in capsys.readouterr().err


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
    assert status == 2 and "(gpu_bandwidth_gb_s, --gpu-bandwidth)" in printed
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
