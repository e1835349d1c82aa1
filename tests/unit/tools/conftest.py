# SPDX-License-Identifier: Apache-2.0
"""The client is a program of its own that is copied to a host as it is; here it is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "tools"))
