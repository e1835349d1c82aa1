# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: linked pages, files, variables, commands with their options."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.vllm_edge.cli import build_parser
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]

# Commands and settings of Ansible, and packages of clients, which no source of ours needs to know.
ANSIBLES = re.compile(r"ANSIBLE_[A-Z_]+|encrypt_string|langchain_openai")


def tracked(*patterns: str) -> list[str]:
    """Files of the repository, those not yet committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [line for line in listed.splitlines() if (ROOT / line).is_file()]


PAGES = tracked("*.md")
# What was measured once stays as it was written; the reference is generated from what it names.
WRITTEN = [page for page in PAGES if not page.startswith(("docs/evidence/", "docs/reference/", ".github/"))]


def tokens(page: str) -> Iterator[Token]:
    """Everything in a page, inline parts included."""
    for token in MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text()):
        yield token
        yield from token.children or []


def headings(page: str) -> set[str]:
    """Anchors of a page's headings, as they are made on the web."""
    found = set()
    parsed = MarkdownIt("commonmark").parse((ROOT / page).read_text())
    for token, following in itertools.pairwise(parsed):
        if token.type == "heading_open":
            text = re.sub(r"[`*]", "", following.content).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def code(page: str) -> list[str]:
    """Everything in a page that is set as code."""
    return [token.content for token in tokens(page) if token.type in {"code_inline", "code_block", "fence"}]


def words(page: str) -> list[str]:
    """What stands between spaces in a page's code, without what surrounds a name in a command or a sentence."""
    return [word.strip("'\"(),;:") for text in code(page) for word in text.split()]


def spelled_out(word: str) -> list[str]:
    """`a/{b,c}` as a/b and a/c."""
    if not (found := re.search(r"\{([^{}]*)\}", word)):
        return [word]
    return [
        path
        for part in found[1].split(",")
        for path in spelled_out(word[: found.start()] + part.strip() + word[found.end() :])
    ]


@functools.cache
def sources() -> str:
    """Text of everything that is no document and no test."""
    no_source = ("tests/", "LICENSES/", "requirements-dev")
    paths = [path for path in tracked() if not path.endswith(".md") and not path.startswith(no_source)]
    return "\n".join((ROOT / path).read_text(errors="replace") for path in paths)


@functools.cache
def variables() -> set[str]:
    """Names that an operator can set with -e."""
    found: set[str] = set()
    for path in tracked("group_vars", "inventories/*/group_vars", "roles/*/defaults"):
        found |= (yaml.safe_load((ROOT / path).read_text()) or {}).keys()
    for path in tracked("roles/*/meta/argument_specs.yml"):
        for entry_point in yaml.safe_load((ROOT / path).read_text())["argument_specs"].values():
            found |= entry_point.get("options", {}).keys()
    for path in tracked("playbooks/*.yml"):
        # What a play asks for with a default, or only if it is set, needs no entry anywhere else.
        found |= set(re.findall(r"\b([a-z_]+) (?:\| default\(|is defined\b)", (ROOT / path).read_text()))
    for path in tracked("roles/*/templates/*.yml.j2"):
        # Files of variables that a play writes for an operator.
        found |= set(re.findall(r"^([a-z_]+):", (ROOT / path).read_text(), re.MULTILINE))
    described = yaml.safe_load((ROOT / "tools/variables.yml").read_text())
    return found.union(*((section.get("variables") or {}).keys() for section in described["sections"]))


def ignored(path: str) -> bool:
    """Whether git ignores a path: something that appears when the project runs."""
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for token in tokens(page):
        link = str(token.attrGet("href") or token.attrGet("src") or "")
        if not link or re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page} links to {link}, which is not there"
        if anchor:
            assert anchor in headings(str(target.relative_to(ROOT))), f"{page} links to {link}, which no heading is"


@pytest.mark.parametrize("page", WRITTEN)
def test_paths_exist(page: str) -> None:
    places = {path.split("/")[0] for path in tracked() if "/" in path}
    for path in {path for word in words(page) for path in spelled_out(word)}:
        pattern = re.sub(r"<[^<>]*>", "*", path).rstrip("/.")
        if path.startswith(("inventories/<yours>/", "inventories/box")):
            continue  # the operator's own, beside ours
        if pattern.split("/")[0] in places and "/" in pattern:
            assert any(ROOT.glob(pattern)) or ignored(pattern), f"{page} names {path}, which is not there"
        elif re.fullmatch(r"[\w-]+\.(py|yml|cfg|toml)", pattern):
            # A file that a template makes counts as well.
            names = {Path(file).name.removesuffix(".j2") for file in tracked()}
            assert pattern in names, f"{page} names {path}, which is not there"


@pytest.mark.parametrize("page", WRITTEN)
def test_names_occur_in_the_sources(page: str) -> None:
    for text in code(page):
        for name in re.findall(r"\b[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b", text):
            known = ANSIBLES.fullmatch(name) or re.search(rf"\b{name}\b", sources())
            assert known, f"{page} names {name}, which no source knows"


@pytest.mark.parametrize("page", WRITTEN)
def test_variables_of_commands_exist(page: str) -> None:
    profiles = yaml.safe_load((ROOT / "group_vars/all/profiles.yml").read_text())["serving_profiles"]
    for text in code(page):
        for name in re.findall(r"(?<!\S)-e ([A-Za-z_]+)=", text):
            assert name in variables(), f"{page} sets {name}, which is no variable"
        for profile in re.findall(r"\bserving_profile[=:] ?([\w-]+)", text):
            here = f"  {profile}:" in text.partition("serving_profiles:\n")[2].splitlines()
            known = here or profile in {*profiles, "advised"}
            assert known, f"{page} chooses the profile {profile}, which is not there"


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_of_the_program_are_right(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (line for text in code(page) for line in text.splitlines()):
        if not (found := re.match(r"\s*(?:sudo )?vllm-edge ((?!--help|--version)[a-z<-][^#|&;]*)", line)):
            continue
        arguments = shlex.split(re.sub(r"<[^<>]*>", "name", found[1]))
        try:
            build_parser().parse_args(arguments)
        except SystemExit:
            raise AssertionError(f"{page}: {line.strip()}: {capsys.readouterr().err}") from None


@pytest.mark.parametrize("page", WRITTEN)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in code(page):
        for target in re.findall(r"(?:^|\n)\s*make ([a-z-]+)", text):
            assert target in targets, f"{page} says `make {target}`, which the Makefile does not know"
