#!/usr/bin/env bash
# run.sh WORK: runs the parity study from nothing to its verdict, in the folder WORK. It skips steps whose
# result exists there. Results: benches/parity/results-3.jsonl.
# BIN: the folder of the built programs (target/release). PYTHON: an interpreter with torch, numpy < 2, Pillow
# and pyarrow (target/test-servers/torch/bin/python, made by tests/install.sh; `pip install 'pyarrow<18'`).
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "${BIN:-target/release}" && pwd)
python=${PYTHON:-$here/../../target/test-servers/torch/bin/python}
version='1:1.16.9-1'
if [ ! -d "$work/data" ]; then
    mkdir -p "$work/package"
    (cd "$work/package" && apt-get download -qq "wesnoth-1.16-data=$version" && dpkg-deb -x ./*.deb all)
    images=$work/package/all/usr/share/games/wesnoth/1.16/data/core/images
    "$python" "$here/prepare.py" "$images" "$work/large.part" 252 mirrored
    mv "$work/large.part" "$work/large"
    "$python" "$here/prepare.py" "$images" "$work/data.part" 84 mirrored
    mv "$work/data.part" "$work/data"
fi
if [ ! -d "$work/orders" ]; then
    rm -rf "$work/orders.part"
    mkdir "$work/orders.part"
    "$bin/bench-epochs" --cell '3 equal staggered, packed' --arms fletch --data "$work/large/train" \
        --chunk-size 16MiB --warm 2 --epochs 38 --mb-per-s 180 \
        --orders "$work/orders.part" --json "$work/cell.json" | tee "$work/cell.md"
    mv "$work/orders.part" "$work/orders"
fi
for arm in fletch random sorted; do
    "$python" "$here/train.py" --data "$work/data" --orders "$work/orders" --arm "$arm" --seeds 201-236 \
        --results "$here/results-3.jsonl"
done
"$bin/fletch" pack --quiet "$work/large/train" --to "$work/pack" --state-dir "$work/state" \
    --chunk-size 16MiB > "$work/root"
"$python" "$here/quality.py" --orders "$work/orders" --pack "$work/pack" --data "$work/data" \
    --json "$here/quality-3.json" | tee "$work/quality.md"
"$python" "$here/judge.py" "$here/results-3.jsonl" --first 201 --runs 36 \
    --json "$here/verdict-3.json" | tee "$work/verdict.md"
