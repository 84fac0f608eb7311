//! The client and its calls: deadlines, retries, the choice of servers, and the reads of versions.

use crate::backoff::Backoff;
use crate::body::{BodyLength, Responder};
use crate::call::Call;
use crate::config::{ClientConfig, FirstAnswer};
use crate::hits::{ANSWER_TIMEOUT, HitServer, HitStats, IdleConnections};
use crate::route::{Route, Subject};
use crate::server::{JobServer, Server};
use crate::token::Bearer;
use crate::{Batch, ClientError, Endpoint, PlacedItem, Servers};
use bytes::Bytes;
use fletch_api::{
    API_MAJOR, Accounts, Cluster, Code, Info, ResolvedVersion, headers,
    hits::{HitRequest, Wanted},
    node::{self, MountedVersion, NodeState},
    routes,
};
use fletch_core::manifest::{CHUNK_BYTES_MAX, FORMAT_MAJOR};
use fletch_core::{DatasetName, Hash, JobName, Kind, Root, Verified};
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

/// When a server that did not answer is probed, and the longest time for the probe.
const PROBE_AFTER: Duration = Duration::from_secs(2);
const PROBE_WITHIN: Duration = Duration::from_secs(1);
/// The longest time for which a call waits for the view of the cluster.
const VIEW_WITHIN: Duration = Duration::from_millis(500);

/// How often servers may send a call on to each other.
const REDIRECTS_MAX: u32 = 3;

/// The time within which a failed connection is tried once more, even by a client that fails fast.
///
/// The connection may be stale, or the server may be restarting.
const FAIL_FAST_RETRY_WITHIN: Duration = Duration::from_secs(1);

/// Counters of a client and its clones, since the client was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Requests sent, including retries and the requests of hit connections.
    pub requests: u64,
    /// Of these requests, those of hit connections.
    pub hits: HitStats,
    /// Retries.
    pub retries: u64,
    /// Calls that another server answered than the one that was asked first.
    pub failovers: u64,
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
    failovers: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// A client of one server, or of the servers of a cluster. Clones share its connections and counters.
#[derive(Clone)]
pub struct Client {
    route: Arc<Route>,
    /// The server that gets every request; `None`: the route decides.
    pinned: Option<Arc<Server>>,
    /// Where the job of a handle lives, in a cluster.
    job_server: Option<Arc<JobServer>>,
    /// How many members of a chunk's ranking are passed by.
    skip: usize,
    io_timeout: Duration,
    /// Whether a server that does not answer is asked at most once more.
    fail_fast: bool,
    /// The job, and the value of its header.
    job: Option<(JobName, HeaderValue)>,
    /// The dataset through which this client reads.
    dataset: Option<DatasetName>,
    first_answer: FirstAnswer,
    counters: Arc<Counters>,
    bearer: Arc<Bearer>,
    /// The server, if hit connections can reach it.
    hits: Option<HitServer>,
    pub(crate) idle_hits: IdleConnections,
}

impl Client {
    /// Makes a client. Sends no request yet.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the token cannot be read or sent, or TLS cannot be set up.
    pub fn new(config: ClientConfig) -> Result<Self, ClientError> {
        let bearer = Arc::new(Bearer::new(config.token.as_ref())?);
        let hits = match config.servers.first() {
            Endpoint::Unix(socket) => {
                let bearer = Arc::clone(&bearer);
                Some(HitServer::new(socket, config.component, bearer, ANSWER_TIMEOUT))
            }
            Endpoint::Http(_) => None,
        };
        let exposed = config.servers.iter().find(|at| at.is_exposed());
        if let Some(exposed) = exposed.filter(|_| config.token.is_some()) {
            warn_of_plain_http(exposed);
        }
        Ok(Client {
            route: Arc::new(Route::new(&config)?),
            pinned: None,
            job_server: None,
            skip: 0,
            io_timeout: config.io_timeout,
            fail_fast: false,
            job: config.job.as_ref().map(job_header).transpose()?,
            dataset: None,
            first_answer: config.first_answer,
            counters: Arc::default(),
            bearer,
            hits,
            idle_hits: IdleConnections::new(),
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

    /// Returns the servers that the user named.
    #[must_use]
    pub fn servers(&self) -> &Servers {
        self.route.servers()
    }

    /// Returns the id and the URL of each server of the cluster that this client has learned of.
    ///
    /// Empty until the first answer of a cluster's server, and for a server that is alone.
    #[must_use]
    pub fn members(&self) -> Vec<(String, String)> {
        self.route.members()
    }

    /// Returns the members of the view, each with the connections to it.
    pub(crate) fn known_members(&self) -> Vec<(String, Arc<Server>)> {
        self.route.known_members()
    }

    /// Returns the same client, of which every request goes to the server at `address`.
    ///
    /// Changes nothing if `address` is none that this client may ask.
    #[must_use]
    pub fn at(&self, address: &str) -> Self {
        Client { pinned: self.route.at(address).or_else(|| self.pinned.clone()), ..self.clone() }
    }

    /// Returns the same client, of which every request goes to one server.
    pub(crate) fn pinned(&self, server: Arc<Server>) -> Self {
        Client { pinned: Some(server), ..self.clone() }
    }

    /// Returns the same client for calls about one job. In a cluster they go to the server that has the job.
    pub(crate) fn for_calls_of_job(&self) -> Self {
        Client { job_server: Some(Arc::new(JobServer::new(self.pinned.clone()))), ..self.clone() }
    }

    /// Returns the same client, of which the route chooses the servers.
    pub(crate) fn routed(&self) -> Self {
        Client { pinned: None, job_server: None, ..self.clone() }
    }

    /// Returns whether this client knows several servers of one cluster.
    pub(crate) fn has_members(&self) -> bool {
        self.route.has_members()
    }

    /// Returns the address of the server that gets every request, or the one that is asked first.
    pub(crate) fn preferred(&self) -> String {
        let of_job = self.job_server.as_ref().and_then(|job| job.get());
        let server = of_job.as_ref().or(self.pinned.as_ref()).or(self.route.first());
        server.map_or_else(|| self.route.servers().to_string(), |server| server.shown.to_string())
    }

    /// Returns the same client, which asks another server of a cluster for a chunk whose bytes were wrong.
    ///
    /// `attempt` is the number of answers with wrong bytes so far.
    #[must_use]
    pub fn after_wrong_bytes(&self, attempt: u32) -> Self {
        Client { skip: attempt as usize, ..self.clone() }
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        let (c, hits) = (&self.counters, self.hits.as_ref().map(HitServer::stats).unwrap_or_default());
        ClientStats {
            requests: c.requests.load(Relaxed) + hits.asks,
            hits,
            retries: c.retries.load(Relaxed),
            failovers: c.failovers.load(Relaxed),
            bytes: c.bytes.load(Relaxed) + hits.bytes,
            errors: c.errors.load(Relaxed),
            clock_ahead_s: c.dated.lock().unwrap_or_else(PoisonError::into_inner).map(clock_ahead_s),
        }
    }

    /// Returns what the server is and which formats it supports.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Version`] if the server and this build have no version in common.
    pub async fn info(&self) -> Result<Info, ClientError> {
        self.info_at().await.map(|(_, info)| info)
    }

    /// As [`Client::info`], with the address of the server that answered, for [`Client::at`].
    ///
    /// # Errors
    /// As [`Client::info`].
    pub async fn info_at(&self) -> Result<(String, Info), ClientError> {
        let (server, bytes) = self
            .call_at(&Call::get(routes::INFO), &[StatusCode::OK], BodyLength::AtMost(JSON_BYTES_MAX))
            .await?;
        let info: Info = parse(&server, &bytes)?;
        let check = |what, theirs: &Vec<u32>, ours| {
            if theirs.contains(&ours) {
                return Ok(());
            }
            let endpoint = server.shown.to_string();
            Err(ClientError::Version { endpoint, what, theirs: theirs.clone(), ours })
        };
        check("API version", &info.formats.api, API_MAJOR)?;
        check("table format", &info.formats.versions, FORMAT_MAJOR)?;
        Ok((server.shown.to_string(), info))
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
        self.call(&Call::get(path), &[StatusCode::NO_CONTENT], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Returns a whole chunk of `len` bytes, verified against its hash.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Corrupt`] if the bytes have another hash.
    pub async fn chunk(&self, root: Root, hash: Hash, len: u32) -> Result<Verified, ClientError> {
        let (server, bytes) = self.chunk_at(root, hash, len).await?;
        let check = move || Verified::check(hash, bytes);
        let checked = if len as usize <= INLINE_HASH_BYTES {
            check()
        } else {
            let lost = |_| ClientError::Config("the runtime stopped while a chunk was hashed".into());
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let endpoint = || server.shown.to_string();
        checked.map_err(|mismatch| ClientError::Corrupt { endpoint: endpoint(), mismatch })
    }

    /// Returns a whole chunk of `len` bytes, **not verified**.
    ///
    /// For a store that hashes the bytes itself. All other callers use [`Client::chunk`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chunk_unchecked(&self, root: Root, hash: Hash, len: u32) -> Result<Bytes, ClientError> {
        Ok(self.chunk_at(root, hash, len).await?.1)
    }

    async fn chunk_at(&self, root: Root, hash: Hash, len: u32) -> Result<(Arc<Server>, Bytes), ClientError> {
        check_chunk_len(len)?;
        let call = Call::get(routes::chunk(root, hash)).about(Some(hash), self.skip);
        self.call_at(&call, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a whole file of `len` bytes by its path in the version, **not verified**.
    ///
    /// For a store that hashes the file itself, and reads files that share a chunk with other files. `chunk`
    /// is that chunk: the server that owns it is asked.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn file_unchecked(
        &self,
        root: Root,
        path: &str,
        len: u32,
        chunk: Option<Hash>,
    ) -> Result<Bytes, ClientError> {
        let call = Call::get(routes::file(root, path)).about(chunk, self.skip);
        self.call(&call, &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns the server for hit connections; `None` unless it is reached by a unix socket.
    ///
    /// Such a server stands alone, and so it is the first that this client asks for any chunk.
    #[must_use]
    pub fn hits(&self) -> Option<&HitServer> {
        self.hits.as_ref()
    }

    /// Returns the request of a hit connection for `size` bytes, which hash to `hash`.
    #[must_use]
    pub fn hit_request<'a>(&self, root: Root, wanted: Wanted<'a>, hash: Hash, size: u32) -> HitRequest<'a> {
        let job = self.job.as_ref().map(|(name, _)| name.clone());
        HitRequest { root, wanted, hash, size, place: None, job, dataset: self.dataset.clone() }
    }

    /// Requests many pieces of one version, each from the server that owns its chunk.
    ///
    /// The pieces come in the order of `items`. An item longer than `item_bytes_max` bytes ends the batch
    /// with an error. The deadline covers the whole batch.
    ///
    /// # Errors
    /// [`ClientError`] if a stream does not begin.
    pub async fn batch(
        &self,
        root: Root,
        items: impl IntoIterator<Item = impl Into<PlacedItem>>,
        item_bytes_max: u64,
    ) -> Result<Batch, ClientError> {
        let items = items.into_iter().map(Into::into).collect();
        Batch::open(self.clone(), root, items, item_bytes_max, Instant::now() + self.io_timeout).await
    }

    /// Returns the server that is asked first for a chunk.
    pub(crate) fn first_for(&self, chunk: Option<Hash>) -> Option<Arc<Server>> {
        if let Some(pinned) = &self.pinned {
            return Some(Arc::clone(pinned));
        }
        let subject = chunk.map_or(Subject::Any, |hash| Subject::Chunk { hash, skip: self.skip });
        self.route.candidates(subject, Instant::now()).into_iter().next()
    }

    /// Returns how many members of a chunk's ranking are passed by.
    pub(crate) fn skip(&self) -> usize {
        self.skip
    }

    /// Returns whether another server can take the place of this one.
    pub(crate) fn has_another(&self, server: &Arc<Server>) -> bool {
        let all = self.route.candidates(Subject::Any, Instant::now());
        self.pinned.is_none() && all.iter().any(|other| !Arc::ptr_eq(other, server))
    }

    /// Notes that a server broke off an answer.
    pub(crate) fn broke_off(&self, server: &Server) {
        self.route.failed(server, false, Instant::now());
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
        self.call(&Call::get(path), &[StatusCode::OK], BodyLength::Exactly(u64::from(len))).await
    }

    /// Returns a table or a range of it. A range must be answered with exactly its bytes.
    pub(crate) async fn table(
        &self,
        path: &str,
        range: Option<String>,
        length: BodyLength,
    ) -> Result<Bytes, ClientError> {
        let mut call = Call::get(path);
        if let Some(range) = &range {
            let value = HeaderValue::try_from(range).map_err(|e| ClientError::Config(e.to_string()))?;
            call = call.header(header::RANGE, value);
        }
        let want = match (&range, length) {
            (None, _) => vec![StatusCode::OK],
            (Some(_), BodyLength::Exactly(_)) => vec![StatusCode::PARTIAL_CONTENT],
            // A suffix longer than the file may be answered with the whole file.
            (Some(_), BodyLength::AtMost(_)) => vec![StatusCode::PARTIAL_CONTENT, StatusCode::OK],
        };
        self.call(&call, &want, length).await
    }

    fn request(&self, call: &Call, server: &Server, view: Option<u64>) -> RequestBuilder {
        let url = format!("{}{}", server.base, call.path);
        let mut request = server.http.current().request(call.method.clone(), url);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        if let Some((_, job)) = &self.job {
            request = request.header(HeaderName::from_static(headers::JOB), job);
        }
        if let Some(dataset) = &self.dataset {
            request = request.header(HeaderName::from_static(headers::DATASET), dataset.as_str());
        }
        if let Some(view) = view {
            request = request.header(HeaderName::from_static(headers::VIEW), view);
        }
        match &call.body {
            Some(body) => request.body(body.clone()),
            None => request,
        }
    }

    pub(crate) async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.json(&Call::get(path), &[StatusCode::OK]).await.map(|answer| answer.1)
    }

    /// Makes a call, and parses the JSON of the answer. Returns the server that sent it, too.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        call: &Call,
        want: &[StatusCode],
    ) -> Result<(Arc<Server>, T), ClientError> {
        let (server, bytes) = self.call_at(call, want, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        let parsed = parse(&server, &bytes)?;
        Ok((server, parsed))
    }

    /// Sends `body` as JSON and parses the JSON of the answer.
    pub(crate) async fn send_json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        want: &[StatusCode],
    ) -> Result<T, ClientError> {
        let call = Call::new(method, path).json(to_json(body)?);
        self.json(&call, want).await.map(|answer| answer.1)
    }

    /// Makes a call and returns the answer with its body still unread, and the server that sends it.
    pub(crate) async fn open(
        &self,
        call: &Call,
        until: Instant,
    ) -> Result<(Arc<Server>, Response), ClientError> {
        match self.ask(call, &[StatusCode::OK], None, until).await? {
            (server, Answer::Open(response)) => Ok((server, response)),
            (server, Answer::Whole(_) | Answer::Elsewhere(_)) => {
                Err(responder(&server).protocol("the answer has no stream"))
            }
        }
    }

    /// Makes a call and returns the whole body of the answer.
    pub(crate) async fn call(
        &self,
        call: &Call,
        want: &[StatusCode],
        length: BodyLength,
    ) -> Result<Bytes, ClientError> {
        self.call_at(call, want, length).await.map(|answer| answer.1)
    }

    /// As [`Client::call`], with the server that answered.
    pub(crate) async fn call_at(
        &self,
        call: &Call,
        want: &[StatusCode],
        length: BodyLength,
    ) -> Result<(Arc<Server>, Bytes), ClientError> {
        let until = Instant::now() + self.io_timeout;
        match self.ask(call, want, Some(length), until).await? {
            (server, Answer::Whole(bytes)) => Ok((server, bytes)),
            (server, Answer::Open(_) | Answer::Elsewhere(_)) => {
                Err(responder(&server).protocol("the answer has no body"))
            }
        }
    }

    /// Returns the servers that a call asks, in their order.
    fn servers_for(&self, subject: Subject) -> Vec<Arc<Server>> {
        let all = || self.route.candidates(subject, Instant::now());
        match (&self.job_server, &self.pinned) {
            (Some(job), _) if self.has_members() => {
                let first = job.get();
                let is_other = |s: &Arc<Server>| first.as_ref().is_none_or(|first| !Arc::ptr_eq(first, s));
                let others: Vec<_> = all().into_iter().filter(is_other).collect();
                first.iter().map(Arc::clone).chain(others).collect()
            }
            (_, Some(server)) => vec![Arc::clone(server)],
            (_, None) => all(),
        }
    }

    /// Makes a call until it succeeds, fails for good, or would pass the deadline.
    ///
    /// Each round asks the servers one after the other until one answers. A wait follows a round.
    async fn ask(
        &self,
        call: &Call,
        want: &[StatusCode],
        length: Option<BodyLength>,
        until: Instant,
    ) -> Result<(Arc<Server>, Answer), ClientError> {
        let mut backoff = Backoff::new();
        let mut last = None;
        let (begun, mut unanswered) = (Instant::now(), 0);
        let mut renewed = false;
        let error = loop {
            let servers = self.servers_for(call.subject);
            let error = match self.round(call, &servers, (want, length), until, &mut renewed).await {
                Ok(answer) => return Ok(answer),
                Err(Round::Late) => {
                    let at = servers.first().or(self.route.first());
                    let late = || {
                        let why = format!("no answer within {:?}", self.io_timeout);
                        let named = at.map_or_else(|| self.servers().to_string(), |s| s.shown.to_string());
                        Responder(&named).unreachable(why)
                    };
                    break last.unwrap_or_else(late);
                }
                Err(Round::Failed(e)) => e,
            };
            let is_first = !self.first_answer.is_received();
            let is_local = servers.iter().all(|s| s.endpoint.is_local());
            if error.is_unreachable() && self.job_server.is_some() && !self.has_members() {
                self.look_for_members(&servers, until).await;
            }
            if is_first && (error.is_refused() && is_local || error.is_tls()) || !error.retryable() {
                break error;
            }
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
            if error.is_tls() {
                for server in &servers {
                    server.http.refresh(true).await;
                }
            }
            last = Some(error);
        };
        self.counters.errors.fetch_add(1, Relaxed);
        Err(error)
    }

    /// Asks servers, one after the other, until one answers.
    ///
    /// Only a server that does not answer, or is not ready, is passed by. After 429 nobody else is asked. A
    /// member that does not know a chunk's version may be late with the news of it, so one more server is
    /// asked, if possible one that the user named.
    async fn round(
        &self,
        call: &Call,
        servers: &[Arc<Server>],
        (want, length): (&[StatusCode], Option<BodyLength>),
        until: Instant,
        renewed: &mut bool,
    ) -> Result<(Arc<Server>, Answer), Round> {
        let is_several = servers.len() > 1;
        let view = is_several.then(|| self.route.view().map(|view| view.number)).flatten();
        let mut failed: Option<ClientError> = None;
        let (mut asked, mut is_unknown) = (0, false);
        let mut rest = servers.iter();
        while let Some(server) = rest.next() {
            let mut left = rest.clone();
            if is_unknown && !self.route.is_given(server) && left.any(|s| self.route.is_given(s)) {
                continue;
            }
            let is_last = rest.len() == 0;
            if is_several && !is_last && server.was_silent() && !self.answers_again(server).await {
                continue;
            }
            asked += 1;
            let (mut server, mut hops) = (Arc::clone(server), 0);
            let error = loop {
                server.http.refresh(false).await;
                let token = self.bearer.header();
                let request = self.request(call, &server, view);
                let request = match &token {
                    Some(token) => request.header(header::AUTHORIZATION, token),
                    None => request,
                };
                let attempt = self.attempt(request, &server, want, length);
                let tried = match is_several && !is_last {
                    true => timeout_at(until, self.watched(attempt, &server)).await,
                    false => timeout_at(until, attempt).await,
                };
                match tried {
                    Ok(Ok(Received { answer: Answer::Elsewhere(url), view })) => {
                        self.look_at_view(&server, view, until).await;
                        hops += 1;
                        if hops > REDIRECTS_MAX {
                            let why = "the servers of the cluster do not agree where the job lives";
                            break responder(&server).unreachable(why);
                        }
                        server = self.sent_on(call, &server, &url, until).await.map_err(Round::Failed)?;
                    }
                    Ok(Ok(answer)) => {
                        self.counters.failovers.fetch_add(u64::from(failed.is_some()), Relaxed);
                        self.look_at_view(&server, answer.view, until).await;
                        if let Some(job) = &self.job_server {
                            job.answered(&server);
                        }
                        return Ok((server, answer.answer));
                    }
                    Ok(Err(e)) if e.is_unauthorized() && !*renewed && self.renewed(token).await => {
                        *renewed = true;
                    }
                    Ok(Err(e)) => break e,
                    Err(_) => {
                        let others = asked - 1;
                        return Err(failed.map_or(Round::Late, |e| Round::Failed(e.and_others(others))));
                    }
                }
            };
            let is_gone = error.is_unreachable();
            if let Some(job) = self.job_server.as_ref().filter(|_| is_gone || is_away(&error)) {
                job.forget(&server);
            }
            if is_gone || is_unready(&error) {
                self.route.failed(&server, is_gone && !error.is_refused(), Instant::now());
            } else if matches!(call.subject, Subject::Chunk { .. }) && error.kind() == Kind::NotFound {
                // The answer of a server that the user named is final.
                if self.route.is_given(&server) || is_unknown {
                    return Err(Round::Failed(error));
                }
                is_unknown = true;
                failed = Some(error);
                continue;
            } else {
                return Err(Round::Failed(error));
            }
            // An answer says more than silence, and the first server more than the others.
            failed = match failed {
                Some(first) if is_gone || !first.is_unreachable() => Some(first),
                _ => Some(error),
            };
        }
        match failed {
            Some(error) => Err(Round::Failed(error.and_others(asked.max(1) - 1))),
            None => Err(Round::Late),
        }
    }

    /// Waits for an attempt, and gives it up if the server does not answer a probe meanwhile.
    async fn watched<T>(
        &self,
        attempt: impl Future<Output = Result<T, ClientError>>,
        server: &Arc<Server>,
    ) -> Result<T, ClientError> {
        tokio::pin!(attempt);
        let mut pause = PROBE_AFTER.min(self.io_timeout / 4);
        loop {
            tokio::select! {
                done = &mut attempt => return done,
                () = sleep(pause) => {}
            }
            // A server that answers has its reasons for being slow.
            let probe = self.is_alive(server);
            tokio::pin!(probe);
            tokio::select! {
                done = &mut attempt => return done,
                is_alive = &mut probe => if !is_alive {
                    return Err(responder(server).unreachable("it is silent"));
                },
            }
            pause *= 2;
        }
    }

    /// Returns whether a server that was silent may be asked again.
    async fn answers_again(&self, server: &Arc<Server>) -> bool {
        if !server.takes_probe(Instant::now()) {
            return false;
        }
        let is_alive = self.is_alive(server).await;
        match is_alive {
            true => server.answered(None),
            false => self.route.failed(server, true, Instant::now()),
        }
        is_alive
    }

    async fn is_alive(&self, server: &Arc<Server>) -> bool {
        let url = format!("{}{}", server.base, routes::LIVEZ);
        let probe = server.http.current().get(url).send();
        let within = PROBE_WITHIN.min(self.io_timeout / 4);
        tokio::time::timeout(within, probe).await.is_ok_and(|answer| answer.is_ok())
    }

    /// Returns the server to which another one sends a call on.
    async fn sent_on(
        &self,
        call: &Call,
        from: &Arc<Server>,
        url: &str,
        until: Instant,
    ) -> Result<Arc<Server>, ClientError> {
        if let Some(server) = self.route.member_at(url, &call.path) {
            return Ok(server);
        }
        // It may have joined since.
        self.fetch_view(from, until).await;
        self.route.member_at(url, &call.path).ok_or_else(|| {
            let place = url.strip_suffix(&call.path).unwrap_or(url);
            responder(from).protocol(format!(
                "it sends the request on to {place}, which is no server of the cluster that this client may \
                 ask; nothing was sent there; name servers by URL, and set its cluster.advertise_url"
            ))
        })
    }

    /// Looks for other servers of the cluster, where the one that has a job does not answer. Never fails.
    async fn look_for_members(&self, asked: &[Arc<Server>], until: Instant) {
        let others = self.route.candidates(Subject::Any, Instant::now());
        for other in others.iter().filter(|other| !asked.iter().any(|s| Arc::ptr_eq(s, other))) {
            self.fetch_view(other, until).await;
            if self.has_members() {
                return;
            }
        }
    }

    /// Fetches the view from a server, if its answer is news of one. Never fails.
    async fn look_at_view(&self, server: &Arc<Server>, number: Option<u64>, until: Instant) {
        if self.route.hear(number, Instant::now()) {
            self.fetch_view(server, until).await;
        }
    }

    async fn fetch_view(&self, server: &Arc<Server>, until: Instant) {
        if self.servers().is_unix() {
            return;
        }
        let known = self.route.view().and_then(|view| view.etag.clone());
        let mut request = server.http.current().get(format!("{}{}", server.base, routes::CLUSTER));
        if let Some(token) = self.bearer.header() {
            request = request.header(header::AUTHORIZATION, token);
        }
        if let Some(etag) = known {
            request = request.header(header::IF_NONE_MATCH, etag);
        }
        let until = until.min(Instant::now() + VIEW_WITHIN);
        let want = [StatusCode::OK, StatusCode::NOT_MODIFIED];
        match timeout_at(until, self.attempt(request, server, &want, None)).await {
            Ok(Ok(Received { answer: Answer::Open(response), .. })) => {
                let adopted = timeout_at(until, self.adopt_view(server, response)).await;
                match adopted {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "the view of the cluster cannot be used"),
                    Err(_) => tracing::debug!("the view of the cluster came too slowly"),
                }
            }
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the view of the cluster cannot be fetched"),
            Err(_) => tracing::debug!(server = %server.shown, "the view of the cluster did not come in time"),
        }
    }

    async fn adopt_view(&self, server: &Arc<Server>, response: Response) -> Result<(), ClientError> {
        if response.status() == StatusCode::NOT_MODIFIED {
            return Ok(());
        }
        let etag = response.headers().get(header::ETAG).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let bytes = responder(server).body(response, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        let cluster: Cluster = parse(server, &bytes)?;
        let route = Arc::clone(&self.route);
        let now = Instant::now();
        // It may read the files of TLS.
        drop(tokio::task::spawn_blocking(move || route.adopt(&cluster, etag, now)).await);
        Ok(())
    }

    async fn renewed(&self, refused: Option<HeaderValue>) -> bool {
        let bearer = Arc::clone(&self.bearer);
        tokio::task::spawn_blocking(move || bearer.renewed(refused.as_ref())).await.unwrap_or(false)
    }

    async fn attempt(
        &self,
        request: RequestBuilder,
        server: &Arc<Server>,
        want: &[StatusCode],
        length: Option<BodyLength>,
    ) -> Result<Received, ClientError> {
        self.counters.requests.fetch_add(1, Relaxed);
        let server_says = responder(server);
        let response = request.send().await.map_err(|e| server_says.transport(&e))?;
        self.first_answer.record();
        self.counters.answered(response.headers());
        let view = response.headers().get(headers::VIEW).and_then(|v| v.to_str().ok()?.parse().ok());
        let from = response.remote_addr();
        let place = response.headers().get(header::LOCATION).and_then(|v| v.to_str().ok());
        if let (StatusCode::TEMPORARY_REDIRECT, Some(url)) = (response.status(), place) {
            let url = url.to_owned();
            // Read to its end, so that the connection can be used again.
            drop(server_says.body(response, BodyLength::AtMost(JSON_BYTES_MAX)).await);
            server.answered(from);
            return Ok(Received { answer: Answer::Elsewhere(url), view });
        }
        let response = server_says.accept(response, want).await?;
        let Some(length) = length else {
            server.answered(from);
            return Ok(Received { answer: Answer::Open(response), view });
        };
        let bytes = server_says.body(response, length).await?;
        server.answered(from);
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(Received { answer: Answer::Whole(bytes), view })
    }
}

/// How a round ended without an answer.
enum Round {
    /// No server was left to ask, or one of them refused the request.
    Failed(ClientError),
    /// The deadline passed while the first server was asked.
    Late,
}

/// An answer with an expected status, and the number of the server's view.
struct Received {
    answer: Answer,
    view: Option<u64>,
}

fn responder(server: &Server) -> Responder<'_> {
    Responder(&server.shown)
}

/// Parses the JSON that a server sent.
pub(crate) fn parse<T: DeserializeOwned>(server: &Server, bytes: &[u8]) -> Result<T, ClientError> {
    let unreadable = |e| responder(server).protocol(format!("the JSON cannot be read: {e}"));
    serde_json::from_slice(bytes).map_err(unreadable)
}

/// Whether a server that answered cannot serve now, while others may.
fn is_unready(error: &ClientError) -> bool {
    let ClientError::Problem { problem, .. } = error else { return false };
    // A proxy whose server is away answers 502 to 504 without a code.
    problem.code == Code::NotReady
        || problem.code == Code::Unknown && problem.retryable && matches!(problem.status, 502..=504)
}

/// Whether the server that has a job cannot serve it now.
fn is_away(error: &ClientError) -> bool {
    is_unready(error) || error.code() == Some(Code::JobWaits)
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

fn job_header(job: &JobName) -> Result<(JobName, HeaderValue), ClientError> {
    let value = HeaderValue::try_from(job.as_str()).map_err(|_| {
        ClientError::Config("the job name contains bytes that an HTTP header cannot carry".into())
    })?;
    Ok((job.clone(), value))
}

/// An answer with an expected status.
enum Answer {
    /// The whole body.
    Whole(Bytes),
    /// An answer whose body is not read yet.
    Open(reqwest::Response),
    /// Another server has the job: the URL of the call there.
    Elsewhere(String),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("servers", self.servers()).finish_non_exhaustive()
    }
}
