//! `fletch.Client`: the address of a server, the credentials for it, and the timeout of calls.

use crate::connections::{Connections, Settings};
use crate::errors::{Failure, Pickled};
use crate::process::wait;
use crate::version::Version;
use crate::version_handle::VersionHandle;
use fletch_api::ResolvedVersion;
use fletch_client::FirstAnswer;
use fletch_client::server_choice::{choose, own_dir, own_socket};
use fletch_core::DatasetName;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;

/// A client of a server. A process makes its connections when it first needs them.
#[pyclass(frozen, module = "fletch")]
#[derive(Debug)]
pub struct Client {
    connections: Arc<Connections>,
}

impl Client {
    /// Creates a client from checked settings. It sends no request.
    pub fn of(settings: Settings, first_answer: FirstAnswer) -> Result<Self, Failure> {
        Ok(Client { connections: Arc::new(Connections::new(settings, first_answer)?) })
    }

    fn settings(&self) -> &Settings {
        self.connections.settings()
    }

    /// Returns this process's connections, and makes them if necessary.
    pub fn live(&self, py: Python<'_>) -> PyResult<fletch_client::Client> {
        self.connections.live(py)
    }

    /// Returns a version of a dataset of the server. It reads nothing.
    fn version(slf: Bound<'_, Self>, resolved: ResolvedVersion) -> Version {
        let connections = Arc::clone(&slf.get().connections);
        Version::new(slf.into_any().unbind(), VersionHandle::new(connections, resolved))
    }
}

/// Parses JSON text into Python objects.
pub fn parsed<'py>(py: Python<'py>, text: serde_json::Result<String>) -> PyResult<Bound<'py, PyAny>> {
    let text = text.map_err(|e| Failure::Invalid(e.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// One address, or those of several servers of a cluster.
#[derive(Debug, FromPyObject)]
enum Addresses {
    One(String),
    Several(Vec<String>),
}

/// Returns the server that `fletch` would ask: that of `FLETCH_SERVER`, else the user's own, else the one of
/// this machine.
fn chosen_server() -> Result<String, Failure> {
    let named = std::env::var("FLETCH_SERVER").ok().filter(|named| !named.is_empty());
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let uid = rustix::process::geteuid().as_raw();
    let own = own_socket(&own_dir(runtime_dir.as_deref(), uid));
    // Without a thread: the process may fork afterwards.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.map_err(|e| Failure::Invalid(format!("no runtime: {e}")))?;
    let chosen = runtime.block_on(choose(named.as_deref(), &own, uid));
    match chosen.map_err(|e| Failure::Invalid(e.to_string()))? {
        Some(chosen) => Ok(chosen.servers().to_string()),
        None => Err(Failure::Invalid(
            "no server was given, and none runs on this machine: give Client(server), set FLETCH_SERVER, or \
             start one of yours with `fletch mount` or `fletch up`"
                .to_owned(),
        )),
    }
}

/// Fills what was not given from the variables that `fletch` reads, too.
fn from_environment(given: Settings) -> Settings {
    let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let has_token = given.token.is_some() || given.token_file.is_some();
    Settings {
        token: given.token.or_else(|| std::env::var("FLETCH_TOKEN").ok().filter(|_| !has_token)),
        token_file: given.token_file.or_else(|| path("FLETCH_TOKEN_FILE").filter(|_| !has_token)),
        ca_file: given.ca_file.or_else(|| path("FLETCH_CA_FILE")),
        cert_file: given.cert_file.or_else(|| path("FLETCH_CERT_FILE")),
        key_file: given.key_file.or_else(|| path("FLETCH_KEY_FILE")),
        ..given
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (
        server=None, *, token=None, token_file=None, job=None, timeout=30.0,
        ca_file=None, cert_file=None, key_file=None, verify="client"
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
    fn new(
        server: Option<Addresses>,
        token: Option<String>,
        token_file: Option<PathBuf>,
        job: Option<String>,
        timeout: f64,
        ca_file: Option<PathBuf>,
        cert_file: Option<PathBuf>,
        key_file: Option<PathBuf>,
        verify: &str,
    ) -> PyResult<Self> {
        let verify = verify.to_owned();
        let given = |server| Settings {
            server,
            token,
            token_file,
            job,
            timeout,
            ca_file,
            cert_file,
            key_file,
            verify,
        };
        let settings = match server {
            Some(Addresses::One(server)) => given(server),
            Some(Addresses::Several(all)) => given(all.join(",")),
            None => from_environment(given(chosen_server()?)),
        };
        Ok(Client::of(settings, FirstAnswer::default())?)
    }

    /// The server's address, as it was given. Several have commas between them.
    #[getter]
    fn server(&self) -> &str {
        &self.settings().server
    }

    /// The job to which the server counts the bytes; `None` is the job `anonymous`.
    #[getter]
    fn job(&self) -> Option<&str> {
        self.settings().job.as_deref()
    }

    /// The seconds within which every call ends, all its attempts together.
    #[getter]
    fn timeout(&self) -> f64 {
        self.settings().timeout
    }

    /// Who hashes what a server of this node puts into the memory that it shares: `client` or `server`.
    #[getter]
    fn verify(&self) -> &str {
        &self.settings().verify
    }

    /// The server's version, formats and limits, as `GET /v1/info` returns them.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.live(py)?;
        let info = wait(py, async move { client.info().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&info))
    }

    /// The datasets of this principal's domain, by name.
    fn datasets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.live(py)?;
        let all = wait(py, async move { client.datasets().await.map_err(Failure::from) })?;
        parsed(py, serde_json::to_string(&all))
    }

    /// The version that `NAME`, `NAME@TAG` or `NAME@ROOT` names now. The default tag is `latest`.
    fn resolve(slf: Bound<'_, Self>, name: &str) -> PyResult<Version> {
        let py = slf.py();
        let (dataset, tag) = split_tag(name)?;
        let client = slf.get().live(py)?;
        let tag = tag.to_owned();
        let found = wait(py, async move { client.resolve(&dataset, &tag).await.map_err(Failure::from) })?;
        Ok(Client::version(slf, found))
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
        let s = self.settings().clone();
        let revive = py.import("fletch._native")?.getattr("_client")?;
        let tls = (s.ca_file, s.cert_file, s.key_file);
        Ok((revive, (s.server, s.token, s.token_file, s.job, s.timeout, tls, s.verify)))
    }

    fn __repr__(&self) -> String {
        let Settings { server, job, .. } = self.settings();
        format!("Client({server:?}, job={})", job.as_ref().map_or("None".into(), |j| format!("{j:?}")))
    }
}

/// The settings of a client as they are pickled.
type PickledSettings = (String, Option<String>, Option<PathBuf>, Option<String>, f64, PickledTls, String);
/// The CA file, the certificate file and the key file.
type PickledTls = (Option<PathBuf>, Option<PathBuf>, Option<PathBuf>);

/// Begins to seal the draft of a dataset. Returns the sealing, as JSON text.
#[pyfunction(name = "_seal")]
pub fn seal(py: Python<'_>, client: Py<Client>, dataset: &str) -> PyResult<String> {
    let (client, dataset) = (client.get().live(py)?, dataset_name(dataset)?);
    let sealing = wait(py, async move { client.seal(&dataset).await.map_err(Failure::from) })?;
    Ok(serde_json::to_string(&sealing).map_err(|e| Failure::Invalid(e.to_string()))?)
}

/// Returns how far the sealing of a dataset is, as JSON text.
#[pyfunction(name = "_sealing")]
pub fn sealing(py: Python<'_>, client: Py<Client>, dataset: &str) -> PyResult<String> {
    let (client, dataset) = (client.get().live(py)?, dataset_name(dataset)?);
    let sealing = wait(py, async move { client.sealing(&dataset).await.map_err(Failure::from) })?;
    Ok(serde_json::to_string(&sealing).map_err(|e| Failure::Invalid(e.to_string()))?)
}

fn dataset_name(text: &str) -> Result<DatasetName, Failure> {
    DatasetName::new(text).map_err(|e| Failure::Invalid(e.to_string()))
}

/// Creates a client from its pickled settings.
#[pyfunction(name = "_client")]
pub fn unpickle_client(
    server: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
    job: Option<String>,
    timeout: f64,
    tls: PickledTls,
    verify: String,
) -> PyResult<Client> {
    let (ca_file, cert_file, key_file) = tls;
    let settings = Settings { server, token, token_file, job, timeout, ca_file, cert_file, key_file, verify };
    // A worker continues the work of the process that pickled the client: it waits for a restarting server.
    Ok(Client::of(settings, FirstAnswer::received())?)
}

/// Creates a version from its client and its pickled description.
#[pyfunction(name = "_version")]
pub fn unpickle_version(client: Bound<'_, Client>, what: &str) -> PyResult<Version> {
    let what = serde_json::from_str(what).map_err(|e| Failure::Invalid(format!("pickled version: {e}")))?;
    Ok(Client::version(client, what))
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
