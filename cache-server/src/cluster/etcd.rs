//! etcd by its HTTP/JSON gateway: the only file that speaks to it.
//!
//! I1. A call lasts at most [`CALL_TIMEOUT`] at an endpoint. An answer has at most [`ANSWER_BYTES_MAX`].
//! I2. One endpoint at a time. After an error the next call goes to the next endpoint.
//! I3. Only calls that change nothing twice are repeated. A write is sent once, unless nothing listened.
//!
//! The gateway encodes keys and values in base64 and 64-bit numbers as texts, and leaves out zeros.

use super::{ClusterError, history::HistoryPoint, settings::EtcdConfig};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use fletch_host::files::read_small;
use parking_lot::Mutex;
use reqwest::{Certificate, Client, Identity, Response, StatusCode, header};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};
use url::Url;

/// The longest time of a call at one endpoint.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest answer.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// The longest item that etcd takes: the longest request of a server with its default settings.
const ITEM_BYTES_MAX: usize = 3 << 19;
/// The most keys of one answer. A page that is too long is asked for again with half as many keys.
const PAGE_KEYS: u32 = 1000;

// A page of one item fits into an answer, in base64 and with its key: halving a page ends.
const _: () = assert!(ITEM_BYTES_MAX * 3 / 2 < ANSWER_BYTES_MAX);
/// After this time without news a watch is opened anew: the connection may be dead.
const WATCH_IDLE: Duration = Duration::from_secs(30);
/// The numbers by which gRPC says that an endpoint cannot serve now: it stops, is late, full or away.
const UNAVAILABLE: [u64; 4] = [1, 4, 8, 14];
/// The number by which gRPC says that a token is not valid.
const UNAUTHENTICATED: u64 = 16;
/// The number by which gRPC says that something does not exist.
const NOT_FOUND: u64 = 5;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EtcdError {
    /// No endpoint answered in time, or none could serve.
    #[error("etcd cannot be reached: {0}")]
    Unreachable(String),
    /// etcd rejected the call.
    #[error("etcd rejected a call: {message}; check cluster.user, and its rights to the cluster's keys")]
    Rejected {
        /// gRPC's number of the error.
        code: u64,
        /// The text of etcd.
        message: String,
    },
    /// The answer is too long.
    #[error("etcd's answer has more than {ANSWER_BYTES_MAX} bytes")]
    TooLong,
    /// The answer cannot be read.
    #[error("etcd's answer cannot be read: {0}")]
    Protocol(String),
}

/// A key with its value.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub key: Vec<u8>,
    #[serde(deserialize_with = "bytes")]
    pub value: Vec<u8>,
    #[serde(deserialize_with = "number")]
    pub mod_revision: u64,
}

/// What a transaction reads, or writes.
#[derive(Debug, Clone)]
pub enum Op {
    /// Reads a key, or all keys that begin with it.
    Read { key: String, is_prefix: bool },
    /// Writes a key, under a lease unless it is 0.
    Put { key: String, value: Vec<u8>, lease: i64 },
    /// Deletes a key.
    Delete { key: String },
}

/// All keys of a prefix at one revision.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The revision.
    pub revision: u64,
    /// The keys, in their order.
    pub keys: Vec<KeyValue>,
}

/// A change of a key.
#[derive(Debug, Clone, Deserialize)]
pub struct Event {
    /// `DELETE`, or nothing for a write.
    #[serde(rename = "type", default)]
    kind: String,
    /// The key with its new value, which a deleted key does not have.
    #[serde(default)]
    pub kv: KeyValue,
}

impl Event {
    /// Whether the key was deleted.
    pub fn is_delete(&self) -> bool {
        self.kind == "DELETE"
    }
}

/// The outcome of a transaction.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The revision of etcd.
    pub revision: u64,
    /// What the answer says about etcd's history.
    pub history: HistoryPoint,
    /// Whether the comparisons held.
    pub succeeded: bool,
    /// What each read found.
    pub reads: Vec<Vec<KeyValue>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u64),
    Text(String),
}

fn number<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    match NumberOrText::deserialize(d)? {
        NumberOrText::Number(n) => Ok(n),
        NumberOrText::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

fn bytes<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(d)?).map_err(serde::de::Error::custom)
}

fn base64(text: impl AsRef<[u8]>) -> String {
    STANDARD.encode(text)
}

/// Returns the end of the range of keys that begin with a text, which does not end in the byte 255.
fn range_end(prefix: &str) -> String {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    base64(end)
}

#[derive(Deserialize)]
struct GrpcError {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: u64,
    #[serde(deserialize_with = "number")]
    cluster_id: u64,
    #[serde(deserialize_with = "number")]
    raft_term: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Range {
    header: Header,
    kvs: Vec<KeyValue>,
    more: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Watched {
    result: WatchResult,
    error: Option<Value>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WatchResult {
    events: Vec<Event>,
    canceled: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct TxnPart {
    response_range: Option<Range>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Txn {
    header: Header,
    succeeded: bool,
    responses: Vec<TxnPart>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    id: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct KeptAlive {
    result: Kept,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Kept {
    #[serde(rename = "TTL", deserialize_with = "number")]
    ttl: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Token {
    token: String,
}

/// The endpoints of an etcd.
pub struct Etcd {
    endpoints: Vec<Url>,
    current: AtomicUsize,
    http: Client,
    login: Option<(String, String)>,
    token: Mutex<Option<String>>,
    failed: AtomicU64,
}

fn read(path: &Path) -> Result<Vec<u8>, ClusterError> {
    read_small(path).map_err(|error| ClusterError::File { path: path.to_owned(), error })
}

impl Etcd {
    /// Returns a client of the endpoints of the settings. Blocking: reads its files.
    ///
    /// # Errors
    /// [`ClusterError::File`] and [`ClusterError::Tls`].
    pub fn new(config: &EtcdConfig) -> Result<Self, ClusterError> {
        let tls = |e: reqwest::Error| ClusterError::Tls(e.to_string());
        let mut builder = Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        builder = builder.connect_timeout(CALL_TIMEOUT);
        if let Some(path) = &config.ca_file {
            builder = builder.tls_certs_only(Certificate::from_pem_bundle(&read(path)?).map_err(tls)?);
        }
        if let Some((cert, key)) = &config.identity {
            let pem = [read(key)?, b"\n".to_vec(), read(cert)?].concat();
            builder = builder.identity(Identity::from_pem(&pem).map_err(tls)?);
        }
        let login = match &config.user {
            None => None,
            Some((user, path)) => {
                let password =
                    String::from_utf8_lossy(&read(path)?).trim_end_matches(['\r', '\n']).to_owned();
                Some((user.clone(), password))
            }
        };
        Ok(Etcd {
            endpoints: config.endpoints.clone(),
            current: AtomicUsize::new(0),
            http: builder.build().map_err(tls)?,
            login,
            token: Mutex::new(None),
            failed: AtomicU64::new(0),
        })
    }

    /// Returns the number of calls that failed at one endpoint.
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Reads and writes in one transaction, if every key has its revision. 0: the key does not exist.
    ///
    /// # Errors
    /// [`EtcdError`]. After an error a write may have happened.
    pub async fn transact(&self, revisions: &[(String, u64)], ops: &[Op]) -> Result<Outcome, EtcdError> {
        let compare: Vec<Value> = revisions
            .iter()
            .map(|(key, revision)| {
                let key = base64(key);
                json!({"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string()})
            })
            .collect();
        let success: Vec<Value> = ops
            .iter()
            .map(|op| match op {
                Op::Read { key, is_prefix: false } => json!({"request_range": {"key": base64(key)}}),
                Op::Read { key, .. } => {
                    json!({"request_range": {"key": base64(key), "range_end": range_end(key)}})
                }
                Op::Delete { key } => json!({"request_delete_range": {"key": base64(key)}}),
                Op::Put { key, value, lease } => json!({"request_put":
                    {"key": base64(key), "value": base64(value), "lease": lease.to_string()}}),
            })
            .collect();
        let is_read = ops.iter().all(|op| matches!(op, Op::Read { .. }));
        let txn: Txn =
            self.call("/v3/kv/txn", &json!({"compare": compare, "success": success}), is_read).await?;
        let reads = txn.responses.into_iter().filter_map(|part| part.response_range.map(|range| range.kvs));
        let Header { revision, cluster_id, raft_term } = txn.header;
        let history = HistoryPoint { cluster_id, revision, raft_term };
        Ok(Outcome { revision, history, succeeded: txn.succeeded, reads: reads.collect() })
    }

    /// Reads all keys that begin with a text, in pages of one revision.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn read_prefix(&self, prefix: &str) -> Result<Page, EtcdError> {
        let mut all = Page::default();
        let (mut from, mut keys_max) = (base64(prefix), PAGE_KEYS);
        loop {
            let body = json!({"key": from, "range_end": range_end(prefix), "limit": keys_max.to_string(),
                "revision": all.revision.to_string()});
            let page: Range = match self.call("/v3/kv/range", &body, true).await {
                Err(EtcdError::TooLong) if keys_max > 1 => {
                    keys_max /= 2;
                    continue;
                }
                page => page?,
            };
            if all.revision == 0 {
                all.revision = page.header.revision;
            }
            all.keys.extend(page.kvs);
            match all.keys.last() {
                // The next key is the last one and a zero byte.
                Some(last) if page.more => from = base64([&last.key[..], &[0]].concat()),
                _ => return Ok(all),
            }
        }
    }

    /// Gets a lease. A lease that nobody keeps alive ends after `ttl`.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn grant(&self, ttl: Duration) -> Result<i64, EtcdError> {
        let body = json!({"TTL": ttl.as_secs().max(1).to_string()});
        // A repeated grant leaves a lease without keys, which ends by itself.
        let granted: Granted = self.call("/v3/lease/grant", &body, true).await?;
        i64::try_from(granted.id).map_err(|e| EtcdError::Protocol(e.to_string()))
    }

    /// Keeps a lease alive. Returns false for a lease that has ended.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn keep_alive(&self, lease: i64) -> Result<bool, EtcdError> {
        let kept: KeptAlive =
            self.call("/v3/lease/keepalive", &json!({"ID": lease.to_string()}), true).await?;
        Ok(kept.result.ttl > 0)
    }

    /// Ends a lease, and deletes its keys.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        match self.call::<Value>("/v3/lease/revoke", &json!({"ID": lease.to_string()}), true).await {
            Err(EtcdError::Rejected { code: NOT_FOUND, .. }) | Ok(_) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Begins to watch keys and prefixes.
    ///
    /// # Errors
    /// [`EtcdError`]. The caller watches again.
    pub async fn watch(&self, keys: &[(String, bool)]) -> Result<Watch<'_>, EtcdError> {
        let requests = keys.iter().map(|(key, is_prefix)| match is_prefix {
            false => json!({"key": base64(key)}),
            true => json!({"key": base64(key), "range_end": range_end(key)}),
        });
        self.open_watch(requests).await
    }

    /// Begins to watch a prefix from a revision on. The events of a revision come at once, and revisions in
    /// their order. The watch fails if etcd has no longer the events of the revision.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn watch_from(&self, prefix: &str, revision: u64) -> Result<Watch<'_>, EtcdError> {
        let request = json!({"key": base64(prefix), "range_end": range_end(prefix),
            "start_revision": revision.to_string()});
        self.open_watch([request].into_iter()).await
    }

    async fn open_watch(&self, requests: impl Iterator<Item = Value>) -> Result<Watch<'_>, EtcdError> {
        let requests: String = requests.map(|r| json!({"create_request": r}).to_string()).collect();
        let at = self.current.load(Relaxed);
        // The head asks etcd to end the watch at an endpoint that has lost its leader.
        let request = self.request(at, "/v3/watch").header("Grpc-Metadata-hasleader", "true");
        let sent = tokio::time::timeout(CALL_TIMEOUT, request.body(requests).send()).await;
        let why = match sent {
            Err(_) => format!("{} does not answer", self.endpoint(at)),
            Ok(Err(e)) => text_of(&e),
            Ok(Ok(response)) if response.status() == StatusCode::OK => {
                return Ok(Watch { etcd: self, at, response, pending: Vec::new() });
            }
            Ok(Ok(response)) => {
                if response.status() == StatusCode::UNAUTHORIZED {
                    self.log_in(at).await?;
                }
                format!("{} answers {}", self.endpoint(at), response.status())
            }
        };
        Err(self.failed_watch(at, why))
    }

    fn failed_watch(&self, at: usize, why: String) -> EtcdError {
        self.leave(at);
        EtcdError::Unreachable(why)
    }

    fn endpoint(&self, at: usize) -> &Url {
        &self.endpoints[at % self.endpoints.len()]
    }

    /// Makes the endpoint after `at` the current one, if `at` still is.
    fn leave(&self, at: usize) {
        self.failed.fetch_add(1, Relaxed);
        // Another call may have left it already.
        let _ = self.current.compare_exchange(at, at.wrapping_add(1), Relaxed, Relaxed);
    }

    fn request(&self, at: usize, path: &str) -> reqwest::RequestBuilder {
        let base = self.endpoint(at).as_str().trim_end_matches('/');
        let request =
            self.http.post(format!("{base}{path}")).header(header::CONTENT_TYPE, "application/json");
        let token = self.token.lock().clone();
        match token {
            Some(token) => request.header(header::AUTHORIZATION, token),
            None => request,
        }
    }

    async fn log_in(&self, at: usize) -> Result<(), EtcdError> {
        let Some((name, password)) = &self.login else {
            let message = "it asks for a user, and cluster.user is not set".to_owned();
            return Err(EtcdError::Rejected { code: UNAUTHENTICATED, message });
        };
        // With a token that is no longer valid, etcd would reject the login, too.
        *self.token.lock() = None;
        let body = json!({"name": name, "password": password});
        let token: Token = match self.attempt(at, "/v3/auth/authenticate", &body).await? {
            Attempt::Answer(token) => token,
            Attempt::Failed { why, .. } => return Err(EtcdError::Unreachable(why)),
        };
        *self.token.lock() = Some(token.token);
        Ok(())
    }

    /// Calls the current endpoint, and the others after it where that is safe.
    async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &Value,
        is_repeatable: bool,
    ) -> Result<T, EtcdError> {
        if self.login.is_some() && self.token.lock().is_none() {
            // The first call at an endpoint that cannot be reached fails below, with its reason.
            self.log_in(self.current.load(Relaxed)).await.ok();
        }
        let mut last = String::new();
        let mut has_logged_in = false;
        let mut left = self.endpoints.len();
        while left > 0 {
            let at = self.current.load(Relaxed);
            match self.attempt(at, path, body).await {
                Ok(Attempt::Answer(answer)) => return Ok(answer),
                Ok(Attempt::Failed { why, was_sent }) => {
                    self.leave(at);
                    last = format!("{}: {why}", self.endpoint(at));
                    if was_sent && !is_repeatable {
                        break;
                    }
                    left -= 1;
                }
                Err(EtcdError::Rejected { code: UNAUTHENTICATED, .. }) if !has_logged_in => {
                    has_logged_in = true;
                    self.log_in(at).await?;
                }
                Err(e) => return Err(e),
            }
        }
        Err(EtcdError::Unreachable(last))
    }

    async fn attempt<T: DeserializeOwned>(
        &self,
        at: usize,
        path: &str,
        body: &Value,
    ) -> Result<Attempt<T>, EtcdError> {
        let request = self.request(at, path).body(body.to_string());
        let answer = async {
            let response = request.send().await?;
            let status = response.status();
            Ok::<_, reqwest::Error>((status, read_body(response).await?))
        };
        let (status, text) = match tokio::time::timeout(CALL_TIMEOUT, answer).await {
            Err(_) => {
                let why = format!("no answer within {CALL_TIMEOUT:?}");
                return Ok(Attempt::Failed { why, was_sent: true });
            }
            Ok(Err(e)) => return Ok(Attempt::Failed { why: text_of(&e), was_sent: !e.is_connect() }),
            Ok(Ok(answer)) => answer,
        };
        if text.len() > ANSWER_BYTES_MAX {
            return Err(EtcdError::TooLong);
        }
        if status == StatusCode::OK {
            let read = serde_json::from_slice(&text).map_err(|e| EtcdError::Protocol(e.to_string()))?;
            return Ok(Attempt::Answer(read));
        }
        let error = serde_json::from_slice::<GrpcError>(&text)
            .unwrap_or_else(|_| GrpcError { code: 0, message: format!("the status {status}") });
        if UNAVAILABLE.contains(&error.code) {
            return Ok(Attempt::Failed { why: error.message, was_sent: true });
        }
        Err(EtcdError::Rejected { code: error.code, message: error.message })
    }
}

/// A running watch. Dropping it ends it.
pub struct Watch<'a> {
    etcd: &'a Etcd,
    at: usize,
    response: Response,
    pending: Vec<u8>,
}

impl Watch<'_> {
    /// Waits for changes. Returns none when the watch begins, and `None` when it should be opened anew,
    /// because it was silent for long.
    ///
    /// # Errors
    /// [`EtcdError`]: the watch has ended.
    pub async fn next(&mut self) -> Result<Option<Vec<Event>>, EtcdError> {
        loop {
            if let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                let news: Watched =
                    serde_json::from_slice(&line).map_err(|e| EtcdError::Protocol(e.to_string()))?;
                if news.error.is_some() || news.result.canceled {
                    let line = String::from_utf8_lossy(&line);
                    return Err(self.failed(format!("the watch was cancelled: {}", line.trim())));
                }
                return Ok(Some(news.result.events));
            }
            if self.pending.len() > ANSWER_BYTES_MAX {
                return Err(EtcdError::Protocol("an event is too long".to_owned()));
            }
            match tokio::time::timeout(WATCH_IDLE, self.response.chunk()).await {
                Err(_) => return Ok(None),
                Ok(Err(e)) => return Err(self.failed(text_of(&e))),
                Ok(Ok(None)) => return Err(self.failed("the watch ended".to_owned())),
                Ok(Ok(Some(piece))) => self.pending.extend_from_slice(&piece),
            }
        }
    }

    fn failed(&self, why: String) -> EtcdError {
        self.etcd.failed_watch(self.at, why)
    }
}

/// The outcome of one attempt.
enum Attempt<T> {
    Answer(T),
    Failed { why: String, was_sent: bool },
}

/// Reads a body, without the part beyond [`ANSWER_BYTES_MAX`].
async fn read_body(mut response: Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        body.extend_from_slice(&piece);
        if body.len() > ANSWER_BYTES_MAX {
            break;
        }
    }
    Ok(body)
}

/// Returns the innermost text of an error: the reason of the system.
fn text_of(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}

#[cfg(test)]
mod tests;
