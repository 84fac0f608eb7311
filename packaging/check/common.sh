# What the scripts in an empty root share.

# Lists all files and links, less what the package manager and programs of Debian write for themselves.
listing() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /pkg -o -path /tmp -o -path /run \
        -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache/apt -o -path /var/log \
        -o -path /data -o -path /var/cache/ldconfig -o -path /usr/lib/python3 \
        -o -path /usr/lib/python3.11 \) -prune -o \( -type f -o -type l -o -type d \) -print | LC_ALL=C sort
}

# Fails if the listing differs from the one in /tmp/before, and says what was left.
nothing_left() {
    listing > /tmp/after
    # Backups of the account files, which every package with a user leaves.
    if ! diff <(grep -v '^/etc/[a-z]*-$' /tmp/before) <(grep -v '^/etc/[a-z]*-$' /tmp/after); then
        echo "FAILED: $1 left these files" >&2
        exit 1
    fi
    echo "ok: $1 was removed without leftovers"
}

# Makes a dataset of 3 classes in /data/photos.
make_data() {
    for class in cat dog owl; do
        mkdir -p "/data/photos/$class"
        for i in $(seq 40); do
            head -c $((1000 + 37 * i)) /dev/urandom > "/data/photos/$class/$i.bin"
        done
    done
    chmod -R a+rX /data
}

# Waits until a command works: seconds, command.
wait_for() {
    local left=$(($1 * 10))
    shift
    until "$@" > /tmp/wait.log 2>&1; do
        left=$((left - 1))
        if [ "$left" = 0 ]; then
            cat /tmp/wait.log >&2
            echo "FAILED: $*" >&2
            exit 1
        fi
        sleep 0.1
    done
}
