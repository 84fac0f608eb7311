//! The settings of a client.

use crate::{Endpoint, Servers, TlsOptions, TokenSource};
use fletch_core::JobName;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

/// Whether a server has answered. Clones share it.
///
/// Until a server has answered, a refused connection to this machine ends a call at once: nothing runs
/// there. Later it means that the server restarts, so calls wait for it.
#[derive(Debug, Clone, Default)]
pub struct FirstAnswer(Arc<AtomicBool>);

impl FirstAnswer {
    /// Returns a value for a process that continues the work of another one, to which the server answered.
    #[must_use]
    pub fn received() -> Self {
        let first = FirstAnswer::default();
        first.record();
        first
    }

    pub(crate) fn record(&self) {
        self.0.store(true, Relaxed);
    }

    pub(crate) fn is_received(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// The settings of a [`Client`].
#[derive(Clone)]
pub struct ClientConfig {
    /// The servers, the preferred one first. The client learns of others of their cluster by itself.
    pub servers: Servers,
    /// The bearer token, if the server asks for one.
    pub token: Option<TokenSource>,
    /// The certificates for an `https://` server.
    pub tls: TlsOptions,
    /// The job that the bytes are accounted to.
    pub job: Option<JobName>,
    /// The component that sends the requests: `mount`, `loader`, `cli` or `peer`.
    pub component: &'static str,
    /// The longest time for a call, all its attempts together.
    pub io_timeout: Duration,
    /// The most idle connections that are kept open.
    pub connections_idle_max: usize,
    /// Whether the server has answered this process before.
    pub first_answer: FirstAnswer,
}

impl ClientConfig {
    /// Returns the defaults for one server: no token, no job, and a deadline of 30 s.
    #[must_use]
    pub fn new(endpoint: Endpoint, component: &'static str) -> Self {
        ClientConfig::of(endpoint.into(), component)
    }

    /// As [`ClientConfig::new`], for one server or several.
    #[must_use]
    pub fn of(servers: Servers, component: &'static str) -> Self {
        ClientConfig {
            servers,
            token: None,
            tls: TlsOptions::default(),
            job: None,
            component,
            io_timeout: Duration::from_secs(30),
            connections_idle_max: 32,
            first_answer: FirstAnswer::default(),
        }
    }
}

impl fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConfig")
            .field("servers", &self.servers)
            .field("token", &self.token)
            .field("tls", &self.tls)
            .field("job", &self.job)
            .field("component", &self.component)
            .field("io_timeout", &self.io_timeout)
            .finish_non_exhaustive()
    }
}
