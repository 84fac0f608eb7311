# The Debian package in an empty root. There is no systemd, so the script starts what the unit would start.
. /pkg/common.sh
make_data
listing > /tmp/before
dpkg -i /pkg/fletch_*.deb
getent passwd fletch
fletch --version
for page in man1/fletch.1 man1/fletch-mount.1 man1/fletch-index.1 man8/fletch-server.8 man8/mount.fletch.8; do
    zcat "/usr/share/man/$page.gz" | grep -q '^\.TH' || { echo "FAILED: no page $page" >&2; exit 1; }
done
bash -c '. /usr/share/bash-completion/completions/fletch && complete -p fletch'

# RuntimeDirectory, StateDirectory and CacheDirectory of the unit.
install -d -o fletch -g fletch /run/fletch
install -d -o fletch -g fletch -m 700 /var/lib/fletch /var/cache/fletch
start=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/fletch-server.service)
# shellcheck disable=SC2086 # the words of the unit
setpriv --reuid fletch --regid fletch --init-groups $start 2> /tmp/server.log &
server=$!
at=unix:/run/fletch/server.sock
wait_for 20 fletch status --server "$at"
export FLETCH_SERVER=$at
fletch index /data/photos
fletch register photos /data/photos
unset FLETCH_SERVER
echo 'photos /srv/photos fletch allow_other,_netdev,nofail 0 0' >> /etc/fstab
mkdir /srv/photos
mount /srv/photos
diff -r /data/photos /srv/photos
if mount -t fletch photos /srv/photos -o sever=x 2> /tmp/wrong; then exit 1; fi
grep -q 'unknown mount option "sever"' /tmp/wrong
# The package is upgraded under readers. systemd would restart the server then.
dpkg-deb -R /pkg/fletch_*.deb /tmp/newer
sed -i 's/^Version: .*/&+1/' /tmp/newer/DEBIAN/control
dpkg-deb -b /tmp/newer /tmp/newer.deb > /tmp/built
python3 /pkg/readers.py /data/photos /srv/photos /tmp/stop > /tmp/readers &
readers=$!
sleep 1
keeper=$(grep -laz '^/srv/photos$' /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | head -1)
worker=$(cat "/proc/$keeper/task/$keeper/children")
dpkg -i /tmp/newer.deb
dpkg -s fletch | grep '^Version: .*+1$'
readlink "/proc/${worker% }/exe" | grep -q deleted
kill -9 "${worker% }"
sleep 1
worker=$(cat "/proc/$keeper/task/$keeper/children")
test "$(readlink "/proc/${worker% }/exe")" = /usr/bin/fletch-mount
kill "$server"
wait "$server"
# shellcheck disable=SC2086 # the words of the unit
setpriv --reuid fletch --regid fletch --init-groups $start 2>> /tmp/server.log &
server=$!
sleep 2
touch /tmp/stop
wait "$readers" || { cat /tmp/readers >&2; exit 1; }
echo "ok: the package was upgraded under 16 readers: $(cat /tmp/readers)"
umount /srv/photos
echo "ok: a mount from fstab shows $(find /data/photos -type f | wc -l) files"
kill "$server"
wait "$server"
rmdir /srv/photos
sed -i '/fletch/d' /etc/fstab

dpkg -r fletch
test -e /etc/fletch/server.toml
test ! -e /usr/bin/fletch
dpkg -P fletch
if getent passwd fletch; then exit 1; fi
nothing_left "the Debian package"
