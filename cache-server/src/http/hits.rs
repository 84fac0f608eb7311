//! `GET /v1/hits`: hit connections, on which a client of this machine gets what the server has at hand.
//!
//! The protocol is in `fletch_api::hits`. A connection has a thread of its own, which reads a request,
//! answers it, and reads the next one: no task, no HTTP. It passes every check and every account of a
//! request by HTTP, by the same functions. What one of them would have to wait for is not at hand
//! (`at_once`). So an answer takes as long as a copy of its bytes, or a read of a short file of this
//! machine. No other origin can hold the thread.
//!
//! Invariants:
//! 1. (I1) only [`fletch_core::Verified`] bytes are sent or put into a window, of the chunk or file that was
//!    asked for; and hashes of groups that make the name of that chunk;
//! 2. (I6) the connection counts like any other, and ends where an HTTP connection would: when it is idle,
//!    takes its bytes too slowly, makes room, or the server stops;
//! 3. (I7) each request is authenticated anew and passes the one access check; requests for one version that
//!    arrived together do so together. Whatever is wrong with it, the answer is "not here", and nothing else
//!    is told;
//! 4. (I8) bytes are counted as they are written to the socket, or put into the window;
//! 5. a slab is lent only as `cache.short_circuit` says, with a descriptor that can only be read. Whoever has
//!    it can read every chunk in that slab, so by default it is lent only where every caller may read all;
//! 6. (I6) the pages of a window count for the client, who touched them before the server writes there
//!    ([`fletch_window`]). The server takes no descriptor of a client.

use super::{
    access::access,
    admission::{Admitted, authenticate},
    error::{ApiError, ApiResult},
    response_body::Charge,
};
use crate::{
    app::{config::ShortCircuit, limits::SEND_BYTES_MIN, server::Server},
    data::{
        reads::{SpanBytes, cost_of},
        versions::Sources,
    },
    tenancy::{
        accounting::{Component, Cost},
        auth::{Peer, Principal},
        connections::{Closed, Connection},
        tenants::{FairPermit, HeldMemory, TenantLimit},
    },
};
use axum::{
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use fletch_api::{
    Code, Problem, headers,
    hits::{
        ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, PROTOCOLS_BEFORE, REQUEST_BYTES_AHEAD_MAX,
        REQUEST_BYTES_MAX, REQUESTS_AHEAD_MAX, WINDOW_BYTES_MAX, WINDOW_REQUEST_BYTES, WINDOWS_MAX, Wanted,
    },
    routes,
};
use fletch_core::{DatasetName, Hash, JobName, Root};
use fletch_store::Tier;
use fletch_window::{Offer, Window};
use futures::FutureExt as _;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::{
    fs::File,
    io::{self, IoSlice, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Instant,
};

/// The stack of the thread of a hit connection.
pub const HIT_STACK_BYTES: usize = 512 << 10;

/// The most bytes that a client can have read in slabs since it last said so.
const READ_BYTES_MAX: u64 = 1 << 40;

/// The output of a future that is ready now. Whoever would wait does so by HTTP.
fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    future.now_or_never()
}

/// Begins a hit connection.
///
/// Only on the unix socket, with `Connection: upgrade` and `Upgrade: fletch-hits/4`, or `/3` or `/2` for a
/// client of an older version. After the 101 the connection speaks that protocol: a client of this machine
/// asks for chunks, parts of chunks and files that the server has in memory or on disk, and gets them without
/// a wait.
#[utoipa::path(
    get, path = "/v1/hits", tag = "bytes",
    params(
        ("Upgrade" = String, Header, description = "`fletch-hits/4`, `fletch-hits/3` or `fletch-hits/2`"),
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
    let asked = |protocol: &str| request.get(header::UPGRADE).is_some_and(|v| v == protocol);
    let Some(protocol) = [PROTOCOL].into_iter().chain(PROTOCOLS_BEFORE).find(|p| asked(p)) else {
        let detail = format!("the header Upgrade must be {PROTOCOL}");
        return Err(ApiError::new(Code::BadRequest, detail, "use a client of the same version"));
    };
    let permit = server.tenants.hit_connections.try_acquire(&principal.tenant, 1).map_err(|_| {
        server.tenants.count_refusal(&principal.tenant, TenantLimit::HitConnections);
        let hint = "read by HTTP, as clients do by themselves";
        ApiError::new(Code::Overloaded, "the server has as many hit connections as it may", hint)
    })?;
    let component = request.get(headers::COMPONENT).and_then(|v| v.to_str().ok()).unwrap_or("");
    let upgrade: [(HeaderName, HeaderValue); 2] = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(protocol)),
    ];
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, upgrade).into_response();
    let session = HitSession {
        server,
        peer,
        credentials: credentials_of(&request),
        component: Component::from_word(component),
        _permit: permit,
    };
    response.extensions_mut().insert(Arc::new(session));
    Ok(response)
}

/// Returns the header by which the caller is known, alone.
pub(super) fn credentials_of(request: &HeaderMap) -> HeaderMap {
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

/// Who sent requests that arrived together, and what it may read.
struct Caller {
    root: Root,
    dataset: Option<DatasetName>,
    job: Option<JobName>,
    admitted: Admitted,
    sources: Arc<Sources>,
    /// Returns the account of bytes of a tier.
    charges: Box<dyn Fn(Cost) -> Charge>,
}

impl Caller {
    /// Whether a request is one of this caller's, for the same version.
    fn sends(&self, request: &HitRequest<'_>) -> bool {
        self.root == request.root && self.dataset == request.dataset && self.job == request.job
    }
}

/// The answer to a request.
enum Answer {
    Bytes(Found),
    /// The length of the chunk, the file that has it, and where the chunk begins there.
    Slab(u32, File, u64),
    /// The bytes that the client read itself are counted.
    Counted,
}

/// Bytes that are sent, and what is held until they are.
struct Found {
    bytes: Bytes,
    /// The account of content. Hashes of groups are none.
    charge: Option<Charge>,
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
        let mut window = Windows::default();
        let mut requests = Requests::new();
        let mut answers = Answers::new(socket);
        let mut caller: Option<Caller> = None;
        loop {
            let Some(request) = requests.next() else {
                caller = None;
                answers.flush().inspect_err(|e| count_slow(connection, e))?;
                connection.set_busy(false);
                let more = requests.receive(socket).inspect_err(|e| {
                    if e.kind() == io::ErrorKind::WouldBlock {
                        connection.count_closed(Closed::Idle);
                    }
                })?;
                if !more {
                    return Ok(());
                }
                connection.set_busy(true);
                continue;
            };
            let began = Instant::now();
            self.server.touch();
            let request = request?;
            if request.is_empty() {
                answers.put(window.open()?)?;
                continue;
            }
            if let Ok(bytes) = <[u8; WINDOW_REQUEST_BYTES]>::try_from(request) {
                match window.offer(u32::from_le_bytes(bytes))? {
                    Some((bytes, file)) => answers.send_window(bytes, &file)?,
                    None => answers.put(HitAnswer::NotHere)?,
                }
                continue;
            }
            let request = HitRequest::parse(request).map_err(broken)?;
            let has_place = |place| window.opened.as_ref().is_some_and(|w| w.has(place, request.size));
            if !request.place.is_none_or(has_place) {
                return Err(broken("the place is not in a window"));
            }
            if !caller.as_ref().is_some_and(|caller| caller.sends(&request)) {
                caller = self.caller(&request);
            }
            let found = caller.as_ref().and_then(|caller| self.answer(caller, &request));
            let status = if found.is_some() { StatusCode::OK } else { StatusCode::NO_CONTENT };
            let answered = match (found, request.place) {
                (Some(Answer::Counted), _) => answers.put(HitAnswer::Here(0)),
                (Some(Answer::Slab(len, file, offset)), _) => answers.send_slab(len, &file, offset),
                (Some(Answer::Bytes(found)), None) => answers.send(HitAnswer::Here(request.size), &found),
                (Some(Answer::Bytes(found)), Some(place)) => {
                    if !window.opened.as_mut().is_some_and(|w| w.put(place, &found.bytes)) {
                        return Err(broken("the place is not in a window"));
                    }
                    if let Some(charge) = &found.charge {
                        charge.add(found.bytes.len());
                    }
                    answers.put(HitAnswer::InWindow(request.size))
                }
                (None, _) => answers.put(HitAnswer::NotHere),
            };
            self.server.requests.count(routes::HITS, status.as_u16(), began.elapsed());
            answered.inspect_err(|e| count_slow(connection, e))?;
        }
    }

    /// Authenticates a request and checks its access. `None` if the caller may not have what it asks for.
    fn caller(&self, request: &HitRequest<'_>) -> Option<Caller> {
        let server = &self.server;
        if server.cluster.is_stale() {
            return None;
        }
        let principal = authenticate(server, &self.credentials, self.peer).ok()?;
        server.credentials.check_reader(self.peer).ok()?;
        if !principal.role.may_read() {
            return None;
        }
        let (root, dataset) = (request.root, request.dataset.clone());
        let sources = at_once(access(server, &principal, root, dataset.as_ref()))?.ok()?;
        // The client checks what it gets against a hash, which it does not know.
        sources.check_sealed().ok()?;
        let anonymous = || JobName::new(headers::JOB_ANONYMOUS).ok();
        let name = request.job.clone().or_else(anonymous)?;
        let job = server.live_job(&principal.tenant, &name).ok()?;
        let admitted = Admitted { principal, job, component: self.component, permit: None };
        let charges = Box::new(admitted.charges(server, &sources, root));
        Some(Caller { root, dataset, job: request.job.clone(), admitted, sources, charges })
    }

    /// Returns the answer to a request of a caller. `None`: what it asks for is not at hand.
    fn answer(&self, caller: &Caller, request: &HitRequest<'_>) -> Option<Answer> {
        match request.wanted {
            Wanted::Slab if self.lends_slabs() => {
                let lent = self.server.reads.slab_at_hand(&caller.sources, request.hash, request.size);
                lent.map(|(len, file, offset)| Answer::Slab(len, file, offset))
            }
            Wanted::Slab => None,
            Wanted::Read(bytes)
                if bytes <= READ_BYTES_MAX && self.lends_slabs() && caller.sources.is_registered() =>
            {
                (caller.charges)(cost_of(Tier::Disk)).add(usize::try_from(bytes).ok()?);
                Some(Answer::Counted)
            }
            Wanted::Read(_) => None,
            _ => self.find(caller, request).map(Answer::Bytes),
        }
    }

    /// Whether this client may read slabs itself. Their files have chunks of every domain.
    fn lends_slabs(&self) -> bool {
        let Peer::Unix { uid, .. } = self.peer else { return false };
        match self.server.cache.short_circuit {
            ShortCircuit::Auto if self.server.auth.needs_token() => false,
            ShortCircuit::Auto | ShortCircuit::Always => uid == 0 || self.server.auth.is_own_user(uid),
            ShortCircuit::Never => false,
        }
    }

    /// Returns the bytes that a request of a caller asks for, if they are at hand.
    fn find(&self, caller: &Caller, request: &HitRequest<'_>) -> Option<Found> {
        let server = &self.server;
        let Caller { admitted, sources, .. } = caller;
        let tenant = &admitted.principal.tenant;
        let permit = server.tenants.requests.try_acquire(tenant, 1).ok()?;
        let held =
            at_once(server.tenants.hold_memory(tenant, held_as(request), request.size.into()))?.ok()?;
        let SpanBytes { bytes, tier } = match request.wanted {
            Wanted::Chunk => {
                let payer = || admitted.payer(server, sources, caller.root);
                server.reads.chunk_at_hand(payer, sources, request.hash)?
            }
            Wanted::File(path) => {
                server.reads.file_at_hand(sources, path, request.hash, request.size.into())?
            }
            Wanted::Part(from) => {
                let range = from as usize..from as usize + request.size as usize;
                server.reads.range_at_hand(sources, request.hash, &range)?
            }
            Wanted::Groups => {
                let groups = server.reads.groups_at_hand(sources, request.hash)?;
                SpanBytes { bytes: Bytes::copy_from_slice(groups.as_bytes()), tier: Tier::Memory }
            }
            Wanted::Slab | Wanted::Read(_) => return None,
        };
        if bytes.len() != request.size as usize {
            return None;
        }
        let is_content = request.wanted != Wanted::Groups;
        let charge = is_content.then(|| (caller.charges)(cost_of(tier)));
        Some(Found { bytes, charge, _permit: permit, _held: held })
    }
}

/// Returns the name under which memory is held for an answer. A part must not stand for its whole chunk,
/// which is longer.
fn held_as(request: &HitRequest<'_>) -> Hash {
    let about = match request.wanted {
        Wanted::Chunk | Wanted::File(_) => return request.hash,
        Wanted::Part(from) => [from, request.size],
        Wanted::Groups | Wanted::Slab | Wanted::Read(_) => [u32::MAX; 2],
    };
    let [a, b] = about.map(u32::to_le_bytes);
    Hash::of(&[&request.hash.0[..], &a, &b].concat())
}

/// Returns the error of a client that breaks the protocol.
fn broken(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Counts a connection that ends because its client takes the answers too slowly.
fn count_slow(connection: &Connection, error: &io::Error) {
    if error.kind() == io::ErrorKind::TimedOut {
        connection.count_closed(Closed::SlowReader);
    }
}

/// The window of a connection.
#[derive(Default)]
struct Windows {
    /// Memory whose pages the client touches now.
    offered: Option<Offer>,
    opened: Option<Window>,
    /// How often the client asked for one.
    asked: u32,
}

impl Windows {
    /// Makes memory for a window of `bytes` that replaces the one before. Returns its length, and the
    /// descriptor for the client.
    fn offer(&mut self, bytes: u32) -> io::Result<Option<(u32, OwnedFd)>> {
        self.asked += 1;
        if self.asked > WINDOWS_MAX || !(1..=WINDOW_BYTES_MAX).contains(&bytes) {
            return Err(broken("the client asks for too many windows, or for a wrong length"));
        }
        (self.offered, self.opened) = (None, None);
        match Offer::new(bytes) {
            Ok((offer, file)) => {
                self.offered = Some(offer);
                Ok(Some((bytes, file)))
            }
            Err(error) => {
                tracing::debug!(%error, "the system has no memory for the window of a client");
                Ok(None)
            }
        }
    }

    /// Opens the window whose pages the client touched. Returns the answer.
    fn open(&mut self) -> io::Result<HitAnswer> {
        let offered = self.offered.take().ok_or_else(|| broken("no window was offered"))?;
        self.opened = offered.accept()?;
        Ok(self.opened.as_ref().map_or(HitAnswer::NotHere, |w| HitAnswer::InWindow(w.bytes())))
    }
}

/// The requests that have arrived.
struct Requests {
    buffer: Vec<u8>,
    /// What has arrived and was not returned yet.
    pending: std::ops::Range<usize>,
}

impl Requests {
    fn new() -> Self {
        Requests { buffer: vec![0; 2 + REQUEST_BYTES_MAX], pending: 0..0 }
    }

    /// Returns the bytes of the next request, after its length; `None` if it has not arrived whole.
    fn next(&mut self) -> Option<io::Result<&[u8]>> {
        let arrived = &self.buffer[self.pending.clone()];
        let (length, _) = arrived.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_le_bytes(*length));
        if length > REQUEST_BYTES_MAX {
            return Some(Err(broken("the request has a wrong length")));
        }
        let begin = self.pending.start + 2;
        if self.pending.end < begin + length {
            return None;
        }
        self.pending.start = begin + length;
        Some(Ok(&self.buffer[begin..begin + length]))
    }

    /// Receives more bytes. Returns false at the end of the connection.
    fn receive(&mut self, mut socket: &UnixStream) -> io::Result<bool> {
        self.buffer.copy_within(self.pending.clone(), 0);
        self.pending = 0..self.pending.len();
        // A client that sends requests ahead sends many at once.
        if self.buffer.len() < REQUEST_BYTES_AHEAD_MAX && self.pending.len() > REQUEST_BYTES_MAX / 2 {
            self.buffer.resize(REQUEST_BYTES_AHEAD_MAX, 0);
        }
        let received = loop {
            match socket.read(&mut self.buffer[self.pending.end..]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                received => break received?,
            }
        };
        self.pending.end += received;
        match received {
            0 if !self.pending.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => Ok(bytes > 0),
        }
    }
}

/// Sends answers. Those without bytes wait for [`Answers::flush`], so that many are sent at once.
struct Answers<'a> {
    socket: &'a UnixStream,
    waiting: Vec<u8>,
}

impl<'a> Answers<'a> {
    fn new(socket: &'a UnixStream) -> Self {
        Answers { socket, waiting: Vec::with_capacity(REQUESTS_AHEAD_MAX * ANSWER_HEAD_BYTES) }
    }

    /// Adds an answer without bytes.
    fn put(&mut self, answer: HitAnswer) -> io::Result<()> {
        if self.waiting.len() >= REQUESTS_AHEAD_MAX * ANSWER_HEAD_BYTES {
            self.flush()?;
        }
        self.waiting.extend_from_slice(&answer.encode());
        Ok(())
    }

    /// Sends an answer with bytes.
    fn send(&mut self, answer: HitAnswer, found: &Found) -> io::Result<()> {
        self.put(answer)?;
        let sent = send(self.socket, &self.waiting, &found.bytes, found.charge.as_ref());
        self.waiting.clear();
        sent
    }

    /// Sends the answer that offers a window, with its descriptor.
    fn send_window(&mut self, bytes: u32, file: &OwnedFd) -> io::Result<()> {
        self.send_with_file(&HitAnswer::InWindow(bytes).encode(), file.as_fd())
    }

    /// Sends the answer that names the place of a chunk in a slab, with the slab's descriptor.
    fn send_slab(&mut self, len: u32, slab: &File, offset: u64) -> io::Result<()> {
        let head = HitAnswer::InSlab(len).encode();
        self.send_with_file(&[&head[..], &offset.to_le_bytes()].concat(), slab.as_fd())
    }

    fn send_with_file(&mut self, message: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
        self.flush()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other("a descriptor needs more space"));
        }
        let (parts, flags) = ([IoSlice::new(message)], SendFlags::NOSIGNAL);
        let sent =
            rustix::io::retry_on_intr(|| rustix::net::sendmsg(self.socket, &parts, &mut control, flags));
        match sent {
            Ok(sent) if sent == message.len() => Ok(()),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends the answers that wait.
    fn flush(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let sent = send(self.socket, &self.waiting, &[], None);
        self.waiting.clear();
        sent
    }
}

/// Sends heads of answers and the bytes after the last one, which it counts as the socket takes them.
fn send(mut socket: &UnixStream, heads: &[u8], bytes: &[u8], charge: Option<&Charge>) -> io::Result<()> {
    let mut sent = 0;
    while sent < heads.len() + bytes.len() {
        let of_heads = &heads[sent.min(heads.len())..];
        let of_bytes = &bytes[sent.saturating_sub(heads.len())..];
        let wrote = match socket.write_vectored(&[IoSlice::new(of_heads), IoSlice::new(of_bytes)]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            // The kernel says so after `limits.send_timeout` without room for one byte.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            wrote => wrote?,
        };
        if let Some(charge) = charge {
            charge.add(wrote.saturating_sub(of_heads.len()));
        }
        sent += wrote;
        // The kernel returns early where the time was over, and only then.
        if sent < heads.len() + bytes.len() && (wrote as u64) < SEND_BYTES_MIN {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}
