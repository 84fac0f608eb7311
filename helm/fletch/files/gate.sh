# Opens the volume of a domain to new pods while its datasets are mounted, and closes it otherwise. The
# readiness probe runs this. Arguments: the root of the mounts, the domain, and the file that the mount writes
# when it is ready.
set -eu
link=$1/.ready/$2
if [ ! -e "$3" ]; then
    rm -f "$link"
    echo "the datasets of the domain $2 are not mounted yet" >&2
    exit 1
fi
[ -L "$link" ] || ln -s "../$2" "$link"
