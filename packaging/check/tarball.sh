# The tarball in an empty root, as a user without privileges installs it: below ~/.local.
. /pkg/common.sh
make_data
adduser --quiet --disabled-password --gecos '' ann
chmod 666 /dev/fuse
install -d -o ann /home/ann/photos
listing > /tmp/before
su ann -c 'bash -euo pipefail' << 'U'
cd ~
mkdir -p ~/.local
tar -C ~/.local --strip-components=1 -xzf /pkg/fletch-*-linux.tar.gz
PATH=$HOME/.local/bin:$PATH
fletch --version
fletch mount /data/photos ~/photos
diff -r /data/photos ~/photos
fletch status
fletch down
if mountpoint -q ~/photos; then exit 1; fi
echo "ok: fletch mount shows $(find /data/photos -type f | wc -l) files"
(cd ~/.local && xargs -d '\n' rm -f < share/doc/fletch/files)
rm -rf ~/.local/state/fletch ~/.cache/fletch
find ~/.local ~/.cache -depth -type d -empty -delete
U
nothing_left "the tarball"
