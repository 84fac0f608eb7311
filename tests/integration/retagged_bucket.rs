//! A bucket whose objects were uploaded again, with equal bytes: every entity tag is new.

use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

struct Bucket {
    dir: tempfile::TempDir,
    emulator: OriginEmulator,
    config: PathBuf,
    files: BTreeMap<String, Vec<u8>>,
}

impl Bucket {
    /// Returns a bucket with 20 short objects and one of three slices.
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let bucket = dir.path().join("bucket");
        let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::Directory(bucket.clone()));
        let config = dir.path().join("fletch.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
             credentials = \"anonymous\"\n",
            emulator.uri(),
            emulator.endpoint()
        );
        fs::write(&config, text).expect("config");
        let files = (0..21).map(|i| {
            let len = if i == 20 { 9_000_000 } else { 20_000 + i };
            let mut bytes = vec![0; len];
            blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
            (format!("f{i:02}"), bytes)
        });
        let bucket = Bucket { dir, emulator, config, files: files.collect() };
        bucket.upload();
        bucket
    }

    fn set(&self) -> PathBuf {
        self.dir.path().join("bucket/set")
    }

    /// Writes every object, which gives it a new entity tag.
    fn upload(&self) {
        let (set, new) = (self.set(), self.dir.path().join("new"));
        fs::create_dir_all(&set).expect("mkdir");
        for (name, bytes) in &self.files {
            fs::write(&new, bytes).expect("write");
            fs::rename(&new, set.join(name)).expect("rename");
        }
    }

    fn uri(&self) -> String {
        format!("{}/set", self.emulator.uri())
    }

    /// Runs a command of `fletch` with the settings of the bucket.
    fn fletch(&self, words: &[&str], state: &Path) -> String {
        let mut fletch = command("fletch");
        fletch.args(words).arg("--config").arg(&self.config);
        fletch.env("XDG_STATE_HOME", state).env("HOME", state);
        stdout(&run(&mut fletch))
    }
}

#[test]
fn a_refresh_reads_no_object_that_the_server_read_under_its_new_tag() {
    let bucket = Bucket::new();
    let site = Site::start(&["--config", &bucket.config.display().to_string()]);
    let (to, state) = (site.place("tables").display().to_string(), site.place("home"));
    let root = bucket.fletch(&["index", &bucket.uri(), "--tables", &to], &state);
    site.register("set", &bucket.uri(), &to);
    bucket.upload();

    // Readers get every file. The first read of each object has one request more.
    for (name, bytes) in &bucket.files {
        let got = site.get(&format!("/v1/versions/{}/files/{name}", root.trim()));
        assert!(got == *bytes, "{name}");
    }
    assert_eq!(site.json("/v1/accounts")["datasets"][0]["changed_objects"], 0);
    let before = bucket.emulator.counts().get;
    let refresh = |expected: u64| {
        let words = ["refresh", "set", "--server", &site.url, "--json"];
        let report: Value = serde_json::from_str(&bucket.fletch(&words, &state)).expect("JSON");
        assert_eq!(report["files_read"], expected, "{report}");
        assert_eq!(report["root"], root.trim());
    };
    refresh(0);
    assert_eq!(bucket.emulator.counts().get, before, "no object was read");

    // The new tables have the new tags: nothing depends on the memory of the server from now on.
    refresh(0);
    bucket.upload();
    refresh(21);
}
