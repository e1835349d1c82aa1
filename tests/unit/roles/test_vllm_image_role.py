# SPDX-License-Identifier: Apache-2.0
"""The role vllm_image as a play against a docker command that keeps its images in a file."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT
from role_cases import Cases, Played, Run, Steps

BASE = "registry.example/vllm/vllm-openai:v0.32.0"
BASE_ID = "sha256:" + "a" * 64
OTHER_ID = "sha256:" + "b" * 64
DIGEST = "sha256:" + "d" * 64
PACKAGES = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.16.0", "tokenizers": "0.23.3", "pip": "26.0"}
FITTING = PACKAGES | {"transformers": "5.18.0"}
"""With them there is no layer, hence a quicker play."""
IMAGE: dict[str, Any] = {"id": BASE_ID, "tags": [BASE], "digests": [DIGEST], "labels": {}, "packages": PACKAGES}
FITTING_IMAGE = IMAGE | {"packages": FITTING}
OTHER_WHEELS = """ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.
    transformers from https://i.example/transformers-5.19.0-py3-none-any.whl:
        Expected sha256 aaaa
             Got        bbbb"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
INDEX = {"vllm_image_pip_source": "index", "vllm_image_wheels_directory": ""}
LOOKS = ("info", "image inspect", "image ls", "container", "manifest", "image tag", "image rm")
"""Commands that only look, or are followed by those that count."""

Step = Generator[Run, Played, Played]


class Host:
    """A directory in place of a host's state, and the command in place of its Docker."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        for path in (self.wheels, root / "docker", root / "state"):
            path.mkdir()
        (self.wheels / "transformers-5.17.0-py3-none-any.whl").write_text("x")
        (self.wheels / "transformers-5.19.0-py3-none-any.whl").touch()
        self.docker()

    def docker(self, *images: Any, **state: Any) -> None:
        """Docker with these images, or the base image alone."""
        state = {"images": images or [IMAGE], "registry": {}, "containers": {}} | state
        (self.root / "docker/state.json").write_text(json.dumps(state))

    def change_docker(self, **changes: Any) -> None:
        (self.root / "docker/state.json").write_text(json.dumps(self.docker_state() | changes))

    def docker_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.root / "docker/state.json").read_text())
        return state

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
        return [item for item in asked if item not in LOOKS]

    def run(self, check: bool = False, **variables: Any) -> Run:
        given = {
            "vllm_image_base": BASE,
            "vllm_image_matrix": [{"vllm": "==0.32.*", "transformers": ">=5.16.1,<5.20.0", "reference": "its wheel"}],
            "vllm_image_pip_source": "directory",
            "vllm_image_wheels_directory": str(self.wheels),
            "vllm_image_free_mib": 0,
            "vllm_image_python": sys.executable,
            "vllm_image_docker": str(Path(__file__).with_name("docker_command.py")),
            "vllm_image_state_directory": str(self.root / "state"),
        }
        return Run(check=check, variables=given | variables, environment={"FAKE_DOCKER": str(self.root / "docker")})

    def converge(self, changed: int | None = None, **variables: Any) -> Step:
        """A run that succeeds, with that many changes if they are given."""
        played = yield self.run(**variables)
        assert not played.failed and changed in (None, len(played.changed)), (played.changed, played.text)
        return played

    def refuse(self, *words: str, **variables: Any) -> Step:
        """A run that fails and says these words."""
        played = yield self.run(**variables)
        assert played.failed and [text for text in words if text not in played.text] == [], played.text
        return played


CASES = Cases("vllm_image", "vllm_image_result", Host)


@CASES.add
def way_of_a_derived_image(host: Host) -> Steps:
    """Foreseen, built, kept, foreseen as nothing, and built again when it is gone."""
    foreseen = yield from host.converge(check=True, changed=1)
    assert "would build vllm-edge/vllm-openai:0.32.0-" in foreseen.text
    assert foreseen.result["id"] == "" and foreseen.result["layer"] is True
    assert list((host.root / "state").iterdir()) == []
    host.commands()

    built = yield from host.converge()
    assert host.commands() == ["run", "run", "run", "run"]
    bom = json.loads((host.root / "state/sbom" / f"{built.result['id'][7:19]}.cdx.json").read_text())
    found = {item["name"]: item for item in bom["components"]}
    assert found["transformers"]["properties"][0]["value"] == "layer" and found["torch"]["version"] == "2.13.0"
    assert found["transformers"]["hashes"][0]["content"] == hashlib.sha256(b"").hexdigest()
    assert bom["specVersion"] == "1.6" and bom["metadata"]["component"]["bom-ref"] == built.result["id"]
    assert found["torch"]["properties"][0]["value"] == "base" and DIGEST in json.dumps(found[BASE.rpartition(":")[0]])
    assert found["libc6"]["purl"] == "pkg:deb/debian/libc6@2.41?arch=amd64"
    assert "names no release (4.57.6 -> 5.0.0)" in built.text
    assert f"vllm_image_base_digest: {DIGEST}" in built.text
    assert built.result["name"] == foreseen.result["name"]
    assert built.result["transformers"] == "5.19.0", "the newest wheel that is there"
    image = host.docker_state()["images"][-1]
    assert image["id"] == built.result["id"]
    labels = {name.removeprefix("vllm-edge."): value for name, value in image["labels"].items()}
    assert labels["base-id"] == BASE_ID and labels["transformers"] == "5.19.0"
    assert labels["constraint"] == "transformers>=5.16.1,<5.20.0"
    assert labels["inputs"].startswith(built.result["name"].rsplit("-", 1)[1])
    context = json.loads((host.root / "docker/context.json").read_text())
    assert f"--entrypoint=env {BASE_ID} PIP_CONFIG_FILE=" in context["command"], "of what was checked, not of its name"
    assert "torch==2.13.0\n" in context["constraints.txt"] and "tokenizers" not in context["constraints.txt"]
    assert context["requirements.txt"] == f"transformers==5.19.0 --hash=sha256:{hashlib.sha256(b'').hexdigest()}\n"
    # With userns-remap the root of the container is another user of the host.
    assert context["modes"].pop("build") == 0 and set(context["modes"].values()) == {4, 5}, context["modes"]
    assert not (host.root / "state/build/image").exists()
    record = host.record()
    assert (record["cuda"], record["driver_branch"]) == ("13.0.2", "580"), "those of the base image"

    again = yield from host.converge(changed=0)
    assert host.commands() == [], "neither looked into nor tested again"
    assert again.result == built.result
    # Nothing runs the base image, so `docker system prune --all` removes it. It is needed only to build.
    images = host.docker_state()["images"]
    host.change_docker(images=images[1:])
    pruned = yield from host.converge(changed=0)
    assert host.commands() == [] and pruned.result == built.result
    host.change_docker(images=images)
    without = yield from host.converge(changed=1, vllm_image_keep=2)
    assert host.commands() == ["run", "run"] and without.result["id"] == built.result["id"], "tested, not built"

    host.change_docker(images=images[:1], build_fails=OTHER_WHEELS)
    failed = yield from host.refuse(
        "5.19.0-py3-none-any.whl:; Expected sha256 aaaa; Got bbbb. The wheels are not those of the key wheels of",
        "otherwise bring the former ones",
    )
    assert host.commands() == ["run", "run"], "the image is gone, hence built again, of the wheels that are recorded"
    assert "image-build.log" in failed.text
    assert not (host.root / "state/build/image").exists()


@CASES.add
def base_that_meets_the_requirement_is_used_until_its_tag_moves(host: Host) -> Steps:
    labels = {"vllm-edge.inputs": "x"}
    old = [IMAGE | {"id": f"sha256:{n}", "tags": [f"vllm-edge/vllm-openai:old{n}"], "labels": labels} for n in range(4)]
    other = IMAGE | {"id": "sha256:9", "tags": ["someone/else:1"]}
    host.docker(FITTING_IMAGE, *old, other, containers={"c1": "sha256:0"})
    generation = host.root / "state/generations/4/engines/e2b"
    generation.mkdir(parents=True)
    (generation / "engine.json").write_text(json.dumps({"image_id": "sha256:1"}, indent=2))
    played = yield from host.converge(vllm_image_keep=2, vllm_image_driver_version="570.195.03")
    assert (played.result["name"], played.result["id"], played.result["layer"]) == (BASE, BASE_ID, False)
    assert host.commands() == ["run", "run"] and "there is no layer" in played.text
    needs = "CUDA 13.0.2, which needs a driver of branch 580 or newer, and the host has 570.195.03. Engines can"
    assert needs in played.text, "whether the compatibility library works only CUDA can tell"
    kept = [tag.removeprefix("vllm-edge/vllm-openai:") for tag in host.tags() if "old" in tag]
    assert kept == ["old0", "old1", "old3"], "old0 is used by a container, old1 by a kept generation"
    assert {BASE, "someone/else:1"} <= set(host.tags())

    host.commands()
    again = yield from host.converge(changed=0, vllm_image_keep=2, vllm_image_driver_version="580.65.06")
    assert again.result == played.result and host.commands() == [] and "Engines can" not in again.text

    images = host.docker_state()["images"]
    images[0] |= {"id": OTHER_ID, "environment": ["CUDA_VERSION=14.0.1"]}
    host.change_docker(images=images)
    yield from host.refuse("the tag was moved", f"vllm_image_base_id: {OTHER_ID}", f"docker tag {BASE_ID} {BASE}")
    accepted = yield from host.converge(vllm_image_base_id=OTHER_ID, vllm_image_driver_version="470.256.02")
    assert accepted.result["base_id"] == OTHER_ID
    record = host.record()
    assert record["base_id"] == OTHER_ID, "what was accepted is what is recorded"
    # An image whose driver nobody knows is used with whatever driver there is.
    assert (record["cuda"], record["driver_branch"]) == ("14.0.1", "")


@CASES.add
def absent_base_is_pulled_by_the_pinned_digest(host: Host) -> Steps:
    host.change_docker(images=[])
    does_not_have_it = "The registry registry.example answers and does not have it. Set vllm_image_base (now"
    yield from host.refuse("manifest unknown", does_not_have_it)
    host.commands()
    host.change_docker(registry={f"{BASE.rsplit(':', 1)[0]}@{DIGEST}": IMAGE})
    said = f"1000000000 MiB are needed to install {BASE}: vllm_image_free_mib, which may be lower"
    yield from host.refuse(said, vllm_image_base_digest=DIGEST, vllm_image_free_mib=10**9)
    foreseen = yield from host.converge(check=True, changed=1, vllm_image_base_digest=DIGEST)
    assert foreseen.result == {}
    assert "cannot be foreseen until the base image is on the host" in foreseen.text
    assert host.commands() == []
    impossible = "is impossible with vLLM 0.32.0"
    yield from host.refuse(impossible, vllm_image_base_digest=DIGEST, vllm_image_requirement="transformers<5")
    assert BASE in host.tags() and host.commands() == ["image pull", "run"]


def manifest(kind: str, *sizes_mib: int) -> dict[str, Any]:
    """A manifest as `docker manifest inspect --verbose` prints it."""
    return {"Ref": BASE, kind: {"layers": [{"size": size * 1024**2} for size in sizes_mib]}}


@CASES.add
def room_for_the_layers_that_the_registry_lists(host: Host) -> Steps:
    """Of the largest platform; the last entry is an attestation of one of them."""
    manifests = [manifest("SchemaV2Manifest", 250_000, 750_000), manifest("OCIManifest", 900_000), manifest("none")]
    host.change_docker(images=[], manifests={BASE: manifests})
    said = "4000000 MiB are needed to install " + BASE + ": 4 times the 1000000 MiB of compressed layers"
    yield from host.refuse(said, vllm_image_free_mib=1)
    assert host.commands() == []


@CASES.add
def archive_is_loaded_by_its_id(host: Host) -> Steps:
    host.change_docker(images=[])
    file = host.root / "base.tar"
    given = {"vllm_image_base_archive": str(file)}
    yield from host.refuse("base.tar' on the", **given)
    file.write_bytes(b"not whole" * 1000)
    yield from host.refuse("is no uncompressed archive of `docker save`, or not all of one: ", **given)
    config = write_archive(file, ["prom/prometheus:v3"])
    yield from host.refuse(f"it has the name 'prom/prometheus:v3', and may have no other than {BASE}", **given)
    write_archive(file, None)
    expected = f"it has the image {config}, and vllm_image_base_id pins {OTHER_ID}"
    yield from host.refuse(expected, **given, vllm_image_base_id=OTHER_ID)
    yield from host.refuse("vllm_image_base_id pins none", **given, vllm_image_base_archive_on_host=True)
    assert host.commands() == [], "nothing of it reached Docker"
    loaded = yield from host.converge(**given)
    assert f"vllm_image_base_id: {config}" in loaded.text, "an archive has no digest to pin"
    assert sorted(path.name for path in (host.root / "state").iterdir()) == ["build", "image.json", "log", "sbom"]
    assert not (host.root / "state/build/image").exists()
    assert host.record()["base_ids"] == [config] and host.tags() == [BASE]


def write_archive(file: Path, names: list[str] | None) -> str:
    """Write what `docker save` writes of an image, with what the command of these tests loads; return the id."""
    text = json.dumps(FITTING_IMAGE | {"digests": []}).encode()
    config = hashlib.sha256(text).hexdigest()
    manifest = json.dumps([{"Config": f"blobs/sha256/{config}", "RepoTags": names, "Layers": []}]).encode()
    with tarfile.open(file, "w") as tar:
        for name, content in (("manifest.json", manifest), (f"blobs/sha256/{config}", text)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return f"sha256:{config}"


@CASES.add
def image_that_lies_about_itself_reaches_no_file(host: Host) -> Steps:
    packages = {**PACKAGES, "zz": "1\ntransformers @ https://attacker.example/x.tar.gz"}
    host.change_docker(answer=json.dumps({"packages": packages, "debian": [], "failures": [], "libraries": 0}))
    refused = yield from host.refuse(f"What {BASE} says of its packages cannot be used: the version of zz is")
    assert "Traceback" not in refused.text and host.commands() == ["run"]
    host.docker(IMAGE | {"user": "0\nENTRYPOINT sh"})
    yield from host.refuse(f"The user of {BASE} is 0 ENTRYPOINT")
    assert list((host.root / "state").iterdir()) == [] and host.commands() == []


@CASES.add
def wheels_from_the_index_are_taken_by_their_hashes_and_held_to_them(host: Host) -> Steps:
    def report(digest: str) -> dict[str, Any]:
        names = ["transformers-5.19.0-py3-none-any.whl", "tokenizers-0.23.4-cp39-abi3-linux_x86_64.whl"]
        infos = [{"url": f"https://i.example/{n}", "archive_info": {"hashes": {"sha256": digest * 64}}} for n in names]
        return {"install": [{"download_info": info} for info in infos]}

    base = host.docker_state()
    host.change_docker(index_report=report("a"))
    empty = "vllm_image_wheel_hashes is empty"
    yield from host.refuse(empty, f'"{"a" * 64}"', **INDEX, vllm_image_require_pins=True)
    built = yield from host.converge(**INDEX)
    context = json.loads((host.root / "docker/context.json").read_text())
    assert "--require-hashes" in context["command"] and "--network=none" not in context["command"]
    hashed = f"tokenizers==0.23.4 --hash=sha256:{'a' * 64}\ntransformers==5.19.0 --hash=sha256:{'a' * 64}\n"
    assert context["requirements.txt"] == hashed
    wheels = host.record()["wheels"]
    assert sorted(wheels.values()) == ["a" * 64] * 2 and "vllm_image_wheel_hashes: {" in built.text
    yield from host.converge(changed=0, **INDEX, vllm_image_wheel_hashes=wheels)
    # Built again, it is made of the same wheels, whatever the index has now.
    host.commands()
    host.change_docker(**base, index_report=report("b"))
    yield from host.converge(**INDEX, vllm_image_require_pins=True, vllm_image_wheel_hashes=wheels)
    assert host.commands() == ["run"] * 3 and host.record()["wheels"] == wheels
    alone = {"tokenizers-0.23.4-cp39-abi3-linux_x86_64.whl": "a" * 64}
    yield from host.refuse("no wheel of transformers is among tokenizers", **INDEX, vllm_image_wheel_hashes=alone)


@CASES.add
def build_on_a_full_disk_is_said_and_nothing_is_left(host: Host) -> Steps:
    said = "1000000000 MiB are needed to build vllm-edge/vllm-openai:0.32.0-"
    yield from host.refuse(said, vllm_image_free_mib=1, __vllm_image_layer_mib=10**9)
    assert host.commands() == ["run"] and not (host.root / "state/build").exists()
    host.change_docker(build_fails=FULL)
    yield from host.refuse("OSError: [Errno 28] No space left on device. Docker's data has no space")
    assert not (host.root / "state/build/image").exists() and not (host.root / "state/image.json").exists()


@CASES.add
def index_that_the_host_does_not_reach(host: Host) -> Steps:
    said = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3."
        "connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection "
        "refused')': /simple/transformers/\nERROR: No matching distribution found for transformers"
    )
    host.change_docker(pip_says=said)
    failed = yield from host.refuse(
        "to the host: Failed to establish a new connection: [Errno 111] Connection refused.",
        "vllm_image_pip_index_url, vllm_image_pip_proxy",
        **INDEX,
        vllm_image_pip_index_url="https://user:s3cret@index.example/simple",
    )
    assert "s3cret" not in failed.text and not (host.root / "state/build/image").exists()
    host.change_docker(pip_says="ERROR: No matching distribution found for transformers<5.20.0,>=5.16.1")
    fill = f"--volume=DIRECTORY:/wheels {BASE} -m pip download --only-binary=:all: --dest=/wheels"
    yield from host.refuse(f"{host.wheels} (vllm_image_wheels_directory) does not give", fill)


@CASES.add
def image_that_fails_its_tests_is_refused_and_not_recorded(host: Host) -> Steps:
    host.docker(FITTING_IMAGE, failures=["libgone.so, which _C.so needs, is not found"])
    yield from host.refuse("libgone.so", "cannot run an engine")
    assert not (host.root / "state/image.json").exists(), "or the next run would take it for tested"


@CASES.add
def uninstalling_leaves_what_others_named_or_use(host: Host) -> Steps:
    names = [f"vllm-edge/vllm-openai:{n}" for n in range(2)] + ["someone/else:1"]
    ours = [IMAGE | {"id": f"sha256:{n}", "tags": [n], "labels": {"vllm-edge.inputs": "x"}} for n in names]
    host.docker(IMAGE, *ours, containers={"c1": f"sha256:{names[1]}"})
    (host.root / "state/image.json").write_text("no JSON")
    played = yield replace(host.run(), points=["uninstall"])
    assert not played.failed and host.tags() == [BASE, *names[1:]], played.text
    assert not (host.root / "state/image.json").exists()


@CASES.add
def sbom_is_written_as_soon_as_the_program_is_there(host: Host) -> Steps:
    host.docker(FITTING_IMAGE)
    for python, said in (
        ("/nonexistent/python", "python cannot be run"),
        (f"{sys.base_prefix}/bin/python3", "cyclonedx"),
    ):
        played = yield from host.converge(vllm_image_python=python)
        assert "cdx.json was not written" in played.text and said in played.text, played.text
    yield from host.converge(changed=1)
    assert host.commands() == ["run"] * 6 and list((host.root / "state/sbom").iterdir())


@CASES.add
def host_without_docker_says_one_line_in_check_mode(host: Host) -> Steps:
    foreseen = yield from host.converge(check=True, vllm_image_docker="/nonexistent/docker", changed=1)
    assert "cannot be foreseen until Docker is installed" in foreseen.text
    yield from host.refuse("The role container_runtime installs it", vllm_image_docker="/nonexistent/docker")


@CASES.add
def wrong_variables_are_refused(host: Host) -> Steps:
    yield from host.refuse("vllm_image_base_id pins", vllm_image_base_id=OTHER_ID)
    yield from host.refuse("vllm_image_base_digest pins", vllm_image_base_digest=OTHER_ID)
    assert host.commands() == []


test_case = CASES.make_test()


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
        ('Get "https://r.example/v2/": context deadline exceeded', "does not reach"),
    ],
)
def test_remedy_fits_what_docker_says(said: str, remedy: str) -> None:
    rows = yaml.safe_load((ROOT / "roles/vllm_image/vars/main.yml").read_text())["__vllm_image_pull_remedies"]
    assert remedy in next(row["remedy"] for row in rows if re.search(row["match"], said))


@pytest.mark.parametrize(
    ("file", "where"), [("image.yml", "tasks/driver.yml"), ("tasks/earlier_stages.yml", "driver.yml")]
)
def test_stages_by_themselves_know_the_driver_before_the_image(file: str, where: str) -> None:
    """Else an image whose CUDA is too new would be used, and its engines would end one after the other."""
    found = yaml.safe_load((ROOT / "playbooks" / file).read_text())
    tasks = found[-1].get("pre_tasks", found)
    files = [task.get("ansible.builtin.include_tasks") for task in tasks]
    roles = [task.get("ansible.builtin.include_role", {}).get("name") for task in tasks]
    # Roles of a play come after its pre_tasks.
    roles += [role["role"] for role in found[-1].get("roles", [])]
    asks = files.index(where)
    assert asks < roles.index("vllm_image")
    assert tasks[asks]["when"] == "nvidia_driver_result is not defined", "the host stage knows more of it"
