"""The tools that people have, over ``fletch://``: each reads the bytes that were published.

`make accept-fsspec` installs the tools and runs this file.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).parent.parent))

import datasets
import duckdb
import fsspec
import pandas
import polars
import pyarrow.dataset
import pyarrow.parquet
import pytest
import webdataset

from conftest import BIN, Server, serving, until
from fletch.fsspec import FletchFileSystem, register_webdataset

ROWS = 400_000
FILES = 4
#: The least rate of a scan over ``fletch://``, compared with a mount.
LEAST_RATE = 0.8


def table() -> pandas.DataFrame:
    rng = random.Random(3)
    rows = range(ROWS)
    texts = [f"text {rng.random()}" for _ in rows]
    return pandas.DataFrame({"id": list(rows), "x": [rng.random() for _ in rows], "text": texts})


@pytest.fixture(scope="module")
def published() -> Iterator[Server]:
    """A server with the dataset ``tables``: Parquet and CSV files, and tar shards."""
    with serving() as server:
        tree = server.scratch / "tree"
        (tree / "parquet").mkdir(parents=True)
        rows = table()
        step = ROWS // FILES
        for at in range(FILES):
            part = rows[at * step : (at + 1) * step]
            part.to_parquet(tree / "parquet" / f"{at}.parquet", row_group_size=20_000)
        rows[:5000].to_csv(tree / "rows.csv", index=False)
        (tree / "latest.parquet").symlink_to("parquet/3.parquet")
        for shard in range(2):
            with tarfile.open(tree / f"shard-{shard}.tar", "w") as tar:
                for i in range(20):
                    for extension in ("cls", "txt"):
                        member = server.scratch / "member"
                        member.write_text(f"{extension} of {shard}-{i}")
                        tar.add(member, arcname=f"{shard}-{i}.{extension}")
        server.publish("tables", tree)
        yield server


@pytest.fixture(scope="module")
def rows() -> pandas.DataFrame:
    return table()


@pytest.fixture(params=["client", "server"])
def options(request: pytest.FixtureRequest, published: Server) -> dict[str, Any]:
    return {"server": published.url, "verify": request.param}


def same(found: pandas.DataFrame, expected: pandas.DataFrame) -> None:
    found = found.sort_values("id").reset_index(drop=True)[["id", "x", "text"]]
    pandas.testing.assert_frame_equal(found, expected.reset_index(drop=True), check_dtype=False)


def test_pandas(options: dict[str, Any], rows: pandas.DataFrame) -> None:
    csv = pandas.read_csv("fletch://tables/rows.csv", storage_options=options)
    same(csv, rows[:5000])
    last = pandas.read_parquet("fletch://tables@latest/latest.parquet", storage_options=options)
    same(last, rows[ROWS // FILES * 3 :])


def test_pyarrow(options: dict[str, Any], rows: pandas.DataFrame) -> None:
    fs = FletchFileSystem(**options)
    data = pyarrow.dataset.dataset("tables/parquet", filesystem=fs, format="parquet")
    same(data.to_table().to_pandas(), rows)
    chosen = data.to_table(columns=["id"], filter=pyarrow.dataset.field("id") >= ROWS - 10)
    assert chosen.column("id").to_pylist() == list(range(ROWS - 10, ROWS))
    one = pyarrow.parquet.read_table("tables/parquet/1.parquet", filesystem=fs)
    assert one.num_rows == ROWS // FILES


def test_polars(options: dict[str, Any], rows: pandas.DataFrame) -> None:
    with fsspec.open("fletch://tables/parquet/0.parquet", **options) as file:
        found = polars.read_parquet(file)
    same(found.to_pandas(), rows[: ROWS // FILES])
    data = pyarrow.dataset.dataset("tables/parquet", filesystem=FletchFileSystem(**options))
    lazy = polars.scan_pyarrow_dataset(data)
    assert lazy.select(polars.col("id").sum()).collect().item() == ROWS * (ROWS - 1) // 2


def test_duckdb(options: dict[str, Any]) -> None:
    connection = duckdb.connect()
    connection.register_filesystem(FletchFileSystem(**options))
    total = connection.sql("select count(*), sum(id) from read_parquet('fletch://tables/parquet/*.parquet')")
    assert total.fetchall() == [(ROWS, ROWS * (ROWS - 1) // 2)]
    csv = connection.sql("select count(*) from read_csv('fletch://tables/rows.csv')")
    assert csv.fetchall() == [(5000,)]


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(
    options: dict[str, Any], rows: pandas.DataFrame, tmp_path: Path, streaming: bool
) -> None:
    loaded = datasets.load_dataset(
        "parquet",
        data_files="fletch://tables/parquet/*.parquet",
        storage_options=options,
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    first = next(iter(loaded))
    assert first == {"id": 0, "x": rows["x"][0], "text": rows["text"][0]}
    if not streaming:
        same(loaded.to_pandas(), rows)


def test_webdataset(options: dict[str, Any]) -> None:
    register_webdataset(**options)
    urls = "fletch://tables/shard-{0..1}.tar"
    samples = webdataset.WebDataset(urls, shardshuffle=False)
    found = {sample["__key__"]: bytes(sample["txt"]) for sample in samples}
    assert found == {f"{s}-{i}": f"txt of {s}-{i}".encode() for s in range(2) for i in range(20)}


def test_simplecache(options: dict[str, Any], rows: pandas.DataFrame, tmp_path: Path) -> None:
    chained = {"fletch": options, "simplecache": {"cache_storage": str(tmp_path)}}
    for _ in range(2):
        with fsspec.open("simplecache::fletch://tables/parquet/2.parquet", **chained) as file:
            found = pandas.read_parquet(file)
        same(found, rows[ROWS // FILES * 2 : ROWS // FILES * 3])
    assert len(list(tmp_path.iterdir())) == 1


def scan_seconds(data: pyarrow.dataset.Dataset) -> float:
    """The time of a scan of all columns."""
    begun = time.perf_counter()
    assert data.to_table().num_rows == ROWS
    return time.perf_counter() - begun


class Mounted:
    """The dataset through a new mount, whose pages the kernel does not have."""

    def __init__(self, server: Server, at: Path) -> None:
        at.mkdir()
        self.at = at
        words = [BIN / "fletch-mount", "tables", at, "--server", f"unix:{server.socket}"]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        until("the mount", lambda: (at / "parquet").is_dir() or self.process.poll() is not None)

    def __enter__(self) -> Path:
        return self.at / "parquet"

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.at], check=False)
        self.process.wait(30)


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="no /dev/fuse: the mount to compare with")
def test_a_scan_is_not_much_slower_than_through_a_mount(published: Server, tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"mount": [], "client": [], "server": []}
    for turn in range(7):
        with Mounted(published, tmp_path / str(turn)) as files:
            seconds["mount"].append(scan_seconds(pyarrow.dataset.dataset(files)))
        for verify in ("client", "server"):
            options = {"verify": verify, "skip_instance_cache": True}
            fs = FletchFileSystem(f"unix:{published.socket}", **options)
            data = pyarrow.dataset.dataset("tables/parquet", filesystem=fs)
            seconds[verify].append(scan_seconds(data))
    # The shortest of each: what other programs of the machine add is no property of the way.
    best = {how: min(times) for how, times in seconds.items()}
    print({how: f"{time * 1000:.0f} ms" for how, time in best.items()})
    assert best["mount"] / best["client"] >= LEAST_RATE, seconds
