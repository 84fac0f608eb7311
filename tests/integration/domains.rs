//! Two tenants of one server: tokens in every program, and the loss of access when a dataset is unregistered.

use fletch_tests::bins::{Running, command, run, stdout};
use fletch_tests::fixture::{Site, index};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::mount::{MntFlags, umount2};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tempfile::TempDir;

struct Mounted {
    dir: PathBuf,
    _daemon: Running,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Already gone where the daemon ended by itself.
        umount2(&self.dir, MntFlags::MNT_DETACH).ok();
    }
}

fn mount(site: &Site, token: &Path, dir: &str) -> Mounted {
    let dir = site.place(dir);
    let log = dir.with_extension("log");
    let mut c = command("fletch-mount");
    c.arg("d").arg(&dir).args(["--server", &site.url]).arg("--token-file").arg(token);
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).expect("log"));
    let mut daemon = Running::spawn("fletch-mount", &mut c);
    until("the mount is usable", Duration::from_secs(20), || {
        assert!(daemon.alive(), "the mount ended: {}", fs::read_to_string(&log).unwrap_or_default());
        fletch_tests::fixture::is_mounted(&dir)
    });
    Mounted { dir, _daemon: daemon }
}

fn token(home: &Path, file: &Path, tenant: &str) -> PathBuf {
    let mut c = command("fletch-server");
    c.args(["token", "new", "--tenant", tenant, "--append"]).arg(file);
    let at = home.join(format!("{tenant}.token"));
    fs::write(&at, stdout(&run(&mut c))).expect("token");
    at
}

fn fletch(site: &Site, token: &Path, args: &[&str]) -> std::process::Command {
    let mut c = command("fletch");
    c.args(args).args(["--server", &site.url]).arg("--token-file").arg(token);
    c
}

#[test]
fn unregistering_in_one_domain_ends_its_mount_and_leaves_the_others() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-domains-").expect("home");
    let tokens = home.path().join("tokens.toml");
    let (a, b) = (token(home.path(), &tokens, "a"), token(home.path(), &tokens, "b"));
    let data = home.path().join("data");
    fs::create_dir_all(data.join("set")).expect("mkdir");
    for i in 0..20u8 {
        fs::write(data.join(format!("set/{i}.bin")), vec![i; 30_000]).expect("write");
    }
    let tables = home.path().join("tables");
    fs::create_dir(&tables).expect("mkdir");
    let root = index(&data.join("set"), &tables, &[]);
    let dirs = format!("{}=*:{}=*", data.display(), tables.display());
    let site = Site::start(&["--auth-tokens", tokens.to_str().expect("utf-8"), "--local-dirs", &dirs]);

    // Without a token, and with one that nobody knows: denied, in every program.
    let mut c = command("fletch");
    assert_eq!(c.args(["datasets", "--server", &site.url]).output().expect("runs").status.code(), Some(5));
    let wrong = home.path().join("wrong.token");
    fs::write(&wrong, "fletch_wrong").expect("write");
    let out = fletch(&site, &wrong, &["datasets"]).output().expect("runs");
    assert_eq!(out.status.code(), Some(5), "{}", String::from_utf8_lossy(&out.stderr));
    let mut c = command("fletch-mount");
    c.arg("d").arg(site.place("denied")).args(["--server", &site.url]).arg("--token-file").arg(&wrong);
    assert_eq!(c.output().expect("runs").status.code(), Some(5));

    let (uri, at) = (data.join("set").display().to_string(), tables.display().to_string());
    for token in [&a, &b] {
        run(&mut fletch(&site, token, &["register", "d", &uri, "--tables", &at]));
    }
    let (of_a, of_b) = (mount(&site, &a, "mnt-a"), mount(&site, &b, "mnt-b"));
    let read = |m: &Mounted| {
        let all = (0..20u8).map(|i| fs::read(m.dir.join(format!("{i}.bin"))));
        all.collect::<std::io::Result<Vec<_>>>()
    };
    assert_eq!(read(&of_a).expect("reads"), read(&of_b).expect("reads"));
    let held = fs::File::open(of_a.dir.join("7.bin")).expect("open");
    let page = || std::os::unix::fs::FileExt::read_at(&held, &mut [0; 4096], 0);
    assert_eq!(page().expect("in the page cache"), 4096);

    let begun = Instant::now();
    run(&mut fletch(&site, &a, &["unregister", "d"]));
    // At once at the server, whatever is cached there.
    let out = fletch(&site, &a, &["ls", &format!("d@{root}")]).output().expect("runs");
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stderr));
    until("a's mount refuses what the kernel had", Duration::from_secs(5), || page().is_err());
    until("by path too", Duration::from_secs(5).saturating_sub(begun.elapsed()), || read(&of_a).is_err());
    assert_eq!(page().expect_err("refused").raw_os_error(), Some(libc::ESTALE));
    assert_eq!(read(&of_b).expect("b's goes on").len(), 20);
    assert!(run(&mut fletch(&site, &b, &["ls", "d"])).stdout.len() > 50);

    // A rotated token: the mount of b takes it over, and one that was not renewed ends.
    let (old, new) = (home.path().join("old.token"), token(home.path(), &tokens, "b2"));
    fs::copy(&b, &old).expect("copy");
    let lines = fs::read_to_string(&tokens).expect("tokens").replace("\"b2\"", "\"b\"");
    let second = mount(&site, &old, "mnt-old");
    assert_eq!(read(&second).expect("reads").len(), 20);
    fs::copy(&new, &b).expect("rotate");
    let keep: Vec<&str> = lines.split("\n[[token]]").collect();
    let hash_of_old = keep[2].lines().find(|l| l.starts_with("hash")).expect("hash").to_owned();
    let without: Vec<&str> = keep.iter().copied().filter(|t| !t.contains(&hash_of_old)).collect();
    fs::write(tokens.with_extension("part"), without.join("\n[[token]]")).expect("write");
    fs::rename(tokens.with_extension("part"), &tokens).expect("rename");
    // A second for the server to look, and five for the mount.
    until("the mount whose token is gone refuses", Duration::from_secs(8), || read(&second).is_err());
    assert_eq!(read(&second).expect_err("refused").raw_os_error(), Some(libc::EACCES));
    assert_eq!(read(&of_b).expect("the one with the new token goes on").len(), 20);
    for secret in [&a, &new, &old] {
        let secret = fs::read_to_string(secret).expect("token");
        assert!(!site.log().contains(secret.trim()), "no token in the log");
    }
}

#[test]
fn warmup_and_evict_say_what_is_true_by_their_exit_codes() {
    let home = TempDir::with_prefix("fletch-warmup-").expect("home");
    let data = home.path().join("data");
    fs::create_dir_all(&data).expect("mkdir");
    for i in 0..30u8 {
        fs::write(data.join(format!("{i}.bin")), vec![i; 50_000]).expect("write");
    }
    let site = Site::start(&["--cache-size", "64MiB", "--cache-free-floor", "0"]);
    let root = site.publish("d", &data);
    let fletch = |args: &[&str]| {
        let out = command("fletch").args(args).args(["--server", &site.url]).output().expect("runs");
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    };
    let json = |args: &[&str]| -> serde_json::Value {
        let (code, out, err) = fletch(&[args, &["--json"]].concat());
        let mut v: serde_json::Value =
            serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out} {err}"));
        v["code"] = code.into();
        v
    };
    let nothing = json(&["warmup", "d", "--check"]);
    assert_eq!(
        (&nothing["code"], &nothing["state"], &nothing["missing"]["chunks"]),
        (&3.into(), &"partial".into(), &30.into())
    );
    let (code, out, err) = fletch(&["warmup", "d@latest", "--wait", "--progress", "plain"]);
    assert!(code == Some(0) && out.contains("30 of 30 chunks (100.0 %)"), "{out} {err}");
    let checked = json(&["warmup", &format!("d@{root}"), "--check"]);
    assert_eq!(
        (&checked["code"], &checked["state"], &checked["present"]["chunks"]),
        (&0.into(), &"done".into(), &30.into())
    );
    assert_eq!(checked["root"], root.as_str());
    let (code, out, _) = fletch(&["evict", "d"]);
    assert!(code == Some(0) && out.contains("30 chunks"), "{out}");
    assert_eq!(fletch(&["warmup", "d", "--check"]).0, Some(3));
    // Without --wait: begun, and its id told.
    let (code, id, _) = fletch(&["warmup", "d", "--pin", "5m"]);
    assert!(code == Some(0) && id.trim().len() == 16, "{id}");
    until("it is warm", Duration::from_secs(10), || fletch(&["warmup", "d", "--check"]).0 == Some(0));
    assert_eq!(fletch(&["warmup", "none", "--wait"]).0, Some(1));
    let (code, _, err) = fletch(&["warmup", "/a/path"]);
    assert!(code == Some(1) && err.contains("/a/path"), "{code:?} {err}");
    assert_eq!(fletch(&["evict", "none"]).0, Some(1));
}

#[test]
fn ctrl_c_ends_the_waiting_and_the_warmup_goes_on() {
    let home = TempDir::with_prefix("fletch-warmup-").expect("home");
    let data = home.path().join("data");
    fs::create_dir_all(&data).expect("mkdir");
    for i in 0..30u8 {
        fs::write(data.join(format!("{i}.bin")), vec![i; 50_000]).expect("write");
    }
    let tables = home.path().join("tables");
    fs::create_dir(&tables).expect("mkdir");
    drop(index(&data, &tables, &[]));
    let site = Site::start(&["--cache-size", "64MiB", "--cache-free-floor", "0"]);
    site.register("d", &data.display().to_string(), &tables.display().to_string());
    let mut c = command("fletch");
    c.args(["warmup", "d", "--wait", "--server", &site.url]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = c.spawn().expect("spawn");
    let warmups = || site.json("/v1/warmups")["warmups"].as_array().expect("list").clone();
    until("it is begun", Duration::from_secs(10), || !warmups().is_empty());
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("pid"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("kill");
    let mut told = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("piped"), &mut told).expect("stderr");
    let code = child.wait().expect("wait").code();
    // On a fast machine it may have been over first.
    if code == Some(130) {
        assert!(told.contains("goes on"), "{told}");
    } else {
        assert_eq!(code, Some(0), "{told}");
    }
    until("it went on to its end", Duration::from_secs(30), || warmups()[0]["state"] == "done");
}
