# SPDX-License-Identifier: Apache-2.0
"""Colours and CSS of the page. Texts have a contrast of 4.5 to their background in both schemes, marks of 3."""

from __future__ import annotations

COLOURS = {
    "page": ("#ffffff", "#14171a"),
    "soft": ("#f5f6f7", "#1c2024"),
    "ink": ("#1b1f24", "#e7e9eb"),
    "muted": ("#57606a", "#a7b0b9"),
    "grid": ("#e1e4e8", "#30363d"),
    "link": ("#0b5cad", "#82baff"),
    "good": ("#1a6e3c", "#7ddc9b"),
    "bad": ("#b3261e", "#ff8f86"),
    "warn": ("#855200", "#f0bd62"),
    "weights": ("#2f6299", "#6ea4dc"),
    "overhead": ("#7d6aa6", "#b3a2d8"),
    "graphs": ("#b07a1e", "#dcab57"),
    "context": ("#77808a", "#98a2ac"),
    "kv_cache": ("#3f8a78", "#74bfac"),
    "measured": ("#33475b", "#c3d0dd"),
    "gateway": ("#71869b", "#8797a8"),
    "foreign": ("#b3261e", "#ff8f86"),
    "budget": ("#d1242f", "#ff8f86"),
    "total": ("#8c959f", "#7d8791"),
    "band": ("#8fb4dc", "#3f6c9c"),
    "mid": ("#0b5cad", "#82baff"),
    "reference": ("#b07a1e", "#dcab57"),
    "phase": ("#2f6299", "#6ea4dc"),
    "back": ("#7d6aa6", "#b3a2d8"),
    "failed": ("#b3261e", "#ff8f86"),
    "gap": ("#d1242f", "#ff8f86"),
    "wait": ("#8c959f", "#7d8791"),
    "container": ("#77808a", "#a7b0b9"),
    "initialize": ("#7d6aa6", "#b3a2d8"),
    "compile": ("#a2543a", "#dd9478"),
    "health": ("#33475b", "#c3d0dd"),
}
"""Light and dark, by the name of the CSS variable."""


def _scheme(number: int) -> str:
    return "".join(f"--{name}:{pair[number]};" for name, pair in COLOURS.items())


CSS = (
    f":root{{color-scheme:light dark;{_scheme(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_scheme(1)}}}}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
 "Noto Sans","Liberation Sans",sans-serif;overflow-wrap:anywhere}
header,nav,main,footer{max-width:60rem;margin:0 auto;padding:0 1rem}
header{padding-top:2rem}
h1{font-size:1.75rem;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:2.75rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.75rem 0 .5rem}
p,ul,dl{margin:.5rem 0}
p,li{max-width:44rem}
ul{padding-left:1.2rem}
a{color:var(--link)}
.lead{color:var(--muted);margin:.25rem 0 0}
.verdict{display:inline-block;margin:1rem 0 0;padding:.2rem .7rem;border-radius:1rem;border:1px solid currentColor;
 font-weight:600;font-size:.9375rem}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.muted{color:var(--muted)}
.note{margin:1rem 0 0;padding:.6rem .9rem;border:1px solid var(--bad);border-left-width:.35rem;color:var(--bad);
 font-weight:600;max-width:none}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;padding:0;margin:1.25rem 0 0;font-size:.9375rem}
nav a{display:inline-block;padding:.25rem 0}
.skip{position:absolute;left:-100vw;top:0;padding:.5rem 1rem;background:var(--page);z-index:2}
.skip:focus{left:0}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,13rem),1fr));gap:.75rem 1.5rem;margin:1rem 0}
dt{color:var(--muted);font-size:.875rem}
dd{margin:0;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:1rem 0;max-width:100%}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.4;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:0 0 .4rem}
caption span{display:inline-block;position:sticky;left:0;max-width:calc(100vw - 2rem)}
th,td{text-align:left;vertical-align:top;padding:.4rem .9rem .4rem 0;border-bottom:1px solid var(--grid);
 overflow-wrap:normal}
td:last-child,th:last-child{padding-right:0}
thead th{color:var(--muted);font-weight:500;border-bottom-color:var(--muted);vertical-align:bottom}
tbody th{font-weight:600;white-space:nowrap}
td{white-space:nowrap}
.number{text-align:right}
.long{display:block;min-width:11rem;white-space:normal;overflow-wrap:anywhere}
.nowrap{white-space:nowrap}
figure{margin:1rem 0}
figcaption{font-weight:600;font-size:.875rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1rem;padding:0;margin:.4rem 0;font-size:.8125rem;
 color:var(--muted)}
.legend span{display:inline-block;width:.75em;height:.75em;margin-right:.4em;border-radius:2px}
figure svg{display:block;width:100%;height:auto}
figure svg text{font-family:inherit}
.narrow{display:none}
@media (max-width:46rem){.narrow{display:block}.wide{display:none}}
details{margin:.5rem 0}
summary{cursor:pointer;color:var(--link);font-size:.875rem;padding:.35rem 0}
pre{background:var(--soft);padding:.75rem 1rem;overflow-x:auto;overflow-wrap:normal;
 font:.8125rem/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
code{font:.9em ui-monospace,"DejaVu Sans Mono",monospace}
footer{margin-top:3rem;padding-bottom:2rem;color:var(--muted);font-size:.875rem}
@media (max-width:30rem){header{padding-top:1.25rem}h1{font-size:1.5rem}}
@media print{
 nav,.skip{display:none}
 header,main,footer{max-width:none;padding:0}
 body{font-size:10pt}
 h2{break-after:avoid}
 figure,tr,.note{break-inside:avoid}
 .scroll,pre{overflow:visible;white-space:normal}
 pre{white-space:pre-wrap}
 details::details-content{content-visibility:visible;block-size:auto}
 summary{display:none}
}
@media print and (prefers-color-scheme:dark){:root{""" + _scheme(0) + "}}"
)
