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
need strace strace
PATH="$PATH:/usr/sbin" need mkfs.ext4 e2fsprogs
PATH="$PATH:/usr/sbin" need nginx nginx-light
if command -v python3 >/dev/null 2>&1 && ! python3 -c 'import venv, ensurepip' 2>/dev/null; then missing+=(python3-venv); fi
# PyTorch without CUDA is Debian's, for Debian's own interpreter.
if ! /usr/bin/python3 -c 'import torch, torchvision' 2>/dev/null; then missing+=(python3-torch python3-torchvision); fi
if ! /usr/bin/python3 -c 'import venv, ensurepip' 2>/dev/null; then missing+=(python3-venv); fi
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
    # A registry that does not answer is a failure with a name, not a run that hangs.
    azurite() { timeout 300 npm install --silent --no-fund --no-audit --prefix "$servers/azure" 'azurite@3.35'; }
    azurite || azurite || { echo "npm did not bring azurite within 2 x 300 s" >&2; exit 1; }
fi

# The Python package is built and tested by an interpreter of its own, which sees Debian's torch.
if [ ! -x "$servers/torch/bin/mypy" ] && /usr/bin/python3 -c 'import torch, torchvision, ensurepip' 2>/dev/null; then
    mkdir -p "$servers"
    /usr/bin/python3 -m venv --system-site-packages "$servers/torch"
    "$servers/torch/bin/pip" install --quiet --disable-pip-version-check 'numpy<2' 'pytest>=8,<10' 'maturin>=1.7,<2' 'mypy>=1.15,<2'
fi
# A folder of real images in folders by class: 48 x 48 icons of a Debian package, unpacked, not installed.
if [ ! -d "$servers/images/icons" ] && command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1; then
    unpacked=$(mktemp -d)
    if (cd "$unpacked" && apt-get download -qq gnome-icon-theme 2>/dev/null && dpkg-deb -x ./*.deb all); then
        mkdir -p "$servers/images"
        mv "$unpacked/all/usr/share/icons/gnome/48x48" "$servers/images/icons"
    else
        echo "not fetched here, the README's example will skip: gnome-icon-theme" >&2
    fi
    rm -r "$unpacked"
fi
