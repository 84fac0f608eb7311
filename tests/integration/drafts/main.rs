//! Drafts: a dataset is usable after its listing, and the first pass over it is its index.

mod mounts;
mod seals;

use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Small files, one of three slices, one with the bytes of another, and an empty one.
fn content() -> BTreeMap<String, Vec<u8>> {
    let mut all: BTreeMap<String, Vec<u8>> = (0..12)
        .map(|i| (format!("c{}/f{i:02}", i % 3), bytes(i, 3_000 + 700 * usize::try_from(i).expect("small"))))
        .collect();
    all.insert("large".into(), bytes(100, 9_000_000));
    all.insert("twin".into(), all["c0/f00"].clone());
    all.insert("empty".into(), Vec::new());
    all
}

/// The bytes of all files, each content once.
fn distinct(all: &BTreeMap<String, Vec<u8>>) -> u64 {
    let contents: std::collections::BTreeSet<&Vec<u8>> = all.values().collect();
    contents.into_iter().map(|bytes| bytes.len() as u64).sum()
}

/// A bucket whose draft a server has registered as `set`.
struct Bucket {
    site: Site,
    emulator: OriginEmulator,
    config: String,
    _dir: tempfile::TempDir,
    all: BTreeMap<String, Vec<u8>>,
    root: String,
    states: AtomicUsize,
}

impl Bucket {
    fn new(all: BTreeMap<String, Vec<u8>>) -> Self {
        Bucket::at(EmulatorConfig::default(), all)
    }

    fn at(store: EmulatorConfig, all: BTreeMap<String, Vec<u8>>) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        // Each write of an object gives it a new tag.
        let emulator = OriginEmulator::start(store, Backing::Directory(dir.path().join("bucket")));
        for (path, bytes) in &all {
            emulator.insert(&format!("set/{path}"), bytes.clone());
        }
        let config = dir.path().join("fletch.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
             credentials = \"anonymous\"\n",
            emulator.uri(),
            emulator.endpoint()
        );
        fs::write(&config, text).expect("config");
        let config = config.display().to_string();
        let site = Site::start(&["--config", &config]);
        let states = AtomicUsize::new(0);
        let mut bucket = Bucket { site, emulator, config, _dir: dir, all, root: String::new(), states };
        bucket.list();
        let tables = bucket.tables().display().to_string();
        bucket.site.register("set", &bucket.uri(), &tables);
        bucket
    }

    fn uri(&self) -> String {
        format!("{}/set", self.emulator.uri())
    }

    fn tables(&self) -> PathBuf {
        self.site.place("tables")
    }

    /// Runs a command of `fletch` with the settings of the bucket and an empty state directory.
    fn fletch(&self, words: &[&str]) -> std::process::Output {
        let state = self.site.place(&format!("state-{}", self.states.fetch_add(1, Relaxed)));
        let mut fletch = command("fletch");
        fletch.args(words).args(["--config", &self.config, "--server", &self.site.url]);
        fletch.env("FLETCH_STATE_DIR", state).output().expect("fletch runs")
    }

    fn ok(&self, words: &[&str]) -> String {
        let out = self.fletch(words);
        assert!(out.status.success(), "{words:?}: {out:?}");
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    }

    /// Lists the bucket anew.
    fn list(&mut self) {
        let tables = self.tables().display().to_string();
        self.root = self.ok(&["index", "--draft", &self.uri(), "--tables", &tables]);
    }

    /// Returns the root that a full index of the bucket has.
    fn indexed(&self) -> String {
        let to = self.site.place("indexed").display().to_string();
        self.ok(&["index", &self.uri(), "--tables", &to])
    }

    /// Seals the draft, unless the server did so by itself. Returns the sealing.
    fn seal(&self) -> Value {
        let said = self.ok(&["seal", "set", "--json"]);
        match said.is_empty() {
            true => self.site.json("/v1/datasets/set/seal"),
            false => serde_json::from_str(&said).expect("JSON"),
        }
    }

    /// Waits until the server has sealed the draft by itself. Returns the root of the version.
    fn sealed(&self) -> String {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let now = self.site.json("/v1/datasets/set/versions/latest");
            if now.get("draft").is_none() {
                return now["root"].as_str().expect("a root").to_owned();
            }
            assert!(Instant::now() < until, "{}", self.site.json("/v1/datasets"));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Fetches a file with curl. Returns the status and the body.
    fn get(&self, path: &str) -> (u32, Vec<u8>) {
        let out = Command::new("curl")
            .args(["-sS", "--max-time", "30", "-o", "-", "-w", "%{stderr}%{http_code}"])
            .arg(format!("{}/v1/versions/{}/files/{path}", self.site.url, self.root))
            .output()
            .expect("curl runs");
        let text = String::from_utf8_lossy(&out.stderr);
        let status = text.trim().rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok());
        (status.unwrap_or(0), out.stdout)
    }

    #[track_caller]
    fn is_right(&self, path: &str) {
        let (status, body) = self.get(path);
        assert!(status == 200 && body == self.all[path], "{path}: {status}, {} bytes", body.len());
    }

    /// Asserts that a file is an error with this code. The body of a long file may end early instead.
    #[track_caller]
    fn is_refused(&self, path: &str, code: &str) {
        let (status, body) = self.get(path);
        if status == 200 {
            let right = &self.all[path];
            assert!(body.len() < right.len() && right.starts_with(&body), "{path}: {} bytes", body.len());
            return;
        }
        let text = String::from_utf8_lossy(&body);
        assert!(status >= 500 && text.contains(code) && text.contains(path), "{path}: {status} {text}");
        assert!(text.contains("fletch refresh"), "the remedy is named: {text}");
    }
}

#[test]
fn one_pass_over_a_draft_is_its_index() {
    let bucket = Bucket::new(content());
    assert_eq!(bucket.emulator.counts().get, 0, "nothing was read for the draft");
    let all = bucket.all.clone();
    for path in all.keys().filter(|path| !path.starts_with("c2/")) {
        bucket.is_right(path);
    }
    // A seal reads what nobody has read.
    let before = bucket.emulator.counts();
    let report = bucket.seal();
    let unread = all.iter().filter(|(path, _)| path.starts_with("c2/"));
    let unread_bytes: usize = unread.clone().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(report["bytes_read"], unread_bytes, "{report}");
    assert_eq!(bucket.emulator.counts().get - before.get, unread.count() as u64);
    let total: usize = all.values().map(Vec::len).sum();
    assert_eq!(bucket.emulator.counts().bytes_sent, total as u64, "every byte came once");
    assert_eq!(report["root"], bucket.indexed());

    // The draft stays readable, and the version finds in the cache what the draft brought.
    bucket.emulator.reset_counts();
    let draft = bucket.root.clone();
    let mut bucket = bucket;
    bucket.root = report["root"].as_str().expect("a root").to_owned();
    for path in all.keys().filter(|path| !path.starts_with("c2/")) {
        bucket.is_right(path);
    }
    bucket.root = draft;
    bucket.is_right("large");
    assert_eq!(bucket.emulator.counts().get, 0);
    assert_eq!(bucket.ok(&["seal", "set"]), "", "a sealed dataset needs no seal");
}

#[test]
fn equal_bytes_are_kept_once_and_a_second_draft_reads_nothing() {
    let mut bucket = Bucket::new(content());
    let all = bucket.all.clone();
    all.keys().for_each(|path| bucket.is_right(path));
    let cached = bucket.site.metric("fletch_disk_used_bytes");
    assert!(cached < 1.05 * distinct(&all) as f64, "{cached} of {}", distinct(&all));
    bucket.emulator.insert("set/c0/new", bytes(7, 5_000));
    bucket.all.insert("c0/new".into(), bytes(7, 5_000));
    bucket.emulator.reset_counts();
    bucket.list();
    all.keys().for_each(|path| bucket.is_right(path));
    assert_eq!(bucket.emulator.counts().get, 0, "names of unchanged objects are known");
    bucket.is_right("c0/new");
    assert_eq!(bucket.emulator.counts().get, 1);
}

#[test]
fn an_object_that_changed_is_an_error_that_names_the_remedy() {
    let mut bucket = Bucket::new(content());
    bucket.is_right("c0/f03");
    let (new, short) = (bytes(55, bucket.all["c0/f00"].len()), bytes(56, 10));
    bucket.emulator.insert("set/c0/f00", new.clone());
    bucket.emulator.insert("set/c1/f01", short.clone());
    for path in ["c0/f00", "c1/f01"] {
        bucket.is_refused(path, "origin_changed");
    }
    assert!(bucket.site.metrics()["fletch_corrupt_total{source=\"origin_changed\"}"] >= 2.0);
    let object = format!("{}/bucket/set/c2/f02", bucket.emulator.endpoint());
    run(Command::new("curl").args(["-sS", "--fail", "-X", "DELETE", &object]));
    bucket.is_refused("c2/f02", "origin_missing");
    bucket.all.remove("c2/f02");
    bucket.is_right("c0/f03");
    // The first slice of a long file is read, then the file is replaced by one of the same length.
    let large = bucket.all["large"].clone();
    let first = format!("{}/v1/versions/{}/files/large", bucket.site.url, bucket.root);
    let got = run(Command::new("curl").args(["-sS", "--fail", "-r", "0-99", &first])).stdout;
    assert_eq!(got, large[..100]);
    bucket.emulator.insert("set/large", bytes(101, large.len()));
    bucket.is_refused("large", "origin_changed");
    // A refresh lists again. Nothing that was known is read again.
    bucket.all.insert("c0/f00".into(), new);
    bucket.all.insert("c1/f01".into(), short);
    bucket.all.insert("large".into(), bytes(101, large.len()));
    bucket.ok(&["refresh", "set", "--allow-loss", "10%"]);
    bucket.root = bucket.site.json("/v1/datasets/set/versions/latest")["root"].as_str().expect("root").into();
    bucket.emulator.reset_counts();
    bucket.is_right("c0/f03");
    assert_eq!(bucket.emulator.counts().get, 0);
    for path in ["c0/f00", "c1/f01", "large"] {
        bucket.is_right(path);
    }
    let (to, before) = (bucket.tables().display().to_string(), bucket.indexed());
    bucket.emulator.reset_counts();
    assert_eq!(bucket.ok(&["index", &bucket.uri(), "--tables", &to]), before);
    let read = bucket.emulator.counts().get;
    assert!(read < bucket.all.len() as u64, "{read} objects are read by an index of a draft");
}

/// A bucket whose objects were all written again, with the same bytes and other tags.
#[test]
fn equal_bytes_under_other_tags_heal_by_a_refresh_that_reads_nothing() {
    let mut bucket = Bucket::new(content());
    bucket.is_right("c0/f03");
    for (path, bytes) in &bucket.all {
        bucket.emulator.insert(&format!("set/{path}"), bytes.clone());
    }
    bucket.is_refused("c0/f00", "origin_changed");
    bucket.is_right("c0/f03");
    bucket.emulator.reset_counts();
    bucket.ok(&["refresh", "set"]);
    assert_eq!(bucket.emulator.counts().get, 0);
    bucket.root = bucket.site.json("/v1/datasets/set/versions/latest")["root"].as_str().expect("root").into();
    let all = bucket.all.clone();
    all.keys().for_each(|path| bucket.is_right(path));
    let total: usize = all.values().map(Vec::len).sum();
    assert_eq!(bucket.emulator.counts().bytes_sent, total as u64, "each object is read once under its tag");
    assert_eq!(bucket.seal()["root"], bucket.indexed());
}

#[test]
fn i1_other_bytes_under_the_same_tag_are_never_data() {
    let bucket = Bucket::new(content());
    bucket.is_right("c0/f00");
    bucket.is_right("large");
    bucket.ok(&["evict", "set"]);
    let mut site = bucket.site;
    // Only the disk kept the chunks beyond this restart, and it has none.
    site.end();
    site.restart();
    let bucket = Bucket { site, ..bucket };
    bucket.emulator.set_fault("set/", Fault::FlipBit { byte: 77 }, None);
    let (status, body) = bucket.get("c0/f00");
    let text = String::from_utf8_lossy(&body);
    assert!(status == 502 && text.contains("origin_corrupt"), "{status} {text}");
    let (_, body) = bucket.get("large");
    assert!(!bucket.all["large"].starts_with(&body) || body.len() < bucket.all["large"].len());
    assert!(bucket.site.metrics()["fletch_corrupt_total{source=\"hash\"}"] >= 1.0);
    bucket.emulator.clear_faults();
    bucket.is_right("c0/f00");
    bucket.is_right("large");
}

#[test]
fn a_killed_server_forgets_at_most_the_last_second() {
    let bucket = Bucket::new(content());
    let all = bucket.all.clone();
    let (early, late): (Vec<_>, Vec<_>) = all.keys().partition(|path| path.starts_with("c0/"));
    early.iter().for_each(|path| bucket.is_right(path));
    std::thread::sleep(Duration::from_millis(2_500));
    late.iter().for_each(|path| bucket.is_right(path));
    let mut site = bucket.site;
    site.kill();
    site.restart();
    let bucket = Bucket { site, ..bucket };
    let report = bucket.seal();
    let lost: u64 = late.iter().map(|path| all[*path].len() as u64).sum();
    let read = report["bytes_read"].as_u64().expect("a number");
    assert!(read <= lost, "{report}");
    assert_eq!(report["root"], bucket.indexed());
    all.keys().for_each(|path| bucket.is_right(path));
}

#[test]
fn a_table_that_somebody_made_up_teaches_nothing() {
    let site = Site::start(&[]);
    let (one, two) = (site.place("one"), site.place("two"));
    fs::write(one.join("f"), "the bytes of one").expect("write");
    fs::write(two.join("f"), "the bytes of two").expect("write");
    let state = site.place("state-cli").display().to_string();
    let tables = site.place("tables").display().to_string();
    // The draft of one dataset, registered as that of another one, so that its names are of other places.
    let mut draft = command("fletch");
    draft.args(["index", "--draft"]).arg(&one).args(["--tables", &tables, "--state-dir", &state]);
    let root = stdout(&run(draft.args(["--server", &site.url])));
    site.register("set", &two.display().to_string(), &tables);
    let url = format!("{}/v1/versions/{}/files/f", site.url, root.trim());
    let out = run(Command::new("curl").args(["-sS", &url])).stdout;
    let problem: Value = serde_json::from_slice(&out).expect("a problem");
    assert_eq!(problem["code"], "tables_corrupt", "{problem}");
    let learned = site.json(&format!("/v1/versions/{}/learned", root.trim()));
    assert_eq!(learned["files"], json!([]), "{learned}");
}

#[test]
fn what_needs_hashes_is_refused_with_the_next_command() {
    let bucket = Bucket::new(content());
    let world = json!({"ranks": 1, "batch": 4, "tail": "keep"});
    let ask = json!({"name": "j", "dataset": "set", "version": "latest", "world": world});
    let out = run(Command::new("curl")
        .args(["-sS", "-H", "Content-Type: application/json", "-d", &ask.to_string()])
        .arg(format!("{}/v1/jobs", bucket.site.url)));
    let problem: Value = serde_json::from_slice(&out.stdout).expect("a problem");
    assert_eq!(problem["code"], "not_sealed", "{problem}");
    assert!(problem["hint"].as_str().expect("a hint").contains("fletch seal"), "{problem}");
    let verify = bucket.fletch(&["verify", "set"]);
    let said = String::from_utf8_lossy(&verify.stderr);
    assert!(!verify.status.success() && said.contains("fletch seal"), "{said}");
    assert!(bucket.ok(&["show", "set"]).contains("draft: only listed"));
    // A warm-up reads a draft, and the server seals what it knows whole.
    bucket.ok(&["warmup", "set", "--wait"]);
    bucket.emulator.reset_counts();
    let root = bucket.sealed();
    assert_eq!(bucket.emulator.counts().get + bucket.emulator.counts().list, 0, "a seal asks for nothing");
    assert_eq!(root, bucket.indexed());
    assert_eq!(bucket.site.json("/v1/datasets/set/seal")["bytes_read"], 0);
}

#[test]
fn the_share_of_a_draft_that_is_known_is_shown() {
    let bucket = Bucket::new(content());
    bucket.is_right("c0/f00");
    bucket.is_right("large");
    let total: usize = bucket.all.values().map(Vec::len).sum();
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let drafts = bucket.site.json("/v1/datasets")["drafts"].clone();
        // The twin has the bytes of another file, and a place of its own.
        let known = bucket.all["c0/f00"].len() + bucket.all["large"].len();
        if drafts[0]["known_bytes"] == known {
            let draft = &drafts[0];
            assert_eq!((&draft["files"], &draft["known_files"]), (&json!(15), &json!(3)), "{draft}");
            assert_eq!((&draft["bytes"], &draft["dataset"]), (&json!(total), &json!("set")), "{draft}");
            break;
        }
        assert!(Instant::now() < until, "{drafts}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
