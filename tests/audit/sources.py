#!/usr/bin/env python3
"""Counts the invariants and the cited sources in comments, at two revisions.

Invariants are names such as `I1`, and the numbered items of module heads. Sources are what a comment cites:
a year of publication, `et al.`, an RFC, an ADR. Only comments of Rust and Python count (docstrings too).

A revision is anything that git knows; `.` is the working tree. Exits 1 when the second revision has fewer
of a kind than the first.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

# The checks themselves: what they name is planted.
PLANTED = (
    "tests/audit/sources.py",
    "tests/harness/names.rs",
    "tests/harness/prose.rs",
    "tests/integration/prose.rs",
)

KINDS = {
    "invariants": re.compile(r"\bI\d{1,2}\b"),
    "numbered": re.compile(r"^\s*//!\s+(?:\*\*)?\d{1,2}[.)]\s"),
    "years": re.compile(r"(?<![\d.,:/-])(?:19[4-9]\d|20[0-3]\d)(?![\d:/-]|[.,]\d)(?<!1970)"),
    "et al.": re.compile(r"\bet al\b"),
    "RFCs": re.compile(r"\bRFC\s?\d+"),
    "ADRs": re.compile(r"\bADRs?\s?\d+|\badr/\d{4}"),
}


def git(*arguments: str) -> str:
    """Returns what a git command prints."""
    done = subprocess.run(["git", *arguments], check=True, capture_output=True)
    return done.stdout.decode(errors="replace")


def sources(revision: str) -> dict[str, str]:
    """Returns the text of every Rust and Python file of a revision, by path."""
    patterns = ("*.rs", "*.py", "*.pyi")
    if revision == ".":
        listed = git("ls-files", "-co", "--exclude-standard", "-z", "--", *patterns).split("\0")
        return {p: Path(p).read_text() for p in listed if p and Path(p).is_file()}
    listed = git("ls-tree", "-r", "--name-only", "-z", "--full-tree", revision).split("\0")
    paths = [p for p in listed if p.endswith((".rs", ".py", ".pyi"))]
    wanted = "".join(f"{revision}:{p}\n" for p in paths).encode()
    command = ["git", "cat-file", "--batch"]
    batch = subprocess.run(command, input=wanted, check=True, capture_output=True).stdout
    texts = {}
    for path in paths:
        head, _, batch = batch.partition(b"\n")
        size = int(head.split()[2])
        texts[path] = batch[:size].decode(errors="replace")
        batch = batch[size + 1 :]
    return texts


def comments(path: str, text: str) -> list[str]:
    """Returns the comment lines of a source, and what follows code in a line."""
    if path.endswith(".rs"):
        return [line[line.index("//") :] for line in text.splitlines() if "//" in line]
    out = []
    inside = False
    for line in text.splitlines():
        quotes = line.count('"""')
        if inside or line.strip().startswith(('"""', 'r"""')):
            out.append(line)
            inside ^= quotes % 2 == 1
        elif "#" in line:
            out.append(line[line.index("#") :])
    return out


def found(texts: dict[str, str]) -> dict[str, Counter[str]]:
    """Returns what the comments name, by kind."""
    out: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for path, text in texts.items():
        if path in PLANTED:
            continue
        for line in comments(path, text):
            for kind, pattern in KINDS.items():
                out[kind].update(" ".join(m.split()) for m in pattern.findall(line))
    return out


def main() -> int:
    """Prints both counts of every kind."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("before", help="the revision before")
    parser.add_argument("after", nargs="?", default=".", help="the revision after (default: .)")
    parser.add_argument("--verbose", action="store_true", help="print what each kind lost")
    arguments = parser.parse_args()
    before, after = found(sources(arguments.before)), found(sources(arguments.after))
    fewer = False
    print(f"{'':12}{'before':>8}{'after':>8}")
    for kind in KINDS:
        counts = before[kind].total(), after[kind].total()
        short = counts[1] < counts[0]
        fewer |= short
        print(f"{kind:12}{counts[0]:8}{counts[1]:8}" + ("  fewer" if short else ""))
        if arguments.verbose:
            for what, times in sorted((before[kind] - after[kind]).items()):
                print(f"{'':12}{times} x {what.strip()}")
    return 1 if fewer else 0


if __name__ == "__main__":
    sys.exit(main())
