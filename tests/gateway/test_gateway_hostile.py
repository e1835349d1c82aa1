# SPDX-License-Identifier: Apache-2.0
"""Each hostile or broken request gets one of its answers, and reaches no engine that it should not reach."""

from __future__ import annotations

import pytest
from gateway_world import Gateway
from hostile_requests import CASES, Case, send


@pytest.mark.parametrize("case", [case for case in CASES if not case.slow], ids=lambda case: case.name[:60])
def test_a_hostile_request_reaches_no_other_engine(gateway: Gateway, case: Case) -> None:
    status, _, engines = send(gateway, case)
    assert status in case.statuses
    assert engines == ([case.engine] if status == 200 and case.engine else [])
