"""``fletch://`` for fsspec: fsspec's own tests, and what this file system promises beside them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any, Iterator

import pytest

fsspec = pytest.importorskip("fsspec", reason="tests/install.sh installs it")

from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests  # noqa: E402

import fletch  # noqa: E402
from conftest import Server, in_child, serving  # noqa: E402
from fletch.fsspec import FletchFileSystem  # noqa: E402


class Published(AbstractFixtures):
    """The fixtures of fsspec's tests. They make their trees in a folder, and publish the folder."""

    @pytest.fixture
    def fs(self, server: Server) -> FletchFileSystem:
        return FletchFileSystem(server.url, skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, request: pytest.FixtureRequest) -> str:
        name = "".join(c if c.isalnum() else "-" for c in request.node.nodeid.rpartition("::")[2])
        return f"abstract-{name}"

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(map(str, parts))

    def _published(self, make: Any, server: Server, fs_path: str) -> str:
        tree = server.scratch / f"tree-{fs_path}"
        tree.mkdir()
        make(LocalFileSystem(auto_mkdir=True), os.path.join, str(tree))
        server.publish(fs_path, tree)
        return f"{fs_path}/source"

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, server: Server, fs_path: str) -> str:
        return self._published(self._bulk_operations_scenario_0, server, fs_path)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, server: Server, fs_path: str) -> str:
        return self._published(self._glob_edge_cases_files, server, fs_path)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, server: Server, fs_path: str) -> str:
        return self._published(self._dir_and_file_with_same_name_prefix, server, fs_path)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, server: Server, fs_path: str) -> str:
        return self._published(self._10_files_with_hashed_names, server, fs_path)


class TestGet(AbstractGetTests, Published):
    def test_get_directory_recursive(
        self, fs: Any, fs_join: Any, fs_path: Any, local_fs: Any, local_join: Any, local_target: Any
    ) -> None:
        """The one of 45 tests that makes a directory on the file system."""
        with pytest.raises(OSError) as refused:
            super().test_get_directory_recursive(fs, fs_join, fs_path, local_fs, local_join, local_target)
        assert refused.value.errno == errno.EROFS


@pytest.fixture(scope="module")
def tables() -> Iterator[Server]:
    """A server with the dataset ``mixed``: files, links of each kind, a shard, an empty directory."""
    with serving() as server:
        tree = server.scratch / "tree"
        for path, text in {"a/one.txt": "one", "a/deep/two.txt": "two", "b/three.csv": "x,y\n1,2\n"}.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        (tree / "large.bin").write_bytes(os.urandom(9_000_000))
        (tree / "odd é #1?%20.bin").write_bytes(b"odd")
        (tree / "void").mkdir()
        (tree / "to-file").symlink_to("a/one.txt")
        (tree / "b" / "to-sibling").symlink_to("../a/deep/two.txt")
        (tree / "to-dir").symlink_to("a")
        (tree / "a" / "deep" / "up").symlink_to("..")
        (tree / "b" / "crossing").symlink_to("../a/deep")
        (tree / "dangling").symlink_to("nothing")
        (tree / "outside").symlink_to("../../../etc/hostname")
        (tree / "absolute").symlink_to("/etc/hostname")
        (tree / "round").symlink_to("round")
        with tarfile.open(tree / "shard.tar", "w") as tar:
            for name in ("0.jpg", "0.cls"):
                tar.add(tree / "a" / "one.txt", arcname=name)
        server.publish("mixed", tree)
        yield server


@pytest.fixture
def fs(tables: Server) -> FletchFileSystem:
    return FletchFileSystem(f"unix:{tables.socket}", skip_instance_cache=True)


def names(fs: FletchFileSystem, path: str) -> list[str]:
    return sorted(one["name"].removeprefix("mixed").lstrip("/") for one in fs.ls(path))


def test_a_listing_has_files_and_inner_links_and_no_members(fs: FletchFileSystem) -> None:
    assert fs.ls("", detail=False) == fs.ls("fletch://", detail=False) == ["mixed"]
    shown = ["a", "b", "large.bin", "odd é #1?%20.bin", "shard.tar", "to-dir", "to-file", "void"]
    assert names(fs, "mixed") == names(fs, "fletch://mixed/") == shown
    assert names(fs, "mixed/a") == ["a/deep", "a/one.txt"]
    assert names(fs, "mixed/to-dir") == ["to-dir/deep", "to-dir/one.txt"]
    # A link to a directory above it would make a walk endless.
    assert names(fs, "mixed/a/deep") == ["a/deep/two.txt"]
    assert names(fs, "mixed/b/crossing") == ["b/crossing/two.txt", "b/crossing/up"]
    assert names(fs, "mixed/b/crossing/up") == ["b/crossing/up/deep", "b/crossing/up/one.txt"]
    assert fs.ls("mixed/void") == []
    assert fs.ls("mixed/a/one.txt", detail=False) == ["mixed/a/one.txt"]
    for absent in ("mixed/nothing", "nothing", "mixed/dangling", "mixed/outside", "mixed/absolute"):
        with pytest.raises(FileNotFoundError):
            fs.ls(absent)
        assert not fs.exists(absent)
    for member in ("mixed/shard.tar/0.jpg", "mixed/round", "mixed/a/one.txt/x", "mixed@v9/a"):
        with pytest.raises(FileNotFoundError):
            fs.info(member)


def test_a_walk_ends_and_has_every_file(fs: FletchFileSystem) -> None:
    found = [path.removeprefix("mixed/") for path in fs.find("mixed")]
    assert {"a/one.txt", "to-dir/deep/two.txt", "b/to-sibling", "b/crossing/up/one.txt"} <= set(found)
    assert not any("shard.tar/" in path or "dangling" in path for path in found)
    assert fs.glob("mixed/**/*.txt")[:2] == ["mixed/a/deep/two.txt", "mixed/a/one.txt"]
    assert fs.glob("fletch://mixed/*/t*.csv") == ["mixed/b/three.csv"]
    assert fs.du("mixed/a") == 6


def test_info_says_what_a_file_is(tables: Server, fs: FletchFileSystem) -> None:
    version = fletch.Client(tables.url).resolve("mixed")
    own = version.entry("a/one.txt")
    by_root = f"mixed@{version.root}/a/one.txt"
    for path in ("mixed/a/one.txt", "mixed/to-file", by_root, "mixed@latest/to-file"):
        info = fs.info(f"fletch://{path}")
        assert (info["name"], info["size"], info["type"]) == (path, 3, "file")
        assert info["blake3"] == info["ETag"] == own.hash == fs.ukey(path)
        assert fs.checksum(path) == int(str(own.hash), 16)
    assert fs.info("mixed/to-dir")["type"] == fs.info("mixed")["type"] == fs.info("")["type"] == "directory"
    assert fs.created("mixed/a/one.txt").timestamp() == pytest.approx(version.created_ns / 1e9)
    assert fs.modified("mixed") == fs.created("mixed")
    assert fs.ukey("mixed/a") != fs.ukey("mixed/b")
    with pytest.raises(IsADirectoryError):
        fs.checksum("mixed/a")


@pytest.mark.parametrize("verify", ["client", "server"])
def test_bytes_are_those_of_the_files(tables: Server, verify: str) -> None:
    fs = FletchFileSystem(tables.url, verify=verify)
    large = (tables.scratch / "tree" / "large.bin").read_bytes()
    assert fs.cat_file("mixed/to-file") == b"one" and fs.cat("mixed/odd é #1?%20.bin") == b"odd"
    assert fs.cat_file("mixed/large.bin") == large
    for start, end in [(0, 0), (None, 5), (5, None), (-7, None), (-7, -3), (4_000_000, 5_000_000), (9, 4)]:
        assert fs.cat_file("mixed/large.bin", start, end) == large[start:end], (start, end)
    with fs.open("mixed/large.bin") as file:
        assert file.read() == large and file.size == len(large)
        file.seek(4_194_300)
        assert file.read(10) == large[4_194_300:4_194_310]
    with fsspec.open("fletch://mixed/b/three.csv", "rt", server=tables.url) as text:
        assert text.read() == "x,y\n1,2\n"
    ranges = fs.cat_ranges(["mixed/large.bin", "mixed/a", "mixed/a/one.txt"], [3, 0, -2], [9, 1, None])
    assert ranges[0] == large[3:9] and isinstance(ranges[1], IsADirectoryError) and ranges[2] == b"ne"
    with pytest.raises(IsADirectoryError):
        fs.cat_ranges(["mixed/a"], 0, 1, on_error="raise")
    both = ["mixed/a/one.txt", "mixed/to-file"]
    assert fs.cat(both) == {path: b"one" for path in both}
    assert fs.cat("mixed/a", recursive=True)["mixed/a/deep/two.txt"] == b"two"
    assert fs.head("mixed/a/one.txt", 2) == b"on" and fs.tail("mixed/a/one.txt", 2) == b"ne"


def test_a_thousand_ranges_take_few_requests(tables: Server) -> None:
    for verify in ("client", "server"):
        fs = FletchFileSystem(tables.url, verify=verify)
        fs.info("mixed/large.bin")
        before = fs._client.stats()["requests"]
        starts = [9000 * i for i in range(1000)]
        got = fs.cat_ranges(["mixed/large.bin"] * 1000, starts, [start + 100 for start in starts])
        assert fs._client.stats()["requests"] - before <= 20
        large = fs.cat_file("mixed/large.bin")
        assert got == [large[start : start + 100] for start in starts]


def test_nothing_is_written(fs: FletchFileSystem, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("own")
    path = "mixed/a/one.txt"
    for call in (
        lambda: fs.open(path, "wb"),
        lambda: fs.open(path, "ab"),
        lambda: fs.open("mixed/new", "xb"),
        lambda: fs.open(path, "r+b"),
        lambda: fs.open(path, "w"),
        lambda: fs.pipe(path, b"x"),
        lambda: fs.write_text(path, "x"),
        lambda: fs.touch("mixed/new"),
        lambda: fs.mkdir("mixed/new"),
        lambda: fs.makedirs("mixed/new", exist_ok=True),
        lambda: fs.rmdir("mixed/void"),
        lambda: fs.rm(path),
        lambda: fs.rm("mixed/a", recursive=True),
        lambda: fs.rm_file(path),
        lambda: fs.mv(path, "mixed/new"),
        lambda: fs.copy(path, "mixed/new"),
        lambda: fs.put(str(own), "mixed/new"),
        lambda: fs.put_file(str(own), "mixed/new"),
    ):
        with pytest.raises(OSError) as refused:
            call()
        assert refused.value.errno == errno.EROFS, call


def _cat_in_another_process(pickled: bytes, path: str, out: str) -> None:
    fs = pickle.loads(pickled)
    found = fs.cat_file(path).decode()
    Path(out).write_text(json.dumps([found, fs.version(path).root]))


def test_a_moved_tag_changes_no_open_instance(tmp_path: Path) -> None:
    with serving() as server:
        tree = server.scratch / "tree"
        tree.mkdir()
        (tree / "file").write_text("before")
        before = server.publish("moves", tree)
        fs = FletchFileSystem(server.url, skip_instance_cache=True)
        late = FletchFileSystem(server.url, skip_instance_cache=True)
        assert fs.cat_file("moves/file") == b"before"
        opened = fs.open("moves/file")
        (tree / "file").write_text("and after")
        (tree / "more").write_text("more")
        # The bytes of the version before are in the cache. An index keeps no copy of its own.
        assert server.publish("moves", tree) != before
        assert fs.cat_file("moves/file") == b"before" and fs.ls("moves", detail=False) == ["moves/file"]
        assert opened.read() == b"before"
        # Its copies read what it reads, in whichever process.
        pickled, out = pickle.dumps(fs), tmp_path / "out"
        spawned = multiprocessing.get_context("spawn")
        process = spawned.Process(target=_cat_in_another_process, args=(pickled, "moves/file", str(out)))
        process.start()
        process.join(60)
        assert process.exitcode == 0 and json.loads(out.read_text()) == ["before", before]
        in_child(lambda: bool(fs.cat_file("moves/file") == b"before"))
        # An instance that resolves the tag now reads the new version.
        assert late.cat_file("moves/file") == b"and after" and len(late.ls("moves")) == 2
        assert pickle.loads(pickle.dumps(late)).cat_file("moves/more") == b"more"


def test_no_secret_is_in_what_is_shown_or_pickled(tables: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    fs = FletchFileSystem(tables.url, token_file=str(token), skip_instance_cache=True)
    assert "a-secret-token" not in f"{fs!r} {fs.storage_options} {fs.to_json()}"
    assert b"a-secret-token" not in pickle.dumps(fs)


def test_the_protocol_is_known_and_chains(tables: Server, tmp_path: Path) -> None:
    assert fsspec.get_filesystem_class("fletch") is FletchFileSystem
    options = {"fletch": {"server": tables.url}, "simplecache": {"cache_storage": str(tmp_path)}}
    with fsspec.open("simplecache::fletch://mixed/large.bin", **options) as file:
        assert file.read() == (tables.scratch / "tree" / "large.bin").read_bytes()
    with fsspec.open("tar://0.jpg::fletch://mixed/shard.tar", fletch=options["fletch"]) as member:
        assert member.read() == b"one"
    found, path = fsspec.core.url_to_fs("fletch://mixed@latest/a", server=tables.url)
    assert isinstance(found, FletchFileSystem) and path == "mixed@latest/a"
    fs = fsspec.filesystem("fletch", server=tables.url)
    fs.get("mixed/a", str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got" / "deep" / "two.txt").read_text() == "two"
