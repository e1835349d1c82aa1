# SPDX-License-Identifier: Apache-2.0
"""For tests of the switch."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import ServingHost
from switch_host import SwitchHost


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwitchHost:
    return SwitchHost(tmp_path, monkeypatch)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwitchHost:
    """A host on which nothing was ever committed."""
    return SwitchHost(tmp_path, monkeypatch, first=True)


@pytest.fixture
def stopped(bench: SwitchHost) -> SwitchHost:
    """The committed generation without e2b."""
    bench.stop("e2b")
    return bench


@pytest.fixture
def host(tmp_path: Path) -> ServingHost:
    return ServingHost(tmp_path)
