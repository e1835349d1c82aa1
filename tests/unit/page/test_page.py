# SPDX-License-Identifier: Apache-2.0
"""The page of a host: complete, escaped, readable by machines, and the same for the same data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from ansible.module_utils.vllm_edge.page import figures
from ansible.module_utils.vllm_edge.page.data import BenchRun, PageData, complete, read_bench, read_quality
from ansible.module_utils.vllm_edge.page.render import make_environment, render_host, render_index
from jinja2 import meta

MINIMAL = PageData({"host": "bare", "profile": "e2b-only", "generation": 1}, "2026-11-25T03:05:00Z")
"""A host of which nothing is recorded."""


def parse(page: str) -> Element:
    """The root of a page, which is well-formed XML but for the elements and attributes that HTML does not end."""
    text = re.sub(r"<(meta\b[^>]*)>", r"<\1/>", page[page.index("<html") :])
    return ElementTree.fromstring(re.sub(r"<([^<>]*) (hidden|open)>", r'<\1 \2="">', text))


def read_text(page: str) -> str:
    return " ".join(" ".join(parse(page).itertext()).split())


@pytest.mark.parametrize("example", ["full", "minimal"])
def test_structure(example: str, page: str) -> None:
    """Headings go down by one level, every table begins with its caption, ids are unique, every section is linked, and
    a page has no address, no script and nothing that is loaded."""
    page = page if example == "full" else render_host(MINIMAL)
    root = parse(page)
    headings = [int(one.tag[1]) for one in root.iter() if one.tag in {"h1", "h2", "h3", "h4"}]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(headings))
    assert [table[0].tag for table in root.iter("table") if table[0].tag != "caption"] == []
    ids = [one.get("id") for one in root.iter() if one.get("id")]
    assert len(ids) == len(set(ids))
    assert all(cell.get("scope") in {"row", "col"} for cell in root.iter("th"))
    links = {str(link.get("href"))[1:] for link in root.iter("a")}
    assert links == {"content", *[one.get("id") for one in root.iter("h2")]} <= set(ids)
    for key in ("aria-labelledby", "aria-describedby"):
        assert {one.get(key) for one in root.iter() if one.get(key) is not None} <= set(ids)
    assert {"header", "nav", "main", "footer"} <= {one.tag for one in root.iter()}

    for word in ("http://", "https://", "url(", " src=", "<script", "@import", "xlink", "<link"):
        assert word not in page


def test_hostile_texts_stay_texts(hostile: PageData, page: str) -> None:
    """A recorded text becomes no element, no attribute, and no character that changes how others look."""
    spoiled = render_host(hostile)
    assert "<script>" not in spoiled and "\x1b" not in spoiled and "\u202e" not in spoiled
    root = parse(spoiled)
    assert {one.tag for one in root.iter()} <= {one.tag for one in parse(page).iter()}
    assert not [key for one in root.iter() for key in one.attrib if key.startswith("on")]
    assert "<script>alert(1)" in "".join(root.itertext())
    assert parse(render_index([hostile.index_row], "x")).find(".//script") is None


@pytest.mark.parametrize("name", ["host.html.j2", "index.html.j2", "macros.html.j2"])
def test_templates_use_what_they_are_given(name: str) -> None:
    """A name that is not there would be empty on the page."""
    place = Path(figures.__file__).parent
    macros = re.findall(r"macro (\w+)", "".join(path.read_text() for path in place.glob("*.j2")))
    used = meta.find_undeclared_variables(make_environment().parse((place / name).read_text()))
    assert used <= {"data", "report", "figures", "hosts", "made_at", "caller", *macros}


def test_everything_recorded_is_on_the_page(page: str) -> None:
    text = read_text(page)
    for word in (
        "architect", "nvidia/Gemma-4-31B-IT-NVFP4", "7 of 7 figures within the tolerance", "architect: no answer",
        "14.9 (reference host)", "13.0 / 14.9 / 16.8", "loading-weights", "order-as-json", "unsteady", "tie",
        "580.178.04", "gpu_uuids:", "Simulated GPUs: speeds mean nothing", "rolled_back",
        "serves without known problems", "127.0.0.1:8000, 0.0.0.0:8443 (TLS)", "4 NVIDIA L4", "1 of 2", "2027-12-27",
        "bf16-tp4 to nvfp4-tp2 (generation 1), committed after 68.5 s.", "31b-nvfp4-tp2 gives 4 % less.",
        "15,563 15,647 +84 160 within", "180 234 67.6 123 8.31 0",
        "architect 47.3, worker 47.3, auditor 41.0", "31b-nvfp4-tp2 14.8, e4b 17.2, e2b 31.4",
        "1,024 tokens, reference", "tool_call not shown: architect, worker, auditor, sentry.",
        "e4b: e4b does not compute in FP4.",
    ):  # fmt: skip
        assert word in text, word


def test_what_is_missing_is_said() -> None:
    text = read_text(render_host(MINIMAL))
    assert not MINIMAL.good and "no engine is known" in text
    for playbook in ("bench.yml", "quality.yml", "site.yml"):
        assert f"ansible-playbook playbooks/{playbook} --limit bare" in text


def test_problems_are_the_verdict(full: PageData) -> None:
    down = [{**engine, "state": "failed"} for engine in full.engines]
    assert replace(full, report={**full.report, "problems": ["a", "b"]}).verdict == "2 problems"
    assert replace(full, report={**full.report, "engines": down}).failures[0] == "31b-nvfp4-tp2 is failed."


def test_a_bar_begins_where_the_one_before_it_ends(full: PageData) -> None:
    drawn = figures.draw_figures(full)
    lines = [line for name in ("memory", "loads") for line in drawn[name].lines]
    assert max(len(line.bars) for line in drawn["loads"].lines) > 2
    for line in lines:
        ends = [bar.start + bar.length for bar in line.bars]
        assert [bar.start for bar in line.bars] == pytest.approx([0.0, *ends[:-1]] if ends else [])


def test_unknown_is_not_zero(full: PageData) -> None:
    """A GPU that could not be measured, and one without a plan."""
    gpu = {"index": 7, "slot": 7, "used_mib": None, "budget_mib": None, "total_mib": 23034}
    figure = figures.draw_memory(replace(full, report={**full.report, "gpus": [gpu]}))
    assert figure is not None and figure.rows[0][:2] == ["GPU 7", "unknown"] and figure.rows[0][7] == "unknown"
    assert [line.value for line in figure.lines] == ["unknown"]


def test_of_damaged_records_what_can_be_read_counts(tmp_path: Path) -> None:
    (tmp_path / "20261125T000000Z-a.jsonl").write_text('{"kind": "run", "run": "a"}\n{"kind": "measurement"}\n{"kin')
    (tmp_path / "20261125T000001Z-b.jsonl").write_text("[]")
    (tmp_path / "20261125T000002Z-c.json").write_text("{")
    (tmp_path / "20261125T000003Z-d.json").write_text(json.dumps({"run": "d"}))
    runs = read_bench(tmp_path)
    assert [run.run["run"] for run in runs] == ["a"] and len(runs[0].measurements) == 1 and not runs[0].end
    assert read_quality(tmp_path) == [{"run": "d"}]


def test_a_saved_report_completes_only_its_own_generation() -> None:
    """The engines of another generation gave those completions."""
    saved = {"generation": 1, "completions": [{}], "versions": {"vLLM": "0.32.0"}, "profile": "old"}
    whole = complete({"generation": 1, "completions": [], "versions": {"vLLM": "0.33.0"}, "profile": "new"}, saved)
    assert whole == {"generation": 1, "completions": [{}], "versions": {"vLLM": "0.33.0"}, "profile": "new"}
    assert complete({"generation": 2, "completions": []}, saved)["completions"] == []


def test_each_engine_of_a_served_name_has_its_own_answer(full: PageData) -> None:
    """Whatever the order. The canary of a switch that did not come to this generation is none of it."""
    good, bad = {"ok": True, "checks": []}, {"ok": False, "error": "no answer", "checks": []}
    engines = [{**full.engines[0], "engine": f"e2b-{k}", "served_names": ["sentry"]} for k in (0, 1)]
    for first, second in ((good, bad), (bad, good)):
        asked = [{"engine": f"e2b-{k}", "served_name": "sentry", **one} for k, one in enumerate((first, second))]
        page = replace(full, report={**full.report, "engines": engines, "completions": asked}, status={})
        assert [page.answers[f"e2b-{k}", "sentry"]["ok"] for k in (0, 1)] == [first["ok"], second["ok"]]
        assert f"sentry (e2b-{(first, second).index(bad)}): no answer" in read_text(render_host(page))
    failed = {"generation": 2, "result": "rolled_back", "canary": asked}
    other = [failed, {"generation": 2, "result": "committed", "canary": asked}]
    for history in ([failed], other):
        assert not replace(full, report={**full.report, "completions": []}, history=history).answers


def test_each_engine_of_a_served_name_has_its_own_state_and_figures(full: PageData) -> None:
    """What both measured through the gateway is a figure of both."""
    states = ("active", "failed")
    engines = [{"engine": f"e2b-{k}", "served_names": ["sentry"], "state": state} for k, state in enumerate(states)]
    row = {**full.bench[0].measurements[0], "through": "gateway", "engine": "e2b-0", "with_engines": ["e2b-1"]}
    gateway = {"roles": {"sentry": {"state": "serving"}}}
    report = {**full.report, "engines": engines, "gateway": gateway}
    page = replace(full, report=report, status={}, bench=[BenchRun({}, [row])])
    assert page.bench[0].best.keys() == page.protocol.keys() == {"e2b-0", "e2b-1"}
    cells = [re.sub("<[^>]*>", "", one) for one in re.findall("<td>.*?</td>", render_host(page))]
    assert {"active", "failed"} <= {*cells} and "serving" not in cells


def test_figures_of_another_model_are_not_those_of_an_engine(full: PageData) -> None:
    """An engine of the same name had another model, or had it on other GPUs, when it was measured."""
    row, now = full.bench[0].measurements[0], full.engines[0]
    for change in ({"model": "other"}, {"precision": "bf16"}, {"tensor_parallel_size": 4}):
        then = {now["engine"]: {**now, **change}}
        former = replace(
            full, bench=[BenchRun({"engines": then}, [row])], quality=[{"kind": "reference", **then[now["engine"]]}]
        )
        assert former.protocol == former.compared == {}
    same = replace(
        full, bench=[BenchRun({"engines": {now["engine"]: now}}, [row])], quality=[{"kind": "reference", **now}]
    )
    assert same.protocol.keys() == same.compared.keys() == {now["engine"]}


def test_the_index_has_a_link_for_each_host() -> None:
    row = {"profile": "p", "verdict": "2 problems", "good": False, "made_at": "x"}
    root = parse(render_index([{**row, "host": name} for name in ("a/../b", "c")], "x"))
    assert [link.get("href") for link in root.iter("a")] == ["#content", "a/../b.html", "c.html"]


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    """Texts have 4.5 to 1, and marks 3 to 1, on the page; the band has its values as text."""
    style = (Path(figures.__file__).parent / "style.css").read_text()
    colours = {name: pair for name, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style)}
    assert {*figures.MEMORY, *figures.SPEED, *figures.LOADS, *figures.SWITCH} <= {*colours}
    for name, pair in colours.items():
        if name in {"page", "soft", "grid", "pale"}:
            continue
        least = 4.5 if name in {"ink", "muted", "link", "good", "bad", "warn"} else 3.0
        bright, dark = sorted((_luminance(pair[scheme]), _luminance(colours["page"][scheme])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= least, name
