# SPDX-License-Identifier: Apache-2.0
"""What staging writes is what site.yml reads: the variables of the medium, whole and pinned, or a refusal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, get_words, run_playbook

COMMIT = "b" * 40
THOROUGH = pytest.mark.thorough
STAGE: dict[str, Any] = {
    "staging_distribution": "Debian-13",
    "staging_image_base": "registry.lab:5000/vllm/vllm-openai:v0.32.0",
    "staging_image_base_id": f"sha256:{'a' * 64}",
    "staging_models": [{"name": "e2b", "repo": "o/n", "dir": "N"}],
    "staging_repositories": [
        {
            "name": "vllm-edge-nvidia-driver",
            "url": "http://vendors.lab/x/",
            "suites": ["/"],
            "fingerprint_variable": "x",
            "prefix": "nvidia_driver",
            "packages": ["nvidia-*"],
        }
    ],
    "staging_result": {
        "python": "3.13",
        "distribution": ["distribution trixie main"],
        "fingerprints": {"vllm-edge-nvidia-driver": "A" * 40},
    },
}
READ = {
    "vllm_models": {"e2b": {"repo": "o/n", "revision": "main", "dir": "N"}},
    "model_weights_models": [{"name": "e2b", "dir": "N"}],
    "nvidia_driver_repository_url": "http://elsewhere/",
    "ansible_become": False,
}
FILES = {
    "apt/distribution/InRelease": "signed",
    "keys/vllm-edge-nvidia-driver.asc": "key",
    "image/base-aaaaaaaaaaaa.tar": "image",
    "wheels/host/a.whl": "wheel",
    "wheels/image/0.32/transformers-5.whl": "wheel of the layer",
    "weights/N/model.safetensors": "weights",
    "weights/N/.cache/huggingface/download/model.safetensors.metadata": f"{COMMIT}\nhash\n",
}


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A medium as the end of staging leaves it."""
    root = tmp_path_factory.mktemp("medium")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    given = {**STAGE, "staging_directory": str(root), "staging_image_wheels": f"{root}/wheels/image/0.32"}
    finish = {"ansible.builtin.include_role": {"name": "staging", "tasks_from": "finish"}}
    playbook = root.with_name("stage.yml")
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": given, "tasks": [finish]}]))
    done = run_playbook("-i", "here,", "-c", "local", "-e", PYTHON, playbook, check=True)
    assert get_hash(root) in done.stdout, "the hash to carry is not printed"
    return root


PYTHON = '{"ansible_python_interpreter": "{{ ansible_playbook_python }}"}'


def get_hash(medium: Path) -> str:
    return hashlib.sha256((medium / "air-gap.yml").read_bytes()).hexdigest()


def read(tmp_path: Path, medium: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Run the tasks of every stage playbook; what the variables were afterwards."""
    names = ["vllm_models", "vllm_image_base_id", "vllm_image_wheel_hashes", "vllm_image_wheels_directory"]
    names += ["nvidia_driver_repository_url", "vllm_image_base_archive", "vllm_edge_host_distribution_repositories"]
    values = "{{ dict(names | zip(names | map('extract', vars))) | to_json }}"
    tasks = [
        {"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/air_gap.yml")},
        {"ansible.builtin.copy": {"content": values, "dest": str(tmp_path / "values")}, "vars": {"names": names}},
    ]
    playbook = tmp_path / "read.yml"
    variables = {**READ, "air_gap_host_directory": str(medium)}
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]))
    done = run_playbook("-i", "here,", "-c", "local", "-e", PYTHON, *options, playbook)
    found = tmp_path / "values"
    return done.returncode, get_words(done), json.loads(found.read_text()) if found.exists() else {}


def test_hosts_get_what_was_staged(tmp_path: Path, medium: Path) -> None:
    assert "{{" not in (medium / "air-gap.yml").read_text()
    returned, said, values = read(
        tmp_path, medium, "-e", f"air_gap={medium}/air-gap.yml", "-e", f"air_gap_sha256={get_hash(medium)}"
    )
    assert returned == 0, said
    assert values["vllm_models"]["e2b"]["revision"] == COMMIT
    assert values["vllm_image_base_id"] == STAGE["staging_image_base_id"]
    wheel = FILES["wheels/image/0.32/transformers-5.whl"].encode()
    assert values["vllm_image_wheel_hashes"] == {"transformers-5.whl": hashlib.sha256(wheel).hexdigest()}
    assert values["vllm_image_wheels_directory"] == f"{medium}/wheels/image/0.32"
    assert values["nvidia_driver_repository_url"] == f"file://{medium}/apt/vllm-edge-nvidia-driver/"


@pytest.mark.parametrize(
    "name",
    [
        "weights/N/model.safetensors",
        *(pytest.param(name, marks=THOROUGH) for name in ("wheels/host/a.whl", "air-gap.yml")),
    ],
)
def test_one_changed_bit_ends_the_run_with_its_name(tmp_path: Path, medium: Path, name: str) -> None:
    expected, before = get_hash(medium), (medium / name).read_bytes()
    (medium / name).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
    try:
        returned, said, values = read(
            tmp_path, medium, "-e", f"air_gap={medium}/air-gap.yml", "-e", f"air_gap_sha256={expected}"
        )
    finally:
        (medium / name).write_bytes(before)
    assert returned != 0 and values == {}
    assert name in said and "changed" in said


def test_file_given_as_variables_is_refused(tmp_path: Path, medium: Path) -> None:
    returned, said, values = read(tmp_path, medium, "-e", f"@{medium}/air-gap.yml")
    assert returned != 0 and values == {}
    assert "-e air_gap=FILE -e air_gap_sha256=HASH" in said


DOCKER = """#!/bin/sh
echo "$@" >>"$0.log"
case "$*" in
*inspect*) echo sha256:container ;;
*"fetch.sh keys"*) cp "$0.key" "$0.stage/keys/vllm-edge-nvidia-driver.asc" ;;
*"fetch.sh packages"*)
    mkdir -p "$0.stage/apt/.work"
    echo 3.13 >"$0.stage/apt/.work/python"
    echo distribution trixie main >"$0.stage/apt/.work/distribution"
    ;;
esac
"""


@pytest.mark.parametrize("fingerprint", ["2EE0110E2F575441C0A3CF3DA7FF9C965562865B", "A" * 40])
def test_keys_are_compared_before_apt_gets_them(tmp_path: Path, fingerprint: str) -> None:
    docker, stage = tmp_path / "docker", tmp_path / "docker.stage"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    (tmp_path / "docker.key").write_bytes((ROOT / "tests/unit/roles/keys/ed25519.asc").read_bytes())
    repository = STAGE["staging_repositories"][0] | {"fingerprint": fingerprint, "key_url": "http://vendors.lab/key"}
    given = {
        "staging_directory": str(stage),
        "staging_distribution": "Debian-13",
        "staging_docker": str(docker),
        "staging_repositories": [repository | {"components": [], "key_file": ""}],
    }
    tasks = [
        {"ansible.builtin.include_role": {"name": "staging", "tasks_from": name, "rolespec_validate": False}}
        for name in ("validate", "container", "apt")
    ]
    playbook = tmp_path / "stage.yml"
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": given, "tasks": tasks}]))
    done = run_playbook("-i", "here,", "-c", "local", "-e", PYTHON, playbook)
    calls = (tmp_path / "docker.log").read_text()
    assert "fetch.sh keys" in calls and f"source={stage}/keys " in calls
    if fingerprint.startswith("A"):
        assert done.returncode != 0 and "is not the expected one" in get_words(done)
        assert "fetch.sh packages" not in calls
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"target=/stage/apt,source={stage}/apt sha256:container /fetch.sh packages" in calls
        assert f"source={stage} " not in calls, "the container sees the whole directory"
        assert (stage / ".work/in/vllm-edge-nvidia-driver.key").exists()
