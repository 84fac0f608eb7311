//! Response bodies that count their bytes (I8), at the moment when the connection takes them.
//!
//! The connection takes slices of at most [`SLICE_BYTES_MAX`]. So an aborted reply counts at most one slice,
//! and what the kernel buffers, more than the client read. A completed reply counts exactly its content. A
//! body that is never polled (HEAD) counts nothing. A body holds its buffers and its permit until it is
//! dropped.

use super::error::{ApiError, ApiResult};
use crate::app::server::Server;
use crate::data::reads::{SpanBytes, cost_of};
use crate::tenancy::accounting::{Component, Cost, JobCosts, Tally, Waiting};
use crate::tenancy::tenants::FairPermit;
use axum::{body::Body, http::response::Builder};
use bytes::Bytes;
use fletch_api::ByteResult;
use fletch_bounds::{InWaits, Waits};
use fletch_store::Tier;
use futures::{Stream, stream::BoxStream};
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// The most bytes that a connection takes at once.
pub const SLICE_BYTES_MAX: usize = 256 << 10;

/// Returns the `Cache-Status` header of a read (RFC 9211).
#[must_use]
pub fn cache_status(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory | Tier::Disk => "fletch; hit",
        Tier::Flight => "fletch; fwd=miss; collapsed",
        Tier::Origin => "fletch; fwd=miss; stored",
        Tier::Bypass => "fletch; fwd=miss",
        Tier::Peer(_) => "fletch; fwd=miss; detail=peer",
    }
}

/// The account that bytes are added to.
#[derive(Clone)]
pub struct Charge {
    /// The account.
    pub tally: Arc<Tally>,
    /// The program that sent the request.
    pub component: Component,
    /// The result and the tier of the bytes.
    pub cost: Cost,
}

impl Charge {
    /// Counts bytes that a connection took.
    pub fn add(&self, n: usize) {
        self.tally.add(self.component, self.cost, n as u64);
    }
}

/// A piece of a body: bytes, and how to count them.
pub enum Piece {
    /// Content of one account, which may be split into slices.
    Content(Bytes, Charge),
    /// Framing mixed with content of these charges and lengths, which is never split.
    Mixed(Bytes, Vec<(Charge, u64)>),
    /// Bytes that are not content.
    Framing(Bytes),
    /// Bytes of a version's tables.
    Table(Bytes),
    /// Content for another server of the cluster, which no account has. The costs of the dataset have it.
    Peer(Bytes, Arc<JobCosts>),
    /// No bytes. The body has all its content, so that a later wait is no stall of the job.
    EndOfContent,
}

impl Piece {
    /// Returns bytes that were read as a piece of a body.
    pub fn of_read(read: SpanBytes, charge: &impl Fn(Cost) -> Charge) -> Self {
        Piece::Content(read.bytes, charge(cost_of(read.tier)))
    }

    fn is_empty(&self) -> bool {
        match self {
            Piece::Content(b, _)
            | Piece::Mixed(b, _)
            | Piece::Framing(b)
            | Piece::Table(b)
            | Piece::Peer(b, _) => b.is_empty(),
            Piece::EndOfContent => true,
        }
    }

    /// Returns what content of one account is counted as.
    pub fn cost(&self) -> Option<Cost> {
        match self {
            Piece::Content(_, charge) => Some(charge.cost),
            _ => None,
        }
    }

    /// Returns the bytes that were not read from the origin for this reader.
    pub fn shared_bytes(&self) -> u64 {
        match self {
            Piece::Content(b, charge) => match charge.cost.0 {
                ByteResult::Hit | ByteResult::Substituted => b.len() as u64,
                ByteResult::Miss | ByteResult::Bypass => 0,
            },
            Piece::Mixed(..)
            | Piece::Framing(_)
            | Piece::Table(_)
            | Piece::Peer(..)
            | Piece::EndOfContent => 0,
        }
    }

    /// Takes the next bytes for the connection, and counts them.
    fn take(&mut self, server: &Server) -> Bytes {
        match self {
            Piece::Content(b, charge) => {
                let out = b.split_to(b.len().min(SLICE_BYTES_MAX));
                charge.add(out.len());
                out
            }
            Piece::Mixed(b, charges) => {
                for (charge, n) in charges.drain(..) {
                    charge.add(usize::try_from(n).unwrap_or(usize::MAX));
                }
                std::mem::take(b)
            }
            Piece::Framing(b) => std::mem::take(b),
            Piece::EndOfContent => Bytes::new(),
            Piece::Table(b) => {
                let out = b.split_to(b.len().min(SLICE_BYTES_MAX));
                server.accounts.add_table_bytes(out.len() as u64);
                out
            }
            Piece::Peer(b, costs) => {
                let out = b.split_to(b.len().min(SLICE_BYTES_MAX));
                costs.send(out.len() as u64);
                if let Some(peers) = server.cluster.peers() {
                    peers.add_sent(out.len() as u64);
                }
                out
            }
        }
    }
}

/// Why a body ends early. The server then cuts the connection, so that the client notices.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

struct CountedBody {
    server: Arc<Server>,
    current: Option<Piece>,
    rest: Option<InWaits<BoxStream<'static, Result<Piece, BodyError>>>>,
    /// Bytes not yet taken, if the length was known from the start.
    remaining: Option<u64>,
    /// The job whose reply this is, and whether the connection waits for its bytes now.
    costs: Option<Arc<JobCosts>>,
    waiting: Option<Waiting>,
    /// The waits of the request, if its reads go on while the reply is sent.
    waits: Option<Arc<Waits>>,
    _permit: Option<FairPermit>,
}

/// Returns a body of one piece, `len` bytes long.
pub fn body_of_piece(server: &Arc<Server>, piece: Piece, len: u64, permit: Option<FairPermit>) -> Body {
    let current = Some(piece);
    Body::new(CountedBody {
        server: Arc::clone(server),
        current,
        rest: None,
        remaining: Some(len),
        costs: None,
        waiting: None,
        waits: None,
        _permit: permit,
    })
}

/// Returns a body of many pieces, `len` bytes long if the length is known. `costs` count how long it waits.
pub fn body_of_stream(
    server: &Arc<Server>,
    pieces: impl Stream<Item = Result<Piece, BodyError>> + Send + 'static,
    len: Option<u64>,
    permit: Option<FairPermit>,
    costs: Option<&Arc<JobCosts>>,
) -> Body {
    // Its reads belong to the request, and run after the handler has returned.
    let waits = Waits::current().unwrap_or_default();
    let rest: BoxStream<'static, _> = Box::pin(pieces);
    let rest = Some(InWaits::new(rest, Arc::clone(&waits)));
    Body::new(CountedBody {
        server: Arc::clone(server),
        current: None,
        rest,
        remaining: len,
        costs: costs.cloned(),
        waiting: None,
        waits: Some(waits),
        _permit: permit,
    })
}

/// Builds a response from a head whose parts are known to be valid.
pub fn respond(head: Builder, body: Body) -> ApiResult {
    head.body(body).map_err(|e| ApiError::internal(e.to_string()))
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        if let Some(waits) = &self.waits {
            self.server.read_watch.note_request(waits, || "a long reply");
        }
    }
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = &mut this.current {
                if !piece.is_empty() {
                    let bytes = piece.take(&this.server);
                    if piece.is_empty() {
                        this.current = None;
                    }
                    if let Some(remaining) = &mut this.remaining {
                        *remaining = remaining.saturating_sub(bytes.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                this.current = None;
            }
            let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
            match rest.poll(|rest| rest.as_mut().poll_next(cx)) {
                Poll::Pending => {
                    if this.waiting.is_none() {
                        this.waiting = this.costs.as_ref().map(JobCosts::wait);
                    }
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(piece))) => {
                    this.waiting = None;
                    if matches!(piece, Piece::EndOfContent) {
                        this.costs = None;
                    }
                    this.current = Some(piece);
                }
                Poll::Ready(Some(Err(e))) => {
                    this.waiting = None;
                    this.rest = None;
                    return Poll::Ready(Some(Err(e)));
                }
                Poll::Ready(None) => {
                    this.waiting = None;
                    this.rest = None;
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.current.is_none() && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
