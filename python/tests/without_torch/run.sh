#!/usr/bin/env bash
# Runs the examples without PyTorch, and the tests of fletch.Epochs, with today's frameworks from PyPI.
# Usage: run.sh ENVIRONMENT BIN
# ENVIRONMENT: the folder of a virtual environment, made at the first run, brought up to date at later ones.
# BIN: the folder of the built programs and of wheels/.
set -euo pipefail
environment=$1 bin=$2
tests=$(cd "$(dirname "$0")/.." && pwd)
python="$environment/bin/python"
if [ ! -x "$python" ]; then
    python3 -m venv "$environment"
fi
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }
# No version is pinned: what users install today is what must work.
pip install --upgrade numpy jax tensorflow-cpu grain 'ray[train]' 'pytest>=8,<10'
pip install --force-reinstall --no-deps --no-index "$bin"/wheels/fletch-*.whl
"$python" -m pip list --disable-pip-version-check 2>/dev/null |
    grep -E '^(numpy|jax|tensorflow-cpu|tensorflow_cpu|grain|ray|fletch) '
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR="$scratch" FLETCH_BIN="$bin" PYTHONDONTWRITEBYTECODE=1
"$python" -m pytest -q -rs -p no:cacheprovider --basetemp "$scratch/t" \
    "$tests/test_without_torch.py" "$tests/test_examples_without_torch.py"
