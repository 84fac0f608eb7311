//! Requests of hit connections, to a running server.

use super::requests::{SERVER, register, request, send};
use crate::plant;
use fletch_api::{
    hits::{
        ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, SLAB_OFFSET_BYTES, WINDOW_BYTES_MAX,
        WINDOW_READY, WINDOW_REQUEST_BYTES, WINDOWS_MAX, Wanted, window_request,
    },
    routes,
};
use fletch_core::{Hash, JobName, Root};
use fletch_window::View;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::{
    io::{IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
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
    seeds.push([encoded(&placed), WINDOW_READY.to_vec()].concat());
    seeds.push([&window_request(WINDOW)[..], &encoded(&requests[0]), &WINDOW_READY].concat());
    seeds
}

/// The length of the window of each connection.
const WINDOW: u32 = 64 << 10;

/// A request that keeps the rules.
enum Sound<'a> {
    Bytes(HitRequest<'a>),
    /// For a window of so many bytes.
    Window(u32),
    /// The pages of a window are said to be there. They are not: nobody touched them.
    Ready,
}

/// What the server has to do with an input.
struct Expected<'a> {
    /// The sound requests before the first that is not.
    requests: Vec<Sound<'a>>,
    /// Whether the input ends after them.
    is_sound: bool,
}

/// Reads an input by the rules of the protocol, on a connection that has its first window.
fn expected(mut input: &[u8]) -> Expected<'_> {
    let mut requests = Vec::new();
    let (mut window, mut is_offered, mut windows) = (Some(WINDOW), false, 1);
    while let Some((length, rest)) = input.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length));
        let Some((request, rest)) = rest.split_at_checked(length) else {
            return Expected { requests, is_sound: false };
        };
        let fits = |r: &HitRequest<'_>| match (r.place, window) {
            (None, _) => true,
            (Some(place), Some(window)) => u64::from(place) + u64::from(r.size) <= window.into(),
            (Some(_), None) => false,
        };
        let sound = if request.is_empty() {
            Some(Sound::Ready).filter(|_| std::mem::take(&mut is_offered))
        } else if let Ok(bytes) = <[u8; WINDOW_REQUEST_BYTES]>::try_from(request) {
            let bytes = u32::from_le_bytes(bytes);
            windows += 1;
            (window, is_offered) = (None, true);
            Some(Sound::Window(bytes))
                .filter(|_| windows <= WINDOWS_MAX && (1..=WINDOW_BYTES_MAX).contains(&bytes))
        } else {
            HitRequest::parse(request).ok().filter(fits).map(Sound::Bytes)
        };
        let Some(sound) = sound else {
            return Expected { requests, is_sound: false };
        };
        if let Sound::Bytes(sound) = &sound {
            let mut again = Vec::new();
            sound.encode(&mut again).expect("it was as long before");
            assert_eq!(again[2..], *request, "a request is written as it was read");
        }
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
        let answer = HitAnswer::parse(*head).expect("the head of an answer");
        let asked = match asked {
            Sound::Bytes(asked) => asked,
            Sound::Window(bytes) => {
                assert_eq!(answer, HitAnswer::InWindow(*bytes));
                continue;
            }
            Sound::Ready => {
                assert_eq!(answer, HitAnswer::NotHere, "I6: nobody touched the pages");
                continue;
            }
        };
        match answer {
            HitAnswer::NotHere => {}
            HitAnswer::InWindow(len) => assert!(len == asked.size && asked.place.is_some()),
            HitAnswer::InSlab(len) => {
                assert!(len == asked.size && asked.wanted == Wanted::Slab);
                rest = rest.split_at_checked(SLAB_OFFSET_BYTES).expect("an offset").1;
            }
            HitAnswer::Here(0) if matches!(asked.wanted, Wanted::Read(_)) => {}
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
    is_sound && requests.iter().any(|asked| matches!(asked, Sound::Bytes(_)))
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
    stream.write_all(&window_request(WINDOW)).expect("the server reads");
    let _view = View::accept(receive_window(&stream), WINDOW).expect("a view");
    stream.write_all(&WINDOW_READY).expect("the server reads");
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

/// Receives the memory of a window.
fn receive_window(stream: &UnixStream) -> OwnedFd {
    let (mut head, mut file) = ([0; ANSWER_HEAD_BYTES], None);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut head)];
    rustix::net::recvmsg(stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("an answer");
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last();
        }
    }
    assert_eq!(HitAnswer::parse(head), Some(HitAnswer::InWindow(WINDOW)));
    file.expect("a descriptor")
}
