"""Samples of a version by index.

Invariant: a batch of indices is one read of many files, whatever it is made of.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union, overload

import torch.utils.data

from .. import Sample, Version
from .keyed import by_extension, extension
from .reads import ByIndex

Content = Union[memoryview, "dict[str, Any]"]


class MapDataset(ByIndex, torch.utils.data.Dataset[Any]):
    """A version's samples by index, for random access in any order.

    Args:
        version: what to read.
        transform: called with the content of each sample (below); what it returns is the item. It
            runs in the process that reads. Without one the item is the content itself, which the
            default collation of torch cannot stack: give the loader a ``collate_fn``. From a worker views come as copies.
        samples: which samples, in which order; all of ``version.samples()`` when absent.

    A sample of one file is a read-only ``memoryview`` of its bytes, of format ``B`` and shape ``(bytes,)``. A sample with a key of its own
    (tar members that share it) is a dict of such views by extension (what follows the first dot
    of the name, as ``"jpg"`` or ``"cls.txt"``), and ``"__key__"``.

    Raises:
        NotFound, Corrupt, Unavailable, Overloaded: as `Version.read_many`, by index and by iteration.
        IndexError: there is no such index.
    """

    def __init__(
        self,
        version: Version,
        transform: Callable[[Any], Any] | None = None,
        samples: Sequence[Sample] | None = None,
    ) -> None:
        self.version = version
        self.transform = transform
        self.samples: list[Any] = list(version.samples() if samples is None else samples)
        self._extensions: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: list[int]) -> list[Any]: ...
    def __getitem__(self, index: int | list[int]) -> Any:
        """One item; or, for a list of indices, a list of items read together."""
        if isinstance(index, list):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Items in the order of ``indices``, read together (torch 2 calls this for a batch)."""
        chosen = self._chosen(indices)
        views = iter(self._views([o for sample in chosen for o in sample.ordinals]))
        items: list[Any] = []
        for sample in chosen:
            content: Content
            if sample.alone:
                content = next(views)
            else:
                content = by_extension(sample.key, map(self._extension, sample.ordinals), views)
            items.append(content if self.transform is None else self.transform(content))
        return items

    def _entries_of(self, indices: Sequence[int]) -> list[int]:
        return [o for sample in self._chosen(indices) for o in sample.ordinals]

    def _chosen(self, indices: Sequence[int]) -> list[Any]:
        return [self.samples[_checked(i, len(self.samples))] for i in indices]

    def _extension(self, ordinal: int) -> str:
        known = self._extensions.get(ordinal)
        if known is None:
            known = self._extensions[ordinal] = extension(self.version.entry(ordinal).path)
        return known

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.version!r}, {len(self)} samples)"


def _checked(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index}, there are {length} samples")
    return index
