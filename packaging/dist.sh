#!/usr/bin/env bash
# Builds what can be installed into the target directory's dist/: a tarball, a Debian package, the Python
# wheel and their checksums. `make dist` builds the programs before. docs/INSTALL.md says how each is
# installed.
#
#   packaging/dist.sh            all three
#   packaging/dist.sh tarball    one of tarball, deb, wheel
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tools=$(realpath -m "${FLETCH_TEST_SERVERS:-$target/test-servers}")/dist-tools
release=$target/release
stage=$release/stage
out=$target/dist
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
machine=$(uname -m)
name=fletch-$version-$machine-linux
# Files of one version are the same, whenever they are built.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH=$epoch

pages() {
    rm -rf "$stage"
    mkdir -p "$stage" "$out"
    "$release/fletch-manuals" "$stage"
    cp -r "$stage/man" "$stage/man.gz"
    find "$stage/man.gz" -type f -exec gzip -9n {} +
    ln -s ../bin/fletch-mount "$stage/mount.fletch"
}

tarball() {
    local tree
    tree=$(mktemp -d)
    local to=$tree/$name
    for program in fletch fletch-mount fletch-server; do
        install -Dm755 -s "$release/$program" "$to/bin/$program"
    done
    mkdir -p "$to/sbin" "$to/share/bash-completion" "$to/share/fish" "$to/share/zsh" "$to/share/fletch"
    cp -d "$stage/mount.fletch" "$to/sbin/"
    cp -r "$stage/man" "$to/share/man"
    cp -r "$stage/completions/bash" "$to/share/bash-completion/completions"
    cp -r "$stage/completions/fish" "$to/share/fish/vendor_completions.d"
    cp -r "$stage/completions/zsh" "$to/share/zsh/site-functions"
    cp -r packaging/systemd "$to/share/fletch/systemd"
    # The units of a tarball name the programs where /usr/local has them.
    sed -i 's,/usr/bin/fletch,/usr/local/bin/fletch,' "$to"/share/fletch/systemd/system/*
    install -Dm644 packaging/debian/server.toml "$to/share/fletch/server.toml"
    install -Dm644 -t "$to/share/doc/fletch" README.md CHANGELOG.md LICENSE docs/INSTALL.md
    (cd "$to" && find . \( -type f -o -type l \) -printf '%P\n' && echo share/doc/fletch/files) |
        LC_ALL=C sort > "$tree/files"
    mv "$tree/files" "$to/share/doc/fletch/files"
    chmod -R u=rwX,go=rX "$to"
    tar -C "$tree" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" \
        -czf "$out/$name.tar.gz" "$name"
    rm -r "$tree"
    echo "$out/$name.tar.gz"
}

deb() {
    local builder
    builder=$(command -v cargo-deb || echo "$tools/bin/cargo-deb")
    if [ ! -x "$builder" ]; then
        CARGO_TARGET_DIR="$tools/target" "$cargo" install --locked cargo-deb --version '^3' --root "$tools"
        rm -rf "$tools/target"
    fi
    rm -f "$out"/fletch_*.deb
    "$builder" --package fletch --no-build --quiet --output "$out/"
    ls "$out"/fletch_*.deb
}

# zig links against the oldest glibc that Rust's standard library supports, whatever this machine has.
wheel() {
    if [ ! -x "$tools/python/bin/maturin" ]; then
        python3 -m venv "$tools/python"
        "$tools/python/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.7,<2' 'ziglang>=0.13'
    fi
    rm -f "$out"/fletch-*.whl
    PATH="$tools/python/bin:$PATH" "$tools/python/bin/maturin" build --locked --release --zig \
        --compatibility manylinux2014 --manifest-path python/Cargo.toml --jobs "${JOBS:-2}" \
        --target "$machine-unknown-linux-gnu" --out "$out" --quiet
    ls "$out"/fletch-*.whl
}

pages
for what in "${@:-all}"; do
    case $what in
    all)
        # One by one: in a chain of `&&` a failure within a function would not stop it.
        tarball
        deb
        wheel
        ;;
    tarball | deb | wheel) "$what" ;;
    *) echo "usage: packaging/dist.sh [tarball|deb|wheel]" >&2 && exit 2 ;;
    esac
done
cd "$out"
find . -maxdepth 1 -type f \( -name '*.tar.gz' -o -name '*.deb' -o -name '*.whl' \) -printf '%P\n' |
    LC_ALL=C sort | xargs sha256sum > SHA256SUMS
