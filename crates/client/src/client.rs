//! The client and its calls: what it asks servers for.

mod reads;
mod retries;
mod views;

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
    API_MAJOR, Accounts, Cluster, Info, ResolvedVersion, headers,
    hits::{HitRequest, Wanted},
    node::{self, MountedVersion, NodeState},
    routes,
};
use fletch_core::manifest::FORMAT_MAJOR;
use fletch_core::{DatasetName, Hash, JobName, Root};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use parking_lot::Mutex;
use reqwest::{RequestBuilder, Response};
use retries::{Answer, WholeAnswer};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt,
    sync::Arc,
    sync::Once,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, SystemTime},
};
use tokio::time::Instant;

/// The longest time for the answer of one server of several.
const MEMBER_WITHIN: Duration = Duration::from_secs(5);
/// The longest JSON answer that is read, in bytes.
pub(crate) const JSON_BYTES_MAX: u64 = 16 << 20;
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

    /// Waits until a server says that the job waits for its server. Only for a client for calls of a job.
    pub(crate) async fn job_waits(&self) {
        match &self.job_server {
            Some(job) => job.waits.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the highest term of the job that a server named.
    pub(crate) fn job_term(&self) -> Option<u64> {
        self.job_server.as_ref().and_then(|job| job.term())
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
            clock_ahead_s: c.dated.lock().map(clock_ahead_s),
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

    fn request(&self, call: &Call, server: &Server, view: Option<u64>) -> RequestBuilder {
        let url = format!("{}{}", server.base, call.path);
        let mut request = server.http.current().request(call.method.clone(), url);
        request = request.header(HeaderName::from_static(headers::REQUEST_ID), format!("{:016x}", call.id));
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

    /// Returns what each server of the cluster answers at `path`, and the ids of those that did not answer.
    ///
    /// # Errors
    /// [`ClientError`], if no server answers, or one refuses the caller.
    pub(crate) async fn of_all<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<(Vec<T>, Vec<String>), ClientError> {
        let (first, answer) = self.json(&Call::get(path), &[StatusCode::OK]).await?;
        let (mut answers, mut silent) = (vec![answer], Vec::new());
        for (id, server) in self.known_members().into_iter().filter(|m| !Arc::ptr_eq(&m.1, &first)) {
            let one = self.pinned(server).fail_fast().within(self.io_timeout().min(MEMBER_WITHIN));
            match one.get_json(path).await {
                Ok(answer) => answers.push(answer),
                Err(e) if e.is_denied() => return Err(e),
                Err(error) => {
                    tracing::debug!(%error, server = id, path, "a server does not answer");
                    silent.push(id);
                }
            }
        }
        Ok((answers, silent))
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
            (server, Answer::Whole(..) | Answer::Elsewhere(_)) => {
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
        let (server, whole) = self.call_whole(call, want, length).await?;
        Ok((server, whole.bytes))
    }

    /// As [`Client::call_at`], with what the answer says about its body.
    pub(crate) async fn call_whole(
        &self,
        call: &Call,
        want: &[StatusCode],
        length: BodyLength,
    ) -> Result<(Arc<Server>, WholeAnswer), ClientError> {
        let until = Instant::now() + self.io_timeout;
        match self.ask(call, want, Some(length), until).await? {
            (server, Answer::Whole(whole)) => Ok((server, whole)),
            (server, Answer::Open(_) | Answer::Elsewhere(_)) => {
                Err(responder(&server).protocol("the answer has no body"))
            }
        }
    }
}

fn responder(server: &Server) -> Responder<'_> {
    Responder(&server.shown)
}

/// Parses the JSON that a server sent.
pub(crate) fn parse<T: DeserializeOwned>(server: &Server, bytes: &[u8]) -> Result<T, ClientError> {
    let unreadable = |e| responder(server).protocol(format!("the JSON cannot be read: {e}"));
    serde_json::from_slice(bytes).map_err(unreadable)
}

impl Counters {
    /// Records the `Date` of an answer.
    fn answered(&self, headers: &HeaderMap) {
        let date = headers.get(header::DATE).and_then(|v| v.to_str().ok());
        if let Some(date) = date.and_then(|text| httpdate::parse_http_date(text).ok()) {
            *self.dated.lock() = Some((date, SystemTime::now()));
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

fn job_header(job: &JobName) -> Result<(JobName, HeaderValue), ClientError> {
    let value = HeaderValue::try_from(job.as_str()).map_err(|_| {
        ClientError::Config("the job name contains bytes that an HTTP header cannot carry".into())
    })?;
    Ok((job.clone(), value))
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("servers", self.servers()).finish_non_exhaustive()
    }
}
