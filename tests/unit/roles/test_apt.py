# SPDX-License-Identifier: Apache-2.0
"""What apt says, as apt 2.6 and 3.0 say it, in an operator's words; apt's sources, and what a repository gets."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import apt, apt_sources

VENDOR = "http://vendors.lab/libnvidia-container/stable/deb/amd64"
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
OTHER_KEY = f"""Err:1 {VENDOR}  InRelease
  Sub-process /usr/bin/sqv returned an error code (1), error message is: Missing key D348, which is needed.
W: An error occurred during the signature verification. The repository is not updated.
E: Failed to fetch {VENDOR}/InRelease  Sub-process /usr/bin/sqv returned an error code (1), error message is: \
Missing key D348, which is needed.
"""
UNMET = """The following packages have unmet dependencies:
 nvidia-container-toolkit : Depends: nvidia-container-toolkit-base (= 1.20.0-1) but 1.18.2-1 is to be installed
                            Depends: libnvidia-container-tools (= 1.20.0-1) but 1.18.2-1 is to be installed
E: Unable to correct problems, you have held broken packages.
E: The following information from --solver 3.0 may provide additional context:
   Unable to satisfy dependencies. Reached two conflicting decisions:
"""
FETCH = f"E: Failed to fetch {VENDOR}/InRelease  {{}}\n"
REQUEST: dict[str, Any] = {"variables": {f"{VENDOR}/": "toolkit_url"}, "version": "toolkit_version"}
REQUEST |= {"offered": ["1.20.0-1", "1.18.2-1"], "lock_s": 300, "silence_s": 20}
RELEASE = f"E: Release file for {VENDOR}/InRelease "
SQV = "Sub-process /usr/bin/sqv returned an error code (1), error message is: "


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        (REFUSED, "(127.0.0.1). - connect (111: Connection refused)", "firewall, DNS; proxy in /etc/apt/apt.conf.d"),
        (
            REFUSED.replace("to vendors.lab:", "to proxy.example:"),
            "Could not connect to proxy.example:80",
            "mirror of it",
        ),
        (FETCH.format("Could not resolve 'vendors.lab'"), "Could not resolve 'vendors.lab'", "in toolkit_url"),
        (FETCH.format("Connection timed out"), "timed out", "silent for 20 s (apt_repository_timeout_s)"),
        (GONE, "404 Not Found [IP: 127.0.0.1 80]", "wrong address in toolkit_url"),
        (DAMAGED, "Hash Sum mismatch", "name another mirror in toolkit_url"),
        (OTHER_KEY, "Missing key D348", "that toolkit_url is the right place, and compare its key"),
        (
            f"W: GPG error: {VENDOR}  InRelease: NO_PUBKEY 3CA7\nE: x is not signed.\n",
            "NO_PUBKEY 3CA7",
            "compare its key",
        ),
        (FETCH.format(f"{SQV}SHA1 is not considered secure"), "SHA1 is not considered secure", "may be the right one"),
        (
            f"{RELEASE}is not valid yet (invalid for another 3d).\n",
            "not valid yet (invalid for another 3d)",
            "timedatectl",
        ),
        (f"{RELEASE}is expired (invalid since 3d).\n", "is expired", "toolkit_url is up to date"),
        (FETCH.format("407  Proxy Authentication Required"), "407 Proxy Authentication", "put them into its address"),
        (FETCH.format("Certificate verification failed: NOT trusted."), "NOT trusted", "install the CA of your proxy"),
        ("E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a'.\n", "interrupted", "dpkg --audit"),
        ("E: Sub-process /usr/bin/dpkg returned an error code (1)\n", "error code (1)", "/var/log/apt/term.log"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.\n", "/var/cache/apt", "'apt-get clean'"),
        (UNMET, "toolkit : Depends: nvidia-container-toolkit-base (= 1.20.0-1)", "held broken packages."),
        ("E: Malformed entry 1 in list file /etc/apt/x.list\n", "Malformed entry 1", "Correct the sources in /etc/apt"),
    ],
)
def test_reason_and_remedy(text: str, reason: str, remedy: str, seen: Any) -> None:
    told = apt.explain(text, REQUEST)
    assert reason in told and remedy in told, told
    assert "\n" not in told and "SHA256" not in told and "{" not in told
    assert told.count("Connection refused") <= 1, "one reason for all files"
    seen("apt", told)


def test_what_scripts_of_packages_print_is_printable() -> None:
    assert apt.explain("E: a\x1b[2K\x07\u202e\n", REQUEST) == "a\\u001b[2K\\u0007\\u202e."


def test_what_a_change_writes() -> None:
    told = "Need to get 1,000 MB of archives.\nAfter this operation, 2 GB of additional disk space will be used.\n"
    found = apt.foretell_writes(told)
    sizes = {path: round(mib) for path, mib in found["packages"].items()}
    assert (sizes, "initramfs" in found) == ({"/var/cache/apt/archives": 954, "/usr": 1907}, False)
    assert apt.foretell_writes("After this operation, 3 MB disk space will be freed.\n") == {}
    assert apt.foretell_writes("Inst curl\n") == {} and apt.foretell_writes("Inst dkms\n") == {"initramfs": {}}
    full = "zstd: error 70 : cannot write block : No space left on device\n"
    full += "E: Sub-process /usr/bin/dpkg returned an error code (1)\n"
    assert "No space left on device" in apt.explain(full, REQUEST) and "'df -h /boot" in apt.explain(full, REQUEST)


def test_branches_and_releases_that_there_are() -> None:
    pins = "\n".join(f"nvidia-driver-pinning-{name}" for name in ("590", "590.48.01", "600", "590.126.9", "590-open"))
    assert apt.list_offered(pins, ["nvidia-driver-pinning-580"]) == ["600", "590"]
    assert apt.list_offered(pins, ["nvidia-driver-pinning-590.1.2"]) == ["590.126.9", "590.48.01"]
    assert apt.list_offered("toolkit | 1.20.0-1 | http://v  Packages\n", ["toolkit"]) == ["1.20.0-1"]


# -- sources and preferences

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
URL = "http://vendor.example/x/"
WANTED = {"name": "vendor", "url": URL, "url_variable": "vendor_url", "suites": ["/"], "components": []}
WANTED |= {"packages": ["nvidia-*"], "packages_variable": "vendor_packages", "key_url": "https://v/key", "key_text": ""}
WANTED |= {"key_source": "https://v/key", "fingerprint": "", "fingerprint_variable": "vendor_fingerprint"}
WANTED |= {
    "keyring": "/k/vendor.asc",
    "source": "/s/vendor.sources",
    "preferences": "/p/vendor.pref",
    "record": "/k.json",
}


def test_sources_of_both_formats() -> None:
    grep = [f"/a.list\0{line}" for line in ONE_LINE.splitlines()] + [
        f"/b.sources\0{line}" for line in DEB822.splitlines()
    ]
    files = apt_sources.split_files("\n".join([*grep, "/c.list.save\0deb http://saved.example /"]))
    assert files["/b.sources"] == DEB822
    found = apt_sources.read_sources(files, "/own.sources")
    assert [(one.uri, one.suite, one.path, one.signed_by) for one in found] == [
        ("http://vendor.example/repos/debian13/x86_64", "/", "/a.list", "/x.gpg"),
        ("http://vendor.example/repos/debian13/x86_64/", "/", "/b.sources", "/x.gpg"),
        ("http://second.example/", "/", "/b.sources", "/x.gpg"),
    ]
    assert apt_sources.read_sources(files, "/b.sources") == found[:1]
    uri = "http://vendor.example/repos/debian13/x86_64"
    assert [one.path for one in apt_sources.find_clashes(found, uri, ["/"])] == ["/a.list", "/b.sources"]
    assert apt_sources.find_clashes(found, uri, ["stable"]) == []
    assert apt_sources.find_clashes([apt_sources.Source("http://v/$(ARCH)", "/", "")], "http://v/amd64/", ["/"])


def test_archive_whose_source_contains_its_key() -> None:
    text = "Types: deb\nURIs: http://a/\nSuites: trixie\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY\n"
    planned = apt_sources.plan_archive({"/a.sources": text}, "/own", "trixie", ["contrib"])
    assert "/a.sources contains the key of its archive" in planned["mistake"] and "add contrib to" in planned["mistake"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "http://v.example/\nTrusted: yes"}, "vendor_url has 'http://v.example/\\nTrusted: yes'"),
        ({"suites": ["/\n\nTypes: deb"]}, "suites has"),
        ({"packages": []}, "vendor_packages is empty"),
        ({"packages": ["a*", "nvidia-*"]}, "vendor_packages has 'a*'"),
        ({"packages": ["nvidia-*\nPin: release *"]}, "vendor_packages has"),
        ({"key_url": "HTTP://vendor.example/key"}, "which anybody on the way can change"),
        ({"key_url": ""}, "has no key"),
        ({"fingerprint": "A7FF9C965562865B"}, "vendor_fingerprint: 'A7FF9C965562865B' is not a fingerprint"),
        ({"record": "/broken.json"}, "/broken.json is not JSON"),
        ({"url": "http://taken.example"}, "http://taken.example is configured in /s/cuda.list already"),
    ],
)
def test_repository_that_is_refused(wrong: dict[str, Any], said: str) -> None:
    files = {"/s/cuda.list": "deb http://taken.example/ /\n", "/broken.json": "{"}
    mistake = apt_sources.plan_repository(WANTED | wrong, files)["mistake"]
    assert said in mistake and "\n" not in mistake


MIRROR = "http://vendor.example/debian"


@pytest.mark.parametrize(
    ("url", "other", "origin", "pin"),
    [
        (URL, "http://deb.debian.org/debian", "NVIDIA|N", 'origin "vendor.example"'),
        (URL, MIRROR, "NVIDIA|N", "release o=NVIDIA,l=N"),
        ("file:///media/x/", "file:///media/debian", "NVIDIA|N", "release o=NVIDIA,l=N"),
        ("http://vendor.example/deb/$(ARCH)", MIRROR, "NVIDIA|N", "release o=NVIDIA,l=N"),
        (URL, MIRROR, "a,b|Fine", "release l=Fine"),
        (URL, MIRROR, "*|$(LABEL)", "can replace every package of this host"),
        (URL, MIRROR, "Debian|Debian", "apt cannot tell them apart"),
    ],
)
def test_repository_is_told_from_others_by_its_host_or_its_index(url: str, other: str, origin: str, pin: str) -> None:
    files = {
        "/s/debian.list": f"deb {other} stable main\n",
        "/s/vendor.sources": f"Types: deb\nURIs: {url}\nSuites: /\n",
    }
    # apt 2.6 and 3.0 print the address of a directory with one slash, and the architecture in place of $(ARCH).
    printed = [uri.replace("file:///", "file:/").replace("$(ARCH)", "amd64") for uri in (other, url)]
    lines = [f"{printed[0]}/|Debian|Debian", f"{printed[1]}|{origin}"]
    assert not apt_sources.plan_repository(WANTED | {"url": url}, files, lines[:1])["complete"]
    chosen = apt_sources.choose_preferences(WANTED | {"url": url}, files, lines)
    assert pin in "".join(chosen.values())
    # A medium that was taken away leaves the preferences as they are.
    kept = apt_sources.choose_preferences(WANTED | {"url": url}, files | {"/p/vendor.pref": "former\n"}, [])
    assert kept["text"] == (chosen["text"] if pin.startswith("origin") else "former\n")


def test_repository_with_preferences_of_ours_is_no_other() -> None:
    files = {"/s/vllm-edge-x.sources": f"Types: deb\nURIs: {MIRROR}\nSuites: /\n", "/p/vllm-edge-x.pref": ""}
    assert 'Pin: origin "vendor.example"' in apt_sources.choose_preferences(WANTED, files, [])["text"]
