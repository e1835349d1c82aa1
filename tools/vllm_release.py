#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record a release of vLLM, and say what it changes for users: `make vllm-release VERSION=0.33.0`.

The source distribution comes from PyPI, or from PIP_INDEX_URL, and is checked by its hash; only its Python files are
unpacked, into .cache/vllm. The judge runs them with the PyTorch of the lab's image, or with that of
the Python in VLLM_JUDGE_PYTHON.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.module_utils.vllm_edge.engine import metrics
from plugins.module_utils.vllm_edge.inventory import risks, vllm_arguments, vllm_changes
from plugins.module_utils.vllm_edge.inventory.engine_arguments import KEY_OF_OPTION, OURS
from plugins.module_utils.vllm_edge.planning.checkpoint import model_classes
from plugins.module_utils.vllm_edge.planning.memory import vllm_versions
from tools import vllm_source
from tools.vllm_source import NO_VALUE, Option, Sources

CACHE = ROOT / ".cache/vllm"
RECORD = ROOT / "plugins/module_utils/vllm_edge/inventory/vllm_arguments.py"
CLASSES = ROOT / "plugins/module_utils/vllm_edge/planning/checkpoint/model_classes.py"
MONITORING = ROOT / "roles/serving_metrics/files"
VERSIONS = ROOT / "group_vars/all/versions.yml"
LIMIT_BYTES = 400 * 2**20
ALIKE = 0.75
"""From this likeness on, an option that is gone and a new one with the same values count as renamed."""
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` of releases of vLLM takes: data that tools/vllm_release.py writes, never edited by hand.

`options` has the names of the options without `--`, with their aliases, by what follows them: `none`, `one`, `many` or
`optional` values of the kind `text`, `int` or `float`. A `switch` takes no value and has a `--no-` form. `metrics` are
those that the project reads, without `vllm:` and the `_total` of counters. A release after the first has what it
changed (vllm_changes.py). VERSION is the release of vllm_image_base.
"""

from typing import Any

from .vllm_changes import apply_changes

'''

HEAD_OF_CLASSES = '''# SPDX-License-Identifier: Apache-2.0
"""Model classes for text that releases of vLLM have, and those before them have not: data that tools/vllm_release.py
writes from model_executor/models/registry.py, never edited by hand. What is in no line exists since 0.19.0, or never.
"""

from collections.abc import Mapping

'''


def fetch(version: str) -> Path:
    """Return the directory with the sources of a release, downloaded unless .cache has them.

    Raises:
        SystemExit: if the index has no such release, or the file is not what the index says.
    """
    target = CACHE / version
    if (target / "PKG-INFO").is_file():
        return target
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    base = f"{index.rstrip('/')}/vllm/"
    if not base.startswith("https://"):
        raise SystemExit(f"PIP_INDEX_URL: {base!r} is not read, because only https:// is; leave it unset for PyPI")
    files = json.loads(_download(base, {"Accept": "application/vnd.pypi.simple.v1+json"}))["files"]
    name = f"vllm-{version}.tar.gz"
    found = next((each for each in files if each["filename"] == name), None)
    if found is None:
        newest = sorted({each["filename"] for each in files if each["filename"].endswith(".gz")})[-3:]
        raise SystemExit(f"VERSION: the index has no {name}; among others it has {', '.join(newest)}")
    content = _download(urllib.parse.urljoin(base, found["url"]), {})
    if hashlib.sha256(content).hexdigest() != found["hashes"]["sha256"]:
        raise SystemExit(f"{name} does not have the SHA-256 that the index says; run it again")
    target.mkdir(parents=True, exist_ok=True)
    archive = target / name
    archive.write_bytes(content)
    unpack(archive, target)
    archive.unlink()
    return target


def _download(url: str, headers: Mapping[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=120) as answer:  # noqa: S310
        content: bytes = answer.read(LIMIT_BYTES)
    return content


def unpack(archive: Path, target: Path) -> None:
    """Unpack the Python files and, last, the metadata of a source distribution, without its first directory.

    Python 3.11.2, which Debian 12 has, lacks the filters of tarfile: only contents of regular files are taken.
    """
    with tarfile.open(archive) as packed:
        members = {member.name.partition("/")[2]: member for member in packed if member.isfile()}
        for path in sorted(members, key=lambda path: path == "PKG-INFO"):
            if path == "PKG-INFO" or (path.startswith("vllm/") and path.endswith(".py")):
                content = packed.extractfile(members[path])
                if content is None or ".." in Path(path).parts:
                    raise SystemExit(f"{archive.name} has the file {path!r}, which would lie elsewhere")
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_bytes(content.read())


def record(sources: Sources) -> dict[str, Any]:
    """Return the entry of a release in vllm_arguments.RELEASES. Raises UnreadableSource."""
    options = vllm_source.read_options(sources)
    groups: dict[str, list[str]] = {}
    for option in options:
        groups.setdefault(option.group, []).append("|".join([option.names[0][2:], *option.names[1:]]))
    return {
        "gpu_memory_utilization": next(
            option.default for option in options if "--gpu-memory-utilization" in option.names
        ),
        "tool_call_parsers": " ".join(vllm_source.read_parsers(sources, "tool_parsers")),
        "reasoning_parsers": " ".join(vllm_source.read_parsers(sources, "reasoning")),
        "options": {group: " ".join(names) for group, names in groups.items()},
        "choices": {option.names[0][2:]: " ".join(map(str, option.choices)) for option in options if option.choices},
        "metrics": " ".join(filter(is_read, vllm_source.read_metrics(sources))),
    }


def is_read(name: str) -> bool:
    """Return whether the project, its rules for Prometheus or its dashboard read this metric.

    `name` is without `vllm:` and the suffix of counters.
    """
    files = (path.read_text(encoding="utf-8") for path in MONITORING.glob("*.*"))
    if re.search(rf"vllm:{name}(?:_total|_bucket|_sum|_count)?\b", "\n".join(files)):
        return True
    text = "\n".join(f'vllm:{name}{suffix}{{num_gpu_blocks="1"}} 1' for suffix in ("", "_total", "_count"))
    read = metrics.read_totals, metrics.read_figures, metrics.kv_blocks
    return any(each(text) != each("") for each in read)


def render(releases: Mapping[str, Mapping[str, Any]], default: str) -> str:
    """Return the text of vllm_arguments.py, the releases in their order."""
    lines = [f'{HEAD}VERSION = "{default}"', "CHANGES: dict[str, dict[str, Any]] = {"]
    before: Mapping[str, Any] = {}
    for version in sorted(releases, key=Version):
        changes, before = vllm_changes.find_changes(before, releases[version]), releases[version]
        lines.append(f'    "{version}": {{')
        for key, value in changes.items():
            if isinstance(value, dict):
                lines.append(f'        "{key}": {{')
                lines += [f'            "{name}": {_quote(text)},' for name, text in value.items()]
                lines.append("        },")
            else:
                lines.append(f'        "{key}": {_quote(value) if isinstance(value, str) else repr(value)},')
        lines.append("    },")
    return "\n".join([*lines, "}", "RELEASES = apply_changes(CHANGES)", ""])


def _quote(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= 80:
        return f'"{text}"'
    return '"""\n' + textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + '\n"""'


def render_classes(version: str, was: set[str], now: set[str]) -> str:
    """Return the text of model_classes.py with a release, whose classes are compared with those of the one before."""
    lines: list[str] = [HEAD_OF_CLASSES.rstrip(), ""]
    for name, names in (("ADDED", now - was), ("GONE", was - now)):
        found: dict[str, str] = {**getattr(model_classes, name), version: " ".join(sorted(names))}
        lines.append(f"{name}: Mapping[str, str] = {{")
        lines += [f'    "{each}": {_quote(found[each])},' for each in sorted(found, key=Version) if found[each]]
        lines.append("}")
    return "\n".join([*lines, ""])


def propose_row(metadata: str, version: str) -> str:
    """Return the row of vllm_compatibility_matrix for a release, by the metadata of its distribution."""
    lines = re.findall(r"^Requires-Dist: *(transformers\b.*)$", metadata, re.MULTILINE)
    specifiers = sorted(str(Requirement(lines[0]).specifier).split(","), reverse=True) if lines else []
    number = Version(version)
    row = {
        "vllm": f">={number.major}.{number.minor},<{number.major}.{number.minor + 1}",
        "transformers": ",".join(specifiers),
        "known_bad": [],
        "reference": f"requirements in the metadata of the vllm {version} wheel",
    }
    known = [
        each
        for each in yaml.safe_load(VERSIONS.read_text())["vllm_compatibility_matrix"]
        if each["vllm"] == row["vllm"]
    ]
    same = known and known[0]["transformers"] == row["transformers"]
    said = "has this row already" if same else "has another row for it" if known else "needs this row"
    return f"{VERSIONS.relative_to(ROOT)} {said}:\n" + textwrap.indent(
        yaml.safe_dump([row], sort_keys=False, width=200), "  "
    )


def compare_options(old: Iterable[Option], new: Iterable[Option]) -> Iterator[str]:
    """Yield what became of the options of a release, one line each."""
    before, after = ({option.names[0]: option for option in options} for options in (old, new))
    spelled = {name: option for option in after.values() for name in option.names}
    added = {name: option for name, option in after.items() if name not in before}
    for name, was in before.items():
        now = spelled.get(name)
        if now is None:
            alike = difflib.get_close_matches(name, [n for n, o in added.items() if o.group == was.group], 1, ALIKE)
            yield f"renamed: {name}, probably to {alike[0]}" if alike else f"gone: {name}"
            continue
        if missing := [alias for alias in was.names if alias not in now.names]:
            yield f"spelling gone: {name}, {' '.join(missing)}"
        if was.group != now.group:
            yield f"values: {name} takes {now.group}, was {was.group}"
        if was.choices != now.choices and (was.choices or now.choices):
            lost, more = (
                [str(x) for x in a if x not in b] for a, b in ((was.choices, now.choices), (now.choices, was.choices))
            )
            if not now.choices:
                lost, more = [], ["any value"]
            yield f"choices: {name}" + "".join(
                f", {what} {' '.join(x)}" for what, x in (("without", lost), ("new:", more)) if x
            )
        if was.default != now.default and NO_VALUE not in (was.default, now.default):
            yield f"default: {name} {now.default!r}, was {was.default!r}"
    more = [
        alias for name, now in after.items() if name in before for alias in now.names if alias not in before[name].names
    ]
    if more:
        yield f"new spellings: {len(more)}, such as {', '.join(more[:3])}"
    for name, option in added.items():
        known = name in risks.SAFE or name in risks.UNSAFE or name in OURS or name in KEY_OF_OPTION
        yield f"new: {name} ({option.group})" + ("" if known else "; inventory/risks.py has it in no table")


def compare_words(what: str, old: str, new: str) -> Iterator[str]:
    """Yield the words that only one of two texts has."""
    for said, words in (("gone", set(old.split()) - set(new.split())), ("new", set(new.split()) - set(old.split()))):
        if words:
            yield f"{said}: {what} {' '.join(sorted(words))}"


def compare_rules(version: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of memory that the planner has in another way than the sources of a release."""
    for name, value in found.items():
        planned = getattr(vllm_versions.behaviour(version), name)
        if value != planned and (not isinstance(value, str) or set(value.split()) != set(planned.split())):
            yield f"{name} is {value!r}, planned {planned!r}: add it to CHANGES in {Path(vllm_versions.__file__).name}"


def compare_functions(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[list[str], str]:
    """Return which functions of the KV arithmetic changed, and the differences of their code."""
    lines: list[str] = []
    differences: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, ""), new.get(name, "")
        if was != now:
            lines.append(f"{'gone' if not now else 'new' if not was else 'changed'}: {name}")
            differences += difflib.unified_diff(was.splitlines(), now.splitlines(), name, name, lineterm="")
    return lines, "\n".join(differences) + "\n"


def run_judge(sources: Iterable[Path]) -> int:
    """Run tests/judge against the functions of these sources. Returns pytest's exit status."""
    environment = {**os.environ, "VLLM_JUDGE_SOURCES": ":".join(map(str, sources)), "VLLM_EDGE_THOROUGH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "docker", "tests/judge"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def report(title: str, lines: Iterable[str]) -> None:
    print(f"\n== {title}")
    print("\n".join(f"  {line}" for line in lines) or "  nothing")


def main() -> int:
    """Record, compare and judge a release. Returns the judge's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="as PyPI names it: 0.33.0")
    parser.add_argument("--no-judge", action="store_true", help="only record and compare")
    parser.add_argument("--only-judge", action="store_true", help="record nothing; takes several releases, with spaces")
    given = parser.parse_args()
    if given.only_judge:
        return run_judge([fetch(version) for version in given.version.split()])
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", given.version):
        raise SystemExit(f"VERSION: {given.version!r} is no release of vLLM; write one as PyPI does, such as 0.33.0")
    older = [each for each in vllm_arguments.RELEASES if Version(each) < Version(given.version)]
    base = max(older, key=Version, default=None)
    directory = fetch(given.version)
    sources = Sources(directory / "vllm")
    try:
        entry = record(sources)
    except vllm_source.UnreadableSource as error:
        raise SystemExit(f"vLLM {given.version} was not recorded: {error}") from None
    image = yaml.safe_load(VERSIONS.read_text())["vllm_image_base"].rpartition(":v")[2]
    releases = {**vllm_arguments.RELEASES, given.version: entry}
    RECORD.write_text(render(releases, image if image in releases else vllm_arguments.VERSION))
    count = len(" ".join(entry["options"].values()).split())
    print(
        f"vLLM {given.version}: {count} options and {len(entry['metrics'].split())} metrics recorded in {RECORD.name}"
    )
    report("compatibility matrix", propose_row((directory / "PKG-INFO").read_text(), given.version).splitlines())
    report("rules of memory", compare_rules(given.version, vllm_source.read_memory_rules(sources)))
    if base:
        was, old = Sources(fetch(base) / "vllm"), vllm_arguments.RELEASES[base]
        classes = tuple(map(vllm_source.read_model_classes, (was, sources)))
        CLASSES.write_text(render_classes(given.version, *classes))
        options = (vllm_source.read_options(was), vllm_source.read_options(sources))
        report(f"arguments, against {base}", sorted(compare_options(*options)))
        words = [
            line
            for key in ("tool_call_parsers", "reasoning_parsers")
            for line in compare_words(f"{key}:", old[key], entry[key])
        ]
        report("parsers", words)
        report("model classes", compare_words("class", *(" ".join(names) for names in classes)))
        report("metrics", compare_words("metrics:", *(" ".join(vllm_source.read_metrics(of)) for of in (was, sources))))
        lines, differences = compare_functions(*map(vllm_source.read_kv_functions, (was, sources)))
        path = CACHE / f"{base}-{given.version}.diff"
        path.write_text(differences)
        report(f"functions behind the plan; their differences are in {path.relative_to(ROOT)}", lines)
    print("\n== judge: the plan's KV cache against the functions of this release", flush=True)
    return 0 if given.no_judge else run_judge([directory])


if __name__ == "__main__":
    sys.exit(main())
