# SPDX-License-Identifier: Apache-2.0
"""Checks that run before a switch changes anything. Each problem is a sentence that says what to do.

Memory of engines that will be stopped counts as free, and that of our containers beside them, which `away` ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ...engine.config import EngineConfig
from ...engine.policy import find_problem
from ...generation import secrets
from ...generation.model import Generation, GenerationError, Limits
from ...gpu.condition import explain_action, explain_mode, find_obstacle, read_action
from ...paths import HostPaths
from ...planning.load_time import expect_load
from ...system.docker import DockerAway, DockerEngine, DockerRefused
from ...system.nvml import NvmlFailure
from ...system.space import find_shortage, measure_step
from ...weights.record import load_record
from ...weights.verification import verify_recorded
from ..model import Done, Moves, PhaseFailed
from ..view import HostView
from . import hooks
from .gpu_memory import load_slots, look, read_boards, require


def check_host(host: HostView, wanted: Generation, moves: Moves) -> Done:
    """Run all checks and report every problem at once, so that an operator can repair them together.

    Raises PhaseFailed if anything would make the switch fail.
    """
    began = host.clock()
    start = [wanted.engines[name].config for name in moves.start]
    problems: list[str] = []
    try:
        host.list_containers()  # waits for a Docker Engine that is being restarted
    except PhaseFailed as failed:
        problems.append(failed.text)
    else:
        problems += check_images(start, host.docker)
    warnings = check_load_limit(host.paths, wanted, start)
    problems += check_weights(start, warnings)
    problems += check_disks(host.paths)
    problems += check_secrets(host.paths, wanted, moves)
    problems += check_policies(wanted, moves)
    problems += [text for hook in hooks.HOOKS for text in hooks.find_unsafe(host.paths.hook_dir(hook))]
    problems += check_gpus(host, wanted, moves, warnings)
    if problems:
        raise PhaseFailed(" ".join(problems), engines=moves.start)
    done = f"image, weights, GPUs and disk as they should be; {host.clock() - began:.1f} s"
    return Done(done, warnings=tuple(warnings))


def check_load_limit(paths: HostPaths, wanted: Generation, start: Iterable[EngineConfig]) -> list[str]:
    """Return a warning for each engine whose load may take longer than an operator lets the switch wait.

    The default is no operator's limit: the switch raises it (loading.py).
    """
    limit_s = wanted.limits.healthy_timeout_s
    expected = [(config, found) for config in start if (found := expect_load(paths, config)) is not None]
    return [
        f"vllm_engine_healthy_timeout_s is {limit_s:g}, and engine {config.engine} may take up to {found.high:.0f} s "
        f"to load ({found.basis}); the switch fails if it does. Set {math.ceil(found.high)} or more."
        for config, found in expected
        if found.high > limit_s != Limits.healthy_timeout_s
    ]


def check_secrets(paths: HostPaths, wanted: Generation, moves: Moves) -> list[str]:
    """Check that the secrets of every engine that starts are on the host; their content is not judged."""
    try:
        missing = secrets.find_missing(wanted, moves.start, paths)
    except GenerationError as error:
        return [f"The secrets of the engines cannot be used: {error}"]
    return [
        f"The secrets of engine {name} are not on this host ({paths.secret_file(name)}): site.yml brings them, from "
        "vllm_engine_secrets."
        for name in missing
    ]


def check_policies(wanted: Generation, moves: Moves) -> list[str]:
    """Check the file by which an engine judges requests; an older generation may need one that is gone."""
    found = {name: find_problem(wanted.engines[name].container) for name in moves.start}
    return [
        f"Engine {name} cannot start, {problem}. A generation of this release has its own: run site.yml."
        for name, problem in found.items()
        if problem
    ]


def check_images(configs: Iterable[EngineConfig], docker: DockerEngine) -> list[str]:
    """Check that every image of the generation is on the host; one sentence for each image, not engine."""
    problems: list[str] = []
    wanted: dict[tuple[str, str], list[str]] = {}
    for config in configs:
        wanted.setdefault((config.image, config.image_id), []).append(config.engine)
    for (image, image_id), engines in wanted.items():
        who = f"Image {image} ({image_id or 'of any id'}) of {', '.join(engines)}"
        try:
            # Engines are created by the id, so it does not matter where the name leads.
            there = docker.image_id(image_id or image)
        except (DockerAway, DockerRefused) as error:
            problems.append(
                f"{who} could not be looked for: {error}. 'systemctl status docker.service' tells how Docker does."
            )
            continue
        if there is None:
            problems.append(f"{who} is not on this host: 'ansible-playbook playbooks/image.yml' brings it.")
        elif image_id and there != image_id:
            problems.append(
                f"{who} is {there} for Docker, which is another one. Run 'ansible-playbook playbooks/image.yml'."
            )
    return problems


def check_weights(configs: Iterable[EngineConfig], warnings: list[str]) -> list[str]:
    """Check every weight file by size and time. The content is hashed only for files that changed since they were
    recorded. What is no problem is added to `warnings`."""
    problems: list[str] = []
    models = {config.weights_record or config.model: config for config in configs}
    for config in models.values():
        again = "'ansible-playbook playbooks/weights.yml -e verify_weights=full' brings what is wrong again"
        name = f"weights of {config.model} ({config.repo})"
        if not config.weights_record:
            warnings.append(f"The {name} were not looked at: the generation names no record. Run site.yml.")
            continue
        try:
            record = load_record(Path(config.weights_record))
            if record is None:
                problems.append(
                    f"The {name} are not recorded in {config.weights_record}: 'ansible-playbook playbooks/weights.yml' "
                    "brings and records them."
                )
                continue
            # The record has the resolved directory; `weights_path` may be a link to it.
            if config.weights_path and Path(record.path).resolve() != Path(config.weights_path).resolve():
                problems.append(
                    f"The {name} are recorded at {record.path}, the engine reads {config.weights_path}: run site.yml."
                )
                continue
            verification = verify_recorded(record, full=False)
        except OSError as error:
            problems.append(f"The {name} cannot be read: {error}. Is the disk mounted? {again}.")
            continue
        wrong = [f"{name} is missing" for name in verification.missing]
        wrong += [f"{name} is damaged ({why})" for name, why in sorted(verification.damaged.items())]
        if wrong:
            problems.append(f"In {record.path}, the {name}: {'; '.join(wrong)}. {again}.")
    return problems


def check_disks(paths: HostPaths) -> list[str]:
    """Check that there is room for what a switch writes. That is little, but a full disk would end it halfway."""
    try:
        paths.state.stat()  # measured would be that of its parent if it were missing
        spaces = [(space, find_shortage(space)) for space in measure_step("switch", vars(paths))]
    except OSError as error:
        return [f"{paths.state} cannot be used: {error}. A switch keeps its journal there: run site.yml."]
    return [
        f"{wrong} for the journal and files of a switch. Make room ('du -xh {space.mount} | sort -h | tail' shows "
        "where it went), then switch again."
        for space, wrong in spaces
        if wrong
    ]


def check_gpus(host: HostView, wanted: Generation, moves: Moves, warnings: list[str]) -> list[str]:
    """Check that every GPU of the generation is there, and has room beside processes of other people.

    `wanted.foreign` decides: `fail` makes any such process a problem; otherwise it is a problem only if the budget does
    not fit beside it, and `ignore` suppresses what is added to `warnings`.
    """
    try:
        with host.nvml() as session:
            boards, lost = read_boards(session, load_slots(host.paths))
            wants = {uuid for name in moves.start for uuid in wanted.engines[name].config.gpus}
            modes = {gpu.uuid: session.read_mode(gpu) for gpu in boards.gpus if gpu.uuid in wants}
    except NvmlFailure as failure:
        return [f"The GPUs cannot be read: {failure}"]
    owners = host.owners({process.pid for gpu in boards.gpus for process in gpu.processes or ()})
    looks = {gpu.uuid: look(gpu, owners, ()) for gpu in boards.gpus}
    problems: list[str] = []
    try:
        require(boards, lost, list(dict.fromkeys(uuid for one in wanted.engines.values() for uuid in one.config.gpus)))
    except (PhaseFailed, NvmlFailure) as failed:
        problems.append(str(failed))
    users = Counter(uuid for one in wanted.engines.values() for uuid in one.config.gpus)
    for uuid, mode in modes.items():
        others = len(looks[uuid].others) + len(looks[uuid].unknown)
        if why := find_obstacle(mode.compute_mode, mode.mig, users[uuid] + others):
            problems.append(f"{looks[uuid].card} {why}. {explain_mode(uuid, mode.mig)}")
        if (action := read_action(mode.recovery or "none")) != "none":
            text = f"{looks[uuid].card}: the driver asks for the recovery action {mode.recovery}."
            (problems if action in ("reset", "reboot") else warnings).append(f"{text} {explain_action(action, uuid)}")
    for engine, uuid in ((name, uuid) for name in moves.start for uuid in wanted.engines[name].config.gpus):
        occupied = looks.get(uuid)
        if occupied is None or not (who := [*occupied.others, *occupied.unknown]):
            continue
        text = f"{occupied.card}, which engine {engine} is to use, is used by others: {'; '.join(who)}."
        budget = wanted.budgets_mib.get(uuid, 0)
        room = occupied.gpu.total_mib - (occupied.gpu.reserved_mib or 0) - occupied.foreign_mib
        if wanted.foreign == "fail":
            problems.append(f"{text} foreign is fail: stop them, or let the profile use other GPUs.")
        elif room < budget:
            problems.append(
                f"{text} The {room} MiB beside them are less than the budget of {budget} MiB: stop them, or choose a "
                "profile that leaves this GPU alone. They were not touched."
            )
        elif wanted.foreign == "warn":
            warnings.append(text if occupied.exact else f"{text} NVML does not say how much they hold.")
    return problems
