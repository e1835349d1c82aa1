# SPDX-License-Identifier: Apache-2.0
"""The client and the comparison are programs of their own, copied to a host as they are: here they are on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "tools"), str(TESTS / "by_hand")]
