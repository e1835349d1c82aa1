# SPDX-License-Identifier: Apache-2.0
"""Caches of engines: the role vllm_engine removes those of images that no kept generation uses, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path

from role_cases import Cases, Run, Steps

OLD, KEPT, LIVE = "0" * 12, "1" * 12, "2" * 12


class Host:
    """One engine over three images, one engine of a former profile, and what others have put there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for cache in (OLD, KEPT, LIVE, "notes-of-me", f"{OLD}-mine", f"../former/{OLD}"):
            (root / "disk/cache/e2b" / cache / "vllm").mkdir(parents=True)
        (root / "cache").symlink_to("disk/cache")
        for place, image in (("state/generations/4", KEPT), ("state/generations/5", LIVE), ("etc", LIVE)):
            file = root / place / "engines/e2b/engine.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({"engine": "e2b", "image_id": f"sha256:{image}{'0' * 52}"}, indent=2))

    def run(self, check: bool = False) -> Run:
        places = {"cache": "cache", "state": "state", "configuration": "etc"}
        variables = {f"vllm_engine_{name}_directory": str(self.root / place) for name, place in places.items()}
        return Run(["prune"], check, variables | {"vllm_engine_uid": os.getuid()})

    def caches(self) -> list[str]:
        return sorted(str(path.relative_to(self.root / "cache")) for path in (self.root / "cache").glob("*/*"))


CASES = Cases("vllm_engine", make=Host, validated=False)


@CASES.add
def caches_that_no_generation_names_are_removed(host: Host) -> Steps:
    before = host.caches()
    foreseen = yield host.run(check=True)
    assert len(foreseen.changed) == 1 and f"{host.root}/cache/former/{OLD}" in foreseen.text
    assert not foreseen.failed and host.caches() == before
    assert len((yield host.run()).changed) == 1
    assert host.caches() == sorted([f"e2b/{KEPT}", f"e2b/{LIVE}", "e2b/notes-of-me", f"e2b/{OLD}-mine"])
    again = yield host.run()
    assert (again.failed, again.changed) == (False, [])


@CASES.add
def nothing_is_removed_where_no_generation_can_be_read(host: Host) -> Steps:
    before = host.caches()
    for file in host.root.rglob("engine.json"):
        file.unlink()
    played = yield host.run()
    assert (played.failed, played.changed) == (False, []) and host.caches() == before


test_case = CASES.make_test()
