"""Notes: what a consumer writes down of an epoch, to be held against its receipt (``docs/FORMATS-epochs.md``, "Notes").

Invariant: a file of notes has whole lines, of one epoch, but for what a crash tore behind the last one.
"""

from __future__ import annotations

import os
import struct

from .. import Invalid
from .receive import Batch

#: A delivery as `Reader.next` tells it: ordinal, content, copy.
_DELIVERY = struct.Struct("<Q32sI")

#: More bytes than any line of the format has.
_LINE_MAX = 8192


def head(root: str, epoch: int) -> str:
    """The first line of a file."""
    return f"fletch.notes 1 {root} {epoch}\n"


def lines(batch: Batch) -> str:
    """A line for each sample of a batch, with its lease and its place there."""
    told = enumerate(_DELIVERY.iter_unpack(batch.deliveries))
    return "".join(f"{ordinal} {copy} {content.hex()} {batch.lease} {place}\n" for place, (ordinal, content, copy) in told)


def append(path: str | os.PathLike[str], first: str, more: str) -> None:
    """Adds lines to a file that begins with the line `first`; durable when this returns. What a crash tore is cut off.

    Raises:
        Invalid: the file begins with something else.
        OSError: it cannot be written.
    """
    begins, new = first.encode(), not os.path.exists(path)
    with open(path, "a+b") as file:
        file.seek(0)
        if not begins.startswith(found := file.readline(len(begins))):
            raise Invalid(f"{os.fspath(path)} is no file of notes of this epoch: it begins with {found[:80]!r}")
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _LINE_MAX))
        whole = start + file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write((b"" if whole else begins) + more.encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        _sync(os.path.dirname(os.path.abspath(path)))


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
