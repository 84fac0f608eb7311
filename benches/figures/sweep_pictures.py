#!/usr/bin/env python3
"""Draws the pictures of docs/SWEEP.md and README.md from the simulator.

    cargo build --release -p fletch-sim
    python3 benches/figures/sweep_pictures.py target/release/fletch-simulate

Writes beside this file:

    sweep.svg       bytes read from the origin per byte delivered, over the size of the cache
    sweep-held.svg  what the cache holds, and what two jobs read, over two epochs

The simulator runs in virtual time with a fixed seed, so every machine draws the same pictures.
The script needs only the standard library, and about half a minute of one core.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNITS, SAMPLES = 800, 32
CACHES = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
PANELS = [
    ("one job", False, [1.0]),
    ("4 equal jobs, staggered", True, [1.0] * 4),
    ("4 jobs at 1 : 1.3 : 2 : 4", False, [1.0, 1.3, 2.0, 4.0]),
    ("8 jobs at 0.97 to 1.1, staggered", True, [0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.1]),
]
ARMS = [("direct", "no cache"), ("lru", "LRU"), ("pin", "pin"), ("fletch", "sweep"), ("bound", "bound")]

# Each picture paints its own background, so that it reads the same whatever page shows it.
STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; font-size: 13px }
.title { font-size: 16px; font-weight: 600 }
.panel { font-weight: 600 }
.note { fill: #59636e; font-size: 12px }
.bg { fill: #ffffff }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.axis { stroke: #59636e; stroke-width: 1 }
.line { fill: none; stroke-width: 2.2 }
.direct { stroke: #8c959f }
.lru { stroke: #cf4a00 }
.pin { stroke: #b98500 }
.fletch { stroke: #0969da; stroke-width: 3 }
.bound { stroke: #1f2328; stroke-width: 1.6; stroke-dasharray: 5 4 }
.dot-lru { fill: #cf4a00 }
.dot-pin { fill: #b98500 }
.dot-fletch { fill: #0969da }
.dot-direct { fill: #8c959f }
.away { fill: #f0f2f4 }
.window { fill: #0969da }
.reserve { fill: #4da06a }
.job-a { fill: #8250df }
.job-b { fill: #cf4a00 }
"""
DARK = """
text { fill: #f0f6fc }
.note { fill: #9198a1 }
.bg { fill: #0d1117 }
.grid { stroke: #3d444d }
.axis { stroke: #9198a1 }
.direct { stroke: #818b98 }
.lru { stroke: #ff8a4c }
.pin { stroke: #e3b341 }
.fletch { stroke: #58a6ff }
.bound { stroke: #f0f6fc }
.dot-lru { fill: #ff8a4c }
.dot-pin { fill: #e3b341 }
.dot-fletch { fill: #58a6ff }
.dot-direct { fill: #818b98 }
.away { fill: #1c2128 }
.window { fill: #58a6ff }
.reserve { fill: #3fb950 }
.job-a { fill: #c297ff }
.job-b { fill: #ff8a4c }
"""


class Svg:
    """An SVG file, built element by element."""

    def __init__(self, width, height, title, description, style="", dark=""):
        self.out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{title}</title><desc>{description}</desc>",
            f"<style>{STYLE}{style}@media (prefers-color-scheme: dark) {{{DARK}{dark}}}</style>",
            f'<rect class="bg" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x, y, content, kind="", anchor="start", turn=None):
        rotate = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        name = f' class="{kind}"' if kind else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.out.append(f"<text {place}{name}{rotate}>{content}</text>")

    def line(self, x1, y1, x2, y2, kind):
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.out.append(f'<line {ends} class="{kind}"/>')

    def path(self, steps, kind):
        self.out.append(f'<path d="{"".join(steps)}" class="{kind}"/>')

    def write(self, path):
        path.write_text("\n".join(self.out) + "\n</svg>\n")
        print(path)


def simulate(program, case, arms=("fletch",), record=None):
    """Runs one case against each arm, and returns the outcomes by arm."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(case, file)
        file.flush()
        command = [program, "--json", "--case", file.name] + [f"--arm={arm}" for arm in arms]
        if record:
            command += ["--record", str(record)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {o["arm"]: o for o in map(json.loads, done.stdout.splitlines())}


def plain_case(cache, staggered, rates):
    """Jobs over one dataset: two epochs of the slowest job to warm up, and four that count."""
    samples, slowest = UNITS * SAMPLES, min(rates)
    starts = [i / len(rates) * samples / r if staggered else 0.0 for i, r in enumerate(rates)]
    return {
        "name": "case", "units": {"count": UNITS, "samples": SAMPLES}, "cache": cache, "seed": 1,
        "warm": 2 * samples / slowest, "end": 6 * samples / slowest,
        "jobs": [{"rate": r, "start": s} for r, s in zip(rates, starts)],
    }


def draw_ratio(program):
    """Bytes read from the origin per byte delivered, over the size of the cache, for each arm."""
    width, height, left, top, wide, high = 960, 700, 62, 92, 376, 216
    about = "Four panels: no cache, LRU, pin, the sweep and the lower bound, over the size of the cache."
    svg = Svg(width, height, "Origin bytes per delivered byte", about)
    svg.text(24, 34, "Bytes read from the origin per byte delivered to the jobs (lower is better)", "title")
    for i, (arm, name) in enumerate(ARMS):
        x = 24 + 130 * i
        svg.line(x, 56, x + 30, 56, f"line {arm}")
        svg.text(x + 38, 60, name)
    for i, (title, staggered, rates) in enumerate(PANELS):
        x0, y0 = left + (i % 2) * (wide + 84), top + 22 + (i // 2) * (high + 78)
        at = lambda c, r: (x0 + c * wide, y0 + high - r / 1.05 * high)
        svg.text(x0, y0 - 12, title, "panel")
        for r in (0, 0.25, 0.5, 0.75, 1.0):
            x, y = at(0, r)
            svg.line(x0, y, x0 + wide, y, "grid")
            svg.text(x0 - 8, y + 4, f"{r:.2f}", "note", "end")
        for c in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
            x, y = at(c, 0)
            svg.line(x, y, x, y + 5, "axis")
            svg.text(x, y + 20, f"{c * 100:.0f} %", "note", "middle")
        svg.line(x0, y0 + high, x0 + wide, y0 + high, "axis")
        if i >= 2:
            svg.text(x0 + wide / 2, y0 + high + 42, "cache, as a part of the dataset", "", "middle")
        points = {arm: [] for arm, _ in ARMS}
        for cache in CACHES:
            case = plain_case(cache, staggered, rates)
            outcomes = simulate(program, case, ("direct", "lru", "pin", "fletch"))
            for arm, outcome in outcomes.items():
                points[arm].append(at(cache, outcome["ratio"]))
            points["bound"].append(at(cache, outcomes["fletch"]["bound"]))
        for arm, _ in ARMS:
            steps = [f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points[arm])]
            svg.path(steps, f"line {arm}")
            if arm == "fletch":
                for x, y in points[arm]:
                    svg.out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" class="dot-fletch"/>')
    svg.write(HERE / "sweep.svg")


def number(data, at):
    """Reads one variable-length number of docs/FORMATS-epochs.md."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def calls(trace):
    """Yields (subscriber, pick, actions) for each call of a recorded trace.

    docs/FORMATS-epochs.md has the format, under "Trace". A pick is (unit, where it is read) or None; an
    action is (unit, loaded). Reads only the calls that a simulation makes: join, leave, begin, next and
    advance.
    """
    at = 16
    while at < len(trace):
        length, kind = int.from_bytes(trace[at:at + 4], "little"), trace[at + 4]
        data, at = trace[at + 24:at + 24 + length], at + 24 + length
        p = 0 if kind == 4 else len(data)
        while p < len(data):
            call, p = number(data, p)
            subscriber = None
            if call in (3, 4, 5):
                subscriber, p = number(data, p)
            if call == 2:
                subset, p = number(data, p)
                assert subset == 0, "plans are the whole dataset here"
            if call == 4:
                slots, p = number(data, p)
                p += 1 if data[p] else 1 + (slots + 7) // 8
            assert call in (2, 3, 4, 5, 6), f"call {call} is none of a plain simulation"
            _, p = number(data, p)
            read_from, p, pick = data[p], p + 1, None
            if read_from:
                _, p = number(data, p)
                unit, p = number(data, p)
                _, p = number(data, p)
                pick = (unit, ("window", "reserve", "range")[read_from - 1])
            p += 1
            count, p = number(data, p)
            actions = []
            for _ in range(count):
                action, p = number(data, p)
                actions.append((action >> 1, action & 1 == 1))
            yield subscriber, pick, actions


def draw_held(program):
    """What the cache holds, and what two staggered jobs read, over two epochs of the first job."""
    units, samples, cache, first, last = 800, 8, 0.25, 3.0, 5.0
    epoch = units * samples
    # R1 of docs/SWEEP.md: the window is 7 % of what is not cached.
    window = round(0.07 * (1 - cache) * units)
    case = {
        "name": "case", "units": {"count": units, "samples": samples}, "cache": cache, "seed": 1,
        "warm": first * epoch, "end": last * epoch,
        "jobs": [{"rate": 1.0}, {"rate": 1.0, "start": 0.5 * epoch}],
    }
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "trace"
        outcome = simulate(program, case, record=record)["fletch"]
        trace = record.read_bytes()
    now, picks, spells, loads, held, came = 0, [], [], [], {}, {}
    for subscriber, pick, actions in calls(trace):
        for unit, load in actions:
            if load:
                held[unit] = len(loads)
                loads.append(now)
                if now >= first:
                    came.setdefault(unit, now)
            elif unit in held:
                spells.append((unit, held.pop(unit), now))
        if pick:
            now += (subscriber == 0) / epoch
            picks.append((now, subscriber, *pick))
    spells += [(unit, load, last) for unit, load in held.items()]
    # Rows follow the order in which the sweep loads the units; the reserve, which it never loads, lies below.
    row = {unit: i for i, unit in enumerate(sorted(range(units), key=lambda u: came.get(u, 0)))}
    width, left, wide, high, gap = 960, 96, 820, 290, 92
    about = "Over the same two epochs: the units in window and reserve, and the units that two jobs read."
    svg = Svg(width, 2 * high + gap + 160, "What a sweep holds and what its jobs read", about)
    x_of = lambda t: left + (t - first) / (last - first) * wide
    tall = high / units
    for y0, title in ((74, "What the cache holds"), (74 + high + gap, "What the two jobs read")):
        svg.text(24, y0 - 44 + 8, title, "title")
        svg.out.append(f'<rect x="{left}" y="{y0}" width="{wide}" height="{high}" class="away"/>')
        svg.text(left - 14, y0 + high / 2, "units, in the order of the sweep", "note", "middle", -90)
        for e in range(int((last - first) * 2) + 1):
            x = x_of(first + e / 2)
            svg.line(x, y0 + high, x, y0 + high + 5, "axis")
            svg.text(x, y0 + high + 20, f"{first + e / 2:.1f}", "note", "middle")
    below = "time, in epochs of job A; job B runs half an epoch behind"
    svg.text(left + wide / 2, 74 + 2 * high + gap + 44, below, "", "middle")

    def legend(x, y, kind, name):
        svg.out.append(f'<rect x="{x}" y="{y}" width="14" height="14" class="{kind}"/>')
        svg.text(x + 21, y + 12, name)

    legend(430, 27, "window", "window: moves on, first in, first out")
    legend(700, 27, "reserve", "reserve: stays between epochs")
    legend(430, 27 + high + gap, "job-a", "a sample that job A reads")
    legend(700, 27 + high + gap, "job-b", "a sample that job B reads")
    # The window is first in, first out: a unit that outlives `window` further loads is in the reserve.
    bars = {"window": [], "reserve": []}
    for unit, load, until in spells:
        leaves = min(until, loads[load + window] if load + window < len(loads) else until)
        for kind, a, b in (("window", loads[load], leaves), ("reserve", leaves, until)):
            a, b = max(a, first), min(b, last)
            if b > a:
                y, long = 74 + high - (row[unit] + 1) * tall, x_of(b) - x_of(a)
                bars[kind].append(f"M{x_of(a):.1f} {y:.2f}h{long:.1f}v{tall:.2f}h{-long:.1f}z")
    for kind, steps in bars.items():
        svg.path(steps, kind)
    dots = ([], [])
    for i, (t, job, unit, _) in enumerate(picks):
        if first <= t <= last and i % 5 == 0:
            x, y = x_of(t), 74 + high + gap + high - (row[unit] + 0.5) * tall
            dots[job].append(f"M{x:.0f} {y:.0f}h1.5v1.5h-1.5z")
    svg.path(dots[0], "job-a")
    svg.path(dots[1], "job-b")
    svg.write(HERE / "sweep-held.svg")
    print(f"two jobs, cache 25 %: {outcome['ratio']:.3f} origin bytes a byte, bound {outcome['bound']:.3f}")


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    draw_held(sys.argv[1])
    draw_ratio(sys.argv[1])


if __name__ == "__main__":
    main()
