"""The contents of samples have the form that the user asked for, whatever else lies in the dataset."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

import fletch
from fletch.torch import DataLoader, EpochDataset, EvalDataset, MapDataset
from fletch.epochs.contents import by_extension, stem
from conftest import Server

#: The bytes of each plain file, and of the members of the shard.
PLAIN = {f"photos/{i:02}.jpg": f"photo {i}".encode() for i in range(12)}
MEMBERS = {"cat/7.JPG": b"a cat", "cat/7.cls": b"1", "dog/8.JPG": b"a dog", "dog/8.cls": b"2"}


@pytest.fixture(scope="module")
def mixed(server: Server) -> None:
    """The dataset `mixed`: plain files, and a shard; and `files`: the same plain files without it."""
    tree = server.scratch / "tree-mixed"
    for name in ("photos", "shards"):
        (tree / name).mkdir(parents=True)
    for path, content in PLAIN.items():
        (tree / path).write_bytes(content)
    server.publish("unmixed", tree / "photos")
    with tarfile.open(tree / "shards/0.tar", "w") as tar:
        for name, content in MEMBERS.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    server.publish("mixed", tree)


def plain(content: Any) -> Any:
    """A content with bytes in place of views."""
    if isinstance(content, memoryview):
        return bytes(content)
    return {name: value if isinstance(value, str) else bytes(value) for name, value in content.items()}


def seen(sample: Any) -> tuple[str, Any, int]:
    return sample.key, plain(sample.content), sample.nbytes


def contents(server: Server, kind: str, dataset: str, form: Any, job: str) -> dict[str, Any]:
    """The contents by key that one kind of dataset gives."""
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    if kind == "map":
        by_index = MapDataset(client.resolve(dataset), plain, content=form)
        return {sample.key: content for sample, content in zip(by_index.samples, by_index)}
    data: Any
    if kind == "eval":
        data = EvalDataset(client, dataset, transform=seen, content=form)
    else:
        data = EpochDataset(client, dataset, job=job, batch_size=4, transform=seen, content=form)
    loader = DataLoader(data, num_workers=1 if kind == "workers" else 0, collate_fn=list)
    items = [item for batch in loader for item in batch]
    for _, content, nbytes in items:
        files = content.items() if isinstance(content, dict) else [("", content)]
        assert nbytes == sum(len(file) for name, file in files if name != "__key__")
    return {key: content for key, content, _ in items}


@pytest.mark.parametrize("kind", ["map", "eval", "epoch", "workers"])
def test_a_shard_beside_them_changes_no_plain_file(server: Server, mixed: None, kind: str) -> None:
    got = contents(server, kind, "mixed", None, f"mixed-{kind}")
    members = {
        "cat/7": {"__key__": "cat/7", "jpg": b"a cat", "cls": b"1"},
        "dog/8": {"__key__": "dog/8", "jpg": b"a dog", "cls": b"2"},
    }
    photos = {stem(path): content for path, content in PLAIN.items()}
    assert got == {**members, **photos}
    # Whoever asks for one form gets it of all samples.
    dicts = {key: {"__key__": key, "jpg": content} for key, content in photos.items()}
    assert contents(server, kind, "mixed", "dict", f"dicts-{kind}") == {**members, **dicts}
    with pytest.raises(fletch.Invalid, match=r'the sample (cat/7|dog/8) has 2 files .*content="dict"'):
        contents(server, kind, "mixed", "view", f"views-{kind}")


@pytest.mark.parametrize("kind", ["map", "eval", "epoch", "workers"])
def test_files_by_themselves_have_both_forms(server: Server, mixed: None, kind: str) -> None:
    files = {path.rpartition("/")[2]: content for path, content in PLAIN.items()}
    assert contents(server, kind, "unmixed", None, f"files-{kind}") == files
    assert contents(server, kind, "unmixed", "view", f"file-views-{kind}") == files
    dicts = {path: {"__key__": stem(path), "jpg": content} for path, content in files.items()}
    assert contents(server, kind, "unmixed", "dict", f"file-dicts-{kind}") == dicts


def test_a_form_that_does_not_exist_is_refused(server: Server, mixed: None) -> None:
    client = fletch.Client(f"unix:{server.socket}", timeout=20)
    wrong: Any = "bytes"
    for make in (
        lambda: MapDataset(client.resolve("unmixed"), content=wrong),
        lambda: EvalDataset(client, "unmixed", content=wrong),
        lambda: EpochDataset(client, "unmixed", job="wrong-form", batch_size=1, content=wrong),
    ):
        with pytest.raises(fletch.Invalid, match='give "view", "dict" or None'):
            make()


def test_extensions_are_those_of_webdataset() -> None:
    a, b, c = (memoryview(text) for text in (b"a", b"b", b"c"))
    assert by_extension("x", ["x.JPG", "x.Cls.TXT"], [a, b]) == {"__key__": "x", "jpg": a, "cls.txt": b}
    # No file is lost to another one.
    got = by_extension("x", ["x.JPG", "x.Jpg", "x.jpg"], [a, b, c])
    assert got == {"__key__": "x", "JPG": a, "Jpg": b, "jpg": c}
    got = by_extension("x", ["x.JPG", "x.Jpg"], [a, b])
    assert got == {"__key__": "x", "jpg": a, "Jpg": b}
