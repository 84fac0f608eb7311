//! `fletch doctor`: each fault is seeded, found with its exit code, and gone after the fix.

use crate::common::{Fixture, Ran};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A healthy machine, as files below a root.
struct Machine {
    w: Fixture,
}

impl Machine {
    fn healthy() -> Self {
        let m = Machine { w: Fixture::new() };
        m.put("etc/fuse.conf", "user_allow_other\n");
        m.put("etc/updatedb.conf", "PRUNEFS=\"NFS fuse.fletch\"\n");
        m.put("usr/bin/fusermount3", "");
        m.put("proc/self/cgroup", "0::/job\n");
        m.put("sys/fs/cgroup/job/memory.max", "8589934592\n");
        m.mounted_as("ext4");
        for link in ["proc/locks", "dev/fuse"] {
            let at = m.w.path("root").join(link);
            fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
            symlink(Path::new("/").join(link), at).expect("symlink");
        }
        m
    }

    fn put(&self, file: &str, text: &str) {
        let at = self.w.path("root").join(file);
        fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
        fs::write(at, text).expect("write");
    }

    /// Sets the type of the file system that holds all directories.
    fn mounted_as(&self, fs_type: &str) {
        self.put("proc/self/mountinfo", &format!("1 0 8:1 / / rw - {fs_type} /dev/a rw\n"));
    }

    fn doctor(&self, args: &[&str]) -> Ran {
        let state = self.w.path("state").display().to_string();
        let cache = self.w.path("cache").display().to_string();
        let fixed = [
            "doctor",
            "--root",
            "root",
            "--state-dir",
            &state,
            "--cache-dir",
            &cache,
            "--cache-size",
            "1GiB",
        ];
        let mut all = fixed.to_vec();
        // A later flag would be a second one.
        for (flag, value) in [("--cache-free-floor", "0"), ("--listen", "none")] {
            if !args.contains(&flag) {
                all.extend([flag, value]);
            }
        }
        all.extend(args);
        let mut command = self.w.command(&all);
        command.env("PATH", "/usr/bin:/bin").env_remove("FLETCH_STATE_DIR");
        command.output().map(Ran::from).expect("spawn")
    }

    /// Runs the doctor, and expects one finding of this check, which decides the exit code.
    #[track_caller]
    fn finds(&self, args: &[&str], check: &str, code: i32) -> String {
        let ran = self.doctor(&[args, &["--json"]].concat()).code(code);
        let report = ran.json();
        let found = report["findings"].as_array().expect("findings");
        assert!(found.len() == 1 && found[0]["check"] == check, "{report}");
        let severity = if code == 1 { "error" } else { "warning" };
        assert_eq!(found[0]["severity"], severity, "{report}");
        assert!(report["checks"].as_array().expect("checks").contains(&Value::from(check)), "{report}");
        let line = self.doctor(args).code(code).stdout;
        assert!(line.starts_with(&format!("{severity}: {check}: ")) && line.contains("; fix: "), "{line}");
        line
    }

    #[track_caller]
    fn passes(&self, args: &[&str]) {
        let ran = self.doctor(args).ok();
        assert!(ran.stdout.ends_with(" checks: healthy\n"), "{}", ran.stdout);
        assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.stdout);
    }
}

/// Returns whether this machine has a FUSE device that this user may open. Prints why not.
fn has_fuse() -> bool {
    let open = fs::File::options().read(true).write(true).open("/dev/fuse");
    open.inspect_err(|e| eprintln!("SKIPPED: needs fuse: {e}")).is_ok()
}

#[test]
fn faults_of_the_machine_are_found_and_their_fixes_work() {
    if !has_fuse() {
        return;
    }
    let m = Machine::healthy();
    m.passes(&["--allow-other"]);

    fs::remove_file(m.w.path("root/dev/fuse")).expect("remove");
    assert!(m.finds(&[], "fuse-device", 1).contains("modprobe fuse"));
    symlink("/dev/fuse", m.w.path("root/dev/fuse")).expect("symlink");

    m.put("etc/updatedb.conf", "PRUNEFS=\"NFS\"\n");
    assert!(m.finds(&[], "updatedb", 3).contains("fuse.fletch"));
    m.put("etc/updatedb.conf", "PRUNEFS=\"fuse.fletch NFS\"\n");

    m.put("sys/fs/cgroup/job/memory.max", "1073741824\n");
    assert!(m.finds(&["--memory", "2GiB"], "memory", 1).contains("--memory 512MiB"));
    m.passes(&["--memory", "512MiB"]);

    m.mounted_as("overlay");
    assert!(m.finds(&[], "cache-place", 3).contains("--cache-dir"));
    m.mounted_as("xfs");

    assert!(m.finds(&["--cache-free-floor", "100%"], "cache-space", 1).contains("nothing is cached"));
    m.passes(&["--cache-free-floor", "0"]);
}

#[test]
fn faults_of_the_server_are_found_and_their_fixes_work() {
    if !has_fuse() {
        return;
    }
    let m = Machine::healthy();
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    let accepts = std::thread::spawn(move || listener.incoming().take(4).for_each(drop));
    let line = m.finds(&["--listen", &address], "port", 1);
    assert!(line.contains(&format!("listens on {address}")), "{line}");
    // Each question of the doctor is asked twice, on a connection of its own.
    while !accepts.is_finished() {
        drop(std::net::TcpStream::connect(&address));
    }
    accepts.join().expect("thread");
    m.passes(&["--listen", &address]);
    assert!(m.finds(&["--server", &format!("http://{address}")], "server", 1).contains("does not answer"));

    fs::create_dir_all(m.w.path("state")).expect("mkdir");
    let file = fs::File::create(m.w.path("state/lock")).expect("lock");
    let lock = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).expect("free");
    assert!(m.finds(&[], "state-dir", 1).contains(&format!("kill {}", std::process::id())));
    drop(lock);
    m.passes(&[]);
}

#[test]
fn a_low_limit_of_open_files_is_found() {
    if !has_fuse() {
        return;
    }
    let m = Machine::healthy();
    let program = env!("CARGO_BIN_EXE_fletch");
    let mut sh = std::process::Command::new("sh");
    sh.args(["-c", "ulimit -Sn 512 && ulimit -Hn 512 && exec \"$@\"", "sh", program, "doctor"]);
    sh.args(["--root", "root", "--listen", "none", "--cache-size", "0", "--state-dir", "state"]);
    let ran = sh.current_dir(m.w.dir.path()).env("PATH", "/usr/bin:/bin").output().map(Ran::from);
    let ran = ran.expect("sh").code(1);
    assert!(ran.stdout.starts_with("error: open-files: a process may open 512 files"), "{}", ran.stdout);
}

#[test]
fn faults_of_an_origin_are_found_and_their_fixes_work() {
    if !has_fuse() {
        return;
    }
    let m = Machine::healthy();
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    origin.insert("set/a", "content");
    m.w.configure(&origin);
    let set = ["s3://bucket/set", "--config", "fletch.toml"];
    m.passes(&set);
    origin.set_fault("", Fault::Error { status: 403, rate: 1.0 }, None);
    assert!(m.finds(&set, "origin", 1).contains("access denied"));
    origin.clear_faults();
    m.passes(&set);

    let tables = ["--tables", "s3://bucket/tables", "--config", "fletch.toml"];
    m.passes(&tables);
    origin.set_fault("", Fault::IgnoreConditions, None);
    assert!(m.finds(&tables, "origin-write", 3).contains("one process at a time"));

    // The environment suffices for a store without a table. The emulator has no such bucket.
    let fixed = ["doctor", "s3://other/set", "--root", "root", "--listen", "none", "--cache-size", "0"];
    let mut command = m.w.command(&fixed);
    command.env("AWS_ENDPOINT_URL", origin.endpoint()).env("AWS_ACCESS_KEY_ID", "id").env("AWS_REGION", "r");
    command.env("AWS_SECRET_ACCESS_KEY", "secret").env("PATH", "/usr/bin:/bin");
    let ran = command.output().map(Ran::from).expect("spawn").code(1);
    assert!(
        ran.stdout.contains("error: origin: ") && ran.stdout.contains("name of the bucket"),
        "{}",
        ran.stdout
    );
    assert!(!ran.stdout.contains("secret"));
}
