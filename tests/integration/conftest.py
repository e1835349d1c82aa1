# SPDX-License-Identifier: Apache-2.0
"""A host for one engine; skipped, with the reason, where there is no Docker Engine or no image."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Host, docker, why_not


@pytest.fixture(scope="session")
def docker_ready() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def host(docker_ready: None, tmp_path: Path) -> Iterator[Host]:
    made = Host(f"t{uuid.uuid4().hex[:8]}", tmp_path)
    try:
        yield made
    finally:
        for run in made.runs:
            if run.process.poll() is None:
                run.kill()
            run.socket.close()
        docker("rm", "--force", "--volumes", made.container, check=False)
