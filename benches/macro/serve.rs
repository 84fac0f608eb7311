//! `bench-serve [--rounds 5] [--seconds 2] [--json FILE]`
//!
//! Times 4 MiB chunks from the server's memory, and from its disk (page cache; each is read and hashed anew),
//! against nginx with sendfile (page cache). One and four keep-alive connections of the same client. Further
//! rows: the same chunks with and without TLS, and batches of 64 × 4 KiB against single GETs. Needs `nginx`.

use fletch_benches::{Daemon, Table, arg, bin, keep, until, usage};
use fletch_core::Hash;
use fletch_testkit::tls::Authority;
use rand::{RngCore, SeedableRng};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A server: its address, and how to reach it if it speaks TLS.
#[derive(Clone)]
struct At {
    addr: String,
    tls: Option<Arc<ClientConfig>>,
}

impl At {
    fn plain(addr: String) -> Self {
        At { addr, tls: None }
    }

    fn connect(&self) -> Box<dyn Stream> {
        let tcp = TcpStream::connect(&self.addr).expect("connect");
        tcp.set_nodelay(true).expect("nodelay");
        let Some(tls) = &self.tls else { return Box::new(tcp) };
        let name = "localhost".try_into().expect("a name");
        let session = ClientConnection::new(Arc::clone(tls), name).expect("a session");
        // By itself rustls reads 4 KiB at a time, and the client would be what is measured.
        Box::new(StreamOwned::new(session, Buffered(BufReader::with_capacity(256 << 10, tcp))))
    }
}

/// A connection that is read in large pieces.
struct Buffered(BufReader<TcpStream>);

impl Read for Buffered {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Buffered {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.get_mut().write(buf)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.get_mut().flush()
    }
}

trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

/// Returns the settings of a client that trusts an authority.
fn trusting(authority: &Authority) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate");
    roots.add(certificate).expect("an authority");
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions");
    Arc::new(config.with_root_certificates(roots).with_no_client_auth())
}

/// A minimal keep-alive client. It reads all bodies into one buffer.
struct Client {
    stream: BufReader<Box<dyn Stream>>,
    buf: Vec<u8>,
}

impl Client {
    fn connect(at: &At) -> Self {
        Client { stream: BufReader::with_capacity(256 << 10, at.connect()), buf: vec![0; 1 << 20] }
    }

    /// Makes one exchange and returns the bytes of the body (identity or chunked).
    fn ask(&mut self, request: &[u8]) -> u64 {
        self.stream.get_mut().write_all(request).expect("request");
        let mut length = None;
        let mut line = String::new();
        let mut first = true;
        loop {
            line.clear();
            self.stream.read_line(&mut line).expect("head");
            if first {
                assert!(line.starts_with("HTTP/1.1 200"), "{line}");
                first = false;
            }
            if line == "\r\n" {
                break;
            }
            if let Some(v) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = v.trim().parse::<u64>().ok();
            }
        }
        match length {
            Some(n) => self.drain(n),
            None => {
                let mut total = 0;
                loop {
                    line.clear();
                    self.stream.read_line(&mut line).expect("chunk");
                    let n = u64::from_str_radix(line.trim(), 16).expect("chunk length");
                    self.drain(n + 2);
                    total += n;
                    if n == 0 {
                        return total;
                    }
                }
            }
        }
    }

    fn drain(&mut self, n: u64) -> u64 {
        let mut left = n;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(self.buf.len());
            let got = self.stream.read(&mut self.buf[..want]).expect("body");
            assert!(got > 0, "early end");
            left -= got as u64;
        }
        n
    }
}

/// Sends the requests in turn from `connections` clients for `time`. Returns (bytes, exchanges) per second.
fn load(at: &At, requests: &[Vec<u8>], connections: usize, time: Duration) -> (f64, f64) {
    let begin = Instant::now();
    let sums: Vec<(u64, u64)> = std::thread::scope(|s| {
        let all: Vec<_> = (0..connections)
            .map(|c| {
                s.spawn(move || {
                    let mut client = Client::connect(at);
                    let (mut bytes, mut n) = (0, 0);
                    while begin.elapsed() < time {
                        let k = usize::try_from(n).unwrap_or(0) * connections + c;
                        bytes += client.ask(&requests[k % requests.len()]);
                        n += 1;
                    }
                    (bytes, n)
                })
            })
            .collect();
        all.into_iter().map(|t| t.join().expect("client")).collect()
    });
    let secs = begin.elapsed().as_secs_f64();
    (sums.iter().map(|s| s.0 as f64).sum::<f64>() / secs, sums.iter().map(|s| s.1 as f64).sum::<f64>() / secs)
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nFletch-Job: bench\r\n\r\n").into_bytes()
}

/// Starts a server of the dataset in `scratch`, with its own folder there, and returns it and its address.
fn serve(scratch: &Path, name: &str, more: &[&str]) -> (Daemon, At) {
    let own = scratch.join(name);
    std::fs::create_dir(&own).expect("mkdir");
    let at = |p: &str| own.join(p);
    let ready = at("ready");
    let server = Daemon::start(
        Command::new(bin("fletch-server"))
            .args(["--listen", "127.0.0.1:0"])
            .args(more)
            .arg("--socket")
            .arg(at("s"))
            .arg("--cache-dir")
            .arg(at("c"))
            .arg("--state-dir")
            .arg(at("d"))
            .arg("--ready-file")
            .arg(&ready),
        Some(&at("server.log")),
    );
    until("server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.contains("http")));
    let url = std::fs::read_to_string(&ready).expect("url").trim().trim_end_matches('/').to_owned();
    assert!(
        Command::new(bin("fletch"))
            .args(["register", "d"])
            .arg(scratch.join("data"))
            .arg("--tables")
            .arg(scratch.join("tables"))
            .arg("--server")
            .arg(format!("unix:{}", at("s").display()))
            .status()
            .expect("register")
            .success()
    );
    let addr = url.trim_start_matches("http://").trim_start_matches("https://");
    (server, At::plain(addr.to_owned()))
}

/// Returns the chunk reads that a server answered from its disk, and from its origin.
fn chunk_reads(at: &At) -> [u64; 2] {
    let mut stream = TcpStream::connect(&at.addr).expect("connect");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("request");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("metrics");
    ["disk", "origin"].map(|tier| {
        let name = format!("fletch_chunk_reads_total{{tier=\"{tier}\"}} ");
        page.lines().find_map(|l| l.strip_prefix(&name)?.trim().parse().ok()).expect("the metric")
    })
}

fn main() {
    usage(include_str!("serve.rs"));
    let rounds: usize = arg("rounds", 5);
    let time = Duration::from_millis((arg("seconds", 2.0) * 1000.0) as u64);
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    let data = at("data");
    std::fs::create_dir_all(data.join("small")).expect("mkdir");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(std::process::id().into());
    let mut fill = |n: usize| {
        let mut b = vec![0; n];
        rng.fill_bytes(&mut b);
        b
    };
    let big: Vec<Hash> = (0..32)
        .map(|i| {
            let b = fill(4 << 20);
            std::fs::write(data.join(format!("{i}.bin")), &b).expect("write");
            Hash::of(&b)
        })
        .collect();
    let small: Vec<Hash> = (0..4096)
        .map(|i| {
            let b = fill(4 << 10);
            std::fs::write(data.join(format!("small/{i}.bin")), &b).expect("write");
            Hash::of(&b)
        })
        .collect();

    let out = Command::new(bin("fletch"))
        .arg("index")
        .arg(&data)
        .arg("--to")
        .arg(at("tables"))
        .arg("--quiet")
        .arg("--state-dir")
        .arg(at("st"))
        .output()
        .expect("index");
    assert!(out.status.success());
    let root = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    let (_server, fletch) = serve(scratch.path(), "memory", &["--memory", "1GiB", "--cache-size", "0"]);
    // Memory for 12 of the 32 chunks that are asked for in turn: every one comes from the disk.
    let little = ["--memory", "64MiB", "--cache-size", "1GiB", "--cache-free-floor", "0"];
    let (_disk_server, disk) = serve(scratch.path(), "disk", &little);
    let authority = Authority::new("bench");
    let (cert, key) = authority.server(&["localhost"], 4000).write(scratch.path(), "tls");
    let files = [format!("--tls-cert-file={}", cert.display()), format!("--tls-key-file={}", key.display())];
    let with_tls = ["--memory", "1GiB", "--cache-size", "0", &*files[0], &*files[1]];
    let (_tls_server, tls) = serve(scratch.path(), "tls-server", &with_tls);
    let tls = At { tls: Some(trusting(&authority)), ..tls };

    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("port").port();
    std::fs::write(
        at("nginx.conf"),
        format!(
            "worker_processes 2; daemon off; pid {pid}; error_log {log} crit;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; sendfile on; tcp_nopush on; tcp_nodelay on;\n\
             keepalive_requests 1000000; client_body_temp_path {tmp}; proxy_temp_path {tmp};\n\
             fastcgi_temp_path {tmp}; uwsgi_temp_path {tmp}; scgi_temp_path {tmp};\n\
             server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n",
            pid = at("nginx.pid").display(),
            log = at("nginx.log").display(),
            tmp = at("nginx-tmp").display(),
            root = data.display(),
        ),
    )
    .expect("conf");
    // nginx workers drop root; let them read the data.
    assert!(Command::new("chmod").arg("755").arg(scratch.path()).status().expect("chmod").success());
    let nginx_daemon = Daemon::start(
        Command::new("nginx").arg("-e").arg(at("nginx.log")).arg("-c").arg(at("nginx.conf")),
        Some(&at("nginx.err")),
    );
    let nginx = At::plain(format!("127.0.0.1:{port}"));
    until("nginx", || TcpStream::connect(&nginx.addr).is_ok());

    let chunks: Vec<Vec<u8>> = big.iter().map(|h| get(&format!("/v1/versions/{root}/chunks/{h}"))).collect();
    let objects: Vec<Vec<u8>> = (0..big.len()).map(|i| get(&format!("/{i}.bin"))).collect();
    let singles: Vec<Vec<u8>> =
        small.iter().map(|h| get(&format!("/v1/versions/{root}/chunks/{h}"))).collect();
    let batches: Vec<Vec<u8>> = small
        .chunks(64)
        .map(|c| {
            let item = |h| format!("{{\"chunk\":{{\"hash\":\"{h}\"}}}}");
            let items: Vec<String> = c.iter().map(item).collect();
            let body = format!("{{\"items\":[{}]}}", items.join(","));
            format!(
                "POST /v1/versions/{root}/batch HTTP/1.1\r\nHost: localhost\r\nFletch-Job: bench\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes()
        })
        .collect();
    // Warm: everything is in the server's memory and in nginx's page cache.
    let all =
        [(&fletch, &chunks), (&nginx, &objects), (&fletch, &singles), (&disk, &chunks), (&tls, &chunks)];
    for (at, reqs) in all {
        let mut c = Client::connect(at);
        for r in reqs {
            c.ask(r);
        }
    }
    let before = chunk_reads(&disk);
    let mut table = Table::default();
    let (mut samples, mut encrypted) = (Table::default(), Table::default());
    for _ in 0..rounds {
        for connections in [1, 4] {
            let row = format!("4 MiB from memory, {connections} connection(s), GB/s");
            table.add(&row, "fletch", load(&fletch, &chunks, connections, time).0 / 1e9);
            table.add(&row, "nginx sendfile", load(&nginx, &objects, connections, time).0 / 1e9);
            let row = format!("4 MiB from disk, {connections} connection(s), GB/s");
            table.add(&row, "fletch", load(&disk, &chunks, connections, time).0 / 1e9);
            table.add(&row, "nginx sendfile", load(&nginx, &objects, connections, time).0 / 1e9);
        }
        for connections in [1, 4] {
            let row = format!("4 MiB from memory, {connections} connection(s), GB/s");
            encrypted.add(&row, "TLS", load(&tls, &chunks, connections, time).0 / 1e9);
            encrypted.add(&row, "plain", load(&fletch, &chunks, connections, time).0 / 1e9);
        }
        let row = "4 KiB samples, 1 connection, samples/s";
        samples.add(row, "batch of 64", 64.0 * load(&fletch, &batches, 1, time).1);
        samples.add(row, "single GETs", load(&fletch, &singles, 1, time).1);
    }
    let after = chunk_reads(&disk);
    let [hits, misses] = [0, 1].map(|i| after[i] - before[i]);
    assert!(misses * 100 <= hits, "{misses} chunks came from the origin, {hits} from the disk");
    table.print("fletch", "GB/s");
    println!();
    encrypted.print("TLS", "GB/s");
    println!();
    samples.print("batch of 64", "samples/s");
    keep(&table);
    drop(nginx_daemon);
}
