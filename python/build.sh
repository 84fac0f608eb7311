#!/usr/bin/env bash
# Builds the wheel of the Python package beside the programs. Usage: python/build.sh [release|debug]
# If maturin is missing it builds nothing and says so; the tests of the package then skip, or fail in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
profile="${1:-release}"
target="${CARGO_TARGET_DIR:-target}"
servers="${FLETCH_TEST_SERVERS:-$target/test-servers}"
maturin="$servers/torch/bin/maturin"
if [ ! -x "$maturin" ]; then
    echo "the Python package is not built: no $maturin (tests/install.sh installs it)" >&2
    exit 0
fi
built=$(mktemp -d "$target/wheel.XXXXXX")
trap 'rm -r "$built"' EXIT
"$maturin" build --locked --manifest-path python/Cargo.toml --jobs "${JOBS:-2}" \
    --profile "$([ "$profile" = debug ] && echo dev || echo "$profile")" --out "$built"
# `mv` replaces the old wheel in one step, because another process may be installing it.
mkdir -p "$target/$profile/wheels"
for old in "$target/$profile/wheels"/*.whl; do
    [ ! -e "$old" ] || [ -e "$built/$(basename "$old")" ] || rm "$old"
done
mv "$built"/*.whl "$target/$profile/wheels/"
