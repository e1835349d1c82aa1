# SPDX-License-Identifier: Apache-2.0
"""The lab's model hub, asked by the real client; tests/unit/weights downloads from it, with its faults."""

from __future__ import annotations

import http.client
import io
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from lab.hub import server

REPOSITORY = "google/gemma-4-E2B-it"
WEIGHTS = bytes(range(256)) * 8192
CONFIG = b'{"model_type": "gemma4_text"}\n'


class World:
    def __init__(self, root: Path, hub: Any) -> None:
        self.root, self.hub = root, hub
        self.state = root.with_name("state")
        self.state.mkdir()
        self.url = f"http://127.0.0.1:{hub.server_address[1]}"
        self.api = HfApi(endpoint=self.url, token=False)

    def set_faults(self, *faults: dict[str, Any]) -> None:
        (self.state / "faults.json").write_text(json.dumps(faults))

    def get(self, path: str, **headers: str) -> tuple[int, Any, bytes]:
        place = urllib.parse.urlsplit(path if path.startswith("http") else self.url + path)
        connection = http.client.HTTPConnection(place.netloc, timeout=60)
        connection.request("GET", place._replace(scheme="", netloc="").geturl(), headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    root = tmp_path / "hub"
    model = root / REPOSITORY
    (model / "extra").mkdir(parents=True)
    (model / "config.json").write_bytes(CONFIG)
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (model / "extra" / "notes.txt").write_text("second level\n")
    with server.Hub(root, 0, "127.0.0.1", tmp_path / "state") as hub:
        hub.log = io.StringIO()
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield World(root, hub)
        hub.shutdown()
        thread.join()


def test_main_is_a_commit_that_follows_from_the_content(world: World) -> None:
    before = world.api.model_info(REPOSITORY).sha
    assert before is not None and len(before) == 40
    assert world.api.model_info(REPOSITORY, revision=before).sha == before
    (world.root / REPOSITORY / "config.json").write_text("{}\n")
    after = world.api.model_info(REPOSITORY).sha
    assert after != before
    with pytest.raises(RevisionNotFoundError):
        world.api.model_info(REPOSITORY, revision=before)
    # A repository that is added while the hub runs.
    (world.state / "example" / "late").mkdir(parents=True)
    (world.state / "example" / "late" / "config.json").write_bytes(CONFIG)
    assert [file.rfilename for file in world.api.model_info("example/late").siblings or []] == ["config.json"]
    assert world.api.model_info(REPOSITORY).sha == after


def test_large_files_are_elsewhere_for_those_whom_the_hub_sent(world: World) -> None:
    """As object storage with signed addresses: no token, no changed address, no expired one, no more than 50 GB."""
    (world.state / "gated.json").write_text(json.dumps({REPOSITORY: "hf_right"}))
    right = {"Authorization": "Bearer hf_right"}
    path = f"/{REPOSITORY}/resolve/main/model.safetensors"
    place = world.get(path, **right)[1]["Location"]
    assert place.startswith("http://127.0.0.1:") and not place.startswith(world.url)
    assert world.get(place)[0] == 200
    assert world.get(place, **right)[0] == 400
    assert world.get(place.replace("Expires=1", "Expires=2"))[0] == 403
    world.set_faults({"path": "*/resolve/*", "times": 1, "expires_in_s": -1})
    assert [world.get(world.get(path, **right)[1]["Location"])[0] for _ in range(2)] == [403, 200]
    world.hub.largest_answer_bytes = 1000
    assert [world.get(place, Range=f"bytes=0-{last}")[0] for last in (999, 1000)] == [206, 400]


def test_errors_are_told_apart(world: World, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        world.api.model_info("google/gemma-5")
    with pytest.raises(RevisionNotFoundError):
        world.api.model_info(REPOSITORY, revision="0" * 40)
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(REPOSITORY, "absent.json", local_dir=tmp_path, endpoint=world.url, token=False)
    assert world.get(f"/{REPOSITORY}/resolve/main/../../../../etc/passwd")[0] == 404


# --- faults ---------------------------------------------------------------------------------------------------------
