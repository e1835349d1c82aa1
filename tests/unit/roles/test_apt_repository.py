# SPDX-License-Identifier: Apache-2.0
"""The role apt_repository on a host in a directory, with an apt-get of ours: whole or not at all, and never unasked."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from helpers import write_program
from role_cases import Cases, Run, Steps

KEY_OF_ED25519, KEY_OF_RSA = (Path(__file__).parent / f"keys/{name}.asc" for name in ("ed25519", "rsa-with-subkey"))
ED25519 = "2EE0110E2F575441C0A3CF3DA7FF9C965562865B"
RSA = "379CE5E90C34A1E850EBC237B0C9811DEAA02CE3"
URL = "http://vendor.example/repos/debian13/"
APT_GET = r"""
echo "$*" >> "$STATE/asked"
for word; do
  case "$word" in
    --option=Dir::Etc::sourcelist=*) trial=${word#*sourcelist=};;
    update)
      if [ "$trial" ]; then
        cp "$trial" "$(sed -n 's/^Signed-By: //p' "$trial")" "$STATE/tried/"
        find "$STATE/root/etc" -type f | wc -l > "$STATE/there"
      fi
      if [ -e "$STATE/broken" ]; then cat "$STATE/broken" >&2; [ ! "$trial" ] || exit 100; exit 0; fi
      [ ! "$trial" ] || echo "http://vendor.example/repos/debian13|NVIDIA|NVIDIA L" > "$STATE/targets";;
    indextargets)
      case "$*" in *"Created-By: Packages"*) cat "$STATE/targets" 2>/dev/null;; esac
      exit 0;;
    --print-uris)
      cat "$STATE/foretold"
      [ ! -e "$STATE/refused" ] || { cat "$STATE/refused" >&2; exit 100; }
      exit 0;;
    --download-only | --no-remove) echo "$*" > "$STATE/done";;
  esac
done
[ ! -e "$STATE/fails" ] || { cat "$STATE/fails" >&2; exit 100; }
"""
UNSIGNED = """W: GPG error: http://vendor.example/repos/debian13  InRelease: NO_PUBKEY 3CA72DAF9D6BD530
E: The repository 'http://vendor.example/repos/debian13  InRelease' is not signed.
"""
LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 2672 (packagekitd)\n"
NEW = "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.\nNeed to get {0} of archives.\n"
NEW += "After this operation, {0} of additional disk space will be used.\n"
NOTHING = "0 upgraded, 0 newly installed, 0 to remove and 3 not upgraded.\n"
REMOVED = "The following packages will be REMOVED:\n  old podman-docker* libz:i386\nThe following NEW packages\n  x\n"


class Host:
    def __init__(self, place: Path) -> None:
        self.place, self.root = place, place / "root"
        for name in ("tried", "root/etc/apt/keyrings", "root/etc/apt/sources.list.d", "root/etc/apt/preferences.d"):
            (place / name).mkdir(parents=True)
        for name in ("root/run", "root/usr", "root/var/cache/apt/archives"):
            (place / name).mkdir(parents=True)
        write_program(place / "bin/apt-get", APT_GET)
        write_program(place / "bin/apt-cache", 'cat "$STATE/$1"')
        write_program(place / "bin/dpkg-query", "exit 1")
        shutil.copy(KEY_OF_ED25519, place / "vendor.asc")
        (place / "foretold").write_text(NEW.format("1 MB"))

    def run(self, point: str = "main", check: bool = False, **more: object) -> Run:
        given = {
            "__apt_repository_root": str(self.root),
            "apt_repository_state_dir": str(self.root / "state"),
            "apt_repository_lock_timeout_s": 0,
        }
        if point == "main":
            given |= {
                "apt_repository_name": "vendor",
                "apt_repository_url": URL,
                "apt_repository_variables": "vendor",
                "apt_repository_packages": ["nvidia-*"],
                "apt_repository_key_url": f"file://{self.place}/vendor.asc",
            }
        if point == "packages":
            given |= {"apt_repository_purpose": "the toolkit", "apt_repository_install": ["toolkit=9-1"]}
        return Run([point], check, given | more)

    def files(self) -> dict[str, str]:
        paths = [path for path in (self.root / "etc").rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root / "etc/apt")): path.read_text() for path in paths}

    def asked(self) -> list[str]:
        """What apt-get was asked since the last question."""
        lines = (self.place / "asked").read_text().splitlines()
        (self.place / "asked").write_text("")
        return lines


CASES = Cases("apt_repository", make=Host)
KEYRING, SOURCE, PREFERENCES = "keyrings/vendor.asc", "sources.list.d/vendor.sources", "preferences.d/vendor.pref"


@CASES.add
def repository_comes_whole_once_and_its_key_is_recorded(host: Host) -> Steps:
    """On a mirror, where its index alone tells it from the distribution, which was not read yet."""
    (host.root / "etc/apt/sources.list").write_text("deb http://vendor.example/debian stable main\n")
    foreseen = yield host.run(check=True)
    assert not foreseen.failed and "would add http://vendor.example/repos/debian13/ with the key of" in foreseen.text
    assert set(host.files()) == {"sources.list"}
    first = yield host.run()
    assert not first.failed, first.message
    assert f'pin it in the inventory: vendor_key_fingerprint: "{ED25519}"' in first.text
    written = host.files()
    assert set(written) == {"sources.list", KEYRING, SOURCE, PREFERENCES}
    assert f"URIs: {URL}\n" in written[SOURCE] and f"Signed-By: {host.root}/etc/apt/{KEYRING}" in written[SOURCE]
    assert "Package: nvidia-*\nPin: release o=NVIDIA,l=NVIDIA L\nPin-Priority: 500\n" in written[PREFERENCES]
    record = json.loads((host.root / "state/keys.json").read_text())
    assert record["vendor"]["fingerprints"] == [ED25519]
    # apt was asked with what was written then, before any of it was there, and waits no longer than it may.
    assert (host.place / "there").read_text().strip() == "1"
    assert (host.place / "tried/key.asc").read_text() == written[KEYRING]
    asked = [line for line in host.asked() if "update" in line]
    assert len(asked) == 1 and "Acquire::https::Timeout=20" in asked[0] and "sourceparts=-" in asked[0]
    (host.place / "vendor.asc").unlink()  # a verified key is not downloaded again
    again = yield host.run()
    assert (again.failed, again.changed) == (False, [])
    assert not [line for line in host.asked() if "update" in line]
    foreseen = yield host.run(check=True)
    assert foreseen.changed == []
    (host.place / "targets").unlink()
    again = yield host.run()
    assert again.changed == [] and [line for line in host.asked() if "update" in line], "an index that is gone is read"
    assert host.files() == written


@CASES.add
def other_key_is_refused_and_the_operators_pin_is_the_way_to_it(host: Host) -> Steps:
    wrong = yield host.run(apt_repository_fingerprint=RSA)
    assert f"has {ED25519}, vendor_key_fingerprint pins {RSA}. Nothing was changed." in wrong.message
    assert host.files() == {}
    yield host.run()
    written, record = host.files(), host.root / "state/keys.json"
    record.unlink()
    shutil.copy(KEY_OF_RSA, host.place / "vendor.asc")
    assert not (yield host.run()).failed and host.files() == written, "the key that apt uses is no first use"
    assert json.loads(record.read_text())["vendor"]["fingerprints"] == [ED25519]
    (host.place / "vendor.asc").write_bytes(KEY_OF_ED25519.read_bytes() + KEY_OF_RSA.read_bytes())
    (host.root / "etc/apt" / KEYRING).write_text("damaged")
    both = yield host.run()
    assert f"has {ED25519}, {RSA}, this host recorded" in both.message
    shutil.copy(KEY_OF_RSA, host.place / "vendor.asc")
    pinned = yield host.run(apt_repository_fingerprint=RSA)
    assert not pinned.failed and host.files()[KEYRING] != written[KEYRING] and host.files()[SOURCE] == written[SOURCE]


@CASES.add
def what_apt_cannot_read_is_not_written(host: Host) -> Steps:
    for before in ({}, {KEYRING, SOURCE, PREFERENCES}):
        there = host.files()
        assert set(there) == set(before)
        (host.place / "broken").write_text(UNSIGNED)
        shutil.copy(KEY_OF_RSA, host.place / "vendor.asc")
        refused = yield host.run(apt_repository_fingerprint=RSA)
        assert f"The repository {URL} was not added, and nothing was changed: " in refused.message
        assert "NO_PUBKEY 3CA72DAF9D6BD530" in refused.message and "see that vendor_url is the right" in refused.message
        assert host.files() == there and not (host.root / "run/vllm-edge-apt").exists()
        (host.place / "broken").unlink()
        shutil.copy(KEY_OF_ED25519, host.place / "vendor.asc")
        yield host.run()


@CASES.add
def key_that_cannot_be_had_is_said(host: Host) -> Steps:
    (host.place / "vendor.asc").unlink()
    absent = yield host.run()
    assert "The key of the repository vendor could not be downloaded from file:" in absent.message
    (host.place / "vendor.asc").write_text("<html>log in first</html>")
    page = yield host.run()
    assert "vendor.asc holds is not usable as the key of the repository vendor: it is not OpenPGP data" in page.message
    os.truncate(host.place / "vendor.asc", 2 * 1024**2)
    large = yield host.run()
    assert "it has more than 1 MiB, which no key of a repository has. Nothing was changed." in large.message, (
        large.message
    )
    assert host.files() == {}


@CASES.add
def local_key_wins_over_the_address(host: Host) -> Steps:
    for check in (True, False):
        local = yield host.run(check=check, apt_repository_key_file=str(KEY_OF_RSA), apt_repository_fingerprint=ED25519)
        assert f"{KEY_OF_RSA} has {RSA}, vendor_key_fingerprint pins {ED25519}" in local.message


@CASES.add
def components_are_added_with_address_and_key_of_the_hosts_own_sources(host: Host) -> Steps:
    own = host.root / "etc/apt/sources.list"
    own.write_text("deb [signed-by=/usr/share/keyrings/debian.gpg] http://deb.debian.org/debian trixie main\n")
    given = {"apt_repository_name": "vendor", "apt_repository_release": "trixie"}
    given |= {"apt_repository_components": ["contrib", "non-free"]}
    foreseen = yield host.run("archive", True, **given)
    assert "Components: contrib non-free" in foreseen.text and set(host.files()) == {"sources.list"}
    (host.place / "broken").write_text(
        "E: Failed to fetch http://deb.debian.org/x  Could not resolve 'deb.debian.org'\n"
    )
    unread = yield host.run("archive", **given)
    assert "and nothing was changed: Failed to fetch" in unread.message and set(host.files()) == {"sources.list"}
    (host.place / "broken").unlink()
    for changed in (True, False):
        added = yield host.run("archive", **given)
        assert not added.failed and ("Enable the components of the archive" in added.changed) == changed
    assert "Signed-By: /usr/share/keyrings/debian.gpg" in host.files()[SOURCE]
    own.write_text("deb http://deb.debian.org/debian trixie main contrib non-free\n")
    yield host.run("archive", **given)
    assert set(host.files()) == {"sources.list"}, "what the operator adds is left to the operator"


@CASES.add
def packages_are_foretold_then_installed(host: Host) -> Steps:
    foreseen = yield host.run("packages", True)
    assert "would install toolkit=9-1" in foreseen.text and not (host.place / "done").exists()
    done = yield host.run("packages")
    assert not done.failed, done.message
    words = (host.place / "done").read_text()
    assert words.endswith(" toolkit=9-1 --no-remove\n") and "Dpkg::Options::=--force-confold" in words
    asked = [line.split() for line in host.asked()]
    assert ["update" in words for words in asked] == [False, True, False, False]
    (host.place / "foretold").write_text(NOTHING)
    for check in (True, False):
        again = yield host.run("packages", check, apt_repository_update=False)
        assert (again.failed, again.changed) == (False, [])
    assert all("--print-uris" in line for line in host.asked())


@CASES.add
def packages_of_others_are_not_removed(host: Host) -> Steps:
    (host.place / "foretold").write_text(REMOVED + NEW.format("1 MB"))
    for check in (True, False):
        refused = yield host.run("packages", check, apt_repository_remove=["old"])
        said = (
            "The toolkit could not be installed, and nothing was changed: apt would remove libz, podman-docker, which"
        )
        assert refused.message.startswith(said), refused.message
    assert all("--print-uris" in line or line.endswith("update") for line in host.asked())
    meant = {"apt_repository_remove": ["old"], "apt_repository_removable": ["podman-docker", "libz"]}
    done = yield host.run("packages", **meant)
    assert not done.failed and host.asked()[-1].endswith(" toolkit=9-1 old-")
    gone = yield host.run("packages", apt_repository_install=[], **meant)
    assert not gone.failed and host.asked()[-1].endswith(" --purge old-")


@CASES.add
def disk_without_room_is_told_before_anything_is_installed(host: Host) -> Steps:
    (host.place / "foretold").write_text(NEW.format("900000 GB"))
    refused = yield host.run("packages")
    assert "The toolkit could not be installed, and nothing was changed: /" in refused.message
    assert "MiB are to be written and 512 MiB to stay free" in refused.message and not (host.place / "done").exists()


@CASES.add
def lock_that_somebody_holds_is_named(host: Host) -> Steps:
    (host.place / "broken").write_text(LOCKED)
    held = yield host.run("packages")
    assert "nothing was changed: Could not get lock /var/lib/apt/lists/lock. It is held by process 2672" in held.message
    assert "waited for 0 s (apt_repository_lock_timeout_s)" in held.message and not (host.place / "done").exists()


@CASES.add
def version_that_no_repository_has_is_answered_by_those_that_there_are(host: Host) -> Steps:
    (host.place / "refused").write_text("E: Version '9-1' for 'toolkit' was not found\n")
    (host.place / "madison").write_text(
        "toolkit | 1.20.0-1 | http://v Packages\ntoolkit | 1.18.2-1 | http://v Packages\n"
    )
    (host.place / "pkgnames").write_text("")
    (host.place / "broken").write_text(
        "W: Failed to fetch http://deb.debian.org/x  Could not resolve 'deb.debian.org'\n"
    )
    missing = yield host.run("packages", apt_repository_version_variable="toolkit_version")
    assert "Version '9-1' for 'toolkit' was not found" in missing.message
    assert "(there is 1.20.0-1, 1.18.2-1). Set toolkit_version to what there is" in missing.message
    assert "Failed to fetch http://deb.debian.org/x" in missing.message, "it may be in the index that was not read"
    foreseen = yield host.run("packages", True)  # the repository may not have been added yet
    assert not foreseen.failed and "would install toolkit=9-1" in foreseen.text


@CASES.add
def failure_of_dpkg_is_not_told_as_nothing(host: Host) -> Steps:
    (host.place / "fails").write_text(
        "cp: No space left on device\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n"
    )
    failed = yield host.run("packages")
    assert failed.message.startswith("The toolkit could not be installed: Sub-process /usr/bin/dpkg returned an error")
    assert "cp: No space left on device" in failed.message and "nothing was changed" not in failed.message


test_case = CASES.make_test()
