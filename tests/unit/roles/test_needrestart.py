# SPDX-License-Identifier: Apache-2.0
"""What the role vllm_engine tells needrestart, read as needrestart reads it: with Perl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

ROLE = Path(__file__).resolve().parents[3] / "roles/vllm_engine"

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


def find_task(module: str) -> dict[str, str]:
    tasks = yaml.safe_load((ROLE / "tasks/install.yml").read_text())
    (found,) = [task[module] for task in tasks if module in task and "needrestart" in str(task)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "restarts"),
    [
        ("vllm-e2b.service", False),
        ("vllm-edge-switch.service", False),
        ("dbus.service", False),
        ("ssh.service", True),
        ("my-vllm-e2b.service", True),
    ],
)
def test_needrestart_restarts_no_engine(tmp_path: Path, unit: str, restarts: bool) -> None:
    snippet = tmp_path / "vllm-edge.conf"
    snippet.write_text(find_task("ansible.builtin.copy")["content"])
    done = subprocess.run(["perl", "-e", PROGRAM, snippet, unit], capture_output=True, text=True, check=True)
    assert done.stdout == str(int(restarts)), done.stderr


def test_needrestart_reads_the_snippet() -> None:
    """It takes files of this directory that end with .conf."""
    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    place = Path(variables["__vllm_engine_needrestart"])
    assert place.parent == Path("/etc/needrestart/conf.d") and place.suffix == ".conf"
    assert find_task("ansible.builtin.copy")["dest"] == "{{ __vllm_engine_needrestart }}"
