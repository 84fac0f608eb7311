"""Views between processes: a worker may hand on what it read as it is.

Invariant: what arrives has the bytes, the format and the shape of what was sent. It is a copy, and read-only.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any


def _sent(view: memoryview) -> tuple[Any, ...]:
    return _arrived, (view.tobytes(), view.format, view.shape)


def _arrived(content: bytes, format: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(content)
    # Only a view of several dimensions has to be told them, and one of no bytes cannot be.
    return view.cast(format) if len(shape) == 1 else view.cast(format, shape)  # type: ignore[call-overload, no-any-return]


# Queues send from a thread, where an object that cannot be pickled is dropped, and its batch is waited for, for ever.
ForkingPickler.register(memoryview, _sent)
