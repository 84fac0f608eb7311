"""The contents of samples: the view of a file, or a dict of the views of a sample's files.

Invariant: which of the two a sample has depends on the sample and on ``content=``, not on other samples of
    the version.
"""

from __future__ import annotations

from typing import Any, Literal, Optional, Sequence, Union

from .. import Invalid

#: What the user asked for: ``"view"``, ``"dict"``, or what each sample is by itself.
ContentForm = Optional[Literal["view", "dict"]]

#: The content of a sample.
Content = Union[memoryview, "dict[str, Any]"]


def checked_content_form(form: Any) -> ContentForm:
    """Returns the argument ``content=`` if it is valid.

    Raises:
        Invalid: it is not.
    """
    if form in (None, "view", "dict"):
        return form  # type: ignore[no-any-return]
    raise Invalid(f'content is {form!r}; give "view", "dict" or None')


def content_of(
    form: ContentForm, key: str, is_keyed: bool, paths: Sequence[str], views: Sequence[memoryview]
) -> Content:
    """The content of a sample.

    Args:
        form: what the user asked for.
        key: the sample's key.
        is_keyed: whether the sample is a member, or are several members, of a tar shard with that key.
        paths: the paths of the sample's files.
        views: the bytes of each file.

    Raises:
        Invalid: a view of a sample of several files is asked for.
    """
    if form == "dict" or (form is None and (is_keyed or len(views) > 1)):
        # The key of a file that is a sample by itself is its path.
        return by_extension(stem(key) if key == paths[0] else key, paths, views)
    if len(views) == 1:
        return views[0]
    raise Invalid(
        f'the sample {key} has {len(views)} files ({", ".join(paths[:4])}), so its content is no single '
        'view: leave content="view" out, or give content="dict"'
    )


def by_extension(key: str, paths: Sequence[str], views: Sequence[memoryview]) -> dict[str, Any]:
    """A dict of a sample's files by extension, in lower case as in webdataset, with the key as ``"__key__"``.

    An extension keeps its own case if another file of the sample has it in lower case.
    """
    content: dict[str, Any] = {"__key__": key}
    extensions = [extension(path) for path in paths]
    for own, view in zip(extensions, views):
        lower = own.lower()
        is_taken = lower in content or (own != lower and lower in extensions)
        content[own if is_taken else lower] = view
    return content


def extension(path: str) -> str:
    """The part of the file's name after the first dot, such as ``"jpg"`` or ``"cls.txt"``."""
    return path.rsplit("/", 1)[-1].partition(".")[2]


def stem(path: str) -> str:
    """The path up to the first dot of the file's name. The whole path if the name has no dot."""
    return path[: len(path) - len(extension(path)) - 1] if extension(path) else path


def nbytes_of(content: Any) -> int:
    """The bytes of a content."""
    if isinstance(content, memoryview):
        return content.nbytes
    return sum(view.nbytes for view in content.values() if isinstance(view, memoryview))
