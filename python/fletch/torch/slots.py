"""Shared memory through which a worker gives the bytes of a batch to the loop, instead of through a pipe.

A worker copies the bytes of a batch into a slot of the memory. Through the pipe the loop gets only the
number of the slot and the places of the samples. The loop's views show the slot itself, and the slot is free
again when the last of them is gone.

::

    worker: free slot ─▶ copy ─▶ _Place for each sample ─▶ pipe ─▶ loop: views of the slot ─▶ slot is free

Must never: change a byte of a slot while any process may read a view of it.

Invariants:
    1. Only its worker takes a slot of that worker, and only the process of the loop frees it.
    2. The process of the loop frees a slot only if no view of it is left, here and in every child that this
       process forked while it had such a view.
    3. Nothing waits for a slot. What does not fit goes through the pipe, as a copy.
    4. The memory has no name. It is gone with the last process that has it, whatever killed the process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
import os
import select
import threading
import uuid
import weakref
from collections import deque
from multiprocessing.reduction import DupFd
from typing import Any, Callable

import torch.utils.data

from .lease_stream import Batch, EpochSample
from .views import _rebuild

_log = logging.getLogger("fletch")

#: The most bytes of the slots of one worker, all together.
_WORKER_BYTES_MAX = 256 << 20
#: A worker has this many slots more than it has batches under way: the loop holds one batch, receives
#: another, and gives a slot back when it receives the next batch.
_SLOTS_OF_LOOP = 3
#: The most slots of one worker.
_SLOTS_MAX = 32
#: Shorter views, and shorter ``bytes``, go through the pipe, which then is as quick. The loop gets a copy of
#: ``bytes`` in any case.
_VIEW_BYTES_MIN, _BYTES_MIN = 2 << 10, 8 << 10
#: The memory of a slot grows by this many bytes.
_GROWTH_BYTES = 1 << 20
#: The start of a content in a slot is a multiple of this many bytes.
_ALIGNMENT = 64
#: The states of a slot, one byte each, at the begin of the memory.
_FREE, _TAKEN = b"\0", b"\1"

#: The memories of the loops of this process, by their keys.
_memories: weakref.WeakValueDictionary[str, SlotMemory] = weakref.WeakValueDictionary()


class SlotMemory:
    """The slots of all workers of one iteration. The process of the loop makes it.

    Attributes:
        key: identifies the memory in the process of the loop.
        slots: the number of slots of each worker.
        slot_bytes: the bytes of a slot. A slot takes memory only for the bytes that were once in it.
    """

    def __init__(self, workers: int, under_way: int) -> None:
        self.key = uuid.uuid4().hex
        self.slots = min(under_way + _SLOTS_OF_LOOP, _SLOTS_MAX)
        self.slot_bytes = _WORKER_BYTES_MAX // self.slots // mmap.PAGESIZE * mmap.PAGESIZE
        self._head = -(-workers * self.slots // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = self._head + workers * self.slots * self.slot_bytes
        self._own(os.memfd_create("fletch-slots", os.MFD_CLOEXEC))
        os.ftruncate(self._fd, self._size)
        self._memory = mmap.mmap(self._fd, self._size)
        _memories[self.key] = self

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        #: The slots that the loop received and did not free.
        self._lent: set[int] = set()
        #: The slots without views. The destruction of a view, at any time in any thread, only adds to it.
        self._returned: deque[int] = deque()
        self._forks: list[_Fork] = []

    def __getstate__(self) -> dict[str, Any]:
        # Works only while a worker is being started, as torch's own shared memory.
        state = {k: v for k, v in self.__dict__.items() if k in ("key", "slots", "slot_bytes", "_head", "_size")}
        return {**state, "_fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own(state["_fd"].detach())
        self._memory = mmap.mmap(self._fd, self._size)

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot, writable."""
        at = self._head + number * self.slot_bytes
        return memoryview(self._memory)[at : at + self.slot_bytes]

    # Methods of a worker.

    def take(self, worker: int) -> int | None:
        """Takes the first free slot of a worker; ``None`` if no slot is free."""
        first = worker * self.slots
        free = os.pread(self._fd, self.slots, first).find(_FREE)
        if free < 0:
            return None
        os.pwrite(self._fd, _TAKEN, first + free)
        return first + free

    def free(self, number: int) -> None:
        """Makes a slot free."""
        os.pwrite(self._fd, _FREE, number)

    def reserve(self, number: int, length: int) -> None:
        """Allocates the first bytes of a slot.

        Raises:
            OSError: there is no memory. Without this call, the process would get SIGBUS.
        """
        os.posix_fallocate(self._fd, self._head + number * self.slot_bytes, length)

    # Methods of the process of the loop. One thread receives.

    def receive(self, number: int) -> memoryview:
        """A read-only view of a slot that a worker filled. The slot is taken until no part of it is left."""
        self._free_returned()
        self._lent.add(number)
        at = self._head + number * self.slot_bytes
        # Its destruction can be noticed, unlike that of a view of the memory itself.
        owner = (ctypes.c_ubyte * self.slot_bytes).from_buffer(self._memory, at)
        weakref.finalize(owner, self._returned.append, number)
        return memoryview(owner).cast("B").toreadonly()

    def _free_returned(self) -> None:
        """Frees the slots without views, here and in forked children."""
        # Only views that were gone before the next lines: a fork that had one of them is known by now.
        gone = len(self._returned)
        for fork in list(self._forks):
            if fork.is_over():
                self._forks.remove(fork)
        kept = set().union(*(fork.slots for fork in list(self._forks)))
        for _ in range(gone):
            number = self._returned.popleft()
            if number in kept:
                self._returned.append(number)
            else:
                self._lent.discard(number)
                self.free(number)

    def before_fork(self) -> None:
        """Keeps the slots with views until the child that this thread makes now has ended."""
        if self._lent:
            self._forks.append(_Fork(set(self._lent)))

    def after_fork_in_parent(self) -> None:
        """Lets the child alone hold what tells of its end."""
        for fork in list(self._forks):
            if fork.thread == threading.get_ident():
                fork.slots |= self._lent
                fork.is_made()


class _Fork:
    """A child that this process forked, and the slots of which the child may read views.

    The child and its own children inherit the write end of a pipe, and never close it. The read end tells
    when no process has the write end any more.
    """

    def __init__(self, slots: set[int]) -> None:
        self.slots, self.thread = slots, threading.get_ident()
        self._ended, self._lives = os.pipe()
        weakref.finalize(self, os.close, self._ended)

    def is_made(self) -> None:
        """Closes the write end in the process that forked."""
        os.close(self._lives)
        self.thread = 0

    def is_over(self) -> bool:
        """Whether the child has ended."""
        poll = select.poll()
        poll.register(self._ended, 0)
        return bool(poll.poll(0))


def _before_fork() -> None:
    for memory in list(_memories.values()):
        memory.before_fork()


def _after_fork_in_parent() -> None:
    for memory in list(_memories.values()):
        memory.after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)


class IntoSlots:
    """A ``collate_fn`` for workers: calls another one, and puts the bytes of its result into a slot.

    It finds views and ``bytes`` in lists, tuples, dicts and samples. What else there is, such as tensors, goes
    to the loop as without it.
    """

    def __init__(self, collate: Callable[[Any], Any], memory: SlotMemory) -> None:
        self.collate, self.memory = collate, memory
        #: The bytes of each slot of this worker that are allocated.
        self._reserved: dict[int, int] = {}

    def __call__(self, items: Any) -> Any:
        batch = self.collate(items)
        info = torch.utils.data.get_worker_info()
        if info is None:
            return batch
        filling = _Filling(self.memory, info.id, self._reserved)
        try:
            if isinstance(batch, Batch):
                batch.content = filling.placed(batch.content)
                return batch
            return filling.placed(batch)
        finally:
            filling.close()


class _Filling:
    """Fills one slot with the bytes of one batch. Takes the slot with the first bytes."""

    def __init__(self, memory: SlotMemory, worker: int, reserved: dict[int, int]) -> None:
        self._memory, self._worker, self._reserved = memory, worker, reserved
        self._slot: _FilledSlot | None = None
        self._target = memoryview(b"")
        #: The bytes of the slot that are filled, and those that can be.
        self._end = self._usable = 0
        #: No slot was free, or shared memory failed. The rest of the batch goes through the pipe.
        self._failed = False
        #: The results by the ids of their originals, which live as long as the batch.
        self._known: dict[int, Any] = {}

    def placed(self, value: Any) -> Any:
        """A copy of a structure, with a `_Place` instead of each content that is in the slot."""
        if id(value) in self._known:
            return self._known[id(value)]
        kind = type(value)
        out: Any
        if kind is list:
            out = self._known[id(value)] = []
            out += [self.placed(one) if type(one) in _SEARCHED else one for one in value]
        elif kind is dict:
            out = self._known[id(value)] = {}
            out.update((k, self.placed(v) if type(v) in _SEARCHED else v) for k, v in value.items())
        elif kind is tuple:
            out = tuple(self.placed(one) if type(one) in _SEARCHED else one for one in value)
        elif kind is EpochSample:
            out = dataclasses.replace(value, content=self.placed(value.content))
        elif kind is memoryview or kind is bytes:
            out = self._place(value) or value
        else:
            out = value
        self._known[id(value)] = out
        return out

    def _place(self, content: memoryview | bytes) -> _Place | None:
        is_bytes = type(content) is bytes
        length = len(content) if is_bytes else content.nbytes  # type: ignore[union-attr]
        if length < (_BYTES_MIN if is_bytes else _VIEW_BYTES_MIN):
            return None
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        end = start + length
        if end > self._usable and not self._reserve(end):
            return None
        if is_bytes:
            self._target[start:end], self._end = content, end
            return _Place(_as_bytes, (self._slot, start, end))
        view: memoryview = content  # type: ignore[assignment]
        if view.format == "B" and view.ndim == 1 and view.c_contiguous:
            self._target[start:end], self._end = view, end
            return _Place(_as_view, (self._slot, start, end))
        if not view.c_contiguous:
            return None
        self._target[start:end], self._end = view.cast("B"), end
        return _Place(_as_shaped_view, (self._slot, start, end, view.format, view.shape))

    def _reserve(self, end: int) -> bool:
        """Takes a slot, if there is none, and makes its first bytes usable. Returns whether it succeeded."""
        if self._failed or end > self._memory.slot_bytes:
            return False
        try:
            if self._slot is None:
                number = self._memory.take(self._worker)
                if number is None:
                    self._failed = True
                    return False
                self._slot = _FilledSlot(self._memory.key, number)
                self._target = self._memory.slot(number)
            number = self._slot.number
            if end > self._reserved.get(number, 0):
                length = min(-(-end // _GROWTH_BYTES) * _GROWTH_BYTES, self._memory.slot_bytes)
                self._memory.reserve(number, length)
                self._reserved[number] = length
            self._usable = self._reserved[number]
        except OSError as error:
            _log.info("a worker sends a batch through its pipe, because shared memory failed: %s", error)
            self._failed = True
            return False
        return True

    def close(self) -> None:
        """Frees the slot if nothing is in it."""
        if self._slot is not None and self._end == 0:
            self._memory.free(self._slot.number)


#: The types in which contents are found, and those of the contents.
_SEARCHED = frozenset((list, dict, tuple, EpochSample, memoryview, bytes))


class _FilledSlot:
    """A slot on its way to the loop, which gets a view of it."""

    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.key, self.number)


class _Place:
    """A content in a slot on its way to the loop, which gets the content."""

    __slots__ = ("arguments", "make")

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.make, self.arguments = make, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.make, self.arguments


def _receive(key: str, number: int) -> memoryview:
    memory = _memories.get(key)
    if memory is None:
        raise RuntimeError("a batch of a worker arrived after its iteration had ended; iterate the loader again")
    return memory.receive(number)


def _as_view(slot: memoryview, start: int, end: int) -> memoryview:
    return slot[start:end]


def _as_shaped_view(
    slot: memoryview, start: int, end: int, format: str, shape: tuple[int, ...]
) -> memoryview:
    return _rebuild(slot[start:end], format, shape)


def _as_bytes(slot: memoryview, start: int, end: int) -> bytes:
    return slot[start:end].tobytes()


def slot_memory(workers: int, under_way: int) -> SlotMemory | None:
    """The slots of a loader, or ``None`` if this machine has no such memory.

    Args:
        workers: the number of workers.
        under_way: the most batches of a worker that the loop asked for and did not get yet.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return SlotMemory(workers, under_way)
    except (OSError, ValueError) as error:
        _log.info("workers send their batches through pipes, because shared memory failed: %s", error)
        return None
