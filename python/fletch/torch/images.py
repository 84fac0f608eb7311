"""Images in folders, one folder a class.

Invariant: classes, samples and targets are those that torchvision's dataset of the same name finds
in the same tree, in the same order; only the paths are relative to the version.
"""

from __future__ import annotations

import io
import posixpath
from typing import Any, Callable, Iterator, Sequence, Union

import torch.utils.data

from .. import Entry, Version
from .map import _checked
from .reads import ByIndex

#: Names that end so (in any case) are images.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

#: No chain of links is longer (as in Linux).
LINKS_MAX = 40

_Node = Union[Entry, "dict[str, _Node]"]


def image_loader(file: io.BytesIO) -> Any:
    """The image of a file, in RGB, as a ``PIL.Image.Image``."""
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


class ImageFolder(ByIndex, torch.utils.data.Dataset[Any]):
    """A version's images, labelled by the folder they are in, as ``torchvision.datasets.ImageFolder``.

    Args:
        version: what to read.
        root: the directory of the version whose sub-directories are the classes; ``""`` is the top.
        transform: called with what ``loader`` returns.
        target_transform: called with the class's index.
        loader: called with a readable, seekable binary file that holds the image (its ``name`` is the
            path); `image_loader` by default.
        is_valid_file: called with a path; whether the file is a sample. Without it names are judged
            by `IMAGE_EXTENSIONS`.

    Attributes:
        classes: names of the classes, sorted.
        class_to_idx: class → index.
        samples: ``(path, index of the class)`` of each sample; ``imgs`` is the same list.
        targets: the class's index of each sample.

    An item is ``(image, target)``. Links that stay inside the version are followed; others are not
    samples. Items are read by ordinals that are kept beside ``samples``: to take a subset, use
    ``torch.utils.data.Subset``.

    Raises:
        FileNotFoundError: there is no class, or one without images.
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
                raise FileNotFoundError(f"class {name!r} of {version!r} has no images")
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
        """``(image, target)``; or, for a list of indices, a list of such pairs read together."""
        if isinstance(index, list):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, Any]]:
        """Pairs in the order of ``indices``, read together (torch 2 calls this for a batch)."""
        views = self._views(self._entries_of(indices))
        return [self._item(*self.samples[i], view) for i, view in zip(indices, views)]

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
    """A version's directories, with links followed inside it."""

    def __init__(self, version: Version) -> None:
        self.top: dict[str, _Node] = {}
        for entry in version.entries():
            if entry.kind == "member":
                continue
            *above, name = entry.path.rstrip("/").split("/")
            here = self.top
            for part in above:
                # A directory is no file and no link: the version's own invariant.
                here = here.setdefault(part, {})  # type: ignore[assignment]
            here[name] = {} if entry.kind == "empty-dir" else entry

    def find(self, path: str, links: int = 0) -> _Node | None:
        """What a path names, links followed; nothing for what is absent, outside or a loop."""
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
        """Names of the directories right below a directory."""
        node = self.find(path)
        if not isinstance(node, dict):
            return []
        return [name for name in node if isinstance(self.find(posixpath.join(path, name)), dict)]

    def files(self, path: str) -> Iterator[tuple[str, Entry]]:
        """Files below a directory as (path, entry), directory by directory, each in order of names."""
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
