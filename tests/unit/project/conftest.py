# SPDX-License-Identifier: Apache-2.0
"""For tests that run playbooks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import helpers
import pytest


@pytest.fixture(scope="session")
def run_playbook() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`helpers.run_playbook`, without the check of the exit status."""
    return helpers.run_playbook
