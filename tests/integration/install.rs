//! What `make dist` packs: the manual pages and completions of every command, the tarball, and the helper of
//! mount(8). `make accept-dist` installs the packages in empty roots.

use fletch_tests::bins::{Running, bin, bin_dir, repo, run, stdout, with_keeper};
use fletch_tests::fixture::{Site, is_mounted};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn dir() -> TempDir {
    TempDir::with_prefix("fi-").expect("a directory")
}

/// Returns the names of files and links below a directory.
fn below(dir: &Path) -> BTreeSet<String> {
    let mut find = Command::new("find");
    find.args([".", "!", "-type", "d", "-printf", "%P\n"]).current_dir(dir);
    stdout(&find.output().expect("find")).lines().map(str::to_owned).collect()
}

#[test]
fn every_command_has_a_page_and_every_program_completions() {
    let out = dir();
    run(Command::new(bin("fletch-manuals")).arg(out.path()));
    let files = below(out.path());
    for name in ["fletch.1", "fletch-mount.1", "fletch-jobs-show.1", "fletch-simulate.1"] {
        assert!(files.contains(&format!("man/man1/{name}")), "{name}: {files:?}");
    }
    for name in ["fletch-server.8", "fletch-server-token-new.8", "mount.fletch.8"] {
        assert!(files.contains(&format!("man/man8/{name}")), "{name}: {files:?}");
    }
    for program in ["fletch", "fletch-mount", "fletch-server"] {
        for file in [format!("bash/{program}"), format!("zsh/_{program}"), format!("fish/{program}.fish")] {
            let text = fs::read_to_string(out.path().join("completions").join(&file)).expect(&file);
            assert!(text.contains("token-file") || text.contains("auth-tokens"), "{file}");
        }
    }
    let help = Command::new(bin("fletch")).arg("--help").output().expect("help");
    let page = fs::read_to_string(out.path().join("man/man1/fletch-index.1")).expect("page");
    assert!(page.starts_with(".ie") || page.contains(".TH fletch-index 1"), "{page}");
    assert!(stdout(&help).contains("index"));
}

#[test]
fn the_tarball_is_removed_by_its_own_list() {
    let target = bin_dir().parent().expect("target").to_owned();
    let mut dist = Command::new(repo().join("packaging/dist.sh"));
    let made = dist.arg("tarball").env("CARGO_TARGET_DIR", &target).output().expect("dist.sh");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let tarball = stdout(&made).lines().last().expect("a path").to_owned();
    let prefix = dir();
    run(Command::new("tar").args(["--strip-components=1", "-xzf", &tarball, "-C"]).arg(prefix.path()));
    let listed = fs::read_to_string(prefix.path().join("share/doc/fletch/files")).expect("the list");
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    assert_eq!(listed, below(prefix.path()));
    for name in
        ["bin/fletch-server", "sbin/mount.fletch", "share/man/man1/fletch.1", "share/fletch/server.toml"]
    {
        assert!(listed.contains(name), "{name}");
    }
    let mut config = Command::new(prefix.path().join("bin/fletch-server"));
    config.args(["--config-check", "--config"]).arg(prefix.path().join("share/fletch/server.toml"));
    let checked = config.output().expect("fletch-server");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let mut remove = Command::new("sh");
    remove.args(["-c", "xargs -d '\\n' rm -f < share/doc/fletch/files"]).current_dir(prefix.path());
    run(&mut remove);
    assert_eq!(below(prefix.path()), BTreeSet::new());
}

/// Calls `mount.fletch` with words of mount(8).
fn helper(at: &Path, words: &[&str]) -> Output {
    Command::new(at).args(words).env_remove("FLETCH_SERVER").output().expect("mount.fletch")
}

#[test]
fn the_helper_of_mount_mounts_and_refuses() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let home = dir();
    let at = home.path().join("mount.fletch");
    symlink(bin("fletch-mount"), &at).expect("symlink");
    let [data, state, mnt] = ["data", "state", "mnt"].map(|name| home.path().join(name));
    fs::create_dir_all(data.join("cat")).expect("mkdir");
    fs::create_dir(&mnt).expect("mkdir");
    fs::write(data.join("cat/1"), b"meow").expect("write");
    let words = |c: &mut Command| {
        c.env("FLETCH_STATE_DIR", &state).env_remove("FLETCH_SERVER");
        run(c);
    };
    words(Command::new(bin("fletch")).args(["index", "--to"]).arg(home.path().join("t")).arg(&data));
    let options = format!(
        "rw,tables={},uri={},state_dir={},nofail,x-systemd.automount",
        home.path().join("t").display(),
        data.display(),
        state.display()
    );
    let dir = mnt.display().to_string();
    let wrong = helper(&at, &["photos", &dir, "-o", "tabels=x"]);
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains("unknown mount option \"tabels\"") && said.contains("tables_memory"), "{said}");
    assert!(helper(&at, &["photos", &dir, "-f", "-o", &options]).status.success(), "-f only checks");
    assert!(!is_mounted(&mnt));
    let done = helper(&at, &["photos", &dir, "-v", "-o", &options]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(fs::read(mnt.join("cat/1")).expect("read"), b"meow");
    run(Command::new("umount").arg(&mnt));
}

#[test]
fn a_directory_may_be_relative_in_the_background() {
    const WITHIN: Duration = Duration::from_secs(20);
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = Site::start(&[]);
    fs::write(site.place("data").join("1"), b"meow").expect("write");
    assert!(!site.publish("photos", &site.place("data")).is_empty());
    let mnt = site.place("here").join("mnt");
    fs::create_dir(&mnt).expect("mkdir");
    let mut c = with_keeper();
    c.args(["photos", "mnt", "--daemon", "--server", &site.url]).current_dir(site.place("here"));
    run(c.arg("--log-file").arg(site.place("logs").join("mount")));
    assert_eq!(fs::read(mnt.join("1")).expect("read"), b"meow");
    let status = stdout(&run(with_keeper().arg("--status").arg("mnt").current_dir(site.place("here"))));
    let worker = status.lines().find_map(|line| line.strip_prefix("worker    process ")).expect(&status);
    let json = stdout(&run(with_keeper().args(["--json", "--status"]).arg(&mnt)));
    let json: serde_json::Value = serde_json::from_str(&json).expect(&json);
    assert_eq!((&json["survives"], &json["dataset"]), (&true.into(), &"photos".into()), "{json}");
    assert_eq!(json["worker"].to_string(), worker, "{json}");
    run(Command::new("kill").args(["-9", worker]));
    until("the mount has another process", WITHIN, || {
        let now = stdout(&run(with_keeper().arg("--status").arg(&mnt)));
        now.contains("survives  yes") && !now.contains(&format!("process {worker}\n"))
    });
    assert_eq!(fs::read_dir(&mnt).expect("listing").count(), 1);
    run(Command::new("umount").arg(&mnt));
}

/// Returns the words of a unit's ExecStart, with paths and specifiers replaced.
fn exec_start(unit: &str, replaced: &[(&str, &str)]) -> Vec<String> {
    let text = fs::read_to_string(repo().join("packaging/systemd/system").join(unit)).expect(unit);
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/fletch-mount "));
    let line = replaced.iter().fold(line.expect("ExecStart").to_owned(), |line, (a, b)| line.replace(a, b));
    line.split_whitespace().map(str::to_owned).collect()
}

/// systemd is not there, so the test starts what its units start, and is the service manager.
#[test]
fn the_units_keep_a_mount_and_replace_what_serves_it() {
    const WITHIN: Duration = Duration::from_secs(20);
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let site = Site::start(&[]);
    fs::write(site.place("data").join("1"), b"meow").expect("write");
    assert!(!site.publish("photos", &site.place("data")).is_empty());
    let (root, run_dir) = (site.place("srv"), site.place("run-keep"));
    let mnt = site.place("srv").join("photos");
    fs::create_dir(&mnt).expect("mkdir");
    let (root, run_dir) = (root.display().to_string(), run_dir.display().to_string());
    let replaced =
        [("/srv/fletch", root.as_str()), ("/run/fletch-keep", &run_dir), ("%i", "photos"), ("%I", "photos")];
    let heard = UnixDatagram::bind(site.place("notify").join("socket")).expect("a socket");
    heard.set_read_timeout(Some(WITHIN)).expect("a timeout");
    let hear = |wanted: &str| {
        let (begun, mut message) = (Instant::now(), [0; 100]);
        while begun.elapsed() < WITHIN {
            let len = heard.recv(&mut message).expect("a message");
            if message[..len] == *wanted.as_bytes() {
                return;
            }
        }
        panic!("no {wanted}");
    };
    let start = |unit: &str| {
        let mut c = with_keeper();
        c.args(exec_start(unit, &replaced)).env("FLETCH_SERVER", &site.url);
        c.env("NOTIFY_SOCKET", site.place("notify").join("socket"));
        Running::spawn(unit, &mut c)
    };
    let status = || stdout(&run(with_keeper().arg("--status").arg(&mnt)));
    let mut keeper = start("fletch-keep.service");
    let mut worker = start("fletch-mount@.service");
    hear("READY=1");
    hear("WATCHDOG=1");
    let said = status();
    let lines = |worker: &str, survives: &str| {
        let wanted = [format!("keeper    process {}", keeper.pid()), format!("worker    {worker}")];
        said_has(&status(), &wanted) && status().contains(&format!("survives  {survives}"))
    };
    assert!(lines(&format!("process {}", worker.pid()), "yes"), "{said}");
    worker.signal(Signal::SIGKILL);
    worker.wait(WITHIN);
    assert!(lines("none", "waiting"), "{}", status());
    let mut worker = start("fletch-mount@.service");
    hear("READY=1");
    assert_eq!(fs::read(mnt.join("1")).expect("read"), b"meow");
    worker.signal(Signal::SIGTERM);
    assert!(worker.wait(WITHIN).success() && is_mounted(&mnt), "`systemctl stop` leaves the mount");
    keeper.signal(Signal::SIGTERM);
    assert!(keeper.wait(WITHIN).success());
    until("nothing is mounted", WITHIN, || !is_mounted(&mnt));
    let none = with_keeper().arg("--status").arg(&mnt).output().expect("the program");
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(!none.status.success() && said.contains("no mount of Fletch"), "{said}");
}

/// Whether a text has all these lines.
fn said_has(text: &str, wanted: &[String]) -> bool {
    wanted.iter().all(|wanted| text.lines().any(|line| line == wanted))
}
