# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while the image comes: each fault is said, the old image stays, and nothing is left behind."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Controller, Machine, Play
from test_d_supply_weights import active_profile, operator, reason, unharmed

__all__ = ["operator", "unharmed"]

REPOSITORY = "registry.lab:5000/vllm/vllm-openai"
ABSENT = f"{REPOSITORY}:v9.9.9"
OTHER_DIGEST = "sha256:" + "0" * 64
REQUIREMENT = "transformers>=5.17"
"""As good as the one that is built, but another: it makes the role build."""
UNTOUCHED = "The image that the host had is kept, and engines that run go on."
BUILD = "/var/lib/vllm-edge/build"

Seen = Callable[..., None]


class Supply:
    """The stage of the image with other variables."""

    def __init__(self, operator: Controller, scratch: Path) -> None:
        self.operator, self.scratch = operator, scratch

    def play(self, **variables: Any) -> Play:
        file = self.scratch / "variables.json"
        file.write_text(json.dumps(variables))
        return self.operator.play("playbooks/image.yml", f"--extra-vars=@{file}")

    def refusal(self, **variables: Any) -> str:
        """What the play says when it gives up; that the old image stays is said, too."""
        message = reason(self.play(**variables))
        assert UNTOUCHED in message, message
        return message

    def pip(self, index: str, **environment: str) -> dict[str, Any]:
        """Variables that lead the controller's pip to this index alone, for an image that is yet to be built."""
        settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index, "PIP_RETRIES": "0", **environment}
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        return {
            "vllm_image_pip_command": [*command, "{{ ansible_playbook_python }}", "-m", "pip"],
            "vllm_image_wheels_cache": str(self.scratch / "wheels"),
            "vllm_image_requirement": REQUIREMENT,
        }


@pytest.fixture
def supply(operator: Controller, tmp_path: Path) -> Supply:
    return Supply(operator, tmp_path)


@pytest.mark.thorough
def test_tag_that_the_registry_does_not_have(supply: Supply, seen: Seen) -> None:
    message = supply.refusal(vllm_image_base=ABSENT)
    assert message.startswith(f"{ABSENT} could not be pulled: manifest for {ABSENT} not found")
    assert "The registry registry.lab:5000 answers and does not have it. Set vllm_image_base (now" in message
    seen(message)


def test_registry_that_cannot_be_reached(supply: Supply, seen: Seen) -> None:
    base = "registry.lab:9/vllm/vllm-openai:v0.32.0"
    message = supply.refusal(vllm_image_base=base)
    assert "connection refused" in message
    assert (
        f"The host does not reach the registry registry.lab:9. Check the name in vllm_image_base (now {base})"
        in message
    )
    assert "vllm_image_base_archive" in message
    seen(message)


def test_digest_that_is_another(supply: Supply, seen: Seen) -> None:
    message = reason(supply.play(vllm_image_base_digest=OTHER_DIGEST))
    assert f"vllm_image_base_digest pins {OTHER_DIGEST}" in message and "the tag was moved" in message
    seen(message)


def test_digest_in_the_name(supply: Supply, seen: Seen) -> None:
    message = reason(supply.play(vllm_image_base=f"{REPOSITORY}@{OTHER_DIGEST}"))
    assert f"(here: vllm_image_base_digest: {OTHER_DIGEST})" in message
    seen(message)


def archive(path: Path, *names: str) -> Path:
    """What `docker save` writes, as far as it says what is in it."""
    manifest = json.dumps([{"Config": "config.json", "RepoTags": list(names), "Layers": []}]).encode()
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("manifest.json")
        member.size = len(manifest)
        tar.addfile(member, io.BytesIO(manifest))
    return path


@pytest.mark.thorough
def test_archive_that_is_not_there(supply: Supply, seen: Seen) -> None:
    message = supply.refusal(vllm_image_base=ABSENT, vllm_image_base_archive="/nowhere/base.tar")
    assert "vllm_image_base_archive on the controller: /nowhere/base.tar is no archive of" in message
    assert f"docker save --output FILE {ABSENT}" in message
    assert "set vllm_image_base_archive_on_host: true if it lies on the host" in message
    seen(message)


@pytest.mark.thorough
def test_archive_of_another_image(supply: Supply, seen: Seen, tmp_path: Path) -> None:
    file = archive(tmp_path / "base.tar", "somebody/else:1")
    message = supply.refusal(vllm_image_base=ABSENT, vllm_image_base_archive=str(file))
    assert (
        f"vllm_image_base_archive on the controller: {file} holds somebody/else:1, and vllm_image_base is {ABSENT}:"
        in message
    )
    seen(message)


@pytest.mark.thorough
def test_package_index_that_cannot_be_reached(supply: Supply, seen: Seen) -> None:
    message = supply.refusal(**supply.pip("http://127.0.0.1:9/simple", PIP_RETRIES="1", PIP_DEFAULT_TIMEOUT="2"))
    assert f"(vllm_image_requirement: {REQUIREMENT})" in message and "Connection refused" in message
    assert "the controller's own configuration of pip" in message and "vllm_image_pip_source" in message
    seen(message)


@pytest.mark.thorough
def test_requirement_that_no_index_meets(supply: Supply, seen: Seen, tmp_path: Path) -> None:
    index = tmp_path / "index" / "transformers"
    index.mkdir(parents=True)
    (index / "index.html").write_text('<a href="transformers-4.58.0-py3-none-any.whl">transformers 4.58.0</a>')
    message = supply.refusal(**supply.pip(index.parent.as_uri()))
    assert "Could not find a version that satisfies the requirement transformers" in message
    assert "(from versions: 4.58.0)" in message
    assert "The index answers and has no release that fits: ask for another by vllm_image_requirement" in message
    seen(message)


def wheel(directory: Path, name: str, version: str, requires: str) -> None:
    """A wheel of nothing but its metadata."""
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {requires}\n",
        )
        file.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{information}/RECORD", "")


def prepared(directory: Path) -> dict[str, Any]:
    """Variables that build from wheels that are not all there."""
    directory.mkdir()
    wheel(directory, "transformers", "5.19.0", "no-such-package>=1")
    return {
        "vllm_image_pip_source": "directory",
        "vllm_image_wheels_directory": str(directory),
        "vllm_image_requirement": REQUIREMENT,
    }


@pytest.mark.thorough
def test_pip_fails_in_the_build(supply: Supply, seen: Seen, tmp_path: Path) -> None:
    message = supply.refusal(**prepared(tmp_path / "wheels"))
    assert "could not be built from" in message and "No matching distribution found for no-such-package>=1" in message
    assert "Add it to vllm_image_movable_packages" in message
    assert "/var/lib/vllm-edge/log/image-build.log" in message
    seen(message)


@pytest.mark.thorough
def test_no_room_for_the_base_image(supply: Supply, seen: Seen) -> None:
    message = reason(supply.play(vllm_image_base=ABSENT, vllm_image_free_mib=10**9))
    assert "1000000000 MiB are needed to install" in message and "which may be lower for a smaller image" in message
    assert "Nothing was changed." in message and "docker system df" in message
    seen(message)


@pytest.fixture
def small_disk(machine: Machine, unharmed: None) -> Iterator[None]:
    """A file system under the build's directory that the wheels do not fit on."""
    machine.run("mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", BUILD)
    yield
    machine.run("umount", BUILD)


@pytest.mark.thorough
def test_disk_full_while_the_wheels_come(
    supply: Supply, machine: Machine, small_disk: None, seen: Seen, tmp_path: Path
) -> None:
    variables = prepared(tmp_path / "wheels")
    (tmp_path / "wheels" / "large-1-py3-none-any.whl").write_bytes(bytes(2 * 1024**2))
    message = supply.refusal(**variables)
    assert f"could not be copied to {BUILD}/image on the host: No space left on device" in message
    assert "Free some space on the file system of /var/lib/vllm-edge and run again." in message
    assert machine.run("ls", "--almost-all", BUILD) == "", "what had arrived is gone"
    seen(message)


@pytest.mark.thorough
def test_plain_run_finds_everything_in_place(operator: Controller, machine: Machine) -> None:
    play = operator.play("playbooks/image.yml", f"--extra-vars=serving_profile={active_profile(machine)}")
    assert play.rc == 0 and play.recap["changed"] == 0, play.output[-4000:]
