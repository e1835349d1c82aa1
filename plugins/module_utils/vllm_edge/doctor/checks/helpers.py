# SPDX-License-Identifier: Apache-2.0
"""Functions and constants that several checks share."""

from __future__ import annotations

import re
from typing import NoReturn

from ...facts.dpkg import parse_upstream_version
from ..contract import NotKnown

HOST_STAGE = "'ansible-playbook playbooks/host.yml'"
GIB = 1024**3


def numbers(version: str) -> tuple[int, ...]:
    return tuple(
        int(part) for part in re.findall(r"\d+", parse_upstream_version(version) if "-" in version else version)
    )


def listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def decline_to_judge(why: str) -> NoReturn:
    raise NotKnown(f"not judged: {why}")


# Packages whose version is not that of the driver, because they serve several branches.
HELPERS = frozenset({"nvidia-persistenced", "nvidia-modprobe", "nvidia-settings", "nvidia-xconfig"})
