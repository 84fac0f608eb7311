//! The cost of index and mount: 256,000 files with paths of 200 bytes, or 1.28 million with `FLETCH_SOAK`.
//! And a mount whose local tables break while it uses them.

use fletch_tests::bins::{Running, command};
use fletch_tests::fixture::{Mounted, Site, files};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::{peak_rss, until};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILES_PER_DIR: usize = 1280;

/// What index and mount may cost.
struct Scale {
    dirs: usize,
    /// The most bytes of memory that index may take.
    index_bytes_max: u64,
    /// The most bytes of memory that the mount may take.
    mount_bytes_max: u64,
}

const SHORT: Scale = Scale { dirs: 200, index_bytes_max: 200 << 20, mount_bytes_max: 100_000_000 };
const FULL: Scale = Scale { dirs: 1000, index_bytes_max: 300 << 20, mount_bytes_max: 200_000_000 };

impl Scale {
    /// Makes the directory of the tree. Some disks take minutes to create the files; the short form does not
    /// need one.
    fn dir(&self) -> TempDir {
        let memory = Path::new("/dev/shm");
        let parent =
            if self.dirs == SHORT.dirs && memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        TempDir::with_prefix_in("fletch-scale-", parent).expect("tree")
    }
}

/// Writes directories of 1,280 empty files. Every path has 200 bytes.
fn tree(dir: &Path, dirs: usize) {
    std::thread::scope(|s| {
        for half in 0..2 {
            s.spawn(move || {
                for d in (half..dirs).step_by(2) {
                    let sub = dir.join(format!("{d:04}-{}", "d".repeat(94)));
                    fs::create_dir(&sub).expect("mkdir");
                    for f in 0..FILES_PER_DIR {
                        fs::File::create(sub.join(format!("{f:05}-{}", "f".repeat(94)))).expect("create");
                    }
                }
            });
        }
    });
}

#[test]
fn a_million_files_cost_little() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let scale = if std::env::var_os("FLETCH_SOAK").is_some() { FULL } else { SHORT };
    let data = scale.dir();
    tree(data.path(), scale.dirs);
    let site = Site::start(&[]);
    let to = site.place("tables");
    let mut c = command("fletch");
    c.arg("index").arg(data.path()).arg("--to").arg(&to).arg("--state-dir").arg(site.place("state"));
    let mut child = Running::spawn("index", c.stdout(Stdio::null()).stderr(Stdio::null()));
    // The peak is gone once the child has ended: ask while it runs.
    let mut peak = 0;
    while child.alive() {
        let text = fs::read_to_string(format!("/proc/{}/status", child.pid())).unwrap_or_default();
        if text.contains("VmHWM") {
            peak = peak.max(peak_rss_of(&text));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(child.wait(Duration::from_secs(1)).success());
    assert!(peak > 0 && peak <= scale.index_bytes_max, "index took {} MiB", peak >> 20);

    site.register("scale", &data.path().display().to_string(), &to.display().to_string());
    // A job finds its samples, and reads no table. What was read for that is not in memory any more.
    let prepared = || site.log().contains("samples are prepared");
    until("the samples are prepared", Duration::from_secs(60), prepared);
    let blocks = site.metrics()["fletch_memory_bytes{of=\"blocks\"}"];
    assert!(blocks <= 2e6, "{blocks} bytes of tables");
    let begin = Instant::now();
    let m = site.mount("scale", "scale", &[]);
    let one = format!("{:04}-{}/01279-{}", scale.dirs - 1, "d".repeat(94), "f".repeat(94));
    assert_eq!(one.len(), 200);
    assert_eq!(fs::metadata(m.dir.join(one)).expect("the last file").len(), 0);
    let ready = begin.elapsed();
    assert!(ready <= Duration::from_secs(2), "mount ready after {ready:?}");
    assert!(
        peak_rss(m.pid()) <= scale.mount_bytes_max,
        "mount took {} MB when ready",
        peak_rss(m.pid()) / 1_000_000
    );
    // And after a walk of everything, too.
    let walked = files(&m.dir).len();
    assert_eq!(walked, scale.dirs * FILES_PER_DIR);
    let rss = peak_rss(m.pid());
    assert!(rss <= scale.mount_bytes_max, "mount took {} MB after a walk", rss / 1_000_000);
    let kept = files(&site.cache_dir().join("tables"));
    let kept = kept.iter().filter(|file| file.to_string_lossy().ends_with(".samples"));
    assert_eq!(kept.count(), 1);
    eprintln!("index peak {} MiB, ready {ready:?}, mount peak {} MB", peak >> 20, rss / 1_000_000);
    m.stop();
}

fn peak_rss_of(status: &str) -> u64 {
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("VmHWM");
    line.split_whitespace().next().and_then(|v| v.parse::<u64>().ok()).expect("kB") * 1024
}

/// The files of the tree with names of its own for each phase, because the kernel keeps what it has seen.
const PHASE_FILES: usize = 400;

/// Memory of a process that no file backs, in bytes.
fn anonymous(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// The bytes of a short file count as few as they are. What came with them over a connection must not stay.
#[test]
fn a_mount_that_read_many_short_files_holds_what_its_settings_count() {
    const FILES: usize = 8000;
    if !have(&[Need::Fuse]) {
        return;
    }
    let site = Site::start(&[]);
    let tree = site.place("tree");
    let path = |i: usize| format!("{:03}/{i:06}", i / 100);
    for i in 0..FILES {
        fs::create_dir_all(tree.join(path(i)).parent().expect("a directory")).expect("mkdir");
        fs::write(tree.join(path(i)), format!("{i:016}")).expect("write");
    }
    let root = site.publish("short", &tree);
    let socket = format!("unix:{}", site.socket().display());
    // Their first reads come over HTTP: the server has none of them.
    let mounted = site.mount_from(&socket, "short", "short", &["--push", "off"]);
    for i in (0..FILES).map(|i| i * 4799 % FILES) {
        let read = fs::read_to_string(mounted.dir.join(path(i))).unwrap_or_else(|e| panic!("{root}: {e}"));
        assert_eq!(read, format!("{i:016}"));
    }
    let held = anonymous(mounted.pid());
    assert!(held <= 64 << 20, "the mount holds {} MiB", held >> 20);
}

fn name(phase: usize, file: usize) -> String {
    // Neighbours in the tables belong to different phases, so that each phase reads every leaf.
    format!("{:02}/{file:05}-{phase}", file % 10)
}

fn content(phase: usize, file: usize) -> String {
    format!("{phase} {file}")
}

/// Reads the files of a phase through a mount, and looks up names that do not exist.
fn check(m: &Mounted, phase: usize) {
    for file in 0..PHASE_FILES {
        let path = m.dir.join(name(phase, file));
        assert_eq!(fs::read_to_string(&path).expect("a file"), content(phase, file), "{}", path.display());
        assert!(!m.dir.join(format!("{}x", name(phase, file))).exists());
    }
}

/// Returns the files of local tables below a cache directory.
fn local_tables(cache: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(cache.join("tables-0")).expect("tables").map(|e| e.expect("entry").path());
    let files = folders.flat_map(|folder| fs::read_dir(folder).expect("folder"));
    files.map(|e| e.expect("entry").path()).filter(|p| p.extension().is_some()).collect()
}

#[test]
fn local_tables_that_break_in_use_change_no_name_and_no_byte() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    const FLIPPED: usize = 1;
    const CUT: usize = 2;
    const LINKED: usize = 3;
    const FOREIGN: usize = 4;
    const GONE: usize = 5;
    const LATER: usize = 6;
    let site = Site::start(&[]);
    let data = site.place("data");
    for file in 0..PHASE_FILES {
        for phase in 0..=LATER {
            let path = data.join(name(phase, file));
            fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
            fs::write(path, content(phase, file)).expect("write");
        }
    }
    let root = site.publish("names", &data);
    let cache = site.place("cache");
    let flag = cache.display().to_string();
    // So little memory that leaves are read again.
    let flags = ["--cache-dir", &flag, "--tables-memory", "64KiB"];
    let m = site.mount("names", "breaks", &flags);
    assert!(site.mount_log("breaks").contains(&root[..12]));
    check(&m, 0);
    let files = local_tables(&cache);
    assert!(!files.is_empty(), "the mount keeps tables in {flag}");
    for phase in [FLIPPED, CUT, LINKED, FOREIGN, GONE] {
        for file in &files {
            match phase {
                FLIPPED => {
                    let mut bytes = fs::read(file).expect("read");
                    bytes.iter_mut().step_by(1000).for_each(|byte| *byte ^= 4);
                    fs::write(file, bytes).expect("write");
                }
                CUT => OpenOptions::new().write(true).open(file).expect("open").set_len(5000).expect("cut"),
                LINKED => {
                    let elsewhere = file.with_extension("elsewhere");
                    fs::rename(file, &elsewhere).expect("rename");
                    symlink(&elsewhere, file).expect("link");
                }
                FOREIGN => chown(file, Some(65_534), None).expect("chown"),
                _ => fs::remove_file(file).expect("remove"),
            }
        }
        check(&m, phase);
        let again = local_tables(&cache);
        assert!(files.iter().all(|file| again.contains(file)), "written again");
    }
    let log = site.mount_log("breaks");
    let told = log.matches("a local table is not believed").count();
    assert_eq!(
        told,
        4 * files.len(),
        "each file is named each time it broke, and not when it was gone: {log}"
    );
    m.stop();
    // The next process finds the files: it needs the server for the version's documents and for bytes only.
    let m = site.mount("names", "later", &flags);
    check(&m, LATER);
    assert!(!site.mount_log("later").contains("not believed"));
    m.stop();
}
