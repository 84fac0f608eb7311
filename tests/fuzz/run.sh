#!/usr/bin/env bash
# Runs the fuzz targets under libFuzzer, on the stable toolchain.
#
#   tests/fuzz/run.sh            every target for FUZZ_MINUTES (1); fails at the first input that breaks one
#   tests/fuzz/run.sh planted    the planted bug of every target is found within 60 s
#
# FUZZ_TARGETS="tar slab" picks targets. The corpus stays in the target directory's fuzz/corpus and grows
# with each run; an input that breaks a target is in fuzz/found.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-clean}
cargo=${CARGO:-cargo}
work=$(realpath -m "${CARGO_TARGET_DIR:-target}/fuzz")
seconds=$((${FUZZ_MINUTES:-1} * 60))
planted_seconds=60

command -v c++ > /dev/null || { echo "libFuzzer needs a C++ compiler: install g++" >&2; exit 1; }
host=$(rustc -vV | sed -n 's/^host: //p')

# What `cargo fuzz` passes, less the sanitizers, which need a nightly toolchain.
flags=-Cpasses=sancov-module
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
RUSTFLAGS="$flags" CARGO_TARGET_DIR="$work" \
    "$cargo" build --profile fuzz -p fletch-fuzz --features libfuzzer --bins --target "$host" -j"${JOBS:-2}"
program="$work/$host/fuzz/fletch-fuzz"
targets=${FUZZ_TARGETS:-$(sed -n 's/^ *Target { name: "\([a-z]*\)".*/\1/p' tests/fuzz/src/target.rs)}

# Runs one target: name, seconds, corpus. The report is in $log.
run() {
    local name=$1 limit=$2 corpus=$3
    log="$work/log/$name"
    mkdir -p "$work/log" "$work/found" "$corpus"
    # libFuzzer has a main function of its own. So nothing ignores SIGPIPE, as each Rust program does.
    (
        trap '' PIPE
        FLETCH_FUZZ_TARGET=$name FLETCH_FUZZ_SEEDS=$corpus "$program" "$corpus" \
            -max_total_time="$limit" -max_len=16384 -timeout=20 -rss_limit_mb=2048 -use_value_profile=1 \
            -artifact_prefix="$work/found/$name-" -print_final_stats=1
    ) > "$log" 2>&1
}

failed=0
for name in $targets; do
    began=$SECONDS
    if [ "$mode" = planted ]; then
        corpus=$(mktemp -d)
        if FLETCH_FUZZ_PLANT=1 run "$name" "$planted_seconds" "$corpus"; then
            echo "$name: the planted bug was NOT found in $planted_seconds s"
            failed=1
        elif grep -q "the planted bug" "$log"; then
            echo "$name: the planted bug was found in $((SECONDS - began)) s"
            rm -f "$work/found/$name-"*
        else
            echo "$name: another bug was found, see $log; the input is in $work/found"
            failed=1
        fi
        rm -rf "$corpus"
    elif run "$name" "$seconds" "$work/corpus/$name"; then
        inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        edges=$(grep -o ' cov: [0-9]*' "$log" | tail -1)
        echo "$name: clean after $((SECONDS - began)) s, $inputs inputs, edges$edges"
    else
        echo "$name: BROKEN, see $log; the input is in $work/found"
        grep -A2 -m1 'panicked\|ERROR: libFuzzer' "$log" || true
        failed=1
    fi
done
exit $failed
