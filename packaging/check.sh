#!/usr/bin/env bash
# Installs what `make dist` built in empty roots of Debian, uses it there, and removes it
# (`make accept-dist`). Needs root, a network for Debian's packages, mmdebstrap and /dev/fuse. The tarballs of
# the roots stay in the target directory.
#
#   Debian package   Debian 12: the service's server as its user, a mount from fstab, purge
#   tarball          the same root, in /usr/local: `fletch mount` with a server of one's own
#   wheel            the same root, PyTorch 1.13 on Python 3.11: training over epochs; Debian 11 with
#                    Python 3.9 and glibc 2.31: reading
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
roots=$target/roots
dist=$target/dist
# More files for a root.
more=

for tool in mmdebstrap gpgv; do
    command -v "$tool" > /dev/null || apt-get install -y -qq --no-install-recommends mmdebstrap gpgv
done

# Makes the tarball of a root: suite, packages.
make_root() {
    local suite=$1 packages=$2
    local tar=$roots/$suite.tar
    if [ ! -s "$tar" ]; then
        mkdir -p "$roots"
        rm -f "$roots/$suite.new.tar"
        mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
            --include="$packages" "$suite" "$roots/$suite.new.tar"
        mv "$roots/$suite.new.tar" "$tar"
    fi
}

# Runs a script in a fresh root: suite, script. Its mounts and processes end with it.
in_root() {
    local suite=$1 script=$2
    local root
    root=$(mktemp -d)
    tar -C "$root" --exclude=./dev -xf "$roots/$suite.tar"
    mkdir -p "$root/dev" "$root/pkg"
    for device in 'null 1 3' 'zero 1 5' 'random 1 8' 'urandom 1 9' 'fuse 10 229'; do
        # shellcheck disable=SC2086 # three words
        set -- $device
        mknod -m 666 "$root/dev/$1" c "$2" "$3"
    done
    ln -s /proc/self/fd "$root/dev/fd"
    mkdir "$root/dev/shm"
    # An init system makes this link.
    ln -sf ../proc/self/mounts "$root/etc/mtab"
    # shellcheck disable=SC2086 # several files
    cp -r $more "$dist"/*.deb "$dist"/*.tar.gz "$dist"/*.whl packaging/check/* "$root/pkg/"
    local status=0
    unshare --mount --pid --fork --kill-child --mount-proc="$root/proc" \
        chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        LANG=C.UTF-8 bash -euo pipefail "/pkg/$script" || status=$?
    rm -rf --one-file-system "$root"
    return "$status"
}

make_root bookworm adduser,fuse3,init-system-helpers,python3-torch,python3-venv,python3-pip
make_root bullseye python3-venv,python3-pip
in_root bookworm deb.sh
in_root bookworm tarball.sh
in_root bookworm wheel_trains.sh

# The server of the last root runs outside of it.
work=$(mktemp -d)
mkdir -p "$work/photos/cat"
for i in $(seq 20); do head -c $((500 + 31 * i)) /dev/urandom > "$work/photos/cat/$i.bin"; done
"$target/release/fletch-server" --listen 127.0.0.1:0 --socket none --state-dir "$work/state" --cache-size 0 \
    --ready-file "$work/server" 2> "$work/log" &
server=$!
trap 'kill "$server"; wait "$server" || true; rm -rf "$work"' EXIT
until [ -s "$work/server" ]; do
    kill -0 "$server"
    sleep 0.1
done
FLETCH_SERVER=$(cat "$work/server")
export FLETCH_SERVER FLETCH_STATE_DIR="$work/cli"
"$target/release/fletch" index "$work/photos"
"$target/release/fletch" register photos "$work/photos"
more="$work/server $work/photos"
in_root bullseye wheel_reads.sh
