//! A user at a machine who runs `fletch`, and what the commands said.

use crate::bins::{command, stdout};
use crate::fixture::files;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A user at a machine, with an own server only if a test starts one. Dropping it stops that server.
#[derive(Debug)]
pub struct User {
    /// The home directory.
    pub dir: TempDir,
    /// The id of the machine.
    pub machine: String,
    /// Further variables of the environment.
    pub more: BTreeMap<&'static str, String>,
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub struct Said {
    /// The exit status; -1 after a signal.
    pub code: i32,
    /// What went to standard output.
    pub stdout: String,
    /// What went to standard error.
    pub stderr: String,
    /// How long the command ran.
    pub took: Duration,
}

impl Said {
    /// Asserts that the command succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Asserts that the command failed, and that its message has all these parts.
    #[track_caller]
    pub fn fails(self, parts: &[&str]) -> Self {
        assert_ne!(self.code, 0, "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in: {}", self.stderr);
        }
        self
    }

    /// Asserts that the command failed with `code`, and that its message has all these parts and one hint.
    #[track_caller]
    pub fn mistake(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        let said = self.fails(parts);
        let hints = said.stderr.matches("hint:").count();
        assert_eq!(hints, 1, "one hint, once: {}", said.stderr);
        let (before, hint) = said.stderr.split_once("hint:").unwrap_or_default();
        assert!(!before.contains(hint.trim()), "the hint is printed twice: {}", said.stderr);
        for foreign in ["<?xml", "<Error", "<Code>", "GET /", "POST /", "\u{1b}["] {
            assert!(!said.stderr.contains(foreign), "{foreign:?} is in: {}", said.stderr);
        }
        said
    }

    /// Returns the words of the first `fletch` command that the hint names, without `fletch`.
    #[track_caller]
    pub fn next(&self) -> Vec<String> {
        let hint = self.stderr.split("hint:").nth(1).unwrap_or_default();
        let command = hint.split('`').skip(1).step_by(2).find(|c| c.starts_with("fletch "));
        let command = command.unwrap_or_else(|| panic!("no command in the hint of: {}", self.stderr));
        command.split(' ').skip(1).map(str::to_owned).collect()
    }

    /// Asserts that whoever only wants to try it meets none of the words of the inner works.
    #[track_caller]
    pub fn in_plain_words(self) -> Self {
        plain(&self.stdout);
        plain(&self.stderr);
        self
    }
}

/// Asserts that a text has none of the words of the inner works.
#[track_caller]
pub fn plain(text: &str) {
    let words = text.split(|c: char| !c.is_ascii_alphabetic()).map(str::to_ascii_lowercase);
    for word in words {
        for inner in ["table", "tables", "layout", "layouts", "root", "roots", "domain", "domains"] {
            assert_ne!(word, inner, "{text}");
        }
    }
}

impl User {
    /// Returns a user with an empty home, on a machine with this id.
    pub fn new(machine: &str) -> Self {
        let dir = TempDir::with_prefix("fm-").expect("home");
        fs::create_dir(dir.path().join("run")).expect("mkdir");
        User { dir, machine: machine.to_owned(), more: BTreeMap::new() }
    }

    /// Lets the terminal have keys for a store of S3's kind.
    pub fn has_keys_of(&mut self, endpoint: String) {
        let keys = [
            ("AWS_ACCESS_KEY_ID", "AKIATESTTEST".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "hunter2secret".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT_URL", endpoint),
        ];
        self.more.extend(keys);
    }

    /// Returns a path below the home.
    pub fn path(&self, rel: &str) -> PathBuf {
        self.dir.path().join(rel)
    }

    /// Returns a path below the home as text.
    pub fn text(&self, rel: &str) -> String {
        self.path(rel).display().to_string()
    }

    /// Returns the socket of the user's own server.
    pub fn socket(&self) -> PathBuf {
        self.path("run/fletch/server.sock")
    }

    /// Returns a command of this user, without the credentials of the machine that runs the tests.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut c = command("fletch");
        c.args(words).current_dir(self.dir.path());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|prefix| text.starts_with(prefix)) {
                c.env_remove(&name);
            }
        }
        c.env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("FLETCH_STATE_DIR", self.path("state"))
            .env("FLETCH_CACHE_DIR", self.path("cache"))
            .env("FLETCH_MACHINE_ID", &self.machine)
            .envs(&self.more);
        c
    }

    /// Runs `fletch` in the home.
    pub fn say(&self, words: &[&str]) -> Said {
        said(self.command(words))
    }

    /// Mounts a source at `mnt`, and returns what the command printed as JSON.
    pub fn mount(&self, source: &str, dir: &str, more: &[&str]) -> Value {
        let words = [&["mount", source, dir, "--json"], more].concat();
        let said = self.say(&words).ok();
        serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
    }

    /// Writes a dataset of small files, and returns their content.
    pub fn dataset(&self, name: &str, files: usize) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut all = BTreeMap::new();
        for i in 0..files {
            let rel = PathBuf::from(format!("d{}/f{i:04}", i % 3));
            let bytes = vec![u8::try_from(i % 251).expect("small"); 1000 + i];
            let path = self.path(name).join(&rel);
            fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            fs::write(&path, &bytes).expect("write");
            all.insert(rel, bytes);
        }
        all
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if self.socket().exists() && !std::thread::panicking() {
            self.say(&["down"]).ok();
        } else if self.socket().exists() {
            eprintln!("{:?}", self.say(&["down"]));
        }
    }
}

/// Runs a command to its end.
pub fn said(mut c: Command) -> Said {
    let begun = Instant::now();
    let out = c.output().expect("spawn");
    Said {
        code: out.status.code().unwrap_or(-1),
        stdout: stdout(&out),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        took: begun.elapsed(),
    }
}

/// Asserts that a directory shows exactly these files.
#[track_caller]
pub fn shows(dir: &Path, all: &BTreeMap<PathBuf, Vec<u8>>) {
    assert_eq!(files(dir), all.keys().cloned().collect::<Vec<_>>());
    for (rel, bytes) in all {
        assert!(fs::read(dir.join(rel)).expect("readable") == *bytes, "{}", rel.display());
    }
}

/// Returns the processes of a program whose command line names a path.
pub fn processes(of: &Path) -> Vec<String> {
    let words = of.display().to_string();
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    all.flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(&words) && line.contains("fletch-"))
        .collect()
}
