#!/usr/bin/env python3
"""A second implementation of the epoch formats, written from docs/FORMATS-epochs.md alone.

Compares its results with tests/golden/epochs/, prints `N passed, 0 failed`, and exits with 1 on a difference.
"""
import json
import math
import struct
import sys
from pathlib import Path

from blake3 import blake3

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "epochs"
M = (1 << 64) - 1
passed, failed = 0, 0


def check(what, got, want):
    global passed, failed
    if got == want:
        passed += 1
    else:
        failed += 1
        print(f"{what}: got {got!r}, want {want!r}", file=sys.stderr)


def derive(name, data, length=32):
    return blake3(data, derive_key_context=f"fletch 2026 {name} 1").digest(length=length)


def order_key(root, plan, seed, epoch):
    return derive("order", root + plan + struct.pack("<QQ", seed, epoch))


def words(key, label, number, count):
    out = blake3(label.encode() + struct.pack("<Q", number), key=key).digest(length=8 * count)
    return struct.unpack(f"<{count}Q", out)


def below(w, n):
    return w * n >> 64


def mix(x, k):
    z = x * 0x9E3779B97F4A7C15 & M ^ k
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M
    rotl = (k << 32 | k >> 32) & M
    z = ((z ^ z >> 27) + rotl) * 0x94D049BB133111EB & M
    return z ^ z >> 31


def permute(key, label, number, n, p):
    a = math.isqrt(n)
    a = max(a + a % 2, 2)
    b = max(-(-n // a), 1)
    k = words(key, label, number, 32 if n < 1024 else 8)
    x = p
    while True:
        l, r = x % a, x // a
        for k0, k1 in zip(k[::2], k[1::2]):
            l = (l + below(mix(r, k0), a)) % a
            r = (r + below(mix(l, k1), b)) % b
        x = r * a + l
        if x < n:
            return x


def plan_hash(samples, counts=None, copies=1, apart=0):
    data = struct.pack("<QII", samples, copies, apart)
    if counts is None:
        data += b"\0"
    else:
        data += b"\1" + struct.pack("<Q", len(counts))
        data += b"".join(struct.pack("<II", s, c) for s, c in counts)
    return derive("plan", data).hex()


def strict(key, n, copies, apart):
    """Base permutation with echo: the entries at all positions."""
    base = [permute(key, "order", 0, n, p) for p in range(n)]
    if copies == 1:
        return base
    h = max(2, n // apart)
    run = [i * n // h for i in range(h + 1)]
    out, groups = [], h // 2
    for g in range(groups):
        runs = range(2 * g, h if g == groups - 1 else 2 * g + 2)
        for k in range(copies):
            for i in runs:
                size = run[i + 1] - run[i]
                for p in range(size):
                    at = p if k == 0 else permute(key, "echo", i * copies + k, size, p)
                    out.append(k * n + base[run[i] + at])
    return out


def bucketed(key, of, batch, tail):
    """Steps as (bucket, entries), and what each entry is."""
    n, steps, items, pads = len(of), [], {e: [e, 0] for e in range(len(of))}, 0
    for b in sorted(set(of)):
        entries = [s for s in range(n) if of[s] == b]
        size = len(entries)
        order = [entries[permute(key, "bucket", b, size, p)] for p in range(size)]
        if tail == "drop":
            order = order[: size // batch * batch]
        if tail == "pad":
            for i in range(-size % batch):
                items[n + pads] = [order[i % size], 2**31 + pads]
                order.append(n + pads)
                pads += 1
        steps += [(b, order[i : i + batch]) for i in range(0, len(order), batch)]
    return [steps[permute(key, "steps", 0, len(steps), s)] for s in range(len(steps))], items


def leb(x):
    out = b""
    while x >= 128:
        out += bytes([x & 127 | 128])
        x >>= 7
    return out + bytes([x])


def txt(s):
    return leb(len(s.encode())) + s.encode()


def lst(v):
    out, last = leb(len(v)), 0
    for x in v:
        d = x - last
        out += leb(d << 1 if d >= 0 else (-d << 1) - 1)
        last = x
    return out


def world(ranks, batch, tail):
    return leb(ranks) + leb(batch) + bytes([["keep", "drop", "pad"].index(tail)])


def record(kind, payload):
    head = struct.pack("<IBBH", len(payload), kind, 0, 0)
    return head + derive("record", head)[:8] + derive("record", payload)[:8] + payload


def main():
    h = lambda s: blake3(s).digest()
    g = json.loads((GOLDEN / "permutation.json").read_text())
    key = order_key(bytes.fromhex(g["root"]), bytes.fromhex(g["plan"]), g["seed"], g["epoch"])
    check("key", key.hex(), g["key"])
    check("words", [f"{w:016x}" for w in words(key, "order", 0, 4)], g["words"])
    for p in g["permutations"]:
        got = [permute(key, "order", 0, p["n"], i) for i in range(len(p["first"]))]
        check(f"permutation of {p['n']}", got, p["first"])

    g = json.loads((GOLDEN / "plan.json").read_text())
    check("all", plan_hash(1000), g["all 1000"])
    check("subset", plan_hash(10, [(1, 1), (5, 1), (9, 1)]), g["subset 1, 5, 9 of 10"])
    check("echo", plan_hash(1000, None, 3, 100), g["all 1000, 3 copies 100 apart"])
    w = g["weighted"]
    most, n = max(w["weights"]), w["draws"]
    units = [math.floor(x / most * 2**32 + 0.5) for x in w["weights"]]
    total = sum(units)
    a, b = words(bytes.fromhex(w["key"]), "weights", 0, 2)
    o = ((a << 64 | b) // 2) % total
    sums = [sum(units[:i]) for i in range(len(units) + 1)]
    copies = [(o + n * sums[i + 1]) // total - (o + n * sums[i]) // total for i in range(len(units))]
    check("weighted copies", copies, w["copies"])
    counts = [(s, c) for s, c in enumerate(copies) if c]
    check("weighted hash", plan_hash(len(units), counts), w["hash"])

    g = json.loads((GOLDEN / "strict.json").read_text())
    cases = [("all 21, drop", 1, 0), ("all 21, pad", 1, 0), ("all 21, keep", 1, 0)]
    for name, copies, apart in [*cases, ("all 21, 2 copies 7 apart", 2, 7)]:
        o = g[name]
        entries = strict(key, 21, copies, apart)
        n, batch = len(entries), o["batch"]
        size = {"drop": n // batch * batch, "pad": -(-n // batch) * batch, "keep": n}[o["tail"]]
        fitted = (entries + list(range(n, size)))[:size]
        check(name, fitted, o["entries"])
        check(f"{name}: dropped", entries[size:], o["dropped"])
        item = lambda e: [e % 21, e // 21] if e < n else [entries[(e - n) % n] % 21, 2**31 + e - n]
        check(f"{name}: items", [item(e) for e in fitted], o["items"])
    units = [permute(key, "units", 0, 10, p) for p in range(10)]
    flat = [s for u in units for s in range(40) if s * 7 % 10 == u]
    blocks = [(0, 12), (12, 24), (24, 40)]
    shuffled = ((i, a, b - a, p) for i, (a, b) in enumerate(blocks) for p in range(b - a))
    got = [flat[a + permute(key, "block", i, n, p)] for i, a, n, p in shuffled]
    check("by units", got, g["40 samples, sample s in unit 7s mod 10, blocks of 12"])
    bits = sum(1 << i for i in (0, 3, 8, 20))
    check("state", bits.to_bytes(3, "little").hex(), g["bits 0, 3, 8, 20 of 21"])

    g = json.loads((GOLDEN / "bucketed.json").read_text())
    of = g["buckets"]
    data = bytes.fromhex(g["plan"]) + struct.pack("<Q", len(of)) + struct.pack(f"<{len(of)}I", *of)
    check("bucketed hash", derive("buckets", data).hex(), g["hash"])
    buckets = [sum(b <= x for b in (10, 100)) for x in (0, 9, 10, 99, 100, 101)]
    check("by length", buckets, g["by length 10, 100"])
    for tail in ("drop", "pad", "keep"):
        steps, items = bucketed(bytes.fromhex(g["key"]), of, g[tail]["batch"], tail)
        got = [{"bucket": b, "entries": e, "items": [items[x] for x in e]} for b, e in steps]
        check(f"bucketed, {tail}", got, g[tail]["steps"])

    g = json.loads((GOLDEN / "trace.json").read_text())
    head = leb(4) + bytes.fromhex(g["key"]) + leb(3000) + leb(3) + leb(6) + struct.pack("<21d", *g["knobs"])
    begin = b"FLETCHLG" + struct.pack("<II", 1, 0) + record(1, head)
    begin += record(2, leb(1000) + leb(2000) + leb(300)) + record(3, lst([0, 1, 2, 0, 1, 2]))
    check("trace header", begin.hex(), g["begin"])
    nothing = b"\0\0\0\0"
    join = bytes([2, 0]) + b"\1\0\0\0" + bytes([2, 1, 1, 1, 0]) + lst([0, 1]) + b"\2\0\0\0"
    starts = bytes([4, 0, 6, 0, 0b111101]) + nothing + bytes([4, 1, 2, 1]) + nothing
    want = [record(4, join), record(4, starts)]
    for p in g["picks"]:
        how = b"\0"
        if p["pick"]:
            spot, unit, word, again = p["pick"]
            how = bytes([["window", "reserve", "range"].index(word) + 1]) + leb(spot) + leb(unit) + leb(again)
        acts = b"".join(leb(u << 1 | (what == "load")) for what, u in p["acts"])
        want.append(record(4, leb(5) + leb(p["seat"]) + b"\0" + how + b"\0" + leb(len(p["acts"])) + acts))
    check("trace calls", [w.hex() for w in want], g["calls"])

    g = json.loads((GOLDEN / "ledger.json").read_text())
    head = leb(1) + txt("train") + leb(3) + h(b"root") + h(b"layout") + h(b"plan")
    head += txt("substitute") + leb(7) + world(2, 8, "drop")
    begin = b"FLETCHLG" + struct.pack("<II", 1, 0) + record(1, head)
    check("ledger header", begin.hex(), g["begin"])
    want = [
        (2, lst([5, 4, 1000])),
        (3, leb(1) + leb(1) + leb(0) + leb(300) + lst([70000, 3, 4, 2000000000])),
        (4, leb(1) + leb(2)),
        (5, leb(1)),
        (6, leb(1)),
        (7, leb(1)),
        (8, world(4, 8, "pad")),
        (9, leb(16) + leb(2)),
        (11, leb(3) + leb(1 << 51) + lst([0, 2])),
    ]
    check("ledger records", [record(k, p).hex() for k, p in want], g["records"])
    g = json.loads((GOLDEN / "state.json").read_text())
    done = sum(1 << bit for bit in g["bits"]).to_bytes(3, "little")
    check("state", (begin + record(10, leb(0) + done)).hex(), g["state"])

    g = json.loads((GOLDEN / "receipt.json").read_text())
    lanes, digests = [0] * 1024, []
    for ordinal, copy in [(0, 0), (0, 1), (1 << 40, 0)]:
        data = bytes.fromhex(g["root"]) + struct.pack("<Q", ordinal) + h(b"bytes") + struct.pack("<I", copy)
        add = struct.unpack("<1024H", derive("receipt", data, 2048))
        lanes = [(x + y) & 0xFFFF for x, y in zip(lanes, add)]
        digests.append(h(struct.pack("<1024H", *lanes)).hex())
    check("receipt digests", digests, g["digests"])
    check("receipt lanes", lanes[:16], g["lanes"])
    said = {"format": "fletch.receipt", "major": 1, "minor": 0, "root": g["root"]}
    said |= {"plan": h(b"plan").hex(), "seed": 7, "epoch": 3}
    said |= {"delivered": 3, "redelivered": 1, "dropped": [5], "padded": 2}
    said |= {"value": struct.pack("<1024H", *lanes).hex()}
    check("receipt", said, g["receipt"])
    check("signed receipt", {**said, "key_id": "k", "signature": "00"}, g["signed"])

    c = json.loads((GOLDEN / "certificate.json").read_text())
    entries = sum(c["entries"])
    chance = sum(n * (n - 1) for n in c["entries"]) / (entries * (entries - 1))

    def mates(orders, lags):
        pairs = [a == b for order in orders for lag in lags for a, b in zip(order, order[lag:])]
        return sum(pairs) / len(pairs)

    for name, orders in (("alone", [c["units"]]), ("both", [c["units"], c["other"]])):
        ten = mates(orders, range(1, 11))
        want = {"delivered": sum(map(len, orders)), "near": mates(orders, [1]) / chance}
        want |= {"near10": ten / chance, "mates": ten}
        close = all(math.isclose(want[k], c[name][k], rel_tol=1e-12) for k in want)
        want["poor"] = want["delivered"] >= 1000 and ten > 0.4 and ten / chance > 1.5
        close = close and c[name]["poor"] == want["poor"]
        check(f"certificate, {name}", (sorted(want), close), (sorted(c[name]), True))

    n = json.loads((GOLDEN / "notes.json").read_text())
    content = h(b"bytes").hex()
    lines = [f"fletch.notes 1 {g['root']} 3", f"0 0 {content}", f"0 1 {content} 7 2"]
    lines += [f"{1 << 40} 0 {content}"]
    lines.append(f"sum 3 {struct.pack('<1024H', *lanes).hex()}")
    check("notes", lines, n["lines"])

    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
