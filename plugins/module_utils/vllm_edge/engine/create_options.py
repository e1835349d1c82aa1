# SPDX-License-Identifier: Apache-2.0
"""The options of `docker create` that an engine may have: those that `docker-create.j2` writes, and no other.

Every way to a container ends here: a rendered generation, one of an earlier version, a file that a person has edited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..paths import RUN
from ..text import nearest, shown

_SIZE = r"[1-9]\d{0,15}[bkmgBKMG]?"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENGINE = r"[a-z0-9][a-z0-9-]{0,62}"
# Directories that are the host's own; an engine gets nothing that is directly below the root either.
_SYSTEM = r"(?!/(?:bin|boot|dev|etc|lib\w*|proc|root|run|sbin|sys|usr|var/run|var/lib/docker)/)"
_SOURCE = rf"{_SYSTEM}(?:/(?!\.\.?/)[^/,\"=]+)+"


class Rule(NamedTuple):
    """What an option may say, and how often it may stand."""

    pattern: str
    """The whole value; empty for an option without one."""
    wanted: str
    """The value in words, or an example."""
    most: int = 1
    required: bool = False


_MOUNTS = (
    rf"source={_SOURCE}/(?P<model>{_NAME}),target=/models/(?P=model),readonly",
    rf"source={_SOURCE}/{_ENGINE}/[0-9a-f]{{1,64}},target=/cache",
    rf"source=(?:/(?!\.\.?/)[^/,\"=]+)*/engines/{_ENGINE}/chat-template\.jinja,target=/chat-template\.jinja,readonly",
    rf"source={RUN}/engines/{_ENGINE},target=/run/api",
)
OPTIONS: dict[str, Rule] = {
    "--name": Rule(rf"vllm-{_ENGINE}", "vllm-<engine>", required=True),
    "--label": Rule(r"vllm-edge\.[a-z-]+=.+", "vllm-edge.<key>=<value>", 8, required=True),
    "--user": Rule(r"([1-9]\d{2,8}):\1", "the engines' user id from 100 on, twice: 8050:8050", required=True),
    "--read-only": Rule("", "", required=True),
    "--cap-drop": Rule("ALL", "ALL", required=True),
    "--security-opt": Rule("no-new-privileges", "no-new-privileges", required=True),
    "--network": Rule("none", "none", required=True),
    "--device": Rule(r"nvidia\.com/gpu=GPU-[0-9A-Fa-f-]{36}", "nvidia.com/gpu=GPU-<UUID>", 64),
    "--shm-size": Rule(_SIZE, "a size such as 4g"),
    "--ulimit": Rule(
        r"(?:core|memlock|nofile|nproc|stack)=(?:-1|\d{1,18})(?::(?:-1|\d{1,18}))?", "such as nofile=65536:65536", 8
    ),
    "--tmpfs": Rule(rf"/tmp:exec,mode=1777(?:,size={_SIZE})?", "/tmp:exec,mode=1777,size=<size>"),
    "--pids-limit": Rule(r"[1-9]\d{0,6}", "a number of processes from 1"),
    "--oom-score-adj": Rule(r"\d{1,3}|1000", "a score from 0 to 1000"),
    "--memory": Rule(_SIZE, "a size such as 96g"),
    "--memory-swap": Rule(_SIZE, "the size that --memory has"),
    "--mount": Rule(
        rf"type=bind,(?:{'|'.join(_MOUNTS)})",
        "type=bind of the weights at /models/<directory>,readonly, the engine's cache at /cache, the directory of its "
        "socket at /run/api, or its chat template",
        4,
    ),
    "--env": Rule(r"[A-Za-z_][A-Za-z0-9_]*=.*", "<NAME>=<value>", 200),
    "--env-file": Rule(rf"(?:/(?!\.\.?/)[^/,\"=]+)+/secrets/{_ENGINE}\.env", "<configuration>/secrets/<engine>.env"),
    "--log-driver": Rule("json-file", "json-file"),
    "--log-opt": Rule(r"max-(?:size=[1-9]\d{0,3}[km]|file=[1-9]\d?)", "max-size=16m or max-file=2", 2),
}
"""Each is written as one line, `--option=value`, with its whole name."""
PUBLISH = "--publish"
FORMER = {
    **OPTIONS,
    "--network": Rule(rf"(?!(?:host|bridge|default)$){_NAME}", "a network of the engines' own, not the host's"),
    PUBLISH: Rule(r"127\.0\.0\.1:[1-9]\d{3,4}:8000", "127.0.0.1:<port>:8000"),
}
"""The same for files of earlier releases, whose engines publish a port (docs/decisions/0120)."""

_IMAGE = re.compile(r"sha256:[0-9a-f]{64}|(?!sha256:)[a-z0-9][A-Za-z0-9._:/@-]{0,511}")
_REASONS = {
    "--rm": "the supervisor removes the container itself, after it has read why it ended",
    "--restart": "systemd restarts the engine; a second judge would hide crashes from it",
    "--gpus": "GPUs are given by CDI: --device=nvidia.com/gpu=<UUID>",
    "--privileged": "an engine needs no privileges on the host",
    PUBLISH: "an engine serves on a socket and has no network; the gateway answers on its port",
}
"""Why an option is none of these, where a person may expect it."""
LONGEST = 100_000
"""Characters of a line; Linux takes 131,071 bytes for one argument."""


def find_line_error(lines: Sequence[str]) -> str:
    """Return what is wrong with a line as such, of Docker's or of vLLM's arguments; empty if nothing is."""
    for number, line in enumerate(lines, 1):
        if line.strip() == "":
            return f"line {number} is blank: every line is one argument of `docker create`, blank ones are not"
        if not line.isprintable():
            return (
                f"line {number} is {shown(line)}: it holds a control character or another one that cannot be printed, "
                "with which a line looks like something else; write it without"
            )
        if len(line) > LONGEST:
            return f"line {number} has {len(line)} characters, the most is {LONGEST}; shorten the value"
    return ""


def publishes(options: Sequence[str]) -> bool:
    """Return whether these are the options of an earlier release, whose engines publish a port."""
    return any(line.startswith(f"{PUBLISH}=") for line in options)


def find_option_errors(options: Sequence[str], image: str, *, former: bool = False) -> Iterator[str]:
    """Yield what is wrong with the options and the image of a container, one phrase each.

    Args:
        options: the lines before the image.
        image: the line of the image.
        former: whether those of an earlier release are taken, too.
    """
    rules = FORMER if former and publishes(options) else OPTIONS
    values: dict[str, list[str]] = {}
    for line in options:
        option, equals, value = line.partition("=")
        rule = rules.get(option)
        if rule is None:
            yield f"{shown(line)} must not stand here: {_explain_unknown(option)}"
            continue
        if bool(equals) != bool(rule.pattern) or not re.fullmatch(rule.pattern, value):
            spelled = f"{option}=<value> on one line, the value {rule.wanted}" if rule.pattern else f"{option} alone"
            yield f"{shown(line)} is refused: it must be {spelled}"
        values.setdefault(option, []).append(value)
    for option, rule in rules.items():
        given = values.get(option, [])
        if len(given) > rule.most or (rule.required and not given):
            number = "one" if rule.most == 1 else f"{rule.most}"
            wanted = (
                f"exactly {number} is expected" if rule.required and rule.most == 1 else f"at most {number} may stand"
            )
            wanted = f"at least one is expected and {wanted}" if rule.required and rule.most > 1 else wanted
            shape = f"{option}=..." if rule.pattern else option
            yield f"{len(given)} lines `{shape}` before the image, {wanted}"
    yield from _find_repeated(values)
    if not _IMAGE.fullmatch(image):
        yield f"{shown(image)} is no image: a name such as vllm-edge/vllm:1, or sha256: and 64 digits, is expected"


def _explain_unknown(option: str) -> str:
    """Return why an option is refused, and what to do."""
    if option in _REASONS:
        return _REASONS[option]
    offered = nearest(option, OPTIONS) if option.startswith("--") else "options are written as --option=value."
    return (
        "an engine's container has the options that the role vllm_engine writes, and no other "
        f"({offered.rstrip('.')}); remove the line, or run site.yml, which renders the file anew"
    )


def _find_repeated(values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield names, keys and targets that stand twice: Docker would silently take one of them."""
    keys = {
        **{option: [value.split("=", 1)[0] for value in values.get(option, ())] for option in _KEYED},
        "--device": list(values.get("--device", ())),
        "--mount": [
            (value.partition(",target=/")[2].replace(",", "/")).split("/")[0] for value in values.get("--mount", ())
        ],
    }
    for option, names in keys.items():
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield f"{option} of {twice} stands twice; keep one"


_KEYED = ("--label", "--env", "--ulimit", "--log-opt")
