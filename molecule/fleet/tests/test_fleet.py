# SPDX-License-Identifier: Apache-2.0
"""What clients of a fleet notice: of a switch of all its hosts, of one that fails, and of a host that is lost."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable

import pytest
from conftest import INVENTORY, A, B, run_lab, run_play
from load import QUESTION, Gateway, Load, Stream

from lab.docker import docker

NOTICED_S = 5
"""Seconds after which no request fails because of a host that is lost."""
ENDED_S = 30
"""A stream that its host cannot finish ends within so many seconds."""


def switch_to(playbook: str, profile: str) -> tuple[int, str]:
    return run_play(playbook, f"--extra-vars=serving_profile={profile}")


def read_profiles() -> list[str]:
    return [host.active["profile"] for host in (A, B)]


@pytest.mark.usefixtures("whole")
def test_a_rolling_switch_loses_no_request(gateways: dict[str, Gateway]) -> None:
    """To another profile and back: all roles of a host are away for a while, and the other one answers."""
    with Load(list(gateways.values())) as load:
        for profile in ("few", "many"):
            status, output = switch_to("playbooks/engines.yml", profile)
            assert (status, read_profiles()) == (0, [profile, profile]), output
    load.show("rolling switch and back")
    assert load.find_failed() == []
    assert {(one.gateway, one.served_by) for one in load.asked} == {(via, by) for via in "ab" for by in "ab"}


@pytest.mark.usefixtures("whole")
def test_a_second_host_that_fails_stays_as_it_is_and_the_next_run_continues() -> None:
    began = time.time()
    B.run("lab-gpu fault set --gpu 0 engine-crash-loading=max_num_seqs=8")
    try:
        status, output = switch_to("site.yml", "few")
    finally:
        B.run("lab-gpu fault clear")
    assert status != 0 and read_profiles() == ["few", "many"], output
    pages = [INVENTORY / f"reports/{name}.html" for name in "ab"]
    assert [page.stat().st_mtime > began for page in pages] == [True, True], output
    status, output = switch_to("site.yml", "few")
    assert (status, read_profiles()) == (0, ["few", "few"]), output


# On the host: asks its gateway as a program there would.
ASK = """
import sys, urllib.request as u
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
url = "http://127.0.0.1:8000/v1/chat/completions"
print(u.urlopen(u.Request(url, sys.argv[2].encode(), headers), timeout=150).headers["X-Served-By"])
"""


@pytest.mark.usefixtures("whole")
def test_a_local_client_of_a_host_without_engines_is_answered(gateways: dict[str, Gateway]) -> None:
    words = [
        "python3",
        "-c",
        ASK,
        gateways["b"].key,
        json.dumps({"model": "tools", "messages": QUESTION, "max_tokens": 2}),
    ]
    generation = B.active["generation"]
    B.run("vllm-edge stop")
    try:
        served_by = B.run(shlex.join(words))
    finally:
        B.run(f"vllm-edge switch {generation}")
    assert served_by.startswith("a/")


GATEWAY = "vllm-edge-gateway.service"
LOSSES: dict[str, tuple[str, Callable[[], object], Callable[[], object]]] = {
    "gateway": (
        "a",
        lambda: B.run(f"systemctl kill --signal=KILL {GATEWAY}; systemctl stop {GATEWAY}"),
        lambda: B.run(f"systemctl start {GATEWAY}"),
    ),
    "link": ("ab", lambda: run_lab("cut", f"--peer={A.lab}"), lambda: run_lab("reconnect", f"--peer={A.lab}")),
    "host": ("a", lambda: docker("kill", f"{B.lab}-host"), lambda: run_lab("up")),
}
"""What is lost of the second host, through which gateways clients ask meanwhile, how it is lost and comes back."""


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("lost", LOSSES)
def test_of_a_lost_host_only_its_running_requests_fail(gateways: dict[str, Gateway], lost: str) -> None:
    through, lose, repair = LOSSES[lost]
    # Three of them with the first host, so that the second one gets the next request.
    streams = [Stream(gateways["a"]) for _ in range(5)]
    threads = [threading.Thread(target=stream.read) for stream in streams]
    with Load([gateways[name] for name in through]) as load:
        try:
            for thread, stream in zip(threads, streams, strict=True):
                thread.start()
                assert stream.begun.wait(60)
            lose()
            lost_s = time.monotonic()
            time.sleep(4 * NOTICED_S)
        finally:
            repair()
    for thread in threads:
        thread.join()
    load.show(f"lost: {lost}", lost_s)
    assert load.find_failed(lost_s + NOTICED_S) == []
    assert {stream.end for stream in streams if stream.served_by == "a"} == {"complete"}
    broken = [stream for stream in streams if stream.served_by == "b"]
    assert broken and all(one.end != "complete" and one.ended_s < lost_s + ENDED_S for one in broken), streams


def test_a_host_is_removed_and_the_other_one_goes_on(gateways: dict[str, Gateway]) -> None:
    """The last test, since the host does not come back."""
    with Load([gateways["a"]]) as load:
        status, output = run_play("playbooks/teardown.yml", "--limit=b", "--extra-vars=teardown=b")
    load.show("teardown of the second host")
    assert (status, B.run("ls -d /etc/vllm-edge || true"), load.find_failed()) == (0, "", []), output
