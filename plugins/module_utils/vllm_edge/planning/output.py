# SPDX-License-Identifier: Apache-2.0
"""A plan as something to run (`vllm-edge plan --output`): a script with `vllm serve` or `docker run`, a compose file or
an inventory. Arguments and limits are those of a host's engine, each with its reason as a comment."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.config import PASSED
from ..engine.reasons import ASKED, NAMED, explain_words
from ..engine.render import (
    CLOSED,
    DEFAULTS,
    FIXED_ENVIRONMENT,
    HEALTH_TIMEOUT_S,
    Settings,
    build_environment,
    list_limits,
    list_serve_arguments,
)
from ..inventory.engine_arguments import (
    derive_key,
    find_argument_errors,
    find_recorded_release,
    parse_arguments,
)
from ..inventory.risks import find_risks
from ..text import WIDTH
from .checkpoint.headers import INDEX
from .checkpoint.inferred import is_approximate
from .checkpoint.model_facts import checkpoint_bytes
from .contract import EnginePlan, Model
from .parsers import find_parsers
from .render import describe_release, describe_together, wrap
from .serve_options import Asked, list_words

KEY_FILE = "/run/secrets/api-key"
KEY_IN_PWD = f"--mount=type=bind,source=$PWD/api-key,target={KEY_FILE},readonly"
OF_A_HOST = frozenset({"USER", "LOGNAME", "PYTHONPATH", "HF_HUB_OFFLINE", "VLLM_HOST_IP"})
"""Variables of engines on a host, whose user, network and files are others."""
IMAGE = "docker.io/vllm/vllm-openai:v{}"
Groups = Iterable[tuple[str, list[str]]]


@dataclass(frozen=True)
class Chosen:
    """A layout that fits, with what was asked for."""

    model: Model
    asked: Asked
    options: Namespace
    """Of the command."""
    gpu: str
    """The name of its model."""
    engine: Mapping[str, Any]
    """As in serving_engines, with what the plan decided."""
    plan: EnginePlan
    advice: Sequence[str]
    """Of the plan, in this command's words."""

    @property
    def key(self) -> str:
        name = self.model.facts.repo.rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:63].rstrip("-") or "model"

    @property
    def directory(self) -> Path | None:
        """The checkpoint on this machine; None if vLLM downloads it."""
        path = Path(self.options.model or self.asked.model).expanduser().absolute()
        return path if path.is_dir() else path.parent if path.name in ("config.json", INDEX) else None

    @property
    def revision(self) -> str:
        return "" if self.directory else self.model.facts.revision or str(self.options.revision)

    @property
    def pinned(self) -> dict[str, Any]:
        """The engine with what the plan adds; a share of the GPU as the size of the KV cache that it leaves, too."""
        left = {"kv_cache_memory_bytes": min(gpu.kv_cache_bytes for gpu in self.plan.gpus)}
        return {**left, **self.parsers, **self.engine, **self.plan.settings}

    @property
    def parsers(self) -> dict[str, str]:
        """Those of the model, where none is asked for; a whole line has what it names."""
        said = " ".join(self.engine["extra_args"]).replace("_", "-")
        found = find_parsers(self.model.architecture, self.model.facts.repo)
        named = {key: parser for key, parser in found.items() if f"--{key.replace('_', '-')}" not in said}
        return {} if self.asked.whole else named

    @property
    def reasons(self) -> dict[str, str]:
        share = {"kv_cache_memory_bytes": "it fits: what the share of the GPU leaves for it, so that it stays that"}
        revision = {"--revision": ASKED} if self.options.revision else {}
        parsers = dict.fromkeys(self.parsers, NAMED)
        return {**share, **parsers, **self.plan.reasons, **revision}

    @property
    def port(self) -> str:
        return "".join(self.asked.server.get("--port", [])) or "8000"

    @property
    def gpus(self) -> list[str]:
        return [str(number) for number in range(len(self.engine["gpus"]) * self.asked.replicas)]

    @property
    def settings(self) -> Settings:
        return Settings(**DEFAULTS, image=IMAGE.format(self.options.vllm), gpu_uuids=())

    def explain_options(self, words: Iterable[str]) -> Groups:
        return explain_words(words, {key: said for key, said in self.reasons.items() if key not in PASSED})

    def explain_serve(self, model: str, host: str) -> Groups:
        """Return the arguments of `vllm serve` with their reasons."""
        names = self.asked.server.get("--served-model-name") or [self.model.facts.repo]
        revision = [f"--revision={self.revision}"] if self.revision else []
        serve = list_serve_arguments(self.pinned, self.settings)
        words = [model, *revision, "--served-model-name", *names, f"--host={host}", f"--port={self.port}", *serve]
        return explain_words(words, self.reasons, ("model",))


def write(kind: str, chosen: Chosen) -> str:
    """Return the text of a kind of --output. Raises ValueError: something was asked for that it cannot say."""
    lines = {"vllm": _write_script, "docker": _write_docker, "compose": _write_compose, "inventory": _write_inventory}
    versions = "# Docker Compose 2.30 and Docker Engine 28.2, or newer: they give GPUs by CDI (nvidia-ctk cdi list)."
    first = {"compose": [versions], "inventory": []}.get(kind, ["#!/usr/bin/env bash"])
    return "\n".join([*first, *_describe(chosen), *lines[kind](chosen)])


def _describe(chosen: Chosen) -> list[str]:
    plan, repo = chosen.plan, chosen.model.facts.repo
    on = f"{len(chosen.gpus)} x {chosen.gpu}, vLLM {chosen.options.vllm}"
    said = [*describe_release(chosen.options.vllm)]
    said += [f"{repo} on {on}: it fits{' by upper bounds' if is_approximate(plan.facts_source) else ''}. {plan.reason}"]
    speed = plan.decode_tok_s
    alone = f", {speed.mid:.0f} tok/s for one (an estimate{describe_together(plan)})" if speed else ""
    said.append(f"{plan.max_concurrency:.1f} requests of {plan.max_model_len:,} tokens at once{alone}.")
    said += [f"Advice: {sentence}." for sentence in chosen.advice]
    return [f"# {line}" for sentence in said for line in wrap(sentence)]


def _quote(word: str) -> str:
    return f'"{word}"' if word == KEY_IN_PWD else shlex.quote(word)


def _dump(text: Any) -> str:
    """Return a value for Docker Compose, which replaces variables."""
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


def _write_array(name: str, groups: Groups) -> list[str]:
    lines = [line for reason, words in groups for line in (f"  # {reason}", *(f"  {_quote(word)}" for word in words))]
    return [f"{name}=(", *lines, ")"]


START = 'VLLM_API_KEY=$(cat {}) && export VLLM_API_KEY="${{VLLM_API_KEY:?it is empty}}" && exec vllm serve "{}"'


def _list_preparations(chosen: Chosen) -> list[str]:
    commits = f"https://huggingface.co/{chosen.model.facts.repo}/commits/main"
    loose = not chosen.revision and not chosen.directory
    pin = [f"# The commit is not pinned: take one of {commits} as --revision."] if loose else []
    key = "# Once: (umask 077; openssl rand -hex 32 > api-key). Clients send it as `Authorization: Bearer KEY`."
    return [*pin, key]


def _build_environment(chosen: Chosen, token_file: str) -> dict[str, str]:
    """Return the variables of the engine and of the download."""
    own, hub = chosen.engine.get("extra_env") or {}, chosen.options.endpoint
    found = {key: str(value) for key, value in build_environment(chosen.engine, chosen.settings).items()}
    found = {key: value for key, value in found.items() if key not in OF_A_HOST}
    found |= {} if hub == "https://huggingface.co" else {"HF_ENDPOINT": hub}
    return found | ({"HF_TOKEN_PATH": token_file} if chosen.options.token_file else {}) | own


def _write_script(chosen: Chosen) -> list[str]:
    own = chosen.engine.get("extra_env") or {}
    found = _build_environment(chosen, str(Path(chosen.options.token_file or "").expanduser().absolute()))
    kept = {key: value for key, value in found.items() if key in own or key not in FIXED_ENVIRONMENT}
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(chosen.gpus), **kept}
    environment = chosen.explain_options(f"--env={key}={value}" for key, value in variables.items())
    return [
        *_list_preparations(chosen),
        *_write_array(
            "environment", ((said, [word.removeprefix("--env=") for word in words]) for said, words in environment)
        ),
        *_write_array("arguments", chosen.explain_serve(str(chosen.directory or chosen.model.facts.repo), "127.0.0.1")),
        'export "${environment[@]}"',
        START.format("api-key", "${arguments[@]}"),
    ]


def _mount(source: str, target: str) -> str:
    fields = io.StringIO()
    csv.writer(fields).writerow(["type=bind", f"source={source}", f"target={target}", "readonly"])
    return "--mount=" + fields.getvalue().removesuffix("\r\n")


def _list_options(chosen: Chosen, here: str, gpus: Sequence[str]) -> Groups:
    """Return the options of `docker create`; `here` is the directory of the key."""
    ask = f"import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout={HEALTH_TIMEOUT_S})"
    binds = {KEY_FILE: f"{here}/api-key"}
    if chosen.options.token_file:
        binds["/run/secrets/hf-token"] = str(Path(chosen.options.token_file).expanduser().absolute())
    if chosen.directory:
        binds[f"/models/{chosen.key}"] = str(chosen.directory)
    mounts = [_mount(source, target) for target, source in binds.items()]
    facts = {"bytes": checkpoint_bytes(chosen.model.facts)}
    environment = _build_environment(chosen, "/run/secrets/hf-token")
    return chosen.explain_options(
        [
            *("--restart=unless-stopped", *gpus, *CLOSED, "--cap-add=DAC_OVERRIDE"),
            *list_limits({**chosen.engine, "gpus": chosen.gpus}, facts, chosen.settings),
            *(*mounts, "--mount=type=volume,source=vllm-cache,target=/cache"),
            *(f"--env={key}={value}" for key, value in environment.items()),
            f"--publish=127.0.0.1:{chosen.port}:{chosen.port}",
            f'--health-cmd=python3 -c "{ask}" http://127.0.0.1:{chosen.port}/health',
            *("--health-interval=10s", "--health-timeout=10s", "--health-start-period=3600s", "--log-driver=local"),
        ]
    )


def _explain_serve_in_container(chosen: Chosen) -> Groups:
    model = f"/models/{chosen.key}" if chosen.directory else chosen.model.facts.repo
    return chosen.explain_serve(model, "0.0.0.0")  # noqa: S104


def _write_docker(chosen: Chosen) -> list[str]:
    options = _list_options(chosen, "$PWD", [f'--gpus="device={",".join(chosen.gpus)}"'])
    start = shlex.quote(START.format(KEY_FILE, "$@"))
    return [
        *_list_preparations(chosen),
        *_write_array("options", options),
        *_write_array("arguments", _explain_serve_in_container(chosen)),
        f'docker run --detach --name={chosen.key} "${{options[@]}}" --entrypoint=/bin/sh \\',
        f'  {chosen.settings.image} -c {start} vllm "${{arguments[@]}}"',
    ]


LISTS = {"--cap-drop": "cap_drop", "--cap-add": "cap_add", "--security-opt": "security_opt", "--tmpfs": "tmpfs"}
LISTS |= {"--env": "environment", "--publish": "ports", "--mount": "volumes", "--device": "devices"}
SCALARS = {"--memory": "mem_limit", "--memory-swap": "memswap_limit"}
"""Names of compose for options of Docker that may be repeated, and for others that it does not call the same."""


def _convert(word: str) -> tuple[str, str]:
    """Return an option of Docker as a key of a service, and what stands there: a value, or a line below the key."""
    option, _, value = word.partition("=")
    text = _dump(value)
    if option == "--mount":
        parts = dict(part.split("=", 1) for part in next(csv.reader(io.StringIO(value, newline=""))) if "=" in part)
        bind = {"read_only": True, "bind": {"create_host_path": False}} if parts["type"] == "bind" else {}
        return "volumes", f"- {_dump({**parts, **bind})}"
    if option in LISTS:
        return LISTS[option], f"- {text}"
    if option == "--ulimit":
        name, soft, hard = re.split("[=:]", value)
        return "ulimits", f"{name}: {{soft: {soft}, hard: {hard}}}"
    if option.startswith("--health-"):
        name = option.removeprefix("--health-").replace("-", "_")
        return "healthcheck", f'test: ["CMD-SHELL", {text}]' if name == "cmd" else f"{name}: {value}"
    if option == "--log-driver":
        return "logging", f"driver: {value}"
    key = SCALARS.get(option, option.removeprefix("--").replace("-", "_"))
    return key, ": " + ("true" if not value else value if value.isdigit() else text)


def _write_compose(chosen: Chosen) -> list[str]:
    entries: dict[str, list[str]] = {}
    for reason, words in _list_options(chosen, ".", [f"--device=nvidia.com/gpu={number}" for number in chosen.gpus]):
        for key, item in map(_convert, words):
            lines = entries.setdefault(key, [])
            lines += [item] if f"# {reason}" in lines else [f"# {reason}", item]
    service: list[str] = []
    for key, lines in entries.items():
        scalar = lines[-1].startswith(": ")
        service += [lines[0], key + lines[1]] if scalar else [f"{key}:", *(f"  {line}" for line in lines)]
    start = _dump(START.format(KEY_FILE, "$@"))
    command = [
        f"  {line}"
        for reason, words in _explain_serve_in_container(chosen)
        for line in (f"# {reason}", *(f"- {_dump(word)}" for word in words))
    ]
    entry = [f"image: {chosen.settings.image}", f'entrypoint: ["/bin/sh", "-c", {start}, "vllm"]', "command:"]
    lines = [f"    {line}" for line in (*entry, *command, *service)]
    return [
        *_list_preparations(chosen),
        *(f"name: {_dump(chosen.key)}", "services:", "  vllm:"),
        *lines,
        *("volumes:", "  vllm-cache: {name: vllm-cache}"),
    ]


def _read_engine(chosen: Chosen) -> dict[str, Any]:
    """Return what was asked for as keys of serving_engines. Raises ValueError: a host decides an option of it."""
    left = {"extra_args", "extra_env", *chosen.asked.reasons}
    asked = {key: value for key, value in chosen.asked.engine.items() if key not in left}
    for key, size in (("tensor_parallel_size", chosen.asked.size), ("pipeline_parallel_size", chosen.asked.stages)):
        if (size or 1) > 1:
            asked[key] = size
    if chosen.asked.replicas > 1 and not chosen.model.experts:
        asked["replicas"] = chosen.asked.replicas
    words = []
    for argument in parse_arguments([*chosen.asked.engine["extra_args"]])[0]:
        name = argument.option.name if argument.option else argument.name
        key = derive_key(argument.option) if argument.option and not argument.dotted else ""
        value = "".join(argument.values)
        if key == "chat_template":
            asked[key] = Path(value).name  # beside the inventory, as the validation says
        elif key in PASSED:
            asked[key] = json.loads(value) if value.startswith("{") else value
        elif name != "--enable-auto-tool-choice" and not (name == "--data-parallel-size" and "replicas" in asked):
            words += list_words(argument)
    names = chosen.asked.server.get("--served-model-name")
    more = {"served_names": names, "extra_args": words, "extra_env": chosen.asked.engine.get("extra_env")}
    asked |= {key: value for key, value in more.items() if value}
    for error in find_argument_errors("--output inventory", asked, {}):
        raise ValueError(error)
    risks = [*find_risks(asked, find_recorded_release(chosen.options.vllm))]
    return asked | ({"accept_risk": risks} if risks else {})


def _write_inventory(chosen: Chosen) -> list[str]:
    import yaml

    options, repo, key = chosen.options, chosen.model.facts.repo, chosen.key
    if chosen.directory:
        raise ValueError(
            f"--model: {chosen.directory} is a directory, and a host downloads its model; name a repository."
        )
    card = {"gpu_name": chosen.gpu, "gpu_count": options.count, "gpu_memory_mib": options.gpu_memory_mib}
    card |= {"gpu_compute_capability": options.compute_capability, "gpu_bandwidth_gb_s": options.gpu_bandwidth}
    release = options.vllm != options.parser.get_default("vllm")
    model = {"repo": repo, **({"revision": chosen.revision} if chosen.revision else {})}
    asked = _read_engine(chosen)
    parts: dict[str, Mapping[str, Any]] = {
        "your word: the cards; the first run reads the rest": {name: value for name, value in card.items() if value},
        "your word: the release of vLLM": {"vllm_image_base": chosen.settings.image} if release else {},
        "your word: the model": {"vllm_models_extra": {key: model}},
        "your word: what you asked for; the plan decides the rest": (
            {"serving_engines_extra": {key: {"model": key, **asked}}} if asked else {}
        ),
    }
    lines = ["# Write the address of the host; then ansible-playbook -i FILE playbooks/site.yml serves the model."]
    lines += ["gpu_hosts:", "  hosts:", "    gpu1:", "      ansible_host: 192.0.2.10"]
    for said, part in parts.items():
        style = None if any(isinstance(value, Mapping) for value in part.values()) else False
        text = yaml.safe_dump(part, sort_keys=False, default_flow_style=style, width=WIDTH)
        lines += [f"      {line}" for line in (f"# {said}", *text.splitlines()) if part]
    return lines
