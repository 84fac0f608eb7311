//! A small HTTP/1.1 client over a TCP or unix socket, with a deadline for each reply.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

/// A TCP or unix connection.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a unix socket.
    Unix(UnixStream),
}

impl Stream {
    /// Connects over TCP.
    ///
    /// # Errors
    /// That of the system.
    pub fn tcp(addr: SocketAddr, within: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, within)?;
        stream.set_nodelay(true)?;
        Ok(Stream::Tcp(stream))
    }

    /// Connects over a unix socket.
    ///
    /// # Errors
    /// That of the system.
    pub fn unix(path: &Path) -> io::Result<Self> {
        UnixStream::connect(path).map(Stream::Unix)
    }

    /// Makes reads and writes fail where they would block.
    ///
    /// # Errors
    /// That of the system.
    pub fn never_block(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => s.set_nonblocking(true),
            Stream::Unix(s) => s.set_nonblocking(true),
        }
    }

    /// Bounds each read and write.
    ///
    /// # Errors
    /// That of the system.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => {
                s.set_read_timeout(Some(timeout)).and_then(|()| s.set_write_timeout(Some(timeout)))
            }
            Stream::Unix(s) => {
                s.set_read_timeout(Some(timeout)).and_then(|()| s.set_write_timeout(Some(timeout)))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(buf),
            Stream::Unix(s) => s.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A reply: its head as text, and its body.
#[derive(Debug)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The head, in lower case.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

/// A connection that sends requests and reads replies with a `Content-Length`.
#[derive(Debug)]
pub struct Link {
    stream: Stream,
    buffer: Vec<u8>,
}

impl Link {
    /// Wraps a connection. Each read or write takes at most `timeout`.
    ///
    /// # Errors
    /// That of the system.
    pub fn new(stream: Stream, timeout: Duration) -> io::Result<Self> {
        stream.set_timeout(timeout)?;
        Ok(Link { stream, buffer: Vec::new() })
    }

    /// Sends a request and returns the reply.
    ///
    /// # Errors
    /// That of the system; `InvalidData` for a reply that is not understood.
    pub fn ask(&mut self, request: &[u8]) -> io::Result<Reply> {
        self.stream.write_all(request)?;
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            self.fill()?;
        };
        let head = String::from_utf8_lossy(&self.buffer[..end]).to_lowercase();
        self.buffer.drain(..end);
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{what}: {head}"));
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or_else(|| bad("no status"))?;
        let length = head.lines().find_map(|l| l.strip_prefix("content-length: "));
        let length: usize = match length {
            Some(text) => text.trim().parse().map_err(|_| bad("no length"))?,
            None if status == 204 => 0,
            None => return Err(bad("no length")),
        };
        while self.buffer.len() < length {
            self.fill()?;
        }
        let rest = self.buffer.split_off(length);
        Ok(Reply { status, head, body: std::mem::replace(&mut self.buffer, rest) })
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut some = [0; 64 << 10];
        match self.stream.read(&mut some)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.buffer.extend_from_slice(&some[..n]);
                Ok(())
            }
        }
    }
}
