//! The calls.

use crate::body::{From, Length};
use crate::retry::Backoff;
use crate::tables::HttpTables;
use crate::token::Bearer;
use crate::{Batch, ClientError, Endpoint, TokenSource};
use bytes::Bytes;
use fletch_api::{
    API_MAJOR, Accounts, BatchItem, BatchRequest, Cluster, Info, ResolvedVersion, headers, routes,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use fletch_core::{DatasetName, Hash, JobName, LayoutId, Root, Verified};
use fletch_tables::TableSource;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use reqwest::{RequestBuilder, Response};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};

/// No JSON answer is longer.
pub(crate) const JSON_BYTES_MAX: u64 = 16 << 20;
/// Above this many bytes a chunk is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 256 << 10;

/// A connection refused or reset within this time may be a restart or a stale connection: even an
/// impatient client asks once more.
const SILENCE_SHORT: Duration = Duration::from_secs(1);

/// Whom to ask, as whom, and for how long.
#[derive(Clone)]
pub struct ClientConfig {
    /// Where the server is.
    pub endpoint: Endpoint,
    /// The bearer token, if the server wants one.
    pub token: Option<TokenSource>,
    /// Which job the bytes are for.
    pub job: Option<JobName>,
    /// Who asks: `mount`, `loader`, `cli` or `peer`.
    pub component: &'static str,
    /// Every call ends within this time, all its attempts together.
    pub io_timeout: Duration,
    /// Idle connections kept.
    pub connections_idle_max: usize,
}

impl ClientConfig {
    /// Asks `endpoint` without token or job, within 30 s.
    #[must_use]
    pub fn new(endpoint: Endpoint, component: &'static str) -> Self {
        ClientConfig {
            endpoint,
            token: None,
            job: None,
            component,
            io_timeout: Duration::from_secs(30),
            connections_idle_max: 32,
        }
    }
}

impl fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConfig")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token)
            .field("job", &self.job)
            .field("component", &self.component)
            .field("io_timeout", &self.io_timeout)
            .finish_non_exhaustive()
    }
}

/// What a client counted; totals since it was made, shared by its clones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Requests sent, repeated ones included.
    pub requests: u64,
    /// Requests that were sent again.
    pub retries: u64,
    /// Bytes of bodies received, errors and tables included.
    pub bytes: u64,
    /// Calls that ended in an error.
    pub errors: u64,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    retries: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// A server, asked over pooled connections. Cloning shares them.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    endpoint: Arc<Endpoint>,
    base: Arc<str>,
    shown: Arc<str>,
    io_timeout: Duration,
    /// Whether silence is waited out until the deadline.
    patient: bool,
    /// Which job the bytes are for.
    job: Option<HeaderValue>,
    counters: Arc<Counters>,
    bearer: Arc<Bearer>,
}

impl Client {
    /// Makes a client; asks nothing yet.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the token cannot be sent, or TLS cannot be set up.
    pub fn new(config: ClientConfig) -> Result<Self, ClientError> {
        let mut always = HeaderMap::new();
        always
            .insert(HeaderName::from_static(headers::COMPONENT), HeaderValue::from_static(config.component));
        let mut http = reqwest::Client::builder()
            .default_headers(always)
            .user_agent(concat!("fletch-client/", env!("CARGO_PKG_VERSION")))
            .http1_only()
            .tcp_nodelay(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(config.connections_idle_max)
            .pool_idle_timeout(Duration::from_secs(60))
            .connect_timeout((config.io_timeout / 2).min(Duration::from_secs(5)))
            // A peer that vanished without a word is given up in time for another attempt.
            .read_timeout(config.io_timeout / 2);
        if let Endpoint::Unix(path) = &config.endpoint {
            http = http.unix_socket(path.clone());
        }
        Ok(Client {
            http: http.build().map_err(|e| ClientError::Config(e.to_string()))?,
            base: config.endpoint.base().into(),
            shown: config.endpoint.to_string().into(),
            endpoint: Arc::new(config.endpoint),
            io_timeout: config.io_timeout,
            patient: true,
            job: config.job.as_ref().map(job_header).transpose()?,
            counters: Arc::default(),
            bearer: Arc::new(Bearer::new(config.token.as_ref())?),
        })
    }

    /// The same client with another deadline for its calls.
    #[must_use]
    pub fn within(&self, io_timeout: Duration) -> Self {
        Client { io_timeout, ..self.clone() }
    }

    /// The deadline of its calls.
    #[must_use]
    pub fn io_timeout(&self) -> Duration {
        self.io_timeout
    }

    /// The same client for someone who can go elsewhere: a server that does not answer is asked
    /// once more at most, and only if its silence was short. Answers are waited for as ever.
    #[must_use]
    pub fn impatient(&self) -> Self {
        Client { patient: false, ..self.clone() }
    }

    /// The same client asking for another job, whose accounts its bytes go to.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the name cannot be sent.
    pub fn for_job(&self, job: &JobName) -> Result<Self, ClientError> {
        Ok(Client { job: Some(job_header(job)?), ..self.clone() })
    }

    /// A name for the principal that the token in use speaks for, as [`TokenSource::name_of`]: another one
    /// after a rotation.
    #[must_use]
    pub fn principal(&self, what: &str) -> Hash {
        self.bearer.name(what)
    }

    /// Whom it asks.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let c = &self.counters;
        ClientStats {
            requests: c.requests.load(Relaxed),
            retries: c.retries.load(Relaxed),
            bytes: c.bytes.load(Relaxed),
            errors: c.errors.load(Relaxed),
        }
    }

    /// What the server is; refuses one that speaks no version of ours.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn info(&self) -> Result<Info, ClientError> {
        let info: Info = self.get_json(routes::INFO).await?;
        let check = |what, theirs: &Vec<u32>, ours| {
            if theirs.contains(&ours) {
                return Ok(());
            }
            let endpoint = self.shown.to_string();
            Err(ClientError::Version { endpoint, what, theirs: theirs.clone(), ours })
        };
        check("API version", &info.formats.api, API_MAJOR)?;
        check("table format", &info.formats.versions, FORMAT_MAJOR)?;
        Ok(info)
    }

    /// The member view.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn cluster(&self) -> Result<Cluster, ClientError> {
        self.get_json(routes::CLUSTER).await
    }

    /// What a tag or root of a dataset is now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn resolve(&self, name: &DatasetName, version: &str) -> Result<ResolvedVersion, ClientError> {
        self.get_json(&routes::dataset_version(name, version)).await
    }

    /// Bytes delivered to the asking principal's domain.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn accounts(&self) -> Result<Accounts, ClientError> {
        self.get_json(routes::ACCOUNTS).await
    }

    /// Whether a version is granted: returns after `wait` at the latest if it is, and at once when
    /// it is not or the grant ends.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` when it is not granted, 401 when the token is not known.
    pub async fn has_access(&self, root: Root, wait: Duration) -> Result<(), ClientError> {
        let path = routes::access(root, u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::NO_CONTENT], Length::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// A whole chunk of `len` bytes, checked.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Corrupt`] when the bytes are others.
    pub async fn chunk(&self, root: Root, hash: Hash, len: u32) -> Result<Verified, ClientError> {
        let bytes = self.chunk_unchecked(root, hash, len).await?;
        let check = move || Verified::check(hash, bytes);
        let checked = if len as usize <= INLINE_HASH_BYTES {
            check()
        } else {
            let lost = |_| ClientError::Config("the runtime is going down".into());
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let endpoint = || self.shown.to_string();
        checked.map_err(|mismatch| ClientError::Corrupt { endpoint: endpoint(), mismatch })
    }

    /// A whole chunk of `len` bytes that **nobody checked**: for a store that hashes whatever it
    /// is brought. Everyone else wants [`Client::chunk`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        if len == 0 || len > CHUNK_BYTES_MAX {
            return Err(ClientError::Config(format!("a chunk of {len} bytes cannot be")));
        }
        let path = routes::chunk(root, hash);
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::OK], Length::Exactly(u64::from(len))).await
    }

    /// A whole file of `len` bytes, by its path in the version, that **nobody checked**: for a
    /// store that hashes it. So are files read that lie in a chunk with others.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn file_unchecked(&self, root: Root, path: &str, len: u32) -> Result<Bytes, ClientError> {
        let path = routes::file(root, path);
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::OK], Length::Exactly(u64::from(len))).await
    }

    /// Many pieces of one version in one stream. An item longer than `item_bytes_max` ends the
    /// stream with an error. The deadline runs until the stream's last piece.
    ///
    /// # Errors
    /// [`ClientError`] when the stream does not begin.
    pub async fn batch(
        &self,
        root: Root,
        items: Vec<BatchItem>,
        item_bytes_max: u64,
    ) -> Result<Batch, ClientError> {
        let until = Instant::now() + self.io_timeout;
        let count = items.len();
        let body =
            serde_json::to_vec(&BatchRequest { items }).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = routes::batch(root);
        let request =
            || self.json_request(Method::POST, &path, body.clone()).header(header::ACCEPT, headers::FRAMES);
        let Answer::Open(response) = self.ask(&request, &[StatusCode::OK], None, until).await? else {
            return Err(self.from().protocol("no stream"));
        };
        Ok(Batch::new(self.shown.to_string(), response, count, item_bytes_max, until))
    }

    /// The tables of one version in one layout, read over this client.
    #[must_use]
    pub fn tables(&self, root: Root, layout: LayoutId) -> Arc<dyn TableSource> {
        Arc::new(HttpTables { client: self.clone(), root, layout })
    }

    /// GET of a table; a range must be answered with exactly its bytes.
    pub(crate) async fn table(
        &self,
        path: &str,
        range: Option<String>,
        length: Length,
    ) -> Result<Bytes, ClientError> {
        let request = || {
            let r = self.request(Method::GET, path);
            match &range {
                Some(v) => r.header(header::RANGE, v),
                None => r,
            }
        };
        let want = match (&range, length) {
            (None, _) => vec![StatusCode::OK],
            (Some(_), Length::Exactly(_)) => vec![StatusCode::PARTIAL_CONTENT],
            // A suffix longer than the file may be answered with the whole file.
            (Some(_), Length::AtMost(_)) => vec![StatusCode::PARTIAL_CONTENT, StatusCode::OK],
        };
        self.call(request, &want, length).await
    }

    fn from(&self) -> From<'_> {
        From(&self.shown)
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.job {
            Some(job) => request.header(HeaderName::from_static(headers::JOB), job),
            None => request,
        }
    }

    pub(crate) fn json_request(&self, method: Method, path: &str, body: Vec<u8>) -> RequestBuilder {
        self.request(method, path).header(header::CONTENT_TYPE, "application/json").body(body)
    }

    pub(crate) async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let request = || self.request(Method::GET, path);
        let bytes = self.call(request, &[StatusCode::OK], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(bytes).map_err(|e| self.from().protocol(format!("unreadable JSON: {e}")))
    }

    /// An answer whose body is still to be read.
    pub(crate) async fn open_json(&self, path: &str, what: &impl Serialize) -> Result<Response, ClientError> {
        let until = Instant::now() + self.io_timeout;
        let body = serde_json::to_vec(what).map_err(|e| ClientError::Config(e.to_string()))?;
        let request = || self.json_request(Method::POST, path, body.clone());
        match self.ask(&request, &[StatusCode::OK], None, until).await? {
            Answer::Open(response) => Ok(response),
            Answer::Whole(_) => Err(self.from().protocol("no stream")),
        }
    }

    /// The whole body of an answer.
    pub(crate) async fn call(
        &self,
        request: impl Fn() -> RequestBuilder + Send + Sync,
        want: &[StatusCode],
        length: Length,
    ) -> Result<Bytes, ClientError> {
        let until = Instant::now() + self.io_timeout;
        match self.ask(&request, want, Some(length), until).await? {
            Answer::Whole(bytes) => Ok(bytes),
            Answer::Open(_) => Err(self.from().protocol("no body")),
        }
    }

    /// Tries until it works, cannot work, or the deadline passed.
    async fn ask(
        &self,
        request: &(dyn Fn() -> RequestBuilder + Send + Sync),
        want: &[StatusCode],
        length: Option<Length>,
        until: Instant,
    ) -> Result<Answer, ClientError> {
        let mut backoff = Backoff::new();
        let (mut last, mut renewed) = (None, false);
        let (begun, mut silences) = (Instant::now(), 0);
        let error = loop {
            let token = self.bearer.header();
            let asked = match &token {
                Some(token) => request().header(header::AUTHORIZATION, token),
                None => request(),
            };
            let error = match timeout_at(until, self.attempt(asked, want, length)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(e)) if e.is_unauthorized() && !renewed && self.renewed(token).await => {
                    renewed = true;
                    continue;
                }
                Ok(Err(e)) if e.retryable() => e,
                Ok(Err(e)) => break e,
                Err(_) => {
                    let late = || self.from().gone(format!("no answer within {:?}", self.io_timeout));
                    break last.unwrap_or_else(late);
                }
            };
            silences += u32::from(error.is_unreachable());
            if !self.patient && silences > 0 && (silences > 1 || begun.elapsed() > SILENCE_SHORT) {
                break error;
            }
            let wait = backoff.wait(error.retry_after());
            if Instant::now() + wait >= until {
                break error;
            }
            tracing::debug!(%error, ?wait, "asking again");
            self.counters.retries.fetch_add(1, Relaxed);
            sleep(wait).await;
            last = Some(error);
        };
        self.counters.errors.fetch_add(1, Relaxed);
        Err(error)
    }

    async fn renewed(&self, refused: Option<HeaderValue>) -> bool {
        let bearer = Arc::clone(&self.bearer);
        tokio::task::spawn_blocking(move || bearer.renewed(refused.as_ref())).await.unwrap_or(false)
    }

    async fn attempt(
        &self,
        request: RequestBuilder,
        want: &[StatusCode],
        length: Option<Length>,
    ) -> Result<Answer, ClientError> {
        self.counters.requests.fetch_add(1, Relaxed);
        let response = request.send().await.map_err(|e| self.from().unreachable(&e))?;
        let response = self.from().accept(response, want).await?;
        let Some(length) = length else { return Ok(Answer::Open(response)) };
        let bytes = self.from().body(response, length).await?;
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(Answer::Whole(bytes))
    }
}

fn job_header(job: &JobName) -> Result<HeaderValue, ClientError> {
    HeaderValue::try_from(job.as_str())
        .map_err(|_| ClientError::Config("the job cannot be sent in a header".into()))
}

/// An answer with one of the wanted statuses.
enum Answer {
    /// Its body was read.
    Whole(Bytes),
    /// Its body is still to be read.
    Open(reqwest::Response),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.shown).finish_non_exhaustive()
    }
}
