# SPDX-License-Identifier: Apache-2.0
"""Fingerprints as gpg prints them, and what makes a key refused."""

from __future__ import annotations

import base64
import shutil
import subprocess
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system.openpgp import (
    KeyFormatError,
    armour,
    dearmour,
    list_fingerprints,
    parse_fingerprints,
    parse_packets,
)

KEYS = Path(__file__).parents[1] / "roles/keys"
KEY_OF_ED25519, KEY_OF_RSA = KEYS / "ed25519.asc", KEYS / "rsa-with-subkey.asc"
"""Public keys made by gpg 2.2.40 for example.org."""
ED25519 = "2EE0110E2F575441C0A3CF3DA7FF9C965562865B"
RSA = "379CE5E90C34A1E850EBC237B0C9811DEAA02CE3"
BOTH = KEY_OF_RSA.read_bytes() + KEY_OF_ED25519.read_bytes()


@pytest.mark.parametrize(
    ("data", "expected"),
    [(KEY_OF_ED25519.read_bytes(), [ED25519]), (KEY_OF_RSA.read_bytes(), [RSA]), (BOTH, [ED25519, RSA])],
)
def test_fingerprints_of_primary_keys_armoured_and_binary(data: bytes, expected: list[str]) -> None:
    binary = dearmour(data)
    assert list_fingerprints(data) == list_fingerprints(binary) == expected
    assert dearmour(armour(binary).encode()) == binary


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
