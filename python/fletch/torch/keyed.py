"""Samples of several files that share a key: what a transform gets of them.

Invariant: a sample's key is the one in the version's tables, however the sample came.
"""

from __future__ import annotations

from typing import Any, Iterable

from .. import Version


def by_extension(key: str, extensions: Iterable[str], views: Iterable[memoryview]) -> dict[str, Any]:
    """A view of each file by its extension, and ``"__key__"``."""
    return {"__key__": key, **dict(zip(extensions, views))}


def extension(path: str) -> str:
    """What follows the first dot of the name, as ``"jpg"`` or ``"cls.txt"``."""
    return path.rsplit("/", 1)[-1].partition(".")[2]


class Keys:
    """Keys of leased samples. A lease says the path of a shard's member, and not where the shard ends in it: the tables of
    the version are asked once for each directory that may lie in a shard.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        #: Of a directory: how much of the path of a file in it is the shard's, with the slash.
        self._shards: dict[str, int] = {}

    def of(self, path: str, ordinal: int) -> str:
        """The key of the sample whose first file this is.

        Raises:
            FletchError: the tables are not there yet, and cannot be had.
        """
        stem = path[: len(path) - len(extension(path)) - 1]
        # Only what is called *.tar is a shard.
        if ".tar/" not in path:
            return stem
        directory = path.rpartition("/")[0]
        if directory not in self._shards:
            key = self._version.entry(ordinal).sample or stem
            self._shards[directory] = len(stem) - len(key)
        return stem[self._shards[directory] :]
