# SPDX-License-Identifier: Apache-2.0
"""A host that was set up without a network: it is cut off indeed, everything came from the medium, and it serves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("VLLM_EDGE_LAB_CACHE") or Path.home() / ".cache" / "vllm-edge-lab")
MEDIUM = CACHE / "airgap" / "medium"
STATE = "/var/lib/vllm-edge"
WEIGHTS = "gemma-4-E2B-it"
CONTAINER = "vllm-chat"
MIRROR = "deb.debian.org"

# Says `reached` or why not: what an installer would open a connection to.
PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
    print("reached")
except OSError as error:
    print(error)
"""
ASK = (ROOT / "tests" / "tools" / "ask.py").read_text()


def lab(*words: str) -> str:
    environment = os.environ | {"VLLM_EDGE_LAB_NAME": "vllm-edge-airgap", "VLLM_EDGE_LAB_SSH_PORT": "22024"}
    command = [sys.executable, "-m", "lab", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def python(host: Host, program: str, *arguments: str) -> str:
    return str(host.check_output(shlex.join(["python3", "-c", program, *arguments])))


def read_json(host: Host, path: str) -> Any:
    return json.loads(host.file(path).content_string)


def vendors() -> list[tuple[str, int]]:
    """What a connected host downloads from: by address, so that a name that is not known proves nothing."""
    seen = json.loads((ROOT / "lab" / "generated" / "vllm-edge-airgap" / "vars.json").read_text())
    address = re.sub(r"^http://(.*):8081$", r"\1", seen["lab_hub"])
    return [(address, 80), (address, 8081), (address, 5000)]


@pytest.fixture(params=["host", "controller"])
def probe(request: pytest.FixtureRequest, host: Host) -> Callable[[str, int], str]:
    """Connects to an address: from the host, or from the controller as site.yml ran there."""
    if request.param == "host":
        return lambda address, port: python(host, PROBE, address, str(port))
    return lambda address, port: lab("offline", sys.executable, "-c", PROBE, address, str(port))


def test_nothing_can_be_reached(probe: Callable[[str, int], str]) -> None:
    for address, port in [*vendors(), ("vendors.lab", 80), ("hub.lab", 8081), (MIRROR, 80), ("pypi.org", 443)]:
        assert probe(address, port) != "reached", (address, port)


def test_apt_has_local_sources_only(host: Host) -> None:
    """apt's own word for what it would read, and a look at it: nothing asks for a network."""
    command = "apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' 'Created-By: Packages'"
    # Repositories without suites have no components either, and apt leaves the word as it is.
    assert sorted(line.removesuffix(" $(COMPONENT)") for line in host.check_output(command).splitlines()) == [
        "file:/media/vllm-edge/apt/distribution/ contrib",
        "file:/media/vllm-edge/apt/distribution/ main",
        "file:/media/vllm-edge/apt/vllm-edge-nvidia-container-toolkit/",
        "file:/media/vllm-edge/apt/vllm-edge-nvidia-driver/",
    ]
    assert host.file("/etc/apt/sources.list.disabled").contains("http"), "what was there before is not lost"
    assert not host.file("/etc/apt/sources.list").exists


@pytest.mark.parametrize(
    ("package", "repository"),
    [
        ("docker.io", "distribution"),
        ("python3-venv", "distribution"),
        ("nvidia-driver-cuda", "vllm-edge-nvidia-driver"),
        ("nvidia-container-toolkit", "vllm-edge-nvidia-container-toolkit"),
    ],
)
def test_installed_package_is_the_staged_one(host: Host, package: str, repository: str) -> None:
    version = host.package(package).version
    policy = host.check_output(f"LC_ALL=C apt-cache policy {package}")
    installed = policy[policy.index("*** ") :]
    assert version in installed.splitlines()[0]
    assert f"file:/media/vllm-edge/apt/{repository}" in installed.splitlines()[1]
    (file,) = (MEDIUM / "apt" / repository).rglob(f"{package}_*.deb")
    assert file.name.startswith(f"{package}_{version.split(':')[-1]}_")


def test_base_image_came_from_the_archive(host: Host) -> None:
    record = read_json(host, f"{STATE}/image.json")
    (archive,) = (MEDIUM / "image").glob("*.tar")
    with tarfile.open(archive) as content:
        member = content.extractfile("manifest.json")
        assert member is not None
        (manifest,) = json.load(member)
    assert not manifest["RepoTags"], "it was saved by its id, so Docker could take no name from it"
    (found,) = json.loads(host.check_output(f"docker image inspect {record['base']}"))
    assert found["RepoDigests"] == [], "no registry gave it"
    text = (MEDIUM / "air-gap.yml").read_text()
    pinned = json.loads(text[text.index("\n{") :])["variables"]["vllm_image_base_id"]
    assert found["Id"] == record["base_id"] == pinned == f"sha256:{Path(manifest['Config']).stem}"


def test_wheels_are_the_staged_ones(host: Host) -> None:
    staged = {path.name for path in (MEDIUM / "wheels" / "host").glob("*.whl")}
    assert set(host.check_output("ls /opt/vllm-edge/current/wheels").split()) == staged
    (wheel,) = (MEDIUM / "wheels" / "image").glob("*/transformers-*.whl")
    assert read_json(host, f"{STATE}/image.json")["transformers"] == wheel.name.split("-")[1]


def test_weights_are_the_staged_ones(host: Host) -> None:
    record = read_json(host, f"{STATE}/weights/chat.json")
    noted = MEDIUM / "weights" / WEIGHTS / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    assert (record["source"], record["revision"]) == ("directory", noted.read_text().splitlines()[0])


def test_engine_serves(host: Host) -> None:
    assert host.service(CONTAINER).is_running
    url = f"unix:/run/vllm-edge/engines/{CONTAINER.removeprefix('vllm-')}/api.sock/v1/chat/completions"
    question = {"model": "chat", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}
    status, answer = json.loads(python(host, ASK, url, json.dumps(question), "60"))
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] > 0, answer


def test_the_probe_can_reach_what_is_there(probe: Callable[[str, int], str]) -> None:
    """Last, because it ends the air gap: without the cut the same probe does reach the vendors."""
    lab("reconnect")
    try:
        assert [probe(address, port) for address, port in vendors()] == ["reached"] * 3
    finally:
        lab("cut")
