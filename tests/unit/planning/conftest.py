# SPDX-License-Identifier: Apache-2.0
"""Lets the tests in the folders below this one import its modules (checkpoints.py, published.py and others), and those
beside it the hub of test_model_facts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "checkpoint"))
