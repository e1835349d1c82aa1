# SPDX-License-Identifier: Apache-2.0
"""A gateway for each file of tests; a test that changes links or maps puts them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_host import HAPROXY, Gateway


@pytest.fixture(scope="session")
def haproxy() -> None:
    """HAProxy, without which these tests say nothing."""
    if not HAPROXY:
        pytest.skip("HAProxy is not installed: apt-get install haproxy (its own service may stay disabled)")


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
