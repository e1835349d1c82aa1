# SPDX-License-Identifier: Apache-2.0
"""All checks by name, and the function that runs them. docs/operate.md says what `ok` means for each.

Nothing here reads the host. A check whose precondition is missing is not judged, so that one fault is reported once:
without a driver, one check fails, and those of its module are unknown.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

from ..engine.state import stamp
from ..facts.model import Facts
from ..gpu.topology import correctness
from .checks import deep, driver, fleet, gateway, gpus, runtime, serving, storage, system, topology
from .contract import STATES, NotKnown, Verdict
from .render import Document


def _find_checks(*modules: ModuleType) -> Mapping[str, Callable[[Any], Verdict]]:
    """Return the functions `check_<name>` of the modules, in their order, by `<module>.<name>` with hyphens."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name.removeprefix('check_').replace('_', '-')}": check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_")
    }


# The names are stable; the part before the dot is the group. A check raises NotKnown if it cannot judge.
CHECKS = _find_checks(system, driver, gpus, runtime, topology, storage, serving, gateway)
DEEP = _find_checks(deep)
FLEET = _find_checks(fleet)


def judge(facts: Facts) -> list[dict[str, str]]:
    """Run every check, in the order of CHECKS, those of FLEET on a host of one, and those of DEEP if their facts were
    read."""
    checks = {name: partial(check, facts) for name, check in CHECKS.items()}
    if facts.fleet is not None:
        checks |= {name: partial(check, facts.fleet) for name, check in FLEET.items()}
    if facts.deep is not None:
        checks |= {name: partial(check, facts.deep) for name, check in DEEP.items()}
    found = []
    for name, check in checks.items():
        try:
            verdict = check()
        except NotKnown as error:
            verdict = Verdict("unknown", str(error))
        # The output of programs may have several lines.
        evidence = " ".join(verdict.evidence.split())
        found.append({"check": name, "group": name.partition(".")[0], **vars(verdict), "evidence": evidence})
    return found


def examine(facts: Facts, host: str = "") -> Document:
    """Run every check, and return the findings and what engines over several GPUs need; an empty `host` is this one."""
    findings = judge(facts)
    summary = {state: sum(finding["state"] == state for finding in findings) for state in STATES}
    return {
        "host": host or socket.gethostname(),
        "time": stamp(),
        "as_root": facts.as_root,
        # What could not be read is no fault of the host.
        "exit_status": 2 if summary["fail"] else 1 if summary["warn"] else 0,
        "summary": summary,
        "checks": findings,
        "recommendation": asdict(correctness(facts.topology)),
    }
