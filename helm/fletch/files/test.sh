# Registers the test's dataset, reads it through the mount as an ordinary user, and compares it with the
# original. FLETCH_SERVER, FLETCH_TOKEN_FILE, DATASET, MOUNT and WAIT_SECONDS are set.
set -eu
here=$(dirname "$0")
scratch=$(mktemp -d)
registered=
finish() {
    code=$?
    [ -z "$registered" ] || fletch unregister "$DATASET" --quiet >/dev/null || code=1
    rm -rf "$scratch"
    exit "$code"
}
trap finish EXIT
fail() {
    echo "FAILED: $1" >&2
    exit 1
}

[ "$(id -u)" != 0 ] || fail "the test must run as an ordinary user, and runs as root"
sh "$here/dataset.sh" "$scratch/original"
set -- file:///srv/fletch-test/data --tables file:///srv/fletch-test/tables
fletch register "$DATASET" "$@" --replace >/dev/null ||
    fail "the server did not register the dataset"
registered=yes

waited=0
until [ -d "$MOUNT/$DATASET/train" ]; do
    [ "$waited" -lt "$WAIT_SECONDS" ] ||
        fail "$DATASET is not in $MOUNT after $waited s: look at the log of the mount pod of this node"
    sleep 1
    waited=$((waited + 1))
done
diff -r "$scratch/original" "$MOUNT/$DATASET/" ||
    fail "the files of the mount are not those of the original"
if touch "$MOUNT/$DATASET/train/new" 2>/dev/null; then
    fail "the mount accepted a write"
fi
echo "passed: $(find "$MOUNT/$DATASET/" -type f | wc -l) files are equal, $waited s after registration"
