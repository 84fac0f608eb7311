#!/usr/bin/env bash
# Builds the wheel of the Python package beside the programs: python/build.sh [release|debug].
# Where tests/install.sh could not bring maturin it says so, and the tests of the package skip (or fail, in CI).
set -euo pipefail
cd "$(dirname "$0")/.."
profile="${1:-release}"
target="${CARGO_TARGET_DIR:-target}"
servers="${FLETCH_TEST_SERVERS:-$target/test-servers}"
maturin="$servers/torch/bin/maturin"
if [ ! -x "$maturin" ]; then
    echo "the Python package is not built: no $maturin (tests/install.sh brings it)" >&2
    exit 0
fi
rm -rf "$target/$profile/wheels"
"$maturin" build --locked --manifest-path python/Cargo.toml --jobs "${JOBS:-2}" \
    --profile "$([ "$profile" = debug ] && echo dev || echo "$profile")" --out "$target/$profile/wheels"
