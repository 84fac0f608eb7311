"""The scripts of the chart, the examples and the Dockerfile."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from rendering import CHART, EXAMPLES, REPO, documents, faults, kube_versions, title
from test_pods import unrestricted

FILES = CHART / "files"


def sh(script, *arguments, **environment):
    return subprocess.run(
        ["sh", FILES / script, *map(str, arguments)],
        env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, timeout=60,
    )


class Scripts(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        # A directory without permissions cannot be removed by an ordinary user.
        self.addCleanup(subprocess.run, ["chmod", "-R", "u+rwx", self.root], check=False)

    def test_a_directory_is_closed_until_it_is_mounted(self):
        if "fuse" not in pathlib.Path("/proc/filesystems").read_text().split():
            self.assertNotIn("fuse", os.environ.get("FLETCH_TEST_REQUIRE", ""), "this kernel has no FUSE")
            self.skipTest("this kernel has no FUSE")
        for _ in range(2):
            done = sh("prepare.sh", self.root, "a", "b")
            self.assertEqual(done.returncode, 0, done.stderr)
            for domain in ("a", "b"):
                directory = self.root / domain / "datasets" / domain
                self.assertEqual(directory.stat().st_mode & 0o777, 0)
                directory.chmod(0o700)
                self.assertEqual([p.name for p in directory.iterdir()], ["NOT-MOUNTED"])
                directory.chmod(0)
            self.assertEqual(list((self.root / ".ready").iterdir()), [])

    def test_the_gate_opens_and_closes(self):
        (self.root / ".ready").mkdir()
        (self.root / "a").mkdir()
        ready, link = self.root / "ready-file", self.root / ".ready" / "a"
        waiting = sh("gate.sh", self.root, "a", ready)
        self.assertEqual(waiting.returncode, 1)
        self.assertIn("not mounted yet", waiting.stderr)
        self.assertFalse(link.is_symlink())
        ready.touch()
        for _ in range(2):
            self.assertEqual(sh("gate.sh", self.root, "a", ready).returncode, 0)
            self.assertEqual(link.resolve(), (self.root / "a").resolve())
        ready.unlink()
        self.assertEqual(sh("gate.sh", self.root, "a", ready).returncode, 1)
        self.assertFalse(link.is_symlink(), "a pod could start without datasets")
        ready.touch()
        sh("gate.sh", self.root, "a", ready)
        self.assertEqual(sh("close.sh", self.root, "a", ready).returncode, 0)
        self.assertFalse(link.is_symlink() or ready.exists())

    def test_the_dataset_of_the_test_is_always_the_same(self):
        for name in ("one", "two"):
            self.assertEqual(sh("dataset.sh", self.root / name).returncode, 0)
        self.assertEqual(
            subprocess.run(["diff", "-r", self.root / "one", self.root / "two"]).returncode, 0
        )
        self.assertEqual(len([p for p in (self.root / "one").rglob("*") if p.is_file()]), 17)

    def helm_test(self, damage=lambda path: None, register=0, seconds="0"):
        """Runs test.sh beside a command `fletch` that only notes its arguments."""
        mount = self.root / "mount"
        sh("dataset.sh", mount / "set")
        damage(mount / "set")
        subprocess.run(["chmod", "-R", "a-w", mount], check=True)
        bin_dir = self.root / "bin"
        bin_dir.mkdir(exist_ok=True)
        log = self.root / "log"
        (bin_dir / "fletch").write_text(
            f'#!/bin/sh\necho "$1 $2" >>{log}\n[ "$1" != register ] || exit {register}\n'
        )
        # The script refuses root. Root writes anywhere, too, so the one who asks is made to look ordinary.
        (bin_dir / "id").write_text("#!/bin/sh\necho 65532\n")
        (bin_dir / "touch").write_text("#!/bin/sh\nexit 1\n")
        for program in bin_dir.iterdir():
            program.chmod(0o755)
        done = sh("test.sh", PATH=f"{bin_dir}:{os.environ['PATH']}", DATASET="set", MOUNT=str(mount),
                  WAIT_SECONDS=seconds)
        return done, log.read_text()

    def test_helm_test_passes_on_equal_files(self):
        done, log = self.helm_test()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("17 files are equal", done.stdout)
        self.assertEqual(log, "register set\nunregister set\n")

    def test_helm_test_fails_on_a_different_byte(self):
        def flip(path):
            file = path / "train" / "cat" / "3.txt"
            content = bytearray(file.read_bytes())
            content[7] ^= 1
            file.write_bytes(content)

        done, log = self.helm_test(flip)
        self.assertEqual(done.returncode, 1)
        self.assertIn("not those of the original", done.stderr)
        self.assertTrue(log.endswith("unregister set\n"))

    def test_helm_test_fails_on_a_missing_file(self):
        done, _ = self.helm_test(lambda path: (path / "train" / "empty.txt").unlink())
        self.assertEqual(done.returncode, 1)

    def test_helm_test_fails_without_the_mount_or_the_server(self):
        done, _ = self.helm_test(lambda path: path.rename(path.with_name("other")))
        self.assertEqual(done.returncode, 1)
        self.assertIn("look at the log of the mount pod", done.stderr)
        done, log = self.helm_test(register=4)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(log.splitlines()[-1], "register set")

    def test_helm_test_refuses_root(self):
        done = subprocess.run(
            ["sh", "-c", f'id() {{ echo 0; }}; . {FILES / "test.sh"}'],
            env={"PATH": os.environ["PATH"], "DATASET": "x", "MOUNT": "/x", "WAIT_SECONDS": "0"},
            capture_output=True, text=True,
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("must run as an ordinary user", done.stderr)


class Examples(unittest.TestCase):
    def objects(self):
        out = documents((EXAMPLES / "train-job.yaml").read_text())
        command = ["sh", EXAMPLES / "sweep.sh", "example/trainer:1", "photos"]
        sweep = subprocess.run(command, capture_output=True, text=True, check=True)
        return out, documents(sweep.stdout)

    def test_they_are_valid_and_restricted(self):
        job, sweep = self.objects()
        self.assertEqual(len([o for o in sweep if o["kind"] == "Job"]), 8)
        self.assertEqual(len({o["metadata"]["name"] for o in sweep}), 8)
        for document in job + sweep:
            for version in kube_versions():
                self.assertEqual(faults(document, version), [], title(document))
            if document["kind"] == "Job":
                self.assertEqual(unrestricted(document["spec"]["template"]["spec"]), [], title(document))

    def test_scripts_compile_and_the_job_knows_nothing_of_fletch(self):
        job, _ = self.objects()
        script = next(o for o in job if o["kind"] == "ConfigMap")["data"]["train.py"]
        compile(script, "train.py", "exec")
        self.assertNotIn("fletch", script)
        compile((EXAMPLES / "sweep-train.py").read_text(), "sweep-train.py", "exec")

    def test_variables_of_scripts_are_set(self):
        job, sweep = self.objects()
        script = next(o for o in job if o["kind"] == "ConfigMap")["data"]["train.py"]
        train = next(o for o in job if o["kind"] == "Job")
        for text, of in ((script, train), ((EXAMPLES / "sweep-train.py").read_text(), sweep[0])):
            read = set(re.findall(r'environ(?:\.get)?[\[(]"([A-Z_]+)"', text))
            given = {e["name"] for e in of["spec"]["template"]["spec"]["containers"][0]["env"]}
            self.assertGreater(len(read), 2)
            self.assertEqual(read, given)


class Images(unittest.TestCase):
    def test_the_toolchain_is_the_pinned_one(self):
        dockerfile = (REPO / "Dockerfile").read_text()
        pinned = re.search(r'channel = "(.*)"', (REPO / "rust-toolchain.toml").read_text()).group(1)
        self.assertIn(f"ARG RUST={pinned}\n", dockerfile)

    def test_each_image_has_user_labels_and_a_health_check(self):
        dockerfile = (REPO / "Dockerfile").read_text()
        stages = {}
        for stage in re.split(r"^FROM ", dockerfile, flags=re.M)[1:]:
            stages[re.match(r"\S+ AS (\S+)", stage).group(1)] = stage
        self.assertEqual(set(stages), {"programs", "server", "mount", "tools"})
        for name, user in (("server", "65532:65532"), ("mount", "0:0"), ("tools", "65532:65532")):
            self.assertIn(f"\nUSER {user}\n", stages[name])
            self.assertRegex(stages[name], r"\nHEALTHCHECK ")
            for label in ("title", "description", "source", "licenses", "version", "revision"):
                self.assertIn(f"org.opencontainers.image.{label}=", stages[name], name)
        self.assertNotIn("\nRUN ", stages["server"] + stages["tools"], "these images need no shell")

    def test_missing_programs_are_named(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [REPO / "packaging" / "image.sh"], env={**os.environ, "BIN": empty, "BUILD_TOOL": "true"},
                capture_output=True, text=True,
            )
        self.assertEqual(done.returncode, 1)
        self.assertIn("has no program fletch", done.stderr)


if __name__ == "__main__":
    unittest.main()
