# SPDX-License-Identifier: Apache-2.0
"""Removal of secrets from texts: what looks like one by its name or form, and given values wherever they appear."""

from __future__ import annotations

import re
from collections.abc import Iterable

GONE = "REDACTED"
SHORTEST_SECRET = 6

# A name of a secret. max_tokens and the tokenizer are none.
NAME = r"(?:api[-_]?key|(?:\b|[-_.])key(?![a-z])|token(?!s|i[sz])|secret|passw|passphrase|credential)"
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}\]\"']+)"
PATTERNS: tuple[re.Pattern[str], ...] = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<secret>(?:[^-]|-(?!----))*)-----END"),
    # https://user:password@host, and a token alone before the @. # pragma: allowlist secret
    re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://(?P<secret>[^\s/@\"']+)@", re.IGNORECASE),
    re.compile(r"\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9._~+/=-]{6,})", re.IGNORECASE),
    # One argument per line, as in docker-create: the values are on lines of their own, until an option or a comment.
    re.compile(
        rf"^--[\w-]{{0,50}}{NAME}[\w-]{{0,50}}\n(?P<secret>(?!-).+(?:\n(?!-|# ).+)*)", re.IGNORECASE | re.MULTILINE
    ),
    # The same in a list of JSON, as in container.json.
    re.compile(rf"\"--[\w-]{{0,50}}{NAME}[\w-]{{0,50}}\"(?P<secret>(?:,\s*\"(?!-)[^\"]*\")+)", re.IGNORECASE),
    # On one line, with all values of an option that takes several.
    re.compile(
        rf"(?<!-)--[\w-]{{0,50}}{NAME}[\w-]{{0,50}}[ \t]+(?P<secret>(?!-)\S+(?:[ \t]+(?!-)\S+)*)", re.IGNORECASE
    ),
    # NAME=value, name: value and "name": "value".
    re.compile(
        rf"{NAME}[\w.-]{{0,50}}[\"']?[ \t]{{0,50}}[=:][ \t]{{0,50}}(?P<secret>{_VALUE})", re.IGNORECASE | re.MULTILINE
    ),
    # The form of known tokens, wherever they appear; the last one is that of our gateway's keys.
    re.compile(
        r"\b(?P<secret>hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|glpat-[\w-]{12,}"
        r"|vllm-[A-Za-z0-9_-]{43}(?![\w-]))"
    ),
)


def find_secrets(texts: Iterable[str]) -> set[str]:
    """Return the values that a pattern matches. Short ones and plain numbers are evidence, and no secrets."""
    found: set[str] = set()
    for text in texts:
        for pattern in PATTERNS:
            for match in pattern.finditer(text):
                for word in match["secret"].split():
                    value = word.strip("\"',;")
                    # user:password of an address: the password alone may appear elsewhere.
                    found |= {part for part in (value, value.rpartition(":")[2]) if is_secret(part)}
    return found


def is_secret(value: str) -> bool:
    return len(value) >= SHORTEST_SECRET and not re.fullmatch(r"[\d.]+|true|false|null|none|REDACTED", value, re.I)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace in a text what a pattern matches, and the given values."""

    def without(match: re.Match[str]) -> str:
        start, end = match.span("secret")
        secret = match["secret"]
        kept = f"{secret[0]}{GONE}{secret[-1]}" if secret[:1] in ("'", '"') and secret[:1] == secret[-1:] else GONE
        return match.string[match.start() : start] + kept + match.string[end : match.end()]

    for pattern in PATTERNS:
        text = pattern.sub(without, text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, GONE)
    return text
