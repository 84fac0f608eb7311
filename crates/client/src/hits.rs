//! Hit connections: a thread asks the server of this machine for bytes that the server has at hand.
//!
//! The rest of this crate waits without holding a thread. Here the calling thread waits itself, for a very
//! short time: that saves the ways between threads, which take longer than the answer. [`fletch_api::hits`]
//! has the protocol. A caller that gets no bytes makes the usual call.
//!
//! The bytes come through the socket, or lie in the *window* of the connection: memory that the server writes
//! and this process reads ([`fletch_window`]). It is made with the first ask for it, and made anew when asks
//! become longer: four of the longest ask fit into it, so that bytes can be held while the next ones come.
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
//! 5. Bytes in a window stay as they are until they are dropped, whatever becomes of connection and server.

mod socket;
mod window_reads;

pub(crate) use window_reads::IdleConnections;
pub use window_reads::{Verify, WindowRead, close_idle};

use crate::token::Bearer;
use fletch_api::hits::{
    ANSWER_HEAD_BYTES, HitAnswer, HitRequest, REQUEST_BYTES_AHEAD_MAX, REQUESTS_AHEAD_MAX, SLAB_OFFSET_BYTES,
    WINDOW_BYTES_MAX, WINDOW_READY, window_request,
};
use fletch_window::{Filled, Place, View};
use http::HeaderValue;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use socket::Socket;
use std::{
    fs::File,
    io::IoSliceMut,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
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
/// The shortest window.
const WINDOW_BYTES_MIN: u32 = 1 << 20;
/// How many asks fit into a window.
const ASKS_IN_WINDOW: u64 = 4;

/// The outcome of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitOutcome {
    /// The buffer has all bytes, not verified.
    Here,
    /// The server does not have the bytes at hand.
    NotHere,
    /// The connection has no window.
    NoWindow,
    /// Nothing was sent: the server is left alone, or had none of the last bytes at hand.
    NotAsked,
    /// The server did not answer in time, or the connection broke. The buffer may have some bytes.
    Failed,
}

/// Where a chunk lies on the disk of the server.
#[derive(Debug)]
pub struct InSlab {
    /// The slab file, which other chunks are in, too.
    pub file: File,
    /// Where the chunk begins.
    pub offset: u64,
    /// The length of the chunk in bytes.
    pub len: u32,
}

/// What the hit connections to a server did; totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HitStats {
    /// Asks that were sent. One may be for many chunks.
    pub asks: u64,
    /// Answers with bytes.
    pub here: u64,
    /// Answers without bytes.
    pub not_here: u64,
    /// Asks that ended with a fault of the server or the connection.
    pub failed: u64,
    /// Bytes of the answers.
    pub bytes: u64,
    /// Bytes that were read in slabs of the server.
    pub slab_bytes: u64,
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
    asks: AtomicU64,
    here: AtomicU64,
    not_here: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    slab_bytes: AtomicU64,
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
            asks: AtomicU64::new(0),
            here: AtomicU64::new(0),
            not_here: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            slab_bytes: AtomicU64::new(0),
        }))
    }

    /// Returns a connection for one thread. It opens with the first ask. Its window has at most
    /// `window_bytes_max`. 0: no window.
    #[must_use]
    pub fn connection(&self, window_bytes_max: u32) -> HitConnection {
        let window_bytes_max = window_bytes_max.min(WINDOW_BYTES_MAX);
        let (server, message) = (self.clone(), Vec::new());
        HitConnection { server, window_bytes_max, open: None, misses: 0, passed: 0, message }
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
            asks: inner.asks.load(Relaxed),
            here: inner.here.load(Relaxed),
            not_here: inner.not_here.load(Relaxed),
            failed: inner.failed.load(Relaxed),
            bytes: inner.bytes.load(Relaxed),
            slab_bytes: inner.slab_bytes.load(Relaxed),
        }
    }

    /// Counts bytes that were read in slabs of the server.
    pub fn note_slab_read(&self, bytes: u64) {
        self.0.slab_bytes.fetch_add(bytes, Relaxed);
    }

    fn rest(&self) -> MutexGuard<'_, Rest> {
        // Each method leaves it whole.
        self.0.rest.lock()
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
    /// The longest window that it makes.
    window_bytes_max: u32,
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
        let (message, len) = (std::mem::take(&mut self.message), buffer.len());
        let until = until.min(now + self.server.0.answer_timeout);
        let outcome = self.with_open(now, until, |open| open.exchange(&message, buffer, until));
        self.message = message;
        let outcome = outcome.map(|is_here| if is_here { (1, 0, len as u64) } else { (0, 1, 0) });
        self.note(outcome)
    }

    /// Asks for the bytes of several requests at once, into the window of the connection.
    ///
    /// Sets `answers` to one entry for each request: its bytes, if the server put them into the window. They
    /// keep their place there until they are dropped. A request is not asked for which the window has no
    /// room. Blocks until all answers are there, at most until `until`.
    ///
    /// Returns [`HitOutcome::Here`] if there are bytes for at least one request, and `NoWindow` if the system
    /// has no memory for a window or the server does not take it.
    pub fn ask_in_window(
        &mut self,
        requests: &mut [HitRequest<'_>],
        answers: &mut Vec<Option<Filled>>,
        until: Instant,
    ) -> HitOutcome {
        let now = Instant::now();
        answers.clear();
        answers.resize_with(requests.len(), || None);
        let most = self.window_bytes_max;
        if most == 0 {
            return HitOutcome::NoWindow;
        }
        if until <= now || !self.is_worthwhile() || !self.server.takes_turn(now, self.open.is_some()) {
            return HitOutcome::NotAsked;
        }
        let mut message = std::mem::take(&mut self.message);
        let bytes = requests.iter().map(|request| View::place_bytes(request.size)).sum();
        let outcome = self.with_open(now, until, |open| {
            open.make_window(bytes, most, until)?;
            open.exchange_in_window(&mut message, requests, answers, until)
        });
        self.message = message;
        match outcome {
            Ok(None) => {
                self.server.answered();
                HitOutcome::NoWindow
            }
            Ok(Some(not_here)) => {
                let here = answers.iter().flatten();
                let bytes = here.clone().map(|filled| filled.as_ref().len() as u64).sum();
                let here = here.count();
                if here == 0 && not_here == 0 {
                    // The window has no room.
                    return HitOutcome::NotAsked;
                }
                self.note(Ok((here as u64, not_here, bytes)))
            }
            Err(fault) => self.note(Err(fault)),
        }
    }

    /// Asks where a chunk lies on the server's disk. `None`: the server does not say, or was not asked.
    ///
    /// Blocks as [`HitConnection::ask`].
    pub fn ask_for_slab(&mut self, request: &HitRequest<'_>, until: Instant) -> Option<InSlab> {
        let now = Instant::now();
        if until <= now || !self.server.takes_turn(now, self.open.is_some()) {
            return None;
        }
        let mut message = Vec::new();
        request.encode(&mut message).ok()?;
        let until = until.min(now + self.server.0.answer_timeout);
        let outcome = self.with_open(now, until, |open| open.exchange_for_slab(&message, until));
        let inner = &self.server.0;
        inner.asks.fetch_add(1, Relaxed);
        match outcome {
            Ok(found) => {
                self.server.answered();
                found
            }
            Err(fault) => {
                self.open = None;
                self.server.failed(&fault);
                None
            }
        }
    }

    /// Counts answers with bytes, answers without, and bytes; or a fault.
    fn note(&mut self, answers: Result<(u64, u64, u64), Fault>) -> HitOutcome {
        let inner = &self.server.0;
        inner.asks.fetch_add(1, Relaxed);
        match answers {
            Ok((here, not_here, bytes)) => {
                inner.here.fetch_add(here, Relaxed);
                inner.not_here.fetch_add(not_here, Relaxed);
                inner.bytes.fetch_add(bytes, Relaxed);
                let more = u32::try_from(not_here).unwrap_or(u32::MAX);
                self.misses = if here > 0 { 0 } else { self.misses.saturating_add(more) };
                self.server.answered();
                if here > 0 { HitOutcome::Here } else { HitOutcome::NotHere }
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

    /// Runs `exchange` with the connection, which is opened if it is not open.
    ///
    /// A connection that the server closed while it was idle is opened again, once.
    fn with_open<T>(
        &mut self,
        now: Instant,
        until: Instant,
        mut exchange: impl FnMut(&mut OpenConnection) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if self.open.as_mut().is_some_and(|open| open.has_old_token(&self.server.0.bearer, now)) {
            self.open = None;
        }
        if let Some(open) = &mut self.open {
            match exchange(open) {
                Err(Fault::Closed) => {}
                outcome => return outcome,
            }
        }
        let open = OpenConnection::open(&self.server.0, now, until)?;
        self.server.opened();
        exchange(self.open.insert(open))
    }
}

/// A connection on which the server speaks the protocol.
struct OpenConnection {
    socket: Socket,
    /// Its window, if the server took one.
    window: Option<Arc<View>>,
    /// The length of the longest window that this side tried to make. 0: none.
    window_tried: u32,
    /// The token that it was opened with.
    token: Option<HeaderValue>,
    token_checked: Instant,
}

impl OpenConnection {
    fn open(server: &Inner, now: Instant, until: Instant) -> Result<Self, Fault> {
        let token = server.bearer.header();
        let mut socket = Socket::connect(&server.socket, until)?;
        socket.upgrade(server.component, token.as_ref(), until)?;
        Ok(OpenConnection { socket, window: None, window_tried: 0, token, token_checked: now })
    }

    /// Makes a window for asks of `bytes`, of at most `most` bytes, unless there is one that is long enough.
    fn make_window(&mut self, bytes: u64, most: u32, until: Instant) -> Result<(), Fault> {
        let wanted = bytes.saturating_mul(ASKS_IN_WINDOW).max(WINDOW_BYTES_MIN.into());
        let wanted = wanted.checked_next_power_of_two().and_then(|wanted| u32::try_from(wanted).ok());
        let wanted = wanted.unwrap_or(most).min(most);
        if wanted <= self.window_tried {
            return Ok(());
        }
        self.window_tried = wanted;
        self.window = None;
        self.socket.send(&window_request(wanted))?;
        let (head, file) = self.socket.receive_with_file(until)?;
        let file = match (HitAnswer::parse(head), file) {
            (Some(HitAnswer::InWindow(len)), Some(file)) if len == wanted => file,
            (Some(HitAnswer::NotHere), None) => return Ok(()),
            _ => return Err(Fault::Protocol("an answer offers no window")),
        };
        let view = match View::accept(file, wanted) {
            Ok(view) => view,
            Err(error) => {
                tracing::warn!(%error, bytes = wanted, "the window of a hit connection cannot be used");
                return Ok(());
            }
        };
        self.socket.send(&WINDOW_READY)?;
        let mut head = [0; ANSWER_HEAD_BYTES];
        self.socket.receive_all(&mut head, until)?;
        self.window = match HitAnswer::parse(head) {
            Some(HitAnswer::InWindow(len)) if len == wanted => Some(view),
            Some(HitAnswer::NotHere) => None,
            _ => return Err(Fault::Protocol("an answer does not fit the window")),
        };
        Ok(())
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
            Some(HitAnswer::InWindow(_) | HitAnswer::InSlab(_)) => {
                Err(Fault::Protocol("bytes were put where nobody asked for them"))
            }
            Some(HitAnswer::NotHere) if in_buffer == 0 => Ok(false),
            Some(HitAnswer::NotHere) => Err(Fault::Protocol("bytes follow an answer without bytes")),
            None => Err(Fault::Protocol("an answer has an unknown head")),
        }
    }

    fn exchange_for_slab(&mut self, message: &[u8], until: Instant) -> Result<Option<InSlab>, Fault> {
        self.socket.send(message)?;
        let (head, file) = self.socket.receive_with_file(until)?;
        match (HitAnswer::parse(head), file) {
            (Some(HitAnswer::InSlab(len)), Some(file)) => {
                let mut offset = [0; SLAB_OFFSET_BYTES];
                self.socket.receive_all(&mut offset, until)?;
                Ok(Some(InSlab { file: file.into(), offset: u64::from_le_bytes(offset), len }))
            }
            (Some(HitAnswer::NotHere), None) => Ok(None),
            _ => Err(Fault::Protocol("an answer names no slab")),
        }
    }

    /// Asks for everything for which the window has room, and returns how often the answer had no bytes.
    /// `None`: there is no window.
    ///
    /// After an error the server may still write into places, so the caller drops this connection. Its window
    /// is then used no more.
    fn exchange_in_window(
        &mut self,
        message: &mut Vec<u8>,
        requests: &mut [HitRequest<'_>],
        answers: &mut [Option<Filled>],
        until: Instant,
    ) -> Result<Option<u64>, Fault> {
        let Some(window) = self.window.clone() else { return Ok(None) };
        let mut not_here = 0;
        let mut asked: Vec<(usize, Place)> = Vec::with_capacity(requests.len().min(REQUESTS_AHEAD_MAX));
        let mut next = 0;
        while next < requests.len() {
            message.clear();
            while next < requests.len() && asked.len() < REQUESTS_AHEAD_MAX {
                let request = &mut requests[next];
                let before = message.len();
                if let Some(place) = window.take(request.size) {
                    request.place = Some(place.offset());
                    let encoded = request.encode(message).is_ok();
                    if encoded && message.len() > REQUEST_BYTES_AHEAD_MAX && before > 0 {
                        message.truncate(before);
                        break;
                    }
                    if encoded {
                        asked.push((next, place));
                    }
                }
                next += 1;
            }
            if asked.is_empty() {
                continue;
            }
            self.socket.send(message)?;
            let mut heads = [0; REQUESTS_AHEAD_MAX * ANSWER_HEAD_BYTES];
            let heads = &mut heads[..asked.len() * ANSWER_HEAD_BYTES];
            self.socket.receive_all(heads, until)?;
            let (heads, _) = heads.as_chunks::<ANSWER_HEAD_BYTES>();
            for (head, (index, place)) in heads.iter().zip(asked.drain(..)) {
                match HitAnswer::parse(*head) {
                    Some(HitAnswer::InWindow(len)) if len == requests[index].size => {
                        answers[index] = Some(place.filled());
                    }
                    Some(HitAnswer::NotHere) => not_here += 1,
                    Some(_) => return Err(Fault::Protocol("an answer does not fit its request")),
                    None => return Err(Fault::Protocol("an answer has an unknown head")),
                }
            }
        }
        Ok(Some(not_here))
    }
}

#[cfg(test)]
mod tests;
