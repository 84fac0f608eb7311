//! Bodies that count (I8): bytes are added to an account at the moment the connection takes them.
//!
//! A body is handed over in slices of at most [`SLICE_BYTES`]. What an aborted answer counts is
//! therefore what the connection took: at most one slice (and what the kernel buffers) more than
//! what the client read. Completed answers count exactly their content. A body that nobody polls
//! (HEAD) counts nothing. Buffers and turns are held until the body is dropped.

use crate::accounting::{Component, Cost, Tally};
use crate::server::Server;
use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, stream::BoxStream};
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::sync::OwnedSemaphorePermit;

/// The most bytes handed to a connection at once.
pub const SLICE_BYTES: usize = 256 << 10;

/// To whose account bytes go.
#[derive(Clone)]
pub struct Charge {
    /// The account.
    pub tally: Arc<Tally>,
    /// What asked.
    pub component: Component,
    /// Where the bytes came from, and what that meant.
    pub cost: Cost,
}

impl Charge {
    fn add(&self, n: usize) {
        self.tally.add(self.component, self.cost, n as u64);
    }
}

/// Bytes and how to count them.
pub enum Piece {
    /// Content of one account, cut at will.
    Content(Bytes, Charge),
    /// Framing and content mixed, handed over whole, with the content in it.
    Mixed(Bytes, Vec<(Charge, u64)>),
    /// Not content.
    Framing(Bytes),
    /// Of a version's tables.
    Table(Bytes),
}

impl Piece {
    fn is_empty(&self) -> bool {
        match self {
            Piece::Content(b, _) | Piece::Mixed(b, _) | Piece::Framing(b) | Piece::Table(b) => b.is_empty(),
        }
    }

    /// The next bytes to hand over, counted as handed over.
    fn take(&mut self, server: &Server) -> Bytes {
        match self {
            Piece::Content(b, charge) => {
                let out = b.split_to(b.len().min(SLICE_BYTES));
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
            Piece::Table(b) => {
                let out = b.split_to(b.len().min(SLICE_BYTES));
                server.accounts.add_table_bytes(out.len() as u64);
                out
            }
        }
    }
}

/// Why a body ends early: the connection is cut, so that the client sees it.
pub type Broken = Box<dyn std::error::Error + Send + Sync>;

struct Counted {
    server: Arc<Server>,
    now: Option<Piece>,
    rest: Option<BoxStream<'static, Result<Piece, Broken>>>,
    /// Bytes still to come, where that is known from the start.
    remaining: Option<u64>,
    _turn: Option<OwnedSemaphorePermit>,
}

/// A body of one piece, `len` bytes long.
pub fn of_piece(server: &Arc<Server>, piece: Piece, len: u64, turn: Option<OwnedSemaphorePermit>) -> Body {
    let now = Some(piece);
    Body::new(Counted { server: Arc::clone(server), now, rest: None, remaining: Some(len), _turn: turn })
}

/// A body of many pieces, `len` bytes long where that is known.
pub fn of_stream(
    server: &Arc<Server>,
    pieces: impl Stream<Item = Result<Piece, Broken>> + Send + 'static,
    len: Option<u64>,
    turn: Option<OwnedSemaphorePermit>,
) -> Body {
    let rest: Option<BoxStream<'static, _>> = Some(Box::pin(pieces));
    Body::new(Counted { server: Arc::clone(server), now: None, rest, remaining: len, _turn: turn })
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = &mut this.now {
                if !piece.is_empty() {
                    let bytes = piece.take(&this.server);
                    if piece.is_empty() {
                        this.now = None;
                    }
                    if let Some(remaining) = &mut this.remaining {
                        *remaining = remaining.saturating_sub(bytes.len() as u64);
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                this.now = None;
            }
            let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
            match rest.as_mut().poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(piece))) => this.now = Some(piece),
                Poll::Ready(Some(Err(e))) => {
                    this.rest = None;
                    return Poll::Ready(Some(Err(e)));
                }
                Poll::Ready(None) => this.rest = None,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.now.is_none() && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
