# SPDX-License-Identifier: Apache-2.0
"""docs/measured: each figure that somebody measured is within what the plan tolerates, or is marked as different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import measured

FILES = sorted(measured.FILES.glob("*.json"))
ENGINE: dict[str, Any] = json.loads((measured.FILES / "xr7620.json").read_text())["engines"][0]


def read_one(path: Path, **changes: Any) -> list[measured.Figure]:
    path.write_text(json.dumps({"source": "x", "engines": [ENGINE | changes]}))
    return list(measured.compare(measured.read(path)[1][0]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_figures_are_within_the_plan_or_marked(path: Path) -> None:
    source, engines = measured.read(path)
    assert source and engines
    for engine in engines:
        figures = list(measured.compare(engine))
        assert figures and {figure.key for figure in figures if not figure.within} == engine.differs.keys()


def test_a_figure_outside_of_the_plan_is_found(tmp_path: Path) -> None:
    figures = read_one(tmp_path / "x.json", measured={"total_mib": 25000}, tok_s=30)
    assert [figure.within for figure in figures] == [False, False]


@pytest.mark.parametrize(
    "changes",
    [
        *({"host": "gpu1"}, {"gpu": "my card"}, {"vllm": "0.19.0-mine"}, {"repo": "acme/x"}, {"driver": "of acme"}),
        *({"measured": {"gpu1": 1}}, {"measured": {"total_mib": "gpu1"}}),
        *({"arguments": {key: "gpu1"}} for key in ("served_model_name", "max_model_len", "kv_cache_dtype")),
        {"arguments": {"limit_mm_per_prompt": {"gpu1": 0}}},
    ],
    ids=str,
)
def test_a_file_with_anything_else_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read_one(tmp_path / "x.json", **changes)


def test_the_page_is_up_to_date() -> None:
    assert measured.PAGE.read_text() == measured.render(), "run python -m tools.reference"
