//! Hit connections: a thread asks the server of this machine for bytes that the server has at hand.
//!
//! The rest of this crate waits without holding a thread. Here the calling thread waits itself, for a very
//! short time: that saves the ways between threads, which take longer than the answer. [`fletch_api::hits`]
//! has the protocol. A caller that gets no bytes makes the usual call.
//!
//! ```text
//!            a fault                    the rest is over, for one thread
//!   ASKED ─────────────▶ LEFT ALONE ──────────────────────────────────────▶ TRIED
//!     ▲                  1, 2 … 60 s ◀───────────── a fault ──────────────────┤
//!     └──────────────────────────────────── an answer ───────────────────────┘
//! ```
//!
//! Invariants
//! 1. An ask ends after [`ANSWER_TIMEOUT`], or at the caller's earlier time, whatever the server does. That
//!    includes the time to connect. The kernel's clock adds some milliseconds.
//! 2. After a fault the connection is closed, and all threads leave the server alone for [`RETRY_AFTER`],
//!    twice as long after each further fault. After a refused upgrade no thread opens a connection for the
//!    longest of these times. Connections that are open go on: the server may be at a limit.
//! 3. The bytes are **not verified**.
//! 4. A connection is closed within about a second after another token is in use.

use crate::token::Bearer;
use fletch_api::{
    headers,
    hits::{ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL},
    routes,
};
use http::HeaderValue;
use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use std::{
    io::IoSliceMut,
    ops::Range,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// The longest time for which a thread waits in one ask. A later answer means that the server is stopped or
/// overloaded: it answers only with bytes that it has at hand.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);
/// The shortest and the longest time for which a server is left alone after a fault.
pub const RETRY_AFTER: Range<Duration> = Duration::from_secs(1)..Duration::from_secs(60);
/// For how long the other threads leave the server to the one that tries it again.
const TURN: Duration = ANSWER_TIMEOUT.saturating_mul(2);
/// How often a connection looks whether another token is in use.
const TOKEN_CHECK_EVERY: Duration = Duration::from_secs(1);
/// After this many answers without bytes in a row, a connection asks less often: each costs a round trip.
const MISSES_MAX: u32 = 16;
/// Of so many asks, one is sent then, until an answer has bytes.
const ASK_EVERY: u32 = 8;
/// The longest head of the answer to the upgrade, in bytes, and the most headers in it.
const HEAD_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 64;
/// The time limit of a socket is set again when it is wrong by more than this.
const LIMIT_SLACK: Duration = Duration::from_millis(5);
/// The shortest time limit of a socket. Zero would mean no limit.
const LIMIT_MIN: Duration = Duration::from_millis(1);

/// The outcome of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitOutcome {
    /// The buffer has all bytes, not verified.
    Here,
    /// The server does not have the bytes at hand.
    NotHere,
    /// Nothing was sent: the server is left alone, or had none of the last bytes at hand.
    NotAsked,
    /// The server did not answer in time, or the connection broke. The buffer may have some bytes.
    Failed,
}

/// What the hit connections to a server did; totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HitStats {
    /// Answers with bytes.
    pub here: u64,
    /// Answers without bytes.
    pub not_here: u64,
    /// Asks that ended with a fault of the server or the connection.
    pub failed: u64,
    /// Bytes of the answers.
    pub bytes: u64,
}

/// The server of this machine, as all hit connections to it see it. Clones share everything.
#[derive(Clone)]
pub struct HitServer(Arc<Inner>);

struct Inner {
    socket: PathBuf,
    component: &'static str,
    bearer: Arc<Bearer>,
    /// The longest time of an ask.
    answer_timeout: Duration,
    /// Whether `rest` has an effect. Read for each ask, without a lock.
    is_troubled: AtomicBool,
    rest: Mutex<Rest>,
    here: AtomicU64,
    not_here: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

impl HitServer {
    pub(crate) fn new(
        socket: &Path,
        component: &'static str,
        bearer: Arc<Bearer>,
        answer_timeout: Duration,
    ) -> Self {
        HitServer(Arc::new(Inner {
            socket: socket.to_owned(),
            component,
            bearer,
            answer_timeout,
            is_troubled: AtomicBool::new(false),
            rest: Mutex::default(),
            here: AtomicU64::new(0),
            not_here: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }))
    }

    /// Returns a connection for one thread. It opens with the first ask.
    #[must_use]
    pub fn connection(&self) -> HitConnection {
        HitConnection { server: self.clone(), open: None, misses: 0, passed: 0, message: Vec::new() }
    }

    /// Returns whether the server is left alone now.
    #[must_use]
    pub fn rests(&self, now: Instant) -> bool {
        self.0.is_troubled.load(Relaxed) && self.rest().rests(now)
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> HitStats {
        let inner = &self.0;
        HitStats {
            here: inner.here.load(Relaxed),
            not_here: inner.not_here.load(Relaxed),
            failed: inner.failed.load(Relaxed),
            bytes: inner.bytes.load(Relaxed),
        }
    }

    fn rest(&self) -> MutexGuard<'_, Rest> {
        // Each method leaves it whole.
        self.0.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the caller may ask the server now.
    fn takes_turn(&self, now: Instant, is_open: bool) -> bool {
        !self.0.is_troubled.load(Relaxed) || self.rest().takes_turn(now, is_open)
    }

    fn answered(&self) {
        if self.0.is_troubled.load(Relaxed) {
            let mut rest = self.rest();
            rest.answered();
            self.0.is_troubled.store(rest.has_effect(), Relaxed);
        }
    }

    fn opened(&self) {
        if self.0.is_troubled.load(Relaxed) {
            self.rest().open_after = None;
        }
    }

    fn failed(&self, fault: &Fault) {
        self.0.failed.fetch_add(1, Relaxed);
        let now = Instant::now();
        let mut rest = self.rest();
        match fault.is_refusal() {
            true => rest.refused(now),
            false => rest.failed(now),
        }
        self.0.is_troubled.store(true, Relaxed);
        drop(rest);
        let server = self.0.socket.display();
        tracing::debug!(%server, error = %fault, "no bytes from a hit connection: reading by HTTP");
    }
}

impl PartialEq for HitServer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for HitServer {}

/// For how long a server is left alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Rest {
    /// When the rest ends. `None`: the last ask was answered.
    until: Option<Instant>,
    /// Until when one thread tries the server, after its rest.
    turn_until: Option<Instant>,
    /// How long the rest is.
    step: Duration,
    /// When a connection may be opened again, after the server refused one.
    open_after: Option<Instant>,
}

impl Rest {
    fn rests(&self, now: Instant) -> bool {
        [self.until, self.turn_until].into_iter().flatten().any(|until| now < until)
    }

    fn has_effect(&self) -> bool {
        self.until.or(self.open_after).is_some()
    }

    /// Returns whether the caller may ask the server. After a rest, only one caller may.
    fn takes_turn(&mut self, now: Instant, is_open: bool) -> bool {
        let is_refused = !is_open && self.open_after.is_some_and(|after| now < after);
        let takes = !is_refused && !self.rests(now);
        if takes {
            self.turn_until = self.until.map(|_| now + TURN);
        }
        takes
    }

    fn answered(&mut self) {
        *self = Rest { open_after: self.open_after, ..Rest::default() };
    }

    fn refused(&mut self, now: Instant) {
        *self = Rest { open_after: Some(now + RETRY_AFTER.end), ..Rest::default() };
    }

    fn failed(&mut self, now: Instant) {
        // Asks that fail together count once.
        if self.until.is_some_and(|until| now < until) {
            return;
        }
        self.step = (self.step * 2).clamp(RETRY_AFTER.start, RETRY_AFTER.end);
        (self.until, self.turn_until) = (Some(now + self.step), None);
    }
}

/// Why an ask has no answer.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("the server closed the connection")]
    Closed,
    #[error("the server did not answer in time")]
    Late,
    #[error("the server refuses the connection with status {0}")]
    Refused(u16),
    #[error("the server breaks the protocol: {0}")]
    Protocol(&'static str),
    #[error("the socket failed: {0}")]
    Socket(Errno),
}

impl Fault {
    /// Whether the server answered that it takes no connection. After 401 the next call renews the token.
    fn is_refusal(&self) -> bool {
        matches!(self, Fault::Refused(status) if *status != 401)
    }
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::AGAIN | Errno::TIMEDOUT => Fault::Late,
            Errno::PIPE | Errno::CONNRESET => Fault::Closed,
            other => Fault::Socket(other),
        }
    }
}

/// One thread's connection to a server.
pub struct HitConnection {
    server: HitServer,
    open: Option<OpenConnection>,
    /// Answers without bytes in a row.
    misses: u32,
    /// Asks that were not sent since the last one that was.
    passed: u32,
    /// The request, encoded. Kept for its memory.
    message: Vec<u8>,
}

impl HitConnection {
    /// Returns the server.
    #[must_use]
    pub fn server(&self) -> &HitServer {
        &self.server
    }

    /// Asks for bytes and puts them into `buffer`, which must be as long as the request says.
    ///
    /// Blocks until the answer, at most for [`ANSWER_TIMEOUT`] and not after `until`. A connection that the
    /// server closed while it was idle is opened again at once.
    pub fn ask(&mut self, request: &HitRequest<'_>, buffer: &mut [u8], until: Instant) -> HitOutcome {
        let now = Instant::now();
        let fits = usize::try_from(request.size).is_ok_and(|size| size == buffer.len());
        if !fits || until <= now || !self.is_worthwhile() || !self.server.takes_turn(now, self.open.is_some())
        {
            return HitOutcome::NotAsked;
        }
        self.message.clear();
        if request.encode(&mut self.message).is_err() {
            return HitOutcome::NotAsked;
        }
        match self.exchange(buffer, now, until.min(now + self.server.0.answer_timeout)) {
            Ok(true) => {
                self.misses = 0;
                self.server.answered();
                self.server.0.here.fetch_add(1, Relaxed);
                self.server.0.bytes.fetch_add(buffer.len() as u64, Relaxed);
                HitOutcome::Here
            }
            Ok(false) => {
                self.misses = self.misses.saturating_add(1);
                self.server.answered();
                self.server.0.not_here.fetch_add(1, Relaxed);
                HitOutcome::NotHere
            }
            Err(fault) => {
                self.open = None;
                self.server.failed(&fault);
                HitOutcome::Failed
            }
        }
    }

    /// Returns whether an ask is worth its round trip.
    fn is_worthwhile(&mut self) -> bool {
        if self.misses >= MISSES_MAX {
            self.passed += 1;
            if self.passed < ASK_EVERY {
                return false;
            }
        }
        self.passed = 0;
        true
    }

    /// Returns whether the answer has bytes.
    fn exchange(&mut self, buffer: &mut [u8], now: Instant, until: Instant) -> Result<bool, Fault> {
        if self.open.as_mut().is_some_and(|open| open.has_old_token(&self.server.0.bearer, now)) {
            self.open = None;
        }
        if let Some(open) = &mut self.open {
            match open.exchange(&self.message, buffer, until) {
                Err(Fault::Closed) => {}
                outcome => return outcome,
            }
        }
        let open = OpenConnection::open(&self.server.0, now, until)?;
        self.server.opened();
        self.open.insert(open).exchange(&self.message, buffer, until)
    }
}

/// A connection on which the server speaks the protocol.
struct OpenConnection {
    socket: Socket,
    /// The token that it was opened with.
    token: Option<HeaderValue>,
    token_checked: Instant,
}

impl OpenConnection {
    fn open(server: &Inner, now: Instant, until: Instant) -> Result<Self, Fault> {
        let token = server.bearer.header();
        let mut socket = Socket::connect(&server.socket, until)?;
        socket.upgrade(server.component, token.as_ref(), until)?;
        Ok(OpenConnection { socket, token, token_checked: now })
    }

    /// Returns whether another token is in use than the one of this connection. Looks once a second.
    fn has_old_token(&mut self, bearer: &Bearer, now: Instant) -> bool {
        if now.saturating_duration_since(self.token_checked) < TOKEN_CHECK_EVERY {
            return false;
        }
        self.token_checked = now;
        bearer.header() != self.token
    }

    fn exchange(&mut self, message: &[u8], buffer: &mut [u8], until: Instant) -> Result<bool, Fault> {
        self.socket.send(message)?;
        let mut head = [0; ANSWER_HEAD_BYTES];
        let mut got = 0;
        // The buffer gets bytes only when the head is whole.
        while got < head.len() {
            let mut parts = [IoSliceMut::new(&mut head[got..]), IoSliceMut::new(buffer)];
            got += self.socket.receive_parts(&mut parts, until)?;
        }
        let in_buffer = got - head.len();
        match HitAnswer::parse(head) {
            Some(HitAnswer::Here(len)) if usize::try_from(len).is_ok_and(|len| len == buffer.len()) => {
                self.socket.receive_all(&mut buffer[in_buffer..], until)?;
                Ok(true)
            }
            Some(HitAnswer::Here(_)) => Err(Fault::Protocol("an answer has another length")),
            Some(HitAnswer::NotHere) if in_buffer == 0 => Ok(false),
            Some(HitAnswer::NotHere) => Err(Fault::Protocol("bytes follow an answer without bytes")),
            None => Err(Fault::Protocol("an answer has an unknown head")),
        }
    }
}

/// A socket whose reads end in time.
struct Socket {
    fd: OwnedFd,
    /// The time limit of a read that is in force.
    limit: Duration,
}

impl Socket {
    fn connect(path: &Path, until: Instant) -> Result<Self, Fault> {
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

    /// Makes the server speak the protocol of hit connections.
    fn upgrade(&mut self, component: &str, token: Option<&HeaderValue>, until: Instant) -> Result<(), Fault> {
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
                Some(len) if len == got => return Ok(()),
                Some(_) => return Err(Fault::Protocol("bytes follow the answer to the upgrade")),
            }
        }
    }

    /// Sends a message without waiting. There is room for it, unless the server takes no requests.
    fn send(&self, message: &[u8]) -> Result<(), Fault> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| rustix::net::send(&self.fd, message, flags))?;
        if sent == message.len() { Ok(()) } else { Err(Fault::Late) }
    }

    /// Receives some bytes, at least one.
    fn receive_parts(&mut self, parts: &mut [IoSliceMut<'_>], until: Instant) -> Result<usize, Fault> {
        self.set_limit(until)?;
        match retry_on_intr(|| rustix::io::readv(&self.fd, parts))? {
            0 => Err(Fault::Closed),
            n => Ok(n),
        }
    }

    /// Fills the buffer. The kernel wakes this thread once, when all bytes have come.
    fn receive_all(&mut self, mut buffer: &mut [u8], until: Instant) -> Result<(), Fault> {
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

/// Returns the length of the head of an answer that accepts the upgrade; `None` while the head is not whole.
fn upgraded(bytes: &[u8]) -> Result<Option<usize>, Fault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let parsed = answer.parse(bytes).map_err(|_| Fault::Protocol("the answer to the upgrade is no HTTP"))?;
    let httparse::Status::Complete(len) = parsed else { return Ok(None) };
    let is_ours = |h: &httparse::Header<'_>| {
        h.name.eq_ignore_ascii_case("upgrade") && h.value.eq_ignore_ascii_case(PROTOCOL.as_bytes())
    };
    match answer.code {
        Some(101) if answer.headers.iter().any(is_ours) => Ok(Some(len)),
        Some(101) => Err(Fault::Protocol("the server upgrades to another protocol")),
        Some(status) => Err(Fault::Refused(status)),
        None => Err(Fault::Protocol("the answer to the upgrade has no status")),
    }
}

#[cfg(test)]
mod tests;
