//! Asks other members for chunks: the client side of the routes below `/v1/peers/`.
//!
//! I1. A member that refused a connection or did not answer in time rests for 2, 4 … 10 s. Nobody asks it
//!     meanwhile. An answer, whatever its status, ends that.
//! I2. A token goes over TLS, or to a loopback address, or nowhere, unless `cluster.insecure_peers` is set.
//! I3. An answer has at most as many bytes as the chunk. The bytes are not verified here: the store does it.
//! I4. A call ends by its deadline, when the member leaves the view, and when the member takes long and gives
//!     no sign of life (`alive.rs`).

mod alive;
mod token;

pub use token::is_safe;

use super::{
    ClusterError,
    refusals::{RefusalReason, Refusals},
    settings::PeerConfig,
    view::ClusterView,
};
use bytes::Bytes;
use fletch_api::{Code, Problem, headers};
use fletch_bounds::Waits;
use fletch_client::{HttpClient, TlsFault};
use fletch_core::{Domain, MemberId};
use fletch_store::AtPeer;
use parking_lot::Mutex;
use reqwest::{Client, ClientBuilder, Method, RequestBuilder, Response, StatusCode, header};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use token::Token;
use tokio::{
    sync::watch,
    time::{Instant as Deadline, timeout_at},
};
use url::Url;

/// The longest time until a connection to a member is open.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an idle connection is kept. A server closes idle ones later (`limits.idle_timeout`).
const POOL_IDLE: Duration = Duration::from_secs(10);
/// How long a connection may have no acknowledged bytes. Then the network between the servers is cut.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// The longest body of a problem that is read.
const PROBLEM_BYTES_MAX: usize = 16 << 10;
/// The shortest and the longest rest of a member that failed.
const REST: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// How long the asker waits after a 429, unless the answer says more.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A member, and the URL by which other servers reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its name.
    pub id: MemberId,
    /// Its URL.
    pub url: String,
}

/// The protection of a chunk from eviction, for a warm-up of another server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinOrder {
    /// The id of the warm-up.
    pub warmup: String,
    /// How long all chunks of the warm-up are protected from now on.
    pub hold: Duration,
}

/// What a member is to do with the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerCall {
    /// Send them.
    Get,
    /// Keep them, and send none.
    Keep(Option<PinOrder>),
    /// Keep these, if it has room.
    Offer(Bytes),
}

/// What is asked of a member.
#[derive(Debug, Clone)]
pub struct PeerRequest {
    /// The path, from `routes::peer_chunk` or `routes::peer_file`.
    pub path: String,
    /// The domain that the bytes belong to.
    pub domain: Domain,
    /// The dataset through which the reader reads.
    pub dataset: String,
    /// The label of the reader's job, for logs.
    pub job: Arc<str>,
    /// The number of bytes.
    pub len: u32,
    /// The bytes of the chunk, if not all of them are wanted.
    pub part: Option<Range<usize>>,
    /// What the member is to do.
    pub call: PeerCall,
    /// Whether the member is to answer only with what it has.
    pub only_if_cached: bool,
}

/// What a member answered.
#[derive(Debug)]
pub enum PeerAnswer {
    /// The bytes, which are not verified, and what the member did for them.
    Bytes(Bytes, AtPeer),
    /// The member does not have them, or does not know the version.
    Absent,
    /// The member is not the owner by its view, which has this number, and names the owner.
    WrongServer(u64, Option<PeerAddress>),
    /// The member is at a limit.
    Overloaded(Duration),
    /// The member did not answer, or answered with an error.
    Failed,
}

impl PeerAnswer {
    fn word(&self) -> &'static str {
        match self {
            PeerAnswer::Bytes(_, at) => at.as_str(),
            PeerAnswer::Absent => "absent",
            PeerAnswer::WrongServer(..) => "wrong_server",
            PeerAnswer::Overloaded(_) => "overloaded",
            PeerAnswer::Failed => "failed",
        }
    }
}

/// Why a call to a member failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("{0}")]
    Tls(TlsFault),
    #[error("it did not answer in time")]
    Late,
    #[error("it gives no sign of life")]
    Silent,
    #[error("it left the view of the cluster")]
    Left,
    #[error("its answer has more than {0} bytes")]
    TooLong(u32),
    #[error("its answer does not say what the bytes count as")]
    NoResult,
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error(
        "its URL {0} is not safe for a token: give it an https:// URL (cluster.peer_url), or set \
         cluster.insecure_peers"
    )]
    Insecure(String),
}

impl CallError {
    /// Whether the member is to rest.
    fn is_silence(&self) -> bool {
        !matches!(self, CallError::TooLong(_) | CallError::NoResult | CallError::Status(_) | CallError::Left)
    }

    /// Returns the refusal that it shows. `None`: it may pass by itself.
    fn refusal(&self) -> Option<RefusalReason> {
        match self {
            CallError::Status(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Some(RefusalReason::Token),
            CallError::TooLong(_) | CallError::NoResult => Some(RefusalReason::Unreadable),
            CallError::Status(status) if status.is_success() || status.is_redirection() => {
                Some(RefusalReason::Unreadable)
            }
            _ => None,
        }
    }
}

/// When a member may be asked again.
#[derive(Debug, Default)]
struct Rest {
    last: Duration,
    until: Option<Instant>,
    /// Whether it accepted a connection and did not answer. Then one call asks it for a sign of life before
    /// others wait for it again.
    was_silent: bool,
}

/// What this server knows of a member.
#[derive(Debug, Default)]
struct PeerState {
    rest: Mutex<Rest>,
    answers: Mutex<BTreeMap<&'static str, u64>>,
    wrong_bytes: AtomicU64,
}

/// Numbers of one member for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStats {
    /// The member.
    pub id: MemberId,
    /// Its answers, by their kind.
    pub answers: Vec<(&'static str, u64)>,
    /// Answers whose bytes did not hash to the chunk's name.
    pub wrong_bytes: u64,
}

/// The other members, as this server asks them.
#[derive(Debug)]
pub struct Peers {
    client: Arc<HttpClient>,
    token: Token,
    allows_insecure: bool,
    views: watch::Receiver<Arc<ClusterView>>,
    members: Mutex<BTreeMap<MemberId, Arc<PeerState>>>,
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    foreign_fills: AtomicU64,
    passed_on: AtomicU64,
    fetched: AtomicU64,
    refusals: Refusals,
}

/// Returns the settings of the client for all members. It keeps connections by their address.
fn settings() -> ClientBuilder {
    Client::builder()
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(POOL_IDLE)
        .tcp_keepalive(KEEPALIVE)
        .tcp_user_timeout(KEEPALIVE)
        .tcp_nodelay(true)
}

impl Peers {
    /// Makes the client side. Reads the token and the certificates. Blocking.
    ///
    /// # Errors
    /// [`ClusterError::File`] and [`ClusterError::Peers`].
    pub fn new(config: &PeerConfig, views: watch::Receiver<Arc<ClusterView>>) -> Result<Self, ClusterError> {
        let token = Token::new(config.token_file.clone())?;
        let client = HttpClient::new(config.tls.clone(), Box::new(settings));
        let client = client.map_err(|e| ClusterError::Peers(e.to_string()))?;
        Ok(Peers {
            client,
            token,
            allows_insecure: config.allows_insecure,
            views,
            members: Mutex::default(),
            received_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            foreign_fills: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            refusals: Refusals::default(),
        })
    }

    fn state(&self, id: &MemberId) -> Arc<PeerState> {
        Arc::clone(self.members.lock().entry(id.clone()).or_default())
    }

    /// Whether a member may be asked now.
    #[must_use]
    pub fn may_ask(&self, id: &MemberId) -> bool {
        let Some(state) = self.members.lock().get(id).cloned() else { return true };
        state.rest.lock().until.is_none_or(|until| until <= Instant::now())
    }

    /// Asks a member. The call ends by `until`.
    pub async fn ask(&self, to: &PeerAddress, request: &PeerRequest, until: Deadline) -> PeerAnswer {
        let state = self.state(&to.id);
        if !self.answers_again(to, &state).await {
            return PeerAnswer::Failed;
        }
        let answer = match self.call(to, request, until).await {
            Ok(answer) => {
                *state.rest.lock() = Rest::default();
                self.refusals.end(&to.id, RefusalReason::Token);
                if let PeerAnswer::Bytes(..) = answer {
                    self.refusals.end(&to.id, RefusalReason::Unreadable);
                }
                answer
            }
            Err(error) => {
                self.note_refusal(&to.id, &error);
                let chunk = &*request.path;
                tracing::debug!(peer = %to.id, %error, chunk, job = &*request.job, "a peer did not serve");
                // A member that does not take what is offered may close the connection at once.
                let is_offer = matches!(request.call, PeerCall::Offer(_));
                if error.is_silence() && !is_offer {
                    self.rest(&to.id, &state, &error);
                }
                PeerAnswer::Failed
            }
        };
        *state.answers.lock().entry(answer.word()).or_default() += 1;
        if let (PeerAnswer::Bytes(bytes, _), true) = (&answer, request.call == PeerCall::Get) {
            self.received_bytes.fetch_add(bytes.len() as u64, Relaxed);
            self.fetched.fetch_add(1, Relaxed);
        }
        answer
    }

    /// Notes what a failed call says about the two servers.
    pub(super) fn note_refusal(&self, id: &MemberId, error: &CallError) {
        if let Some(reason) = error.refusal() {
            self.refusals.note(id, reason, &error.to_string());
        }
    }

    /// Returns what servers refuse each other.
    #[must_use]
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Compares, at each change of the view, whether the members ask for tokens as this one does.
    pub(super) async fn compare_tokens(&self, own: &MemberId) {
        let mut views = self.views.clone();
        loop {
            let view = Arc::clone(&views.borrow_and_update());
            let wants = view.needs_token(own);
            self.refusals.retain(|id| view.members().any(|member| member == id));
            for id in view.members().filter(|id| *id != own) {
                match (wants, view.needs_token(id)) {
                    (Some(true), Some(false)) => {
                        let detail = "it serves everybody, and this server asks for tokens";
                        self.refusals.note(id, RefusalReason::TokensDiffer, detail);
                    }
                    (Some(false), Some(true)) => {
                        let detail = "it asks for tokens, and this server serves everybody";
                        self.refusals.note(id, RefusalReason::TokensDiffer, detail);
                    }
                    _ => self.refusals.end(id, RefusalReason::TokensDiffer),
                }
            }
            if views.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    fn rest(&self, id: &MemberId, state: &PeerState, error: &CallError) {
        let mut rest = state.rest.lock();
        if rest.until.is_some_and(|until| until > Instant::now()) {
            return;
        }
        rest.last = (rest.last * 2).clamp(REST.0, REST.1);
        rest.until = Some(Instant::now() + rest.last);
        rest.was_silent = matches!(error, CallError::Late | CallError::Silent);
        tracing::warn!(peer = %id, %error, rests = ?rest.last, "a peer does not answer; others are asked");
    }

    async fn call(
        &self,
        to: &PeerAddress,
        request: &PeerRequest,
        until: Deadline,
    ) -> Result<PeerAnswer, CallError> {
        let sent = async {
            let response = self.send(to, request).await?;
            if response.status() == StatusCode::UNAUTHORIZED && self.read_token_again().await {
                return self.send(to, request).await;
            }
            Ok(response)
        };
        let answered = async { self.read(sent.await?, request).await };
        let answered = self.watched(to, answered, until);
        let mut views = self.views.clone();
        let left = async {
            // A member outside of the view was named by another one, which knows better.
            let is_known = views.borrow().core.is_up(&to.id);
            if !is_known || views.wait_for(|view| !view.core.is_up(&to.id)).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            answered = timeout_at(until, answered) => answered.unwrap_or(Err(CallError::Late)),
            () = left => Err(CallError::Left),
        }
    }

    async fn send(&self, to: &PeerAddress, request: &PeerRequest) -> Result<Response, CallError> {
        let method = match request.call {
            PeerCall::Get => Method::GET,
            PeerCall::Keep(_) => Method::HEAD,
            PeerCall::Offer(_) => Method::PUT,
        };
        let call = self.start(to, method, &request.path, &request.domain).await?;
        let mut call = call.header(headers::DATASET, &request.dataset).header(headers::JOB, &*request.job);
        match &request.call {
            PeerCall::Offer(bytes) => {
                call = call.header(header::CONTENT_TYPE, headers::CHUNK).body(bytes.clone());
            }
            PeerCall::Keep(Some(pin)) => {
                call = call.header(headers::PIN, format!("{} {}", pin.warmup, pin.hold.as_secs()));
            }
            PeerCall::Keep(None) | PeerCall::Get => {}
        }
        if let Some(range) = &request.part {
            call = call.header(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        if request.only_if_cached {
            call = call.header(header::CACHE_CONTROL, "only-if-cached");
        }
        self.finish(to, call).await
    }

    /// Begins a request to a member, with what all of them have.
    pub(super) async fn start(
        &self,
        to: &PeerAddress,
        method: Method,
        path: &str,
        domain: &Domain,
    ) -> Result<RequestBuilder, CallError> {
        let view = self.views.borrow().core.number();
        self.client.refresh(false).await;
        let call = self
            .client
            .current()
            .request(method, format!("{}{path}", to.url))
            .header(headers::DOMAIN, domain.as_str())
            .header(headers::COMPONENT, "peer")
            .header(headers::VIEW, view);
        let call = match Waits::current_request() {
            Some(id) => call.header(headers::REQUEST_ID, id.to_string()),
            None => call,
        };
        let Some(token) = self.token.header() else { return Ok(call) };
        if !self.allows_insecure && !is_safe(&to.url) {
            return Err(CallError::Insecure(to.url.clone()));
        }
        Ok(call.header(header::AUTHORIZATION, token))
    }

    /// Sends a request.
    pub(super) async fn finish(&self, to: &PeerAddress, call: RequestBuilder) -> Result<Response, CallError> {
        call.send().await.map_err(|e| match TlsFault::of(&to.url, &e) {
            Some(fault) => CallError::Tls(fault),
            None => CallError::Http(e),
        })
    }

    /// Reads the token again. Returns whether it changed.
    pub(super) async fn read_token_again(&self) -> bool {
        self.token.read_again().await
    }

    async fn read(&self, response: Response, request: &PeerRequest) -> Result<PeerAnswer, CallError> {
        let head = response.headers();
        let text = |name: &str| head.get(name).and_then(|v| v.to_str().ok());
        let status = response.status();
        let retry_after = text(header::RETRY_AFTER.as_str()).and_then(|s| s.parse().ok());
        match status {
            // An earlier build sends the whole chunk, for which the asker holds no memory.
            StatusCode::OK if request.part.is_some() => Ok(PeerAnswer::Absent),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT
                if request.part.is_some() || status == StatusCode::OK =>
            {
                let at = text(headers::RESULT).and_then(AtPeer::from_word).ok_or(CallError::NoResult)?;
                Ok(PeerAnswer::Bytes(body(response, request.len).await?, at))
            }
            StatusCode::NOT_FOUND => Ok(PeerAnswer::Absent),
            StatusCode::TOO_MANY_REQUESTS => {
                Ok(PeerAnswer::Overloaded(retry_after.map_or(RETRY_AFTER, Duration::from_secs)))
            }
            StatusCode::MISDIRECTED_REQUEST => {
                let view = text(headers::VIEW).and_then(|v| v.parse().ok()).unwrap_or(0);
                let owner = text(headers::OWNER).and_then(address);
                // The answer to a HEAD has no problem in it.
                let is_wrong_server = owner.is_some() || problem(response).await == Some(Code::WrongServer);
                match is_wrong_server {
                    true => Ok(PeerAnswer::WrongServer(view, owner)),
                    false => Err(CallError::Status(status)),
                }
            }
            _ => Err(CallError::Status(status)),
        }
    }

    /// Notes that bytes of a member did not hash to the chunk's name.
    pub fn blame(&self, id: &MemberId, chunk: &str) {
        self.state(id).wrong_bytes.fetch_add(1, Relaxed);
        tracing::warn!(peer = %id, chunk, "a peer returned wrong bytes, which nobody got; check that server");
    }

    /// Counts bytes that were sent to a member.
    pub fn add_sent(&self, n: u64) {
        self.sent_bytes.fetch_add(n, Relaxed);
    }

    /// Counts a chunk that this server fetched for a member, although it does not own it.
    pub fn add_foreign_fill(&self) {
        self.foreign_fills.fetch_add(1, Relaxed);
    }

    /// Counts a chunk of this server that another one keeps.
    pub fn add_passed_on(&self) {
        self.passed_on.fetch_add(1, Relaxed);
    }

    /// Returns bytes received, bytes sent, fills of chunks that others own, answers with bytes, and chunks
    /// that were passed on.
    #[must_use]
    pub fn sums(&self) -> [u64; 5] {
        [&self.received_bytes, &self.sent_bytes, &self.foreign_fills, &self.fetched, &self.passed_on]
            .map(|n| n.load(Relaxed))
    }

    /// Returns numbers of each member that was asked.
    #[must_use]
    pub fn stats(&self) -> Vec<PeerStats> {
        let members = self.members.lock();
        let stats = |(id, state): (&MemberId, &Arc<PeerState>)| PeerStats {
            id: id.clone(),
            answers: state.answers.lock().iter().map(|(word, n)| (*word, *n)).collect(),
            wrong_bytes: state.wrong_bytes.load(Relaxed),
        };
        members.iter().map(stats).collect()
    }
}

/// The room for a body before its first byte, at most. Chunks have at most so many bytes.
const BODY_BYTES_FIRST: usize = 16 << 20;

/// Reads a body of at most `len` bytes.
pub(super) async fn body(mut response: Response, len: u32) -> Result<Bytes, CallError> {
    let mut bytes = Vec::with_capacity((len as usize).min(BODY_BYTES_FIRST));
    while let Some(piece) = response.chunk().await? {
        if bytes.len() + piece.len() > len as usize {
            return Err(CallError::TooLong(len));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

/// Returns the code of a problem.
async fn problem(mut response: Response) -> Option<Code> {
    let mut bytes = Vec::new();
    while let Some(piece) = response.chunk().await.ok()? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > PROBLEM_BYTES_MAX {
            return None;
        }
    }
    serde_json::from_slice::<Problem>(&bytes).ok().map(|problem| problem.code)
}

/// Parses the header `Fletch-Owner`.
fn address(text: &str) -> Option<PeerAddress> {
    let (id, url) = text.split_once(' ')?;
    Url::parse(url).ok()?;
    Some(PeerAddress { id: MemberId::new(id).ok()?, url: url.to_owned() })
}

#[cfg(test)]
mod tests;
