# SPDX-License-Identifier: Apache-2.0
"""Threads whose errors reach whoever waits for them: no other module makes threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


class Worker(threading.Thread):
    """A daemon thread that has begun. Its owner looks at `problem`, or calls `check`, before it calls anything good."""

    def __init__(self, act: Callable[..., object], *arguments: Any) -> None:
        super().__init__(name=getattr(act, "__name__", None), daemon=True)
        self._act = act
        self._arguments = arguments
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._act(*self._arguments)
        except BaseException as error:
            self.problem = error

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self.problem is not None:
            raise self.problem


def call_in_parallel(function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
    """Call `function` for every item, each in its own thread, and return the results in the order of the items.

    If calls raised, the exception of the first such item is raised after all threads have ended. They are joined in
    short steps, so that a signal that ends the program does not wait for an engine's answer.
    """
    values: dict[int, Value] = {}

    def call(at: int, item: Item) -> None:
        values[at] = function(item)

    workers = [Worker(call, at, item) for at, item in enumerate(items)]
    for worker in workers:
        while worker.is_alive():
            worker.join(0.2)
    for worker in workers:
        worker.check()
    return [values[at] for at in range(len(workers))]
