"""Seeds of samples, so that a random transform makes the same item of a sample in whichever process it runs.

Invariants:
    1. A seed depends on the job's seed, the epoch and the sample only: not on workers, ranks or restarts.
    2. Outside of `seeded` the generators of the process go on as if nothing had been seeded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import struct
from typing import Any, Iterator

from . import loaded_torch

try:
    #: The module ``numpy.random``, if numpy is installed.
    _numpy: Any = importlib.import_module("numpy.random")
except ImportError:
    _numpy = None

#: The seed of a batch's ``collate_fn`` belongs to its first sample, but is not the seed of that sample.
_OF_SAMPLE, _OF_BATCH = 0, 1
#: The number in place of the copy for a sample that only pads a last step.
_PAD = 0xFFFF_FFFF


class SampleSeeds:
    """The seeds of one epoch of a job.

    Args:
        seed: the job's seed, of 64 bits.
        epoch: the epoch's number.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._key = struct.pack("<QQ", seed, epoch)

    def of_sample(self, number: int, copy: int | None) -> int:
        """The seed of a copy of a sample, 0 to 2^63 - 1."""
        return self._seed(_OF_SAMPLE, number, copy)

    def of_batch(self, number: int, copy: int | None) -> int:
        """The seed for the ``collate_fn`` of the batch that begins with this copy of a sample."""
        return self._seed(_OF_BATCH, number, copy)

    def _seed(self, kind: int, number: int, copy: int | None) -> int:
        message = struct.pack("<BQI", kind, number, _PAD if copy is None else copy)
        digest = hashlib.blake2b(message, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seeds the generators that transforms use: of ``random``, numpy, and torch on the CPU if it is there."""
    random.seed(seed)
    if (torch := loaded_torch.module()) is not None:
        torch.default_generator.manual_seed(seed)
    if _numpy is not None:
        # numpy's old generator takes 32 bits.
        _numpy.seed(seed & 0xFFFF_FFFF)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Gives the generators their former states back at the end."""
    of_random, torch = random.getstate(), loaded_torch.module()
    of_torch = None if torch is None else torch.default_generator.get_state()
    of_numpy = None if _numpy is None else _numpy.get_state()
    try:
        yield
    finally:
        random.setstate(of_random)
        if torch is not None:
            torch.default_generator.set_state(of_torch)
        if _numpy is not None:
            _numpy.set_state(of_numpy)
