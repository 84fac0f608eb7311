"""Images in folders, one folder for each class.

Invariant: classes, samples and targets are those that ``torchvision.datasets.ImageFolder`` finds in the same
    tree, in the
same order. Only the paths differ: they are relative to the version.
"""

from __future__ import annotations

import io
import posixpath
from typing import Any, Callable, Iterator, Sequence, Union

import torch.utils.data

from .. import Entry, Version
from ..epochs.sample_errors import add_note, named
from .map import _checked
from .prefetch import IndexedReads

#: The extensions of image files, compared without case.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

#: The longest chain of symlinks that is followed, as in Linux.
LINKS_MAX = 40

_Node = Union[Entry, "dict[str, _Node]"]


def image_loader(file: io.BytesIO) -> Any:
    """Decodes the image in a file. Returns a ``PIL.Image.Image`` in RGB."""
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


class ImageFolder(IndexedReads, torch.utils.data.Dataset[Any]):
    """The images of a version, labelled by their folder, as in ``torchvision.datasets.ImageFolder``.

    An item is ``(image, target)``. The dataset follows links that stay inside the version; other links are
    not samples. It reads items by ordinals that it keeps beside ``samples``, so use
    ``torch.utils.data.Subset`` for a subset.

    Args:
        version: the version to read.
        root: the directory whose sub-directories are the classes; ``""`` is the top of the version.
        transform: called with the result of ``loader``.
        target_transform: called with the class's index.
        loader: called with a readable, seekable binary file that holds the image; the file's ``name`` is the
            image's path. By default `image_loader`.
        is_valid_file: called with a path; returns whether the file is a sample. By default a file is a sample
            if its name ends with one of `IMAGE_EXTENSIONS`.

    Attributes:
        classes: the names of the classes, sorted.
        class_to_idx: the index of each class.
        samples: ``(path, index of the class)`` for each sample; ``imgs`` is the same list.
        targets: the class's index for each sample.

    Raises:
        FileNotFoundError: there is no class, or a class has no images.
        Corrupt, Unavailable, Overloaded: as `Version.read_many`, by index and by iteration.
    """

    def __init__(
        self,
        version: Version,
        root: str = "",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        loader: Callable[[io.BytesIO], Any] = image_loader,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        self.version = version
        self.root = root.strip("/")
        self.transform = transform
        self.target_transform = target_transform
        self.loader = loader
        self.extensions = None if is_valid_file else IMAGE_EXTENSIONS
        valid = is_valid_file or (lambda path: path.lower().endswith(IMAGE_EXTENSIONS))
        tree = _Tree(version)
        self.classes, self.class_to_idx = self._classes(tree)
        self.samples: list[tuple[str, int]] = []
        self._ordinals: list[int] = []
        for name, index in self.class_to_idx.items():
            before = len(self.samples)
            for path, entry in tree.files(posixpath.join(self.root, name)):
                if valid(path):
                    self.samples.append((path, index))
                    self._ordinals.append(entry.ordinal)
            if len(self.samples) == before:
                raise FileNotFoundError(
                    f"class {name!r} of {version!r} has no images; remove the folder or give is_valid_file"
                )
        self.targets = [target for _, target in self.samples]
        self.imgs = self.samples

    def _classes(self, tree: _Tree) -> tuple[list[str], dict[str, int]]:
        classes = sorted(tree.directories(self.root))
        if not classes:
            raise FileNotFoundError(f"{self.version!r} has no directories below {self.root or 'its top'!r}")
        return classes, {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | list[int]) -> Any:
        """The pair ``(image, target)`` at an index; for a list of indices, a list of pairs read together."""
        if isinstance(index, list):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, Any]]:
        """The pairs at these indices, in order, read together. Torch 2 calls it for a batch."""
        views = self._views(self._entries_of(indices))
        return [self._named_item(i, view) for i, view in zip(indices, views)]

    def _named_item(self, index: int, view: memoryview) -> tuple[Any, Any]:
        """The pair at an index. An error of the loader or a transform names the image."""
        path, target = self.samples[index]
        try:
            return self._item(path, target, view)
        except Exception as error:
            name = named(path, path, None, self._ordinals[index])
            add_note(error, f"fletch: the image cannot be loaded or transformed: {name}")
            raise

    def _entries_of(self, indices: Sequence[int]) -> list[int]:
        return [self._ordinals[_checked(i, len(self))] for i in indices]

    def _item(self, path: str, target: Any, view: memoryview) -> tuple[Any, Any]:
        file = io.BytesIO(view)
        file.name = path
        image = self.loader(file)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        return f"ImageFolder({self.version!r}, {len(self)} images, {len(self.classes)} classes)"


class _Tree:
    """The directories of a version. Follows links inside the version."""

    def __init__(self, version: Version) -> None:
        self.top: dict[str, _Node] = {}
        for entry in version.entries():
            if entry.kind == "member":
                continue
            *above, name = entry.path.rstrip("/").split("/")
            here = self.top
            for part in above:
                # In a version no path is both a directory and a file or link.
                here = here.setdefault(part, {})  # type: ignore[assignment]
            here[name] = {} if entry.kind == "empty-dir" else entry

    def find(self, path: str, links: int = 0) -> _Node | None:
        """The node at a path, with links followed; ``None`` if it is absent, outside, or a loop of links."""
        node: _Node = self.top
        done: list[str] = []
        for part in (p for p in path.split("/") if p not in ("", ".")):
            if part == "..":
                if not done:
                    return None
                done.pop()
                node = self._at(done)
                continue
            if not isinstance(node, dict) or part not in node:
                return None
            node = node[part]
            if isinstance(node, Entry) and node.kind == "symlink":
                if node.target.startswith("/") or links >= LINKS_MAX:
                    return None
                found = self.find("/".join([*done, node.target]), links + 1)
                if found is None:
                    return None
                node = found
            done.append(part)
        return node

    def _at(self, parts: list[str]) -> _Node:
        return self.find("/".join(parts)) or self.top

    def directories(self, path: str) -> list[str]:
        """The names of the directories right below a directory."""
        node = self.find(path)
        if not isinstance(node, dict):
            return []
        return [name for name in node if isinstance(self.find(posixpath.join(path, name)), dict)]

    def files(self, path: str) -> Iterator[tuple[str, Entry]]:
        """The files below a directory as (path, entry), ordered by directory and then by name."""
        found: list[tuple[str, str, Entry]] = []
        todo: list[tuple[str, tuple[int, ...]]] = [(path, ())]
        while todo:
            here, above = todo.pop()
            node = self.find(here)
            if not isinstance(node, dict) or id(node) in above:
                continue
            for name in node:
                below = self.find(posixpath.join(here, name))
                if isinstance(below, dict):
                    todo.append((posixpath.join(here, name), (*above, id(node))))
                elif below is not None:
                    found.append((here, name, below))
        found.sort(key=lambda f: f[:2])
        return ((posixpath.join(here, name), entry) for here, name, entry in found)
