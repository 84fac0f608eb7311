"""``fletch://DATASET[@TAG or ROOT]/path`` for fsspec: for pandas, pyarrow, DuckDB, Hugging Face and others.

The package registers the protocol, so ``fsspec.open("fletch://photos@v3/labels.csv")`` works without an
import of this module. Needs fsspec (the extra ``fletch[fsspec]``).

Invariants:
    1. An instance resolves each name once. It reads the same versions until its end, also if a tag moves, and
       so do the copies that are pickled from it.
    2. A listing reads the tables of the directories that it lists, and no others.
    3. Nothing is written: every call that would write raises `OSError` with ``errno.EROFS``.
"""

from __future__ import annotations

import errno
import os
from datetime import datetime, timezone
from typing import Any, Callable, Iterable, Sequence

from fsspec.caching import BaseCache, register_cache
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem, make_instance

from . import Client, Entry, FletchError, NotFound, Version

#: The most bytes that an open file reads ahead, by default.
_BLOCK_BYTES = 4 << 20

#: The bytes that an open file reads at least after a seek.
_SEEK_BYTES = 64 << 10

#: The most bytes of a file that `FletchFileSystem.cat_file` reads in one call.
_PIECE_BYTES = 256 << 20

#: The most links that lead from a path to its file, as on Linux.
_LINKS_MAX = 40


def _read_only(path: Any = "") -> OSError:
    return OSError(errno.EROFS, "fletch:// is read-only", str(path))


def _absent(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class FletchFileSystem(AbstractFileSystem):
    """The datasets of a server as a file system for fsspec.

    A path is ``DATASET/path``, ``DATASET@TAG/path`` or ``DATASET@ROOT/path``; without a tag, ``latest``. The
    root lists the datasets. Links within a dataset are followed. Members of tar shards are not files here:
    their shard is one.

    Args:
        server: as for `fletch.Client`: by default ``FLETCH_SERVER``, or the user's own server.
        token_file: a file that holds the bearer token, if the server requires one.
        ca_file, cert_file, key_file: the certificates for an ``https://`` server, in PEM form.
        job: the job to which the server counts the bytes.
        timeout: the seconds within which each call ends.
        verify: ``"client"``: this process hashes what it reads, and reads whole chunks of up to 16 MiB for
            that. ``"server"``: it reads the bytes alone, and trusts the server and the network.
        roots: for pickled copies: the roots of names that were resolved already.
    """

    protocol = "fletch"
    root_marker = ""

    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        job: str | None = None,
        timeout: float = 30.0,
        verify: str = "client",
        roots: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._client = Client(
            server,
            token_file=token_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            job=job,
            timeout=timeout,
            verify=verify,
        )
        self._roots = dict(roots or {})
        #: The versions that were resolved, by ``DATASET[@TAG or ROOT]``.
        self._versions: dict[str, Version] = {}

    def __reduce__(self) -> Any:
        # Other threads may resolve names meanwhile.
        roots = {**self._roots, **{name: known.root for name, known in list(self._versions.items())}}
        return make_instance, (type(self), self.storage_args, {**self.storage_options, "roots": roots})

    # Paths.

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """The path without ``fletch://`` and slashes at its ends; of a list, the list of them."""
        plain = super()._strip_protocol(path)
        return plain if isinstance(plain, list) else plain.lstrip("/")

    def version(self, path: str) -> Version:
        """The version that this instance reads for a path or a name ``DATASET[@TAG or ROOT]``.

        Raises:
            FileNotFoundError: the dataset or tag does not exist, or this principal may not see it.
        """
        name = self._strip_protocol(path).partition("/")[0]
        if name not in self._versions:
            root = self._roots.get(name)
            try:
                asked = name if root is None else f"{name.partition('@')[0]}@{root}"
                # Another thread may have resolved it meanwhile: the first one counts.
                self._versions.setdefault(name, self._client.resolve(asked))
            except NotFound as error:
                raise _absent(path) from error
        return self._versions[name]

    def _real(self, path: str) -> tuple[Version, str, Entry | None]:
        """The version, the path without links, and the entry; ``None`` for a directory.

        Raises:
            FileNotFoundError: there is nothing, or a link leads out of the dataset.
        """
        name, _, inner = self._strip_protocol(path).partition("/")
        version = self.version(name)
        real, entry = _resolved(version, inner, path)
        return version, real, entry

    # Listings.

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """The description of a file or directory: ``name``, ``size``, ``type``; for a file its hash.

        Raises:
            FileNotFoundError: it does not exist.
        """
        name = self._strip_protocol(path)
        if name == self.root_marker:
            return _directory(name)
        entry = self._real(name)[2]
        return _directory(name) if entry is None else _file(name, entry)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The children of a directory, by name; of a file, the file itself.

        A link is shown as what it leads to. Links that lead out of the dataset, to nothing, or to a directory
        above them are not shown.

        Raises:
            FileNotFoundError: it does not exist.
        """
        name = self._strip_protocol(path)
        found = self._datasets() if name == self.root_marker else self._children(name)
        return found if detail else [one["name"] for one in found]

    def _datasets(self) -> list[dict[str, Any]]:
        return [_directory(dataset["name"]) for dataset in self._client.datasets()]

    def _children(self, name: str) -> list[dict[str, Any]]:
        version, real, entry = self._real(name)
        if entry is not None:
            return [_file(name, entry)]
        above: set[str] | None = None
        out = []
        for child, own in version.children(real):
            shown = f"{name}/{child}"
            if own is None:
                out.append(_directory(shown))
            elif own.kind != "symlink":
                out.append(_file(shown, own))
            else:
                try:
                    target, led = _resolved(version, f"{real}/{child}".lstrip("/"), shown)
                except FileNotFoundError:
                    continue
                if led is not None:
                    out.append(_file(shown, led))
                    continue
                if above is None:
                    above = self._real_directories(name)
                if target not in above:
                    out.append(_directory(shown))
        return out

    def _real_directories(self, name: str) -> set[str]:
        """The directories on the way to this one, without links. A walk must not enter one of them again."""
        parts = name.split("/")
        return {self._real("/".join(parts[: at + 1]))[1] for at in range(len(parts))}

    def created(self, path: str) -> datetime:
        """The time when the version was made."""
        return datetime.fromtimestamp(self.version(path).created_ns / 1e9, timezone.utc)

    modified = created

    def ukey(self, path: str) -> str:
        """The BLAKE3 hash of a file, 64 hex digits; for a directory a text of its version and path."""
        version, real, entry = self._real(path)
        if entry is None or entry.hash is None:
            return f"{version.root}/{real}"
        return entry.hash

    def checksum(self, path: str) -> int:
        """The BLAKE3 hash of a file as a number.

        Raises:
            IsADirectoryError: it is a directory.
        """
        return int(self._file_entry(path)[1].hash or "0", 16)

    # Bytes.

    def _file_entry(self, path: str) -> tuple[Version, Entry]:
        version, _, entry = self._real(path)
        if entry is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return version, entry

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file, or a range of it. Negative numbers count from its end."""
        version, entry = self._file_entry(path)
        first, last = _range(entry.size, start, end)
        if last - first == entry.size <= _PIECE_BYTES:
            return bytes(version.read(entry.ordinal))
        pieces = range(first, last, _PIECE_BYTES)
        return b"".join(version.read_range(entry.ordinal, at, min(at + _PIECE_BYTES, last)) for at in pieces)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Ranges of files, in few requests. ``starts`` and ``ends`` are lists, or one number for all.

        ``max_gap`` has no effect. With ``on_error="return"`` the error of a range stands in its place.
        """
        starts = starts if isinstance(starts, (list, tuple)) else [starts] * len(paths)
        ends = ends if isinstance(ends, (list, tuple)) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(f"{len(paths)} paths, {len(starts)} starts and {len(ends)} ends are given")

        def wanted(at: int) -> tuple[Version, Any]:
            version, entry = self._file_entry(paths[at])
            return version, (entry.ordinal, *_range(entry.size, starts[at], ends[at]))

        return _each(range(len(paths)), wanted, Version.read_ranges, on_error)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """The bytes of a file; for several paths, a dict of them. Many files come in few requests."""
        paths = self.expand_path(path, recursive=recursive, **kwargs)
        if len(paths) == 1 and paths[0] == self._strip_protocol(path):
            return self.cat_file(paths[0])
        files = [one for one in paths if not self.isdir(one)]

        def wanted(name: str) -> tuple[Version, Any]:
            version, entry = self._file_entry(name)
            return version, entry.ordinal

        got = _each(files, wanted, Version.read_many, "return" if on_error == "omit" else on_error)
        return {name: one for name, one in zip(files, got) if on_error != "omit" or isinstance(one, bytes)}

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> FletchFile:
        if mode != "rb":
            raise _read_only(path)
        version, entry = self._file_entry(path)
        size = block_size or _BLOCK_BYTES
        return FletchFile(self, path, version, entry, size, cache_options=cache_options, **kwargs)

    # Writes.

    def _refuse(self, path: Any = "", *_: Any, **__: Any) -> Any:
        raise _read_only(path)

    mkdir = makedirs = rmdir = rm = rm_file = _rm = touch = pipe_file = cp_file = mv = _refuse

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        """Raises `OSError` with ``errno.EROFS``."""
        raise _read_only(rpath)


class _GrowingReadAhead(BaseCache):
    """The buffer of an open file. It reads ahead more and more, as long as the file is read on.

    After a seek it reads little more than what is asked for: readers of Parquet jump from column to column.
    """

    name = "fletch"

    def __init__(self, blocksize: int, fetcher: Callable[[int, int], bytes], size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._start, self._bytes, self._ahead = 0, b"", _SEEK_BYTES

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        first, last = start or 0, self.size if stop is None else min(stop, self.size)
        if first >= last:
            return b""
        end = self._start + len(self._bytes)
        if self._start <= first and last <= end:
            return self._bytes[first - self._start : last - self._start]
        is_read_on = self._start <= first <= end and end > 0
        have = self._bytes[first - self._start :] if is_read_on else b""
        self._ahead = min(2 * self._ahead, self.blocksize) if is_read_on else 0
        until = max(last + self._ahead, first + _SEEK_BYTES)
        self._ahead = max(self._ahead, _SEEK_BYTES)
        self._bytes = have + self.fetcher(first + len(have), min(until, self.size))
        self._start = first
        return self._bytes[: last - first]


register_cache(_GrowingReadAhead, clobber=True)


class FletchFile(AbstractBufferedFile):
    """A file that is open for reading. It keeps its version, also if the tag moves."""

    def __init__(
        self,
        fs: FletchFileSystem,
        path: str,
        version: Version,
        entry: Entry,
        block_size: int,
        **kwargs: Any,
    ) -> None:
        self._version, self._entry = version, entry
        kwargs["cache_type"] = kwargs.get("cache_type") or _GrowingReadAhead.name
        super().__init__(fs, path, "rb", block_size, size=entry.size, **kwargs)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self._version.read_range(self._entry.ordinal, start, end))


def register_webdataset(**options: Any) -> None:
    """Makes webdataset read ``fletch://`` URLs in this process, with these options of `FletchFileSystem`.

    A worker that is started by spawn needs its own call.
    """
    from webdataset.gopen import gopen_schemes

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:
        return FletchFileSystem(**options).open(url, mode)

    gopen_schemes["fletch"] = gopen


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(name: str, entry: Entry) -> dict[str, Any]:
    # Hugging Face's datasets notice by the ETag that a file is another one.
    return {"name": name, "size": entry.size, "type": "file", "blake3": entry.hash, "ETag": entry.hash}


def _resolved(version: Version, inner: str, shown: str) -> tuple[str, Entry | None]:
    """The path in a version without links, and the entry there; ``None`` for a directory.

    Raises:
        FileNotFoundError: there is nothing, or a link leads out of the version.
    """
    left = [part for part in reversed(inner.split("/")) if part]
    plain = "/".join(reversed(left))
    if version.is_directory(plain):
        return plain, None
    real: list[str] = []
    links = 0
    entry: Entry | None = None
    while left:
        part = left.pop()
        if part == ".":
            continue
        if part == "..":
            # Only links have such parts. One that leads above the root leads out of the dataset.
            if not real:
                raise _absent(shown)
            real.pop()
            continue
        path = "/".join([*real, part])
        if version.is_directory(path):
            real.append(part)
            continue
        try:
            entry = version.entry(path)
        except NotFound as error:
            raise _absent(shown) from error
        if entry.kind == "symlink":
            links += 1
            if links > _LINKS_MAX or entry.target.startswith("/"):
                raise _absent(shown)
            left += [part for part in reversed(entry.target.split("/")) if part]
            entry = None
            continue
        if left or entry.kind != "file":
            raise _absent(shown)
        real.append(part)
    return "/".join(real), entry


def _range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """The range of a file of ``size`` bytes, as a slice of `bytes` has it."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _each(
    names: Iterable[Any],
    wanted: Callable[[Any], tuple[Version, Any]],
    read: Callable[[Version, list[Any]], list[memoryview]],
    on_error: str,
) -> list[Any]:
    """Reads items of several versions, those of one version together. Returns bytes in the items' order.

    Args:
        names: the items.
        wanted: the version of an item, and what to read of it.
        read: reads a list of a version.
        on_error: ``"raise"``, or ``"return"``: the error of an item stands in its place.
    """
    out: list[Any] = []
    of_version: dict[Version, list[tuple[int, Any]]] = {}
    for at, name in enumerate(names):
        out.append(None)
        try:
            version, item = wanted(name)
        except OSError as error:
            if on_error == "raise":
                raise
            out[at] = error
            continue
        of_version.setdefault(version, []).append((at, item))
    for version, items in of_version.items():
        try:
            got: list[Any] = [bytes(view) for view in read(version, [item for _, item in items])]
        except FletchError:
            if on_error == "raise":
                raise
            # One by one: each item has its own result.
            got = [_one(version, item, read) for _, item in items]
        for (at, _), one in zip(items, got):
            out[at] = one
    return out


def _one(version: Version, item: Any, read: Callable[[Version, list[Any]], list[memoryview]]) -> Any:
    try:
        return bytes(read(version, [item])[0])
    except FletchError as error:
        return error
