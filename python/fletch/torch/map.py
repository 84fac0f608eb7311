"""The samples of a version by index.

Invariant: a batch of indices is one call of `Version.read_many`, whatever its samples consist of.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence, overload

import torch.utils.data

from .. import Sample, Version
from ..epochs.contents import Content, ContentForm, checked_content_form, content_of
from ..epochs.sample_errors import add_note, named
from .prefetch import IndexedReads


class MapDataset(IndexedReads, torch.utils.data.Dataset[Any]):
    """The samples of a version by index, for random access.

    The content of a plain file is a read-only ``memoryview`` of its bytes, of format ``B`` and shape
    ``(bytes,)``. The content of members of a tar shard, and of several files, is a dict of such views by
    extension (the part of the name after the first dot, in lower case, such as ``"jpg"`` or ``"cls.txt"``),
    with the key as ``"__key__"``.

    Args:
        version: the version to read.
        transform: makes an item of a sample's content. It runs in the process that reads. Without it the item
            is the content itself; torch's default collation cannot stack views, so give the loader a
            ``collate_fn``. Views that a worker returns arrive as read-only views of shared memory, or as
            copies.
        samples: the samples, in order; by default ``version.samples()``.
        content: ``"view"`` or ``"dict"``: the form of every content, as in `EpochDataset`.

    Raises:
        Invalid: a sample has several files, and ``content="view"``.
        NotFound, Corrupt, Unavailable, Overloaded: as `Version.read_many`, by index and by iteration.
        IndexError: the index is out of range.
    """

    def __init__(
        self,
        version: Version,
        transform: Callable[[Any], Any] | None = None,
        samples: Sequence[Sample] | None = None,
        content: ContentForm = None,
    ) -> None:
        self.version = version
        self.transform = transform
        self.samples: list[Any] = list(version.samples() if samples is None else samples)
        self.content = checked_content_form(content)

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
        chosen, form, transform = self._chosen(indices), self.content, self.transform
        views = iter(self._views([o for sample in chosen for o in sample.ordinals]))
        # Calls of functions are most of the time of short files, so a plain file takes none.
        contents = [
            next(views)
            if sample.single and form != "dict"
            else content_of_indexed(self.version, sample, views, form)
            for sample in chosen
        ]
        if transform is None:
            return contents
        items: list[Any] = []
        try:
            for content in contents:
                items.append(transform(content))
        except Exception as error:
            sample = chosen[len(items)]
            first = sample.ordinals[0]
            name = named(self.version.entry(first).path, sample.key, None, first)
            add_note(error, f"fletch: transform failed for the sample {name}")
            raise
        return items

    def _entries_of(self, indices: Sequence[int]) -> list[int]:
        return [o for sample in self._chosen(indices) for o in sample.ordinals]

    def _chosen(self, indices: Sequence[int]) -> list[Any]:
        return [self.samples[_checked(i, len(self.samples))] for i in indices]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.version!r}, {len(self)} samples)"


def _checked(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range: the dataset has {length} samples")
    return index


def content_of_indexed(
    version: Version, sample: Sample, views: Iterator[memoryview], form: ContentForm
) -> Content:
    """The content of a sample of a version, made of the next views."""
    if sample.single and form != "dict":
        return next(views)
    entries = [version.entry(ordinal) for ordinal in sample.ordinals]
    is_keyed = not sample.single and entries[0].kind == "member"
    return content_of(form, sample.key, is_keyed, [e.path for e in entries], [next(views) for _ in entries])
