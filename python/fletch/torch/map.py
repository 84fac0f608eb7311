"""The samples of a version by index.

Invariant: a batch of indices is one call of `Version.read_many`, whatever its samples consist of.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union, overload

import torch.utils.data

from .. import Sample, Version
from .prefetch import IndexedReads
from .sample_errors import add_note, named
from .sample_keys import by_extension, extension

Content = Union[memoryview, "dict[str, Any]"]


class MapDataset(IndexedReads, torch.utils.data.Dataset[Any]):
    """The samples of a version by index, for random access.

    The content of a sample of one file is a read-only ``memoryview`` of its bytes, of format ``B`` and shape
    ``(bytes,)``. The content of a sample with a key (tar members that share the key) is a dict of such views
    by extension (the part of the name after the first dot, such as ``"jpg"`` or ``"cls.txt"``), with the key
    as ``"__key__"``.

    Args:
        version: the version to read.
        transform: makes an item of a sample's content. It runs in the process that reads. Without it the item
            is the content itself; torch's default collation cannot stack views, so give the loader a
            ``collate_fn``. Views that a worker returns arrive as read-only views of shared memory, or as
            copies.
        samples: the samples, in order; by default ``version.samples()``.

    Raises:
        NotFound, Corrupt, Unavailable, Overloaded: as `Version.read_many`, by index and by iteration.
        IndexError: the index is out of range.
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
        """The item at an index; for a list of indices, a list of items that are read together."""
        if isinstance(index, list):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The items at these indices, in order, read together. Torch 2 calls it for a batch."""
        chosen = self._chosen(indices)
        views = iter(self._views([o for sample in chosen for o in sample.ordinals]))
        items: list[Any] = []
        for sample in chosen:
            content: Content
            if sample.single:
                content = next(views)
            else:
                content = by_extension(sample.key, map(self._extension, sample.ordinals), views)
            items.append(content if self.transform is None else self._transformed(content, sample))
        return items

    def _transformed(self, content: Content, sample: Sample) -> Any:
        """The item of a content. An error of ``transform`` names the sample."""
        assert self.transform is not None
        try:
            return self.transform(content)
        except Exception as error:
            first = sample.ordinals[0]
            name = named(self.version.entry(first).path, sample.key, None, first)
            add_note(error, f"fletch: transform failed for the sample {name}")
            raise

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
        raise IndexError(f"index {index} is out of range: the dataset has {length} samples")
    return index
