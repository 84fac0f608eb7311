"""Drafts: a dataset that was only listed is sealed before its samples are read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Iterator

import pytest

import fletch
from conftest import Server, serving
from fletch.torch import DataLoader, EpochDataset, EvalDataset, MapDataset

FILES = 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def list_tree(server: Server, name: str) -> Path:
    """Makes a tree of files of two bytes or more, and registers its draft."""
    tree = server.scratch / name
    tree.mkdir()
    for i in range(FILES):
        (tree / f"{i:02}").write_text(f"{i} of {name}")
    server.publish(name, tree, "--draft", "--server", server.url)
    return tree


def text(sample: Any) -> str:
    return bytes(sample.content).decode()


def test_an_epoch_of_a_draft_seals_first_and_says_so(server: Server, caplog: Any) -> None:
    list_tree(server, "epoch")
    client = fletch.Client(server.url)
    assert client.resolve("epoch").draft
    with caplog.at_level(logging.WARNING, logger="fletch"):
        dataset = EpochDataset(client, "epoch", job="draft", batch_size=8, transform=text)
    assert any("is a draft" in line.getMessage() for line in caplog.records), caplog.text
    assert not client.resolve("epoch").draft and client.resolve("epoch").root == dataset.root
    loader = DataLoader(dataset, collate_fn=list)
    seen = sorted(item for batch in loader for item in batch)
    assert seen == sorted(f"{i} of epoch" for i in range(FILES))


def test_a_pass_over_a_draft_seals_first(server: Server) -> None:
    list_tree(server, "pass")
    client = fletch.Client(server.url)
    passes = EvalDataset(client, "pass", transform=text)
    assert [item for item in passes] == [f"{i} of pass" for i in range(FILES)]


def test_an_object_that_changed_is_named(server: Server) -> None:
    tree = list_tree(server, "changed")
    (tree / "07").write_text("longer than what was listed")
    client = fletch.Client(server.url)
    with pytest.raises(fletch.Corrupt, match="07.*fletch refresh changed") as raised:
        EpochDataset(client, "changed", job="changed", batch_size=8)
    assert raised.value.code == "origin_changed"
    assert client.resolve("changed").draft


def test_samples_of_a_draft_by_index_name_the_next_command(server: Server) -> None:
    list_tree(server, "index")
    version = fletch.Client(server.url).resolve("index")
    with pytest.raises(fletch.FletchError) as raised:
        MapDataset(version)[0]
    assert raised.value.code == "not_sealed" and "fletch seal" in raised.value.hint
