# SPDX-License-Identifier: Apache-2.0
"""The sources of apt on a host: reading them, and rendering further ones."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser

HEADER = "# Managed by Ansible (vllm-edge, role {role}): changes made here by hand are lost.\n"


@dataclass(frozen=True)
class Source:
    """One apt source, as a file on the host defines it."""

    uri: str
    suite: str
    path: str
    components: tuple[str, ...] = ()
    signed_by: str = ""


def parse_one_line_sources(text: str, path: str) -> list[Source]:
    """Return the binary sources (`deb` lines) of the .list file `path`."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)([^#]*)", line)
        if match:
            key = re.search(r"signed-by=(\S+)", match[1] or "", re.IGNORECASE)
            found.append(Source(match[2], match[3], path, tuple(match[4].split()), key[1] if key else ""))
    return found


def parse_deb822_sources(text: str, path: str) -> list[Source]:
    """Return the enabled binary sources of the .sources file `path`, one per combination of URI and suite."""
    found = []
    plain = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    for stanza in re.split(r"\n\s*\n", plain.strip()):
        fields = HeaderParser().parsestr(stanza)
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off")
        if enabled and "deb" in fields.get("types", "").split():
            components, key = (fields.get(name, "").split() for name in ("components", "signed-by"))
            found += [
                Source(uri, suite, path, tuple(components), " ".join(key))
                for uri in fields.get("uris", "").split()
                for suite in fields.get("suites", "").split()
            ]
    return found


def read_sources(root: str) -> list[Source]:
    """Return the sources of all files that apt reads below `root`/etc/apt. Raises OSError."""
    etc = os.path.join(root, "etc/apt")
    found: list[Source] = []
    for path in [os.path.join(etc, "sources.list"), *sorted(glob.glob(os.path.join(etc, "sources.list.d/*")))]:
        parse = {".sources": parse_deb822_sources, ".list": parse_one_line_sources}.get(os.path.splitext(path)[1])
        if parse and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                found += parse(file.read(), path)
    return found


def find_clashes(sources: Sequence[Source], uri: str, suites: Sequence[str], architecture: str) -> list[Source]:
    """Return the sources that define a repository of ours too, which apt refuses with another Signed-By value.

    Args:
        uri: address of our repository; like the others it may contain $(ARCH)
        architecture: value for $(ARCH), as `dpkg --print-architecture` prints it
    """

    def normalise(address: str) -> str:
        return address.replace("$(ARCH)", architecture).rstrip("/")

    return [source for source in sources if source.suite in suites and normalise(source.uri) == normalise(uri)]


def find_missing_components(sources: Sequence[Source], release: str, components: Sequence[str]) -> list[Source]:
    """Return the components that the host's own sources of the archive lack, with their address, suite and key.

    Args:
        release: code name of the distribution's release; its updates and security updates count as the archive too
    """
    suites = (release, f"{release}-updates", f"{release}-security")
    # Repositories of Docker and other vendors also have suites with these names, but no component main.
    archive: dict[tuple[str, str], Source] = {}
    present: dict[tuple[str, str], set[str]] = {}
    for source in sources:
        key = (source.uri.rstrip("/"), source.suite)
        present.setdefault(key, set()).update(source.components)
        if source.suite in suites and "main" in source.components:
            archive.setdefault(key, source)
    found = []
    for key, source in archive.items():
        if missing := tuple(component for component in components if component not in present[key]):
            found.append(Source(source.uri, source.suite, source.path, missing, source.signed_by))
    return found


def render_sources(sources: Sequence[Source], role: str, architectures: Sequence[str] = ()) -> str:
    """Render a .sources file in deb822 format; empty without sources. `role` is named as its author."""
    stanzas = []
    for source in sources:
        fields = {
            "Types": "deb",
            "URIs": source.uri,
            "Suites": source.suite,
            "Components": " ".join(source.components),
            "Architectures": " ".join(architectures),
            "Signed-By": source.signed_by,
        }
        stanzas.append("".join(f"{name}: {value}\n" for name, value in fields.items() if value))
    return HEADER.format(role=role) + "\n".join(stanzas) if stanzas else ""


def get_index_prefix(uri: str, suite: str) -> str:
    """Return the prefix of a source's index files below /var/lib/apt/lists (apt's URItoFileName)."""
    url = uri.rstrip("/") + "/" + ("" if suite == "/" else suite if suite.endswith("/") else f"dists/{suite}/")
    url = re.sub(r"^[a-z+]+:(//)?([^/@]*@)?", "", url)
    quoted = "".join(f"%{ord(c):02x}" if c in '\\|{}[]<>"^~_=!@#$%&*' or not "!" <= c <= "~" else c for c in url)
    return quoted.replace("/", "_")


PACKAGE_PATTERN = re.compile(r"[a-z0-9][a-z0-9+.-][a-z0-9+.*?-]*")
"""A package's name, or a pattern that begins with two characters of one."""
RELEASE_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/+()-]*")
"""A value that apt's Pin takes literally: neither a list, nor a pattern, nor a regular expression."""


def find_unprintable(fields: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence about the first value that would end a field or a stanza of apt's files; empty if none does.

    Args:
        fields: the values, by the name of the field
    """
    for name, values in fields.items():
        for value in values:
            if not re.fullmatch(r"[!-~]+", value):
                return (
                    f"{name} has {ascii(value)[:80]}: spaces, line breaks, control characters and letters outside of "
                    f"ASCII are not possible there. Write them percent-encoded in an address, or leave them out."
                )
    return ""


def find_wrong_pattern(packages: Sequence[str]) -> str:
    """Return the first entry that is no name of a package and no pattern of some; empty if all are."""
    return next((ascii(entry)[:80] for entry in packages if not PACKAGE_PATTERN.fullmatch(entry)), "")


def get_host(uri: str) -> str:
    """Return the host of a repository as apt's `Pin: origin` compares it; empty for file:, copy: and cdrom:."""
    match = re.match(r"[A-Za-z0-9+.-]+://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", uri)
    return match[1].strip("[]") if match and not uri.startswith(("file:", "copy:", "cdrom:")) else ""


def read_release_fields(text: str) -> dict[str, str]:
    """Return Origin and Label of a Release or InRelease file, without those that a Pin cannot name literally."""
    fields = dict(re.findall(r"^(Origin|Label):[ \t]*(.*?)[ \t\r]*$", text.split("\n\n-----BEGIN")[0], re.MULTILINE))
    return {name: value for name, value in fields.items() if RELEASE_FIELD.fullmatch(value)}


def choose_pin(uri: str, shared: bool, release: Mapping[str, str]) -> str:
    """Return the Pin that tells a repository from all others of the host; empty if nothing does.

    The host is better than what the repository says of itself, but it also names other repositories of a mirror, and
    all repositories in directories have none.

    Args:
        shared: whether a repository that is not restricted has the same host
        release: its Origin and Label
    """
    host = get_host(uri)
    if host and not shared:
        return f'origin "{host}"'
    keys = {"Origin": "o", "Label": "l"}
    return "release " + ",".join(f"{keys[name]}={value}" for name, value in release.items()) if release else ""


def render_preferences(pin: str, packages: Sequence[str]) -> str:
    """Render preferences with which a repository supplies only these packages.

    Priority 1 leaves installable what no other repository has, such as a new dependency, and never upgrades a package
    (apt_preferences(5)).
    """
    return HEADER.format(role="apt_repository") + (
        f"Package: {' '.join(packages)}\nPin: {pin}\nPin-Priority: 500\n\nPackage: *\nPin: {pin}\nPin-Priority: 1\n"
    )
