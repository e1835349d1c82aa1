# SPDX-License-Identifier: Apache-2.0
"""A hub of their own for the tests of the weights, and the module with the arguments that all of them share."""

from __future__ import annotations

import grp
import io
import json
import os
import pwd
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.hub.server import Hub

REPO = "example/tiny"
Result = dict[str, Any]


class TestHub:
    """The lab's hub in a thread, with its requests and its files at hand."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server = Hub(root, 0, "127.0.0.1", xet=True)
        self.server.log = io.StringIO()  # type: ignore[assignment]
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def write(self, path: str, content: bytes, repo: str = REPO) -> None:
        target = self.root / repo / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def remove(self, path: str, repo: str = REPO) -> None:
        (self.root / repo / path).unlink()

    def alter_in_transit(self, path: str, repo: str = REPO) -> None:
        """What a broken mirror does: the stated hash stays, the bytes do not. The hub's cache goes by mtime."""
        target = self.root / repo / path
        before = target.stat()
        content = target.read_bytes()
        target.write_bytes(bytes([content[0] ^ 0xFF]) + content[1:])
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))

    def gate(self, token: str, repo: str = REPO) -> None:
        file = self.root / "gated.json"
        gates = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**gates, repo: token}))

    def faults(self, *faults: dict[str, Any]) -> None:
        (self.root / "faults.json").write_text(json.dumps(faults))

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.server.log.getvalue().splitlines()]  # type: ignore[attr-defined]

    def downloads(self) -> list[str]:
        """Files whose content went out, in the order in which that ended."""
        return [request["path"].split("/", 5)[-1].partition("?")[0] for request in self.contents()]

    def contents(self) -> list[dict[str, Any]]:
        """Requests that were answered with the content of a file, at the hub or where it redirects to."""
        return [
            request
            for request in self.requests()
            if request["method"] == "GET"
            and ("/resolve/" in request["path"] or request["path"].startswith("/cdn/"))
            and request["status"] < 300
        ]

    def forget_requests(self) -> None:
        self.server.log = io.StringIO()  # type: ignore[assignment]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    served = TestHub(tmp_path / "hub")
    served.write("config.json", b'{"quantization_config": {"producer": {"name": "modelopt", "version": "0.37.0"}}}\n')
    served.write("model.safetensors", bytes(range(256)) * 800)
    served.write("nested/extra.json", b"{}\n")
    served.write("pytorch_model.bin", b"a pickle")
    served.write(".gitattributes", b"*.safetensors filter=lfs\n")
    yield served
    served.close()


@pytest.fixture
def arguments(hub: TestHub, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "repo": REPO,
        "revision": "main",
        "path": str(tmp_path / "weights" / "tiny"),
        "state_directory": str(tmp_path / "state"),
        "endpoint": hub.endpoint,
        "reserve_mib": 0,
        "owner": pwd.getpwuid(os.getuid()).pw_name,
        "group": grp.getgrgid(os.getgid()).gr_name,
        "progress_path": str(tmp_path / "progress" / "weights-tiny"),
    }


@pytest.fixture
def weights(run_module: Callable[..., Result], arguments: dict[str, Any]) -> Callable[..., Result]:
    """weights(check=False, replace={}, revision=..., ...) runs the module."""

    def run(check: bool = False, replace: dict[str, Any] | None = None, **changed: Any) -> Result:
        return run_module("model_weights", {**arguments, **changed}, check=check, replace=replace)

    return run
