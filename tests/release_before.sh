#!/bin/bash
# Builds the programs of an earlier revision, in a work tree and a target directory of its own:
#   tests/release_before.sh REVISION DIR
# The work tree is DIR/tree, and the programs are in DIR/release. A second run builds what changed.
set -euo pipefail
revision=$(git rev-parse --verify "$1^{commit}")
mkdir -p "$2"
dir=$(cd "$2" && pwd)
if [ -e "$dir/tree/.git" ]; then
    git -C "$dir/tree" checkout -q --detach "$revision"
else
    # Git may remember a tree that somebody deleted.
    git worktree add -q --force --detach "$dir/tree" "$revision"
fi
cd "$dir/tree"
# The whole workspace names the features, as for the programs beside it.
CARGO_TARGET_DIR="$dir" "${CARGO:-cargo}" build --release --locked -j"${JOBS:-2}" \
    --workspace --exclude fletch-benches --bin fletch-server --bin fletch-mount
