//! Runs the binary in a place of its own.

use fletch_testkit::OriginEmulator;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use tempfile::TempDir;

/// A scratch directory with a dataset `data`, a state directory and a place for tables.
pub struct Fixture {
    pub dir: TempDir,
}

/// What a run printed and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Fixture {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        fs::create_dir(dir.path().join("data")).expect("mkdir");
        Fixture { dir }
    }

    pub fn path(&self, rel: &str) -> PathBuf {
        self.dir.path().join(rel)
    }

    pub fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// Writes a file of the dataset, with the directories it needs.
    pub fn write(&self, rel: &str, bytes: impl AsRef<[u8]>) {
        let path = self.data().join(rel);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, bytes).expect("write");
    }

    /// Returns a command without the caller's settings. `index` and `pack` write their tables into the
    /// dataset, where tests look for them, unless the words name a place.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut c = self.command_as_written(args);
        let names_a_place = args.iter().any(|word| ["--to", "--tables"].contains(word));
        if let ["index" | "pack", dataset, ..] = args
            && !names_a_place
        {
            c.args(["--tables", dataset]);
        }
        c
    }

    /// Returns a command with exactly these words.
    pub fn command_as_written(&self, args: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_fletch"));
        c.args(args).current_dir(self.dir.path());
        c.env("XDG_RUNTIME_DIR", self.dir.path());
        for var in ["FLETCH_SERVER", "FLETCH_TOKEN", "FLETCH_TOKEN_FILE", "FLETCH_CONFIG"] {
            c.env_remove(var);
        }
        c.env("FLETCH_STATE_DIR", self.path("state"));
        c
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.command(args).output().map(Ran::from).expect("spawn")
    }

    /// Writes `fletch.toml` for the dataset of an emulated bucket.
    pub fn configure(&self, origin: &OriginEmulator) {
        let (prefix, endpoint) = (origin.uri(), origin.endpoint());
        let config = format!(
            "[[origin]]\nprefix = \"{prefix}\"\nendpoint = \"{endpoint}\"\nallow_http = true\n\
             credentials = \"anonymous\"\nregion = \"local\"\n"
        );
        fs::write(self.path("fletch.toml"), config).expect("write");
    }

    /// Runs, expects success, and reads the JSON on stdout.
    pub fn json(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        self.run(&args).ok().json()
    }

    /// Indexes `data` and gives the root.
    pub fn index(&self, more: &[&str]) -> String {
        let mut args = vec!["index", "data"];
        args.extend(more);
        self.run(&args).ok().stdout.trim().to_owned()
    }

    /// The root of a run that knows nothing from before.
    pub fn full_root(&self, more: &[&str]) -> String {
        let fresh = tempfile::tempdir().expect("tempdir");
        let at = |rel: &str| fresh.path().join(rel).to_str().expect("UTF-8").to_owned();
        let (to, state) = (at("to"), at("state"));
        let mut args = vec!["--to", &to, "--state-dir", &state];
        args.extend(more);
        self.index(&args)
    }
}

impl From<Output> for Ran {
    fn from(o: Output) -> Self {
        Ran {
            code: o.status.code().unwrap_or(-1),
            stdout: String::from_utf8(o.stdout).expect("UTF-8"),
            stderr: String::from_utf8_lossy(&o.stderr).into_owned(),
        }
    }
}

impl Ran {
    #[track_caller]
    pub fn ok(self) -> Self {
        self.code(0)
    }

    #[track_caller]
    pub fn code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub fn says(self, part: &str) -> Self {
        assert!(self.stderr.contains(part), "{part:?} is not in stderr: {}", self.stderr);
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

/// Sends a signal to a child.
pub fn signal(child: &Child, signal: Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("pid"));
    nix::sys::signal::kill(pid, signal).expect("signal");
}

/// Field names of an object, sorted.
#[track_caller]
pub fn keys(v: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = v.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Bytes of their own for each seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Every file below `dir`, relative.
pub fn files(dir: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut stack = vec![dir.to_owned()];
    while let Some(d) = stack.pop() {
        for item in fs::read_dir(d).into_iter().flatten() {
            let path = item.expect("entry").path();
            if path.is_dir() {
                stack.push(path);
            } else {
                out.push(path.strip_prefix(dir).expect("below").to_str().expect("UTF-8").to_owned());
            }
        }
    }
    out.sort();
    out
}
