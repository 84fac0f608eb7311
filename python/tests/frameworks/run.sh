#!/usr/bin/env bash
# Runs the package's own tests, and those of this folder, with today's torch and frameworks from PyPI.
# Usage: run.sh ENVIRONMENT BIN
# ENVIRONMENT: the folder of a virtual environment, made at the first run, brought up to date at later ones.
# BIN: the folder of the built programs and of wheels/.
set -euo pipefail
environment=$1 bin=$2
here=$(cd "$(dirname "$0")" && pwd)
python="$environment/bin/python"
if [ ! -x "$python" ]; then
    python3 -m venv "$environment"
fi
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }
# No version is pinned: what users install today is what must work.
pip install --upgrade torch torchvision lightning transformers accelerate torchdata datasets \
    numpy pillow 'pytest>=8,<10' psutil
pip install --force-reinstall --no-deps --no-index "$bin"/wheels/fletch-*.whl
"$python" -m pip list --disable-pip-version-check 2>/dev/null |
    grep -E '^(torch|torchdata|lightning|transformers|accelerate|datasets|fletch) '
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR="$scratch" FLETCH_BIN="$bin" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
failed=0
for part in "$here" "$here/.."; do
    # The frameworks by themselves, then the package's own tests.
    tests=("$part"/test_*.py)
    "$python" -m pytest -q -p no:cacheprovider --basetemp "$scratch/t" "${tests[@]}" || failed=1
done
exit "$failed"
