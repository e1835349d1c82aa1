# SPDX-License-Identifier: Apache-2.0
"""The host of a switch against a real Docker Engine and real HTTP servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from ansible.module_utils.vllm_edge.system.docker import Container, DockerEngine
from harness import IMAGE, docker


@pytest.fixture
def made(docker_ready: None) -> Iterator[tuple[str, str, str]]:
    """The name of an engine, and the ids of its container and of one of somebody else."""
    name = f"t{uuid.uuid4().hex[:8]}"
    run = ["run", "--detach", "--init", "--entrypoint", "sleep"]
    labels = ["--label", f"vllm-edge.engine={name}", "--label", "vllm-edge.input-hash=ab12"]
    ours = docker(*run, "--name", f"vllm-{name}", *labels, IMAGE, "300")
    foreign = docker(*run, "--name", f"vllm-{name}-of-somebody", IMAGE, "300")
    try:
        yield name, ours, foreign
    finally:
        docker("rm", "--force", "--volumes", ours, foreign, check=False)


def find(container_id: str) -> Container | None:
    return next((one for one in DockerEngine().listed() if one.id == container_id), None)


def test_containers_as_a_real_docker_lists_them_and_one_is_ended_at_once(made: tuple[str, str, str]) -> None:
    name, *ids = made
    ours, foreign = map(find, ids)
    assert ours is not None and foreign is not None
    assert (ours.name, ours.engine, ours.input_hash, ours.running) == (f"vllm-{name}", name, "ab12", True)
    assert foreign.engine is None and foreign.running
    began = time.monotonic()
    DockerEngine().kill(ours.id)
    ended, left = map(find, ids)
    assert ended is not None and not ended.running and time.monotonic() - began < 10
    assert left is not None and left.running


def test_images_by_name(docker_ready: None) -> None:
    assert DockerEngine().image_id(IMAGE) == docker("image", "inspect", "--format", "{{.Id}}", IMAGE)
    assert DockerEngine().image_id("vllm-edge/no-such-image:1") is None
