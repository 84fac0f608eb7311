# The wheel on the oldest Python that it supports. The programs need a newer glibc than this root has, so the
# server runs outside of it; /pkg/server has its address, /pkg/photos the files of the dataset.
. /pkg/common.sh
python3 -m venv /opt/old
listing > /tmp/before
/opt/old/bin/pip install --no-deps --no-index --quiet /pkg/fletch-*.whl
cat > /tmp/read.py << 'P'
import copy, pathlib, sys
import fletch

assert sys.version_info[:2] == (3, 9), sys.version
client = fletch.Client(pathlib.Path("/pkg/server").read_text().strip(), job="old")
version = client.resolve("photos")
root = pathlib.Path("/pkg/photos")
paths = [str(p.relative_to(root)) for p in root.rglob("*.bin")]
views = version.read_many(paths)
assert len(views) == 20 and all(v == (root / p).read_bytes() for p, v in zip(paths, views))
view = version.read(paths[0])
assert view.readonly and view.contiguous
owner = view.obj
del view, views
assert bytes(memoryview(owner)) == (root / paths[0]).read_bytes()
for make in (type(owner), lambda: copy.copy(owner)):
    try:
        make()
        raise SystemExit("an object without bytes was made")
    except TypeError:
        pass
try:
    version.read("absent")
    raise SystemExit("an absent file was read")
except fletch.NotFound as error:
    error.add_note("a note")
    assert error.__notes__ == ["a note"]
    print("python", sys.version.split()[0], "read", len(paths), "files; error in words:", error)
P
/opt/old/bin/python /tmp/read.py
/opt/old/bin/pip uninstall --yes --quiet fletch
nothing_left "the wheel for Python 3.9"
