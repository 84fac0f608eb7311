"""The tree of odd names that clients of the S3 door read, and what they must find in it.

    tree.py DIR     writes the tree
"""

import hashlib
import os
import pathlib
import sys

# Names that a client, a parser or a shell gets wrong. XML can hold all of them.
ODD = [
    "a b/c d.txt", "plus+minus-.txt", "percent%20sign%", "é/ü", "e\u0301/decomposed", "日本/語.bin",
    "😀.jpg", "amp&<tag>\"quote'", "semi;colon:comma,equals=", "hash#question?star*", "[bracket]{brace}",
    "~tilde/!bang", "at@sign/x@y", "back\\slash", ".hidden/..two", "...", "dot./.x", "a-b/c", "a/b", "a.b/c",
    "dollar$(x)`y`", " leading", "trailing /x ", "under_score", "caret^pipe|", "x" * 200, "UPPER/lower",
    "upper/LOWER", "0", "-dash",
]
BIG = ("big.bin", 9 * (1 << 20) + 17)
LINK = ("links/to-big", "../big.bin")
# Clients of tables read Parquet files with these names, mosaicml-streaming the samples in this folder.
TABLES = ["0.parquet", "a b+c%20.parquet", "é;x=y,z&'@~.parquet"]
SAMPLES = "a b+c/é%20@~"
EMPTY = "empty"
EMPTY_DIR = "void"


def content(name):
    """Returns bytes that belong to a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return digest * (1 + digest[0])


def files():
    """Returns the bytes of every key that a client must find, by path."""
    big = (content(BIG[0]) * (BIG[1] // 32 + 1))[: BIG[1]]
    found = {name: content(name) for name in ODD}
    found.update({BIG[0]: big, LINK[0]: big, EMPTY: b"", "many/large": big[:5000]})
    found.update({f"many/{number:04}": content(str(number))[:100] for number in range(1200)})
    return found


def make(directory):
    """Writes the tree."""
    root = pathlib.Path(directory)
    for name, data in files().items():
        if name == LINK[0]:
            continue
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / LINK[0]).parent.mkdir()
    os.symlink(LINK[1], root / LINK[0])
    os.symlink("nowhere", root / "links/dangling")
    (root / EMPTY_DIR).mkdir()


if __name__ == "__main__":
    make(sys.argv[1])
