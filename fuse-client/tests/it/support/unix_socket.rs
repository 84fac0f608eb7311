//! A unix socket in front of the stub server, with hit connections that misbehave as a test demands.

use super::dataset::Dataset;
use fletch_api::hits::{HitAnswer, HitRequest, WINDOW_REQUEST_BYTES, Wanted};
use std::{
    io::{Read, Write, copy},
    net::{Shutdown, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread::spawn,
};
use tempfile::TempDir;

/// How hit connections answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum HitReply {
    /// With all chunks.
    Honest,
    /// With no chunk.
    NotHere,
    /// With chunks that have one bit flipped.
    Flip,
    /// Never.
    Hang,
}

const HIT_REPLIES: [HitReply; 4] = [HitReply::Honest, HitReply::NotHere, HitReply::Flip, HitReply::Hang];

/// The socket. It serves until the test ends.
pub struct UnixSocket {
    dir: TempDir,
    reply: Arc<AtomicUsize>,
}

impl UnixSocket {
    /// Passes all requests on to the stub at `address`, except those of hit connections.
    pub fn start(dataset: Arc<Dataset>, address: String) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("socket")).expect("bound");
        let reply = Arc::<AtomicUsize>::default();
        let how = Arc::clone(&reply);
        spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.expect("a connection");
                let (dataset, how, address) = (Arc::clone(&dataset), Arc::clone(&how), address.clone());
                spawn(move || serve(stream, &dataset, &how, &address));
            }
        });
        UnixSocket { dir, reply }
    }

    pub fn url(&self) -> String {
        format!("unix:{}", self.dir.path().join("socket").display())
    }

    pub fn set(&self, reply: HitReply) {
        self.reply.store(reply as usize, Relaxed);
    }
}

fn serve(mut stream: UnixStream, dataset: &Dataset, how: &AtomicUsize, address: &str) {
    let mut head = vec![0; 8 << 10];
    // The client sends its head at once.
    let len = stream.read(&mut head).expect("a head");
    if head.starts_with(b"GET /v1/hits ") {
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: fletch-hits/4\r\n\r\n")
            .expect("sent");
        return answer(stream, dataset, how);
    }
    let mut stub = TcpStream::connect(address).expect("the stub listens");
    stub.write_all(&head[..len]).expect("sent");
    let (mut answers, mut back) = (stub.try_clone().expect("cloned"), stream.try_clone().expect("cloned"));
    spawn(move || {
        // Either end may leave at any time.
        drop(copy(&mut answers, &mut back));
        drop(back.shutdown(Shutdown::Both));
    });
    drop(copy(&mut stream, &mut stub));
    drop(stub.shutdown(Shutdown::Both));
}

/// Answers the requests of a hit connection until the client closes it.
fn answer(mut stream: UnixStream, dataset: &Dataset, how: &AtomicUsize) {
    let mut length = [0; 2];
    while stream.read_exact(&mut length).is_ok() {
        let mut bytes = vec![0; u16::from_le_bytes(length).into()];
        stream.read_exact(&mut bytes).expect("a whole request");
        if bytes.len() == WINDOW_REQUEST_BYTES {
            // It offers no window, so bytes go through the socket.
            if HIT_REPLIES[how.load(Relaxed)] != HitReply::Hang {
                stream.write_all(&HitAnswer::NotHere.encode()).expect("sent");
            }
            continue;
        }
        let request = HitRequest::parse(&bytes).expect("a valid request");
        assert_eq!(request.root, dataset.root);
        assert_eq!(request.dataset.as_ref().map(|name| name.as_str()), Some("d"));
        if request.wanted == Wanted::Slab {
            stream.write_all(&HitAnswer::NotHere.encode()).expect("sent");
            continue;
        }
        let mut chunk = dataset.chunks[&request.hash].to_vec();
        let answer = match HIT_REPLIES[how.load(Relaxed)] {
            HitReply::Hang => continue,
            HitReply::NotHere => HitAnswer::NotHere.encode().to_vec(),
            reply => {
                let at = chunk.len() / 2;
                chunk[at] ^= u8::from(reply == HitReply::Flip);
                [&HitAnswer::Here(request.size).encode()[..], &chunk].concat()
            }
        };
        if stream.write_all(&answer).is_err() {
            return;
        }
    }
}
