//! The socket of a hit connection: every read ends in time.

use super::Fault;
use fletch_api::{
    headers,
    hits::{ANSWER_HEAD_BYTES, PROTOCOL},
    routes,
};
use http::HeaderValue;
use rustix::{
    io::retry_on_intr,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use std::{
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

/// The longest head of the answer to the upgrade, in bytes, and the most headers in it.
pub(super) const HEAD_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;
/// The time limit of a socket is set again when it is wrong by more than this.
const LIMIT_SLACK: Duration = Duration::from_millis(5);
/// The shortest time limit of a socket. Zero would mean no limit.
const LIMIT_MIN: Duration = Duration::from_millis(1);

/// A socket whose reads end in time.
pub(super) struct Socket {
    fd: OwnedFd,
    /// The time limit of a read that is in force.
    limit: Duration,
}

impl Socket {
    pub fn connect(path: &Path, until: Instant) -> Result<Self, Fault> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        let left = left(until)?;
        // A stopped server takes no connections from its queue, and connecting waits while that is full.
        for which in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&fd, which, Some(left))?;
        }
        let address = SocketAddrUnix::new(path)?;
        retry_on_intr(|| rustix::net::connect(&fd, &address))?;
        Ok(Socket { fd, limit: left })
    }

    /// Makes the server speak the protocol of hit connections, with a program that has the caller's token.
    pub fn upgrade(
        &mut self,
        component: &str,
        token: Option<&HeaderValue>,
        until: Instant,
    ) -> Result<(), Fault> {
        let mut message = format!(
            "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\n\
             User-Agent: fletch-client/{}\r\n{}: {component}\r\n",
            routes::HITS,
            env!("CARGO_PKG_VERSION"),
            headers::COMPONENT,
        )
        .into_bytes();
        if let Some(token) = token {
            message.extend_from_slice(b"Authorization: ");
            message.extend_from_slice(token.as_bytes());
            message.extend_from_slice(b"\r\n");
        }
        message.extend_from_slice(b"\r\n");
        self.send(&message)?;
        let mut head = vec![0; HEAD_BYTES_MAX];
        let mut got = 0;
        loop {
            if got == head.len() {
                return Err(Fault::Protocol("the answer to the upgrade has a long head"));
            }
            got += self.receive_parts(&mut [IoSliceMut::new(&mut head[got..])], until)?;
            match upgraded(&head[..got])? {
                None => {}
                Some(head_bytes) if head_bytes == got => return Ok(()),
                Some(_) => return Err(Fault::Protocol("bytes follow the answer to the upgrade")),
            }
        }
    }

    /// Sends a message without waiting. There is room for it, unless the server takes no requests.
    pub fn send(&self, message: &[u8]) -> Result<(), Fault> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| rustix::net::send(&self.fd, message, flags))?;
        if sent == message.len() { Ok(()) } else { Err(Fault::Late) }
    }

    /// Receives some bytes, at least one.
    pub fn receive_parts(&mut self, parts: &mut [IoSliceMut<'_>], until: Instant) -> Result<usize, Fault> {
        self.set_limit(until)?;
        match retry_on_intr(|| rustix::io::readv(&self.fd, parts))? {
            0 => Err(Fault::Closed),
            n => Ok(n),
        }
    }

    /// Fills the buffer. The kernel wakes this thread once, when all bytes have come.
    pub fn receive_all(&mut self, mut buffer: &mut [u8], until: Instant) -> Result<(), Fault> {
        while !buffer.is_empty() {
            self.set_limit(until)?;
            let receive = || rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::WAITALL);
            match retry_on_intr(receive)?.0 {
                0 => return Err(Fault::Closed),
                n => buffer = &mut buffer[n..],
            }
        }
        Ok(())
    }

    /// Receives the head of an answer, with the descriptor that came with it.
    pub fn receive_with_file(
        &mut self,
        until: Instant,
    ) -> Result<([u8; ANSWER_HEAD_BYTES], Option<OwnedFd>), Fault> {
        self.set_limit(until)?;
        let (mut head, mut file) = ([0; ANSWER_HEAD_BYTES], None);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let parts = &mut [IoSliceMut::new(&mut head)];
            rustix::net::recvmsg(&self.fd, parts, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                file = files.last();
            }
        }
        match received.bytes {
            0 => Err(Fault::Closed),
            ANSWER_HEAD_BYTES => Ok((head, file)),
            _ => Err(Fault::Late),
        }
    }

    /// Limits the next read to the time that is left.
    fn set_limit(&mut self, until: Instant) -> Result<(), Fault> {
        let left = left(until)?;
        if left.abs_diff(self.limit) > LIMIT_SLACK {
            set_socket_timeout(&self.fd, Timeout::Recv, Some(left))?;
            self.limit = left;
        }
        Ok(())
    }
}

/// Returns the time that is left, as a time limit of a socket.
fn left(until: Instant) -> Result<Duration, Fault> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Fault::Late) } else { Ok(left.max(LIMIT_MIN)) }
}

/// Returns the length of the head of an answer that accepts the upgrade; `None` while it is not whole.
fn upgraded(bytes: &[u8]) -> Result<Option<usize>, Fault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let parsed = answer.parse(bytes).map_err(|_| Fault::Protocol("the answer to the upgrade is no HTTP"))?;
    let httparse::Status::Complete(head_bytes) = parsed else { return Ok(None) };
    let is_ours = |h: &httparse::Header<'_>| {
        h.name.eq_ignore_ascii_case("upgrade") && h.value.eq_ignore_ascii_case(PROTOCOL.as_bytes())
    };
    match answer.code {
        Some(101) if answer.headers.iter().any(is_ours) => Ok(Some(head_bytes)),
        Some(101) => Err(Fault::Protocol("the server upgrades to another protocol")),
        Some(status) => Err(Fault::Refused(status)),
        None => Err(Fault::Protocol("the answer to the upgrade has no status")),
    }
}
