# The wheel on the oldest Python that it supports. The programs need a newer glibc, so they are not here: the
# tables are read without a server, from a folder that the host indexed.
. /pkg/common.sh
python3 -m venv /opt/old
listing > /tmp/before
/opt/old/bin/pip install --no-deps --no-index --quiet /pkg/fletch-*.whl
cat > /tmp/read.py << 'P'
import copy, sys
import fletch

assert sys.version_info[:2] == (3, 9), sys.version
try:
    fletch.Client("http://127.0.0.1:9").resolve("photos")
    raise SystemExit("no server answered, and nothing was raised")
except fletch.FletchError as error:
    print("python", sys.version.split()[0], "error in words:", error)
P
/opt/old/bin/python /tmp/read.py
/opt/old/bin/pip uninstall --yes --quiet fletch
nothing_left "the wheel for Python 3.9"
