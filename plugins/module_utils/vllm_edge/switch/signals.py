# SPDX-License-Identifier: Apache-2.0
"""Signal handling of a switch: SIGTERM, SIGINT and SIGHUP ask it to roll back."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from .model import Interrupted
from .render import complain


class Signals:
    """Signal handlers while a switch runs; use it as a context manager.

    SIGTERM, SIGINT and SIGHUP raise Interrupted, but only inside `interruptible`: the journal and the commit are never
    interrupted. On the way back signals are ignored, unless the host shuts down.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal that arrived and has not been acted on yet."""
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
        """Handle a signal: remember it, and raise Interrupted if the current phase may be interrupted."""
        del frame
        self.asked = signal.Signals(number).name
        if self._back and not self.going_down():
            complain(f"{self.asked}: the switch goes back already.")
        elif self._open:
            self._open = False
            raise Interrupted(self.asked)

    def go_back(self) -> None:
        """Enter the way back: forget the signal that arrived and ignore further ones."""
        self.asked, self._back = None, True

    def go_forward(self) -> None:
        """Leave the way back. A signal that arrived in the meantime takes effect at the next check."""
        self._back = False

    def check(self) -> None:
        if self.asked is not None and (not self._back or self.going_down()):
            raise Interrupted(self.asked)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Let no signal interrupt the body, also within `interruptible`; one that arrived takes effect after it."""
        former, self._open = self._open, False
        try:
            yield
        finally:
            self._open = former
        if former:
            self.check()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let signals interrupt the body of the `with` statement."""
        try:
            self._open = True
            self.check()
            yield
        finally:
            self._open = False
