//! A connection of the unix socket, which brings no descriptor of its client into this process.
//!
//! A client can add descriptors to the bytes that it sends (`SCM_RIGHTS`). Linux closes those that nobody
//! asked for, on the thread that reads the bytes or closes the connection. Such a close can wait for the
//! client: a TCP socket lingers, a file of FUSE asks its daemon. A thread of the runtime must not wait there.
//!
//! Invariants:
//! 1. (I6) From Linux 6.16 the kernel refuses descriptors on this socket: the sender gets an error.
//! 2. (I6) Before that, a thread of the runtime takes only bytes without descriptors. A connection with
//!    descriptors ends, and a thread of its own closes it. The connection counts for its caller until then.

use crate::tenancy::connections::Connection;
use nix::{setsockopt_impl, sockopt_impl, sys::socket::SetSockOpt as _};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, sockopt::set_socket_oobinline};
use std::{
    io::{self, IoSlice, IoSliceMut},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream as StdUnixStream},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::UnixStream,
};

/// `SO_PASSRIGHTS` of Linux 6.16, which the C library does not know yet.
const SO_PASSRIGHTS: libc::c_int = 83;
/// The stack of a thread that closes a connection.
const CLOSE_STACK_BYTES: usize = 64 << 10;

sockopt_impl!(
    /// Whether a socket takes descriptors.
    PassRights, SetOnly, libc::SOL_SOCKET, SO_PASSRIGHTS, bool
);

/// Makes the kernel refuse descriptors on a listener and on what it accepts. Returns whether it does.
pub(super) fn refuse_descriptors(listener: &impl AsFd) -> bool {
    let refused = PassRights.set(listener, &false);
    if let Err(error) = refused {
        tracing::debug!(%error, "only Linux 6.16 and later refuse descriptors: the server looks for them");
    }
    refused.is_ok()
}

/// The stream of a connection of the unix socket.
pub(super) struct LocalStream {
    /// `None` after it was taken.
    stream: Option<UnixStream>,
    /// Where the server looks for descriptors itself, the connection that counts until it is closed.
    looks: Option<Arc<Connection>>,
}

impl LocalStream {
    /// Returns the stream of a connection on which the kernel refuses descriptors, or not.
    pub fn new(stream: UnixStream, connection: &Arc<Connection>, kernel_refuses: bool) -> Self {
        if kernel_refuses {
            return LocalStream { stream: Some(stream), looks: None };
        }
        // Else a byte out of the line, and a descriptor with it, would be closed unseen.
        if let Err(error) = set_socket_oobinline(&stream, true) {
            tracing::debug!(%error, "the socket of a client does not take its bytes in one line");
        }
        LocalStream { stream: Some(stream), looks: Some(Arc::clone(connection)) }
    }

    fn stream(&self) -> io::Result<&UnixStream> {
        self.stream.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn pinned(&mut self) -> io::Result<Pin<&mut UnixStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Waits until there are bytes.
    pub async fn readable(&self) -> io::Result<()> {
        self.stream()?.readable().await
    }

    /// Reads what is there.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let stream = self.stream()?;
        if self.looks.is_none() {
            return stream.try_read(bytes);
        }
        stream.try_io(Interest::READABLE, || read_plain(stream, bytes))
    }

    /// Returns the socket, for a thread that may wait.
    pub fn into_socket(mut self) -> io::Result<StdUnixStream> {
        self.looks = None;
        self.stream.take().ok_or(io::ErrorKind::NotConnected)?.into_std()
    }
}

impl Drop for LocalStream {
    fn drop(&mut self) {
        let (Some(stream), Some(connection)) = (self.stream.take(), self.looks.take()) else { return };
        match stream.into_std() {
            Ok(socket) => close(socket, connection),
            Err(error) => tracing::debug!(%error, "the runtime had forgotten a connection"),
        }
    }
}

/// Closes a socket. If the client sent bytes that nobody read, and maybe descriptors, a thread closes it. The
/// connection counts until then.
pub(super) fn close(socket: StdUnixStream, connection: Arc<Connection>) {
    // The client can send nothing after that.
    if let Err(error) = socket.shutdown(Shutdown::Both) {
        tracing::debug!(%error, "a client had left");
    }
    if matches!(rustix::io::ioctl_fionread(&socket), Ok(0)) {
        return;
    }
    let thread = std::thread::Builder::new().name("fletch-close".to_owned()).stack_size(CLOSE_STACK_BYTES);
    let closes = thread.spawn(move || {
        drop(socket);
        drop(connection);
    });
    if let Err(error) = closes {
        tracing::warn!(%error, "the system starts no thread that closes a connection");
    }
}

/// Reads bytes that came without a descriptor.
fn read_plain(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<usize> {
    // Linux makes a copy of a descriptor for who looks, and closes it without its last close.
    let mut none = RecvAncillaryBuffer::default();
    let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let seen = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut none, look)?;
    if seen.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the client sent a descriptor"));
    }
    if seen.bytes == 0 {
        return Ok(0);
    }
    // Further bytes may have come meanwhile.
    Ok(rustix::net::recv(stream, &mut bytes[..seen.bytes], RecvFlags::DONTWAIT)?.0)
}

impl AsyncRead for LocalStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.looks.is_none() {
            return self.pinned()?.poll_read(cx, buf);
        }
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            ready!(self.stream()?.poll_read_ready(cx))?;
            match self.try_read(buf.initialize_unfilled()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    buf.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.pinned()?.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.pinned()?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned()?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::connections::{Connections, RequestMemory, Source, TableLimits};
    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::net::{
        RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt::set_socket_linger,
    };
    use std::{
        io::{IoSlice, Write as _},
        mem::MaybeUninit,
        net::{TcpListener, TcpStream},
        os::fd::{BorrowedFd, OwnedFd},
        path::Path,
        time::{Duration, Instant},
    };
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
    };

    const LONG: Duration = Duration::from_secs(20);
    /// The most descriptors that Linux takes in one message.
    const DESCRIPTORS_MAX: usize = 253;
    /// A close that waits takes this long at least.
    const LINGER: Duration = Duration::from_secs(600);

    /// Returns a socket whose last close waits, and its other end.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (end, _) = listener.accept().expect("accepted");
        socket.set_nonblocking(true).expect("a socket");
        while socket.write(&[0; 64 << 10]).is_ok() {}
        set_socket_linger(&socket, Some(LINGER)).expect("a socket");
        (socket, end)
    }

    /// Sends a byte with descriptors. Returns whether the kernel takes it.
    fn send_all(to: &StdUnixStream, files: &[BorrowedFd<'_>], flags: SendFlags) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        rustix::net::sendmsg(to, &[IoSlice::new(b"G")], &mut control, flags).is_ok()
    }

    /// Sends a byte with a descriptor, of which the sender keeps none. Returns whether the kernel takes it.
    fn send(to: &StdUnixStream, socket: TcpStream, flags: SendFlags) -> bool {
        let is_sent = send_all(to, &[socket.as_fd()], flags);
        if !is_sent {
            set_socket_linger(&socket, None).expect("a socket");
        }
        is_sent
    }

    /// Reads until the end, and returns the error.
    async fn error_of(stream: &mut LocalStream) -> io::Error {
        let read = tokio::time::timeout(LONG, async {
            let mut bytes = [0; 64];
            loop {
                let read = stream.read(&mut bytes).await;
                if !matches!(read, Ok(1..)) {
                    return read;
                }
            }
        });
        read.await.expect("at once").expect_err("a descriptor")
    }

    /// Returns a descriptor of each kind of file.
    fn kinds(dir: &Path) -> Vec<(&'static str, OwnedFd)> {
        let memory = |seals| {
            let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
            let memory = rustix::fs::memfd_create("attack", flags).expect("memory");
            rustix::fs::ftruncate(&memory, 1 << 40).expect("a huge length");
            rustix::fs::fcntl_add_seals(&memory, seals).expect("seals");
            memory
        };
        let (socket, other) = StdUnixStream::pair().expect("a pair");
        // A socket that waits in itself: the kernel collects such circles.
        assert!(send_all(&socket, &[other.as_fd(), socket.as_fd()], SendFlags::empty()));
        vec![
            ("a directory", OwnedFd::from(std::fs::File::open(dir).expect("open"))),
            ("a device", OwnedFd::from(std::fs::File::open("/dev/zero").expect("open"))),
            ("memory", memory(SealFlags::empty())),
            ("sealed memory", memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)),
            ("a socket with descriptors", OwnedFd::from(other)),
            ("a socket that listens", OwnedFd::from(TcpListener::bind("127.0.0.1:0").expect("a port"))),
        ]
    }

    fn connection() -> Arc<Connection> {
        let limits = TableLimits { tcp: 9, unix: 9, per_caller: 9, probes: 9 };
        Arc::new(Connections::new(limits, RequestMemory::new(1 << 20)).admit(Source::User(7)).0)
    }

    /// Returns a stream on which the server looks for descriptors itself, and the other end.
    fn looking() -> (LocalStream, StdUnixStream, Arc<Connection>) {
        let (ours, theirs) = StdUnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("a socket");
        let connection = connection();
        let stream = UnixStream::from_std(ours).expect("a stream");
        (LocalStream::new(stream, &connection, false), theirs, connection)
    }

    /// Waits until nobody else has the connection.
    async fn closed(connection: &Arc<Connection>) -> bool {
        for _ in 0..200 {
            if Arc::strong_count(connection) == 1 {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }

    #[tokio::test]
    async fn bytes_without_a_descriptor_are_read_as_they_are() {
        let (mut stream, mut client, connection) = looking();
        assert_eq!(stream.try_read(&mut [0; 9]).expect_err("no byte").kind(), io::ErrorKind::WouldBlock);
        client.write_all(b"first").expect("sent");
        stream.readable().await.expect("bytes");
        let mut bytes = [0; 9];
        assert_eq!((stream.try_read(&mut bytes[..2]).expect("two"), &bytes[..2]), (2, &b"fi"[..]));
        let content: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        let sent = content.clone();
        let sender = std::thread::spawn(move || client.write_all(&sent).map(|()| client).expect("sent"));
        let mut got = vec![0; 3 + content.len()];
        stream.read_exact(&mut got).await.expect("all");
        assert!(&got[..3] == b"rst" && got[3..] == content);
        let client = sender.join().expect("no panic");
        stream.write_all(b"answer").await.expect("sent");
        assert_eq!(rustix::net::recv(&client, &mut bytes, RecvFlags::empty()).expect("received").0, 6);
        drop(client);
        assert_eq!(stream.read(&mut bytes).await.expect("the end"), 0);
        drop(stream);
        assert!(closed(&connection).await);
    }

    #[tokio::test]
    async fn i6_no_descriptor_of_a_client_holds_a_thread_of_the_runtime() {
        for (flags, is_read) in
            [(SendFlags::empty(), true), (SendFlags::empty(), false), (SendFlags::OOB, true)]
        {
            let (mut stream, mut client, connection) = looking();
            let (socket, end) = lingering();
            client.write_all(b"GE").expect("sent");
            if !send(&client, socket, flags) {
                assert_eq!(flags, SendFlags::OOB, "some kernels have no such bytes");
                continue;
            }
            let began = Instant::now();
            if is_read {
                assert_eq!(error_of(&mut stream).await.kind(), io::ErrorKind::InvalidData);
            }
            drop(stream);
            assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(Arc::strong_count(&connection), 2, "it counts while a thread closes it");
            drop((end, client));
            assert!(closed(&connection).await, "the other end let go");
        }
    }

    #[tokio::test]
    async fn i6_no_kind_and_no_number_of_descriptors_comes_in() {
        let dir = tempfile::tempdir().expect("a directory");
        for (kind, file) in kinds(dir.path()) {
            for (is_read, number) in [(true, 1), (true, DESCRIPTORS_MAX - 1), (false, DESCRIPTORS_MAX - 1)] {
                let (mut stream, mut client, connection) = looking();
                // The end of this pipe says that no copy of what came with it is left.
                let (mut pipe, sent) = io::pipe().expect("a pipe");
                client.write_all(b"GE").expect("sent");
                let files: Vec<BorrowedFd<'_>> = std::iter::repeat_n(file.as_fd(), number).collect();
                assert!(send_all(&client, &[&files[..], &[sent.as_fd()]].concat(), SendFlags::empty()));
                drop(sent);
                if is_read {
                    assert_eq!(error_of(&mut stream).await.kind(), io::ErrorKind::InvalidData, "{kind}");
                }
                drop(stream);
                assert!(closed(&connection).await, "{kind}, {number}");
                assert_eq!(io::Read::read(&mut pipe, &mut [0]).expect("the end"), 0, "{kind}, {number}");
            }
        }
    }

    #[tokio::test]
    async fn i6_a_new_kernel_refuses_descriptors_on_all_connections_of_a_listener() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("s")).expect("bound");
        let refuses = refuse_descriptors(&listener);
        let mut client = StdUnixStream::connect(dir.path().join("s")).expect("connected");
        let (socket, end) = lingering();
        // Before the server accepts, and after it.
        let before = refuses && send(&client, socket, SendFlags::empty());
        let connection = connection();
        let mut stream = LocalStream::new(listener.accept().await.expect("accepted").0, &connection, refuses);
        let (socket, other_end) = lingering();
        let after = send(&client, socket, SendFlags::empty());
        assert_eq!((before, after), (false, !refuses));
        if refuses {
            client.write_all(b"GET").expect("sent");
            let mut bytes = [0; 3];
            stream.read_exact(&mut bytes).await.expect("bytes");
            assert_eq!(&bytes, b"GET");
        }
        drop((end, other_end));
    }
}
