"""The keys of samples that consist of several files, and the dicts that a transform gets for such samples.

Invariant: a sample's key is the one in the version's tables, whichever dataset delivers the sample.
"""

from __future__ import annotations

from typing import Any, Iterable

from .. import Version


def by_extension(key: str, extensions: Iterable[str], views: Iterable[memoryview]) -> dict[str, Any]:
    """A dict of a sample's files by extension, with the key as ``"__key__"``."""
    return {"__key__": key, **dict(zip(extensions, views))}


def extension(path: str) -> str:
    """The part of the file's name after the first dot, such as ``"jpg"`` or ``"cls.txt"``."""
    return path.rsplit("/", 1)[-1].partition(".")[2]


class SampleKeys:
    """Finds the keys of leased samples.

    A lease has the path of a shard's member, and does not say where the shard's own path ends in it. So this
    class asks the version's tables once for each directory that may lie in a shard.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        #: For a directory: the length of its shard's path in the path of a file, including the slash.
        self._shard_lengths: dict[str, int] = {}

    def of(self, path: str, ordinal: int) -> str:
        """The key of the sample whose first file has this path and ordinal.

        Raises:
            FletchError: the tables cannot be read.
        """
        stem = path[: len(path) - len(extension(path)) - 1]
        # Only a file named *.tar is a shard.
        if ".tar/" not in path:
            return stem
        directory = path.rpartition("/")[0]
        if directory not in self._shard_lengths:
            key = self._version.entry(ordinal).sample or stem
            self._shard_lengths[directory] = len(stem) - len(key)
        return stem[self._shard_lengths[directory] :]
