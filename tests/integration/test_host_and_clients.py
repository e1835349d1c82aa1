# SPDX-License-Identifier: Apache-2.0
"""The host of a switch against a real Docker Engine and real HTTP servers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from ansible.module_utils.vllm_edge.system.docker import Container, DockerEngine
from harness import IMAGE, docker


@dataclass
class Made:
    """A container of ours and one of somebody else."""

    engine: str
    ours: str
    foreign: str


@pytest.fixture
def made(docker_ready: None) -> Iterator[Made]:
    name = f"t{uuid.uuid4().hex[:8]}"
    run = ["run", "--detach", "--init", "--entrypoint", "sleep"]
    labels = ["--label", f"vllm-edge.engine={name}", "--label", "vllm-edge.input-hash=ab12"]
    ours = docker(*run, "--name", f"vllm-{name}", *labels, IMAGE, "300")
    foreign = docker(*run, "--name", f"vllm-{name}-of-somebody", IMAGE, "300")
    try:
        yield Made(name, ours, foreign)
    finally:
        docker("rm", "--force", "--volumes", ours, foreign, check=False)


def find(container_id: str) -> Container | None:
    return next((one for one in DockerEngine().listed() if one.id == container_id), None)


def test_containers_as_a_real_docker_lists_them_and_one_is_ended_at_once(made: Made) -> None:
    ours, foreign = find(made.ours), find(made.foreign)
    assert ours is not None and foreign is not None
    assert (ours.name, ours.engine, ours.input_hash) == (f"vllm-{made.engine}", made.engine, "ab12")
    assert ours.running
    assert foreign.engine is None and foreign.running
    began = time.monotonic()
    DockerEngine().kill(made.ours)
    ended, left = find(made.ours), find(made.foreign)
    assert ended is not None and not ended.running and time.monotonic() - began < 10
    assert left is not None and left.running


def test_images_by_name(docker_ready: None) -> None:
    assert DockerEngine().image_id(IMAGE) == docker("image", "inspect", "--format", "{{.Id}}", IMAGE)
    assert DockerEngine().image_id("vllm-edge/no-such-image:1") is None
