#!/usr/bin/env python3
"""Runs the images and the chart's pods in real containers, and checks what they promise.

    accept_images.py BIN [BASE]

BIN is a directory with the built programs. BASE is a runtime base; without it, mmdebstrap makes one. The
script needs root, podman, runc and catatonit (Debian's packages of these names), and /dev/fuse.

It builds the images on BASE and compares their sizes with it. It starts the server pod as Helm renders it,
except for what only a cluster has: claims, Secrets, ConfigMaps and probes. It mounts a dataset as the mount
pod does, and runs the pod of `helm test` as an ordinary user. Then it starts three servers and three etcd as
the chart renders them (Debian's etcd, in an image on BASE), takes one server away, and brings it back.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from containers import build, expect, free_port, logs, make_base, run, until, use_podman
from rendering import REPO, one, render, server_spec

SIZE_MAX = 120_000_000
USER = 65532
# Keys of a pod and of a container that need a kubelet or a scheduler.
CLUSTER_ONLY = ("topologySpreadConstraints", "serviceAccountName", "enableServiceLinks", "tolerations",
                "activeDeadlineSeconds", "terminationGracePeriodSeconds")
# podman maps no ports in the network of the host.
KUBELET_ONLY = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")


class Pods:
    """Pods of this run. They are removed by their ids when the run ends."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.ids = []

    def volume(self, given, contents):
        """Returns a volume for podman: files of ConfigMaps and Secrets lie in a directory."""
        if "hostPath" in given or "emptyDir" in given:
            return {k: ({} if k == "emptyDir" else v) for k, v in given.items()}
        if "persistentVolumeClaim" in given:
            path = contents["claim", given["persistentVolumeClaim"]["claimName"]]
            return {"name": given["name"], "hostPath": {"path": str(path), "type": "Directory"}}
        if "configMap" in given:
            files = contents["configMap", given["configMap"]["name"]]
        else:
            files = contents["secret", given["secret"]["secretName"]]
            files = {item["path"]: files[item["key"]] for item in given["secret"]["items"]}
        home = pathlib.Path(tempfile.mkdtemp(dir=self.scratch))
        home.chmod(0o755)
        for name, text in files.items():
            (home / name).write_text(text)
            (home / name).chmod(0o444)
        return {"name": given["name"], "hostPath": {"path": str(home), "type": "Directory"}}

    def play(self, name, spec, contents, claims=()):
        """Starts a pod and returns its id."""
        spec = {k: v for k, v in spec.items() if k not in CLUSTER_ONLY}
        spec["volumes"] = [self.volume(v, contents) for v in spec["volumes"]]
        spec["volumes"] += [{"name": claim, "emptyDir": {}} for claim in claims]
        spec["restartPolicy"] = "Never"
        for kind in ("initContainers", "containers"):
            if kind in spec:
                spec[kind] = [{k: v for k, v in c.items() if k not in KUBELET_ONLY} for c in spec[kind]]
        # podman gives all pods one volume for each name of an emptyDir.
        own = {v["name"]: f"{name}-{v['name']}" for v in spec["volumes"] if "emptyDir" in v}
        spec["volumes"] = [{**v, "name": own.get(v["name"], v["name"])} for v in spec["volumes"]]
        for container in spec.get("initContainers", []) + spec["containers"]:
            container["volumeMounts"] = [
                {**m, "name": own.get(m["name"], m["name"])} for m in container["volumeMounts"]
            ]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        file = self.scratch / f"{name}.yaml"
        file.write_text(json.dumps(pod))
        done = subprocess.run(["podman", "kube", "play", "--network=host", str(file)],
                              capture_output=True, text=True)
        found = run("podman", "pod", "ls", "--quiet", "--no-trunc", "--filter", f"name=^{name}$")
        self.ids += found.split()
        if done.returncode != 0:
            raise SystemExit(f"FAILED: podman kube play {name}\n{done.stdout}{done.stderr}")
        return self.ids[-1]

    def remove(self, pod):
        """Stops and removes a pod."""
        run("podman", "pod", "rm", "--force", "--time", "10", pod)
        self.ids.remove(pod)


def size(image):
    return int(run("podman", "image", "inspect", "--format", "{{.Size}}", image))


def answer(url):
    """Returns the status of a URL, or nothing if it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def cgroup_memory(container):
    """Returns (bytes in use, limit) of a container's memory cgroup."""
    pid = run("podman", "inspect", "--format", "{{.State.Pid}}", container)
    for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            home = pathlib.Path("/sys/fs/cgroup/memory" + path)
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
        elif number == "0" and (pathlib.Path("/sys/fs/cgroup" + path) / "memory.max").exists():
            home = pathlib.Path("/sys/fs/cgroup" + path)
            names = ("memory.current", "memory.max")
        else:
            continue
        return tuple(int((home / name).read_text()) for name in names)
    raise SystemExit("FAILED: the container has no memory cgroup")


def check_images(base, tag):
    """Checks size, user and health check of each image, and a server without any settings."""
    for name in ("fletch-server", "fletch-mount", "fletch"):
        image = f"localhost/{name}:{tag}"
        added = size(image) - size(base)
        expect(added <= SIZE_MAX, f"{image} has {added / 1e6:.1f} MB on top of its base, at most 120")
    image = f"localhost/fletch-server:{tag}"
    expect(run("podman", "image", "inspect", "--format", "{{.User}}", image) == f"{USER}:{USER}",
           f"the server's user is {USER}")
    port = free_port()
    writable = [a for path in ("lib", "cache") for a in ("--tmpfs", f"/var/{path}/fletch:mode=0700,U")]
    container = run("podman", "run", "--detach", "--network=host", "--read-only", "--cap-drop=all",
                    "--security-opt=no-new-privileges", "--memory=512m", *writable, image,
                    "--listen", f"127.0.0.1:{port}", "--socket", "none", "--state-dir", "/var/lib/fletch",
                    "--cache-dir", "/var/cache/fletch", "--cache-size", "64MiB")
    try:
        until("the server answers", 20, lambda: answer(f"http://127.0.0.1:{port}/livez") == 200)
        expect(True, "a server with a read-only root answers at /livez")
        users = run("podman", "top", container, "huser", "args").splitlines()[1:]
        expect(all(line.split()[0] == str(USER) for line in users), f"its process has the uid {USER}")
    finally:
        run("podman", "rm", "--force", "--time", "5", container)
    # The health check asks the default port, so each server has a network of its own.
    arguments = ["--state-dir", "/var/lib/fletch", "--cache-dir", "/var/cache/fletch", "--socket", "none"]
    for port, healthy in ((7380, True), (7381, False)):
        container = run("podman", "run", "--detach", "--network=none", "--read-only", *writable, image,
                        *arguments, "--listen", f"127.0.0.1:{port}")
        check = ["podman", "healthcheck", "run", container]
        try:
            until("the server listens", 20, lambda: "listening" in logs(container))
            done = subprocess.run(check, capture_output=True)
            expect((done.returncode == 0) == healthy, f"HEALTHCHECK of a server at port {port}: {healthy}")
        finally:
            run("podman", "rm", "--force", "--time", "5", container)


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fletch-accept-")))
        scratch.chmod(0o755)
        use_podman(scratch)
        base = sys.argv[2] if len(sys.argv) > 2 else make_base(scratch, "base", "ca-certificates", "fuse3")
        tag = f"accept-{os.getpid()}"
        given = {"BASE": base, "BIN": str(programs), "IMAGE_TAG": tag, "BUILD_TOOL": "podman"}
        run(REPO / "packaging" / "image.sh", env={**os.environ, **given})
        stack.callback(lambda: [run("podman", "rmi", f"localhost/{name}:{tag}", check=False)
                                for name in ("fletch-server", "fletch-mount", "fletch")])
        check_images(base, tag)

        # Before the pods: images are removed after the pods that use them.
        etcd = etcd_image(stack, scratch, base, tag)
        pods = Pods(scratch)
        stack.callback(lambda: [pods.remove(pod) for pod in list(reversed(pods.ids))])
        check_pods(stack, pods, scratch, programs, tag)
        check_cluster(stack, pods, scratch, programs, etcd, tag)


def etcd_image(stack, scratch, base, tag):
    """Makes an image of Debian's etcd and returns its name."""
    image, context = f"localhost/fletch-etcd:{tag}", scratch / "etcd"
    context.mkdir()
    shutil.copy(shutil.which("etcd"), context / "etcd")
    path = "ENV PATH=/usr/local/bin:/usr/bin:/bin"
    build(stack, context, image, f"FROM {base}", "COPY etcd /usr/local/bin/etcd", path)
    return image


def as_pod(spec, name, replacements):
    """Does what the kubelet and the cluster's DNS do: fills the pod's name in, and knows addresses."""
    text = json.dumps(spec)
    for old, new in [*replacements, ("$(POD_NAME)", name)]:
        text = text.replace(old, new)
    spec = json.loads(text)
    for container in spec["containers"]:
        container["env"] = [e for e in container.get("env", []) if "valueFrom" not in e]
    return spec


def stateful_set(objects, name):
    """Returns the pod of a StatefulSet."""
    return one(objects, "StatefulSet", name)["spec"]["template"]["spec"]


def check_cluster(stack, pods, scratch, programs, etcd, tag):
    """Runs three servers as one cluster, with the chart's etcd."""
    prefix = f"cluster-{os.getpid()}"
    data, home = scratch / "cluster-data", scratch / "cluster"
    (data / "files").mkdir(parents=True)
    home.mkdir()
    for i in range(48):
        (data / "files" / f"{i:02}.bin").write_bytes(os.urandom(256 << 10))
    run(programs / "fletch", "index", data / "files", "--tables", data / "tables", "--state-dir",
        home / "state", "--quiet")
    image = {"tag": tag, "pullPolicy": "Never"}
    objects, _ = render({
        "images": {"registry": "localhost", "server": image},
        "server": {
            "replicas": 3,
            "cache": {"storage": "emptyDir", "size": "64Mi"},
            "resources": {"limits": {"memory": "512Mi"}},
            "datasetVolumes": [{"name": "data", "mountPath": "/data", "domains": ["default"],
                                "volume": {"hostPath": {"path": str(data), "type": "Directory"}}}],
        },
        "cluster": {"enabled": True, "insecurePeers": True, "forgetAfter": "1m",
                    "etcd": {"deploy": {"enabled": True, "image": etcd, "pullPolicy": "Never"}}},
        "mounts": {"enabled": False},
    })
    for role, whose in (("user", ["--tenant", "default"]), ("peer", []), ("monitor", ["--tenant", "ops"])):
        run(programs / "fletch-server", "token", "new", *whose, "--role", role,
            "--append", home / "tokens.toml", "--out", home / role)
    secret = {f.name: f.read_text() for f in home.iterdir() if f.is_file()}

    # All pods are in the network of the host, so each has ports of its own.
    suffix = "fletch-etcd.fletch.svc.cluster.local"
    ports = [(free_port(), free_port()) for _ in range(3)]
    addresses = [(f"fletch-etcd-{i}.{suffix}:{inside}", f"127.0.0.1:{outside}")
                 for i, pair in enumerate(ports) for inside, outside in zip((2379, 2380), pair)]
    for i, pair in enumerate(ports):
        own = [(f"$(POD_NAME).{suffix}:{inside}", f"127.0.0.1:{outside}")
               for inside, outside in zip((2379, 2380), pair)]
        own += [(f"0.0.0.0:{inside}", f"127.0.0.1:{outside}") for inside, outside in zip((2379, 2380), pair)]
        spec = as_pod(stateful_set(objects, "fletch-etcd"), f"fletch-etcd-{i}", addresses + own)
        spec["volumes"] = []
        pods.play(f"{prefix}-etcd-{i}", spec, {}, claims=("data",))
    until("etcd is healthy", 30, lambda: all(
        answer(f"http://127.0.0.1:{client}/health") == 200 for client, _ in ports))
    expect(True, "three etcd pods of the chart form a cluster")

    settings = one(objects, "ConfigMap", "fletch-server")["data"]["fletch.toml"]
    for old, new in addresses:
        settings = settings.replace(old, new)
    listen = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in listen]

    def start(i):
        own = [("$(POD_NAME).fletch-headless.fletch.svc.cluster.local:7380", f"127.0.0.1:{listen[i]}")]
        spec = as_pod(stateful_set(objects, "fletch-server"), f"fletch-server-{i}", own)
        text = settings.replace("0.0.0.0:7380", f"127.0.0.1:{listen[i]}")
        contents = {("configMap", "fletch-server"): {"fletch.toml": text},
                    ("secret", "fletch-tokens"): secret}
        return pods.play(f"{prefix}-server-{i}", spec, contents, claims=("state",))

    def fletch(*words, server=0):
        return run(programs / "fletch", *words, "--server", urls[server], "--token-file", home / "user")

    def members(server=0):
        status = json.loads(fletch("cluster", "status", "--json", server=server))
        return {m["id"]: m["state"] for m in status["members"]}, status["view"]

    servers = [start(i) for i in range(3)]
    until("all servers are ready", 30, lambda: all(answer(f"{url}/readyz") == 200 for url in urls))
    names = [f"fletch-server-{i}" for i in range(3)]
    up = dict.fromkeys(names, "up")
    until("all servers agree", 10, lambda: all(members(i)[0] == up for i in range(3)))
    expect(True, "three server pods of the chart are one cluster")
    view = members()[1]
    fletch("register", "set", "file:///data/files", "--tables", "file:///data/tables", server=0)
    fletch("warmup", "set", "--wait", server=1)

    def chunks():
        token = {"Authorization": f"Bearer {secret['monitor'].strip()}"}
        found = []
        for url in urls:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=token)) as reply:
                lines = reply.read().decode().splitlines()
            found += [int(float(line.split()[1])) for line in lines if line.startswith("fletch_disk_chunks ")]
        return found

    kept = chunks()
    expect(sum(kept) == 48 and min(kept) > 0, f"each chunk is on one of the three disks {kept}")
    pods.remove(servers[2])
    root = json.loads(fletch("show", "set", "--json"))["root"]

    def read(i, server):
        token = {"Authorization": f"Bearer {secret['user'].strip()}"}
        url = f"{urls[server]}/v1/versions/{root}/files/{i:02}.bin"
        with urllib.request.urlopen(urllib.request.Request(url, headers=token), timeout=20) as reply:
            return reply.read() == (data / "files" / f"{i:02}.bin").read_bytes()

    expect(all(read(i, i % 2) for i in range(48)), "without one server, the others serve every file")
    start(2)
    until("the server is back", 20, lambda: members()[0] == up)
    expect(members()[1] == view, "it is back, and the view of the cluster has the same number")


def check_pods(stack, pods, scratch, programs, tag):
    """Runs the rendered pods: server, mount, and the test as an ordinary user."""
    port = free_port()
    prefix = f"accept-{os.getpid()}"
    root = pathlib.Path(f"/run/{prefix}")
    image = {"tag": tag, "pullPolicy": "Never"}
    objects, _ = render({
        "images": {"registry": "localhost", "server": image, "mount": image, "tools": image},
        "server": {
            "service": {"port": port},
            "cache": {"storage": "emptyDir", "size": "256Mi"},
            "resources": {"limits": {"memory": "512Mi"}},
        },
        "mounts": {"hostPath": str(root)},
        "test": {"enabled": True, "timeoutSeconds": 20},
    })

    tokens = scratch / "tokens"
    tokens.mkdir()
    for role, name in (("reader", "mount"), ("user", "test")):
        run(programs / "fletch-server", "token", "new", "--tenant", "default", "--role", role,
            "--append", tokens / "tokens.toml", "--out", tokens / name)
    link = root / ".ready" / "default"
    contents = {("configMap", o["metadata"]["name"]): o["data"] for o in objects if o["kind"] == "ConfigMap"}
    contents["secret", "fletch-tokens"] = {f.name: f.read_text() for f in tokens.iterdir()}
    contents["claim", "fletch-test"] = link
    contents["configMap", "fletch-test"]["reader.sh"] = READER

    # The cluster's DNS is missing, so clients name the server by its address.
    def local(spec):
        url = f"http://fletch.fletch.svc.cluster.local:{port}"
        return json.loads(json.dumps(spec).replace(url, f"http://127.0.0.1:{port}"))

    spec = server_spec(objects)
    pods.play(f"{prefix}-server", spec, contents, claims=("state",))
    server = f"{prefix}-server-server"
    until("the server is ready", 30, lambda: answer(f"http://127.0.0.1:{port}/readyz") == 200)
    expect(True, "the rendered server pod is ready, with the chart's settings file")
    expect(answer(f"http://127.0.0.1:{port}/v1/datasets") == 401, "it refuses a request without a token")
    expect(run("podman", "top", server, "huser").splitlines()[1:] == [str(USER)], f"its uid is {USER}")

    # Only a shared mount takes part in propagation. On a node, systemd makes /run one.
    root.mkdir()
    stack.callback(lambda: shutil.rmtree(root, ignore_errors=True))
    run("mount", "-t", "tmpfs", "tmpfs", root)
    stack.callback(lambda: run("umount", "--recursive", "--lazy", root, check=False))
    run("mount", "--make-shared", root)

    def register(dataset="fletch-test", below="/srv/fletch-test"):
        run(programs / "fletch", "register", dataset, f"file://{below}/data",
            "--tables", f"file://{below}/tables", "--server", f"http://127.0.0.1:{port}",
            "--token-file", tokens / "test")

    # The server pod's volume of the test's data, as the host sees it.
    volume = pathlib.Path(run("podman", "volume", "inspect", "--format", "{{.Mountpoint}}",
                              f"{prefix}-server-test-data"))

    def index(below):
        run(programs / "fletch", "index", volume / below / "data", "--tables", volume / below / "tables",
            "--state-dir", scratch / "index", "--quiet")

    mounts = local(one(objects, "DaemonSet")["spec"]["template"]["spec"])
    container = mounts["containers"][0]
    test = local(one(objects, "Pod")["spec"])
    where = root / "default" / "datasets" / "default"
    register()
    gate = container["readinessProbe"]["exec"]["command"]
    mount_pod = pods.play(f"{prefix}-mounts", mounts, contents)
    name = f"{prefix}-mounts-{container['name']}"
    until("the gate opens", 30, lambda: subprocess.run(["podman", "exec", name, *gate],
                                                       capture_output=True).returncode == 0)
    expect(link.is_dir(), "the readiness probe opens the volume")
    until("a mounted file is seen outside the container", 15, lambda: any(where.rglob("8.txt")))
    expect(True, "the mount is seen outside its container")

    def helm_test(number):
        pod = pods.play(f"{prefix}-test{number}", test, contents)
        name = f"{prefix}-test{number}-test"
        code = run("podman", "wait", name)
        log = logs(name)
        pods.remove(pod)
        return code, log

    code, log = helm_test(1)
    expect(code == "0" and "17 files are equal" in log,
           f"the pod of `helm test` passes without privilege and capabilities ({log.splitlines()[-1]})")

    used, limit = cgroup_memory(server)
    expect(limit == 512 << 20 and used <= limit, f"the server uses {used >> 20} of {limit >> 20} MiB")

    # The test's pod has unregistered its dataset.
    register()
    shutil.copytree(volume / "data", volume / "moved" / "data")
    index("moved")

    def move():
        (volume / "moved" / "data" / "train" / "added.txt").write_text("of the second version")
        index("moved")

    mount_pod = check_readers(pods, test, contents, prefix, register, move, lambda number: pods.play(
        f"{prefix}-mounts{number}", mounts, contents), mount_pod, name, gate)
    name = f"{prefix}-mounts2-{container['name']}"

    close = one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    run("podman", "exec", name, *close["exec"]["command"])
    expect(not link.exists(), "the end of the mount pod closes the volume")
    pods.remove(mount_pod)
    run("umount", "--recursive", "--lazy", where, check=False)
    mode = where.stat().st_mode & 0o777
    expect(mode == 0, "an unmounted directory is closed to ordinary users (mode 0000)")
    link.symlink_to("../default")
    code, log = helm_test(2)
    expect(code == "1" and "is not in" in log, "the pod of `helm test` fails without the mount, and says so")
    register()
    check_keeper(stack, pods, test, contents, prefix, (image, port), local)


# Reads again and again, and says for each time whether the files are equal, an error, or wrong. The reads go
# past the page cache, which still has the bytes when the mount is dead.
READER = """
sh /etc/fletch/test/dataset.sh /tmp/original
wanted=$(ls /tmp/original/train)
while :; do
    if ! names=$(ls "$MOUNT/$DATASET/train" 2>/dev/null); then echo error
    elif [ "$names" != "$wanted" ]; then echo WRONG: "$names"
    elif ! dd if="$MOUNT/$DATASET/train/cat/8.txt" of=/tmp/read bs=64k iflag=direct 2>/dev/null
    then echo error
    elif cmp -s /tmp/read /tmp/original/train/cat/8.txt; then echo equal
    else echo WRONG: $(wc -c </tmp/read) bytes; fi
    sleep 0.2
done
"""


def check_readers(pods, test, contents, prefix, register, move, start, mount_pod, mount, gate):
    """Registers a dataset and moves its tag while two pods read. Then kills the mount, starts it again, and
    returns the new mount pod."""
    readers = {}
    for propagation in ("HostToContainer", "None"):
        spec = json.loads(json.dumps(test))
        container = spec["containers"][0]
        container["command"] = ["/bin/sh", "/etc/fletch/test/reader.sh"]
        for volume in container["volumeMounts"]:
            if volume["name"] == "datasets":
                volume["mountPropagation"] = propagation
                if propagation == "None":
                    del volume["mountPropagation"]
        name = f"{prefix}-reader-{propagation.lower()}"
        readers[propagation] = (pods.play(name, spec, contents), f"{name}-test")

    def last(propagation):
        return logs(readers[propagation][1]).split("\n")[-2:-1]

    for propagation in readers:
        until(f"the reader with {propagation} reads", 20, lambda p=propagation: last(p) == ["equal"])

    def in_reader(script):
        """Runs a script in the running reader pod. Returns its output, or nothing if it fails."""
        done = subprocess.run(["podman", "exec", readers["HostToContainer"][1], "sh", "-c", script],
                              capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    register("fletch-test-new", "/srv/fletch-test/moved")
    began = time.monotonic()
    until("a running pod sees a new dataset", 15,
          lambda: in_reader('ls "$MOUNT/fletch-test-new/train/cat/8.txt"'))
    expect(True, f"a running pod sees a new dataset {time.monotonic() - began:.1f} s after its registration")
    old = in_reader('readlink "$MOUNT/fletch-test-new"')
    move()
    began = time.monotonic()
    until("a running pod follows a moved tag", 15, lambda: in_reader(
        'cat "$MOUNT/fletch-test-new/train/added.txt"') == "of the second version")
    took = time.monotonic() - began
    new = in_reader('readlink "$MOUNT/fletch-test-new"')
    expect(new != old, f"it follows a moved tag after {took:.1f} s")
    same = in_reader(f'cmp "$MOUNT/{old}/train/cat/8.txt" /tmp/original/train/cat/8.txt && '
                     f'ls "$MOUNT/{old}/train"')
    expect(same == "cat\ndog\nempty.txt", "a reader of the old version goes on, and sees that version only")
    run("podman", "kill", "--signal", "KILL", mount)
    for propagation in readers:
        until(f"the reader with {propagation} gets an error", 40, lambda p=propagation: last(p) == ["error"])
    expect(True, "while the mount is dead, running readers get errors")
    pods.remove(mount_pod)
    began = time.monotonic()
    mount_pod = start(2)
    until("the reader sees the data again", 10, lambda: last("HostToContainer") == ["equal"])
    expect(True, f"with HostToContainer a reader sees the data {time.monotonic() - began:.1f} s later")
    mount = mount.replace("-mounts-", "-mounts2-")
    until("the gate opens again", 30, lambda: subprocess.run(["podman", "exec", mount, *gate],
                                                             capture_output=True).returncode == 0)
    time.sleep(1)
    expect(last("None") == ["error"], "without HostToContainer a running reader keeps its error")
    for pod, name in readers.values():
        wrong = [line for line in logs(name).splitlines() if "WRONG" in line]
        expect(not wrong, f"{name} never saw wrong or empty data {wrong or ''}")
        pods.remove(pod)
    return mount_pod


def check_keeper(stack, pods, test, contents, prefix, served, local):
    """Replaces mount pods without privilege under readers, while another pod holds the mounts."""
    root = pathlib.Path(f"/run/{prefix}-kept")
    image, port = served
    objects, _ = render({
        "server": {"service": {"port": port}},
        "images": {"registry": "localhost", "mount": image},
        "mounts": {"hostPath": str(root), "keeper": {"enabled": True}},
    })
    root.mkdir()
    stack.callback(lambda: shutil.rmtree(root, ignore_errors=True))
    run("mount", "-t", "tmpfs", "tmpfs", root)
    stack.callback(lambda: run("umount", "--recursive", "--lazy", root, check=False))
    run("mount", "--make-shared", root)
    contents = {**contents, ("claim", "fletch-test"): root / ".ready" / "default"}
    specs = {name: local(one(objects, "DaemonSet", f"fletch-{name}")["spec"]["template"]["spec"])
             for name in ("mounts", "mount-keeper")}
    container = specs["mounts"]["containers"][0]
    gate = container["readinessProbe"]["exec"]["command"]
    keeper = pods.play(f"{prefix}-keeper1", specs["mount-keeper"], contents)

    def mount(number):
        pod = pods.play(f"{prefix}-kept{number}", specs["mounts"], contents)
        name = f"{prefix}-kept{number}-{container['name']}"
        until("the gate opens", 30, lambda: subprocess.run(["podman", "exec", name, *gate],
                                                           capture_output=True).returncode == 0)
        return pod, name

    pod, name = mount(1)
    capabilities = run("podman", "exec", name, "grep", "Cap[PEB]", "/proc/1/status").split()[1::2]
    expect(set(capabilities) == {"0" * 16}, "a mount pod beside a keeper has no capability")
    readers = {}
    for propagation in ("HostToContainer", "None"):
        spec = json.loads(json.dumps(test))
        spec["containers"][0]["command"] = ["/bin/sh", "/etc/fletch/test/reader.sh"]
        volume = next(v for v in spec["containers"][0]["volumeMounts"] if v["name"] == "datasets")
        volume.pop("mountPropagation", None)
        if propagation != "None":
            volume["mountPropagation"] = propagation
        reader = f"{prefix}-kept-reader-{propagation.lower()}"
        readers[propagation] = (pods.play(reader, spec, contents), f"{reader}-test")

    def looks():
        """Returns how many looks each reader took, after it checked that each found the data."""
        seen = []
        for propagation, (_, reader) in readers.items():
            lines = [line for line in logs(reader).splitlines() if line]
            wrong = [line for line in lines if line != "equal"]
            what = f"a reader with {propagation} saw {len(lines)} times the data"
            expect(not wrong, f"{what} {wrong[:3] or ''}")
            seen.append(len(lines))
        return min(seen)

    def goes_on():
        before = min(len(logs(reader).splitlines()) for _, reader in readers.values())
        until("the readers go on", 30, lambda: min(
            len(logs(reader).splitlines()) for _, reader in readers.values()) > before + 5)

    goes_on()
    run("podman", "kill", "--signal", "KILL", name)
    pods.remove(pod)
    time.sleep(1)
    pod, name = mount(2)
    goes_on()
    looks()
    expect(True, "a mount pod was killed and replaced")
    pods.remove(pod)
    time.sleep(1)
    pod, name = mount(3)
    goes_on()
    looks()
    expect(True, "a mount pod was deleted and replaced, as in an upgrade")
    run("podman", "kill", "--signal", "KILL", f"{prefix}-keeper1-keeper")
    pods.remove(keeper)
    keeper = pods.play(f"{prefix}-keeper2", specs["mount-keeper"], contents)
    until("the keeper has the mounts back", 20, lambda: "has the mounts back" in logs(name))
    pods.remove(pod)
    pod, name = mount(4)
    goes_on()
    looks()
    expect(True, "the keeper was killed and replaced, and then a mount pod")
    for reader, _ in readers.values():
        pods.remove(reader)
    pods.remove(pod)
    pods.remove(keeper)
    left = pathlib.Path("/proc/self/mounts").read_text().count(f"{root}/")
    expect(left == 0, "when all pods are gone, nothing is mounted")


if __name__ == "__main__":
    main()
