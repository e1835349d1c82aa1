# SPDX-License-Identifier: Apache-2.0
"""What apt says, as apt 2.6.1 and 3.0.3 said it, in an operator's words; and how long it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import apt
from ansible.module_utils.vllm_edge.system.apt_sources import Source, find_clashes, read_sources

RunModule = Callable[..., dict[str, Any]]
VENDOR = "http://vendors.lab/libnvidia-container/stable/deb/amd64"
LIMITS = apt.Limits(lock_s=300, silence_s=20)

REFUSED = f"""Err:2 {VENDOR}  libnvidia-container1 1.18.2-1
  Unable to connect to vendors.lab:http:
Err:1 {VENDOR}  libnvidia-container-tools 1.18.2-1
  Could not connect to vendors.lab:80 (127.0.0.1). - connect (111: Connection refused)
  Unable to connect to vendors.lab:http:
E: Failed to fetch {VENDOR}/./libnvidia-container-tools_1.18.2-1_amd64.deb  Unable to connect to vendors.lab:http:
E: Failed to fetch {VENDOR}/./libnvidia-container1_1.18.2-1_amd64.deb  Unable to connect to vendors.lab:http:
E: Some files failed to download
"""
GONE = f"""Err:1 {VENDOR}  libnvidia-container-tools 1.18.2-1
  404  Not Found [IP: 127.0.0.1 80]
E: Failed to fetch {VENDOR}/./libnvidia-container-tools_1.18.2-1_amd64.deb  404  Not Found [IP: 127.0.0.1 80]
"""
DAMAGED = f"""Err:1 {VENDOR}  libnvidia-container1 1.18.2-1
  Hash Sum mismatch
E: Failed to fetch {VENDOR}/./libnvidia-container1_1.18.2-1_amd64.deb  Hash Sum mismatch
   Hashes of expected file:
    - SHA256:a74d38d059fe86b18177f44d0a1327d1e6ca8392592a8e80b73ffe919f5383dc
   Last modification reported: Sat, 21 Nov 2026 13:26:25 +0000
"""
DROPPED = """Err:2 http://deb.debian.org/debian sid InRelease
  Unable to connect to deb.debian.org:http:
Err:1 http://deb.debian.org/debian trixie InRelease
  Could not connect to deb.debian.org:80 (192.0.2.1), connection timed out
  Unable to connect to deb.debian.org:http:
Reading package lists...
W: Failed to fetch http://deb.debian.org/debian/dists/trixie/InRelease  Unable to connect to deb.debian.org:http:
W: Failed to fetch http://deb.debian.org/debian/dists/sid/InRelease  Unable to connect to deb.debian.org:http:
W: Some index files failed to download. They have been ignored, or old ones used instead.
"""
OTHER_KEY = f"""Err:1 {VENDOR}  InRelease
  Sub-process /usr/bin/sqv returned an error code (1), error message is: Missing key D348, which is needed.
W: An error occurred during the signature verification. The repository is not updated.
E: Failed to fetch {VENDOR}/InRelease  Sub-process /usr/bin/sqv returned an error code (1), error message is: \
Missing key D348, which is needed.
"""
OTHER_KEY_AT_FIRST = f"""Err:1 {VENDOR}  InRelease
  Sub-process /usr/bin/sqv returned an error code (1), error message is: Missing key D348, which is needed.
W: OpenPGP signature verification failed: {VENDOR}  InRelease: Sub-process /usr/bin/sqv returned an error code (1), \
error message is: Missing key D348, which is needed.
E: The repository '{VENDOR}  InRelease' is not signed.
"""
OTHER_KEY_2_6 = f"""W: GPG error: {VENDOR}  InRelease: The following signatures couldn't be verified because the \
public key is not available: NO_PUBKEY 3CA72DAF9D6BD530
E: The repository '{VENDOR}  InRelease' is not signed.
"""
UNSIGNED = f"E: The repository '{VENDOR}  Release' is no longer signed.\n"
NO_REPOSITORY = f"E: The repository '{VENDOR}  Release' does not have a Release file.\n"
LOCKED = """E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 2666 (unattended-upgr)
E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?
"""
LOCKED_LISTS = """E: Could not get lock /var/lib/apt/lists/lock. It is held by process 2672 (packagekitd)
E: Unable to lock directory /var/lib/apt/lists/
"""
LOCKED_UNKNOWN = """E: Could not get lock /var/lib/apt/lists/lock - open (11: Resource temporarily unavailable)
E: Unable to lock directory /var/lib/apt/lists/
"""
NOT_OFFERED = """Package nvidia-container-toolkit is not available, but is referred to by another package.
E: Version '9.9.9-1' for 'nvidia-container-toolkit' was not found
E: Unable to locate package nonsense
E: Package 'docker-ce' has no installation candidate
"""
UNMET = """The following packages have unmet dependencies:
 nvidia-container-toolkit : Depends: nvidia-container-toolkit-base (= 1.20.0-1) but 1.18.2-1 is to be installed
                            Depends: libnvidia-container-tools (= 1.20.0-1) but 1.18.2-1 is to be installed
E: Unable to correct problems, you have held broken packages.
E: The following information from --solver 3.0 may provide additional context:
   Unable to satisfy dependencies. Reached two conflicting decisions:
"""
INTERRUPTED = "E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a' to correct the problem. \n"
DPKG_FAILED = """Errors were encountered while processing:
 /var/cache/apt/archives/nvidia-persistenced.deb
E: Sub-process /usr/bin/dpkg returned an error code (1)
"""

SOURCES = [
    Source("http://vendors.lab/", "/", "/etc/apt/sources.list.d/all.list"),
    Source(f"{VENDOR}/", "/", "/etc/apt/sources.list.d/vllm-edge-toolkit.sources"),
    Source("http://deb.debian.org/debian", "trixie", "/etc/apt/sources.list"),
]
REQUEST = apt.Request("the container toolkit", "toolkit_version", {f"{VENDOR}/": "toolkit_url"}, LIMITS)
UNTOUCHED = "nothing was changed"
TIMED_OUT = REFUSED.replace(". - connect (111: Connection refused)", ", connection timed out")
OF_DEBIAN = REFUSED.replace(VENDOR + "/.", "http://deb.debian.org/debian/pool/main/d").replace("1.18.2-1", "26%2bd")


def why(text: str, update: str = "", offered: dict[str, list[str]] | None = None) -> str:
    message = apt.explain_failed_install(REQUEST, apt.Outcome(False, text, 301.2), update, SOURCES, offered or {})
    assert "\n" not in message and message.startswith("The container toolkit could not be installed")
    assert "  " not in message
    return message


@pytest.mark.parametrize(
    ("text", "said", "unsaid"),
    [
        (
            REFUSED,
            f"libnvidia-container-tools 1.18.2-1, libnvidia-container1 1.18.2-1 could not be downloaded from {VENDOR}/ "
            "(toolkit_url): Could not connect to vendors.lab:80 (127.0.0.1). - connect (111: Connection refused). | "
            f"mirror of it in toolkit_url|{UNTOUCHED}",
            "apt_repository_timeout_s",
        ),
        (TIMED_OUT, "A server may be silent for 20 s (apt_repository_timeout_s).", "111"),
        (
            OF_DEBIAN.replace("vendors.lab", "deb.debian.org"),
            "libnvidia-container-tools 26+d, libnvidia-container1 26+d could not be downloaded from "
            "http://deb.debian.org/debian (/etc/apt/sources.list): Could not connect",
            "toolkit_url",
        ),
        # A proxy that is down is the reason.
        (
            REFUSED.replace("to vendors.lab:", "to proxy.example:"),
            f"from {VENDOR}/ (toolkit_url): Could not connect to proxy.example:80 (127.0.0.1). - connect",
            "vendors.lab:80",
        ),
        (
            GONE,
            f"libnvidia-container-tools 1.18.2-1 was not found on|: 404 Not Found [IP: 127.0.0.1 80]. |{UNTOUCHED}",
            "Err:",
        ),
        (
            DAMAGED,
            f"libnvidia-container1 1.18.2-1 is not what the signed index describes, coming from {VENDOR}/|"
            f": Hash Sum mismatch. It was thrown away.|{UNTOUCHED}",
            "SHA256",
        ),
        (
            LOCKED,
            "unattended-upgr (process 2666) holds /var/lib/dpkg/lock-frontend, and was waited for 301 s|"
            f'apt_repository_lock_timeout_s|"ps -fp 2666"|{UNTOUCHED}',
            "fuser",
        ),
        (LOCKED_UNKNOWN, '"fuser -v /var/lib/apt/lists/lock"', "ps -fp"),
        (INTERRUPTED, '"dpkg --configure -a"|Nothing was changed', UNTOUCHED),
        (DPKG_FAILED, "dpkg failed half way|term.log", "othing was changed"),
        # Other errors are apt's own, and short.
        (
            UNMET,
            "Unable to correct problems, you have held broken packages.|"
            f"nvidia-container-toolkit : Depends: nvidia-container-toolkit-base (= 1.20.0-1)|{UNTOUCHED}",
            "solver",
        ),
    ],
)
def test_reasons_of_a_failed_installation(text: str, said: str, unsaid: str) -> None:
    message = why(text)
    assert [words for words in said.split("|") if words not in message] == []
    assert unsaid not in message


def test_versions_that_are_not_there() -> None:
    message = why(NOT_OFFERED, offered={"nvidia-container-toolkit": ["1.20.0-1", "1.18.2-1"]})
    assert "No repository of this host has nvidia-container-toolkit 9.9.9-1 (there is 1.20.0-1, 1.18.2-1)" in message
    assert ", nonsense, docker-ce: set toolkit_version to what there is" in message and UNTOUCHED in message
    assert "Not every index" not in message
    offered = {"a": ["2", "1"], "b": ["2", "1"]}
    several = apt.describe_unknown([("a", "9"), ("b", "9"), ("c", "9")], offered, "")
    assert "has a, b 9 (there is 2, 1), c 9: name a" in several
    unread = why(NOT_OFFERED, update=DROPPED)
    assert "Not every index could be read: the index could not be downloaded from http://deb.debian.org/d" in unread
    assert unread.count("connection timed out") == 1


def test_a_warning_is_better_than_no_reason() -> None:
    assert apt.extract_errors("W: only a warning\n") == "W: only a warning"


OTHER = "is not signed by the key ABCD of key.asc"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OTHER_KEY, f"{OTHER}|: Missing key D348|toolkit_url"),
        (OTHER_KEY_AT_FIRST, f"{OTHER}|: Missing key D348|toolkit_url"),
        (OTHER_KEY_2_6, f"{OTHER}|NO_PUBKEY 3CA72DAF9D6BD530|toolkit_url"),
        (UNSIGNED, f"{OTHER}|is no longer signed|toolkit_url"),
        (DROPPED, "connection timed out. Make it reachable"),
        (NO_REPOSITORY, "does not have a Release file. The usual causes are a wrong address in toolkit_url"),
        (LOCKED_LISTS, "packagekitd (process 2672) holds /var/lib/apt/lists/lock"),
        ("E: Malformed entry 1\n", "apt says: Malformed entry 1."),
    ],
)
def test_a_repository_that_is_not_added(text: str, said: str) -> None:
    outcome = apt.Outcome(False, text, 7)
    message = apt.explain_unread_repository(VENDOR, "the key ABCD of key.asc", "toolkit_url", outcome, LIMITS)
    assert message.startswith(f"The repository {VENDOR} was not added, and {UNTOUCHED}: ")
    assert [words for words in said.split("|") if words not in message] == []


# -- sources

URI = "http://vendor.example/repos/debian13/x86_64/"
ONE_LINE = """
# deb http://commented.example /
deb [arch=amd64 signed-by=/x.gpg] http://vendor.example/repos/debian13/x86_64 /
deb-src http://vendor.example/repos/debian13/x86_64/ /
"""
DEB822 = """Types: deb deb-src
URIs: http://vendor.example/repos/debian13/x86_64/
 http://second.example/
# a remark
Suites: /
Signed-By: /x.gpg

Types: deb
URIs: http://off.example/
Suites: /
Enabled: no
"""


def test_sources_of_both_formats(tmp_path: Path) -> None:
    directory = tmp_path / "etc/apt/sources.list.d"
    directory.mkdir(parents=True)
    for name, text in (("a.list", ONE_LINE), ("b.sources", DEB822), ("c.list.save", ONE_LINE)):
        (directory / name).write_text(text)
    found = read_sources(str(tmp_path))
    assert [(source.uri, source.suite, Path(source.path).name) for source in found] == [
        ("http://vendor.example/repos/debian13/x86_64", "/", "a.list"),
        ("http://vendor.example/repos/debian13/x86_64/", "/", "b.sources"),
        ("http://second.example/", "/", "b.sources"),
    ]
    others = [source for source in found if source.path != str(directory / "b.sources")]
    assert [source.path for source in find_clashes(others, URI, ["/"], "amd64")] == [str(directory / "a.list")]
    assert find_clashes(found, URI, ["stable"], "amd64") == []


@pytest.mark.parametrize(("architecture", "clashes"), [("amd64", True), ("arm64", False)])
def test_architecture_in_addresses(architecture: str, clashes: bool) -> None:
    source = Source("http://v.example/deb/$(ARCH)", "/", "a.list")
    assert bool(find_clashes([source], "http://v.example/deb/amd64/", ["/"], architecture)) is clashes


# -- a call


def call(answers: Sequence[tuple[int, str, str]], limits: apt.Limits) -> tuple[apt.Outcome, list[list[str]]]:
    """The last answer holds for all calls after it. Time passes only where somebody sleeps."""
    commands: list[list[str]] = []
    slept = [0.0]

    def run(command: list[str]) -> tuple[int, str, str]:
        commands.append(command)
        return answers[min(len(commands), len(answers)) - 1]

    return apt.apt_get(run, ["update"], limits, clock=lambda: sum(slept), sleep=slept.append), commands


def test_a_lock_is_waited_for_until_it_is_free_or_as_long_as_stated() -> None:
    outcome, commands = call([(100, "", LOCKED), (100, "", LOCKED_LISTS), (0, "Done", "")], LIMITS)
    assert outcome.ok and outcome.waited_s == 2 and len(commands) == 3
    outcome, _ = call([(100, "", LOCKED)], apt.Limits(lock_s=7, silence_s=20))
    assert not outcome.ok and outcome.waited_s == 7
    assert apt.find_lock(outcome.text)


def test_what_scripts_of_packages_print_is_printable() -> None:
    outcome, _ = call([(1, "Setting up x\n\x1b[2K\x1b]0;owned\x07", "dpkg: error\u202e\n")], LIMITS)
    assert outcome.text == "Setting up x\n\\u001b[2K\\u001b]0;owned\\u0007\ndpkg: error\\u202e\n"


def test_other_failures_are_not_tried_again_and_silence_has_an_end() -> None:
    outcome, (command,) = call([(100, "", REFUSED)], apt.Limits(lock_s=300, silence_s=9))
    assert not outcome.ok
    assert {"Acquire::http::Timeout=9", "Acquire::https::Timeout=9", "Acquire::Retries=1"} < set(command)
    assert command[-1] == "update"


# -- the module

APT_GET = """
echo "$@" >> "$STATE/apt-get.log"
for word; do
  case "$word" in
    update) cat "$STATE/update" >&2 2>/dev/null; exit 0;;
    install)
      if [ -e "$STATE/install" ]; then cat "$STATE/install" >&2; exit 100; fi
      cat "$STATE/done"; exit 0;;
  esac
done
"""


@pytest.fixture
def run(run_module: RunModule, tmp_path: Path, program: Callable[[str, str], None]) -> RunModule:
    program("apt-get", APT_GET)
    program("apt-cache", 'case $1 in madison) cat "$STATE/madison";; pkgnames) cat "$STATE/names";; esac')
    (tmp_path / "madison").write_text(
        f"toolkit | 1.20.0-1 | {VENDOR}  Packages\ntoolkit | 1.18.2-1 | {VENDOR} Packages\n"
    )
    (tmp_path / "done").write_text(
        "0 upgraded, 1 newly installed, 0 to remove and 0 not upgraded.\nSetting up toolkit (9-1) ...\n"
    )
    given = {"packages": ["toolkit=9-1"], "purpose": "the toolkit", "version_variable": "toolkit_version"}
    given["root"] = str(tmp_path)
    return lambda check=False, **more: run_module("apt_packages", {**given, **more}, check=check)


def test_packages_are_installed(run: RunModule, tmp_path: Path) -> None:
    result = run(absent=["old"], replace=True)
    assert (result["changed"], result["installed"]) == (True, ["toolkit 9-1"])
    update, asked, install = (tmp_path / "apt-get.log").read_text().splitlines()
    assert update.endswith(" update")
    assert asked.endswith(" toolkit=9-1 old- --print-uris -o Debug::NoLocking=1")
    assert install.endswith(" --allow-downgrades --allow-change-held-packages toolkit=9-1 old-")
    (tmp_path / "done").write_text("0 upgraded, 0 newly installed, 0 to remove and 3 not upgraded.\n")
    assert run(update=False)["changed"] is False
    last = (tmp_path / "apt-get.log").read_text().splitlines()[-1]
    assert "--allow" not in last and last.endswith(" --no-remove")
    assert len((tmp_path / "apt-get.log").read_text().splitlines()) == 5
    (tmp_path / "done").write_text("0 upgraded, 0 newly installed, 1 downgraded, 0 to remove and 3 not upgraded.\n")
    assert run()["changed"] is True


FORETOLD = """0 upgraded, 32 newly installed, 0 to remove and 0 not upgraded.
Need to get {} of archives.
After this operation, {} of additional disk space will be used.
Do you want to continue? [Y/n] N
"""


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (FORETOLD.format("13.7 MB", "42.3 MB"), (13_700_000, 42_300_000)),
        (FORETOLD.format("0 B/1,024 kB", "1.2 GB"), (0, 1_200_000_000)),
        ("After this operation, 3 MB disk space will be freed.\n", (0, 0)),
        ("E: Unable to locate package x\n", (0, 0)),
    ],
)
def test_sizes(text: str, needed: tuple[int, int]) -> None:
    assert apt.parse_sizes(text) == needed


def test_room() -> None:
    gib = 2**30
    needed = (1 * gib, 2 * gib)
    assert apt.explain_lack_of_space(REQUEST, needed, {"/var": (1, 2 * gib), "/usr": (2, 3 * gib)}) == ""
    apart = apt.explain_lack_of_space(REQUEST, needed, {"/var": (1, 1 * gib), "/usr": (2, 3 * gib)})
    assert "takes 1024 MiB of the file system of /var, 512 MiB have to stay free there, and 1024 MiB are" in apart
    together = apt.explain_lack_of_space(REQUEST, needed, {"/var": (1, 3 * gib), "/usr": (1, 3 * gib)})
    assert "The container toolkit could not be installed, and nothing was changed: it takes 3072 MiB" in together
    assert apt.explain_lack_of_space(REQUEST, (0, 0), {"/var": (1, 0), "/usr": (1, 0)}) == ""


def test_a_disk_without_room_is_told_before_anything_is_installed(
    run: RunModule, tmp_path: Path, seen: Callable[[str, str], None]
) -> None:
    for directory in ("var/cache/apt/archives", "usr"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "done").write_text(FORETOLD.format("300 MB", "900000 GB"))
    result = run()
    assert result["rc"] == 1
    assert result["msg"].startswith(
        "The toolkit could not be installed, and nothing was changed: it takes 858307170 MiB"
    )
    assert "--print-uris" in (tmp_path / "apt-get.log").read_text().splitlines()[-1], "nothing was installed"
    seen("disk too small for the packages", result["msg"])


def test_packages_of_others_are_not_removed(run: RunModule, tmp_path: Path) -> None:
    """As apt 3.0.3 foretold it for docker.io on a host with podman-docker."""
    going = "The following packages will be REMOVED:\n  old podman-docker* libz:i386\nThe following NEW packages\n  x\n"
    (tmp_path / "done").write_text(going + FORETOLD.format("1 MB", "1 MB"))
    for check in (True, False):
        result = run(absent=["old"], check=check)
        said = "The toolkit could not be installed, and nothing was changed: apt would remove libz, podman-docker, "
        assert result["rc"] == 1 and result["msg"].startswith(said)
    assert "--print-uris" in (tmp_path / "apt-get.log").read_text().splitlines()[-1], "nothing was installed"
    assert run(absent=["old"], removable=["podman-docker", "libz"])["rc"] == 0
    assert run(packages=[], absent=["old"])["msg"].startswith("The toolkit could not be removed, and nothing was ")
    assert run(packages=[], absent=["old", "podman-docker", "libz"])["rc"] == 0
    assert (tmp_path / "apt-get.log").read_text().splitlines()[-1].endswith(" old- podman-docker- libz- --purge")


def test_an_index_of_others_that_cannot_be_read_is_a_warning(run: RunModule, tmp_path: Path) -> None:
    (tmp_path / "update").write_text(DROPPED)
    result = run()
    assert result["rc"] == 0
    assert "connection timed out" in str(result["warnings"])


def test_a_lock_on_the_indexes_is_not_waited_for_twice(
    run: RunModule, tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    (tmp_path / "bin/apt-get").unlink()
    program("apt-get", f"echo x >> $STATE/calls; echo '{LOCKED_LISTS}' >&2; exit 100")
    result = run(lock_timeout=0)
    assert result["rc"] == 1 and "packagekitd (process 2672)" in result["msg"]
    assert (tmp_path / "calls").read_text().split() == ["x"]


@pytest.mark.parametrize(
    ("wanted", "has"),
    [
        ("toolkit=9-1", "1.20.0-1, 1.18.2-1"),
        # The branches of NVIDIA's repository and of Ubuntu's archive, and the releases of one that is pinned.
        ("nvidia-driver-pinning-580", "600, 595, 590"),
        ("nvidia-headless-no-dkms-999-server-open=999.*", "615, 580"),
        ("nvidia-driver-pinning-590.1.2", "600.9.1, 590.126.9, 590.48.01"),
    ],
)
def test_a_version_or_branch_that_is_not_there(run: RunModule, tmp_path: Path, wanted: str, has: str) -> None:
    pins = [f"nvidia-driver-pinning-{name}" for name in ("590", "590.48.01", "600", "590.126.9", "600.9.1", "595")]
    leads = [f"nvidia-headless-no-dkms-{name}" for name in ("580", "580-server-open", "590-open", "615-server-open")]
    (tmp_path / "names").write_text("\n".join([*pins, *leads]))
    name = wanted.partition("=")[0]
    (tmp_path / "install").write_text(f"E: Unable to locate package {name}\n")
    message = run(packages=[wanted], version_variable="nvidia_driver_branch")["msg"]
    assert f"No repository of this host has {name} (there is {has}): set nvidia_driver_branch to what there" in message
