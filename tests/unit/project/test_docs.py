# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: linked pages, files, variables, commands, playbooks, entry points, directories."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.cli import parse as parse_command
from ansible.module_utils.vllm_edge.planning.serve_options import read as read_serve_options
from helpers import ROOT, list_files
from markdown_it import MarkdownIt
from markdown_it.token import Token

# Names of Ansible, vLLM and packages of clients, which no source of ours needs to know.
FOREIGN = re.compile(
    r"ANSIBLE_[A-Z_]+|encrypt_string|langchain_openai|cache_salt|served_model_name|xfs_quota|net_bind_service"
)
PACKAGE = "plugins/module_utils/vllm_edge"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


@functools.cache
def tracked(*patterns: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in list_files(*patterns) if path.is_file()]


PAGES = tracked("*.md")
# What was measured once names what was there then; the reference is generated from what it names.
WRITTEN = [page for page in PAGES if not page.startswith(("docs/evidence.md", "docs/reference/", ".github/"))]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def load(path: str) -> Any:
    return yaml.load(read(path), yaml.CSafeLoader) or {}


@functools.cache
def parse(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(read(page))


def tokens(page: str) -> list[Token]:
    return [part for token in parse(page) for part in (token, *(token.children or []))]


def headings(page: str) -> set[str]:
    """Anchors of a page's headings, as they are made on the web."""
    found = set()
    for token, following in itertools.pairwise(parse(page)):
        if token.type == "heading_open":
            text = re.sub(r"[`*]", "", following.content).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@functools.cache
def code(page: str) -> list[str]:
    """Everything in a page that is set as code."""
    return [token.content for token in tokens(page) if token.type in {"code_inline", "code_block", "fence"}]


def spelled_out(word: str) -> list[str]:
    """`a/{b,c}` as a/b and a/c."""
    if not (found := re.search(r"\{([^{}]*)\}", word)):
        return [word]
    return [
        path
        for part in found[1].split(",")
        for path in spelled_out(word[: found.start()] + part.strip() + word[found.end() :])
    ]


def find_in_code(pattern: str) -> list[tuple[str, str]]:
    """Page and match of a pattern in the code of every written page."""
    return [(page, each) for page in WRITTEN for text in code(page) for each in re.findall(pattern, text)]


def variables() -> set[str]:
    """Names that an operator can set with -e."""
    found: set[str] = set()
    for path in tracked("group_vars", "inventories/*/group_vars", "roles/*/defaults"):
        found |= load(path).keys()
    for path in tracked("roles/*/meta/argument_specs.yml"):
        for entry_point in load(path)["argument_specs"].values():
            found |= entry_point.get("options", {}).keys()
    for path in tracked("playbooks/*.yml"):
        # What a play asks for with a default, or only if it is set, needs no entry anywhere else.
        found |= set(re.findall(r"\b([a-z_]+) (?:\| default\(|is defined\b)", read(path)))
    for path in tracked("roles/*/templates/*.yml.j2"):
        # Files of variables that a play writes for an operator.
        found |= set(re.findall(r"^([a-z_]+):", read(path), re.MULTILINE))
    return found.union(*((section.get("variables") or {}) for section in load("meta/variables.yml")["sections"]))


def test_links_lead_somewhere() -> None:
    wrong = []
    for page, token in [(each, token) for each in PAGES for token in tokens(each)]:
        link = str(token.attrGet("href") or token.attrGet("src") or "")
        if not link or re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not target.exists() or (anchor and anchor not in headings(str(target.relative_to(ROOT)))):
            wrong.append(f"{page} links to {link}")
    assert wrong == []


@pytest.mark.slow
def test_paths_exist() -> None:
    places = {path.split("/")[0] for path in tracked() if "/" in path}
    # A file that a template makes counts as well.
    names = {Path(file).name.removesuffix(".j2") for file in tracked()}
    missing: dict[str, str] = {}
    # Without what surrounds a name in a command or a sentence.
    words = {(each, word.strip("'\"(),;:")) for each in WRITTEN for text in code(each) for word in text.split()}
    for page, path in {(page, path) for page, word in words for path in spelled_out(word)}:
        pattern = re.sub(r"<[^<>]*>", "*", path).rstrip("/.")
        if path.startswith(("inventories/<yours>/", "inventories/box")):
            continue  # the operator's own, beside ours
        if pattern.split("/")[0] in places and "/" in pattern:
            if not any(ROOT.glob(pattern)):
                missing[pattern] = page
        elif re.fullmatch(r"[\w-]+\.(py|yml|cfg|toml)", pattern) and pattern not in names:
            missing[pattern] = page
    # What git ignores appears when the project runs.
    command = ["git", "check-ignore", "--stdin"]
    ignored = subprocess.run(command, cwd=ROOT, input="\n".join(missing), capture_output=True, text=True, check=False)
    assert {path: page for path, page in missing.items() if path not in ignored.stdout.splitlines()} == {}


def test_names_occur_in_the_sources() -> None:
    """Everything that is no document and no test is a source."""
    no_source = ("tests/", "LICENSES/", "requirements-dev")
    paths = [path for path in tracked() if not path.endswith(".md") and not path.startswith(no_source)]
    known = {name for path in paths for name in re.findall(r"\w+", (ROOT / path).read_text(errors="replace"))}
    named = find_in_code(r"\b[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b")
    assert [(page, name) for page, name in named if name not in known and not FOREIGN.fullmatch(name)] == []


def test_variables_and_profiles_of_commands_exist() -> None:
    known = variables()
    assert [found for found in find_in_code(r"(?<!\S)-e ([A-Za-z_]+)=") if found[1] not in known] == []
    profiles = {*load("group_vars/all/profiles.yml")["serving_profiles"], "advised"}
    wrong = []
    for page, text in [(each, text) for each in WRITTEN for text in code(each)]:
        here = [line.strip() for line in text.partition("serving_profiles:\n")[2].splitlines()]
        for profile in re.findall(r"\bserving_profile[=:] ?([\w-]+)", text):
            if f"{profile}:" not in here and profile not in profiles:
                wrong.append(f"{page} chooses the profile {profile}")
    assert wrong == []


def test_commands_of_the_program_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    lines = [(page, line) for page in WRITTEN for text in code(page) for line in text.splitlines()]
    for page, line in lines:
        if found := re.match(r"\s*(?:sudo )?vllm-edge ((?!--help|--version)[a-z<-][^#|&;]*)", line):
            try:
                options = parse_command(shlex.split(re.sub(r"<[^<>]*>", "name", found[1])))
                if options.rest:
                    read_serve_options(options.rest, options.vllm)
            except (SystemExit, ValueError) as error:
                wrong.append(f"{page}: {line.strip()}: {error} {capsys.readouterr().err}")
    assert wrong == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert [found for found in find_in_code(r"(?:^|\n)\s*make ([a-z-]+)") if found[1] not in targets] == []


# ---- what operate.md, CONTRIBUTING and the READMEs of the roles have to name ------------------------------------


def first_cells(page: str) -> list[str]:
    """Code in the first column of all tables of a page, in order."""
    rows = re.findall(r"^\|(.*?)\|", read(page), re.MULTILINE)
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def list_directory(directory: str = "") -> set[str]:
    below = [path.removeprefix(directory) for path in tracked() if path.startswith(directory)]
    return {path.split("/")[0] + "/" * ("/" in path) for path in below}


def test_operate_names_every_playbook_and_the_stages_first() -> None:
    stages = [f"playbooks/{play['ansible.builtin.import_playbook']}" for play in load("playbooks/site.yml")]
    named = [name for name in first_cells("docs/operate.md") if name.startswith("playbooks/")]
    assert named[: len(stages)] == stages
    assert len(stages) == 9, "the page says that site.yml runs the first nine"
    there = {f"playbooks/{path.name}" for path in (ROOT / "playbooks").glob("*.yml")}
    assert sorted(named) == sorted(there - {"playbooks/site.yml"})


def test_contributing_names_every_directory_and_gives_every_part_of_the_package_a_layer() -> None:
    named = {name.split("/")[0] + "/" for name in re.findall(r"`([^`\s]+/[^`\s]*)`", read("CONTRIBUTING.md"))}
    assert {name for name in list_directory() if name.endswith("/")} - named == set()
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", read("CONTRIBUTING.md"), re.MULTILINE)
    parts = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(parts) == sorted(list_directory(f"{PACKAGE}/") - {"__init__.py", "py.typed"})
    layers = [int(layer) for layer, _ in rows]
    assert layers == sorted(layers)


def test_readme_of_a_role_names_its_entry_points_its_reference_and_only_tasks_that_exist() -> None:
    for role in ROLES:
        page = f"roles/{role}/README.md"
        assert load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"].keys() <= set(first_cells(page)), role
        assert f"(../../docs/reference/variables.md#role-{role})" in read(page), role
        named = {f"roles/{role}/tasks/{name}.yml" for name in first_cells(page)}
        assert named <= set(tracked(f"roles/{role}/tasks")), role


def test_continuous_integration_runs_every_test() -> None:
    github = [step.get("run") for job in load(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert "make test" in github
    assert "make test" in load(".gitlab-ci.yml")["test"]["script"]
    assert "exec make test" in read(".ci/run").splitlines()
