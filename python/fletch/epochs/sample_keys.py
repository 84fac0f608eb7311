"""The keys of leased samples.

Invariant: a sample's key is the one in the version's tables, whichever dataset delivers the sample.
"""

from __future__ import annotations

from .. import Version
from .contents import stem


class SampleKeys:
    """Finds the keys of leased samples.

    A lease has the path of a shard's member, and does not say where the shard's own path ends in it. So this
    class asks the version's tables once for each directory that may lie in a shard.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        #: Without keys each file is a sample by itself.
        self._has_keys = version.sample_rule == "stem"
        #: For a directory: the length of its shard's path in the path of a file, including the slash.
        self._shard_lengths: dict[str, int] = {}

    def of(self, path: str, ordinal: int) -> tuple[str, bool]:
        """The key of the sample whose first file has this path and ordinal, and whether it is in a shard.

        If each file is a sample by itself, the key is the path.

        Raises:
            FletchError: the tables cannot be read.
        """
        if not self._has_keys:
            return path, False
        # Only a file named *.tar is a shard.
        if ".tar/" not in path:
            return stem(path), False
        directory = path.rpartition("/")[0]
        if directory not in self._shard_lengths:
            key = self._version.entry(ordinal).sample or stem(path)
            self._shard_lengths[directory] = len(stem(path)) - len(key)
        length = self._shard_lengths[directory]
        return stem(path)[length:], length > 0
