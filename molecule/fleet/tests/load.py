# SPDX-License-Identifier: Apache-2.0
"""Clients that ask every role of a fleet through its gateways, and count what was answered, and what was lost."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx2
import openai

ROLES = ("chat", "tools")
QUESTION: Any = [{"role": "user", "content": "Count."}]
TIMEOUT_S = 150
"""Longer than the gateway lets a request wait for a role."""
RETRY_AFTER_S = 0.5
"""After which the `openai` client tries again."""
ERRORS = (openai.APIError, httpx2.HTTPError)


@dataclass(frozen=True)
class Gateway:
    """The gateway of a host, on this machine's loopback interface, and a client of it."""

    host: str
    port: int
    key: str
    ca: str

    @cached_property
    def client(self) -> openai.OpenAI:
        trusted = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=self.ca), timeout=TIMEOUT_S)
        url = f"https://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=self.key, http_client=trusted, max_retries=0)

    def ask(self, role: str) -> tuple[str, str]:
        """Ask once; returns the host that answered, or an empty text and the error."""
        try:
            ask = self.client.chat.completions.with_raw_response.create
            return read_host(ask(model=role, messages=QUESTION, max_tokens=4)), ""
        except ERRORS as error:
            return "", f"{type(error).__name__}: {error}"


def read_host(answer: Any) -> str:
    return str(answer.headers["X-Served-By"]).partition("/")[0]


@dataclass(frozen=True)
class Asked:
    """A request; a moment is on the monotonic clock."""

    gateway: str
    role: str
    began_s: float
    seconds: float
    served_by: str
    error: str
    error_again: str
    """Of the one retry of a request that failed."""


class Load:
    """As long as it is entered, one client for each gateway and role asks, one request after the other."""

    def __init__(self, gateways: Sequence[Gateway], interval_s: float = 0.5) -> None:
        self.interval_s, self.asked, self.stop = interval_s, list[Asked](), threading.Event()
        pairs = [(gateway, role) for gateway in gateways for role in ROLES]
        self.threads = [threading.Thread(target=self.keep_asking, args=pair) for pair in pairs]

    def keep_asking(self, gateway: Gateway, role: str) -> None:
        while not self.stop.wait(self.interval_s):
            began_s = time.monotonic()
            served_by, error = gateway.ask(role)
            seconds, again = time.monotonic() - began_s, ""
            if error:
                time.sleep(RETRY_AFTER_S)
                again = gateway.ask(role)[1]
            self.asked.append(Asked(gateway.host, role, began_s, seconds, served_by, error, again))

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def find_failed(self, since_s: float = 0) -> list[Asked]:
        """Requests that failed, of those that were sent since a moment."""
        return [one for one in self.asked if one.error and one.began_s >= since_s]

    def show(self, title: str, since_s: float = 0) -> None:
        """Print what each gateway and role got, and in which seconds since a moment requests were sent that failed."""
        print(f"\n{title}:")
        for pair in sorted({(one.gateway, one.role) for one in self.asked}):
            asked = [one for one in self.asked if (one.gateway, one.role) == pair]
            failed = [one for one in asked if one.error]
            print(
                f"  {pair[1]} through {pair[0]}: {len(asked)} sent, answered by "
                f"{dict(Counter(one.served_by for one in asked if not one.error))}, {len(failed)} failed, "
                f"{sum(bool(one.error_again) for one in failed)} with one retry; the slowest took "
                f"{max(one.seconds for one in asked):.1f} s"
            )
        print(f"  failed in second: {dict(Counter(int(one.began_s - since_s) for one in self.find_failed(since_s)))}")


@dataclass
class Stream:
    """An answer of many tokens that a client reads as it comes."""

    gateway: Gateway
    served_by: str = ""
    end: str = ""
    """`complete`, or the kind of the error."""
    ended_s: float = 0
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        try:
            answer = self.gateway.client.chat.completions.with_raw_response.create(
                model="chat", messages=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            self.served_by = read_host(answer)
            self.begun.set()
            for _ in answer.parse():
                pass
            self.end = "complete"
        except ERRORS as error:
            self.end = type(error).__name__
        self.ended_s = time.monotonic()
        self.begun.set()
