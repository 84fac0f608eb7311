//! The settings of a client, and the connections that this process has made with them.

use crate::errors::Failure;
use crate::process::Slot;
use fletch_client::{ClientConfig, FirstAnswer, Servers, TlsOptions, TokenSource, hits::Verify};
use fletch_core::JobName;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::time::Duration;

/// The number of idle connections that a client keeps.
const CONNECTIONS_IDLE_MAX: usize = 8;
/// The longest timeout, in seconds. A longer one is probably a mistake in the unit.
const TIMEOUT_MAX: f64 = 86_400.0;

/// The settings of a client. Pickling a client sends only these.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub server: String,
    pub token: Option<String>,
    pub token_file: Option<PathBuf>,
    pub job: Option<String>,
    pub timeout: f64,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// Who hashes what a server of this node puts into the memory that it shares: `client` or `server`.
    pub verify: String,
}

impl Settings {
    /// Returns who hashes what a server of this node puts into the memory that it shares.
    pub fn verify(&self) -> Result<Verify, Failure> {
        match self.verify.as_str() {
            "client" => Ok(Verify::Client),
            "server" => Ok(Verify::Server),
            other => {
                Err(Failure::Invalid(format!("verify is {other:?}; it must be \"client\" or \"server\"")))
            }
        }
    }

    fn connect(&self, first_answer: &FirstAnswer) -> Result<fletch_client::Client, Failure> {
        let servers: Servers = self.server.parse().map_err(|e| Failure::Invalid(format!("{e}")))?;
        let mut config = ClientConfig::of(servers, "loader");
        let job = self.job.as_deref().map(JobName::new).transpose();
        config.job = job.map_err(|e| Failure::Invalid(format!("job: {e}")))?;
        config.token = TokenSource::of(self.token.clone(), self.token_file.clone())?;
        config.tls = TlsOptions {
            ca_file: self.ca_file.clone(),
            cert_file: self.cert_file.clone(),
            key_file: self.key_file.clone(),
        };
        config.connections_idle_max = CONNECTIONS_IDLE_MAX;
        config.first_answer = first_answer.clone();
        if !(self.timeout > 0.0 && self.timeout <= TIMEOUT_MAX) {
            let text = format!("timeout is {} s; it must be above 0 and at most 86400", self.timeout);
            return Err(Failure::Invalid(text));
        }
        config.io_timeout = Duration::from_secs_f64(self.timeout);
        Ok(fletch_client::Client::new(config)?)
    }
}

/// The connections to a server. A process makes its own when it first needs them.
#[derive(Debug)]
pub struct Connections {
    settings: Settings,
    /// Whether the server answered this process, or the one that pickled the client. It outlives a runtime.
    first_answer: FirstAnswer,
    live: Slot<fletch_client::Client>,
}

impl Connections {
    /// Checks the settings. Sends no request.
    pub fn new(settings: Settings, first_answer: FirstAnswer) -> Result<Self, Failure> {
        // A faulty setting is an error here, in the process that wrote it, and not in one that unpickles it.
        settings.connect(&first_answer)?;
        settings.verify()?;
        Ok(Connections { settings, first_answer, live: Slot::new() })
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns this process's connections, and makes them if necessary.
    pub fn live(&self, py: Python<'_>) -> PyResult<fletch_client::Client> {
        if let Some(client) = self.live.get(py) {
            return Ok(client);
        }
        let client = self.settings.connect(&self.first_answer)?;
        self.live.set(py, client.clone());
        Ok(client)
    }
}
