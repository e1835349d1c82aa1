# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter plugins: what apt-get says, and what a repository gets on a host."""

from __future__ import annotations

DOCUMENTATION = """
name: apt
short_description: what apt-get says, and what a repository gets on a host
extends_documentation_fragment: edge.vllm_edge.filters
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

from ..module_utils.vllm_edge.system import apt, apt_sources


def check_apt_key(offered: str, wanted: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    return apt_sources.check_key(base64.b64decode(offered), wanted, plan)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "split_apt_files": apt_sources.split_files,
            "plan_apt_repository": apt_sources.plan_repository,
            "plan_apt_archive": apt_sources.plan_archive,
            "check_apt_key": check_apt_key,
            "choose_apt_preferences": apt_sources.choose_preferences,
            "explain_apt": apt.explain,
            "refuse_apt_change": apt.refuse,
            "foretell_apt_writes": apt.foretell_writes,
            "changes_nothing_of_apt": apt.changes_nothing,
            "list_apt_offers": apt.list_offered,
        }
