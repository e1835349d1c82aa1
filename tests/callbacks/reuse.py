# SPDX-License-Identifier: GPL-3.0-or-later
"""Callback plugin for tests: what every run of Ansible, and every task of it, would make anew is there already.

Each task is a fork of the process that loads this. A quarter of what the controller computes is packing modules, which
Ansible does once in each run; here, once until a source changes. So it is with the bytecode of collections, which
Ansible keeps nowhere.
"""

from __future__ import annotations

import hashlib
import importlib
import marshal
import os
import shutil
import time
from pathlib import Path
from types import CodeType

from ansible import __version__, constants
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionPkgLoaderBase as Loader

ROOT = Path(__file__).resolve().parents[2]

UNUSED_S = 86400


def find_place() -> Path:
    """A directory for the packed modules of these sources."""
    # Tests have modules of their own.
    modules = (Path(path, "ansible_collections/edge/vllm_edge/plugins/modules") for path in constants.COLLECTIONS_PATHS)
    places = [ROOT / "plugins", *modules]
    files = [ROOT / "collections" / ".stamp", *(file for place in places for file in place.rglob("*.py"))]
    seen = sorted(f"{path} {path.stat().st_mtime_ns} {path.stat().st_size}" for path in files if path.exists())
    return ROOT / ".cache" / "modules" / hashlib.sha256("\n".join([__version__, *seen]).encode()).hexdigest()[:12]


def keep_bytecode(place: Path) -> None:
    """Let the loader of collections read bytecode from this directory, and write there what is missing."""
    compile_module = Loader.get_code

    def read_or_compile(self: Loader, fullname: str) -> CodeType | None:
        kept = place / fullname
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        if code := compile_module(self, fullname):
            (new := place / f"{fullname}.{os.getpid()}").write_bytes(marshal.dumps(code))
            new.rename(kept)
        return code

    Loader.get_code = read_or_compile


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "reuse"
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self) -> None:
        super().__init__()
        place = find_place()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.touch()
        for other in place.parent.iterdir():
            if other.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
        constants.DEFAULT_LOCAL_TMP = str(place)
        keep_bytecode(place)
        for file in (ROOT / "plugins" / "filter").glob("*.py"):
            importlib.import_module(f"ansible_collections.edge.vllm_edge.plugins.filter.{file.stem}")
        _ = list(filter_loader.all()), list(test_loader.all())
