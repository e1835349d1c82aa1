# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/variables.md, from the roles' argument specs, meta/variables.yml, the rules and group_vars/all,
docs/measured.md, and the dashboard for Grafana.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from plugins.module_utils.vllm_edge.inventory import rules, variables
from tools import dashboard, measured

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "variables.md"
TEMPLATE = ROOT / "tools" / "templates" / "variables.md.j2"
MODULES = ROOT / "plugins" / "modules"
COLLECTION = ("edge", "vllm_edge")
"""Namespace and name. The modules name their doc fragments by it."""
GROUP_VARS = ROOT / "group_vars" / "all"
WIDTH = 120

Doc = dict[str, Any]


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


def role_docs() -> Doc:
    """Return the entry points of every role, by role."""
    files = sorted(ROOT.glob("roles/*/meta/argument_specs.yml"))
    return {path.parts[-3]: yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"] for path in files}


def module_docs() -> Doc:
    """Return `doc`, `examples` and `return` of every module by name, as ansible-doc prints them."""
    names = sorted(path.stem for path in MODULES.glob("*.py"))
    with collections_path() as collections:
        text = run_command(
            *("ansible-doc", "--json", "-t", "module", "-M", str(MODULES), *names),
            ANSIBLE_NOCOLOR="1",
            ANSIBLE_COLLECTIONS_PATH=collections,
        )
    docs: Doc = json.loads(text)
    if missing := sorted(set(names) - set(docs)):
        raise SystemExit(f"ansible-doc finds no documentation of {', '.join(missing)}")
    return {name: docs[name] for name in names}


def group_vars() -> dict[str, Doc]:
    return {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8")) or {} for path in sorted(GROUP_VARS.glob("*.yml"))
    }


def variable_docs() -> Doc:
    """Return the sections of meta/variables.yml with values, and one of each role with its other variables."""
    of_roles = variables.read_options(ROOT)
    described = variables.read_sections(ROOT, of_roles)
    values = {name: (file, value) for file, found in group_vars().items() for name, value in found.items()}
    for section in described["sections"]:
        own: Doc = section["variables"]
        file: str = section.get("file", "")
        names = [*own, *(name for name in values if values[name][0] == file and name not in own)]
        if missing := [name for name in names if name not in own and name not in of_roles]:
            raise SystemExit(f"{file}: no argument spec of a role and not meta/variables.yml describes {missing}")
        section["variables"] = {
            name: {**(own.get(name) or of_roles[name]), **({"value": values[name][1]} if name in values else {})}
            for name in names
        }
    told = {name: it for section in described["sections"] for name, it in section["variables"].items()}
    for role, entry_points in role_docs().items():
        path = ROOT / "roles" / role / "defaults" / "main.yml"
        defaults = yaml.safe_load(path.read_text(encoding="utf-8"))
        options = {name: it for each in entry_points.values() for name, it in each.get("options", {}).items()}
        section = {"title": f"Role {role}", "intro": f"{entry_points['main']['short_description']}."}
        section["variables"] = {
            name: {**leave_out(told, option), **({"default": defaults[name]} if name in defaults else {})}
            for name, option in options.items()
            if name not in told
        }
        described["sections"].append(section)
    return described


def leave_out(told: Mapping[str, Doc], option: Doc) -> Doc:
    """Return an option without the keys that a variable of the inventory has as well, which is named instead."""
    keys = option.get("options", {})
    for name, other in told.items():
        theirs = other.get("options", {})
        own = {key: it for key, it in keys.items() if theirs.get(key) != it}
        if len(own) < len(keys) - 2:
            without = ", ".join(f"C({key})" for key in theirs if key not in keys)
            text = f"It has the keys of C({name}){f', without {without}' if without else ''}."
            return {**option, "description": [option["description"], text], "options": own}
    return option


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
    """Return the unit of a number: what its rule says, else the last word of its name."""
    endings = {
        "tok_s": "tok/s",
        "_percent": "percent",
        "_s": "seconds",
        "_mib": "MiB",
        "_gib": "GiB",
        "_bytes": "bytes",
    }
    return rules.RULES.get(name, rules.DEFAULT).unit or next(
        (unit for ending, unit in endings.items() if name.endswith(ending)), ""
    )


def bounds(name: str) -> str:
    """Return the bounds of a number that has a rule."""
    rule = rules.RULES.get(name, rules.DEFAULT)
    if rule.low or rule.high:
        return f"{rule.low} to {rule.high}" if rule.high else f"from {rule.low}"
    return ""


def shown(value: Any) -> bool:
    """Whether a variable's value can be printed in one line: it is neither computed nor a mapping."""
    return (
        value is not None and not isinstance(value, dict) and len(literal(value)) < 100 and "{{" not in literal(value)
    )


def head(name: str, option: Mapping[str, Any]) -> str:
    """Return the type of an option, its unit and bounds, and its value, its default or that it is required."""
    kind = option.get("type", "str")
    if kind == "list" and "elements" in option:
        kind = f"list of {option['elements']}"
    numeric = {option.get("type"), option.get("elements")} & {"int", "float", "raw"}
    words = [kind, unit(name), bounds(name)] if numeric else [kind]
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
    return tidy(template.render(variable_docs()))


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")
    measured.PAGE.write_text(measured.render(), encoding="utf-8")
    dashboard.FILE.write_text(dashboard.render(), encoding="utf-8")


if __name__ == "__main__":
    main()
