# SPDX-License-Identifier: Apache-2.0
"""Packages that cannot be had, each for another reason: the play says why and leaves the host as it was.

The plays begin with the role that is asked, which spares the stages before it. The vendors' site is not touched, since
other labs use it too: faults are made on the host, by what it takes for the vendors' address.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from conftest import Controller, Machine, Play, play_result

Seen = Callable[..., None]

DRIVER = "nvidia_driver : Gather the distribution"
RUNTIME = "container_runtime : Gather the distribution"
UNUSED = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""

# What the host takes for the vendors' site where a test says so. Below /unsigned the signatures are missing.
IMPOSTOR = """
import http.server, sys, urllib.error, urllib.request
class Impostor(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.removeprefix("/unsigned")
        if path != self.path and path.endswith(("InRelease", "Release.gpg")):
            return self.send_error(404)
        try:
            body = urllib.request.urlopen(f"http://{sys.argv[1]}{path}", timeout=10).read()
        except urllib.error.HTTPError as error:
            return self.send_error(error.code)
        if path.endswith(".deb"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 80), Impostor).serve_forever()
"""

# dpkg and apt lock with fcntl, and tell the holder's name from its pid.
HOLD = """
import fcntl, sys, time
open("/proc/self/comm", "w").write("unattended-upgr")
files = [open(path, "w") for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
time.sleep(300)
"""
FRONTEND, LISTS = "/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"

SNAPSHOT = """
dpkg-query --show --showformat '${Package} ${db:Status-Abbrev} ${Version}\\n'
find /etc/apt /var/lib/vllm-edge/keys.json -type f -exec sha256sum {} +
dpkg --audit
find /tmp -maxdepth 1 -name 'vllm-edge-apt-*'
"""


@contextlib.contextmanager
def service(machine: Machine, unit: str, ready: str, program: str, *arguments: str) -> Iterator[None]:
    machine.run("systemd-run", "--quiet", "--collect", f"--unit={unit}", "python3", "-c", program, *arguments)
    try:
        machine.wait(f"{unit} to be ready", lambda: machine.host.run(ready).rc == 0, 10, every=0.2)
        yield
    finally:
        machine.host.run(f"systemctl stop {unit}")


@contextlib.contextmanager
def locked(machine: Machine, *paths: str) -> Iterator[None]:
    """The locks are held as by unattended-upgrades at work."""
    with service(machine, "supply-lock", "pgrep --exact unattended-upgr && sleep 0.3", HOLD, *paths):
        yield


@contextlib.contextmanager
def resolved(machine: Machine, name: str, address: str) -> Iterator[None]:
    """The name stands for another address. The file is a mount in the lab: it is written, never replaced."""
    machine.shell(f"cp /etc/hosts /run/hosts.before && echo {address} {name} >> /etc/hosts")
    try:
        yield
    finally:
        machine.shell("cat /run/hosts.before > /etc/hosts && rm /run/hosts.before")


@pytest.fixture(scope="module")
def impostor(machine: Machine) -> Iterator[None]:
    vendors = machine.run("getent", "hosts", "vendors.lab").split()[0]
    with service(machine, "supply-impostor", "ss -Hltn src 127.0.0.1:80 | grep -q .", IMPOSTOR, vendors):
        yield


def remove(machine: Machine, package: str) -> None:
    """The package is gone, and what apt keeps of it; nothing else changes."""
    machine.shell(f"dpkg --force-depends --remove {package} && rm --force /var/cache/apt/archives/{package}_*.deb")


@pytest.fixture(scope="module")
def without_toolkit(machine: Machine) -> None:
    """The toolkit's own package, which holds nothing that a running container needs."""
    remove(machine, "nvidia-container-toolkit")


def message(play: Play) -> str:
    """What the failed task says, on one line as the terminal wraps it."""
    found = re.search(r"^ +msg: (.*?)\n\n", play.output, re.MULTILINE | re.DOTALL)
    assert found, play.output[-4000:]
    return " ".join(found[1].split()).strip("'\"").replace("''", "'")


Refused = Callable[..., str]


@pytest.fixture
def refused(controller: Controller, machine: Machine, seen: Seen, undisturbed: None) -> Refused:
    """refused(start, variables...) -> the message of a play that fails there and leaves packages and sources alone."""

    def play(start: str, **variables: object) -> str:
        before = machine.shell(SNAPSHOT)
        begin = time.monotonic()
        result = controller.play(
            "playbooks/host.yml", f"--start-at-task={start}", f"--extra-vars={json.dumps(variables)}"
        )
        seconds = time.monotonic() - begin
        assert result.rc != 0 and result.recap["failed"] == 1, result.output[-4000:]
        assert result.changed == []
        assert machine.shell(SNAPSHOT) == before
        said = message(result)
        assert "othing was changed" in said
        seen(said, failed_after=seconds)
        return said

    return play


# ---- packages -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_apt_is_locked_by_somebody_else(machine: Machine, without_toolkit: None, refused: Refused) -> None:
    with locked(machine, FRONTEND):
        pid = machine.run("systemctl", "show", "--property=MainPID", "--value", "supply-lock").strip()
        said = refused(RUNTIME, apt_repository_lock_timeout_s=2)
    assert f"unattended-upgr (process {pid}) holds {FRONTEND}, and was waited for " in said
    assert "apt_repository_lock_timeout_s" in said and f'"ps -fp {pid}"' in said


@pytest.mark.thorough
def test_vendor_drops_packets(machine: Machine, without_toolkit: None, refused: Refused) -> None:
    rule = f"OUTPUT --destination {UNUSED} --jump DROP"
    machine.shell(f"iptables --insert {rule}")
    try:
        with resolved(machine, "vendors.lab", UNUSED):
            said = refused(RUNTIME, apt_repository_timeout_s=1)
    finally:
        machine.shell(f"iptables --delete {rule}")
    assert (
        "nvidia-container-toolkit 1.18.2-1 could not be downloaded from http://vendors.lab/libnvidia-container/" in said
    )
    assert (
        f"(container_runtime_repository_url): Could not connect to vendors.lab:80 ({UNUSED}), connection timed out"
        in said
    )
    assert "1 s (apt_repository_timeout_s)" in said


@pytest.mark.thorough
def test_package_is_damaged_on_its_way(
    machine: Machine, impostor: None, without_toolkit: None, refused: Refused
) -> None:
    with resolved(machine, "vendors.lab", "127.0.0.1"):
        said = refused(RUNTIME)
    assert "nvidia-container-toolkit 1.18.2-1 is not what the signed index describes" in said
    assert "Hash Sum mismatch. It was thrown away." in said and "SHA256" not in said


# ---- repositories -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_repository_is_refused_a_connection(refused: Refused) -> None:
    said = refused(RUNTIME, container_runtime_repository_url="http://127.0.0.1:9/deb/")
    assert said.startswith("The repository http://127.0.0.1:9/deb/ was not added, and nothing was changed: ")
    assert "Could not connect to 127.0.0.1:9" in said and "Connection refused" in said
    assert "name a mirror of it in container_runtime_repository_url" in said


def test_key_has_another_fingerprint(refused: Refused) -> None:
    said = refused(RUNTIME, container_runtime_repository_key_url="{{ nvidia_driver_repository_key_url }}")
    assert "is not the expected one" in said and "container_runtime_repository_key_fingerprint pins" in said


def test_release_is_signed_by_another_key(refused: Refused) -> None:
    other = "{{ nvidia_driver_repository_url | replace('vendors.lab', 'vendors.lab:80') }}"
    said = refused(RUNTIME, container_runtime_repository_url=other)
    assert "its index is not signed by the key " in said and re.search(r"Missing key|NO_PUBKEY", said)
    assert "see that container_runtime_repository_url is the right place" in said


@pytest.mark.thorough
def test_release_is_not_signed(impostor: None, refused: Refused) -> None:
    unsigned = "http://127.0.0.1/unsigned/libnvidia-container/stable/deb/amd64/"
    said = refused(RUNTIME, container_runtime_repository_url=unsigned)
    assert "its index is not signed by the key " in said and "is not signed" in said.partition(": ")[2]


def test_toolkit_that_is_known_not_to_work(refused: Refused) -> None:
    said = refused(RUNTIME, container_runtime_toolkit_version="1.19.1-1")
    assert "container_runtime_toolkit_version is 1.19.1-1: cuInit was reported to fail in containers" in said


def test_version_that_the_repository_does_not_have(refused: Refused) -> None:
    said = refused(RUNTIME, container_runtime_toolkit_version="9.9.9-1")
    assert "No repository of this host has nvidia-container-toolkit, " in said
    assert ", libnvidia-container1 9.9.9-1 (there is 1.20.0+8269969f-1, 1.20.0-1, 1.19.0-1, 1.18.2-1): " in said
    assert "set container_runtime_toolkit_version to what there is" in said


# ---- Debian's own, and back -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_mirror_of_the_distribution_is_unreachable(machine: Machine, refused: Refused) -> None:
    """The way out is a proxy that is down, for that mirror alone."""
    remove(machine, "docker-buildx")
    sites = machine.shell("apt-get indextargets --format '$(SITE)' 'Created-By: Packages'").splitlines()
    name = next(urlsplit(site).hostname for site in sites if "vendors.lab" not in site)
    dead = "".join(f'Acquire::{scheme}::Proxy::{name} "http://127.0.0.1:9";\n' for scheme in ("http", "https"))
    machine.shell(f"printf %s {shlex.quote(dead)} > /etc/apt/apt.conf.d/99supply-fault")
    try:
        said = refused(RUNTIME)
    finally:
        machine.run("rm", "/etc/apt/apt.conf.d/99supply-fault")
    assert re.search(rf"docker-buildx \S+ could not be downloaded from \w+://{name}\S* \(/etc/apt/", said)
    assert "Could not connect to 127.0.0.1:9" in said


def test_a_plain_run_waits_for_a_lock_and_heals_exactly_that(
    controller: Controller, machine: Machine, without_toolkit: None, undisturbed: None, seen: Seen
) -> None:
    remove(machine, "nvidia-persistenced")
    remove(machine, "docker-buildx")
    asked = f"journalctl --quiet --since=@{int(machine.now())} --identifier=ansible-apt_packages --lines=1 | grep -q ."
    begin = time.monotonic()
    with locked(machine, LISTS, FRONTEND):
        process = controller.start_play("playbooks/host.yml", f"--start-at-task={DRIVER}")
        machine.wait("apt to be asked for", lambda: machine.host.run(asked).rc == 0, 90)
        time.sleep(2)
        assert process.poll() is None
        assert machine.host.run("dpkg --status nvidia-persistenced | grep -q '^Status: .* installed'").rc != 0
    result = play_result(process)
    assert result.rc == 0, result.output[-4000:]
    assert result.changed == [
        "nvidia_driver : Install the driver packages; lock timeout in seconds - 300",
        "nvidia_driver : Hold the driver packages (nvidia-persistenced)",
        "container_runtime : Install the Docker Engine; lock timeout in seconds - 300",
        "container_runtime : Install the container toolkit; lock timeout in seconds - 300",
        "container_runtime : Hold the container toolkit packages (nvidia-container-toolkit)",
    ]
    seen("waits until the lock is free; then all is there again", serving_after=time.monotonic() - begin)
    # What an operator does next on that host.
    machine.run("apt-get", "update", "--option=APT::Update::Error-Mode=any")
    assert machine.shell("dpkg --audit; apt-get check --quiet=2") == ""
