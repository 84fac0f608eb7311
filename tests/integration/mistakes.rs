//! The mistakes of the first hour: each message names the cause and the next command, and that command works.
//!
//! A row makes one mistake, asserts what the message says, and runs the command that the message names. The
//! rows share a server and build on each other, as the commands of a user do.

use fletch_testkit::scripted::{ScriptedServer, answer};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use fletch_tests::bins::{Running, command, run};
use fletch_tests::fixture::{Site, is_mounted};
use fletch_tests::require::{Need, have};
use fletch_tests::user::{Said, said};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A generous bound for what is said at once: the retries of a call alone take longer.
const AT_ONCE: Duration = Duration::from_secs(2);

/// A user's directory, and a server.
struct Desk {
    site: Site,
    dir: PathBuf,
}

impl Desk {
    fn new() -> Self {
        let site = Site::start(&[]);
        let dir = site.place("desk");
        Desk { site, dir }
    }

    fn path(&self, rel: &str) -> String {
        self.dir.join(rel).display().to_string()
    }

    /// Writes a small dataset, with one file that a pack leaves where it is.
    fn dataset(&self, name: &str) {
        let dir = self.dir.join(name);
        fs::create_dir_all(dir.join("d")).expect("mkdir");
        for i in 0..20u8 {
            fs::write(dir.join(format!("d/{i}")), vec![i; 1000 + usize::from(i)]).expect("write");
        }
        fs::write(dir.join("long"), name.repeat(1 << 20)).expect("write");
    }

    fn fletch(&self, words: &[impl AsRef<str>]) -> Command {
        let mut c = command("fletch");
        c.args(words.iter().map(AsRef::as_ref)).current_dir(&self.dir);
        c.env("FLETCH_STATE_DIR", self.dir.join("state"));
        c
    }

    /// Runs `fletch` without a server.
    fn alone(&self, words: &[impl AsRef<str>]) -> Said {
        said(self.fletch(words))
    }

    /// Runs `fletch` with the server of the desk.
    fn say(&self, words: &[impl AsRef<str>]) -> Said {
        let mut c = self.fletch(words);
        c.env("FLETCH_SERVER", &self.site.url);
        said(c)
    }

    /// Writes settings with one `[[origin]]`.
    fn settings(&self, prefix: &str, endpoint: &str) -> String {
        let path = self.path("origin.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{prefix}\"\nendpoint = \"{endpoint}\"\nallow_http = true\n\
             credentials = \"anonymous\"\nregion = \"local\"\n"
        );
        fs::write(&path, text).expect("write");
        path
    }
}

#[test]
fn the_fifteen_mistakes() {
    let desk = Desk::new();
    for name in ["photos", "docs", "other"] {
        desk.dataset(name);
    }
    fs::create_dir(desk.dir.join("empty")).expect("mkdir");

    // 1. An empty directory. Nothing is written.
    for verb in ["index", "pack"] {
        desk.alone(&[verb, "empty"]).mistake(1, &["nothing to index", "is empty", "--allow-empty"]);
        assert_eq!(fs::read_dir(desk.dir.join("empty")).expect("dir").count(), 0);
    }
    desk.alone(&["index", "empty", "--allow-empty"]).ok();

    // 2. A directory that does not exist.
    desk.alone(&["index", "photo"]).mistake(1, &["cannot read the dataset", "photo", "existing directory"]);

    // 3. A dataset that is not indexed yet.
    for words in [&["register", "photos", "photos"][..], &["ls", "./photos"]] {
        let said = desk.say(words).mistake(1, &["photos is not indexed yet"]);
        assert_eq!(said.next()[0], "index");
    }
    let next = desk.say(&["register", "photos", "photos"]).next();
    assert_eq!(next, ["index", "photos"]);
    desk.say(&next).ok();
    desk.say(&["register", "photos", "photos"]).ok();

    // 4. A wrong name.
    desk.say(&["ls", "photo"]).mistake(1, &["no dataset photo is registered at", "did you mean photos?"]);
    desk.say(&["warmup", "photo"]).mistake(1, &["no dataset photo is registered at"]);
    assert!(desk.say(&["ls", "photos"]).ok().stdout.contains("long"));

    // 5. A wrong tag, at a server and at a place of tables.
    for words in [["ls", "photos@v9"], ["warmup", "photos@v9"], ["show", "./photos@v9"]] {
        let said = desk.say(&words).mistake(1, &["no tag v9", "its tags are: latest"]);
        assert!(desk.say(&said.next()).ok().stdout.starts_with("latest"));
    }

    // 6. Forgotten tables: the dataset was indexed with --tables elsewhere. They are found; without them, the
    // message says where they were.
    desk.alone(&["index", "docs", "--tables", "docs-tables"]).ok();
    assert!(desk.alone(&["ls", "docs/"]).ok().stdout.contains("long"));
    fs::rename(desk.dir.join("docs-tables"), desk.dir.join("away")).expect("rename");
    desk.alone(&["ls", "docs/"]).mistake(1, &["this account wrote them to", "docs-tables"]);
    fs::rename(desk.dir.join("away"), desk.dir.join("docs-tables")).expect("rename");
    assert!(desk.alone(&["ls", "docs/", "--tables", "docs-tables"]).ok().stdout.contains("long"));

    // 7. A wrong place of tables at the registration.
    let said = desk.say(&["register", "docs", "docs", "--tables", "nowhere"]);
    let said =
        said.mistake(1, &["no tables of docs at", "nowhere", "this account wrote them to", "docs-tables"]);
    assert_eq!(said.next()[..3], ["register", "docs", "docs"]);
    desk.say(&said.next()).ok();

    // 8. A dataset that is not registered.
    let said = desk.say(&["warmup", "./other"]).mistake(1, &["no dataset of the server is", "other"]);
    assert_eq!(said.next(), ["register", "NAME", "./other"]);
    desk.alone(&["index", "other"]).ok();
    desk.say(&["register", "other", "./other"]).ok();
    desk.say(&["warmup", "./other", "--wait"]).ok();

    // 9. A name that belongs to another dataset.
    let said = desk.say(&["register", "photos", "docs"]);
    said.mistake(1, &["photos is already registered for", "/photos, not for", "/docs", "--replace"]);
    desk.say(&["register", "photos", "docs", "--replace"]).ok();
    desk.say(&["register", "photos", "photos", "--replace"]).ok();

    // 10. Packing after the registration: no `unregister`, and the pack is found by itself.
    desk.alone(&["pack", "photos", "--tables", "packs"]).ok();
    let registered = desk.say(&["register", "photos", "photos"]).ok();
    assert!(registered.stdout.contains("packs"), "{registered:?}");
    assert!(desk.say(&["show", "photos"]).ok().stdout.contains("(pack,"));

    // 11. No server.
    let away = ["status", "--server", "http://127.0.0.1:1"];
    let said = desk.alone(&away).mistake(4, &["127.0.0.1:1 does not answer", "fletch-server"]);
    assert!(said.took < AT_ONCE, "it took {:?}", said.took);
    let socket = format!("unix:{}", desk.path("no.sock"));
    let said = desk.alone(&["datasets", "--server", &socket]).mistake(4, &["no.sock does not answer"]);
    assert!(said.took < AT_ONCE, "it took {:?}", said.took);
    desk.alone(&["datasets"]).mistake(2, &["no server", "--server"]);

    // 12. A word of another tool.
    desk.alone(&["serve"]).mistake(2, &["`fletch serve` is no command", "fletch-server --help"]);
    run(command("fletch-server").arg("--help"));
    let said = desk.alone(&["rm", "photos"]).mistake(2, &["fletch unregister"]);
    assert_eq!(said.next(), ["unregister", "NAME"]);

    // 13. A job that does not exist, or a job of a finished run.
    desk.say(&["jobs", "show", "train-7"]).mistake(1, &["no job train-7"]);
    run(Command::new("curl")
        .args(["-sS", "--fail", "--max-time", "30", "-H", "Content-Type: application/json"])
        .args(["-d", r#"{"name":"train-8","dataset":"docs","world":{"ranks":1,"batch":4,"tail":"keep"}}"#])
        .arg(format!("{}/v1/jobs", desk.site.url)));
    let said =
        desk.say(&["jobs", "delete", "train-7"]).mistake(1, &["no job train-7", "the jobs are: train-8"]);
    assert!(desk.say(&said.next()).ok().stdout.starts_with("train-8\tdocs@"));
    assert!(desk.say(&["jobs", "show", "train-8"]).ok().stdout.contains("21 samples"));
    assert_eq!(desk.say(&["jobs", "delete", "train-8"]).ok().stdout, "train-8");
    assert_eq!(desk.say(&["jobs", "list"]).ok().stdout, "");

    // 14. A bucket that does not exist, and a prefix without objects.
    let store = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    store.insert("set/a", "a");
    let config = desk.settings("s3://missing", &store.endpoint());
    let said = desk.alone(&["index", "s3://missing/set", "--tables", "t", "--config", &config]);
    assert!(said.stderr.contains("no such bucket") && said.stderr.contains("NoSuchBucket"), "{said:?}");
    assert!(!said.stderr.contains('<'), "{said:?}");
    let config = desk.settings(&store.uri(), &store.endpoint());
    let prefix = format!("{}/sett", store.uri());
    let said = desk.alone(&["index", &prefix, "--tables", "t", "--config", &config]);
    said.mistake(1, &["no object lies below", "/sett/", "--allow-empty"]);
    assert!(!desk.dir.join("t/fletch").exists(), "nothing is written");
    let prefix = format!("{}/set", store.uri());
    desk.alone(&["index", &prefix, "--tables", "t", "--config", &config]).ok();

    // 15. Credentials that are rejected, and another region.
    let wrong =
        [("403 Forbidden", "AccessDenied", "permission"), ("403 Forbidden", "ExpiredToken", "expired")];
    for (status, code, word) in wrong {
        let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
        let server = ScriptedServer::start(move |_| answer(status, &[], body.as_bytes()));
        let config = desk.settings("s3://locked", &server.endpoint());
        let said = desk.alone(&["index", "s3://locked/set", "--tables", "t", "--config", &config]);
        assert_eq!(said.code, 5, "{said:?}");
        assert!(said.stderr.contains(code) && said.stderr.contains(word), "{said:?}");
        assert!(!said.stderr.contains('<'), "{said:?}");
    }
    let moved = ScriptedServer::start(|_| {
        let body = b"<Error><Code>PermanentRedirect</Code></Error>";
        answer("301 Moved", &[("x-amz-bucket-region", "eu-west-1")], body)
    });
    let config = desk.settings("s3://far", &moved.endpoint());
    let said = desk.alone(&["index", "s3://far/set", "--tables", "t", "--config", &config]);
    assert!(said.stderr.contains("region eu-west-1") && said.stderr.contains("AWS_REGION"), "{said:?}");

    // A log that is a file has no colour codes.
    assert!(!desk.site.log().is_empty() && !desk.site.log().contains('\u{1b}'), "{}", desk.site.log());
}

#[test]
fn a_mount_without_a_server_reads_the_pack_and_finds_the_long_files() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let desk = Desk::new();
    desk.dataset("photos");
    // The root is that of the pack too, so that only the layout tells which one is read.
    desk.alone(&["index", "photos", "--tables", "packs"]).ok();
    desk.alone(&["pack", "photos", "--tables", "packs"]).ok();
    let root = desk.alone(&["tag", "packs"]).ok().stdout.split('\t').nth(1).expect("a root").to_owned();
    for version in ["latest".to_owned(), root] {
        let dir = desk.site.place("mnt");
        let log = desk.dir.join("mount.log");
        let mut c = command("fletch-mount");
        c.arg(format!("photos@{version}")).arg(&dir).args([
            "--tables",
            &desk.path("packs"),
            "--cache-size",
            "0",
        ]);
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).expect("log"));
        let mut daemon = Running::spawn("fletch-mount", &mut c);
        until("the mount is usable", Duration::from_secs(20), || {
            assert!(daemon.alive(), "the mount ended: {}", fs::read_to_string(&log).unwrap_or_default());
            is_mounted(&dir)
        });
        // A small file is only in the pack now, a long one only at the dataset.
        fs::rename(desk.dir.join("photos/d"), desk.dir.join("hidden")).expect("hide");
        assert_eq!(fs::read(dir.join("d/7")).expect("from the pack"), vec![7; 1007]);
        assert_eq!(
            fs::read(dir.join("long")).expect("from the dataset"),
            "photos".repeat(1 << 20).as_bytes()
        );
        fs::rename(desk.dir.join("hidden"), desk.dir.join("photos/d")).expect("show");
        daemon.signal(Signal::SIGTERM);
        assert!(daemon.wait(Duration::from_secs(11)).success());
        let log = fs::read_to_string(&log).expect("log");
        assert!(!log.contains('\u{1b}'), "{log}");
    }
}

#[test]
fn a_full_disk_is_named_and_has_its_own_exit_code() {
    if !have(&[Need::Root, Need::Fuse]) {
        return;
    }
    let desk = Desk::new();
    desk.dataset("data");
    let disk = PathBuf::from(desk.path("disk"));
    fs::create_dir(&disk).expect("mkdir");
    let (kind, options) = (Some("tmpfs"), Some("size=64k"));
    nix::mount::mount(kind, &disk, kind, nix::mount::MsFlags::empty(), options).expect("tmpfs");
    fs::write(disk.join("ballast"), vec![0; 60 << 10]).expect("write");
    let (data, tables) = (desk.path("data"), desk.path("disk/tables"));
    let indexed = desk.alone(&["index", &data, "--tables", &tables]);
    let mounted = said({
        let mut c = desk.fletch(&["mount", &data, &desk.path("mnt"), "--pack", &tables]);
        c.env("FLETCH_SERVER", &desk.site.url);
        c
    });
    nix::mount::umount(&disk).expect("umount");
    indexed.mistake(6, &["No space left on device"]);
    let said = mounted.mistake(6, &["no room for the tables at ", " are free", "nothing was read"]);
    assert!(!said.stderr.contains("reads "), "{said:?}");
}
