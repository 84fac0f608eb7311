#!/usr/bin/env python3
"""Writes the README of the chart from the comments of its values.

    helm/generate-readme.py            writes helm/fletch/README.md
    helm/generate-readme.py --check    exits with 1 if that file is not current

Each key of values.yaml has a comment above it: a key that holds a value, and a table of keys without one.
"""

import pathlib
import re
import sys

CHART = pathlib.Path(__file__).resolve().parent / "fletch"
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):(?: (?P<value>.*))?$")


def values(lines):
    """Returns (path, default, comment) for each commented key, and the paths of values without a comment.

    A commented key without a value on its line holds a table that is one value (a security context), unless a
    comment follows further in. Then its comment describes the group.
    """
    rows, bare, path, comment, whole = [], [], [], [], None
    for number, line in enumerate(lines):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if not text:
            comment = []
            continue
        if whole is not None and indent > whole:
            rows[-1][1].append(line[whole:])
            continue
        whole = None
        if text.startswith("#"):
            comment.append(text[1:].strip())
            continue
        match = KEY.match(line)
        if not match:
            raise SystemExit(f"values.yaml:{number + 1}: neither a key nor a comment: {text}")
        path = [*path[: indent // 2], match["key"]]
        name = ".".join(path)
        if match["value"] is not None:
            rows.append((name, [match["value"]], " ".join(comment)))
            if not comment:
                bare.append(name)
        elif comment and not group(lines[number + 1 :], indent):
            rows.append((name, [], " ".join(comment)))
            whole = indent
        elif comment:
            rows.append((name, None, " ".join(comment)))
        comment = []
    return rows, bare


def group(rest, indent):
    """Says whether a comment lies further in than `indent`, before the next key at that depth."""
    for line in rest:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return False
        if line.strip().startswith("#"):
            return True
    return False


def cell(text):
    return text.replace("|", "\\|")


def default(lines):
    if not lines:
        return ""
    if len(lines) == 1:
        return f"`{cell(lines[0].strip())}`"
    return "see `values.yaml`"


def readme():
    rows, bare = values((CHART / "values.yaml").read_text().splitlines())
    if bare:
        raise SystemExit(f"values.yaml: no comment above {', '.join(bare)}")
    head = (CHART / "README.head.md").read_text()
    out = [head.rstrip(), "", "## Values", "", "| key | default | meaning |", "|---|---|---|"]
    out += [f"| `{name}` | {default(value)} | {cell(text)} |" for name, value, text in rows]
    return "\n".join(out) + "\n"


def main():
    target = CHART / "README.md"
    text = readme()
    if sys.argv[1:] == ["--check"]:
        if not target.exists() or target.read_text() != text:
            sys.exit("helm/fletch/README.md is not current: run helm/generate-readme.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        target.write_text(text)


if __name__ == "__main__":
    main()
