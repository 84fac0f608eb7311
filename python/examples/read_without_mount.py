"""Reads every file of a dataset without a mount, by three calls, and prints a hash of all their bytes.

    python read_without_mount.py SERVER DATASET
"""

import hashlib, os, sys

import fsspec

import fletch

server, dataset = sys.argv[1:3]
# A server without tokens needs none.
options = {"server": server, "token_file": os.environ.get("FLETCH_TOKEN_FILE"), "job": "read"}
version = fletch.Client(**options).resolve(dataset)
files = [entry for entry in version.entries() if entry.kind == "file"]


def report(call, contents):
    count, nbytes, digest = 0, 0, hashlib.sha256()
    for content in contents:
        count, nbytes = count + 1, nbytes + len(content)
        digest.update(content)
    print(f"{call}: {count} reads, {nbytes} bytes, sha256 {digest.hexdigest()}", flush=True)


def whole_files():
    """Many files in few requests."""
    for begin in range(0, len(files), 256):
        yield from version.read_many([entry.path for entry in files[begin : begin + 256]])


def ranges(nbytes=1 << 20):
    """Parts of large files, as a program reads them that seeks."""
    for entry in files:
        for start in range(0, entry.size, nbytes):
            yield version.read_range(entry.path, start, start + nbytes)


def open_files():
    """Files by URL, for tools that speak fsspec. The root names this version, also when the tag moves."""
    for entry in files:
        url = f"fletch://{dataset.partition('@')[0]}@{version.root}/{entry.path}"
        with fsspec.open(url, **options) as file:
            yield file.read()


report("read_many", whole_files())
report("read_range", ranges())
report("fletch://", open_files())
