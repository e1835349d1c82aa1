#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: add an apt repository after its signing key was verified."""

from __future__ import annotations

DOCUMENTATION = r"""
module: signed_apt_repository
short_description: Manage an apt repository with a verified signing key
version_added: "0.1.0"
description:
  - Writes a keyring and a deb822 source with C(Signed-By).
  - Compares the fingerprint of the key with O(fingerprint) or, if that is empty, with the fingerprint that the host
    recorded when the repository was first added. A different key is an error.
  - apt reads the repository with this key before any file is written. If that fails, nothing was changed.
  - Fails if another source already contains the repository, because apt refuses one repository with two keyrings.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.apt
  - edge.vllm_edge.root
attributes:
  check_mode:
    support: full
    description: In check mode nothing is written. A key that would have to be downloaded is not verified.
  diff_mode:
    support: full
    description: Shows the files before and after the change. The keyring is shown as its fingerprints.
  idempotent:
    support: full
options:
  name:
    description: Base name of the files that are written.
    type: str
    required: true
  uri:
    description: Address of the repository.
    type: str
    required: true
  uri_variable:
    description: Name of the variable that sets the address. Used in messages.
    type: str
    default: ''
  suites:
    description: Suites of the repository. V(/) for a flat repository.
    type: list
    elements: str
    default: [/]
  components:
    description: Components of the repository. Empty for a flat repository.
    type: list
    elements: str
    default: []
  architectures:
    description: Architectures to use. If it is empty, those of the host are used.
    type: list
    elements: str
    default: []
  key_url:
    description: Address of the key. It is only downloaded if the host has no verified key from this address.
    type: str
    default: ''
  key_text:
    description: The key itself, ASCII-armoured. Takes precedence over O(key_url).
    type: str
    default: ''
  key_source:
    description: Where O(key_text) comes from. Used in messages and in the record.
    type: str
    default: ''
  fingerprint:
    description:
      - Fingerprint of the key. Spaces are ignored. Several fingerprints are separated by commas.
      - If it is empty, the fingerprint that was recorded at first use is expected. If none is recorded, the key is
        accepted and its fingerprint is recorded.
    type: str
    default: ''
  fingerprint_variable:
    description: Name of the variable that pins the fingerprint. Used in messages.
    type: str
    required: true
  record:
    description: File in which the host records fingerprints.
    type: path
    default: /var/lib/vllm-edge/keys.json
seealso:
  - module: edge.vllm_edge.apt_packages
    description: Install packages from the repository.
"""

EXAMPLES = r"""
- name: Add the repository of the container toolkit
  edge.vllm_edge.signed_apt_repository:
    name: nvidia-container-toolkit
    uri: https://nvidia.github.io/libnvidia-container/stable/deb/amd64
    key_url: https://nvidia.github.io/libnvidia-container/gpgkey
    fingerprint: C95B 321B 61E8 8C18 09C4 F759 DDCA E044 F796 ECB0
    uri_variable: container_runtime_repository_url
    fingerprint_variable: container_runtime_repository_key_fingerprint
"""

RETURN = r"""
fingerprints:
  description: Fingerprints of the key in use. Empty in check mode if the key would have to be downloaded first.
  returned: success
  type: list
  elements: str
trust:
  description: What the key was compared with. V(pinned) is O(fingerprint), V(recorded) is the record on the host, and
    V(first-use) means that this run recorded the key.
  returned: success
  type: str
refreshed:
  description: Whether apt read the index of the repository in this run.
  returned: success
  type: bool
"""

import base64
import binascii
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url

from ..module_utils.vllm_edge.system import apt
from ..module_utils.vllm_edge.system.files import write_durably

ARMOUR = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)
FINGERPRINT = re.compile(r"(?:[0-9A-F]{40}|[0-9A-F]{64})")
TAG_SECRET_KEY, TAG_PUBLIC_KEY = 5, 6
HEADER = "# Managed by Ansible (vllm-edge, role apt_repository): changes made here by hand are lost.\n"


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


def packets(data: bytes) -> list[tuple[int, bytes]]:
    """Return the packets (tag, body) of binary OpenPGP data, RFC 9580 section 4.2."""
    found: list[tuple[int, bytes]] = []
    at = 0
    try:
        while at < len(data):
            head = data[at]
            if not head & 0x80:
                raise KeyFormatError("it is not OpenPGP data")
            at += 1
            if head & 0x40:
                tag, first = head & 0x3F, data[at]
                at += 1
                if first < 192:
                    length = first
                elif first < 224:
                    length = ((first - 192) << 8) + data[at] + 192
                    at += 1
                elif first == 255:
                    length = int.from_bytes(data[at : at + 4], "big")
                    at += 4
                else:
                    raise KeyFormatError("it has a packet of unknown length, which no exported key has")
            else:
                tag, size = (head >> 2) & 0x0F, head & 0x03
                if size == 3:
                    length = len(data) - at
                else:
                    octets = 1 << size
                    length = int.from_bytes(data[at : at + octets], "big")
                    at += octets
            body = data[at : at + length]
            if len(body) != length:
                raise KeyFormatError("it is cut short")
            found.append((tag, body))
            at += length
    except IndexError as error:
        raise KeyFormatError("it is cut short") from error
    return found


def fingerprints(data: bytes) -> list[str]:
    """Return the fingerprints of all primary keys in an OpenPGP key, armoured or binary, as gpg --show-keys does.

    apt trusts every key of a keyring. A keyring with the expected key and a second one is therefore refused.
    """
    found: list[str] = []
    for tag, body in packets(dearmour(data)):
        if tag == TAG_SECRET_KEY:
            raise KeyFormatError("it holds a secret key, which belongs on no host")
        if tag != TAG_PUBLIC_KEY or not body:
            continue
        if body[0] == 4:
            found.append(hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper())
        elif body[0] == 6:
            found.append(hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper())
        else:
            raise KeyFormatError(f"it is an OpenPGP key of version {body[0]}; versions 4 and 6 are known here")
    if not found:
        raise KeyFormatError("it holds no public key")
    return sorted(set(found))


def parse_fingerprints(text: str) -> list[str]:
    """Return the fingerprints that an operator pinned. Raises ValueError."""
    wanted = [re.sub(r"[\s:]", "", part).upper() for part in text.split(",")]
    wanted = [part for part in wanted if part]
    for part in wanted:
        if not FINGERPRINT.fullmatch(part):
            raise ValueError(f"{part!r} is not a fingerprint: 40 (or 64) hexadecimal digits are expected")
    return sorted(set(wanted))


def render_source(uri: str, suites: list[str], components: list[str], architectures: list[str], keyring: str) -> str:
    """Render the source in deb822 format."""
    fields = [("Types", "deb"), ("URIs", uri), ("Suites", " ".join(suites))]
    if components:
        fields.append(("Components", " ".join(components)))
    if architectures:
        fields.append(("Architectures", " ".join(architectures)))
    fields.append(("Signed-By", keyring))
    return HEADER + "".join(f"{name}: {value}\n" for name, value in fields)


def list_name(uri: str, suite: str) -> str:
    """Return the prefix of a source's index files below /var/lib/apt/lists (apt's URItoFileName)."""
    url = uri.rstrip("/") + "/" + ("" if suite == "/" else suite if suite.endswith("/") else f"dists/{suite}/")
    url = re.sub(r"^[a-z+]+:(//)?([^/@]*@)?", "", url)
    quoted = "".join(f"%{ord(c):02x}" if c in '\\|{}[]<>"^~_=!@#$%&*' or not "!" <= c <= "~" else c for c in url)
    return quoted.replace("/", "_")


def read_bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


class Repository:
    """One repository on one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params = module.params
        self.name: str = params["name"]
        self.root: str = params["root"]
        self.keyring = f"/etc/apt/keyrings/{self.name}.gpg"
        self.source = f"/etc/apt/sources.list.d/{self.name}.sources"
        self.limits = apt.Limits(params["lock_timeout"], params["timeout"])
        self.key_source: str = params["key_source"] if params["key_text"] else params["key_url"]

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def fail(self, message: str) -> None:
        self.module.fail_json(msg=message)

    # -- the key

    def read_record(self) -> dict[str, Any]:
        data = read_bytes(self.module.params["record"])
        if data is None:
            return {}
        try:
            record = json.loads(data)
        except ValueError as error:
            record = None
            self.fail(
                f"{self.module.params['record']} is not JSON ({error}). It remembers the repository keys that this "
                f"host trusts: restore it from a backup, or delete it so that the keys are recorded again."
            )
        return record if isinstance(record, dict) else {}

    def installed(self) -> tuple[bytes | None, list[str]]:
        data = read_bytes(self.path(self.keyring))
        try:
            return data, fingerprints(data) if data else []
        except KeyFormatError:
            # A damaged keyring is replaced by a verified one.
            return data, []

    def offered(self) -> bytes:
        params = self.module.params
        if params["key_text"]:
            return bytes(params["key_text"].encode())
        if not params["key_url"]:
            self.fail(
                f"The repository {self.name} has no key: neither an address nor a local file of it is set. "
                f"Set the variable beside {params['fingerprint_variable']} that names one."
            )
        response, info = fetch_url(self.module, params["key_url"], timeout=params["timeout"])
        # file: addresses return no status.
        if response is None or info["status"] not in (200, None):
            self.fail(
                f"The key of the repository {self.name} could not be downloaded from {params['key_url']}: "
                f"{info['msg']}. Nothing was changed. Check the address and the host's way out (proxy, CA bundle), or "
                f"give the key as a local file. A server may be silent for {params['timeout']} s "
                f"({apt.TIMEOUT_VARIABLE})."
            )
        return bytes(response.read())

    def check_key(self, data: bytes, expected: list[str], trust: str) -> list[str]:
        try:
            found = fingerprints(data)
        except KeyFormatError as error:
            found = []
            self.fail(
                f"What {self.key_source} holds is not usable as the key of the repository {self.name}: {error}. "
                f"Nothing was changed."
            )
        if expected and found != expected:
            variable = self.module.params["fingerprint_variable"]
            origin = (
                f"{variable} pins"
                if trust == "pinned"
                else f"this host recorded at first use (in {self.module.params['record']})"
            )
            self.fail(
                f"The key of the repository {self.name} is not the expected one: {self.key_source} has "
                f"{', '.join(found)}, {origin} {', '.join(expected)}. Nothing was changed. Whoever holds that key "
                f"decides what is installed as root: ask the vendor for the fingerprint, and only where the new one is "
                f"right set {variable}."
            )
        return found

    # -- the sources

    def indexed(self) -> bool:
        """Whether apt has read the index of every suite."""
        names = glob.glob(self.path("/var/lib/apt/lists/*Release"))
        uri = self.module.params["uri"].replace("$(ARCH)", self.architecture())
        return all(
            any(os.path.basename(name).startswith(list_name(uri, suite)) for name in names)
            for suite in self.module.params["suites"]
        )

    def architecture(self) -> str:
        given = self.module.params["architectures"]
        if given:
            return str(given[0])
        _, out, _ = self.module.run_command(["dpkg", "--print-architecture"], check_rc=True)
        return str(out.strip())

    def verify(self, keyring: bytes, source: str) -> apt.Outcome:
        """Let apt read only this repository, from a source and a keyring in a directory that the host's apt ignores.

        apt keeps the indexes, because the address is the same. Once the source is written, its packages are known.
        """
        # Not in the module's own directory, because apt verifies signatures as a user who may not read it.
        scratch = tempfile.mkdtemp(prefix="vllm-edge-apt-")
        try:
            os.chmod(scratch, 0o755)
            files = {os.path.join(scratch, f"{self.name}.gpg"): keyring}
            trial = os.path.join(scratch, f"{self.name}.sources")
            files[trial] = source.replace(self.keyring, next(iter(files))).encode()
            for path, data in files.items():
                with open(path, "wb") as file:
                    file.write(data)
                os.chmod(path, 0o644)
            return self.refresh(trial)
        finally:
            shutil.rmtree(scratch)

    def refresh(self, trial: str) -> apt.Outcome:
        options = [
            f"Dir::Etc::sourcelist={trial}",
            "Dir::Etc::sourceparts=-",
            "APT::Get::List-Cleanup=0",
            # Without this option an unreadable repository is only a warning, and the exit status is 0.
            "APT::Update::Error-Mode=any",
        ]
        lists = self.path("/var/lib/apt/lists")
        before = os.stat(lists) if os.path.isdir(lists) else None
        command = ["update", *(word for option in options for word in ("-o", option))]
        outcome = apt.apt_get(self.run, command, self.limits)
        if before:
            # ansible.builtin.apt uses the directory's age as the age of the whole cache (cache_valid_time), but only
            # one repository was read here.
            os.utime(lists, ns=(before.st_atime_ns, before.st_mtime_ns))
        return outcome

    def run(self, command: list[str]) -> tuple[int, str, str]:
        return self.module.run_command(command, environ_update={"LC_ALL": "C"})

    # -- the run

    def write(self, path: str, data: bytes | None) -> None:
        target = self.path(path)
        if data is None:
            if os.path.exists(target):
                os.unlink(target)
            return
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        temporary = os.path.join(self.module.tmpdir, f"{self.name}-{os.path.basename(target)}")
        with open(temporary, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        self.module.atomic_move(temporary, target)
        os.chmod(target, 0o644)

    def write_record(self, record: dict[str, Any], found: list[str]) -> None:
        entry = {"fingerprints": found, "source": self.key_source}
        if record.get(self.name) == entry:
            return
        # A record that a power failure truncated would be an error, like a damaged one.
        text = json.dumps({**record, self.name: entry}, indent=2, sort_keys=True) + "\n"
        write_durably(Path(self.module.params["record"]), text)

    def ensure(self) -> dict[str, Any]:
        params = self.module.params
        record = self.read_record()
        remembered = record.get(self.name, {})
        try:
            pinned = parse_fingerprints(params["fingerprint"])
        except ValueError as error:
            pinned = []
            self.fail(f"{params['fingerprint_variable']}: {error}.")
        expected = pinned or list(remembered.get("fingerprints", []))
        trust = "pinned" if pinned else "recorded" if expected else "first-use"

        own = self.path(self.source)
        clash = apt.find_clashes(apt.read_sources(self.root), params["uri"], params["suites"], self.architecture(), own)
        if clash:
            self.fail(
                f"{params['uri']} is configured in {clash[0].path} already. apt refuses one repository with two "
                f"keyrings: remove that file (dpkg -S {clash[0].path} names its package, if any) and run again."
            )

        keyring, found = self.installed()
        # A verified key on the host is only downloaded again if its address changed.
        same_place = not remembered or remembered.get("source") == self.key_source
        if params["key_text"] or not found or found != expected or not same_place:
            if self.module.check_mode and not params["key_text"]:
                wanted, found = keyring, []
            else:
                offered = self.offered()
                found = self.check_key(offered, expected, trust)
                wanted = dearmour(offered)
        else:
            wanted = keyring
        key_pending = self.module.check_mode and not found

        suites, components, architectures = (params[name] for name in ("suites", "components", "architectures"))
        source = render_source(params["uri"], suites, components, architectures, self.keyring)
        files: dict[str, bytes | None] = {self.keyring: wanted, self.source: source.encode()}
        before = {path: read_bytes(self.path(path)) for path in files}
        changed = [path for path in files if before[path] != files[path]]
        diff = [self.diff(path, before[path], files[path]) for path in changed]
        if key_pending:
            condition = f", only if its fingerprint is {', '.join(expected)}" if expected else ""
            text = f"key from {self.key_source}{condition}\n"
            diff.insert(0, {"before_header": self.keyring, "after_header": self.keyring, "before": "", "after": text})

        refresh = self.keyring in changed or self.source in changed or not self.indexed()
        result = {
            "changed": bool(changed) or key_pending,
            "diff": diff,
            "fingerprints": found,
            "trust": trust,
            "refreshed": refresh and not self.module.check_mode,
        }
        if self.module.check_mode:
            return result

        # Before anything is written, because an unreadable source would break the operator's own apt-get update.
        if refresh:
            outcome = self.verify(wanted or b"", source)
            if not outcome.ok:
                key = f"the key {', '.join(found)} of {self.key_source}"
                self.fail(
                    apt.explain_unread_repository(
                        params["uri"], key, params["uri_variable"] or "its address", outcome, self.limits
                    )
                )
        for path in changed:
            self.write(path, files[path])
        self.write_record(record, found)
        return result

    def diff(self, path: str, before: bytes | None, after: bytes | None) -> dict[str, str]:
        def show(data: bytes | None) -> str:
            if data is None:
                return ""
            if path != self.keyring:
                return data.decode("utf-8", "replace")
            try:
                return "".join(f"{item}\n" for item in fingerprints(data))
            except KeyFormatError as error:
                return f"no key: {error}\n"

        return {"before_header": path, "after_header": path, "before": show(before), "after": show(after)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str", "required": True},
            "uri_variable": {"type": "str", "default": ""},
            "suites": {"type": "list", "elements": "str", "default": ["/"]},
            "components": {"type": "list", "elements": "str", "default": []},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "key_url": {"type": "str", "default": "", "no_log": False},
            "key_text": {"type": "str", "default": "", "no_log": False},
            "key_source": {"type": "str", "default": "", "no_log": False},
            "fingerprint": {"type": "str", "default": ""},
            "fingerprint_variable": {"type": "str", "required": True},
            "record": {"type": "path", "default": "/var/lib/vllm-edge/keys.json"},
            "root": {"type": "path", "default": "/"},
            "timeout": {"type": "int", "default": 20},
            "lock_timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Repository(module).ensure())


if __name__ == "__main__":
    main()
