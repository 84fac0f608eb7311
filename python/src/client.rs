//! `fletch.Client`: the address of a server, the credentials for it, and the timeout of calls.

use crate::errors::{Failure, Pickled};
use crate::process::{Slot, wait};
use crate::version::Version;
use fletch_client::{ClientConfig, Endpoint, TokenSource};
use fletch_core::{DatasetName, JobName};
use pyo3::prelude::*;
use pyo3::types::PyDict;
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
}

impl Settings {
    fn connect(&self) -> Result<fletch_client::Client, Failure> {
        let endpoint: Endpoint = self.server.parse().map_err(|e| Failure::Invalid(format!("{e}")))?;
        let mut config = ClientConfig::new(endpoint, "loader");
        let job = self.job.as_deref().map(JobName::new).transpose();
        config.job = job.map_err(|e| Failure::Invalid(format!("job: {e}")))?;
        config.token = TokenSource::of(self.token.clone(), self.token_file.clone())?;
        config.connections_idle_max = CONNECTIONS_IDLE_MAX;
        if !(self.timeout > 0.0 && self.timeout <= TIMEOUT_MAX) {
            let text = format!("timeout is {} s; it must be above 0 and at most 86400", self.timeout);
            return Err(Failure::Invalid(text));
        }
        config.io_timeout = Duration::from_secs_f64(self.timeout);
        Ok(fletch_client::Client::new(config)?)
    }
}

/// A client of a server. A process makes its connections when it first needs them.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    live: Slot<fletch_client::Client>,
}

impl Client {
    /// Creates a client from checked settings. It sends no request.
    pub fn of(settings: Settings) -> Result<Self, Failure> {
        // A faulty setting is an error here, in the process that wrote it, and not in one that unpickles it.
        settings.connect()?;
        Ok(Client { settings, live: Slot::new() })
    }

    /// Returns the client's settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns this process's connections, and makes them if necessary.
    pub fn live(&self, py: Python<'_>) -> PyResult<fletch_client::Client> {
        if let Some(client) = self.live.get(py) {
            return Ok(client);
        }
        let client = self.settings.connect()?;
        self.live.set(py, client.clone());
        Ok(client)
    }
}

/// Parses JSON text into Python objects.
pub fn parsed<'py>(py: Python<'py>, text: serde_json::Result<String>) -> PyResult<Bound<'py, PyAny>> {
    let text = text.map_err(|e| Failure::Invalid(e.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (server, *, token=None, token_file=None, job=None, timeout=30.0))]
    fn new(
        server: String,
        token: Option<String>,
        token_file: Option<PathBuf>,
        job: Option<String>,
        timeout: f64,
    ) -> PyResult<Self> {
        Ok(Client::of(Settings { server, token, token_file, job, timeout })?)
    }

    /// The server's address, as it was given.
    #[getter]
    fn server(&self) -> &str {
        &self.settings.server
    }

    /// The job to which the server counts the bytes; `None` is the job `anonymous`.
    #[getter]
    fn job(&self) -> Option<&str> {
        self.settings.job.as_deref()
    }

    /// The seconds within which every call ends, all its attempts together.
    #[getter]
    fn timeout(&self) -> f64 {
        self.settings.timeout
    }

    /// The server's version, formats and limits, as `GET /v1/info` returns them.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.live(py)?;
        let info = wait(py, async { client.info().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&info))
    }

    /// The datasets of this principal's domain, by name.
    fn datasets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.live(py)?;
        let all = wait(py, async { client.datasets().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&all))
    }

    /// The version that `NAME`, `NAME@TAG` or `NAME@ROOT` names now. The default tag is `latest`.
    fn resolve(slf: Bound<'_, Self>, name: &str) -> PyResult<Version> {
        let py = slf.py();
        let (dataset, tag) = split_tag(name)?;
        let client = slf.get().live(py)?;
        let found = wait(py, async { client.resolve(&dataset, tag).await.map_err(Failure::from) })?;
        Ok(Version::new(slf.unbind(), found))
    }

    /// Counters of this process's connections since they were made.
    ///
    /// `requests` sent, `retries` among them, `bytes` of complete responses, and `errors` of calls.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.live(py)?.stats();
        let out = PyDict::new(py);
        out.set_item("requests", s.requests)?;
        out.set_item("retries", s.retries)?;
        out.set_item("bytes", s.bytes)?;
        out.set_item("errors", s.errors)?;
        Ok(out)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, PickledSettings> {
        let s = self.settings.clone();
        let revive = py.import("fletch._native")?.getattr("_client")?;
        Ok((revive, (s.server, s.token, s.token_file, s.job, s.timeout)))
    }

    fn __repr__(&self) -> String {
        let Settings { server, job, .. } = &self.settings;
        format!("Client({server:?}, job={})", job.as_ref().map_or("None".into(), |j| format!("{j:?}")))
    }
}

/// The settings of a client as they are pickled.
type PickledSettings = (String, Option<String>, Option<PathBuf>, Option<String>, f64);

/// Creates a client from its pickled settings.
#[pyfunction(name = "_client")]
pub fn unpickle_client(
    server: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
    job: Option<String>,
    timeout: f64,
) -> PyResult<Client> {
    Ok(Client::of(Settings { server, token, token_file, job, timeout })?)
}

/// Splits `NAME[@TAG]` into the dataset and its tag or root.
fn split_tag(name: &str) -> Result<(DatasetName, &str), Failure> {
    let slash = name.rfind('/').map_or(0, |i| i + 1);
    let (dataset, tag) = match name[slash..].rfind('@') {
        Some(at) => (&name[..slash + at], &name[slash + at + 1..]),
        None => (name, "latest"),
    };
    if tag.is_empty() {
        return Err(Failure::Invalid(format!(
            "{name:?}: write a tag or a root after the @, or leave the @ out"
        )));
    }
    let dataset = DatasetName::new(dataset).map_err(|e| Failure::Invalid(e.to_string()))?;
    Ok((dataset, tag))
}
