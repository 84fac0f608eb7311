"""The client: its reads, its errors, and its behaviour with other threads and signals."""

from __future__ import annotations

import http.server
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fletch
from conftest import Server, until


def test_a_server_says_what_it_is_and_has(client: fletch.Client, files: Path) -> None:
    info = client.info()
    assert info["name"] == "fletch-server" and 1 in info["formats"]["api"]
    assert "files" in [d["name"] for d in client.datasets()]
    assert client.stats()["requests"] >= 2 and client.stats()["errors"] == 0


def test_the_second_server_of_a_list_is_enough(server: Server, files: Path) -> None:
    nobody = "http://127.0.0.1:1"
    for servers in ([nobody, server.url], f"{nobody},{server.url}"):
        client = fletch.Client(servers)
        assert client.server == f"{nobody},{server.url}"
        assert client.resolve("files").read("a/000.bin") == (files / "a/000.bin").read_bytes()
        assert pickle.loads(pickle.dumps(client)).info()["name"] == "fletch-server"
    with pytest.raises(fletch.Unavailable, match="1 other server"):
        fletch.Client([nobody, "http://127.0.0.1:2"]).info()
    for wrong in ([], ["unix:/run/x", server.url], ["nonsense"]):
        with pytest.raises(fletch.Invalid):
            fletch.Client(wrong)


def test_a_client_without_an_address_asks_the_server_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("FLETCH_SERVER", f"unix:{server.socket}")
    client = fletch.Client(job="by-environment")
    assert client.server == f"unix:{server.socket}" and client.resolve("files").dataset == "files"
    # A token that is given counts, and not the one of the environment.
    monkeypatch.setenv("FLETCH_TOKEN_FILE", str(tmp_path / "absent"))
    assert fletch.Client(token="given").server == client.server
    with pytest.raises(fletch.FletchError):
        fletch.Client().datasets()
    monkeypatch.delenv("FLETCH_TOKEN_FILE")
    # The user's own server, as `fletch mount` starts it.
    monkeypatch.delenv("FLETCH_SERVER")
    with pytest.raises(fletch.Invalid, match="FLETCH_SERVER"):
        fletch.Client()
    (tmp_path / "fletch").mkdir(mode=0o700)
    (tmp_path / "fletch" / "server.sock").symlink_to(server.socket)
    assert fletch.Client().server == f"unix:{tmp_path}/fletch/server.sock"


def test_a_version_is_listed(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    assert (version.dataset, version.tag) == ("files", "latest")
    assert client.resolve(f"files@{version.root}") == version
    entries = version.entries()
    assert len(version) == len(entries) == 606
    assert [e.path for e in entries] == sorted((e.path for e in entries), key=str.encode)
    assert [e.ordinal for e in entries] == list(range(606))
    assert version.entries(10, 13) == entries[10:13] and version.entries(606) == []
    assert sum(e.size for e in entries if e.kind == "file") == version.nbytes
    assert version.entry("a/000.bin") == version.entry(version.entry("a/000.bin").ordinal)
    link = version.entry("link")
    assert (link.kind, link.target, link.hash) == ("symlink", "a/000.bin", None)
    samples = version.samples()
    assert {s.key for s in samples} == {e.path for e in entries if e.kind == "file"}
    classes, labels = version.labels()
    assert classes == ["a", "b", "c"] and len(labels) == len(samples)
    for sample, label in zip(samples, labels):
        assert label == ("abc".find(sample.key[0]) if "/" in sample.key else -1), sample


def test_a_file_is_its_bytes(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    for path in ["empty", "a/000.bin", "middle.bin", "large.bin", "odd é #1?.bin"]:
        view = version.read(path)
        assert view == (files / path).read_bytes(), path
        assert view.readonly and view.format == "B" and view.ndim == 1 and view.contiguous
        # No copy: the view is of the received bytes themselves, and keeps them alive.
        assert type(view.obj).__name__ == "Buffer"
    with pytest.raises(TypeError):
        view[0] = 1


def test_many_files_come_in_few_requests(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    paths = [e.path for e in version.entries() if e.kind == "file" and e.path != "large.bin"]
    version.read(0)
    before = client.stats()["requests"]
    views = version.read_many(paths)
    # Over the unix socket, one ask for what is at hand, and at most as many requests for the rest.
    assert client.stats()["requests"] - before in ({3} if "http" in client.server else {1, 2, 3, 4})
    assert all(v == (files / p).read_bytes() for p, v in zip(paths, views))
    mixed = [5, "b/001.bin", 5, "large.bin", "empty"]
    by_path = version.entries()[5].path
    want = [(files / p).read_bytes() for p in [by_path, "b/001.bin", by_path, "large.bin", "empty"]]
    assert version.read_many(mixed) == want
    assert version.read_many([]) == []


def test_members_of_shards_are_read_by_their_names(client: fletch.Client, shards: Path) -> None:
    version = client.resolve("shards")
    assert bytes(version.read("0.tar/0-3.cls")) == b"3"
    samples = version.samples()
    assert [s.key for s in samples] == [f"{s}-{i}" for s in range(2) for i in range(4)]
    for sample in samples:
        paths = [version.entry(o).path for o in sample.ordinals]
        assert paths == [f"{sample.key[0]}.tar/{sample.key}.{ext}" for ext in ("cls", "jpg")]
        assert not sample.single


@pytest.mark.parametrize("item", [606, 10**12, "nothing", "a", "void", "link", "../x", ""])
def test_what_is_no_file_is_refused(client: fletch.Client, files: Path, item: int | str) -> None:
    version = client.resolve("files")
    kind = fletch.Invalid if item in ("void", "link") else fletch.NotFound
    if item == "void":
        item = "void/"
    with pytest.raises(kind):
        version.read(item)
    with pytest.raises(kind):
        version.read_many([0, item])
    for bad in (-1, 1.5, None):
        with pytest.raises((TypeError, OverflowError)):
            version.read(bad)  # type: ignore[arg-type]


def test_errors_say_who_can_act(client: fletch.Client, files: Path) -> None:
    with pytest.raises(fletch.NotFound) as caught:
        client.resolve("absent")
    error = caught.value
    assert isinstance(error, (fletch.FletchError, LookupError))
    assert (error.code, error.retryable) == ("not_found", False) and error.hint
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code, again.hint) == (str(error), error.code, error.hint)
    with pytest.raises(fletch.NotFound):
        client.resolve("files@v99")
    with pytest.raises(fletch.Invalid):
        client.resolve("files@")


def test_settings_are_checked_at_once(tmp_path: Path) -> None:
    for bad in ("", "127.0.0.1:7380", "ftp://x", "http://u:p@h", "unix:"):
        with pytest.raises(fletch.Invalid):
            fletch.Client(bad)
    for seconds in (0, -1, float("nan"), float("inf"), 1e6):
        with pytest.raises(fletch.Invalid):
            fletch.Client("http://127.0.0.1:1", timeout=seconds)
    with pytest.raises(fletch.Invalid):
        fletch.Client("http://127.0.0.1:1", job="no such/../job name")
    with pytest.raises(fletch.Invalid):
        fletch.Client("http://127.0.0.1:1", token="x", token_file=tmp_path / "t")
    with pytest.raises(fletch.Invalid):
        fletch.Client("http://127.0.0.1:1", token_file=tmp_path / "absent")
    assert "secret" not in repr(fletch.Client("http://127.0.0.1:1", token="secret"))


@pytest.fixture
def silent() -> str:
    """A server that accepts and never answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                kept.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "unix:/no/such/socket"])
def test_a_server_that_does_not_run_is_said_at_once(address: str) -> None:
    begun = time.monotonic()
    with pytest.raises(fletch.Unavailable) as caught:
        fletch.Client(address).resolve("photos")
    assert time.monotonic() - begun < 5, "it waited for its timeout of 30 s"
    said = str(caught.value)
    assert address in said and said.count("check that fletch-server runs there") == 1


def test_what_is_absent_is_named_in_words(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    server.publish("named", tmp_path)
    client = fletch.Client(server.url)
    for name, words in (
        ("nobody", "no dataset nobody is registered here"),
        ("named@v9", "dataset named has no tag v9"),
    ):
        with pytest.raises(fletch.NotFound) as caught:
            client.resolve(name)
        said = str(caught.value)
        assert words in said and "`fletch " in said, said
        assert not any(verb in said for verb in ("GET ", "POST ", "PUT ", "DELETE ")), said


def test_a_silent_server_costs_the_timeout_and_no_thread(silent: str) -> None:
    client = fletch.Client(silent, timeout=2)
    ticks, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.01)

    counter = threading.Thread(target=count)
    counter.start()
    begun = time.monotonic()
    try:
        with pytest.raises(fletch.Unavailable) as caught:
            client.info()
    finally:
        done.set()
        counter.join()
    assert caught.value.retryable
    assert 1 < time.monotonic() - begun < 8
    # Another thread ran all the while: a call that kept the GIL would have let it tick once or twice.
    assert ticks[0] > 20


def test_ctrl_c_ends_a_call(silent: str) -> None:
    code = (
        "import fletch, sys\n"
        f"client = fletch.Client({silent!r}, timeout=300)\n"
        "try:\n    print('calling', flush=True)\n    client.info()\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True); sys.exit(7)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "calling\n"
    # The interrupt may come before the call begins: then Python raises it there.
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert (out, child.returncode) == ("interrupted\n", 7)


class Liar(threading.Thread):
    """Forwards to a server, and changes a marked word in the first `lies` responses."""

    def __init__(self, to: str, word: bytes, lies: int, instead: bytes | None = None) -> None:
        super().__init__(daemon=True)
        self.instead = bytes(len(word)) if instead is None else instead
        host, port = to.removeprefix("http://").split(":")
        self.to, self.word, self.lies = (host, int(port)), word, lies
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self.to)
            threading.Thread(target=self.pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self.pump, args=(far, near, True), daemon=True).start()

    def pump(self, src: socket.socket, dst: socket.socket, back: bool) -> None:
        try:
            while data := src.recv(1 << 20):
                if back and self.lies and self.word in data:
                    self.lies -= 1
                    data = data.replace(self.word, self.instead)
                dst.sendall(data)
            dst.shutdown(socket.SHUT_WR)
        except OSError:
            dst.close()


@pytest.mark.parametrize("lies", [1, 1000])
def test_wrong_bytes_never_arrive(server: Server, tmp_path: Path, lies: int) -> None:
    (tmp_path / "marked").write_bytes(b"what was MARKED-BY-THE-TEST arrives")
    (tmp_path / "other").write_bytes(b"whole")
    server.publish(f"lied{lies}", tmp_path)
    liar = Liar(server.url, b"MARKED-BY-THE-TEST", lies)
    version = fletch.Client(liar.url).resolve(f"lied{lies}")
    if lies == 1:
        assert bytes(version.read("marked")) == (tmp_path / "marked").read_bytes()
        assert liar.lies == 0
    else:
        with pytest.raises(fletch.Corrupt, match="marked"):
            version.read_many(["other", "marked"])
    liar.listener.close()


def test_what_was_not_answered_is_no_empty_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"twelve bytes")
    server.publish("unanswered", tmp_path)
    # The file's frame is of a kind that is skipped here; then the answer ends, and says that all of it came.
    frame = struct.pack("<BBHIQ", 1, 1, 200, 0, 12)
    liar = Liar(server.url, frame, 1, bytes([7]) + frame[1:])
    version = fletch.Client(liar.url).resolve("unanswered")
    with pytest.raises(fletch.Corrupt, match="the batch has 0 items"):
        version.read("x")
    assert liar.lies == 0
    liar.listener.close()


class Proxy(http.server.BaseHTTPRequestHandler):
    """A proxy in front of a server that is starting."""

    def do_GET(self) -> None:
        self.send_error(502)

    def log_message(self, *_: object) -> None: ...


def test_a_proxy_whose_server_is_away_is_asked_again() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        client = fletch.Client(f"http://127.0.0.1:{proxy.server_port}", timeout=3)
        with pytest.raises(fletch.Unavailable) as error:
            client.info()
        assert error.value.retryable and client.stats()["retries"] > 0
        proxy.shutdown()


def test_a_server_that_comes_back_is_used_again(own_server: Server, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 1000)
    own_server.publish("x", tmp_path)
    version = fletch.Client(f"unix:{own_server.socket}", timeout=60).resolve("x")
    assert len(version.read("x")) == 1000
    own_server.kill()
    with pytest.raises(fletch.Unavailable):
        fletch.Client(f"unix:{own_server.socket}", timeout=0.5).info()
    got: list[memoryview] = []
    reader = threading.Thread(target=lambda: got.append(version.read("x")))
    reader.start()
    own_server.start()
    reader.join(90)
    assert got and bytes(got[0]) == b"x" * 1000


def test_clients_and_versions_pickle_by_their_settings(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    version.read(0)
    again = pickle.loads(pickle.dumps(version))
    assert again == version and hash(again) == hash(version)
    assert (again.client.server, again.client.job) == (client.server, "pytest")
    assert again.read("a/000.bin") == version.read("a/000.bin")
    assert pickle.loads(pickle.dumps(client)).timeout == 30.0
    listed = [version.entries(), version.samples()]
    assert pickle.loads(pickle.dumps(listed)) == listed


def test_threads_share_a_client(client: fletch.Client, files: Path) -> None:
    version = client.resolve("files")
    wrong: list[object] = []

    def read(first: int) -> None:
        for i in range(first, 600, 8):
            path = f"{'abc'[i % 3]}/{i:03}.bin"
            if version.read(path) != (files / path).read_bytes():
                wrong.append(path)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_forked_child_has_connections_of_its_own(client: fletch.Client, files: Path) -> None:
    from conftest import sockets_of

    version = client.resolve("files")
    version.read(0)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            inherited = sockets_of()
            same = version.read("b/001.bin") == (files / "b/001.bin").read_bytes()
            os.write(w, repr((same, inherited, sockets_of() - inherited)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(w)
    with os.fdopen(r, "rb") as answer:
        said = answer.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    same, inherited, own = eval(said)
    assert same and own
    assert version.read("b/001.bin") == (files / "b/001.bin").read_bytes()
    assert not (own & sockets_of())
    # Nothing that leads to the server was inherited.
    peers = Path("/proc/net/tcp").read_text() + Path("/proc/net/unix").read_text()
    port = f":{int(client.server.rsplit(':', 1)[-1]):04X}" if client.server.startswith("http") else "s.sock"
    to_server = [line for line in peers.splitlines() if port in line]
    leaked = [s for s in inherited if any(s[8:-1] in line.split() for line in to_server)]
    assert leaked == []


def test_a_fork_in_the_middle_of_a_call_hangs_nobody(files: Path, server: Server) -> None:
    version = fletch.Client(server.url).resolve("files")
    want = (files / "middle.bin").read_bytes()
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if version.read("middle.bin") != want:
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if version.read("middle.bin") == want else 2
            finally:
                os._exit(code)
        ended: list[int] = []

        def has_ended(pid: int = pid, ended: list[int] = ended) -> bool:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended.append(status)
            return bool(done)

        try:
            until("the child ends", has_ended)
        except AssertionError:
            os.kill(pid, signal.SIGKILL)
            raise
        assert ended == [0]
    stop.set()
    reader.join()
    assert wrong == []


def test_files_come_through_memory_that_the_server_of_the_node_shares(server: Server, files: Path) -> None:
    listed = fletch.Client(server.url).resolve("files")
    paths = [e.path for e in listed.entries() if e.path.startswith("a/") and e.size > 0][:40]
    by_tcp = listed.read_many(paths)
    assert len(by_tcp) == 40
    for verify in ("client", "server"):
        client = fletch.Client(f"unix:{server.socket}", verify=verify)
        again = pickle.loads(pickle.dumps(client))
        assert client.verify == again.verify == verify
        version = client.resolve("files")
        before = client.stats()["bytes"]
        kept = [version.read_many(paths) for _ in range(3)]
        assert all(views == by_tcp for views in kept)
        assert all(view.readonly for view in kept[0])
        assert client.stats()["bytes"] - before >= 3 * sum(map(len, by_tcp))
    with pytest.raises(fletch.Invalid, match="verify"):
        fletch.Client(server.url, verify="nobody")
