# SPDX-License-Identifier: Apache-2.0
"""The findings of the doctor as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

Document = dict[str, Any]
WIDTH = 120
NAME = 26
# Names of packages and units are not broken, so that they can be copied.
_wrap = partial(textwrap.wrap, width=WIDTH, break_on_hyphens=False, break_long_words=False)


def _render_check(check: Mapping[str, str]) -> list[str]:
    head = f"{check['state']:<8}{check['check']:<{NAME}}"
    indent = " " * len(head)
    lines = _wrap(check["evidence"], initial_indent=head, subsequent_indent=indent)
    if check["remedy"]:
        arrow = "advice: " if check["state"] == "ok" else "do: "
        lines += _wrap(arrow + check["remedy"], initial_indent=indent, subsequent_indent=indent + "    ")
    return lines


def render(document: Mapping[str, Any]) -> list[str]:
    lines = [line for check in document["checks"] for line in _render_check(check)]
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
