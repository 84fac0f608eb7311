//! Two users of one machine: nobody reaches another user's server, or reads through another's credentials.
//!
//! The users are ids without an account. The kernel names them to the server, as it names real users.

use fletch_tests::bins::{Running, bin, stdout};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const ANN: u32 = 12_345;
const BOB: u32 = 12_346;

/// The machine of the users: a directory that both can enter, with copies of programs that both can run.
struct Machine {
    dir: TempDir,
}

impl Machine {
    fn new(programs: &[&str]) -> Self {
        let dir = TempDir::with_prefix("fu-").expect("a directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("chmod");
        for program in programs {
            fs::copy(bin(program), dir.path().join(program)).expect("a copy that the users may run");
        }
        Machine { dir }
    }

    /// Makes a directory that belongs to a user.
    fn home(&self, name: &str, user: u32, mode: u32) -> PathBuf {
        let home = self.dir.path().join(name);
        fs::create_dir(&home).expect("mkdir");
        chown(&home, Some(user), Some(user)).expect("chown");
        fs::set_permissions(&home, Permissions::from_mode(mode)).expect("chmod");
        home
    }

    /// Returns a program that a user starts, without settings of the machine that runs the tests.
    fn program(&self, user: u32, program: &Path, home: &Path) -> Command {
        let id = user.to_string();
        let mut c = Command::new("setpriv");
        c.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
        c.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", home).env("XDG_RUNTIME_DIR", home);
        c.current_dir(home);
        c
    }

    fn fletch(&self, user: u32, home: &Path, words: &[&str]) -> Output {
        let mut c = self.program(user, &self.dir.path().join("fletch"), home);
        c.args(words).output().expect("spawn")
    }
}

/// Sends a request to a socket as a user. Returns the status code (000 without a reply) and the body.
fn request(machine: &Machine, user: u32, home: &Path, socket: &Path, words: &[&str]) -> (String, String) {
    let mut c = machine.program(user, Path::new("/usr/bin/curl"), home);
    c.args(["-s", "-m", "20", "-w", "\n%{http_code}", "--unix-socket"]).arg(socket).args(words);
    let text = stdout(&c.output().expect("curl"));
    let (body, code) = text.rsplit_once('\n').expect("a status code");
    (code.to_owned(), body.to_owned())
}

#[test]
fn nobody_reads_through_the_credentials_of_another_user() {
    if !have(&[Need::Root]) {
        return;
    }
    let machine = Machine::new(&["fletch", "fletch-server"]);
    let (ann, bob) = (machine.home("ann", ANN, 0o700), machine.home("bob", BOB, 0o700));
    let run = ann.join("fletch");
    fs::create_dir(&run).expect("mkdir");
    chown(&run, Some(ANN), Some(ANN)).expect("chown");
    let socket = run.join("server.sock");
    let mut server = machine.program(ANN, &machine.dir.path().join("fletch-server"), &ann);
    server.args(["--listen", "none", "--cache-size", "0", "--socket"]).arg(&socket);
    server.arg("--state-dir").arg(ann.join("state")).stderr(fs::File::create(ann.join("log")).expect("log"));
    let _server = Running::spawn("ann's server", &mut server);
    until("ann's server answers", Duration::from_secs(20), || {
        socket.exists() && request(&machine, ANN, &ann, &socket, &["http://s/livez"]).0 == "200"
    });

    // The directory is the first wall: Bob does not reach the socket.
    let (code, _) = request(&machine, BOB, &bob, &socket, &["http://s/v1/datasets"]);
    assert_eq!(code, "000");
    let at = format!("unix:{}", socket.display());
    let refused = machine.fletch(BOB, &bob, &["datasets", "--server", &at]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("ermission denied"), "{said}");

    // Ann opens her directory and her socket by mistake. Bob opens the admin page, which Ann's server shows
    // to all users until she hands over credentials.
    for path in [&ann, &run, &socket] {
        let mode = if path == &socket { 0o666 } else { 0o755 };
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
    }
    let mut page = machine.program(BOB, Path::new("/usr/bin/curl"), &bob);
    page.args(["-sN", "-m", "20", "http://s/v1/dashboard/events", "--unix-socket"]).arg(&socket);
    let page = page.stdout(Stdio::piped()).spawn().expect("curl");
    std::thread::sleep(Duration::from_secs(1));
    let given = r#"{"origin":"s3://private","options":{"region":"us-east-1"},"secrets":
        {"aws_access_key_id":"AKIAANN","aws_secret_access_key":"secret-of-ann"}}"#;
    let give = ["-X", "PUT", "-H", "Content-Type: application/json", "-d", given];
    let give = [&give[..], &["http://s/v1/origins/credentials"]].concat();
    let (code, body) = request(&machine, ANN, &ann, &socket, &give);
    assert_eq!(code, "200", "{body}");
    for path in ["/v1/datasets", "/v1/jobs", "/v1/origins", "/v1/origins/credentials", "/metrics"] {
        let url = format!("http://s{path}");
        let (code, body) = request(&machine, BOB, &bob, &socket, &[&url]);
        assert_eq!(code, "403", "{path}: {body}");
        assert!(body.contains("12346") && body.contains("server of your own"), "{path}: {body}");
        assert!(!body.contains("AKIAANN") && !body.contains("secret-of-ann"), "{path}: {body}");
        let (code, body) = request(&machine, ANN, &ann, &socket, &[&url]);
        assert_eq!(code, "200", "{path}: {body}");
    }
    let (code, body) = request(&machine, BOB, &bob, &socket, &give);
    assert_eq!(code, "403", "{body}");
    let events = stdout(&page.wait_with_output().expect("curl ends with the stream"));
    assert!(events.contains("event: now") && events.contains("event: end"), "{events}");
    let log = fs::read_to_string(ann.join("log")).expect("log");
    assert!(!log.contains("secret-of-ann"), "{log}");
}

#[test]
fn a_stranger_s_socket_gets_nothing() {
    if !have(&[Need::Root, Need::Python]) {
        return;
    }
    let machine = Machine::new(&["fletch"]);
    // Ann finds a socket in her own directory on which a process of Bob listens.
    let (ann, bob) = (machine.home("ann", ANN, 0o755), machine.home("bob", BOB, 0o700));
    let own = ann.join("fletch");
    fs::create_dir(&own).expect("mkdir");
    fs::set_permissions(&own, Permissions::from_mode(0o777)).expect("chmod");
    let socket = own.join("server.sock");
    let script = format!(
        "import os, socket, time\ns = socket.socket(socket.AF_UNIX)\ns.bind({at:?})\ns.listen()\n\
         os.chmod({at:?}, 0o777)\ntime.sleep(60)\n",
        at = socket.display().to_string()
    );
    let mut listener = machine.program(BOB, Path::new("/usr/bin/python3"), &bob);
    let _listener = Running::spawn("bob's listener", listener.args(["-c", &script]));
    until("bob's process listens", Duration::from_secs(10), || {
        socket.exists() && fs::metadata(&socket).is_ok_and(|m| m.mode() & 0o777 == 0o777)
    });
    let refused = machine.fletch(ANN, &ann, &["datasets"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(5), "{said}");
    for part in ["12346", "nothing was sent", "FLETCH_SERVER"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// The kernel shows unmapped users as `nobody`, too. In a namespace that maps all users there are none.
#[test]
fn nobody_uses_the_server_that_it_started() {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if !have(&[Need::Root]) || map.split_whitespace().nth(2) != Some("4294967295") {
        return;
    }
    const NOBODY: u32 = 65_534;
    let machine = Machine::new(&["fletch", "fletch-server"]);
    let home = machine.home("nobody", NOBODY, 0o700);
    let data = machine.home("data", NOBODY, 0o755);
    fs::write(data.join("a"), "hi").expect("write");
    let ok = |words: &[&str]| {
        let out = machine.fletch(NOBODY, &home, words);
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
        stdout(&out)
    };
    ok(&["up"]);
    let data = data.display().to_string();
    ok(&["index", &data]);
    ok(&["register", "set", &data]);
    assert!(ok(&["datasets"]).contains("set"));
    ok(&["unregister", "set"]);
    ok(&["down"]);
    // Without a home the error says what to set.
    let mut c = machine.program(NOBODY, &machine.dir.path().join("fletch"), &home);
    let out = c.arg("up").env("HOME", "/nonexistent").output().expect("spawn");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(said.contains("FLETCH_STATE_DIR and FLETCH_CACHE_DIR"), "{said}");
}
