//! I6: in a small cgroup, with many clients, connections and open files, memory stays within its setting.

use crate::common::{Over, series, whole};
use fletch_tests::bins::run;
use fletch_tests::cgroup::Memory;
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Readers};
use fletch_tests::require::{Need, have};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const CGROUP: u64 = 512 * MIB;
const MEMORY: u64 = 128 * MIB;
const TABLES: u64 = 32 * MIB;

/// Returns a connection that had one request. The server closes one that had none after a few seconds.
fn used_once(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.write_all(b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("a request");
    let mut status = [0; 15];
    stream.read_exact(&mut status).expect("an answer");
    assert_eq!(&status, b"HTTP/1.1 200 OK");
    stream
}

#[test]
fn i6_many_clients_in_a_small_cgroup() {
    if !have(&[Need::Fuse, Need::Cgroup]) {
        return;
    }
    let soak = std::env::var_os("FLETCH_SOAK").is_some();
    // More than the cgroup has, so that page cache alone would fill it.
    let bytes = if soak { 8 << 30 } else { 640 * MIB };
    let group = Memory::new(CGROUP).expect("cgroup");
    let wrapper = group.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let (memory, tables) = (MEMORY.to_string(), TABLES.to_string());
    let cache = (bytes / 2).to_string();
    let flags =
        ["--memory", &memory, "--tables-memory", &tables, "--cache-size", &cache, "--cache-free-floor", "0"];
    // What is held is asked here, not how long a disk takes to which the tests before this one wrote a
    // hundred gigabytes, nor how long somebody who asks for nothing stays connected meanwhile.
    let patient = ["--io-timeout", "5m", "--limits-idle-timeout", "10m", "--limits-head-timeout", "10m"];
    let flags = [&flags[..], &patient].concat();
    let mut site = Site::start_by(&wrapper, &flags);
    let large = Data::new(71, bytes / 2 / (12 * MIB), 12 * MIB);
    let small = Data::new(72, bytes / 2 / 110_000, 110_000);
    // Gigabytes that are still to be written out would keep the disk from its readers for longer than an
    // origin may take.
    for data in [&large, &small] {
        run(Command::new("sync").arg("-f").arg(&data.dir));
    }
    let roots = [site.publish("large", &large.dir), site.publish("small", &small.dir)];
    let mount = site.mount("small", "open", &["--memory", "32MiB"]);
    let open: Vec<File> =
        small.files[..256].iter().map(|(p, _)| File::open(mount.dir.join(p)).expect("open")).collect();
    let address = site.url.strip_prefix("http://").expect("url").to_owned();
    let idle: Vec<TcpStream> = (0..900).map(|_| used_once(&address)).collect();
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        s.spawn(|| {
            while !done.load(Relaxed) {
                peak.fetch_max(group.held(), Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _over = Over(&done);
        let crowd: Vec<_> = [(&large, &roots[0]), (&small, &roots[1])]
            .into_iter()
            .map(|(data, root)| {
                let site = &site;
                s.spawn(move || {
                    let readers = Readers::new();
                    for _ in 0..2 {
                        assert_eq!(readers.read(site, root, &data.files, 32), whole(data));
                    }
                })
            })
            .collect();
        for c in crowd {
            c.join().expect("readers");
        }
    });
    assert!(series(&site, "fletch_connections{of=\"tcp\"}") >= 900);
    assert!(series(&site, "fletch_chunk_reads_total{tier=\"disk\"}") > 0);
    let (peak, bound) = (peak.load(Relaxed), MEMORY + TABLES + 32 * MIB);
    assert!(peak <= bound, "{} MiB held, {} MiB allowed", peak / MIB, bound / MIB);
    assert_eq!(group.kills(), 0);
    drop((open, idle));
    mount.stop();
    site.end();
}
