//! The hit connections of FUSE threads.
//!
//! A FUSE thread asks the server of this machine itself for bytes that the server has at hand
//! ([`fletch_client::hits`]). So most READs of cached data end on the thread that received them.
//!
//! 1. Only a thread between [`enter`] and the end of its guard asks. Threads of the runtime never do: they
//!    must not block.
//! 2. Between these two, a thread waits for at most [`ANSWER_TIMEOUT`] in all, however much it asks.
//! 3. (I6) A thread keeps at most [`CONNECTIONS_MAX`] connections: those that it used last. Each has a window
//!    of at most [`WINDOW_BYTES_MAX`], beside the memory of the store. Almost every mount has one server.

use crate::fs::read::FetchRequest;
use bytes::Bytes;
use fletch_api::hits::{HitRequest, Wanted};
use fletch_client::{
    Client,
    hits::{ANSWER_TIMEOUT, HitConnection, HitOutcome, HitServer, InSlab},
};
use fletch_core::{Hash, Root};
use fletch_store::Brought;
use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
    time::Instant,
};

/// The most connections of a thread, each to another server or with another token.
const CONNECTIONS_MAX: usize = 8;
/// The longest window of a connection: two of the longest READs. A thread answers one READ at a time, but
/// other threads may still send what it read for them.
const WINDOW_BYTES_MAX: u32 = 2 << 20;

thread_local! {
    /// Until when this thread may ask. `None` outside the guard of [`enter`].
    static UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The connections of this thread, the one that it used last at the end.
    static CONNECTIONS: RefCell<Vec<HitConnection>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, its thread may ask.
#[must_use]
pub struct MayAsk {
    before: Option<Instant>,
    /// The guard stays on its thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for MayAsk {
    fn drop(&mut self) {
        UNTIL.set(self.before);
    }
}

/// Permits this thread to ask and wait, for [`ANSWER_TIMEOUT`] from now at most, while the guard lives.
///
/// The caller polls the work of one request meanwhile. The thread must be none of the runtime's.
pub fn enter() -> MayAsk {
    let before = UNTIL.replace(Some(Instant::now() + ANSWER_TIMEOUT));
    MayAsk { before, _thread: PhantomData }
}

/// Returns whether this thread may ask the server of a client now.
#[must_use]
pub fn may_ask(client: &Client) -> bool {
    let Some(until) = UNTIL.get() else { return false };
    let Some(server) = client.hits() else { return false };
    let now = Instant::now();
    now < until && !server.rests(now)
}

/// Asks the server of a client for bytes of a version. Returns whether `buffer` has all of them, unverified.
///
/// Asks nothing on a thread that may not wait.
pub fn ask(client: &Client, root: Root, wanted: &FetchRequest, buffer: &mut [u8]) -> bool {
    let (Some(until), Some(server)) = (UNTIL.get(), client.hits()) else { return false };
    let request = request(client, root, wanted);
    with_connection(server, |connection| connection.ask(&request, buffer, until)) == HitOutcome::Here
}

/// As [`ask`], and returns the bytes, unverified, in the window of the connection.
///
/// [`Brought::NoMemory`]: there is no window, or the bytes are longer.
pub fn ask_in_window(client: &Client, root: Root, wanted: &FetchRequest) -> Brought {
    let (Some(until), Some(server)) = (UNTIL.get(), client.hits()) else { return Brought::Nothing };
    let (_, size) = wanted.hash_and_len();
    if size > WINDOW_BYTES_MAX {
        return Brought::NoMemory;
    }
    let mut request = [request(client, root, wanted)];
    let mut answers = Vec::with_capacity(1);
    let ask = |c: &mut HitConnection| c.ask_in_window(&mut request, &mut answers, until);
    match with_connection(server, ask) {
        HitOutcome::NoWindow => Brought::NoMemory,
        _ => answers.pop().flatten().map_or(Brought::Nothing, |f| Brought::Bytes(Bytes::from_owner(f))),
    }
}

/// Asks the server of a client where a chunk of a version lies on its disk.
pub fn ask_for_slab(client: &Client, root: Root, chunk: Hash, len: u32) -> Option<InSlab> {
    let (Some(until), Some(server)) = (UNTIL.get(), client.hits()) else { return None };
    let request = client.hit_request(root, Wanted::Slab, chunk, len);
    with_connection(server, |connection| connection.ask_for_slab(&request, until))
}

/// Tells the server of a client how many bytes of a version were read in slabs. Returns whether it counts
/// them; `None` if it does not answer.
pub fn tell_read(client: &Client, root: Root, bytes: u64) -> Option<bool> {
    let (Some(until), Some(server)) = (UNTIL.get(), client.hits()) else { return None };
    let request = client.hit_request(root, Wanted::Read(bytes), root.0, 0);
    match with_connection(server, |connection| connection.ask(&request, &mut [], until)) {
        HitOutcome::Here => Some(true),
        HitOutcome::NotHere => Some(false),
        HitOutcome::NoWindow | HitOutcome::NotAsked | HitOutcome::Failed => None,
    }
}

/// As [`ask_in_window`], for several at once. Returns one entry for each.
pub fn ask_all_in_window(client: &Client, root: Root, wanted: &[FetchRequest]) -> Vec<Option<Bytes>> {
    let (Some(until), Some(server)) = (UNTIL.get(), client.hits()) else { return vec![None; wanted.len()] };
    let mut requests: Vec<HitRequest<'_>> = wanted.iter().map(|w| request(client, root, w)).collect();
    let mut answers = Vec::with_capacity(wanted.len());
    with_connection(server, |connection| connection.ask_in_window(&mut requests, &mut answers, until));
    answers.resize_with(wanted.len(), || None);
    answers.into_iter().map(|answer| answer.map(Bytes::from_owner)).collect()
}

fn request<'a>(client: &Client, root: Root, wanted: &'a FetchRequest) -> HitRequest<'a> {
    let (hash, size) = wanted.hash_and_len();
    let wanted = match wanted {
        FetchRequest::Chunk { .. } => Wanted::Chunk,
        FetchRequest::File { path, .. } => Wanted::File(path),
        FetchRequest::Part { from, .. } => Wanted::Part(*from),
        FetchRequest::Groups { .. } => Wanted::Groups,
    };
    client.hit_request(root, wanted, hash, size)
}

/// Runs `work` with this thread's connection to a server.
fn with_connection<T>(server: &HitServer, work: impl FnOnce(&mut HitConnection) -> T) -> T {
    CONNECTIONS.with_borrow_mut(|connections| {
        let known = connections.iter().position(|connection| connection.server() == server);
        let mut connection =
            known.map_or_else(|| server.connection(WINDOW_BYTES_MAX), |at| connections.remove(at));
        let outcome = work(&mut connection);
        if connections.len() >= CONNECTIONS_MAX {
            connections.remove(0);
        }
        connections.push(connection);
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::hits::{HitAnswer, HitRequest};
    use fletch_client::{ClientConfig, Endpoint};
    use std::{
        io::{BufRead, BufReader, Read, Write},
        os::unix::net::{UnixListener, UnixStream},
        path::Path,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering::SeqCst},
        },
    };

    const CONTENT: &[u8] = b"the bytes of a chunk";

    /// A server that has [`CONTENT`] and counts the connections that it accepted.
    fn server(socket: &Path) -> Arc<AtomicU64> {
        let listener = UnixListener::bind(socket).expect("bound");
        let accepted = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&accepted);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, SeqCst);
                let stream = stream.expect("a connection");
                std::thread::spawn(move || serve(&stream));
            }
        });
        accepted
    }

    fn serve(stream: &UnixStream) {
        let mut input = BufReader::new(stream);
        let mut output = stream;
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            input.read_line(&mut line).expect("a line");
        }
        let upgraded = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: fletch-hits/4\r\n\r\n";
        output.write_all(upgraded).expect("sent");
        let mut length = [0; 2];
        while input.read_exact(&mut length).is_ok() {
            let mut bytes = vec![0; u16::from_le_bytes(length).into()];
            input.read_exact(&mut bytes).expect("a request");
            let request = HitRequest::parse(&bytes).expect("a valid request");
            let has = request.hash == Hash::of(CONTENT);
            let answer = if has { HitAnswer::Here(request.size) } else { HitAnswer::NotHere };
            output.write_all(&answer.encode()).expect("sent");
            output.write_all(if has { CONTENT } else { &[] }).expect("sent");
        }
    }

    fn client(socket: &Path) -> Client {
        let endpoint: Endpoint = format!("unix:{}", socket.display()).parse().expect("an address");
        Client::new(ClientConfig::new(endpoint, "mount")).expect("a client")
    }

    fn asks(client: &Client, hash: Hash) -> Option<Vec<u8>> {
        let mut buffer = vec![0; CONTENT.len()];
        let wanted = FetchRequest::Chunk { hash, len: u32::try_from(CONTENT.len()).expect("small") };
        ask(client, Root(Hash::of(b"root")), &wanted, &mut buffer).then_some(buffer)
    }

    #[test]
    fn only_a_thread_that_may_wait_asks() {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("socket");
        let accepted = server(&socket);
        let client = client(&socket);
        let has = Hash::of(CONTENT);
        assert!(!may_ask(&client) && asks(&client, has).is_none());
        assert_eq!(accepted.load(SeqCst), 0);
        {
            let _may_ask = enter();
            assert!(may_ask(&client));
            assert_eq!(asks(&client, has).as_deref(), Some(CONTENT));
            assert_eq!(asks(&client, Hash::of(b"other")), None);
            let elsewhere = std::thread::scope(|s| s.spawn(|| asks(&client, has)).join());
            assert_eq!(elsewhere.expect("no panic"), None, "another thread has no guard");
        }
        assert!(asks(&client, has).is_none(), "the guard is gone");
        let _may_ask = enter();
        assert!(asks(&client, has).is_some());
        assert_eq!(accepted.load(SeqCst), 1, "one connection for one thread");
        let tcp: Endpoint = "http://127.0.0.1:1".parse().expect("an address");
        let tcp = Client::new(ClientConfig::new(tcp, "mount")).expect("a client");
        assert!(!may_ask(&tcp) && asks(&tcp, has).is_none(), "no unix socket");
        let stats = client.stats();
        assert_eq!((stats.hits.here, stats.hits.not_here, stats.hits.failed), (2, 1, 0));
        assert_eq!((stats.requests, stats.bytes), (3, 2 * CONTENT.len() as u64));
    }

    #[test]
    fn i6_a_thread_keeps_the_connections_that_it_used_last() {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("socket");
        let accepted = server(&socket);
        let clients: Vec<Client> = (0..=CONNECTIONS_MAX).map(|_| client(&socket)).collect();
        let has = Hash::of(CONTENT);
        let asks = |client: &Client| {
            let _may_ask = enter();
            asks(client, has)
        };
        for client in clients.iter().chain(&clients[1..]) {
            assert!(asks(client).is_some());
        }
        assert_eq!(accepted.load(SeqCst), clients.len() as u64, "the last eight are kept");
        assert!(asks(&clients[0].for_dataset(None)).is_some());
        assert_eq!(accepted.load(SeqCst), clients.len() as u64 + 1, "the first one had to go");
        CONNECTIONS.with_borrow(|kept| assert_eq!(kept.len(), CONNECTIONS_MAX));
    }
}
