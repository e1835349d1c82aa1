# SPDX-License-Identifier: Apache-2.0
"""Helpers of several checks."""

from __future__ import annotations

import re
from typing import NoReturn

from ...system.dpkg import upstream
from ..contract import NotKnown

HOST_STAGE = "'ansible-playbook playbooks/host.yml'"
GIB = 1024**3


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, as far as it has them."""
    return tuple(int(part) for part in re.findall(r"\d+", upstream(version) if "-" in version else version))


def listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def not_judged(why: str) -> NoReturn:
    raise NotKnown(f"not judged: {why}")


# Packages of a branch whose version is not that of the driver, since they serve several.
HELPERS = frozenset({"nvidia-persistenced", "nvidia-modprobe", "nvidia-settings", "nvidia-xconfig"})
