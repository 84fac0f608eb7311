//! Tests the program: its line when it is ready, its exit codes, and that it always ends.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    io::Read as _,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

fn command(dir: &Path, more: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-server"));
    c.env_clear().stdin(Stdio::null());
    for (flag, name) in [
        ("--state-dir", "state"),
        ("--cache-dir", "cache"),
        ("--socket", "s.sock"),
        ("--ready-file", "ready"),
    ] {
        c.arg(flag).arg(dir.join(name));
    }
    c.args(more);
    c
}

fn run(dir: &Path, more: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(dir, more).output().expect("run");
    let text = |b| String::from_utf8(b).expect("utf-8");
    (status.code().expect("exit code"), text(stdout), text(stderr))
}

fn start(dir: &Path, more: &[&str]) -> (Child, String) {
    let mut args = vec!["--listen=127.0.0.1:0"];
    args.extend(more);
    let mut child = command(dir, &args).stderr(Stdio::piped()).spawn().expect("spawn");
    let mut url = None;
    for _ in 0..1000 {
        url = std::fs::read_to_string(dir.join("ready")).ok();
        if url.is_some() || child.try_wait().expect("wait").is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    if let Some(url) = url {
        return (child, url.trim().to_owned());
    }
    // Ended or killed here: nothing is left behind.
    drop(child.kill());
    let mut told = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut told).expect("stderr");
    panic!("never ready, ended as {:?}: {told}", child.wait());
}

/// Sends a signal. Returns the exit code, the text on stderr, and the time until the exit.
fn stop(mut child: Child, signal: Signal) -> (Option<i32>, String, Duration) {
    let begun = Instant::now();
    kill(Pid::from_raw(i32::try_from(child.id()).expect("pid")), signal).expect("kill");
    let mut told = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut told).expect("stderr");
    (child.wait().expect("wait").code(), told, begun.elapsed())
}

#[tokio::test]
async fn it_says_where_it_listens_and_ends_on_both_signals() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let dir = tempfile::tempdir().expect("tempdir");
        let (child, url) = start(dir.path(), &["--log-format", "json"]);
        assert_eq!(reqwest::get(format!("{url}/livez")).await.expect("answer").status(), 200);
        let (code, told, took) = stop(child, signal);
        assert_eq!(code, Some(0), "{told}");
        let socket = dir.path().join("s.sock");
        assert!(told.contains(&format!("listening on {url} and unix:{}", socket.display())), "{told}");
        assert!(told.contains("\"level\":\"INFO\""), "{told}");
        assert!(took < Duration::from_secs(5) && !socket.exists(), "{took:?}");
    }
}

#[tokio::test]
async fn it_ends_in_time_though_an_origin_never_answers() {
    let dir = tempfile::tempdir().expect("tempdir");
    let silent = TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = silent.local_addr().expect("addr");
    let file = dir.path().join("f.toml");
    let text = format!(
        "[[origin]]\nprefix = \"s3://silent\"\nendpoint = \"http://{endpoint}\"\nallow_http = true\nregion = \
            \"x\"\ncredentials = \"anonymous\"\n"
    );
    std::fs::write(&file, text).expect("write");
    let (child, url) = start(dir.path(), &["--config", file.to_str().expect("utf-8"), "--io-timeout", "10m"]);
    let http = reqwest::Client::new();
    let body = r#"{"name":"s","uri":"s3://silent/x"}"#;
    assert_eq!(
        http.post(format!("{url}/v1/datasets"))
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .expect("answer")
            .status(),
        201
    );
    let unknown = fletch_api::routes::manifest(fletch_core::Root(fletch_core::Hash::of(b"unknown")));
    let hanging = TaskTracker::new().spawn(http.get(format!("{url}{unknown}")).send());
    // Until the origin was asked; what was accepted stays open, or the origin would have answered.
    let accepted = tokio::task::spawn_blocking(move || silent.accept().map(|(s, _)| (s, silent)));
    let _held = accepted.await.expect("task").expect("asked");
    let (code, told, took) =
        tokio::task::spawn_blocking(move || stop(child, Signal::SIGTERM)).await.expect("task");
    assert_eq!(code, Some(0), "{told}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(hanging.await.expect("task").is_err());
}

#[test]
fn settings_are_shown_with_where_they_came_from_and_faults_end_it_with_2() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (code, out, err) = run(dir.path(), &["--memory", "128MiB", "config", "show", "--effective"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("memory.max = \"128MiB\"") && out.contains("# flag --memory"), "{out}");
    let mut c = command(dir.path(), &["--config-check"]);
    let out = c.env("FLETCH_MEMORY", "256MiB").output().expect("run");
    assert!(
        out.status.success() && String::from_utf8_lossy(&out.stdout).contains("# environment FLETCH_MEMORY")
    );
    let (code, _, err) = run(dir.path(), &["--listen", "0.0.0.0:7380", "--memory", "1"]);
    assert_eq!((code, err.lines().count()), (2, 1), "{err}");
    assert!(err.contains("loopback"), "{err}");
    assert_eq!(run(dir.path(), &["--no-such-flag"]).0, 2);
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let addr = taken.local_addr().expect("addr").to_string();
    let (code, _, err) = run(dir.path(), &["--listen", &addr]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("--listen"), "{err}");
}

#[tokio::test]
async fn a_token_is_told_once_and_stands_nowhere_afterwards() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("tokens.toml");
    let made = |args: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-server"));
        let out =
            c.env_clear().args(["token", "new", "--append"]).arg(&file).args(args).output().expect("run");
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        let token = String::from_utf8(out.stdout).expect("utf-8").trim().to_owned();
        assert!(token.starts_with("fletch_") && !String::from_utf8_lossy(&out.stderr).contains(&token));
        token
    };
    let token = made(&["--tenant", "t", "--role", "admin"]);
    let unknown = format!("fletch_{}", "5".repeat(64));
    let mut c =
        command(dir.path(), &["--listen=127.0.0.1:0", "--auth-tokens", file.to_str().expect("utf-8")]);
    let mut child = c.env("FLETCH_LOG", "trace").stderr(Stdio::piped()).spawn().expect("spawn");
    // Read along: a full pipe would stop the server.
    let mut pipe = child.stderr.take().expect("piped");
    let reading = std::thread::spawn(move || {
        let mut told = String::new();
        pipe.read_to_string(&mut told).map(|_| told)
    });
    let url = loop {
        match std::fs::read_to_string(dir.path().join("ready")) {
            Ok(url) => break url.trim().to_owned(),
            Err(_) => assert!(child.try_wait().expect("wait").is_none(), "ended before it was ready"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let http = reqwest::Client::new();
    let mut shown = String::new();
    for t in [&token, &unknown] {
        for path in
            ["/metrics", "/v1/accounts", "/v1/datasets/none", "/v1/versions/x/manifest.json", "/v1/info"]
        {
            let r = http.get(format!("{url}{path}")).bearer_auth(t).header("fletch-job", "a b").send().await;
            let r = r.expect("answer");
            shown += &format!("{} {:?} {}\n", r.status(), r.headers().clone(), r.text().await.expect("text"));
        }
    }
    assert!(
        shown.contains("200 OK")
            && shown.contains("401 Unauth")
            && shown.contains("fletch_auth_refused_total")
    );
    kill(Pid::from_raw(i32::try_from(child.id()).expect("pid")), Signal::SIGTERM).expect("kill");
    assert_eq!(child.wait().expect("wait").code(), Some(0));
    let told = reading.join().expect("thread").expect("utf-8");
    assert!(told.contains("stopped"), "the log was read to its end: {told}");
    let file = std::fs::read_to_string(&file).expect("file");
    for t in [&token, &unknown] {
        let secret = t.trim_start_matches("fletch_");
        assert!(!told.contains(secret) && !shown.contains(secret) && !file.contains(secret));
    }
}

/// Returns the permission bits of a file.
fn mode(path: &Path) -> u32 {
    std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).expect("file").permissions()) & 0o777
}

/// Returns every file and directory below a directory, with the directory.
fn below(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut all = vec![dir.to_owned()];
    for entry in std::fs::read_dir(dir).expect("directory") {
        let entry = entry.expect("entry");
        match entry.file_type().expect("type").is_dir() {
            true => all.extend(below(&entry.path())),
            false => all.push(entry.path()),
        }
    }
    all
}

#[tokio::test]
async fn other_users_can_read_neither_state_nor_cache() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().expect("tempdir");
    let tree = crate::common::Tree::usual();
    let root = tree.index().root();
    let state = dir.path().join("state");
    // An earlier version left these, or a restored backup.
    std::fs::create_dir_all(state.join("jobs")).expect("mkdir");
    std::fs::write(state.join("jobs/old"), "x").expect("write");
    for (path, mode) in [("", 0o755), ("jobs", 0o775), ("jobs/old", 0o644)] {
        std::fs::set_permissions(state.join(path), std::fs::Permissions::from_mode(mode)).expect("chmod");
    }
    let (child, url) = start(dir.path(), &["--memory", "64MiB"]);
    let http = reqwest::Client::new();
    let post = async |path: &str, body: serde_json::Value| {
        let r = http.post(format!("{url}{path}")).header("content-type", "application/json");
        let r = r.body(body.to_string()).send().await.expect("answer");
        let (status, text) = (r.status(), r.text().await.expect("text"));
        assert!(status.is_success(), "{path}: {status} {text}");
    };
    post("/v1/datasets", serde_json::json!({"name": "d", "uri": tree.uri()})).await;
    // The job's record is a file of the state, too.
    let world = serde_json::json!({"ranks": 1, "batch": 2, "tail": "keep"});
    post("/v1/jobs", serde_json::json!({"name": "j", "dataset": "d", "world": world})).await;
    let file = format!("{url}/v1/versions/{root}/files/big.bin");
    assert_eq!(
        http.get(file).send().await.expect("answer").bytes().await.expect("body").len(),
        tree.files["big.bin"].len()
    );
    let (code, told, _) = stop(child, Signal::SIGTERM);
    assert_eq!(code, Some(0), "{told}");
    let files = below(&state).into_iter().chain(below(&dir.path().join("cache")));
    let files: Vec<_> = files.collect();
    assert!(files.len() > 6, "{files:?}");
    for file in files {
        assert_eq!(mode(&file) & 0o077, 0, "{}: {:o}", file.display(), mode(&file));
    }
    assert_eq!(mode(&dir.path().join("ready")), 0o644);
}

#[test]
fn with_tokens_an_origin_and_a_directory_without_domains_stop_the_start_and_the_line_helps() {
    let dir = tempfile::tempdir().expect("tempdir");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let origin = "[[origin]]\nprefix = \"s3://bucket\"\n";
    std::fs::write(at("f.toml"), format!("[local]\ndirs = [\"/usr\"]\n{origin}")).expect("write");
    let tokens = at("tokens.toml");
    let args = ["--config", &at("f.toml"), "--auth-tokens", &tokens, "--listen", "127.0.0.1:0"];
    let (code, _, err) = run(dir.path(), &args);
    assert_eq!((code, err.lines().count()), (2, 2), "{err}");
    let line = |from: &str, to: char| {
        let rest = &err[err.find(from).unwrap_or_else(|| panic!("{from} in {err}"))..];
        rest[..rest.find(to).expect("its end")].to_owned()
    };
    // The lines are taken from the message, as an operator would.
    let (domains, usr) = (line("domains = ", '`'), line("/usr=", '"'));
    std::fs::write(at("f.toml"), format!("[local]\ndirs = [{usr:?}]\n{origin}{domains}\n")).expect("write");
    let (code, out, err) = run(dir.path(), &[&args[..], &["--config-check"]].concat());
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    // The same without tokens: nothing is asked for.
    std::fs::write(at("f.toml"), format!("[local]\ndirs = [\"/usr\"]\n{origin}")).expect("write");
    assert_eq!(run(dir.path(), &["--config", &at("f.toml"), "--config-check"]).0, 0);
}

#[tokio::test]
async fn what_config_show_prints_starts_a_server_with_the_same_settings() {
    let dir = tempfile::tempdir().expect("tempdir");
    let shown = dir.path().join("shown.toml");
    let args =
        ["--limits-requests", "77", "--io-timeout", "7s", "--memory", "64MiB", "--listen", "127.0.0.1:0"];
    let (code, out, err) = run(dir.path(), &[&args[..], &["config", "show", "--effective"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    std::fs::write(&shown, &out).expect("write");
    let values = |text: &str| -> Vec<String> {
        text.lines().map(|l| l.split("  # ").next().unwrap_or(l).trim_end().to_owned()).collect()
    };
    let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-server"));
    let again = c.env_clear().arg("--config").arg(&shown).arg("--config-check").output().expect("run");
    assert_eq!(values(&out), values(&String::from_utf8_lossy(&again.stdout)), "{again:?}");
    let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-server"));
    c.env_clear().arg("--config").arg(&shown).arg("--ready-file").arg(dir.path().join("up"));
    let mut child = c.stderr(Stdio::piped()).spawn().expect("spawn");
    while !dir.path().join("up").exists() {
        assert!(child.try_wait().expect("wait").is_none(), "ended before it was ready");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(stop(child, Signal::SIGTERM).0, Some(0));
}

#[tokio::test]
async fn an_idle_server_ends_by_itself_and_logs_to_its_file_without_colours() {
    let dir = tempfile::tempdir().expect("tempdir");
    let log = dir.path().join("server.log");
    let log_flag = log.to_str().expect("utf-8");
    let (mut child, url) = start(dir.path(), &["--idle", "2s", "--log-file", log_flag]);
    let http = reqwest::Client::new();
    let root = fletch_core::Hash::of(b"root").to_string();
    let mount = serde_json::json!({"dataset": "d", "root": root, "dir": "/m", "host": "h", "pid": 7,
        "job": "j", "version": "latest"});
    let put = http.put(format!("{url}/v1/mounts/m1")).header("content-type", "application/json");
    assert_eq!(put.body(mount.to_string()).send().await.expect("answer").status(), 204);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(child.try_wait().expect("wait").is_none(), "a mount is announced");
    assert_eq!(http.delete(format!("{url}/v1/mounts/m1")).send().await.expect("answer").status(), 204);
    let gone = Instant::now();
    let ended = loop {
        // Probes keep no server alive.
        drop(http.get(format!("{url}/livez")).send().await);
        match child.try_wait().expect("wait") {
            Some(status) => break status,
            None if gone.elapsed() < Duration::from_secs(20) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            None => {
                drop(child.kill());
                panic!("it never ended: {:?}", child.wait());
            }
        }
    };
    assert_eq!(ended.code(), Some(0));
    assert!(gone.elapsed() >= Duration::from_millis(1_900), "{:?}", gone.elapsed());
    let mut told = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut told).expect("stderr");
    assert!(told.contains("listening on") && !told.contains("INFO"), "{told}");
    let text = std::fs::read_to_string(&log).expect("the log");
    assert!(text.contains("nobody uses this server") && text.contains("INFO"), "{text}");
    assert!(text.trim_end().ends_with("stopped") && !text.contains('\x1b'), "{text}");
    let (code, _, err) = run(dir.path(), &["--log-file", "/no/such/directory/log"]);
    assert!(code == 1 && err.contains("/no/such/directory/log"), "{err}");
    let (code, _, err) = run(dir.path(), &["--idle", "0s", "--log-file-bytes-max", "1KiB"]);
    assert!(code == 2 && err.contains("idle (flag --idle)") && err.contains("log.file_bytes_max"), "{err}");
}
