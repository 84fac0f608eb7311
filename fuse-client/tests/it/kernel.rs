//! Real mounts over a stub server: what programs see, and how many requests the kernel sends.

use crate::support::dataset::{Dataset, Node, walk};
use crate::support::kernel::{Mount, can_mount, can_trace};
use crate::support::stub::{ChunkReply, Stub};
use fletch_testkit::fuse_trace::FuseTrace;
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

/// Reads all files in a fixed random order, each whole, as Python's `read()` does: one call for the size and
/// a byte.
fn read_all(dir: &Path, nodes: &BTreeMap<String, Node>) {
    let mut paths: Vec<&String> = nodes.keys().collect();
    paths.sort_by_key(|p| fletch_core::Hash::of(p.as_bytes()));
    for path in paths {
        let Node::File(want) = &nodes[path] else { continue };
        let mut file = fs::File::open(dir.join(path)).expect("opens");
        let mut got = vec![0; want.len() + 1];
        let n = file.read(&mut got).expect("reads");
        let mut rest = Vec::new();
        file.read_to_end(&mut rest).expect("reads");
        got.truncate(n);
        got.extend_from_slice(&rest);
        assert!(got == want[..], "{path}: wrong bytes");
    }
}

fn started_blocks(nodes: &BTreeMap<String, Node>) -> u64 {
    let size = |n: &Node| if let Node::File(b) = n { b.len() as u64 } else { 0 };
    nodes.values().map(|n| size(n).div_ceil(128 << 10)).sum()
}

#[test]
fn everything_reads_as_the_source() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::odd());
    let stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &[]);
    assert_eq!(walk(mount.path()), dataset.nodes);
    // Positioned reads across slices, past the end, and a mapping.
    let Node::File(want) = &dataset.nodes["shards/9m.tar"] else { panic!("a file") };
    let mut file = fs::File::open(mount.path().join("shards/9m.tar")).expect("opens");
    let mut buf = vec![0; 70_000];
    for at in [0u64, 4_194_000, 8_388_000, 9_430_000] {
        file.read_exact_at(&mut buf, at).expect("reads");
        assert!(buf == want[at as usize..at as usize + 70_000], "at {at}");
    }
    file.seek(SeekFrom::Start(9_499_990)).expect("seeks");
    assert_eq!(file.read(&mut buf).expect("reads"), 10);
    assert_eq!(file.read(&mut buf).expect("reads"), 0);
    assert_eq!(mount.entry().expect("mounted").fs_type, "fuse.fletch");
}

#[test]
fn the_second_epoch_sends_no_requests() {
    if !can_mount() || !can_trace() {
        return;
    }
    let dataset = Arc::new(Dataset::many(1500, 110_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &[]);
    let trace = FuseTrace::start(mount.path());

    read_all(mount.path(), &dataset.nodes);
    let first = trace.take();
    let count = |op: &str| first.get(op).copied().unwrap_or(0);
    assert!(count("FUSE_READ") <= started_blocks(&dataset.nodes) + trace.dropped(), "{first:?}");
    assert!(count("FUSE_OPEN") <= 1 && count("FUSE_OPENDIR") <= 1, "{first:?}");
    assert_eq!((count("FUSE_RELEASE"), count("FUSE_GETXATTR")), (0, 0), "{first:?}");
    assert!(count("FUSE_FLUSH") <= 1, "{first:?}");
    assert_eq!(stub.chunks(), 1500, "each chunk once");

    read_all(mount.path(), &dataset.nodes);
    assert_eq!(trace.take_again(), BTreeMap::new(), "the second epoch");
    assert_eq!(walk(mount.path()).len(), 1500);
    let _first_walk = trace.take();
    assert_eq!(walk(mount.path()).len(), 1500);
    assert_eq!(trace.take_again(), BTreeMap::new(), "the second walk");
}

#[test]
fn a_long_listing_asks_for_acls_and_labels_once_and_not_once_a_file() {
    if !can_mount() || !can_trace() {
        return;
    }
    let files = (0..3000).map(|i| (format!("d/{i:04}"), Node::File("x".into()))).collect();
    let stub = Stub::start(Arc::new(Dataset::in_memory(files)));
    let mount = Mount::start(&stub.url(), &[]);
    let trace = FuseTrace::start(mount.path());
    let out = Command::new("ls").arg("-l").arg(mount.path().join("d")).output().expect("ls");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(out.stdout.iter().filter(|&&b| b == b'\n').count(), 3001, "all files and a total");
    let counts = trace.take();
    let count = |op: &str| counts.get(op).copied().unwrap_or(0);
    // One for each of the names that `ls` knows: labels, ACLs, capabilities.
    assert!(count("FUSE_GETXATTR") <= 4, "{counts:?}");
    // READDIRPLUS brings the attributes along.
    assert!(count("FUSE_LOOKUP") + count("FUSE_GETATTR") <= 300, "{counts:?}");
}

#[test]
fn small_blocks_cost_no_more_reads_than_whole_files() {
    if !can_mount() || !can_trace() {
        return;
    }
    let dataset = Arc::new(Dataset::many(300, 110_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let reads = |args: &[&str]| {
        let mount = Mount::start(&stub.url(), args);
        let trace = FuseTrace::start(mount.path());
        let out =
            Command::new("tar").args(["-cf", "-", "-C"]).arg(mount.path()).arg(".").output().expect("tar");
        assert!(out.status.success());
        let counts = trace.take();
        assert!(counts.get("FUSE_OPEN").copied().unwrap_or(0) <= 1, "{counts:?}");
        read_all(mount.path(), &dataset.nodes);
        let again = trace.take_again();
        assert_eq!(again.get("FUSE_READ"), None, "what was pushed is right and stays: {again:?}");
        counts["FUSE_READ"]
    };
    let blocks = started_blocks(&dataset.nodes);
    let pushed = reads(&[]);
    let plain = reads(&["--push", "off"]);
    assert!(pushed <= blocks, "{pushed} READs for {blocks} blocks");
    assert!(plain >= pushed, "without pushing {plain}, with {pushed}");
}

#[test]
fn concurrent_readers_of_every_kind_agree() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::odd());
    let stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &["--memory", "32MiB", "--threads", "4"]);
    let until = Instant::now() + Duration::from_secs(3);
    std::thread::scope(|s| {
        for reader in 0..8u64 {
            let (dataset, dir) = (&dataset, mount.path());
            s.spawn(move || {
                let mut x = reader + 1;
                let files: Vec<(&String, &bytes::Bytes)> = dataset
                    .nodes
                    .iter()
                    .filter_map(|(p, n)| if let Node::File(b) = n { Some((p, b)) } else { None })
                    .collect();
                while Instant::now() < until {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (path, want) = files[(x >> 33) as usize % files.len()];
                    let file = fs::File::open(dir.join(path)).expect("opens");
                    let at = if want.is_empty() { 0 } else { (x >> 20) as usize % want.len() };
                    let at = if x & 1 == 0 { 0 } else { at };
                    let mut buf = vec![0; 1 + (x >> 40) as usize % 50_000];
                    let n = file.read_at(&mut buf, at as u64).expect("reads");
                    assert!(
                        n == buf.len().min(want.len() - at) && buf[..n] == want[at..at + n],
                        "{path}@{at}"
                    );
                    if x & 6 == 0 {
                        // Drop the pages, so that they are asked for (and pushed) again.
                        nix::fcntl::posix_fadvise(
                            &file,
                            0,
                            0,
                            nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED,
                        )
                        .expect("fadvise");
                    }
                }
            });
        }
    });
}

#[test]
fn i1_no_wrong_byte_reaches_a_reader() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(20, 200_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--io-timeout", "3s"]);
    stub.set(ChunkReply::Flip);
    for path in dataset.nodes.keys() {
        let e = fs::read(mount.path().join(path)).expect_err("no bytes rather than wrong ones");
        assert_eq!(e.raw_os_error(), Some(libc::EIO), "{path}");
    }
    mount.wait_for("wrong bytes were refused");
    stub.set(ChunkReply::FlipOnce);
    // Every chunk was asked for before, so now the stub is honest, and errors were not kept (but for
    // the half second of the error cache, on a busy machine).
    std::thread::sleep(Duration::from_millis(600));
    read_all(mount.path(), &dataset.nodes);
}

#[test]
fn errors_have_their_errno_and_a_log_line_with_advice() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(12, 150_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--io-timeout", "2s"]);
    let mut paths = dataset.nodes.keys();
    let cases = [
        (ChunkReply::Gone, libc::ESTALE, "register it again"),
        (ChunkReply::Denied, libc::EACCES, "check the token"),
        (ChunkReply::Changed, libc::EIO, "1 object changed since the index: `fletch refresh "),
        (ChunkReply::Hang, libc::EIO, "check that fletch-server runs"),
    ];
    for (chunk_reply, errno, line) in cases {
        stub.set(chunk_reply);
        let path = mount.path().join(paths.next().expect("enough files"));
        let begun = Instant::now();
        let e = fs::read(&path).expect_err("fails");
        assert_eq!(e.raw_os_error(), Some(errno), "{chunk_reply:?}");
        assert!(begun.elapsed() < Duration::from_millis(3500), "{chunk_reply:?} took {:?}", begun.elapsed());
        let said = mount.wait_for(line);
        assert!(said.contains("d0000/"), "the line names the file: {said}");
        stub.set(ChunkReply::Honest);
        // A failure that took long is told again for half a second (the error cache).
        std::thread::sleep(Duration::from_millis(600));
        fs::read(&path).expect("works again");
    }
    for chunk_reply in [ChunkReply::Busy, ChunkReply::Cut] {
        let path = mount.path().join(paths.next().expect("enough files"));
        stub.set(chunk_reply);
        if chunk_reply == ChunkReply::Cut {
            let e = fs::read(&path).expect_err("cut every time");
            assert_eq!(e.raw_os_error(), Some(libc::EIO));
            stub.set(ChunkReply::Honest);
            std::thread::sleep(Duration::from_millis(600));
        }
        fs::read(&path).expect("waited for, or asked again");
    }
}

#[test]
fn a_server_that_restarts_is_waited_for() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(30, 150_000));
    let mut stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &["--io-timeout", "3s"]);
    let mut paths = dataset.nodes.keys();
    let mut next = || mount.path().join(paths.next().expect("enough files"));
    let cached = next();
    fs::read(&cached).expect("reads");
    // The directory's other names are known from here on, so what fails below is a READ.
    fs::read_dir(cached.parent().expect("dir"))
        .expect("lists")
        .for_each(|e| drop(e.expect("entry").metadata()));

    // Back within the timeout: the read waits and succeeds.
    stub.kill();
    let path = next();
    let reader = std::thread::spawn(move || fs::read(path).map(|b| b.len()));
    std::thread::sleep(Duration::from_secs(1));
    stub.restart();
    assert_eq!(reader.join().expect("reader").expect("it came back"), 150_000);
    fs::read(next()).expect("and later reads work");

    // Killed in the middle of a read: an error within the bound, not a hang.
    stub.set(ChunkReply::Hang);
    let path = next();
    let reader =
        std::thread::spawn(move || (Instant::now(), fs::read(path).map(|b| b.len()), Instant::now()));
    std::thread::sleep(Duration::from_millis(300));
    stub.kill();
    let (begun, outcome, ended) = reader.join().expect("reader");
    assert_eq!(outcome.expect_err("no server").raw_os_error(), Some(libc::EIO));
    assert!(ended - begun < Duration::from_secs(5), "took {:?}", ended - begun);
    fs::read(&cached).expect("what the kernel has stays readable");
}

#[test]
fn a_server_that_is_gone_is_named_and_then_left_alone_until_it_answers() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(60, 150_000));
    let mut stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--io-timeout", "4s"]);
    let dir = mount.path().to_owned();
    let mut paths = dataset.nodes.keys().map(|p| dir.join(p));
    let mut next = || paths.next().expect("enough files");
    // All names are known from here on, so what fails below is a READ.
    dataset.nodes.keys().for_each(|p| assert!(fs::metadata(dir.join(p)).is_ok()));
    stub.kill();
    let (path, begun) = (next(), Instant::now());
    let reader = std::thread::spawn(move || fs::read(path).map(|b| b.len()));
    let said = mount.wait_for("reads wait for the server");
    // 2 s are promised; a busy machine gets the rest.
    assert!(begun.elapsed() < Duration::from_secs(3), "after {:?}", begun.elapsed());
    assert!(said.contains(&stub.url()), "it names the server: {said}");
    let outcome = reader.join().expect("reader");
    assert_eq!(outcome.expect_err("no server").raw_os_error(), Some(libc::EIO));
    assert!(begun.elapsed() < Duration::from_secs(6), "io_timeout and 2 s: {:?}", begun.elapsed());

    mount.wait_for("fail at once");
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(fs::read(next()).expect_err("gone").raw_os_error(), Some(libc::EIO));
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "20 reads took {:?}", begun.elapsed());

    stub.restart();
    mount.wait_for("the server answers again");
    assert_eq!(fs::read(next()).expect("reads again").len(), 150_000);
}

/// Touches a page of a mapped file, and prints a byte of it.
const TOUCH: &str = "import mmap, sys\n\
    with open(sys.argv[1], 'rb') as f:\n\
    \x20   m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n\
    print('mapped', flush=True)\n\
    sys.stdin.readline()\n\
    print(m[100_000])\n";

/// A program that has mapped a file and touches it at the next line of its input.
fn mapping(path: &Path) -> std::process::Child {
    use std::io::BufRead as _;
    use std::process::Stdio;
    let mut python = Command::new("python3");
    python.args(["-c", TOUCH]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = python.spawn().expect("python3");
    let mut line = String::new();
    let out = child.stdout.as_mut().expect("stdout");
    std::io::BufReader::with_capacity(7, out).read_line(&mut line).expect("a line");
    assert_eq!(line, "mapped\n");
    child
}

#[test]
fn a_mapped_page_waits_for_a_server_that_a_read_gives_up() {
    use std::io::Write as _;
    use std::os::unix::process::ExitStatusExt as _;
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(3, 150_000));
    let mut stub = Stub::start(Arc::clone(&dataset));
    let patient = Mount::start(&stub.url(), &["--io-timeout", "2s", "--map-timeout", "2m"]);
    let hasty = Mount::start(&stub.url(), &["--io-timeout", "2s", "--map-timeout", "0s"]);
    let names: Vec<_> = dataset.nodes.keys().cloned().collect();
    let mut waits = mapping(&patient.path().join(&names[0]));
    let mut dies = mapping(&hasty.path().join(&names[0]));
    let other = patient.path().join(&names[1]);
    assert!(fs::metadata(&other).is_ok(), "its name is known from here on");
    stub.kill();
    for program in [&mut waits, &mut dies] {
        program.stdin.take().expect("stdin").write_all(b"\n").expect("told");
    }
    let died = dies.wait_with_output().expect("ended");
    assert_eq!(died.status.signal(), Some(libc::SIGBUS), "{died:?}");
    // A read call of the patient mount fails, while the page waits on.
    assert_eq!(fs::read(&other).expect_err("no server").raw_os_error(), Some(libc::EIO));
    std::thread::sleep(Duration::from_secs(3));
    assert!(waits.try_wait().expect("its state").is_none(), "it still waits");
    stub.restart();
    let out = waits.wait_with_output().expect("ended");
    assert!(out.status.success(), "{out:?}");
    let byte = fs::read(&other).map(|_| ()).and_then(|()| fs::read(patient.path().join(&names[0])));
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), byte.expect("reads again")[100_000].to_string());
}

#[test]
fn attributes_are_the_documented_ones() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::odd());
    let stub = Stub::start(Arc::clone(&dataset));
    let mount = Mount::start(&stub.url(), &[]);
    let stat = |p: &str| fs::symlink_metadata(mount.path().join(p)).expect("stat");
    let file = stat("photos/110k.jpg");
    assert_eq!((file.mode(), file.nlink(), file.size(), file.blocks()), (0o100_444, 1, 110_000, 215));
    assert_eq!((file.mtime(), file.mtime_nsec()), (1_704_164_645, 6));
    assert_eq!((file.uid(), file.gid()), (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw()));
    let dir = stat("photos");
    assert_eq!((dir.mode(), dir.nlink()), (0o040_555, 1));
    assert_eq!(stat("links/dir").mode(), 0o120_777);
    assert_eq!(stat("").ino(), 1);
    let vfs = nix::sys::statvfs::statvfs(mount.path()).expect("statfs");
    let bytes: usize = dataset.nodes.values().map(|n| if let Node::File(b) = n { b.len() } else { 0 }).sum();
    assert_eq!(vfs.blocks() * vfs.fragment_size(), (bytes as u64).div_ceil(512) * 512);
    assert_eq!((vfs.files(), vfs.blocks_available()), (dataset.nodes.len() as u64, 0));
    for (what, e) in [
        ("create", fs::write(mount.path().join("new"), "x")),
        ("overwrite", fs::write(mount.path().join("a0"), "x")),
        ("mkdir", fs::create_dir(mount.path().join("newdir"))),
        ("unlink", fs::remove_file(mount.path().join("a0"))),
        ("rename", fs::rename(mount.path().join("a0"), mount.path().join("a1"))),
    ] {
        assert_eq!(e.expect_err(what).raw_os_error(), Some(libc::EROFS), "{what}");
    }
}
