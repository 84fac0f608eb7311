#!/usr/bin/env python3
"""A second implementation of Fletch's identities, written from docs/FORMATS.md alone.

Compares its results with tests/golden/, prints `N passed, 0 failed`, and exits with 1 on any difference.
"""
import json
import struct
import sys
from pathlib import Path

from blake3 import blake3

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
KINDS = {"file": 1, "symlink": 2, "empty-dir": 3, "member": 4}
passed, failed = 0, 0


def check(what, got, want):
    global passed, failed
    if got == want:
        passed += 1
    else:
        failed += 1
        print(f"{what}: got {got!r}, want {want!r}", file=sys.stderr)


def derive(name, data):
    return blake3(data, derive_key_context=f"fletch 2026 {name} 1").digest()


def text(s):
    b = s.encode()
    return struct.pack("<I", len(b)) + b


def encode(e):
    out = bytes([KINDS[e["kind"]]]) + text(e["path"]) + struct.pack("<Q", e["size"])
    if e["kind"] == "symlink":
        out += text(e["target"])
    elif e["kind"] != "empty-dir":
        out += bytes.fromhex(e["blake3"])
    tag = {"none": 0, "alone": 1, "keyed": 2}[e["sample_kind"]]
    return out + bytes([tag]) + (text(e["sample"]) if tag == 2 else b"")


def cut(entries):
    """Yields parts: lists of entries."""
    part = []
    for e in entries:
        part.append(e)
        h = blake3(e["path"].encode()).digest()
        if int.from_bytes(h[:2], "big") >> 4 == 0 or len(part) == 65536:
            yield part
            part = []
    if part:
        yield part


def summary(part):
    h = derive("part", b"".join(map(encode, part)))
    return {"hash": h.hex(), "entries": len(part), "first": part[0]["path"]}


def encode_rule(rule):
    globs = rule.get("globs", [])
    key = {"file": 1, "stem": 2}[rule["key"]]
    return bytes([key]) + struct.pack("<I", len(globs)) + b"".join(map(text, globs))


def root(rule, hashes):
    head = struct.pack("<I", 1) + encode_rule(rule) + struct.pack("<Q", len(hashes))
    return derive("root", head + b"".join(hashes))


def placement(part):
    out = b""
    for row, e in enumerate(part):
        slices = e.get("slices", [])
        if slices:
            out += struct.pack("<II", row, len(slices))
        for s in slices:
            out += bytes.fromhex(s["chunk"]) + struct.pack("<II", s["chunk_offset"], s["length"])
    return derive("placement", out)


def layout_id(params, of, placements):
    pairs = [(1, params["slice_bytes"])]
    if "pack" in params:
        pairs += [(2, params["pack"]["group_bytes"]), (3, params["pack"]["align"])]
    out = struct.pack("<IBH", 1, {"index": 1, "pack": 2}[params["kind"]], len(pairs))
    out += b"".join(struct.pack("<HQ", *p) for p in pairs)
    return derive("layout", out + of + struct.pack("<Q", len(placements)) + b"".join(placements))


def small():
    described = json.loads((GOLDEN / "entries.json").read_text())
    want = json.loads((GOLDEN / "small.json").read_text())
    entries = described["entries"]
    check("order", entries, sorted(entries, key=lambda e: e["path"].encode()))
    for e, hexed in zip(entries, want["encodings"], strict=True):
        check(f"encoding of {e['path']}", encode(e).hex(), hexed)
    rule = described["sample_rule"]
    check("sample rule", encode_rule(rule).hex(), want["sample_rule_encoding"])
    parts = list(cut(entries))
    got = [summary(p) for p in parts]
    check("parts", got, want["parts"])
    r = root(rule, [bytes.fromhex(p["hash"]) for p in got])
    check("root", r.hex(), want["root"])
    placements = [placement(p) for p in parts]
    check("placements", [p.hex() for p in placements], want["placements"])
    layout = layout_id(described["params"], r, placements)
    check("layout", layout.hex(), want["layout"])
    manifest = json.loads((GOLDEN / "tables/manifest.json").read_text())
    head = (manifest["format"], manifest["major"], manifest["root"])
    check("manifest", head, ("fletch.manifest", 1, r.hex()))
    check("manifest's parts", manifest["parts"], got)
    doc = json.loads((GOLDEN / "tables/layout.json").read_text())
    check("layout.json", (doc["format"], doc["major"], doc["root"]), ("fletch.layout", 1, r.hex()))
    check("layout's id", doc["layout"], layout.hex())
    check("layout's parts", doc["parts"], [p.hex() for p in placements])
    tag = json.loads((GOLDEN / "tag.json").read_text())
    named = (tag["format"], tag["major"], tag["root"], tag["layout"])
    check("tag", named, ("fletch.tag", 1, r.hex(), layout.hex()))


def big():
    want = json.loads((GOLDEN / "big.json").read_text())
    paths = sorted(f"{i*2654435761 % 2**32:08x}/{i:06d}.jpg" for i in range(want["entries"]))
    entries = [
        {
            "path": p,
            "kind": "file",
            "size": want["size"],
            "blake3": blake3(p.encode()).hexdigest(),
            "sample_kind": "alone",
        }
        for p in paths
    ]
    got = [summary(p) for p in cut(entries)]
    check("big parts", got, want["parts"])
    check("big root", root(want["sample_rule"], [bytes.fromhex(p["hash"]) for p in got]).hex(), want["root"])


def log():
    b = (GOLDEN / "log.bin").read_bytes()
    check("log header", struct.unpack("<8sII", b[:16]), (b"FLETCHLG", 1, 0))
    at, records = 16, []
    while at < len(b):
        length, kind, flags, zero = struct.unpack("<IBBH", b[at : at + 8])
        payload = b[at + 24 : at + 24 + length]
        check("header check", derive("record", b[at : at + 8])[:8], b[at + 8 : at + 16])
        check("payload check", derive("record", payload)[:8], b[at + 16 : at + 24])
        check("flags", (flags, zero), (0, 0))
        records.append((kind, payload))
        at += 24 + length
    check("records", records, [(1, b"first"), (200, b""), (2, b"\xff" * 300)])


def frames():
    b = (GOLDEN / "frames.bin").read_bytes()
    check("preface", struct.unpack("<6sH", b[:8]), (b"FLTFRM", 1))
    at, got = 8, []
    while at < len(b):
        kind, _version, status, index, length = struct.unpack("<BBHIQ", b[at : at + 16])
        payload = b[at + 16 : at + 16 + length]
        at += 16 + length
        if kind in (1, 2, 3):
            got.append((kind, status, index, payload))
    want = [(1, 200, 0, b"abc"), (1, 206, 1, b"de"), (1, 200, 1, b""), (2, 404, 2, b"{}"), (3, 200, 3, b"")]
    check("frames", got, want)


def shards():
    def stem(name):
        base = name.rsplit("/", 1)[-1]
        dot = base.find(".")
        return name[: len(name) - len(base) + dot] if dot > 0 else None

    for line in (GOLDEN / "shards.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        what, members, want = line.split("\t")
        at, bounds, last = 0, [], None
        for i, (name, size) in enumerate(m.split(":") for m in members.split()):
            key = stem(name)
            if i:
                bounds.append((at, key is None or key != last))
            last, at = key, at + 512 + (int(size) + 511) // 512 * 512
        if members:
            bounds.append((at, True))
        size, start, got = at + 1024, 0, []
        while start < size:
            fits = [b for b in bounds if start < b[0] <= start + 4096]
            samples = [b for b in fits if b[1]] or fits
            end = size if size - start <= 4096 else max((b[0] for b in samples), default=start + 4096)
            got.append(end - start)
            start = end
        check(f"slices of a shard: {what}", " ".join(map(str, got)), want)


def groups():
    """The hashes of groups, with BLAKE3 in plain Python: libraries do not return inner hashes."""
    iv = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
    order = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]

    def turn(x, n):
        return (x >> n | x << (32 - n)) & 0xFFFFFFFF

    def compress(chaining, block, counter, length, flags):
        m = list(struct.unpack("<16I", block.ljust(64, b"\0")))
        v = [*chaining, *iv[:4], counter & 0xFFFFFFFF, counter >> 32, length, flags]
        for _ in range(7):
            for n, (a, b, c, d) in enumerate(columns + diagonals):
                for word, (first, second) in ((m[2 * n], (16, 12)), (m[2 * n + 1], (8, 7))):
                    v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
                    v[d] = turn(v[d] ^ v[a], first)
                    v[c] = (v[c] + v[d]) & 0xFFFFFFFF
                    v[b] = turn(v[b] ^ v[c], second)
            m = [m[n] for n in order]
        return [a ^ b for a, b in zip(v[:8], v[8:])]

    def leaf(data, counter):
        chaining, blocks = iv, [data[i : i + 64] for i in range(0, len(data), 64)]
        for n, block in enumerate(blocks):
            flags = (n == 0) | (n == len(blocks) - 1) << 1
            chaining = compress(chaining, block, counter, len(block), flags)
        return chaining

    def parent(left, right, root):
        return compress(iv, struct.pack("<16I", *left, *right), 0, 64, 4 | root << 3)

    def tree(values, root=False):
        if len(values) == 1:
            return values[0]
        cut = 1 << ((len(values) - 1).bit_length() - 1)
        return parent(tree(values[:cut]), tree(values[cut:]), root)

    def packed(words):
        return struct.pack("<8I", *words)

    file = (GOLDEN / "groups.bin").read_bytes()
    magic, rows = struct.unpack("<8sQ", file[:16])
    check("magic and rows", (magic, rows), (b"FLTGRP01", 3))
    found = {}
    for n in range(rows):
        chunk, at, length, zero = struct.unpack("<32sQI4s", file[16 + 48 * n : 64 + 48 * n])
        check("zeros", zero, bytes(4))
        found[chunk] = (at, length)
    check("rows are sorted", list(found), sorted(found))
    # The file has no list of the fourth chunk that the writer knew.
    for length, modulus in ((300_000, 251), (262_144, 241), (262_145, 239)):
        data = bytes(i % modulus for i in range(length))
        leaves = [leaf(data[i : i + 1024], i // 1024) for i in range(0, length, 1024)]
        hashes = [tree(leaves[i : i + 16]) for i in range(0, len(leaves), 16)]
        name = packed(tree(hashes, root=True))
        check("the hashes make the name", name, blake3(data).digest())
        at, listed = found.get(name, (0, 0))
        check("length of the chunk", listed, length)
        want = b"".join(map(packed, hashes))
        check("hashes of groups", file[at : at + len(want)], want)


for part_of_formats in (small, big, log, frames, shards, groups):
    part_of_formats()
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed else 0)
