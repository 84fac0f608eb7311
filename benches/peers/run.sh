#!/usr/bin/env bash
# Reads a bucket of small objects through fletch mount, rclone mount and s3fs, beside a bare read.
#
#   benches/peers/run.sh [--rounds N] [--objects N] [--readers N] [--install] [--json FILE]
#
# Each round gives every system the same bucket of a moto S3 server, an empty cache and one process that reads
# all files in a random order, twice, by N threads (default 1). Systems take turns; medians are over rounds.
# --install installs the peers from Debian, as root. Programs of Fletch come from FLETCH_BIN, else
# target/release.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
servers=${FLETCH_TEST_SERVERS:-$target/test-servers}
for word in "$@"; do
    if [ "$word" = --install ]; then
        apt-get install -y -qq --no-install-recommends rclone s3fs fuse3
    fi
done
export FLETCH_BIN=${FLETCH_BIN:-$target/release}
exec "$servers/s3/bin/python" benches/peers/mounts.py "${@/--install/--installed}"
