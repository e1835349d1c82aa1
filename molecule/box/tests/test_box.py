# SPDX-License-Identifier: Apache-2.0
"""The host with one card of 80 GB serves the profile that was advised, within its budget."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[3]
PASTED = yaml.safe_load((ROOT / "molecule/box/inventory/group_vars/gpu_hosts/serving.yml").read_text())
((NAME, ENGINE),) = PASTED["serving_engines"].items()
ASK = (ROOT / "tests" / "tools" / "ask.py").read_text()


def query(host: Host, fields: str) -> list[str]:
    return str(host.check_output(f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits")).splitlines()


def test_there_is_one_card_of_80_gb(host: Host) -> None:
    assert query(host, "name,memory.total,compute_cap") == ["NVIDIA H100 80GB HBM3, 81559, 9.0"]


def test_the_advised_engine_serves_every_role(host: Host) -> None:
    assert host.service(f"vllm-{NAME}").is_running

    def ask(path: str, question: str = "") -> Any:
        words = ["python3", "-c", ASK, f"unix:/run/vllm-edge/engines/{NAME}/api.sock{path}", question, "60"]
        status, answer = json.loads(str(host.check_output(shlex.join(words))))
        assert status == 200, answer
        return json.loads(answer)

    models = {model["id"]: model["max_model_len"] for model in ask("/v1/models")["data"]}
    assert models == dict.fromkeys(["architect", "worker", "auditor", "sentry"], ENGINE["max_model_len"])
    question = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}
    for name in models:
        answer = ask("/v1/chat/completions", json.dumps({"model": name, **question}))
        assert answer["usage"]["completion_tokens"] > 0


def test_the_card_is_full_and_within_the_budget(host: Host) -> None:
    (used,) = query(host, "memory.used")
    report = json.loads(host.file("/var/lib/vllm-edge/report.json").content_string)
    assert int(used) > 75_000, "the plan gives the KV cache the rest of the card"
    assert [gpu["within_budget"] for gpu in report["gpus"]] == [True]
