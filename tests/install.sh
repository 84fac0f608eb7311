#!/usr/bin/env bash
# Installs what the tests need beside Rust, where it may (root on Debian or Ubuntu); elsewhere
# it says what is missing, and the tests that need it skip or, in CI, fail.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need fusermount3 fuse3
need python3 python3
need getfattr attr
need tar tar
need find findutils
need curl curl
need node nodejs
need npm npm
need setpriv util-linux
PATH="$PATH:/usr/sbin" need mkfs.ext4 e2fsprogs
PATH="$PATH:/usr/sbin" need nginx nginx-light
if command -v python3 >/dev/null 2>&1 && ! python3 -c 'import venv, ensurepip' 2>/dev/null; then missing+=(python3-venv); fi
if ((${#missing[@]})); then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}"
    else
        echo "not installed here, some tests will skip: ${missing[*]}" >&2
    fi
fi
if ! cargo nextest --version >/dev/null 2>&1; then
    cargo install --locked cargo-nextest
fi

# Servers that tests start themselves, each on a port of its own: S3 (moto), Azure Blob (Azurite).
# They live below the target directory, nothing is installed for others.
servers="${FLETCH_TEST_SERVERS:-${CARGO_TARGET_DIR:-target}/test-servers}"
if [ ! -x "$servers/s3/bin/moto_server" ]; then
    mkdir -p "$servers"
    python3 -m venv "$servers/s3"
    "$servers/s3/bin/pip" install --quiet --disable-pip-version-check 'moto[server]==5.2.*'
fi
if [ ! -x "$servers/azure/node_modules/.bin/azurite-blob" ]; then
    mkdir -p "$servers/azure"
    npm install --silent --no-fund --no-audit --prefix "$servers/azure" 'azurite@3.35'
fi
