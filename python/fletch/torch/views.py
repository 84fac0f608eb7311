"""Pickling of memoryviews, so that a worker can pass on the bytes that it read.

Contents for which `shared_buffers` has room do not come here.

Invariant: the received view has the bytes, the format and the shape of the sent one. It is a copy, and
    read-only.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any


def _reduce(view: memoryview) -> tuple[Any, ...]:
    return _rebuild, (view.tobytes(), view.format, view.shape)


def _rebuild(content: bytes | memoryview, format: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(content)
    # `cast` needs the shape of a view with several dimensions, and refuses the shape of an empty one.
    if len(shape) == 1:
        return view.cast(format)  # type: ignore[call-overload, no-any-return]
    return view.cast(format, shape)  # type: ignore[call-overload, no-any-return]


# A queue sends from a thread. It drops an object that cannot be pickled, and the loop would wait for its
# batch for ever.
ForkingPickler.register(memoryview, _reduce)
