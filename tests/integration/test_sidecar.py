# SPDX-License-Identifier: Apache-2.0
"""The container beside an engine, in a real Docker Engine: what its program gets, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.docker import DockerEngine
from ansible.module_utils.vllm_edge.system.long_run import LongRun, interruptible
from ansible.module_utils.vllm_edge.trials.sidecar import (
    Ended,
    Sidecar,
    SidecarError,
    remove_sidecars,
    run_sidecar,
)
from harness import IMAGE, USER, docker

SIDECAR = Sidecar("test", IMAGE, USER, program="")
Runner = Callable[..., Ended]


@pytest.fixture
def paths(docker_ready: None, tmp_path: Path) -> HostPaths:
    return HostPaths(run=tmp_path / "run", state=tmp_path / "state")


@pytest.fixture
def run(paths: HostPaths) -> Iterator[Runner]:
    def start(program: str, timeout_s: float = 60, **given: object) -> Ended:
        options = {key: given.pop(key) for key in ("on_line", "find_trouble") if key in given}
        sidecar = replace(SIDECAR, program=program, **given)  # type: ignore[arg-type]
        return run_sidecar(sidecar, DockerEngine(), paths, timeout_s=timeout_s, **options)  # type: ignore[arg-type]

    yield start
    assert docker("ps", "--all", "--quiet", "--filter", "label=vllm-edge.companion=test") == ""
    assert [path for path in paths.run.rglob("*") if path.name != "companions"] == []
    assert [path for path in paths.state.rglob("*") if path.name != "companions"] == []


def test_the_program_gets_files_and_environment_and_returns_lines_and_files(run: Runner) -> None:
    lines: list[str] = []
    ended = run(
        "import os, pathlib, sys\n"
        "print(os.environ['WHO'], pathlib.Path('/job/key').read_text())\n"
        "pathlib.Path('/job/out/result').write_text('42')\n"
        "os.symlink('/etc/hostname', '/job/out/link')\n"
        "sys.exit(3)",
        environment={"WHO": "me"},
        files={"key": b"secret"},
        on_line=lines.append,
    )
    assert (ended.status, ended.lines) == (3, ("me secret",))
    assert lines == ["me secret"]
    assert ended.output == {"result": b"42"}, "links of the container are not followed"


def test_the_program_is_in_a_cage(run: Runner, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir(mode=0o755)
    ended = run(
        "import os, pathlib, socket\n"
        "def fails(what):\n"
        "    try: what()\n"
        "    except OSError: return True\n"
        "print(sorted(os.listdir('/sys/class/net')), os.getuid())\n"
        "print([fails(lambda: pathlib.Path(d, 'x').write_text('')) for d in ('/usr', '/job', '/models/weights')])\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(status['CapBnd'].strip(), status['NoNewPrivs'].strip(), oct(os.stat('/job/key').st_mode))",
        weights=weights,
        files={"key": b"secret"},
    )
    assert ended.lines == (f"['lo'] {USER}", "[True, True, True]", "0000000000000000 1 0o100400")


def test_a_socket_of_a_read_only_directory_answers(run: Runner, tmp_path: Path) -> None:
    place = tmp_path / "api"
    place.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "api.sock"))
        (place / "api.sock").chmod(0o666)
        server.listen()
        threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
        ended = run(
            "import socket\n"
            "s = socket.socket(socket.AF_UNIX)\n"
            "s.connect('/run/api/api.sock')\n"
            "print(s.recv(9).decode())",
            sockets={"api": place},
        )
    assert ended.lines == ("hello",)


def test_a_program_that_takes_too_long_or_for_which_nobody_waits_is_ended(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match="did not finish within 2 s"):
        run("import time\ntime.sleep(600)", timeout_s=2)
    long_run = LongRun(tmp_path, "test", attended=True)
    long_run.follow()
    assert not long_run.is_lost()
    (tmp_path / "test.asked").write_text("-100")
    long_run = LongRun(tmp_path, "test", attended=True, _began=-100.0)
    with pytest.raises(SidecarError, match="nobody waits for it"):
        run(
            "import time\ntime.sleep(600)",
            find_trouble=lambda: "nobody waits for it" if long_run.is_lost() else "",
        )


def test_a_signal_ends_the_program_and_a_second_one_does_not_stop_its_removal(run: Runner) -> None:
    removed = threading.Event()

    def interrupt(line: str) -> None:
        while not removed.wait(0.001):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), interruptible():
        try:
            run("import time\nprint('runs')\ntime.sleep(600)", on_line=interrupt)
        finally:
            removed.set()
            time.sleep(0.1)


def test_what_a_killed_run_left_is_removed_by_the_next_and_an_absent_image_is_named(run: Runner) -> None:
    docker("create", "--name=vllm-edge-test", "--label=vllm-edge.companion=test", IMAGE, "true")
    assert run("print(1)").status == 0
    docker("create", "--name=vllm-edge-test", "--label=vllm-edge.companion=test", IMAGE, "true")
    assert remove_sidecars(DockerEngine(), "test") == ["vllm-edge-test"]
    with pytest.raises(SidecarError, match=r"Container vllm-edge-test could not run: .*nothing/of/it"):
        run("print(1)", image="nothing/of/it:1")
