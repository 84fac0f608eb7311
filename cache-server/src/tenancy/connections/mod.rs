//! The open connections: [`ConnectionTable`] decides. This room carries its decisions out and counts them.
//!
//! A connection that is to be closed learns of it by [`Connection::closed`]. The log names the source of what
//! is closed or refused, in one line for each reason in ten seconds.

mod request_memory;
mod table;

pub use request_memory::{BodyRefusal, Caller, NoMemory, RequestBytes, RequestMemory};
pub use table::{ConnectionId, ConnectionTable, Listener, Refusal, Source, TableLimits};

use crate::app::telemetry::Event;
use fletch_core::Tenant;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

/// The memory of a connection while a request arrives or is answered: its buffers, and its state.
pub const CONNECTION_BYTES: u64 = 16 << 10;
/// The memory that TLS needs besides: what waits to be sent, and a record that arrives.
pub const TLS_BYTES: u64 = TLS_SEND_BYTES as u64 + (16 << 10);
/// The bytes of records that wait to be sent.
pub const TLS_SEND_BYTES: usize = 32 << 10;
/// How long a request waits for memory, while unproven connections are closed.
const MEMORY_WAIT: Duration = Duration::from_millis(500);
/// The value of `idle_since` while a request runs.
const BUSY: u64 = u64::MAX;

/// Why the server closed a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// It made room for another connection.
    MadeRoom = 0,
    /// Its first request was not complete, or not authenticated, in time.
    NotProven = 1,
    /// It sent no further request in time.
    Idle = 2,
    /// It took the bytes of a reply too slowly.
    SlowReader = 3,
    /// It spoke no TLS on a port that does, or its handshake failed.
    Handshake = 4,
}

impl Closed {
    const ALL: [Closed; 5] =
        [Closed::MadeRoom, Closed::NotProven, Closed::Idle, Closed::SlowReader, Closed::Handshake];

    fn as_str(self) -> &'static str {
        match self {
            Closed::MadeRoom => "made_room",
            Closed::NotProven => "not_proven",
            Closed::Idle => "idle",
            Closed::SlowReader => "slow_reader",
            Closed::Handshake => "handshake",
        }
    }
}

/// The open connections of a server.
#[derive(Debug)]
pub struct Connections {
    state: Mutex<State>,
    memory: Arc<RequestMemory>,
    began: Instant,
    refused: [Event; Refusal::ALL.len()],
    closed: [Event; Closed::ALL.len()],
}

#[derive(Debug)]
struct State {
    table: ConnectionTable,
    next: ConnectionId,
    open: HashMap<ConnectionId, Arc<Facts>>,
}

/// What others need to know of a connection.
#[derive(Debug)]
struct Facts {
    source: Source,
    close: CancellationToken,
    /// Since when it waits for a request, in milliseconds, or [`BUSY`].
    idle_since: AtomicU64,
    /// Whether it holds memory for a request.
    holds: AtomicBool,
}

impl State {
    /// Tells a connection to close.
    fn close(&mut self, id: Option<ConnectionId>) -> Option<Source> {
        let facts = self.open.remove(&id?)?;
        facts.close.cancel();
        Some(facts.source)
    }

    /// Returns the table, and since when each connection is idle.
    fn parts(&mut self) -> (&mut ConnectionTable, impl Fn(ConnectionId) -> Option<u64> + '_) {
        let open = &self.open;
        let idle_since = |id| {
            let since = open.get(&id)?.idle_since.load(Relaxed);
            (since != BUSY).then_some(since)
        };
        (&mut self.table, idle_since)
    }
}

/// An open connection. Dropping it removes it from the table.
#[derive(Debug)]
pub struct Connection {
    connections: Arc<Connections>,
    id: ConnectionId,
    facts: Arc<Facts>,
    /// The tenant of its first authenticated request, or the default tenant on a server without tokens.
    tenant: OnceLock<Tenant>,
    bytes: Mutex<Option<RequestBytes>>,
    /// How long the request that arrives waited for memory.
    memory_waited_ns: AtomicU64,
    /// The memory of TLS, or 0.
    tls_bytes: AtomicU64,
    /// Whether it lacks the client certificate that the server requires.
    lacks_certificate: AtomicBool,
}

/// What the metrics show.
#[derive(Debug)]
pub struct ConnectionStats {
    /// Served connections over TCP, over the socket, and connections in the probe lanes.
    pub open: [(&'static str, u64); 3],
    /// Connections that were not served, by reason.
    pub refused: Vec<(&'static str, u64)>,
    /// Connections that the server closed, by reason.
    pub closed: Vec<(&'static str, u64)>,
}

impl Connections {
    /// Creates an empty table. Heads of requests take their memory from `memory`.
    #[must_use]
    pub fn new(limits: TableLimits, memory: Arc<RequestMemory>) -> Arc<Self> {
        let state = State { table: ConnectionTable::new(limits), next: 0, open: HashMap::new() };
        Arc::new(Connections {
            state: Mutex::new(state),
            memory,
            began: Instant::now(),
            refused: Default::default(),
            closed: Default::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(BUSY - 1)
    }

    /// Admits a connection. Returns it, and why it is in the probe lane if it is.
    pub fn admit(self: &Arc<Self>, source: Source) -> (Connection, Option<Refusal>) {
        let facts = Arc::new(Facts {
            source,
            close: CancellationToken::new(),
            idle_since: AtomicU64::new(self.now_ms()),
            holds: AtomicBool::new(false),
        });
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let (table, idle_since) = state.parts();
        let admission = table.admit(id, source, idle_since);
        state.open.insert(id, Arc::clone(&facts));
        let closed = state.close(admission.close);
        drop(state);
        if let Some(of) = closed {
            self.count_closed(of, Closed::MadeRoom);
        }
        if let Some(why) = admission.refused {
            self.count_refused(source, why);
        }
        let connection = Connection {
            connections: Arc::clone(self),
            id,
            facts,
            tenant: OnceLock::new(),
            bytes: Mutex::new(None),
            memory_waited_ns: AtomicU64::new(0),
            tls_bytes: AtomicU64::new(0),
            lacks_certificate: AtomicBool::new(false),
        };
        (connection, admission.refused)
    }

    /// Counts a refusal, and logs it if it is time for a line.
    fn count_refused(&self, source: Source, why: Refusal) {
        if let Some(new) = self.refused[why as usize].count() {
            tracing::warn!(
                %source, limit = why.as_str(), refused = new,
                "a connection is answered 429: its limit is reached (the count is since the last such line)"
            );
        }
    }

    /// Counts a connection that the server closed, and logs it if it is time for a line.
    pub fn count_closed(&self, source: Source, why: Closed) {
        if let Some(new) = self.closed[why as usize].count() {
            tracing::info!(
                %source, reason = why.as_str(), closed = new,
                "the server closed a connection (the count is since the last such line)"
            );
        }
    }

    /// Returns the number of open connections, those in the probe lanes included.
    #[must_use]
    pub fn open(&self) -> u64 {
        self.lock().open.len() as u64
    }

    /// Returns what the metrics show.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        let state = self.lock();
        let count = |listener| state.table.open(listener) as u64;
        let probes = state.table.in_probe_lanes() as u64;
        let open = [("tcp", count(Listener::Tcp)), ("unix", count(Listener::Unix)), ("probe", probes)];
        drop(state);
        ConnectionStats {
            open,
            refused: Refusal::ALL.map(|why| (why.as_str(), self.refused[why as usize].total())).to_vec(),
            closed: Closed::ALL.map(|why| (why.as_str(), self.closed[why as usize].total())).to_vec(),
        }
    }
}

impl Connection {
    /// Returns where it comes from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.facts.source
    }

    /// Waits until the connection is to be closed.
    pub async fn closed(&self) {
        self.facts.close.cancelled().await;
    }

    /// Whether a request of it was authenticated.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.tenant.get().is_some()
    }

    /// Notes that its request was authenticated. `tenant` is `None` on a server without tokens.
    ///
    /// # Errors
    /// [`Refusal::Tenant`]: the tenant has too many connections.
    pub fn prove(&self, tenant: Option<&Tenant>) -> Result<(), Refusal> {
        if self.is_proven() {
            return Ok(());
        }
        let mut state = self.connections.lock();
        let (table, idle_since) = state.parts();
        let proven = table.prove(self.id, tenant, idle_since);
        let closed = proven.map(|close| state.close(close));
        drop(state);
        match closed {
            Ok(closed) => {
                if let Some(of) = closed {
                    self.connections.count_closed(of, Closed::MadeRoom);
                }
            }
            Err(why) => {
                self.connections.count_refused(self.source(), why);
                return Err(why);
            }
        }
        let tenant = self.tenant.get_or_init(|| tenant.cloned().unwrap_or_else(Tenant::default_tenant));
        if let Some(bytes) = &mut *self.bytes() {
            bytes.belong_to(tenant);
        }
        Ok(())
    }

    /// Notes that it speaks TLS, which needs memory besides.
    pub fn use_tls(&self) {
        self.tls_bytes.store(TLS_BYTES, Relaxed);
    }

    /// Notes that it lacks the client certificate that the server requires.
    pub fn set_lacks_certificate(&self) {
        self.lacks_certificate.store(true, Relaxed);
    }

    /// Whether it lacks the client certificate that the server requires. Then only probes are answered.
    #[must_use]
    pub fn lacks_certificate(&self) -> bool {
        self.lacks_certificate.load(Relaxed)
    }

    /// Notes that a request of it runs, or that it waits for the next one.
    pub fn set_busy(&self, busy: bool) {
        let since = if busy { BUSY } else { self.connections.now_ms() };
        self.facts.idle_since.store(since, Relaxed);
    }

    /// Whether a request of it runs.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.facts.idle_since.load(Relaxed) == BUSY
    }

    /// Returns for how long it has waited for a request, or `None` while one runs.
    #[must_use]
    pub fn idle_for(&self) -> Option<Duration> {
        let since = self.facts.idle_since.load(Relaxed);
        let now = self.connections.now_ms();
        (since != BUSY).then(|| Duration::from_millis(now.saturating_sub(since)))
    }

    fn bytes(&self) -> MutexGuard<'_, Option<RequestBytes>> {
        self.bytes.lock()
    }

    /// Takes the memory that a request needs before its first byte is read. Does nothing if it has it.
    ///
    /// Waits for a moment. Meanwhile it closes connections that hold memory and are not proven, those of the
    /// same source first.
    ///
    /// # Errors
    /// [`Refusal::Memory`].
    pub async fn take_memory(&self) -> Result<(), Refusal> {
        if self.facts.holds.load(Relaxed) {
            return Ok(());
        }
        let until = tokio::time::Instant::now() + MEMORY_WAIT;
        let caller = match self.tenant.get() {
            Some(tenant) => Caller::Tenant(tenant.clone()),
            None => Caller::Stranger(self.source()),
        };
        let mut began: Option<Instant> = None;
        loop {
            let freed = self.connections.memory.freed().notified();
            tokio::pin!(freed);
            // Before the attempt, so that bytes that come free after it are noticed.
            freed.as_mut().enable();
            if let Ok(bytes) = self.connections.memory.take(caller.clone(), self.least_bytes()) {
                self.facts.holds.store(true, Relaxed);
                *self.bytes() = Some(bytes);
                if let Some(began) = began {
                    let waited = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    self.memory_waited_ns.store(waited, Relaxed);
                }
                return Ok(());
            }
            self.shed();
            began.get_or_insert_with(Instant::now);
            if timeout_at(until, freed).await.is_err() {
                self.connections.count_refused(self.source(), Refusal::Memory);
                return Err(Refusal::Memory);
            }
        }
    }

    /// Returns how long the next request waited for its memory, once.
    pub fn take_memory_wait(&self) -> Duration {
        Duration::from_nanos(self.memory_waited_ns.swap(0, Relaxed))
    }

    /// Closes the oldest connection that holds memory and is not proven, if possible of the same source.
    fn shed(&self) {
        let mut state = self.connections.lock();
        let State { table, open, .. } = &mut *state;
        let holds = |id| open.get(&id).is_some_and(|facts| facts.holds.load(Relaxed));
        let shed = table.shed(self.source(), holds);
        let closed = state.close(shed);
        drop(state);
        if let Some(of) = closed {
            self.connections.count_closed(of, Closed::MadeRoom);
        }
    }

    /// Returns the memory that it needs for a short request.
    fn least_bytes(&self) -> u64 {
        CONNECTION_BYTES + self.tls_bytes.load(Relaxed)
    }

    /// Takes memory for a head that is `n` bytes long so far.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn grow_head(&self, n: u64) -> Result<(), NoMemory> {
        match &mut *self.bytes() {
            // The buffer of a head that does not end doubles.
            Some(bytes) if 2 * n > CONNECTION_BYTES => {
                bytes.grow_to(2 * n + self.least_bytes() - CONNECTION_BYTES / 2)
            }
            _ => Ok(()),
        }
    }

    /// Gives back what a long head took: the request was parsed.
    pub fn head_was_parsed(&self) {
        if let Some(bytes) = &mut *self.bytes() {
            bytes.shrink_to(self.least_bytes());
        }
    }

    /// Gives all of its memory back: its buffers were freed.
    pub fn give_memory_back(&self) {
        self.facts.holds.store(false, Relaxed);
        *self.bytes() = None;
    }

    /// Moves it to the probe lane, because it gets no memory.
    pub fn divert(&self) {
        let mut state = self.connections.lock();
        let close = state.table.divert(self.id, self.source().listener());
        state.close(close);
    }

    /// Counts why the server closed it.
    pub fn count_closed(&self, why: Closed) {
        self.connections.count_closed(self.source(), why);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.table.remove(self.id);
        state.open.remove(&self.id);
    }
}
