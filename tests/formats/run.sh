#!/usr/bin/env bash
# Runs the second implementation of the formats, check.py and epochs.py, in its own virtual environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
"$scratch/venv/bin/python" "$here/check.py"
"$scratch/venv/bin/python" "$here/epochs.py"
