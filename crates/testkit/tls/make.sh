#!/usr/bin/env bash
# Makes the certificates of this folder anew. They are for tests on loopback, and secret to nobody.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 "$@"; }
new -keyout "$work/ca.key" -out authority.pem -subj "/CN=tests of Fletch"
new -keyout server.key -out server.pem -CA authority.pem -CAkey "$work/ca.key" -subj "/CN=localhost" \
    -addext "basicConstraints=critical,CA:FALSE" \
    -addext "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:0.0.0.0"
