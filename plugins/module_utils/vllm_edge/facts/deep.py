# SPDX-License-Identifier: Apache-2.0
"""The reader of `doctor --deep`: what takes minutes, or needs the program that is installed on the host.

It changes nothing on the host, except that a canary that passed is recorded as always.
"""

from __future__ import annotations

import grp
from functools import partial
from pathlib import Path

from ..answers.canary_command import full_canary
from ..paths import HostPaths
from ..switch.steps.preflight import check_images
from ..system.docker import DockerEngine
from ..weights.record import load_record
from ..weights.survey import Ownership, find_ownership_faults, survey_recorded
from .model import Deep, Expectation, Weights
from .serving import ask_gpus, collect, load_configs

CANARY_TIMEOUT_S = 120.0
REPAIR = "'ansible-playbook playbooks/weights.yml -e verify_weights=full'"


def hash_weights(model: str, repo: str, revision: str, group: str, state: Path) -> Weights:
    """Hash every file of a model, and compare files, owners and modes with the record."""
    what = f"The weights of {model}"
    try:
        record = load_record(state / f"{model}.json")
        if record is None:
            return Weights(model, problems=(f"{what} ({repo}) are not recorded: run site.yml.",))
        if record.repo != repo or revision not in (record.requested_revision, record.revision):
            wrong = f"{what} on this host are {record.repo} at {record.revision}, wanted are {repo} at {revision}"
            return Weights(model, problems=(f"{wrong}: run site.yml to bring those.",))
        survey = survey_recorded(record, full=True)
        owner = Ownership(0, grp.getgrnam(group).gr_gid)
        faults = find_ownership_faults(Path(record.path), survey.good, owner)
    except (OSError, KeyError) as error:
        return Weights(model, problems=(f"{what} could not be verified: {error}.",))
    problems = [
        f"{record.path}/{name} of model {model} is damaged: {why}. {REPAIR} brings this file again; an engine that "
        "runs has read it already and needs a restart if it was damaged before that."
        for name, why in sorted(survey.damaged.items())
    ]
    problems += [f"{record.path}/{name} of model {model} is missing. {REPAIR} brings it." for name in survey.missing]
    problems += [
        f"{path} of model {model} has owner and mode {was}: engines may not be able to read it, or somebody else may "
        f"change it. {REPAIR} sets them."
        for path, was in sorted(faults.items())
    ]
    return Weights(model, len(record.files), record.total_bytes, record.revision, tuple(problems))


def read_deep(paths: HostPaths, expected: Expectation) -> Deep:
    """Collect the status, hash the weights, look for the images, and send the canary to every engine that runs.

    Args:
        expected: what the inventory expects. Without its weights, those of the engines on the host are hashed.
    """
    docker = DockerEngine(request_timeout_s=10)
    configs, _ = load_configs(paths)  # what is wrong with the others is in the status
    status = collect(paths, docker, gpus=partial(ask_gpus, foreign=expected.foreign), expected_profile=expected.profile)
    active = {engine["engine"] for engine in status["engines"] if engine["active_state"] == "active"}
    models = {config.model: (config.repo, config.revision) for config in configs}
    if expected.weights:
        models = {model["name"]: (model["repo"], model.get("revision", "main")) for model in expected.weights}
    return Deep(
        expected=expected,
        status=status,
        images=tuple(check_images(configs, docker)),
        weights=tuple(
            hash_weights(name, *source, group=expected.group, state=paths.state / "weights")
            for name, source in models.items()
        ),
        canary={
            config.engine: full_canary(config, paths, docker, CANARY_TIMEOUT_S)
            for config in configs
            if config.engine in active
        },
    )
