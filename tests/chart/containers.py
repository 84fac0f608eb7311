"""What the acceptance runs in containers share: commands, waiting, and a base of Debian for images."""

import os
import shutil
import socket
import subprocess
import time


def run(*command, check=True, **more):
    """Runs a command and returns its output."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if check and done.returncode != 0:
        raise SystemExit(f"FAILED: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def until(what, seconds, test):
    """Waits until `test` returns something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = test()
        if found:
            return found
        time.sleep(0.1)
    raise SystemExit(f"FAILED: {what}: not within {seconds} s")


def expect(condition, what):
    """Ends the run if a promise does not hold."""
    if not condition:
        raise SystemExit(f"FAILED: {what}")
    print(f"ok: {what}", flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def logs(container):
    """Returns what a container wrote."""
    done = subprocess.run(["podman", "logs", container], capture_output=True, text=True)
    return done.stdout + done.stderr


def use_podman(scratch):
    """Ends the run if podman cannot run here. Sets podman up, unless CONTAINERS_CONF does."""
    missing = [name for name in ("podman", "runc", "catatonit", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"this runs containers: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise SystemExit("run this as root: it starts containers")
    if "CONTAINERS_CONF" not in os.environ:
        conf = scratch / "containers.conf"
        limits = '"nofile=1024:1024", "nproc=1024:1024"'
        conf.write_text(f'[containers]\ndefault_ulimits=[{limits}]\n[engine]\nruntime="runc"\n')
        os.environ["CONTAINERS_CONF"] = str(conf)


def make_base(scratch, name, *packages):
    """Makes an image of Debian's base with `packages`, unless it exists. Returns its name."""
    image = f"localhost/fletch-accept-{name}:bookworm"
    if subprocess.run(["podman", "image", "exists", image]).returncode != 0:
        tar = scratch / "base.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", tar)
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        run("podman", "import", "--quiet", "--change", f"ENV {path}", tar, image)
        tar.unlink()
    return image


def build(stack, context, image, *lines):
    """Builds an image of the files in `context`, which the run removes at its end."""
    (context / "Dockerfile").write_text("\n".join([*lines, ""]))
    run("podman", "build", "--quiet", "--network=none", "--tag", image, context)
    stack.callback(lambda: run("podman", "rmi", image, check=False))
