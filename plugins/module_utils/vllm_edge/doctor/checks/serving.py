# SPDX-License-Identifier: Apache-2.0
"""The checks of the engines: files, units, sockets, start at boot and switches."""

from __future__ import annotations

from ...facts.model import Engine, Facts
from ..contract import Verdict, decline_to_judge, fail, good, known, listed, warn


def engines(facts: Facts) -> tuple[Engine, ...]:
    found = known(facts.serving.engines)
    if not found:
        decline_to_judge("no engine is configured on this host")
    return found


def check_configuration(facts: Facts) -> Verdict:
    if facts.serving.errors:
        return fail("; ".join(facts.serving.errors), "Run site.yml, which renders the files of every engine anew.")
    return good(f"every engine's files are valid: {listed([engine.name for engine in engines(facts)])}")


def settled(facts: Facts) -> tuple[Engine, ...]:
    """Return the engines. Raises NotKnown while a switch runs, because it changes them."""
    if facts.serving.switching:
        decline_to_judge("a switch runs; 'vllm-edge progress' says how far it is")
    return engines(facts)


def check_units(facts: Facts) -> Verdict:
    found = settled(facts)
    failed = [engine for engine in found if engine.unit.active_state == "failed" or engine.unit.auto_restart]
    if failed:
        told = ", ".join(f"{engine.unit.id} {engine.unit.active_state} ({engine.unit.result})" for engine in failed)
        return fail(told, f"'vllm-edge explain {failed[0].name}' says why it ended last, and what to do.")
    if caches := [(engine.name, text) for engine in found for text in known(engine.cache)]:
        return warn(
            f"compile caches of engines: {'; '.join(text for _, text in caches)}",
            f"'vllm-edge explain {caches[0][0]}' says whether one broke a start. One that is set aside goes once "
            "the engine has started, and with playbooks/engines.yml. The next start empties one that is too large.",
        )
    down = [engine for engine in found if engine.unit.active_state != "active"]
    if not down:
        return good(f"{len(found)} engines run")
    told = ", ".join(f"{engine.unit.id} is {engine.unit.active_state}" for engine in down)
    if all(engine.unit.active_state == "activating" for engine in down):
        return good(told, "'vllm-edge status' shows how far it is.")
    return warn(told, f"'systemctl start {down[0].unit.id}', or site.yml, which starts all of them.")


def check_sockets(facts: Facts) -> Verdict:
    found = settled(facts)
    if wrong := known(facts.serving.socket_directories):
        return fail(
            "; ".join(wrong),
            "'systemd-tmpfiles --create /etc/tmpfiles.d/vllm-edge.conf' corrects the directories, and so does a boot; "
            "site.yml brings that file.",
        )
    running = [engine for engine in found if engine.unit.active_state == "active"]
    silent = [f"{engine.name}: {problem}" for engine in running if (problem := known(engine.silent))]
    if silent:
        return fail(
            f"the socket of an engine whose unit is active is not as it should be: {'; '.join(silent)}",
            "'systemctl restart' of the unit makes a new container and socket; 'journalctl -u' of it says more.",
        )
    return good(f"{listed([engine.name for engine in running])} answer on sockets")


def check_libraries(facts: Facts) -> Verdict:
    old = {engine.unit.id: names for engine in settled(facts) if (names := known(engine.replaced))}
    if not old:
        return good("no supervisor runs with a library that was replaced")
    return warn(
        "; ".join(f"{unit} runs with a former {listed(names, 3)}" for unit, names in old.items()),
        f"'systemctl restart {' '.join(old)}' at a good time: each engine loads its model anew. needrestart leaves "
        "engines alone.",
    )


def check_boot(facts: Facts) -> Verdict:
    engines(facts)
    target = known(facts.serving.target)
    if target.starts_at_boot:
        return good("vllm-edge.target starts the engines at boot")
    return warn("vllm-edge.target is not enabled", "'systemctl enable vllm-edge.target', or run site.yml.")


def check_permissions(facts: Facts) -> Verdict:
    known(facts.serving.engines)
    if facts.serving.open_to_others:
        return fail(
            " ".join(facts.serving.open_to_others),
            "Correct owner and mode: 'chown root:root' and 'chmod go-w' for a hook, 'chmod 600' for a secret. Then "
            "replace that, because somebody may have read it.",
        )
    return good("only root reads the engines' secrets and changes hooks")


def check_switch(facts: Facts) -> Verdict:
    known(facts.serving.engines)
    if facts.serving.unfinished_switch:
        return fail(
            f"a switch was killed and not ended: {facts.serving.unfinished_switch}",
            "'vllm-edge recover' goes back to the committed generation.",
        )
    if facts.serving.over_budget:
        return warn(
            facts.serving.over_budget,
            "'vllm-edge status' shows what the engines use now; raise vram_budget_mib and run site.yml, which restarts "
            "nothing.",
        )
    return good("no switch was left unfinished")


def check_profile(facts: Facts) -> Verdict:
    running = [engine.name for engine in settled(facts) if engine.unit.active_state in ("active", "activating")]
    if running and (fault := known(facts.serving.unrecorded)) and not facts.serving.unfinished_switch:
        return fail(
            f"{listed(running)} run, and {fault.rstrip('.')}: a switch that fails has nothing to go back to",
            "Run site.yml, which writes it again and restarts no engine.",
        )
    return good("the profile of what runs is recorded")


def check_risks(facts: Facts) -> Verdict:
    risky = {engine.name: engine.accept_risk for engine in engines(facts) if engine.accept_risk}
    if not risky:
        return good("no engine has an option or a variable that undoes a limit of it")
    return warn(
        "; ".join(f"{name} runs with {', '.join(names)}" for name, names in risky.items()),
        "Remove it, and its name in accept_risk, where it is not needed. See docs/profiles.md, Accept a risk.",
    )
