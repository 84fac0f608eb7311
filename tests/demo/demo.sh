#!/usr/bin/env bash
# The demo: mounts DATA (default /usr/share) read-only, and reads it with unmodified programs.
# BIN is the folder of the three built programs. The demo writes only to one scratch folder, and
# removes it at the end, also after Ctrl-C.
set -euo pipefail

DATA=${DATA:-/usr/share}
BIN=${BIN:-target/release}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '%s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[ -d "$DATA" ] || die "DATA=$DATA is not a folder"
DATA=$(cd "$DATA" && pwd -P)
for p in fletch fletch-server fletch-mount; do
    [ -x "$BIN/$p" ] || die "$BIN/$p is missing: run \`make build\`"
done
[ -e /dev/fuse ] || die "no /dev/fuse: FUSE is not available here \
(in a container: --device /dev/fuse --cap-add SYS_ADMIN)"
if [ "$(id -u)" != 0 ] && ! command -v fusermount3 >/dev/null; then
    die "not root, and no fusermount3: install the package fuse3"
fi
command -v python3 >/dev/null || die "python3 is needed for the random reader"

# The name is chosen before the folder is created, so that a signal at any moment leaves nothing behind.
scratch=$(mktemp -u "${TMPDIR:-/tmp}/fletch-demo.XXXXXXXXXX")
mnt=$scratch/mnt

# Bash does not run its traps reliably while it expands a substitution. So this shell only waits. Every
# step is a job in its own process group, which Ctrl-C does not reach, and `finish` ends the jobs in order.
set -m
# Steps write to the terminal from background process groups.
trap '' TTOU
# shellcheck disable=SC2329  # called by the traps
finish() {
    # Every trap ignores further signals first: bash runs no trap for a signal that comes while it exits.
    trap '' INT TERM HUP
    trap - EXIT
    set +m
    code=$1
    # In reverse order: the step, the mount, then the server.
    last_first=
    for pid in $(jobs -p); do last_first="$pid $last_first"; done
    for pid in $last_first; do
        kill -TERM -- "-$pid" 2>/dev/null || true
        for _ in $(seq 120); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -KILL -- "-$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if grep -qs " $mnt fuse" /proc/self/mounts; then
        umount -l "$mnt" 2>/dev/null || fusermount3 -uz "$mnt" || true
    fi
    rm -rf --one-file-system "$scratch" || [ "$code" != 0 ] || code=1
    exit "$code"
}
trap 'finish $?' EXIT
trap 'finish 129' HUP
trap 'finish 130' INT
trap 'finish 143' TERM
step() { "$@" </dev/null & wait $!; }

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f s", b - a }'; }
metrics() { curl -sS --max-time 10 "$url/metrics"; }
metric() { metrics | awk -v m="$1" '$1 ~ "^"m"($|{)" { s += $NF } END { printf "%.0f", s }'; }
bytes_total() {
    metrics | awk -v r="result=\"$1\"" '
        /^fletch_bytes_total\{/ && index($0, r) { s += $NF }
        END { printf "%.0f", s }'
}
human() { numfmt --to=iec-i --suffix=B "$1"; }

prepare() {
    mkdir -m 700 "$scratch"
    mkdir "$mnt" "$scratch/tables"
}

indexed() {
    say "1. index  $DATA (every byte is read once; nothing is written there)"
    t=$(now)
    "$BIN/fletch" index "$DATA" --to "$scratch/tables" --state-dir "$scratch/state" --skip-failed \
        >"$scratch/root" || {
        code=$?
        [ "$code" = 3 ] || exit "$code"
        say "   some files could not be read; they are listed above and are not in the version"
    }
    say "   root $(cat "$scratch/root") in $(since "$t")"
}

# ready NAME PID COMMAND...: waits until COMMAND succeeds, while the process runs.
ready() {
    name=$1 pid=$2
    shift 2
    for _ in $(seq 200); do
        "$@" && return
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.05
    done
    cat "$scratch/$name.log" >&2
    die "the $name ended, or was not ready within 10 s"
}

served() {
    ready server "$1" test -s "$scratch/ready"
    url=$(cat "$scratch/ready")
    "$BIN/fletch" register demo "$DATA" --tables "$scratch/tables" --server "$url" >/dev/null
    say "   $url"
}

mounted() {
    ready mount "$1" grep -qs " $mnt fuse" /proc/self/mounts
    say "   demo at $mnt"
}

read_it() {
    url=$(cat "$scratch/ready")
    before=$(metric fletch_chunk_fetched_bytes_total)
    t=$(now)
    entries=$(find "$mnt" | wc -l)
    found=$(since "$t")
    fetched=$(($(metric fletch_chunk_fetched_bytes_total) - before))
    say "   find          $entries names in $found, $fetched bytes of data read from the origin"
    python3 "$here/reader.py" "$DATA" "$mnt" "$BIN/fletch" "$scratch/tables" "$scratch/epochs"
    t=$(now)
    tarred=$(tar -C "$mnt" -cf - . | wc -c)
    say "   tar           $(human "$tarred") in $(since "$t")"

    # shellcheck disable=SC1091
    . "$scratch/epochs"
    hits=$(bytes_total hit)
    misses=$(bytes_total miss)
    origin=$(metric fletch_chunk_fetched_bytes_total)
    times=$(awk -v o="$origin" -v b="$bytes" 'BEGIN { printf "%.3f", b ? o / b : 0 }')
    say ""
    say "report"
    say "  files           $files, $(human "$bytes"); each one equal to its original, in both epochs"
    say "  first epoch     $first s, $first_rate files/s, $(human "$first_bps")/s (random order, cold)"
    say "  second epoch    $second s, $second_rate files/s, $(human "$second_bps")/s (another random order, \
no request to the daemon for cached pages)"
    say "  server sent     $(human $((hits + misses))): $(human "$hits") from cache, \
$(human "$misses") first fetched"
    say "  origin read     $(human "$origin") = $times x the dataset (equal files are read once)"
    say "  root            $(cat "$scratch/root")"
    say ""
    say "next: README.md (your own server and mount), docs/SEMANTICS.md (what the mount promises), \
docs/ARCHITECTURE.md"
}

step prepare
step indexed

say "2. serve"
"$BIN/fletch-server" --listen 127.0.0.1:0 --socket "$scratch/server.sock" --cache-dir "$scratch/cache" \
    --state-dir "$scratch/server" --ready-file "$scratch/ready" </dev/null 2>"$scratch/server.log" &
step served $!

say "3. mount"
"$BIN/fletch-mount" demo "$mnt" --server "$(cat "$scratch/ready")" --job demo </dev/null \
    2>"$scratch/mount.log" &
step mounted $!

say "4. read it with unmodified programs"
step read_it
