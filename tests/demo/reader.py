#!/usr/bin/env python3
"""Reads every file of a mount in random order, twice, and compares it with the original.

usage: reader.py ORIGINAL MOUNT FLETCH TABLES OUT

The list of files comes from the mount. So the program also walks the original, and names every
difference that is not in the index's list of skipped files. It writes shell variables for the
report to OUT. It measures only the reads of the mount.
"""

import os
import random
import subprocess
import sys
import time


def walk(top):
    """Relative paths (bytes) of the regular files and of the symlinks below `top`."""
    files, links = [], []
    todo = [b""]
    while todo:
        here = todo.pop()
        with os.scandir(os.path.join(top, here) if here else top) as it:
            for e in it:
                rel = os.path.join(here, e.name)
                if e.is_symlink():
                    links.append(rel)
                elif e.is_dir(follow_symlinks=False):
                    todo.append(rel)
                elif e.is_file(follow_symlinks=False):
                    files.append(rel)
    return sorted(files), sorted(links)


def skipped(fletch, tables):
    """The paths that the index skipped."""
    import json

    out = subprocess.run([fletch, "show", tables, "--json"], check=True, stdout=subprocess.PIPE).stdout
    return {s["path"].encode() for s in json.loads(out).get("skipped", [])}


def main():
    original, mount = os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2])
    fletch, tables, out = sys.argv[3:6]
    files, links = walk(mount)
    left_out = skipped(fletch, tables)
    have_files, have_links = walk(original)
    reserved = b"fletch/"
    for what, mine, theirs in (("file", files, have_files), ("link", links, have_links)):
        theirs = [p for p in theirs if p not in left_out and not p.startswith(reserved)]
        if mine != theirs:
            diff = set(mine) ^ set(theirs)
            sys.exit(f"reader: the {what}s differ: {sorted(diff)[:10]}")
    for p in links:
        a, b = (os.readlink(os.path.join(t, p)) for t in (original, mount))
        if a != b:
            sys.exit(f"reader: link {p!r}: {a!r} is not {b!r}")
    rng = random.Random(7)
    result = {"files": len(files)}
    for epoch in ("first", "second"):
        rng.shuffle(files)
        spent, total = 0.0, 0
        for p in files:
            t = time.perf_counter()
            with open(os.path.join(mount, p), "rb", buffering=0) as f:
                got = f.read()
            spent += time.perf_counter() - t
            total += len(got)
            with open(os.path.join(original, p), "rb") as f:
                if f.read() != got:
                    sys.exit(f"reader: {p!r} differs from its original")
        spent = max(spent, 1e-9)
        line = f"   {epoch + ' epoch':<13} {len(files)} files compared, {spent:.1f} s reading the mount"
        print(line, flush=True)
        result["bytes"] = total
        result[epoch] = f"{spent:.1f}"
        result[f"{epoch}_rate"] = round(len(files) / spent)
        result[f"{epoch}_bps"] = round(total / spent)
    with open(out, "w") as f:
        for k, v in result.items():
            print(f"{k}={v}", file=f)


if __name__ == "__main__":
    main()
