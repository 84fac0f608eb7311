"""The device's time of each step, by events that the device itself records.

Must never: wait for the device, use a device that the training script does not use, or fail a step.

The framework puts work into a queue, and the device does it later. So the loop's clock does not show how long
the device computed. An event is a mark in that queue: the device notes the time when it reaches the mark.
This module puts a mark before and after the work of each step. It asks for the times at a later step, when
the device has passed both marks.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Callable, Protocol

from . import loaded_torch

_log = logging.getLogger("fletch")

#: The steps whose times are awaited at most. A device that is further behind tells nothing.
_STEPS_MAX = 64


class Event(Protocol):
    """A mark in the queue of a device, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Puts the mark at the end of the queue."""

    def query(self) -> bool:
        """Whether the device has passed the mark. Does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this mark to a later one. The device must have passed both."""


class DeviceClock:
    """The device times of the steps of one loop, oldest first.

    Attributes:
        steps: the number of steps whose times are awaited.
    """

    def __init__(self, make_event: Callable[[], Event | None]) -> None:
        """``make_event`` returns None while the script uses no device that has events."""
        self._make_event = make_event
        self._begun: Event | None = None
        self._pending: deque[tuple[Event, Event]] = deque(maxlen=_STEPS_MAX)
        #: Events to be recorded again.
        self._spare: list[Event] = []
        self._failed = False

    @property
    def steps(self) -> int:
        return len(self._pending)

    def begin(self) -> None:
        """Marks the beginning of a step. A second call before `end` moves the mark."""
        self._begun = self._marked(self._begun)

    def end(self) -> None:
        """Marks the end of the step."""
        begun, self._begun = self._begun, None
        if begun is None or (ended := self._marked(None)) is None:
            return
        if len(self._pending) == _STEPS_MAX:
            self._spare += self._pending.popleft()
        self._pending.append((begun, ended))

    def take(self) -> int | None:
        """The nanoseconds of the oldest step whose time nobody took; None while the device is not there."""
        if not self._pending:
            return None
        begun, ended = self._pending[0]
        try:
            if not ended.query():
                return None
            milliseconds = begun.elapsed_time(ended)
        except RuntimeError as error:
            self._fail(error)
            return None
        self._pending.popleft()
        self._spare += (begun, ended)
        return max(round(milliseconds * 1e6), 0)

    def _marked(self, event: Event | None) -> Event | None:
        if self._failed:
            return None
        try:
            if event is None:
                event = self._spare.pop() if self._spare else self._make_event()
            if event is not None:
                event.record()
            return event
        except RuntimeError as error:
            self._fail(error)
            return None

    def _fail(self, error: RuntimeError) -> None:
        # The script meets the error of its device itself.
        _log.debug("the device tells no more times: %s", error)
        self._failed, self._begun = True, None
        self._pending.clear()
        self._spare.clear()


#: The devices of which this process holds memory.
_used: set[int] = set()


def cuda_event() -> Event | None:
    """An event of the current CUDA or ROCm device; None unless this process computes on it.

    To record an event on a device takes memory of it. So a script that computes on another device than the
    current one gets no event.
    """
    torch = loaded_torch.module()
    if torch is None or not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    if device not in _used:
        if torch.cuda.memory_reserved(device) == 0:
            return None
        _used.add(device)
    event: Event = torch.cuda.Event(enable_timing=True)
    return event
