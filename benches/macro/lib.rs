//! Shared parts of the timed tables: interleaved arms, medians with their range, child processes that end
//! with the table, and seeded data that nothing can deduplicate.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The figures of one run: row → arm → one figure per round. Arms of a row are measured in turn
/// (A B A B …), so that a drift of the machine hits all of them.
#[derive(Debug, Default)]
pub struct Table {
    rows: BTreeMap<String, BTreeMap<String, Vec<f64>>>,
}

impl Table {
    /// Adds one round's figure.
    pub fn add(&mut self, row: &str, arm: &str, figure: f64) {
        self.rows.entry(row.to_owned()).or_default().entry(arm.to_owned()).or_default().push(figure);
    }

    /// Prints every row with the ratio of `arm` to each other arm, round by round: median (min–max).
    pub fn print(&self, arm: &str, unit: &str) {
        println!("| row | arm | {unit}: median (min–max) | {arm} / arm: median (min–max) |");
        println!("|---|---|---|---|");
        for (row, arms) in &self.rows {
            let Some(ours) = arms.get(arm) else { continue };
            for (name, figures) in arms {
                let ratios: Vec<f64> = ours.iter().zip(figures).map(|(a, b)| a / b).collect();
                println!(
                    "| {row} | {name} | {} | {} |",
                    span(figures),
                    if name == arm { "–".into() } else { span(&ratios) }
                );
            }
        }
    }

    /// Returns the raw figures as JSON, to be kept beside a table.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!(self.rows)
    }
}

/// Formats figures as median (min–max) with three significant digits.
#[must_use]
pub fn span(figures: &[f64]) -> String {
    let mut f = figures.to_vec();
    f.sort_by(f64::total_cmp);
    match (f.first(), f.get(f.len() / 2), f.last()) {
        (Some(min), Some(mid), Some(max)) => format!("{} ({}–{})", short(*mid), short(*min), short(*max)),
        _ => "–".into(),
    }
}

fn short(x: f64) -> String {
    let digits = if x >= 100.0 {
        0
    } else if x >= 10.0 {
        1
    } else {
        2
    };
    format!("{x:.digits$}")
}

/// A child process that ends (SIGTERM, then SIGKILL) when dropped.
#[derive(Debug)]
pub struct Daemon(Child);

impl Daemon {
    /// Starts the process. Its errors go to `log`; all other output is discarded.
    ///
    /// # Panics
    /// When the process cannot be started.
    #[must_use]
    pub fn start(c: &mut Command, log: Option<&Path>) -> Self {
        let err = log.map_or_else(Stdio::null, |p| std::fs::File::create(p).expect("log").into());
        Daemon(
            c.stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(err)
                .spawn()
                .unwrap_or_else(|e| panic!("{c:?}: {e}")),
        )
    }

    /// Returns the id of the process that works: that of its child, if the process is the keeper of a mount.
    #[must_use]
    pub fn pid(&self) -> u32 {
        let own = self.0.id();
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children"));
        let child = children.unwrap_or_default().split_whitespace().next().and_then(|pid| pid.parse().ok());
        child.unwrap_or(own)
    }

    /// Returns the CPU seconds (user and system) that the process that works has used.
    #[must_use]
    pub fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let ticks = |i: usize| fields.get(i).and_then(|t| t.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // `kill` by pid through the shell's tool: no unsafe here for a signal.
        let pid = self.0.id().to_string();
        if let Err(e) = Command::new("kill").args(["-TERM", &pid]).status() {
            eprintln!("kill {pid}: {e}");
        }
        let end = Instant::now() + Duration::from_secs(12);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        if matches!(self.0.try_wait(), Ok(None)) {
            self.0.kill().ok();
            self.0.wait().ok();
        }
    }
}

/// Waits until `done`, for at most 20 s.
///
/// # Panics
/// When that time has passed.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns whether a file system is mounted at `dir`.
#[must_use]
pub fn is_mounted(dir: &Path) -> bool {
    let up = dir.parent().and_then(|p| std::fs::metadata(p).ok()).map(|m| m.dev());
    std::fs::metadata(dir).ok().map(|m| m.dev()) != up
}

/// Returns the path of a program built beside this one.
#[must_use]
pub fn bin(name: &str) -> PathBuf {
    let me = std::env::current_exe().expect("own path");
    let path = me.parent().expect("target/release").join(name);
    assert!(path.is_file(), "{} is not built: make build", path.display());
    path
}

/// Writes `files` unique incompressible files of `bytes` each, 1,000 to a directory.
pub fn write_tree(dir: &Path, seed: u64, files: usize, bytes: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut b = vec![0; bytes];
    for i in 0..files {
        rng.fill_bytes(&mut b);
        std::fs::File::create(place(dir, i)).expect("create").write_all(&b).expect("write");
    }
}

/// The same tree of files that have a length and nothing else: `Backing::Synthetic` says what is in them.
pub fn sow_tree(dir: &Path, files: usize, bytes: usize) {
    for i in 0..files {
        let file = std::fs::File::create(place(dir, i)).expect("create");
        file.set_len(bytes as u64).expect("as long as that");
    }
}

/// Returns the path of file `i` of a tree, and creates its folder.
fn place(dir: &Path, i: usize) -> PathBuf {
    let d = dir.join(format!("d{:02}", i / 1000));
    std::fs::create_dir_all(&d).expect("mkdir");
    d.join(format!("f{i:05}.jpg"))
}

/// Walks a tree as a loader does (names and types) and returns the relative paths of all files.
#[must_use]
pub fn walk(top: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![top.to_owned()];
    while let Some(d) = todo.pop() {
        for e in std::fs::read_dir(&d).expect("readdir") {
            let e = e.expect("entry");
            if e.file_type().expect("type").is_dir() {
                todo.push(e.path());
            } else {
                out.push(e.path().strip_prefix(top).expect("below").to_owned());
            }
        }
    }
    out.sort();
    out
}

/// Reads every file whole, in this order, with `threads` in turn. Returns files per second.
#[must_use]
pub fn epoch(top: &Path, order: &[PathBuf], threads: usize) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|s| {
        for t in 0..threads {
            s.spawn(move || {
                let mut buf = vec![0u8; 1 << 20];
                for p in order.iter().skip(t).step_by(threads) {
                    let mut f = std::fs::File::open(top.join(p)).expect("open");
                    while std::io::Read::read(&mut f, &mut buf).expect("read") > 0 {}
                }
            });
        }
    });
    order.len() as f64 / begin.elapsed().as_secs_f64()
}

/// Returns the value of `--name` among the program's arguments, or `default` without it. Ends the program if
/// the value is missing or cannot be parsed.
pub fn arg<T: std::str::FromStr>(name: &str, default: T) -> T {
    let args: Vec<String> = std::env::args().collect();
    let Some(at) = args.iter().position(|a| a.strip_prefix("--") == Some(name)) else { return default };
    let value = args.get(at + 1).map(|v| v.parse());
    let Some(Ok(value)) = value else {
        eprintln!("--{name}: {} is not a valid value; see --help", args.get(at + 1).map_or("nothing", |v| v));
        std::process::exit(2);
    };
    value
}

/// Prints the head of a program's source, which says how to call it, and ends the program, if an argument
/// asks for help or is an option that the head does not name.
pub fn usage(source: &str) {
    let head = source.lines().map_while(|l| l.strip_prefix("//!")).map(|l| l.strip_prefix(' ').unwrap_or(l));
    let head = head.collect::<Vec<_>>().join("\n");
    for option in std::env::args().skip(1).filter(|a| a.starts_with('-')) {
        if option == "--help" || option == "-h" {
            println!("{head}");
            std::process::exit(0);
        }
        let named = |w: &str| w == option;
        if !head.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').any(named) {
            eprintln!("unknown option {option}\n\n{head}");
            std::process::exit(2);
        }
    }
}

/// Writes the raw figures to `--json FILE`, if given.
pub fn keep(table: &Table) {
    let path: String = arg("json", String::new());
    if !path.is_empty() {
        let text = serde_json::to_string_pretty(&table.json()).expect("json");
        std::fs::write(&path, text).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
}
