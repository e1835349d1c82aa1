# SPDX-License-Identifier: Apache-2.0
"""Signals that reach a switch while it runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from .messages import complain
from .model import Interrupted


class Signals:
    """SIGTERM, SIGINT and SIGHUP ask the switch to go back. They interrupt only what is `interruptible`, which journal
    and commit are not; on the way back they are heard only where the host goes down."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal that came and has not been obeyed yet."""
        self.going_down: Callable[[], bool] = lambda: False
        self._open = False
        self._back = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._former = {number: signal.signal(number, self._arrived) for number in self.NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.asked = signal.Signals(number).name
        if self._back and not self.going_down():
            complain(f"{self.asked}: the switch goes back already.")
        elif self._open:
            self._open = False
            raise Interrupted(self.asked)

    def go_back(self) -> None:
        self.asked, self._back = None, True

    def go_forward(self) -> None:
        """What came meanwhile is obeyed now."""
        self._back = False

    def check(self) -> None:
        if self.asked is not None and (not self._back or self.going_down()):
            raise Interrupted(self.asked)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            self._open = True
            self.check()
            yield
        finally:
            self._open = False
