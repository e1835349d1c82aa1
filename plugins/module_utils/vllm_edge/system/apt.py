# SPDX-License-Identifier: Apache-2.0
"""Calls of apt-get, and translation of its messages into reasons and remedies for an operator.

apt and dpkg are run in the C locale, so that they print English. Every text that is matched here was seen with apt 2.6
or 3.0.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ..text import printable
from .apt_sources import Source

Run = Callable[[list[str]], tuple[int, str, str]]
"""Runs a command in the C locale and returns its exit status, standard output and standard error."""

LOCK_VARIABLE = "apt_repository_lock_timeout_s"
"""Variable of the inventory that sets Limits.lock_s; named in messages."""
TIMEOUT_VARIABLE = "apt_repository_timeout_s"
"""Variable of the inventory that sets Limits.silence_s; named in messages."""
POLL_S = 1.0
"""Seconds between two attempts while another program holds a lock."""


@dataclass(frozen=True)
class Limits:
    lock_s: int
    """Seconds to wait for another program that holds one of apt's locks."""
    silence_s: int
    """Seconds to wait for a server that does not answer."""


@dataclass(frozen=True)
class Outcome:
    ok: bool
    text: str
    """Standard output and standard error."""
    waited_s: float
    """Seconds spent waiting for a lock."""


def apt_get(
    run: Run,
    arguments: Sequence[str],
    limits: Limits,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Run apt-get; wait for locks up to a limit, and only briefly for a server that does not answer.

    The locks are waited for here because DPkg::Lock::Timeout covers only dpkg's lock and not those of the indexes and
    of the archive directory.
    """
    network = [f"Acquire::{scheme}::Timeout={limits.silence_s}" for scheme in ("http", "https")]
    options = [word for option in (*network, "Acquire::Retries=1") for word in ("-o", option)]
    begin = clock()
    while True:
        code, out, err = run(["apt-get", *options, *arguments])
        waited = clock() - begin
        locked = code != 0 and find_lock(err) is not None
        if not locked or waited >= limits.lock_s:
            return Outcome(code == 0, printable(f"{out}\n{err}"), waited)
        sleep(POLL_S)


@dataclass(frozen=True)
class Kind:
    """A kind of download failure, with a verb and a remedy of its own."""

    pattern: str
    """Matches apt's reason."""
    verb: str
    """What happened to the file, as part of a sentence that ends with the repository."""
    remedy: str
    """What an operator can do; {where} is the variable or file that names the repository."""


UNTRUSTED = Kind(
    r"[Ss]ignature|NO_PUBKEY|Missing key|no longer signed|not signed|EXPKEYSIG|REVKEYSIG",
    "was not accepted from",
    "Whoever signs it decides what is installed as root: compare its key with what its owner publishes.",
)
DAMAGED = Kind(
    r"Hash Sum mismatch|unexpected size|weak security information",
    "is not what the signed index describes, coming from",
    "It was thrown away. A mirror that is half updated or a proxy that keeps old files is the usual cause: try later, "
    "empty the proxy's cache, or name another mirror in {where}.",
)
MISSING = Kind(
    r"^404\b|does not have a Release file|No such file or directory|File not found",
    "was not found on",
    "The usual causes are a wrong address in {where} and a mirror that is half updated.",
)
UNREACHABLE = Kind(
    "",
    "could not be downloaded from",
    "Make it reachable from the host (route, firewall, DNS; proxy in /etc/apt/apt.conf.d), or name a mirror of it in "
    "{where}.",
)


@dataclass(frozen=True)
class Lock:
    """A lock that another program holds; pid and name of its holder if apt reported them."""

    path: str
    pid: int | None = None
    holder: str = ""


@dataclass(frozen=True)
class Failure:
    """One file that apt could not download or did not accept."""

    url: str
    said: str

    @property
    def kind(self) -> Kind:
        kinds = (UNTRUSTED, DAMAGED, MISSING, UNREACHABLE)
        return next(kind for kind in kinds if re.search(kind.pattern, self.said))

    @property
    def package(self) -> str:
        name, _, rest = unquote(self.url.rpartition("/")[2]).partition("_")
        return f"{name} {rest.partition('_')[0]}" if self.url.endswith(".deb") else ""


def find_lock(text: str) -> Lock | None:
    """Return the lock that apt failed to get, from its messages; None if there was no such failure."""
    match = re.search(r"Could not get lock (\S+?)\.?\s(?:It is held by process (\d+) \((.*?)\))?", text)
    if match:
        return Lock(match[1], int(match[2]) if match[2] else None, match[3] or "")
    match = re.search(r"Unable to (?:lock directory|acquire the dpkg frontend lock) \(?([^\s),]+)", text)
    return Lock(match[1]) if match else None


def find_failures(text: str) -> list[Failure]:
    """Return the files that could not be downloaded, in the order of apt's summary (which lists them as E: or W:)."""
    # After a retry the summary says only "Unable to connect to HOST:http:"; the reason is in an earlier line.
    lines = re.findall(r"^[ \t]+(Could not (?:connect to|resolve) '?([^:'\s]+).*)$", text, re.MULTILINE)
    reasons: dict[str, str] = {host: said for said, host in lines}
    found: list[Failure] = []
    for match in re.finditer(r"^[EW]: Failed to fetch (\S+)\s+(.*)$", text, re.MULTILINE):
        url, said = match[1], match[2]
        # This is the proxy's host if a proxy is used.
        if unable := re.match(r"Unable to connect to ([^:]+):", said):
            said = reasons.get(str(unable[1]), said.rstrip(":"))
        found.append(Failure(url, said))
    # Same in apt 2.6 and 3.0: first a warning why a signature is bad, then an error that the repository is not signed.
    warning = r"^W: (?:GPG error|OpenPGP signature verification failed): (\S+)\s+\S+: (.*)$"
    signatures = dict(re.findall(warning, text, re.MULTILINE))
    for match in re.finditer(r"^[EW]: (The repository '(\S+)\s.*' (?:is|does) .*)$", text, re.MULTILINE):
        found.append(Failure(match[2], str(signatures.get(match[2], match[1]))))
    return [Failure(failure.url, _strip_prefix(failure.said)) for failure in found]


def _strip_prefix(said: str) -> str:
    """Return the reason on one line, without the name of the subprocess that reported it."""
    return " ".join(re.sub(r"^Sub-process \S+ returned an error code.*?, error message is: ", "", said).split())


def extract_errors(text: str) -> str:
    """Return apt's errors, without those that only follow from others and without its lists of hashes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    follows = ("Some index files failed", "Some files failed to download", "The following information from --solver")
    errors = [line[3:] for line in lines if line.startswith("E: ") and not line[3:].startswith(follows)]
    # Unmet dependencies are listed without "E:".
    errors += [line for line in lines if re.match(r"\S+ : (Depends|Conflicts|Breaks): ", line)]
    return " ".join(errors or lines[-3:])


def explain_lock(lock: Lock, waited_s: float) -> str:
    """Return why apt could not start because of a lock, and what an operator can do about it."""
    who = f"{lock.holder} (process {lock.pid})" if lock.pid else "another program"
    look = f'"ps -fp {lock.pid}" shows what it does' if lock.pid else f'"fuser -v {lock.path}" names it'
    return (
        f"{who} holds {lock.path}, and was waited for {waited_s:.0f} s ({LOCK_VARIABLE}). {look}; let it finish and "
        f"run again, or set {LOCK_VARIABLE} higher. Do not remove the file: two programs at once ruin dpkg's database."
    )


def locate(url: str, sources: Iterable[Source], variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the repository that a file belongs to, and where an operator configured it.

    Args:
        variables: variable that sets a repository's address, by that address

    Returns:
        The repository's address, and the variable or the file on the host that names it.
    """
    inside = [source for source in sources if url.startswith(source.uri.rstrip("/") + "/") or url == source.uri]
    if not inside:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc}", "the sources of apt"
    source = max(inside, key=lambda source: len(source.uri))
    mine = [name for uri, name in variables.items() if uri.rstrip("/") == source.uri.rstrip("/")]
    return source.uri, mine[0] if mine else source.path


def suggest_remedy(failure: Failure, where: str, silence_s: int) -> str:
    """Return what an operator can do; `where` is the variable or file that names the repository."""
    text = failure.kind.remedy.format(where=where)
    if failure.kind is UNREACHABLE and re.search(r"timed out|Connection failed", failure.said):
        text += f" A server may be silent for {silence_s} s ({TIMEOUT_VARIABLE})."
    return text


def describe_failures(
    failures: Sequence[Failure], sources: Sequence[Source], variables: Mapping[str, str], silence_s: int
) -> str:
    """Return a paragraph about failed downloads: which files, from which repository, why, and the remedy.

    Files of one repository with the same kind of failure share one sentence.
    """
    groups: dict[tuple[str, str, Kind], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((*locate(failure.url, sources, variables), failure.kind), []).append(failure)
    sentences = []
    for (repository, where, kind), members in groups.items():
        files = dict.fromkeys(member.package or "the index" for member in members)
        verb = kind.verb if len(files) == 1 else kind.verb.replace("is not", "are not").replace("was", "were")
        reason = f"{members[0].said.rstrip('.')}. {suggest_remedy(members[0], where, silence_s)}"
        sentences.append(f"{', '.join(files)} {verb} {repository} ({where}): {reason}")
    return " ".join(sentences)


def find_unknown_packages(text: str) -> list[tuple[str, str]]:
    """Return the packages that no index lists, each with the requested version (empty if none was requested)."""
    patterns = (
        r"^E: Version '(?P<version>.+)' for '(?P<name>.+)' was not found",
        r"^E: Unable to locate package (?P<name>\S+)",
        r"^E: Package '(?P<name>.+)' has no installation candidate",
    )
    found = (match.groupdict() for pattern in patterns for match in re.finditer(pattern, text, re.MULTILINE))
    return [(groups["name"], groups.get("version", "")) for groups in found]


def describe_unknown(unknown: Sequence[tuple[str, str]], offered: Mapping[str, Sequence[str]], variable: str) -> str:
    """Return a sentence about packages that no repository of the host has, and the versions that it does have.

    Args:
        unknown: packages and versions, from `find_unknown_packages`
        offered: available versions, or branches if a package's name contains one, by package, newest first
        variable: variable that sets the version; empty if there is none
    """
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, version in unknown:
        groups.setdefault((version, tuple(offered.get(name, []))), []).append(name)
    told = []
    for (version, have), names in groups.items():
        there = f" (there is {', '.join(have[:8])}{', and more' if len(have) > 8 else ''})" if have else ""
        told.append(f"{', '.join(names)} {version}".strip() + there)
    way = f"set {variable} to what there is" if variable else "name a repository that has it"
    return f"No repository of this host has {', '.join(told)}: {way}, or bring what is missing to the mirror."


@dataclass(frozen=True)
class Request:
    """The installation that was requested, in terms of the inventory."""

    purpose: str
    """What the packages are for, as in "the container toolkit"."""
    version_variable: str
    """Variable that sets the version; empty if there is none."""
    variables: Mapping[str, str]
    """Variable that sets a repository's address, by that address."""
    limits: Limits
    verb: str = "installed"
    """What could not be done: "installed" or "removed"."""

    @property
    def failed(self) -> str:
        return f"{self.purpose[:1].upper()}{self.purpose[1:]} could not be {self.verb}"


def explain_failed_install(
    request: Request,
    outcome: Outcome,
    update: str,
    sources: Sequence[Source],
    offered: Mapping[str, Sequence[str]],
) -> str:
    """Return one paragraph: what failed, whether anything was changed, and what to do.

    Args:
        update: output of the preceding `apt-get update`
        offered: available versions of the requested packages, newest first
    """
    text = outcome.text
    told = request.failed
    if "dpkg was interrupted" in text:
        return (
            f'{told}: an earlier run of dpkg on this host was cut off. Nothing was changed: run "dpkg --configure -a", '
            f'see that "dpkg --audit" is silent, and run again.'
        )
    if "/usr/bin/dpkg returned an error" in text or "Errors were encountered while processing" in text:
        return (
            f"{told}: dpkg failed half way: {extract_errors(text)}. Its output is in /var/log/apt/term.log. "
            f'Repair the cause, run "dpkg --configure -a", see that "dpkg --audit" is silent, and run again.'
        )
    told += ", and nothing was changed: "
    if lock := find_lock(text):
        return told + explain_lock(lock, outcome.waited_s)
    silence = request.limits.silence_s
    if failures := find_failures(text):
        return told + describe_failures(failures, sources, request.variables, silence)
    if unknown := find_unknown_packages(text):
        told += describe_unknown(unknown, offered, request.version_variable)
        # The package may be in an index that could not be read.
        unread = find_failures(update)
        also = describe_failures(unread, sources, request.variables, silence)
        return f"{told} Not every index could be read: {also}" if unread else told
    return f"{told}{extract_errors(text).rstrip('.')}."


RESERVE_BYTES = 512 * 1024**2
"""Our choice: space that stays free for the journal, dpkg's own files and an initramfs, which apt does not count."""
_SIZE = r"([\d.,]+) ?(B|kB|MB|GB)"
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_sizes(text: str) -> tuple[int, int]:
    """Return the bytes to download and the bytes needed on disk, as apt-get announces them; 0 where it does not."""
    download = re.search(rf"^Need to get {_SIZE}(?:/\S+ ?\S+)? of archives", text, re.MULTILINE)
    installed = re.search(rf"^After this operation, {_SIZE} of additional disk space", text, re.MULTILINE)
    return (_bytes(download), _bytes(installed))


def parse_removals(text: str) -> list[str]:
    """Return the names of the packages that apt-get announces to remove, without architecture."""
    listed = re.search(r"^The following packages will be REMOVED:\n((?: .*\n)+)", text, re.MULTILINE)
    return sorted({word.rstrip("*").partition(":")[0] for word in listed[1].split()}) if listed else []


def explain_removals(request: Request, removed: Sequence[str]) -> str:
    """Return why nothing is done that would take these packages of others away."""
    names = " ".join(removed)
    return (
        f"{request.failed}, and nothing was changed: apt would remove {', '.join(removed)}, which vllm-edge did not "
        f"install and somebody may need ('apt-cache show {names}' names the conflict or dependency). If nobody does, "
        f"remove it yourself ('apt-get --simulate remove {names}' shows what goes with it) and run again. Otherwise "
        + ("this host cannot have both." if request.verb == "installed" else "keep these packages.")
    )


def _bytes(found: re.Match[str] | None) -> int:
    return int(float(found[1].replace(",", "")) * _UNITS[found[2]]) if found else 0


def explain_lack_of_space(request: Request, needed: tuple[int, int], free: Mapping[str, tuple[int, int]]) -> str:
    """Return why the file systems lack the space for an installation; empty if there is enough.

    Args:
        needed: bytes to download and bytes to install
        free: for the download directory and for the program directory, in this order: the device number of the file
            system and its free bytes
    """
    wanted: dict[int, int] = {}
    for (system, _), size in zip(free.values(), needed, strict=True):
        wanted[system] = wanted.get(system, 0) + size
    for directory, (system, there) in free.items():
        if wanted[system] and there < wanted[system] + RESERVE_BYTES:
            mib = 1024**2
            return (
                f"{request.failed}, and nothing was changed: it takes {wanted[system] // mib} MiB of the file system "
                f"of {directory}, {RESERVE_BYTES // mib} MiB have to stay free there, and {there // mib} MiB are. "
                f"'apt-get clean', removing old kernels ('apt-get autoremove --purge') and 'journalctl "
                f"--vacuum-size=200M' free some."
            )
    return ""


def explain_unread_repository(uri: str, key: str, uri_variable: str, outcome: Outcome, limits: Limits) -> str:
    told = f"The repository {uri} was not added, and nothing was changed: "
    if lock := find_lock(outcome.text):
        return told + explain_lock(lock, outcome.waited_s)
    failures = find_failures(outcome.text)
    if not failures:
        return f"{told}apt says: {extract_errors(outcome.text).rstrip('.')}."
    failure = failures[0]
    if failure.kind is UNTRUSTED:
        return (
            f"{told}its index is not signed by {key}: {failure.said.rstrip('.')}. Whoever signs it decides what is "
            f"installed as root: see that {uri_variable} is the right place, and compare the key with what its owner "
            f"publishes."
        )
    return f"{told}{failure.said.rstrip('.')}. {suggest_remedy(failure, uri_variable, limits.silence_s)}"
