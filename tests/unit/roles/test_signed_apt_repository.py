# SPDX-License-Identifier: Apache-2.0
"""Fingerprints as gpg prints them, what makes a key refused, and that a repository is added whole or not at all."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.apt_sources import get_index_prefix
from ansible.module_utils.vllm_edge.system.openpgp import (
    KeyFormatError,
    dearmour,
    list_fingerprints,
    parse_fingerprints,
    parse_packets,
)

KEY_OF_ED25519, KEY_OF_RSA = (Path(__file__).parent / f"keys/{name}.asc" for name in ("ed25519", "rsa-with-subkey"))
"""Public keys made by gpg 2.2.40 for example.org."""
ED25519 = "2EE0110E2F575441C0A3CF3DA7FF9C965562865B"
RSA = "379CE5E90C34A1E850EBC237B0C9811DEAA02CE3"
URI = "http://vendor.example/repos/debian13/x86_64/"
RunModule = Callable[..., dict[str, Any]]


# -- fingerprints


BOTH = KEY_OF_RSA.read_bytes() + KEY_OF_ED25519.read_bytes()


@pytest.mark.parametrize(
    ("data", "expected"),
    [(KEY_OF_ED25519.read_bytes(), [ED25519]), (KEY_OF_RSA.read_bytes(), [RSA]), (BOTH, [ED25519, RSA])],
    ids=["ed25519", "rsa", "both"],
)
def test_fingerprints_of_primary_keys_armoured_and_binary(data: bytes, expected: list[str]) -> None:
    assert list_fingerprints(data) == list_fingerprints(dearmour(data)) == expected


def packet(tag: int, body: bytes) -> bytes:
    return bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<html>Not found</html>", "not OpenPGP data"),
        (b"-----BEGIN PGP MESSAGE-----\n\naaaa\n-----END PGP MESSAGE-----\n", "no public key block"),
        (packet(5, b"\x04secret"), "secret key"),
        (packet(13, b"a name alone"), "not begin with a public key"),
        (b"", "no public key"),
        (packet(6, b"\x04whole")[:-2], "cut short"),
        (b"\xc6", "cut short"),
        (b"\xc6\xe1ab", "partial length"),
        (bytes([0x80 | 6 << 2 | 3]) + b"\x04key", "indeterminate length"),
        (bytes([0x80 | 6 << 2 | 2]) + b"\x00\x00", "cut short"),
        (packet(6, b"\x04" * 65_536), "key of 65536 bytes"),
        (packet(6, b""), "key of 0 bytes"),
        (packet(6, b"\x04key") + packet(14, b"\x03old"), "version 3"),
        (packet(6, b"\x05key"), "version 5"),
        *((packet(6, b"\x04key") + packet(tag, b"x"), f"type {tag}") for tag in (0, 1, 8, 10, 11, 12, 18, 20, 60)),
        (packet(6, b"\x04key") + packet(13, b"x" * 1024**2), "more than 1048576 bytes"),
        (KEY_OF_ED25519.read_bytes().replace(b"mDME", b"mD*E"), "armour is damaged"),
    ],
)
def test_what_is_no_key_is_said(data: bytes, said: str) -> None:
    with pytest.raises(KeyFormatError, match=said):
        list_fingerprints(data)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gpg"), reason="gpg is not installed")
@pytest.mark.parametrize("hidden", ["compressed", "indeterminate", "second", "subkey", "user attribute", "signature"])
def test_gpg_never_sees_a_key_that_the_module_does_not(hidden: str, tmp_path: Path) -> None:
    known, other = (dearmour(key.read_bytes()) for key in (KEY_OF_ED25519, KEY_OF_RSA))
    packed = zlib.compressobj(wbits=-15)
    deflated = b"\x01" + packed.compress(other) + packed.flush()
    data = (
        known
        + {
            "compressed": packet(8, deflated),
            "indeterminate": bytes([0x80 | 8 << 2 | 3]) + deflated,
            "second": other,
            "subkey": b"".join(packet(tag, body) for tag, body in parse_packets(other) if tag == 14),
            "user attribute": packet(17, b"\x02\x01x"),
            "signature": packet(2, b"\x04rubbish"),
        }[hidden]
    )
    (tmp_path / "keyring").write_bytes(data)
    command = ["gpg", "--homedir", str(tmp_path), "--with-colons", "--show-keys", str(tmp_path / "keyring")]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    gpg = {line.split(":")[9] for before, line in pairwise(lines) if before.startswith("pub:")}
    try:
        found = list_fingerprints(data)
    except KeyFormatError:
        # gpg reads what is refused here, so the refusal is not a matter of taste.
        assert hidden in ("compressed", "indeterminate")
        assert gpg == {ED25519, RSA}
    else:
        assert gpg <= set(found)
        assert found == ([ED25519, RSA] if hidden == "second" else [ED25519])


@pytest.mark.parametrize("size", [150, 300, 9000])
def test_packet_lengths_of_both_formats(size: int) -> None:
    body = b"\x04" + bytes(size - 1)
    new = bytes([0xC6]) + (
        bytes([size])
        if size < 192
        else bytes([((size - 192) >> 8) + 192, (size - 192) & 0xFF])
        if size < 8384
        else b"\xff" + size.to_bytes(4, "big")
    )
    old = bytes([0x80 | 6 << 2 | (0 if size < 256 else 1)]) + size.to_bytes(1 if size < 256 else 2, "big")
    assert list_fingerprints(new + body) == list_fingerprints(old + body)


def test_version_6_keys_have_long_fingerprints() -> None:
    # RFC 9580, appendix A.3: the sample certificate's primary key.
    sample = base64.b64decode("xioGY4d/4xsAAAAg+U2nu0jWCmHlZ3BqZYfQMxmZu52JGggkLq2EVD34laPC")[:44]
    expected = "CB186C4F0609A697E4D52DFA6C722B0C1F1E27C18A56708F6525EC27BAD9ACC9"
    assert list_fingerprints(sample) == [expected]


@pytest.mark.parametrize(
    "text", [ED25519, ED25519.lower(), "2EE0 110E 2F57 5441 C0A3  CF3D A7FF 9C96 5562 865B", f"{ED25519}, "]
)
def test_fingerprints_as_operators_write_them(text: str) -> None:
    assert parse_fingerprints(text) == [ED25519]


@pytest.mark.parametrize("text", ["A7FF9C965562865B", f"0x{ED25519}", "-"])
def test_short_fingerprints_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a fingerprint"):
        parse_fingerprints(text)


# -- sources


@pytest.mark.parametrize(
    ("uri", "suite", "expected"),
    [
        (URI, "/", "vendor.example_repos_debian13_x86%5f64_"),
        ("https://a:b@deb.example:8080/x", "stable", "deb.example:8080_x_dists_stable_"),
        ("file:/srv/mirror", "/", "_srv_mirror_"),
        ("file:///srv/mirror", "./", "_srv_mirror_._"),
    ],
)
def test_names_of_apts_index_files(uri: str, suite: str, expected: str) -> None:
    assert get_index_prefix(uri, suite) == expected


# -- the module

PREFERENCES, RECORD = "etc/apt/preferences.d/vendor.pref", "var/lib/vllm-edge/keys.json"
APT_GET = """
echo "$@" >> "$STATE/apt-get.log"
# What lies on the host while apt reads, and what it reads.
find "$STATE/root/etc" -type f 2>/dev/null | wc -l >> "$STATE/written"
for word; do case "$word" in Dir::Etc::sourcelist=*) trial=${word#*=}; cat "$trial" > "$STATE/trial";; esac; done
stat --format %a "${trial%/*}" "$trial" > "$STATE/modes"
cp "$(sed -n 's/^Signed-By: //p' "$STATE/trial")" "$STATE/trial.gpg"
if [ -e "$STATE/broken" ]; then cat "$STATE/broken" >&2; exit 100; fi
mkdir -p "$STATE/root/var/lib/apt/lists"
touch "$STATE/root/var/lib/apt/lists/vendor.example_repos_debian13_x86%5f64_InRelease"
"""


@pytest.fixture
def run(run_module: RunModule, tmp_path: Path, program: Callable[[str, str], None]) -> RunModule:
    program("apt-get", APT_GET)
    program("dpkg", "echo amd64")
    shutil.copy(KEY_OF_ED25519, tmp_path / "vendor.asc")
    given = {
        "name": "vendor",
        "uri": URI,
        "key_url": f"file://{tmp_path}/vendor.asc",
        "fingerprint_variable": "vendor_fingerprint",
        "root": str(tmp_path / "root"),
        "record": str(tmp_path / "root" / RECORD),
        "uri_variable": "vendor_url",
        "packages": ["nvidia-*", "libnvidia-*"],
        "packages_variable": "vendor_packages",
    }
    return lambda check=False, **more: run_module("signed_apt_repository", given | more, check=check)


def files(tmp_path: Path) -> dict[str, bytes]:
    root = tmp_path / "root"
    paths = [path for path in root.rglob("*") if path.is_file() and "lists" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def test_first_use_is_recorded_and_second_run_changes_nothing(
    run: RunModule, tmp_path: Path, on_the_disk: Callable[[Path], bool]
) -> None:
    foreseen = run(check=True)
    assert foreseen["changed"] and foreseen["fingerprints"] == []
    assert files(tmp_path) == {}

    result = run()
    assert (result["changed"], result["trust"], result["fingerprints"]) == (True, "first-use", [ED25519])
    assert f'vendor_fingerprint: "{ED25519}"' in str(result["warnings"])
    written = files(tmp_path)
    assert written["etc/apt/keyrings/vendor.gpg"] == dearmour(KEY_OF_ED25519.read_bytes())
    assert "Signed-By: /etc/apt/keyrings/vendor.gpg" in written["etc/apt/sources.list.d/vendor.sources"].decode()
    assert json.loads(written[RECORD])["vendor"]["fingerprints"] == [ED25519]
    assert on_the_disk(tmp_path / "root" / RECORD)

    (tmp_path / "vendor.asc").unlink()  # a checked key is not downloaded again
    again = run()
    assert (again["changed"], again["refreshed"], again["trust"]) == (False, False, "recorded")
    assert run(check=True)["changed"] is False
    assert files(tmp_path) == written


def test_pinned_key_must_match(run: RunModule, tmp_path: Path) -> None:
    result = run(fingerprint=RSA)
    assert result["rc"] == 1
    assert ED25519 in result["msg"] and f"vendor_fingerprint pins {RSA}" in result["msg"]
    assert files(tmp_path) == {}
    assert run(fingerprint=ED25519)["trust"] == "pinned"


def test_later_different_key_is_refused(run: RunModule, tmp_path: Path) -> None:
    run()
    shutil.copy(KEY_OF_RSA, tmp_path / "vendor.asc")
    (tmp_path / "root/etc/apt/keyrings/vendor.gpg").unlink()
    result = run()
    assert result["rc"] == 1 and "recorded at first use" in result["msg"]
    # The operator's pin is the way to a new key.
    result = run(fingerprint=RSA)
    assert (result["rc"], result["changed"], result["fingerprints"]) == (0, True, [RSA])
    assert run()["trust"] == "recorded"


def test_known_key_with_another_beside_it_is_refused(run: RunModule, tmp_path: Path) -> None:
    (tmp_path / "vendor.asc").write_bytes(BOTH)
    result = run(fingerprint=ED25519)
    assert result["rc"] == 1 and RSA in result["msg"]
    assert run(fingerprint=f"{RSA},{ED25519}")["rc"] == 0


UNSIGNED = """E: Failed to fetch http://vendor.example/repos/debian13/x86_64/InRelease  Sub-process /usr/bin/sqv \
returned an error code (1), error message is: Missing key D348, which is needed to verify signature.
E: Some index files failed to download. They have been ignored, or old ones used instead.
"""


@pytest.mark.parametrize("installed", [False, True])
def test_what_apt_cannot_read_is_never_written(run: RunModule, tmp_path: Path, installed: bool) -> None:
    if installed:
        run()
    before = files(tmp_path)
    (tmp_path / "broken").write_text(UNSIGNED)
    (tmp_path / "written").unlink(missing_ok=True)
    shutil.copy(KEY_OF_RSA, tmp_path / "vendor.asc")
    umask = os.umask(0o077)
    try:
        result = run(fingerprint=RSA)
    finally:
        os.umask(umask)
    assert result["rc"] == 1
    assert "was not added, and nothing was changed" in result["msg"]
    assert f"not signed by the key {RSA} of file://{tmp_path}/vendor.asc: Missing key D348" in result["msg"]
    assert "vendor_url" in result["msg"] and "Some index files" not in result["msg"]
    assert files(tmp_path) == before
    # A run that is cut off while apt reads leaves nothing either.
    assert (tmp_path / "written").read_text().split() == [str(sum(name.startswith("etc") for name in before))]
    # apt was asked with what would have been written, from elsewhere, and nothing is left there.
    trial = (tmp_path / "trial").read_text()
    assert f"URIs: {URI}\n" in trial
    keyring = Path(re.findall(r"^Signed-By: (.*)$", trial, re.MULTILINE)[0])
    assert (tmp_path / "trial.gpg").read_bytes() == dearmour(KEY_OF_RSA.read_bytes())
    assert not keyring.parent.exists()
    # apt checks signatures as a user of its own.
    assert (tmp_path / "modes").read_text().split() == ["755", "644"]


@pytest.mark.parametrize("damage", ["etc/apt/keyrings/vendor.gpg", "etc/apt/sources.list.d/vendor.sources"])
def test_damage_is_repaired_as_foreseen(run: RunModule, tmp_path: Path, damage: str) -> None:
    run()
    written = files(tmp_path)
    (tmp_path / "root" / damage).write_bytes(b"damaged")
    assert run(check=True)["changed"] is True
    assert run()["changed"] is True
    assert files(tmp_path) == written


def test_missing_index_is_read_without_a_change(run: RunModule, tmp_path: Path) -> None:
    run()
    shutil.rmtree(tmp_path / "root/var/lib/apt/lists")
    result = run()
    assert (result["changed"], result["refreshed"]) == (False, True)
    # One repository alone, and a failure is a failure.
    log = (tmp_path / "apt-get.log").read_text().splitlines()[-1]
    assert "Dir::Etc::sourceparts=-" in log and "APT::Update::Error-Mode=any" in log


def test_the_same_repository_elsewhere_is_named(run: RunModule, tmp_path: Path) -> None:
    other = tmp_path / "root/etc/apt/sources.list.d/cuda.list"
    other.parent.mkdir(parents=True)
    other.write_text("deb [arch=amd64] http://vendor.example/repos/debian13/x86_64 /\n")
    result = run()
    assert result["rc"] == 1 and str(other) in result["msg"]


def test_key_as_text_wins_and_is_checked_each_time(run: RunModule) -> None:
    local = {"key_text": KEY_OF_RSA.read_text(), "key_source": "keys/vendor.asc"}
    assert run(**local)["fingerprints"] == [RSA]
    assert run(**local)["changed"] is False
    other = {**local, "key_text": KEY_OF_ED25519.read_text()}
    for check in (True, False):
        result = run(check=check, **other)
        assert result["rc"] == 1 and "keys/vendor.asc" in result["msg"]


def test_a_key_that_cannot_be_had_is_said(run: RunModule, tmp_path: Path) -> None:
    (tmp_path / "vendor.asc").unlink()
    assert "could not be downloaded" in run()["msg"]
    assert "vendor_fingerprint" in run(key_url="")["msg"]
    (tmp_path / "vendor.asc").write_text("<html>log in first</html>")
    assert "not OpenPGP data" in run()["msg"]
    os.truncate(tmp_path / "vendor.asc", 1024**4)
    assert "more than 1048576 bytes" in run()["msg"], "it is not read to its end"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"uri": "http://v.example/\nTrusted: yes"}, "vendor_url has"),
        ({"uri": "http://v.example/ http://w.example/"}, "vendor_url has"),
        ({"suites": ["/\n\nTypes: deb"]}, "suites has"),
        ({"components": ["main\r"]}, "components has"),
        ({"architectures": ["amd64\0"]}, "architectures has"),
        ({"packages": []}, "vendor_packages is empty"),
        ({"packages": ["*"]}, "vendor_packages has '*'"),
        ({"packages": ["a*", "nvidia-*"]}, "vendor_packages has 'a*'"),
        ({"packages": ["nvidia-*\nPin: release *"]}, "vendor_packages has"),
        ({"key_url": "http://vendor.example/key"}, "which anybody on the way can change"),
        ({"key_url": "HTTP://vendor.example/key"}, "which anybody on the way can change"),
        ({"key_url": "ftp://vendor.example/key"}, "which anybody on the way can change"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_what_would_end_a_field_or_trust_the_wire_is_refused(
    run: RunModule, tmp_path: Path, wrong: dict[str, Any], said: str, check: bool
) -> None:
    result = run(check=check, **wrong)
    assert result["rc"] == 1 and said in result["msg"], result
    assert "\n" not in result["msg"] and "\0" not in result["msg"]
    assert files(tmp_path) == {}


INDEX = "Origin: {0}\nLabel: {0} L\nDate: Mon, 23 Nov 2026 10:00:00 UTC\n"


def add_source_of_debian(tmp_path: Path, uri: str, ours: str, index: str) -> None:
    """A source of the host that nobody restricts, with its index and that of our repository."""
    for path, text in {
        "etc/apt/sources.list": f"deb {uri} stable main\n",
        f"var/lib/apt/lists/{get_index_prefix(uri, 'stable')}InRelease": INDEX.format("Debian"),
        f"var/lib/apt/lists/{get_index_prefix(ours, '/')}InRelease": index,
    }.items():
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(text)


MIRROR, MEDIUM = "http://vendor.example/debian", "file:///media/vllm-edge/apt/distribution/"


@pytest.mark.parametrize(
    ("uri", "other", "index", "pin"),
    [
        (URI, "http://deb.debian.org/debian", INDEX.format("NVIDIA"), 'origin "vendor.example"'),
        (URI, MIRROR, INDEX.format("NVIDIA"), "release o=NVIDIA,l=NVIDIA L"),
        ("file:///media/vllm-edge/apt/x/", MEDIUM, INDEX.format("NVIDIA"), "release o=NVIDIA,l=NVIDIA L"),
        (URI, MIRROR, "Origin: a,b\nLabel: Fine\n", "release l=Fine"),
        (URI, MIRROR, "Origin: *\nLabel: /x/\n", ""),
        (URI, MIRROR, "Date: now\n", ""),
    ],
)
def test_repository_is_told_from_others_by_its_host_or_its_index(
    run: RunModule, tmp_path: Path, uri: str, other: str, index: str, pin: str
) -> None:
    add_source_of_debian(tmp_path, other, uri, index)
    result = run(uri=uri)
    written = files(tmp_path).get(PREFERENCES, b"").decode()
    assert re.findall("^Pin: (.*)$", written, re.MULTILINE) == ([pin, pin] if pin else [])
    assert ("can replace every package of this host" in str(result["warnings"])) == (not pin)
    assert (run(uri=uri)["changed"], run(check=True, uri=uri)["changed"]) == (False, False)
    # A medium that was taken away leaves the preferences as they are.
    for path in (tmp_path / "root/var/lib/apt/lists").iterdir():
        path.unlink()
    run(uri=uri)
    assert files(tmp_path).get(PREFERENCES, b"").decode() == written


def test_a_second_run_changes_nothing_once_the_other_repository_of_the_host_is_restricted(
    run: RunModule, tmp_path: Path
) -> None:
    add_source_of_debian(tmp_path, MIRROR, URI, INDEX.format("NVIDIA"))
    assert run()["changed"]
    (tmp_path / "root/etc/apt/sources.list").unlink()
    assert not run()["changed"]


def test_repository_that_calls_itself_like_the_distribution_is_refused(run: RunModule, tmp_path: Path) -> None:
    add_source_of_debian(tmp_path, MIRROR, URI, INDEX.format("Debian"))
    result = run()
    assert result["rc"] == 1 and "apt cannot tell them apart" in result["msg"]
    assert "etc/apt/sources.list.d/vendor.sources" not in files(tmp_path)


def test_changed_packages_change_the_preferences_alone(run: RunModule, tmp_path: Path) -> None:
    run()
    before = files(tmp_path)
    result = run(packages=["nvidia-*"])
    assert result["changed"] and [entry["after_header"] for entry in result["diff"]] == [f"/{PREFERENCES}"]
    assert {name for name, data in files(tmp_path).items() if data != before[name]} == {PREFERENCES}


def test_damaged_record_is_not_overwritten(run: RunModule, tmp_path: Path) -> None:
    record = tmp_path / "root" / RECORD
    record.parent.mkdir(parents=True)
    record.write_text("{")
    result = run()
    assert result["rc"] == 1 and str(record) in result["msg"]
    assert record.read_text() == "{"


# -- the archive's components

TRIXIE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n"
DEB822 = """Types: deb
URIs: http://security.debian.org/debian-security/
Suites: trixie-security
Components: main contrib
Signed-By: /etc/apt/keyrings/own.gpg
"""
DOCKER = "deb http://download.docker.com/linux/debian trixie stable\n"
WANTED = {"name": "driver", "release": "trixie", "components": ["contrib", "non-free"]}


@pytest.fixture
def archive(tmp_path: Path, program: Callable[[str, str], None]) -> Path:
    sources = tmp_path / "etc/apt/sources.list.d"
    sources.mkdir(parents=True)
    (sources.parent / "sources.list").write_text(TRIXIE)
    (sources / "security.sources").write_text(DEB822)
    (sources / "docker.list").write_text(DOCKER)
    program("apt-get", 'echo "$@" >>"$STATE/asked"; [ ! -e "$STATE/broken" ] || { cat "$STATE/broken" >&2; exit 100; }')
    return tmp_path


@pytest.fixture
def add(run_module: RunModule, archive: Path) -> RunModule:
    return lambda **more: run_module("signed_apt_repository", WANTED | {"root": str(archive)}, **more)


def test_components_are_added_with_address_and_key_of_the_hosts_own_sources(add: RunModule, archive: Path) -> None:
    written = archive / "etc/apt/sources.list.d/driver.sources"
    assert add(check=True)["changed"] and not written.exists() and not (archive / "asked").exists()
    result = add()
    assert result["added"] == [
        "http://deb.debian.org/debian trixie contrib non-free",
        "http://security.debian.org/debian-security/ trixie-security non-free",
    ]
    assert "Signed-By: /etc/apt/keyrings/own.gpg" in written.read_text() and "docker" not in written.read_text()
    assert not add()["changed"]
    # What the operator adds to his own sources is left to them.
    (archive / "etc/apt/sources.list").write_text(TRIXIE.replace("main", "main contrib non-free"))
    (archive / "etc/apt/sources.list.d/security.sources").unlink()
    assert add()["changed"] and not written.exists()


def test_a_source_that_apt_cannot_read_is_not_written(add: RunModule, archive: Path) -> None:
    (archive / "broken").write_text(
        "E: Failed to fetch http://deb.debian.org/debian/dists/trixie/InRelease  Could not resolve 'deb.debian.org'\n"
    )
    assert "was not added, and nothing was changed: Could not resolve 'deb.debian.org'" in add()["msg"]
    assert not (archive / "etc/apt/sources.list.d/driver.sources").exists()


def test_a_key_inside_a_source_is_nobody_elses(add: RunModule, archive: Path) -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n"
    (archive / "etc/apt/sources.list.d/security.sources").write_text(DEB822.partition("Signed-By")[0] + key)
    assert "add contrib non-free to its components there" in add()["msg"]
