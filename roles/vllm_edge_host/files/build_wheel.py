# SPDX-License-Identifier: Apache-2.0
"""Write the wheel of the program vllm-edge, unless a wheel of the same sources is there already.

Usage: build_wheel.py PROJECT DIRECTORY

PROJECT is a checkout or an installed collection, DIRECTORY is where the wheel lies. The same sources always give the
same wheel. Needs neither pip nor setuptools, which the Python of Ansible may lack. Prints path, version, SHA-256, hash
of the sources and time of the newest commit as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "plugins/module_utils/vllm_edge"


def list_content(project: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the wheel as setuptools writes them by pyproject.toml; `name` is `vllm_edge-VERSION`.

    Source: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    root = project / PACKAGE
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(root.parent).as_posix(), path.read_bytes()
    facts = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {"": facts["dependencies"], **facts["optional-dependencies"]}
    lines = [
        *("Metadata-Version: 2.4", f"Name: {facts['name']}", f"Version: {name.partition('-')[2]}"),
        *(f"Summary: {facts['description']}", f"License-Expression: {facts['license']}", "License-File: LICENSE"),
        *(f"Requires-Python: {facts['requires-python']}", *(f"Provides-Extra: {extra}" for extra in needs if extra)),
        *(f"Requires-Dist: {word}" + f'; extra == "{extra}"' * bool(extra) for extra in needs for word in needs[extra]),
    ]
    scripts = [f"{command} = {function}" for command, function in facts["scripts"].items()]
    wheel = ["Wheel-Version: 1.0", "Generator: build_wheel.py", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    yield f"{name}.dist-info/licenses/LICENSE", (project / "LICENSE").read_bytes()
    for file, content in (("METADATA", lines), ("WHEEL", wheel), ("entry_points.txt", ["[console_scripts]", *scripts])):
        yield f"{name}.dist-info/{file}", "\n".join([*content, ""]).encode()


def build(project: Path, wheel: Path) -> None:
    """Write the wheel and put it in its place by one rename; wheels of other versions beside it are removed."""
    name = "-".join(wheel.name.split("-")[:2])
    files = list(list_content(project, name))
    record = f"{name}.dist-info/RECORD"
    lines = []
    for path, content in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    files.append((record, f"{''.join(lines)}{record},,\n".encode()))
    fresh = wheel.with_name(f".{wheel.name}.{os.getpid()}")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files:
            # Of 1980, the earliest time that a zip file can hold, and a plain file that everybody may read.
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    fresh.chmod(0o644)
    os.replace(fresh, wheel)
    for other in wheel.parent.glob("vllm_edge-*.whl"):
        if other != wheel:
            other.unlink(missing_ok=True)


def find_commit_time(project: Path) -> int:
    """Return when the program was last changed by a commit, in seconds since the epoch; 0 without a git checkout."""
    command = ["git", "-C", str(project), "log", "-1", "--format=%ct", "--", PACKAGE, "roles/vllm_edge_host"]
    try:
        return int(subprocess.run(command, check=False, capture_output=True, text=True).stdout or 0)
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Build the wheel where it is absent or made of other sources, and print what is there."""
    project, directory = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str((project / PACKAGE).parent))
    version = importlib.import_module("vllm_edge.version")

    def hash_wheel() -> str:
        with zipfile.ZipFile(wheel) as content:
            names = [name for name in content.namelist() if name.startswith("vllm_edge/")]
            return str(version.hash_files({name.partition("/")[2]: content.read(name) for name in names}))

    wheel = directory / f"vllm_edge-{version.__version__}-py3-none-any.whl"
    sources = version.hash_sources()
    if not wheel.exists() or hash_wheel() != sources:
        try:
            build(project, wheel)
        except OSError as error:
            sys.exit(f"The wheel of vllm-edge cannot be built: {error}")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = {"path": str(wheel), "version": version.__version__, "sha256": sha256, "sources": sources}
    print(json.dumps({**found, "committed_s": find_commit_time(project)}))


if __name__ == "__main__":
    main()
