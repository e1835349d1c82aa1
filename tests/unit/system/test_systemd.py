# SPDX-License-Identifier: Apache-2.0
"""What `systemctl` prints and is told, by a program of that name on the PATH; and programs end within their limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system import host, systemd
from ansible.module_utils.vllm_edge.system.systemd import (
    Ran,
    Systemd,
    SystemdError,
    Unit,
    parse_timespan,
    run_command,
)

LOADING = (
    """\
Id=vllm-e2b.service LoadState=loaded ActiveState=activating SubState=start UnitFileState=disabled NeedDaemonReload=no
FragmentPath=/etc/systemd/system/vllm-e2b.service Result=success NRestarts=2 InvocationID=5d4c3b2a Job=417
""".replace(" ", "\n")
    + "StatusText=loading=weights, 12 s\nTimeoutStopUSec=1min 30s\n"
)
UNKNOWN = "Id=vllm-gone.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead\nTimeoutStopUSec=infinity\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that answers with the file `answer`, and writes down what it was asked."""
    place = tmp_path / "systemctl"
    place.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$*" >>"$0.asked"\ncat "$0.says" >&2\ncat "$0.answer"\nexit "$(cat "$0.status")"\n'
    )
    place.chmod(0o755)
    for name, text in (("answer", ""), ("says", ""), ("status", "0"), ("asked", "")):
        (tmp_path / f"systemctl.{name}").write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return place


def tell(program: Path, **texts: str) -> None:
    for name, text in texts.items():
        Path(f"{program}.{name}").write_text(text)


def asked(program: Path) -> list[str]:
    return Path(f"{program}.asked").read_text().splitlines()


def test_units_as_systemctl_shows_them(program: Path) -> None:
    tell(program, answer=f"{LOADING}\n{UNKNOWN}")
    units = Systemd().show(["vllm-gone.service", "vllm-e2b.service", "vllm-other.service"])
    loading = units["vllm-e2b.service"]
    assert loading == Unit(
        "vllm-e2b.service",
        load_state="loaded",
        active_state="activating",
        sub_state="start",
        file_state="disabled",
        fragment="/etc/systemd/system/vllm-e2b.service",
        status_text="loading=weights, 12 s",
        restarts=2,
        invocation="5d4c3b2a",
        job=True,
        stop_timeout_s=90.0,
    )
    assert loading.loaded and not loading.down and not loading.auto_restart
    gone = units["vllm-gone.service"]
    assert not gone.loaded and gone.down and gone.stop_timeout_s is None
    assert not replace(gone, job=True).down, "it waits for its turn"
    assert units["vllm-other.service"] == Unit("vllm-other.service")
    assert asked(program)[0].endswith("-- vllm-e2b.service vllm-gone.service vllm-other.service")


def test_a_systemd_that_cannot_be_asked_is_an_error(program: Path) -> None:
    tell(program, status="1", says="Failed to connect to bus")
    for ask in (lambda: Systemd().show(["a.service"]), lambda: Systemd().loaded("vllm-*.service")):
        with pytest.raises(SystemdError, match="cannot be asked: Failed to connect to bus"):
            ask()
    tell(
        program,
        status="0",
        answer="● vllm-a.service loaded failed failed A\nvllm-b.service loaded active running B\n\n",
    )
    assert Systemd().loaded("vllm-*.service") == ["vllm-a.service", "vllm-b.service"], "with and without a mark"


def test_orders_and_their_refusals(program: Path) -> None:
    systemd = Systemd()
    assert systemd.show([]) == {}
    systemd.daemon_reload()
    systemd.start(["a.service", "b.service"])
    systemd.start([])
    systemd.enable("t.target")
    systemd.reset_failed(["a.service"])
    systemd.reset_failed([])
    assert asked(program) == [
        "daemon-reload",
        "start --no-block -- a.service b.service",
        "enable -- t.target",
        "reset-failed -- a.service",
    ]
    tell(program, status="5", says="Unit a.service is masked.")
    with pytest.raises(SystemdError, match=r"'systemctl start --no-block -- a.service': Unit a.service is masked"):
        systemd.start(["a.service"])
    systemd.reset_failed(["a.service"])
    assert systemd.stop(["a.service"], 5) == "Unit a.service is masked."
    tell(program, status="0", says="")
    assert systemd.stop(["a.service"], 5) is None


def test_a_stop_that_takes_too_long_is_told_and_no_exception(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    said = Systemd().stop(["a.service"], 0.1)
    assert said == "'systemctl stop -- a.service' did not end within 0.1 s"
    with pytest.raises(SystemdError, match="'nothing-like-it' cannot be run"):
        run_command(["nothing-like-it"], 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1min 30s", 90.0), ("2h 5min", 7500.0), ("500ms", 0.5), ("infinity", None), ("1month", 2_629_800.0), ("0", 0.0)],
)
def test_time_spans(text: str, seconds: float | None) -> None:
    assert parse_timespan(text) == seconds


def test_a_program_is_run_in_english() -> None:
    said = "print(os.environ['LC_ALL'], os.environ['DOCKER_HOST'])"
    script = f"import os, sys; {said}; print('why ', file=sys.stderr); sys.exit(3)"
    ran = host.run_in_english([sys.executable, "-c", script], 30)
    assert ran == Ran(3, "C unix:///var/run/docker.sock\n", "why"), "the daemon of the engines, and no context"


def test_output_that_is_no_utf_8_and_escapes_are_no_traceback() -> None:
    script = r"import os; os.write(1, b'\xff'); os.write(2, b'\x1b[2Jx'); raise SystemExit(1)"
    assert run_command([sys.executable, "-c", script], 30) == Ran(1, "\ufffd", "\\u001b[2Jx")


@pytest.mark.slow
def test_a_process_that_cannot_be_killed_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi on a lost GPU, which the kernel does not let die; or one whose control group is frozen."""
    scores: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: scores.append(process.pid))
    monkeypatch.setattr(systemd, "KILLED_S", 0.1)
    began = time.monotonic()
    with pytest.raises(SystemdError, match=r"its process \d+ cannot be killed"):
        host.run_in_english(["sleep", "5"], 0.2)
    assert time.monotonic() - began < 4
    with open(f"/proc/{scores[0]}/oom_score_adj", encoding="ascii") as file:
        assert file.read().strip() == "1000"
