# SPDX-License-Identifier: Apache-2.0
"""Sources and preferences of apt: what a host has, and what a repository gets."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from typing import Any

from . import openpgp
from .apt import shorten_address

HEADER = "# Managed by Ansible (vllm-edge, role apt_repository): changes made here by hand are lost.\n"
PACKAGE_PATTERN = re.compile(r"[a-z0-9][a-z0-9+.-][a-z0-9+.*?-]*")
"""A package's name, or a pattern that begins with two characters of one."""
RELEASE_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/+()-]*")
"""A value that apt's Pin takes literally: neither a list, nor a pattern, nor a regular expression."""

Wanted = Mapping[str, Any]
"""A repository as the role apt_repository has it in `__apt_repository_wanted`."""


@dataclass(frozen=True)
class Source:
    """One apt source, as a file on the host defines it."""

    uri: str
    suite: str
    path: str
    components: tuple[str, ...] = ()
    signed_by: str = ""


def split_files(text: str) -> dict[str, str]:
    """Return texts of files by their paths, from what `grep -rsaZ ""` prints of them among other lines."""
    files: dict[str, str] = {}
    for line in text.splitlines():
        path, end, rest = line.partition("\0")
        if end:
            files[path] = files.get(path, "") + rest + "\n"
    return files


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


def read_sources(files: Mapping[str, str], own: str) -> list[Source]:
    """Return the sources in these files, by path, without those of the file `own`."""
    found: list[Source] = []
    for path, text in sorted(files.items()):
        if path != own and path.endswith(".sources"):
            found += parse_deb822_sources(text, path)
        elif path != own and path.endswith(".list"):
            found += parse_one_line_sources(text, path)
    return found


def covers(uri: str, printed: str) -> bool:
    """Return whether an address is that of a source, where apt puts the architecture in place of $(ARCH)."""
    pattern = re.escape(shorten_address(uri)).replace(re.escape("$(ARCH)"), "[a-z0-9]+")
    return re.fullmatch(pattern, shorten_address(printed)) is not None


def find_clashes(sources: Sequence[Source], uri: str, suites: Sequence[str]) -> list[Source]:
    """Return the sources that define a repository of ours too, which apt refuses with another Signed-By value."""
    return [one for one in sources if one.suite in suites and (covers(one.uri, uri) or covers(uri, one.uri))]


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
    missing = {key: tuple(part for part in components if part not in present[key]) for key in archive}
    return [replace(source, components=missing[key]) for key, source in archive.items() if missing[key]]


def render_sources(sources: Sequence[Source]) -> str:
    """Render a .sources file in deb822 format; empty without sources."""
    stanzas = []
    for source in sources:
        fields = {
            "Types": "deb",
            "URIs": source.uri,
            "Suites": source.suite,
            "Components": " ".join(source.components),
            "Signed-By": source.signed_by,
        }
        stanzas.append("".join(f"{name}: {value}\n" for name, value in fields.items() if value))
    return HEADER + "\n".join(stanzas) if stanzas else ""


def plan_archive(files: Mapping[str, str], own: str, release: str, components: Sequence[str]) -> dict[str, str]:
    """Return the source that adds components of the distribution's archive to those that the host has.

    Args:
        files: apt's sources on the host, by path.
        own: path of the source.

    Returns:
        `source` (its text, empty if the host has all components), and `mistake` (why there can be none, or empty).
    """
    added = find_missing_components(read_sources(files, own), release, components)
    inside = [source.path for source in added if "BEGIN PGP" in source.signed_by]
    mistake = (
        f"{inside[0]} contains the key of its archive, so that no other source can refer to it. Nothing was changed: "
        f"add {' '.join(components)} to its components there, and run again."
        if inside
        else ""
    )
    return {"mistake": mistake, "source": render_sources(added)}


def find_mistake(wanted: Wanted, expected: Sequence[str]) -> str:
    """Return why a repository cannot be added as it is wanted; empty if it can.

    A value must not become something else in apt's files, and no key may come over a wire that nobody verifies.
    """
    name, untouched = wanted["name"], "Nothing was changed"
    fields = {wanted["url_variable"]: [wanted["url"]], "suites": wanted["suites"], "components": wanted["components"]}
    for field, values in fields.items():
        for value in values:
            if not re.fullmatch(r"[!-~]+", value):
                return (
                    f"The repository {name} was not added, and nothing was changed: {field} has {ascii(value)[:80]}: "
                    f"spaces, line breaks, control characters and letters outside of ASCII are not possible there. "
                    f"Write them percent-encoded in an address, or leave them out."
                )
    wrong = [ascii(entry)[:80] for entry in wanted["packages"] if not PACKAGE_PATTERN.fullmatch(entry)]
    if wrong or not wanted["packages"]:
        return (
            f"{wanted['packages_variable']} {'has ' + wrong[0] if wrong else 'is empty'}. It lists the packages that "
            f"the repository {name} may supply: names, or patterns that begin with two characters of one, such as "
            f"nvidia-*. {untouched}."
        )
    url, variable = wanted["key_url"], wanted["fingerprint_variable"]
    if not wanted["key_text"] and not url:
        return (
            f"The repository {name} has no key: neither an address nor a local file of it is set. Set the variable "
            f"beside {variable} that names one."
        )
    if not wanted["key_text"] and not url.lower().startswith(("https:", "file:")) and not expected:
        return (
            f"The key of the repository {name} comes from {ascii(url)[:200]}, which anybody on the way can change, "
            f"and no fingerprint is set. {untouched}. Ask the vendor for the fingerprint and set {variable}, or use "
            f"https or a local file."
        )
    return ""


def plan_repository(wanted: Wanted, files: Mapping[str, str], targets: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a repository needs on a host.

    Args:
        files: apt's sources and preferences, the keyring of the repository and the record of keys on the host, by path.
        targets: what apt has read of this repository and of the others, as `read_targets` takes it.

    Returns:
        `mistake` (why it is refused, or empty), `source` (the text of its source), `expected` (fingerprints),
        `trust` ("pinned", "recorded" or "first-use"), `record` (the former record of all keys), `key` (as `check_key`
        returns it: that of a local file, or that of the host if it is the expected one; empty if it has to be
        downloaded), `unread` (whether apt has to read it), and `complete` (whether the host has all of it).
    """
    plan: dict[str, Any] = {"mistake": "", "source": "", "expected": [], "trust": "", "record": {}, "key": {}}
    plan |= {"unread": True, "complete": False}
    try:
        plan["record"] = dict(json.loads(files.get(wanted["record"], "{}")))
        pinned = openpgp.parse_fingerprints(wanted["fingerprint"])
    except json.JSONDecodeError as error:
        return plan | {
            "mistake": f"{wanted['record']} is not JSON ({error}). It contains the repository keys that this host "
            f"trusts: restore it from a backup, or delete it so that the keys are recorded again."
        }
    except ValueError as error:
        return plan | {"mistake": f"{wanted['fingerprint_variable']}: {error}."}
    known = plan["record"].get(wanted["name"], {})
    keyring = files.get(wanted["keyring"], "")
    plan["expected"] = pinned or list(known.get("fingerprints", []))
    if not plan["expected"] and keyring and wanted["source"] in files:
        with contextlib.suppress(openpgp.KeyFormatError):  # the record is lost, and apt goes on with this key
            plan["expected"] = openpgp.list_fingerprints(keyring.encode())
    plan["trust"] = "pinned" if pinned else "recorded" if plan["expected"] else "first-use"
    plan["mistake"] = find_mistake(wanted, plan["expected"])
    for clash in find_clashes(read_sources(files, wanted["source"]), wanted["url"], wanted["suites"]):
        plan["mistake"] = plan["mistake"] or (
            f"{wanted['url']} is configured in {clash.path} already. apt refuses one repository with two keyrings: "
            f"remove that file (dpkg -S {clash.path} names its package, if any) and run again."
        )
    source = Source(wanted["url"], " ".join(wanted["suites"]), "", tuple(wanted["components"]), wanted["keyring"])
    plan["source"] = render_sources([source])
    if wanted["key_text"]:
        plan["key"] = check_key(wanted["key_text"].encode(), wanted, plan)
    elif plan["expected"] and known.get("source", wanted["key_source"]) == wanted["key_source"]:
        # A verified key is only downloaded again if its address changed. A damaged keyring is replaced.
        former = check_key(keyring.encode(), wanted, plan)
        plan["key"] = {} if former["mistake"] else former
    # A medium that was taken out again has no index, and is not missed.
    index = wanted["url"].startswith("file:") or find_index(read_targets(targets), wanted["url"]) is not None
    there = (files.get(wanted["source"]), keyring)
    plan["unread"] = not index or there != (plan["source"], plan["key"].get("keyring"))
    if not plan["mistake"] and not plan["unread"]:
        chosen = {"text": files.get(wanted["preferences"], ""), "warning": "", "mistake": ""}
        recorded = {"fingerprints": plan["expected"], "source": wanted["key_source"]} == known
        plan["complete"] = recorded and choose_preferences(wanted, files, targets) == chosen
    return plan


def check_key(offered: bytes, wanted: Wanted, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return `keyring` (armoured) and `fingerprints` of a key, and `mistake`: why it is refused, or empty."""
    refused = {"keyring": "", "fingerprints": []}
    source, variable = wanted["key_source"], wanted["fingerprint_variable"]
    try:
        found = openpgp.list_fingerprints(offered)
    except openpgp.KeyFormatError as error:
        return refused | {
            "mistake": f"What {source} holds is not usable as the key of the repository {wanted['name']}: {error}. "
            f"Nothing was changed."
        }
    if plan["expected"] and found != plan["expected"]:
        pins = f"{variable} pins" if plan["trust"] == "pinned" else f"this host recorded (in {wanted['record']})"
        return refused | {
            "mistake": f"The key of the repository {wanted['name']} is not the expected one: {source} has "
            f"{', '.join(found)}, {pins} {', '.join(plan['expected'])}. Nothing was changed. Whoever holds that key "
            f"decides what is installed as root: ask the vendor for the fingerprint, and only where the new one is "
            f"right set {variable}."
        }
    return {"keyring": openpgp.armour(openpgp.dearmour(offered)), "fingerprints": found, "mistake": ""}


def get_host(uri: str) -> str:
    """Return the host of a repository as apt's `Pin: origin` compares it; empty for file:, copy: and cdrom:."""
    match = re.match(r"[A-Za-z0-9+.-]+://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", uri)
    return match[1].strip("[]") if match and not uri.startswith(("file:", "copy:", "cdrom:")) else ""


def read_targets(lines: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return Origin and Label of the repositories whose indexes apt has, by address, without unusable ones.

    Args:
        lines: what `apt-get indextargets` printed, each address|Origin|Label.
    """
    found = {}
    for line in lines:
        if line.count("|") == 2 and "\0" not in line:
            uri, *values = line.split("|")
            named = zip(("o", "l"), values, strict=True)
            found[uri] = {key: value for key, value in named if RELEASE_FIELD.fullmatch(value)}
    return found


def find_index(indexes: Mapping[str, Mapping[str, str]], uri: str) -> Mapping[str, str] | None:
    """Return Origin and Label of a repository, from what `read_targets` returns; None if apt has no index of it."""
    return next((index for printed, index in indexes.items() if covers(uri, printed)), None)


def choose_preferences(wanted: Wanted, files: Mapping[str, str], targets: Sequence[str]) -> dict[str, str]:
    """Return the preferences with which a repository supplies only its packages.

    Its host tells it from the others. Where these have the same host, as on a mirror, or none, as in a directory, it is
    told by Origin and Label of its index. Priority 1 leaves installable what no other repository has, such as a new
    dependency, and never upgrades a package (apt_preferences(5)).

    Args:
        files: apt's sources and preferences on the host, by path.
        targets: what apt has read of this repository and of the others, as `read_targets` takes it.

    Returns:
        `text`, `warning` (where the repository is not restricted), and `mistake` (why it is refused); perhaps empty.
    """
    kept = {"text": files.get(wanted["preferences"], ""), "warning": "", "mistake": ""}
    host, indexes = get_host(wanted["url"]), read_targets(targets)
    # Repositories that have preferences of ours are told apart by the names of their packages.
    restricted = {path.rpartition("/")[2].removesuffix(".pref") for path in files if path.endswith(".pref")}
    others = read_sources(files, wanted["source"])
    others = [one for one in others if one.path.rpartition("/")[2].removesuffix(".sources") not in restricted]
    pin = f'origin "{host}"'
    if not host or any(get_host(other.uri) == host for other in others):
        release = find_index(indexes, wanted["url"])
        if release is None:
            return kept
        told = f"The repository {wanted['url']}"
        if not release:
            return kept | {
                "text": "",
                "warning": f"{told} can replace every package of this host: other repositories have the same host, "
                f"and its index has neither Origin nor Label. Serve it from a host of its own.",
            }
        if any(find_index(indexes, other.uri) == release for other in others):
            return kept | {
                "mistake": f"{told} calls itself {', '.join(release.values())}, as another repository of this host "
                f"does, so apt cannot tell them apart. Whoever signs it could replace every package: see that "
                f"{wanted['url_variable']} is the right place, or serve it from a host of its own.",
            }
        pin = "release " + ",".join(f"{key}={value}" for key, value in release.items())
    text = f"Package: {' '.join(wanted['packages'])}\nPin: {pin}\nPin-Priority: 500\n\n"
    return kept | {"text": f"{HEADER}{text}Package: *\nPin: {pin}\nPin-Priority: 1\n"}
