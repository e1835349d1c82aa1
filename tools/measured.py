# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/measured.md from the files in docs/measured/: today's plan beside what others measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plugins.module_utils.vllm_edge.doctor.publish import Measured, parse
from plugins.module_utils.vllm_edge.planning import drift, planner
from plugins.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from plugins.module_utils.vllm_edge.planning.inputs import build_gpu

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measured.md"
FILES = PAGE.with_suffix("")
MARK = "<!-- Below: python -m tools.reference -->\n"


class Figure(NamedTuple):
    key: str
    planned: float
    measured: float
    low: float
    high: float
    """What the plan tolerates."""

    @property
    def within(self) -> bool:
        return self.low <= self.measured <= self.high


def read(path: Path) -> tuple[str, list[Measured]]:
    """Return who measured, and the engines. Raises ValueError if anything in the file is not allowed."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["source"], [parse(engine) for engine in document["engines"]]


def compare(engine: Measured) -> Iterator[Figure]:
    """Plan an engine as it was asked for, and yield each figure that was measured."""
    facts = model_facts.recorded(engine.repo)
    gpu = build_gpu("gpu", {"name": engine.gpu, "nvml_total_mib": engine.memory_mib}, lambda sentence: None)
    asked = {"name": "engine", "model": "model", "gpus": [*range(engine.gpus)], **engine.arguments}
    models = {"model": families.interpret(facts)} if facts else {}
    (plan,) = planner.plan("measured", [asked], models, [gpu] * engine.gpus, engine.vllm).engines
    expected = drift.expectation(plan, engine.vllm, drift.TOLERANCES, "warn")
    for key, measured in engine.measured.items():
        planned = float(expected[key] if drift.COMPONENTS[key].counted else expected["gpus"][0][key])
        limit = expected["tolerances"][key]
        yield Figure(key, planned, measured, planned - limit, planned + limit)
    if engine.tok_s and plan.decode_tok_s:
        speed = plan.decode_tok_s
        yield Figure("tok_s", speed.mid, engine.tok_s, speed.low, speed.high)


def render_rows() -> Iterator[str]:
    # The reference host's first.
    for path in sorted(FILES.glob("*.json"), key=lambda path: (path.stem != "xr7620", path.stem)):
        source, engines = read(path)
        yield f"\n## {path.stem}\n\n{source[:1].upper()}{source[1:]}.\n"
        yield "| model | GPUs, vLLM, driver | arguments | figure | planned | measured | tolerated |"
        yield "|---|---|---|---|---|---|---|"
        for engine in engines:
            arguments = ", ".join(f"{key} {json.dumps(value)}" for key, value in engine.arguments.items())
            of = f"{engine.gpus} {engine.gpu}, {engine.vllm}, {engine.driver or 'not told'}"
            head = f"{engine.repo} | {of} | {arguments}"
            for figure in compare(engine):
                words = drift.COMPONENTS[figure.key].words if figure.key != "tok_s" else "tok/s"
                unit = " MiB" if figure.key.endswith("_mib") else ""
                digits = ",.1f" if figure.key == "tok_s" else ",.0f"
                values = [format(value, digits) for value in figure[1:]]
                told = f"{values[2]} to {values[3]}" if figure.within else f"differs: {engine.differs.get(figure.key)}"
                yield f"| {head} | {words}{unit} | {values[0]} | {values[1]} | {told} |"
                head = "| |"


def render() -> str:
    """Return the whole page: what stands above the mark, and the table."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n".join(render_rows()) + "\n"
