# SPDX-License-Identifier: Apache-2.0
"""The checks of a host of a fleet: its certificate for the other hosts, and what their gateways say when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from ...engine.state import stamp
from ...facts.model import Fleet
from ...gateway.peers import Seen
from ...system.host import Unread
from ...text import shown
from ..contract import Verdict, decline_to_judge, fail, good, known, listed, warn
from .gateway import SOON, STAGE, judge_certificate

MOST_AHEAD_S = 5
"""Seconds between two clocks, beyond which logs and the ends of keys no longer fit together."""
BOTH = f"Run {STAGE} for that host and this one, which"
FAULTS: Mapping[str, tuple[str, str]] = {
    "silent": (
        "is not reached",
        "See whether that host and its gateway run, and whether a packet filter lets this host to its "
        "serving_fleet_listen.",
    ),
    "refuses": ("refuses this host's certificate", f"{BOTH} gives it the certificate of this host's CA."),
    "foreign": (
        "has a certificate that does not count here",
        f"{BOTH} makes and exchanges certificates. If it says the same afterwards, 'timedatectl' shows the clocks, or "
        "another machine has the address.",
    ),
    "strange": ("does not say what it serves", "Run site.yml for that host; its vllm-edge may be of before fleets."),
    "ends": ("has a certificate that ends soon", f"Run {STAGE} for that host, which makes a new one."),
}


def _ask(fleet: Fleet) -> Sequence[Seen]:
    return known(fleet.peers) or decline_to_judge("no other host of the fleet is known here")


def _list_answers(fleet: Fleet) -> list[Seen]:
    return [seen for seen in _ask(fleet) if not seen.fault] or decline_to_judge("no other host of the fleet answers")


def check_certificate(fleet: Fleet) -> Verdict:
    remedy = f"Run {STAGE}, which makes a new one and cuts no stream."
    verdict = judge_certificate(fleet.certificate, "tls/fleet.pem", "the certificate for the other hosts", remedy)
    if verdict.state == "ok" and isinstance(fleet.peers, Unread):
        return fail(f"{fleet.peers.why}: the gateway does not start again", f"Run {STAGE}.")
    return verdict


def check_peers(fleet: Fleet) -> Verdict:
    seen = _ask(fleet)
    wrong: list[tuple[str, str, str]] = [(one.fault, one.name, one.why) for one in seen if one.fault]
    wrong += [("ends", one.name, stamp(one.ends)) for one in seen if one.ends and one.ends - datetime.now(UTC) < SOON]
    if not wrong:
        return good(f"answer, with certificates that count: {listed([one.name for one in seen])}")
    told = listed([f"{name} {FAULTS[fault][0]} ({why})" for fault, name, why in wrong])
    remedies = dict.fromkeys(FAULTS[fault][1] for fault, _, _ in wrong)
    # A host that is down is no fault of this one.
    serious = {"refuses", "foreign"}.intersection(fault for fault, _, _ in wrong)
    return (fail if serious else warn)(told, " ".join(remedies))


def check_clocks(fleet: Fleet) -> Verdict:
    wrong = [
        f"that of {one.name} by {one.ahead_s:+.0f} s" for one in _list_answers(fleet) if abs(one.ahead_s) > MOST_AHEAD_S
    ]
    if wrong:
        return warn(f"clocks differ from the one here: {listed(wrong)}", "'timedatectl' says which one is wrong.")
    return good(f"no clock differs by more than {MOST_AHEAD_S} s")


def check_generations(fleet: Fleet) -> Verdict:
    answers = _list_answers(fleet)
    if not fleet.said:
        decline_to_judge("state.map does not say what this host serves")
    if any(said.get("switch") for said in (fleet.said, *(one.said for one in answers))):
        decline_to_judge("a switch runs on a host of the fleet")
    wrong = [text for one in answers for text in _compare(one, fleet)]
    if wrong:
        return warn(listed(wrong), "Run site.yml for all hosts of the fleet.")
    return good("hosts of one profile serve the same, by one release of vllm-edge")


def _compare(one: Seen, fleet: Fleet) -> Iterator[str]:
    here, there = fleet.said, one.said
    if there.get("fleet") != here["fleet"]:
        yield f"{one.name} is of the fleet {shown(there.get('fleet'))}"
    elif there.get("profile") == here["profile"] and there.get("digest") != here["digest"]:
        yield f"{one.name} serves {here['profile']} with other models, images or arguments"
    if there.get("release") != here["release"]:
        yield f"{one.name} has vllm-edge {shown(there.get('release'))}, and this host {here['release']}"


def check_roles(fleet: Fleet) -> Verdict:
    if fleet.said.get("switch"):
        decline_to_judge("a switch runs; 'vllm-edge progress' says how far it is")
    if unserved := known(fleet.unserved):
        return fail(
            f"no host of the fleet serves {listed(unserved)}: requests for it wait, and are refused",
            "'vllm-edge status' on each host says what is wrong with its engines.",
        )
    return good("each served name is served by a host")
