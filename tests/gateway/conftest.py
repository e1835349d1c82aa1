# SPDX-License-Identifier: Apache-2.0
"""A gateway for each file of tests; a test that changes links or maps puts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gateway_world
import pytest
from gateway_world import HAPROXY, Gateway


@pytest.fixture(scope="session")
def haproxy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """HAProxy, without which these tests say nothing, with a socket of its master beside its file of the pid."""
    if not HAPROXY:
        pytest.skip("HAProxy is not installed: apt-get install haproxy (its own service may stay disabled)")
    script = tmp_path_factory.mktemp("haproxy") / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {HAPROXY} "$@" -S "${{5%/pid}}/master.sock"\n')
    script.chmod(0o755)
    gateway_world.HAPROXY = str(script)


def start_gateways(haproxy: None) -> Iterator[Callable[..., Gateway]]:
    """Start a gateway with these variables of the role."""
    made: list[Gateway] = []

    def make(**variables: Any) -> Gateway:
        made.append(Gateway(**variables))
        made[-1].start()
        return made[-1]

    yield make
    for gateway in made:
        gateway.stop()


# One that goes on would ask its engines for their health in all tests that follow.
make_gateway = pytest.fixture(start_gateways, name="make_gateway")
make_gateway_of_the_file = pytest.fixture(start_gateways, name="make_gateway_of_the_file", scope="module")


@pytest.fixture(scope="module")
def gateway(make_gateway_of_the_file: Callable[..., Gateway]) -> Gateway:
    """A gateway in front of three engines."""
    return make_gateway_of_the_file()
