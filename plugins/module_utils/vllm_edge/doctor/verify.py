# SPDX-License-Identifier: Apache-2.0
"""The judgement of what `playbooks/verify.yml` collected: one row for each check, one paragraph for each problem.

These are pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..status.collect import HISTORY
from ..status.problems import (
    chosen_words,
    engine_problems,
    file_problems,
    find_profile_problems,
    find_target_problems,
    judge,
    switch_problems,
)
from ..status.tables import describe_checks, render_gpu_table, render_role_table
from ..switch.render import describe_result
from ..text import WIDTH, table

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Checked:
    """The result of one check. `found` is None if nothing could be compared; then `problems`, or the check of the host,
    say why."""

    what: str
    found: str | None
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "PROBLEM" if self.problems else "ok" if self.found is not None else "not compared"


@dataclass(frozen=True)
class Collected:
    """What the playbook collected. None means that it could not be collected, or was not for a reason that another
    check names.

    The collecting tasks do not fail, so that all of them run. A module failed if its result lacks the expected keys.
    """

    host: str
    status: Row
    image: Row
    weights: Sequence[Row]
    canary: Sequence[Row]
    files: Sequence[Row] | None
    vram: Row | None


# ---- single checks ----------------------------------------------------------------------------------------------


def check_host(status: Row) -> Checked:
    """Report what could not be asked: systemd, Docker, NVML, and files of the project that cannot be read."""
    judged = judge(status)
    return Checked(
        "host", "systemd, Docker and NVML answer", [text for text in status["problems"] if text not in judged]
    )


def check_profile(status: Row) -> Checked:
    """Compare the active profile with the one that the inventory names."""
    profile = status["active_profile"] or {}
    problems = find_profile_problems(status)
    if problems and status["active_profile"] is not None and profile.get("profile") != status["expected_profile"]:
        problems[0] += (
            " Files, weights and memory were not compared with the inventory, which is about other engines; "
            f"'-e serving_profile={profile.get('profile')}' verifies what runs."
        )
    found = f"{profile.get('profile')}, generation {profile.get('generation')}, {chosen_words(profile)}"
    return Checked("profile", found, problems)


def check_switches(status: Row) -> Checked:
    """Report an unfinished switch, and a running one, because it changes what the other checks look at."""
    problems, running = switch_problems(status), status.get("switch")
    if running is not None:
        problems.append(
            f"A switch to generation {running['generation']} ({running['profile']}) runs, asked by "
            f"{running['asked_by']}, phase {running['phase'] or 'none yet'}: what was looked at meanwhile may be of "
            "either generation. 'vllm-edge progress' says how far it is; verify again when it has ended."
        )
    former = status.get("history") or []
    last = f", the last {describe_result(former[0]['result'])} at {former[0]['started_at']}" if former else ""
    # The status has only the newest switches.
    count = f"the newest {len(former)}" if len(former) >= HISTORY else str(len(former))
    return Checked("switches", f"{count} known{last}, none unfinished", problems)


def check_generation(status: Row, files: Sequence[Row] | None) -> Checked:
    """Compare the live files with the directory of the committed generation, which a rollback would restore.

    A file that differs from what the inventory renders is reported by `check_files` instead.
    """
    live = status.get("live_files")
    found = None if live is None else f"live files as in generation {(status['active_profile'] or {})['generation']}"
    named = {entry["path"] for entry in files or [] if difference(entry.get("diff")) is not None}
    left = [row for row in live or [] if row["path"] not in named]
    return Checked("generation", found, file_problems({**status, "live_files": left}))


def check_units(status: Row) -> Checked:
    """Check the units of the engines and the target."""
    engines = status["engines"]
    switching = status.get("switch") is not None
    problems = [text for engine in engines for text in engine_problems(engine, switching=switching)]
    if not switching:
        problems += find_target_problems(status["target"], bool(engines))
    ports = [str(engine["port"]) for engine in engines]
    return Checked(
        "units", f"{len(engines)} active, enabled at boot, {', '.join(ports)} on the loopback only", problems
    )


def check_containers(status: Row, image: Row) -> Checked:
    """Check that the containers run the recorded image."""
    problems = []
    for engine in status["engines"]:
        if engine["container_state"] == "absent" and engine["active_state"] == "active":
            problems.append(
                f"{engine['unit']} is active and has no container {engine['container']}: "
                f"'systemctl restart {engine['unit']}'."
            )
        running, recorded = engine["container_image_id"], image.get("recorded_id")
        if running and recorded and running != recorded:
            problems.append(
                f"Container {engine['container']} runs the image {running}, recorded is {recorded}: run site.yml."
            )
    return Checked("containers", f"{len(status['engines'])} of the recorded inputs and image", problems)


def check_image(image: Row) -> Checked:
    """Check that the recorded image is on the host under its name."""
    name, recorded, present = image.get("name"), image.get("recorded_id"), image.get("present_id")
    if not recorded:
        return Checked("image", None, ["No image is recorded on this host: run site.yml."])
    problems = []
    if not present:
        problems.append(
            f"The image {name} ({recorded}) is not on this host: engines that run go on, and none could start again. "
            "Run site.yml."
        )
    elif present != recorded:
        problems.append(
            f"{name} is {present} on this host, recorded is {recorded}: somebody moved the tag. Run site.yml to build "
            "the image again, or tag the recorded one."
        )
    return Checked("image", f"{name} ({recorded.removeprefix('sha256:')[:12]})", problems)


def check_weights(model: Row) -> Checked:
    """Check the weights of one model, whose files were all hashed."""
    what = f"weights {model['name']}"
    again = "'ansible-playbook playbooks/weights.yml -e verify_weights=full'"
    result = model.get("result")
    if not model.get("recorded"):
        return Checked(
            what, None, [f"The weights of {model['name']} ({model['repo']}) are not recorded: run site.yml."]
        )
    if not model.get("fits"):
        return Checked(
            what,
            None,
            [
                f"The weights of {model['name']} on this host are {model['recorded']['repo']} at "
                f"{model['recorded']['revision']}, the inventory says {model['repo']} at {model['revision']}: run "
                "site.yml to bring those."
            ],
        )
    if result is None or "damaged" not in result:
        reason = (result or {}).get("msg") or "the module said nothing"
        return Checked(what, None, [f"The weights of {model['name']} could not be verified: {reason}"])
    damaged: Mapping[str, str] = result.get("damaged") or {}
    missing = sorted(set(result.get("downloaded") or []) - damaged.keys())
    path = result["path"]
    problems = [
        f"{path}/{name} of model {model['name']} is damaged: {why}. {again} brings this file again; an engine that "
        "runs has read it already and needs a restart if it was damaged before that."
        for name, why in sorted(damaged.items())
    ]
    problems += [f"{path}/{name} of model {model['name']} is missing. {again} brings it." for name in missing]
    problems += [
        f"{name} of model {model['name']} has owner and mode {was}: engines may not be able to read it, or somebody "
        f"else may change it. {again} sets them."
        for name, was in sorted((result.get("healed") or {}).items())
    ]
    size_mib = int(result.get("bytes") or 0) / 1024**2
    found = f"{result.get('files')} files, {size_mib:,.0f} MiB, sha256 as recorded at {result.get('revision', '')[:12]}"
    return Checked(what, found, problems)


def check_canary(status: Row, canary: Sequence[Row]) -> Checked:
    """Report failures of the canary. An engine that does not run is reported by `check_units`."""
    asked = {row["engine"]: row for row in canary}
    problems = []
    answered = 0
    for engine in status["engines"]:
        row = asked.get(engine["engine"])
        if row is None:
            continue
        if "results" not in row:
            problems.append(f"The canary of {engine['engine']} could not be asked: {row.get('error') or 'no answer'}")
            continue
        answered += sum(bool(result["ok"]) for result in row["results"])
        failed = [result for result in row["results"] if not result["ok"]]
        problems += [
            f"{note[0].upper()}{note[1:]}. 'vllm-edge canary {engine['engine']}' asks again, 'journalctl -u "
            f"{engine['unit']}' has vLLM's own words."
            for note in failures(failed)
        ]
    total = sum(len(engine["served_names"]) for engine in status["engines"])
    return Checked("served names", f"{answered} of {total} answer", problems)


def failures(results: Sequence[Row]) -> list[str]:
    """Return a sentence for each failure; served names that failed alike share it."""
    said: dict[str, list[str]] = {}
    for result in results:
        said.setdefault(str(result.get("error") or describe_checks(result)).rstrip("."), []).append(
            str(result["served_name"])
        )
    return [f"served name {', '.join(names)} does not answer as it should: {why}" for why, names in said.items()]


def check_files(files: Sequence[Row] | None) -> Checked:
    """Compare the rendered files with what the inventory would render now. None means that they were not compared."""
    if files is None:
        return Checked("files", None)
    problems = []
    for entry in files:
        how = difference(entry.get("diff"))
        if entry.get("diff") is None:
            problems.append(f"{entry['path']} could not be compared: {entry.get('msg')}")
        elif how is not None:
            problems.append(
                f"{entry['path']} is not what the inventory renders: {how}. 'site.yml --check --diff' shows it, "
                "site.yml renders it again; where the change was meant, put it into the inventory."
            )
    return Checked("files", f"{len(files)} as the inventory renders them", problems)


def difference(diff: object) -> str | None:
    """Return how a file differs, from the `diff` that a module returned; None if it does not."""
    parts = diff if isinstance(diff, list) else [diff]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("before") == part.get("after"):
            continue
        before, after = part.get("before"), part.get("after")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            wrong = [
                f"{key} is {before.get(key)} instead of {after[key]}" for key in after if after[key] != before.get(key)
            ]
            return ", ".join(wrong)
        if not part.get("before_header") and not before:
            return "it is missing"
        return "its content differs"
    return None


def check_memory(vram: Row | None) -> Checked:
    """Check that every GPU is within its budget."""
    if vram is None:
        return Checked("GPUs", None)
    gpus = vram.get("gpus") or []
    # Without `failures` nothing was measured, and the message says why.
    problems = list(map(str, vram["failures"])) if "failures" in vram else [str(vram.get("msg"))]
    return Checked("GPUs", f"{len(gpus)} within budget", problems)


# ---- all of them ------------------------------------------------------------------------------------------------


def verify(collected: Collected) -> list[Checked]:
    """Return every check, in the order in which an operator repairs."""
    status = collected.status
    return [
        check_host(status),
        check_profile(status),
        check_switches(status),
        check_generation(status, collected.files),
        check_units(status),
        check_containers(status, collected.image),
        check_image(collected.image),
        *[check_weights(model) for model in collected.weights],
        check_files(collected.files),
        check_canary(status, collected.canary),
        check_memory(collected.vram),
    ]


def render(collected: Collected, checked: Sequence[Checked]) -> list[str]:
    """Return the result as text of at most 100 columns."""
    count = sum(len(check.problems) for check in checked)
    verdict = "verified" if count == 0 else f"NOT verified, {count} problem{'' if count == 1 else 's'}"
    lines = [f"{collected.host}: {verdict}", ""]
    lines += table(
        ["check", "verdict", "found"],
        [[check.what, check.verdict, (check.found or "-") if not check.problems else "-"] for check in checked],
    )
    ports = {engine["engine"]: engine["port"] for engine in collected.status["engines"]}
    asked = [
        {"port": ports.get(row["engine"]), **row} for canary in collected.canary for row in canary.get("results", [])
    ]
    if asked:
        lines += ["", *render_role_table(asked)]
    if collected.vram is not None and collected.vram.get("gpus"):
        lines += ["", *render_gpu_table(collected.vram["gpus"])]
    return [line[:WIDTH] for line in lines]
