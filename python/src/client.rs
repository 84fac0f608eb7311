//! `fletch.Client`: whom to ask, as whom, and for how long.

use crate::errors::{Failure, Pickled};
use crate::process::{Slot, wait};
use crate::version::Version;
use fletch_client::{ClientConfig, Endpoint, TokenSource};
use fletch_core::{DatasetName, JobName};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::time::Duration;

/// Calls that run at once keep this many connections.
const CONNECTIONS_IDLE_MAX: usize = 8;
/// A timeout longer than a day is a mistake in the unit.
const TIMEOUT_MAX: f64 = 86_400.0;

/// What makes a client; all that travels to another process.
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

/// A server, asked over connections that this process makes when it first needs them.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    live: Slot<fletch_client::Client>,
}

impl Client {
    /// Checks the settings; asks nothing yet.
    pub fn of(settings: Settings) -> Result<Self, Failure> {
        // Whatever is wrong with them shows here, in the process that wrote them.
        settings.connect()?;
        Ok(Client { settings, live: Slot::new() })
    }

    /// What it was made of.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// This process's connections.
    pub fn live(&self, py: Python<'_>) -> PyResult<fletch_client::Client> {
        if let Some(client) = self.live.get(py) {
            return Ok(client);
        }
        let client = self.settings.connect()?;
        self.live.set(py, client.clone());
        Ok(client)
    }
}

/// JSON text as Python objects.
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

    /// Where the server is, as it was given.
    #[getter]
    fn server(&self) -> &str {
        &self.settings.server
    }

    /// The job that bytes are counted for; `None` is the job `anonymous`.
    #[getter]
    fn job(&self) -> Option<&str> {
        self.settings.job.as_deref()
    }

    /// Seconds within which every call ends, all its attempts together.
    #[getter]
    fn timeout(&self) -> f64 {
        self.settings.timeout
    }

    /// What the server is, speaks and allows, as `GET /v1/info` answers.
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

    /// What `NAME`, `NAME@TAG` or `NAME@ROOT` is now; `latest` without a tag.
    fn resolve(slf: Bound<'_, Self>, name: &str) -> PyResult<Version> {
        let py = slf.py();
        let (dataset, tag) = target(name)?;
        let client = slf.get().live(py)?;
        let found = wait(py, async { client.resolve(&dataset, tag).await.map_err(Failure::from) })?;
        Ok(Version::new(slf.unbind(), found))
    }

    /// What this process's connections counted since they were made: `requests` sent, `retries`
    /// among them, `bytes` of whole answers, `errors` of calls.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.live(py)?.stats();
        let out = PyDict::new(py);
        out.set_item("requests", s.requests)?;
        out.set_item("retries", s.retries)?;
        out.set_item("bytes", s.bytes)?;
        out.set_item("errors", s.errors)?;
        Ok(out)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Pickled<'py, Revival> {
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
type Revival = (String, Option<String>, Option<PathBuf>, Option<String>, f64);

/// A client from its pickled settings.
#[pyfunction(name = "_client")]
pub fn revive_client(
    server: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
    job: Option<String>,
    timeout: f64,
) -> PyResult<Client> {
    Ok(Client::of(Settings { server, token, token_file, job, timeout })?)
}

/// Dataset and tag (or root) of `NAME[@TAG]`.
fn target(name: &str) -> Result<(DatasetName, &str), Failure> {
    let slash = name.rfind('/').map_or(0, |i| i + 1);
    let (dataset, tag) = match name[slash..].rfind('@') {
        Some(at) => (&name[..slash + at], &name[slash + at + 1..]),
        None => (name, "latest"),
    };
    if tag.is_empty() {
        return Err(Failure::Invalid(format!("{name:?}: a tag or root must follow the @")));
    }
    let dataset = DatasetName::new(dataset).map_err(|e| Failure::Invalid(e.to_string()))?;
    Ok((dataset, tag))
}
