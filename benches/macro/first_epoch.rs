//! `bench-first-epoch [--files 6000] [--bytes 110000] [--rounds 5] [--threads 1,2]
//!                    [--places memory,disk,origin,filling] [--in-order] [--before DIR] [--json FILE]`
//!
//! Times the first epoch of a fresh mount, after a warm walk, by where the server has the bytes: in its
//! memory, on its disk (in the page cache), or only at its origin, a directory of this machine. With
//! `filling` the server keeps what it reads there on its disk, which is empty before. Files are read in a
//! random order, or with `--in-order` as the directory lists them.
//!
//! Beside it the bare in-memory daemon, and with `--before` the server and the mount of an earlier build in
//! that directory. Counts CPU seconds for a GB, context switches and page faults for a file. At last the same
//! files from the server's memory over one connection without a mount: a hit connection, and a hand-written
//! HTTP client.

use fletch_api::hits::{ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, Wanted};
use fletch_benches::{
    Daemon, Table, arg, bin, epoch, is_mounted, keep, span, until, usage, walk, write_tree,
};
use fletch_core::{DatasetName, Hash, JobName, Root};
use rand::{SeedableRng, seq::SliceRandom};
use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Within this time the server writes to its disk what it has queued for it.
const APPENDED_WITHIN: Duration = Duration::from_secs(2);

/// Where the server has the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Memory,
    Disk,
    Origin,
    Filling,
}

impl Held {
    fn settings(self) -> [&'static str; 3] {
        match self {
            Held::Memory => ["--memory=3GiB", "--cache-size=0", "--cache-free-floor=0"],
            Held::Disk => ["--memory=64MiB", "--cache-size=8GiB", "--cache-free-floor=0"],
            Held::Origin => ["--memory=64MiB", "--cache-size=0", "--cache-free-floor=0"],
            Held::Filling => ["--memory=256MiB", "--cache-size=8GiB", "--cache-free-floor=0"],
        }
    }

    fn word(self) -> &'static str {
        match self {
            Held::Memory => "memory",
            Held::Disk => "disk",
            Held::Origin => "origin",
            Held::Filling => "filling",
        }
    }
}

/// What a process has used so far.
#[derive(Debug, Clone, Copy)]
struct Used {
    cpu: f64,
    switches: f64,
    faults: f64,
}

impl Used {
    fn by(daemon: &Daemon) -> Self {
        let of = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let proc = PathBuf::from(format!("/proc/{}", daemon.pid()));
        let stat = of(proc.join("stat"));
        let faults = stat.rsplit(')').next().and_then(|s| s.split_whitespace().nth(7)?.parse().ok());
        let mut switches = 0.0;
        for task in std::fs::read_dir(proc.join("task")).into_iter().flatten().flatten() {
            let status = of(task.path().join("status"));
            let counts = status.lines().filter_map(|l| l.split_once("ctxt_switches:"));
            switches += counts.filter_map(|(_, n)| n.trim().parse::<f64>().ok()).sum::<f64>();
        }
        Used { cpu: daemon.cpu(), switches, faults: faults.unwrap_or(0.0) }
    }

    fn since(self, before: Used) -> Used {
        Used {
            cpu: self.cpu - before.cpu,
            switches: self.switches - before.switches,
            faults: self.faults - before.faults,
        }
    }
}

/// A server of the dataset in `scratch`, of one build.
struct Served {
    server: Daemon,
    url: String,
    socket: PathBuf,
    programs: PathBuf,
}

impl Served {
    fn start(scratch: &Path, name: &str, programs: &Path, held: Held) -> Self {
        let own = scratch.join(name);
        std::fs::create_dir_all(&own).expect("mkdir");
        let (ready, socket) = (own.join("ready"), own.join("s"));
        let server = Daemon::start(
            Command::new(programs.join("fletch-server"))
                .args(["--listen", "127.0.0.1:0"])
                .args(held.settings())
                .arg("--socket")
                .arg(&socket)
                .arg("--cache-dir")
                .arg(own.join("c"))
                .arg("--state-dir")
                .arg(own.join("d"))
                .arg("--ready-file")
                .arg(&ready),
            Some(&own.join("server.log")),
        );
        until("server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.contains("http")));
        let url = std::fs::read_to_string(&ready).expect("url").trim().to_owned();
        let registered = Command::new(bin("fletch"))
            .args(["register", "d"])
            .arg(scratch.join("data"))
            .arg("--tables")
            .arg(scratch.join("tables"))
            .args(["--server", &url])
            .status();
        assert!(registered.expect("register").success());
        Served { server, url, socket, programs: programs.to_owned() }
    }

    fn mount(&self, dir: &Path) -> Daemon {
        std::fs::create_dir_all(dir).expect("mkdir");
        let mount = Daemon::start(
            Command::new(self.programs.join("fletch-mount")).arg("d").arg(dir).args([
                "--server",
                &format!("unix:{}", self.socket.display()),
                "--job",
                "bench",
            ]),
            Some(&dir.with_extension("log")),
        );
        until("mount", || is_mounted(dir));
        mount
    }

    /// Empties the server's disk.
    fn evict(&self) {
        let mut evict = Command::new(bin("fletch"));
        evict.args(["evict", "d", "--quiet", "--server", &self.url]);
        assert!(evict.output().expect("evict").status.success());
    }

    /// Reads all files once, so that the server has them where it keeps them.
    fn warm(&self, dir: &Path) {
        let mount = self.mount(dir);
        let files = walk(dir);
        let _ = epoch(dir, &files, 2);
        drop(mount);
    }
}

/// One connection that asks for one file after another.
enum Asker {
    Hits(UnixStream),
    Http(BufReader<UnixStream>),
}

impl Asker {
    fn open(socket: &Path, by_http: bool) -> Self {
        let mut stream = UnixStream::connect(socket).expect("connect");
        if by_http {
            return Asker::Http(BufReader::with_capacity(16 << 10, stream));
        }
        write!(
            stream,
            "GET /v1/hits HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n"
        )
        .expect("upgrade");
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).expect("a reply");
            head.extend(byte);
        }
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
        Asker::Hits(stream)
    }

    /// Reads a file into `bytes`, which is as long.
    fn ask(&mut self, root: Root, hash: Hash, bytes: &mut [u8]) {
        match self {
            Asker::Hits(stream) => {
                let size = u32::try_from(bytes.len()).expect("short");
                let job = JobName::new("bench").ok();
                let request = HitRequest {
                    root,
                    wanted: Wanted::Chunk,
                    hash,
                    size,
                    place: None,
                    job,
                    dataset: DatasetName::new("d").ok(),
                };
                let mut out = Vec::with_capacity(128);
                request.encode(&mut out).expect("short");
                stream.write_all(&out).expect("request");
                let mut head = [0; ANSWER_HEAD_BYTES];
                stream.read_exact(&mut head).expect("head");
                assert_eq!(HitAnswer::parse(head), Some(HitAnswer::Here(size)));
                stream.read_exact(bytes).expect("bytes");
            }
            Asker::Http(stream) => {
                let path = fletch_api::routes::chunk(root, hash);
                write!(
                    stream.get_mut(),
                    "GET {path} HTTP/1.1\r\nHost: localhost\r\nFletch-Job: bench\r\nFletch-Dataset: d\r\n\r\n"
                )
                .expect("request");
                let mut line = String::new();
                stream.read_line(&mut line).expect("head");
                assert!(line.starts_with("HTTP/1.1 200"), "{line}");
                while line != "\r\n" {
                    line.clear();
                    stream.read_line(&mut line).expect("head");
                }
                stream.read_exact(bytes).expect("body");
            }
        }
    }
}

fn run(c: &mut Command) {
    assert!(c.status().expect("run").success(), "{c:?}");
}

fn main() {
    usage(include_str!("first_epoch.rs"));
    let (files, bytes): (usize, usize) = (arg("files", 6000), arg("bytes", 110_000));
    let rounds: u64 = arg("rounds", 5);
    let readers: String = arg("threads", "1,2".to_owned());
    let readers: Vec<usize> = readers.split(',').map(|n| n.parse().expect("--threads: a number")).collect();
    let places: String = arg("places", "memory,disk,origin".to_owned());
    let in_order = std::env::args().any(|arg| arg == "--in-order");
    let before: String = arg("before", String::new());
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    write_tree(&at("data"), std::process::id().into(), files, bytes);
    let out = Command::new(bin("fletch"))
        .arg("index")
        .arg(at("data"))
        .arg("--to")
        .arg(at("tables"))
        .arg("--quiet")
        .arg("--state-dir")
        .arg(at("st"))
        .output()
        .expect("index");
    assert!(out.status.success());
    let root: Root = String::from_utf8_lossy(&out.stdout).trim().parse().expect("a root");
    let own = bin("fletch").parent().expect("a directory").to_owned();
    let mut builds = vec![("fletch", own)];
    if !before.is_empty() {
        builds.push(("before", PathBuf::from(before)));
    }
    let gb = (files * bytes) as f64 / 1e9;
    let (mut table, mut used) = (Table::default(), BTreeMap::<String, [Vec<f64>; 6]>::new());
    for held in [Held::Memory, Held::Disk, Held::Origin, Held::Filling] {
        if !places.split(',').any(|p| p == held.word()) {
            continue;
        }
        let served: Vec<_> = builds
            .iter()
            .map(|(name, programs)| {
                let server =
                    Served::start(scratch.path(), &format!("{name}-{}", held.word()), programs, held);
                server.warm(&at(&format!("{name}-{}-warm", held.word())));
                (*name, server)
            })
            .collect();
        std::thread::sleep(APPENDED_WITHIN);
        for round in 0..rounds {
            for &threads in &readers {
                let row = format!("{bytes} B from {}, {threads} reader(s), files/s", held.word());
                let shuffled = |dir: &Path| {
                    let mut order = walk(dir);
                    order.sort();
                    if in_order {
                        return order;
                    }
                    order.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(round));
                    order
                };
                let dir = at(&format!("bare-{}-{round}-{threads}", held.word()));
                std::fs::create_dir(&dir).expect("mkdir");
                let bare = Daemon::start(
                    Command::new(bin("bare-mount")).arg(&dir).arg(files.to_string()).arg(bytes.to_string()),
                    None,
                );
                until("bare mount", || is_mounted(&dir));
                table.add(&row, "bare daemon", epoch(&dir, &shuffled(&dir), threads));
                // Unmounting ends the daemon; a signal would leave a dead mount behind.
                run(Command::new("umount").arg(&dir));
                drop(bare);
                for (name, served) in &served {
                    let dir = at(&format!("{name}-{}-{round}-{threads}", held.word()));
                    if held == Held::Filling {
                        served.evict();
                    }
                    let mount = served.mount(&dir);
                    let order = shuffled(&dir);
                    let begun = [Used::by(&served.server), Used::by(&mount)];
                    table.add(&row, name, epoch(&dir, &order, threads));
                    if held == Held::Filling {
                        std::thread::sleep(APPENDED_WITHIN);
                    }
                    let of = [Used::by(&served.server).since(begun[0]), Used::by(&mount).since(begun[1])];
                    let n = files as f64;
                    let figures = [
                        of[0].cpu / gb,
                        of[1].cpu / gb,
                        of[0].switches / n,
                        of[1].switches / n,
                        of[0].faults / n,
                        of[1].faults / n,
                    ];
                    let all = used.entry(format!("{row}: {name}")).or_default();
                    all.iter_mut().zip(figures).for_each(|(all, figure)| all.push(figure));
                    drop(mount);
                }
            }
            if held == Held::Memory {
                let row = format!("{bytes} B from memory, one connection without a mount, files/s");
                let (_, served) = &served[0];
                let hashes: Vec<Hash> = walk(&at("data"))
                    .iter()
                    .map(|p| Hash::of(&std::fs::read(at("data").join(p)).expect("read")))
                    .collect();
                let mut buffer = vec![0; bytes];
                for (arm, by_http) in [("fletch", false), ("HTTP", true)] {
                    let mut asker = Asker::open(&served.socket, by_http);
                    let begun = Instant::now();
                    for hash in &hashes {
                        asker.ask(root, *hash, &mut buffer);
                    }
                    table.add(&row, arm, files as f64 / begun.elapsed().as_secs_f64());
                }
            }
        }
    }
    println!("{files} files of {bytes} bytes, {rounds} rounds; a fresh mount each, over the unix socket");
    table.print("fletch", "per second");
    println!();
    println!(
        "| row | CPU s/GB: server | mount | switches/file: server | mount | faults/file: server | mount |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (row, figures) in &used {
        let shown: Vec<String> = figures.iter().map(|f| span(f)).collect();
        println!("| {row} | {} |", shown.join(" | "));
    }
    keep(&table);
}
