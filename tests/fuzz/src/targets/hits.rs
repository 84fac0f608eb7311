//! Requests of hit connections, to a running server.

use super::requests::{SERVER, register, request, send};
use crate::plant;
use fletch_api::{
    hits::{ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, Wanted},
    routes,
};
use fletch_core::{Hash, JobName, Root};
use std::{
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
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
    requests.iter().map(encoded).collect()
}

/// A sound request gets an answer, and only bytes with the hash that it asks for. Each other one gets none.
pub fn run(input: &[u8]) -> bool {
    LazyLock::force(&ROOT);
    let asked = input.split_first_chunk().and_then(|(length, rest)| {
        let whole = usize::from(u16::from_le_bytes(*length)) == rest.len();
        HitRequest::parse(rest).ok().filter(|_| whole)
    });
    let reply = exchange(input);
    let Some(asked) = asked else {
        assert!(reply.is_empty(), "a request that breaks the protocol got {reply:?}");
        return false;
    };
    let mut again = Vec::new();
    asked.encode(&mut again).expect("it was as long before");
    assert_eq!(again, input, "a request is written as it was read");
    let (head, bytes) = reply.split_first_chunk::<ANSWER_HEAD_BYTES>().expect("an answer");
    match HitAnswer::parse(*head).expect("the head of an answer") {
        HitAnswer::NotHere => assert!(bytes.is_empty()),
        HitAnswer::Here(len) => {
            assert_eq!((len, bytes.len()), (asked.size, asked.size as usize));
            assert_eq!(Hash::of(bytes), asked.hash, "I1");
            plant::bug(matches!(asked.wanted, Wanted::File(_)));
        }
    }
    true
}

/// Sends the input on a new hit connection, and returns everything that the server answers.
fn exchange(input: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(&SERVER.socket).expect("the server accepts");
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).expect("a timeout");
    let path = routes::HITS;
    let upgrade = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n"
    );
    stream.write_all(upgrade.as_bytes()).expect("the server reads");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("the head of a reply");
        head.extend(byte);
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
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
