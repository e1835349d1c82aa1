# SPDX-License-Identifier: Apache-2.0
"""Real plays with a token and the password of a proxy: nobody else on the host reads them, also after a SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conftest import TestHub

ROOT = Path(__file__).resolve().parents[3]
HANDED_OVER = Path("/run/vllm-edge-secrets")
TOKEN, PASSWORD = "hf_planted_token_7261", "planted-proxy-password-9134"
PLANTED = (TOKEN.encode(), PASSWORD.encode())
pytestmark = [pytest.mark.skipif(os.getuid() != 0, reason="the role works as root"), pytest.mark.slow]


def has_secret(text: bytes) -> bool:
    return any(secret in text for secret in PLANTED)


def read_command_lines() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes()
            except OSError:
                continue


class Watch:
    """Looks at the command lines of all processes every 20 ms."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.seen += [line for _pid, line in read_command_lines() if has_secret(line)]

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start(play, variables) begins a play at -vvv whose directories are all below tmp_path."""
    begun = []

    def run(play: dict[str, Any], variables: dict[str, Any]) -> subprocess.Popen[bytes]:
        given = tmp_path / "given"
        given.mkdir(exist_ok=True, mode=0o700)
        (given / "play.json").write_text(json.dumps([{"hosts": "all", "gather_facts": False, **play}]))
        (given / "vars.json").write_text(json.dumps({"ansible_python_interpreter": sys.executable, **variables}))
        output = (tmp_path / "output").open("ab")
        environment = {
            "HOME": str(tmp_path / "home"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
            "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        }
        program = [str(Path(sys.executable).with_name("ansible-playbook")), "-vvv", "-i", "localhost,", "-c", "local"]
        command = [*program, "-e", f"@{given}/vars.json", str(given / "play.json")]
        begun.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.wait()


def find_secrets(tmp_path: Path) -> list[str]:
    """The files with a secret, but those that the test itself wrote and those that a running download renames."""
    own = (tmp_path / "given", tmp_path / "hub")
    found = []
    for path in [*tmp_path.rglob("*"), *(HANDED_OVER.rglob("*") if HANDED_OVER.exists() else ())]:
        if path.is_file() and not any(each in path.parents for each in own):
            with contextlib.suppress(FileNotFoundError):
                if has_secret(path.read_bytes()):
                    found.append(str(path))
    return found


@pytest.fixture
def role(hub: TestHub, tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A play of the role with a gated model and a proxy, which is not used as the hub's address is not https."""
    hub.gate(TOKEN)
    (tmp_path / "weights").mkdir()
    (tmp_path / "home").mkdir()
    variables = {
        "model_weights_models": [{"name": "tiny", "repo": "example/tiny", "dir": "tiny"}],
        "model_weights_root": str(tmp_path / "weights"),
        "model_weights_state_directory": str(tmp_path / "state"),
        "model_weights_progress_directory": str(tmp_path / "progress"),
        "model_weights_endpoint": hub.endpoint,
        "model_weights_token": TOKEN,
        "model_weights_environment": {"HTTPS_PROXY": f"http://user:{PASSWORD}@127.0.0.1:9", "UNUSED": "1"},
        "model_weights_reserve_mib": 0,
        "model_weights_group": "root",
        "model_weights_python": sys.executable,
    }
    return {"roles": ["model_weights"]}, variables


def test_killed_download_leaves_no_secret_and_the_next_run_completes(
    hub: TestHub, role: tuple[dict[str, Any], dict[str, Any]], start: Callable[..., Any], tmp_path: Path
) -> None:
    hub.faults({"path": "*model.safetensors", "bytes_per_second": 2000})
    with Watch() as watch:
        play = start(*role)
        deadline = time.monotonic() + 300
        while not list((tmp_path / "weights").rglob("model.safetensors.*.part")):
            assert play.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()[-3000:]
            time.sleep(0.02)
        during = find_secrets(tmp_path)
        # Ansible, its task, which has a session of its own, and the module.
        mine = {pid: line for pid, line in read_command_lines() if str(tmp_path).encode() in line}
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        play.wait()
        after = find_secrets(tmp_path)
        hub.faults()
        # As if the module had been killed before it read them.
        (HANDED_OVER / "weights-tiny.secrets").write_text(TOKEN)
        again = start(*role)
        assert again.wait(60) == 0, (tmp_path / "output").read_text()[-3000:]
    module = str(tmp_path / "remote").encode()
    assert any(module in line and b"model_weights" in line for line in mine.values()), "no module was killed"
    assert (tmp_path / "weights" / "tiny" / "model.safetensors").exists()
    assert during == after == find_secrets(tmp_path) == []
    assert watch.seen == []
    assert [path for path in HANDED_OVER.rglob("*") if path.name.startswith("weights-tiny")] == []


def test_staging_sends_no_token_that_was_not_given(
    hub: TestHub, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's hub refuses a token that it does not know, for public repositories as well."""
    hub.server.xet = False
    (tmp_path / "home" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "huggingface" / "token").write_text("hf_of_the_login")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_of_the_user")
    variables = {
        "staging_directory": str(tmp_path / "stage"),
        "staging_endpoint": hub.endpoint,
        "staging_token": "",
        "staging_token_file": "",
        "__staging_model": {"name": "tiny", "repo": "example/tiny", "dir": "tiny"},
    }
    tasks = [{"include_vars": f"{ROOT}/roles/staging/vars/main.yml"}]
    tasks.append({"include_tasks": f"{ROOT}/roles/staging/tasks/weights.yml"})
    with Watch() as watch:
        done = start({"tasks": tasks}, variables)
        assert done.wait(60) == 0, (tmp_path / "output").read_text()[-3000:]
    assert (tmp_path / "stage" / "weights" / "tiny" / "model.safetensors").stat().st_mode & 0o077 == 0
    assert watch.seen == [] and find_secrets(tmp_path) == []
    assert not {request["status"] for request in hub.requests()} & {400, 401, 403}
