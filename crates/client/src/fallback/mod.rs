//! Reads bytes from the origin while the server does not answer (`--origin-fallback`).
//!
//! Owns the decision between server and origin for one mount or tool, and the reads from the origin. Never
//! chooses samples: only a server does. Never caches. Never overrides an answer of the server: only a server
//! that does not answer makes it read the origin.
//!
//! Invariants
//! 1. (I1) It returns whole chunks or files that are not verified, as those of a server: the caller hashes
//!    them. The caller's hash rejects bytes of an object that changed at the origin; they are never mixed
//!    with others.
//! 2. 429, 404 and every other answer of the server are final. None of them causes a read from the origin.
//! 3. At most [`OriginLimits::requests_max`] reads run at the origin at once, at the rate of its `[[origin]]`
//!    table. The first reads after a loss are spread over [`SPREAD`], so that the nodes of a cluster do not
//!    all read at once.
//! 4. While the server is away no read waits for it. [`Fallback::watch`] notices when it is back.
//!
//! [`OriginLimits::requests_max`]: fletch_origin::OriginLimits::requests_max

mod origin_tables;
mod remembered;
mod server_state;

pub use origin_tables::{OriginTables, resolve};
pub use remembered::{RememberedVersion, RememberedVersionError};

use crate::{Client, ClientError};
use bytes::Bytes;
use fletch_origin::{Origin, OriginError, OriginStats, Origins};
use rand::Rng;
use server_state::ServerState;
use std::{fmt, ops::Range, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};

/// The time over which the first reads after a loss are spread.
pub const SPREAD: Duration = Duration::from_millis(200);
/// The shortest and the longest time between two probes of a server that is away.
const PROBE_EVERY: Range<Duration> = Duration::from_millis(500)..Duration::from_millis(1000);
/// The longest time for one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the bytes of a chunk or a file are at the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginLocation {
    /// In an object of the dataset.
    DatasetObject {
        /// The object's path, relative to the dataset's URI.
        path: String,
        /// The offset of the first byte in the object.
        offset: u64,
    },
    /// In an object that was written beside the version tables.
    TablesObject {
        /// The object's key, relative to the tables' URI.
        key: String,
        /// The offset of the first byte in the object.
        offset: u64,
    },
}

impl OriginLocation {
    /// Returns where the bytes from byte `n` on are.
    #[must_use]
    pub fn from(mut self, n: u64) -> Self {
        match &mut self {
            OriginLocation::DatasetObject { offset, .. } | OriginLocation::TablesObject { offset, .. } => {
                *offset = offset.saturating_add(n);
            }
        }
        self
    }
}

/// A server and the origin that is read while the server does not answer. Cheap to clone.
#[derive(Clone)]
pub struct Fallback(Arc<Inner>);

struct Inner {
    /// `None` if no server is used.
    client: Option<Client>,
    origins: Origins,
    data: Origin,
    tables: Origin,
    server_state: ServerState,
}

impl Fallback {
    /// Returns a fallback that reads through `client` and, while the server does not answer, from the origin.
    ///
    /// `data` has the dataset's objects, `tables` its version tables and packs. Both were opened from
    /// `origins`. Without a client every read goes to the origin.
    #[must_use]
    pub fn new(client: Option<Client>, origins: Origins, data: Origin, tables: Origin) -> Self {
        let server_state = ServerState::new(client.is_none());
        let client = client.map(|c| c.fail_fast());
        Fallback(Arc::new(Inner { client, origins, data, tables, server_state }))
    }

    /// Returns the `len` bytes that `ask` requests from the server, **not verified**.
    ///
    /// While the server does not answer, reads them from `location` at the origin.
    ///
    /// # Errors
    /// [`ClientError`]: the server's error, or [`ClientError::Origin`] if the server does not answer and the
    /// origin failed too.
    pub async fn bytes_unchecked<A>(
        &self,
        location: &OriginLocation,
        len: u32,
        ask: impl FnOnce(Client) -> A,
    ) -> Result<Bytes, ClientError>
    where
        A: Future<Output = Result<Bytes, ClientError>>,
    {
        if let Some(client) = self.server() {
            match ask(client.clone()).await {
                Err(e) if e.is_unreachable() => self.lost(&e),
                answer => return answer,
            }
        }
        self.spread().await;
        let (origin, path, offset) = match location {
            OriginLocation::DatasetObject { path, offset } => (&self.0.data, path, *offset),
            OriginLocation::TablesObject { key, offset } => (&self.0.tables, key, *offset),
        };
        let got = origin.get(path, Some(offset..offset + u64::from(len)), None).await;
        Ok(got.map_err(|e| self.failed(&e))?.bytes)
    }

    /// Returns what `ask` requests from the server, **not verified**, if the origin has no such thing.
    ///
    /// # Errors
    /// [`ClientError`]: the server's error, or [`ClientError::Config`] while the server does not answer.
    pub async fn from_server_unchecked<A>(&self, ask: impl FnOnce(Client) -> A) -> Result<Bytes, ClientError>
    where
        A: Future<Output = Result<Bytes, ClientError>>,
    {
        let away =
            || ClientError::Config("the server does not answer, and the origin has no such thing".into());
        let answer = ask(self.server().ok_or_else(away)?.clone()).await;
        if let Err(e) = &answer
            && e.is_unreachable()
        {
            self.lost(e);
        }
        answer
    }

    /// Returns whether reads go to the origin now.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.0.server_state.is_away()
    }

    /// Returns how often the server was lost.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.0.server_state.losses()
    }

    /// Returns the counters of the origin.
    #[must_use]
    pub fn origin_stats(&self) -> OriginStats {
        self.0.origins.stats()
    }

    /// Probes a server that is away, about every second, for as long as this future is polled.
    ///
    /// The owner of the process's tasks runs it beside the reads. Without a server it waits for ever.
    pub async fn watch(&self) {
        let Some(client) = &self.0.client else { return std::future::pending().await };
        let probe = client.within(PROBE_TIMEOUT);
        loop {
            let wait = rand::rng().random_range(PROBE_EVERY);
            sleep(wait).await;
            if !self.is_away() {
                continue;
            }
            match probe.info().await {
                Ok(_) => {
                    if let Some(away) = self.0.server_state.mark_back(Instant::now()) {
                        tracing::info!(server = %client.servers(), ?away, "the server answers again");
                    }
                }
                Err(error) => tracing::debug!(%error, "the server still does not answer"),
            }
        }
    }

    /// Returns the server's client, unless the server is away.
    #[must_use]
    pub fn server(&self) -> Option<&Client> {
        self.0.client.as_ref().filter(|_| !self.is_away())
    }

    /// Returns whether a probe gets no answer, and records the loss.
    ///
    /// Any answer counts as an answer (I2).
    async fn is_unreachable(&self) -> bool {
        let Some(client) = self.server() else { return true };
        match client.within(PROBE_TIMEOUT).info().await {
            Err(e) if e.is_unreachable() => {
                self.lost(&e);
                true
            }
            _ => false,
        }
    }

    fn lost(&self, error: &ClientError) {
        if self.0.server_state.mark_lost(Instant::now()) {
            let origin = self.0.data.uri();
            tracing::warn!(%error, %origin, "the server does not answer; reading from the origin");
        }
    }

    /// Waits a random part of [`SPREAD`] after a loss (I3).
    async fn spread(&self) {
        if self.0.server_state.lost_within(Instant::now(), SPREAD) {
            let wait = SPREAD.mul_f64(rand::rng().random_range(0.0..1.0));
            sleep(wait).await;
        }
    }

    fn failed(&self, e: &OriginError) -> ClientError {
        let server = match &self.0.client {
            Some(c) => format!("{} does not answer, and the read from the origin failed", c.servers()),
            None => "no server is used, and the read from the origin failed".to_owned(),
        };
        ClientError::Origin { server, kind: e.kind(), why: e.to_string() }
    }
}

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fallback")
            .field("client", &self.0.client)
            .field("data", self.0.data.uri())
            .field("tables", self.0.tables.uri())
            .field("away", &self.is_away())
            .finish_non_exhaustive()
    }
}
