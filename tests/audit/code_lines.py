#!/usr/bin/env python3
"""Counts the lines of product code at a revision: without tests, comments and blank lines.

Product code is the Rust and Python of every package except the tests, the benches and the testkit. The item
after `#[cfg(test)]` is a test. A revision is anything that git knows; `.` is the working tree.
Exits 1 when there are more lines than `--most` allows.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from sources import sources  # noqa: E402

LEAVES = ("tests/", "benches/", "crates/testkit/")


def is_test(path: str) -> bool:
    """Whether a file holds tests only."""
    parts = path.removesuffix(".rs").split("/")
    return path.startswith(LEAVES) or "tests" in parts or "benches" in parts or "examples" in parts


def code_lines(path: str, text: str) -> int:
    """Returns the lines of a file that are code."""
    count = 0
    docstring = False
    test: int | None = None  # The open braces of a test's item, while its lines are passed over.
    for line in map(str.strip, text.splitlines()):
        if path.endswith(".rs"):
            if line == "#[cfg(test)]":
                test = 0
            elif test is not None:
                test += line.count("{") - line.count("}")
                if test <= 0 and line.endswith(("}", ";", ",")):
                    test = None
            else:
                count += bool(line) and not line.startswith("//")
            continue
        quotes = line.count('"""')
        if docstring or line.startswith(('"""', 'r"""')):
            docstring ^= quotes % 2 == 1
        else:
            count += bool(line) and not line.startswith("#")
    return count


def main() -> int:
    """Prints the lines by package, and their sum."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("revision", nargs="?", default=".", help="default: the working tree")
    parser.add_argument("--most", type=int, help="fail above so many lines")
    arguments = parser.parse_args()
    packages: Counter[str] = Counter()
    for path, text in sources(arguments.revision).items():
        if not is_test(path):
            parts = path.split("/")
            packages["/".join(parts[: 2 if parts[0] == "crates" else 1])] += code_lines(path, text)
    for package, lines in packages.most_common():
        print(f"{lines:8}  {package}")
    print(f"{packages.total():8}  in all")
    return 1 if arguments.most is not None and packages.total() > arguments.most else 0


if __name__ == "__main__":
    sys.exit(main())
