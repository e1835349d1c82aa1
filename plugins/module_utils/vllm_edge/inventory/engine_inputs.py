# SPDX-License-Identifier: Apache-2.0
"""Checks of keys, types, units and names of an engine, a model or a profile.

The argument specs of the roles and meta/variables.yml define which keys exist and their types, `rules.py` units,
ranges and what a name may contain. Every function yields one sentence for each mistake: the variable (`where`), the
value, why it is wrong, and what would be right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..names import VARIABLE_NAME
from ..redaction import find_secrets
from ..text import describe_invalid_choice, nearest, shown
from .rules import DEFAULT, PLAIN_NAME, RULES, Rule

Spec = Mapping[str, Mapping[str, Any]]
"""The keys of a mapping, each with `type`, `elements`, `required` and `choices` as in an argument spec."""

# Environment variables that the role sets for every engine, or that `gpus` decides.
OUR_ENVIRONMENT: dict[str, str] = {
    "HOME": "the role sets it to a directory that lasts as long as the container",
    "USER": "the role sets it to the name of the engines' user, which the image does not know",
    "LOGNAME": "the role sets it to the name of the engines' user, which the image does not know",
    "PYTHONNOUSERSITE": "the role sets it, as an engine must not load code that it wrote itself",
    "PYTHONSAFEPATH": "the role sets it, as an engine must not load code that it wrote itself",
    "XDG_CACHE_HOME": "the role sets it to the engine's cache",
    "CUDA_CACHE_PATH": "the role sets it to the engine's cache",
    "FLASHINFER_WORKSPACE_BASE": "the role sets it to the engine's cache",
    "VLLM_API_KEY": (
        "the canary, the gateway and the probe of idle engines send no key, so a switch to the engine would fail; the "
        "gateway asks clients for a key of their own"
    ),
    "VLLM_CACHE_ROOT": "the role sets it to the engine's cache",
    "TORCHINDUCTOR_CACHE_DIR": "the role sets it to the engine's cache",
    "TRITON_CACHE_DIR": "the role sets it to the engine's cache",
    "HF_HUB_OFFLINE": "the role sets it, as engines need nothing from a network",
    "VLLM_NO_USAGE_STATS": "the role sets it, as engines need nothing from a network",
    "DO_NOT_TRACK": "the role sets it, as engines need nothing from a network",
    "CUDA_VISIBLE_DEVICES": "gpus of the engine says which GPUs it gets",
    "NVIDIA_VISIBLE_DEVICES": "gpus of the engine says which GPUs it gets",
}

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose value is a secret."""
NO_SECRET = re.compile(r"TOKENS|TOKENIZ|BYPASS", re.IGNORECASE)
"""Parts of names that make no secret: numbers of tokens, tokenizers."""
SHORTEST_SECRET, LONGEST_SECRET = 8, 16_384
"""Characters of a secret. A shorter one would be masked in ordinary text, too; Docker reads lines up to 64 KiB."""

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")


def select_texts(value: Any) -> list[str]:
    """Return the texts in a list; what is no text is refused elsewhere."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def select_mappings(value: Any) -> dict[str, Mapping[str, Any]]:
    """Return the entries of a mapping that are mappings themselves; the others are refused elsewhere."""
    return {name: item for name, item in value.items() if isinstance(item, dict)} if isinstance(value, dict) else {}


def find_owners(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return the names by the item that each of them has, in the order of the pairs."""
    owners: dict[Any, list[str]] = {}
    for item, name in pairs:
        owners.setdefault(item, []).append(name)
    return owners


def _find_rule(key: str) -> Rule:
    return RULES.get(key, DEFAULT)


def find_name_errors(where: str, name: str, what: str) -> Iterator[str]:
    """Yield a sentence if a key cannot be a file name on the host; `what` is what it names, such as `an engine`."""
    if not re.fullmatch(PLAIN_NAME, name):
        yield (
            f"{where}: {shown(name)} cannot be the name of {what}, since it becomes a file name on the host; "
            f"write letters, digits and . _ -, the first one a letter or digit."
        )


def find_key_errors(where: str, given: Mapping[str, Any], spec: Spec, variable: str = "") -> Iterator[str]:
    """Yield missing keys, and values of a wrong type or form. Unknown keys are left to `describe_unknown_key`.

    `variable` is the one whose rules, `<variable>.<key>`, go before those of an engine's key of the same name.
    """
    for key, option in spec.items():
        rule = f"{variable}.{key}" if f"{variable}.{key}" in RULES else key
        if key in given:
            yield from find_value_errors(f"{where}.{key}", rule, given[key], option)
        elif option.get("required"):
            yield f"{where}.{key}: is missing; {_describe_expected(rule, option)}."


def find_unknown_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    for key in given:
        if key not in known:
            yield describe_unknown_key(where, str(key), known)


def describe_unknown_key(where: str, key: str, known: Collection[str]) -> str:
    spelled = key.lstrip("-").replace("-", "_")
    if spelled in known:
        return f"{where}.{key}: nothing reads this key; keys are written with underscores: {spelled}."
    return f"{where}.{key}: nothing reads this key; {nearest(spelled, known)}"


def parse_text(value: Any, option: Mapping[str, Any]) -> Any:
    """Return the number, boolean or list that a text of `-e name=value` means; what means none stays as it is."""
    kind = option["type"]
    if kind == "list":
        words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        each = {"type": option.get("elements", "str")}
        return [parse_text(word.strip() if isinstance(word, str) else word, each) for word in words if word != ""]
    if kind == "bool" and isinstance(value, str | int):
        return _read_boolean(value)
    if kind in ("int", "float") and isinstance(value, str):
        if re.fullmatch(r"\d+", value):
            return int(value)
        if kind == "float" and re.fullmatch(r"\d+\.\d+", value):
            return float(value)
    return value


def find_value_errors(where: str, key: str, value: Any, option: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a value; `key` is the name of its rule, `option` its entry in the argument spec."""
    kind = option.get("type", "str")
    if value is None:
        yield f"{where}: has no value; {_describe_expected(key, option)}, or remove the line."
    elif kind in ("int", "float"):
        yield from find_number_errors(where, key, value, whole=kind == "int")
    elif kind == "bool":
        yield from _find_boolean_errors(where, value)
    elif kind == "list":
        yield from _find_list_errors(where, key, value, option)
    elif kind == "dict" and not isinstance(value, dict):
        told = "" if key == "secret_env" else f"{shown(value)} "  # it may be the secret itself, by mistake
        yield f"{where}: {told}is not a mapping; {_find_rule(key).remedy or 'write keys with values'}."
    elif kind == "dict":
        yield from _find_entry_errors(where, key, value)
    else:
        yield from _find_text_errors(where, key, value, option)


def find_number_errors(where: str, key: str, value: Any, *, whole: bool) -> Iterator[str]:
    """Yield a sentence if a value is no number, has a unit, or is out of range.

    `key` is the name of the rule, `whole` whether decimals are wrong.
    """
    quantity = _find_rule(key)
    usual = _describe_number(quantity, whole)
    if isinstance(value, str):
        yield f"{where}: {shown(value)} is text, not a number; {_suggest_number(value, quantity, whole) or usual}."
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        yield f"{where}: {shown(value)} is not a number; {usual}."
    elif whole and not isinstance(value, int):
        remedy = f"write {int(value)}" if value == int(value) else usual
        yield f"{where}: {shown(value)} is not a whole number; {remedy}."
    elif fault := _find_bound(value, quantity):
        yield f"{where}: {shown(value)} is {fault}" + ("" if fault.endswith("?") else f"; {usual}.")


def _find_bound(value: float, quantity: Rule) -> str:
    """Return which bound a number is beyond, perhaps with a question that ends the sentence, or an empty string."""
    fraction = quantity.unit == "fraction"
    if fraction and 1 < value <= 100:
        return f"above 1, and it is a fraction, not percent; did you mean {value / 100:.2f}?"
    if quantity.unit == "port" and 0 < value < quantity.low:
        return "below 1024, where ports are privileged and belong to the system"
    if value < quantity.low or (fraction and value == 0):
        return f"too small, the least is {'above 0' if fraction else f'{quantity.low}'}"
    return f"above {quantity.high:g}" if quantity.high is not None and value > quantity.high else ""


def _read_boolean(value: str | int) -> Any:
    word = str(value).strip().lower()
    return True if word in _TRUE else False if word in _FALSE else value


def _find_boolean_errors(where: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        return
    meant = _read_boolean(value) if isinstance(value, str | int) else value
    if not isinstance(meant, bool):
        yield f"{where}: {shown(value)} is neither true nor false; write true or false."
    elif isinstance(value, str):
        yield (
            f"{where}: {shown(value)} is text, and any text that is not empty counts as true; "
            f"write {shown(meant)} without quotes."
        )
    else:
        yield f"{where}: {shown(value)} is a number; write {shown(meant)}."


def _find_list_errors(where: str, key: str, value: Any, option: Mapping[str, Any]) -> Iterator[str]:
    arguments = key == "extra_args"  # engine_arguments checks the texts among these together
    if not isinstance(value, list):
        words = value.replace(",", " ").split() if isinstance(value, str) else [str(value)]
        plain = words and not arguments and all(re.fullmatch(DEFAULT.pattern, word) for word in words)
        remedy = f"write [{', '.join(words)}]" if plain else "write one item per line, each after a dash"
        yield f"{where}: {shown(value)} is not a list; {remedy}."
        return
    if not value and not arguments and not _find_rule(key).may_be_empty:
        yield f"{where}: is an empty list; {_describe_expected(key, option)}."
    for position, item in enumerate(value):
        if not (arguments and isinstance(item, str)):
            yield from find_value_errors(f"{where}[{position}]", key, item, {"type": option.get("elements", "str")})
    if not arguments:
        yield from find_repeated(where, value, "each may be named once")


def find_repeated(where: str, items: list[Any], rule: str) -> Iterator[str]:
    for item in {shown(item): item for item in items if items.count(item) > 1}.values():
        yield f"{where}: {shown(item)} is listed {items.count(item)} times; {rule}."


def _find_entry_errors(where: str, key: str, value: Mapping[Any, Any]) -> Iterator[str]:
    """Yield what is wrong with the entries of a mapping of an engine or of vllm_engine_request_limits."""
    for name, entry in value.items():
        if key == "limit_mm_per_prompt":
            yield from _find_limit_error(where, name, entry)
        elif key == "vllm_engine_request_limits":
            if not isinstance(name, str) or not re.fullmatch(r"VLLM_MAX_[A-Z0-9_]+", name):
                yield f"{where}: {shown(name)} is no limit of vLLM; their names begin with VLLM_MAX_."
            elif isinstance(entry, bool) or not isinstance(entry, int) or not 0 < entry <= 10**12:
                yield f"{where}.{name}: {shown(entry)} is not a limit; write a whole number from 1."
        elif key in ("extra_env", "secret_env") and (wrong := _find_name_error(where, name)):
            yield wrong
        elif key == "extra_env":
            yield from _find_variable_error(f"{where}.{name}", name, entry)
        elif key == "secret_env" and (not isinstance(entry, str) or not re.fullmatch(PLAIN_NAME, entry)):
            yield (
                f"{where}.{name}: its value is no name of a secret, and is not shown; write a key of "
                f"vllm_engine_secrets: letters, digits and . _ -, the first one a letter or digit."
            )


def _find_limit_error(where: str, name: Any, limit: Any) -> Iterator[str]:
    """Yield why vLLM does not take a limit: it is a number of items of a modality, or a mapping with `count`."""
    count = limit.get("count", 999) if isinstance(limit, dict) else limit
    if name not in ("image", "video", "audio"):
        yield f"{where}: {describe_invalid_choice(name, ('image', 'video', 'audio'))}"
    elif isinstance(count, bool) or not isinstance(count, int) or count < 0:
        yield f"{where}.{name}: {shown(limit)} is not a number of items; write a whole number from 0."


def _find_variable_error(where: str, name: str, text: Any) -> Iterator[str]:
    told = shown(text)
    if SECRET.search(NO_SECRET.sub("", name)) or find_secrets([str(text)]):
        yield (
            f"{where}: by its name or form its value is a secret, and extra_env stands in files and on command lines "
            f"of the host; put the value into vllm_engine_secrets, and its name there into secret_env: "
            f"{{{name}: <name>}}."
        )
    elif isinstance(text, bool):
        yield (
            f"{where}: {told} would reach the engine as {str(text)!r}; write the text that you mean in quotes, such "
            f"as '1'."
        )
    elif not isinstance(text, str | int | float):
        yield f"{where}: {told} is no text; write one line in quotes, or remove it."
    elif fault := find_control_character(str(text)):
        yield f"{where}: {told} {fault}, and a variable of a container is one line; write one line."


def _find_name_error(where: str, name: Any) -> str:
    """Return why a name cannot be that of an environment variable of an engine; empty if it can."""
    if not isinstance(name, str) or not re.fullmatch(VARIABLE_NAME, name):
        return (
            f"{where}: {shown(name)} cannot be the name of an environment variable; write letters, digits and _, "
            f"such as VLLM_LOGGING_LEVEL."
        )
    if name in OUR_ENVIRONMENT:
        return f"{where}.{name}: is not free to choose, {OUR_ENVIRONMENT[name]}; remove it."
    return ""


def find_secret_fault(value: object) -> str:
    """Return why a value cannot be a secret of an engine, without the value; empty if it can."""
    if not isinstance(value, str):
        return "has no value" if value is None else "is no text; put it in quotes"
    if len(value) < SHORTEST_SECRET:
        return f"has {len(value)} characters, at least {SHORTEST_SECRET} are expected"
    if len(value) > LONGEST_SECRET:
        return f"has {len(value)} characters, at most {LONGEST_SECRET} are possible"
    if re.search(r"[\u0080-\u009f\u2028\u2029\ud800-\udfff]", value):
        return "holds a character that no line of a file may have"
    fault = find_control_character(value)
    return f"{fault}, and a variable of a container is one line" if fault else ""


def _find_text_errors(where: str, key: str, value: Any, option: Mapping[str, Any]) -> Iterator[str]:
    choices, rule = option.get("choices", ()), _find_rule(key)
    if choices:
        if value not in choices:
            yield f"{where}: {describe_invalid_choice(value, choices)}"
    elif isinstance(value, bool):
        yield f"{where}: YAML reads this word as {shown(value)}, and a text is expected; put the word in quotes."
    elif isinstance(value, int | float):
        yield f"{where}: {shown(value)} is a number, and a text is expected; put it in quotes."
    elif not isinstance(value, str):
        yield f"{where}: {shown(value)} is not a text; {_describe_expected(key, option)}."
    elif not value.strip():
        if not (value == "" and rule.may_be_empty):
            yield f"{where}: is empty; {_describe_expected(key, option)}."
    elif not re.fullmatch(rule.pattern, value):
        remedy = _suggest_repair(key, value) or rule.remedy
        yield (
            f"{where}: {shown(value)} {_find_fault(value)}; "
            f"{remedy or 'it is one word of a command line: letters, digits and . _ : / -'}."
        )


def find_control_character(value: str) -> str:
    """Return that a text has a character which no line of a file may have, or an empty string."""
    if "\0" in value:
        return "holds a NUL"
    return "holds a line break or control character" if re.search(r"[\x00-\x1f\x7f]", value) else ""


def _find_fault(value: str) -> str:
    if fault := find_control_character(value):
        return fault
    if ".." in value.split("/") or value.startswith("/"):
        return "leads out of its directory"
    if re.search(r"\s", value):
        return "holds a space"
    odd = sorted(set(re.sub(r"[A-Za-z0-9._:/-]", "", value)))
    return f"holds {' '.join(odd)}" if odd else "does not have the expected form"


def _suggest_repair(key: str, value: str) -> str:
    address = re.fullmatch(rf"https?://[^/]+/({PLAIN_NAME}/{PLAIN_NAME})/?", value)
    return f"write {address.group(1)}; the hub's address is model_weights_endpoint" if key == "repo" and address else ""


def _describe_expected(key: str, option: Mapping[str, Any]) -> str:
    kind, rule = option.get("type", "str"), _find_rule(key)
    if option.get("choices"):
        return f"write one of {', '.join(option['choices'])}"
    if kind in ("int", "float"):
        return _describe_number(rule, kind == "int")
    if kind == "bool":
        return "write true or false"
    if remedy := (rule.missing if kind == "list" else "") or rule.remedy:
        return remedy
    description = option.get("description", "")
    first = re.sub(r"[A-Z]\(([^)]{0,200})\)", r"\1", description if isinstance(description, str) else description[0])
    return f"it is: {first.strip().rstrip('.')}" if first else f"write a {kind}"


def _describe_number(quantity: Rule, whole: bool) -> str:
    number = "a whole number" if whole else "a number"
    unit = f" of {quantity.unit}" if quantity.unit not in ("", "port", "slot", "fraction") else ""
    return quantity.remedy or f"write {number}{unit}, such as {quantity.example}"


def _suggest_number(text: str, quantity: Rule, whole: bool) -> str:
    """Return what to write instead of a text with a unit, or an empty string if it cannot be guessed."""
    plain = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?\d+", plain):
        return f"write {int(plain)} without quotes"
    if not whole and re.fullmatch(r"\d*[.,]\d+", plain):
        return f"write {plain.replace(',', '.')} without quotes"
    if whole and re.fullmatch(r"\d{1,3}(,\d{3})+", plain):
        return f"write {plain.replace(',', '')}"
    if quantity.unit == "tokens" and plain == "auto":
        return f"vLLM would choose a length that no plan knows; write a number of tokens, such as {quantity.example}"
    if quantity.unit == "fraction":
        percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", plain)
        return f"write {float(percent.group(1)) / 100:.2f}" if percent else ""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(([kmgt])(i?b)?)", plain, re.IGNORECASE)
    if not found:
        return ""
    number, unit, letter, suffix = found.groups(default="")
    return _suggest_size(number, unit, letter, suffix, quantity.unit)


def _suggest_size(number: str, unit: str, letter: str, suffix: str, counted: str) -> str:
    """Return what to write for a number with a unit, which may count by 1000 or by 1024.

    `number` and `unit` are what was written, such as `4` and `GiB`, `letter` and `suffix` the parts of the unit, `G`
    and `iB`; `counted` is what the key counts, such as `MiB`.
    """
    power = _POWERS[letter.lower()]
    each = 1048576 if counted == "MiB" else 1
    decimal, binary = float(number) * 1000**power / each, float(number) * 1024**power / each
    if counted in ("MiB", "bytes"):
        if suffix.lower() == "ib":
            return f"write {binary:.0f}"
        return (
            f"{unit} is 1000 to some and 1024 to others: write {binary:.0f} for {number} {letter.upper()}iB, "
            f"{decimal:.0f} for {number} {letter.upper()}B"
        )
    if suffix or not counted:
        return ""
    if letter.isupper():
        return f"write {binary:.0f}"
    return f"write {binary:.0f}, or {decimal:.0f}, which is what vLLM's command line reads in {number}{unit}"


def convert_to_yaml(value: str) -> str:
    """Convert a value of vLLM's command line to one for a key. There 4G is 4 x 1024^3 and 4g is 4 x 1000^3."""
    if short := re.fullmatch(r"(\d+)([kKmMgGtT])", value):
        base = 1024 if short.group(2).isupper() else 1000
        return str(int(short.group(1)) * base ** _POWERS[short.group(2).lower()])
    try:
        return json.dumps(json.loads(value))
    except ValueError:
        return value
