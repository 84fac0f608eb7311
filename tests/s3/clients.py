"""Stock S3 clients read the tree of odd names through the S3 door, each by its own means.

    clients.py [CLIENT ...]     all clients without arguments

The variables that `fletch s3 credentials` prints name the door. The dataset `odd` has the tree of
`tree.py`, `tables` has Parquet files, and `mds` is a dataset in the format of mosaicml-streaming.
Each client must list every key, and read its bytes. Prints a line for each client, and exits with 1 if one
of them did not.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

import tree

URL = os.environ["AWS_ENDPOINT_URL"]
HOST = urllib.parse.urlsplit(URL).netloc
ID, SECRET = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
BUCKET = "fletch"


def want():
    """Returns the bytes of each file that a client must find."""
    return tree.files()


def compare(found, wanted, what):
    """Compares what a client found, by name, with what it must find."""
    missing, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or more:
        raise AssertionError(f"{what}: missing {missing[:5]}, and not there {more[:5]}")
    other = [name for name, data in wanted.items() if found[name] != data]
    if other:
        raise AssertionError(f"{what}: other bytes: {other[:5]}")


def local(directory):
    """Returns the bytes of all files below a directory."""
    root = pathlib.Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*")
            if path.is_file()}


def run(*words, **more):
    """Runs a program. Returns what it printed."""
    done = subprocess.run(words, capture_output=True, timeout=600, **more)
    if done.returncode:
        raise AssertionError(f"{words[0]}: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
    return done.stdout.decode()


def boto3():
    """Pages of both versions of the listing, with and without encoding; get, head, ranges, download_file."""
    import boto3 as module

    client = module.client("s3")
    wanted = {f"odd/{name}": data for name, data in want().items()}
    for call, field in (("list_objects_v2", "Contents"), ("list_objects", "Contents")):
        for size in (1000, 7):
            paginate = client.get_paginator(call).paginate
            pages = paginate(Bucket=BUCKET, Prefix="odd/", PaginationConfig={"PageSize": size})
            keys = [item["Key"] for page in pages for item in page.get(field, [])]
            assert len(keys) == len(set(keys)), f"{call}: a key twice"
            assert set(keys) - {"odd/void/"} == set(wanted), f"{call}: {set(keys) ^ set(wanted)}"
            assert keys == sorted(keys, key=lambda key: key.encode()), f"{call}: not in byte order"
    found = {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in wanted}
    compare(found, wanted, "get_object")
    head = client.head_object(Bucket=BUCKET, Key="odd/big.bin")
    assert head["ContentLength"] == tree.BIG[1] and len(head["ETag"]) == 66, head
    part = client.get_object(Bucket=BUCKET, Key="odd/big.bin", Range="bytes=-17")["Body"].read()
    assert part == wanted["odd/big.bin"][-17:]
    whole = client.get_object(Bucket=BUCKET, Key="odd@latest/big.bin", PartNumber=1)
    assert whole["Body"].read() == wanted["odd/big.bin"], "PartNumber"
    pinned = client.list_objects_v2(Bucket=BUCKET, Prefix="odd@latest/a", Delimiter="/")
    folders = [folder["Prefix"] for folder in pinned["CommonPrefixes"]]
    assert folders == [f"odd@latest/{name}/" for name in ("a b", "a-b", "a.b", "a", "at@sign")], folders
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "big"
        client.download_file(BUCKET, "odd/big.bin", str(path))
        assert path.read_bytes() == wanted["odd/big.bin"], "download_file"
    top = client.list_objects_v2(Bucket=BUCKET, Prefix="odd/", Delimiter="/")
    assert top["KeyCount"] == len(top["Contents"]) + len(top["CommonPrefixes"])
    assert client.list_buckets()["Buckets"][0]["Name"] == BUCKET
    client.head_bucket(Bucket=BUCKET)
    return len(found)


def aws_cli():
    """`aws s3 ls --recursive`, `aws s3 sync` and `aws s3 cp`."""
    aws = str(pathlib.Path(sys.executable).parent / "aws")
    listed = run(aws, "s3", "ls", "--recursive", f"s3://{BUCKET}/odd/")
    assert len(listed.splitlines()) == len(want()) + 1, "aws s3 ls is not complete"
    with tempfile.TemporaryDirectory() as scratch:
        run(aws, "s3", "sync", "--only-show-errors", f"s3://{BUCKET}/odd/", scratch)
        found = local(scratch)
        compare(found, want(), "aws s3 sync")
        run(aws, "s3", "cp", "--only-show-errors", f"s3://{BUCKET}/odd/a b/c d.txt", f"{scratch}/one")
        assert pathlib.Path(scratch, "one").read_bytes() == want()["a b/c d.txt"]
    return len(found)


def pyarrow():
    """A recursive FileSelector, and files."""
    import pyarrow.fs as fs

    store = fs.S3FileSystem(access_key=ID, secret_key=SECRET, endpoint_override=HOST, scheme="http",
                            region="us-east-1")
    infos = store.get_file_info(fs.FileSelector(f"{BUCKET}/odd", recursive=True))
    paths = [info.path for info in infos if info.is_file]
    found = {path[len(f"{BUCKET}/odd/"):]: store.open_input_file(path).read() for path in paths}
    compare(found, want(), "pyarrow")
    import pyarrow.dataset

    rows = pyarrow.dataset.dataset(f"{BUCKET}/tables", filesystem=store, format="parquet").count_rows()
    assert rows == 30_000, rows
    return len(found)


def polars():
    """scan_parquet over a pattern."""
    import polars as module

    options = {"aws_endpoint_url": URL, "aws_allow_http": "true", "aws_access_key_id": ID,
               "aws_secret_access_key": SECRET, "aws_region": "us-east-1"}
    frame = module.scan_parquet(f"s3://{BUCKET}/tables/*.parquet", storage_options=options)
    total = frame.select(module.col("x").sum()).collect().item()
    assert total == sum(range(30_000)), total
    return 3


def s3fs():
    """find, cat_file, and buffered files."""
    import s3fs as module

    store = module.S3FileSystem(endpoint_url=URL)
    # One by one: in a list of paths, `*` and `[` would be patterns.
    found = {path[len(f"{BUCKET}/odd/"):]: store.cat_file(path) for path in store.find(f"{BUCKET}/odd")}
    assert found.pop("void/") == b""
    compare(found, want(), "s3fs")
    with store.open(f"{BUCKET}/odd/big.bin", block_size=1 << 20) as file:
        file.seek(5_000_000)
        assert file.read(1000) == want()["big.bin"][5_000_000:5_001_000]
    return len(found)


def duckdb():
    """read_parquet, glob and read_blob by httpfs."""
    import duckdb as module
    from duckdb_extensions import import_extension

    # From PyPI: DuckDB's own server of extensions is not in every network's reach.
    import_extension("httpfs")
    db = module.connect()
    for line in ("LOAD httpfs", f"SET s3_endpoint='{HOST}'", "SET s3_use_ssl=false",
                 "SET s3_url_style='path'",
                 f"SET s3_access_key_id='{ID}'", f"SET s3_secret_access_key='{SECRET}'"):
        db.execute(line)
    total = db.sql(f"SELECT sum(x) FROM read_parquet('s3://{BUCKET}/tables/*.parquet')").fetchone()[0]
    assert total == sum(range(30_000)), total
    begin = f"s3://{BUCKET}/odd/"
    listed = {name[len(begin):] for name, in db.sql(f"SELECT file FROM glob('{begin}**')").fetchall()}
    assert listed == want().keys(), listed ^ want().keys()
    # In a path to read these are the syntax of DuckDB: parameters, patterns, and a separator.
    wanted = {name: data for name, data in want().items() if not set(name) & set("?*[\\")}
    assert len(wanted) == len(listed) - 3
    found = {}
    for path in ["many/*", *(name for name in wanted if not name.startswith("many/"))]:
        blobs = db.execute("SELECT filename, content FROM read_blob($1)", [begin + path]).fetchall()
        found.update({name[len(begin):]: data for name, data in blobs})
    compare(found, wanted, "read_blob")
    return len(found)


def rclone():
    """`rclone lsf -R`, `rclone copy` and `rclone check`, which list by version 1."""
    with tempfile.TemporaryDirectory() as scratch:
        variables = dict(os.environ, RCLONE_CONFIG=f"{scratch}/none", RCLONE_CONFIG_F_TYPE="s3",
                         RCLONE_CONFIG_F_PROVIDER="Other", RCLONE_CONFIG_F_ENV_AUTH="true",
                         RCLONE_CONFIG_F_ENDPOINT=URL, RCLONE_CONFIG_F_FORCE_PATH_STYLE="true",
                         RCLONE_S3_LIST_VERSION="1", RCLONE_NO_UNICODE_NORMALIZATION="true")
        variables.pop("AWS_CA_BUNDLE", None)
        listed = run("rclone", "lsf", "-R", "--files-only", f"F:{BUCKET}/odd", env=variables).splitlines()
        assert len(listed) == len(want()), f"rclone lsf has {len(listed)} of {len(want())}"
        copy = f"{scratch}/copy"
        run("rclone", "copy", f"F:{BUCKET}/odd", copy, env=variables)
        found = local(copy)
        compare(found, want(), "rclone copy")
        run("rclone", "check", "--download", "--one-way", f"F:{BUCKET}/odd", copy, env=variables)
    return len(found)


def s3fs_fuse():
    """A mount of s3fs-fuse, which lists by version 1."""
    if not os.path.exists("/dev/fuse"):
        return "skipped: no /dev/fuse"
    with tempfile.TemporaryDirectory() as mounted:
        variables = dict(os.environ, AWSACCESSKEYID=ID, AWSSECRETACCESSKEY=SECRET)
        options = f"url={URL},use_path_request_style,ro,no_check_certificate,endpoint=us-east-1"
        run("s3fs", f"{BUCKET}:/odd", mounted, "-o", options, env=variables)
        try:
            found = local(mounted)
        finally:
            run("fusermount3" if shutil.which("fusermount3") else "fusermount", "-u", mounted)
    compare(found, want(), "s3fs-fuse")
    return len(found)


def s3torchconnector():
    """S3MapDataset over a prefix."""
    import s3torchconnector as module

    config = module.S3ClientConfig(force_path_style=True)
    data = module.S3MapDataset.from_prefix(f"s3://{BUCKET}/odd/", region="us-east-1", endpoint=URL,
                                           s3client_config=config)
    found = {data[i].key[len("odd/"):]: data[i].read() for i in range(len(data))}
    found.pop("void/", None)
    compare(found, want(), "s3torchconnector")
    return len(found)


def mosaicml_streaming():
    """StreamingDataset over a dataset in the format MDS."""
    os.environ["S3_ENDPOINT_URL"] = URL
    from streaming import StreamingDataset

    with tempfile.TemporaryDirectory() as scratch:
        data = StreamingDataset(remote=f"s3://{BUCKET}/mds/{tree.SAMPLES}", local=scratch, shuffle=False,
                                batch_size=1)
        found = {str(i): data[i]["x"] for i in range(len(data))}
    compare(found, {str(i): tree.content(str(i)) for i in range(500)}, "mosaicml-streaming")
    return len(found)


CLIENTS = {"boto3": boto3, "aws cli": aws_cli, "pyarrow": pyarrow, "polars": polars, "s3fs": s3fs,
           "DuckDB httpfs": duckdb, "rclone": rclone, "s3fs-fuse": s3fs_fuse,
           "s3torchconnector": s3torchconnector, "mosaicml-streaming": mosaicml_streaming}


def main(names):
    """Runs the clients. Returns the exit code."""
    failed = 0
    for name in names or CLIENTS:
        try:
            done = CLIENTS[name]()
        except Exception as error:
            failed, done = 1, f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}\t{done if isinstance(done, str) else f'{done} files equal'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
