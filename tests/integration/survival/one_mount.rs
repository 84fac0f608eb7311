//! One mount of a plain user, of root and of fstab.

use crate::common::{
    FILE_BYTES, FILES, IN_A_DIRECTORY, KEEPER_KIB_MAX, Kernel, SLOW, content, keeper_on, metrics_at, name,
    resident_kib, serve, until, worker,
};
use fletch_tests::bins::{Running, bin, run, with_keeper, without_variables};
use fletch_tests::fixture::{Mounted, is_mounted};
use fletch_tests::prometheus::free_port;
use fletch_tests::require::{Need, have};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

const READERS: u64 = 64;
/// Does one thing that a program does with files, and panics at an error or another byte.
fn look(dir: &Path, rng: &mut StdRng, held: &(usize, File)) {
    let i = rng.random_range(0..FILES);
    let path = dir.join(name(i));
    let from = rng.random_range(0..FILE_BYTES - 5000);
    let check = |i: usize, file: &File| {
        let mut bytes = [0; 5000];
        file.read_exact_at(&mut bytes, from as u64).unwrap_or_else(|e| panic!("{}: {e}", name(i)));
        assert!(bytes == content(i)[from..from + 5000], "{}: other bytes", name(i));
        // The next read asks the mount again.
        posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
    };
    match rng.random_range(0..10) {
        0 => {
            let folder = path.parent().expect("a directory");
            let names = fs::read_dir(folder).expect("listing").map(|entry| entry.expect("an entry"));
            assert_eq!(names.count(), IN_A_DIRECTORY, "a listing is whole");
        }
        1 => assert_eq!(fs::metadata(&path).expect("stat").len(), FILE_BYTES as u64),
        2 | 3 => check(held.0, &held.1),
        4 => {
            let file = File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            #[expect(unsafe_code, reason = "no file of a mount is ever cut short")]
            // SAFETY: the mount is read-only, and shows one version.
            let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
            assert!(map[from..from + 5000] == content(i)[from..from + 5000], "{}: other bytes", name(i));
            drop(map);
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
        }
        _ => check(i, &File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))),
    }
}

/// Returns how many requests the kernel sent to this process that it had sent to another one, by the page of
/// metrics at a port.
fn resent(port: u16) -> u64 {
    let page = metrics_at(port);
    let line = page.lines().find_map(|line| line.strip_prefix("fletch_mount_resent_requests_total "));
    line.map_or(0, |number| number.parse().expect("a number"))
}

/// Kills what serves the mount at random moments under readers. Returns the looks that were taken, the
/// slowest, and how many requests were sent again, as far as the page of metrics at a port could be asked.
fn kill_under_readers(mounted: &Mounted, kills: usize, seed: u64, port: u16) -> (u64, Duration, u64) {
    let mut sent_again = 0;
    let (stop, looks, slowest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|k| {
                let (stop, looks, slowest) = (&stop, &looks, &slowest);
                scope.spawn(move || {
                    let mut rng = StdRng::seed_from_u64(seed ^ k);
                    let held = k as usize % FILES;
                    let held = (held, File::open(mounted.dir.join(name(held))).expect("open"));
                    while !stop.load(SeqCst) {
                        let begun = Instant::now();
                        look(&mounted.dir, &mut rng, &held);
                        slowest.fetch_max(begun.elapsed().as_micros() as u64, SeqCst);
                        looks.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        let mut rng = StdRng::seed_from_u64(seed);
        let keeper = mounted.pid();
        for _ in 0..kills {
            thread::sleep(Duration::from_micros(rng.random_range(20_000..300_000)));
            let victim = until(SLOW, || worker(keeper));
            sent_again += resent(port);
            kill(victim, Signal::SIGKILL).expect("kill");
            until(SLOW, || worker(keeper).filter(|next| *next != victim));
            if readers.iter().any(thread::ScopedJoinHandle::is_finished) {
                break;
            }
        }
        let before = looks.load(SeqCst);
        until(SLOW, || (looks.load(SeqCst) > before + 10 * READERS).then_some(()));
        stop.store(true, SeqCst);
    });
    (looks.into_inner(), Duration::from_micros(slowest.into_inner()), sent_again)
}

#[test]
fn what_serves_a_mount_is_killed_under_readers_who_see_no_error() {
    if have(&[Need::Fuse, Need::Resend]) {
        kill_and_count(Kernel::Resends);
    }
}

#[test]
fn an_old_kernel_sends_nothing_again_and_readers_see_no_error() {
    if have(&[Need::Fuse]) {
        kill_and_count(Kernel::Old);
    }
}

fn kill_and_count(kernel: Kernel) {
    let kills = if std::env::var_os("FLETCH_SOAK").is_some() { 500 } else { 20 };
    let site = serve();
    let log = site.place("logs").join("survivor");
    let port = free_port();
    let words = ["set", "--io-timeout", "60s", "--metrics", &format!("127.0.0.1:{port}")];
    let mounted = Mounted::start_by(keeper_on(kernel), &site.url, site.place("mnt"), &log, &words);
    let (looks, slowest, resent) = kill_under_readers(&mounted, kills, 7, port);
    println!(
        "{kills} kills under {READERS} readers: {looks} looks, {resent} requests sent again, the slowest \
         took {slowest:?}"
    );
    assert!(slowest < SLOW, "the slowest look took {slowest:?}");
    // The page of a process is not always there before it is killed.
    assert!(resent >= kills as u64, "{resent} requests were sent again");
    let log = fs::read_to_string(log).expect("log");
    assert_eq!(log.matches("readers wait for the next one").count(), kills, "{log}");
    // Some are killed before they can say so.
    assert!(log.matches("took over the mount of set").count() > kills / 4, "{log}");
    let kib = until(SLOW, || Some(resident_kib(mounted.pid())).filter(|kib| *kib <= KEEPER_KIB_MAX));
    println!("the keeper of one mount has {kib} KiB");
    let dir = mounted.dir.clone();
    mounted.stop();
    assert!(!is_mounted(&dir));
}

#[test]
fn the_program_is_replaced_under_a_mount() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let program = site.place("programs").join("fletch-mount");
    fs::copy(bin("fletch-mount"), &program).expect("copy");
    let mut c = without_variables(Command::new(&program));
    c.env("FLETCH_CACHE_DIR", site.place("cache"));
    let log = site.place("logs").join("log");
    let mounted = Mounted::start_by(c, &site.url, site.place("mnt"), &log, &["set", "--survive"]);
    // As a package manager does, slowly: for a moment there is no program.
    fs::remove_file(&program).expect("removed");
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    thread::sleep(Duration::from_millis(300));
    fs::copy(bin("fletch-mount"), &program).expect("the new program");
    assert!(fs::read(mounted.dir.join(name(5))).expect("read") == content(5));
    assert!(fs::read_to_string(&log).expect("log").contains("cannot start a process for the mount"));
    mounted.stop();
}

#[test]
fn an_old_kernels_requests_fail_in_time_when_no_process_comes() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let mut site = serve();
    let log = site.place("logs").join("survivor");
    let words = ["set", "--io-timeout", "3s", "--threads", "2"];
    let mounted = Mounted::start_by(keeper_on(Kernel::Old), &site.url, site.place("mnt"), &log, &words);
    // The process has the requests, and does not answer while the server does not.
    site.server().signal(Signal::SIGSTOP);
    let readers: Vec<_> = (0..8)
        .map(|i| {
            let path = mounted.dir.join(name(i));
            let reads = Command::new("cat").arg(path).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            reads.expect("a reader")
        })
        .collect();
    thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    for reader in readers {
        let read = reader.wait_with_output().expect("the reader");
        let said = String::from_utf8_lossy(&read.stderr);
        assert!(!read.status.success() && said.contains("Input/output error"), "{said}");
    }
    let took = begun.elapsed();
    println!("8 requests of a dead process failed after {took:?}");
    assert!(took > Duration::from_secs(2) && took < SLOW, "{took:?}");
    site.server().signal(Signal::SIGCONT);
    for i in 0..8 {
        until(Duration::from_secs(30), || {
            fs::read(mounted.dir.join(name(i))).ok().filter(|b| *b == content(i))
        });
    }
    mounted.stop();
}

/// Ends a process that serves nothing any more.
fn ended(keeper: &mut Running) -> bool {
    keeper.wait(SLOW).success()
}

#[test]
fn a_mount_without_a_process_fails_reads_in_time_and_recovers() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let mut site = serve();
    // A restarted server has another port, and the same socket.
    let socket = format!("unix:{}", site.socket().display());
    let mut mounted = site.mount_from(&socket, "set", "survivor", &["--survive", "--io-timeout", "2s"]);
    let read = |dir: &Path, i: usize| fs::read(dir.join(name(i)));
    assert!(read(&mounted.dir, 0).expect("read") == content(0));
    let held = File::open(mounted.dir.join(name(0))).expect("open");
    // No worker can open the version while the server is away.
    site.end();
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    let begun = Instant::now();
    let failed = read(&mounted.dir, 1).expect_err("nothing serves the mount");
    assert_eq!(failed.raw_os_error(), Some(nix::libc::EIO));
    assert!(begun.elapsed() < SLOW, "{:?}", begun.elapsed());
    // By its path it might fail: a mount has the kernel forget the attributes of its root now and then.
    let mut bytes = vec![0; FILE_BYTES];
    held.read_exact_at(&mut bytes, 0).expect("the kernel has its pages");
    assert!(bytes == content(0));
    site.restart();
    until(Duration::from_secs(30), || read(&mounted.dir, 2).ok().filter(|bytes| *bytes == content(2)));
    assert_eq!(fs::read_dir(mounted.dir.join("d0")).expect("listing").count(), IN_A_DIRECTORY);
    // A signal unmounts, whoever serves the mount by now.
    let dir = mounted.dir.clone();
    mounted.daemon().signal(Signal::SIGTERM);
    assert!(ended(mounted.daemon()) && !is_mounted(&dir));
}

#[test]
fn a_mount_that_another_program_unmounts_ends_its_keeper() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let mut mounted = site.mount("set", "survivor", &["--survive"]);
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    assert!(fs::read(mounted.dir.join(name(3))).expect("read") == content(3));
    let unmounted = Command::new("umount").arg(&mounted.dir).status().expect("umount");
    assert!(unmounted.success());
    assert!(ended(mounted.daemon()), "{}", site.mount_log("survivor"));
}

#[test]
fn a_mount_of_fstab_survives() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let site = serve();
    let helper = site.place("sbin").join("mount.fletch");
    std::os::unix::fs::symlink(bin("fletch-mount"), &helper).expect("symlink");
    let (dir, log) = (site.place("mnt"), site.place("logs").join("fstab"));
    let options =
        format!("server={},log_file={},cache_dir={}", site.url, log.display(), site.place("c").display());
    let mut mount = without_variables(Command::new(&helper));
    run(mount.arg("set").arg(&dir).args(["-o", &format!("rw,{options},nofail")]));
    let of_the_mount = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(&dir.display().to_string())
    };
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let all = all.filter_map(|process| process.file_name().to_string_lossy().parse().ok());
    let keeper = all.filter(of_the_mount).find(|pid| worker(*pid).is_some()).expect("a keeper");
    for i in 0..5 {
        kill(until(SLOW, || worker(keeper)), Signal::SIGKILL).expect("kill");
        assert!(fs::read(dir.join(name(i))).expect("read") == content(i));
    }
    run(Command::new("umount").arg(&dir));
    until(SLOW, || (!Path::new(&format!("/proc/{keeper}")).exists()).then_some(()));
}

#[test]
fn a_process_that_does_not_run_any_more_is_replaced() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let log = site.place("logs").join("survivor");
    let words = ["set", "--io-timeout", "8s"];
    let mounted = Mounted::start_by(with_keeper(), &site.url, site.place("mnt"), &log, &words);
    let stopped = worker(mounted.pid()).expect("a worker");
    kill(stopped, Signal::SIGSTOP).expect("stopped");
    assert!(fs::read(mounted.dir.join(name(9))).expect("read") == content(9));
    assert_ne!(worker(mounted.pid()), Some(stopped));
    assert!(fs::read_to_string(&log).expect("log").contains("does not run any more"));
    mounted.stop();
}
