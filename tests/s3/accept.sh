#!/usr/bin/env bash
# Stock S3 clients, pinned, read a tree of odd names through the S3 door of a server with tokens.
# Usage: accept.sh ENVIRONMENT BIN
# ENVIRONMENT: the folder of a virtual environment, made at the first run. BIN: the folder of the programs.
# Needs root for Debian's rclone and s3fs, unless they are installed, and PyTorch of any kind for two clients.
set -euo pipefail
environment=$1 bin=$2
here=$(cd "$(dirname "$0")" && pwd)
python="$environment/bin/python"
if [ ! -x "$python" ]; then
    # Debian's interpreter, which sees Debian's torch: PyPI's would take 6 GB.
    /usr/bin/python3 -m venv --system-site-packages "$environment"
fi
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }
pip install -r "$here/requirements.txt"
pip install --no-deps -r "$here/requirements-torch.txt"
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
"$python" "$here/tree.py" make "$work/odd"
"$python" "$here/tree.py" plain "$work/plain"
"$python" "$here/made.py" "$work/plain/tables" "$work/mds"
for name in odd plain mds; do
    fletch index "$work/$name" --tables "$work/tables-$name" --quiet > /dev/null
    fletch register "$name" "$work/$name" --tables "$work/tables-$name" > /dev/null
done
eval "$(fletch s3 credentials)"
"$python" -m pip list --disable-pip-version-check 2> /dev/null |
    grep -iE '^(boto3|awscli|pyarrow|polars|s3fs|duckdb|s3torchconnector|mosaicml-streaming) '
rclone version | head -1
s3fs --version | head -1
"$python" "$here/clients.py" || { cat "$work/log" >&2; exit 1; }
