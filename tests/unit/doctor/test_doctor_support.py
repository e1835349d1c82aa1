# SPDX-License-Identifier: Apache-2.0
"""The support report: evidence is in it, seeded secrets are nowhere in it."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.doctor import support
from ansible.module_utils.vllm_edge.doctor.command import run_doctor
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import FakeHost

API_KEY = "q7Zs-api-key-value-91"
SECOND_KEY = "w2second93key"
HF_TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
PASSWORD = "pa55word-of-the-proxy"
ADMIN = "Adm1nSecretValue"
BEARER = "eyJhbGciOi.J9-bearer_value"
FILE_KEY = "only-in-a-key-file-4711"
PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEF"
QUOTED = "two words quoted-secret"
SEEDED = (API_KEY, SECOND_KEY, HF_TOKEN, PASSWORD, ADMIN, BEARER, FILE_KEY, PEM, QUOTED, "quoted-secret")


@pytest.fixture
def seeded(host: FakeHost) -> FakeHost:
    """A host whose configuration, journal and programs all tell secrets."""
    create = host.root / "etc/vllm-edge/engines/e2b/docker-create"
    lines = create.read_text()
    lines = lines.replace("vllm-edge:1\n", f"--env=HF_TOKEN={HF_TOKEN}\n--env=ADMIN_PASSWORD={ADMIN}\nvllm-edge:1\n")
    create.write_text(f"{lines}--api-key\n{API_KEY}\n{SECOND_KEY}\n--max-num-batched-tokens=2048\n")
    proxy = f"http://operator:{PASSWORD}@proxy.example.org:3128"
    host.write("etc/docker/daemon.json", json.dumps({"proxies": {"http-proxy": proxy}, "features": {"cdi": True}}))
    host.write("etc/vllm-edge/gateway.key", f"{FILE_KEY}\n")
    host.write("etc/vllm-edge/tls.conf", f"-----BEGIN PRIVATE KEY-----\n{PEM}\n-----END PRIVATE KEY-----\n")
    host.write("etc/vllm-edge/hooks/after_commit.d/tell", f'#!/bin/sh\nclient_secret="{QUOTED}"\ncurl {proxy}\n')
    host.answers["journalctl --no-pager"] = Ran(
        0,
        f"vllm[1]: Authorization: Bearer {BEARER}\n"
        f"vllm[1]: non-default args: {{'api_key': ['{API_KEY}'], 'max_model_len': 4096}}\n"
        f"vllm[1]: argv: serve --api-key {API_KEY} {SECOND_KEY} --port 8000 max_tokens=16 total_tokens: 17\n"
        f"vllm[1]: a value alone: {ADMIN}; the file's: {FILE_KEY}; token {HF_TOKEN}\n",
    )
    host.answers["docker version"] = Ran(0, f"HTTP_PROXY={proxy}\nServer: Docker Engine 26.1.5\n")
    return host


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.removeprefix("vllm-edge-support/"): content.read().decode()
            for member in archive.getmembers()
            if (content := archive.extractfile(member)) is not None
        }


def test_seeded_secrets_are_nowhere(seeded: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.tar.gz"
    reader = seeded.reader
    run_doctor(reader.paths, output="text", support_report=str(path), reader=reader)
    texts = unpacked(path)
    everything = "\n".join([*texts, *texts.values(), capsys.readouterr().out])
    assert [secret for secret in SEEDED if secret in everything] == []
    assert everything.count(support.GONE) >= len(SEEDED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_evidence_stays(seeded: FakeHost) -> None:
    texts = support.collect(seeded.reader, seeded.examine())
    create = texts[next(name for name in texts if name.endswith("docker-create"))]
    assert "--max-num-batched-tokens=2048" in create and "--device=nvidia.com/gpu=GPU-1f3c0a51" in create
    assert "--env=HF_TOKEN=REDACTED" in create and "--api-key\nREDACTED\n--max-num" in create
    log = texts["journal/vllm-e2b.service.log"]
    assert "--port 8000 max_tokens=16 total_tokens: 17" in log and "'max_model_len': 4096" in log
    daemon = texts[next(name for name in texts if name.endswith("daemon.json"))]
    assert json.loads(daemon)["proxies"] == {"http-proxy": "http://REDACTED@proxy.example.org:3128"}
    assert "holds a secret" in texts[next(name for name in texts if name.endswith("gateway.key"))]
    assert "Docker Engine 26.1.5" in texts["commands/docker.txt"]
    assert json.loads(texts["doctor.json"])["exit_status"] == 0
    assert "driver.versions" in texts["doctor.txt"]
    assert {"units.txt", "commands/packages.txt", "journal/docker.service.log"} <= set(texts)


def test_a_report_that_is_there_is_replaced_and_kept_from_others(host: FakeHost, tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("old")
    path.chmod(0o644)
    support.write_report(path, host.reader, host.examine())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "doctor.json" in unpacked(path)


def test_what_is_too_long_or_unreadable_is_named(host: FakeHost) -> None:
    host.write("etc/vllm-edge/long", "x" * (support.LONGEST_FILE + 1))
    host.link("etc/vllm-edge/circle", "circle")
    texts = support.collect(host.reader, host.examine())
    assert "left out" in texts[next(name for name in texts if name.endswith("/long"))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://hub.example.org/api?token=abcdefgh&x=1", "https://hub.example.org/api?token=REDACTED"),
        ("https://hf_abcdefgh12@hub.example.org", "https://REDACTED@hub.example.org"),
        ("git@example.org:owner/name", "git@example.org:owner/name"),
        ('{"api-key": "abc"}', '{"api-key": "REDACTED"}'),
        ("VLLM_API_KEY=x y", "VLLM_API_KEY=REDACTED y"),
        ("--api-key=abc --port=8000", "--api-key=REDACTED --port=8000"),
        ("serve --api-key one two --port 8000", "serve --api-key REDACTED --port 8000"),
        ("sk-abcdefghijklmnop", "REDACTED"),
        (
            "max_tokens: 5, tokenizer: /models/a, kv_cache_tokens=14983",
            "max_tokens: 5, tokenizer: /models/a, kv_cache_tokens=14983",
        ),
        ("monkey: banana, keyboard=us", "monkey: banana, keyboard=us"),
    ],
)
def test_patterns(text: str, expected: str) -> None:
    assert support.redact(text) == expected


def test_short_and_plain_values_do_not_take_evidence_with_them() -> None:
    assert support.find_secrets(["TOKEN=1234567 PASSWORD=no SECRET=true API_KEY=abcdef1"]) == {"abcdef1"}
