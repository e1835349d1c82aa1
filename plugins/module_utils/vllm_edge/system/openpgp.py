# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of OpenPGP public keys, read without gpg, which a bare host may lack (RFC 9580)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

ARMOUR = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)
FINGERPRINT = re.compile(r"(?:[0-9A-F]{40}|[0-9A-F]{64})")
TAG_SECRET_KEY, TAG_PUBLIC_KEY = 5, 6


class KeyFormatError(ValueError):
    """The data is not an OpenPGP public key of a known version."""


def dearmour(data: bytes) -> bytes:
    """Return the binary form of a key, which may be armoured or binary."""
    if b"-----BEGIN" not in data:
        return data
    binary = b""
    for block in ARMOUR.finditer(data.decode("ascii", "replace")):
        # Headers such as "Version:" end at the first empty line; "=xxxx" is a checksum, optional in newer OpenPGP.
        lines = [line.strip() for line in block["body"].splitlines()]
        start = lines.index("") + 1 if "" in lines else 0
        payload = "".join(line for line in lines[start:] if line and not line.startswith("="))
        try:
            binary += base64.b64decode(payload, validate=True)
        except binascii.Error as error:
            raise KeyFormatError(f"its ASCII armour is damaged ({error})") from error
    if not binary:
        raise KeyFormatError("it holds no public key block")
    return binary


def _read_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the packet at an offset, the offset of its body and the body's length, RFC 9580 section 4.2."""
    head = data[at]
    if not head & 0x80:
        raise KeyFormatError("it is not OpenPGP data")
    at += 1
    if not head & 0x40:
        octets = 1 << (head & 0x03)
        if octets == 8:
            return (head >> 2) & 0x0F, at, len(data) - at
        return (head >> 2) & 0x0F, at + octets, int.from_bytes(data[at : at + octets], "big")
    tag, first = head & 0x3F, data[at]
    if first < 192:
        return tag, at + 1, first
    if first < 224:
        return tag, at + 2, ((first - 192) << 8) + data[at + 1] + 192
    if first == 255:
        return tag, at + 5, int.from_bytes(data[at + 1 : at + 5], "big")
    raise KeyFormatError("it has a packet of unknown length, which no exported key has")


def parse_packets(data: bytes) -> list[tuple[int, bytes]]:
    """Return the packets (tag, body) of binary OpenPGP data. Raises KeyFormatError."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        try:
            tag, begin, length = _read_header(data, at)
        except IndexError as error:
            raise KeyFormatError("it is cut short") from error
        at = begin + length
        if at > len(data):
            raise KeyFormatError("it is cut short")
        found.append((tag, data[begin:at]))
    return found


def list_fingerprints(data: bytes) -> list[str]:
    """Return the fingerprints of all primary keys in an OpenPGP key, armoured or binary, as gpg --show-keys does.

    apt trusts every key of a keyring. A keyring with the expected key and a second one is therefore refused.
    """
    found: set[str] = set()
    for tag, body in parse_packets(dearmour(data)):
        if tag == TAG_SECRET_KEY:
            raise KeyFormatError("it holds a secret key, which belongs on no host")
        if tag != TAG_PUBLIC_KEY or not body:
            continue
        if body[0] == 4:
            digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)
        elif body[0] == 6:
            digest = hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body)
        else:
            raise KeyFormatError(f"it is an OpenPGP key of version {body[0]}; versions 4 and 6 are supported")
        found.add(digest.hexdigest().upper())
    if not found:
        raise KeyFormatError("it holds no public key")
    return sorted(found)


def parse_fingerprints(text: str) -> list[str]:
    """Return the fingerprints that an operator pinned, separated by commas. Raises ValueError."""
    wanted = [part for part in (re.sub(r"[\s:]", "", part).upper() for part in text.split(",")) if part]
    for part in wanted:
        if not FINGERPRINT.fullmatch(part):
            raise ValueError(f"{part!r} is not a fingerprint: 40 (or 64) hexadecimal digits are expected")
    return sorted(set(wanted))
