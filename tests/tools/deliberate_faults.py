# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults: each line of faults.yml that is changed in a copy of the tree has to be noticed by a test.

    tests/tools/deliberate_faults.py                   every fault that unit tests notice
    tests/tools/deliberate_faults.py NAME ...          some of them
    tests/tools/deliberate_faults.py --host            the faults that only a host shows; needs Docker and a lab

A fault counts as noticed if its test file fails with it (or cannot be collected), and if what failed passes without it.
Files are tried as `make test` runs them, so a case that is marked `thorough` or `docker` notices nothing.

The faults of a host are tried on one simulated host for each scenario: it is converged without a fault; for each fault
the host is damaged, where a role corrects only what is wrong, the scenario's playbook is run from the changed copy, and
then the file of tests; what failed has to pass again after the playbook ran from the unchanged copy. A playbook that
fails with the fault and not without it counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.yml")
LIMIT_S = 60
CONVERGE_LIMIT_S = 45 * 60
HOST_TESTS_LIMIT_S = 20 * 60
LAB = "vllm-edge-faults"
SSH_PORT = "22037"

NOTICED = "noticed"
NOT_NOTICED = "NOT NOTICED"
TOO_LONG = "took longer than {limit_s:g} s"
NOT_APPLICABLE = "does not apply"
FAILS_ANYWAY = "fails without the fault, too"
NOT_RUN = "no test could be run"


@dataclass(frozen=True)
class Fault:
    """One changed line: in `file`, the text `old` becomes `new`."""

    name: str
    file: str
    old: str
    """Part of a line. It is found once in the file, or once in the first line that has it behind `after`."""
    new: str
    harm: str
    """What the fault would do to a user."""
    noticed_by: str
    """The test file that has to notice it."""
    after: str = ""
    """A text before the line that is found once in the file; needed where `old` is found more than once."""
    case: str = ""
    """Part of the name of the case that notices it, where all cases of the file take more than a minute."""
    scenario: str = ""
    """Of a fault that only a host shows the molecule scenario, else empty."""
    damage: str = ""
    """A command that root runs on that host before, so that the role has something to correct; it must fail nowhere."""

    def find_mistake(self, root: Path) -> str:
        """Return why the fault cannot be applied to the tree below `root`, as a sentence; empty if it can."""
        path = root / self.file
        if not (root / self.noticed_by).is_file():
            return f"{self.noticed_by} is not there"
        if not path.is_file():
            return f"{self.file} is not there"
        if "\n" in self.old + self.new or self.old == self.new:
            return "it does not change one line"
        text = path.read_text(encoding="utf-8")
        if self.after and text.count(self.after) != 1:
            return f"{self.after!r} is found {text.count(self.after)} times in {self.file}"
        behind = text.partition(self.after)[2] if self.after else text
        line = next((line for line in behind.splitlines() if self.old in line), "")
        found = line.count(self.old) if self.after else text.count(self.old)
        if found != 1:
            return f"{self.old!r} is found {found} times in {self.file}"
        return _find_syntax_error(self.file, self.apply(text))

    def apply(self, text: str) -> str:
        before, after, behind = text.partition(self.after) if self.after else ("", "", text)
        return before + after + behind.replace(self.old, self.new, 1)


def _find_syntax_error(name: str, text: str) -> str:
    try:
        if name.endswith(".py"):
            ast.parse(text)
        elif name.endswith((".yml", ".yaml")):
            yaml.compose(text)
    except (SyntaxError, yaml.YAMLError) as error:
        return f"it is an error of syntax: {error}"
    return ""


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return the faults of the list. Raises TypeError for a key that a fault does not have, or lacks."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Fault(**row) for row in rows]


@contextlib.contextmanager
def copy_tree() -> Iterator[Path]:
    """Copy what git tracks, as it is in the working tree, and the collections into a temporary directory."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="vllm-edge-faults-") as place:
        root = Path(place) / "tree"
        for name in names.decode().split("\0"):
            source, target = ROOT / name, root / name
            if not name or not os.path.lexists(source):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        collections = root / "collections" / "ansible_collections"
        (collections / "edge").mkdir(parents=True)
        (collections / "edge" / "vllm_edge").symlink_to("../../..")
        for entry in (ROOT / "collections" / "ansible_collections").iterdir():
            if entry.name != "edge":
                (collections / entry.name).symlink_to(entry)
        if (ROOT / ".venv").exists():
            (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        # Tests of the repository ask git for its files.
        subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
        subprocess.run(["git", "add", "--all"], cwd=root, check=True)
        yield root


@contextlib.contextmanager
def faulty(fault: Fault, root: Path) -> Iterator[None]:
    """Change the line below `root`, and put it back at the end."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.apply(text), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_limited(command: Sequence[str], root: Path, limit_s: float, **variables: str) -> tuple[int | None, str]:
    """Run a command in the copy, and end it with all its children at the limit.

    Returns its exit status, which is None if the limit passed, and its output.
    """
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "VLLM_EDGE_", "MAKE"))},
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "160",
        **variables,
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


@dataclass(frozen=True)
class Outcome:
    """What became of a fault."""

    fault: Fault
    verdict: str
    detail: str = ""

    @property
    def row(self) -> str:
        told = f"{self.verdict}{': ' if self.detail else ''}{self.detail}"
        return f"{self.fault.name:<34} {self.fault.noticed_by:<52} {told}"


def find_failed_test(output: str) -> str:
    """Return file and name of the first test that pytest's summary names; empty if there is none."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return match[1].rpartition("/")[2] if match else ""


def pytest_command(fault: Fault, cache: Path, *more: str) -> list[str]:
    """Return the command that runs the test file as `make test` does, up to the first failure."""
    options = ["-x", "-q", "-p", "no:xdist", "-m", "not docker", "-o", f"cache_dir={cache}"]
    case = ["-k", fault.case] if fault.case else []
    return [sys.executable, "-m", "pytest", *options, *more, *case, fault.noticed_by]


def try_fault(fault: Fault, root: Path, limit_s: float) -> Outcome:
    """Try a fault that unit tests notice."""
    if mistake := fault.find_mistake(root):
        return Outcome(fault, NOT_APPLICABLE, mistake)
    with tempfile.TemporaryDirectory(prefix="vllm-edge-faults-") as place:
        cache = Path(place)
        with faulty(fault, root):
            status, output = run_limited(pytest_command(fault, cache), root, limit_s)
        if status is None:
            return Outcome(fault, TOO_LONG.format(limit_s=limit_s))
        if status == 0:
            return Outcome(fault, NOT_NOTICED)
        if status not in (1, 2):
            return Outcome(fault, NOT_RUN, f"pytest ended with status {status}")
        # pytest has remembered the test that failed: it has to pass without the fault.
        again = ["--collect-only"] if status == 2 else ["--last-failed", "--last-failed-no-failures=none"]
        without, _ = run_limited(pytest_command(fault, cache, *again), root, limit_s)
    if without is None:
        return Outcome(fault, TOO_LONG.format(limit_s=limit_s), "without the fault")
    return Outcome(fault, NOTICED if without == 0 else FAILS_ANYWAY, find_failed_test(output))


# ---- faults that only a host shows ------------------------------------------------------------------------------


def read_environment(root: Path, scenario: str) -> dict[str, str]:
    """Give the scenario of the copy a lab of its own; return the lab's settings."""
    path = root / "molecule" / scenario / "molecule.yml"
    steps = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps["ansible"]["env"] |= {"VLLM_EDGE_LAB_NAME": LAB, "VLLM_EDGE_LAB_SSH_PORT": SSH_PORT}
    path.write_text(yaml.safe_dump(steps), encoding="utf-8")
    return {key: value for key, value in steps["ansible"]["env"].items() if key.startswith("VLLM_EDGE_")}


def try_host_faults(scenario: str, faults: Sequence[Fault], root: Path) -> Iterator[Outcome]:
    """Try the faults of one scenario on one host of their own, which is removed at the end."""
    variables = read_environment(root, scenario)
    ssh_config = f"{root}/lab/generated/{LAB}/ssh_config"

    def run(limit_s: float, *command: str) -> tuple[int | None, str]:
        print(f"==> {scenario}: {' '.join(command[:2])}", flush=True)
        return run_limited(command, root, limit_s, MOLECULE_PROJECT_DIRECTORY=str(root), **variables)

    def molecule(step: str) -> tuple[int | None, str]:
        return run(CONVERGE_LIMIT_S, "molecule", step, "--scenario-name", scenario)

    def tests(fault: Fault, cache: Path, *more: str) -> tuple[int | None, str]:
        host = [f"--hosts=ssh://{LAB}-host", f"--ssh-config={ssh_config}", "--sudo"]
        return run(HOST_TESTS_LIMIT_S, *pytest_command(fault, cache, *host, *more))

    def try_one(fault: Fault, cache: Path) -> tuple[str, str]:
        if mistake := fault.find_mistake(root):
            return NOT_APPLICABLE, mistake
        if fault.damage and run(60, "ssh", "-F", ssh_config, f"{LAB}-host", f"sudo {fault.damage}")[0] != 0:
            return NOT_RUN, f"{fault.damage} failed"
        with faulty(fault, root):
            converged, output = molecule("converge")
            failed = converged != 0
            status, output = (1, output) if failed else tests(fault, cache)
        again, _ = molecule("converge")
        if converged is None or status is None or again is None:
            return TOO_LONG.format(limit_s=CONVERGE_LIMIT_S if converged is None else HOST_TESTS_LIMIT_S), ""
        if status == 0:
            return NOT_NOTICED, ""
        if status not in (1, 2) or again != 0:
            return (NOT_RUN, f"pytest ended with status {status}") if again == 0 else (FAILS_ANYWAY, "the playbook")
        if failed:
            fatal = re.search(r"fatal: .{0,160}", output)
            return NOTICED, f"the playbook fails: {fatal[0] if fatal else 'see its output'}"
        without, _ = tests(fault, cache, "--last-failed", "--last-failed-no-failures=none")
        return NOTICED if without == 0 else FAILS_ANYWAY, find_failed_test(output)

    try:
        prepare = ["prepare"] if (root / "molecule" / scenario / "prepare.yml").exists() else []
        for step in ("destroy", "create", *prepare, "converge"):
            status, output = molecule(step)
            if status != 0:
                print(output[-4000:], flush=True)
                yield from (Outcome(fault, NOT_RUN, f"molecule {step} fails without a fault") for fault in faults)
                return
        for fault in faults:
            with tempfile.TemporaryDirectory(prefix="vllm-edge-faults-") as place:
                yield Outcome(fault, *try_one(fault, Path(place)))
    finally:
        molecule("destroy")


# ---- all of them ------------------------------------------------------------------------------------------------


def try_all(faults: Sequence[Fault], limit_s: float) -> list[Outcome]:
    """Try the faults one after another, and print each outcome when it is known."""
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(outcome.row, flush=True)

    scenarios: dict[str, list[Fault]] = {}
    with copy_tree() as root:
        for fault in faults:
            if fault.scenario:
                scenarios.setdefault(fault.scenario, []).append(fault)
            else:
                note(try_fault(fault, root, limit_s))
        for scenario, some in scenarios.items():
            for outcome in try_host_faults(scenario, some, root):
                note(outcome)
    return outcomes


def main() -> int:
    """Parse the command line, try the faults, and print the table."""
    parser = argparse.ArgumentParser(description="Tries deliberate faults: a test has to notice each.")
    parser.add_argument("names", nargs="*", help="faults to try; none means all")
    parser.add_argument("--host", action="store_true", help="the faults that only a host shows")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for a test file; not for a host's")
    options = parser.parse_args()
    every = read_faults()
    unknown = set(options.names) - {fault.name for fault in every}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    if options.names:
        faults = [fault for fault in every if fault.name in options.names]
    else:
        faults = [fault for fault in every if bool(fault.scenario) == options.host]
    # Ended from outside, it still removes its copy and its lab.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    outcomes = try_all(faults, options.limit_s)
    print("\n".join(["", "==> faults", *(outcome.row for outcome in outcomes)]))
    noticed = sum(outcome.verdict == NOTICED for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} faults were noticed.")
    return 0 if noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
