#!/usr/bin/env bash
# Runs fsspec's own tests and the tools that people have over fletch://, with pinned packages from PyPI.
# Usage: run.sh ENVIRONMENT BIN
# ENVIRONMENT: the folder of a virtual environment, made at the first run.
# BIN: the folder of the built programs and of wheels/.
set -euo pipefail
environment=$1 bin=$2
tests=$(cd "$(dirname "$0")/.." && pwd)
python="$environment/bin/python"
if [ ! -x "$python" ]; then
    python3 -m venv "$environment"
fi
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }
pip install -r "$tests/fsspec_readers/requirements.txt"
pip install --force-reinstall --no-deps --no-index "$bin"/wheels/fletch-*.whl
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR="$scratch" FLETCH_BIN="$bin" PYTHONDONTWRITEBYTECODE=1
"$python" -m pytest -q -s -p no:cacheprovider --basetemp "$scratch/t" \
    "$tests/test_fsspec.py" "$tests/fsspec_readers/test_readers.py"
