# SPDX-License-Identifier: Apache-2.0
"""Journals of switches, as tests of what shows them need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ansible.module_utils.vllm_edge.switch.model import Downtime, Gap, Journal, Phase, PhaseRecord, Result

RUNNING = Journal(
    id="20261121T164000Z-4",
    generation=4,
    profile="bf16-tp4",
    from_generation=3,
    from_profile="nvfp4-tp2",
    origin="-e",
    asked_by="site.yml by alice",
    pid=4711,
    boot_id="b",
    started_at="2026-11-21T16:40:00Z",
    phase=Phase.HEALTHY,
    keep=("e4b",),
    stop=("31b-nvfp4-tp2",),
    start=("31b-bf16-tp4",),
    provisional={"e2b": 31.0},
    phases=(
        PhaseRecord(Phase.PREFLIGHT, "forward", "2026-11-21T16:40:00Z", 0.0, 0.8, "done", "nothing is in the way"),
        PhaseRecord(Phase.STOP, "forward", "2026-11-21T16:40:01Z", 0.8, 4.1, "done", "31b-nvfp4-tp2 stopped"),
        PhaseRecord(Phase.HEALTHY, "forward", "2026-11-21T16:40:05Z", 4.9),
    ),
)


def ended(result: Result = Result.COMMITTED, **more: Any) -> Journal:
    """The same switch at its end; `more` replaces parts of it."""
    healthy = replace(RUNNING.phases[-1], seconds=60.2, outcome="done", detail="31b-bf16-tp4 answers")
    values: dict[str, Any] = {
        "ended_at": "2026-11-21T16:41:10Z",
        "seconds": 70.4,
        "phase": Phase.CLEAN_UP,
        "result": result,
        "message": "Generation 4 (bf16-tp4) serves." if result == Result.COMMITTED else "The canary of worker failed.",
        "phases": (*RUNNING.phases[:-1], healthy),
        "downtime": {
            "architect": Downtime(64.5, (Gap(1.0, 65.5),), {"stop": 4.1, "healthy": 60.4}, 140),
            "sentry": Downtime(0.0, (), {}, 140),
        },
    }
    return replace(RUNNING, **{**values, **more})
