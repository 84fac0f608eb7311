use super::{socket::HEAD_BYTES_MAX, *};
use crate::TokenSource;
use fletch_api::hits::{HERE, Wanted};
use fletch_core::{Hash, Root};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{JoinHandle, spawn},
};
use tempfile::TempDir;

/// Far more than a test takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(20);
const SIZE: u32 = 200_000;
const UPGRADED: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: fletch-hits/4\r\n\r\n";

fn content() -> Vec<u8> {
    (0..SIZE).map(|i| (i % 251) as u8).collect()
}

fn request(size: u32) -> HitRequest<'static> {
    let (root, hash) = (Root(Hash::of(b"root")), Hash::of(&content()));
    HitRequest { root, wanted: Wanted::File("a/b.jpg"), hash, size, place: None, job: None, dataset: None }
}

fn ask(connection: &mut HitConnection, buffer: &mut [u8]) -> HitOutcome {
    let size = u32::try_from(buffer.len()).expect("small");
    connection.ask(&request(size), buffer, Instant::now() + LONG)
}

/// One connection, as the fake server sees it.
struct Peer {
    input: BufReader<UnixStream>,
    output: UnixStream,
}

impl Peer {
    fn accept(listener: &UnixListener) -> Self {
        let (output, _) = listener.accept().expect("a connection");
        Peer { input: BufReader::new(output.try_clone().expect("cloned")), output }
    }

    /// Returns the head of the request for the upgrade.
    fn head(&mut self) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(self.input.read_line(&mut head).expect("a line"), 0, "the client closed");
        }
        head
    }

    fn send(&mut self, bytes: &[u8]) {
        self.output.write_all(bytes).expect("sent");
    }

    fn upgrade(mut self) -> Self {
        self.head();
        self.send(UPGRADED);
        self
    }

    /// Reads a request and checks it. Returns false if the client closed the connection.
    fn receive(&mut self) -> bool {
        let mut length = [0; 2];
        if self.input.read_exact(&mut length).is_err() {
            return false;
        }
        let mut bytes = vec![0; u16::from_le_bytes(length).into()];
        self.input.read_exact(&mut bytes).expect("a whole request");
        let parsed = HitRequest::parse(&bytes).expect("a valid request");
        assert_eq!(parsed, request(parsed.size));
        true
    }

    fn answer(&mut self, answer: HitAnswer, bytes: &[u8]) {
        assert!(self.receive(), "the client closed");
        self.send(&[&answer.encode()[..], bytes].concat());
    }

    fn answer_here(&mut self) {
        self.answer(HitAnswer::Here(SIZE), &content());
    }
}

/// A fake server that runs `work` on a thread.
struct FakeServer {
    dir: TempDir,
    thread: JoinHandle<()>,
}

impl FakeServer {
    fn new(work: impl FnOnce(UnixListener) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("socket")).expect("bound");
        FakeServer { dir, thread: spawn(move || work(listener)) }
    }

    fn within(&self, answer_timeout: Duration, token: Option<TokenSource>) -> HitServer {
        let bearer = Arc::new(Bearer::new(token.as_ref()).expect("a token"));
        HitServer::new(&self.dir.path().join("socket"), "mount", bearer, answer_timeout)
    }

    fn server(&self) -> HitServer {
        self.within(LONG, None)
    }

    fn end(self) {
        self.thread.join().expect("the server saw what it expects");
    }
}

/// Ends the rest of a server, as if its time had passed.
fn end_rest(server: &HitServer) {
    server.rest().until = Some(Instant::now());
}

#[test]
fn bytes_come_over_one_connection_that_began_with_an_upgrade() {
    let fake = FakeServer::new(|listener| {
        let mut peer = Peer::accept(&listener);
        let head = peer.head();
        let mut lines = head.split("\r\n");
        assert_eq!(lines.next(), Some("GET /v1/hits HTTP/1.1"));
        let lines: Vec<&str> = lines.collect();
        for line in [
            "Host: localhost",
            "Connection: upgrade",
            "Upgrade: fletch-hits/4",
            "fletch-component: mount",
            "Authorization: Bearer secret",
        ] {
            assert_eq!(lines.iter().filter(|l| **l == line).count(), 1, "{line} in {head}");
        }
        peer.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: Fletch-Hits/4\r\n");
        peer.send(b"Connection: upgrade\r\n\r\n");
        for _ in 0..3 {
            peer.answer_here();
        }
        peer.answer(HitAnswer::NotHere, &[]);
        // In pieces, of which the first ends within the head.
        assert!(peer.receive());
        let answer = [&HitAnswer::Here(SIZE).encode()[..], &content()].concat();
        for piece in [&answer[..3], &answer[3..9], &answer[9..60_000], &answer[60_000..]] {
            peer.send(piece);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!peer.receive(), "no more requests");
    });
    let server = fake.within(LONG, Some(TokenSource::Text("secret".into())));
    let mut connection = server.connection(0);
    let mut buffer = vec![0; SIZE as usize];
    for _ in 0..3 {
        buffer.fill(0);
        assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
        assert_eq!(buffer, content());
    }
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::NotHere);
    buffer.fill(0);
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    assert_eq!(buffer, content());
    drop(connection);
    let bytes = 4 * u64::from(SIZE);
    assert_eq!(server.stats(), HitStats { asks: 5, here: 4, not_here: 1, bytes, ..HitStats::default() });
    fake.end();
}

#[test]
fn a_slow_answer_ends_in_time_and_the_server_is_left_alone() {
    // The server accepts, upgrades, sends a part of its answer, and then hangs as a stopped process does.
    let (done, until_done): (Sender<()>, Receiver<()>) = channel();
    let fake = FakeServer::new(move |listener| {
        let mut peer = Peer::accept(&listener).upgrade();
        peer.answer(HitAnswer::Here(SIZE), &content()[..1000]);
        until_done.recv().expect("the end of the test");
    });
    let server = fake.within(ANSWER_TIMEOUT, None);
    let (mut connection, mut other) = (server.connection(0), server.connection(0));
    let mut buffer = vec![0; SIZE as usize];
    let begun = Instant::now();
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Failed);
    let waited = begun.elapsed();
    assert!(waited >= ANSWER_TIMEOUT / 2 && waited < ANSWER_TIMEOUT * 5, "{waited:?}");
    let begun = Instant::now();
    for connection in [&mut connection, &mut other] {
        assert_eq!(ask(connection, &mut buffer), HitOutcome::NotAsked);
    }
    assert!(begun.elapsed() < ANSWER_TIMEOUT / 2, "nobody waits again");
    assert!(server.rests(Instant::now()));
    assert!(!server.rests(Instant::now() + RETRY_AFTER.start * 2));
    // Nobody accepts: the queue of the kernel takes the connection.
    end_rest(&server);
    let begun = Instant::now();
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Failed);
    assert!(begun.elapsed() < ANSWER_TIMEOUT * 5, "{:?}", begun.elapsed());
    assert!(server.rests(Instant::now() + RETRY_AFTER.start), "twice as long");
    assert_eq!(server.stats(), HitStats { asks: 2, failed: 2, ..HitStats::default() });
    done.send(()).expect("the server waits");
    fake.end();
}

#[test]
fn connecting_to_a_stopped_server_ends_in_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let address = SocketAddrUnix::new(&path).expect("an address");
    let socket = |flags| {
        let flags = flags | SocketFlags::CLOEXEC;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket")
    };
    let listener = socket(SocketFlags::empty());
    rustix::net::bind(&listener, &address).expect("bound");
    rustix::net::listen(&listener, 1).expect("listening");
    // Nobody accepts, until the queue of the kernel is full.
    let mut waiting = Vec::new();
    let full = loop {
        waiting.push(socket(SocketFlags::NONBLOCK));
        if let Err(error) = rustix::net::connect(&waiting[waiting.len() - 1], &address) {
            break error;
        }
    };
    assert_eq!(full, Errno::AGAIN, "after {} connections", waiting.len());
    let server =
        HitServer::new(&path, "mount", Arc::new(Bearer::new(None).expect("no token")), ANSWER_TIMEOUT);
    let begun = Instant::now();
    assert_eq!(ask(&mut server.connection(0), &mut [0; 10]), HitOutcome::Failed);
    let waited = begun.elapsed();
    assert!(waited >= ANSWER_TIMEOUT / 2 && waited < ANSWER_TIMEOUT * 5, "{waited:?}");
}

#[test]
fn an_ask_ends_at_the_callers_time() {
    let (done, until_done): (Sender<()>, Receiver<()>) = channel();
    let fake = FakeServer::new(move |listener| {
        let mut peer = Peer::accept(&listener).upgrade();
        peer.answer_here();
        assert!(peer.receive());
        until_done.recv().expect("the end of the test");
    });
    let mut connection = fake.server().connection(0);
    let mut buffer = vec![0; SIZE as usize];
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    let now = Instant::now();
    assert_eq!(connection.ask(&request(SIZE), &mut buffer, now), HitOutcome::NotAsked);
    let until = now + Duration::from_millis(50);
    assert_eq!(connection.ask(&request(SIZE), &mut buffer, until), HitOutcome::Failed);
    // The kernel counts in ticks.
    let waited = now.elapsed();
    assert!(waited >= Duration::from_millis(30) && waited < LONG / 2, "{waited:?}");
    done.send(()).expect("the server waits");
    fake.end();
}

#[test]
fn an_answer_that_breaks_the_protocol_ends_the_connection() {
    let answers: [Vec<u8>; 4] = [
        HitAnswer::Here(SIZE - 1).encode().into(),
        vec![9, 0, 0, 0, 0, 0, 0, 0],
        vec![HERE, 1, 0, 0, 0, 0, 0, 0],
        b"\0\0\0\0\0\0\0\0more".into(),
    ];
    let fake = FakeServer::new(move |listener| {
        for answer in answers {
            let mut peer = Peer::accept(&listener).upgrade();
            assert!(peer.receive());
            peer.send(&answer);
            assert!(!peer.receive(), "the client closes");
        }
        Peer::accept(&listener).upgrade().answer_here();
    });
    let server = fake.server();
    let mut connection = server.connection(0);
    let mut buffer = vec![0; SIZE as usize];
    for _ in 0..4 {
        assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Failed);
        end_rest(&server);
    }
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    assert!(!server.rests(Instant::now()), "an answer ends the trouble");
    fake.end();
}

#[test]
fn a_connection_that_was_closed_while_idle_is_opened_again_at_once() {
    let fake = FakeServer::new(|listener| {
        for _ in 0..2 {
            let mut peer = Peer::accept(&listener).upgrade();
            peer.answer_here();
            drop(peer);
        }
        // The server goes: no socket is left.
        drop(listener);
    });
    let server = fake.server();
    let mut connection = server.connection(0);
    let mut buffer = vec![0; SIZE as usize];
    for _ in 0..2 {
        assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    }
    assert_eq!(server.stats().failed, 0);
    fake.thread.join().expect("the server saw what it expects");
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Failed);
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::NotAsked);
}

#[test]
fn a_server_that_refuses_the_upgrade_gets_no_other_one_soon() {
    let fake = FakeServer::new(|listener| {
        let mut open = Peer::accept(&listener).upgrade();
        open.answer_here();
        for answer in [
            &b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"[..],
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: fletch-hits/5\r\n\r\n",
            b"SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            let mut peer = Peer::accept(&listener);
            peer.head();
            peer.send(answer);
        }
        let mut peer = Peer::accept(&listener);
        peer.head();
        let endless = [&b"HTTP/1.1 101 Switching Protocols\r\nX: "[..], &[b'x'; HEAD_BYTES_MAX]].concat();
        peer.send(&endless);
        open.answer_here();
    });
    let server = fake.server();
    let (mut open, mut refused) = (server.connection(0), server.connection(0));
    let mut buffer = vec![0; SIZE as usize];
    assert_eq!(ask(&mut open, &mut buffer), HitOutcome::Here);
    assert_eq!(ask(&mut refused, &mut buffer), HitOutcome::Failed);
    assert_eq!(ask(&mut refused, &mut buffer), HitOutcome::NotAsked);
    let rest = *server.rest();
    assert!(rest.open_after > Some(Instant::now() + RETRY_AFTER.end / 2), "{rest:?}");
    assert!(!server.rests(Instant::now()), "connections that are open go on");
    for _ in 0..3 {
        *server.rest() = Rest::default();
        assert_eq!(ask(&mut refused, &mut buffer), HitOutcome::Failed);
    }
    *server.rest() = rest;
    assert_eq!(ask(&mut open, &mut buffer), HitOutcome::Here);
    assert_eq!(ask(&mut refused, &mut buffer), HitOutcome::NotAsked, "another one's answer");
    fake.end();
}

#[test]
fn after_many_misses_only_some_asks_are_sent() {
    let asks = 16 + 3 * 8;
    let fake = FakeServer::new(|listener| {
        let mut peer = Peer::accept(&listener).upgrade();
        for _ in 0..16 + 3 {
            peer.answer(HitAnswer::NotHere, &[]);
        }
        for _ in 0..3 {
            peer.answer_here();
        }
        assert!(!peer.receive());
    });
    let server = fake.server();
    let mut connection = server.connection(0);
    let mut buffer = vec![0; SIZE as usize];
    let outcomes: Vec<HitOutcome> = (0..asks).map(|_| ask(&mut connection, &mut buffer)).collect();
    let sent: Vec<usize> = (0..asks).filter(|i| outcomes[*i] == HitOutcome::NotHere).collect();
    assert_eq!(sent, (0..16).chain([23, 31, 39]).collect::<Vec<_>>());
    let outcomes: Vec<HitOutcome> = (0..10).map(|_| ask(&mut connection, &mut buffer)).collect();
    let expected = [[HitOutcome::NotAsked; 7].as_slice(), &[HitOutcome::Here; 3]].concat();
    assert_eq!(outcomes, expected, "a hit ends the economy");
    drop(connection);
    fake.end();
}

#[test]
fn another_token_opens_another_connection() {
    let tokens = tempfile::tempdir().expect("a directory");
    let file = tokens.path().join("token");
    std::fs::write(&file, "one").expect("written");
    let fake = FakeServer::new(|listener| {
        for token in ["one", "two"] {
            let mut peer = Peer::accept(&listener);
            assert!(peer.head().contains(&format!("Authorization: Bearer {token}\r\n")));
            peer.send(UPGRADED);
            for _ in 0..2 {
                peer.answer_here();
            }
            assert!(!peer.receive(), "the client closes");
        }
    });
    let server = fake.within(LONG, Some(TokenSource::File(file.clone())));
    let mut connection = server.connection(0);
    let mut buffer = vec![0; SIZE as usize];
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    std::fs::write(&file, "two").expect("written");
    let bearer = &server.0.bearer;
    assert!(bearer.renewed(bearer.header().as_ref()), "a call was refused with 401 and read the file");
    let checked = |connection: &mut HitConnection, ago| {
        let open = connection.open.as_mut().expect("open");
        open.token_checked = Instant::now().checked_sub(ago).expect("the machine runs for longer");
    };
    checked(&mut connection, Duration::ZERO);
    assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here, "not looked at yet");
    for _ in 0..2 {
        checked(&mut connection, TOKEN_CHECK_EVERY);
        assert_eq!(ask(&mut connection, &mut buffer), HitOutcome::Here);
    }
    drop(connection);
    fake.end();
}

#[test]
fn a_request_that_the_protocol_cannot_carry_is_not_sent() {
    let fake = FakeServer::new(drop);
    let mut connection = fake.server().connection(0);
    let mut buffer = vec![0; 10];
    let until = Instant::now() + LONG;
    assert_eq!(connection.ask(&request(11), &mut buffer, until), HitOutcome::NotAsked, "another length");
    let path = "x".repeat(HEAD_BYTES_MAX);
    let long = HitRequest { wanted: Wanted::File(&path), ..request(10) };
    assert_eq!(connection.ask(&long, &mut buffer, until), HitOutcome::NotAsked);
    fake.end();
}

#[test]
fn rests_grow_until_an_answer_and_one_thread_tries_at_a_time() {
    let (mut rest, mut now) = (Rest::default(), Instant::now());
    let s = Duration::from_secs;
    assert!(rest.takes_turn(now, false) && rest.takes_turn(now, false), "all may ask");
    for step in [1, 2, 4, 8, 16, 32, 60, 60] {
        rest.failed(now);
        // Other threads had asked before.
        rest.failed(now);
        assert!(!rest.takes_turn(now + s(step) - Duration::from_millis(1), true), "{step} s");
        now += s(step);
        assert!(rest.takes_turn(now, true) && !rest.takes_turn(now, true), "one thread tries");
    }
    assert!(rest.takes_turn(now + TURN, true), "the one that tried did not come back");
    rest.answered();
    assert_eq!(rest, Rest::default());
    rest.failed(now);
    rest.refused(now);
    assert!(rest.takes_turn(now, true) && !rest.takes_turn(now, false), "open connections go on");
    rest.answered();
    assert!(rest.has_effect() && !rest.takes_turn(now + s(59), false));
    assert!(rest.takes_turn(now + s(60), false));
}
