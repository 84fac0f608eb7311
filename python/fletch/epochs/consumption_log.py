"""Consumption logs: the samples that a process consumed, in a file that is compared with the epoch's receipt.

The format is in ``docs/FORMATS-epochs.md``. Its first line begins with ``fletch.notes``.

Invariant: a log has whole lines of one epoch. After a crash the last line may be torn; `append` removes it.
"""

from __future__ import annotations

import os
import struct

from .. import Invalid
from .lease_stream import Batch

#: A delivery as `Reader.next` returns it: ordinal, content hash, copy.
_DELIVERY = struct.Struct("<Q32sI")

#: The longest line of the format is shorter than this number of bytes.
_LINE_BYTES_MAX = 8192


def head(root: str, epoch: int) -> str:
    """The first line of a log."""
    return f"fletch.notes 1 {root} {epoch}\n"


def lines(batch: Batch) -> str:
    """A line for each sample of a batch, with its lease and its position in the lease."""
    samples = enumerate(_DELIVERY.iter_unpack(batch.deliveries))
    return "".join(
        f"{ordinal} {copy} {content.hex()} {batch.lease} {position}\n"
        for position, (ordinal, content, copy) in samples
    )


def append(path: str | os.PathLike[str], first: str, more: str) -> None:
    """Appends lines to a log whose first line is ``first``. They are durable when this returns.

    It creates the file if necessary, and cuts off a line that a crash tore.

    Raises:
        Invalid: the file begins with another line.
        OSError: the file cannot be written.
    """
    begins, new = first.encode(), not os.path.exists(path)
    with open(path, "a+b") as file:
        file.seek(0)
        if not begins.startswith(found := file.readline(len(begins))):
            raise Invalid(
                f"{os.fspath(path)} is not a consumption log of this epoch: it begins with {found[:80]!r}; "
                "use one file for each epoch"
            )
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _LINE_BYTES_MAX))
        whole = start + file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write((b"" if whole else begins) + more.encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        _sync_directory(os.path.dirname(os.path.abspath(path)))


def save_sum(path: str | os.PathLike[str], first: str, total: bytes) -> None:
    """Writes a receipt sum as a log whose first line is ``first``. The file is complete or does not exist."""
    delivered, value = int.from_bytes(total[:8], "little"), total[8:].hex()
    part = f"{os.fspath(path)}.part"
    with open(part, "w", encoding="ascii") as file:
        file.write(f"{first}sum {delivered} {value}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
