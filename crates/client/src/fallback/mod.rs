//! Bytes from the origin while the server is gone (`--origin-fallback`).
//!
//! Owns the decision *server or origin* for one mount or tool, and the reads from the origin. It
//! never chooses samples (that waits for a server), never caches, and never hides an answer of
//! the server: only silence is a reason to go elsewhere.
//!
//! Invariants
//! 1. (I1) What it brings is whole chunks or files, unchecked like those of the server: whoever
//!    asks hashes them. An object that was changed at the origin is refused there, never mixed in.
//! 2. 429, 404 and every other answer of the server are answers. Nothing falls through on them.
//! 3. The origin is asked by at most [`OriginLimits::requests_max`] reads at once and at the rate
//!    of its `[[origin]]` table; the first reads after the server was lost are spread over
//!    [`SPREAD`], so that a cluster that lost its server does not arrive at once.
//! 4. While the server is away no read waits for it; [`Fallback::watch`] finds out when it is back.
//!
//! [`OriginLimits::requests_max`]: fletch_origin::OriginLimits::requests_max

mod gate;
mod known;
mod tables;

pub use known::{Known, KnownError};
pub use tables::{PlaceTables, resolve};

use crate::{Client, ClientError};
use bytes::Bytes;
use fletch_core::{LayoutId, Root};
use fletch_origin::{Origin, OriginError, OriginStats, Origins};
use fletch_tables::TableSource;
use gate::Gate;
use rand::Rng;
use std::{fmt, ops::Range, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};

/// Over how long the first reads after a loss are spread.
pub const SPREAD: Duration = Duration::from_millis(200);
/// How often a server that is away is asked whether it is back, at most and at least.
const PROBE_EVERY: Range<Duration> = Duration::from_millis(500)..Duration::from_millis(1000);
/// How long such a question may take.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// Where the bytes of a chunk or file lie at the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spot {
    /// In an object of the dataset.
    Data {
        /// The object's path, relative to the dataset's URI.
        path: String,
        /// Where in it they begin.
        offset: u64,
    },
    /// In an object that was written beside the tables.
    Beside {
        /// Its key, relative to the tables' place.
        key: String,
        /// Where in it the bytes begin.
        offset: u64,
    },
}

/// A server and the origin behind it. Cheap to clone.
#[derive(Clone)]
pub struct Fallback(Arc<Inner>);

struct Inner {
    /// None when there was no server from the beginning.
    client: Option<Client>,
    origins: Origins,
    data: Origin,
    tables: Origin,
    gate: Gate,
}

impl Fallback {
    /// Reads through `client` and, while it does not answer, from `data` (the dataset's objects)
    /// and `tables` (its version tables and packs), both opened from `origins`. Without a client
    /// everything comes from the origin.
    #[must_use]
    pub fn new(client: Option<Client>, origins: Origins, data: Origin, tables: Origin) -> Self {
        let gate = Gate::new(client.is_none());
        let client = client.map(|c| c.impatient());
        Fallback(Arc::new(Inner { client, origins, data, tables, gate }))
    }

    /// The `len` bytes that `ask` asks a server for or, while it does not answer, those at `spot`.
    /// **Nobody checked** them.
    ///
    /// # Errors
    /// [`ClientError`]: the server's answer, or [`ClientError::Origin`] when neither of them
    /// brought it.
    pub async fn bytes_unchecked<A>(
        &self,
        spot: &Spot,
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
        let (origin, path, offset) = match spot {
            Spot::Data { path, offset } => (&self.0.data, path, *offset),
            Spot::Beside { key, offset } => (&self.0.tables, key, *offset),
        };
        let got = origin.get(path, Some(offset..offset + u64::from(len)), None).await;
        Ok(got.map_err(|e| self.failed(&e))?.bytes)
    }

    /// The tables of a version: from the server or, while it does not answer, from the origin.
    #[must_use]
    pub fn tables(&self, root: Root, layout: LayoutId) -> Arc<dyn TableSource> {
        Arc::new(tables::Either {
            fallback: self.clone(),
            server: self.0.client.as_ref().map(|c| c.tables(root, layout)),
            place: PlaceTables::new(self.0.tables.clone(), root, layout),
        })
    }

    /// Whether the origin is read instead of the server now.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.0.gate.is_away()
    }

    /// How often the server was lost.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.0.gate.losses()
    }

    /// What was asked of the origin.
    #[must_use]
    pub fn origin_stats(&self) -> OriginStats {
        self.0.origins.stats()
    }

    /// Asks a server that is away whether it is back, about every second, for as long as it is
    /// polled. To be run beside the reads, by whoever owns tasks.
    pub async fn watch(&self) {
        let Some(client) = &self.0.client else { return std::future::pending().await };
        let probe = client.within(PROBE_WITHIN);
        loop {
            let wait = rand::rng().random_range(PROBE_EVERY);
            sleep(wait).await;
            if !self.is_away() {
                continue;
            }
            match probe.info().await {
                Ok(_) => {
                    if let Some(away) = self.0.gate.back(Instant::now()) {
                        tracing::info!(server = %client.endpoint(), ?away, "the server is back");
                    }
                }
                Err(error) => tracing::debug!(%error, "the server is still away"),
            }
        }
    }

    /// The server, unless it is away.
    fn server(&self) -> Option<&Client> {
        self.0.client.as_ref().filter(|_| !self.is_away())
    }

    /// Whether the server does not even say who it is; a loss is noted. An answer, of whatever
    /// kind, is no silence (I2).
    async fn is_silent(&self) -> bool {
        let Some(client) = self.server() else { return true };
        match client.within(PROBE_WITHIN).info().await {
            Err(e) if e.is_unreachable() => {
                self.lost(&e);
                true
            }
            _ => false,
        }
    }

    fn lost(&self, error: &ClientError) {
        if self.0.gate.lost(Instant::now()) {
            tracing::warn!(%error, origin = %self.0.data.uri(), "the server is gone: reading from the origin");
        }
    }

    /// I3: not all at once.
    async fn spread(&self) {
        if self.0.gate.lost_within(Instant::now(), SPREAD) {
            let wait = SPREAD.mul_f64(rand::rng().random_range(0.0..1.0));
            sleep(wait).await;
        }
    }

    fn failed(&self, e: &OriginError) -> ClientError {
        let server = match &self.0.client {
            Some(c) => format!("{} does not answer, and the origin failed", c.endpoint()),
            None => "no server is used, and the origin failed".to_owned(),
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
