# SPDX-License-Identifier: Apache-2.0
"""Signed apt repositories: flat ones, as both vendors have, and one in the layout of a distribution's archive."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from lab.nvidia.packages import EPOCH, Package


@dataclass(frozen=True)
class Key:
    """A signing key of a vendor that exists nowhere else; made once, kept beside the repositories."""

    secret: Path
    user: str

    @contextlib.contextmanager
    def _home(self) -> Iterator[list[str]]:
        """gpg with a home of its own for the length of one step: short enough for its socket, and gone after it."""
        with tempfile.TemporaryDirectory(prefix="lab-gpg-") as home:
            command = ["gpg", "--homedir", home, "--batch", "--quiet", "--no-tty"]
            command += ["--pinentry-mode=loopback", "--passphrase="]
            try:
                if self.secret.exists():
                    _gpg([*command, "--import", str(self.secret)])
                yield command
            finally:
                subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], capture_output=True)

    def ensure(self) -> None:
        if self.secret.exists():
            return
        self.secret.parent.mkdir(parents=True, exist_ok=True)
        self.secret.parent.chmod(0o700)
        with self._home() as gpg:
            _gpg([*gpg, "--quick-generate-key", self.user, "rsa3072", "sign", "never"])
            secret = _gpg([*gpg, "--armor", "--export-secret-keys"])
        scratch = self.secret.with_suffix(".new")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        scratch.replace(self.secret)

    @property
    def fingerprint(self) -> str:
        with self._home() as gpg:
            lines = _gpg([*gpg, "--with-colons", "--list-keys"]).decode().splitlines()
        return next(line.split(":")[9] for line in lines if line.startswith("fpr:"))

    def public(self) -> bytes:
        with self._home() as gpg:
            return _gpg([*gpg, "--armor", "--export"])

    def sign(self, release: Path) -> None:
        with self._home() as gpg:
            for output, how in (("InRelease", ["--clearsign"]), ("Release.gpg", ["--armor", "--detach-sign"])):
                target = str(release.with_name(output))
                _gpg([*gpg, "--yes", "--digest-algo=SHA512", f"--output={target}", *how, str(release)])


def _gpg(command: list[str]) -> bytes:
    result = subprocess.run(command, capture_output=True)
    if result.returncode != 0:
        raise RuntimeError(f"gpg ended with {result.returncode}: {result.stderr.decode().strip()}")
    return result.stdout


def stanza(package: Package, deb: Path, place: str = "./") -> str:
    """What the index says about one package."""
    data = deb.read_bytes()
    head, description = package.control.split("Description: ", 1)
    sums = {"MD5sum": hashlib.md5, "SHA1": hashlib.sha1, "SHA256": hashlib.sha256}
    return (
        f"{head}Filename: {place}{deb.name}\nSize: {len(data)}\n"
        + "".join(f"{name}: {function(data).hexdigest()}\n" for name, function in sums.items())
        + f"Description: {description}"
    )


def write(directory: Path, packages: list[Package], key: Key, origin: str) -> None:
    directory.mkdir(parents=True)
    listed = write_index(directory, "".join(f"{stanza(package, package.build(directory))}\n" for package in packages))
    write_release(directory, listed, key, {"Origin": origin, "Label": origin})


def write_archive(root: Path, suite: str, components: Mapping[str, list[Package]], key: Key, origin: str) -> None:
    """The same in a distribution's layout: a suite with components, packages in a pool that suites share."""
    release = root / "dists" / suite
    listed = []
    for component, packages in components.items():
        pool = root / "pool" / component
        pool.mkdir(parents=True, exist_ok=True)
        index = "".join(f"{stanza(package, package.build(pool), f'pool/{component}/')}\n" for package in packages)
        directory = release / component / "binary-amd64"
        directory.mkdir(parents=True)
        listed += write_index(directory, index)
    fields = {"Origin": origin, "Label": origin, "Suite": suite, "Codename": suite, "Components": " ".join(components)}
    write_release(release, listed, key, fields)


def write_index(directory: Path, index: str) -> list[Path]:
    (directory / "Packages").write_text(index)
    (directory / "Packages.gz").write_bytes(gzip.compress(index.encode(), mtime=EPOCH))
    return [directory / "Packages", directory / "Packages.gz"]


def write_release(directory: Path, listed: list[Path], key: Key, fields: Mapping[str, str]) -> None:
    release = {**fields, "Architectures": "amd64", "Date": formatdate(usegmt=True)}
    text = "".join(f"{name}: {value}\n" for name, value in release.items()) + "SHA256:\n"
    for path in listed:
        data = path.read_bytes()
        text += f" {hashlib.sha256(data).hexdigest()} {len(data):>8} {path.relative_to(directory)}\n"
    (directory / "Release").write_text(text)
    key.sign(directory / "Release")
