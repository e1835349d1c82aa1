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
TAG_SIGNATURE, TAG_SECRET_KEY, TAG_PUBLIC_KEY, TAG_USER_ID, TAG_SUBKEY, TAG_USER_ATTRIBUTE = 2, 5, 6, 13, 14, 17
ALLOWED_TAGS = (TAG_SIGNATURE, TAG_PUBLIC_KEY, TAG_USER_ID, TAG_SUBKEY, TAG_USER_ATTRIBUTE)
"""What an exported public key consists of. Other packets (compressed data, for one) can hold keys that gpg reads."""
MAX_BYTES = 1024**2
"""Our choice: the keys of the vendors have some thousand bytes."""
MAX_KEY_BYTES = 0xFFFF
"""The fingerprint of a version 4 key has the length in two octets (RFC 9580 section 5.5.4.2)."""


class KeyFormatError(ValueError):
    """The data is not an OpenPGP public key of a known version."""


def dearmour(data: bytes) -> bytes:
    """Return the binary form of a key, which may be armoured or binary."""
    if len(data) > MAX_BYTES:
        raise KeyFormatError(f"it has more than {MAX_BYTES} bytes, which no key of a repository has")
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


def armour(data: bytes) -> str:
    """Return a binary key as ASCII text, with the empty line that apt expects."""
    encoded = base64.encodebytes(data).decode()
    return f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{encoded}-----END PGP PUBLIC KEY BLOCK-----\n"


def _read_header(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the packet at an offset, the offset of its body and the body's length, RFC 9580 section 4.2."""
    head = data[at]
    if not head & 0x80:
        raise KeyFormatError("it is not OpenPGP data")
    at += 1
    if not head & 0x40:
        octets = 1 << (head & 0x03)
        if octets == 8:
            raise KeyFormatError("it has a packet of indeterminate length, which no exported key has")
        if at + octets > len(data):
            raise KeyFormatError("it is cut short")
        return (head >> 2) & 0x0F, at + octets, int.from_bytes(data[at : at + octets], "big")
    tag, first = head & 0x3F, data[at]
    if first < 192:
        return tag, at + 1, first
    if first < 224:
        return tag, at + 2, ((first - 192) << 8) + data[at + 1] + 192
    if first == 255:
        if at + 5 > len(data):
            raise KeyFormatError("it is cut short")
        return tag, at + 5, int.from_bytes(data[at + 1 : at + 5], "big")
    raise KeyFormatError("it has a packet of partial length, which no exported key has")


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

    apt trusts every key of a keyring. A keyring with the expected key and a second one is therefore refused, and so is
    every packet that is not part of a public key. gpgv and sqv ignore a subkey that its primary key did not sign, so
    subkeys are not compared. Keys of version 4 and 6 are read; no other version is accepted. Raises KeyFormatError.
    """
    found: set[str] = set()
    packets = parse_packets(dearmour(data))
    if packets and packets[0][0] != TAG_PUBLIC_KEY and packets[0][0] in ALLOWED_TAGS:
        raise KeyFormatError("it does not begin with a public key")
    for tag, body in packets:
        if tag == TAG_SECRET_KEY:
            raise KeyFormatError("it holds a secret key, which belongs on no host")
        if tag not in ALLOWED_TAGS:
            raise KeyFormatError(f"it holds a packet of type {tag}, which is not part of a public key")
        if tag not in (TAG_PUBLIC_KEY, TAG_SUBKEY):
            continue
        if not 0 < len(body) <= MAX_KEY_BYTES:
            raise KeyFormatError(f"it holds a key of {len(body)} bytes; 1 to {MAX_KEY_BYTES} are possible")
        if body[0] not in (4, 6):
            raise KeyFormatError(f"it is an OpenPGP key of version {body[0]}; versions 4 and 6 are supported")
        if tag == TAG_SUBKEY:
            continue
        if body[0] == 4:
            digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False)
        else:
            digest = hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body)
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
