#!/usr/bin/env bash
# Stock S3 clients, pinned, read a tree of odd names through the S3 door of a server with tokens.
# Usage: accept.sh ENVIRONMENTS BIN
# ENVIRONMENTS: a folder for virtual environments, made at the first run. BIN: the folder of the programs.
# Needs Debian's python3-torch, and root for Debian's rclone and s3fs unless they are installed.
set -euo pipefail
environments=$1 bin=$2
here=$(cd "$(dirname "$0")" && pwd)
clients="$environments/clients/bin/python" s3fs="$environments/s3fs/bin/python"
torch="$environments/torch/bin/python"
# s3fs needs an older botocore than boto3. Debian's torch, which needs an older numpy than pyarrow, takes the
# place of PyPI's, which would take 6 GB; so two clients come without their dependencies.
mkdir -p "$environments"
[ -x "$clients" ] || python3 -m venv "$environments/clients"
[ -x "$s3fs" ] || python3 -m venv "$environments/s3fs"
[ -x "$torch" ] || /usr/bin/python3 -m venv --system-site-packages "$environments/torch"
install() { "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"; }
install "$clients" -r "$here/requirements.txt"
install "$s3fs" -r "$here/requirements-s3fs.txt"
install "$torch" -r "$here/requirements-torch.txt"
install "$torch" --no-deps -r "$here/requirements-torch-alone.txt"
for program in rclone s3fs; do
    command -v "$program" > /dev/null || apt-get install -y -qq --no-install-recommends "$program" > /dev/null
done

work=$(mktemp -d)
server=
finish() {
    if [ -n "$server" ]; then
        kill "$server" 2> /dev/null || true
        wait "$server" 2> /dev/null || true
    fi
    rm -rf "$work"
}
trap finish EXIT
export PATH="$bin:$PATH" FLETCH_STATE_DIR="$work/state" FLETCH_CACHE_DIR="$work/cache"
export PYTHONDONTWRITEBYTECODE=1 AWS_EC2_METADATA_DISABLED=true
fletch-server token new --tenant a --append "$work/tokens.toml" --out "$work/token" 2> /dev/null
(umask 077; head -c 32 /dev/urandom > "$work/s3.key")
fletch-server --listen 127.0.0.1:0 --socket none --s3-listen 127.0.0.1:0 --s3-key-file "$work/s3.key" \
    --auth-tokens "$work/tokens.toml" --local-dirs "$work=*" --cache-size 256MiB --cache-free-floor 0 \
    --ready-file "$work/url" 2> "$work/log" & server=$!
for _ in $(seq 100); do [ -s "$work/url" ] && break; sleep 0.1; done
FLETCH_SERVER=$(cat "$work/url")
export FLETCH_SERVER FLETCH_TOKEN_FILE="$work/token"
"$clients" "$here/tree.py" "$work/odd"
"$clients" "$here/made.py" tables "$work/tables"
"$torch" "$here/made.py" mds "$work/mds"
for name in odd tables mds; do
    fletch index "$work/$name" --tables "$work/index-$name" --quiet > /dev/null
    fletch register "$name" "$work/$name" --tables "$work/index-$name" > /dev/null
done
eval "$(fletch s3 credentials)"
grep -hE '^(boto3|awscli|pyarrow|polars|s3fs|duckdb|s3torchconnector|mosaic)' "$here"/requirements*.txt |
    sort -u
# Not by head: it would end the programs that it reads from.
rclone version | sed -n 1p
s3fs --version | sed -n 1p
failed=0
read_by() { "$1" "$here/clients.py" "${@:2}" || failed=1; }
read_by "$clients" boto3 "aws cli" pyarrow polars "DuckDB httpfs" rclone s3fs-fuse
read_by "$s3fs" s3fs
read_by "$torch" s3torchconnector mosaicml-streaming
if [ "$failed" = 1 ]; then
    cat "$work/log" >&2
fi
exit "$failed"
