# SPDX-License-Identifier: Apache-2.0
"""The image cannot be had: the fault is said, the old image stays, and nothing is left behind.

What Docker and pip say of other faults is in tests/unit/roles/test_vllm_image_role.py.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Controller, Machine
from test_d_supply_weights import operator, reason, unharmed

__all__ = ["operator", "unharmed"]

UNTOUCHED = "The image that the host had is kept, and engines that run go on."


def refusal(operator: Controller, **variables: Any) -> str:
    """What the play says when it gives up; that the old image stays is said, too."""
    message = reason(operator.play("playbooks/image.yml", f"--extra-vars={json.dumps(variables)}"))
    assert UNTOUCHED in message, message
    return message


def test_registry_that_cannot_be_reached(operator: Controller) -> None:
    base = "registry.lab:9/vllm/vllm-openai:v0.32.0"
    message = refusal(operator, vllm_image_base=base)
    reached = f"The host does not reach the registry registry.lab:9. Check the name in vllm_image_base (now {base})"
    assert reached in message and "connection refused" in message and "vllm_image_base_archive" in message


REQUIREMENT = "transformers>=5.17"
"""As good as the one that is built, but another: it makes the role build."""
BUILD = "/var/lib/vllm-edge/build"


def prepared(directory: Path) -> dict[str, Any]:
    """Variables that build from wheels that are not all there: one of nothing but its metadata, which names another."""
    information = "transformers-5.19.0.dist-info"
    requires = "Metadata-Version: 2.1\nName: transformers\nVersion: 5.19.0\nRequires-Dist: no-such-package>=1\n"
    directory.mkdir()
    with zipfile.ZipFile(directory / "transformers-5.19.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{information}/METADATA", requires)
        file.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{information}/RECORD", "")
    return {
        "vllm_image_pip_source": "directory",
        "vllm_image_wheels_directory": str(directory),
        "vllm_image_requirement": REQUIREMENT,
    }


@pytest.mark.thorough
def test_pip_fails_in_the_build(operator: Controller, tmp_path: Path) -> None:
    message = refusal(operator, **prepared(tmp_path / "wheels"))
    assert "could not be built from" in message and "No matching distribution found for no-such-package>=1" in message
    assert "Add it to vllm_image_movable_packages" in message
    assert "/var/lib/vllm-edge/log/image-build.log" in message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("index", "cause", "remedy"),
    [
        ("http://127.0.0.1:9/simple", "Connection refused", "the controller's own configuration of pip"),
        ("file", "(from versions: 4.58.0)", "The index answers and has no release that fits"),
    ],
)
def test_package_index_of_the_controller(
    operator: Controller, tmp_path: Path, index: str, cause: str, remedy: str
) -> None:
    (tmp_path / "transformers").mkdir()
    link = '<a href="transformers-4.58.0-py3-none-any.whl">transformers 4.58.0</a>'
    (tmp_path / "transformers" / "index.html").write_text(link)
    url = tmp_path.as_uri() if index == "file" else index
    settings = ["PIP_CONFIG_FILE=/dev/null", f"PIP_INDEX_URL={url}", "PIP_RETRIES=1", "PIP_DEFAULT_TIMEOUT=2"]
    message = refusal(
        operator,
        vllm_image_pip_command=["env", *settings, "{{ ansible_playbook_python }}", "-m", "pip"],
        vllm_image_wheels_cache=str(tmp_path / "wheels"),
        vllm_image_requirement=REQUIREMENT,
    )
    assert cause in message and remedy in message and "vllm_image_requirement" in message, message


@pytest.mark.thorough
def test_disk_full_while_the_wheels_come(operator: Controller, machine: Machine, tmp_path: Path) -> None:
    """A file system under the build's directory that the wheels do not fit on."""
    variables = prepared(tmp_path / "wheels")
    (tmp_path / "wheels" / "large-1-py3-none-any.whl").write_bytes(bytes(2 * 1024**2))
    machine.run("mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", BUILD)
    try:
        message = refusal(operator, **variables)
        assert machine.run("ls", "--almost-all", BUILD) == "", "what had arrived is gone"
    finally:
        machine.run("umount", BUILD)
    assert f"could not be copied to {BUILD}/image on the host: No space left on device" in message
    assert "Free some space on the file system of /var/lib/vllm-edge and run again." in message
