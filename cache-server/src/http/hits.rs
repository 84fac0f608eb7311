//! `GET /v1/hits`: hit connections, on which a client of this machine gets what the server has at hand.
//!
//! The protocol is in `fletch_api::hits`. A connection has a thread of its own, which reads a request,
//! answers it, and reads the next one: no task, no HTTP. It passes every check and every account of a
//! request by HTTP, by the same functions. What one of them would have to wait for is not at hand
//! (`at_once`). So an answer takes as long as a copy of its bytes, or a read of a short file of this
//! machine. No other origin can hold the thread.
//!
//! Invariants:
//! 1. (I1) only [`fletch_core::Verified`] bytes are sent, and their hash is the one that was asked for;
//! 2. (I6) the connection counts like any other, and ends where an HTTP connection would: when it is idle,
//!    takes its bytes too slowly, makes room, or the server stops;
//! 3. (I7) each request is authenticated anew and passes the one access check. Whatever is wrong with it, the
//!    answer is "not here", and nothing else is told;
//! 4. (I8) bytes are counted as they are written.

use super::{
    access::access,
    admission::{Admitted, authenticate},
    chunk_read::{Payer, chunk_no_wait, cost_of, near_chunk, part_no_wait},
    entry_read::{Span, spans},
    error::{ApiError, ApiResult},
    response_body::Charge,
};
use crate::{
    accounting::Component,
    auth::{Peer, Principal},
    connections::{Closed, Connection},
    limits::SEND_BYTES_MIN,
    server::Server,
    tenants::{FairPermit, HeldMemory, TenantLimit},
    versions::Sources,
};
use axum::{
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use fletch_api::{
    Code, Problem, headers,
    hits::{HitAnswer, HitRequest, PROTOCOL, REQUEST_BYTES_MAX, Wanted},
    routes,
};
use fletch_core::{Hash, JobName};
use fletch_store::Tier;
use futures::FutureExt as _;
use std::{
    io::{self, IoSlice, Read as _, Write as _},
    os::unix::net::UnixStream,
    sync::Arc,
    time::Instant,
};

/// The stack of the thread of a hit connection.
pub const HIT_STACK_BYTES: usize = 512 << 10;

/// The output of a future that is ready now. Whoever would wait does so by HTTP.
fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    future.now_or_never()
}

/// Begins a hit connection.
///
/// Only on the unix socket, with `Connection: upgrade` and `Upgrade: fletch-hits/1`. After the 101 the
/// connection speaks that protocol: a client of this machine asks for chunks and files that the server has in
/// memory or on disk, and gets them without a wait.
#[utoipa::path(
    get, path = "/v1/hits", tag = "bytes",
    params(
        ("Upgrade" = String, Header, description = "`fletch-hits/1`"),
        ("Fletch-Component" = Option<String>, Header,
            description = "The program that reads: `mount`, `loader`, `cli` or `peer`"),
    ),
    responses(
        (status = 101, description = "The connection speaks the protocol from here on"),
        (status = 400, description = "It is no connection of the unix socket, or the protocol is another one",
            body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "The server has as many hit connections as it may", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn get(
    principal: Principal,
    peer: Peer,
    State(server): State<Arc<Server>>,
    request: HeaderMap,
) -> ApiResult<Response> {
    if peer == Peer::Tcp {
        let detail = "hit connections begin on the unix socket of the server";
        return Err(ApiError::new(Code::BadRequest, detail, "read chunks by HTTP from another machine"));
    }
    if request.get(header::UPGRADE).is_none_or(|v| v.as_bytes() != PROTOCOL.as_bytes()) {
        let detail = format!("the header Upgrade must be {PROTOCOL}");
        return Err(ApiError::new(Code::BadRequest, detail, "use a client of the same version"));
    }
    let permit = server.tenants.hit_connections.try_acquire(&principal.tenant, 1).map_err(|_| {
        server.tenants.count_refusal(&principal.tenant, TenantLimit::HitConnections);
        let hint = "read by HTTP, as clients do by themselves";
        ApiError::new(Code::Overloaded, "the server has as many hit connections as it may", hint)
    })?;
    let component = request.get(headers::COMPONENT).and_then(|v| v.to_str().ok()).unwrap_or("");
    let session = HitSession {
        server,
        peer,
        credentials: credentials_of(&request),
        component: Component::from_word(component),
        _permit: permit,
    };
    let upgrade: [(HeaderName, HeaderValue); 2] = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(PROTOCOL)),
    ];
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, upgrade).into_response();
    response.extensions_mut().insert(Arc::new(session));
    Ok(response)
}

/// Returns the header by which the caller is known, alone.
fn credentials_of(request: &HeaderMap) -> HeaderMap {
    let token = request.get(header::AUTHORIZATION).cloned();
    token.into_iter().map(|token| (header::AUTHORIZATION, token)).collect()
}

/// What a hit connection needs besides its socket. The reply that accepts it has it as an extension.
pub struct HitSession {
    server: Arc<Server>,
    peer: Peer,
    credentials: HeaderMap,
    component: Component,
    _permit: FairPermit,
}

/// Bytes that are sent, and what is held until they are.
struct Found {
    bytes: Bytes,
    charge: Charge,
    _permit: FairPermit,
    _held: Option<Arc<HeldMemory>>,
}

impl HitSession {
    /// Serves the connection until it ends, on the calling thread.
    ///
    /// Whoever shuts the socket down ends it. It returns an error where the client broke the protocol, left
    /// in the middle of an answer, or took it too slowly.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn serve(&self, socket: &UnixStream, connection: &Connection) -> io::Result<()> {
        let limits = &self.server.limits;
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(limits.idle_timeout))?;
        socket.set_write_timeout(Some(limits.send_timeout))?;
        let mut buffer = vec![0; 2 + REQUEST_BYTES_MAX];
        loop {
            connection.set_busy(false);
            let Some(length) = receive(socket, &mut buffer).inspect_err(|e| {
                if e.kind() == io::ErrorKind::WouldBlock {
                    connection.count_closed(Closed::Idle);
                }
            })?
            else {
                return Ok(());
            };
            connection.set_busy(true);
            let began = Instant::now();
            self.server.touch();
            let wrong = |e| io::Error::new(io::ErrorKind::InvalidData, e);
            let request = HitRequest::parse(&buffer[2..2 + length]).map_err(wrong)?;
            let found = self.find(&request);
            let status = if found.is_some() { StatusCode::OK } else { StatusCode::NO_CONTENT };
            self.server.requests.count(routes::HITS, status.as_u16(), began.elapsed());
            let sent = match found {
                Some(found) => send(socket, HitAnswer::Here(request.size), &found.bytes, Some(&found.charge)),
                None => send(socket, HitAnswer::NotHere, &[], None),
            };
            sent.inspect_err(|e| {
                if e.kind() == io::ErrorKind::TimedOut {
                    connection.count_closed(Closed::SlowReader);
                }
            })?;
        }
    }

    /// Returns what a request asks for, if it is at hand and the caller may have it.
    fn find(&self, request: &HitRequest<'_>) -> Option<Found> {
        let server = &self.server;
        let principal = authenticate(server, &self.credentials, self.peer).ok()?;
        server.credentials.check_reader(self.peer).ok()?;
        if !principal.role.may_read() {
            return None;
        }
        let permit = server.tenants.requests.try_acquire(&principal.tenant, 1).ok()?;
        let sources = at_once(access(server, &principal, request.root, request.dataset.as_ref()))?.ok()?;
        let anonymous = || JobName::new(headers::JOB_ANONYMOUS).ok();
        let name = request.job.clone().or_else(anonymous)?;
        let job = server.live_job(&principal.tenant, &name).ok()?;
        let size = u64::from(request.size);
        let held = at_once(server.tenants.hold_memory(&principal.tenant, request.hash, size))?.ok()?;
        let admitted = Admitted { principal, job, component: self.component, permit: None };
        let (bytes, tier) = match request.wanted {
            Wanted::Chunk => {
                let payer = admitted.payer(server, &sources, request.root);
                self.chunk(&payer, &sources, request.hash)?
            }
            Wanted::File(path) => self.file(&sources, path, request)?,
        };
        if bytes.len() != request.size as usize {
            return None;
        }
        let charge = admitted.charges(server, &sources, request.root)(cost_of(tier));
        Some(Found { bytes, charge, _permit: permit, _held: held })
    }

    /// Returns the bytes of a chunk: from memory, from the disk, or, if it is short, from a disk with its
    /// origin.
    fn chunk(&self, payer: &Payer, sources: &Arc<Sources>, hash: Hash) -> Option<(Bytes, Tier)> {
        let server = &self.server;
        let located = at_once(server.versions.locate(sources, hash))?.ok()?;
        let hit = chunk_no_wait(server, sources, hash, located.len)
            .or_else(|| near_chunk(server, payer, sources, hash, &located))?;
        Some((hit.chunk.bytes().clone(), hit.tier))
    }

    /// Returns the bytes of a file that lies in one chunk.
    fn file(&self, sources: &Arc<Sources>, path: &str, request: &HitRequest<'_>) -> Option<(Bytes, Tier)> {
        let server = &self.server;
        let found = at_once(sources.first.version.find(path))?.ok()??;
        let entry = found.entry();
        if entry.hash != Some(request.hash) || entry.size != u64::from(request.size) {
            return None;
        }
        let mut spans = spans(&sources.first, &found, 0..entry.size);
        let (span, None) = (spans.pop()?, spans.pop()) else { return None };
        if let Some(read) = span.try_read(server, sources) {
            return Some((read.bytes, read.tier));
        }
        let hit = match &span {
            Span::Chunk(range) => chunk_no_wait(server, sources, range.slice.chunk, range.slice.len)?,
            Span::PackedFile(file) => {
                let chunk = file.chunk().chunk;
                let located = at_once(server.versions.locate(sources, chunk))?.ok()?;
                part_no_wait(server, sources, (chunk, located.len), file.place(), request.hash)?
            }
        };
        Some((hit.chunk.bytes().clone(), hit.tier))
    }
}

/// Receives one request into `buffer`, and returns its length. Returns `None` at the end of the connection.
fn receive(mut socket: &UnixStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut filled = 0;
    loop {
        let read = match socket.read(&mut buffer[filled..]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if read == 0 {
            return if filled == 0 { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        filled += read;
        if filled < 2 {
            continue;
        }
        let length = usize::from(u16::from_le_bytes([buffer[0], buffer[1]]));
        // A client waits for the answer before it sends the next request.
        if length > REQUEST_BYTES_MAX || filled > 2 + length {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the request has a wrong length"));
        }
        if filled == 2 + length {
            return Ok(Some(length));
        }
    }
}

/// Sends an answer, and counts its bytes as the socket takes them.
fn send(mut socket: &UnixStream, head: HitAnswer, bytes: &[u8], charge: Option<&Charge>) -> io::Result<()> {
    let head = head.encode();
    let mut sent = 0;
    while sent < head.len() + bytes.len() {
        let of_head = &head[sent.min(head.len())..];
        let of_bytes = &bytes[sent.saturating_sub(head.len())..];
        let wrote = match socket.write_vectored(&[IoSlice::new(of_head), IoSlice::new(of_bytes)]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            // The kernel says so after `limits.send_timeout` without room for one byte.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            wrote => wrote?,
        };
        if let Some(charge) = charge {
            charge.add(wrote.saturating_sub(of_head.len()));
        }
        sent += wrote;
        // The kernel returns early where the time was over, and only then.
        if sent < head.len() + bytes.len() && (wrote as u64) < SEND_BYTES_MIN {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}
