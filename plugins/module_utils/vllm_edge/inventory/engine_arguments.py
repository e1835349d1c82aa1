# SPDX-License-Identifier: Apache-2.0
"""Checks of the `extra_args` of an engine, which are read the way vLLM's own parser reads them.

The sentences of `find_argument_errors` hold for every release of vLLM. Those of `find_release_errors` hold for one
release whose options are recorded in vllm_arguments. Where no release is named, it is that of vllm_image_base.
`where` is the variable, with which each sentence begins, and `keys` are those that an engine may have.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ..text import describe_invalid_choice, nearest, shown
from .engine_inputs import convert_to_yaml, describe_unknown_key, find_control_character, select_texts
from .vllm_arguments import RELEASES, VERSION


class Option(NamedTuple):
    name: str
    aliases: tuple[str, ...]
    """Other spellings, the `--no-` form among them."""
    takes: str
    """Values that follow it: `none`, `optional`, `one`, `many`."""
    kind: str
    """What a value is: `text`, `int`, `float`."""
    choices: tuple[str, ...]
    repeatable: bool


def parse_options(groups: Mapping[str, str], choices: Mapping[str, str]) -> Iterator[Option]:
    """Yield the recorded options; `vllm_arguments` says in which form they are recorded."""
    for group, names in groups.items():
        *repeatable, takes, kind = ["none", "text"] if group == "switch" else group.split()
        for spelled in names.split():
            name, *aliases = spelled.split("|")
            negated = [f"--no-{name}"] if group == "switch" else []
            allowed = tuple(choices.get(name, "").split())
            yield Option(f"--{name}", (*negated, *aliases), takes, kind, allowed, bool(repeatable))


@functools.cache
def read_spellings(version: str) -> dict[str, Option]:
    options = parse_options(RELEASES[version]["options"], RELEASES[version]["choices"])
    return {spelled: option for option in options for spelled in (option.name, *option.aliases)}


# Keys of an engine whose name differs from that of the option.
KEY_OF_OPTION: dict[str, str] = {"--served-model-name": "served_names", "--model": "model"}

# Options that the role sets, or that the way engines run rules out, with what to use instead.
OURS: dict[str, str] = {
    "--host": "an engine has no network, and serves on a socket; remove it",
    "--port": "an engine serves on a socket; the key port says where the gateway answers for it; remove it",
    "--uds": "the role sets it to the socket that the gateway connects to; remove it",
    "--grpc": "engines are reached over HTTP; remove it",
    "--grpc-port": "an engine has no network; remove it",
    "--headless": "an engine without an API would never be ready; remove it",
    "--root-path": "health and completions are requested at the root; remove it",
    "--ssl-keyfile": "an engine serves on a socket; the gateway speaks TLS; remove it",
    "--ssl-certfile": "an engine serves on a socket; the gateway speaks TLS; remove it",
    "--api-key": (
        "it would be readable in the unit's files, and the host's own checks send none; the gateway asks clients for a "
        "key of their own; remove it"
    ),
    "--enable-auto-tool-choice": "the key tool_call_parser turns it on; use that one",
    "--config": "a file would hide arguments from plan and validation; write them here",
    "--revision": "the key revision of the model says which commit is downloaded and served; use that one",
    "--download-dir": "weights are downloaded before the engine starts, to model_weights_root; remove it",
    "--hf-token": "engines reach no hub; for the download use model_weights_token_file",
    "--data-parallel-size": "one engine has tensor_parallel_size x pipeline_parallel_size GPUs; make a second engine",
    "--shutdown-timeout": "it follows from vllm_engine_stop_timeout_s; set that, for all engines",
    "--device-ids": "the key gpus says which GPUs the engine gets; use that one",
}

_NO_DRAFT = 'leave "model" out, with "method": "mtp" where the checkpoint has layers for it, and else "ngram"'
_NO_ADAPTER = "serve weights into which the adapter was merged"
# Options that name files besides those of the model, with what to use instead.
FOREIGN_FILES: dict[str, str] = {
    **dict.fromkeys(("--speculative-config", "--spec-model"), _NO_DRAFT),
    **dict.fromkeys(("--lora-modules", "--default-mm-loras"), _NO_ADAPTER),
}

# Options of earlier releases that the recorded release no longer has, with what to do.
FORMER: dict[str, str] = {
    "--swap-space": "there is no swap to host memory any more; remove it",
    "--disable-log-requests": "requests are logged only with --enable-log-requests; remove it",
    "--guided-decoding-backend": "it is called --structured-outputs-config.backend now",
    "--enable-reasoning": "the key reasoning_parser is enough; use that one",
    "--task": "it is called --runner now, with pooling for embeddings and rewards",
    "--num-scheduler-steps": "scheduling is asynchronous by itself; remove it",
    "--device": "the image decides it; remove it",
}


def _read_key_choices(version: str) -> dict[str, tuple[str, ...]]:
    """Return the values that keys of an engine may have in a recorded release; without those that take any."""
    spelled = read_spellings(version)
    choices = {
        **{f"{kind}_parser": RELEASES[version][f"{kind}_parsers"].split() for kind in ("tool_call", "reasoning")},
        **{key: spelled[f"--{key.replace('_', '-')}"].choices for key in ("dtype", "kv_cache_dtype")},
    }
    return {key: tuple(values) for key, values in choices.items() if values}


# Options whose value must not be printed.
SECRET = re.compile(r"^(--api[-_]key|--hf[-_]token)([= ]).*", re.DOTALL)


class Argument(NamedTuple):
    """One option of extra_args."""

    text: str
    """The option with its values, as written."""
    name: str
    """Its name as vLLM spells it, without what follows a dot."""
    dotted: str
    """What follows the name from the first dot on; empty for none."""
    option: Option | None
    """The option in the recorded release; None if that does not have it."""
    glued: bool
    """Whether a value follows after an equals sign."""
    values: tuple[str, ...]


def quote(text: str) -> str:
    """Return an argument for printing, without the value of a secret."""
    return shown(SECRET.sub(r"\1\2...", text))


def is_option(item: str) -> bool:
    """Return whether a word is an option for argparse: it begins with a dash and is no number."""
    return item.startswith("-") and re.fullmatch(r"-\d+(\.\d+)?|-", item) is None


def find_option(name: str, version: str = VERSION) -> Option | None:
    """Return the option of a name, of an alias, or of an abbreviation that only one option has; otherwise None."""
    known = read_spellings(version)
    if name.startswith("-O"):
        return known["--optimization-level"]
    if name in known or not name.startswith("--"):
        return known.get(name)
    begun = {option for spelled, option in known.items() if spelled.startswith(name)}
    return begun.pop() if len(begun) == 1 and len(name) > 4 else None


def parse_arguments(items: list[str], version: str = VERSION) -> tuple[list[Argument], list[str]]:
    """Return the options with their values, and the words that belong to no option."""
    found: list[Argument] = []
    stray: list[str] = []
    position = 0
    while position < len(items):
        item = items[position]
        position += 1
        if not is_option(item):
            stray.append(item)
            continue
        written, equals, value = item.partition("=")
        base, dot, rest = written.partition(".")
        name = base.replace("_", "-") if base.startswith("--") else base
        option = find_option(name, version)
        values = [value] if equals else [name[2:]] if re.fullmatch(r"-O.+", name) else []
        room = {"none": 0, "optional": 1, "one": 1, "many": len(items)}[option.takes if option else "many"]
        while (
            not equals
            and len(values) < (1 if dot else room)
            and position < len(items)
            and not is_option(items[position])
        ):
            values.append(items[position])
            position += 1
        text = " ".join([item, *(values if not equals and not re.fullmatch(r"-O.+", name) else [])])
        found.append(Argument(text, name, dot + rest, option, bool(equals), tuple(values)))
    return found, stray


def find_argument_errors(where: str, engine: Mapping[str, Any], keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with extra_args in every release of vLLM."""
    items = select_texts(engine.get("extra_args"))
    faults = {item: fault for item in items if (fault := _find_fault(item))}
    for item, fault in faults.items():
        yield f"{where}.extra_args: {quote(item)} {fault}."
    found, stray = parse_arguments([item for item in items if item not in faults])
    for word in stray:
        yield (
            f"{where}.extra_args: {shown(word)} belongs to no option; options begin with --, "
            f"and the model is the key model."
        )
    for argument in found:
        yield from _find_reserved_options(where, argument, engine, keys)
        yield from _find_foreign_files(where, argument)
    yield from _find_repeated_options(where, found)


def _find_repeated_options(where: str, found: list[Argument]) -> Iterator[str]:
    """Yield options that are given twice, although vLLM takes one value."""
    seen: dict[str, Argument] = {}
    for argument in found:
        name = argument.option.name if argument.option else argument.name
        place = name + argument.dotted
        other = seen.get(place) or (seen.get(name) if argument.dotted else None)
        if other and not (argument.option and argument.option.repeatable):
            yield (
                f"{where}.extra_args: {quote(other.text)} and {quote(argument.text)} are two sources for {name}, "
                f"of which vLLM silently takes the last; keep one."
            )
        seen[place] = argument


def find_recorded_release(release: str) -> str:
    """Return the recorded release that stands for a release: itself, or the newest before it, or the oldest of all.

    A release is numbers with dots between them; where it is empty, because it is not known, VERSION stands for it.
    """
    number = [int(part) for part in release.split(".") if part]
    older = [each for each in RELEASES if [int(part) for part in each.split(".")] <= number]
    return (older[-1] if older else next(iter(RELEASES))) if number else VERSION


def find_release_errors(
    where: str, engine: Mapping[str, Any], keys: Mapping[str, Any], version: str = VERSION
) -> Iterator[str]:
    """Yield what a recorded release of vLLM does not know. `version` is a key of vllm_arguments.RELEASES."""
    for key, choices in _read_key_choices(version).items():
        value = engine.get(key)
        if isinstance(value, str) and value and value not in choices:
            yield f"{where}.{key}: vLLM {version} knows no {shown(value)}; {nearest(value, choices)}"
    items = [item for item in select_texts(engine.get("extra_args")) if not _find_fault(item)]
    for argument in parse_arguments(items, version)[0]:
        option = argument.option
        reserved = option and (option.name in OURS or option.name in KEY_OF_OPTION or derive_key(option) in keys)
        if not reserved:
            yield from find_option_errors(f"{where}.extra_args: ", argument, keys, version)


def find_option_errors(place: str, argument: Argument, keys: Collection[str], version: str) -> Iterator[str]:
    """Yield why a recorded release of vLLM does not take an argument; each sentence begins with `place`."""
    if argument.option is None:
        yield f"{place}vLLM {version} knows no {shown(argument.name)}; {_suggest_instead(argument.name, keys, version)}"
    else:
        yield from _find_value_errors(f"{place}{quote(argument.text)}", argument, argument.option)


def describe_unknown_engine_key(where: str, key: str, keys: Mapping[str, Any]) -> str:
    """Return the sentence for a key that no role reads; it may be an option that vLLM has or had."""
    spelled = key.lstrip("-").replace("-", "_").lower()
    dashed = "--" + spelled.replace("_", "-")
    if spelled in keys:
        return describe_unknown_key(where, key, keys)
    if dashed in FORMER:
        return f"{where}.{key}: vLLM {VERSION} has no {dashed}: {FORMER[dashed]}."
    if dashed in OURS:
        return f"{where}.{key}: nothing reads this key: {OURS[dashed]}."
    option = find_option(dashed)
    if option is None:
        return describe_unknown_key(where, key, keys)
    if option.name in KEY_OF_OPTION:
        return f"{where}.{key}: nothing reads this key; it is called {KEY_OF_OPTION[option.name]} here."
    if derive_key(option) in keys:
        return f"{where}.{key}: nothing reads this key; vLLM's name for it is {derive_key(option)}."
    example = option.name if option.takes == "none" else f"{option.name}=..."
    return f"{where}.{key}: nothing reads this key, though vLLM knows it; write it into extra_args, as {example}."


def derive_key(option: Option) -> str:
    return option.name.removeprefix("--").replace("-", "_")


def _find_fault(item: str) -> str:
    """Return why an item cannot be in extra_args, or an empty string. Items are lines of a file; no shell reads
    them."""
    value = item.partition("=")[2] if is_option(item) else item
    if not item.strip():
        return "is empty; remove it"
    if fault := find_control_character(item):
        return f"{fault}, and each item is one line of the unit's file; write one item each"
    if value[:1] in ("{", "["):
        try:
            json.loads(value)
        except ValueError as error:
            return f"is not JSON ({error}); write it as in '--compilation-config={{\"mode\": 3}}', in single quotes"
        return ""
    if re.search(r"\s", item):
        return "holds a space, and nothing splits it; write one item for each word"
    odd = sorted(set(re.findall(r"[$`;|&<>()\\\"'!#]", item)))
    return f"holds {' '.join(odd)}, and no shell reads it; write the value itself" if odd else ""


def _find_reserved_options(
    where: str, argument: Argument, engine: Mapping[str, Any], keys: Mapping[str, Any]
) -> Iterator[str]:
    """Yield options that have a key of their own, or that the role decides."""
    option = argument.option
    if option is None or argument.dotted:
        return
    key = KEY_OF_OPTION.get(option.name) or derive_key(option)
    if key in keys and option.name != "--port":
        if key in engine:
            yield (
                f"{where}.extra_args: {quote(argument.text)} and the key {key} ({shown(engine[key])}) are two sources "
                f"for one thing; keep the key."
            )
        else:
            value = str(not argument.name.startswith("--no-")).lower() if option.takes == "none" else argument.values
            example = value if isinstance(value, str) else convert_to_yaml(value[0]) if value else "..."
            yield (
                f"{where}.extra_args: {quote(argument.text)} has a key of its own, which plan and report read; "
                f"write {key}: {example}."
            )
    elif option.name in OURS:
        yield f"{where}.extra_args: {quote(argument.text)} is not free to choose: {OURS[option.name]}."


def _find_foreign_files(where: str, argument: Argument) -> Iterator[str]:
    """Yield drafts and adapters that an engine cannot read: it has no network, and the files of its own model only."""
    name = argument.option.name if argument.option else argument.name
    for value in argument.values if name in FOREIGN_FILES else ():
        try:
            found = json.loads(value)
        except ValueError:
            found = value
        if argument.dotted or not isinstance(found, dict):
            named: list[Any] = [value.partition("=")[2] if name == "--lora-modules" else value]
            named = named if argument.dotted in ("", ".model") or name == "--default-mm-loras" else []
        else:
            named = [*found.values()] if name == "--default-mm-loras" else [found.get("model"), found.get("path")]
        for file in named:
            if isinstance(file, str) and not re.fullmatch(r"|/models/.+|\[?ngram\]?|suffix", file):
                yield (
                    f"{where}.extra_args: {quote(argument.text)} names {shown(file)}, and an engine has no network, "
                    f"and below /models the files of its own model only; {FOREIGN_FILES[name]}."
                )


def _suggest_instead(name: str, keys: Collection[str], version: str) -> str:
    """Return what to write instead of an option that the release does not know."""
    if name in FORMER:
        return f"{FORMER[name]}."
    known = read_spellings(version)
    offered = nearest(name, known)
    for option in (known[word] for word in re.findall(r"--[a-z0-9-]+", offered)):
        if derive_key(option) in keys:
            return f"did you mean the key {derive_key(option)}?"
    return offered


def _find_value_errors(text: str, argument: Argument, option: Option) -> Iterator[str]:
    """Yield values that an option of the recorded release does not take; each sentence begins with `text`."""
    if option.takes == "none" and argument.glued:
        negated = "".join(f" or {alias}" for alias in option.aliases if alias.startswith("--no-"))
        yield f"{text}: {option.name} takes no value; write {option.name}{negated}."
    elif option.takes in ("one", "many") and not argument.values:
        yield f"{text}: {option.name} needs a value; write {option.name}=..."
    elif not argument.dotted:
        for value in argument.values:
            if option.kind == "int" and not re.fullmatch(r"[+-]?\d+", value):
                yield f"{text}: {option.name} takes a whole number, and {shown(value)} is none."
            elif option.kind == "float" and not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", value):
                yield f"{text}: {option.name} takes a number, and {shown(value)} is none."
            elif option.choices and value not in option.choices:
                yield f"{text}: {describe_invalid_choice(value, option.choices)}"
