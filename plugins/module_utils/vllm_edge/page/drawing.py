# SPDX-License-Identifier: Apache-2.0
"""Drawing of a figure with matplotlib, which is imported only here: as SVG for the page, and as SVG and PNG files.

The same values give the same bytes: no dates, no random names. In the page the colours are CSS variables.
"""

from __future__ import annotations

import io
import re
from typing import Any

from ..text import shorten
from .figures import Figure
from .style import COLOURS

WIDE, NARROW = 9.6, 3.5
"""Inches of a figure; a CSS pixel is a 96th."""
ROW, GAP = 0.25, 0.12
"""Inches of a line, and before a group."""
LONGEST = 32
"""Characters of a name."""


def paint() -> dict[str, str]:
    """Return a sentinel for each colour, which is replaced in the finished SVG."""
    return {name: f"#01{position:04x}" for position, name in enumerate(COLOURS, start=16)}


def _draw(figure: Figure, width: float, legend: bool) -> Any:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator

    colours = paint()
    narrow = width < WIDE
    step = ROW * (1.75 if narrow else 1.0)
    places: list[float] = []
    at = 0.0
    for line in figure.lines:
        at += step + (GAP if line.heads and places else 0.0)
        places.append(at)
    columns = 2 if narrow else 4
    above = (0.24 * -(-len(figure.legend) // columns) + 0.32) if legend else 0.06
    below = 0.42
    height = above + at + step * 0.6 + below
    longest = max(min(LONGEST, len(line.name)) for line in figure.lines)
    left = 0.04 if narrow else min(2.6, 0.12 + longest * 0.078)
    right = 0.04 if narrow else 0.14 + max(min(LONGEST, len(line.value)) for line in figure.lines) * 0.078
    canvas = Canvas(figsize=(width, height), facecolor="none")
    axes = canvas.add_axes(
        (left / width, below / height, (width - left - right) / width, (height - above - below) / height)
    )
    ends = [bar.start + bar.length for line in figure.lines for bar in line.bars]
    reach = max([*ends, *[place for line in figure.lines for place, _ in line.marks], 0.0]) or 1.0
    axes.set_xlim(0, reach * 1.01)
    axes.set_ylim(at + step * 0.6, 0)
    axes.set_facecolor("none")
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(length=0, colors=colours["muted"])
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}" if reach > 5 else f"{value:g}")
    axes.set_xlabel(figure.unit, color=colours["muted"])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for tick in axes.get_xticks():
        if tick <= reach * 1.01:
            axes.vlines(tick, 0, at + step * 0.6, color=colours["grid"], linewidth=0.7, zorder=0)
    bar_height = ROW * 0.62
    for place, line in zip(places, figure.lines, strict=True):
        name, value = shorten(line.name, LONGEST), shorten(line.value, LONGEST)
        for bar in line.bars:
            # A phase of a few milliseconds stays visible.
            length = max(bar.length, reach * 0.003)
            axes.add_patch(
                Rectangle(
                    (bar.start, place - bar_height / 2), length, bar_height, color=colours[bar.colour], linewidth=0
                )
            )
        for position, colour in line.marks:
            top, bottom = place - bar_height * 0.75, place + bar_height * 0.75
            axes.vlines(position, top, bottom, color=colours[colour], linewidth=2.2)
        words: dict[str, Any] = {"color": colours["ink"], "transform": axes.get_yaxis_transform(), "parse_math": False}
        if narrow:
            axes.text(0, place - bar_height * 0.72, name, va="bottom", ha="left", **words)
            axes.text(1, place - bar_height * 0.72, value, va="bottom", ha="right", **words)
        else:
            axes.text(-0.008, place, name, va="center_baseline", ha="right", **words)
            axes.text(1.008, place, value, va="center_baseline", ha="left", **words)
    if legend:
        canvas.text(
            0.012, 1 - 0.07 / height, figure.title, va="top", color=colours["ink"], fontsize=10.5, weight="bold"
        )
        canvas.legend(
            handles=[Patch(color=colours[colour], label=words) for words, colour in figure.legend],
            loc="upper left", bbox_to_anchor=(0.005, 1 - 0.24 / height), ncol=columns, frameon=False,
            handlelength=1.0, handleheight=0.9, columnspacing=1.4, borderpad=0.2, labelcolor=colours["ink"],
        )  # fmt: skip
    for artist in canvas.findobj():
        artist.set_clip_on(False)
    return canvas


def _save(figure: Figure, width: float, kind: str, legend: bool) -> bytes:
    import matplotlib

    target = io.BytesIO()
    with matplotlib.rc_context():
        # The settings of a user's matplotlibrc are not ours.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "vllm-edge", "font.size": 9.0, "font.family": "DejaVu Sans"}
        )
        canvas = _draw(figure, width, legend)
        if kind == "png":
            for artist in canvas.findobj():
                _recolour(artist)
            canvas.savefig(target, format="png", dpi=160, facecolor=COLOURS["page"][0], metadata={"Software": None})
        else:
            canvas.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    return target.getvalue()


def _recolour(artist: Any) -> None:
    """Replace the sentinel colours of an artist by those of the light scheme, for pixels."""
    from matplotlib.colors import to_hex

    light = {sentinel: COLOURS[name][0] for name, sentinel in paint().items()}
    for part in ("color", "facecolor", "edgecolor"):
        getter, setter = getattr(artist, f"get_{part}", None), getattr(artist, f"set_{part}", None)
        if getter is None or setter is None:
            continue
        value = getter()
        try:
            found = light.get(to_hex(value if isinstance(value, (str, tuple)) else value[0]))
        except (ValueError, TypeError, IndexError):
            continue
        if found is not None:
            setter(found)


def _replace_colours(text: str, page: bool) -> str:
    for name, sentinel in paint().items():
        text = text.replace(sentinel, f"var(--{name})" if page else COLOURS[name][0])
    return text


def draw_inline(figure: Figure, width: float) -> str:
    """Return the SVG for the page: in CSS variables, without names of its own and without addresses."""
    text = _save(figure, width, "svg", legend=False).decode()
    text = text[text.index("<svg") :]
    for begin, end in (("<metadata>", "</metadata>"), ("<defs>", "</defs>"), ("<!--", "-->")):
        text = _cut(text, begin, end)
    text = re.sub(r' (?:id|xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"font: (?:\w+ )?([\d.]+px)[^;\"]*", r"font-size: \1", text)
    head, _, rest = text.partition(">")
    points = re.search(r' width="([\d.]{1,12})pt"', head)
    pixels = f"{float(points[1]) * 96 / 72:.0f}" if points else "700"
    head = re.sub(r' width="[^"]*"', f' style="max-width:{pixels}px"', head, count=1)
    head = re.sub(r' height="[^"]*"', ' aria-hidden="true" focusable="false"', head, count=1)
    return _replace_colours(f"{head}>{rest}", page=True)


def _cut(text: str, begin: str, end: str) -> str:
    """Return the text without everything from `begin` to `end`, which do not nest."""
    first, *others = text.split(begin)
    return first + "".join(other.partition(end)[2] for other in others)


def draw_files(figure: Figure) -> dict[str, bytes]:
    """Return the figure with its title and legend as `svg` and `png`, in the light scheme."""
    svg = _replace_colours(_save(figure, WIDE, "svg", legend=True).decode(), page=False)
    background = f'<rect width="100%" height="100%" fill="{COLOURS["page"][0]}"/>'
    svg = re.sub(r"(<svg[^>]*>)", rf"\1{background}", svg, count=1)
    return {"svg": svg.encode(), "png": _save(figure, WIDE, "png", legend=True)}
