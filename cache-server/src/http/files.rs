//! `GET|HEAD /v1/versions/{root}/files/{path}`: whole files for people with curl.

use super::{
    access::access,
    admit::Admitted,
    body::{Broken, Charge, Piece, of_stream},
    chunks::finish,
    entry::{Cut, Span, spans},
    parsed,
    problem::{Answer, Fault},
    range::{not_modified, unsatisfiable, wanted},
    read::{cache_status, cost},
};
use crate::{accounting::Cost, server::Server, versions::Sources};
use axum::{
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::{HeaderMap, Method, header},
};
use fletch_api::{Code, Problem, headers};
use fletch_core::{
    Root,
    manifest::{EntryKind, EntryRef},
};
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use std::sync::Arc;
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

/// Chunks of a file that are read while the one before is sent.
const AHEAD: usize = 2;

/// A file of a version, chunk by chunk.
#[utoipa::path(
    get, path = "/v1/versions/{root}/files/{path}", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("path" = String, Path, description = "Path in the version, with slashes"),
        ("Range" = Option<String>, Header, description = "One range of bytes"),
        ("Fletch-Job" = Option<String>, Header, description = "Job the bytes are for"),
    ),
    responses(
        (status = 200, description = "The file", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 400, description = "A link or a directory", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "Not a file of a version of this domain", body = Problem, content_type = "application/problem+json"),
        (status = 416, description = "The range is past the end", body = Problem, content_type = "application/problem+json"),
        (status = 502, description = "The origin changed, or is wrong", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    path: Result<Path<(String, String)>, PathRejection>,
    mut admitted: Admitted,
    method: Method,
    request: HeaderMap,
) -> Answer {
    let Path((root, path)) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let root: Root = parsed(&root)?;
    let sources = access(&server, &admitted.principal, root).await?;
    let found = sources.first.version.find(&path).await.map_err(crate::versions::VersionError::from)?;
    let found = found.ok_or_else(Fault::not_found)?;
    let entry = found.entry();
    let hash = content(&entry)?;
    let (len, etag) = (entry.size, format!("\"{hash}\""));
    if let Some(same) = not_modified(&request, &etag) {
        return Ok(same);
    }
    let wanted = match wanted(&request, len, &etag) {
        Ok(w) => w,
        Err(fault) => return Ok(unsatisfiable(fault, len)),
    };
    let head = wanted
        .head(len, &etag)
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::CACHE_CONTROL, "private, no-cache");
    if method == Method::HEAD {
        return finish(head, Body::empty());
    }
    let range = wanted.range(len);
    let n = range.end - range.start;
    let spans = spans(&sources.first, &found, range);
    let charge = admitted.charges(&server, &sources, root);
    let mut reads = Box::pin(read_all(Arc::clone(&server), sources, spans));
    // The first chunk is read before the head is sent, so that its failure has a status.
    let first = reads.next().await.transpose()?;
    let status = first.as_ref().map_or("fletch; hit", |cut| cache_status(cut.tier));
    let all = stream::iter(first.map(Ok)).chain(reads);
    let pieces = all.map(move |read| Ok::<_, Broken>(piece(read?, &charge)));
    let body = of_stream(&server, pieces, Some(n), admitted.turn.take());
    finish(head.header(headers::CACHE_STATUS, status), body)
}

/// The content's hash of an entry that has content.
pub fn content(entry: &EntryRef<'_>) -> Answer<fletch_core::Hash> {
    if let Some(hash) = entry.hash {
        return Ok(hash);
    }
    let (what, hint) = match entry.kind {
        EntryKind::Symlink => {
            ("a symbolic link", format!("it points to {:?}: ask for that path", entry.target))
        }
        _ => ("an empty directory", String::new()),
    };
    Err(Fault::new(Code::NotAFile, format!("{:?} is {what}", entry.path), hint))
}

/// Reads span after span, a few ahead.
pub fn read_all(
    server: Arc<Server>,
    sources: Arc<Sources>,
    spans: Vec<Span>,
) -> impl Stream<Item = Answer<Cut>> + Send + 'static {
    let reads = stream::iter(spans).map(move |span| {
        let (server, sources) = (Arc::clone(&server), Arc::clone(&sources));
        async move { span.read(&server, &sources).await }
    });
    reads.buffered(AHEAD)
}

/// Bytes, to be sent.
pub fn piece(cut: Cut, charge: &impl Fn(Cost) -> Charge) -> Piece {
    Piece::Content(cut.bytes, charge(cost(cut.tier)))
}

/// Spans of few bytes, in a task of their own: however slowly somebody takes an answer, what was read for it is
/// copied out of its chunk when that is there.
pub async fn read_now(
    server: &Arc<Server>,
    sources: &Arc<Sources>,
    spans: Vec<Span>,
    charge: impl Fn(Cost) -> Charge,
) -> Answer<Vec<Piece>> {
    let cuts = read_all(Arc::clone(server), Arc::clone(sources), spans);
    let reading = AbortOnDropHandle::new(server.tasks.spawn(cuts.try_collect::<Vec<Cut>>()));
    let lost = |e: JoinError| Fault::new(Code::Internal, e.to_string(), "see the server's log");
    let cuts = reading.await.map_err(lost)??;
    Ok(cuts.into_iter().map(|cut| piece(cut, &charge)).collect())
}
