# Writes and indexes the test's dataset where the server can read it.
set -eu
here=$(dirname "$0")
to=${1:-/srv/fletch-test}
rm -rf "$to/data" "$to/tables"
sh "$here/dataset.sh" "$to/data"
fletch index "$to/data" --tables "$to/tables" --state-dir "$to/state" --quiet
