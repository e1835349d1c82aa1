# SPDX-License-Identifier: Apache-2.0
"""For tests that run playbooks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import support


@pytest.fixture(scope="session")
def run_playbook() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`support.run_playbook`, without the check of the exit status."""
    return support.run_playbook
