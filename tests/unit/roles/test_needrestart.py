# SPDX-License-Identifier: Apache-2.0
"""What the role vllm_engine tells needrestart, read as needrestart reads it: with Perl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

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
