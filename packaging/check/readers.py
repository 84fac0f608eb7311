#!/usr/bin/env python3
"""Reads files through a mount until a file appears, and compares each with its source.

Usage: readers.py SOURCE MOUNT STOP. Prints the number of reads and the slowest, in seconds. Exits 1 at the
first read that fails or has other bytes.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

READERS = 16


class Readers:
    """What the threads share."""

    def __init__(self, source: Path, mount: Path, stop: Path) -> None:
        self.names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        self.wanted = {name: (source / name).read_bytes() for name in self.names}
        self.mount = mount
        self.stop = stop
        self.reads = 0
        self.slowest = 0.0
        self.failed: list[str] = []

    def run(self, seed: int) -> None:
        """Reads random files."""
        rng = random.Random(seed)
        while not self.stop.exists() and not self.failed:
            name = rng.choice(self.names)
            begun = time.monotonic()
            try:
                file = os.open(self.mount / name, os.O_RDONLY)
                read = os.read(file, 1 << 20)
                # The next read asks the mount again.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
            except OSError as error:
                self.failed.append(f"{name}: {error}")
                return
            if read != self.wanted[name]:
                self.failed.append(f"{name}: other bytes")
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.reads += 1


def main() -> int:
    """Runs the readers."""
    readers = Readers(*map(Path, sys.argv[1:4]))
    threads = [threading.Thread(target=readers.run, args=(seed,)) for seed in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{readers.reads} reads, the slowest took {readers.slowest:.2f} s", *readers.failed)
    return 1 if readers.failed or readers.reads == 0 or readers.slowest > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
