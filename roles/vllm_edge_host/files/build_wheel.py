# SPDX-License-Identifier: Apache-2.0
"""Write the wheel of the program vllm-edge, unless a wheel of the same sources is there already.

Usage: build_wheel.py PROJECT DIRECTORY

PROJECT is a checkout or an installed collection, DIRECTORY is where the wheel lies. The same sources always give the
same wheel. Needs neither pip nor setuptools, which the Python of Ansible may lack. Prints path, version, SHA-256, hash
of the sources and time of the newest commit as JSON. It is also the build backend of pyproject.toml, so what pip and uv
build of a checkout, what is published and what the collection carries are the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "plugins/module_utils/vllm_edge"
ROOT = Path(__file__).resolve().parents[3]
Files = dict[str, bytes]


def load_version(project: Path) -> Any:
    """Import the module of the package that knows its version and the hash of its sources."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str((project / PACKAGE).parent))
    return importlib.import_module("vllm_edge.version")


def read_package(project: Path) -> Files:
    root = project / PACKAGE
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(root.parent).as_posix(): path.read_bytes() for path in paths}


def read_pyproject(project: Path) -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return facts


def write_metadata(project: Path, version: str) -> bytes:
    """Source: https://packaging.python.org/en/latest/specifications/core-metadata/"""
    facts = read_pyproject(project)
    needs = {"": facts["dependencies"], **facts["optional-dependencies"]}
    lines = [
        *("Metadata-Version: 2.4", f"Name: {facts['name']}", f"Version: {version}", f"Summary: {facts['description']}"),
        *(f"License-Expression: {facts['license']}", *(f"License-File: {name}" for name in facts["license-files"])),
        *(f"Project-URL: {name}, {url}" for name, url in facts["urls"].items()),
        *(f"Keywords: {','.join(facts['keywords'])}", *(f"Classifier: {name}" for name in facts["classifiers"])),
        *(f"Requires-Python: {facts['requires-python']}", *(f"Provides-Extra: {extra}" for extra in needs if extra)),
        *(f"Requires-Dist: {word}" + f'; extra == "{extra}"' * bool(extra) for extra in needs for word in needs[extra]),
        *("Description-Content-Type: text/markdown", "", (project / facts["readme"]).read_text(encoding="utf-8")),
    ]
    return "\n".join(lines).encode()


def list_content(project: Path, version: str) -> Files:
    """Return the files of the wheel but its RECORD.

    Source: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    facts, info = read_pyproject(project), f"vllm_edge-{version}.dist-info"
    wheel = ["Wheel-Version: 1.0", "Generator: build_wheel.py", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
    scripts = [f"{command} = {function}" for command, function in facts["scripts"].items()]
    return {
        **read_package(project),
        **{f"{info}/licenses/{name}": (project / name).read_bytes() for name in facts["license-files"]},
        f"{info}/METADATA": write_metadata(project, version),
        f"{info}/WHEEL": "\n".join(wheel).encode(),
        f"{info}/entry_points.txt": "\n".join(["[console_scripts]", *scripts, ""]).encode(),
    }


def write_wheel(files: Files, wheel: Path) -> None:
    """Write the wheel and put it in its place by one rename."""
    record = next(name for name in files if name.endswith("METADATA")).replace("METADATA", "RECORD")
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    fresh = wheel.with_name(f".{wheel.name}.{os.getpid()}")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**files, record: f"{''.join(lines)}{record},,\n".encode()}.items():
            # Of 1980, the earliest time that a zip file can hold, and a plain file that everybody may read.
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    fresh.chmod(0o644)
    os.replace(fresh, wheel)


def read_wheel(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Write the wheel for pip or uv (PEP 517) and return its name."""
    version = load_version(ROOT).__version__
    name = f"vllm_edge-{version}-py3-none-any.whl"
    write_wheel(list_content(ROOT, version), Path(wheel_directory, name))
    return name


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    """Write the sources from which the wheel is built (PEP 517) and return the name of their archive."""
    version, facts = load_version(ROOT).__version__, read_pyproject(ROOT)
    name = f"vllm_edge-{version}"
    paths = ["pyproject.toml", facts["readme"], *facts["license-files"], Path(__file__).relative_to(ROOT).as_posix()]
    files = {path: (ROOT / path).read_bytes() for path in paths}
    files |= {f"{Path(PACKAGE).parent}/{path}": content for path, content in read_package(ROOT).items()}
    files["PKG-INFO"] = write_metadata(ROOT, version)
    with (
        gzip.GzipFile(Path(sdist_directory, f"{name}.tar.gz"), "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{name}.tar.gz"


def find_commit_time(project: Path) -> int:
    """Return when the program was last changed by a commit, in seconds since the epoch; 0 without a git checkout."""
    command = ["git", "-C", str(project), "log", "-1", "--format=%ct", "--", PACKAGE, "roles/vllm_edge_host"]
    try:
        return int(subprocess.run(command, check=False, capture_output=True, text=True).stdout or 0)
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Build the wheel where it is absent or made of other sources, and print what is there. Others beside it go."""
    project, directory = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    module = load_version(project)
    version = module.__version__
    wheel = directory / f"vllm_edge-{version}-py3-none-any.whl"
    try:
        files = list_content(project, version)
        if not zipfile.is_zipfile(wheel) or read_wheel(wheel) != files:
            write_wheel(files, wheel)
            for other in set(directory.glob("vllm_edge-*.whl")) - {wheel}:
                other.unlink(missing_ok=True)
    except OSError as error:
        sys.exit(f"The wheel of vllm-edge cannot be built: {error}")
    found = {"path": str(wheel), "version": version, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    print(json.dumps({**found, "sources": module.hash_sources(), "committed_s": find_commit_time(project)}))


if __name__ == "__main__":
    main()
