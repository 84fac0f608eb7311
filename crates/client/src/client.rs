//! The client and its calls: one pooled connection set, deadlines, retries, and the reads of versions.

use crate::backoff::Backoff;
use crate::body::{BodyLength, Responder};
use crate::config::{ClientConfig, FirstAnswer};
use crate::tls::{HttpClient, TlsOptions};
use crate::token::Bearer;
use crate::{Batch, ClientError, Endpoint};
use bytes::Bytes;
use fletch_api::{
    API_MAJOR, Accounts, BatchItem, BatchRequest, Cluster, Info, ResolvedVersion, headers,
    node::{self, MountedVersion, NodeState},
    routes,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use fletch_core::{DatasetName, Hash, JobName, Root, Verified};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use reqwest::{RequestBuilder, Response};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    sync::{Mutex, Once, PoisonError},
    time::{Duration, SystemTime},
};
use tokio::time::{Instant, sleep, timeout_at};

/// The longest JSON answer that is read, in bytes.
pub(crate) const JSON_BYTES_MAX: u64 = 16 << 20;
/// A longer chunk is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 256 << 10;

/// The time within which a failed connection is tried once more, even by a client that fails fast.
///
/// The connection may be stale, or the server may be restarting.
const FAIL_FAST_RETRY_WITHIN: Duration = Duration::from_secs(1);

/// Counters of a client and its clones, since the client was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Requests sent, including retries.
    pub requests: u64,
    /// Retries.
    pub retries: u64,
    /// Bytes of answer bodies received whole, including tables.
    pub bytes: u64,
    /// Calls that ended in an error.
    pub errors: u64,
    /// By how many seconds the server's clock is ahead, by the `Date` of its last answer.
    pub clock_ahead_s: Option<i64>,
}

#[derive(Default)]
struct Counters {
    /// The `Date` of the last answer, and when the answer arrived.
    dated: Mutex<Option<(SystemTime, SystemTime)>>,
    requests: AtomicU64,
    retries: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// A client of one server. Clones share its connections and counters.
#[derive(Clone)]
pub struct Client {
    http: Arc<HttpClient>,
    endpoint: Arc<Endpoint>,
    base: Arc<str>,
    shown: Arc<str>,
    io_timeout: Duration,
    /// Whether a server that does not answer is asked at most once more.
    fail_fast: bool,
    /// The value of the job header.
    job: Option<HeaderValue>,
    /// The dataset through which this client reads.
    dataset: Option<DatasetName>,
    first_answer: FirstAnswer,
    counters: Arc<Counters>,
    bearer: Arc<Bearer>,
}

impl Client {
    /// Makes a client. Sends no request yet.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the token cannot be read or sent, or TLS cannot be set up.
    pub fn new(config: ClientConfig) -> Result<Self, ClientError> {
        let bearer = Bearer::new(config.token.as_ref())?;
        if config.token.is_some() && config.endpoint.is_exposed() {
            warn_of_plain_http(&config.endpoint);
        }
        let files = if config.endpoint.is_https() { config.tls.clone() } else { TlsOptions::default() };
        let socket = match &config.endpoint {
            Endpoint::Unix(path) => Some(path.clone()),
            Endpoint::Http(_) => None,
        };
        let (io_timeout, idle_max) = (config.io_timeout, config.connections_idle_max);
        let mut always = HeaderMap::new();
        always
            .insert(HeaderName::from_static(headers::COMPONENT), HeaderValue::from_static(config.component));
        let settings = move || {
            let http = reqwest::Client::builder()
                .default_headers(always.clone())
                .user_agent(concat!("fletch-client/", env!("CARGO_PKG_VERSION")))
                .http1_only()
                .tcp_nodelay(true)
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .pool_max_idle_per_host(idle_max)
                .pool_idle_timeout(Duration::from_secs(60))
                .connect_timeout((io_timeout / 2).min(Duration::from_secs(5)))
                // Half the deadline: a connection that went silent leaves time for another attempt.
                .read_timeout(io_timeout / 2);
            match &socket {
                Some(path) => http.unix_socket(path.clone()),
                None => http,
            }
        };
        Ok(Client {
            http: HttpClient::new(files, Box::new(settings))?,
            base: config.endpoint.base().into(),
            shown: config.endpoint.to_string().into(),
            endpoint: Arc::new(config.endpoint),
            io_timeout: config.io_timeout,
            fail_fast: false,
            job: config.job.as_ref().map(job_header).transpose()?,
            dataset: None,
            first_answer: config.first_answer,
            counters: Arc::default(),
            bearer: Arc::new(bearer),
        })
    }

    /// Returns the same client with another deadline for its calls.
    #[must_use]
    pub fn within(&self, io_timeout: Duration) -> Self {
        Client { io_timeout, ..self.clone() }
    }

    /// Returns the deadline of this client's calls.
    #[must_use]
    pub fn io_timeout(&self) -> Duration {
        self.io_timeout
    }

    /// Returns the same client without patience for a server that is down: for callers with another source.
    ///
    /// It asks a server that does not answer at most once more, and only if the first failure came within a
    /// second. It treats answers, such as 429, as every client does.
    #[must_use]
    pub fn fail_fast(&self) -> Self {
        Client { fail_fast: true, ..self.clone() }
    }

    /// Returns the same client for another job, to which its bytes are accounted.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the name does not fit in a header.
    pub fn for_job(&self, job: &JobName) -> Result<Self, ClientError> {
        Ok(Client { job: Some(job_header(job)?), ..self.clone() })
    }

    /// Returns the same client for reads through a dataset.
    ///
    /// The server asks that dataset's origin first, and accounts the bytes to it. Without a dataset the
    /// server chooses one that has the version.
    #[must_use]
    pub fn for_dataset(&self, dataset: Option<&DatasetName>) -> Self {
        Client { dataset: dataset.cloned(), ..self.clone() }
    }

    /// Returns the name of the principal, as [`TokenSource::name_of`], for the token in use.
    ///
    /// The name changes when the token is rotated.
    #[must_use]
    pub fn principal(&self, purpose: &str) -> Hash {
        self.bearer.name(purpose)
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let c = &self.counters;
        ClientStats {
            requests: c.requests.load(Relaxed),
            retries: c.retries.load(Relaxed),
            bytes: c.bytes.load(Relaxed),
            errors: c.errors.load(Relaxed),
            clock_ahead_s: c.dated.lock().unwrap_or_else(PoisonError::into_inner).map(clock_ahead_s),
        }
    }

    /// Returns what the server is and which formats it supports.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Version`] if the server and this build have no version in common.
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

    /// Returns the member view of the cluster.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn cluster(&self) -> Result<Cluster, ClientError> {
        self.get_json(routes::CLUSTER).await
    }

    /// Resolves a tag or a root of a dataset to a version and its layout.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn resolve(&self, name: &DatasetName, version: &str) -> Result<ResolvedVersion, ClientError> {
        self.get_json(&routes::dataset_version(name, version)).await
    }

    /// Returns the accounts of delivered bytes that the caller may see.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn accounts(&self) -> Result<Accounts, ClientError> {
        self.get_json(routes::ACCOUNTS).await
    }

    /// Checks that the caller has access to a version, and watches the access for `wait`.
    ///
    /// Returns after `wait` while access lasts. Returns an error at once if the caller has no access or loses
    /// it.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` without access, `unauthorized` if the server does not know the token.
    pub async fn check_access(&self, root: Root, wait: Duration) -> Result<(), ClientError> {
        let path = routes::access(root, u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::NO_CONTENT], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Returns a whole chunk of `len` bytes, verified against its hash.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Corrupt`] if the bytes have another hash.
    pub async fn chunk(&self, root: Root, hash: Hash, len: u32) -> Result<Verified, ClientError> {
        let bytes = self.chunk_unchecked(root, hash, len).await?;
        let check = move || Verified::check(hash, bytes);
        let checked = if len as usize <= INLINE_HASH_BYTES {
            check()
        } else {
            let lost = |_| ClientError::Config("the runtime stopped while a chunk was hashed".into());
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let endpoint = || self.shown.to_string();
        checked.map_err(|mismatch| ClientError::Corrupt { endpoint: endpoint(), mismatch })
    }

    /// Returns a whole chunk of `len` bytes, **not verified**.
    ///
    /// For a store that hashes the bytes itself. All other callers use [`Client::chunk`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        check_chunk_len(len)?;
        let path = routes::chunk(root, hash);
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a whole file of `len` bytes by its path in the version, **not verified**.
    ///
    /// For a store that hashes the file itself, and reads files that share a chunk with other files.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn file_unchecked(&self, root: Root, path: &str, len: u32) -> Result<Bytes, ClientError> {
        let path = routes::file(root, path);
        let request = || self.request(Method::GET, &path);
        self.call(request, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Requests many pieces of one version in one stream.
    ///
    /// An item longer than `item_bytes_max` bytes ends the stream with an error. The deadline covers the
    /// whole stream.
    ///
    /// # Errors
    /// [`ClientError`] if the stream does not begin.
    pub async fn batch(
        &self,
        root: Root,
        items: Vec<BatchItem>,
        item_bytes_max: u64,
    ) -> Result<Batch, ClientError> {
        let until = Instant::now() + self.io_timeout;
        let count = items.len();
        let body = to_json(&BatchRequest { items })?;
        let path = routes::batch(root);
        let request =
            || self.json_request(Method::POST, &path, body.clone()).header(header::ACCEPT, headers::FRAMES);
        let Answer::Open(response) = self.ask(&request, &[StatusCode::OK], None, until).await? else {
            return Err(self.server().protocol("the answer has no stream"));
        };
        Ok(Batch::new(self.shown.to_string(), response, count, item_bytes_max, until))
    }

    /// Returns the state of the node's store, and tells its owner a version that the caller reads.
    ///
    /// The client's endpoint must be the socket of the node's store.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn node_state(&self, version: Option<MountedVersion>) -> Result<NodeState, ClientError> {
        self.get_json(&node::state(version)).await
    }

    /// Returns a chunk from the node's store, **not verified**. The owner may fetch it from the server.
    ///
    /// After an error the caller asks the server itself.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` for every reason why the owner sends no bytes.
    pub async fn node_chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        self.node_bytes(&node::chunk(root, hash, len), len).await
    }

    /// Returns a file that shares a chunk with other files, as [`Client::node_chunk_unchecked`].
    ///
    /// # Errors
    /// As [`Client::node_chunk_unchecked`].
    pub async fn node_file_unchecked(
        &self,
        root: Root,
        hash: Hash,
        len: u32,
        path: &str,
    ) -> Result<Bytes, ClientError> {
        self.node_bytes(&node::file(root, hash, len, path), len).await
    }

    async fn node_bytes(&self, path: &str, len: u32) -> Result<Bytes, ClientError> {
        check_chunk_len(len)?;
        let request = || self.request(Method::GET, path);
        self.call(request, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a table or a range of it. A range must be answered with exactly its bytes.
    pub(crate) async fn table(
        &self,
        path: &str,
        range: Option<String>,
        length: BodyLength,
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
            (Some(_), BodyLength::Exactly(_)) => vec![StatusCode::PARTIAL_CONTENT],
            // A suffix longer than the file may be answered with the whole file.
            (Some(_), BodyLength::AtMost(_)) => vec![StatusCode::PARTIAL_CONTENT, StatusCode::OK],
        };
        self.call(request, &want, length).await
    }

    fn server(&self) -> Responder<'_> {
        Responder(&self.shown)
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.current().request(method, format!("{}{path}", self.base));
        let request = match &self.job {
            Some(job) => request.header(HeaderName::from_static(headers::JOB), job),
            None => request,
        };
        match &self.dataset {
            Some(dataset) => request.header(HeaderName::from_static(headers::DATASET), dataset.as_str()),
            None => request,
        }
    }

    pub(crate) fn json_request(&self, method: Method, path: &str, body: Vec<u8>) -> RequestBuilder {
        self.request(method, path).header(header::CONTENT_TYPE, "application/json").body(body)
    }

    pub(crate) async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let request = || self.request(Method::GET, path);
        let bytes = self.call(request, &[StatusCode::OK], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(bytes)
            .map_err(|e| self.server().protocol(format!("the JSON cannot be read: {e}")))
    }

    /// Sends `body` as JSON and parses the JSON of the answer.
    pub(crate) async fn send_json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        want: &[StatusCode],
    ) -> Result<T, ClientError> {
        let body = to_json(body)?;
        let request = || self.json_request(method.clone(), path, body.clone());
        let bytes = self.call(request, want, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }

    /// Posts `body` as JSON and returns the answer with its body still unread.
    pub(crate) async fn open_json(&self, path: &str, body: &impl Serialize) -> Result<Response, ClientError> {
        let until = Instant::now() + self.io_timeout;
        let body = to_json(body)?;
        let request = || self.json_request(Method::POST, path, body.clone());
        match self.ask(&request, &[StatusCode::OK], None, until).await? {
            Answer::Open(response) => Ok(response),
            Answer::Whole(_) => Err(self.server().protocol("the answer has no stream")),
        }
    }

    /// Sends a request and returns the whole body of the answer.
    pub(crate) async fn call(
        &self,
        request: impl Fn() -> RequestBuilder + Send + Sync,
        want: &[StatusCode],
        length: BodyLength,
    ) -> Result<Bytes, ClientError> {
        let until = Instant::now() + self.io_timeout;
        match self.ask(&request, want, Some(length), until).await? {
            Answer::Whole(bytes) => Ok(bytes),
            Answer::Open(_) => Err(self.server().protocol("the answer has no body")),
        }
    }

    /// Sends a request until it succeeds, fails for good, or would pass the deadline.
    async fn ask(
        &self,
        request: &(dyn Fn() -> RequestBuilder + Send + Sync),
        want: &[StatusCode],
        length: Option<BodyLength>,
        until: Instant,
    ) -> Result<Answer, ClientError> {
        let mut backoff = Backoff::new();
        let (mut last, mut renewed) = (None, false);
        let (begun, mut unanswered) = (Instant::now(), 0);
        self.http.refresh(false).await;
        let error = loop {
            let token = self.bearer.header();
            let asked = match &token {
                Some(token) => request().header(header::AUTHORIZATION, token),
                None => request(),
            };
            let error = match timeout_at(until, self.attempt(asked, want, length)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(e))
                    if e.is_refused() && self.endpoint.is_local() && !self.first_answer.is_received() =>
                {
                    break e;
                }
                Ok(Err(e)) if e.is_tls() && !self.first_answer.is_received() => break e,
                Ok(Err(e)) if e.is_unauthorized() && !renewed && self.renewed(token).await => {
                    renewed = true;
                    continue;
                }
                Ok(Err(e)) if e.retryable() => e,
                Ok(Err(e)) => break e,
                Err(_) => {
                    let late =
                        || self.server().unreachable(format!("no answer within {:?}", self.io_timeout));
                    break last.unwrap_or_else(late);
                }
            };
            unanswered += u32::from(error.is_unreachable());
            if self.fail_fast
                && unanswered > 0
                && (unanswered > 1 || begun.elapsed() > FAIL_FAST_RETRY_WITHIN)
            {
                break error;
            }
            let wait = backoff.wait(error.retry_after());
            if Instant::now() + wait >= until {
                break error;
            }
            tracing::debug!(%error, ?wait, "retrying a request");
            self.counters.retries.fetch_add(1, Relaxed);
            sleep(wait).await;
            self.http.refresh(error.is_tls()).await;
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
        length: Option<BodyLength>,
    ) -> Result<Answer, ClientError> {
        self.counters.requests.fetch_add(1, Relaxed);
        let response = request.send().await.map_err(|e| self.server().transport(&e))?;
        self.first_answer.record();
        self.counters.answered(response.headers());
        let response = self.server().accept(response, want).await?;
        let Some(length) = length else { return Ok(Answer::Open(response)) };
        let bytes = self.server().body(response, length).await?;
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(Answer::Whole(bytes))
    }
}

impl Counters {
    /// Records the `Date` of an answer.
    fn answered(&self, headers: &HeaderMap) {
        let date = headers.get(header::DATE).and_then(|v| v.to_str().ok());
        if let Some(date) = date.and_then(|text| httpdate::parse_http_date(text).ok()) {
            *self.dated.lock().unwrap_or_else(PoisonError::into_inner) = Some((date, SystemTime::now()));
        }
    }
}

/// Warns, once in a process, that a token crosses the network unencrypted.
fn warn_of_plain_http(endpoint: &Endpoint) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            server = %endpoint,
            "the token is sent unencrypted, and others in the network can read it; use https://, or a \
                network that you trust"
        );
    });
}

/// Returns by how many seconds `date` is after `now`.
fn clock_ahead_s((date, now): (SystemTime, SystemTime)) -> i64 {
    let seconds = |span: Duration| i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
    match date.duration_since(now) {
        Ok(ahead) => seconds(ahead),
        Err(behind) => -seconds(behind.duration()),
    }
}

pub(crate) fn to_json(value: &impl Serialize) -> Result<Vec<u8>, ClientError> {
    serde_json::to_vec(value).map_err(|e| ClientError::Config(e.to_string()))
}

fn check_chunk_len(len: u32) -> Result<(), ClientError> {
    if len == 0 || len > CHUNK_BYTES_MAX {
        return Err(ClientError::Config(format!("a chunk has 1 to {CHUNK_BYTES_MAX} bytes, not {len}")));
    }
    Ok(())
}

fn job_header(job: &JobName) -> Result<HeaderValue, ClientError> {
    HeaderValue::try_from(job.as_str()).map_err(|_| {
        ClientError::Config("the job name contains bytes that an HTTP header cannot carry".into())
    })
}

/// An answer with an expected status.
enum Answer {
    /// The whole body.
    Whole(Bytes),
    /// An answer whose body is not read yet.
    Open(reqwest::Response),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.shown).finish_non_exhaustive()
    }
}
