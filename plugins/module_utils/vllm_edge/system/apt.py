# SPDX-License-Identifier: Apache-2.0
"""What apt-get says, in C locale, translated into reasons and remedies for an operator (apt 2.6 to 3.0)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..text import printable
from .space import MIB

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
LOCK = re.compile(r"Could not get lock (\S+?)\.?\s(?:It is held by process (\d+) \((.*?)\))?")

HINTS = (
    (
        r"dpkg was interrupted",
        'An earlier run of dpkg on this host was cut off: run "dpkg --configure -a", see that "dpkg --audit" is '
        "silent, and run again.",
    ),
    (
        r"(?s)(?=.*(?:dpkg returned an error|errors were))(?=.*(?:no space left|quota exceeded|read-only file system))",
        "dpkg failed half way, because a file system is full or read-only: the words above name the file; an initramfs "
        "is written to /boot. 'df -h /boot /usr /var /tmp' and 'df -i' show which it is. Make room ('apt-get autoremove"
        ' --purge\' removes old kernels), run "dpkg --configure -a", see that "dpkg --audit" is silent, and run again.',
    ),
    (
        r"dpkg returned an error|errors were encountered while processing",
        "dpkg failed half way. Its output is in /var/log/apt/term.log; a kernel module that DKMS cannot build and a "
        'full /boot are the usual causes. Repair it, run "dpkg --configure -a", see that "dpkg --audit" is silent, and '
        "run again.",
    ),
    (
        LOCK.pattern,
        "It was waited for {lock_s} s (apt_repository_lock_timeout_s). See with ps or fuser what it does, let it "
        "finish and run again, or set apt_repository_lock_timeout_s higher. Do not remove the file of the lock: two "
        "programs at once ruin dpkg's database.",
    ),
    (
        r"no space left|enough free space|quota exceeded",
        "Free some space: 'apt-get clean', removing old kernels ('apt-get autoremove --purge') and 'journalctl "
        "--vacuum-size=200M' do.",
    ),
    (
        r"unable to locate|was not found|no installation candidate|no package matching",
        "No repository of this host has it{offered}. Set {version} to what there is, or bring it to the mirror.",
    ),
    (
        r"not valid yet|is expired|not live until",
        "The clock of this host differs from that of the repository, or a mirror or proxy gives old files: compare "
        "'timedatectl' with another clock, and see that {where} is up to date.",
    ),
    (
        r"\b407\b",
        "The proxy asks for a user and a password: put them into its address, where apt reads it (/etc/apt/apt.conf.d, "
        "or the environment).",
    ),
    (
        r"certificate|SSL connection|TLS",
        "The certificate of the server, or of a proxy that answers in its place, is not trusted here: install the CA "
        "of your proxy (/usr/local/share/ca-certificates, update-ca-certificates), or correct {where}.",
    ),
    (
        r"SHA-?1\b",
        "The key may be the right one: this host's apt does not accept signatures with SHA-1 any more. Name a "
        "repository in {where} that is signed anew.",
    ),
    (
        r"signature|no_pubkey|missing key|not signed|no longer signed|EXPKEYSIG|REVKEYSIG",
        "Whoever signs the repository decides what is installed as root: see that {where} is the right place, and "
        "compare its key with what its owner publishes.",
    ),
    (
        r"hash sum mismatch|unexpected size|weak security",
        "What came is not what the signed index describes, and was thrown away. A mirror that is half updated or a "
        "proxy that keeps old files is the usual cause: try later, empty the proxy's cache, or name another mirror in "
        "{where}.",
    ),
    (
        r"\b404\b|does not have a release file|no such file or directory|file not found",
        "The usual causes are a wrong address in {where} and a mirror that is half updated.",
    ),
    (
        r"could not (?:resolve|connect)|unable to connect|connection failed|timed out|unreachable|failed to fetch",
        "Make the repository reachable from the host (route, firewall, DNS; proxy in /etc/apt/apt.conf.d), or name a "
        "mirror of it in {where}. A server may be silent for {silence_s} s (apt_repository_timeout_s).",
    ),
    (
        r"malformed|list of sources could not be read|conflicting values",
        "Correct the sources in /etc/apt and run again.",
    ),
)
"""What apt's words mean for an operator: a pattern, and a remedy. The first that fits is told."""


def extract_errors(text: str) -> str:
    """Return apt's errors in one line: neither those that follow from others, nor lists of hashes, nor repetitions."""
    lines = [" ".join(line.split()) for line in printable(text).splitlines() if line.strip()]
    follows = r"E: (?:Some (?:index )?files failed|The following information from --solver|Unable to (?:lock|acquire))"
    # Why a server was not reached or a signature is bad, unmet dependencies, and what the script of a package missed.
    more = (
        r"Could not (?:connect|resolve)|W: (?:Failed to|GPG|.*signature)|\S+ : (?:Depends|Conflicts):|"
        r".*(?i:no space left|quota exceeded|read-only file system|initramfs.*fail)"
    )
    errors = [line for line in lines if line.startswith("E: ") and not re.match(follows, line)]
    errors += [line for line in lines if re.match(more, line) and line not in errors]
    # After a retry apt's summary says only this, and names a port by its scheme.
    told = [line for line in errors if "Unable to connect to" not in line or len(errors) == 1] or lines[-3:]
    plain = [
        re.sub(r"^[EW]: |Sub-process \S+ returned an error code.*?, error message is: ", "", line) for line in told
    ]
    return ". ".join(dict.fromkeys(line.rstrip(".") for line in plain))


def explain(text: str, request: Mapping[str, Any], more: str = "") -> str:
    """Return why apt-get failed, and what an operator can do.

    Args:
        text: what it printed.
        request: `variables` (the variable that sets a repository's address, by that address), `version` (the variable
            that sets the version), `offered` (versions that there are), `lock_s` and `silence_s` (limits in seconds).
        more: what else was printed, on the other stream or by a run before it.
    """
    said = extract_errors(f"{text}\n{more}")
    mine = [name for uri, name in request["variables"].items() if uri and uri.rstrip("/") in text + more]
    words = {
        "where": mine[0] if mine else "the file below /etc/apt that names it",
        "version": request.get("version") or "the version",
        "offered": f" (there is {', '.join(request['offered'][:8])})" if request.get("offered") else "",
        "lock_s": request["lock_s"],
        "silence_s": request["silence_s"],
    }
    remedy = next((hint for pattern, hint in HINTS if re.search(pattern, said, re.IGNORECASE)), "")
    return f"{said}. {remedy.format(**words)}".strip()


def find_bytes(pattern: str, text: str) -> int:
    """Return a size that apt-get announces, in bytes; 0 if it does not. In the pattern {} stands for the size."""
    found = re.search(pattern.format(r"([\d.,]+) ?(B|kB|MB|GB)"), text, re.MULTILINE)
    return int(float(found[1].replace(",", "")) * UNITS[found[2]]) if found else 0


def refuse(foretold: str, meant: Sequence[str]) -> str:
    """Return why the change is refused that apt-get announces; empty if it is not.

    Args:
        foretold: what `apt-get --print-uris` printed.
        meant: packages that may be removed.
    """
    removed = re.search(r"^The following packages will be REMOVED:\n((?: .*\n)+)", foretold, re.MULTILINE)
    listed = {word.rstrip("*").partition(":")[0] for word in removed[1].split()} if removed else set()
    others = sorted(listed - {*meant})
    names = " ".join(others)
    if not others:
        return ""
    return (
        f"apt would remove {', '.join(others)}, which vllm-edge did not install and somebody may need ('apt-cache "
        f"show {names}' names the conflict or dependency). If nobody does, remove it yourself ('apt-get --simulate "
        f"remove {names}' shows what goes with it) and run again. Otherwise this host cannot have both."
    )


def foretell_writes(foretold: str) -> dict[str, dict[str, float]]:
    """Return what the change that apt-get announces writes, as `room` of the module mounted_paths.

    These are MiB by directory for each step of `system/space.py` that it takes; none if it only removes packages.
    """
    sizes = {
        "/var/cache/apt/archives": find_bytes(r"^Need to get {}(?:/\S+ ?\S+)? of archives", foretold),
        "/usr": find_bytes(r"^After this operation, {} of additional disk space", foretold),
    }
    found = {"packages": {path: size / MIB for path, size in sizes.items()}} if any(sizes.values()) else {}
    makes = re.search(r"initramfs|dracut|dkms|linux-(?:image|modules)", foretold)
    return {**found, **({"initramfs": {}} if makes else {})}


def changes_nothing(text: str, download_only: bool = False) -> bool:
    """Return whether apt-get announces, or reports, that nothing changes."""
    nothing = (
        r"^Need to get 0 B" if download_only else r"^0 upgraded, 0 newly installed, (?:0 downgraded, )?0 to remove"
    )
    return re.search(nothing, text, re.MULTILINE) is not None


def list_offered(text: str, names: Sequence[str]) -> list[str]:
    """Return what there is in place of a version or branch that no index has, newest first.

    Args:
        text: what `apt-cache madison` and `apt-cache pkgnames` printed.
        names: the packages. Where a name contains the branch or version, those of similar names are returned.
    """
    versions = dict.fromkeys(re.findall(r"^ *\S+ \| *(\S+) \|", text, re.MULTILINE))
    numbers = set()
    for parts in filter(None, (re.match(r"(.*?-)(\d{3}[\d.]*)(.*)", name) for name in names)):
        kind = r"\d{3}\.[\d.]+" if "." in parts[2] else r"\d{3}"
        numbers |= set(re.findall(f"^{re.escape(parts[1])}({kind}){re.escape(parts[3])}$", text, re.MULTILINE))
    return [*versions, *sorted(numbers, key=lambda number: [*map(int, number.split("."))], reverse=True)]


def shorten_address(uri: str) -> str:
    """Return an address without slashes at its end; that of a directory begins with one slash, as apt prints it."""
    return re.sub(r"^file:/+", "file:/", uri).rstrip("/")
