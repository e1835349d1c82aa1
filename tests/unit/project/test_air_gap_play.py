# SPDX-License-Identifier: Apache-2.0
"""What staging writes is what site.yml reads: the variables of the medium, whole and pinned, or a refusal."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, find_failures, run_playbook, start_warm_python, write_program

pytestmark = pytest.mark.slow

COMMIT = "b" * 40
STAGE: dict[str, Any] = {
    "staging_distribution": "Debian-13",
    "staging_image_base": "registry.lab:5000/vllm/vllm-openai:v0.32.0",
    "staging_image_base_id": f"sha256:{'a' * 64}",
    "staging_models": [{"name": "e2b", "repo": "o/n", "dir": "N"}],
    "staging_repositories": [
        {
            **{"name": "vllm-edge-nvidia-driver", "url": "http://vendors.lab/x/", "suites": ["/"]},
            **{"fingerprint_variable": "x", "prefix": "nvidia_driver", "packages": ["nvidia-*"]},
        }
    ],
    "staging_result": {
        **{"python": "3.13", "distribution": ["distribution trixie main"]},
        "fingerprints": {"vllm-edge-nvidia-driver": "A" * 40},
    },
}
READ = {
    "serving_expanded": {"models": {"e2b": {"repo": "o/n", "revision": "main", "dir": "N"}}},
    "model_weights_models": [{"name": "e2b", "dir": "N"}],
    "nvidia_driver_repository_url": "http://elsewhere/",
    "air_gap_url": "",
}
HERE = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": start_warm_python()}
FILES = {
    "apt/distribution/InRelease": "signed",
    "keys/vllm-edge-nvidia-driver.asc": "key",
    "image/base-aaaaaaaaaaaa.tar": "image",
    "wheels/host/a.whl": "wheel",
    "wheels/image/0.32/transformers-5.whl": "wheel of the layer",
    "weights/N/model.safetensors": "weights",
    "weights/N/.cache/huggingface/download/model.safetensors.metadata": f"{COMMIT}\nhash\n",
}


DOCKER = """
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
FINGERPRINTS = {"known": "2EE0110E2F575441C0A3CF3DA7FF9C965562865B", "other": "A" * 40}
"""Two hosts with that of the key which comes, and with another one."""


def play(
    place: Path, hosts: dict[str, dict[str, Any]], tasks: list[dict[str, Any]]
) -> subprocess.CompletedProcess[str]:
    """Run tasks for hosts that are this machine."""
    listed = {name: HERE | variables for name, variables in hosts.items()}
    (place / "hosts.yml").write_text(json.dumps({"all": {"hosts": listed}}))
    (place / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    return run_playbook("-i", place / "hosts.yml", place / "play.yml")


def get_hash(medium: Path) -> str:
    return hashlib.sha256((medium / "air-gap.yml").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A directory with `medium` as the end of staging leaves it, and what the packages' stage did with both keys."""
    place = tmp_path_factory.mktemp("staged")
    medium = place / "medium"
    for name, text in FILES.items():
        (medium / name).parent.mkdir(parents=True, exist_ok=True)
        (medium / name).write_text(text)
    wheels = f"{medium}/wheels/image/0.32"
    hosts = {"here": {**STAGE, "staging_directory": str(medium), "staging_image_wheels": wheels, "parts": ["finish"]}}
    for name, fingerprint in FINGERPRINTS.items():
        docker = place / name
        write_program(docker, DOCKER)
        shutil.copy(ROOT / "tests/unit/roles/keys/ed25519.asc", place / f"{name}.key")
        wanted = {"fingerprint": fingerprint, "key_url": "http://vendors.lab/key", "components": [], "key_file": ""}
        hosts[name] = {
            "staging_directory": f"{docker}.stage",
            "staging_distribution": "Debian-13",
            "staging_docker": str(docker),
            "staging_repositories": [STAGE["staging_repositories"][0] | wanted],
            "parts": ["validate", "container", "apt"],
        }
    stage = []
    for part in ("validate", "container", "apt", "finish"):
        role = {"name": "staging", "tasks_from": part, "rolespec_validate": False}
        stage.append({"ansible.builtin.include_role": role, "when": f"'{part}' in parts"})
    return place, play(place, hosts, stage)


def test_staging_prints_the_hash_to_carry(staged: Any) -> None:
    place, done = staged
    assert "here" not in find_failures(done) and get_hash(place / "medium") in done.stdout, done.stdout
    assert "{{" not in (place / "medium" / "air-gap.yml").read_text()


def test_keys_are_compared_before_apt_gets_them(staged: Any) -> None:
    place, done = staged
    calls = {name: (place / f"{name}.log").read_text() for name in FINGERPRINTS}
    for name, called in calls.items():
        stage = f"{place / name}.stage"
        assert "fetch.sh keys" in called and f"source={stage}/keys " in called
        assert f"source={stage} " not in called, "the container sees the whole directory"
    failures = find_failures(done)
    assert failures.keys() == {"other"} and "is not the expected one" in failures["other"], done.stdout
    assert "fetch.sh packages" not in calls["other"]
    stage = place / "known.stage"
    assert f"target=/stage/apt,source={stage}/apt sha256:container /fetch.sh packages" in calls["known"]
    assert (stage / ".work/in/vllm-edge-nvidia-driver.asc").exists()


def test_hosts_get_what_was_staged_or_nothing(staged: Any, tmp_path: Path) -> None:
    """One changed bit ends the run of a host with the file's name; air-gap.yml given as variables is refused."""
    medium = staged[0] / "medium"
    changed = {"weights": "weights/N/model.safetensors", "wheel": "wheels/host/a.whl", "variables": "air-gap.yml"}
    hosts: dict[str, dict[str, Any]] = {}
    for host in ("good", *changed):
        copy = shutil.copytree(medium, tmp_path / f"of_{host}")
        if host in changed:
            before = (copy / changed[host]).read_bytes()
            (copy / changed[host]).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        given = {"air_gap": f"{copy}/air-gap.yml", "air_gap_sha256": get_hash(medium)}
        hosts[host] = {**READ, **given, "air_gap_host_directory": str(copy)}
    # Also a file with the right hash is data.
    (template := tmp_path / "template.yml").write_text(
        (medium / "air-gap.yml").read_text().replace(STAGE["staging_image_base_id"], "{{ 'evalu' ~ 'ated' }}")
    )
    given = {"air_gap": str(template), "air_gap_sha256": hashlib.sha256(template.read_bytes()).hexdigest()}
    hosts["template"] = {**READ, **given, "air_gap_host_directory": str(medium)}
    hosts["as_variables"] = {**READ, **yaml.safe_load((medium / "air-gap.yml").read_text())}
    names = ["__air_gap", "vllm_image_base_id", "vllm_image_wheel_hashes", "vllm_image_wheels_directory"]
    names += ["nvidia_driver_repository_url"]
    values = "{{ dict(names | zip(names | map('extract', vars))) | to_json }}"
    read = [
        {"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/air_gap.yml")},
        {
            "ansible.builtin.copy": {"content": values, "dest": f"{tmp_path}/values.{{{{ inventory_hostname }}}}"},
            "vars": {"names": names},
        },
    ]
    done = play(tmp_path, hosts, read)
    failures = find_failures(done)
    assert {path.name for path in tmp_path.glob("values.*")} == {"values.good", "values.template"}, done.stdout
    assert json.loads((tmp_path / "values.template").read_text())["vllm_image_base_id"] == "{{ 'evalu' ~ 'ated' }}"
    for host, name in changed.items():
        assert name in failures[host] and "changed" in failures[host]
    assert "-e air_gap=FILE -e air_gap_sha256=HASH" in failures["as_variables"]
    wheel = FILES["wheels/image/0.32/transformers-5.whl"].encode()
    good = json.loads((tmp_path / "values.good").read_text())
    assert good.pop("__air_gap")["revisions"] == {"e2b": COMMIT}
    assert good == {
        "vllm_image_base_id": STAGE["staging_image_base_id"],
        "vllm_image_wheel_hashes": {"transformers-5.whl": hashlib.sha256(wheel).hexdigest()},
        "vllm_image_wheels_directory": f"{tmp_path}/of_good/wheels/image/0.32",
        "nvidia_driver_repository_url": f"file://{tmp_path}/of_good/apt/vllm-edge-nvidia-driver/",
    }
