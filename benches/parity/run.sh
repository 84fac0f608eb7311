#!/usr/bin/env bash
# run.sh WORK: the parity study from nothing to its verdict, below WORK; what is there already is not made again.
# BIN: the built programs (target/release). PYTHON: an interpreter with torch, numpy < 2, Pillow and pyarrow
# (target/test-servers/torch/bin/python, made by tests/install.sh, and `pip install 'pyarrow<18'` into it). Results: benches/parity/results.jsonl.
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "${BIN:-target/release}" && pwd)
python=${PYTHON:-$here/../../target/test-servers/torch/bin/python}
version='1:1.16.9-1'
if [ ! -d "$work/data" ]; then
    mkdir -p "$work/package"
    (cd "$work/package" && apt-get download -qq "wesnoth-1.16-data=$version" && dpkg-deb -x ./*.deb all)
    "$python" "$here/prepare.py" "$work/package/all/usr/share/games/wesnoth/1.16/data/core/images" "$work/data.part"
    mv "$work/data.part" "$work/data"
fi
if [ ! -d "$work/orders" ]; then
    rm -rf "$work/orders.part"
    mkdir "$work/orders.part"
    "$bin/bench-epochs" --cell '3 equal staggered, packed' --data "$work/data/train" --chunk-size 2MiB \
        --cache-size "$(cat "$here/cache-size")" --warm 2 --epochs 60 --mb-per-s 150 \
        --orders "$work/orders.part" --json "$work/cell.json" | tee "$work/cell.md"
    mv "$work/orders.part" "$work/orders"
fi
for arm in fletch random sorted; do
    "$python" "$here/train.py" --data "$work/data" --orders "$work/orders" --arm "$arm" --seeds 1-23 \
        --results "$here/results.jsonl"
done
"$bin/fletch" pack --quiet "$work/data/train" --to "$work/pack" --state-dir "$work/state" --chunk-size 2MiB > "$work/root"
"$python" "$here/quality.py" --orders "$work/orders" --pack "$work/pack" --data "$work/data" \
    --json "$here/quality.json" | tee "$here/quality.md"
"$python" "$here/judge.py" "$here/results.jsonl" --json "$here/verdict.json" | tee "$here/verdict.md"
