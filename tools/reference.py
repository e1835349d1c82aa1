# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/variables.md, from the output of ansible-doc, from group_vars/all and from variables.yml.

The same sources always give the same text: nothing in it depends on the time, the machine or the working directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "variables.md"
TEMPLATE = ROOT / "tools" / "templates" / "variables.md.j2"
MODULES = ROOT / "plugins" / "modules"
COLLECTION = ("edge", "vllm_edge")
"""Namespace and name. The modules name their doc fragments by it."""
VARIABLES = ROOT / "tools" / "variables.yml"
GROUP_VARS = ROOT / "group_vars" / "all"
WIDTH = 120

Doc = dict[str, Any]

# Throughout the project the last word of a name is the unit.
UNITS = {"tok_s": "tok/s", "_percent": "percent", "_s": "seconds", "_mib": "MiB", "_gib": "GiB", "_bytes": "bytes"}


def run_command(*command: str, **environment: str) -> str:
    """Return what a command prints. The output is the same in every locale and terminal."""
    completed = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C.UTF-8", "NO_COLOR": "1", **environment},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if completed.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {completed.returncode}\n{completed.stderr}")
    return completed.stdout


@contextlib.contextmanager
def collections_path() -> Iterator[str]:
    """Provide a directory of collections in which this checkout is the collection.

    ansible-doc finds `plugins/doc_fragments` there, whether or not `make collections` was run.
    """
    namespace, name = COLLECTION
    with tempfile.TemporaryDirectory() as directory:
        link = Path(directory, "ansible_collections", namespace, name)
        link.parent.mkdir(parents=True)
        link.symlink_to(ROOT, target_is_directory=True)
        yield directory


def ansible_doc(kind: str, names: Collection[str], paths: Iterable[Path]) -> Doc:
    """Return the documentation that ansible-doc prints, by name, with doc fragments merged into it."""
    where = ["-r" if kind == "role" else "-M", ":".join(str(path) for path in paths)]
    with collections_path() as collections:
        text = run_command(
            *("ansible-doc", "--json", "-t", kind, *where, *names),
            ANSIBLE_NOCOLOR="1",
            ANSIBLE_COLLECTIONS_PATH=collections,
        )
    docs: Doc = json.loads(text)
    if missing := sorted(set(names) - set(docs)):
        raise SystemExit(f"ansible-doc finds no documentation of {', '.join(missing)}")
    # A role is listed twice, the second time as a role of the collection.
    return {name: docs[name] for name in names}


def role_docs() -> Doc:
    """Return the entry points of every role, by role. `main` comes first."""
    names = sorted(path.parent.parent.name for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
    return {
        name: dict(sorted(doc["entry_points"].items(), key=lambda pair: (pair[0] != "main", pair[0])))
        for name, doc in sorted(ansible_doc("role", names, [ROOT / "roles"]).items())
    }


def module_docs() -> Doc:
    """Return `doc`, `examples` and `return` of every module and action plugin, by name."""
    return ansible_doc("module", sorted(path.stem for path in MODULES.glob("*.py")), [MODULES])


def group_vars() -> dict[str, Doc]:
    return {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8")) or {} for path in sorted(GROUP_VARS.glob("*.yml"))
    }


def variable_docs(roles: Doc) -> Doc:
    """Return the sections of tools/variables.yml with values, and with descriptions from roles where it has none."""
    described: Doc = yaml.safe_load(VARIABLES.read_text(encoding="utf-8"))
    values = {name: (file, value) for file, found in group_vars().items() for name, value in found.items()}
    of_roles = {
        name: {**option, "role": role}
        for role, entry_points in roles.items()
        for entry_point in entry_points.values()
        for name, option in entry_point.get("options", {}).items()
    }
    for section in described["sections"]:
        own: Doc = section.get("variables") or {}
        file: str = section.get("file", "")
        names = [*own, *(name for name in values if values[name][0] == file and name not in own)]
        section["variables"] = {}
        for name in names:
            option = own.get(name) or of_roles.get(name)
            if option is None:
                raise SystemExit(
                    f"{file}: {name} is described neither by a role's argument spec nor in {VARIABLES.name}"
                )
            if source := option.pop("options_of", None):
                nested = of_roles[source]["options"]
                nested = {key: value for key, value in nested.items() if key != "name"}
                option["options"] = nested | option.get("options", {})
            if name in values:
                option["value"] = values[name][1]
            section["variables"][name] = option
    return described


def markup(text: str) -> str:
    """Convert Ansible's markup to Markdown. Unknown markup is not changed."""
    parts = re.split(r"\b([A-Z]{1,2})\(([^()]*(?:\([^()]*\))?[^()]*)\)", text)
    plain = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::3]]
    marked = [
        {"B": f"**{inner}**", "I": f"*{inner}*", "U": f"<{inner}>"}.get(kind, f"`{inner}`")
        if kind in {"B", "C", "E", "I", "M", "O", "RV", "U", "V"}
        else f"{kind}({inner})"
        for kind, inner in zip(parts[1::3], parts[2::3], strict=True)
    ]
    return "".join(a + b for a, b in zip(plain, [*marked, ""], strict=True))


def sentences(description: str | list[str]) -> str:
    """Return a description, which may be a list of paragraphs, as one line."""
    parts = [description] if isinstance(description, str) else description
    return " ".join(markup(" ".join(part.split())) for part in parts)


def literal(value: Any) -> str:
    """Return a value as an operator would write it, in one line."""
    if value is True or value is False or value is None:
        text = str(json.dumps(value))
    elif isinstance(value, str):
        text = value or '""'
    else:
        text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`"


def unit(name: str) -> str:
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


def shown(value: Any) -> bool:
    """Whether a variable's value can be printed in one line: it is neither computed nor a mapping."""
    return (
        value is not None and not isinstance(value, dict) and len(literal(value)) < 100 and "{{" not in literal(value)
    )


def head(name: str, option: Mapping[str, Any]) -> str:
    """Return the type of an option, its unit, and its value, its default or that it is required."""
    kind = option.get("type", "str")
    if kind == "list" and "elements" in option:
        kind = f"list of {option['elements']}"
    words = [kind, unit(name)]
    if shown(option.get("value")):
        words.append(f"is {literal(option['value'])}")
    elif option.get("required"):
        words.append("required")
    elif "default" in option:
        words.append(f"default {literal(option['default'])}")
    return ", ".join(word for word in words if word)


def item(text: str, level: int = 0) -> str:
    """Return an item of a list, wrapped."""
    indent = "  " * level
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{indent}- ",
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def tidy(text: str) -> str:
    """Remove space at the end of lines, repeated empty lines, and all but one newline at the end."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip("\n") + "\n"


def in_order(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sort options: the required ones first, each part by name."""
    return sorted(options.items(), key=lambda pair: (not pair[1].get("required", False), pair[0]))


def render() -> str:
    """Render the page."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "head": head,
        "in_order": in_order,
        "item": item,
        "literal": literal,
        "paragraph": paragraph,
        "sentences": sentences,
    }
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return tidy(template.render(variable_docs(role_docs())))


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
