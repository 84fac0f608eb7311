//! Requests of hit connections, to a running server.

use super::requests::{SERVER, register, request, send};
use crate::plant;
use fletch_api::{
    hits::{ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, WINDOW_REQUEST, Wanted},
    routes,
};
use fletch_core::{Hash, JobName, Root};
use fletch_window::View;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::{
    io::{IoSlice, Read as _, Write as _},
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    sync::LazyLock,
    time::Duration,
};

/// How long the server may take for an answer. It never waits for anything.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The root of a version whose files are in the server's memory.
static ROOT: LazyLock<Root> = LazyLock::new(|| {
    let server = &*SERVER;
    register(server);
    for path in ["a.txt", "b/c.txt"] {
        let target = format!("/v1/versions/{}/files/{path}", server.root);
        let reply = send(server, &request("GET", &target, &[], "")).expect("a reply");
        assert!(reply.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&reply));
    }
    server.root.parse().expect("a root")
});

pub fn seeds() -> Vec<Vec<u8>> {
    let job = || Some(JobName::new("j").expect("a name"));
    let hello = Hash::of(b"hello");
    let of = |wanted, hash, size, job| {
        let place = None;
        HitRequest { root: *ROOT, wanted, hash, size, place, job, dataset: None }
    };
    let requests = [
        of(Wanted::Chunk, hello, 5, job()),
        of(Wanted::File("a.txt"), hello, 5, None),
        of(Wanted::File("b/c.txt"), Hash::of(b"world!"), 6, job()),
        of(Wanted::File("no/such"), hello, 5, None),
    ];
    let encoded = |request: &HitRequest<'_>| {
        let mut out = Vec::new();
        request.encode(&mut out).expect("it is short");
        out
    };
    let mut seeds: Vec<Vec<u8>> = requests.iter().map(encoded).collect();
    let placed = HitRequest { place: Some(64), ..of(Wanted::Chunk, hello, 5, job()) };
    seeds.push([encoded(&placed), encoded(&requests[1])].concat());
    seeds.push([encoded(&placed), WINDOW_REQUEST.to_vec()].concat());
    seeds
}

/// The length of the window of each connection.
const WINDOW: u32 = 64 << 10;

/// What the server has to do with an input.
struct Expected<'a> {
    /// The sound requests before the first that is not.
    requests: Vec<HitRequest<'a>>,
    /// Whether the input ends after them.
    is_sound: bool,
}

/// Reads an input by the rules of the protocol. A request of length 0 breaks them: it has no descriptor.
fn expected(mut input: &[u8]) -> Expected<'_> {
    let mut requests = Vec::new();
    while let Some((length, rest)) = input.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length));
        let Some((request, rest)) = rest.split_at_checked(length) else {
            return Expected { requests, is_sound: false };
        };
        let fits = |r: &HitRequest<'_>| {
            r.place.is_none_or(|place| u64::from(place) + u64::from(r.size) <= WINDOW.into())
        };
        let Some(sound) = HitRequest::parse(request).ok().filter(fits) else {
            return Expected { requests, is_sound: false };
        };
        let mut again = Vec::new();
        sound.encode(&mut again).expect("it was as long before");
        assert_eq!(again[2..], *request, "a request is written as it was read");
        requests.push(sound);
        input = rest;
    }
    Expected { requests, is_sound: input.is_empty() }
}

/// Each sound request gets an answer in its turn, and only bytes with the hash that it asks for. What breaks
/// the protocol ends the connection; answers that wait to be sent together are then lost.
pub fn run(input: &[u8]) -> bool {
    LazyLock::force(&ROOT);
    let reply = exchange(input);
    let Expected { requests, is_sound } = expected(input);
    let mut rest = &reply[..];
    for asked in &requests {
        if rest.is_empty() && !is_sound {
            break;
        }
        let (head, bytes) = rest.split_first_chunk::<ANSWER_HEAD_BYTES>().expect("an answer");
        rest = bytes;
        match HitAnswer::parse(*head).expect("the head of an answer") {
            HitAnswer::NotHere => {}
            HitAnswer::InWindow(len) => assert!(len == asked.size && asked.place.is_some()),
            HitAnswer::Here(len) => {
                assert!(len == asked.size && asked.place.is_none());
                let (bytes, after) = rest.split_at_checked(len as usize).expect("all bytes");
                assert_eq!(Hash::of(bytes), asked.hash, "I1");
                rest = after;
                plant::bug(matches!(asked.wanted, Wanted::File(_)));
            }
        }
    }
    assert!(rest.is_empty(), "nobody asked for {rest:?}");
    is_sound && !requests.is_empty()
}

/// Sends the input on a new hit connection with a window. Returns everything that the server answers to it.
fn exchange(input: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(&SERVER.socket).expect("the server accepts");
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).expect("a timeout");
    let path = routes::HITS;
    let upgrade = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\n\
         \r\n"
    );
    stream.write_all(upgrade.as_bytes()).expect("the server reads");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("the head of a reply");
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    let (_view, file) = View::new(WINDOW).expect("memory");
    send_window(&stream, &file);
    let mut head = [0; ANSWER_HEAD_BYTES];
    stream.read_exact(&mut head).expect("an answer");
    assert_eq!(HitAnswer::parse(head), Some(HitAnswer::InWindow(WINDOW)));
    // The server may end the connection before it has read everything.
    drop(stream.write_all(input));
    drop(stream.shutdown(Shutdown::Write));
    let mut reply = Vec::new();
    match stream.read_to_end(&mut reply) {
        Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
            panic!("no answer to {input:?}")
        }
        _ => reply,
    }
}

/// Sends the memory of a window.
fn send_window(stream: &UnixStream, file: &OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let parts = [IoSlice::new(&WINDOW_REQUEST)];
    rustix::net::sendmsg(stream, &parts, &mut control, SendFlags::empty()).expect("the server reads");
}
