#!/usr/bin/env bash
# The tests of Ceph's s3-tests that read, against the S3 door, by a double that keeps what they write.
# Usage: ceph.sh S3_TESTS ENVIRONMENTS BIN
# S3_TESTS: a checkout of github.com/ceph/s3-tests. ENVIRONMENTS: the folder for a virtual environment.
# Fails if other tests fail than those that ceph-fails.txt names.
set -euo pipefail
tests=$(cd "$1" && pwd) python="$2/ceph/bin/python" bin=$3
here=$(cd "$(dirname "$0")" && pwd)
[ -x "$python" ] || python3 -m venv "$2/ceph"
"$python" -m pip install --quiet --disable-pip-version-check -r "$tests/requirements.txt" 'blake3==1.*'

work=$(mktemp -d)
pids=()
finish() {
    for pid in "${pids[@]}"; do
        kill "$pid" 2> /dev/null || true
        wait "$pid" 2> /dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
export PATH="$bin:$PATH" FLETCH_STATE_DIR="$work/state" FLETCH_CACHE_DIR="$work/cache"
export PYTHONDONTWRITEBYTECODE=1
door=127.0.0.1:$(free_port) port=$(free_port)
fletch-server --listen 127.0.0.1:0 --socket none --s3-listen "$door" --cache-size 64MiB --cache-free-floor 0 \
    --ready-file "$work/url" 2> "$work/log" & pids+=($!)
for _ in $(seq 100); do [ -s "$work/url" ] && break; sleep 0.1; done
"$python" "$here/double.py" "$port" "$door" "$(cat "$work/url")" "$work" 2> "$work/double.log" & pids+=($!)
for _ in $(seq 100); do (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null && break; sleep 0.1; done
sed -e "s/^port = .*/port = $port/" -e 's/^host = .*/host = 127.0.0.1/' "$tests/s3tests.conf.SAMPLE" \
    > "$work/conf"

reads='bucket_list|bucket_listv2|bucketv2?_notexist|basic_key_count|object_read|object_head'
reads+='|object_raw_get|object_raw_response|get_object_if|bucket_head|ranged_|non_multipart_get_part'
reads+='|object_anon|buckets_list|list_buckets|bucket_get_location|object_requestid'
reads+='|buckets_create_then_list'
file=s3tests/functional/test_s3.py
cd "$tests"
mapfile -t names < <(sed -nE 's/^def (test_[a-z0-9_]+)\(.*/\1/p' "$file" | grep -E "^test_($reads)" |
    grep -vE 'acl|torrent|tagging|sse|encryp|policy|versioning|logging|attributes|tenant')
S3TEST_CONF="$work/conf" "$python" -m pytest -q -p no:cacheprovider --tb=no "${names[@]/#/$file::}" \
    > "$work/out" || true
tail -1 "$work/out"
sed -nE 's/^(FAILED|ERROR) .*::(test_[a-z0-9_]+).*/\2/p' "$work/out" | sort > "$work/failed"
sed -nE 's/^(test_[a-z0-9_]+):.*/\1/p' "$here/ceph-fails.txt" | sort > "$work/named"
diff "$work/named" "$work/failed" && echo "the tests that fail are those that ceph-fails.txt names"
