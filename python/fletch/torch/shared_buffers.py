"""Shared memory through which a worker gives the bytes of a batch to the loop, instead of through a pipe.

A worker copies the bytes of a batch into a shared buffer. Through the pipe the loop gets only the number of
the buffer and the places of the samples. The loop's views show the buffer itself, and the buffer is free
again when the last of them is gone.

::

    worker: free buffer ─▶ copy ─▶ a _Place for each sample ─▶ pipe
    loop:   pipe ─▶ views of the buffer ─▶ the last view is gone ─▶ free buffer

Must never: change a byte of a buffer while any process may read a view of it.

Invariants:
    1. Only its worker takes a buffer of that worker, and only the process of the loop frees it.
    2. The process of the loop frees a buffer only if no view of it is left, here and in every child that this
       process forked while it had such a view.
    3. Nothing waits for a buffer. What does not fit goes through the pipe, as a copy.
    4. The memory has no name. It is gone with the last process that has it, whatever killed the process.
    5. No process that finds the memory, for example below ``/proc``, can make it shorter: reading what a file
       no longer has ends a process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
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

from ..epochs.lease_stream import Batch, EpochSample
from .evaluation import EvalSample
from .views import _rebuild

_log = logging.getLogger("fletch")

#: The most bytes of the buffers of one worker, all together.
_WORKER_BYTES_MAX = 256 << 20
#: A worker has this many buffers more than it has batches under way: the loop holds one batch, receives
#: another, and gives a buffer back when it receives the next batch.
_BUFFERS_OF_LOOP = 3
#: The most buffers of one worker.
_BUFFERS_MAX = 32
#: Shorter views, and shorter ``bytes``, go through the pipe, which then is as quick. The loop gets a copy of
#: ``bytes`` in any case.
_VIEW_BYTES_MIN, _BYTES_MIN = 2 << 10, 8 << 10
#: The memory of a buffer grows by this many bytes.
_GROWTH_BYTES = 1 << 20
#: The start of a content in a buffer is a multiple of this many bytes.
_ALIGNMENT = 64
#: The states of a buffer, one byte each, at the start of the memory.
_FREE, _TAKEN = b"\0", b"\1"

#: The memories of the loops of this process, by their keys.
_memories: weakref.WeakValueDictionary[str, BufferMemory] = weakref.WeakValueDictionary()


class BufferMemory:
    """The buffers of all workers of one iteration. The process of the loop makes it.

    Attributes:
        key: identifies the memory in the process of the loop.
        buffers: the number of buffers of each worker.
        buffer_bytes: the bytes of a buffer. A buffer takes memory only for the bytes that were once in it.
    """

    def __init__(self, workers: int, under_way: int) -> None:
        self.key = uuid.uuid4().hex
        self.buffers = min(under_way + _BUFFERS_OF_LOOP, _BUFFERS_MAX)
        self.buffer_bytes = _WORKER_BYTES_MAX // self.buffers // mmap.PAGESIZE * mmap.PAGESIZE
        self._head = -(-workers * self.buffers // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = self._head + workers * self.buffers * self.buffer_bytes
        self._own(os.memfd_create("fletch-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self._fd, self._size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self._fd, self._size)
        _memories[self.key] = self

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        #: The buffers that the loop received and did not free.
        self._lent: set[int] = set()
        #: The buffers without views. The destruction of a view, at any time in any thread, only adds to it.
        self._returned: deque[int] = deque()
        self._forks: list[_Fork] = []

    def __getstate__(self) -> dict[str, Any]:
        # Works only while a worker is being started, as torch's own shared memory.
        kept = ("key", "buffers", "buffer_bytes", "_head", "_size")
        return {**{name: getattr(self, name) for name in kept}, "_fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own(state["_fd"].detach())
        self._memory = mmap.mmap(self._fd, self._size)

    def buffer(self, number: int) -> memoryview:
        """The bytes of a buffer, writable."""
        at = self._head + number * self.buffer_bytes
        return memoryview(self._memory)[at : at + self.buffer_bytes]

    # Methods of a worker.

    def take(self, worker: int) -> int | None:
        """Takes the first free buffer of a worker; ``None`` if no buffer is free."""
        first = worker * self.buffers
        free = os.pread(self._fd, self.buffers, first).find(_FREE)
        if free < 0:
            return None
        os.pwrite(self._fd, _TAKEN, first + free)
        return first + free

    def free(self, number: int) -> None:
        """Makes a buffer free."""
        os.pwrite(self._fd, _FREE, number)

    def reserve(self, number: int, length: int) -> None:
        """Allocates the first bytes of a buffer.

        Raises:
            OSError: there is no memory. Without this call, the process would get SIGBUS.
        """
        os.posix_fallocate(self._fd, self._head + number * self.buffer_bytes, length)

    # Methods of the process of the loop. One thread receives.

    def receive(self, number: int) -> memoryview:
        """A read-only view of a buffer that a worker filled. The buffer is taken while a view is left."""
        self._free_returned()
        self._lent.add(number)
        at = self._head + number * self.buffer_bytes
        # Its destruction can be noticed, unlike that of a view of the memory itself.
        owner = (ctypes.c_ubyte * self.buffer_bytes).from_buffer(self._memory, at)
        weakref.finalize(owner, self._returned.append, number)
        return memoryview(owner).cast("B").toreadonly()

    def _free_returned(self) -> None:
        """Frees the buffers without views, here and in forked children."""
        # Only views that were gone before the next lines: a fork that had one of them is known by now.
        gone = len(self._returned)
        for fork in list(self._forks):
            if fork.is_over():
                self._forks.remove(fork)
        kept = set().union(*(fork.buffers for fork in list(self._forks)))
        for _ in range(gone):
            number = self._returned.popleft()
            if number in kept:
                self._returned.append(number)
            else:
                self._lent.discard(number)
                self.free(number)

    def before_fork(self) -> None:
        """Keeps the buffers with views until the child that this thread makes now has ended."""
        if self._lent:
            self._forks.append(_Fork(set(self._lent)))

    def after_fork_in_parent(self) -> None:
        """Lets the child alone hold what tells of its end."""
        for fork in list(self._forks):
            if fork.thread == threading.get_ident():
                fork.buffers |= self._lent
                fork.is_made()


class _Fork:
    """A child that this process forked, and the buffers of which the child may read views.

    The child and its own children inherit the write end of a pipe, and never close it. The read end tells
    when no process has the write end any more.
    """

    def __init__(self, buffers: set[int]) -> None:
        self.buffers, self.thread = buffers, threading.get_ident()
        self._ended = self._lives = -1
        try:
            self._ended, self._lives = os.pipe()
        except OSError as error:
            _log.info("%d shared buffers are lost to a child, because a pipe failed: %s", len(buffers), error)
            return
        weakref.finalize(self, os.close, self._ended)

    def is_made(self) -> None:
        """Closes the write end in the process that forked."""
        self.thread = 0
        if self._lives >= 0:
            os.close(self._lives)

    def is_over(self) -> bool:
        """Whether the child has ended. Without a pipe nobody knows, so the buffers stay as they are."""
        if self._ended < 0:
            return False
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


class IntoSharedBuffers:
    """A ``collate_fn`` for workers: calls another one, and puts the bytes of its result into a buffer.

    It finds views and ``bytes`` in lists, tuples, dicts and samples. Other values, such as tensors, go to the
    loop as torch sends them.
    """

    def __init__(self, collate: Callable[[Any], Any], memory: BufferMemory) -> None:
        self.collate, self.memory = collate, memory
        #: The bytes of each buffer of this worker that are allocated.
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
    """Fills one buffer with the bytes of one batch. Takes the buffer with the first bytes."""

    def __init__(self, memory: BufferMemory, worker: int, reserved: dict[int, int]) -> None:
        self._memory, self._worker, self._reserved = memory, worker, reserved
        self._buffer: _FilledBuffer | None = None
        self._target = memoryview(b"")
        #: The bytes of the buffer that are filled, and those that can be.
        self._end = self._usable = 0
        #: No buffer was free, or shared memory failed. The rest of the batch goes through the pipe.
        self._failed = False
        #: The results by the ids of their originals, which live as long as the batch.
        self._known: dict[int, Any] = {}

    def placed(self, value: Any) -> Any:
        """A copy of a structure, with a `_Place` instead of each content that is in the buffer."""
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
        elif kind is EpochSample or kind is EvalSample:
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
            return _Place(_as_bytes, (self._buffer, start, end))
        view: memoryview = content  # type: ignore[assignment]
        if view.format == "B" and view.ndim == 1 and view.c_contiguous:
            self._target[start:end], self._end = view, end
            return _Place(_as_view, (self._buffer, start, end))
        if not view.c_contiguous:
            return None
        self._target[start:end], self._end = view.cast("B"), end
        return _Place(_as_shaped_view, (self._buffer, start, end, view.format, view.shape))

    def _reserve(self, end: int) -> bool:
        """Takes a buffer if there is none, and makes its first bytes usable. Returns whether it succeeded."""
        if self._failed or end > self._memory.buffer_bytes:
            return False
        try:
            if self._buffer is None:
                number = self._memory.take(self._worker)
                if number is None:
                    self._failed = True
                    return False
                self._buffer = _FilledBuffer(self._memory.key, number)
                self._target = self._memory.buffer(number)
            number = self._buffer.number
            if end > self._reserved.get(number, 0):
                length = min(-(-end // _GROWTH_BYTES) * _GROWTH_BYTES, self._memory.buffer_bytes)
                self._memory.reserve(number, length)
                self._reserved[number] = length
            self._usable = self._reserved[number]
        except OSError as error:
            _log.info("a worker sends a batch through its pipe, because shared memory failed: %s", error)
            self._failed = True
            return False
        return True

    def close(self) -> None:
        """Frees the buffer if nothing is in it."""
        if self._buffer is not None and self._end == 0:
            self._memory.free(self._buffer.number)


#: The types in which contents are found, and those of the contents.
_SEARCHED = frozenset((list, dict, tuple, EpochSample, EvalSample, memoryview, bytes))


class _FilledBuffer:
    """A buffer on its way to the loop, which gets a view of it."""

    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.key, self.number)


class _Place:
    """A content in a buffer on its way to the loop, which gets the content."""

    __slots__ = ("arguments", "make")

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.make, self.arguments = make, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.make, self.arguments


def _receive(key: str, number: int) -> memoryview:
    memory = _memories.get(key)
    if memory is None:
        raise RuntimeError("a batch arrived after its iteration had ended; iterate the loader again")
    return memory.receive(number)


def _as_view(buffer: memoryview, start: int, end: int) -> memoryview:
    return buffer[start:end]


def _as_shaped_view(
    buffer: memoryview, start: int, end: int, format: str, shape: tuple[int, ...]
) -> memoryview:
    return _rebuild(buffer[start:end], format, shape)


def _as_bytes(buffer: memoryview, start: int, end: int) -> bytes:
    return buffer[start:end].tobytes()


def buffer_memory(workers: int, under_way: int) -> BufferMemory | None:
    """The buffers of a loader, or ``None`` if this machine has no such memory.

    Args:
        workers: the number of workers.
        under_way: the most batches of a worker that the loop asked for and did not get yet.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return BufferMemory(workers, under_way)
    except (OSError, ValueError) as error:
        _log.info("workers send their batches through pipes, because shared memory failed: %s", error)
        return None
