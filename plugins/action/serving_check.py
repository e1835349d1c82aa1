# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: check the variables of a host for mistakes before anything is changed."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.constants import INVENTORY_IGNORE_PATTERNS
from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from ..module_utils.vllm_edge.answers import suite
from ..module_utils.vllm_edge.inventory import (
    fleet,
    gateway,
    image_answer,
    measuring,
    pins,
    profiles,
    reports,
    variables,
)
from ..module_utils.vllm_edge.inventory.engine_inputs import find_secret_fault, find_value_errors
from ..module_utils.vllm_edge.inventory.merging import VARIABLES, merge
from ..module_utils.vllm_edge.text import shown
from ..module_utils.vllm_edge.weights import access

PROJECT = Path(__file__).resolve().parents[2]
GIVEN = (
    *("model_weights_token", "model_weights_token_file", "vllm_image_base_archive", "vllm_image_base_digest"),
    *("vllm_image_base_id", "vllm_image_wheels_directory"),
)


def find_certificate_fault(variables: Mapping[str, Any]) -> str:
    """Return what is wrong with the files of the operator's certificate, or an empty string; read on the controller."""
    name, other = "serving_gateway_certificate", "serving_gateway_private_key"
    files = [file for file in (variables.get(name), variables.get(other)) if isinstance(file, str) and file]
    if len(files) < 2:
        return ""
    remedy = "write the path of a PEM file on this machine, the certificate with its chain, the key without a password."
    at = name
    try:
        certificate = x509.load_pem_x509_certificate(Path(files[0]).read_bytes())
        at = other
        key = load_pem_private_key(Path(files[1]).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "holds nothing that can be read, or has a password"
        return f"{at}: {shown(variables[at])}: {why}; {remedy}"
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        return f"{name}: {shown(files[0])} ended on {certificate.not_valid_after_utc:%Y-%m-%d}; renew the certificate."
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*form) != key.public_key().public_bytes(*form):
        return f"{other}: {shown(files[1])} is not the key of {shown(files[0])}; write the key that belongs to it."
    return ""


def _read_others(variables: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return variables of a host that have a value. What cannot be read is refused when that host is checked."""
    values = {}
    for name in names:
        with contextlib.suppress(AnsibleError, KeyError):
            values[name] = variables[name]
    return values


class ActionModule(ActionBase):  # type: ignore[misc]
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "profile": {"type": "str"},
                "playbook": {"type": "str", "choices": list(measuring.FINDERS)},
            }
        )
        self._variables = task_vars or {}
        self._profile: str | None = options["profile"]
        project = variables.load(PROJECT)
        inventory = self._read_inventory(project)
        for warning in profiles.find_warnings(inventory, project):
            Display().warning(warning)
        hub = {name: self._read(f"model_weights_{name}") for name in ("endpoint", "token", "token_file", "environment")}
        found = profiles.find_mistakes(inventory, project) + self._find_unpinned()
        found += self._find_quality_mistakes() + self._find_wheel_mistakes()
        found += self._find_fleet_mistakes(inventory, project)
        # A plan, which names the profile, writes nothing.
        if not self._profile and (directory := self._read("serving_reports_directory")) is not None:
            sources = self._variables.get("ansible_inventory_sources", ())
            groups, hostvars = (self._variables.get(name, {}) for name in ("groups", "hostvars"))
            hosts = reports.list_hosts(str(directory), groups, hostvars)
            found += filter(None, [reports.find_fault(str(directory), sources, INVENTORY_IGNORE_PATTERNS, hosts)])
        if not self._read("model_weights_source_directory"):
            found += access.find_access_mistakes(**hub)
        commands: dict[str, list[str]] = {}
        if not found and options["playbook"]:
            given = self._read_plain(measuring.NAMES)
            given = measuring.read_variables(given, project.variables)
            active = {engine["name"]: engine["model"] for engine in self._read("serving_active_engines")}
            every = self._read("serving_expanded")
            known = list(every["engines"]), active, list(every["models"])
            found = [*measuring.FINDERS[options["playbook"]](given, *known)]
            serving = (name for name, model in active.items() if model == given["quality_reference"])
            given["quality_reference_engine"] = given["quality_reference_engine"] or next(serving, "")
            commands = {name: measuring.write_options(name, given) for name in measuring.OPTIONS}
        if not found:
            return {"changed": False, "options": commands}
        # Ansible prints a text with several lines unchanged, but quotes and folds the elements of a list.
        count = "One mistake" if len(found) == 1 else f"{len(found)} mistakes"
        return {
            "failed": True,
            "msg": f"{count} in the variables, see 'mistakes'; no host was touched.",
            "mistakes": "".join(f"{number}. {sentence}\n" for number, sentence in enumerate(found, 1)),
        }

    def _find_quality_mistakes(self) -> list[str]:
        suites = self._read_plain(("quality_suite", "quality_cases"))
        found = [mistake for name, cases in suites.items() for mistake in suite.find_mistakes(cases, name)]
        return found or suite.find_mistakes([*suites["quality_suite"], *suites["quality_cases"]], "quality_cases")

    def _find_wheel_mistakes(self) -> list[str]:
        try:
            image_answer.check_wheels(self._read("vllm_image_wheel_hashes") or {})
        except image_answer.ImageAnswerError as error:
            remedy = "paste what the image stage printed, or leave it empty, which is {}"
            return [f"vllm_image_wheel_hashes: cannot be used, {error}; {remedy}."]
        return []

    def _find_fleet_mistakes(self, inventory: profiles.Inventory, project: variables.Project) -> list[str]:
        own = self._read("serving_fleet")
        if not own and self._variables.get(fleet.LISTEN) is not None:
            remedy = f"set it in group_vars/gpu_hosts (that of all has no effect), or remove {fleet.LISTEN}"
            return [f"{fleet.LISTEN}: is set for a host of no fleet, as serving_fleet is empty; {remedy}."]
        if not own or [*find_value_errors("", "serving_fleet", own, {})]:
            return []  # in no fleet, or refused with the settings
        groups, hostvars = (self._variables.get(name, {}) for name in ("groups", "hostvars"))
        hosts = {str(host): hostvars[host] for host in groups.get("gpu_hosts", ())}
        fleets = {host: _read_others(it, ["serving_fleet"]).get("serving_fleet") for host, it in hosts.items()}
        members = {host: _read_others(hosts[host], fleet.VARIABLES) for host in hosts if fleets[host] == own}
        for host, member in members.items():
            expanded = _read_others(hosts[host], ["serving_expanded"]).get("serving_expanded", {"roles": ()})
            member["roles"] = frozenset(expanded["roles"])
        host, keys = str(self._variables["inventory_hostname"]), project.variables[fleet.LISTEN]["options"]
        return [*fleet.find_fleet_mistakes(host, fleets, members, inventory.engines, keys)] if host in members else []

    def _find_unpinned(self) -> list[str]:
        try:
            if not boolean(self._read("require_pins") or False, strict=True):
                return []
        except TypeError:
            return [f"require_pins: {self._read('require_pins')!a} is neither true nor false."]
        facts = self._variables.get("ansible_facts", {})
        version = "distribution_version" if facts.get("distribution") == "Ubuntu" else "distribution_major_version"
        distribution = f"{facts['distribution']}-{facts[version]}" if facts.get(version) else ""
        values = {name: self._read(name) for name in pins.NAMES}
        return pins.find_unpinned(values, self._read("model_weights_models") or [], distribution)

    def _read(self, name: str) -> Any:
        """Return the value of a variable; None if it is not set or names one that is not."""
        try:
            return self._templar.template(self._variables.get(name))
        except AnsibleUndefinedVariable:
            return None

    def _read_plain(self, names: Iterable[str]) -> dict[str, Any]:
        """Return variables as plain data: texts of Ansible have a type of their own."""
        return {name: json.loads(json.dumps(self._read(name), default=str)) for name in names}

    def _read_known(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the variables that have a value now; others depend on facts or results that do not exist yet."""
        values = {}
        for name in names:
            if name in self._variables:
                with contextlib.suppress(AnsibleError):
                    values[name] = self._templar.template(self._variables[name])
        return values

    def _read_secret_faults(self) -> dict[str, str] | None:
        """Return what is wrong with each secret of engines; None if there is no mapping."""
        secrets = self._variables.get("vllm_engine_secrets", {})
        if isinstance(secrets, str):  # a template for all of them
            secrets = self._read("vllm_engine_secrets")
        if not isinstance(secrets, dict):
            return None
        faults = {}
        for name, value in secrets.items():
            try:
                faults[str(name)] = find_secret_fault(self._templar.template(value))
            except AnsibleError as error:
                faults[str(name)] = f"cannot be read: {str(error).splitlines()[0].rstrip('.')}"
        return faults

    def _read_inventory(self, project: variables.Project) -> profiles.Inventory:
        """Return what the checks need of the variables. Other values may be secret."""
        directory = self._read("vllm_engine_chat_templates_directory")
        templates = Path(directory or f"{self._read('inventory_dir')}/chat_templates")
        files = templates.iterdir() if templates.is_dir() else ()
        names = VARIABLES | {"roles": "serving_roles"}
        given = {kind: self._templar.template(self._variables.get(name)) for kind, name in names.items()}
        extra = self._templar.template(self._variables["serving_extra"])
        profile = self._profile or self._read("serving_profile")
        return profiles.Inventory(
            profile=profile,
            merged=merge(given, extra, functools.partial(variables.read_shipped, PROJECT), [profile]),
            extra={f"{name}_extra": extra[kind] for kind, name in VARIABLES.items()},
            image=self._templar.template(self._variables.get("vllm_image_base")),
            **{key: self._read(key) for key in ("gpu_name", "gpu_uuids")},
            settings=self._read_known(project.settings),
            given={name: bool(self._read(name)) for name in GIVEN},
            secrets=self._read_secret_faults(),
            chat_template=self._read("vllm_engine_chat_template") or "",
            chat_templates=frozenset(entry.name for entry in files if entry.is_file()),
            chat_templates_directory=str(templates),
            gateway=(values := self._read_known(gateway.VARIABLES)),
            certificate_fault=find_certificate_fault(values),
            names=frozenset(map(str, self._variables)),
        )
