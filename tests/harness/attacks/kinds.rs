//! The attacks on connections, heads, bodies and replies.

use super::{Attack, Stream, Target};
use std::{
    io::{Read as _, Write as _},
    time::Duration,
};

/// How long an attacker waits for a connection.
const CONNECT: Duration = Duration::from_millis(200);

/// Idle connections cost an attacker little, so it opens many while other attacks take one step.
const CONNECTIONS_A_STEP: usize = 8;

/// Connections that an attack holds, each with what it still has to send.
#[derive(Debug, Default)]
struct Held {
    links: Vec<(Stream, Vec<u8>)>,
    next: usize,
    opened: u64,
}

impl Held {
    /// Opens a connection if there are fewer than `most`, and queues its first bytes.
    fn open(&mut self, target: &Target, most: usize, unix: bool, first: impl FnOnce() -> Vec<u8>) {
        if self.links.len() >= most {
            return;
        }
        let stream = if unix { Stream::unix(&target.socket) } else { Stream::tcp(target.addr, CONNECT) };
        if let Ok(stream) = stream
            && stream.never_block().is_ok()
        {
            self.links.push((stream, first()));
            self.opened += 1;
        }
    }

    /// Sends what the next connection has to send, then `more`. Forgets a connection that the server closed.
    ///
    /// With `read`, takes the reply, too.
    fn go_on(&mut self, more: &[u8], read: bool) {
        if self.links.is_empty() {
            return;
        }
        self.next = (self.next + 1) % self.links.len();
        let (stream, queued) = &mut self.links[self.next];
        queued.extend_from_slice(more);
        let sent = if queued.is_empty() { Ok(0) } else { stream.write(queued) };
        let mut alive = match sent {
            Ok(n) => {
                queued.drain(..n);
                true
            }
            Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
        };
        // An attack that reads nothing learns of the end when a write fails.
        if read {
            alive &= match stream.read(&mut [0; 4096]) {
                Ok(n) => n > 0,
                Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
            };
        }
        if !alive {
            self.links.swap_remove(self.next);
        }
    }
}

/// Opens connections, sends nothing, and replaces those that the server closes.
#[derive(Debug)]
pub struct Idle {
    held: Held,
    most: usize,
    unix: bool,
}

impl Idle {
    /// Holds `most` connections over TCP, or over the unix socket.
    #[must_use]
    pub fn new(most: usize, unix: bool) -> Self {
        Idle { held: Held::default(), most, unix }
    }
}

impl Attack for Idle {
    fn name(&self) -> &'static str {
        if self.unix { "idle connections on the socket" } else { "idle connections" }
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        for _ in 0..CONNECTIONS_A_STEP {
            self.held.open(target, self.most, self.unix, Vec::new);
            self.held.go_on(&[], true);
        }
    }
}

/// Sends heads that never end: long ones at first, then byte by byte.
#[derive(Debug)]
pub struct SlowHeads {
    held: Held,
    most: usize,
    first: usize,
}

impl SlowHeads {
    /// Holds `most` connections. Each sends a header of `first` bytes at once.
    #[must_use]
    pub fn new(most: usize, first: usize) -> Self {
        SlowHeads { held: Held::default(), most, first }
    }
}

impl Attack for SlowHeads {
    fn name(&self) -> &'static str {
        "slow heads"
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        let first = self.first;
        self.held.open(target, self.most, false, || {
            format!("{}x-long: {}", target.head("GET", "/v1/info"), "y".repeat(first)).into_bytes()
        });
        self.held.go_on(b"y", true);
    }
}

/// Announces bodies and sends them byte by byte.
#[derive(Debug)]
pub struct SlowBodies {
    held: Held,
    most: usize,
    length: usize,
    at_once: usize,
}

impl SlowBodies {
    /// Holds `most` requests with bodies of `length` bytes, and sends `at_once` of them at once.
    #[must_use]
    pub fn new(most: usize, length: usize, at_once: usize) -> Self {
        SlowBodies { held: Held::default(), most, length, at_once }
    }
}

impl Attack for SlowBodies {
    fn name(&self) -> &'static str {
        "slow bodies"
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        let (length, at_once) = (self.length, self.at_once);
        self.held.open(target, self.most, false, || {
            let path = format!("/v1/versions/{}/batch", target.root);
            let head = target.head("POST", &path) + "content-type: application/json\r\n";
            let head = format!("{head}content-length: {length}\r\n\r\n{{\"items\":[");
            (head + &" ".repeat(at_once)).into_bytes()
        });
        self.held.go_on(b" ", true);
    }
}

/// Sends chunked bodies without an end, as fast as the server takes them.
#[derive(Debug)]
pub struct EndlessBodies {
    held: Held,
    most: usize,
    chunk: Vec<u8>,
}

impl EndlessBodies {
    /// Holds `most` requests.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let chunk = format!("4000\r\n{}\r\n", " ".repeat(0x4000)).into_bytes();
        EndlessBodies { held: Held::default(), most, chunk }
    }
}

impl Attack for EndlessBodies {
    fn name(&self) -> &'static str {
        "endless bodies"
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        self.held.open(target, self.most, false, || {
            let head = target.head("POST", "/v1/jobs") + "content-type: application/json\r\n";
            (head + "transfer-encoding: chunked\r\n\r\n").into_bytes()
        });
        let behind = self.held.links.iter().map(|(_, queued)| queued.len()).max().unwrap_or(0);
        let more: &[u8] = if behind > 4 * self.chunk.len() { &[] } else { &self.chunk };
        self.held.go_on(more, true);
    }
}

/// Sends the same request again and again, each on a connection of its own, and reads a little of the reply.
pub struct Repeated {
    name: &'static str,
    held: Held,
    most: usize,
    request: Request,
}

/// Returns the bytes of the nth request.
type Request = Box<dyn Fn(&Target, u64) -> Vec<u8> + Send>;

impl Repeated {
    /// Holds `most` connections. `request` returns the bytes of the nth request.
    #[must_use]
    pub fn new(
        name: &'static str,
        most: usize,
        request: impl Fn(&Target, u64) -> Vec<u8> + Send + 'static,
    ) -> Self {
        Repeated { name, held: Held::default(), most, request: Box::new(request) }
    }
}

impl Attack for Repeated {
    fn name(&self) -> &'static str {
        self.name
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        let (n, request) = (self.held.opened, &self.request);
        self.held.open(target, self.most, false, || request(target, n));
        self.held.go_on(&[], true);
    }
}

fn post(target: &Target, path: &str, body: &str) -> Vec<u8> {
    let head = target.head("POST", path) + "content-type: application/json\r\nconnection: close\r\n";
    format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Sends batches of a hundred thousand items.
#[derive(Debug)]
pub struct Batches;

impl Batches {
    /// Holds `most` requests.
    #[must_use]
    pub fn attack(most: usize) -> Repeated {
        let body = format!("{{\"items\":[{}]}}", vec!["{\"ordinal\":1}"; 100_000].join(","));
        Repeated::new("batches of 100,000 items", most, move |target, _| {
            post(target, &format!("/v1/versions/{}/batch", target.root), &body)
        })
    }
}

/// Sends whole bodies of 4 MiB that are no JSON of any request.
#[derive(Debug)]
pub struct LongBodies;

impl LongBodies {
    /// Holds `most` requests.
    #[must_use]
    pub fn attack(most: usize) -> Repeated {
        let body = format!("{{\"plan\":[{}]}}", vec!["\"\""; (4 << 20) / 3 - 8].join(","));
        Repeated::new("bodies of 4 MiB", most, move |target, _| post(target, "/v1/jobs", &body))
    }
}

/// Reads unknown roots, each as another job.
#[derive(Debug)]
pub struct InventedJobs;

impl InventedJobs {
    /// Holds `most` requests.
    #[must_use]
    pub fn attack(most: usize) -> Repeated {
        Repeated::new("invented jobs on unknown roots", most, |target, n| {
            let head = target.head("GET", &format!("/v1/versions/{n:064x}/manifest.json"));
            format!("{head}fletch-job: invented-{n}\r\nconnection: close\r\n\r\n").into_bytes()
        })
    }
}

/// Asks for large files and takes no byte of the replies.
#[derive(Debug)]
pub struct SlowReaders {
    held: Held,
    most: usize,
}

impl SlowReaders {
    /// Holds `most` requests.
    #[must_use]
    pub fn new(most: usize) -> Self {
        SlowReaders { held: Held::default(), most }
    }
}

impl Attack for SlowReaders {
    fn name(&self) -> &'static str {
        "slow readers"
    }

    fn opened(&self) -> u64 {
        self.held.opened
    }

    fn step(&mut self, target: &Target) {
        self.held.open(target, self.most, false, || {
            let path = format!("/v1/versions/{}/files/{}", target.root, target.large);
            (target.head("GET", &path) + "\r\n").into_bytes()
        });
        self.held.go_on(&[], false);
    }
}
