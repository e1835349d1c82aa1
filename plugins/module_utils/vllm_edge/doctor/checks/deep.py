# SPDX-License-Identifier: Apache-2.0
"""The checks of `doctor --deep`: what serves is what the inventory and the records say. Every problem is a failure.

The sentences of the evidence name their remedies themselves, because one check may find several problems.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...facts.model import Deep
from ...names import unit_name
from ...status.problems import chosen_words, judge
from ..contract import NotKnown, Verdict, fail, good


def _judge(problems: Sequence[str], evidence: str, nothing: str = "") -> Verdict:
    """Judge by the problems. Raises NotKnown with `nothing` if there is no evidence, because nothing was looked at."""
    if not problems and not evidence:
        raise NotKnown(nothing)
    return fail(" ".join(problems)) if problems else good(evidence)


def check_status(deep: Deep) -> Verdict:
    """Fail on every problem that `vllm-edge status` names, and while a switch runs, which changes what is looked at.

    Drift is a warning of the status and no failure. A file that `check_files` names is not named again.
    """
    status = deep.status
    named = {file["path"] for file in deep.expected.files or () if file["how"]}
    live = status["live_files"]
    left = None if live is None else [file for file in live if file["path"] not in named]
    problems = [*status["problems"], *judge({**status, "live_files": left, "on_drift": "ignore"})]
    running = status["switch"]
    if running is not None:
        problems.append(
            f"{'A calibration of' if running.get('purpose') == 'calibration' else 'A switch to'} generation "
            f"{running['generation']} ({running['profile']}) runs, asked by "
            f"{running['asked_by']}, phase {running['phase'] or 'none yet'}: what was looked at meanwhile may be of "
            "either generation. 'vllm-edge progress' says how far it is; check again when it has ended."
        )
    profile = status["active_profile"]
    if profile is None:
        return _judge(problems, "no profile is active on this host")
    return _judge(
        problems,
        f"profile {profile.get('profile')}, generation {profile.get('generation')}, {chosen_words(profile)}; "
        f"{len(status['engines'])} engines and {len(status['gpus'])} GPUs are as they should be",
    )


def check_images(deep: Deep) -> Verdict:
    problems = list(deep.images)
    for engine in deep.status["engines"]:
        running, wanted = engine["container_image_id"], engine["image_id"]
        if engine["container_state"] == "absent" and engine["active_state"] == "active":
            problems.append(
                f"{engine['unit']} is active and has no container {engine['container']}: "
                f"'systemctl restart {engine['unit']}'."
            )
        if running and wanted and running != wanted:
            problems.append(
                f"Container {engine['container']} runs the image {running}, recorded is {wanted}: run site.yml."
            )
    images = sorted({f"{engine['image']} ({engine['image_id'][7:19]})" for engine in deep.status["engines"]})
    return _judge(problems, ", ".join(images), "no engine is configured on this host")


def check_weights(deep: Deep) -> Verdict:
    """Fail if weights are not recorded, are others than expected, or if a file is missing, damaged or not protected."""
    told = [
        f"{model.model}: {model.files} files, {model.size_bytes / 1024**2:,.0f} MiB, sha256 as recorded at "
        f"{model.revision[:12]}"
        for model in deep.weights
    ]
    problems = [problem for model in deep.weights for problem in model.problems]
    return _judge(problems, "; ".join(told), "no engine is configured on this host")


def check_files(deep: Deep) -> Verdict:
    """Fail if a file differs from what the inventory renders. Only Ansible can tell."""
    files, profile = deep.expected.files, deep.status["active_profile"] or {}
    if files is None:
        if deep.expected.profile is None:
            raise NotKnown("not compared with the inventory: 'ansible-playbook playbooks/verify.yml' does that")
        if profile.get("profile") != deep.expected.profile:
            raise NotKnown(
                "not compared: the inventory is about the engines of another profile; '-e serving_profile="
                f"{profile.get('profile')}' verifies what runs"
            )
        raise NotKnown("not compared: a switch runs, or image, weights or GPUs are not known")
    problems = [
        f"{file['path']} is not what the inventory renders: {file['how']}. 'site.yml --check --diff' shows it, "
        "site.yml renders it again; if the change was meant, put it into the inventory."
        for file in files
        if file["how"]
    ]
    return _judge(problems, f"{len(files)} files are as the inventory renders them")


def check_canary(deep: Deep) -> Verdict:
    results = [result for answers in deep.canary.values() for result in answers]
    failures: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if not result.ok:
            failures.setdefault((result.engine, str(result.error).rstrip(".")), []).append(result.served_name)
    problems = [
        f"Served name {', '.join(names)} does not answer as it should: {why}. 'vllm-edge canary {engine}' asks again, "
        f"'journalctl -u {unit_name(engine)}' has vLLM's own words."
        for (engine, why), names in failures.items()
    ]
    told = [f"{result.served_name} ({result.engine}) in {result.seconds:.2f} s" for result in results]
    return _judge(problems, f"all answer: {', '.join(told)}" if told else "", "no engine runs")
