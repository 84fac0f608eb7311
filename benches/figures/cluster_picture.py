#!/usr/bin/env python3
"""Draws the picture of docs/ALLOCATION.md from the simulator.

    cargo build --release -p fletch-sim
    python3 benches/figures/cluster_picture.py target/release/fletch-simulate

Writes docs/figures/cluster.svg: how much longer jobs take because they wait for data, for seven kinds of
clusters and five ways to divide the cache. The numbers are those of docs/SIMULATE.md, "Clusters".

The simulator runs in virtual time with fixed seeds, so every machine draws the same picture.
The script needs only the standard library, and about half a minute of one core.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

from sweep_pictures import Svg

TO = Path(__file__).resolve().parents[2] / "docs" / "figures" / "cluster.svg"
SEED, SEEDS = 5000, 8
ARMS = {
    "lru": "LRU",
    "equal": "equal shares",
    "demand": "by demand",
    "quiver": "greedy, whole datasets (Quiver)",
    "fletch": "by worth (Fletch)",
}
TICKS = (1, 1.5, 2, 3, 5, 10)

STYLE = """
.span { stroke: #d1d9e0; stroke-width: 3; stroke-linecap: round }
.arm-lru { fill: #cf4a00 }
.arm-equal { fill: #8c959f }
.arm-demand { fill: #b98500 }
.arm-quiver { fill: #8250df }
.arm-fletch { fill: #0969da }
.value { fill: #0969da; font-weight: 600 }
"""
DARK = """
.span { stroke: #3d444d }
.arm-lru { fill: #ff8a4c }
.arm-equal { fill: #9198a1 }
.arm-demand { fill: #e3b341 }
.arm-quiver { fill: #c297ff }
.arm-fletch { fill: #58a6ff }
.value { fill: #58a6ff }
"""


def simulate(program):
    """The mean slowdown of each arm, by cluster, in the order of the simulator."""
    command = [program, "cluster", "--json", f"--seed={SEED}", f"--seeds={SEEDS}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = {}
    for row in map(json.loads, done.stdout.splitlines()):
        rows.setdefault(row["cluster"], {})[row["arm"]] = row["slowdown"]
    for cluster, arms in rows.items():
        assert set(arms) == set(ARMS), f"{cluster}: {sorted(arms)}"
    return rows


def mark(arm, x, y):
    """The sign of an arm: each has a shape of its own, for readers who do not see the colours."""
    kind = f'class="arm-{arm}"'
    if arm == "fletch":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" {kind}/>'
    if arm == "lru":
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {kind}/>'
    if arm == "equal":
        return f'<rect x="{x - 2:.1f}" y="{y - 7:.1f}" width="4" height="14" {kind}/>'
    if arm == "demand":
        return f'<path d="M{x:.1f} {y - 6:.1f}l5.6 10h-11.2z" {kind}/>'
    return f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z" {kind}/>'


def draw(rows):
    width, left, right, top, pitch = 960, 300, 910, 118, 46
    bottom = top + pitch * len(rows) - 6
    about = "A row for each kind of cluster, with a sign for each way to divide the cache."
    for cluster, arms in rows.items():
        about += f" {cluster}: " + ", ".join(f"{ARMS[arm]} {arms[arm]:.2f}" for arm in ARMS) + "."
    svg = Svg(width, bottom + 70, "Mean slowdown of the jobs of a cluster", about, STYLE, DARK)
    title = "Time of a job, as a multiple of its time without waiting for data (lower is better)"
    svg.text(24, 34, title, "title")
    x = 24
    for arm, name in ARMS.items():
        svg.out.append(mark(arm, x + 7, 62))
        svg.text(x + 22, 66.5, name)
        x += 50 + 7.2 * len(name)
    most = math.log(TICKS[-1])
    at = lambda slowdown: left + math.log(slowdown) / most * (right - left)
    for tick in TICKS:
        svg.line(at(tick), top - 22, at(tick), bottom, "grid")
        svg.text(at(tick), bottom + 20, f"{tick:g}", "note", "middle")
    axis = f"mean over jobs and {SEEDS} seeds, logarithmic"
    svg.text((left + right) / 2, bottom + 46, axis, "note", "middle")
    for i, (cluster, arms) in enumerate(rows.items()):
        y = top + pitch * i
        svg.text(left - 22, y + 4.5, cluster, "", "end")
        svg.line(at(min(arms.values())), y, at(max(arms.values())), y, "span")
        svg.out += [mark(arm, at(arms[arm]), y) for arm in ARMS]
        svg.text(at(arms["fletch"]), y + 21, f"{arms['fletch']:.2f}", "value", "middle")
    svg.write(TO)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    draw(simulate(sys.argv[1]))


if __name__ == "__main__":
    main()
