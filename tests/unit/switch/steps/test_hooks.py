# SPDX-License-Identifier: Apache-2.0
"""Hooks of a switch: real executables, in order, told where it goes; their children do not outlive the limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation, Limits
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.model import Done
from ansible.module_utils.vllm_edge.switch.steps import hooks
from ansible.module_utils.vllm_edge.switch.view import HostView
from fake_host import alive, failure, until, write
from generations import engine, put, rendered

ROOT = Path(__file__).resolve().parents[4]


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = HostPaths(root / "etc", root / "state", root / "units")
        self.former = store.load(self.paths, put(self.paths, rendered(engine("a"), profile="small")))
        self.wanted = store.load(self.paths, put(self.paths, rendered(engine("b"), profile="large")))
        self.marker, self.out = root / "ran", root / "out"
        self.touch = f"#!/bin/sh\ntouch {self.marker}\n"

    def hook(self, name: str, script: str, point: str = "before_drain", mode: int = 0o755) -> Path:
        place = self.paths.hook_dir(point) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script)
        place.chmod(mode)
        return place

    def run(self, point: hooks.Hook = "before_drain", former: Generation | None = None, limit_s: float = 20) -> Done:
        wanted = replace(self.wanted, limits=Limits(hook_timeout_s=limit_s))
        return hooks.run_hooks(HostView(self.paths), point, wanted, former)

    def fails(self, limit_s: float = 20) -> str:
        return failure(lambda: self.run(limit_s=limit_s)).text


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_no_hooks_and_a_directory_that_cannot_be_read(place: Place) -> None:
    assert place.run().detail == f"no hook in {place.paths.hook_dir('before_drain')}"

    write(place.paths.hook_dir("before_drain"), "a file")
    done = place.run()
    assert "cannot be read: " in done.warnings[0] and "no hook was run" in done.warnings[0]


def test_hooks_run_in_order_and_are_told_where_the_switch_goes(place: Place) -> None:
    place.hook("20-second", f'#!/bin/sh\necho second "[$VLLM_EDGE_FROM_PROFILE]" >>{place.out}\n')
    ours = "^VLLM_EDGE_(HOOK|GENERATION|PROFILE|FROM_)"
    place.hook("10-first", f"#!/bin/sh\nenv | grep -E '{ours}' | sort >>{place.out}; pwd >>{place.out}\n")
    done = place.run(former=place.former)
    assert place.out.read_text().splitlines() == [
        "VLLM_EDGE_FROM_GENERATION=1",
        "VLLM_EDGE_FROM_PROFILE=small",
        "VLLM_EDGE_GENERATION=2",
        "VLLM_EDGE_HOOK=before_drain",
        "VLLM_EDGE_PROFILE=large",
        "/",
        "second [small]",
    ]
    assert re.fullmatch(r"hooks run: 10-first \([0-9.]+ s\), 20-second \([0-9.]+ s\)", done.detail)
    place.out.unlink()
    place.run()
    assert "VLLM_EDGE_FROM_GENERATION=\n" in place.out.read_text() and "second []" in place.out.read_text()


def test_what_is_no_hook_is_left_out_and_what_could_be_one_is_named(place: Place) -> None:
    for name in (".hidden", "backup~"):
        place.hook(name, place.touch)
    (place.paths.hook_dir("before_drain") / "directory").mkdir()
    forgotten = place.hook("10-forgotten", place.touch, mode=0o644)
    done = place.run()
    assert not place.marker.exists()
    assert done.warnings == (f"{forgotten} is not executable and was not run: 'chmod +x {forgotten}', or remove it.",)


def test_a_failing_hook_fails_the_switch_before_the_drain_and_warns_after_the_commit(place: Place) -> None:
    bad = place.hook("10-bad", "#!/bin/sh\necho to stdout\necho to stderr >&2\nexit 3\n")
    place.hook("20-next", place.touch)
    assert place.fails() == (
        f"Hook before_drain failed: {bad} ended with exit status 3. It printed: to stdout\nto stderr. No engine was "
        f"stopped. Correct or remove {bad}, then begin again."
    )
    assert not place.marker.exists()
    bad = place.hook("10-bad", "#!/bin/sh\nkill -KILL $$\n", "after_commit")
    place.hook("20-next", place.touch, "after_commit")
    done = place.run("after_commit")
    assert done.warnings == (f"Hook after_commit failed: {bad} was ended by signal 9. It printed nothing.",)
    assert place.marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ignoring", ["", "trap '' TERM\n"])
def test_a_hook_that_hangs_is_ended_with_its_children(place: Place, ignoring: str) -> None:
    place.hook("10-hangs", f"#!/bin/sh\n{ignoring}sleep 300 & echo $! >{place.out}\necho waiting\nwait\nsleep 300\n")
    began = time.monotonic()
    text = place.fails(2)
    assert "did not end within 2 s and was ended, with its children. It printed: waiting" in text
    assert "A larger vllm_engine_hook_timeout_s" in text
    assert time.monotonic() - began < 60
    until(lambda: not alive(int(place.out.read_text())), 2)


def test_a_child_in_the_background_is_not_waited_for(place: Place) -> None:
    place.hook("10-starts", f"#!/bin/sh\nsleep 300 & echo $! >{place.out}\n")
    began = time.monotonic()
    place.run(limit_s=120)
    assert time.monotonic() - began < 120
    os.kill(int(place.out.read_text()), 9)


def test_what_a_failing_hook_printed_is_shown_and_why_one_cannot_run(place: Place) -> None:
    place.hook("10-talks", "#!/bin/sh\nseq 1 100000\nexit 1\n")
    text = place.fails()
    assert "It printed: ..." in text and "\n100000. No engine" in text and len(text) < 3000
    place.hook("10-talks", "#!/bin/sh\necho 'Authorization: Bearer marked-secret-1234'; echo gateway is down; exit 1\n")
    text = place.fails()
    assert "marked" not in text and "gateway is down" in text
    place.hook("10-empty", "no interpreter is named here\n")
    assert re.search(r"10-empty cannot be run: .*A script begins with a line such as '#!/bin/sh'", place.fails())


@pytest.mark.slow
def test_a_signal_to_the_switch_ends_the_hook_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.hook("10-hangs", f"#!/bin/sh\necho $$ >{place.out}\nexec sleep 300\n")

    class Asked(Exception):
        pass

    wait = hooks.subprocess.Popen.wait

    def interrupted(self: object, timeout: float | None = None) -> int:
        if timeout == hooks.POLL_S:
            until(lambda: place.out.exists() and place.out.read_text().strip() != "")
            raise Asked
        return wait(self, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(hooks.subprocess.Popen, "wait", interrupted)
    with pytest.raises(Asked):
        place.run()
    until(lambda: not alive(int(place.out.read_text())), 2)


# A program that the kernel's out-of-memory killer would rather end: to be spared takes a right that tests may lack.
ADJUSTED = """
import sys
from pathlib import Path
from vllm_edge.switch.steps import hooks
hooks.OOM_SCORE.write_text("300")
if sys.argv[2] == "spared":
    hooks.OOM_SCORE = Path(sys.argv[3])
hooks.run_one(Path(sys.argv[1]), {}, 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("own", "hook"), [("spared", "0"), ("not", "300")])
def test_a_hook_is_not_spared_when_memory_runs_out(place: Place, own: str, hook: str) -> None:
    script = place.hook("10-own", f"#!/bin/sh\nread value < /proc/self/oom_score_adj; echo $value > {place.out}\n")
    score = write(place.root / "score", "-900\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")}
    subprocess.run([sys.executable, "-c", ADJUSTED, str(script), own, str(score)], check=True, env=environment)
    assert place.out.read_text().strip() == hook


def _give_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


def _link(path: Path) -> None:
    path.rename(path.with_name(".script"))
    path.symlink_to(".script")


UNSAFE = {
    "of another user": (_give_away, "belongs to uid 65534", "chown root: "),
    "writable for all": (lambda path: path.chmod(0o757), "has mode 0757", "chmod go-w "),
    "writable for a group": (lambda path: path.chmod(0o775), "has mode 0775", "chmod go-w "),
    "a link": (_link, "is a link", "cp --remove-destination "),
    "directory writable": (lambda path: path.parent.chmod(0o777), "has mode 0777", "chmod go-w "),
    "directory sticky": (lambda path: path.parent.chmod(0o1777), "has mode 1777", "chmod go-w "),
    "directory above": (lambda path: path.parent.parent.chmod(0o775), "has mode 0775", "chmod go-w "),
    "directory of another user": (lambda path: _give_away(path.parent.parent), "belongs to uid", "chown root: "),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("case", UNSAFE)
def test_a_hook_that_others_can_change_is_named_and_not_run(place: Place, case: str) -> None:
    change, why, remedy = UNSAFE[case]
    for point in hooks.HOOKS:
        change(place.hook("10-ours", place.touch, point))
    assert all(part in place.fails() for part in (why, remedy, "No engine was stopped"))
    done = place.run("after_commit")
    assert done.warnings and why in done.warnings[0], "the commit stands"
    assert not place.marker.exists()


def test_a_hook_has_a_fixed_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_SOMEBODY", "1")
    monkeypatch.setenv("PATH", "/nowhere:/usr/bin:/bin")
    monkeypatch.setenv("VLLM_EDGE_STATE", "/elsewhere")
    place.hook("10-tells", f"#!/bin/sh\nenv >{place.out}\n")
    place.run()
    found = dict(line.split("=", 1) for line in place.out.read_text().splitlines())
    assert "LD_PRELOAD_OF_SOMEBODY" not in found and found["PATH"].startswith("/usr/local/sbin:")
    assert (found["VLLM_EDGE_STATE"], found["VLLM_EDGE_HOOK"]) == ("/elsewhere", "before_drain")


def test_what_a_hook_prints_does_not_fill_the_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "OUTPUT_KEPT_BYTES", 10_000)
    sizes: list[int] = []
    truncate = os.ftruncate

    def cut(handle: int, size: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        truncate(handle, size)

    monkeypatch.setattr(os, "ftruncate", cut)
    place.hook("10-talks", "#!/bin/sh\nfor i in 1 2 3; do seq 1 20000; sleep 0.5; done; echo the end; exit 1\n")
    assert "the end." in place.fails() and len(sizes) >= 2 and max(sizes) < 300_000
