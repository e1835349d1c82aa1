# SPDX-License-Identifier: Apache-2.0
"""The role vllm_engine: caches of images that no kept generation uses go, and needrestart restarts no engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from role_cases import Cases, Run, Steps

OLD, KEPT, LIVE = "0" * 12, "1" * 12, "2" * 12


class Host:
    """One engine over three images, one engine of a former profile, and what others have put there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for cache in (OLD, KEPT, LIVE, f"{LIVE}.set-aside", "notes-of-me", f"{OLD}-mine", f"../former/{OLD}"):
            (root / "disk/cache/e2b" / cache / "vllm").mkdir(parents=True)
        (root / "cache").symlink_to("disk/cache")
        for place, image in (("state/generations/4", KEPT), ("state/generations/5", LIVE), ("etc", LIVE)):
            file = root / place / "engines/e2b/engine.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({"engine": "e2b", "image_id": f"sha256:{image}{'0' * 52}"}, indent=2))

    def run(self, check: bool = False) -> Run:
        places = {"cache": "cache", "state": "state", "configuration": "etc"}
        variables = {f"vllm_engine_{name}_directory": str(self.root / place) for name, place in places.items()}
        return Run(["prune"], check, variables | {"vllm_engine_uid": os.getuid()})

    def caches(self) -> list[str]:
        return sorted(str(path.relative_to(self.root / "cache")) for path in (self.root / "cache").glob("*/*"))


CASES = Cases("vllm_engine", make=Host, validated=False)


@CASES.add
def caches_that_no_generation_names_are_removed(host: Host) -> Steps:
    before = host.caches()
    foreseen = yield host.run(check=True)
    assert len(foreseen.changed) == 1 and f"{host.root}/cache/former/{OLD}" in foreseen.text
    assert not foreseen.failed and host.caches() == before
    assert len((yield host.run()).changed) == 1
    assert host.caches() == sorted([f"e2b/{KEPT}", f"e2b/{LIVE}", "e2b/notes-of-me", f"e2b/{OLD}-mine"])
    again = yield host.run()
    assert (again.failed, again.changed) == (False, [])


@CASES.add
def nothing_is_removed_where_no_generation_can_be_read(host: Host) -> Steps:
    before = host.caches()
    for file in host.root.rglob("engine.json"):
        file.unlink()
    played = yield host.run()
    assert (played.failed, played.changed) == (False, []) and host.caches() == before


test_case = CASES.make_test()


# ---- needrestart, which reads the role's snippet with Perl -------------------------------------------------------

ROLE = ROOT / "roles/vllm_engine"

# As /etc/needrestart/needrestart.conf reads its snippets, and as needrestart 3.6 looks a service up.
PROGRAM = r"""
use strict;
our %nrconf = (override_rc => {qr(^dbus) => 0});
my ($fn, @units) = @ARGV;
eval do { local(@ARGV, $/) = $fn; <>};
die "Error parsing $fn: $@" if($@);
foreach my $rc (@units) {
    my $restart = 1;
    foreach my $re (keys %{$nrconf{override_rc}}) {
        next unless($rc =~ /$re/);
        $restart = $nrconf{override_rc}->{$re};
        last;
    }
    print "$restart";
}
"""


RESTARTED = {
    "vllm-e2b.service": False,
    "vllm-edge-switch.service": False,
    "dbus.service": False,
    "ssh.service": True,
    "my-vllm-e2b.service": True,
}


@pytest.mark.slow
def test_needrestart_reads_the_snippet_and_restarts_no_engine(tmp_path: Path) -> None:
    """It takes files of this directory that end with .conf."""
    place = Path(yaml.safe_load((ROLE / "vars/main.yml").read_text())["__vllm_engine_needrestart"])
    assert place.parent == Path("/etc/needrestart/conf.d") and place.suffix == ".conf"
    tasks = yaml.safe_load((ROLE / "tasks/install.yml").read_text())
    (copy,) = (each for task in tasks if (each := task.get("ansible.builtin.copy")) and "needrestart" in each["dest"])
    assert copy["dest"] == "{{ __vllm_engine_needrestart }}"
    (tmp_path / place.name).write_text(copy["content"])
    words = ["perl", "-e", PROGRAM, tmp_path / place.name, *RESTARTED]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert dict(zip(RESTARTED, (said == "1" for said in done.stdout), strict=True)) == RESTARTED, done.stderr
