# SPDX-License-Identifier: Apache-2.0
"""How a host of a fleet leaves a role to the others: it says so, waits until they have asked, and only then goes.

Without the wait requests are lost: a gateway that refuses quickly has few open ones, and draws all new ones to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...gateway import sync as gateway
from ...gateway.admin import GatewayDown
from ...gateway.clients import GatewayError
from ...gateway.fleet import LEAVE_S, Fleet, read_fleet
from ...gateway.names import backend_name
from ...gateway.peers import PEERS
from ...gateway.view import SwitchProgress
from ...generation.model import Generation
from ..model import Done, Moves, Phase, PhaseFailed
from ..view import HostView


def check_peers(
    host: HostView, wanted: Generation, serving: Generation | None, moves: Moves, *, gap: bool = False
) -> Done:
    """Check that another host of the fleet serves each name that leaves this one; nothing is checked with `gap`.

    Names that nobody reaches here do not count. `serving` is the committed generation. Raises PhaseFailed.
    """
    if gap or serving is None:
        return Done()
    try:
        _refuse_alone(*_find_leaving(host, wanted, serving, moves))
    except GatewayError as error:
        raise PhaseFailed(f"{error} {_WAY_OUT}") from error
    return Done()


def leave(host: HostView, wanted: Generation, serving: Generation, moves: Moves, *, gap: bool = False) -> Done:
    """Let the other hosts of the fleet send no more requests for the names that go away here; see `check_peers`.

    Takes LEAVE_S, or no time if none of these names is reached here. They are looked at again at the end, because
    another host may leave at the same time: the gateway still shows that they leave when PhaseFailed is raised. With
    `gap` nothing is refused, and what the gateway does not say is a warning.
    """
    try:
        fleet, leaving = _find_leaving(host, wanted, serving, moves)
        if not leaving:
            return Done()
        _refuse_alone(fleet, {} if gap else leaving)
        warnings = gateway.publish_leaving(host.paths, leaving)
        host.sleep(LEAVE_S)
        if not gap:
            _refuse_alone(*_find_leaving(host, wanted, serving, moves))
    except GatewayError as error:
        if not gap:
            raise PhaseFailed(f"{error} {_WAY_OUT}") from error
        return Done(warnings=(f"The other hosts of the fleet were not told before roles left: {error}",))
    return Done(f"the other hosts were told {LEAVE_S:g} s before that {', '.join(leaving)} leave", warnings=warnings)


_WAY_OUT = (
    "serving_fleet_gap is false. To go on all the same, with nobody there for these names until they are back: --gap "
    "of 'vllm-edge switch', 'rollback' and 'stop', or 'ansible-playbook -e serving_fleet_gap=true'."
)


def _find_leaving(
    host: HostView, wanted: Generation, serving: Generation, moves: Moves
) -> tuple[Fleet | None, dict[str, list[str]]]:
    """Return the fleet, and by each served name that is reached here and goes away the hosts that serve it, too.

    Raises GatewayError: that is not known.
    """
    fleet = read_fleet(host.paths)
    if fleet is None or not fleet.peers:
        return fleet, {}
    proxy = gateway.open_proxy(host.paths)
    try:
        try:
            worker = proxy.list_workers()[0]
            servers, checks = worker.read_servers(), worker.read_checks(PEERS)
        except GatewayDown:
            if proxy.is_stopped():
                return fleet, {}
            raise
    except GatewayDown as error:
        raise GatewayError(
            f"The gateway does not say what it reaches, here and on the other hosts of fleet {fleet.fleet}: {error}"
        ) from error
    reached = {link.partition("+")[0] for link, server in servers.items() if server.up and not server.away}
    up = {key for key, check in checks.items() if check.up}
    view = gateway.view_host(host.paths, serving, SwitchProgress(Phase.AWAY, moves.keep, wanted))
    names = {role.name: backend_name(role.name) for role in view.roles if role.state == "away"}
    return fleet, {
        name: [peer.name for peer in fleet.peers if (f"{PEERS}{backend}", peer.server) in up]
        for name, backend in names.items()
        if backend in reached
    }


def _refuse_alone(fleet: Fleet | None, leaving: Mapping[str, Sequence[str]]) -> None:
    """Raise PhaseFailed if nobody else serves one of the names."""
    alone = [name for name, others in leaving.items() if not others]
    if fleet is None or not alone:
        return
    raise PhaseFailed(
        f"{', '.join(alone)} would be served by nobody: no other host of fleet {fleet.fleet} does that now (asked: "
        f"{', '.join(peer.name for peer in fleet.peers)}). Bring one back first: 'vllm-edge status' on it says what it "
        f"serves. {_WAY_OUT}"
    )
