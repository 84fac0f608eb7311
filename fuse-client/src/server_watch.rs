//! The calls of a mount to its server: counts those that wait, probes a silent server, and refuses calls
//! while it is gone.
//!
//! [`ServerBreaker`] decides, and this module waits. A server of the user's own that does not run is started
//! again ([`Restart`]). A mount with `--origin-fallback` has no use for this module: it reads the origin as
//! soon as the server is silent.

use crate::restart::Restart;
use crate::server_breaker::{Change, Outcome, ServerBreaker};
use async_trait::async_trait;
use bytes::Bytes;
use fletch_api::Code;
use fletch_client::{Client, ClientError};
use fletch_core::Kind;
use fletch_tables::{SourceError, Table, TableRange, TableSource};
use parking_lot::{Mutex, MutexGuard};
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

/// The pause between two looks at the waiting calls.
const TICK: Duration = Duration::from_millis(200);
/// The longest time for a probe.
const PROBE_WITHIN: Duration = Duration::from_millis(800);

/// The calls to one server.
pub struct ServerWatch {
    client: Client,
    breaker: Mutex<ServerBreaker>,
    begun: Notify,
    restart: Option<tokio::sync::Mutex<Restart>>,
    losses: AtomicU64,
    refused: AtomicU64,
}

impl ServerWatch {
    /// Returns the watch of the server of `client`, whose calls last at most its `io_timeout`. `restart`
    /// starts it again, if it is the user's own.
    #[must_use]
    pub fn new(client: Client, restart: Option<Restart>) -> Arc<Self> {
        let breaker = Mutex::new(ServerBreaker::new(client.io_timeout()));
        let (losses, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        let restart = restart.map(tokio::sync::Mutex::new);
        Arc::new(ServerWatch { client, breaker, begun: Notify::new(), restart, losses, refused })
    }

    /// Runs a call to the server, or refuses it at once while the server is gone.
    ///
    /// A server of the user's own that was started again may lack the credentials for a moment, or has some
    /// that expired. Then the call waits until it has been given those of the terminal, and is made again.
    ///
    /// # Errors
    /// The error of the call. [`ClientError::Unreachable`] if the call was refused.
    pub async fn call<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<T, ClientError> {
        let outcome = self.call_once(call()).await;
        let (Some(restart), Err(ClientError::Problem { problem, .. })) = (&self.restart, &outcome) else {
            return outcome;
        };
        if !matches!(problem.code, Code::OriginDenied | Code::UriNotAllowed) {
            return outcome;
        }
        restart.lock().await.run().await;
        self.call_once(call()).await
    }

    async fn call_once<T>(
        &self,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let running = self.begin().map_err(|silent| ClientError::Unreachable {
            endpoint: self.client.servers().to_string(),
            refused: false,
            why: refusal(silent),
        })?;
        let outcome = call.await;
        let silent = outcome.as_ref().is_err_and(ClientError::is_unreachable);
        running.end(if silent { Outcome::Silent } else { Outcome::Answered });
        outcome
    }

    /// Returns `tables`, read through this watch.
    #[must_use]
    pub fn tables(self: &Arc<Self>, tables: Arc<dyn TableSource>) -> Arc<dyn TableSource> {
        Arc::new(WatchedTables { watch: Arc::clone(self), tables })
    }

    /// Returns whether calls are refused now.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.breaker().is_open()
    }

    /// Returns how often the server was lost, and how many calls were refused.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.losses.load(Relaxed), self.refused.load(Relaxed))
    }

    /// Probes the server when calls wait for it or are refused. Never ends; drop the future to stop.
    pub async fn run(&self) {
        let probe = self.client.within(PROBE_WITHIN).fail_fast();
        loop {
            if self.breaker().is_idle() {
                self.begun.notified().await;
            }
            sleep(TICK).await;
            if !self.breaker().probe_due(Instant::now()) {
                continue;
            }
            let error = probe.info().await.err().filter(ClientError::is_unreachable);
            if let (Some(restart), Some(ClientError::Unreachable { refused: true, .. })) =
                (&self.restart, &error)
            {
                restart.lock().await.run().await;
            }
            let change = self.breaker().probed(error.is_none(), Instant::now());
            self.log(change, error.as_ref());
        }
    }

    fn begin(&self) -> Result<RunningCall<'_>, Duration> {
        let begun = self.breaker().begin(Instant::now());
        match begun {
            Ok(number) => {
                self.begun.notify_one();
                Ok(RunningCall { watch: self, number: Some(number) })
            }
            Err(silent) => {
                self.refused.fetch_add(1, Relaxed);
                Err(silent)
            }
        }
    }

    fn end(&self, number: u64, outcome: Outcome) {
        let change = self.breaker().end(number, outcome, Instant::now());
        self.log(change, None);
    }

    fn log(&self, change: Option<Change>, error: Option<&ClientError>) {
        let server = self.client.servers();
        let error = error.map(ToString::to_string).unwrap_or_default();
        let io_timeout = self.client.io_timeout();
        match change {
            None => {}
            Some(Change::Waiting { calls, longest }) => tracing::warn!(
                %server, calls, ?longest, error,
                "reads wait for the server, which does not answer; each fails after {io_timeout:?}"
            ),
            Some(Change::Refusing) => {
                self.losses.fetch_add(1, Relaxed);
                tracing::error!(
                    %server, error,
                    "the server did not answer a read for {io_timeout:?}: until it answers, reads of \
                     data that is not cached fail at once; {}",
                    match self.restart {
                        Some(_) => "run `fletch up`",
                        None => "check that fletch-server runs there",
                    }
                );
            }
            Some(Change::Back { silent }) => tracing::info!(%server, ?silent, "the server answers again"),
        }
    }

    fn breaker(&self) -> MutexGuard<'_, ServerBreaker> {
        // Each method leaves the breaker whole, so a panic elsewhere does no harm.
        self.breaker.lock()
    }
}

fn refusal(silent: Duration) -> String {
    format!("it has been silent for {} s, and reads fail at once until it answers", silent.as_secs())
}

/// A call in flight. Dropping it without an outcome means that the caller left.
struct RunningCall<'a> {
    watch: &'a ServerWatch,
    number: Option<u64>,
}

impl RunningCall<'_> {
    fn end(mut self, outcome: Outcome) {
        if let Some(number) = self.number.take() {
            self.watch.end(number, outcome);
        }
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number.take() {
            self.watch.end(number, Outcome::Left);
        }
    }
}

struct WatchedTables {
    watch: Arc<ServerWatch>,
    tables: Arc<dyn TableSource>,
}

#[async_trait]
impl TableSource for WatchedTables {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let refused = |silent| {
            let message = format!("{table}: {}: {}", self.watch.client.servers(), refusal(silent));
            SourceError { kind: Kind::Unavailable, message }
        };
        let running = self.watch.begin().map_err(refused)?;
        let outcome = self.tables.read(table, range).await;
        // An answer of the server can have this kind, too. The probe that follows tells them apart.
        let silent = outcome.as_ref().is_err_and(|e| e.kind == Kind::Unavailable);
        running.end(if silent { Outcome::Silent } else { Outcome::Answered });
        outcome
    }
}
