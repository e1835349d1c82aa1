# SPDX-License-Identifier: Apache-2.0
"""The checks of the gateway: its unit, its certificate, and whether it shows to clients what serves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ...engine.state import stamp
from ...facts.model import Facts, Gateway
from ...gateway.certificate import Certificate
from ...names import EXPORTER_UNIT, GATEWAY_UNIT
from ...system.host import Unread
from ..contract import Verdict, decline_to_judge, fail, good, known, listed, warn

STAGE = "'ansible-playbook playbooks/gateway.yml'"
SOON, VERY_SOON = timedelta(days=30), timedelta(days=7)


def find_gateway(facts: Facts) -> Gateway:
    return known(facts.gateway) or decline_to_judge("this host has no gateway")


def check_unit(facts: Facts) -> Verdict:
    gateway = find_gateway(facts)
    unit = known(gateway.unit)
    if unit.active_state != "active":
        return fail(
            f"{GATEWAY_UNIT} is {unit.active_state} ({unit.result}): no client is answered",
            f"'journalctl -u {GATEWAY_UNIT}' says why, and 'systemctl start {GATEWAY_UNIT}' starts it; {STAGE} writes "
            "its configuration anew.",
        )
    if not gateway.answers:
        return fail(
            f"{GATEWAY_UNIT} is active and does not answer on its socket: no key can be revoked, and a switch cannot "
            "tell it anything",
            f"'systemctl restart {GATEWAY_UNIT}' ends the streams that run; {STAGE} writes its configuration anew.",
        )
    if not unit.starts_at_boot:
        return warn(f"{GATEWAY_UNIT} does not start at boot", f"'systemctl enable {GATEWAY_UNIT}', or {STAGE}.")
    return good("the gateway runs")


def check_certificate(facts: Facts) -> Verdict:
    gateway = find_gateway(facts)
    remedy = f"Renew it where you got it, and run {STAGE}, which reloads the gateway and cuts no stream."
    if not gateway.with_tls:
        return good("the gateway listens without TLS")
    return judge_certificate(gateway.certificate, "tls/server.pem", "the certificate", remedy)


def judge_certificate(found: Certificate | Unread | None, file: str, what: str, remedy: str) -> Verdict:
    if found is None:
        return fail(f"{file} is missing: the gateway does not start again", f"Run {STAGE}.")
    if isinstance(found, Unread):
        return fail(f"{file}: {found.why}", remedy)
    now = datetime.now(UTC)
    if not found.key_fits:
        return fail(f"the key in {file} is missing, or is not that of the certificate", remedy)
    if now < found.begins:
        return fail(
            f"{what} counts from {stamp(found.begins)} on, and it is {stamp(now)}",
            "Correct the clock ('timedatectl' shows it), or wait.",
        )
    if now >= found.ends:
        return fail(f"{what} ended on {stamp(found.ends)}: it is refused", remedy)
    left = f"{what} ends on {stamp(found.ends)}"
    if found.ends - now < VERY_SOON:
        return fail(left, remedy)
    return warn(left, remedy) if found.ends - now < SOON else good(left)


def check_maps(facts: Facts) -> Verdict:
    gateway = find_gateway(facts)
    if facts.serving.switching:
        decline_to_judge("a switch runs; 'vllm-edge progress' says how far it is")
    if not gateway.answers and known(gateway.unit).active_state == "active":
        decline_to_judge("HAProxy does not answer")
    if gateway.problems:
        return fail(" ".join(gateway.problems), "Do what it says, then 'vllm-edge gateway sync'.")
    if gateway.differences:
        return fail(
            f"not as what serves needs it: {listed(gateway.differences)}",
            "'vllm-edge gateway sync' corrects it and cuts no stream.",
        )
    return good("maps, links and servers are as what serves needs them")


def check_names(facts: Facts) -> Verdict:
    gateway = find_gateway(facts)
    missing, few = gateway.without_backend, gateway.too_few_servers
    if missing:
        return fail(
            f"haproxy.cfg has no backend for {listed(missing)}: requests for it fail",
            f"Run {STAGE}, which writes the names of all profiles of the inventory.",
        )
    if few:
        return warn(
            f"haproxy.cfg has fewer servers for {listed(few)} than there are engines: some get no requests",
            f"Run {STAGE}, which writes the replicas of all profiles of the inventory.",
        )
    return good("haproxy.cfg has a backend for every served name")


def check_port(facts: Facts) -> Verdict:
    gateway = find_gateway(facts)
    if gateway.port_users:
        return warn(
            f"{listed(gateway.port_users)}: a request that waits for its engine goes there each second",
            "Stop that program, or let it listen on another port or address.",
        )
    return good("port 1 of loopback refuses, which lets requests wait")


def check_metrics(facts: Facts) -> Verdict:
    metrics = known(find_gateway(facts).metrics) or decline_to_judge("no metrics are served (serving_metrics)")
    # The exporter is started by the first who asks.
    down = [one for one in metrics.units if one.active_state != "active" and not (one.id == EXPORTER_UNIT and one.down)]
    wrong = [f"{one.id} is {one.active_state} ({one.result})" for one in down]
    if metrics.fault:
        wrong.append(metrics.fault)
    if wrong:
        return warn(
            f"Prometheus gets no figures of this host, or old ones: {listed(wrong)}",
            "'journalctl -u vllm-edge-facts -u vllm-edge-exporter' says why; 'ansible-playbook playbooks/metrics.yml' "
            "installs and starts both services.",
        )
    return good("figures are read and served")
