# Prepares a node for mounts. Arguments: the root of the mounts, and the names of the domains.
set -eu
root=$1
shift
if ! grep -qw fuse /proc/filesystems; then
    echo "this node's kernel has no FUSE: load the kernel module fuse on the node" >&2
    exit 1
fi
umask 022
mkdir -p "$root/.ready"
for domain in "$@"; do
    directory=$root/$domain/datasets/$domain
    rm -f "$root/.ready/$domain"
    # A mount that a killed pod left behind is the new pod's to replace.
    if [ -d "$root/$domain" ] && grep -q " $directory[ /]" /proc/self/mountinfo; then
        continue
    fi
    mkdir -p "$directory"
    chmod 0700 "$directory"
    echo "Fletch mounts the datasets of the domain $domain here. Nothing is mounted now." \
        >"$directory/NOT-MOUNTED"
    chmod 0000 "$directory"
done
