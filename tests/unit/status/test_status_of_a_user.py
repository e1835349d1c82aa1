# SPDX-License-Identifier: Apache-2.0
"""What `vllm-edge` says to a user who is not root: sentences, and nothing that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.status import collect
from ansible.module_utils.vllm_edge.switch import history
from generations import activate, engine, rendered

NOBODY = 65534


@pytest.fixture
def host() -> Iterator[HostPaths]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # Neither pytest's directory nor everybody's TMPDIR is open to others.
    root = Path(tempfile.mkdtemp(prefix="vllm-edge-test-", dir="/var/tmp"))
    root.chmod(0o755)
    umask = os.umask(0o022)
    paths = HostPaths(root / "etc", root / "state", root / "units")
    activate(paths, rendered(engine()))
    (paths.state / "generations").chmod(0o750)
    paths.history.mkdir(mode=0o750)
    paths.switch_journal.write_text("{}")
    paths.switch_journal.chmod(0o640)
    os.umask(umask)
    yield paths
    shutil.rmtree(root)


def ask(act: Callable[[], Any]) -> Any:
    """Return what `act` returns as user nobody, through a pipe."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write_end, json.dumps(act()).encode())
        except BaseException as error:
            os.write(write_end, json.dumps({"raised": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    result = json.loads(said)
    assert not isinstance(result, dict) or "raised" not in result, result
    return result


def test_switches_are_for_root_and_none_is_called_unfinished(host: HostPaths) -> None:
    found, problems = ask(lambda: history.read_switches(host))
    assert found == {"switch": None, "unfinished_switch": None, "history": []}
    assert problems == [f"{host.switch_journal} is not for this user: switches are shown to root"]


def test_the_live_files_are_not_judged(host: HostPaths) -> None:
    profile, problem = ask(lambda: collect.read_active_profile(host))
    assert problem is None and profile["generation"] == 1, "this everybody may read"
    assert [config.engine for config in collect.load_configs(host)[0]] == ["e2b"]
    assert ask(lambda: len(collect.load_configs(host)[0])) == 1, "and this"
    files, problems = ask(lambda: collect.read_live_files(host, profile))
    assert files is None
    assert problems == [f"{host.state}/generations is not for this user: whether files were changed is shown to root"]


@pytest.mark.parametrize("command", ["history", "progress"])
def test_a_command_that_cannot_read_says_so(host: HostPaths, command: str) -> None:
    def run() -> Any:
        told: list[str] = []
        sys.stderr = type("Told", (), {"write": lambda self, text: told.append(text), "flush": lambda self: None})()
        status = history.run_history(host, output="text") if command == "history" else history.run_progress(host)
        return [status, "".join(told)]

    status, said = ask(run)
    assert status == 1 and f"shown to root: 'sudo vllm-edge {command}'." in said
