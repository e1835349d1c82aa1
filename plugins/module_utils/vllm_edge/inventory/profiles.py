# SPDX-License-Identifier: Apache-2.0
"""Checks of profiles, engines, models and the declared host for contradictions, from the variables alone.

What can never be right is refused in every profile. What depends on the host (its slots, its memory) is checked for the
chosen profile only, because group_vars may contain profiles of other hosts. Nothing here assumes that a value has the
right type. Every mistake is one sentence with the variable, the value, why it is wrong and what would be right, and one
run finds all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from ..gpu.models import GPU_MODELS, L4_CUDA_MIB, L4_TOTAL_MIB, find_by_short_name, find_total_mib, list_alike
from ..text import nearest, shown
from .engine_arguments import (
    describe_unknown_engine_key,
    find_argument_errors,
    find_recorded_release,
    find_release_errors,
)
from .engine_inputs import (
    Spec,
    find_key_errors,
    find_name_errors,
    find_owners,
    find_repeated,
    find_unknown_keys,
    find_value_errors,
    parse_text,
    select_mappings,
    select_texts,
)
from .gateway import find_gateway_errors, find_shared_stand_ins, find_stand_in_errors
from .merging import PLANNED, Merged
from .replicas import OF_ONE_ENGINE, add_defaults, count_replicas, find_replica_errors
from .risks import find_risk_errors
from .rules import PLAIN_NAME, RULES
from .variables import Project, find_unknown_variables
from .vllm_arguments import RELEASES

RESERVED_ENGINE_NAMES = re.compile(r"edge(-.*)?")
"""The project has units of these names: `vllm-edge.target`, `vllm-edge-switch.service`, ..."""

_UUID = re.compile(r"GPU-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_RELEASE = re.compile(r":v?(\d+\.\d+\.\d+)[^/]*$")


@dataclass(frozen=True)
class Inventory:
    """What an operator wrote, not yet checked."""

    profile: Any
    merged: Merged
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The variables that end in `_extra`, by name."""
    gpu_name: Any = None
    gpu_uuids: Any = None
    image: Any = None
    """The variable vllm_image_base; its tag is the release of vLLM."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The variables of `Project.settings` that have a value, by name."""
    given: Mapping[str, bool] = field(default_factory=dict)
    """Whether a variable has a value, for variables whose value is secret or does not matter."""
    secrets: Mapping[str, str] | None = field(default_factory=dict)
    """By name of a secret in vllm_engine_secrets what is wrong with its value, or ""; None if it is no mapping."""
    chat_template: Any = ""
    chat_templates: frozenset[str] = frozenset()
    """The files in the directory of chat templates."""
    chat_templates_directory: str = ""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the gateway that have a value, by name (`gateway.VARIABLES`)."""
    certificate_fault: str = ""
    """What is wrong with the operator's certificate of the gateway, one sentence."""
    names: frozenset[str] = frozenset()
    """The names of all variables of the host."""

    @property
    def profiles(self) -> Any:
        return self.merged.profiles

    @property
    def engines(self) -> Any:
        return self.merged.engines

    @property
    def models(self) -> Any:
        return self.merged.models


class Floor(NamedTuple):
    """The least memory that an engine takes on each GPU, and why."""

    mib: int
    reason: str


def find_mistakes(inventory: Inventory, project: Project) -> list[str]:
    """Return every mistake in an inventory as one sentence; empty if there is none."""
    found = list(_find_errors(inventory, project))
    if _is_recorded_release(inventory):
        found += _find_release_mistakes(inventory, project)
    for variable, names in inventory.merged.added.items():
        where = re.compile(rf"\b{variable}(?=\.({'|'.join(map(re.escape, names))})[.:])")
        found = [where.sub(f"{variable}_extra", sentence) for sentence in found] if names else found
    return found


def find_warnings(inventory: Inventory, project: Project) -> list[str]:
    """Return what is wrong by the nearest recorded release of vLLM, if the image has one that nobody has recorded."""
    if _is_recorded_release(inventory):
        return []
    return [
        f"{sentence} vllm_image_base is {shown(inventory.image)}, whose arguments nobody has recorded, so that those "
        f"of vLLM {find_recorded_release(find_release(inventory.image))} were compared."
        for sentence in _find_release_mistakes(inventory, project)
    ]


def compute_vram_floor(engine: Mapping[str, Any], gpu_memory_mib: int, default: float | None) -> Floor | None:
    """Return the least MiB that an engine takes on each GPU, as far as that follows from its arguments alone.

    vLLM reserves its whole share when it starts, so this is taken whatever the load. Weights and activations are left
    to the planner. `gpu_memory_mib` is the total that nvidia-smi prints, `default` the release's
    gpu_memory_utilization, None if it is not known. Returns None if nothing follows from the arguments.
    """
    kv_cache = engine.get("kv_cache_memory_bytes")
    if _is_number(kv_cache):
        return Floor(math.ceil(kv_cache / 2**20), f"kv_cache_memory_bytes {kv_cache} alone")
    utilization = engine.get("gpu_memory_utilization", default)
    if gpu_memory_mib != L4_TOTAL_MIB or not _is_number(utilization) or not 0 < utilization <= 1:
        return None
    cuda_total = int(L4_CUDA_MIB)
    said = "" if "gpu_memory_utilization" in engine else ", vLLM's default,"
    return Floor(
        math.floor(cuda_total * utilization),
        f"gpu_memory_utilization {utilization:g}{said} of the {cuda_total} MiB that CUDA has of {gpu_memory_mib}",
    )


def _find_errors(inventory: Inventory, project: Project) -> Iterator[str]:
    """Yield every mistake that does not depend on the release of vLLM."""
    engines = select_mappings(inventory.engines)
    profiles = select_mappings(inventory.profiles)
    yield from _find_choice_errors(inventory)
    yield from _find_collection_errors("vllm_models", inventory.models, "a model")
    for (variable, entries), what in zip(inventory.extra.items(), ("a model", "an engine", "a profile"), strict=False):
        yield from _find_collection_errors(variable, entries, what)
    for variable, names in inventory.merged.twice.items():
        for name in names:
            yield (
                f"{variable}_extra: {shown(name)} is also a name in {variable}; choose another name, or replace "
                f"{variable} as a whole."
            )
    defaults: dict[str, list[str]] = {}
    for name, model in select_mappings(inventory.models).items():
        yield from _find_model_errors(name, model, project.model_keys)
        defaults[name] = list(_find_default_errors(name, model, inventory, project.engine_keys))
        yield from defaults[name]
    yield from _find_shared_directories(select_mappings(inventory.models))
    yield from _find_collection_errors("serving_engines", inventory.engines, "an engine")
    for name, engine in engines.items():
        left = PLANNED if name in inventory.merged.incomplete else ()
        keys = {
            key: {**it, "required": it.get("required") and key not in left} for key, it in project.engine_keys.items()
        }
        found = _find_engine_errors(name, add_defaults(engine, inventory.models), inventory, keys)
        yield from _drop_inherited(name, engine, found, defaults)
    yield from find_replica_errors(engines)
    yield from find_stand_in_errors(engines)
    specs = {**project.options, **project.variables}
    yield from find_gateway_errors(inventory.gateway, engines, inventory.certificate_fault, specs)
    yield from _find_collection_errors("serving_profiles", inventory.profiles, "a profile")
    if inventory.merged.roles != []:
        of_names = {"type": "list", "elements": "str"}
        yield from find_value_errors("serving_roles", "served_names", inventory.merged.roles, of_names)
    for name, profile in profiles.items():
        yield from _find_profile_errors(name, profile, inventory, specs["serving_profiles"]["options"])
    yield from _find_host_errors(inventory)
    yield from _find_settings_errors(inventory, project)
    yield from find_unknown_variables(inventory.names, project)


def _find_release_mistakes(inventory: Inventory, project: Project) -> list[str]:
    """Return every mistake by the recorded release that stands for the image's."""
    version = find_recorded_release(find_release(inventory.image))
    keys, found = project.engine_keys, []
    defaults = {}
    for name, model in select_mappings(inventory.models).items():
        given = model.get("engine_defaults")
        where = f"vllm_models.{name}.engine_defaults"
        defaults[name] = list(find_release_errors(where, given, keys, version)) if isinstance(given, dict) else []
        found += defaults[name]
    for name, engine in select_mappings(inventory.engines).items():
        whole = add_defaults(engine, inventory.models)
        sentences = find_release_errors(f"serving_engines.{name}", whole, keys, version)
        found += _drop_inherited(name, engine, sentences, defaults)
    return found


def _drop_inherited(
    name: str, engine: Mapping[str, Any], sentences: Iterable[str], defaults: Mapping[str, list[str]]
) -> Iterator[str]:
    """Yield the sentences about an engine, without those about arguments that it has from its model.

    `defaults` are the sentences about `engine_defaults`, by model.
    """
    model = engine.get("model")
    known = defaults.get(model, []) if isinstance(model, str) else []
    said = {sentence.removeprefix(f"vllm_models.{model}.engine_defaults") for sentence in known}
    for sentence in sentences:
        about = sentence.removeprefix(f"serving_engines.{name}")
        if about not in said or re.split(r"[.:[]", about)[1] in engine:
            yield sentence


def find_release(image: Any) -> str:
    found = _RELEASE.search(image) if isinstance(image, str) else None
    return found.group(1) if found else ""


def _is_recorded_release(inventory: Inventory) -> bool:
    return find_release(inventory.image) in RELEASES


def _find_choice_errors(inventory: Inventory) -> Iterator[str]:
    profile, profiles = inventory.profile, inventory.profiles
    known, own = inventory.merged.known_profiles, inventory.merged.added.get("serving_profiles", ())
    if profile in (None, "") and len(own) > 1:
        yield (
            f"serving_profile: is not set, and the inventory adds several profiles; write {' or '.join(own)}, or one "
            f"profile with several engines into serving_profiles_extra, such as all: {{engines: [{', '.join(own)}]}}."
        )
    elif profile in (None, ""):
        yield (
            "serving_profile: is not set, and nothing else says what the host serves; set it for the group gpu_hosts "
            f"(in the group all of an inventory it has no effect) to one of {', '.join(known)}."
        )
    elif not isinstance(profile, str):
        yield f"serving_profile: {shown(profile)} is not a name; write one of {', '.join(known)}."
    elif profile not in known and isinstance(profiles, dict) and not any(inventory.merged.twice.values()):
        yield f"serving_profile: {shown(profile)} is not a key of serving_profiles; {nearest(profile, known)}"


def _find_collection_errors(variable: str, value: Any, what: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{variable}: {shown(value)} is not a mapping; write names, each with the keys of {what}."
        return
    for name, item in value.items():
        yield from find_name_errors(variable, name, what)
        if not isinstance(item, dict):
            yield f"{variable}.{name}: {shown(item)} is not a mapping; write the keys of {what}."


def _find_model_errors(name: str, model: Mapping[str, Any], keys: Spec) -> Iterator[str]:
    where = f"vllm_models.{name}"
    yield from find_unknown_keys(where, model, keys)
    yield from find_key_errors(where, model, keys)
    manifest = model.get("manifest_sha256")
    if isinstance(manifest, str) and not re.fullmatch(r"([0-9a-f]{64})?", manifest):
        yield (
            f"{where}.manifest_sha256: {shown(manifest)} is no SHA-256; write the 64 hexadecimal digits that the run "
            "which brought the model printed, or leave it out."
        )


def _find_default_errors(name: str, model: Mapping[str, Any], inventory: Inventory, keys: Spec) -> Iterator[str]:
    where, defaults = f"vllm_models.{name}.engine_defaults", model.get("engine_defaults")
    if not isinstance(defaults, dict):
        return  # refused as a key of the model, or not there
    for key in (key for key in OF_ONE_ENGINE if key in defaults):
        yield f"{where}.{key}: belongs to one engine, {OF_ONE_ENGINE[key]}; write it into the engines of the model."
    given = {key: value for key, value in defaults.items() if key not in OF_ONE_ENGINE}
    free = {key: option for key, option in keys.items() if key not in OF_ONE_ENGINE}
    yield from _find_argument_mistakes(where, given, inventory, keys, free)


def _find_shared_directories(models: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    owners = find_owners((model["dir"], name) for name, model in models.items() if isinstance(model.get("dir"), str))
    for directory, names in owners.items():
        # Two names of one commit share its files.
        if len({(str(models[name].get("repo")), str(models[name].get("revision"))) for name in names}) > 1:
            yield (
                f"vllm_models: dir {shown(directory)} is used by {' and '.join(names)}, whose files would replace "
                f"each other; give each model its own, or let engines name the same model."
            )


def _find_engine_errors(name: str, engine: Mapping[str, Any], inventory: Inventory, keys: Spec) -> Iterator[str]:
    where = f"serving_engines.{name}"
    if RESERVED_ENGINE_NAMES.fullmatch(name):
        yield (
            f"serving_engines: {shown(name)} would be the unit vllm-{name}, and the project has units that begin so; "
            f"choose another name."
        )
    yield from _find_argument_mistakes(where, engine, inventory, keys, keys)
    yield from find_risk_errors(where, engine, find_recorded_release(find_release(inventory.image)))
    models = select_mappings(inventory.models)
    model = engine.get("model")
    if isinstance(model, str) and model.strip() and model not in models and isinstance(inventory.models, dict):
        yield f"{where}.model: {shown(model)} is not a key of vllm_models; {nearest(model, models)}"
    yield from _find_secret_errors(f"{where}.secret_env", engine, inventory.secrets or {})


def _find_argument_mistakes(
    where: str, engine: Mapping[str, Any], inventory: Inventory, keys: Spec, free: Spec
) -> Iterator[str]:
    """Yield what is wrong with the arguments of an engine, or of the defaults of a model.

    `free` are the keys that are allowed, and if required must be there.
    """
    for key in engine:
        if key not in keys:
            yield describe_unknown_engine_key(where, key, keys)
    yield from find_key_errors(where, engine, free)
    yield from find_argument_errors(where, engine, keys)
    yield from _find_chat_template_errors(f"{where}.chat_template", engine.get("chat_template"), inventory)
    yield from _find_clashes(where, engine)


def _find_secret_errors(where: str, engine: Mapping[str, Any], secrets: Mapping[str, str]) -> Iterator[str]:
    named = engine.get("secret_env")
    for name, secret in named.items() if isinstance(named, dict) else ():
        if not isinstance(secret, str) or not re.fullmatch(PLAIN_NAME, secret):
            continue  # refused elsewhere
        if secret not in secrets:
            yield (
                f"{where}.{name}: vllm_engine_secrets has no {shown(secret)}; {nearest(secret, secrets)} Take its "
                f"value from Ansible Vault or lookup('ansible.builtin.file', ...)."
            )
        elif secrets[secret]:
            yield f"{where}.{name}: the value of {shown(secret)} in vllm_engine_secrets {secrets[secret]}."
        if name in (engine.get("extra_env") or ()):
            yield f"{where}.{name}: extra_env sets it, too, two sources for one thing; keep one."


def _find_clashes(where: str, engine: Mapping[str, Any]) -> Iterator[str]:
    sizes = [engine.get("tensor_parallel_size"), engine.get("pipeline_parallel_size", 1)]
    gpus = engine.get("gpus")
    if isinstance(gpus, list) and gpus and all(_is_whole(size) and size > 0 for size in sizes):
        replicas = count_replicas(engine)
        ranks = replicas * sizes[0] * sizes[1]
        if ranks != len(gpus):
            yield (
                f"{where}.gpus: {shown(gpus)} {'is 1 GPU' if len(gpus) == 1 else f'are {len(gpus)} GPUs'}, but "
                f"{'replicas x ' if replicas > 1 else ''}tensor_parallel_size x pipeline_parallel_size is "
                f"{f'{replicas} x ' if replicas > 1 else ''}{sizes[0]} x {sizes[1]} = {ranks}; give one slot for each."
            )
    if "gpu_memory_utilization" in engine and "kv_cache_memory_bytes" in engine:
        yield (
            f"{where}: gpu_memory_utilization ({shown(engine['gpu_memory_utilization'])}) and kv_cache_memory_bytes "
            f"({shown(engine['kv_cache_memory_bytes'])}) are two sources for one thing: vLLM takes the second, and of "
            f"the first only that so much is free when it begins, which the plan sets; keep one."
        )
    tokens, requests = engine.get("max_num_batched_tokens"), engine.get("max_num_seqs")
    if _is_whole(tokens) and _is_whole(requests) and 0 < tokens < requests:
        yield (
            f"{where}.max_num_batched_tokens: {tokens} is below max_num_seqs {requests}, which vLLM refuses; "
            f"raise it, or lower max_num_seqs."
        )


def _find_chat_template_errors(where: str, value: Any, inventory: Inventory) -> Iterator[str]:
    """Yield a sentence if the template does not exist. A value that is no plain name is refused elsewhere."""
    if isinstance(value, str) and re.fullmatch(PLAIN_NAME, value) and value not in inventory.chat_templates:
        yield (
            f"{where}: there is no file {shown(value)} in {inventory.chat_templates_directory or 'the directory'} "
            f"(vllm_engine_chat_templates_directory); {nearest(value, inventory.chat_templates)}"
        )


def _find_profile_errors(name: str, profile: Mapping[str, Any], inventory: Inventory, keys: Spec) -> Iterator[str]:
    where = f"serving_profiles.{name}"
    yield from find_unknown_keys(where, profile, keys)
    yield from find_key_errors(where, profile, keys)
    known = inventory.engines if isinstance(inventory.engines, dict) else {}
    names = list(dict.fromkeys(select_texts(profile.get("engines"))))
    for engine in names:
        if engine.strip() and engine not in known and isinstance(inventory.engines, dict):
            yield f"{where}.engines: {shown(engine)} is not a key of serving_engines; {nearest(engine, known)}"
    chosen = {engine: known[engine] for engine in names if isinstance(known.get(engine), dict)}
    yield from _find_shared(where, chosen, "gpus", "GPU slot")
    yield from _find_shared(where, chosen, "port", "port")
    yield from find_shared_stand_ins(where, chosen)
    for engine in chosen if len(chosen) > 1 else ():
        if engine in inventory.merged.incomplete and "gpus" not in chosen[engine]:
            yield (
                f"serving_engines.{engine}.gpus: is missing, and {name} has other engines beside it; write the slots "
                f"of its GPUs, such as [0]. Only an engine that runs alone may leave them out."
            )
    if chosen and len(chosen) == len(names):
        yield from _find_unserved(where, chosen, inventory.merged.roles)


def _find_shared(where: str, engines: Mapping[str, Mapping[str, Any]], key: str, what: str) -> Iterator[str]:
    """Yield slots or ports that two engines of a profile use."""
    values = {name: engine.get(key) for name, engine in engines.items()}
    owners = find_owners(
        (item, name)
        for name, value in values.items()
        for item in set(filter(_is_whole, value if isinstance(value, list) else [value]))
    )
    for item, names in sorted(owners.items()):
        if len(names) > 1:
            yield f"{where}: {what} {item} is wanted by {' and '.join(names)}; give each engine its own."


def _find_unserved(where: str, engines: Mapping[str, Mapping[str, Any]], roles: Any) -> Iterator[str]:
    """Yield names that two engines serve, and roles that no engine serves."""
    owners = find_owners(
        (served, name) for name, engine in engines.items() for served in set(select_texts(engine.get("served_names")))
    )
    wanted = select_texts(roles)
    for role in dict.fromkeys([*wanted, *sorted(owners)]):
        names = owners.get(role, [])
        if len(names) != 1:
            title = f"role {shown(role)} of serving_roles" if role in wanted else f"served name {shown(role)}"
            yield (
                f"{where}: {title} is served by {'nobody' if not names else ' and '.join(names)}; "
                f"put it into served_names of exactly one of its engines ({', '.join(engines)})."
            )


def _find_host_errors(inventory: Inventory) -> Iterator[str]:
    stated = (inventory.settings.get(name) for name in ("gpu_count", "gpu_memory_mib"))
    count, memory = (parse_text(value, {"type": "int"}) for value in stated)
    if not memory and isinstance(inventory.gpu_name, str) and inventory.gpu_name:
        memory = find_total_mib(inventory.gpu_name)
        yield from () if memory else [_describe_unknown_gpu(inventory.gpu_name)]
    uuids = inventory.gpu_uuids
    if inventory.gpu_name not in (None, "") and not isinstance(inventory.gpu_name, str):
        yield (
            f"gpu_name: {shown(inventory.gpu_name)} is not a text; write the name that 'nvidia-smi -L' prints, such as "
            f"NVIDIA L4, or leave it out."
        )
    yield from _find_uuid_errors(uuids)
    default = RELEASES.get(find_release(inventory.image), {}).get("gpu_memory_utilization")
    slots = [(count, "gpu_count is")] if _is_whole(count) and count > 0 else []
    if isinstance(uuids, list) and uuids:
        slots.append((len(uuids), "gpu_uuids has"))
        if len(slots) == 2 and count != len(uuids):
            yield f"gpu_count: {count} contradicts gpu_uuids, which has {len(uuids)}; correct it, or leave it out."
    for name, engine in _select_active_engines(inventory).items():
        where = f"serving_engines.{name}"
        yield from _find_slot_errors(where, engine.get("gpus"), slots)
        if name in inventory.merged.incomplete and not (slots and (memory or inventory.gpu_name)):
            yield (
                f"{where}: leaves {' and '.join(key for key in PLANNED if key not in engine)} to the plan, which needs "
                f"to know the GPUs; set gpu_count, and gpu_name or gpu_memory_mib."
            )
        ranks = _count_ranks(engine)
        if "gpus" not in engine and slots and ranks > slots[0][0]:
            yield (
                f"{where}.tensor_parallel_size: {shown(engine.get('tensor_parallel_size', 1))} makes {ranks} GPUs with "
                f"its stages and replicas, and {slots[0][1]} {slots[0][0]}; lower it, or leave it to the plan."
            )
        if _is_whole(memory) and memory >= RULES["gpu_memory_mib"].low:
            yield from _find_budget_errors(where, engine, memory, default)


def _describe_unknown_gpu(name: str) -> str:
    memory = "set gpu_memory_mib to the total that nvidia-smi prints of one GPU"
    if known := GPU_MODELS.get(find_by_short_name(name) or ""):
        return f"gpu_name: cards of {shown(name)} have {' or '.join(map(str, known.totals_mib))} MiB; {memory}."
    alike = list_alike(name)
    hint = f"did you mean {' or '.join(alike)}? Of" if alike else "of"
    return f"gpu_name: {shown(name)} is no GPU whose memory is known; {hint} another one {memory}."


def _count_ranks(engine: Mapping[str, Any]) -> int:
    """Return the GPUs of an engine by its sizes; 0 if they cannot be right."""
    sizes = [engine.get(key, 1) for key in ("tensor_parallel_size", "pipeline_parallel_size")]
    return count_replicas(engine) * sizes[0] * sizes[1] if all(_is_whole(size) and size > 0 for size in sizes) else 0


def _find_slot_errors(where: str, gpus: Any, slots: list[tuple[int, str]]) -> Iterator[str]:
    """Yield slots that the host does not have. `slots` are numbers of slots, each with what states it."""
    for slot in sorted({slot for slot in gpus if _is_whole(slot)}) if isinstance(gpus, list) else ():
        beyond = min(((limit, said) for limit, said in slots if slot >= limit), default=None)
        if beyond:
            yield (
                f"{where}.gpus: slot {slot} does not exist, {beyond[1]} {beyond[0]}, so slots are 0 to "
                f"{beyond[0] - 1}; choose one of those, or another serving_profile."
            )


def _find_uuid_errors(uuids: Any) -> Iterator[str]:
    if uuids is None or uuids == []:
        return
    if not isinstance(uuids, list):
        yield f"gpu_uuids: {shown(uuids)} is not a list; write one UUID per line, as 'nvidia-smi -L' prints them."
        return
    for slot, uuid in enumerate(uuids):
        if not isinstance(uuid, str) or not _UUID.fullmatch(uuid):
            yield (
                f"gpu_uuids[{slot}]: {shown(uuid)} is no UUID of a GPU; 'nvidia-smi -L' prints them: GPU- and "
                f"8-4-4-4-12 hexadecimal digits."
            )
    yield from find_repeated("gpu_uuids", [uuid.lower() for uuid in select_texts(uuids)], "every slot is another card")


def _find_budget_errors(where: str, engine: Mapping[str, Any], memory: int, default: float | None) -> Iterator[str]:
    budget = engine.get("vram_budget_mib")
    if not _is_whole(budget) or budget <= 0:
        return
    floor = compute_vram_floor(engine, memory, default)
    if budget > memory:
        yield f"{where}.vram_budget_mib: {budget} is above gpu_memory_mib, what a GPU has; write at most {memory}."
    elif floor and budget < floor.mib:
        yield (
            f"{where}.vram_budget_mib: {budget} is below the {floor.mib} MiB that the engine takes from the start "
            f"({floor.reason}); raise the budget, or lower that."
        )


def _find_settings_errors(inventory: Inventory, project: Project) -> Iterator[str]:
    for name, value in sorted(inventory.settings.items()):
        option = project.variables.get(name) or project.options[name]
        # A role gets its own variables as they are, and plays convert the others.
        if name in project.variables or option["type"] in ("int", "float"):
            value = parse_text(value, option)
        yield from find_value_errors(name, name, value, option)
    given = {name for name, has_value in inventory.given.items() if has_value}
    if given >= {"model_weights_token", "model_weights_token_file"}:
        yield "model_weights_token and model_weights_token_file: both are set, two sources for one thing; keep one."
    if given >= {"vllm_image_base_archive", "vllm_image_base_digest"}:
        yield (
            "vllm_image_base_archive and vllm_image_base_digest: both are set, but a digest is what a registry calls "
            "an image, and one from an archive has none; pin it by vllm_image_base_id."
        )
    on_host = inventory.settings.get("vllm_image_base_archive_on_host") is True
    if on_host and "vllm_image_base_archive" in given and "vllm_image_base_id" not in given:
        yield (
            "vllm_image_base_id: is empty, and vllm_image_base_archive is on the host: a medium is not trusted to say "
            "itself which image it should hold. Stage again (air-gap.yml then has the id), or set it to what `docker "
            "image inspect --format {{.Id}}` prints of the image where the archive was written."
        )
    source = inventory.settings.get("vllm_image_pip_source", "index")
    if (source == "directory") != ("vllm_image_wheels_directory" in given):
        yield (
            f"vllm_image_wheels_directory: is {'not ' if source == 'directory' else ''}set, and vllm_image_pip_source "
            f"is {shown(source)}; the directory is needed for the source 'directory', and for no other."
        )
    if inventory.secrets is None:
        yield "vllm_engine_secrets: is not a mapping; write names, each with its value from Ansible Vault or a file."
    yield from find_value_errors("vllm_engine_chat_template", "chat_template", inventory.chat_template, {"type": "str"})
    yield from _find_chat_template_errors("vllm_engine_chat_template", inventory.chat_template, inventory)


def _select_active_engines(inventory: Inventory) -> dict[str, Mapping[str, Any]]:
    profile = select_mappings(inventory.profiles).get(inventory.profile) if isinstance(inventory.profile, str) else None
    engines = select_mappings(inventory.engines)
    return {
        name: engines[name] for name in select_texts(profile.get("engines") if profile else None) if name in engines
    }


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
