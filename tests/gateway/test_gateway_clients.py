# SPDX-License-Identifier: Apache-2.0
"""Large requests of the official library: older versions write `model` last."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

import openai_requests
import pytest
from gateway_world import KEYS, ROOT, Gateway

pytestmark = pytest.mark.slow


def install(major: int) -> Path:
    """The Python of an environment with the newest release of this major version."""
    place = ROOT / f".cache/openai-{major}"
    python = place / "bin/python"
    if not (place / "done").exists():
        venv.create(place, clear=True, with_pip=True)
        words = [python, "-m", "pip", "install", "--quiet", f"openai>={major},<{major + 1}"]
        subprocess.run(words, check=True)
        (place / "done").touch()
    return python


@pytest.mark.timeout(600)
@pytest.mark.parametrize("major", [0, *(pytest.param(one, marks=pytest.mark.thorough) for one in (1, 2, 3))])
def test_large_requests_of_the_official_library(gateway: Gateway, major: int) -> None:
    def ask_all(path: str) -> dict[str, tuple[int, str]]:
        url, key = f"http://127.0.0.1:{gateway.port}{path}", KEYS["all"]
        if not major:
            return openai_requests.ask_all(url, key)
        words = [install(major), openai_requests.__file__, url, key]
        return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))

    by_role, by_model = ask_all("/roles/worker/v1"), ask_all("/v1")
    assert {status for status, _ in by_role.values()} == {200}, by_role
    for name, (status, message) in by_model.items():
        assert status == 200 or (status == 400 and "/roles/worker/v1" in message), (name, status, message)
    assert (by_model["image of 900000 bytes"][0] == 400) == (major in (1, 2)), "which versions write `model` last"
