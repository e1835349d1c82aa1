#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: add an apt repository after its signing key was verified, or components of the archive."""

from __future__ import annotations

DOCUMENTATION = r"""
module: signed_apt_repository
short_description: Manage an apt repository with a verified signing key
version_added: "0.1.0"
description:
  - With O(uri), writes a keyring and a deb822 source with C(Signed-By).
  - Compares the fingerprint of the key with O(fingerprint) or, if that is empty, with the fingerprint that the host
    recorded when the repository was first added. A different key is an error.
  - With O(release), finds the apt sources of the host that contain the distribution's archive (those with the component
    C(main) for the release, its updates or its security updates). Writes a separate source with the O(components) that
    they lack, with the same address and key. The host's own sources are not changed. Fails if one of them contains its
    key inline, because another source cannot refer to such a key.
  - With O(uri), writes apt preferences with which the repository supplies only O(packages). Its other packages get the
    priority 1, so they never replace a package of another repository. They name the repository by its host or, where
    the host has other repositories too or the address is a directory, by Origin and Label of its index.
  - apt reads the repository with its key before any file is written. If that fails, nothing was changed.
  - Fails if another source already contains the repository, because apt refuses one repository with two keyrings.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.apt
  - edge.vllm_edge.root
attributes:
  check_mode:
    description: In check mode nothing is written. A key that would have to be downloaded is not verified.
  diff_mode:
    description: Shows the files before and after the change. The keyring is shown as its fingerprints.
options:
  name:
    description: Base name of the files that are written.
    type: str
    required: true
  uri:
    description: Address of the repository. Exactly one of O(uri) and O(release) is required.
    type: str
  uri_variable:
    description: Name of the variable that sets the address. Used in messages.
    type: str
    default: ''
  release:
    description: Code name of the distribution's release, for example V(trixie), to enable components of its archive.
    type: str
  refresh:
    description: Whether to refresh all package indexes of the host even if nothing changed. Used with O(release) only.
    type: bool
    default: false
  suites:
    description: Suites of the repository. V(/) for a flat repository.
    type: list
    elements: str
    default: [/]
  components:
    description: Components of the repository, empty for a flat one; or components of the archive that the host needs.
    type: list
    elements: str
    default: []
  packages:
    description:
      - Names of the packages that the repository supplies, or patterns of them, for example V(nvidia-*).
      - Required with O(uri).
    type: list
    elements: str
  packages_variable:
    description: Name of the variable that sets O(packages). Used in messages.
    type: str
    default: packages
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
        accepted, its fingerprint is recorded, and a warning names the line that pins it.
      - A key over plain http is not accepted without a fingerprint.
    type: str
    default: ''
  fingerprint_variable:
    description: Name of the variable that pins the fingerprint. Used in messages. Required with O(uri).
    type: str
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
    packages: [nvidia-container-toolkit*, libnvidia-container*]
    uri_variable: container_runtime_repository_url
    fingerprint_variable: container_runtime_repository_key_fingerprint

- name: Enable non-free
  edge.vllm_edge.signed_apt_repository:
    name: vllm-edge-nvidia-driver
    release: trixie
    components: [contrib, non-free, non-free-firmware]
"""

RETURN = r"""
fingerprints:
  description: Fingerprints of the key in use. Empty in check mode if the key would have to be downloaded first.
  returned: with O(uri)
  type: list
  elements: str
keyring:
  description: The binary form of the key in base64. Empty in check mode if the key would have to be downloaded first.
  returned: with O(uri)
  type: str
trust:
  description: What the key was compared with. V(pinned) is O(fingerprint), V(recorded) is the record on the host, and
    V(first-use) means that this run recorded the key.
  returned: with O(uri)
  type: str
added:
  description: What the written source adds, each entry as C(address suite components).
  returned: with O(release)
  type: list
  elements: str
  sample: ["http://deb.debian.org/debian trixie contrib non-free non-free-firmware"]
refreshed:
  description: Whether apt read the index of the repository in this run.
  returned: success
  type: bool
"""

import base64
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url

from ..module_utils.vllm_edge.system import apt, openpgp
from ..module_utils.vllm_edge.system.apt_sources import (
    Source,
    choose_pin,
    find_clashes,
    find_missing_components,
    find_unprintable,
    find_wrong_pattern,
    get_host,
    get_index_prefix,
    read_release_fields,
    read_sources,
    render_preferences,
    render_sources,
)
from ..module_utils.vllm_edge.system.files import write_durably

Files = Mapping[str, bytes | None]
"""Content of files by path; None if the file should not exist."""


def read_bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


class SourceFile:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        self.name: str = module.params["name"]
        self.keyring = f"/etc/apt/keyrings/{self.name}.gpg"
        self.path = f"/etc/apt/sources.list.d/{self.name}.sources"
        self.preferences = f"/etc/apt/preferences.d/{self.name}.pref"
        self.limits = apt.Limits(module.params["lock_timeout"], module.params["timeout"])

    def at(self, path: str) -> str:
        return os.path.join(self.params["root"], path.lstrip("/"))

    def fail(self, message: str) -> NoReturn:
        self.module.fail_json(msg=message)

    def run(self, command: list[str]) -> tuple[int, str, str]:
        return self.module.run_command(command, environ_update={"LC_ALL": "C"})

    def update(self, *options: str) -> apt.Outcome:
        return apt.apt_get(self.run, ["update", *(word for option in options for word in ("-o", option))], self.limits)

    def read_other_sources(self) -> list[Source]:
        own = self.at(self.path)
        return [source for source in read_sources(self.params["root"]) if source.path != own]

    def compare(self, files: Files) -> tuple[list[str], list[dict[str, str]]]:
        """Return the paths of the files that differ on the host, and the differences."""
        before = {path: read_bytes(self.at(path)) for path in files}
        changed = [path for path, data in files.items() if before[path] != data]
        return changed, [
            {
                "before_header": path,
                "after_header": path,
                "before": self.show(path, before[path]),
                "after": self.show(path, files[path]),
            }
            for path in changed
        ]

    def show(self, path: str, data: bytes | None) -> str:
        if data is None or path != self.keyring:
            return (data or b"").decode("utf-8", "replace")
        try:
            return "".join(f"{item}\n" for item in openpgp.list_fingerprints(data))
        except openpgp.KeyFormatError as error:
            return f"no key: {error}\n"

    def read_alone(self, files: Files) -> apt.Outcome:
        """Let apt read only these files, from a directory that the host's apt ignores.

        apt keeps the indexes, because the address is the same. Once the source is written, its packages are known.
        """
        lists = self.at("/var/lib/apt/lists")
        before = os.stat(lists) if os.path.isdir(lists) else None
        # Not in the module's own directory, because apt verifies signatures as a user who may not read it.
        scratch = tempfile.mkdtemp(prefix="vllm-edge-apt-")
        try:
            os.chmod(scratch, 0o755)
            trial = {path: os.path.join(scratch, os.path.basename(path)) for path in files}
            for path, data in files.items():
                if path == self.path and self.keyring in trial:
                    data = (data or b"").replace(self.keyring.encode(), trial[self.keyring].encode())
                with open(trial[path], "wb") as file:
                    file.write(data or b"")
                os.chmod(trial[path], 0o644)
            return self.update(
                f"Dir::Etc::sourcelist={trial[self.path]}",
                "Dir::Etc::sourceparts=-",
                "APT::Get::List-Cleanup=0",
                # Without this option an unreadable repository is only a warning, and the exit status is 0.
                "APT::Update::Error-Mode=any",
            )
        finally:
            shutil.rmtree(scratch)
            if before:
                # ansible.builtin.apt uses the directory's age as the age of the whole cache (cache_valid_time), but
                # only one repository was read here.
                os.utime(lists, ns=(before.st_atime_ns, before.st_mtime_ns))

    def verify(self, files: Files, uri: str, key: str, variable: str) -> None:
        """Fail if apt cannot read these files.

        Called before anything is written, because an unreadable source would break the operator's own apt-get update.
        """
        outcome = self.read_alone(files)
        if not outcome.ok:
            self.fail(apt.explain_unread_repository(uri, key, variable, outcome, self.limits))

    def write(self, path: str, data: bytes | None) -> None:
        target = self.at(path)
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

    def ensure_components(self) -> dict[str, Any]:
        """Enable further components of the distribution's archive."""
        components, release = self.params["components"], self.params["release"]
        added = find_missing_components(self.read_other_sources(), release, components)
        inside = [source.path for source in added if "BEGIN PGP" in source.signed_by]
        if inside:
            self.fail(
                f"{inside[0]} contains the key of its archive, so that no other source can refer to it. Nothing was "
                f"changed: add {' '.join(components)} to its components there, and run again."
            )
        # Preferences for a vendor's repository of the same name, which this source replaces, would have no effect.
        files: Files = {self.path: render_sources(added, "nvidia_driver").encode() or None, self.preferences: None}
        changed, diff = self.compare(files)
        refresh = bool(changed) or self.params["refresh"]
        if not self.module.check_mode:
            if changed and added:
                key = added[0].signed_by or "the keys that apt trusts"
                self.verify({self.path: files[self.path]}, added[0].uri, key, added[0].path)
            for path in changed:
                self.write(path, files[path])
            if refresh:
                # An index that cannot be read is reported when a package from it is installed.
                self.update()
        return {
            "changed": bool(changed),
            "diff": diff,
            "added": [f"{source.uri} {source.suite} {' '.join(source.components)}" for source in added],
            "refreshed": refresh and not self.module.check_mode,
        }


class Repository(SourceFile):
    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module)
        self.record_path: str = self.params["record"]
        self.key_source: str = self.params["key_source"] if self.params["key_text"] else self.params["key_url"]
        self.record = self.read_record()
        self.known: dict[str, Any] = self.record.get(self.name, {})
        try:
            pinned = openpgp.parse_fingerprints(self.params["fingerprint"])
        except ValueError as error:
            self.fail(f"{self.params['fingerprint_variable']}: {error}.")
        self.expected = pinned or list(self.known.get("fingerprints", []))
        self.check_values()
        self.trust = "pinned" if pinned else "recorded" if self.expected else "first-use"

    def check_values(self) -> None:
        """Fail if a value would become something else in apt's files, or an unverified key would be downloaded."""
        values = {name: self.params[name] for name in ("suites", "components", "architectures")}
        told = find_unprintable({self.params["uri_variable"] or "uri": [self.params["uri"]], **values})
        if told:
            self.fail(f"The repository {self.name} was not added, and nothing was changed: {told}")
        packages, variable = self.params["packages"], self.params["packages_variable"]
        if not packages or (wrong := find_wrong_pattern(packages)):
            what = f"has {wrong}" if packages else "is empty"
            self.fail(
                f"{variable} {what}. It lists the packages that the repository {self.name} may supply: names, or "
                f"patterns that begin with two characters of one, such as nvidia-*. Nothing was changed."
            )
        encrypted = self.params["key_text"] or self.params["key_url"].lower().startswith(("https:", "file:"))
        if self.params["key_url"] and not encrypted and not self.expected:
            self.fail(
                f"The key of the repository {self.name} comes from {ascii(self.params['key_url'])[:200]}, which "
                f"anybody on the way can change, and no fingerprint is set. Nothing was changed. Ask the vendor for "
                f"the fingerprint and set {self.params['fingerprint_variable']}, or use https or a local file."
            )

    def read_release(self, source: Source) -> dict[str, str] | None:
        """Return Origin and Label of a repository as apt has read them; None if it has not."""
        prefix = get_index_prefix(source.uri.replace("$(ARCH)", self.architecture), source.suite.split()[0])
        for name in ("InRelease", "Release"):
            if data := read_bytes(self.at(f"/var/lib/apt/lists/{prefix}{name}")):
                return read_release_fields(data[: openpgp.MAX_BYTES].decode("utf-8", "replace"))
        return None

    def render_preferences(self, source: Source, others: list[Source]) -> bytes | None:
        """Return the preferences of the repository, or those of the host if its index cannot be read now."""
        current = read_bytes(self.at(self.preferences))
        # Repositories that have preferences of this module are told apart by the names of their packages.
        restricted = self.at("/etc/apt/preferences.d/{}.pref")
        host = get_host(source.uri)
        open_to_all = [
            other
            for other in others
            if not os.path.exists(restricted.format(os.path.basename(other.path).removesuffix(".sources")))
        ]
        shared = not host or any(get_host(other.uri) == host for other in open_to_all)
        index = self.read_release(source)
        if shared and index is None:
            return current
        release = index or {}
        if shared and release and any(self.read_release(other) == release for other in open_to_all):
            self.fail(
                f"The repository {source.uri} calls itself {', '.join(release.values())}, as another repository of "
                f"this host does, so apt cannot tell them apart. Whoever signs it could replace every package: see "
                f"that {self.params['uri_variable'] or 'its address'} is the right place, or serve it from a host "
                f"of its own."
            )
        # Once the others of its host are restricted, too, the earlier form is as good: a second run changes nothing.
        by_release = choose_pin(source.uri, True, release)
        if not shared and by_release and current == render_preferences(by_release, self.params["packages"]).encode():
            return current
        pin = choose_pin(source.uri, shared, release)
        if not pin:
            self.module.warn(
                f"The repository {source.uri} can replace every package of this host: other repositories have the same "
                f"host, and its index has neither Origin nor Label. Serve it from a host of its own."
            )
        return render_preferences(pin, self.params["packages"]).encode() if pin else None

    def read_record(self) -> dict[str, Any]:
        data = read_bytes(self.record_path)
        try:
            record = json.loads(data) if data is not None else {}
        except ValueError as error:
            self.fail(
                f"{self.record_path} is not JSON ({error}). It contains the repository keys that this host trusts: "
                f"restore it from a backup, or delete it so that the keys are recorded again."
            )
        return record if isinstance(record, dict) else {}

    def write_record(self, found: list[str]) -> None:
        entry = {"fingerprints": found, "source": self.key_source}
        if self.known != entry:
            # A record that a power failure truncated would be an error, like a damaged one.
            text = json.dumps({**self.record, self.name: entry}, indent=2, sort_keys=True) + "\n"
            write_durably(Path(self.record_path), text)

    def fetch_key(self) -> bytes:
        if self.params["key_text"]:
            return bytes(self.params["key_text"].encode())
        if not self.params["key_url"]:
            self.fail(
                f"The repository {self.name} has no key: neither an address nor a local file of it is set. "
                f"Set the variable beside {self.params['fingerprint_variable']} that names one."
            )
        response, info = fetch_url(self.module, self.params["key_url"], timeout=self.limits.silence_s)
        # file: addresses return no status.
        if response is None or info["status"] not in (200, None):
            self.fail(
                f"The key of the repository {self.name} could not be downloaded from {self.params['key_url']}: "
                f"{info['msg']}. Nothing was changed. Check the address and the host's way out (proxy, CA bundle), or "
                f"give the key as a local file. A server may be silent for {self.limits.silence_s} s "
                f"({apt.TIMEOUT_VARIABLE})."
            )
        # One byte more than the reader accepts.
        return bytes(response.read(openpgp.MAX_BYTES + 1))

    def check_key(self, data: bytes) -> list[str]:
        """Return the fingerprints of an offered key. Fails if they are not the expected ones."""
        try:
            found = openpgp.list_fingerprints(data)
        except openpgp.KeyFormatError as error:
            self.fail(
                f"What {self.key_source} holds is not usable as the key of the repository {self.name}: {error}. "
                f"Nothing was changed."
            )
        if self.expected and found != self.expected:
            variable = self.params["fingerprint_variable"]
            origin = (
                f"{variable} pins"
                if self.trust == "pinned"
                else f"this host recorded at first use (in {self.record_path})"
            )
            self.fail(
                f"The key of the repository {self.name} is not the expected one: {self.key_source} has "
                f"{', '.join(found)}, {origin} {', '.join(self.expected)}. Nothing was changed. Whoever holds that key "
                f"decides what is installed as root: ask the vendor for the fingerprint, and only where the new one is "
                f"right set {variable}."
            )
        return found

    def choose_key(self) -> tuple[bytes | None, list[str]]:
        """Return the content of the keyring, and its fingerprints; none in check mode before it was downloaded."""
        keyring = read_bytes(self.at(self.keyring))
        try:
            found = openpgp.list_fingerprints(keyring) if keyring else []
        except openpgp.KeyFormatError:
            # A damaged keyring is replaced by a verified one.
            found = []
        # A verified key on the host is only downloaded again if its address changed.
        moved = bool(self.known) and self.known.get("source") != self.key_source
        if found and found == self.expected and not moved and not self.params["key_text"]:
            return keyring, found
        if self.module.check_mode and not self.params["key_text"]:
            return keyring, []
        key = self.fetch_key()
        found = self.check_key(key)
        return openpgp.dearmour(key), found

    def get_architecture(self) -> str:
        if self.params["architectures"]:
            return str(self.params["architectures"][0])
        _, out, _ = self.module.run_command(["dpkg", "--print-architecture"], check_rc=True)
        return str(out.strip())

    def is_indexed(self, architecture: str) -> bool:
        names = [os.path.basename(path) for path in glob.glob(self.at("/var/lib/apt/lists/*Release"))]
        uri = self.params["uri"].replace("$(ARCH)", architecture)
        prefixes = [get_index_prefix(uri, suite) for suite in self.params["suites"]]
        return all(any(name.startswith(prefix) for name in names) for prefix in prefixes)

    def ensure(self) -> dict[str, Any]:
        uri, suites = self.params["uri"], self.params["suites"]
        self.architecture = architecture = self.get_architecture()
        others = self.read_other_sources()
        if clash := find_clashes(others, uri, suites, architecture):
            self.fail(
                f"{uri} is configured in {clash[0].path} already. apt refuses one repository with two keyrings: remove "
                f"that file (dpkg -S {clash[0].path} names its package, if any) and run again."
            )
        keyring, found = self.choose_key()
        source = Source(uri, " ".join(suites), self.path, tuple(self.params["components"]), self.keyring)
        text = render_sources([source], "apt_repository", self.params["architectures"])
        files: dict[str, bytes | None] = {self.keyring: keyring, self.path: text.encode()}
        changed, diff = self.compare(files)
        if not found:
            condition = f", only if its fingerprint is {', '.join(self.expected)}" if self.expected else ""
            after = f"key from {self.key_source}{condition}\n"
            diff.insert(0, {"before_header": self.keyring, "after_header": self.keyring, "before": "", "after": after})
        refresh = not self.module.check_mode and (bool(changed) or not self.is_indexed(architecture))
        if refresh:
            key = f"the key {', '.join(found)} of {self.key_source}"
            self.verify(files, uri, key, self.params["uri_variable"] or "its address")
        # Written first, so that apt never sees the repository without them.
        files = {self.preferences: self.render_preferences(source, others), **files}
        changed, more = self.compare(files)
        diff = [entry for entry in more if entry["after_header"] == self.preferences] + diff
        if not self.module.check_mode:
            for path in changed:
                self.write(path, files[path])
            self.write_record(found)
        if found and self.trust == "first-use":
            variable = self.params["fingerprint_variable"]
            self.module.warn(
                f"The key of {self.name} was seen for the first time on this host and is recorded in "
                f"{self.record_path}. Compare it with what the vendor publishes, then pin it in the inventory: "
                f'{variable}: "{",".join(found)}"'
            )
        return {
            # A key that is seen for the first time is recorded.
            "changed": bool(changed) or not found or self.trust == "first-use",
            "diff": diff,
            "fingerprints": found,
            "keyring": base64.b64encode(keyring or b"").decode(),
            "trust": self.trust,
            "refreshed": refresh,
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str"},
            "uri_variable": {"type": "str", "default": ""},
            "release": {"type": "str"},
            "refresh": {"type": "bool", "default": False},
            "suites": {"type": "list", "elements": "str", "default": ["/"]},
            "packages": {"type": "list", "elements": "str"},
            "packages_variable": {"type": "str", "default": "packages"},
            "components": {"type": "list", "elements": "str", "default": []},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "key_url": {"type": "str", "default": "", "no_log": False},
            "key_text": {"type": "str", "default": "", "no_log": False},
            "key_source": {"type": "str", "default": "", "no_log": False},
            "fingerprint": {"type": "str", "default": ""},
            "fingerprint_variable": {"type": "str"},
            "record": {"type": "path", "default": "/var/lib/vllm-edge/keys.json"},
            "root": {"type": "path", "default": "/"},
            "timeout": {"type": "int", "default": 20},
            "lock_timeout": {"type": "int", "default": 300},
        },
        required_one_of=[("uri", "release")],
        mutually_exclusive=[("uri", "release")],
        required_by={"uri": ["fingerprint_variable", "packages"]},
        supports_check_mode=True,
    )
    archive = module.params["release"] is not None
    module.exit_json(**(SourceFile(module).ensure_components() if archive else Repository(module).ensure()))


if __name__ == "__main__":
    main()
