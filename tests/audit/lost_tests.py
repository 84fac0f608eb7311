#!/usr/bin/env python3
"""Compares two lists of tests and prints the tests that were lost.

A list is what `cargo nextest list --message-format oneline` prints: a binary's name and a test's path a
line. Tests are matched by the last segment of their path, so that a test may move to another module or
package. A test whose function was renamed stands in the file of renames, as `old -> new` a line; there,
too, only the last segments count.

Exits 1 when a test was lost, and 2 when a file of renames names a test that neither list has.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path


def name(path: str) -> str:
    """Returns the last segment of a test's path."""
    return path.split("::")[-1].strip()


def tests(text: str) -> Counter[str]:
    """Returns how often each test's name is in a list."""
    lines = (line.split() for line in text.splitlines())
    return Counter(name(words[-1]) for words in lines if len(words) == 2)


def renames(text: str) -> list[tuple[str, str]]:
    """Returns the pairs of a file of renames. Blank lines and lines that begin with `#` are skipped."""
    pairs = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            old, arrow, new = line.partition("->")
            if not arrow:
                raise ValueError(f"no `->` in {line!r}: write `old -> new`")
            pairs.append((name(old.strip()), name(new.strip())))
    return pairs


def lost(before: Counter[str], after: Counter[str], renamed: list[tuple[str, str]]) -> Counter[str]:
    """Returns the names in `before` that `after` has less often, each renamed test counted once."""
    left = before.copy()
    found = after.copy()
    for old, new in renamed:
        if left[old] > found[old] and found[new] > before[new]:
            left[old] -= 1
            found[new] -= 1
    return left - found


def main() -> int:
    """Runs the comparison."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("before", type=Path, help="the list before")
    parser.add_argument("after", type=Path, help="the list after")
    parser.add_argument("renames", type=Path, nargs="*", help="files of `old -> new` lines")
    arguments = parser.parse_args()
    before, after = tests(arguments.before.read_text()), tests(arguments.after.read_text())
    renamed = [pair for file in arguments.renames for pair in renames(file.read_text())]
    gone = lost(before, after, renamed)
    unknown = [f"{old} -> {new}" for old, new in renamed if old not in before or new not in after]
    for test, times in sorted(gone.items()):
        print(f"lost: {test}" + (f" ({times} times)" if times > 1 else ""))
    for pair in unknown:
        print(f"renamed, but not in the lists: {pair}", file=sys.stderr)
    counts = f"{before.total()} tests before, {after.total()} after, {len(renamed)} renamed"
    print(f"{counts}, {gone.total()} lost")
    return 1 if gone or not before else 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
