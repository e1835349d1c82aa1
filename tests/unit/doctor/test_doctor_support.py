# SPDX-License-Identifier: Apache-2.0
"""The module and the command; and the support report: evidence is in it, seeded secrets are nowhere in it."""

from __future__ import annotations

import json
import re
import stat
import tarfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge import redaction
from ansible.module_utils.vllm_edge.doctor import command, publish, render, support
from ansible.module_utils.vllm_edge.doctor.command import run_doctor
from ansible.module_utils.vllm_edge.doctor.registry import CHECKS, DEEP, FLEET
from ansible.module_utils.vllm_edge.engine.state import EngineState, write_state
from ansible.module_utils.vllm_edge.planning.drift import TOLERANCES
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, GPUS, NEW_GPU, FakeHost, card

API_KEY = "q7Zs-api-key-value-91"
SECOND_KEY = "w2second93key"
HF_TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
PASSWORD = "pa55word-of-the-proxy"
ADMIN = "Adm1nSecretValue"
BEARER = "eyJhbGciOi.J9-bearer_value"
FILE_KEY = "only-in-a-key-file-4711"
PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEF"
QUOTED = "two words quoted-secret"
ENGINE_SECRET = "a secret = of: an engine"
SEEDED = (ENGINE_SECRET, API_KEY, SECOND_KEY, HF_TOKEN, PASSWORD, ADMIN, BEARER, FILE_KEY, PEM, QUOTED, "quoted-secret")


@pytest.fixture
def seeded(host: FakeHost) -> FakeHost:
    """A host whose configuration, journal and programs all tell secrets."""
    create = host.root / "etc/vllm-edge/engines/e2b/docker-create"
    lines = create.read_text()
    lines = lines.replace("vllm-edge:1\n", f"--env=HF_TOKEN={HF_TOKEN}\n--env=ADMIN_PASSWORD={ADMIN}\nvllm-edge:1\n")
    lines += f"--api-key\n{API_KEY}\n{SECOND_KEY}\n# your word: evidence\n--max-num-batched-tokens=2048\n"
    create.write_text(lines)
    words = [line for line in lines.splitlines() if not line.startswith("#")]
    create.with_name("container.json").write_text(json.dumps({"arguments": words}, indent=2))
    proxy = f"http://operator:{PASSWORD}@proxy.example.org:3128"
    host.write("etc/docker/daemon.json", json.dumps({"proxies": {"http-proxy": proxy}, "features": {"cdi": True}}))
    host.write("etc/vllm-edge/secrets/e2b.env", f"STORE={ENGINE_SECRET}\n").chmod(0o600)
    (host.root / "etc/vllm-edge/secrets").chmod(0o700)
    host.write("etc/vllm-edge/gateway.key", f"{FILE_KEY}\n")
    host.write("etc/vllm-edge/tls.conf", f"-----BEGIN PRIVATE KEY-----\n{PEM}\n-----END PRIVATE KEY-----\n")
    host.write("etc/vllm-edge/hooks/after_commit.d/tell", f'#!/bin/sh\nclient_secret="{QUOTED}"\ncurl {proxy}\n')
    host.answers["journalctl --no-pager"] = Ran(
        0,
        f"vllm[1]: Authorization: Bearer {BEARER}\n"
        f"vllm[1]: non-default args: {{'api_key': ['{API_KEY}'], 'max_model_len': 4096}}\n"
        f"vllm[1]: argv: serve --api-key {API_KEY} {SECOND_KEY} --port 8000 max_tokens=16 total_tokens: 17\n"
        f"vllm[1]: a value alone: {ADMIN}, {ENGINE_SECRET}; the file's: {FILE_KEY}; token {HF_TOKEN}\n",
    )
    host.answers["docker version"] = Ran(0, f"HTTP_PROXY={proxy}\nServer: Docker Engine 26.1.5\n")
    return host


def test_seeded_secrets_are_nowhere(seeded: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("one that others may read")
    path.chmod(0o644)
    reader = seeded.reader
    assert run_doctor(reader.paths, output="text", support_report=str(path), reader=reader) == 0
    with tarfile.open(path) as archive:
        texts = {item.name: content.read().decode() for item in archive if (content := archive.extractfile(item))}
    assert "vllm-edge-support/doctor.json" in texts
    everything = "\n".join([*texts, *texts.values(), capsys.readouterr().out])
    assert [secret for secret in SEEDED if secret in everything] == []
    assert everything.count(redaction.GONE) >= len(SEEDED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_evidence_stays(seeded: FakeHost) -> None:
    texts = support.collect(seeded.reader, seeded.examine())
    create = texts[next(name for name in texts if name.endswith("docker-create"))]
    assert "--max-num-batched-tokens=2048" in create and "--device=nvidia.com/gpu=GPU-1f3c0a51" in create
    assert "--env=HF_TOKEN=REDACTED" in create and "--api-key\nREDACTED\n# your word: evidence\n--max-num" in create
    container = texts[next(name for name in texts if name.endswith("container.json"))]
    assert '"--max-num-batched-tokens=2048"' in container and '"--env=HF_TOKEN=REDACTED"' in container
    log = texts["journal/vllm-e2b.service.log"]
    assert "--port 8000 max_tokens=16 total_tokens: 17" in log and "'max_model_len': 4096" in log
    daemon = texts[next(name for name in texts if name.endswith("daemon.json"))]
    assert json.loads(daemon)["proxies"] == {"http-proxy": "http://REDACTED@proxy.example.org:3128"}
    assert "holds a secret" in texts[next(name for name in texts if name.endswith("gateway.key"))]
    assert "Docker Engine 26.1.5" in texts["commands/docker.txt"]
    assert json.loads(texts["doctor.json"])["exit_status"] == 0
    assert "driver.versions" in texts["doctor.txt"]
    assert {"units.txt", "commands/packages.txt", "journal/docker.service.log"} <= set(texts)


def test_records_of_the_host_are_in_the_report_and_what_is_too_long_or_unreadable_is_named(host: FakeHost) -> None:
    host.write("etc/vllm-edge/long", "x" * (support.LONGEST + 1))
    host.link("etc/vllm-edge/circle", "circle")
    host.write("var/lib/vllm-edge/observations.json", '{"e2b": {"weights_mib": 9800}}')
    host.write("var/lib/vllm-edge/engines/e2b.json", '{"phase": "serving"}')
    texts = support.collect(host.reader, host.examine())
    assert "left out" in texts[next(name for name in texts if name.endswith("/long"))]
    found = {name.rpartition("var/lib/vllm-edge/")[2]: text for name, text in texts.items()}
    assert found["observations.json"] == '{"e2b": {"weights_mib": 9800}}'
    assert found["engines/e2b.json"] == '{"phase": "serving"}' and "580" in found["image.json"]


PUBLIC = "NVIDIA L4|google/gemma-4-E2B-it|[0-9.]+|measured by vllm-edge [0-9.]+ doctor --publish|source|engines|image"
BOARD: dict[str, Any] = {"uuid": GPUS[0], "name": "NVIDIA L4", "total_mib": 23034, "engine_mib": 20604, "unit": API_KEY}
SPEED: dict[str, Any] = {
    "kind": "measurement",
    "at": "t",
    "engine": "e2b",
    "served_name": PASSWORD,
    "through": "engine",
}
SPEED |= {"case": "protocol", "input_tokens": 256, "output_tokens": 128, "concurrency": 1, "requests": 3}
SPEED |= {"completed": 3, "failed": 0, "seconds": 9.0}


@pytest.fixture
def measured(seeded: FakeHost, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The engine of that host with a plan, what it logged, and a benchmark; names and secrets are in all of them."""
    paths = seeded.reader.paths
    file = paths.engine_dir("e2b") / "engine.json"
    gpu = {"weights_mib": 10060, "graphs_mib": 43, "kv_cache_mib": 9074, "total_mib": 20550}
    plan: dict[str, Any] = {"vllm_version": "0.32.0", "gpus": [gpu], "kv_cache_tokens": 309728, "kv_blocks": 6000}
    plan |= {"tolerances": dict(TOLERANCES), "on_drift": "warn", "reason": ADMIN}
    config = json.loads(file.read_text()) | {"plan": plan, "served_names": [QUOTED]}
    file.write_text(json.dumps(config))
    create = json.loads(file.with_name("container.json").read_text())["arguments"]
    words = [word for word in create if word not in (SECOND_KEY, "--api-key", API_KEY)]
    words += [f"--served-model-name={PASSWORD}", "--max-model-len=4096", '--limit-mm-per-prompt={"image": 0}']
    file.with_name("container.json").write_text(json.dumps({"arguments": words}))
    state = EngineState("e2b", "serving", "t", input_hash="ab12", log_facts={"model_gib": 9.8})
    write_state(paths.engine_state("e2b"), state)
    engine = config | {"slots": [0], "arguments": [API_KEY], "weights_digest": None}
    run = {key: BEARER for key in ("run", "at", "host", "profile", "image", "image_id", "vllm", "driver", "note")}
    rows = [run | {"kind": "run", "generation": 1, "engines": {"e2b": engine}}, SPEED | {"tok_s": 53.5}]
    paths.bench.mkdir(parents=True)
    (paths.bench / "20261125T023000Z-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(command, "ask_gpus", lambda *_: ([BOARD], None))
    return seeded


def test_what_is_published_has_figures_and_no_text_of_the_host(measured: FakeHost, tmp_path: Path) -> None:
    reader, path = measured.reader, tmp_path / "figures.json"
    assert run_doctor(reader.paths, output="text", support_report=str(path), publish=True, reader=reader) == 0
    (engine,) = json.loads(path.read_text())["engines"]
    assert engine["measured"] == {"weights_mib": pytest.approx(10035.2), "total_mib": 20604.0}
    assert engine["planned"] == {"weights_mib": 10060.0, "total_mib": 20550.0}
    assert (engine["tok_s"], engine["driver"]) == (53.5, "580.173.02")
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 2048}
    assert engine["arguments"] == {**limits, "limit_mm_per_prompt": {"image": 0}}
    known = {item.name for item in fields(publish.Measured)} | TOLERANCES.keys() | engine["arguments"].keys()
    words = set(re.findall(r'"([^"]*)"', path.read_text())) - known
    assert [word for word in words if not re.fullmatch(PUBLIC, word)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo": "acme/secret-model"}, "repo: not in the lists"),
        ({"plan": None}, "not planned and measured"),
        ({"args": ["--enable-lora"]}, "counts options that are not in the lists"),
        ({"gpu": "Acme prototype"}, "gpu: not in the lists"),
    ],
)
def test_an_engine_with_anything_else_is_left_out(measured: FakeHost, changes: dict[str, Any], words: str) -> None:
    files = measured.reader.paths.engine_dir("e2b")
    config, container = (json.loads((files / name).read_text()) for name in ("engine.json", "container.json"))
    (files / "engine.json").write_text(json.dumps(config | changes))
    arguments = [*container["arguments"], *changes.get("args", [])]
    (files / "container.json").write_text(json.dumps({"arguments": arguments}))
    board = BOARD | {"name": changes.get("gpu", BOARD["name"])}
    engines, (left,) = publish.build(measured.reader.paths, [board], "")
    assert engines == [] and words in left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://hub.example.org/api?token=abcdefgh&x=1", "https://hub.example.org/api?token=REDACTED"),
        (f"key vllm-{'aB3_-' * 8}xyz was", "key REDACTED was"),
        (f"unit vllm-{'aB3_-' * 9} was", f"unit vllm-{'aB3_-' * 9} was"),
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
    assert redaction.redact(text) == expected


def test_short_and_plain_values_do_not_take_evidence_with_them() -> None:
    assert redaction.find_secrets(["TOKEN=1234567 PASSWORD=no SECRET=true API_KEY=abcdef1"]) == {"abcdef1"}


# ---- what only a host with real GPUs can show ----------------------------------------------------------------------

PARTS = {
    **{part: " ".join(command) for part, command in support.COMMANDS.items()},
    "driver-modules": r"apt-cache search --full --names-only ^linux-modules-nvidia-.*-6\.12\.48\+deb13\-amd64$",
    "image": "docker image inspect vllm-edge:1",
    "boot-times": f"systemctl show --property={support.UNIT_TIMES} -- vllm-e2b.service vllm-edge.target",
    "boot-units": "journalctl --boot --no-pager --output=short-monotonic --identifier=systemd --unit=vllm-e2b.service",
    "boot-nvidia": "journalctl --boot --no-pager --output=short-monotonic --unit=nvidia-persistenced.service",
    "unit-files": "systemctl --no-pager cat vllm-e2b.service",
    "cuda-new-container": f"docker run --rm --pull=never --name={support.PROBE_CONTAINER}",
    "cuda-e2b": "docker exec vllm-e2b python3 -c",
    "start-of-e2b": "docker logs --timestamps vllm-e2b",
}
"""Part of the archive to the command whose output it has."""


def collected(host: FakeHost) -> dict[str, str]:
    return {
        name.removeprefix("commands/").removesuffix(".txt"): text
        for name, text in support.collect(host.reader, host.examine()).items()
    }


def test_each_part_is_there_without_secrets(host: FakeHost) -> None:
    said = Ran(3, f"what it said; HF_TOKEN={HF_TOKEN} at http://ops:{PASSWORD}@proxy\n", "and why")
    for part, asked in PARTS.items():
        before = dict(host.answers)
        host.answers[asked] = said
        text = collected(host)[part]
        assert "what it said; HF_TOKEN=REDACTED at http://REDACTED@proxy" in text and "and why" in text, part
        assert text.startswith(f"$ {asked}") and text.endswith("exit status 3\n") and "import ctypes" not in text
        host.answers = before


def test_a_bare_host_has_every_part_and_iommu_groups_have_their_type_and_devices(tmp_path: Path) -> None:
    found = collected(FakeHost(tmp_path))
    assert {part for part in PARTS if not part.endswith("e2b")} <= found.keys()
    assert found["image"] == "no image is recorded\n"
    assert found["runc"] == "'runc' cannot be run: No such file or directory\n"
    assert found["iommu-groups"].endswith("sys/kernel/iommu_groups: No such file or directory\n")
    host = FakeHost(tmp_path)
    for group, kind, bus in (("2", "identity", BUSES[0]), ("11", "DMA-FQ", BUSES[1])):
        host.write(f"sys/kernel/iommu_groups/{group}/type", f"{kind}\n")
        host.write(f"sys/kernel/iommu_groups/{group}/devices/{bus}")
    assert collected(host)["iommu-groups"] == f"2: identity: {BUSES[0]}\n11: DMA-FQ: {BUSES[1]}\n"
    for group in ("2", "11"):
        host.remove(f"sys/kernel/iommu_groups/{group}")
    assert collected(host)["iommu-groups"] == "no groups: the IOMMU is off\n"


def test_the_start_of_an_engine_is_in_the_order_of_its_times(host: FakeHost) -> None:
    host.answers["docker logs"] = Ran(
        0, "2026-11-23T07:00:01Z out\n2026-11-23T07:00:03Z API_KEY=abcdefgh\n", "2026-11-23T07:00:02Z shard 1/2"
    )
    lines = collected(host)["start-of-e2b"].split("\n")
    assert [line.split("Z ")[-1] for line in lines if "Z " in line] == ["out", "shard 1/2", "API_KEY=REDACTED"]
    host.answers["docker logs"] = Ran(0, "begin " + "x" * support.LONGEST)
    text = collected(host)["start-of-e2b"]
    assert "\nbegin xxx" in text and "6 more characters" in text and len(text) < support.LONGEST + 200


# ---- CUDA is asked where it disturbs nobody ------------------------------------------------------------------------


def probed(host: FakeHost) -> tuple[set[str], str]:
    """GPUs of the new container, and what the report says of it."""
    host.answers["docker run"] = Ran(0, '{"cuInit": 0}\n')
    host.answers["docker rm"] = Ran(0)
    text = collected(host)["cuda-new-container"]
    lines = [line for line in host.asked if line.startswith("docker run")]
    return {word.partition("gpu=")[2] for line in lines for word in line.split() if word.startswith("--device=")}, text


def test_a_new_container_gets_the_gpus_that_nobody_uses(host: FakeHost) -> None:
    host.gpus.append(card(NEW_GPU, "0000:b1:00.0"))
    host.answers["nvidia-smi --query-compute-apps"] = Ran(0, f"{NEW_GPU}\n")
    gpus, text = probed(host)
    assert host.asked and f" {GPUS[1]}" in next(line for line in host.asked if line.startswith("docker run"))
    assert gpus == {GPUS[1]}, "the first is of the engine, the third of a process"
    assert '{"cuInit": 0}' in text and "--cap-drop=ALL" in text and f"--user={host.reader.engine_uid()}:" in text
    assert host.asked[-1].startswith("journalctl")
    assert f"docker rm --force {support.PROBE_CONTAINER}" in host.asked


@pytest.mark.parametrize(
    ("state", "asked"),
    [("activating", GPUS[1:]), ("deactivating", GPUS[1:]), ("reloading", GPUS[1:]), ("inactive", GPUS)],
)
def test_an_engine_that_starts_or_stops_keeps_its_gpu(host: FakeHost, state: str, asked: tuple[str, ...]) -> None:
    host.unit("vllm-e2b.service", ActiveState=state)
    assert probed(host)[0] == set(asked)


NOT_SURE: dict[str, tuple[Callable[[FakeHost], object], str]] = {
    "a damaged engine": (lambda host: host.write("etc/vllm-edge/engines/e2b/engine.json", "{"), "files of an engine"),
    "a lost GPU": (
        lambda host: host.answers.update({"nvidia-smi --query-compute-apps": Ran(9, "GPU is lost\n")}),
        "nvidia-smi: GPU is lost",
    ),
    "no image": (lambda host: host.remove("var/lib/vllm-edge/image.json"), "no image is recorded"),
    "all in use": (lambda host: host.engine(gpus=GPUS), "every GPU that answers is in use"),
}


@pytest.mark.parametrize("name", NOT_SURE)
def test_no_container_is_started_where_it_is_not_certain(host: FakeHost, name: str) -> None:
    change, said = NOT_SURE[name]
    change(host)
    gpus, text = probed(host)
    assert gpus == set() and text.startswith("not asked: ") and said in text


# ---- the module and the command ---------------------------------------------------------------------------------

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("check", [False, True])
def test_the_module_reports_and_does_not_fail(run_module: Run, host: FakeHost, check: bool) -> None:
    host.module("570.211.01")
    args = {"host": "xr7620", "gpu_uuids": [*GPUS, NEW_GPU], "gpus": 2}
    found = run_module("host_doctor", args, check=check, replace={"Reader": lambda: host.reader})
    assert (found["rc"], found["changed"], found["doctor"]["exit_status"]) == (0, False, 2)
    assert [check["check"] for check in found["doctor"]["checks"]] == list(CHECKS)
    assert [problem.split(":")[0] for problem in found["problems"]] == ["driver.versions", "gpus.expected"]
    assert "allow_reboot=true" in found["problems"][0]
    assert found["lines"][-1].startswith("xr7620: ")
    assert found["lines"][-1].endswith("2 fail; failed: driver.versions, gpus.expected")


def test_the_module_writes_a_report_except_in_check_mode(run_module: Run, host: FakeHost, tmp_path: Path) -> None:
    path = tmp_path / "report"
    replace = {"Reader": lambda: host.reader}
    args = {"support_report": str(path)}
    assert run_module("host_doctor", args, check=True, replace=replace)["rc"] == 0 and not path.exists()
    found = run_module("host_doctor", args, replace=replace)
    assert (found["rc"], found["changed"]) == (0, False) and path.stat().st_mode & 0o777 == 0o600
    failed = run_module("host_doctor", {"support_report": str(tmp_path / "absent/report")}, replace=replace)
    assert failed["failed"] and "absent/report cannot be written" in failed["msg"]


def test_lines_for_people(host: FakeHost) -> None:
    host.unit("vllm-edge.target", UnitFileState="disabled")
    lines = render.render(host.examine() | {"host": "xr7620", "as_root": False, "summary": {"ok": 1, "unknown": 2}})
    assert all(len(line) <= render.WIDTH for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("warn    serving.boot"))
    assert lines[at + 1].strip().startswith("do: 'systemctl enable vllm-edge.target'")
    assert lines[-2:] == [
        "xr7620: 1 ok, 2 unknown",
        "Not everything is shown to this user: as root more of what is unknown can be read.",
    ]


def test_a_report_that_cannot_be_written(host: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "nowhere" / "report.tar.gz")
    assert command.run_doctor(host.reader.paths, output="text", support_report=path, reader=host.reader) == 2
    assert f"{path} cannot be written" in capsys.readouterr().err


def test_the_page_has_every_check() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operate.md").read_text()
    assert re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| .+ \|$", page, re.MULTILINE) == [*CHECKS, *FLEET, *DEEP]
