//! TLS through the built programs: a mount, the command `fletch` and the Python client.

use fletch_testkit::tls::Authority;
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::{Site, index};
use fletch_tests::python::Installed;
use fletch_tests::require::{Need, have};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// A server that requires client certificates, with the dataset `d`.
struct Secure {
    site: Site,
    authority: Authority,
    dir: TempDir,
    tree: TempDir,
}

fn content(i: usize) -> Vec<u8> {
    let mut bytes = vec![0; 30_000 + i];
    blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

const FILES: usize = 40;

impl Secure {
    fn start() -> Self {
        let (dir, tree) = (TempDir::new().expect("dir"), TempDir::new().expect("tree"));
        for i in 0..FILES {
            fs::write(tree.path().join(format!("f{i:02}")), content(i)).expect("write");
        }
        let authority = Authority::new("tests");
        let (cert, key) = authority.server(&NAMES, 4000).write(dir.path(), "server");
        let _ = authority.client("reader").write(dir.path(), "client");
        let ca = dir.path().join("ca.pem");
        fs::write(&ca, authority.pem()).expect("write");
        let [cert, key, ca] = [cert, key, ca].map(|p| p.display().to_string());
        let site =
            Site::start(&["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-client-ca-file", &ca]);
        let secure = Secure { site, authority, dir, tree };
        let tables = secure.site.place("tables");
        let _ = index(secure.tree.path(), &tables, &[]);
        let mut register = secure.fletch(true);
        run(register.arg("register").arg("d").arg(secure.tree.path()).arg("--tables").arg(tables));
        secure
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command `fletch` with the files of TLS in its environment.
    fn fletch(&self, with_certificate: bool) -> Command {
        let mut c = command("fletch");
        c.env("FLETCH_SERVER", &self.site.url).env("FLETCH_CA_FILE", self.path("ca.pem"));
        if with_certificate {
            c.env("FLETCH_CERT_FILE", self.path("client.crt"))
                .env("FLETCH_KEY_FILE", self.path("client.key"));
        }
        c
    }
}

fn told(c: &mut Command) -> (Option<i32>, String) {
    let out = c.output().expect("runs");
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn the_command_says_which_file_is_missing() {
    let secure = Secure::start();
    assert!(secure.site.url.starts_with("https://"), "{}", secure.site.url);
    assert!(stdout(&run(secure.fletch(true).arg("datasets"))).contains("d\t"));
    let (code, refused) = told(secure.fletch(false).arg("datasets"));
    assert_eq!(code, Some(5), "{refused}");
    assert!(refused.contains("certificate") && refused.contains("--cert-file"), "{refused}");
    let begun = Instant::now();
    let (code, unknown) = told(command("fletch").args(["datasets", "--server", &secure.site.url]));
    assert_eq!(code, Some(4), "{unknown}");
    assert!(unknown.contains("is not signed by a known CA") && unknown.contains("--ca-file"), "{unknown}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let plain = secure.site.url.replace("https", "http");
    let (code, plain) = told(command("fletch").args(["datasets", "--server", &plain]));
    assert_eq!(code, Some(4), "{plain}");
    assert!(plain.contains("use https://"), "{plain}");
    let doctor = told(command("fletch").args(["doctor", "--server", &secure.site.url])).1;
    let doctor = doctor
        + &stdout(&command("fletch").args(["doctor", "--server", &secure.site.url]).output().expect("runs"));
    assert!(doctor.contains("--ca-file"), "{doctor}");
}

fn read_all(dir: &Path) {
    for i in 0..FILES {
        let path = dir.join(format!("f{i:02}"));
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(bytes == content(i), "{}: other bytes", path.display());
    }
}

#[test]
fn a_mount_reads_over_tls_while_every_certificate_is_renewed() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let secure = Secure::start();
    let [ca, cert, key] =
        ["ca.pem", "client.crt", "client.key"].map(|n| secure.path(n).display().to_string());
    let files = ["--ca-file", &*ca, "--cert-file", &cert, "--key-file", &key];
    // Little memory, so that reads go to the server.
    let little = ["--memory", "32MiB", "--io-timeout", "10s"];
    let mounted = secure.site.mount("d", "tls", &[&files[..], &little].concat());
    read_all(&mounted.dir);
    let _ = secure.authority.server(&NAMES, 4001).write(secure.dir.path(), "server");
    let _ = secure.authority.client("reader").write(secure.dir.path(), "client");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        read_all(&mounted.dir);
    }
    let log = secure.site.mount_log("tls");
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn python_reads_over_tls() {
    if !have(&[Need::Torch]) {
        return;
    }
    let (secure, installed) = (Secure::start(), Installed::new());
    let program = "import fletch, pickle, sys\n\
        url, ca, cert, key = sys.argv[1:]\n\
        client = fletch.Client(url, ca_file=ca, cert_file=cert, key_file=key)\n\
        version = pickle.loads(pickle.dumps(client)).resolve('d')\n\
        print(sum(len(version.read(i)) for i in range(len(version))))\n\
        for missing, word in (({}, '--ca-file'), ({'ca_file': ca}, '--cert-file')):\n    \
            try:\n        \
                fletch.Client(url, **missing).info()\n    \
            except fletch.FletchError as error:\n        \
                assert word in str(error) + error.hint, error\n    \
            else:\n        \
                raise AssertionError(missing)\n";
    let mut python = installed.command();
    python.args(["-c", program, &secure.site.url]);
    python.args(["ca.pem", "client.crt", "client.key"].map(|n| secure.path(n)));
    let bytes: usize = (0..FILES).map(|i| content(i).len()).sum();
    assert_eq!(stdout(&run(&mut python)), bytes.to_string());
}
