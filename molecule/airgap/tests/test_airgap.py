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
CONTAINER = "vllm-e2b-all"
SERVED_NAMES = ["architect", "worker", "auditor", "sentry"]
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


def read_medium() -> dict[str, Any]:
    """The values of air-gap.yml, below its comments."""
    text = (MEDIUM / "air-gap.yml").read_text()
    assert "{{" not in text
    variables: dict[str, Any] = json.loads(text[text.index("\n{") :])["variables"]
    return variables


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
    names = {path.name for path in (MEDIUM / "apt" / repository).rglob(f"{package}_*.deb")}
    assert names == {f"{package}_{version.split(':')[-1]}_{architecture(host, package)}.deb"}


def architecture(host: Host, package: str) -> str:
    return str(host.check_output(f"dpkg-query --show --showformat='${{Architecture}}' {package}"))


def test_vendors_signatures_were_kept(host: Host) -> None:
    """The index on the medium is the vendor's own, signed with the key that the host has."""
    for name in ("vllm-edge-nvidia-driver", "vllm-edge-nvidia-container-toolkit"):
        signed = (MEDIUM / "apt" / name / "InRelease").read_text()
        assert "-----BEGIN PGP SIGNATURE-----" in signed
        assert host.file(f"/etc/apt/keyrings/{name}.asc").exists
        assert not host.file(f"/etc/apt/sources.list.d/{name}.sources").contains("rusted: yes")


def test_medium_pins_what_it_holds(host: Host) -> None:
    pins = read_medium()
    record = read_json(host, f"{STATE}/weights/e2b.json")
    assert pins["models"]["e2b"]["revision"] == record["revision"]
    keys = read_json(host, f"{STATE}/keys.json")
    for prefix, name in (
        ("nvidia_driver", "vllm-edge-nvidia-driver"),
        ("container_runtime", "vllm-edge-nvidia-container-toolkit"),
    ):
        assert [pins[f"{prefix}_repository_key_fingerprint"]] == keys[name]["fingerprints"]


def test_base_image_came_from_the_archive(host: Host) -> None:
    record = read_json(host, f"{STATE}/image.json")
    (archive,) = (MEDIUM / "image").glob("*.tar")
    with tarfile.open(archive) as content:
        member = content.extractfile("manifest.json")
        assert member is not None
        (manifest,) = json.load(member)
    digest = Path(manifest["Config"]).stem
    found = json.loads(host.check_output(f"docker image inspect {record['base']}"))[0]
    assert found["Id"] == record["base_id"] == f"sha256:{digest}"
    assert found["RepoDigests"] == [], "no registry gave it"
    assert not manifest["RepoTags"], "it was saved by its id, so Docker could take no name from it"
    assert read_medium()["vllm_image_base_id"] == found["Id"], "the medium pins it"
    running = json.loads(host.check_output(f"docker inspect {CONTAINER}"))[0]
    layers = json.loads(host.check_output(f"docker image inspect {running['Image']}"))[0]["RootFS"]["Layers"]
    assert layers[: len(found["RootFS"]["Layers"])] == found["RootFS"]["Layers"]


def test_wheels_are_the_staged_ones(host: Host) -> None:
    staged = {path.name for path in (MEDIUM / "wheels" / "host").glob("*.whl")}
    assert set(host.check_output("ls /opt/vllm-edge/current/wheels").split()) == staged
    (wheel,) = (MEDIUM / "wheels" / "image").glob("*/transformers-*.whl")
    assert read_json(host, f"{STATE}/image.json")["tested"]["versions"]["transformers"] == wheel.name.split("-")[1]


def test_weights_are_the_staged_ones(host: Host) -> None:
    record = read_json(host, f"{STATE}/weights/e2b.json")
    noted = MEDIUM / "weights" / WEIGHTS / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    assert (record["source"], record["revision"]) == ("directory", noted.read_text().splitlines()[0])
    sums = dict(reversed(line.split("  ./", 1)) for line in (MEDIUM / "SHA256SUMS").read_text().splitlines())
    for name, file in record["files"].items():
        assert file["sha256"] == sums[f"weights/{WEIGHTS}/{name}"]
        assert file["sha256"] == host.file(f"/data/vllm/weights/{WEIGHTS}/{name}").sha256sum


def test_engine_serves(host: Host) -> None:
    assert host.service(CONTAINER).is_running
    url = f"unix:/run/vllm-edge/engines/{CONTAINER.removeprefix('vllm-')}/api.sock"

    def ask(path: str, question: str = "") -> Any:
        status, answer = json.loads(python(host, ASK, f"{url}{path}", question, "60"))
        assert status == 200, answer
        return json.loads(answer)

    models = ask("/v1/models")
    assert [model["id"] for model in models["data"]] == SERVED_NAMES
    for name in SERVED_NAMES:
        question = {"model": name, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8}
        answer = ask("/v1/chat/completions", json.dumps(question))
        assert answer["usage"]["completion_tokens"] > 0


def test_the_probe_can_reach_what_is_there(probe: Callable[[str, int], str]) -> None:
    """Last, because it ends the air gap: without the cut the same probe does reach the vendors."""
    lab("reconnect")
    try:
        assert [probe(address, port) for address, port in vendors()] == ["reached"] * 3
    finally:
        lab("cut")
