#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: write the rendered generation, and switch the host to it if anything differs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_switch
short_description: Switch a host to the rendered generation
version_added: "0.1.0"
description:
  - Writes what the inventory rendered as one generation, a directory on the host, and compares it with what
    runs. If engines, live files or units differ, starts C(vllm-edge switch), which completes or rolls back even if
    Ansible is interrupted, and returns its journal. A generation that was written before keeps its number.
  - An engine keeps running unless its input hash changes, which covers what reaches the container or its supervisor.
  - While another switch is running, the module writes nothing and fails.
  - The switch is refused before it changes anything if foreign processes on a GPU of a new engine leave less memory
    than the GPU's budget, whatever O(foreign) is.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.foreign
attributes:
  diff_mode:
    description: Compares the live files with the rendered ones, whichever generation the live files belong to.
options:
  profile:
    description: Name of the profile.
    type: str
    required: true
  engines:
    description: The engines. Exactly these run after the switch.
    type: list
    elements: dict
    required: true
    suboptions:
      engine:
        description: The engine as an entry of C(serving_engines), with its C(name) and the settings that the plan adds.
        type: dict
        required: true
      unit:
        description: Text of the systemd unit.
        type: str
        required: true
      chat_template:
        description: Text of the chat template, if the engine does not use that of the checkpoint.
        type: str
  models:
    description: The models of the engines by name, each with C(repo), C(revision), C(precision), the C(path) of the
      weights and of their C(record) on the host, their C(bytes) and their C(manifest_sha256), as the filter
      C(describe_weights) returns them.
    type: dict
    required: true
  settings:
    description:
      - What the host gives to all its engines. Each key is the variable C(vllm_engine_<key>) of the role
        C(vllm_engine), whose argument specification has its type and unit.
      - Optional are C(image_id), C(memory), C(ulimits), C(request_limits), C(shutdown_timeout_s) (V(0) for a release of
        vLLM without it), C(bus_environment) and C(bus_arguments) as M(edge.vllm_edge.host_facts) returns them, and
        C(secrets_hashes) as M(edge.vllm_edge.engine_secrets) does.
    type: dict
    required: true
  target:
    description: Text of the systemd target that wants the engines.
    type: str
    required: true
  budgets_mib:
    description: Memory that the engines may use on each GPU of the host, by UUID, in MiB. V(0) for a GPU without an
      engine.
    type: dict
    required: true
  limits:
    description: Time limits of the switch, such as C(drain_timeout_s) in seconds, and C(keep_generations).
    type: dict
    default: {}
  quality:
    description: Questions that a switch asks the engines it starts, after the canary and before the commit. C(gate) is
      V(warn) or V(fail), C(cases) is the suite as C(quality_suite) has it, C(repeats) how often each case is asked,
      C(timeout_s) the seconds of one answer.
    type: dict
  purpose:
    description: What the generation is for.
    type: str
    choices:
      serving: It is committed after the switch to it has verified it.
      calibration: It is started, verified and measured, and the host's program goes back to the committed generation by
        itself, whether Ansible is there or not. RV(journal) has what was measured.
    default: serving
  early:
    description: Whether clients of the gateway reach each engine as soon as the switch has verified it, and not after
      the commit. They never do with O(quality), with O(purpose=calibration), and in the first switch of a host.
    type: bool
    default: true
  gap:
    description: Whether served names may leave this host although no other host of its fleet serves them. Otherwise the
      switch is refused.
    type: bool
    default: false
  origin:
    description: Where the profile was chosen.
    type: str
    choices:
      inventory: In the inventory.
      "-e": On the command line of Ansible, with C(-e).
      host: On the host, with the program C(vllm-edge).
    default: inventory
  inventory_profile:
    description: Name of the profile in the inventory.
    type: str
  asked_by:
    description: Who requests the switch. It is recorded in the journal.
    type: str
    default: Ansible
  state_directory:
    description: Directory of the host's state, which contains the generations.
    type: path
    default: /var/lib/vllm-edge
  configuration_directory:
    description: Directory of the live configuration.
    type: path
    default: /etc/vllm-edge
  units_directory:
    description: Directory of the live systemd units.
    type: path
    default: /etc/systemd/system
  program:
    description: Path of the program C(vllm-edge) on the host.
    type: path
    default: /usr/local/bin/vllm-edge
  timeout_s:
    description: Number of seconds to wait for a switch. If it takes longer, the module fails, and the switch continues.
    type: int
    default: 7200
"""

EXAMPLES = r"""
- name: Switch to the rendered engines
  edge.vllm_edge.serving_switch:
    profile: e2b-only
    engines:
      - engine: {name: e2b-all, model: e2b, tensor_parallel_size: 1, gpus: [0], served_names: [sentry]}
        unit: "{{ lookup('ansible.builtin.template', 'vllm-engine.service.j2') }}"
    models: "{{ model_weights_result | edge.vllm_edge.describe_weights(vllm_models, '/var/lib/vllm-edge') }}"
    settings: "{{ engine_settings }}"
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
  description: For each engine its C(input_hash), and the C(generation) with which it was introduced.
  type: dict
  returned: success
moves:
  description: Engines that are (or would be) kept, stopped, started, or waited for because they are still loading.
  type: dict
  returned: success
files:
  description: The live files, each with C(path) and C(diff). The latter is empty if the file is as rendered.
  type: list
  elements: dict
  returned: success
result:
  description: >-
    V(committed), V(measured) of a calibration, or V(unchanged) if no switch was necessary. On failure V(refused),
    V(rolled_back) or V(failed), or V(over_budget) if the first generation of the host is committed and serves with more
    memory than its budgets, or V(busy) while another switch is running. Absent in check mode if a switch would be
    necessary.
  type: str
  returned: when known
journal:
  description: Journal of the switch, see C(vllm-edge history).
  type: dict
  returned: when a switch ran and had something to do
msg:
  description: One paragraph that summarises what happened, or describes the error and its remedy.
  type: str
  returned: always
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.engine import policy
from ..module_utils.vllm_edge.engine.state import stamp
from ..module_utils.vllm_edge.generation import build, committed, live, store
from ..module_utils.vllm_edge.generation.build import Rendered
from ..module_utils.vllm_edge.generation.model import Choice, Committed, Generation, GenerationError
from ..module_utils.vllm_edge.paths import ETC, STATE, UNITS, HostPaths
from ..module_utils.vllm_edge.switch.journal import Busy, holder, take_lock
from ..module_utils.vllm_edge.switch.model import Exit, Result, decide_moves, explain_restarts
from ..module_utils.vllm_edge.switch.render import describe_moves, name_generation

ENGINE: dict[str, Any] = {
    "engine": {"type": "dict", "required": True},
    "unit": {"type": "str", "required": True},
    "chat_template": {"type": "str"},
}
ARGUMENT_SPEC: dict[str, Any] = {
    "profile": {"type": "str", "required": True},
    "engines": {"type": "list", "elements": "dict", "required": True, "options": ENGINE},
    "models": {"type": "dict", "required": True},
    "settings": {"type": "dict", "required": True},
    "target": {"type": "str", "required": True},
    "budgets_mib": {"type": "dict", "required": True},
    "foreign": {"type": "str", "choices": ["ignore", "warn", "fail"], "default": "warn"},
    "limits": {"type": "dict", "default": {}},
    "quality": {"type": "dict"},
    "purpose": {"type": "str", "choices": ["serving", "calibration"], "default": "serving"},
    "early": {"type": "bool", "default": True},
    "gap": {"type": "bool", "default": False},
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
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        given = module.params
        self.paths = HostPaths(
            Path(given["configuration_directory"]), Path(given["state_directory"]), Path(given["units_directory"])
        )
        self.program: str = given["program"]
        self.result: dict[str, Any] = {}
        self.needed = False
        """Whether the host's program has to switch."""
        self.restarts: tuple[str, ...] = ()
        """Why engines would restart, in check mode; otherwise the program says it."""

    def fail(self, text: str, result: str, **more: Any) -> NoReturn:
        self.module.fail_json(msg=text, result=result, **{**self.result, **more})

    def refuse(self, text: str) -> NoReturn:
        self.fail(f"{text} Nothing was changed on this host.", Result.REFUSED)

    def write(self, rendered: Rendered, number: int, now: Committed | None) -> Generation:
        """Write the generation. In check mode it goes to the module's own directory and can be read as usual."""
        files = store.documents(rendered, number, now, stamp())
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
        """Let systemd verify the units. An invalid unit would otherwise fail after the old engines are stopped."""
        for unit in units:
            rc, out, err = self.module.run_command(["systemd-analyze", "verify", unit], handle_exceptions=False)
            if rc != 0:
                raise GenerationError(f"systemd does not accept {Path(unit).name}: {(err or out).strip()}.")

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
        # With `=`, because one of the origins looks like an option.
        arguments += [f"--origin={given['origin']}", f"--asked-by={given['asked_by']}"]
        arguments += ["--gap"] if given["gap"] else []
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
            # An engine that was still loading before serves by now. The journal contains no answers of engines.
            self.done(" ".join([message, *news]), changed=bool(news))
        self.result["journal"] = journal
        if result not in (Result.COMMITTED, Result.MEASURED):
            self.module.fail_json(msg=message, **{**self.result, "changed": result is not Result.REFUSED})
        self.done(message, changed=True)

    def done(self, text: str, *, changed: bool, **more: Any) -> NoReturn:
        self.module.exit_json(msg=text, **{**self.result, **more, "changed": changed})

    def main(self) -> NoReturn:
        try:
            rendered = build.rendered(self.module.params, self.paths, store.read_installed_hashes(self.paths))
            if self.module.check_mode:
                running = holder(self.paths)
                if running is not None:
                    raise Busy(running)
                generation, news = self.settle(rendered)
            else:
                with take_lock(self.paths):
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
            words = {"stop": "stop", "start": "start", "wait": "wait for", "keep": "keep"}
            moves = describe_moves(self.result["moves"], words) or "no engine moves"
            moves += ", and back" if generation.purpose == "calibration" else ""
            self.done("; ".join([f"would go to {name_generation(generation)}: {moves}", *self.restarts]), changed=True)
        what = f"generation {generation.number} ({generation.profile}) runs as rendered"
        self.done("; ".join([what, *news]) + ".", changed=bool(news), result=Result.UNCHANGED)

    def settle(self, rendered: Rendered) -> tuple[Generation, list[str]]:
        """Write the generation if necessary. Return it with what else was recorded. Differences go to the result."""
        now = committed.committed(self.paths)
        number = store.choose_number(rendered.digest, self.paths)
        same = now is not None and now.generation == number and now.digest == rendered.digest
        defect = store.is_written(rendered, number, now, self.paths)
        # Before a generation that names it.
        renewed = policy.install(self.paths, write=not self.module.check_mode)
        generation = store.load(self.paths, number) if defect is None else self.write(rendered, number, now)
        seen, target = live.seen(self.status())
        changes = live.live_changes(generation, self.paths)
        moves = decide_moves(generation.hashes, seen, changes, target)
        self.needed = bool(moves) or not same
        if self.module.check_mode and now is not None and now.generation in store.numbers(self.paths):
            with contextlib.suppress(GenerationError):
                self.restarts = explain_restarts(store.load_committed(self.paths), generation, moves)
        news = [f"its directory was written again, as {defect}"] if same and defect is not None else []
        news += [f"the file in {self.paths.policies} was written again"] if same and renewed else []
        origin = self.module.params["origin"]
        if not self.needed and now is not None and origin == "inventory" != now.origin:
            news.append(f"the inventory says so now too, which only {now.origin} did before")
            if not self.module.check_mode:
                choice = Choice(origin, self.module.params["inventory_profile"])
                committed.commit(generation, self.paths, choice, now.chosen_at, over_budget=now.over_budget)
        record = None
        if generation.purpose == "serving":
            record = live.record_difference(now, generation, origin, self.paths, defect if same else None)
        self.result |= {
            "generation": number,
            "engines": generation.marks,
            "moves": {key: asdict(moves)[key] for key in ("keep", "stop", "start", "wait", "target")},
            "files": live.build_file_rows(generation, self.paths, changes, None if same and not defect else record),
            "diff": [*map(live.difference, changes), *([record] if record else [])],
        }
        return generation, news


def main() -> None:
    Switch(AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)).main()


if __name__ == "__main__":
    main()
