#!/usr/bin/env python3
"""Reads and trains in containers without FUSE, root, capabilities and PyTorch, as docs/howto/without-fuse.md
says.

    accept_without_fuse.py BIN

BIN is a directory with the built programs and wheels/. The script needs root, podman, runc, catatonit and
mmdebstrap (Debian's packages of these names), and numpy and fsspec from PyPI.

The containers have Debian's Python, the wheel, numpy, fsspec and the programs of python/examples. They run as
an ordinary user with a read-only root and no capability; one folder is writable, for checkpoints. The reads
must give the bytes of the files. A training is killed twice after a checkpoint, and each time it continues
in a new container: the receipts of its epochs must agree.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

from containers import build, expect, free_port, logs, make_base, run, until, use_podman

REPO = pathlib.Path(__file__).resolve().parents[2]
PYTHON = "3.11"  # Debian 12's.
USER, FILES, KILLS = 10001, 6000, 2
# What a process of the container can do, as the kernel and its Python tell it.
CHECK = """
import importlib.util, json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def writable(path):
    try:
        open(os.path.join(path, "probe"), "w").close()
    except OSError:
        return False
    return True
print(json.dumps({
    "user": os.getuid(), "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "may gain privileges": status["NoNewPrivs"].strip() != "1", "FUSE": os.path.exists("/dev/fuse"),
    "torch": importlib.util.find_spec("torch") is not None,
    "writable": [path for path in ("/", "/tmp", "/var/tmp", "/opt", "/run", "/work") if writable(path)],
}))
"""
BARE = {"user": USER, "capabilities": 0, "may gain privileges": False, "FUSE": False, "torch": False,
        "writable": ["/work"]}


def make_image(stack, scratch, programs):
    """Makes the image of the user's program. Returns its name."""
    base = make_base(scratch, "python", "ca-certificates", "python3")
    image, context = f"localhost/fletch-without-fuse:accept-{os.getpid()}", scratch / "image"
    context.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
           "--target", context / "site", "--only-binary=:all:", f"--python-version={PYTHON}"]
    [wheel] = (programs / "wheels").glob("fletch-*.whl")
    run(*pip, wheel, "numpy", "fsspec")
    shutil.copytree(REPO / "python" / "examples", context / "examples")
    copies = [f"COPY {name} /opt/{name}" for name in ("site", "examples")]
    build(stack, context, image, f"FROM {base}", *copies, "ENV PYTHONPATH=/opt/site")
    print(*sorted(path.name for path in (context / "site").glob("*.dist-info")), flush=True)
    return image


def serve(stack, scratch, programs):
    """Serves a tree of 6,000 files in three folders to holders of a token. Returns the URL, the token's file
    and the files' bytes in the order of their paths."""
    tree, tables, ready = (scratch / name for name in ("tree", "tables", "ready"))
    rng = random.Random(1)
    contents = {f"{'abc'[i % 3]}/{i:04}.bin": rng.randbytes(rng.randrange(2000)) for i in range(FILES)}
    contents["c/large.bin"] = rng.randbytes(20_000_001)
    for path, content in contents.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLETCH_")}
    clean |= {"FLETCH_STATE_DIR": str(scratch / "state"), "FLETCH_CACHE_DIR": str(scratch / "cache")}
    token, tokens = scratch / "token", scratch / "tokens.toml"
    run(programs / "fletch-server", "token", "new", "--tenant", "a", "--append", tokens, "--out", token,
        env=clean)
    token.chmod(0o444)
    log = stack.enter_context(open(scratch / "log", "wb"))
    server = subprocess.Popen(
        [programs / "fletch-server", "--listen", f"127.0.0.1:{free_port()}", "--socket", "none",
         "--auth-tokens", tokens, "--local-dirs", f"{scratch}=*", "--cache-size", "256MiB",
         "--cache-free-floor", "0", "--limits-lease-ttl", "5s", "--ready-file", ready],
        env=clean, stderr=log)
    stack.callback(lambda: (server.terminate(), server.wait(30)))
    until("the server listens", 20, lambda: ready.exists() and ready.read_text().strip())
    url = ready.read_text().strip()
    clean |= {"FLETCH_SERVER": url, "FLETCH_TOKEN_FILE": str(token)}
    run(programs / "fletch", "index", tree, "--tables", tables, "--quiet", env=clean)
    run(programs / "fletch", "register", "classes", tree, "--tables", tables, env=clean)
    return url, token, [contents[path] for path in sorted(contents, key=str.encode)], clean


class Containers:
    """Starts containers of one image, and removes them by their ids."""

    def __init__(self, stack, image, token, work):
        self.stack, self.image = stack, image
        self.options = ["--network=host", f"--user={USER}:{USER}", "--read-only", "--read-only-tmpfs=false",
                        "--cap-drop=all", "--security-opt=no-new-privileges", "--memory=512m",
                        f"--volume={token}:/etc/fletch/token:ro", f"--volume={work}:/work", "--workdir=/work",
                        "--env=FLETCH_TOKEN_FILE=/etc/fletch/token"]

    def start(self, *words):
        """Starts Python with `words`. Returns the container."""
        container = run("podman", "run", "--detach", *self.options, self.image, "python3", *words)
        self.stack.callback(lambda: run("podman", "rm", "--force", "--time", "0", container, check=False))
        return container

    def finished(self, *words):
        """Runs Python with `words` to the end. Returns what it printed."""
        container = self.start(*words)
        code = run("podman", "wait", container)
        if code != "0":
            raise SystemExit(f"FAILED: {words[0]}: exit code {code}\n{logs(container)}")
        return logs(container)


def check_reads(containers, url, contents):
    """Each call of the example reads the bytes of all files."""
    said = containers.finished("/opt/examples/read_without_mount.py", url, "classes")
    print(said, end="")
    whole = hashlib.sha256(b"".join(contents)).hexdigest()
    nbytes = sum(map(len, contents))
    for call in ("read_many", "read_range", "fletch://"):
        found = re.search(rf"^{call}: (\d+) reads, {nbytes} bytes, sha256 {whole}$", said, re.MULTILINE)
        expect(found is not None, f"{call} reads the bytes of all {len(contents)} files")


def ended(container):
    return run("podman", "inspect", "--format", "{{.State.Running}}", container) != "true"


def check_training(containers, url, programs, env):
    """A training that is killed continues in a new container, and consumes each sample once."""
    words = ("/opt/examples/train_numpy.py", url, "classes", "numpy-1")
    for kill in range(KILLS):
        container = containers.start(*words)
        until("three checkpoints", 60, lambda: logs(container).count("checkpoint after") >= 3
              or ended(container))
        print(logs(container)[-500:] if ended(container) else "", end="")
        expect(not ended(container), "a training reaches its third checkpoint")
        run("podman", "kill", "--signal=KILL", container)
        code, said = run("podman", "wait", container), logs(container)
        expect(code == "137" and "epoch 0:" not in said, f"kill {kill + 1} is in mid-epoch, by signal 9")
        expect(("continues with epoch 0" in said) == (kill > 0), f"the container continued: {kill > 0}")
    said = containers.finished(*words)
    print(*said.splitlines()[:1], *said.splitlines()[-1:], sep="\n")
    expect("continues with epoch 0" in said, "a new container continues epoch 0")
    ends = re.findall(r"epoch (\d): (\d+) images, receipt (\w+)", said)
    expect([(epoch, receipt) for epoch, _, receipt in ends] == [("0", "agrees"), ("1", "agrees")],
           "the receipts of both epochs agree with what the surviving weights consumed")
    for epoch in ("0", "1"):
        shown = json.loads(run(programs / "fletch", "--json", "receipt", "show", "numpy-1", epoch, env=env))
        receipt = shown["receipt"]
        told = {name: receipt[name] for name in ("epoch", "delivered", "dropped", "padded")}
        wanted = {"epoch": int(epoch), "delivered": FILES + 1, "dropped": [], "padded": 0}
        expect(told == wanted, f"the server's receipt states {json.dumps(told)}")


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fletch-accept-")))
        scratch.chmod(0o755)
        use_podman(scratch)
        image = make_image(stack, scratch, programs)
        url, token, contents, env = serve(stack, scratch, programs)
        work = scratch / "work"
        work.mkdir()
        os.chown(work, USER, USER)
        containers = Containers(stack, image, token, work)
        told = json.loads(containers.finished("-c", CHECK))
        expect(told == BARE, f"a container has {json.dumps(told)}")
        check_reads(containers, url, contents)
        check_training(containers, url, programs, env)


if __name__ == "__main__":
    main()
