# SPDX-License-Identifier: Apache-2.0
"""The findings of the doctor as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]
WIDTH = 120
NAME = 26


def _check(check: Mapping[str, str]) -> list[str]:
    head = f"{check['state']:<8}{check['check']:<{NAME}}"
    indent = " " * len(head)
    lines = _wrapped(check["evidence"], head, indent)
    if check["remedy"]:
        arrow = "advice: " if check["state"] == "ok" else "do: "
        lines += _wrapped(arrow + check["remedy"], indent, indent + "    ")
    return lines


def _wrapped(text: str, first: str, following: str) -> list[str]:
    """Wrap text; names of packages and units are not broken, so that they can be copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_on_hyphens=False,
        break_long_words=False,
    )


def render(document: Mapping[str, Any]) -> list[str]:
    lines = [line for check in document["checks"] for line in _check(check)]
    told = ", ".join(f"{count} {state}" for state, count in document["summary"].items() if count)
    wrong = [check["check"] for check in document["checks"] if check["state"] == "fail"]
    lines += ["", f"{document['host']}: {told}" + (f"; failed: {', '.join(wrong)}" if wrong else "")]
    if not document["as_root"] and document["summary"]["unknown"]:
        lines.append("Not everything is shown to this user: as root more of what is unknown can be read.")
    return lines


def problems(document: Mapping[str, Any]) -> list[str]:
    return [
        f"{check['check']}: {check['evidence'].rstrip('.')}. {check['remedy']}".strip()
        for check in document["checks"]
        if check["state"] == "fail"
    ]
