#!/usr/bin/env bash
# Runs the timed tables. Needs nginx and b3sum on PATH (`cargo install b3sum`), root for mounts.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${CARGO_TARGET_DIR:-target}/release
cargo build --release -p fletch-benches
for t in bench-index bench-serve bench-lease bench-mount bench-pack; do
    echo "## $t $*"
    "$bin/$t" "$@"
done
echo "## bench-sweep"
"$bin/bench-sweep"
