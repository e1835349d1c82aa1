#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: write a generation, and have the host's program switch to it where anything differs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_switch
short_description: Write a generation, and switch the host to it where anything differs
description:
  - Writes what the inventory rendered as a generation, complete in one directory below C(generations/) of
    O(state_directory), and asks what runs. Where engines, live files or units differ, it has C(vllm-edge switch) take
    the host there, which finishes or goes back without Ansible, and returns its journal.
  - A generation that was written before keeps its number; so does one whose directory is damaged, which is repaired.
  - An engine whose input hash is the same keeps its process. The hash covers everything that reaches the container or
    its supervisor, and neither budgets nor numbers.
  - While another switch runs nothing is written, and the module fails with the name of who asked for it and its phase.
  - Where nothing differs no unit is started. Where the inventory has come to say what O(origin=-e) or O(origin=host)
    chose before, the inventory is recorded as the origin.
author: vllm-edge
attributes:
  check_mode:
    description: Says what would be written and which engines would move, and writes nothing.
    support: full
  diff_mode:
    description: Live files against the rendered ones, whichever generation they are of.
    support: full
  idempotent:
    description: A second run changes nothing and starts nothing.
    support: full
options:
  profile:
    description: Name of the profile.
    type: str
    required: true
  engines:
    description: The engines, exactly those that are to run.
    type: list
    elements: dict
    required: true
    options:
      name:
        description: Name of the engine.
        type: str
        required: true
      docker_create:
        description: The arguments of C(docker create), one on each line, without labels of generation and input hash.
        type: str
        required: true
      unit:
        description: The unit of systemd.
        type: str
        required: true
      config:
        description: C(engine.json) without C(input_hash) and C(generation).
        type: dict
        required: true
      chat_template:
        description: The chat template, where the engine has one of its own.
        type: str
      manifest_sha256:
        description: Hash over the weights' files.
        type: str
        required: true
  target:
    description: The target of systemd that wants the engines.
    type: str
    required: true
  budgets_mib:
    description: MiB that the engines may use, by UUID, of every GPU of the host; V(0) where none may be.
    type: dict
    required: true
  foreign:
    description: What to do about processes on a GPU that are not ours.
    type: str
    choices: [ignore, warn, fail]
    default: warn
  limits:
    description: Patience of the switch, C(drain_timeout_s) and the like, and C(keep_generations).
    type: dict
    default: {}
  origin:
    description: Who chose the profile.
    type: str
    choices: [inventory, "-e", host]
    default: inventory
  inventory_profile:
    description: What the inventory says.
    type: str
  asked_by:
    description: Who asks, for the journal.
    type: str
    default: Ansible
  state_directory:
    description: Directory of what the host remembers.
    type: path
    default: /var/lib/vllm-edge
  configuration_directory:
    description: Directory of the live configuration.
    type: path
    default: /etc/vllm-edge
  units_directory:
    description: Directory of the live units.
    type: path
    default: /etc/systemd/system
  program:
    description: The host's program.
    type: path
    default: /usr/local/bin/vllm-edge
  timeout_s:
    description: Seconds to follow a switch. One that takes longer goes on by itself.
    type: int
    default: 7200
"""

EXAMPLES = r"""
- name: Switch to what was rendered
  serving_switch:
    profile: e2b-only
    engines:
      - name: e2b-all
        docker_create: "{{ lookup('ansible.builtin.template', 'docker-create.j2') }}"
        unit: "{{ lookup('ansible.builtin.template', 'vllm-engine.service.j2') }}"
        config: "{{ lookup('ansible.builtin.template', 'engine.json.j2') | from_json }}"
        manifest_sha256: "{{ model_weights_result['e2b'].manifest_sha256 }}"
    target: "{{ lookup('ansible.builtin.template', 'vllm-edge.target.j2') }}"
    budgets_mib:
      GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0003: 20900
"""

RETURN = r"""
generation:
  description: Number of the generation.
  type: int
  returned: success
engines:
  description: Input hash of each engine, and the number of the generation in which it came.
  type: dict
  returned: success
moves:
  description: Engines that are or would be kept, stopped, started or waited for.
  type: dict
  returned: success
  sample: {keep: [e4b, e2b], stop: [31b-nvfp4-tp2], start: [31b-w4a16-tp2], wait: []}
files:
  description: Every live file of concern with its difference, which is empty where it is as rendered.
  type: list
  elements: dict
  returned: success
result:
  description: >-
    V(committed), or V(unchanged) where no switch was needed; on failure V(refused), V(rolled_back) or V(failed), or
    V(busy) while another switch runs. Absent in check mode where a switch would be needed.
  type: str
  returned: when known
journal:
  description: The journal of the switch, see C(vllm-edge history).
  type: dict
  returned: when a switch ran and had something to do
msg:
  description: One paragraph that says what happened, and on failure what to do.
  type: str
  returned: always
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.generation import committed, live, render, store
from ..module_utils.vllm_edge.generation.model import Committed, Generation, GenerationError
from ..module_utils.vllm_edge.generation.render import Rendered
from ..module_utils.vllm_edge.paths import ETC, STATE, UNITS, HostPaths
from ..module_utils.vllm_edge.switch.journal import Busy, Lock, holder
from ..module_utils.vllm_edge.switch.model import Exit, Result
from ..module_utils.vllm_edge.switch.moves import decide_moves

ENGINE: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "docker_create": {"type": "str", "required": True},
    "unit": {"type": "str", "required": True},
    "config": {"type": "dict", "required": True},
    "chat_template": {"type": "str"},
    "manifest_sha256": {"type": "str", "required": True},
}
ARGUMENT_SPEC: dict[str, Any] = {
    "profile": {"type": "str", "required": True},
    "engines": {"type": "list", "elements": "dict", "required": True, "options": ENGINE},
    "target": {"type": "str", "required": True},
    "budgets_mib": {"type": "dict", "required": True},
    "foreign": {"type": "str", "choices": ["ignore", "warn", "fail"], "default": "warn"},
    "limits": {"type": "dict", "default": {}},
    "origin": {"type": "str", "choices": ["inventory", "-e", "host"], "default": "inventory"},
    "inventory_profile": {"type": "str"},
    "asked_by": {"type": "str", "default": "Ansible"},
    "state_directory": {"type": "path", "default": STATE},
    "configuration_directory": {"type": "path", "default": ETC},
    "units_directory": {"type": "path", "default": UNITS},
    "program": {"type": "path", "default": "/usr/local/bin/vllm-edge"},
    "timeout_s": {"type": "int", "default": 7200},
}
STATUS_TIMEOUT_S = 120


class Switch:
    """One run of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        given = module.params
        self.paths = HostPaths(
            Path(given["configuration_directory"]), Path(given["state_directory"]), Path(given["units_directory"])
        )
        self.program: str = given["program"]
        self.result: dict[str, Any] = {}
        self.needed = False
        """Whether the host's program has anything to do."""

    def fail(self, text: str, result: str, **more: Any) -> NoReturn:
        self.module.fail_json(msg=text, result=result, **{**self.result, **more})

    def refuse(self, text: str) -> NoReturn:
        self.fail(f"{text} Nothing was changed on this host.", Result.REFUSED)

    # -- the generation

    def write(self, rendered: Rendered, number: int, now: Committed | None) -> Generation:
        """In its place; under check mode in the module's own directory, so that what follows reads the same."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        files = store.documents(rendered, number, now, stamp)
        if self.module.check_mode:
            staged = Path(tempfile.mkdtemp(dir=self.module.tmpdir))
            self.module.add_cleanup_file(str(staged))
            store.write_directory(staged, files)
            return store.load_directory(staged, number)
        staged = store.stage(self.paths)
        try:
            store.write_directory(staged, files)
            self.verify_units(sorted(map(str, (staged / "units").glob("*.service"))))
            store.load_directory(staged, number)
            store.put(staged, number, self.paths)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return store.load(self.paths, number)

    def verify_units(self, units: Sequence[str]) -> None:
        """By systemd's own reading: a unit that it does not load would fail when the old engines are gone."""
        for unit in units:
            rc, out, err = self.module.run_command(["systemd-analyze", "verify", unit], handle_exceptions=False)
            if rc != 0:
                raise GenerationError(f"systemd does not accept {Path(unit).name}: {(err or out).strip()}.")

    # -- the program

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        places = {"ETC": self.paths.etc, "STATE": self.paths.state, "UNITS": self.paths.units}
        return subprocess.run(
            [self.program, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, **{f"VLLM_EDGE_{key}": str(path) for key, path in places.items()}},
        )

    def status(self) -> dict[str, Any]:
        if self.module.check_mode and not Path(self.program).exists():
            return {}
        try:
            done = self.run("status", "--format", "json", timeout_s=STATUS_TIMEOUT_S)
            said = json.loads(done.stdout)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.refuse(f"The host's program cannot be asked what runs: {error}. playbooks/host.yml installs it.")
        except ValueError:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            self.refuse(f"{self.program} status does not say what runs: {why[0]}. playbooks/host.yml installs it anew.")
        return dict(said)

    def switch(self, generation: Generation, news: Sequence[str]) -> NoReturn:
        given = self.module.params
        arguments = ["switch", str(generation.number), "--format", "json"]
        # With `=`, as one of the origins looks like an option.
        arguments += [f"--origin={given['origin']}", f"--asked-by={given['asked_by']}"]
        if given["inventory_profile"]:
            arguments.append(f"--inventory-profile={given['inventory_profile']}")
        try:
            done = self.run(*arguments, timeout_s=given["timeout_s"])
        except OSError as error:
            self.refuse(f"{self.program} cannot be run: {error}. playbooks/host.yml installs it.")
        except subprocess.TimeoutExpired:
            self.fail(
                f"The switch to generation {generation.number} has not ended within {given['timeout_s']} s. It goes on "
                "without Ansible: 'vllm-edge progress' on the host says how far it is, and 'vllm-edge history' how it "
                "ended.",
                Result.FAILED,
            )
        try:
            journal = json.loads(done.stdout)
            result, message = Result(journal["result"]), str(journal["message"])
        except (ValueError, KeyError, TypeError):
            said = done.stderr.strip() or f"{self.program} ended with status {done.returncode} and said nothing"
            kinds = {Exit.BUSY: "busy", Exit.REFUSED: Result.REFUSED}
            self.fail(said, kinds.get(done.returncode, Result.FAILED))  # type: ignore[call-overload,unused-ignore]
        for warning in journal["warnings"]:
            self.module.warn(warning)
        self.result["result"] = result
        if result is Result.UNCHANGED:
            # What was still loading when this module looked serves by now. The journal has no answers of engines.
            self.done(" ".join([message, *news]), changed=bool(news))
        self.result["journal"] = journal
        if result is not Result.COMMITTED:
            self.module.fail_json(msg=message, **{**self.result, "changed": result is not Result.REFUSED})
        self.done(message, changed=True)

    # -- all of it

    def done(self, text: str, *, changed: bool, **more: Any) -> NoReturn:
        self.module.exit_json(msg=text, **{**self.result, **more, "changed": changed})

    def main(self) -> NoReturn:
        try:
            rendered = render.rendered(self.module.params)
            if self.module.check_mode:
                running = holder(self.paths)
                if running is not None:
                    raise Busy(running)
                generation, news = self.settle(rendered)
            else:
                with Lock(self.paths):
                    generation, news = self.settle(rendered)
        except Busy as busy:
            self.fail(str(busy), "busy")
        except GenerationError as error:
            self.refuse(str(error))
        except OSError as error:
            self.refuse(f"{self.paths.state} cannot be used: {error}.")
        if self.needed:
            if not self.module.check_mode:
                self.switch(generation, news)
            self.done(live.would(generation, self.result["moves"]), changed=True)
        what = f"generation {generation.number} ({generation.profile}) runs as rendered"
        self.done("; ".join([what, *news]) + ".", changed=bool(news), result=Result.UNCHANGED)

    def settle(self, rendered: Rendered) -> tuple[Generation, list[str]]:
        """The generation in its place, and what else was recorded; what differs goes to the result."""
        now = committed.committed(self.paths)
        number = store.number_for(rendered.digest, self.paths)
        same = now is not None and now.generation == number and now.digest == rendered.digest
        defect = store.is_written(rendered, number, now, self.paths)
        generation = store.load(self.paths, number) if defect is None else self.write(rendered, number, now)
        seen, target = live.seen(self.status())
        changes = live.live_changes(generation, self.paths)
        moves = decide_moves(generation.hashes, seen, changes, target)
        self.needed = bool(moves) or not same
        news = [f"its directory was written again, as {defect}"] if same and defect is not None else []
        origin, inventory_profile = self.module.params["origin"], self.module.params["inventory_profile"]
        if not self.needed and now is not None and origin == "inventory" != now.origin:
            news.append(f"the inventory says so now too, which only {now.origin} did before")
            if not self.module.check_mode:
                committed.commit(
                    generation,
                    self.paths,
                    origin=origin,
                    inventory_profile=inventory_profile,
                    chosen_at=now.chosen_at,
                )
        record = live.record_difference(now, generation, origin, self.paths, defect if same else None)
        self.result |= {
            "generation": number,
            "engines": {
                name: {"input_hash": engine.config.input_hash, "generation": engine.config.generation}
                for name, engine in generation.engines.items()
            },
            "moves": {key: asdict(moves)[key] for key in ("keep", "stop", "start", "wait", "target")},
            "files": live.file_rows(generation, self.paths, changes, None if same and not defect else record),
            "diff": [*map(live.difference, changes), *([record] if record else [])],
        }
        return generation, news


def main() -> None:
    Switch(AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)).main()


if __name__ == "__main__":
    main()
