# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: print lines on the terminal without changing them."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):  # type: ignore[misc]
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "lines": {"type": "list", "elements": "str"},
                "text": {"type": "str"},
                "color": {"type": "str", "choices": ["red"]},
            },
            mutually_exclusive=[("lines", "text")],
            required_one_of=[("lines", "text")],
        )
        lines = options["lines"]
        if lines is None:
            lines = [f"{(task_vars or {}).get('inventory_hostname', '')}: {options['text']}"]
        # Lines may quote a log, a registry or a client: no character of theirs may drive the terminal.
        shown = [
            "".join(one if one.isprintable() or one in "\t\n\u00a0\u3000" else f"\\u{ord(one):04x}" for one in line)
            for line in lines
        ]
        if shown:
            # All at once, so that what several hosts print does not mix.
            Display().display("\n".join(shown), color=options["color"])
        return {"changed": False}
