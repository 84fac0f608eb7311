#!/usr/bin/env bash
# The demo: DATA (default /usr/share) behind a read-only mount, read by unmodified programs.
# BIN is the folder of the three built programs. Everything it makes is under one scratch
# folder and is gone when it ends, also after Ctrl-C.
set -euo pipefail

DATA=${DATA:-/usr/share}
BIN=${BIN:-target/release}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '%s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[ -d "$DATA" ] || die "DATA=$DATA is not a folder"
DATA=$(cd "$DATA" && pwd -P)
for p in fletch fletch-server fletch-mount; do [ -x "$BIN/$p" ] || die "$BIN/$p is missing: run \`make build\`"; done
[ -e /dev/fuse ] || die "no /dev/fuse: FUSE is not available here (in a container: --device /dev/fuse --cap-add SYS_ADMIN)"
if [ "$(id -u)" != 0 ] && ! command -v fusermount3 >/dev/null; then die "not root, and no fusermount3: install the package fuse3"; fi
command -v python3 >/dev/null || die "python3 is needed for the random reader"

scratch=$(mktemp -d "${TMPDIR:-/tmp}/fletch-demo.XXXXXX")
mnt=$scratch/mnt
server=
mount=
# shellcheck disable=SC2329  # called by the trap
finish() {
    code=$?
    trap - EXIT INT TERM
    # In the order of use: the mount, then what it reads from.
    for pid in $mount $server; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in $mount $server; do
        for _ in $(seq 120); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if grep -qs " $mnt fuse" /proc/self/mounts; then umount -l "$mnt" 2>/dev/null || fusermount3 -uz "$mnt" || true; fi
    rm -rf --one-file-system "$scratch"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$mnt" "$scratch/tables"

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f s", b - a }'; }
metric() { curl -sS --max-time 10 "$url/metrics" | awk -v m="$1" '$1 ~ "^"m"($|{)" { s += $NF } END { printf "%.0f", s }'; }
human() { numfmt --to=iec-i --suffix=B "$1"; }

say "1. index  $DATA (every byte is read once; nothing is written there)"
t=$(now)
root=$("$BIN/fletch" index "$DATA" --to "$scratch/tables" --state-dir "$scratch/state" --skip-failed) || {
    code=$?
    [ "$code" = 3 ] || exit "$code"
    say "   some files could not be read; they are listed above and left out"
}
say "   root $root in $(since "$t")"

say "2. serve"
"$BIN/fletch-server" --listen 127.0.0.1:0 --socket "$scratch/server.sock" --cache-dir "$scratch/cache" \
    --state-dir "$scratch/server" --ready-file "$scratch/ready" 2>"$scratch/server.log" &
server=$!
for _ in $(seq 200); do
    [ -s "$scratch/ready" ] && break
    kill -0 "$server" 2>/dev/null || { cat "$scratch/server.log" >&2; die "the server ended"; }
    sleep 0.05
done
url=$(cat "$scratch/ready")
"$BIN/fletch" register demo "$DATA" --tables "$scratch/tables" --server "$url" >/dev/null
say "   $url"

say "3. mount"
"$BIN/fletch-mount" demo "$mnt" --server "$url" --job demo 2>"$scratch/mount.log" &
mount=$!
for _ in $(seq 200); do
    grep -qs " $mnt fuse" /proc/self/mounts && break
    kill -0 "$mount" 2>/dev/null || { cat "$scratch/mount.log" >&2; die "the mount ended"; }
    sleep 0.05
done
say "   demo at $mnt"

say "4. read it with programs that know nothing of Fletch"
before=$(metric fletch_chunk_fetched_bytes_total)
t=$(now)
entries=$(find "$mnt" | wc -l)
say "   find          $entries names in $(since "$t"), $(($(metric fletch_chunk_fetched_bytes_total) - before)) bytes of data read from the origin"
python3 "$here/reader.py" "$DATA" "$mnt" "$BIN/fletch" "$scratch/tables" "$scratch/epochs"
t=$(now)
tarred=$(tar -C "$mnt" -cf - . | wc -c)
say "   tar           $(human "$tarred") in $(since "$t")"

# shellcheck disable=SC1091
. "$scratch/epochs"
hits=$(curl -sS --max-time 10 "$url/metrics" | awk '/^fletch_bytes_total\{/ && /result="hit"/ { s += $NF } END { printf "%.0f", s }')
misses=$(curl -sS --max-time 10 "$url/metrics" | awk '/^fletch_bytes_total\{/ && /result="miss"/ { s += $NF } END { printf "%.0f", s }')
origin=$(metric fletch_chunk_fetched_bytes_total)
say ""
say "report"
say "  files           $files, $(human "$bytes"); each one equal to its original, in both epochs"
say "  first epoch     $first s, $first_rate files/s, $(human "$first_bps")/s (random order, cold)"
say "  second epoch    $second s, $second_rate files/s, $(human "$second_bps")/s (another random order, no request to the daemon for cached pages)"
say "  server sent     $(human $((hits + misses))): $(human "$hits") from cache, $(human "$misses") first fetched"
say "  origin read     $(human "$origin") = $(awk -v o="$origin" -v b="$bytes" 'BEGIN { printf "%.3f", b ? o / b : 0 }') x the dataset (equal files are read once)"
say "  root            $root"
say ""
say "next: README.md (your own server and mount), docs/SEMANTICS.md (what the mount promises), docs/ARCHITECTURE.md"
