# The tarball in an empty root, below /usr/local.
. /pkg/common.sh
make_data
listing > /tmp/before
tar -C /usr/local --strip-components=1 -xzf /pkg/fletch-*-linux.tar.gz
fletch --version
mkdir -p /run/user/0
export XDG_RUNTIME_DIR=/run/user/0
fletch mount /data/photos /mnt
diff -r /data/photos /mnt
fletch status
fletch down
if mountpoint -q /mnt; then exit 1; fi
echo "ok: fletch mount shows $(find /data/photos -type f | wc -l) files"
(cd /usr/local && xargs -d '\n' rm -f < share/doc/fletch/files)
rm -rf /root/.local/state/fletch /root/.cache/fletch
find /usr/local /root -depth -type d -empty -newer /tmp/before -delete
nothing_left "the tarball"
