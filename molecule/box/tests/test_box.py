# SPDX-License-Identifier: Apache-2.0
"""The host with one card of 80 GB serves the profile that was advised, within its budget."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from testinfra.host import Host

ASK = (Path(__file__).resolve().parents[3] / "tests/tools/ask.py").read_text()
INVENTORY = "/home/ops/vllm-edge/molecule/box/inventory"


@pytest.fixture
def engine(host: Host) -> tuple[str, dict[str, Any]]:
    """Name and settings of the engine that was pasted."""
    pasted = yaml.safe_load(host.file(f"{INVENTORY}/group_vars/gpu_hosts/serving.yml").content_string)
    ((name, settings),) = pasted["serving_engines"].items()
    return name, settings


def query(host: Host, fields: str) -> list[str]:
    return str(host.check_output(f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits")).splitlines()


def test_there_is_one_card_of_80_gb(host: Host) -> None:
    assert query(host, "name,memory.total,compute_cap") == ["NVIDIA H100 80GB HBM3, 81559, 9.0"]


def test_the_advised_engine_serves_every_role(host: Host, engine: tuple[str, dict[str, Any]]) -> None:
    name, settings = engine
    assert host.service(f"vllm-{name}").is_running

    def ask(path: str, question: str = "") -> Any:
        words = ["python3", "-c", ASK, f"unix:/run/vllm-edge/engines/{name}/api.sock{path}", question, "60"]
        status, answer = json.loads(str(host.check_output(shlex.join(words))))
        assert status == 200, answer
        return json.loads(answer)

    models = {model["id"]: model["max_model_len"] for model in ask("/v1/models")["data"]}
    assert models == dict.fromkeys(["architect", "worker", "auditor", "sentry"], settings["max_model_len"])
    question = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}
    for role in models:
        answer = ask("/v1/chat/completions", json.dumps({"model": role, **question}))
        assert answer["usage"]["completion_tokens"] > 0


def test_the_card_is_full_and_within_the_budget(host: Host) -> None:
    (used,) = query(host, "memory.used")
    report = json.loads(host.file("/var/lib/vllm-edge/report.json").content_string)
    assert int(used) > 75_000, "the plan gives the KV cache the rest of the card"
    assert [gpu["within_budget"] for gpu in report["gpus"]] == [True]


MODELS = """
import os, urllib.request as u
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
print(url, u.urlopen(u.Request(url + "/models", headers={"Authorization": "Bearer " + key})).status)
"""


def test_clients_get_the_address_of_the_host_and_its_certificate_names_it(host: Host) -> None:
    address = host.check_output("ip -4 route get 203.0.113.1 | grep -o 'src [0-9.]*' | cut -c 5-")
    client = f"{INVENTORY}/reports/clients/box-default.env"
    asked = host.check_output(f"set -a; . {client}; python3 -c {shlex.quote(MODELS)}")
    assert asked == f"https://{address}:8443/v1 200"


def test_root_left_nothing_of_its_own(host: Host) -> None:
    assert host.check_output(f"find {INVENTORY} -user root") == ""
