# SPDX-License-Identifier: Apache-2.0
"""The role serving_metrics on this machine: its own directories, with programs of ours in place of the host's."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Generator
from pathlib import Path

from helpers import write_program
from role_cases import Cases, Played, Run, Steps

SYSTEMCTL = """
echo "$@" >> "$STATE/asked"
case "$*" in
"show --property=MainPID --value "*) cat "$STATE/pid-$4" 2>/dev/null || echo 0 ;;
show*) printf 'Id=%s\\nLoadState=loaded\\nActiveState=%s\\n' "$2" "$(cat "$STATE/up-$2" || echo inactive)" ;;
is-enabled*) [ -e "$STATE/on-$2" ] && echo enabled || { echo disabled; exit 1; } ;;
enable*) touch "$STATE/on-$2" ;;
disable*) rm -f "$STATE/on-$2" ;;
start* | restart*) echo active > "$STATE/up-$2" ;;
stop*) rm -f "$STATE/up-$2" ;;
esac
"""
LOOKS = ("show", "is-enabled", "is-active")


class Host:
    """The role's directories below one of this machine, on which a release of the program is installed."""

    def __init__(self, root: Path) -> None:
        self.root, self.units = root, root / "units"
        for name in ("state", "units", "run"):
            (root / name).mkdir()
        for name, script in {"systemctl": SYSTEMCTL, "systemd-analyze": "exit 0", "getent": "exit 0"}.items():
            write_program(root / "bin" / name, script)
        self.socket = root / "run/exporter.sock"
        os.mknod(self.socket, stat.S_IFSOCK)
        self.socket.chmod(0o660)
        self.install("old")

    def install(self, release: str) -> None:
        (self.root / release).mkdir(exist_ok=True)
        write_program(self.root / release / "bin/vllm-edge", "exit 0")
        (self.root / "vllm-edge").unlink(missing_ok=True)
        (self.root / "vllm-edge").symlink_to(f"{release}/bin/vllm-edge")

    def run(self, point: str, check: bool = False) -> Generator[Run, Played, Played]:
        variables = {
            "serving_metrics_program": str(self.root / "vllm-edge"),
            "serving_metrics_state_directory": str(self.root / "state"),
            "__serving_metrics_units_directory": str(self.units),
            "__serving_metrics_run": str(self.root / "run"),
            "__serving_metrics_socket": f"srw-rw---- {self.root.owner()} {self.root.group()}",
        }
        played = yield Run([point], check, variables)
        assert not played.failed, played.text
        return played

    def orders(self) -> list[str]:
        file = self.root / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith(LOOKS)]


CASES = Cases("serving_metrics", make=Host, result="serving_metrics_uninstalled")
RESTARTS = ["restart vllm-edge-exporter.socket", "restart vllm-edge-facts.service"]


@CASES.add
def the_services_come_once_restart_with_unit_or_release_and_go(host: Host) -> Steps:
    (host.root / "vllm-edge").unlink()
    foreseen = yield from host.run("main", check=True)
    assert "would install vllm-edge-exporter.socket" in foreseen.text and not list(host.units.iterdir())
    host.install("old")
    yield from host.run("main")
    assert [line for line in host.orders() if line.startswith("enable")] == [
        "enable vllm-edge-exporter.socket",
        "enable vllm-edge-facts.service",
    ]
    # The command line of a process of a release begins with the directory of the release.
    with subprocess.Popen([str(host.root / "old/venv/bin/python"), "600"], executable="/bin/sleep") as process:
        (host.root / "pid-vllm-edge-facts.service").write_text(f"{process.pid}\n")
        assert (yield from host.run("main")).changed == [] and host.orders() == []
        host.install("new")
        yield from host.run("main", check=True)
        assert host.orders() == []
        yield from host.run("main")
        process.kill()
    assert host.orders() == RESTARTS
    (host.units / "vllm-edge-facts.service").write_text("changed\n")
    yield from host.run("main")
    assert host.orders() == ["daemon-reload", *RESTARTS]
    host.socket.unlink()
    yield from host.run("main")
    assert host.orders() == RESTARTS

    foreign = host.units / "vllm-edge-facts.service.d"
    foreign.mkdir()
    (host.root / "state/metrics.json").write_text("{}")
    removed = yield from host.run("uninstall")
    assert len(removed.result["removed"]) == 5 and list(host.units.iterdir()) == [foreign]
    assert not (host.root / "run").exists() and list((host.root / "state").iterdir()) == []
    assert [line for line in host.orders() if line.startswith("stop")] == [
        "stop vllm-edge-facts.service",
        "stop vllm-edge-exporter.socket",
    ]
    assert (yield from host.run("uninstall")).changed == []


test_case = CASES.make_test()
