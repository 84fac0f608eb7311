"""Ranges of files: equal to slices, checked, and in few requests."""

from __future__ import annotations

import random
import socket
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any, Iterator

import pytest

import fletch
from conftest import BIN, Server, serving

#: More than a number of 32 bits counts.
LONG = (4 << 30) + (9 << 20)


@pytest.fixture(params=["client", "server"])
def verify(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def version_of(server: Server, name: str, verify: str, address: str | None = None) -> fletch.Version:
    return fletch.Client(address or server.url, job="ranges", verify=verify).resolve(name)


def some_ranges(rng: random.Random, paths: dict[str, bytes]) -> Iterator[tuple[str, int, int | None]]:
    for path, content in paths.items():
        size = len(content)
        yield from [(path, 0, None), (path, 0, 0), (path, size, size + 5), (path, size + 7, None)]
        for _ in range(6):
            start = rng.randrange(size + 1)
            yield path, start, rng.choice([None, start, start + rng.randrange(9000), size, size + 3])


def test_a_range_is_a_slice_of_the_file(server: Server, files: Path, verify: str) -> None:
    names = ["empty", "a/000.bin", "b/001.bin", "middle.bin", "large.bin", "odd é #1?.bin"]
    contents = {name: (files / name).read_bytes() for name in names}
    wanted = list(some_ranges(random.Random(5), contents))
    # Across the border of two chunks, and across three.
    wanted += [("large.bin", (4 << 20) - 3, (4 << 20) + 4), ("large.bin", 3 << 20, 13 << 20)]
    for address in (server.url, f"unix:{server.socket}"):
        version = version_of(server, "files", verify, address)
        views = version.read_ranges(wanted)
        assert len(views) == len(wanted)
        for (name, start, stop), view in zip(wanted, views):
            assert view == contents[name][start:stop], (name, start, stop)
            assert view.readonly and view.format == "B"
        assert version.read_range("middle.bin", 7, 11) == contents["middle.bin"][7:11]
        ordinal = version.entry("middle.bin").ordinal
        assert version.read_range(ordinal, 2_999_990) == contents["middle.bin"][2_999_990:]
        assert version.read_ranges([]) == []


def test_members_and_packed_files_have_ranges(server: Server, shards: Path, verify: str) -> None:
    version = version_of(server, "shards", verify)
    for path in ("0.tar/0-3.jpg", "1.tar/1-0.jpg", "1.tar"):
        content = bytes(version.read(path))
        assert version.read_range(path, 100, 2000) == content[100:2000]
    tree = server.scratch / "tree-packed"
    contents = {}
    rng = random.Random(4)
    for i in range(300):
        path = tree / f"{i % 7}" / f"{i:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.randrange(1, 40_000)))
        contents[str(path.relative_to(tree))] = path.read_bytes()
    (tree / "long").write_bytes(rng.randbytes(9_000_000))
    contents["long"] = (tree / "long").read_bytes()
    name = f"packed-{verify}"
    pack(server, name, tree)
    version = version_of(server, name, verify)
    wanted = list(some_ranges(rng, contents))
    for (path, start, stop), view in zip(wanted, version.read_ranges(wanted)):
        assert view == contents[path][start:stop], (path, start, stop)


def test_a_member_in_several_chunks_has_ranges(server: Server, tmp_path: Path, verify: str) -> None:
    content = random.Random(3).randbytes(9_000_001)
    (tmp_path / "member").write_bytes(content)
    tree = server.scratch / f"tree-members-{verify}"
    tree.mkdir()
    with tarfile.open(tree / "shard.tar", "w") as tar:
        for name in ("first.bin", "second.bin"):
            tar.add(tmp_path / "member", arcname=name)
    server.publish(f"members-{verify}", tree)
    pack(server, f"packed-members-{verify}", tree)
    for name in (f"members-{verify}", f"packed-members-{verify}"):
        version = version_of(server, name, verify)
        wanted = [("shard.tar/second.bin", at, at + 5_000_000) for at in (0, 7, 3_000_000, 8_999_999)]
        for (path, start, stop), view in zip(wanted, version.read_ranges(wanted)):
            assert view == content[start:stop], (name, path, start)
        assert version.read("shard.tar/first.bin") == content


def pack(server: Server, name: str, tree: Path) -> None:
    """Packs a dataset, so that many files share a chunk, and registers it."""
    tables, state = server.scratch / f"tables-{name}", server.scratch / f"pack-{name}"
    words = [BIN / "fletch", "pack", tree, "--to", tables, "--state-dir", state, "--quiet"]
    subprocess.run(words, check=True, capture_output=True)
    server.register(name, tree, tables)


def test_a_thousand_ranges_take_few_requests(server: Server, files: Path, verify: str) -> None:
    version = version_of(server, "files", verify)
    large = (files / "large.bin").read_bytes()
    rng = random.Random(6)
    starts = [rng.randrange(len(large) - 2000) for _ in range(1000)]
    wanted = [("large.bin", start, start + rng.randrange(1, 2000)) for start in starts]
    version.read_range("large.bin", 0, 1)
    before = version.client.stats()
    views = version.read_ranges(wanted)
    after = version.client.stats()
    assert after["requests"] - before["requests"] <= 20
    assert all(view == large[start:stop] for (_, start, stop), view in zip(wanted, views))
    small = [(f"{'abc'[i % 3]}/{i:03}.bin", 0, 3) for i in range(600)] * 2
    before = version.client.stats()["requests"]
    views = version.read_ranges(small[:1000])
    assert version.client.stats()["requests"] - before <= 20
    assert all(view == (files / path).read_bytes()[:3] for (path, _, _), view in zip(small, views))


def test_reading_on_fetches_each_chunk_once(server: Server, files: Path) -> None:
    large = (files / "large.bin").read_bytes()
    version = version_of(server, "files", "client")
    version.entry(0)
    before = version.client.stats()["requests"]
    for start in range(0, len(large), 1 << 20):
        assert version.read_range("large.bin", start, start + (1 << 20)) == large[start : start + (1 << 20)]
    # 9 chunks of 4 MiB in 34 calls.
    assert version.client.stats()["requests"] - before <= 9


def test_a_small_range_costs_its_groups(server: Server, files: Path) -> None:
    large = (files / "large.bin").read_bytes()
    proxy = Tampering(server, range(0))
    try:
        version = version_of(server, "files", "client", proxy.url)
        version.entry(0)
        # With the hashes of its chunk, which take 8 KiB; after it; and in both groups.
        for at, most in [(9 << 20, 30_000), ((9 << 20) + 40_000, 20_000), ((9 << 20) + 16_000, 36_000)]:
            before = proxy.sent
            assert version.read_range("large.bin", at, at + 2000) == large[at : at + 2000]
            assert 2000 < proxy.sent - before <= most
        # Whoever reads on in pieces of 64 KiB gets the chunk, once a quarter of it was read in a row.
        before, requests = proxy.sent, version.client.stats()["requests"]
        for at in range(12 << 20, 16 << 20, 1 << 16):
            assert version.read_range("large.bin", at, at + (1 << 16)) == large[at : at + (1 << 16)]
        assert version.client.stats()["requests"] - requests <= 18
        assert 4 << 20 < proxy.sent - before <= (4 << 20) + (5 << 18)
    finally:
        proxy.close()


def test_wrong_hashes_of_groups_cost_the_chunk(server: Server, files: Path) -> None:
    large = (files / "large.bin").read_bytes()
    proxy = Tampering(server, range(0))
    try:
        version = version_of(server, "files", "client", proxy.url)
        version.read_range("large.bin", 0, 1)
        # The hashes of a chunk take 8 KiB.
        proxy.lengths, proxy.most, before = range(8_000, 12_000), 1, proxy.sent
        assert version.read_range("large.bin", 17 << 20, (17 << 20) + 10) == large[17 << 20 : (17 << 20) + 10]
        assert proxy.changed == 1
        assert proxy.sent - before > 4 << 20
    finally:
        proxy.close()


@pytest.mark.parametrize(
    "wanted",
    [("nothing", 0, 1), ("a", 0, 1), ("link", 0, 1), ("a/000.bin", 5, 4), ("a/000.bin", -1, 4), ("empty",)],
)
def test_what_is_no_range_is_refused(server: Server, files: Path, verify: str, wanted: Any) -> None:
    version = version_of(server, "files", verify)
    kinds = (fletch.NotFound, fletch.Invalid, OverflowError, TypeError, ValueError)
    with pytest.raises(kinds):
        version.read_ranges([("a/001.bin", 0, 1), wanted])


@pytest.fixture(scope="module")
def long_file() -> Iterator[Server]:
    """A server with the dataset ``long``: one file of more than 4 GiB, nearly all zeros."""
    with serving() as server:
        tree = server.scratch / "tree"
        tree.mkdir()
        with open(tree / "long", "wb") as file:
            file.truncate(LONG)
            for at in (0, 4 << 30, LONG - 5):
                file.seek(at)
                file.write(b"%5d" % (at % 99_991))
        server.publish("long", tree)
        yield server


def test_a_file_above_four_gibibytes_has_ranges(long_file: Server, verify: str) -> None:
    version = version_of(long_file, "long", verify)
    with pytest.raises(fletch.Invalid, match="ranges"):
        version.read("long")
    with pytest.raises(fletch.Invalid, match="several calls"):
        version.read_range("long", 0)
    assert version.read_range("long", LONG - 5) == b"%5d" % ((LONG - 5) % 99_991)
    assert version.read_ranges([("long", (4 << 30) - 2, (4 << 30) + 6), ("long", 0, 6)]) == [
        b"\0\0" + b"%5d" % ((4 << 30) % 99_991) + b"\0",
        b"    0\0",
    ]


def test_a_draft_is_sealed_first(verify: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some bytes")
    name = f"draft-{verify}"
    server.publish(name, tmp_path, "--draft")
    with pytest.raises(fletch.Invalid, match="fletch seal") as refused:
        version_of(server, name, verify).read_range("file", 0, 4)
    assert refused.value.code == "not_sealed"


class Tampering:
    """A proxy that changes a byte in runs of bytes that the server sends, if they are so long."""

    def __init__(self, server: Server, lengths: range) -> None:
        self.lengths = lengths
        self.most = 1 << 30
        self._to = server.url.removeprefix("http://").split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.changed = 0
        #: Bytes from the server.
        self.sent = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            there = socket.create_connection((self._to[0], int(self._to[1])))
            threading.Thread(target=self._copy, args=(client, there, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(there, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, tampers: bool) -> None:
        while True:
            try:
                got = bytearray(source.recv(1 << 16))
                self.sent += len(got) if tampers else 0
                if tampers and len(got) in self.lengths and self.changed < self.most:
                    got[len(got) // 2] ^= 1
                    self.changed += 1
                sink.sendall(got)
            except OSError:
                return
            if not got:
                sink.close()
                return


def test_a_wrong_byte_is_an_error(server: Server, files: Path) -> None:
    large = (files / "large.bin").read_bytes()
    proxy = Tampering(server, range(40_000, 1 << 20))
    try:
        version = version_of(server, "files", "client", proxy.url)
        with pytest.raises(fletch.Corrupt, match="large.bin"):
            version.read_range("large.bin", 5 << 20, (5 << 20) + 300_000)
        assert proxy.changed > 0
        # Without hashing here, the reader trusts the network: PYTHON.md says so.
        trusting = version_of(server, "files", "server", proxy.url)
        assert trusting.read_range("large.bin", 5 << 20, 8 << 20) != large[5 << 20 : 8 << 20]
    finally:
        proxy.close()
